"""An answer that is good is recognised by one traced function, with what it works out serving the backward pass."""

import pytest
import torch

import torchdil as dil
from torchdil import compiled, condition, glance, solve, traced
from torchdil.linear import curvature

CALLS = traced._PATIENCE + 12


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def energy(y, x, W):
    return 0.5 * ((y - x) ** 2).sum(-1) + torch.nn.functional.softplus(y @ W).sum(-1)


def exact(y, x, W, v):
    """vᵀ ∂y/∂W by the theorem, dense, of one problem."""
    H = torch.autograd.functional.hessian(lambda y: energy(y, x, W), y)
    with torch.enable_grad():
        leaf, W = y.clone().requires_grad_(), W.detach().requires_grad_()
        (F,) = torch.autograd.grad(energy(leaf, x, W), leaf, create_graph=True)
    return torch.autograd.grad(F, W, -torch.linalg.solve(H, v))[0]


@pytest.fixture
def glances(monkeypatch):
    """What came of each glance."""
    found = []
    original = glance.glance
    monkeypatch.setattr(solve, "glance", lambda *args: found.append(original(*args)) or found[-1])
    traced.forget_all()
    return found


def minimum(x, W):
    with torch.no_grad():
        return dil.argmin(energy, torch.zeros_like(x), (x, W), solver=dil.Newton(rtol=1e-13)).value


@pytest.mark.parametrize("n", [3, 40, 300])
@pytest.mark.parametrize("known", [True, False])
def test_good_answers(n, known, glances):
    """Status, numbers and gradients are those of a closer look, and F is evaluated no more often."""
    W = (draw(0, n, 4) / n**0.5).requires_grad_()
    x = draw(1, n)
    y, v = minimum(x, W), draw(2, n)
    solver = (lambda f, y0: y) if known else dil.LBFGS(rtol=1e-12)
    told = []
    for _ in range(CALLS + 25):
        solution = dil.argmin(energy, torch.zeros(n, dtype=torch.float64), (x, W), solver=solver)
        (found,) = torch.autograd.grad((solution.value * v).sum(), W)
        torch.testing.assert_close(found, exact(y, x, W, v), rtol=1e-7, atol=1e-9)
        assert bool(solution.converged) and bool(solution.report.backward.converged)
        told.append(solution.stats)
    assert glances[0] is None and glances[-1] is not None  # traced, if not from the start
    first, last = told[0], told[-1]
    for name in ("residual", "tolerance", "norm"):
        torch.testing.assert_close(getattr(last, name), getattr(first, name), rtol=1e-6, atol=1e-10)
    assert (first.method, first.products, int(first.steps)) == (last.method, last.products, int(last.steps))


def test_the_factors_of_a_look_serve_the_backward_pass(monkeypatch, glances):
    """Else J would be made and factorised twice."""
    made = []
    original = condition.Condition.solve_at_once

    def spied(self, operator, *args):
        found = original(self, operator, *args)
        made.append((len(operator.factors), found is not None))
        return found

    monkeypatch.setattr(condition.Condition, "solve_at_once", spied)
    W, x, v = draw(0, 5, 4).requires_grad_(), draw(1, 5), draw(2, 5)
    y = minimum(x, W)
    for _ in range(CALLS):
        found = dil.argmin(energy, torch.zeros_like(x), (x, W), solver=lambda f, y0: y).value
        (grad,) = torch.autograd.grad((found * v).sum(), W)
        torch.testing.assert_close(grad, exact(y, x, W, v), rtol=1e-8, atol=1e-10)
    assert (2, True) in made


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_damping_is_not_lost(damping, glances):
    """The factors are those of J, and not of J + εI."""
    W, x, v = draw(0, 5, 4).requires_grad_(), draw(1, 5), draw(2, 5)
    y = minimum(x, W)
    for _ in range(CALLS):
        solution = dil.argmin(
            energy, torch.zeros_like(x), (x, W), solver=lambda f, y0: y, linear_solver=dil.Dense(damping=damping)
        )
        (found,) = torch.autograd.grad((solution.value * v).sum(), W)
    H = torch.autograd.functional.hessian(lambda y: energy(y, x, W.detach()), y)
    leaf, weights = y.clone().requires_grad_(), W.detach().requires_grad_()
    (F,) = torch.autograd.grad(energy(leaf, x, weights), leaf, create_graph=True)
    g = torch.linalg.solve(H + damping * torch.eye(5, dtype=torch.float64), v)
    torch.testing.assert_close(found, torch.autograd.grad(F, weights, -g)[0], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("n", [3, 300])
def test_bad_answers_are_not_taken_for_good(n, glances):
    """Once traced: a point that is not stationary, and a saddle."""
    W, x = (draw(0, n, 4) / n**0.5).requires_grad_(), draw(1, n)
    sign = torch.ones(n, dtype=torch.float64)

    def saddle(y):
        return 0.5 * (sign * y**2).sum() + 0.1 * torch.tanh(y @ W).pow(2).sum()

    y = minimum(x, W)
    for _ in range(CALLS):
        dil.argmin(energy, torch.zeros_like(x), (x, W), solver=lambda f, y0: y).value.sum().backward()
    off = dil.argmin(energy, torch.zeros_like(x), (x, W), solver=lambda f, y0: y + 1e-3, on_failure="ignore")
    assert off.status == dil.Status.not_stationary
    before = len(glances)
    for _ in range(CALLS):
        dil.argmin(saddle, torch.ones(n, dtype=torch.float64), solver=lambda f, y0: 0 * y0).value.sum().backward()
    assert any(glance is not None for glance in glances[before:])
    sign[0] = -2.0
    found = dil.argmin(saddle, torch.ones(n, dtype=torch.float64), solver=lambda f, y0: 0 * y0, on_failure="ignore")
    assert found.status == dil.Status.negative_curvature


@pytest.mark.parametrize("unit", [1e-170, 1e-20, 1e160])
def test_answers_in_small_and_large_units(unit, glances):
    """Whose squares are no numbers: they are judged as before."""
    a = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    theta = (unit * a).requires_grad_()
    for call in range(CALLS + 1):
        factor = 1.0 if call < CALLS else 1.01
        solution = dil.root(
            lambda y: y - theta,
            torch.zeros(3, dtype=torch.float64),
            solver=lambda f, y0, factor=factor: factor * theta.detach(),
            on_failure="ignore",
        )
        assert bool(solution.converged) == (call < CALLS)
        solution.value.sum().backward()


@pytest.mark.parametrize("samples", [1, 2, 16])
@pytest.mark.parametrize("negative", [-5.0, -0.5, -0.05])
@pytest.mark.parametrize("n", [100, 300])
def test_a_saddle_is_seen_in_any_company(n, negative, samples):
    """Newton at a stationary point: eigenvalues from 1 to 1000, and a negative one."""
    values = torch.linspace(1, 1000, n, dtype=torch.float64)
    values[0] = negative
    Q = torch.linalg.qr(draw(0, n, n))[0]

    def score(y):
        z = y @ Q
        return 0.5 * (values * z**2).sum(-1) + 0.25 * 8 * z[..., 0] ** 4

    with pytest.warns(dil.ConvergenceWarning, match="negative_curvature"):
        found = dil.argmin(score, torch.zeros(samples, n, dtype=torch.float64))
    assert (found.status == dil.Status.negative_curvature).all()


def test_negative_curvature_that_only_the_backward_pass_meets(monkeypatch):
    """The look at y was too short: the backward pass says so, and the report."""
    monkeypatch.setattr(curvature, "_PROBE_STEPS", 1)
    n = 300
    values = torch.ones(n, dtype=torch.float64)
    values[0] = -0.5
    theta = torch.zeros(n, dtype=torch.float64, requires_grad=True)
    found = dil.argmin(lambda y: 0.5 * (values * (y - theta) ** 2).sum(), torch.zeros(n, dtype=torch.float64))
    assert bool(found.converged)
    with pytest.warns(dil.ConvergenceWarning, match="forward solve .* negative_curvature"):
        (grad,) = torch.autograd.grad((found.value * draw(1, n)).sum(), theta)
    assert found.report.forward.status == dil.Status.negative_curvature and bool(found.report.backward.converged)
    torch.testing.assert_close(grad, draw(1, n), rtol=1e-8, atol=1e-8)  # of the stationary point, which it is


def test_products_of_many_vectors_can_be_scripted(monkeypatch):
    """TorchScript does not tell shapes under vmap: where it was asked for one, small systems fell back to Python."""
    refused = []
    scripted = compiled.scripted

    def spied(*args):
        try:
            return scripted(*args)
        except Exception as error:
            refused.append(error)
            raise

    monkeypatch.setattr(compiled, "scripted", spied)
    traced.forget_all()
    W, x = draw(0, 10, 8).requires_grad_(), draw(1, 10)
    for _ in range(CALLS):
        dil.argmin(energy, torch.zeros_like(x), (x, W)).value.sum().backward()
    assert not refused
