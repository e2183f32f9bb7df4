"""A function whose derivative is not its slope is told at the first solve with it, though the solve succeeds."""

import warnings

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import torchdil as dil
from torchdil import slope

ZERO = torch.zeros(4, 3, dtype=torch.float64)
TIMES = torch.linspace(0, 1, 11, dtype=torch.float64)


@pytest.fixture(autouse=True)
def _as_new(monkeypatch):
    monkeypatch.setattr(slope, "_seen", slope.weakref.WeakKeyDictionary())


def by_numpy(y):
    return torch.as_tensor(np.tanh(y.detach().cpu().numpy())).to(y)


class Surrogate(torch.autograd.Function):
    """round(), whose backward is that of the identity."""

    @staticmethod
    def forward(ctx, y):
        return 4 * y.clone()

    @staticmethod
    def backward(ctx, v):
        return v


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def argmin(score, **options):
    return dil.argmin(score, ZERO, **options).value


def root(residual, **options):
    return dil.root(residual, ZERO, batch_dims=1, **options).value


def fixed_point(g, **options):
    return dil.fixed_point(g, ZERO, batch_dims=1, **options).value


def trajectory(f, **options):
    return dil.odeint(f, draw(0, 4, 3), TIMES, batch_dims=1, **options)


X = draw(1, 4, 3)
# Each solve succeeds with what autograd knows of the function.
WRONG = {
    "score by numpy": (argmin, lambda y: ((y - X) ** 2).sum(-1) + 0.3 * by_numpy(y).sum(-1)),
    "detached score": (argmin, lambda y: ((y - X) ** 2).sum(-1) + 0.3 * torch.tanh(y.detach()).sum(-1)),
    "residual by numpy": (root, lambda y: y + 0.1 * by_numpy(y) - X),
    "detached map": (fixed_point, lambda y: 0.3 * torch.cos(y.detach()) + 0.1 * y),
    "surrogate": (root, lambda y: y + 0.02 * Surrogate.apply(y) - X),
    "field by numpy": (trajectory, lambda t, y: -y + 0.3 * by_numpy(y)),
    "detached field": (trajectory, lambda t, y: torch.sin(y.detach()) - y),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_autograd_does_not_see_is_told_once(name):
    state, function = WRONG[name]
    with pytest.warns(dil.ConvergenceWarning, match="is not its slope") as caught:
        state(function)
        state(function)
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 20])
@pytest.mark.parametrize("kind", ["detached mean", "item", "one of the others"])
@pytest.mark.parametrize("state", [root, fixed_point, trajectory])
def test_a_part_that_is_a_number_of_all_of_y(state, kind, n):
    """It may change by next to nothing on a way of random signs."""
    parts = {
        "detached mean": lambda y: 0.5 * y.detach().mean(-1, keepdim=True),
        "item": lambda y: 0.5 * y[0].mean().item(),
        "one of the others": lambda y: torch.nn.functional.pad(0.5 * y[:, -1:].detach(), (0, n - 1)),
    }
    part, x = parts[kind], torch.ones(1, n, dtype=torch.float64)
    with pytest.warns(dil.ConvergenceWarning, match="is not its slope"):
        if state is root:
            dil.root(lambda y: y - part(y) - x, 0 * x, batch_dims=1, solver=dil.Anderson())
        elif state is fixed_point:
            dil.fixed_point(lambda y: part(y) + x, 0 * x, batch_dims=1, solver=dil.Anderson())
        else:
            dil.odeint(lambda t, y: part(y) - y, x, TIMES, batch_dims=1)


def test_other_functions_in_the_same_code_are_looked_at():
    def made(g):
        return lambda y: y - 0.5 * g(y) - X

    class Model:
        def __init__(self, g):
            self.g = g

        def __call__(self, y):
            return y - 0.5 * self.g(y) - X

        def residual(self, y):
            return y - 0.5 * self.g(y) - X

    good, bad = torch.tanh, lambda y: torch.tanh(y.detach()) + 0.1 * y
    for make in (made, lambda g: Model(g).residual, Model):
        root(make(good))
        with pytest.warns(dil.ConvergenceWarning, match="is not its slope") as caught:
            root(make(bad))
            root(make(bad))
        assert len([w for w in caught if "slope" in str(w.message)]) == (2 if make is Model else 1)
    nets = [nn.Linear(3, 3).double() for _ in range(slope._LOOKS + 5)]
    for net in nets:
        root(made(lambda y, net=net: 0.1 * net(y)))
    assert max(map(len, slope._seen.values())) <= slope._LOOKS


def test_policies():
    state, function = WRONG["residual by numpy"]
    assert torch.isfinite(state(function, on_failure="ignore")).all()
    with pytest.raises(dil.ConvergenceError, match="use no detach"):
        state(function, on_failure="raise")


net = nn.Sequential(nn.Linear(3, 64), nn.ReLU(), nn.Linear(64, 3))
RIGHT = {
    "kinks": (argmin, lambda y: ((y - X) ** 2).sum(-1) + 0.1 * (y - X).abs().sum(-1)),
    "relu": (fixed_point, lambda y: 0.1 * net.double()(y)),
    "square root": (argmin, lambda y: torch.exp(y).sum(-1) - y.sum(-1) + torch.sqrt(1e-6 + y**2).sum(-1)),
    "a large constant": (argmin, lambda y: 1e9 + ((y - X) ** 2).sum(-1)),
    "no part of y": (root, lambda y: y - X),
    "rotation": (root, lambda y: torch.stack((y[:, 1], -y[:, 0], y[:, 2]), -1) - X),
    "stiff": (trajectory, lambda t, y: -1e6 * (y - torch.cos(t)) - torch.sin(t)),
    "no part of the state": (trajectory, lambda t, y: torch.cos(t) * torch.ones_like(y)),
}


@pytest.mark.parametrize("name", RIGHT)
def test_functions_that_are_right_are_left_alone(name):
    """A warning would be an error."""
    state, function = RIGHT[name]
    state(function)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("seed", range(5))
def test_low_precision(dtype, seed):
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Linear(30, 100), nn.ReLU(), nn.Linear(100, 30)).to(dtype)
    x = torch.randn(8, 30).to(dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dil.fixed_point(lambda y: 0.3 * module(y) + x, torch.zeros_like(x), batch_dims=1)
        dil.argmin(lambda y: ((y - x) ** 2).mean(-1) + (module(y) ** 2).mean(-1), torch.zeros_like(x), solver=dil.LBFGS())
    assert not any("slope" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("n", [1, 3, 30])
@pytest.mark.parametrize("seed", range(8))
def test_half_precision_inside_goes_by_steps(seed, n):
    """Its steps are longer than a way that is short in the precision of y: a difference along that says anything."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(n, 32), nn.Tanh(), nn.Linear(32, n))
    half = nn.Sequential(nn.Linear(n, 32), nn.Tanh(), nn.Linear(32, n)).bfloat16()
    x = torch.randn(4, n)

    def autocast(y):
        with torch.autocast(x.device.type, dtype=torch.bfloat16):
            return y + 0.3 * net(y).float() - x

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {"batch_dims": 1, "solver": dil.Picard(rtol=1e-2)}
        dil.root(lambda y: y + 0.3 * half(y.bfloat16()).float() - x, torch.zeros_like(x), **options)
        dil.root(autocast, torch.zeros_like(x), **options)
        score = lambda y: ((y - x) ** 2).sum(-1) + 0.3 * half(y.bfloat16()).float().sum(-1)  # noqa: E731
        dil.argmin(score, torch.zeros_like(x), solver=dil.LBFGS(rtol=1e-2))
    assert not any("slope" in str(warning.message) for warning in caught)


def test_a_score_that_mixes_samples_is_called_that():
    """The derivative of one sample's score by its own y is not all there is, and no detach() is to blame."""
    norm = nn.BatchNorm1d(3).double()
    with pytest.warns(dil.ConvergenceWarning, match="score mixes samples") as caught:
        argmin(lambda y: ((norm(y) - X) ** 2).sum(-1) + ((y - X) ** 2).sum(-1))
    assert len(caught) == 1 and "detach" not in str(caught[0].message)


def test_a_point_that_the_function_refuses():
    def residual(y):
        if bool((y > 1.5).any()):
            raise ValueError("too large")
        return y - 1.4

    y = dil.root(residual, torch.full((2,), 1.3, dtype=torch.float64)).value
    torch.testing.assert_close(y, torch.full_like(y, 1.4))


def test_looking_saves_nothing_for_the_hooks_of_others():
    """torch's checkpointing counts what is saved, and looks only the first time."""
    x = draw(2, 4, 3).requires_grad_()

    def layer(x):
        return dil.root(lambda y, x: y + 0.1 * torch.tanh(y) - x, ZERO, (x,), batch_dims=1).value

    y = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, 1 / (1 + 0.1 / torch.cosh(y.detach()) ** 2))
