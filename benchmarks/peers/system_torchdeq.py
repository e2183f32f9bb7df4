"""TorchDEQ: `get_deq(ift=True)`, for fixed points only."""

from __future__ import annotations

from torch import Tensor
from torchdeq import get_deq

from benchmarks.peers.problems import Arrays, Problem, step
from benchmarks.peers.torch_side import OPS, Given, Layer, TorchCalls

PACKAGES = ("torchdeq", "torch")


def make(problem: Problem, solution: Tensor) -> Layer:
    if problem.kind != "root":
        raise ValueError("TorchDEQ has fixed points only")
    deq = get_deq(
        ift=True,
        f_solver="fixed_point_iter",
        f_max_iter=1,
        b_solver="anderson",
        b_max_iter=1000,
        b_tol=problem.rtol,
        b_stop_mode="rel",
    )

    def layer(given: Given) -> Tensor:
        found, _ = deq(lambda y: step(OPS, problem, y, given), solution)
        return found[-1]

    return layer


def calls(problem: Problem, arrays: Arrays, device: str) -> TorchCalls:
    return TorchCalls(make, problem, arrays, device)
