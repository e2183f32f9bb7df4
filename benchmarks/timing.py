"""Times of calls that take turns: one thread, one core, medians and quartiles."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def now(device: str) -> float:
    """Seconds, after what a GPU still has to do."""
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def quartiles(seconds: list[float]) -> dict[str, Any]:
    """In milliseconds."""
    low, middle, high = (round(1e3 * float(q), 4) for q in np.quantile(seconds, (0.25, 0.5, 0.75)))
    return {"median": middle, "quartiles": [low, high], "calls": len(seconds)}


@contextmanager
def one_core(device: str) -> Iterator[None]:
    """One thread and, on a CPU, one core, for this process and those it starts."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
    if cores and device == "cpu":
        os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if cores:
            os.sched_setaffinity(0, cores)
