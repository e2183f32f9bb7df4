"""How long an iteration of `experiments.table1` takes alone and side by side with others, and how far apart they come out.

`python -m experiments.table1_speed` writes `experiments/results/table1_speed.json`: for each cell of the table CPU time an
iteration and run, and the relative distance between the weights of seed 0 trained both ways.
"""

from __future__ import annotations

import json
import statistics
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
ITERATIONS = 10


def compare(config: table1.Config, iterations: int = ITERATIONS) -> dict[str, Any]:
    """One cell."""
    seeds = range(config.together)
    alone = trained(config, seeds[:1], iterations)
    together = trained(config, seeds, iterations) if len(seeds) > 1 else alone
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
    """A training, and its median seconds of CPU time an iteration over the second half."""
    training = Training(config, seeds)
    times = []
    for iteration in range(2 * iterations):
        began = time.process_time()
        training.step(iteration)
        times.append(time.process_time() - began)
    return training, statistics.median(times[iterations:])


def measure(data: str | None = None, path: Path = PATH) -> None:
    """All cells of the table."""
    torch.set_num_threads(1)
    cells = table1.variants(table1.Config(data=data))
    path.write_text(json.dumps({"machine": machine(), "cells": [compare(config) for config in cells]}, indent=1) + "\n")


def load() -> dict[str, Any] | None:
    """What was measured, if it was."""
    return json.loads(PATH.read_text()) if PATH.exists() else None


if __name__ == "__main__":
    measure()
