"""A trajectory on a fixed grid, step by step.

Each step is the problem F_i = Y_i - y_n - h Σ_j a_ij f(t_n + c_j h, Y_j) = 0 for the rows of the method; it is solved for all
samples at once by `SimplifiedNewton`, or by any solver of the core. A step that fails is tried again by Newton with damping,
without, and from where shorter steps lead; a sample whose step fails for good stays where it is, and says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear import Auto
from torchdil.linear.base import LinearSolver
from torchdil.live import TimeTable, asked, showing
from torchdil.ode.bidiagonal import Bidiagonal
from torchdil.ode.newton import OdeSolver, SimplifiedNewton, unknowns, worth_a_try
from torchdil.ode.step import StepSolver
from torchdil.ode.trajectory import Trajectory
from torchdil.problem import Call, Problem
from torchdil.solution import Result, Stats, Status, tally
from torchdil.solvers.base import Solver
from torchdil.solvers.newton import Newton

# How far below what is asked of the whole trajectory a step goes.
_SHARE = 0.1
_PIECES = (1, 2, 4, 8, 32)
# Iterations of Newton's method without damping.
_ASTRAY = 100
# The size of the states, which the tolerance is relative to, is looked at every so many steps.
_RESIZE = 8


@dataclass(frozen=True)
class Marching(Solver):
    """Solves a `Trajectory` from step to step.

    Attributes:
        statement: the trajectory.
        inner: what solves a step: a `SimplifiedNewton`, a solver of the core such as `Picard()`, or a callable (fn, y) -> y,
            where y holds the rows of the step, (B, m D); None: `SimplifiedNewton()`.
        linear: for Newton on all steps at once, where that is called for; None: direct.
        owner: the user's function, with which what is compiled is kept, if at all.

    Example:
        >>> dil.odeint(f, y0, t, method="backward_euler", solver=dil.Picard())
    """

    statement: Trajectory = field(kw_only=True)
    inner: OdeSolver | None = None
    linear: LinearSolver | None = None
    owner: Any = None

    def accuracy(self, dtype: torch.dtype) -> float:
        if isinstance(self.inner, (Solver, SimplifiedNewton)) and self.rtol is None:
            return self.inner.accuracy(dtype)
        return super().accuracy(dtype)

    def accepted(self, dtype: torch.dtype) -> float:
        if isinstance(self.inner, Solver):
            return self.inner.accepted(dtype)
        foreign = self.inner is not None and not isinstance(self.inner, SimplifiedNewton)
        return self.accuracy(dtype) ** 0.5 if foreign else self.accuracy(dtype)

    def resume(self, problem: Problem, y: Tensor, tolerance: Tensor) -> Result:
        """Newton on all steps at once: from here it is near."""
        return self._together().solve(problem, y, tolerance)

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        if problem.bound is None:  # f cannot be called by itself
            return self._together().solve(problem, y0, tolerance)
        call, (first, times) = problem.bound
        with torch.set_grad_enabled(problem.unrolled):
            if not problem.unrolled:
                first, times = batch.map_tensors(Tensor.detach, first), times.detach()
            march = _March(self, call, self.statement.state.ravel(first), times, y0.dtype)
            shown = self.verbose or asked()
            table = TimeTable(self.title(problem, len(y0)), "‖F‖, worst") if shown else None
            with showing(False if shown else None):  # what solves a step shows itself only if it was told so
                rows, residuals = march.run(table)
        failed = march.status != Status.converged
        stats = Stats(
            method=march.name,
            steps=march.steps,
            residual=torch.where(failed, torch.inf, torch.stack(residuals).square().sum(dim=0).sqrt()),
            tolerance=tolerance,
            history=residuals,
            causes=march.causes(),
        )
        return Result(torch.stack(rows, dim=1).flatten(1), march.status, stats)

    def _together(self) -> Newton:
        linear = Bidiagonal(steps=self.statement.steps, rows=len(self.statement.method.rows))
        return Newton(self.rtol, self.atol, linear_solver=self.linear or linear)


class _March:
    """One walk along the grid.

    Attributes:
        status: (B,).
        steps: iterations, (B,).
        name: what ran.
    """

    def __init__(self, marching: Marching, call: Call, y: Tensor, times: Tensor, dtype: torch.dtype):
        statement, inner, self.owner = marching.statement, marching.inner, marching.owner
        self.statement, self.call, self.times = statement, call, times
        self.method = method = statement.method
        self.one = Trajectory(method, statement.state, statement.field, 1)
        self.y = y
        self.inner = SimplifiedNewton() if inner is None else inner
        self.h = times.diff(dim=-1).to(dtype)
        c = method.tensors(y)[1]
        self.at = times[..., :-1, None].to(dtype) + self.h[..., None] * c
        self.shared = times.dim() == 1
        self.status = torch.zeros(len(y), dtype=torch.long, device=y.device)
        self.steps = torch.zeros_like(self.status)
        self.alive, self.all_alive = torch.ones_like(self.status, dtype=torch.bool), True
        self.share = _SHARE * marching.accuracy(dtype)
        self.floor = marching.atol
        first = statement.field(call, self.at[..., 0, :1], y.unsqueeze(1)).squeeze(1)
        self.begun, self.n, self.until = batch.finite(first), 0, times[..., 0].expand(len(y))
        first = self.h[..., :1] * first if statement.steps else torch.zeros_like(y)
        # How large each component is, (B, D): what F has to be small against.
        self.weight = torch.maximum(y.abs(), first.abs()).nan_to_num(posinf=0.0).detach()
        self.rescued = False
        self.increments = torch.zeros_like(y.repeat(1, len(method.rows)))
        what = self.inner if isinstance(self.inner, (Solver, SimplifiedNewton)) else None
        self.title = getattr(self.inner, "__name__", type(self.inner).__name__) if what is None else type(what).__name__

    @property
    def name(self) -> str:
        if self.method.explicit:
            return "step by step"
        return f"step by step, {self.title}" + (", then Newton" if self.rescued else "")

    def run(self, table: TimeTable | None) -> tuple[list[Tensor], list[Tensor]]:
        """The rows of each step, (B, m, D), and what is left of its ‖F‖, (B,)."""
        quick = self.method.explicit or isinstance(self.inner, SimplifiedNewton)
        step = self._quick() if quick else self._ordinary
        rows, residuals = [], []
        m = len(self.method.rows)
        for n in range(self.statement.steps):
            self.n = n
            if n % _RESIZE == 0:
                self.weight = torch.maximum(self.weight, self.y.detach().abs())
                tolerance = (self.share * m**0.5 * batch.norm(self.weight)).clamp_min(self.floor)
            found, residual = step(n, tolerance)
            if not self.all_alive:
                # Steps of nothing: a sample that has failed stays where it was.
                found = torch.where(self.alive[:, None, None], found, self.y.unsqueeze(1))
            rows.append(found)
            residuals.append(residual)
            self.y = found[:, -1]
            if table is not None:
                h = self.h[..., n].abs().amax()
                table.row(n + 1, self.times[..., n + 1].max(), h, self.alive, residual, last=n == self.statement.steps - 1)
        if table is not None:
            table.close(tally(self.status))
        return rows, residuals

    def fail(self, failed: Tensor, status: Tensor | Status) -> None:
        failed = failed & self.alive
        self.status = torch.where(failed, status if isinstance(status, Tensor) else int(status), self.status)
        self.alive = self.alive & ~failed
        self.all_alive = bool(self.alive.all())
        self.until = torch.where(failed, self.times[..., self.n + 1], self.until)

    def causes(self) -> list[tuple[str, Tensor]]:
        """Where samples ran away that had begun well."""
        lost = self.begun & (self.status == Status.non_finite)
        if not bool(lost.any()):
            return []
        t = float(torch.where(lost, (self.until - self.times[..., 0]).abs(), torch.inf).amin())
        t = float(self.times[..., 0].reshape(-1)[0]) + math.copysign(t, float(self.h.reshape(-1)[0]))
        why = 'y may be infinite there, or func not defined; take shorter steps, or a method that chooses them, "kvaerno5"'
        return [(f"y or func is not finite by t = {t:.6g}: {why}", lost)]

    def _quick(self) -> Callable[[int, Tensor], tuple[Tensor, Tensor]]:
        """Steps by `StepSolver`."""
        newton = self.inner if isinstance(self.inner, SimplifiedNewton) else SimplifiedNewton()
        given = (self.method, self.statement.field, self.call, self.y, self.owner)
        most = self._most(newton)
        solver = StepSolver(replace(newton, jacobian="krylov") if most else newton, *given, most=most or None)
        explicit, sizes = self.method.explicit, self.h.tolist() if self.shared else []
        slope: list[Tensor | None] = [None]

        def step(n: int, tolerance: Tensor) -> tuple[Tensor, Tensor]:
            nonlocal solver
            alive = None if self.all_alive else self.alive
            if n % _RESIZE == 0 and solver.kind in ("full", "krylov"):  # others pass the error from component to component
                largest, eps = self.weight.amax(dim=1, keepdim=True), torch.finfo(self.y.dtype).eps
                # A component that is small beside the others is worth half their digits at least, as it may be made of them;
                # fewer in the first steps where it begins at zero, as it may grow; more as long as its residual falls, as it
                # may be of other units.
                least, tiny = (
                    torch.where(self.weight > 0, eps**power, eps ** (0.5 if n else 0.25)) * largest for power in (0.5, 1)
                )
                solver.weight = torch.maximum(self.weight, least).clamp_min(torch.finfo(largest.dtype).tiny)
                finer = torch.maximum(self.weight, tiny).clamp_min(torch.finfo(largest.dtype).tiny)
                solver.finer = finer if bool((finer < solver.weight).any()) else None
            goal = (
                tolerance if solver.weight is None else torch.full_like(tolerance, self.share * self.increments.shape[1] ** 0.5)
            )
            if self.shared:
                G = solver.advance(sizes[n], self.at[n], self.y, goal, alive, slope[0])
                if solver.strained:  # stiff: with matrices from here on
                    tried, solver = solver, StepSolver(replace(newton, jacobian="full"), *given)
                    solver.weight, solver.finer, solver.iterations = tried.weight, tried.finer, tried.iterations
                    G = solver.advance(sizes[n], self.at[n], self.y, goal, alive, slope[0])
            else:
                h = self.h[:, n : n + 1]
                solver.refresh(self.at[:, n, :1], self.y)
                solver.factorise(h)
                G = solver.solve(h, self.at[:, n], self.y, goal, alive)
            found = solver.rows
            if explicit:
                finite = batch.finite(found.flatten(1)) if n % 10 == 9 or n == self.statement.steps - 1 else None
                if finite is not None and not bool(finite.all()):
                    self.fail(~finite, Status.non_finite)
            elif not solver.all_ok:
                missed = self.alive & ~solver.ok
                found = self._rescue(n, tolerance, missed, found, solver.kind in ("full", "krylov"))
                if solver.carries_slope and self.shared:  # those of G are where the solve went astray
                    last = sizes[n] * solver.slope(self.at[n, -1:], found[:, -1])
                    G = torch.where(missed[:, None, None], torch.cat((G[:, :-1], last.unsqueeze(1)), dim=1), G)
            if solver.carries_slope and self.shared and n + 1 < len(sizes):
                slope[0] = G[:, -1] if sizes[n + 1] == sizes[n] else G[:, -1] * (sizes[n + 1] / sizes[n])
            self.steps = solver.iterations
            return found, solver.residual

        return step

    def _most(self, newton: SimplifiedNewton) -> int:
        """In how many steps a Krylov method must solve, lest matrices are formed, see `worth_a_try`; 0: formed at once."""
        # On a GPU matrices cost little, and a look at each solve much.
        if not self.shared or newton.jacobian is not None or self.method.explicit or self.y.device.type != "cpu":
            return 0
        return worth_a_try(len(self.y), unknowns(self.method, self.y.shape[1]))

    def _ordinary(self, n: int, tolerance: Tensor) -> tuple[Tensor, Tensor]:
        """A step by a solver of the core, or a foreign one."""
        m = len(self.method.rows)
        start = self.y.repeat(1, m) + self.increments  # the last step once more
        problem = self.problem(self.y, self.times[..., n : n + 2])
        if isinstance(self.inner, Solver):
            value, status, stats = self.inner.solve(problem, start, torch.where(self.alive, tolerance, torch.inf))
            self.steps = self.steps + torch.where(self.alive, stats.steps, 0)
            residual = stats.residual
        else:
            assert callable(self.inner)
            with torch.enable_grad():
                value = self.inner(problem.residual, start.clone())
            if not isinstance(value, Tensor) or value.shape != start.shape or value.dtype != start.dtype:
                raise ValueError(f"solver must return the rows of a step like its start, {tuple(start.shape)}, {start.dtype}.")
            value = value.detach()
            residual = batch.norm(problem.evaluate(value))
            status = torch.where(torch.isfinite(residual), 0, int(Status.non_finite))
            self.steps = self.steps + 1
        failed = status != Status.converged
        if bool((failed & self.alive).any()):
            self.fail(failed, status)
        self.increments = value - self.y.repeat(1, m)
        return value.unflatten(1, (m, -1)), residual

    def problem(self, y: Tensor, times: Tensor) -> Problem:
        """One step from y (B, D) as a problem of the core."""
        args = (self.statement.state.unravel(y), times)
        return Problem("ode", False, lambda Y: self.one.residual(self.call, Y, args), layout=self.one.layout)

    def _rescue(self, n: int, tolerance: Tensor, failed: Tensor, found: Tensor, damped: bool) -> Tensor:
        """The rows of step n, (B, m, D), with those of the failed samples by damped Newton, from better and better starts."""
        m = len(self.method.rows)
        begin, end = self.times[..., n : n + 1], self.times[..., n + 1 : n + 2]
        status = torch.full_like(self.status, int(Status.max_steps))
        for pieces in _PIECES if damped else ():
            self.rescued = True
            if pieces == 2:  # before the search gets long
                found, failed = self._wander(n, tolerance, failed, found)
                if not bool(failed.any()):
                    return found
            way = [self.y]
            if pieces > 1:
                cuts = torch.lerp(begin, end, torch.linspace(0, 1, pieces + 1, dtype=begin.dtype, device=begin.device))
                going = failed  # whoever has met a piece without a solution, as at a jump of f, waits there
                for k in range(pieces):
                    if not bool(going.any()):
                        way.append(way[-1])
                        continue
                    part = self._damped(way[-1], cuts[..., k : k + 2], way[-1].repeat(1, m), tolerance, going)
                    way.append(batch.select(batch.finite(part.value), part.value, way[-1].repeat(1, m))[:, -self.y.shape[1] :])
                    going = going & (part.status == Status.converged)
            starts = []
            for place in self.method.places:
                k = min(int(place * (len(way) - 1)), len(way) - 2)
                starts.append(way[0] if len(way) == 1 else torch.lerp(way[k], way[k + 1], place * (len(way) - 1) - k))
            result = self._damped(self.y, self.times[..., n : n + 2], torch.cat(starts, dim=1), tolerance, failed)
            solved = failed & (result.status == Status.converged)
            found = torch.where(solved[:, None, None], result.value.unflatten(1, (m, -1)), found)
            self.steps = self.steps + torch.where(failed, result.stats.steps, 0)
            status = torch.where(failed, result.status, status)
            failed = failed & ~solved
            if not bool(failed.any()):
                return found
        self.fail(failed, torch.where(batch.finite(found.flatten(1)), status, int(Status.non_finite)))
        return found

    def _wander(self, n: int, tolerance: Tensor, failed: Tensor, found: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of step n and who has still failed, by Newton's method without damping: where ‖F‖ has a minimum that is no
        root, as where a step leads from one branch of a slow manifold to another, it goes astray and often finds the root.
        """
        m = len(self.method.rows)
        problem = self.problem(self.y, self.times[..., n : n + 2])
        linear = Auto()
        with torch.no_grad():
            for start in (self.y.repeat(1, m), self.y.repeat(1, m) - problem.evaluate(self.y.repeat(1, m))):
                Y, running = start, failed
                for _ in range(_ASTRAY):
                    F = problem.evaluate(Y)
                    self.steps = self.steps + running
                    running = running & ~(batch.norm(F) <= tolerance) & batch.finite(F)
                    if not bool(running.any()):
                        break
                    Y = batch.select(running, Y - linear.solve(problem.operator(Y), F).value, Y)
                solved = failed & (batch.norm(problem.evaluate(Y)) <= tolerance)
                found = torch.where(solved[:, None, None], Y.unflatten(1, (m, -1)), found)
                failed = failed & ~solved
        return found, failed

    def _damped(self, y: Tensor, times: Tensor, start: Tensor, tolerance: Tensor, who: Tensor) -> Result:
        return Newton(max_steps=50).solve(self.problem(y, times), start, torch.where(who, tolerance, torch.inf))
