"""Adaptive steps that are held fixed in the backward pass: how far the gradient is off, by differences of the solution."""

import math

import pytest
import torch
from torch.autograd import grad

import torchdil as dil

F64 = torch.float64
TIGHT = {"method": "radauIIA5", "rtol": 1e-8, "atol": 1e-10}
LOOSE = {"rtol": 1e-3, "atol": 1e-6}
W1, W2 = (torch.randn(8, 8, generator=torch.Generator().manual_seed(seed), dtype=F64) for seed in (1, 2))


def oscillator(mu):
    return lambda t, y: torch.stack((y[..., 1], mu * (1 - y[..., 0] ** 2) * y[..., 1] - y[..., 0]), dim=-1)


def switch(width):
    return lambda at: lambda t, y: 0.1 + 0.9 * torch.sigmoid((at - y) / width)


def network(scale):
    return lambda t, y: 2 * torch.tanh(y @ (W1 * scale)) @ W2 - y


def pendulum(k):
    return lambda t, y: torch.stack((y[..., 1], -k * torch.sin(y[..., 0])), dim=-1)


def to_rest(k):
    """Where a shift in time means nothing, as nothing moves."""
    return lambda t, y: -k * (y - k) * torch.tensor([1.0, 1000.0], dtype=F64)


def forced(k):
    return lambda t, y: -k * (y - torch.cos(3 * t))


def times(end, count=2):
    return torch.linspace(0, end, count, dtype=F64)


def state(*numbers):
    return torch.tensor(numbers, dtype=F64)


def off(make, theta, y0, t, **options):
    """How far the gradient of Σ y² is from that of the solution, relative, and the report."""
    node = dil.NeuralODE(make(parameter := torch.tensor(theta, dtype=F64, requires_grad=True)), batch_dims=0, **options)
    (found,) = grad(node(y0, t)[1:].square().sum(), parameter)
    h = 1e-3 * theta
    ends = [dil.odeint(make(theta + s * h), y0, t, options={"max_steps": 10**5}, **TIGHT)[1:].square().sum() for s in (1, -1)]
    true = (ends[0] - ends[1]) / (2 * h)
    return float((found - true).abs() / true.abs()), node.report


SPOILT = {
    "oscillator": (oscillator, 10.0, state(2.0, 0.0), times(30.0), {"method": "trbdf2", "rtol": 1e-3, "atol": 1e-3}),
    "stiff oscillator": (oscillator, 50.0, state(2.0, 0.0), times(60.0), {"method": "kvaerno5", "rtol": 1e-3, "atol": 1e-3}),
    "sharp switch": (switch(1e-4), 1.0, state(0.3), times(2.0), {"method": "kvaerno5"} | LOOSE),
    "separatrix": (pendulum, 1.0, state(3.0, 0.0), times(30.0, 4), {"method": "kvaerno5"} | LOOSE),
}
RIGHT = {
    "oscillator": (oscillator, 5.0, state(2.0, 0.0), times(8.0, 3), {"method": "radauIIA5"} | LOOSE),
    "smooth switch": (switch(0.1), 1.0, state(0.3), times(2.0), {"method": "kvaerno5"} | LOOSE),
    "network": (network, 0.3, torch.linspace(-1, 1, 8, dtype=F64), times(3.0, 7), {"method": "kvaerno5"} | LOOSE),
    "network, order 2": (network, 0.3, torch.linspace(-1, 1, 8, dtype=F64), times(3.0, 7), {"method": "trbdf2"} | LOOSE),
    "to rest": (to_rest, 2.0, state(0.0, 0.0), times(30.0), {"method": "kvaerno5"} | LOOSE),
    "on the way to rest": (to_rest, 2.0, state(0.0, 0.0), state(0.0, 1.0, 30.0), {"method": "kvaerno5"} | LOOSE),
    "at rest": (to_rest, 2.0, state(2.0, 2.0), times(30.0), {"method": "kvaerno5"} | LOOSE),
    "forced": (forced, 50.0, state(0.0, 0.5), times(10.0, 11), {"method": "kvaerno5"} | LOOSE),
    "forced, one output": (forced, 500.0, state(0.0, 0.5), times(10.0), {"method": "kvaerno5"} | LOOSE),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_gradient_that_the_grid_spoils_is_told(name):
    *case, options = SPOILT[name]
    with pytest.warns(dil.ConvergenceWarning, match=r"holds their sizes fixed, and may be off by \d+%"):
        error, report = off(*case, **options)
    assert error > 0.1
    assert 0.2 < float(report.grid_error) <= 2.0
    assert "held fixed" in str(report)


@pytest.mark.parametrize("name", RIGHT)
def test_a_gradient_that_is_right_is_not_blamed(name):
    """Warnings are errors here."""
    *case, options = RIGHT[name]
    error, report = off(*case, **options)
    assert error < 0.02
    assert float(report.grid_error) < 0.1


SETTINGS = [("kvaerno5", 1e-3), ("kvaerno5", 1e-6), ("radauIIA5", 1e-6), ("trbdf2", 1e-4)]


@pytest.mark.parametrize(("method", "tolerance"), SETTINGS)
@pytest.mark.parametrize("rate", [10.0, 30.0, 100.0, 1000.0])
@pytest.mark.parametrize("begin", [1.0, 0.0])
def test_what_is_zero_but_for_rounding_at_a_steady_state_is_not_blamed(begin, rate, method, tolerance):
    """There the rate and the start mean nothing any more, and what is left of their gradients is noise."""
    k, c, y0 = (torch.tensor(number, dtype=F64, requires_grad=True) for number in (rate, 2.0, [begin]))
    node = dil.NeuralODE(lambda t, y: -k * (y - c), method=method, rtol=tolerance, atol=tolerance, batch_dims=0)
    found = grad(node(y0, times(1.0))[-1].sum(), (c, k, y0))
    left = (c - y0).detach() * math.exp(-rate)
    for a, expected in zip(found, (1 - math.exp(-rate), left, math.exp(-rate)), strict=True):
        assert float((a - expected).abs()) < tolerance
    assert float(node.report.grid_error) < 0.2


@pytest.mark.parametrize(("method", "tolerance"), SETTINGS)
@pytest.mark.parametrize("rate", [30.0, 300.0])
def test_an_encoder_whose_code_is_forgotten_is_not_blamed(rate, method, tolerance):
    torch.manual_seed(0)
    encoder, net = torch.nn.Linear(3, 4).double(), torch.nn.Linear(4, 4).double()
    node = dil.NeuralODE(lambda t, y: rate * (torch.tanh(net(y)) - y), method=method, rtol=tolerance, atol=tolerance)
    node(encoder(torch.randn(5, 3, dtype=F64)), times(1.0))[-1].square().sum().backward()
    assert float(node.report.grid_error.max()) < 0.1


@pytest.mark.parametrize("unit", [1e-9, 1e9])
def test_a_steady_state_in_other_units_is_not_blamed(unit):
    y0 = torch.zeros(1, dtype=F64, requires_grad=True)
    node = dil.NeuralODE(lambda t, y: -30 * (y - unit), method="kvaerno5", rtol=1e-3, atol=1e-3 * unit, batch_dims=0)
    grad(node(y0, times(1.0))[-1].sum(), y0)
    assert float(node.report.grid_error) < 0.1


@pytest.mark.parametrize("unit", [1e-9, 1.0, 1e9])
def test_a_spoilt_gradient_is_told_in_any_units_and_at_a_zero(unit):
    """The place of a switch, counted from where it is, of a state in other units."""
    shift = torch.zeros((), dtype=F64, requires_grad=True)

    def func(t, y):
        return 0.1 * unit + 0.9 * unit * torch.sigmoid((1 + shift - y / unit) / 1e-4)

    settings = {"method": "kvaerno5", "rtol": 1e-3, "atol": 1e-6 * unit, "batch_dims": 0}
    with pytest.warns(dil.ConvergenceWarning, match="holds their sizes fixed"):
        grad(dil.NeuralODE(func, **settings)(state(0.3 * unit), times(2.0))[-1].sum(), shift)


def test_a_spoilt_gradient_is_told_beside_one_that_is_right():
    place, size = torch.tensor(1.0, dtype=F64, requires_grad=True), torch.tensor(20.0, dtype=F64, requires_grad=True)

    def func(t, y):
        return torch.stack((0.1 + 0.9 * torch.sigmoid((place - y[0]) / 1e-4), -1e3 * (y[1] - size)))

    node = dil.NeuralODE(func, method="kvaerno5", batch_dims=0, **LOOSE)
    with pytest.warns(dil.ConvergenceWarning, match="holds their sizes fixed"):
        grad(node(state(0.3, 0.0), times(2.0))[-1].sum(), (place, size))


@pytest.mark.parametrize("rtol", [1e-3, 1e-4, 1e-5])
def test_the_estimate_follows_the_error(rtol):
    error, report = off(oscillator, 5.0, state(2.0, 0.0), times(8.0, 3), method="kvaerno5", rtol=rtol, atol=rtol)
    assert error / 5 < float(report.grid_error) < 50 * error


def test_the_sample_is_named_and_the_others_are_not():
    def func(t, y):  # each sample has its own width
        return torch.stack((0.1 + 0.9 * torch.sigmoid((1 - y[..., 0]) / y[..., 1]), torch.zeros_like(y[..., 1])), dim=-1)

    y0 = torch.tensor([[0.3, 1.0], [0.3, 1e-4], [0.3, 0.1]], dtype=F64, requires_grad=True)
    node = dil.NeuralODE(func, method="kvaerno5", **LOOSE)
    with pytest.warns(dil.ConvergenceWarning, match=r"\(sample 1\)"):
        node(y0, times(2.0))[-1, :, 0].sum().backward()
    assert (node.report.grid_error > 0.2).tolist() == [False, True, False]


def test_policies():
    y0 = torch.tensor([0.3], dtype=F64, requires_grad=True)

    def run(on_failure):
        node = dil.NeuralODE(switch(1e-4)(1.0), method="kvaerno5", batch_dims=0, on_failure=on_failure, **LOOSE)
        node(y0, times(2.0))[-1].sum().backward()
        return node.report.grid_error

    with pytest.raises(dil.ConvergenceError, match="holds their sizes fixed"):
        run("raise")
    assert float(run("ignore")) > 0.2  # noted all the same


def test_one_grid_for_all_samples_is_looked_at_as_one_system():
    """Rates of each sample in a closure, and a use of t, make the steps common."""
    rates = torch.tensor([[1.0], [2.0]], dtype=F64)
    y0 = torch.tensor([[0.3], [0.3]], dtype=F64, requires_grad=True)
    node = dil.NeuralODE(lambda t, y: rates * (0.1 + 0.9 * torch.sigmoid((1 + 0 * t - y) / 1e-4)), method="kvaerno5", **LOOSE)
    with pytest.warns(dil.ConvergenceWarning, match="holds their sizes fixed"):
        node(y0, times(1.0))[-1].sum().backward()
    assert node.report.grid_error.shape == (2,) and float(node.report.grid_error.min()) > 0.2


def test_fixed_grids_have_none():
    y0 = state(0.3).requires_grad_()
    node = dil.NeuralODE(switch(1e-4)(1.0), method="kvaerno5", batch_dims=0, options={"substeps": 10})
    node(y0, times(2.0))[-1].sum().backward()
    assert node.report.grid_error is None


@pytest.mark.parametrize("width", [0.1, 1e-4])
def test_check_gradient_knows(width):
    """The differences that it makes are on the grid that it holds, and see nothing."""
    node = dil.NeuralODE(switch(width)(1.0), method="kvaerno5", batch_dims=0, **LOOSE)
    check = dil.check_gradient(node, state(0.3), times(2.0))
    assert check.ok == (width == 0.1)
    assert check.blame == ("nothing" if check.ok else "held steps")
    assert ("smooth what switches" in str(check)) != check.ok
