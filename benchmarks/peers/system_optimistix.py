"""Optimistix and Lineax: the implicit function theorem of `optimistix.internal.implicit_jvp` with Lineax's CG or GMRES."""

from __future__ import annotations

from typing import Any

import jax
import lineax
import optimistix.internal

from benchmarks.peers.jax_side import OPS, Given, JaxCalls
from benchmarks.peers.problems import Arrays, Problem, objective, residual

PACKAGES = ("optimistix", "lineax", "jax", "jaxlib")
# The functions that Optimistix rewrites must be global, so that which problem they are of must be, too.
stated: Problem


def primal(inputs: Any) -> Any:
    return inputs[0], None


def rewrite(y: Any, _: Any, inputs: Any) -> Any:
    given = inputs[1] | inputs[2]
    if stated.kind == "root":
        return residual(OPS, stated, y, given)
    return jax.grad(lambda y: objective(OPS, stated, y, given).sum())(y)


def make(problem: Problem) -> Any:
    global stated
    stated = problem
    if problem.kind == "root":
        solver, tags = lineax.GMRES(rtol=problem.rtol, atol=0.0, max_steps=1000), frozenset[object]()
    else:
        solver, tags = lineax.CG(rtol=problem.rtol, atol=0.0, max_steps=1000), frozenset({lineax.positive_semidefinite_tag})

    def layer(solution: Any, wanted: Given, others: Given) -> Any:
        return optimistix.internal.implicit_jvp(primal, rewrite, (solution, wanted, others), tags, solver)[0]

    return layer


def calls(problem: Problem, arrays: Arrays, device: str) -> JaxCalls:
    return JaxCalls(make, problem, arrays, device)
