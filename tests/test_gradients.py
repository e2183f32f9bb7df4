"""Gradients: every problem × every linear solver that claims to solve it, against four oracles.

Closed forms, the theorem written out densely with torch.func, autograd through unrolled iterations, and finite differences
(gradcheck, gradgradcheck, at their default tolerances).
"""

from dataclasses import replace

import pytest
import torch
from problems import PROBLEMS, flatten
from torch.autograd import gradcheck, gradgradcheck

import torchdil as dil

# Relative, of a gradient: ten times the rtol of the linear solvers times the condition numbers of the problems (up to 200).
RTOL = 1e-8
# What a finite difference of 1e-6 divides must be solved as exactly as it gets: forward, and backward where gradients differ.
TIGHT_RTOL = 1e-13
TIGHT = dil.Newton(rtol=TIGHT_RTOL)

BY_NAME = {problem.name: problem for problem in PROBLEMS}
GENERAL = {
    "NormalCG": dil.NormalCG(),
    "GMRES": dil.GMRES(),
    "BiCGStab": dil.BiCGStab(),
    "Dense": dil.Dense(),
    "Auto": dil.Auto(),
    "Auto, Krylov": dil.Auto(dense_below=0),
}
# CG on a J that is not symmetric is NormalCG by another name; on an indefinite one it is none of its business.
POSITIVE = {"CG": dil.CG(), "MINRES": dil.MINRES(), **GENERAL}
INDEFINITE = {"MINRES": dil.MINRES(), **GENERAL}
UNSYMMETRIC = {"CG": dil.CG(), **GENERAL}


def claims(problem):
    if problem.symmetric:
        return INDEFINITE
    return POSITIVE if problem.kind == "argmin" else UNSYMMETRIC


def damped(problem, linear_solver):
    return replace(linear_solver, damping=problem.damping)


PAIRS = [
    pytest.param(problem, damped(problem, solver), id=f"{problem.name}-{name}")
    for problem in PROBLEMS
    for name, solver in claims(problem).items()
]


def cotangent(y):
    return torch.randn(flatten(y).shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def gradient(problem, linear_solver, y0=None):
    """vᵀ ∂y/∂θ for every parameter, as one vector."""
    params = problem.leaves()
    y = flatten(problem.value(params, y0, solver=TIGHT, linear_solver=linear_solver))
    return flatten(torch.autograd.grad(y, params, cotangent(y), materialize_grads=True))


def dense_theorem(problem):
    """-vᵀ (J + εI)⁻¹ ∂F/∂θ with every matrix written out."""
    params = tuple(p.detach() for p in problem.params)
    y = flatten(problem.value(params, solver=TIGHT)).detach()
    J, *partial = torch.func.jacrev(problem.residual, tuple(range(1 + len(params))))(y, *params)
    g = torch.linalg.solve((J + problem.damping * torch.eye(len(y))).mT, cotangent(y))
    return flatten([-torch.tensordot(g, P, dims=1) for P in partial])


def unrolled(problem, steps):
    """Autograd through plain Newton, or through y ← g(y), from y0."""
    params = problem.leaves()
    y = flatten(problem.y0)
    for _ in range(steps):
        F = problem.residual(y, *params)
        if problem.kind != "fixed_point":
            F = torch.linalg.solve(torch.func.jacrev(problem.residual)(y, *params), F)
        y = y - F
    return flatten(torch.autograd.grad(y, params, cotangent(y)))


def relative(a, b):
    return float((a - b).detach().norm() / b.detach().norm())


def layer(problem, linear_solver):
    """The layer as gradcheck wants it, started where the answer is for unperturbed parameters."""
    start = problem.value(tuple(p.detach() for p in problem.params), solver=TIGHT)
    start = torch.utils._pytree.tree_map(lambda t: t.detach(), start)

    def function(*params):
        y = problem.value(params, start, solver=TIGHT, linear_solver=linear_solver)
        return tuple(torch.utils._pytree.tree_leaves(y))

    return function


@pytest.mark.parametrize(("problem", "linear_solver"), PAIRS)
def test_gradient_is_the_dense_theorem(problem, linear_solver):
    assert relative(gradient(problem, linear_solver), dense_theorem(problem)) <= RTOL


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.exact], ids=lambda p: p.name)
def test_value_and_gradient_are_the_closed_form(problem):
    params = problem.leaves()
    y = flatten(problem.exact(*params))
    expected = flatten(torch.autograd.grad(y, params, cotangent(y), materialize_grads=True))
    assert relative(flatten(problem.value(params)).detach(), y.detach()) <= RTOL
    for linear_solver in claims(problem).values():
        assert relative(gradient(problem, linear_solver), expected) <= RTOL


UNROLLED = {"kepler_root": 8, "mlp_energy": 8, "logistic": 8, "deq": 60, "deq_batch4": 120, "huber_pooling": 8, "saddle": 8}


@pytest.mark.parametrize(("name", "steps"), UNROLLED.items())
def test_gradient_is_that_of_unrolled_iterations(name, steps):
    problem = BY_NAME[name]
    expected = unrolled(problem, steps)
    for linear_solver in claims(problem).values():
        assert relative(gradient(problem, linear_solver), expected) <= RTOL


@pytest.mark.parametrize(("problem", "linear_solver"), PAIRS)
def test_gradcheck(problem, linear_solver):
    assert gradcheck(layer(problem, linear_solver), problem.leaves())


@pytest.mark.parametrize(("problem", "linear_solver"), PAIRS)
def test_gradgradcheck(problem, linear_solver):
    torch.manual_seed(0)  # gradgradcheck draws its cotangents
    tight = replace(linear_solver, rtol=TIGHT_RTOL)
    assert gradgradcheck(layer(problem, tight), problem.leaves())


FORWARD_MODE = ("mlp_energy", "kepler_root", "deq_batch4", "saddle", "nested_root", "argmin_batch4", "scalar")


@pytest.mark.parametrize("name", FORWARD_MODE)
def test_forward_mode(name):
    problem = BY_NAME[name]
    for linear_solver in (dil.Dense(), dil.GMRES()):
        assert gradcheck(layer(problem, linear_solver), problem.leaves(), check_forward_ad=True)


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if not p.symmetric], ids=lambda p: p.name)
def test_cg_agrees_with_dense(problem):
    by_cg, by_dense = (gradient(problem, damped(problem, solver)) for solver in (dil.CG(), dil.Dense()))
    assert relative(by_cg, by_dense) <= RTOL


def test_gradient_does_not_depend_on_the_start():
    for problem in PROBLEMS:
        start = torch.utils._pytree.tree_map(lambda t: t + 0.1, problem.y0)
        if not problem.damping:
            assert relative(gradient(problem, None, start), gradient(problem, None)) <= RTOL
