"""An experiment for the tests of the runner: it counts how often each run is made, and fails where it is told to."""

from __future__ import annotations

import os
import random
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.runner import Skip


@dataclass(frozen=True)
class Config:
    """Attributes:
    method: what happens to run 1: "good", "raises", "dies" (its process is killed), "skips".
    pause: seconds a run takes.
    """

    method: str = "good"
    pause: float = 0.0
    runs: int = 4
    device: str = "cpu"

    @staticmethod
    def preset(name: str) -> Config:
        return {"smoke": Config(), "quick": Config(pause=0.3), "paper": Config("raises")}[name]


def variants(config: Config) -> list[Config]:
    return [config, replace(config, method=os.environ.get("TOY_METHOD", "dies"))] if config.method == "raises" else [config]


def run(config: Config, seed: int) -> dict[str, Any]:
    with open(Path(os.environ["TOY_COUNTS"]) / f"{config.method}-{seed}", "a") as file:
        file.write("x")
    if seed == 1 and config.method == "raises":
        raise ValueError("no luck today")
    if seed == 1 and config.method == "dies":
        os.kill(os.getpid(), signal.SIGKILL)
    if seed == 1 and config.method == "skips":
        raise Skip("the toy has no data.")
    time.sleep(config.pause)
    drawn = [random.random(), float(np.random.rand()), torch.rand(2, dtype=torch.float64)]
    return {"drawn": drawn, "infinite": float("inf"), "threads": torch.get_num_threads(), "pid": os.getpid()}
