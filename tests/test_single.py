"""Late steps of a traced solve in float64 take products in float32, where that is no larger an error than the tolerance."""

import pytest
import torch
from torch.nn import functional

import torchdil as dil
from torchdil import linear_graph, step_counts, traced

CALLS = 30  # the last few of them at once


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float64)


def energy(y, x, W):
    """A batch: its Hessians, of y and W, are far from multiples of the identity."""
    return (0.5 * (y - x) ** 2).sum(-1) + functional.softplus(y @ W).sum(-1)


def regression(y, x, W):
    """One problem: the Hessian is that of a logistic regression with the rows of W as data."""
    return functional.softplus(W @ y).sum() + 0.5 * ((1 + x**2) * y**2).sum()


def experts(y, x, W):
    """An image under a prior of filters."""
    responses = functional.conv2d(y, W)
    return 0.5 * ((y - x) ** 2).sum() + torch.sqrt(0.1 + responses**2).sum()


def equilibrium(y, x, W):
    return y - torch.tanh(y @ W + x)


CASES = {
    "energy": (energy, (24, 40), (40, 60), 0.5),
    "regression": (regression, (150,), (250, 150), 0.4),
    "experts": (experts, (1, 1, 48, 48), (4, 1, 5, 5), 0.15),
    "equilibrium": (equilibrium, (8, 160), (160, 160), 0.05),
}


class Case:
    """A layer at a given solution, and its gradient of vᵀy."""

    def __init__(self, name, **settings):
        self.function, self.shape, weights, size = CASES[name]
        self.W, self.settings = (size * draw(1, *weights)).requires_grad_(), settings
        self.state = dil.root if self.function is equilibrium else dil.argmin
        self.options = {"batch_dims": 1} if self.function is equilibrium else {}

    def __call__(self, seed=0, scale=1.0, **settings):
        """Gradients in x and W, and what the layer gave."""
        x, v = draw(2 + seed, *self.shape).requires_grad_(), scale * draw(3, *self.shape)
        solver = (dil.GMRES if self.function is equilibrium else dil.CG)(**self.settings | settings)
        with torch.no_grad():
            y = torch.tanh(draw(4, *self.shape))  # no solution: of the formula of the theorem it is as good as any

        def given(function, start):
            return y

        layer = self.state(
            lambda y: self.function(y, x, self.W), y, solver=given, linear_solver=solver, on_failure="ignore", **self.options
        )
        return torch.autograd.grad((v * layer.value).sum(), (x, self.W), retain_graph=True), layer


def off(found, exact):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small problems, for which it would not pay, are to do."""
    monkeypatch.setattr(linear_graph, "_MANY", 2**13)


@pytest.fixture
def taken(monkeypatch):
    """Whether solves at once took products in float32, and whether they were accurate enough."""
    noted, took = [], traced.Source.took_single
    monkeypatch.setattr(traced.Source, "took_single", lambda self, good: noted.append(good) or took(self, good))
    return noted


@pytest.mark.parametrize("rtol", [1e-4, 1e-6, None])
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_as_exact_as_was_asked(name, rtol, taken):
    case = Case(name, rtol=rtol)
    asked = 1e-10 if rtol is None else rtol
    for seed in range(CALLS):
        found, _ = case(seed % 3)
    assert len(taken) > 3 and all(taken)
    exact, _ = case(seed % 3, rtol=1e-13, product="backward")
    assert off(found, exact) <= 30 * asked
    # Products in float32 all the way would miss the tolerance, so the test would see them.
    found, layer = case(0)
    stats = layer.report.backward.stats
    assert bool((stats.residual <= 1.1 * stats.tolerance).all()) and bool(layer.report.backward.converged.all())


def test_products_in_float32_were_not_exact_enough_from_the_first_step_on(taken, monkeypatch):
    """So it matters how many are in full precision, and the check is needed."""
    monkeypatch.setattr("torchdil.linear.base.LinearSolver.full_steps", lambda *_: 1)
    case = Case("equilibrium")
    for _ in range(CALLS):
        found, _ = case()
    assert taken and not any(taken)
    exact, _ = case(rtol=1e-13, product="backward")
    assert off(found, exact) <= 3e-9


def test_the_report_counts_the_product_that_checks(taken):
    case = Case("energy", rtol=1e-8)
    for _ in range(CALLS):
        case()
        before = len(taken)
    while len(taken) == before:  # one of ten is made step by step
        _, layer = case()
    stats = layer.report.backward.stats
    assert stats.method == "CG" and stats.products == len(stats.history)  # of which the first is what it began with
    assert bool((stats.spectrum.extremes()[0] > 0.9).all())


def test_two_backward_passes_agree_to_the_bit(taken):
    case = Case("equilibrium")
    for _ in range(CALLS):
        found, layer = case()
        again = torch.autograd.grad((draw(3, *case.shape) * layer.value).sum(), case.W)[0]
        assert torch.equal(found[1], again)
    assert any(taken)


@pytest.mark.parametrize("scale", [1e-60, 1e60])
@pytest.mark.parametrize("name", ["energy", "equilibrium"])
def test_gradients_may_come_in_of_any_size(name, scale):
    case = Case(name)
    exact, _ = case(scale=scale, rtol=1e-13, product="backward")
    for _ in range(CALLS):
        found, layer = case(scale=scale)
        assert off(found, exact) <= 3e-9 and bool(layer.report.backward.converged.all())


def test_what_float32_cannot_hold_is_solved_in_float64(taken):
    """In units in which J is huge: its solves are judged, and after three that were not good it is left."""
    case = Case("energy")
    score, unit = case.function, torch.tensor(1e50, dtype=torch.float64)
    case.function = lambda *given: unit * score(*given)
    exact, _ = case(rtol=1e-13, product="backward")
    for _ in range(CALLS + 10):
        found, layer = case()
        assert off(found, exact) <= 3e-9 and bool(layer.report.backward.converged.all())
    assert taken == [False] * step_counts._MISSED


def test_a_solve_that_is_good_again_forgets_those_that_were_not(taken):
    case = Case("energy")
    for call in range(CALLS + 20):
        case(scale=1e-60 if call > CALLS and call % 2 else 1.0)
    assert taken.count(False) > 2 and taken[-3:].count(True)


def test_what_gains_nothing_stays_in_float64(taken):
    """Few numbers, few steps, or products without matrices."""
    few, short = Case("energy"), Case("energy", rtol=0.1)
    few.shape, few.W = (4, 40), few.W.detach()[:, :4].clone().requires_grad_()
    for _ in range(CALLS):
        few()
        short()
    x = draw(0, 100, 100).requires_grad_()
    for _ in range(CALLS):
        smooth = dil.argmin(
            lambda y: ((y - x) ** 2).sum() + torch.sqrt(0.1 + y.diff(dim=0) ** 2).sum(),
            torch.zeros_like(x),
            solver=lambda f, y: y,
            on_failure="ignore",
            linear_solver=dil.CG(rtol=1e-6),
        )
        smooth.value.sum().backward()
    assert not taken


def test_it_asks_for_fewer_exact_products_the_looser_the_tolerance(monkeypatch):
    monkeypatch.setattr(traced.Source, "takes_single", lambda *_: True)
    asked = []
    full_steps = dil.CG.full_steps

    def note(self, operator, transpose, steps):
        if steps:
            asked.append([full_steps(dil.CG(rtol=rtol), operator, transpose, 100) for rtol in (1e-15, 1e-10, 1e-6, 1e-3)])
        return full_steps(self, operator, transpose, steps)

    monkeypatch.setattr(dil.CG, "full_steps", note)
    case = Case("energy")
    for _ in range(CALLS):
        case()
    tightest, tight, loose, loosest = asked[-1]
    assert 60 < tightest < 70 and 40 < tight < 50 and 5 < loose < 15 and loosest == 1
