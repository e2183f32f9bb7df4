"""Traced derivatives: equal to those of autograd, used once a layer was solved with often enough, and never out of date."""

import gc
import pickle
import sys
import threading
import types
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional

import torchdil as dil
from torchdil import traced
from torchdil.batch import default_rtol
from torchdil.condition import Condition
from torchdil.linearize import UntraceableError, split
from torchdil.signature import signature
from torchdil.solution import Outcome, Report, Stats

TIGHT = {"rtol": 1e-11, "atol": 1e-12}
CALLS = traced._PATIENCE + 3


@pytest.fixture(autouse=True)
def _new():
    traced.forget_all()
    yield
    traced.forget_all()


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def traces():
    return [memory for memory in traced._memories.values() if memory.trace is not None]


def kept(layer):
    """Whether a layer that was called often enough still has its trace."""
    return [memory.solves for memory in traces()] != []


# Scores of a batch y (B, 4), parameters W (4, 4) and x (B, 4).
SCORES = {
    "quadratic": lambda y, x, W: ((y @ W - x) ** 2).sum(-1) + (y**2).sum(-1),
    "tanh": lambda y, x, W: (y**2).sum(-1) + (torch.tanh(y @ W) * x).sum(-1),
    "softplus": lambda y, x, W: ((y - x) ** 2).sum(-1) + functional.softplus(y @ W).sum(-1),
    "two layers": lambda y, x, W: ((y - x) ** 2).sum(-1) + functional.softplus(torch.sigmoid(y @ W) @ W**2).sum(-1),
    "silu": lambda y, x, W: 3 * ((y - x) ** 2).sum(-1) + functional.silu(y @ W).mean(-1),
    "gelu": lambda y, x, W: 3 * ((y - x) ** 2).sum(-1) + functional.gelu(y @ W).mean(-1),
    "elu": lambda y, x, W: 3 * ((y - x) ** 2).sum(-1) + functional.elu(y @ W).mean(-1),
    "relu squared": lambda y, x, W: ((y - x) ** 2).sum(-1) + (torch.relu(y @ W) ** 2).sum(-1),
    "logsumexp": lambda y, x, W: ((y - x) ** 2).sum(-1) + torch.logsumexp(y @ W, -1),
    "softmax": lambda y, x, W: 2 * ((y - x) ** 2).sum(-1) + (torch.softmax(y @ W, -1) ** 2).sum(-1),
    "division": lambda y, x, W: ((y - x) ** 2).sum(-1) / (2 + torch.cos(W).sum() ** 2) + (y**4).sum(-1) / 3,
    "exponentials": lambda y, x, W: torch.exp(0.3 * y).sum(-1) + ((y - x) ** 2 * torch.exp(W[0])).sum(-1),
    "pieces": lambda y, x, W: (torch.cat([y[:, :2] * y[:, 2:], y**2], -1) ** 2).sum(-1) + ((y - x) ** 2).sum(-1),
    "norms": lambda y, x, W: torch.sqrt(1 + (y @ W) ** 2).sum(-1) + ((y - x) ** 2).sum(-1),
    "einsum": lambda y, x, W: torch.einsum("bi,ij,bj->b", y, W.T @ W, y) + ((y - x) ** 2).sum(-1) + (y**4).sum(-1),
    "convolution": lambda y, x, W: functional.conv1d(y[:, None], W[:2, None, :3]).pow(4).sum((1, 2)) + ((y - x) ** 2).sum(-1),
    "normalisation": lambda y, x, W: functional.layer_norm(y @ W, (4,), eps=0.1).pow(2).mean(-1) + 3 * ((y - x) ** 2).sum(-1),
    "where": lambda y, x, W: torch.where(y > 0, y**2, 2 * y**2).sum(-1) + ((y @ W - x) ** 2).sum(-1),
    "in place": lambda y, x, W: (y.clone().mul_(2) - x).pow(2).sum(-1) + (2 * y).add_(1).pow(2).sum(-1),
    "indices": lambda y, x, W: ((y[:, [1, 0, 2, 1]] @ W - x) ** 2).sum(-1) + (y**2).sum(-1),
    "numbers": lambda y, x, W: (
        (torch.full_like(y, 0.3) * (y @ W - x) ** 2 * torch.ones_like(W)[0]).mean(-1) / y.new_ones(())
        + ((y**2).sum(-1) - torch.zeros_like(y)[:, 0])
    ),
    "transposed": lambda y, x, W: ((y @ (torch.full_like(W, 0.5).T * W).T - x) ** 2).sum(-1) + (y**2).sum(-1),
    "stored": lambda y, x, W: (y**2).sum(-1) + ((stored(y) @ W - x) ** 2).sum(-1),
}


def stored(y):
    """y, part by part, in a place that was made for it: what cannot be split."""
    place = torch.zeros_like(y)
    place[:, :2] = 2 * y[:, :2]
    place[:, 2:] = y[:, 2:]
    return place


def gradient(score, y, x, W):
    (F,) = torch.autograd.grad(score(y, x, W).sum(), y, create_graph=True)
    return F


@pytest.mark.parametrize("name", SCORES)
def test_split_derivatives_are_those_of_autograd(name):
    score = SCORES[name]
    y, x, W, p, g = draw(0, 3, 4), draw(1, 3, 4), draw(2, 4, 4).requires_grad_(), draw(3, 3, 4), draw(4, 3, 4)

    def derivatives(y, p, g):
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            F = gradient(score, leaf, x, W)
            product = torch.autograd.grad(F, leaf, p, retain_graph=True)
            pulled = torch.autograd.grad(F, W, g, materialize_grads=True)
        return [(F.detach(),), product, pulled]

    if name == "stored":
        with pytest.raises(UntraceableError, match="changes its argument"):
            split(derivatives, y, p, g)
        return
    halves = split(derivatives, y, p, g)
    y, p, g, new = draw(5, 3, 4), draw(6, 3, 4), draw(7, 3, 4), draw(8, 4, 4)
    with torch.no_grad():
        captured = [new if t is W else t for t in halves.captured]
        saved = halves.prelude(y, *captured)
        found = [
            part.module(vector, *(saved[i] for i in part.places)) for part, vector in zip(halves.parts, (p, g), strict=True)
        ]
        W.copy_(new)
    F, product, pulled = derivatives(y, p, g)
    torch.testing.assert_close(saved[0], *F, **TIGHT)
    torch.testing.assert_close(found[0], product, **TIGHT)
    torch.testing.assert_close(found[1], pulled, **TIGHT)


def test_a_product_is_no_more_than_its_matrices():
    """The Hessian of an energy with one hidden layer: W D Wᵀ p + 2 p."""
    halves = split(hessian_of_one_layer(2.0), draw(2, 30), draw(3, 30))
    assert sorted(name for name in called(halves.parts[0].module) if "squeeze" not in name) == ["add", "mm", "mm", "mul"]


def hessian_of_one_layer(weight):
    W, x = draw(0, 30, 20), draw(1, 30)

    def product(y, p):
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            F = gradient(lambda y, x, W: 0.5 * weight * ((y - x) ** 2).sum() + functional.softplus(y @ W).sum(), leaf, x, W)
            return [(F.detach(),), torch.autograd.grad(F, leaf, p)]

    return product


def called(module):
    return [getattr(node.target, "_opname", node.target.__name__) for node in module.graph.nodes if node.op == "call_function"]


def test_what_only_derivatives_are_wanted_of_is_not_computed():
    """Neither the value of a score, nor the numbers that autograd begins with."""
    names = called(split(hessian_of_one_layer(1.0), draw(2, 30), draw(3, 30)).prelude)
    assert not {"softplus", "sum", "ones_like", "pow"}.intersection(names)
    assert names.count("mul") == 1  # of the second derivative of softplus; ½ · 2 (y - x) is y - x


# Functions of (0.5, -0.3, 1.2) with an infinite slope where a derivative of 0 is selected, and what autograd makes of it.
SELECTED = {
    "relu": (lambda t: torch.relu(t).sqrt(), lambda t: 0.5 / t.sqrt()),
    "relu, entries of it": (lambda t: torch.relu(t)[[0, 1, 2]].sqrt(), lambda t: 0.5 / t.sqrt()),
    "relu, in another shape": (lambda t: torch.relu(t)[None].expand(2, 3).sqrt().mean(0), lambda t: 0.5 / t.sqrt()),
    "relu to a power": (lambda t: torch.relu(t) ** 0.7, lambda t: 0.7 * t**-0.3),
    "relu6": (lambda t: functional.relu6(t).sqrt(), lambda t: 0.5 / t.sqrt()),
    "threshold": (lambda t: functional.threshold(t, 0.0, 0.0).sqrt(), lambda t: 0.5 / t.sqrt()),
    "clamp": (lambda t: t.clamp(min=0).sqrt(), lambda t: 0.5 / t.sqrt()),
    "hardtanh": (lambda t: torch.acos(functional.hardtanh(t - 0.7)), lambda t: -1 / (1 - (t - 0.7) ** 2).sqrt()),
    "where": (lambda t: torch.where(t > 0, t, torch.zeros(3).to(t)).sqrt(), lambda t: 0.5 / t.sqrt()),
    "masked": (lambda t: t.masked_fill(t < 0, 0.0).sqrt(), lambda t: 0.5 / t.sqrt()),
}


@pytest.mark.parametrize("name", SELECTED)
def test_a_derivative_that_selects_does_so_of_infinities(name):
    """y = x + s(θ): with a dead entry, as relu has them, autograd gives 0, and a product with 0 would be NaN."""
    function, slope = SELECTED[name]
    theta = torch.tensor([0.5, -0.3, 1.2], dtype=torch.float64, requires_grad=True)
    layer = dil.ArgminLayer(lambda y, x: (0.5 * y**2 - y * (x + function(theta))).sum(-1), init=(3,))
    alive = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    expected = 4 * slope(theta.detach()).where(alive > 0, alive)
    for call in range(traced._PATIENCE + 2 * traced._CHECKED_EVERY):
        (found,) = torch.autograd.grad(layer(draw(call, 4, 3)).sum(), theta)
        torch.testing.assert_close(found, expected, **TIGHT)
    assert kept(layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_are_those_of_the_dtype(dtype):
    """0.3 times a third in float32 is not what it is in float64; a split function rounds as the function does."""
    y, p = draw(0, 3, 4).to(dtype), draw(1, 3, 4).to(dtype)

    def function(y, p):
        factor = torch.full_like(y, 0.3) * torch.ones(4, dtype=dtype) / 3
        return [((factor * y).exp(),), (p * factor * factor[0, 0],)]

    halves = split(function, y, p)
    with torch.no_grad():
        saved = halves.prelude(y, *halves.captured)
        (found,) = halves.parts[0].module(p, *(saved[i] for i in halves.parts[0].places))
    (value,), (product,) = function(y, p)
    assert torch.equal(saved[0], value)
    torch.testing.assert_close(found, product, rtol=4 * torch.finfo(dtype).eps, atol=0)


class Layer(nn.Module):
    """f(y) with parameters, as a user has it in a training loop."""

    def __init__(self, score=SCORES["two layers"], linear_solver=None, shape=(5, 4)):
        super().__init__()
        self.score, self.linear_solver, self.shape = score, linear_solver, shape
        self.W = nn.Parameter(0.5 * draw(0, 4, 4))
        self.number = 1.0

    def forward(self, x):
        solver = dil.Newton(rtol=1e-12)
        start = torch.zeros(self.shape, dtype=torch.float64)
        stated = lambda y: self.number * self.score(y, x, self.W)  # noqa: E731 (a new function with each call)
        return dil.argmin(stated, start, solver=solver, linear_solver=self.linear_solver).value


def exact(layer, x, v):
    """(∂/∂x, ∂/∂W) of vᵀy by the theorem, dense."""
    with torch.no_grad():
        y = layer(x)
    total = lambda y, x, W: layer.number * layer.score(y, x, W).sum()  # noqa: E731
    F = torch.func.grad(total)
    J, of_x, of_W = torch.func.jacrev(F, (0, 1, 2))(y, x.detach(), layer.W.detach())
    n = y.numel()
    g = torch.linalg.solve(J.reshape(n, n).mT, v.reshape(n))
    return -(g @ of_x.reshape(n, -1)).reshape(x.shape), -(g @ of_W.reshape(n, -1)).reshape(layer.W.shape)


@pytest.mark.parametrize("solver", [dil.Dense(), dil.CG(rtol=1e-11), dil.GMRES(rtol=1e-11), dil.GMRES(rtol=1e-11, damping=0.1)])
def test_solves_at_once_are_used_and_right(solver, monkeypatch):
    used = []
    at_once = Condition.solve_at_once
    monkeypatch.setattr(Condition, "solve_at_once", lambda *args: used.append(at_once(*args)) or used[-1])
    layer = Layer(linear_solver=solver)
    for seed in range(traced._PATIENCE + traced._CHECKED_FIRST + 25):
        check(layer, seed) if not solver.damping else layer(draw(seed, 5, 4).requires_grad_()).sum().backward()
    # The first with a trace are made step by step, and one of ten; so are those whose number of steps is new.
    made = [found is not None for found in used]
    assert not any(made[: traced._CHECKED_FIRST - 1]) and sum(made) >= 7


@pytest.mark.parametrize("solver", [dil.Dense(), dil.CG(), dil.GMRES()])
def test_a_report_that_nobody_has_asked_yet_can_be_copied(solver):
    W, score = draw(0, 4, 4).requires_grad_(), SCORES["two layers"]
    for seed in range(traced._PATIENCE + traced._CHECKED_FIRST + 18):
        x = draw(seed, 5, 4)
        solution = dil.argmin(lambda y, x=x: score(y, x, W), torch.zeros_like(x), linear_solver=solver)
        solution.value.sum().backward()
    report = solution.report
    assert callable(report._backward)
    copied = pickle.loads(pickle.dumps(report))
    assert str(copied) == str(report) and bool(report.backward.converged.all())
    assert report.backward is report.backward and not report.adjoint_error.requires_grad


def test_a_report_that_is_read_while_there_is_a_new_one():
    """By another thread: it gets what it asked for, and the new one stays."""
    report, numbers = Report(), torch.zeros(1)
    old, new = (Stats(name, numbers.long(), numbers, numbers) for name in ("old", "new"))

    def solve():
        report.backward = Outcome(numbers.long(), new)
        return numbers.long(), old

    report.backward_by(solve)
    assert report.backward.stats is old and report.backward.stats is new


def check(layer, seed, **close):
    x, v = draw(100 + seed, *layer.shape).requires_grad_(), draw(200 + seed, *layer.shape)
    found = torch.autograd.grad((v * layer(x)).sum(), (x, layer.W), materialize_grads=True)
    for one, other in zip(found, exact(layer, x, v), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9, **close)


SOLVERS = [dil.Auto(rtol=1e-11), dil.CG(rtol=1e-11), dil.Dense(), dil.MINRES(rtol=1e-11), dil.GMRES(rtol=1e-11)]


def test_large_solves_are_traced_sooner(monkeypatch):
    """As if 5 x 4 unknowns were many: after one solve of a few products."""
    monkeypatch.setattr(traced, "_LARGE", 5)
    layer = Layer(linear_solver=dil.CG(rtol=1e-11))
    for seed in range(CALLS):
        assert bool(traces()) == (seed > 1)  # traced in the second call
        check(layer, seed)
    assert [memory.solves for memory in traced._memories.values()] == [traced._PATIENCE + CALLS - 1]


@pytest.mark.parametrize("linear_solver", [*SOLVERS, dil.NormalCG(rtol=1e-13), dil.CG(rtol=1e-11, damping=1e-13)])
def test_gradients_before_and_after(linear_solver):
    layer = Layer(linear_solver=linear_solver)
    for seed in range(CALLS):
        assert bool(traces()) == (seed > traced._PATIENCE)
        check(layer, seed)
    assert len(traces()) == 1


@pytest.mark.parametrize("shape", [(1, 4), (40, 4)])
@pytest.mark.parametrize("name", [name for name in SCORES if name != "stored"])
def test_gradients_of_all_kinds(name, shape, monkeypatch):
    monkeypatch.setattr(traced, "_PATIENCE", 0)
    layer = Layer(SCORES[name], dil.CG(rtol=1e-11), shape)
    for seed in range(3):
        check(layer, seed)
    assert traces()


def test_what_cannot_be_split_works():
    layer = Layer(SCORES["stored"])
    for seed in range(CALLS):
        check(layer, seed)
    assert not traces() and all(memory.refused for memory in traced._memories.values())


def test_roots_in_both_directions(monkeypatch):
    monkeypatch.setattr(traced, "_PATIENCE", 0)
    W = (0.3 * draw(0, 4, 4)).requires_grad_()

    def solve(x, W):
        return dil.root(lambda y: y - torch.tanh(y @ W + x), torch.zeros(3, 4, dtype=torch.float64), batch_dims=1).value

    for seed in range(3):
        x = draw(seed, 3, 4).requires_grad_()
        assert torch.autograd.gradcheck(solve, (x, W), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(solve, (x, W))
    assert traces()


def changed_in_place(layer):
    with torch.no_grad():
        layer.W.mul_(0.7)


def replaced(layer):
    layer.W = nn.Parameter(draw(77, 4, 4))


def number(layer):
    layer.number = 1.7


def other_function(layer):
    layer.score = SCORES["softplus"]


def other_shape(layer):
    layer.shape = (6, 4)


def transposed(layer):
    layer.W = nn.Parameter(draw(78, 4, 4).T)


@pytest.mark.parametrize("change", [changed_in_place, replaced, number, other_function, other_shape, transposed])
def test_changes_are_seen(change):
    layer = Layer()
    for seed in range(CALLS):
        check(layer, seed)
    change(layer)
    for seed in range(3):
        check(layer, seed)
    assert len(traces()) == 1 and not any(memory.refused for memory in traced._memories.values())


class Kept:
    """A number that nothing shows: the interpreter keeps it, as the time that a thread may run on, in 10 µs."""

    @property
    def prec(self):
        return round(sys.getswitchinterval() * 1e5)

    @prec.setter
    def prec(self, value):
        sys.setswitchinterval(value * 1e-5)


KEPT = Kept()


def hidden():
    return KEPT.prec / 100


def hidden_in_f(y, x, W):
    return ((y - x) ** 2 * hidden()).sum(-1) + functional.softplus(y @ W).sum(-1)


def hidden_in_x(y, x, W):
    """J does not change with the number, F and ∂F/∂x do."""
    return ((y - hidden() * x) ** 2).sum(-1) + ((y @ W) ** 2).sum(-1)


@pytest.mark.parametrize("score", [hidden_in_f, hidden_in_x])
def test_what_cannot_be_seen_is_noticed(score, monkeypatch):
    monkeypatch.setattr(KEPT, "prec", 100)
    W = draw(0, 4, 4).requires_grad_()

    def run(seed):
        x, v = draw(seed, 3, 4).requires_grad_(), draw(50 + seed, 3, 4)
        start = torch.zeros(3, 4, dtype=torch.float64)
        y = dil.argmin(lambda y: score(y, x, W), start, solver=dil.Newton(rtol=1e-12)).value
        found = torch.autograd.grad((v * y).sum(), (x, W))
        F = torch.func.grad(lambda y, x, W: score(y, x, W).sum())
        J, *parts = torch.func.jacrev(F, (0, 1, 2))(y.detach(), x.detach(), W.detach())
        g = torch.linalg.solve(J.reshape(12, 12), v.reshape(12))
        for one, part in zip(found, parts, strict=True):
            torch.testing.assert_close(one, -(g @ part.reshape(12, -1)).reshape(one.shape), rtol=1e-7, atol=1e-9)

    for seed in range(CALLS):
        run(seed)
    assert traces()
    monkeypatch.setattr(KEPT, "prec", 150)
    for seed in range(3):
        run(seed)
    assert not traces()


class Scaled(torch.autograd.Function):
    """y, with a cotangent that is multiplied by a number from elsewhere."""

    factor = 1.0

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, v):
        return v * Scaled.factor * hidden()


def scaled_gradient(W, seed):
    x = draw(seed, 3, 4).requires_grad_()
    residual = lambda y: Scaled.apply(y) - torch.tanh(y @ W) - x  # noqa: E731
    y = dil.root(
        residual, torch.zeros(3, 4, dtype=torch.float64), solver=dil.Newton(rtol=1e-12), on_failure="warn", batch_dims=1
    )
    return torch.autograd.grad(y.value.sum(), x)[0]


def test_numbers_of_a_class_are_seen(monkeypatch):
    monkeypatch.setattr(KEPT, "prec", 100)
    W = 0.2 * draw(0, 4, 4)
    monkeypatch.setattr(traced, "_PATIENCE", 0)
    before = [scaled_gradient(W, 0) for _ in range(5)][-1]
    assert traces()
    Scaled.factor = 2.0
    try:
        after = scaled_gradient(W, 0)
        traced.forget_all()
        torch.testing.assert_close(after, scaled_gradient(W, 0), rtol=1e-9, atol=0)
    finally:
        Scaled.factor = 1.0
    assert not torch.allclose(after, before)


def test_a_hidden_change_of_the_derivative_alone_is_told(monkeypatch):
    monkeypatch.setattr(KEPT, "prec", 100)
    W = 0.2 * draw(0, 4, 4)
    for seed in range(traced._PATIENCE + traced._CHECKED_FIRST + 1):
        scaled_gradient(W, seed)
    assert traces()
    monkeypatch.setattr(KEPT, "prec", 200)
    with pytest.warns(dil.ConvergenceWarning, match="gradients since the last check, as a rule up to eighteen, may be wrong"):
        for _ in range(2 * traced._CHECKED_EVERY):
            found = scaled_gradient(W, 0)
    assert not traces()
    traced.forget_all()
    torch.testing.assert_close(found, scaled_gradient(W, 0), rtol=1e-9, atol=0)


def spoil(found):
    return tuple(t * float("nan") for t in found)


@pytest.mark.parametrize("linear_solver", [dil.CG(rtol=1e-12), dil.CG(rtol=1e-12, max_steps=30)], ids=repr)
@pytest.mark.parametrize("part", ["product", "pull"])
def test_a_trace_that_gives_nan_for_a_number_is_given_up(part, linear_solver, monkeypatch):
    whole = traced.Source.bound

    def spoilt(self, parts, *rest):
        function = whole(self, parts, *rest)
        return (lambda *t: spoil(function(*t))) if ("pull" in parts) == (part == "pull") else function

    monkeypatch.setattr(traced.Source, "bound", spoilt)
    monkeypatch.setattr(traced.Source, "_close", lambda *_: True)
    layer = Layer(linear_solver=linear_solver)
    for seed in range(CALLS):
        check(layer, seed)
    assert not traces()


def test_a_gradient_that_is_infinite_in_autograd_too_is_no_reason():
    theta = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    layer = dil.ArgminLayer(lambda y, x: (0.5 * y**2 - y * (x + theta.sqrt())).sum(-1), init=(3,))
    for call in range(CALLS):
        (found,) = torch.autograd.grad(layer(draw(call, 4, 3)).sum(), theta)
        assert bool((found == float("inf")).all())
    assert kept(layer)


@pytest.mark.parametrize("solver", [dil.Auto(rtol=1e-11), dil.CG(rtol=1e-11), dil.GMRES(rtol=1e-11), dil.Dense()])
def test_backward_passes_through_one_point_do_not_differ(solver):
    layer = Layer(linear_solver=solver, shape=(12, 4))
    for seed in range(25):
        x = draw(seed, 12, 4).requires_grad_()
        y = layer(x).sum()
        first, second = (torch.autograd.grad(y, (x, layer.W), retain_graph=True) for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("solver", [None, dil.GMRES(), dil.Dense()], ids=["Auto", "GMRES", "Dense"])
def test_low_precision(solver, dtype):
    W = (0.1 * draw(0, 6, 6)).to(dtype).requires_grad_()
    start = torch.zeros(3, 6, dtype=dtype)
    for seed in range(traced._PATIENCE + traced._CHECKED_FIRST + 5):
        x = draw(seed, 3, 6).to(dtype).requires_grad_()
        settings = {"batch_dims": 1, "solver": dil.Picard(), "linear_solver": solver}
        y = dil.fixed_point(lambda y, x=x: torch.tanh(y @ W + x), start, **settings).value
        (found,) = torch.autograd.grad(y.sum(), x)
        slopes = 1 - y.detach().double() ** 2  # dy = slopes (dy W + dx)
        J = torch.eye(6, dtype=torch.float64) - slopes.unsqueeze(2) * W.detach().double().mT
        exact = slopes * torch.linalg.solve(J.mT, torch.ones_like(slopes))
        # In norm: 1 - y² of a y near 1 has few digits of its own. Both solves are asked for 1e-2, in float32 for 1e-5.
        assert (found.double() - exact).norm() <= 5 * default_rtol(dtype) * exact.norm()


def test_a_compiled_module_is_not_traced(monkeypatch):
    monkeypatch.setattr(traced, "_PATIENCE", 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        module = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double())
    x = draw(0, 3).requires_grad_()
    for _ in range(3):
        y = dil.root(lambda y: 3 * y - module(y) - x, torch.zeros(3, dtype=torch.float64)).value
        y.sum().backward()
    assert not traces() and x.grad is not None and module[0].weight.grad is not None


def test_a_branch_that_depends_on_y():
    def score(y, x):
        return ((y - x) ** 2).sum(-1) * (3.0 if float(x.detach().sum()) > 0 else 1.0) + (y**4).sum(-1)

    for seed in range(2 * CALLS):
        x, v = draw(seed, 3, 4).requires_grad_(), draw(50 + seed, 3, 4)
        start = torch.zeros(3, 4, dtype=torch.float64)
        y = dil.argmin(score, start, (x,), solver=dil.Newton(rtol=1e-12)).value
        (found,) = torch.autograd.grad((v * y).sum(), x)
        factor = 3.0 if float(x.detach().sum()) > 0 else 1.0
        torch.testing.assert_close(found, v * 2 * factor / (2 * factor + 12 * y.detach() ** 2), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("patience", [0, 1, 10])
def test_a_layer_inside_a_layer(patience, monkeypatch):
    """Whichever of them is due to be traced first."""
    monkeypatch.setattr(traced, "_PATIENCE", patience)
    W, start = (0.5 * draw(0, 3, 3)).requires_grad_(), torch.zeros(3, dtype=torch.float64)

    def inner(y):
        return dil.argmin(lambda z: ((z - y) ** 2).sum() + functional.softplus(z @ W).sum(), start).value

    def outer(x):
        return dil.argmin(lambda y: ((y - x) ** 2).sum() + inner(y).square().sum(), start, solver=dil.LBFGS(rtol=1e-10)).value

    for seed in range(4):
        x = draw(seed, 3).requires_grad_()
        (found,) = torch.autograd.grad(outer(x).sum(), x)
        step = 1e-5 * torch.eye(3, dtype=torch.float64)
        with torch.no_grad():
            slopes = [float((outer(x + h) - outer(x - h)).sum()) / 2e-5 for h in step]
        torch.testing.assert_close(found, torch.tensor(slopes, dtype=torch.float64), rtol=1e-5, atol=1e-7)


def test_higher_derivatives(monkeypatch):
    monkeypatch.setattr(traced, "_PATIENCE", 0)
    layer = Layer(shape=(2, 4))
    for _ in range(3):
        check(layer, 0)
    x = draw(1, 2, 4).requires_grad_()

    def value(x, W):
        start = torch.zeros(2, 4, dtype=torch.float64)
        return dil.argmin(layer.score, start, (x, W), solver=dil.Newton(rtol=1e-13)).value

    W = layer.W.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(value, (x, W)) and torch.autograd.gradgradcheck(value, (x, W))
    assert traces()


@pytest.mark.parametrize("calls", [CALLS, CALLS + 12])  # the next solve is checked by autograd, or not
@pytest.mark.parametrize("name", ["two layers", "softplus"])
def test_a_change_between_forward_and_backward_raises(name, calls):
    layer = Layer(SCORES[name])
    for seed in range(calls):
        check(layer, seed)
    y = layer(draw(0, 5, 4))
    with torch.no_grad():
        layer.W.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_only_what_is_asked_for():
    """Gradients of some inputs, hooks, a second backward pass and accumulation are those of autograd."""
    layer, encoder = Layer(), nn.Linear(4, 4).double()
    for seed in range(CALLS):
        check(layer, seed)
    calls = []
    for _ in range(2):
        raw = draw(3, 5, 4).requires_grad_()
        x = encoder(raw)
        x.register_hook(lambda grad: calls.append(grad))
        y = layer(x)
        (one,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        (other,) = torch.autograd.grad(y.sum(), layer.W, retain_graph=True)
        of_x, of_W = exact(layer, x.detach(), torch.ones_like(y))
        torch.testing.assert_close(one, of_x, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(other, of_W, rtol=1e-7, atol=1e-9)
        layer.zero_grad()
        y.sum().backward(retain_graph=True)
        y.sum().backward()
        torch.testing.assert_close(layer.W.grad, 2 * of_W, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(raw.grad, 2 * of_x @ encoder.weight.detach(), rtol=1e-7, atol=1e-9)
    assert len(calls) == 6


def test_parameters_that_are_swapped_for_a_call():
    layer = Layer()
    for seed in range(CALLS):
        check(layer, seed)
    x, v = draw(0, 5, 4), draw(1, 5, 4)
    W = draw(99, 4, 4).requires_grad_()
    y = torch.func.functional_call(layer, {"W": W}, (x,))
    (found,) = torch.autograd.grad((v * y).sum(), W)
    with torch.no_grad():
        layer.W.copy_(W)
    torch.testing.assert_close(found, exact(layer, x, v)[1], rtol=1e-7, atol=1e-9)


def test_nothing_of_the_user_is_kept():
    layer = Layer()
    for seed in range(CALLS):
        x = draw(seed, 5, 4).requires_grad_()
        layer(x).sum().backward()
    assert traces()
    gone = [weakref.ref(x), weakref.ref(layer.W), weakref.ref(layer)]
    del x, layer
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def test_large_tensors_that_cannot_be_found_are_not_kept():
    def stated(y, x):
        return ((y - x) ** 2).sum(-1) + functional.softplus(y @ (W + hidden["data"])).sum(-1)

    hidden, W = types.MappingProxyType({"data": draw(1, 40, 40)}), draw(0, 40, 40).requires_grad_()
    for seed in range(CALLS):
        x = draw(seed, 3, 40).requires_grad_()
        dil.argmin(stated, torch.zeros_like(x), (x,)).value.sum().backward()
    assert not traces() and all(memory.refused for memory in traced._memories.values())


def test_few_are_remembered():
    for n in range(1, traced._REMEMBERED + 10):
        x = torch.ones(n, 2, dtype=torch.float64, requires_grad=True)
        dil.argmin(lambda y, x: ((y - x) ** 2).sum(-1), torch.zeros_like(x), (x,)).value.sum().backward()
    assert len(traced._memories) == traced._REMEMBERED


def test_few_routines_are_remembered(monkeypatch):
    """A solve that takes another number of steps each time must not fill the memory."""
    layer = Layer(linear_solver=dil.CG(rtol=1e-11))
    for seed in range(CALLS):
        check(layer, seed)
    (memory,) = traces()
    for steps in range(2 * traced._ROUTINES):
        monkeypatch.setattr(traced.Source, "expected", lambda self, settings, steps=steps: 4 + steps)
        check(layer, steps)
    assert len(memory.trace._routines) == traced._ROUTINES and "prelude" in memory.trace._routines


def test_those_in_use_are_remembered():
    """A layer beside one that is another with each call, because a number changes."""
    layer, changing = Layer(), Layer()
    for call in range(traced._REMEMBERED + CALLS):
        changing.number = 1.0 + call
        x = draw(call, 5, 4)
        (layer(x).sum() + changing(x).sum()).backward()
    assert len(traces()) == 1


def test_tracing_draws_no_random_numbers():
    layer, states = Layer(lambda y, x, W: ((y - x) ** 2).sum(-1) + 0 * torch.rand(()) * (y @ W).sum(-1)), []
    for _ in range(CALLS):
        torch.manual_seed(0)
        layer(draw(0, 5, 4)).sum().backward()
        states.append(torch.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)


def test_autograd_where_it_is_asked_for():
    layer = Layer(linear_solver=dil.Auto(product="backward"))
    for seed in range(CALLS):
        check(layer, seed)
    assert not traced._memories


def test_deterministic_algorithms_are_not_traced():
    torch.use_deterministic_algorithms(True)
    try:
        layer = Layer()
        for seed in range(CALLS):
            check(layer, seed)
        assert not traced._memories
    finally:
        torch.use_deterministic_algorithms(False)


def test_threads():
    layers = [Layer(), Layer(SCORES["softplus"]), Layer(SCORES["tanh"], dil.CG(rtol=1e-11))]
    errors = []

    here = torch.get_default_device()  # each thread has its own

    def train(layer):
        try:
            with here:
                for seed in range(2 * CALLS):
                    check(layer, seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(layer,)) for layer in layers * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_signature_tells_functions_apart():
    a, b = draw(0, 2, 3), draw(1, 2, 3)

    def make(t, number, inner):
        return lambda y: inner(y * number + t)

    same = signature(make(a, 1.0, torch.sin)), signature(make(b, 1.0, torch.sin))
    assert same[0][1] == same[1][1] and same[0][0][0] is a and same[1][0][0] is b
    others = (
        make(a, 2.0, torch.sin),
        make(a, 1, torch.sin),
        make(a, 1.0, torch.cos),
        make(a.T, 1.0, torch.sin),
        make(a.float(), 1.0, torch.sin),
    )
    assert all(signature(other)[1] != same[0][1] for other in others)
    shared = [a, b], [a, a]
    assert signature(lambda y: y + shared[0][0])[1] is not None
    assert signature((a, b))[1] != signature((a, a))[1]
    assert signature([draw(0, 1) for _ in range(3000)]) is None
    loop = []
    loop.append(loop)
    assert signature(loop)[0] == []


@pytest.mark.parametrize("function", [functional.mish, lambda y: torch.cat((y, y[:1])).unfold(0, 2, 1).tanh().sum(-1)])
def test_torch_says_nothing_of_slow_operations(function):
    """A warning of torch that products are made one by one would be an error here."""
    theta = draw(0, 3).requires_grad_()
    for _ in range(CALLS + 3):
        y = dil.root(lambda y: y + 0.3 * function(y) - theta, torch.zeros(3, dtype=torch.float64)).value
        y.sum().backward()
    assert traces()
