"""torchdil: `dil.argmin` or `dil.root` with the solution as the solver's answer."""

from __future__ import annotations

import torch
from torch import Tensor

import torchdil as dil
from benchmarks.peers.problems import Arrays, Problem, objective, residual
from benchmarks.peers.torch_side import OPS, Given, Layer, TorchCalls

PACKAGES = ("torchdil", "torch")


def make(problem: Problem, solution: Tensor) -> Layer:
    function = residual if problem.kind == "root" else objective
    state = dil.root if problem.kind == "root" else dil.argmin
    solver = dil.Auto(rtol=problem.rtol)
    batch = {"batch_dims": 1 if problem.samples else 0} if problem.kind == "root" else {}

    def layer(given: Given) -> Tensor:
        def stated(y: Tensor) -> Tensor:
            return function(OPS, problem, y, given)

        return state(stated, solution, solver=lambda f, y: solution, linear_solver=solver, on_failure="ignore", **batch).value

    return layer


def calls(problem: Problem, arrays: Arrays, device: str) -> TorchCalls:
    return TorchCalls(make, problem, arrays, device)


__all__ = ["PACKAGES", "calls", "torch"]
