"""What each of the things that make torchdil fast is worth: the backward pass without it over the backward pass with it.

All variants run in one process and take turns, each with traces of its own. `benchmarks/results/ablation.json`, or `_gpu`.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock, patch

import numpy as np
import torch
from torch import Tensor

from benchmarks.machine import machine
from benchmarks.peers import system_torchdil
from benchmarks.peers.compare import RESULTS, solved
from benchmarks.peers.problems import Problem, problems
from benchmarks.timing import one_core
from torchdil import batch, convolve, linearize, matvec, solve, traced
from torchdil.condition import Condition
from torchdil.linear import auto, cg
from torchdil.solution import Report

WARM_UP = 45  # calls until all that is compiled is compiled ...
LONG = 20.0  # ... or so many seconds, where it takes long: the last call counts then
ROUNDS, SECONDS = 7, 0.15


def _never(*args: Any, **kwargs: Any) -> None:
    return None


def _not(*args: Any) -> bool:
    return False


def _plain(function: Any, tensors: Any, saved: Any) -> Any:
    return function


def _torchs(node: Any) -> Any:
    return node.target


def _at_once(self: Report, solve: Any) -> None:
    self.backward = self.outcome(*solve())


def _rows(A: Tensor, x: Tensor) -> Tensor:
    return torch.bmm(A, x.unsqueeze(2)).squeeze(2)


def _one_by_one(self: Any, vectors: Tensor) -> Tensor:
    return torch.stack([self.product(v) for v in vectors])


# Name -> how to do without it, and on which device it matters.
WITHOUT: dict[str, tuple[list[Any], tuple[str, ...]]] = {
    "traced": ([patch.object(traced, "_PATIENCE", 10**9)], ("cpu", "cuda")),
    "simplified": (
        [patch.object(linearize._Part, name, _never) for name in ("sum", "scaled", "turned")]
        + [patch.object(linearize, "number_of", _never)],
        ("cpu", "cuda"),
    ),
    "pulled": ([patch.object(traced.Source, "pulls", PropertyMock(return_value=False))], ("cpu", "cuda")),
    "columns": (
        [patch.object(traced.TracedJacobian, "rows", _one_by_one), patch.object(Condition, "solve_at_once", _never)],
        ("cpu", "cuda"),
    ),
    "compiled": ([patch.object(traced, "fast", _plain)], ("cpu", "cuda")),
    "at once": ([patch.object(Condition, "solve_at_once", _never)], ("cpu", "cuda")),
    "checked now and then": ([patch.object(traced, "_CHECKED_EVERY", 1)], ("cpu", "cuda")),
    "numbers": ([patch.object(cg, "_One", cg._Many)], ("cpu",)),
    "fused": ([patch.object(cg, "fused_steps", cg.plain_steps)], ("cuda",)),
    "few direct": ([patch.object(auto, "_DENSE_BESIDE_CG", 2**18)], ("cpu",)),
    "convolutions": ([patch.object(convolve, "chosen", _torchs)], ("cpu", "cuda")),
    "single": ([patch.object(traced.Source, "takes_single", _not)], ("cpu",)),
    "reports": ([patch.object(Report, "backward_by", _at_once)], ("cpu", "cuda")),
    "rows": ([patch.object(batch, "rows", _rows)], ("cpu",)),
    "glance": ([patch.object(solve, "glance", _never)], ("cpu", "cuda")),
    "matrices": ([patch.object(matvec, "_LARGE", 2**62)], ("cpu",)),
}


BOTH = {"glance"}  # what is gained in the forward pass, too


def case(problem: Problem, device: str, rounds: int = ROUNDS) -> dict[str, Any]:
    """One problem with everything, and without each; how far the gradients differ, relative."""
    found = solved(problem, device)
    names = ["all", *(name for name, (_, where) in WITHOUT.items() if device in where)]
    calls = {name: system_torchdil.calls(problem, found, device) for name in names}
    memories: dict[str, dict[Any, Any]] = {name: {} for name in names}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in names}  # of the forward and of the backward pass

    def turn(name: str, count: int) -> list[tuple[float, float]]:
        with ExitStack() as stack:
            for change in [patch.object(traced, "_memories", memories[name]), *(WITHOUT[name][0] if name in WITHOUT else [])]:
                stack.enter_context(change)
            began, found = time.perf_counter(), []
            while len(found) < count and time.perf_counter() - began < LONG:
                found.append(calls[name]())
            return found

    counts = {}
    for name in names:
        warm = turn(name, WARM_UP)
        if len(warm) < WARM_UP:
            times[name] = warm[-1:]
        else:
            counts[name] = max(1, min(100, round(SECONDS / max(statistics.median(map(sum, warm[-5:])), 1e-5))))
    for _ in range(rounds):
        for name, count in counts.items():
            times[name] += turn(name, count + 1)[1:]
    backward = {name: statistics.median(b for _, b in pairs) for name, pairs in times.items()}
    both = {name: statistics.median(map(sum, pairs)) for name, pairs in times.items()}
    gains = {name: both[name] / both["all"] if name in BOTH else backward[name] / backward["all"] for name in names[1:]}
    exact = calls["all"].gradient()
    differences = [np.linalg.norm(calls[name].gradient() - exact) / np.linalg.norm(exact) for name in names]
    return {
        "label": problem.label,
        "gains": {name: round(gain, 3) for name, gain in gains.items()},
        "largest_difference": float(f"{max(differences):.2g}"),
    }


def run(device: str, only: str | None = None) -> None:
    """All problems, or those with `only` in their label; written after each, besides what is known of the others."""
    path = Path(RESULTS / ("ablation_gpu.json" if device == "cuda" else "ablation.json"))
    known = {one["label"]: one for one in json.loads(path.read_text())["cases"]} if path.exists() else {}
    with one_core(device):
        for problem in problems(device):
            if only is None or only in problem.label:
                known[problem.label] = found = case(problem, device)
                print(problem.label, found["gains"], file=sys.stderr, flush=True)
                cases = [known[other.label] for other in problems(device) if other.label in known]
                results: dict[str, Any] = {"machine": machine() | {"device": device}, "cases": cases}
                path.write_text(json.dumps(results, indent=2) + "\n")
