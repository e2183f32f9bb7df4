"""Step by step on a fixed grid: every way to solve a step finds the same trajectory, and says so where it finds none."""

import functools

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

import torchdil as dil
from torchdil.ode import SimplifiedNewton, newton, solve, step
from torchdil.ode.whole import WholeTrajectory
from torchdil.solution import Status

SAME = 1e-9
EXACT = 1e-12

IMPLICIT = ("backward_euler", "implicit_midpoint", "trapezoid", "trbdf2", "sdirk2", "gl4", "radau3", "radau5", "kvaerno5")
GRID = {"substeps": 1}


def swing(t: Tensor, y: Tensor) -> Tensor:
    """A driven, damped pendulum: nonlinear, and t matters."""
    return torch.stack((y[..., 1], -torch.sin(y[..., 0]) - 0.3 * y[..., 1] + torch.cos(t)), dim=-1)


def start() -> Tensor:
    return torch.tensor([[1.0, 0.0], [-0.5, 1.0], [2.5, -1.0]], dtype=torch.float64)


def times(end: float = 2.0, steps: int = 20) -> Tensor:
    return torch.linspace(0, end, steps + 1, dtype=torch.float64)


@functools.cache
def whole(method: str) -> Tensor:
    found = solve(swing, start(), times(), method=method, batch_dims=1, solver=WholeTrajectory(), options=GRID)
    assert found.converged.all() and "step by step" not in found.stats.method
    return found.value


def foreign(residual, y: Tensor) -> Tensor:
    for _ in range(200):
        y = y - residual(y).detach()
    return y


SOLVERS = {
    "default": SimplifiedNewton(),
    "full": SimplifiedNewton(jacobian="full"),
    "krylov": SimplifiedNewton(jacobian="krylov"),
    "diagonal": SimplifiedNewton(jacobian="diagonal"),
    "identity": SimplifiedNewton(jacobian="identity"),
    "Picard": dil.Picard(),
    "Anderson": dil.Anderson(),
    "Broyden": dil.Broyden(),
    "Newton": dil.Newton(),
    "Newton, NormalCG": dil.Newton(linear_solver=dil.NormalCG()),
    "SciPy": dil.SciPy(),
    "callable": foreign,
}


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_every_inner_solver_finds_the_trajectory_of_backward_euler(solver):
    found = solve(swing, start(), times(), method="backward_euler", batch_dims=1, solver=solver)
    assert found.converged.all()
    assert found.stats.method.startswith("step by step")
    assert (found.value - whole("backward_euler")).abs().max() < SAME


@pytest.mark.parametrize("jacobian", ["full", "krylov", "diagonal", "identity"])
@pytest.mark.parametrize("method", IMPLICIT)
def test_every_method_finds_its_trajectory_with_every_jacobian(method, jacobian):
    solver = SimplifiedNewton(jacobian=jacobian)
    found = solve(swing, start(), times(), method=method, batch_dims=1, solver=solver, options=GRID)
    assert found.converged.all()
    assert (found.value - whole(method)).abs().max() < SAME


def test_backward_euler_is_what_scipy_finds_step_by_step():
    found = solve(swing, start(), times(), method="backward_euler", batch_dims=1, solver=SimplifiedNewton())
    t, y = times().numpy(), start()[2].numpy()
    for n in range(20):
        h, end = t[n + 1] - t[n], torch.tensor(t[n + 1])
        y = scipy.optimize.fsolve(lambda z, y=y, h=h, end=end: z - y - h * swing(end, torch.tensor(z)).numpy(), y, xtol=1e-13)
    assert np.abs(found.value[-1, 2].numpy() - y).max() < SAME


def test_the_classical_method_is_four_evaluations_a_step():
    found = solve(swing, start(), times(), method="rk4", batch_dims=1)
    y, grid = start(), times()
    for n in range(20):
        t, h = grid[n], grid[n + 1] - grid[n]
        k1 = swing(t, y)
        k2 = swing(t + h / 2, y + h / 2 * k1)
        k3 = swing(t + h / 2, y + h / 2 * k2)
        y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + swing(t + h, y + h * k3))
    assert found.converged.all()
    assert (found.value[-1] - y).abs().max() < EXACT


@pytest.mark.parametrize("method", ["backward_euler", "trbdf2", "radau5"])
def test_the_way_back_uses_the_same_steps(method):
    back = solve(swing, start(), times().flip(0), method=method, batch_dims=1, solver=SimplifiedNewton(), options=GRID)
    mirrored = solve(
        lambda t, y: -swing(2.0 - t, y), start(), times(), method=method, batch_dims=1, solver=SimplifiedNewton(), options=GRID
    )
    assert back.converged.all()
    assert (back.value - mirrored.value).abs().max() < SAME


def test_steps_of_different_sizes_are_solved_too():
    t = torch.tensor([0.0, 0.01, 0.1, 0.5, 0.55, 1.5], dtype=torch.float64)
    for method in ("backward_euler", "kvaerno5", "gl6"):
        options = {"substeps": 2}
        found = solve(swing, start(), t, method=method, batch_dims=1, solver=SimplifiedNewton(), options=options)
        other = solve(swing, start(), t, method=method, batch_dims=1, solver=dil.Newton(), options=options)
        assert found.converged.all()
        assert (found.value - other.value).abs().max() < SAME


def test_a_smooth_step_costs_little_more_than_one_evaluation():
    torch.manual_seed(0)
    f = torch.nn.Sequential(torch.nn.Linear(2, 30), torch.nn.Tanh(), torch.nn.Linear(30, 2))
    y0, t = torch.randn(8, 2), torch.linspace(0, 5, 101)
    found = solve(lambda t, y: f(y), y0, t, method="backward_euler", batch_dims=1, solver=SimplifiedNewton())
    assert found.converged.all()
    assert found.stats.products < 250


def saturating(t: Tensor, y: Tensor) -> Tensor:
    """Newton's iteration for a long step overshoots from side to side."""
    return -100 * torch.atan(20 * y)


def test_a_step_that_newton_overshoots_is_solved_by_damping():
    y0 = torch.tensor([[3.0], [0.001]], dtype=torch.float64)
    found = solve(saturating, y0, times(1.0, 5), method="backward_euler", batch_dims=1, solver=SimplifiedNewton())
    assert found.converged.all()
    assert "then Newton" in found.stats.method
    y, h = y0[0, 0].item(), 0.2
    for n in range(5):
        y = scipy.optimize.brentq(lambda z, y=y: z - y + h * 100 * np.arctan(20 * z), -5, 5, xtol=1e-15)
        assert abs(found.value[n + 1, 0, 0].item() - y) < SAME


def test_a_step_without_a_solution_fails_for_its_sample_only():
    y0 = torch.tensor([[0.5], [3.0], [-1.0]], dtype=torch.float64)  # y = y0 + h y² needs 4 h y0 <= 1

    def explode(t: Tensor, y: Tensor) -> Tensor:
        return y * y

    found = solve(
        explode, y0, times(0.5, 5), method="backward_euler", batch_dims=1, solver=SimplifiedNewton(), on_failure="ignore"
    )
    assert found.status[1] in (Status.max_steps, Status.stagnated)
    assert found.converged.tolist() == [True, False, True]
    assert (found.value[:, 1] == 3.0).all()  # stays where it was
    alone = solve(explode, y0[::2], times(0.5, 5), method="backward_euler", batch_dims=1, solver=SimplifiedNewton())
    assert (found.value[:, ::2] - alone.value).abs().max() < EXACT


@pytest.mark.parametrize("method", ["backward_euler", "trbdf2", "radau5", "rk4"])
def test_a_sample_without_a_value_fails_alone(method):
    y0 = torch.tensor([[4.0], [0.09], [1.0]], dtype=torch.float64)

    def root(t: Tensor, y: Tensor) -> Tensor:
        return -torch.sqrt(y - 0.05) - 0.5

    solver = None if method == "rk4" else SimplifiedNewton()
    found = solve(root, y0, times(0.4, 8), method=method, batch_dims=1, solver=solver, options=GRID, on_failure="ignore")
    assert found.status.tolist() == [0, int(Status.non_finite), 0]
    alone = solve(root, y0[::2], times(0.4, 8), method=method, batch_dims=1, solver=solver, options=GRID)
    assert (found.value[:, ::2] - alone.value).abs().max() < EXACT


def test_a_hard_sample_changes_nothing_for_the_others():
    def stiff(t: Tensor, y: Tensor) -> Tensor:
        a, b = y[..., 0], y[..., 1]
        return torch.stack((b, 100 * (1 - a * a) * b - a), dim=-1)  # Van der Pol

    y0 = torch.tensor([[0.1, 0.0], [2.0, 0.0], [2.0, 5.0]], dtype=torch.float64)
    t = times(2.0, 40)
    found = solve(stiff, y0, t, method="sdirk2", batch_dims=1, solver=SimplifiedNewton())
    assert found.converged.all()
    for b in range(3):
        alone = solve(stiff, y0[b : b + 1], t, method="sdirk2", batch_dims=1, solver=SimplifiedNewton())
        assert (found.value[:, b] - alone.value[:, 0]).abs().max() < EXACT * found.value.abs().max()


class Counted:
    """Counts the Jacobians that are formed."""

    def __init__(self, monkeypatch):
        self.calls, real = 0, step.jacobian

        def jacobian(*arguments):
            self.calls += 1
            return real(*arguments)

        monkeypatch.setattr(step, "jacobian", jacobian)


@pytest.mark.parametrize("method", ["backward_euler", "radau5"])
def test_no_matrices_are_formed_for_a_batch_that_needs_few_products(method, monkeypatch):
    y0 = torch.randn(32, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    W = torch.randn(200, 200, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 200**0.5

    def f(t: Tensor, y: Tensor) -> Tensor:
        return torch.tanh(y @ W.to(y.device)) - y

    counted = Counted(monkeypatch)
    full = solve(f, y0, times(0.5, 3), method=method, batch_dims=1, solver=SimplifiedNewton(jacobian="full"), options=GRID)
    formed = counted.calls
    found = solve(f, y0, times(0.5, 3), method=method, batch_dims=1, solver=SimplifiedNewton(), options=GRID)
    assert found.converged.all() and formed
    assert (counted.calls == formed) == (not found.value.is_cuda)
    assert (found.value - full.value).abs().max() < SAME


@pytest.mark.parametrize("method", ["backward_euler", "trbdf2", "radau5"])
def test_matrices_are_formed_where_a_batch_turns_stiff(method, monkeypatch):
    monkeypatch.setattr(newton, "_DEAR", 1e4)
    monkeypatch.setattr(newton, "_UNKNOWNS", 6)
    y0 = torch.rand(16, 60, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def f(t: Tensor, y: Tensor) -> Tensor:  # diffusion that sets in
        padded = torch.nn.functional.pad(y, (1, 1))
        second = padded[..., 2:] - 2 * y + padded[..., :-2]
        return 1e3 * (t - 1).clamp(min=0) * second - y**3

    settings = {"method": method, "batch_dims": 1, "options": GRID}
    full = solve(f, y0, times(2.0, 8), solver=SimplifiedNewton(jacobian="full"), **settings)
    counted = Counted(monkeypatch)
    for end, steps, formed in ((1.0, 4, y0.is_cuda), (2.0, 8, True)):
        found = solve(f, y0, times(end, steps), solver=SimplifiedNewton(), **settings)
        assert found.converged.all() and bool(counted.calls) == formed
        assert (found.value - full.value[: steps + 1]).abs().max() < SAME
    assert (found.stats.steps >= 8).all()


@pytest.mark.parametrize(
    ("samples", "unknowns", "tried"), [(1, 500, 0), (1, 600, 0), (64, 50, 0), (32, 200, 6), (32, 384, 12), (32, 600, 20)]
)
def test_which_shapes_are_tried_without_matrices(samples, unknowns, tried):
    assert newton.fits(samples, unknowns)
    assert newton.worth_a_try(samples, unknowns) == tried


def test_fixed_point_iteration_says_that_it_cannot_do_stiff_equations():
    solver = SimplifiedNewton(jacobian="identity")
    y0 = torch.ones(1, 1, dtype=torch.float64)
    found = solve(lambda t, y: -100 * y, y0, times(1.0, 10), method="backward_euler", solver=solver, on_failure="ignore")
    assert not found.converged.any()
    with pytest.warns(dil.ConvergenceWarning, match="step by step, SimplifiedNewton"):
        solve(lambda t, y: -100 * y, y0, times(1.0, 10), method="backward_euler", solver=solver)


def test_float32_and_a_single_system_work():
    y0 = torch.tensor([1.0, 0.0])
    found = solve(swing, y0, torch.linspace(0, 2, 21), method="backward_euler", solver=SimplifiedNewton())
    assert found.value.dtype == torch.float32 and found.value.shape == (21, 2)
    assert bool(found.converged)
    assert (found.value - whole("backward_euler")[:, 0]).abs().max() < 1e-4


def test_a_table_shows_the_steps(capsys):
    from torchdil.ode.equation import Equation
    from torchdil.ode.march import Marching
    from torchdil.ode.methods import method_of
    from torchdil.ode.trajectory import Trajectory
    from torchdil.problem import Problem

    equation = Equation.of(swing, start(), times(), 1)
    statement = Trajectory(method_of("backward_euler"), equation.layout, equation.field(), 20)
    args = (start(), times())
    problem = Problem("ode", False, lambda y: statement.residual(swing, y, args), bound=(swing, args))
    y0 = start().repeat(1, 20)
    result = Marching(statement=statement, verbose=True).solve(problem, y0, torch.ones(3, dtype=torch.float64))
    assert (problem.residual(result.value).norm(dim=1) < SAME).all()
    shown = capsys.readouterr().out
    assert "Marching: ode, 3 samples" in shown and "converged 3" in shown


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"rtol": -1.0}, "rtol"), ({"max_steps": 0}, "max_steps"), ({"jacobian": "half"}, "jacobian")],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        SimplifiedNewton(**settings)
