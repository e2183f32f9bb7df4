"""Times of calls that take turns: one thread, one core, medians and quartiles."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch

LONG = 0.3  # seconds; such a call needs no other before it


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


class Way(NamedTuple):
    """How to do it: an answer, and the gradients of its weighted sum."""

    forward: Callable[[], Any]
    backward: Callable[[Any], Any]


def timed(ways: dict[str, Way], device: str, rounds: int, warm_up: int) -> dict[str, Any]:
    """Medians and quartiles in milliseconds; the ways take turns."""

    def call(way: Way) -> tuple[float, float]:
        began = now(device)
        answer = way.forward()
        middle = now(device)
        way.backward(answer)
        return middle - began, now(device) - middle

    for way in ways.values():
        if sum(call(way)) < LONG:
            for _ in range(warm_up):
                call(way)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(call(way))
    return {
        name: {
            "forward": quartiles([forward for forward, _ in found]),
            "backward": quartiles([backward for _, backward in found]),
            "both": quartiles([sum(pair) for pair in found]),
        }
        for name, found in times.items()
    }
