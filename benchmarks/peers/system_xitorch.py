"""xitorch: `xitorch.optimize.minimize` and `equilibrium` with the solution as the answer of the method.

A batch is one system.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from xitorch.optimize import equilibrium, minimize

from benchmarks.peers.problems import Arrays, Problem, objective, step
from benchmarks.peers.torch_side import OPS, Given, Layer, TorchCalls

PACKAGES = ("xitorch", "torch")


def make(problem: Problem, solution: Tensor) -> Layer:
    names = list(problem.of)
    options = {"method": "gmres" if problem.kind == "root" else "cg", "rtol": problem.rtol, "atol": 0.0, "max_niter": 1000}

    def layer(given: Given) -> Tensor:
        def stated(y: Tensor, *values: Any) -> Tensor:
            now = given | dict(zip(names, values, strict=True))
            return step(OPS, problem, y, now) if problem.kind == "root" else objective(OPS, problem, y, now).sum()

        def known(function: Any, y: Tensor, *rest: Any, **others: Any) -> Tensor:
            return solution.clone()

        solve = equilibrium if problem.kind == "root" else minimize
        return solve(stated, solution, params=[given[name] for name in names], bck_options=options, method=known)

    return layer


def calls(problem: Problem, arrays: Arrays, device: str) -> TorchCalls:
    return TorchCalls(make, problem, arrays, device)
