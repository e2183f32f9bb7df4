"""JAXopt: `implicit_diff.custom_root` with CG, or BiCGStab where J is not symmetric; a batch by `jax.vmap` or as one system."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jaxopt import implicit_diff, linear_solve

from benchmarks.peers.jax_side import OPS, Given, JaxCalls
from benchmarks.peers.problems import Arrays, Problem, objective, residual

PACKAGES = ("jaxopt", "jax", "jaxlib")


def make(problem: Problem) -> Any:
    def optimality(y: Any, wanted: Given, others: Given) -> Any:
        if problem.kind == "root":
            return residual(OPS, problem, y, wanted | others)
        return jax.grad(lambda y: objective(OPS, problem, y, wanted | others).sum())(y)

    method = linear_solve.solve_bicgstab if problem.kind == "root" else linear_solve.solve_cg
    solve = partial(method, tol=problem.rtol, maxiter=1000)

    @implicit_diff.custom_root(optimality, solve=solve)
    def layer(solution: Any, wanted: Given, others: Given) -> Any:
        return solution

    return layer


def calls(problem: Problem, arrays: Arrays, device: str) -> JaxCalls:
    return JaxCalls(make, problem, arrays, device)
