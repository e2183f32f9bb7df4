"""Solves that fail for reasons of their own leave the trace of a layer alone; a trace that is to blame is given up."""

import warnings

import pytest
import torch

import torchdil as dil
from torchdil import traced
from torchdil.condition import Condition
from torchdil.operator import Operator

CALLS = 30  # after which a layer is traced


def energy(y, x):
    return (0.5 * torch.logspace(0, 3, 6, dtype=y.dtype) * (y - x) ** 2 + torch.cosh(y)).sum(-1)


def draw(seed):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def gradient(layer, seed, factor=1.0):
    x = draw(seed)
    (layer(x).sum() * factor).backward()
    return x.grad


def exact(seed):
    """Of Σ y, in closed form: y solves c (y - x) + sinh y = 0 for each entry."""
    x, c = draw(seed).detach(), torch.logspace(0, 3, 6, dtype=torch.float64)
    y = x.clone()
    for _ in range(50):
        y = y - (c * (y - x) + torch.sinh(y)) / (c + torch.cosh(y))
    return c / (c + torch.cosh(y))


def trained(linear_solver):
    layer = dil.ArgminLayer(energy, init=(6,), solver=dil.Newton(rtol=1e-14), linear_solver=linear_solver, on_failure="ignore")
    for seed in range(CALLS):
        gradient(layer, seed)
    assert is_traced()
    return layer


def is_traced():
    return [memory.trace is not None for memory in traced._memories.values()] == [True]


@pytest.fixture(autouse=True)
def nothing_traced():
    traced.forget_all()


def an_infinite_gradient(layer):
    """As a GradScaler meets, and skips."""
    assert not torch.isfinite(gradient(layer, 100, factor=float("inf"))).any()
    assert bool((layer.report.backward.status == dil.Status.non_finite).all())


def a_solve_that_stops_short(layer):
    known, layer.linear_solver = layer.linear_solver, dil.CG(max_steps=2)
    gradient(layer, 100)
    assert bool((layer.report.backward.status == dil.Status.max_steps).all())
    layer.linear_solver = known


def an_approximation(layer):
    known, layer.linear_solver = layer.linear_solver, dil.JacobianFree()
    for seed in range(100, 100 + CALLS):
        gradient(layer, seed)
    layer.linear_solver = known


def a_check(layer):
    assert dil.check_gradient(layer, draw(100).detach()).ok


def anomaly_mode(layer):
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")  # that it is slow
        gradient(layer, 100)


@pytest.mark.parametrize("event", [an_infinite_gradient, a_solve_that_stops_short, an_approximation, a_check, anomaly_mode])
def test_a_trace_outlives(event):
    layer = trained(dil.CG(rtol=1e-12))
    event(layer)
    assert is_traced()
    for seed in range(200, 215):
        torch.testing.assert_close(gradient(layer, seed), exact(seed), rtol=1e-8, atol=0)
    assert is_traced() and bool(layer.report.backward.converged.all())


def test_a_layer_that_began_in_anomaly_mode_is_traced_later():
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("ignore")
        layer = dil.ArgminLayer(energy, init=(6,), linear_solver=dil.CG())
        for seed in range(CALLS):
            gradient(layer, seed)
    assert not traced._memories
    trained(dil.CG(rtol=1e-12))


def test_a_system_that_cannot_be_solved_is_tried_without_its_trace_now_and_then_only(monkeypatch):
    weights = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)  # singular: the last unknown is free

    def residual(y, x):
        return weights * (y - x)

    sure, solves = [], 60
    surely = Operator.surely
    monkeypatch.setattr(Operator, "surely", lambda self: (sure.append(1), surely(self))[1])
    for seed in range(solves):
        x = draw(seed)[:, :3].detach().requires_grad_()
        y = dil.attach(residual, x.detach(), (x,), batch_dims=1, linear_solver=dil.GMRES(), on_failure="ignore")
        y.sum().backward()
    assert is_traced() and 1 <= len(sure) <= 3 + solves // 5


def test_a_trace_that_is_to_blame_is_given_up(monkeypatch):
    """Products that are off by more than the tolerance, but by less than is plainly wrong."""
    layer = trained(dil.CG(rtol=1e-12))
    product = traced.TracedJacobian.product

    def rough(self, p):
        return product(self, p) * (1 + 1e-9 * torch.sin(1e6 * p))  # not linear: CG stagnates

    monkeypatch.setattr(traced.TracedJacobian, "product", rough)
    monkeypatch.setattr(Condition, "solve_at_once", lambda *_: None)
    torch.testing.assert_close(gradient(layer, 100), exact(100), rtol=1e-9, atol=0)
    assert not is_traced() and bool(layer.report.backward.converged.all())
