"""Outputs inside the steps of a trajectory.

The state at t_out, t_n < t_out < t_{n+1}, is where one step of the same method leads from y_n: a shorter one than that from t_n
to t_{n+1}, so within its error. All outputs of all samples are independent steps, solved together and attached like any
problem, so the derivatives with respect to y_n, t_n, t_out and what f depends on are exact.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear import Auto, Dense
from torchdil.linear.base import LinearSolver
from torchdil.modes import tangents_active
from torchdil.ode.equation import Equation
from torchdil.ode.interpolant import Interpolant
from torchdil.ode.trajectory import Trajectory
from torchdil.ode.walk import Tolerances
from torchdil.operator import Operator, Product
from torchdil.problem import Call, Problem, Statement
from torchdil.solution import Report, Result, Stats, Status
from torchdil.solve import Setting
from torchdil.solvers.base import Solver
from torchdil.solvers.newton import Newton

# The correction of an output, in units of its tolerance, after which Newton's iteration has nothing left to do.
_SMALL = 1e-3


def outputs(
    equation: Equation,
    statement: Trajectory,
    rows: Tensor,
    times: Tensor,
    reached: Tensor,
    tolerances: Tolerances,
    linear_solver: LinearSolver | None,
    on_failure: str,
    report: Report,
) -> Tensor:
    """The states at the outputs, (B, T, D).

    Args:
        rows: the attached rows of the steps, (B, N, m, D).
        times: their grid, (N + 1,) or (B, N + 1).
        reached: how far each sample came, (B,).
    """
    samples, _, m, d = rows.shape
    first = equation.start.unsqueeze(1)
    grid, wanted = times.expand(samples, -1), equation.t[1:].double()
    step, beyond = _located(grid, equation.t.double(), reached)
    states = torch.gather(rows[:, :, -1], 1, step.unsqueeze(2).expand(-1, -1, d))
    inside = ~((torch.gather(grid, 1, step + 1) == wanted) | beyond).all(dim=0)
    if equation.t.requires_grad or tangents_active():  # the grid does not move with the outputs
        inside = torch.ones_like(inside)
    columns = inside.nonzero().squeeze(1)
    if not len(columns):
        return torch.cat((first, states), dim=1)
    step, beyond = step[:, columns], beyond[:, columns]
    before = torch.cat((first, rows[:, :-1, -1]), dim=1)
    before = torch.gather(before, 1, step.unsqueeze(2).expand(-1, -1, d))
    before = torch.where(beyond.unsqueeze(2), states[:, columns], before)
    begin = torch.gather(grid, 1, step)
    end = wanted[columns].expand_as(begin)
    if times.dim() > 1:
        end = torch.where(beyond, begin, end)
    with torch.no_grad():
        taken = torch.gather(rows, 1, step[:, :, None, None].expand(-1, -1, m, d))
        part = batch.divide(end - begin, torch.gather(grid, 1, step + 1) - begin).to(rows.dtype)
        c = torch.tensor(statement.method.places, dtype=rows.dtype, device=rows.device)
        start = Interpolant(statement.method).at(part.unsqueeze(2) * c, before, taken)
    independent = IndependentSteps(statement.method, statement.state, statement.field, len(columns))
    newton = Corrected(statement=independent, tolerances=tolerances, linear_solver=Folded(steps=len(columns)))
    inner = Report(equation.layout.batch_shape)
    backward = Folded(steps=len(columns), inner=linear_solver or Auto())
    setting = Setting(independent, equation.func, newton, backward, on_failure, inner)
    args = (before, begin[0], end[0]) if times.dim() == 1 else (before, begin, end)
    found = independent.view(setting.attached(independent.layout.unravel(start.flatten(1)), args))[:, :, -1]
    if times.dim() == 1:  # one grid for all: a sample that has failed takes the steps of the others
        found = torch.where(beyond.unsqueeze(2), before, found)
    assert inner.forward is not None and report.forward is not None
    if on_failure == "zero":  # of what failed before this
        failed = (report.forward.status != Status.converged).reshape(-1, 1, 1)
        found = torch.where(failed, found.detach(), found)
    status = torch.where(report.forward.status == Status.converged, inner.forward.status, report.forward.status)
    report.forward.stats.products += inner.forward.stats.products
    report.forward = report.forward._replace(status=status)
    states = found if len(columns) == states.shape[1] else states.index_copy(1, columns, found)
    return torch.cat((first, states), dim=1)


@torch.no_grad()
def _located(grid: Tensor, t: Tensor, reached: Tensor) -> tuple[Tensor, Tensor]:
    """The step of the grid (B, N + 1) that each time of t[1:] lies in, and where a sample did not come so far, (B, T - 1)."""
    sign = torch.sign(t[-1] - t[0])
    ends, points = (sign * t[1:]).expand(len(grid), -1).contiguous(), (sign * grid).contiguous()
    step = (torch.searchsorted(points, ends) - 1).clamp(0, grid.shape[1] - 2)
    return step, ends > sign * reached[:, None]  # a sample that failed on the way stays where it is


def accepted(tolerances: Tolerances, dtype: torch.dtype) -> float:
    """The ‖F‖, relative to its size, that is in keeping with errors of this size."""
    return 10 * max(tolerances.rtol, batch.default_rtol(dtype))


class Estimated(Trajectory):
    """Steps that are solved as well as their errors are worth, each of which was accepted by a test of its own."""

    advice = "use float64 if y is float32, loosen rtol and atol, or allow more steps (max_steps in options)"
    counted = Statement.counted

    def size(self, operator: Operator, y: Tensor, start: Tensor | None) -> Tensor:
        # Newton's iteration leaves an error in y, and F of it is larger the stiffer the equation.
        stiff = torch.finfo(y.dtype).eps ** 0.5 * super().size(operator, y, start)
        return torch.maximum(self.quick_size(y, start), stiff)


class IndependentSteps(Estimated):
    """Steps that do not follow one another; `args` are the states before them, (B, T, D), and where they begin and end."""

    def direct(self) -> LinearSolver | None:
        return Folded(steps=self.steps, inner=Dense()) if self.fits else None

    def residual(self, call: Call, y: Tensor, args: tuple[Any, ...]) -> Tensor:
        before, begin, end = args
        own = self.own(call, self.view(y), begin.to(y.dtype), (end - begin).to(y.dtype))
        return (own - before.unsqueeze(2)).flatten(1)


@dataclass(frozen=True)
class Corrected(Solver):
    """Newton's iteration from a start that is nearly right, until a correction is far below the tolerance.

    Where it does not get there, damped Newton takes over.

    Attributes:
        statement: the steps.
        tolerances: of the integration.
        linear_solver: for J δ = F.
    """

    max_steps: int = 6
    statement: IndependentSteps = field(kw_only=True)
    tolerances: Tolerances = field(kw_only=True)
    linear_solver: LinearSolver = field(kw_only=True)

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        y, running = y0, torch.ones_like(tolerance, dtype=torch.bool)
        steps = torch.zeros_like(running, dtype=torch.long)
        with torch.no_grad():
            for _ in range(self.max_steps):
                correction = self.linear_solver.solve(problem.operator(y), problem.evaluate(y)).value
                y = batch.select(running, y - correction, y)
                steps += running
                relative = self.statement.view(correction) / self.tolerances.scale(self.statement.view(y).abs())
                running = running & ~(relative.square().mean(dim=(2, 3)).sqrt().amax(dim=1) <= _SMALL)
                if not bool(running.any()):
                    break
        stats = Stats("Newton", steps, torch.zeros_like(tolerance), tolerance, history=[torch.zeros_like(tolerance)])
        if not bool(running.any()):
            return Result(y, torch.zeros_like(steps), stats)
        newton = Newton(linear_solver=self.linear_solver)
        value, status, _ = newton.solve(problem, y0, torch.where(running, tolerance, torch.inf))
        return Result(batch.select(running, value, y), torch.where(running, status, 0), stats)

    def accepted(self, dtype: torch.dtype) -> float:
        return accepted(self.tolerances, dtype)


@dataclass(frozen=True)
class Folded(LinearSolver):
    """Solves with a J that has a block for each of T steps, as B T systems.

    Attributes:
        steps: T.
        inner: solves them.
    """

    steps: int = 1
    inner: LinearSolver = field(default_factory=Auto)

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        samples, before = len(rhs), operator.products
        blocks = _Blocks(operator, self.steps)
        guess = None if start is None else start.reshape(blocks.shape)
        value, status, stats = self.inner.solve(blocks, rhs.reshape(blocks.shape), guess, transpose=transpose)
        total = Stats(
            method=stats.method,
            steps=stats.steps.reshape(samples, self.steps).amax(dim=1),
            residual=batch.norm(stats.residual.reshape(samples, self.steps)),
            tolerance=batch.norm(stats.tolerance.reshape(samples, self.steps)),
            products=operator.products - before,
            exact=stats.exact,
        )
        return Result(value.reshape(rhs.shape), status.reshape(samples, self.steps).amax(dim=1), total)


class _Blocks(Operator):
    """J with T blocks a sample, (B, T k), as B T operators of size k."""

    def __init__(self, whole: Operator, steps: int):
        samples, n = whole.shape
        super().__init__(whole.residual, whole.y.reshape(samples * steps, n // steps), whole.symmetric)
        self._whole = whole

    def product(self, transpose: bool, strategy: str = "backward") -> Product:
        product, shape = self._whole.product(transpose, strategy), self._whole.shape
        return lambda p: product(p.reshape(shape)).reshape(p.shape)

    def rows(self, vectors: Tensor) -> Tensor:
        return self._whole.rows(vectors.reshape(len(vectors), *self._whole.shape)).reshape(vectors.shape)
