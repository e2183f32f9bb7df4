"""How much faster the runs of `experiments.table1` are side by side than one after another, and how far apart they come out.

`python -m experiments.table1_speed` writes `experiments/results/table1_speed.json`: for each cell whose runs are trained side
by side, CPU time an iteration and run, and the relative distance between the weights of seed 0 trained both ways.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine
from experiments import table1
from experiments.forecast import Training, short
from experiments.runner import COMMITTED

PATH = COMMITTED / "table1_speed.json"
# Before the clock starts, in which the library prepares, and then as many again.
ITERATIONS = 20


def compare(config: table1.Config, iterations: int = ITERATIONS) -> dict[str, Any]:
    """One cell."""
    seeds = range(config.together)
    alone, together = (trained(config, group, iterations) for group in (seeds[:1], seeds))
    pairs = [(p[0], q[0]) for p, q in zip(alone[0].parameters, together[0].parameters, strict=True)]
    apart = max(((p - q).norm() / p.norm()).item() for p, q in pairs)
    return {
        "task": config.task,
        "method": config.method,
        "stack": len(seeds),
        "iterations": 2 * iterations,
        "alone": short(alone[1]),
        "together": short(together[1] / len(seeds)),
        "apart": float(f"{apart:.1e}"),
    }


def trained(config: table1.Config, seeds: Sequence[int], iterations: int) -> tuple[Training, float]:
    """A training, and its seconds of CPU time an iteration over the second half."""
    training = Training(config, seeds)
    for iteration in range(2 * iterations):
        if iteration == iterations:
            began = time.process_time()
        training.step(iteration)
    return training, (time.process_time() - began) / iterations


def measure(data: str | None = None, path: Path = PATH) -> None:
    """All cells whose runs are trained side by side."""
    torch.set_num_threads(1)
    cells = [config for config in table1.variants(table1.Config(data=data)) if config.together > 1]
    path.write_text(json.dumps({"machine": machine(), "cells": [compare(config) for config in cells]}, indent=1) + "\n")


def load() -> dict[str, Any] | None:
    """What was measured, if it was."""
    return json.loads(PATH.read_text()) if PATH.exists() else None


if __name__ == "__main__":
    measure()
