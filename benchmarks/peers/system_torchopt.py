"""TorchOpt: `torchopt.diff.implicit.custom_root` with CG, or normal CG where J is not symmetric. A batch is one system."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchopt import linear_solve
from torchopt.diff import implicit

from benchmarks.peers.problems import Arrays, Problem, objective, residual
from benchmarks.peers.torch_side import OPS, Given, Layer, TorchCalls

PACKAGES = ("torchopt", "torch")


def make(problem: Problem, solution: Tensor) -> Layer:
    names = list(problem.of)
    cg = linear_solve.solve_normal_cg if problem.kind == "root" else linear_solve.solve_cg
    solver = cg(rtol=problem.rtol, atol=0.0, maxiter=1000)

    def layer(given: Given) -> Tensor:
        def optimality(y: Tensor, *values: Any) -> Tensor:
            now = given | dict(zip(names, values, strict=True))
            if problem.kind == "root":
                return residual(OPS, problem, y, now)
            return torch.func.grad(lambda y: objective(OPS, problem, y, now).sum())(y)

        @implicit.custom_root(optimality, argnums=tuple(range(1, 1 + len(names))), solve=solver)
        def solve(y: Tensor, *values: Any) -> Tensor:
            return y

        return solve(solution, *(given[name] for name in names))

    return layer


def calls(problem: Problem, arrays: Arrays, device: str) -> TorchCalls:
    return TorchCalls(make, problem, arrays, device)
