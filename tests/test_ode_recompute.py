"""options["checkpoint"] of odeint: the same gradient from less memory."""

import warnings
from itertools import accumulate

import pytest
import torch

from torchdil import Newton
from torchdil.ode import odeint, solve
from torchdil.solution import ConvergenceError, ConvergenceWarning, Status

RTOL = 1e-10
TIGHT = Newton(rtol=1e-13)  # two solves of the same steps, in other portions, may differ by the tolerance


def relative(a, b):
    return float((a - b).detach().norm() / b.detach().norm())


class Network(torch.nn.Module):
    """Parameters that are used twice, in an equation that looks at t."""

    def __init__(self, hidden=6):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Linear(2, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 2)).double()

    def forward(self, t, y):
        return self.net(y) * torch.cos(t) + 0.5 * self.net(-y)


FUNC = Network()


def problem():
    torch.manual_seed(1)
    y0 = torch.randn(3, 2, dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.0, 0.3, 1.0, 1.1], dtype=torch.float64, requires_grad=True)
    return y0, t, torch.randn(4, 3, 2, dtype=torch.float64)


@pytest.mark.parametrize(
    "method, options, pieces",
    [
        ("backward_euler", {}, True),
        ("backward_euler", {"substeps": 5}, True),
        ("backward_euler", {"step_size": 0.06}, 4),
        ("backward_euler", {"substeps": 5}, 1),
        ("trapezoid", {"step_size": 0.06}, 1000),
        ("gl4", {"substeps": 5}, 4),
        ("gl4", {}, 1000),
        ("rk4", {"substeps": 5}, True),
    ],
    ids=str,
)
def test_the_states_and_their_gradient_are_those_without(method, options, pieces):
    y0, t, weights = problem()
    found = []
    for more in ({}, {"checkpoint": pieces}):
        y = odeint(FUNC, y0, t, method=method, batch_dims=1, options=options | more, solver=TIGHT)
        found.append((y, *torch.autograd.grad((weights * y).sum(), (y0, t, *FUNC.parameters()))))
    for a, b in zip(*found, strict=True):
        assert relative(a, b) < RTOL


def test_the_default_solver_gives_the_same_to_its_tolerance():
    y0, t, weights = problem()
    plain, pieces = (
        torch.autograd.grad((weights * odeint(FUNC, y0, t, batch_dims=1, options={"substeps": 9} | more)).sum(), (y0, t))
        for more in ({}, {"checkpoint": True})
    )
    for a, b in zip(pieces, plain, strict=True):
        assert relative(a, b) < 10 * RTOL


def test_the_second_derivative_is_the_one_without():
    y0, t, weights = problem()
    found = []
    for more in ({}, {"checkpoint": 3}):
        y = odeint(FUNC, y0, t, method="trapezoid", batch_dims=1, options={"substeps": 3} | more, solver=TIGHT)
        tensors = (y0, t, *FUNC.parameters())
        first = torch.autograd.grad((weights * y**2).sum(), tensors, create_graph=True)
        total = sum((g**2).sum() for g in first)
        found.append((*first, *torch.autograd.grad(total, tensors)))
    for a, b in zip(*found, strict=True):
        assert relative(a, b) < RTOL


def test_first_and_second_derivatives_are_those_of_finite_differences():
    w = torch.tensor(0.8, dtype=torch.float64, requires_grad=True)
    y0 = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.0, 0.5], dtype=torch.float64)

    def final(w, y0):
        func = lambda t, y: torch.tanh(w * y) + t  # noqa: E731
        return odeint(func, y0, t, options={"substeps": 3, "checkpoint": 2}, solver=TIGHT)[1:]

    assert torch.autograd.gradcheck(final, (w, y0))
    assert torch.autograd.gradgradcheck(final, (w, y0))


def test_backward_adds_up_in_the_parameters_and_twice_if_retained():
    y0, t, _ = problem()
    y = odeint(FUNC, y0, t, batch_dims=1, options={"substeps": 4, "checkpoint": True})
    wanted = torch.autograd.grad(y.square().sum(), list(FUNC.parameters()), retain_graph=True)
    for _ in range(2):
        y.square().sum().backward(retain_graph=True)
    for parameter, once in zip(FUNC.parameters(), wanted, strict=True):
        assert relative(parameter.grad, 2 * once) < RTOL
    FUNC.zero_grad()


def test_a_nested_state_and_tensors_made_from_one_another_have_their_gradients():
    w = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    twice = 2 * w
    x0 = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    z0 = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    t = torch.linspace(1, 0, 3, dtype=torch.float64)

    def func(t, state):
        x, (z,) = state
        return torch.sin(w * x) + twice * z + z0, (torch.cos(z) * x.sum(),)

    for create_graph in (False, True):
        found = []
        for more in ({}, {"checkpoint": 2}):
            x, (z,) = odeint(func, (x0, (z0,)), t, options={"substeps": 3} | more, solver=TIGHT)
            total = x.square().sum() + z.square().sum()
            tensors = (x0, z0, w, twice)
            found.append(torch.autograd.grad(total, tensors, create_graph=create_graph, retain_graph=True))
        for a, b in zip(*found, strict=True):
            assert relative(a, b) < RTOL


WIDE = Network(hidden=30)


def bytes_of(steps, more):
    """What is held between the passes, and the most that is held in the backward pass, from torch's record of allocations."""
    torch.manual_seed(2)
    y0 = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.0, 1.0], dtype=torch.float64)

    def forward():
        return odeint(WIDE, y0, t, batch_dims=1, options={"substeps": steps} | more)

    def backward(y):
        return torch.autograd.grad(y.square().sum(), (y0, *WIDE.parameters()))

    backward(forward())  # what is kept for later calls is made here
    with recorded() as first:
        y = forward()
    with recorded() as second:
        backward(y)
    held = sum(changes(first))
    return held, max(accumulate(changes(second), initial=held))


def recorded():
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True, acc_events=True)


def changes(profile):
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def test_less_is_held_and_it_grows_with_the_root_of_the_steps():
    plain_held, plain_peak = bytes_of(144, {})
    held, peak = bytes_of(144, {"checkpoint": True})
    assert held < plain_held / (50 if torch.get_default_device().type == "cpu" else 25)  # a GPU holds no less than 512 bytes
    assert peak < plain_peak / 5
    # Four times as many steps: about twice the memory, where all of the graph would be four times as much.
    assert bytes_of(576, {"checkpoint": True})[1] < 2.5 * peak


# Failures


def stops(t, y):
    """y' = y² + c: backward Euler has no next state once y is large."""
    return torch.stack((y[..., 0] ** 2 + y[..., 1], 0 * y[..., 1]), dim=-1)


def run(starts, on_failure):
    y0 = torch.tensor(starts, dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.0, 1.0], dtype=torch.float64)
    options = {"substeps": 9, "checkpoint": 3}
    solution = solve(stops, y0, t, batch_dims=1, options=options, on_failure=on_failure)
    return *torch.autograd.grad(solution.value[-1, -1, 0], y0), solution


def test_a_sample_that_fails_in_one_piece_is_reported_once_and_leaves_the_others_alone():
    good, bad = [0.1, 0.5], [1.0, 20.0]
    with pytest.warns(ConvergenceWarning) as said:
        run([bad, good], "warn")
    assert sum("The forward solve" in str(one.message) for one in said) == 1
    with pytest.raises(ConvergenceError, match="failed for 1 of 2 samples"):
        run([bad, good], "raise")
    alone, _ = run([good], "raise")
    for policy, value in (("zero", 0.0), ("nan", float("nan"))):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            grad, solution = run([bad, good], policy)
        assert solution.converged.tolist() == [False, True]
        assert relative(grad[1], alone[0]) < 10 * RTOL
        assert grad[0].tolist() == pytest.approx([value, value], nan_ok=True)


def test_the_report_counts_all_pieces():
    y0, t, _ = problem()
    solution = solve(FUNC, y0, t, batch_dims=1, options={"substeps": 4, "checkpoint": 3})
    assert solution.status.shape == (3,) and bool((solution.stats.steps >= 3).all())
    assert solution.report.backward is None
    solution.value.sum().backward()
    assert solution.report.backward.status.tolist() == [Status.converged] * 3
    FUNC.zero_grad()


def test_what_checkpointing_cannot_do_gets_its_sentence():
    y0, t, _ = problem()
    with pytest.raises(ValueError, match="checkpoint is for gradient=\"ift\", got gradient='adjoint'"):
        odeint(FUNC, y0, t, gradient="adjoint", options={"checkpoint": True})
    with pytest.raises(RuntimeError, match=r'options\["checkpoint"\] cannot be used in forward mode or torch.func'):
        torch.func.grad(lambda y0: odeint(lambda t, y: -y, y0, t.detach(), options={"checkpoint": True}).sum())(y0.detach())


def test_nothing_is_recorded_where_nothing_asks_for_a_gradient():
    y0, t, _ = problem()
    with torch.no_grad():
        assert not odeint(FUNC, y0, t, batch_dims=1, options={"checkpoint": True}).requires_grad
    y = odeint(lambda t, y: -y, y0.detach(), t.detach(), batch_dims=1, options={"checkpoint": True})
    assert not y.requires_grad
