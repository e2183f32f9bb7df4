"""Adaptive steps: the tolerance asked for, stiff or not; exact gradients on the grid that was found; failures that are said."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp
from torch import Tensor

import torchdil as dil
from torchdil.ode import SimplifiedNewton, solve
from torchdil.solution import Status

ADAPTIVE = ("radau5", "kvaerno5", "trbdf2")
# The error at the end in units of atol + rtol |y|: one of the last step for methods with an estimate below their order, a sum
# over the steps for TRBDF2, whose order is that of its estimate.
WITHIN = {"radau5": 3.0, "kvaerno5": 20.0, "trbdf2": 500.0}
GRADIENT = 1e-3
ROUNDING = 1e-12


class Stiff(NamedTuple):
    """dy/dt = f(y; p), with torch or numpy stacking the components."""

    f: Callable[[Any, Any], list[Any]]
    p: list[float]
    y0: list[float]
    times: list[float]

    def torch(self, p: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda t, y: torch.stack(self.f(y.unbind(-1), p), dim=-1)


def robertson(y, p):
    a, b, c = y
    slow, back, fast = p[0] * a, p[1] * b * c, p[2] * b * b
    return [back - slow, slow - back - fast, fast]


def van_der_pol(y, p):
    return [y[1], p[0] * (1 - y[0] ** 2) * y[1] - p[1] * y[0]]


def oregonator(y, p):
    a, b, c = y
    return [p[0] * (b + a * (1 - p[1] * a - b)), (c - (1 + a) * b) / p[0], p[2] * (a - c)]


def hires(y, p):
    a, b, c, d, e, f, g, h = y
    bound = p[5] * f * h
    return [
        -p[0] * a + p[1] * b + p[2] * c + p[3],
        p[0] * a - 8.75 * b,
        -p[4] * c + p[1] * d + 0.035 * e,
        p[2] * b + p[0] * c - 1.12 * d,
        -1.745 * e + p[1] * f + p[1] * g,
        -bound + 0.69 * d + p[0] * e - p[1] * f + 0.69 * g,
        bound - 1.81 * g,
        -bound + 1.81 * g,
    ]


PROBLEMS = {
    "Robertson": Stiff(robertson, [0.04, 1e4, 3e7], [1.0, 0.0, 0.0], [0.0, 10.0, 1e4]),
    "Van der Pol": Stiff(van_der_pol, [1000.0, 1.0], [2.0, 0.0], [0.0, 500.0, 900.0]),
    "Oregonator": Stiff(oregonator, [77.27, 8.375e-6, 0.161], [1.0, 2.0, 3.0], [0.0, 20.0, 50.0]),
    "HIRES": Stiff(hires, [1.71, 0.43, 8.32, 0.0007, 10.03, 280.0], [1.0, *[0.0] * 6, 0.0057], [0.0, 5.0, 321.8122]),
}


# y at the times after the first: SciPy's Radau at rtol 1e-12, atol 1e-17; at 1e-11 and 1e-16 all digits are the same.
EXACT = {
    "Robertson": [
        [8.4136992384e-01, 1.6233909380e-05, 1.5861384225e-01],
        [1.0730042854e-01, 4.8001669726e-07, 8.9269909145e-01],
    ],
    "Van der Pol": [
        [1.5967689511e00, -1.0303911878e-03],
        [-1.9364435448e00, 7.0420886016e-04],
    ],
    "Oregonator": [
        [2.7601542069e01, 9.9273258809e-01, 5.5005359320e00],
        [1.0006886900e00, 1.4530195992e03, 4.1483684347e02],
    ],
    "HIRES": [
        [
            *[3.1651675705e-02, 6.4815495311e-03, 4.5834510647e-03, 8.9743232735e-02],
            *[1.6245145375e-01, 6.8504389614e-01, 5.6467003419e-03, 5.3299658079e-05],
        ],
        [
            *[7.3713125733e-04, 1.4424857263e-04, 5.8887297410e-05, 1.1756513433e-03],
            *[2.3863561988e-03, 6.2389682527e-03, 2.8499983952e-03, 2.8500016048e-03],
        ],
    ],
}


def run(name: str, method: str, rtol: float, p: Tensor | None = None) -> dil.Solution:
    problem = PROBLEMS[name]
    p = torch.tensor(problem.p, dtype=torch.float64) if p is None else p
    y0, t = (torch.tensor(a, dtype=torch.float64) for a in ([problem.y0], problem.times))
    return solve(problem.torch(p), y0, t, method=method, rtol=rtol, atol=1e-4 * rtol, batch_dims=1)


# TRBDF2, of order 2, would take thousands of steps at 1e-5.
STIFF = [("radau5", 1e-3), ("radau5", 1e-5), ("kvaerno5", 1e-3), ("kvaerno5", 1e-5), ("trbdf2", 1e-3), ("trbdf2", 1e-4)]


@pytest.mark.parametrize(("method", "rtol"), STIFF)
@pytest.mark.parametrize("name", PROBLEMS)
def test_stiff_problems_are_solved_to_the_tolerance(name, method, rtol):
    found = run(name, method, rtol)
    assert found.converged.all()
    exact = np.array(EXACT[name])
    error = np.abs(found.value[1:, 0].numpy() - exact) / (1e-4 * rtol + rtol * np.abs(exact))
    assert error.max() < WITHIN[method]


@pytest.mark.parametrize("name", PROBLEMS)
def test_radau_takes_about_as_many_steps_as_that_of_scipy(name):
    problem, rtol = PROBLEMS[name], 1e-5
    theirs = solve_ivp(
        lambda t, y: np.array(problem.f(y, problem.p)), problem.times[::2], problem.y0, "Radau", rtol=rtol, atol=1e-4 * rtol
    )
    found = run(name, "radau5", rtol)
    assert int(found.stats.accepted) < 1.1 * (len(theirs.t) - 1) + 5
    assert found.stats.jacobians < 1.5 * theirs.njev + 5
    assert found.stats.factorisations < 2 * theirs.nlu


# The gradient of Σ y_i / (|y_i| + 1e-6) at the end by each constant: fourth-order differences of SciPy's Radau at rtol 1e-11,
# atol 1e-15, the constants shifted by 1e-3 of themselves (HIRES: 3e-5).
DIFFERENCES = {
    "Robertson": [-31.71219, 0.0001260486, -2.641367e-08],
    "Van der Pol": [-0.001889959, 1.890189],
    "Oregonator": [0.03881797, -237855.8, -35.86417],
    "HIRES": [2869.24, 532.9936, 61.21236, 36186.99, -23.67388, -0.01800817],
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_gradients_by_rate_constants_are_those_of_tight_differences(name):
    p = torch.tensor(PROBLEMS[name].p, dtype=torch.float64, requires_grad=True)
    end = run(name, "radau5", 1e-8, p).value[-1, 0]
    (gradient,) = torch.autograd.grad((end / (end.detach().abs() + 1e-6)).sum(), p)
    expected = torch.tensor(DIFFERENCES[name], dtype=torch.float64)
    assert (gradient - expected).abs().le(GRADIENT * expected.abs()).all()


@pytest.mark.parametrize(
    ("method", "times"),
    [("radau5", (0.0, 4e7)), ("radau5", (0.0, 4e9)), ("trbdf2", (0.0, 2e9, 4e9)), ("kvaerno5", (0.0, 2e9, 4e9))],
)
def test_gradients_of_steps_that_are_long_for_the_fastest_rate(method, times):
    # Late in Robertson's problem dc/dt = p2 (p0 a / p1)² and c = 1, so a = (p1 / p0)² / (p2 t) but for terms of its own size.
    # The rows of the systems differ by h |∂f/∂y|, up to 1e14.
    p = torch.tensor(PROBLEMS["Robertson"].p, dtype=torch.float64, requires_grad=True)
    f, y0 = PROBLEMS["Robertson"].torch(p), at(1, 0, 0)
    settings = {"rtol": 1e-4, "atol": 1e-10, "options": {"max_steps": 100_000}, "on_failure": "raise"}
    for a, t in zip(solve(f, y0, at(*times), method=method, **settings).value[1:, 0], times[1:], strict=True):
        assert 0.9 < a.item() * p[2].item() * t * (p[0] / p[1]).item() ** 2 < 1.1
        (gradient,) = torch.autograd.grad(a.log(), p, retain_graph=True)
        assert (p * gradient - at(-2, 2, -1)).abs().max() < 1e-3 + 100 * a


def swing(t: Tensor, y: Tensor) -> Tensor:
    return torch.stack((y[..., 1], -torch.sin(y[..., 0]) - 0.3 * y[..., 1] + torch.cos(t)), dim=-1)


def start() -> Tensor:
    return torch.tensor([[1.0, 0.0], [-0.5, 1.0], [2.5, -1.0]], dtype=torch.float64)


def at(*times: float) -> Tensor:
    return torch.tensor(times, dtype=torch.float64)


@functools.cache
def tight_swing(*times: float) -> Tensor:
    return solve(swing, start(), at(*times), method="kvaerno5", rtol=1e-9, atol=1e-10, batch_dims=1).value


@pytest.mark.parametrize("method", ADAPTIVE)
def test_each_sample_walks_as_if_it_were_alone(method):
    def kinetics(t: Tensor, y: Tensor) -> Tensor:
        return torch.stack(robertson(y.unbind(-1), (0.04, 1e4, 3e7)), dim=-1)

    y0 = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.5, 1e-3, 0.2]], dtype=torch.float64)
    together = solve(kinetics, y0, at(0, 1, 50), method=method, rtol=1e-5, atol=1e-9, batch_dims=1)
    for b in range(3):
        alone = solve(kinetics, y0[b : b + 1], at(0, 1, 50), method=method, rtol=1e-5, atol=1e-9, batch_dims=1)
        assert int(alone.stats.accepted) == int(together.stats.accepted[b])
        assert int(alone.stats.rejected) == int(together.stats.rejected[b])
        assert (alone.value[:, 0] - together.value[:, b]).abs().max() < ROUNDING
    assert len(set(together.stats.accepted.tolist())) > 1  # or the test shows nothing


@pytest.mark.parametrize("method", ADAPTIVE)
def test_each_sample_has_times_of_its_own(method):
    found = solve(swing, start(), at(0, 1.3, 4), method=method, rtol=1e-7, atol=1e-7, batch_dims=1)
    assert found.converged.all()
    for b in range(3):
        slope = lambda t, y: swing(torch.tensor(t), torch.tensor(y)).numpy()  # noqa: E731
        exact = solve_ivp(slope, (0, 4), start()[b], "DOP853", [1.3, 4], rtol=1e-12, atol=1e-12).y.T
        assert (np.abs(found.value[1:, b].numpy() - exact) / (1 + np.abs(exact))).max() < WITHIN[method] * 1e-7


@pytest.mark.parametrize("method", ADAPTIVE)
def test_time_may_run_backwards(method):
    back = solve(swing, start(), at(4, 1.5, 0), method=method, rtol=1e-5, atol=1e-7, batch_dims=1)
    mirrored = solve(lambda t, y: -swing(4 - t, y), start(), at(0, 2.5, 4), method=method, rtol=1e-5, atol=1e-7, batch_dims=1)
    assert back.converged.all()
    assert (back.value - mirrored.value).abs().max() < 1e-9


@pytest.mark.parametrize("method", ADAPTIVE)
def test_outputs_are_the_same_whether_dense_or_sparse(method):
    dense = torch.linspace(0, 4, 101, dtype=torch.float64)
    many = solve(swing, start(), dense, method=method, rtol=1e-5, atol=1e-8, batch_dims=1)
    few = solve(swing, start(), dense[::20], method=method, rtol=1e-5, atol=1e-8, batch_dims=1)
    assert many.converged.all() and few.converged.all()
    assert (many.stats.accepted == few.stats.accepted).all()
    assert (many.value[::20] - few.value).abs().max() < 1e-9
    assert (many.value - tight_swing(*dense.tolist())).abs().max() < (2e-3 if method == "trbdf2" else 1e-4)


@pytest.mark.parametrize("method", ADAPTIVE)
def test_gradients_are_those_of_the_numbers_returned(method):
    """Tight enough, the discrete gradient and differences of the solution are the same."""
    rate = torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)
    y0 = torch.tensor([[1.0, 0.5], [0.3, -0.2]], dtype=torch.float64, requires_grad=True)
    t = at(0.1, 0.35, 0.6).requires_grad_()

    def f(rate: Tensor, y0: Tensor, t: Tensor) -> Tensor:
        def func(t: Tensor, y: Tensor) -> Tensor:
            return torch.stack((y[..., 1] * rate[0], -torch.sin(y[..., 0]) * rate[1] + t * y[..., 0]), dim=-1)

        rtol = {"trbdf2": 1e-7, "radau5": 1e-9, "kvaerno5": 1e-10}[method]
        return dil.odeint(func, y0, t, method=method, rtol=rtol, atol=rtol, batch_dims=1)

    tolerance = 1e-5 if method == "trbdf2" else 1e-7
    # Every entry of the Jacobian for one method, random combinations of all entries for the others.
    fast = method != "radau5"
    assert torch.autograd.gradcheck(f, (rate, y0, t), eps=1e-4, atol=tolerance, rtol=tolerance, fast_mode=fast)


def test_gradients_are_those_of_a_fixed_grid_of_the_same_steps():
    rate = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)

    def func(t: Tensor, y: Tensor) -> Tensor:
        return -rate * y**3 + torch.sin(t)

    y0 = torch.ones(1, 1, dtype=torch.float64)
    found = dil.odeint(func, y0, at(0, 2), method="radau5", rtol=1e-6, atol=1e-6)
    (gradient,) = torch.autograd.grad(found[-1].sum(), rate)
    from torchdil.ode.adaptive import Tolerances, Walk
    from torchdil.ode.equation import Equation, Options
    from torchdil.ode.methods import method_of

    equation = Equation.of(func, y0, at(0, 2), 0)
    tolerances = Tolerances.of(1e-6, 1e-6, torch.float64)
    with torch.no_grad():
        walk = Walk(equation, method_of("radau5"), equation.field(True), tolerances, Options(), SimplifiedNewton(), False)
        walk.run()
        ends, _ = walk.path()
    grid = torch.cat((at(0), ends[0]))
    fixed = dil.odeint(func, y0, grid, method="radau5")
    (expected,) = torch.autograd.grad(fixed[-1].sum(), rate)
    # Newton's iteration leaves a thousandth of the tolerance a step.
    left = 1e-3 * 1e-6 * len(ends[0])
    assert (found[-1] - fixed[-1]).abs().max() < left
    assert abs(float(gradient - expected)) < 10 * left * abs(float(expected))


def test_second_derivatives_work():
    rate = torch.tensor([0.7], dtype=torch.float64, requires_grad=True)

    def f(rate: Tensor) -> Tensor:
        y0 = torch.ones(1, 1, dtype=torch.float64)
        return dil.odeint(lambda t, y: -rate * y**2, y0, at(0, 0.5, 1), method="kvaerno5", rtol=1e-11, atol=1e-12)[1:]

    value = f(rate)
    for n, t in enumerate((0.5, 1.0)):  # y = 1 / (1 + rate t)
        (first,) = torch.autograd.grad(value[n].sum(), rate, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), rate, retain_graph=True)
        assert abs(first.item() + t / (1 + 0.7 * t) ** 2) < 1e-8
        assert abs(second.item() - 2 * t**2 / (1 + 0.7 * t) ** 3) < 1e-7


def test_a_function_that_cannot_have_times_of_its_own_takes_common_steps():
    rates = torch.tensor([[1.0], [50.0], [3.0]], dtype=torch.float64, requires_grad=True)

    def func(t: Tensor, y: Tensor) -> Tensor:
        return -rates * (y - torch.cos(t))  # rates belong to the samples, and t is used

    y0 = torch.zeros(3, 1, dtype=torch.float64)
    found = solve(func, y0, at(0, 1, 2), method="kvaerno5", rtol=1e-8, atol=1e-10, batch_dims=1)
    assert found.converged.all()
    assert len(set(found.stats.accepted.tolist())) == 1
    r, t = rates.detach()[:, 0], 2.0
    exact = (r**2 * np.cos(t) + r * np.sin(t) - r**2 * torch.exp(-r * t)) / (r**2 + 1)
    assert (found.value[-1, :, 0] - exact).abs().max() < 1e-7
    (gradient,) = torch.autograd.grad(found.value[-1].sum(), rates)
    assert torch.isfinite(gradient).all() and (gradient != 0).all()


@pytest.mark.parametrize("jacobian", ["full", "krylov", "diagonal", "identity"])
@pytest.mark.parametrize("method", ADAPTIVE)
def test_every_jacobian_serves_where_it_can(method, jacobian):
    solver = SimplifiedNewton(jacobian=jacobian)
    found = solve(swing, start(), at(0, 0.7), method=method, rtol=1e-6, atol=1e-8, batch_dims=1, solver=solver)
    assert found.converged.all()
    assert (found.value - tight_swing(0, 0.7)).abs().max() < 1e-4


def test_float32_gets_what_it_has_digits_for():
    t = torch.tensor([0.0, 0.7])
    found = solve(swing, start().float(), t, method="kvaerno5", rtol=1e-12, atol=1e-7, batch_dims=1)
    assert found.converged.all() and found.value.dtype == torch.float32
    assert (found.value - tight_swing(0, 0.7)).abs().max() < 1e-4


@pytest.mark.parametrize("method", ADAPTIVE)
def test_a_sample_that_leaves_the_domain_of_f_fails_alone(method):
    def root(t: Tensor, y: Tensor) -> Tensor:
        return -torch.sqrt(y - 0.05) - 0.5

    y0 = torch.tensor([[4.0], [0.09], [1.0]], dtype=torch.float64)
    found = solve(root, y0, at(0, 0.2, 0.4), method=method, rtol=1e-5, atol=1e-7, batch_dims=1, on_failure="ignore")
    assert found.status.tolist() == [0, int(Status.non_finite), 0]
    assert torch.isfinite(found.value).all()
    alone = solve(root, y0[::2], at(0, 0.2, 0.4), method=method, rtol=1e-5, atol=1e-7, batch_dims=1)
    assert (found.value[:, ::2] - alone.value).abs().max() < ROUNDING


def test_a_value_that_is_none_at_the_start_is_said():
    y0 = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)
    found = solve(lambda t, y: -torch.sqrt(y), y0, at(0, 0.1), method="kvaerno5", batch_dims=1, on_failure="ignore")
    assert found.status.tolist() == [0, int(Status.non_finite)]


def test_a_solution_that_ends_is_said():
    y0 = torch.tensor([[1.0], [-1.0]], dtype=torch.float64)  # 1 / (1 - t) and 1 / (-1 - t)
    with pytest.warns(dil.ConvergenceWarning, match="adaptive RadauIIA"):
        found = solve(lambda t, y: y * y, y0, at(0, 0.5, 2), method="radau5", rtol=1e-6, atol=1e-8, batch_dims=1)
    assert found.status[0] in (Status.stagnated, Status.non_finite) and found.status[1] == Status.converged
    assert abs(found.value[1, 0].item() - 2) < 1e-4
    assert abs(found.value[2, 1].item() + 1 / 3) < 1e-5


def test_too_many_steps_are_said():
    found = solve(
        swing, start(), at(0, 100), method="trbdf2", rtol=1e-8, batch_dims=1, options={"max_steps": 20}, on_failure="ignore"
    )
    assert found.status.tolist() == [int(Status.max_steps)] * 3
    assert (found.stats.steps == 20).all()
    assert (found.stats.accepted + found.stats.rejected == found.stats.steps).all()


def test_the_choice_between_a_grid_and_adaptive_steps():
    def method_of(**settings: Any) -> str:
        return solve(swing, start(), at(0, 0.1, 0.2), batch_dims=1, **settings).stats.method

    assert "adaptive Kvaerno5" in method_of(method="kvaerno5")
    assert "adaptive TRBDF2" in method_of(method="trbdf2", rtol=1e-4)
    assert "adaptive" not in method_of(method="trbdf2")
    assert "adaptive" not in method_of(method="kvaerno5", rtol=1e-4, options={"substeps": 2})
    with pytest.warns(UserWarning, match="rtol and atol are not used"):
        assert "adaptive" not in method_of(method="backward_euler", rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rtol": -1.0}, "rtol must be a finite number >= 0"),
        ({"atol": float("nan")}, "atol must be a finite number >= 0"),
        ({"rtol": 0, "atol": 0}, "must not both be 0"),
        ({"rtol": 1e-3, "solver": dil.Picard()}, "solver must be a SimplifiedNewton"),
    ],
)
def test_what_cannot_work_gets_its_sentence(settings, words):
    with pytest.raises((ValueError, TypeError), match=words):
        dil.odeint(swing, start(), at(0, 1), method="radau5", batch_dims=1, **settings)
