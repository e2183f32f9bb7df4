"""Step by step, through the iterations of the solver, every operation recorded by autograd: slow, for tests.

A step solves F(Y) = 0 (`torchdil.ode.trajectory`) by Newton's method with J in the graph, until ‖F‖ is small and twice more:
the first derivative of an iterate is as good as the iterate before it, the second as the one before that. Explicit methods need
no solver. A sample that is not finite spoils the gradient of the tensors it shares with others, whatever the policy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.live import TimeTable, asked, showing
from torchdil.modes import full_precision, observed_by, transforms_active
from torchdil.ode.equation import Equation, Grid
from torchdil.ode.methods import Method
from torchdil.ode.newton import OdeSolver
from torchdil.ode.outcomes import together
from torchdil.ode.trajectory import Trajectory
from torchdil.problem import Problem
from torchdil.solution import Outcome, Report, Result, Stats, Status, handle_failure, mask_failed, tally
from torchdil.solvers import LBFGS, Anderson, Broyden, GradientDescent, Newton, Picard
from torchdil.solvers.base import Solver

# The solvers whose iterations leave a graph; Newton's method is written here.
_UNROLLED = (Newton, Picard, Anderson, Broyden, GradientDescent, LBFGS)
# Steps of Newton's method after the tolerance.
_FURTHER = 2


def unrolled_grid(
    equation: Equation, method: Method, grid: Grid, solver: OdeSolver | None, on_failure: str, report: Report
) -> Tensor:
    """The states at the outputs, (B, T, D), with the graph of the steps that led there."""
    if transforms_active():
        raise RuntimeError('gradient="backprop" cannot be used inside torch.func transforms: use gradient="ift".')
    solver = Newton() if solver is None else solver
    if not isinstance(solver, _UNROLLED):
        names = ", ".join(kind.__name__ for kind in _UNROLLED)
        raise TypeError(f'solver must be one of {names} with gradient="backprop", got {solver!r}.')
    statement = Trajectory(method, equation.layout, equation.field(), 1)
    step = _explicit if method.explicit else _implicit
    states, outcomes, last = [equation.start], list[Outcome](), len(grid.times) - 2
    table = TimeTable("backprop: ode", "‖F‖, worst") if asked() else None
    with full_precision(equation.start), observed_by(None), showing(False if table is not None else None):
        for n in range(last + 1):
            rows, outcome = step(statement, equation, states[-1], grid.times[n : n + 2], solver)
            states.append(rows[:, -1])
            outcomes.append(outcome)
            if table is not None:
                size = (grid.times[n + 1] - grid.times[n]).abs()
                table.row(n + 1, grid.times[n + 1], size, outcome.converged, outcome.stats.residual, last=n == last)
        if table is not None:
            table.close(tally(together(outcomes).status))
    report.forward = report.outcome(*together(outcomes))
    failed = handle_failure("forward", report.forward, on_failure, report).reshape(-1)
    ends = range(len(states) - 1) if grid.ends is None else grid.ends
    found = torch.stack([states[0], *(states[end + 1] for end in ends)], dim=1)
    if found.requires_grad and on_failure in ("zero", "nan"):
        found.register_hook(lambda v: mask_failed(v, failed, on_failure))
    return found


def _explicit(statement: Trajectory, equation: Equation, y: Tensor, times: Tensor, _: Solver) -> tuple[Tensor, Outcome]:
    """One step of an explicit method: its rows (B, m, D)."""
    rows, c = statement.method.tensors(y)
    h = times.diff().to(y.dtype)
    found: list[Tensor] = []
    slopes: list[Tensor] = []
    for i, row in enumerate(rows):
        found.append(y + h * sum((a * k for a, k in zip(row, slopes, strict=False)), torch.zeros_like(y)))
        if i < len(c):
            slopes.append(statement.field(equation.func, times[:1].to(y.dtype) + h * c[i], found[-1].unsqueeze(1)).squeeze(1))
    zeros = torch.zeros_like(y[:, 0]).detach()
    status = torch.where(batch.finite(found[-1]), int(Status.converged), int(Status.non_finite))
    return torch.stack(found, dim=1), Outcome(status, Stats("explicit", torch.ones_like(status), zeros, zeros, len(c)))


def _implicit(statement: Trajectory, equation: Equation, y: Tensor, times: Tensor, solver: Solver) -> tuple[Tensor, Outcome]:
    """One step of an implicit method: its rows (B, m, D)."""
    args = (equation.layout.unravel(y), times)

    def residual(u: Tensor) -> Tensor:
        return statement.residual(equation.func, u, args)

    start = y.repeat(1, len(statement.method.rows))
    rtol = solver.accuracy(y.dtype)
    if isinstance(solver, Newton):
        value, status, stats = _newton(residual, start, solver, rtol)
    else:
        problem = Problem(statement.name, False, residual, layout=statement.layout, bound=(equation.func, args))
        problem.unrolled = torch.is_grad_enabled()
        value, status, stats = solver.solve(problem, start, (rtol * batch.norm(start.detach())).clamp_min(solver.atol))
        stats = replace(stats, residual=stats.residual.detach(), history=[])
    return value.unflatten(1, (len(statement.method.rows), -1)), Outcome(status, stats)


def _newton(residual: Any, start: Tensor, solver: Newton, rtol: float) -> Result:
    """Newton's method, in the graph if grad is enabled."""
    y, recorded = start, torch.is_grad_enabled() and residual(start).requires_grad
    left = torch.full_like(y[:, 0], 1 + _FURTHER, dtype=torch.long)  # steps to take after the tolerance, then frozen
    steps, size = torch.zeros_like(left), batch.norm(start.detach())
    for _ in range(solver.max_steps):
        with torch.enable_grad():
            y = y if recorded and y.requires_grad else y.detach().requires_grad_()
            F = residual(y)
            J = [torch.autograd.grad(F[:, i].sum(), y, create_graph=recorded, retain_graph=True)[0] for i in range(F.shape[1])]
        found = batch.norm(F.detach())
        size = torch.maximum(batch.norm(y.detach()), batch.norm((y - start).detach()))
        left = torch.where((found <= rtol * size) | (found <= solver.atol) | (left <= _FURTHER), left - 1, left)
        left = torch.where(found.isfinite(), left, 0)
        if not bool((left > 0).any()):
            break
        with torch.set_grad_enabled(recorded):
            change = torch.linalg.solve_ex(torch.stack(J, dim=1), F.unsqueeze(2))[0].squeeze(2)
            y = batch.select(left > 0, y - change, y)
        steps += left > 0
    with torch.no_grad():
        found, tolerance = batch.norm(residual(y.detach())), (rtol * size).clamp_min(solver.atol)
    status = torch.where(found <= tolerance, int(Status.converged), int(Status.max_steps))
    status = torch.where(found.isfinite(), status, int(Status.non_finite))
    return Result(y if recorded else y.detach(), status, Stats("Newton", steps, found, tolerance))
