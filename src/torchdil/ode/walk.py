"""The integration with adaptive steps: B samples, each on a grid of its own, that step together.

The error of a step, in units of atol + rtol |y|, is estimated by an embedded formula. The size of the next step follows from
this estimate and the last (Gustafsson 1994); J and the matrix of Newton's iteration are kept while they serve, by the rules of
Hairer & Wanner (1996), section IV.8. Samples that have arrived, or failed, idle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.live import TimeTable, asked, showing
from torchdil.ode.equation import Equation, Options
from torchdil.ode.field import Field
from torchdil.ode.interpolant import Interpolant
from torchdil.ode.methods import Method
from torchdil.ode.newton import SimplifiedNewton
from torchdil.ode.step import StepSolver
from torchdil.settings import check_number
from torchdil.solution import Result, Stats, Status, tally

_RTOL, _ATOL = 1e-3, 1e-6
# The least rtol that a dtype has digits for.
_LEAST = {torch.float64: 1e-13, torch.float32: 1e-6}
# A step grows and shrinks by these factors at most; a little growth is not worth a new matrix.
_GROW, _SHRINK, _KEEP = 10.0, 0.2, 1.2
# The factor for a step that Newton's iteration could not solve.
_RETREAT = 0.25
# The most iterations, and the contraction that is too good to take J anew; it is where the step has grown by this much since.
_ITERATIONS, _FAST, _OLD = 8, 1e-3, 4.0
# A state that has grown by this much where its steps end is said to run away.
_FAR = 1e3
# Smaller errors are taken for this.
_TINY = 1e-10


@dataclass
class AdaptiveStats(Stats):
    """The numbers of an adaptive integration.

    Attributes:
        accepted: steps, (B,).
        rejected: steps that were tried and taken back, because of the error or of Newton's iteration, (B,).
        jacobians: evaluations of ∂f/∂y, each for the whole batch.
        factorisations: of I - hγ ∂f/∂y, each for the whole batch.
    """

    accepted: Tensor = field(kw_only=True)
    rejected: Tensor = field(kw_only=True)
    jacobians: int = 0
    factorisations: int = 0


@dataclass(frozen=True)
class Tolerances:
    """What the error of a step is measured by: atol + rtol |y|."""

    rtol: float
    atol: float

    @staticmethod
    def of(rtol: Any, atol: Any, dtype: torch.dtype) -> Tolerances:
        """Those given, or the defaults, as far as the dtype goes."""
        check_number("rtol", rtol, least=0, below=math.inf, optional=True)
        check_number("atol", atol, least=0, below=math.inf, optional=True)
        if rtol == 0 and atol == 0:
            raise ValueError("rtol and atol must not both be 0.")
        return Tolerances(max(_RTOL if rtol is None else rtol, _LEAST.get(dtype, 1e-2)), _ATOL if atol is None else atol)

    def scale(self, size: Tensor) -> Tensor:
        """The error that is worth 1 where |y| is `size`."""
        # A component that is 0 is measured by the rounding of the others where atol is 0, too.
        least = self.rtol * torch.finfo(size.dtype).eps * size.amax(dim=-1, keepdim=True)
        return torch.maximum(self.atol + self.rtol * size, least).clamp_min(torch.finfo(size.dtype).tiny)


class Walk:
    """The integration from t[0] to t[-1], without a graph.

    Args:
        equation: what to integrate.
        method: one with an error estimate.
        evaluate: f at many points.
        tolerances: of the error.
        options: the first step, and how many at most.
        newton: how steps are solved.
        common: one step for all samples, as f cannot have times of its own for each.

    Attributes:
        status: (B,).
        accepted, rejected: how many steps were, (B,).
        calls: of f.
    """

    def __init__(
        self,
        equation: Equation,
        method: Method,
        evaluate: Field,
        tolerances: Tolerances,
        options: Options,
        newton: SimplifiedNewton,
        common: bool,
    ):
        self.calls = 0

        def call(*args: Any) -> Any:
            self.calls += 1
            return equation.func(*args)

        self._method, self._tolerances, self._options, self._common = method, tolerances, options, common
        self._y = y = equation.start.detach()
        self._solver = solver = StepSolver(newton, method, evaluate, call, y, equation.func)
        if newton.max_steps is None and solver.kind in ("full", "krylov"):
            solver.max_steps = _ITERATIONS
        times = equation.t.detach().double()
        self._begin, self._end, self._span = times[0], times[-1], (times[-1] - times[0]).abs()
        self._sign = math.copysign(1.0, float(times[-1] - times[0]))
        self._c = method.tensors(y)[1]
        weights = [*method.error_weights, *([method.error_start] if method.error_start else [])]
        self._weights = torch.tensor(weights, dtype=y.dtype, device=y.device)
        # Newton's iterations of a step are counted by the stage.
        self._solves = sum(method.A[i][i] != 0 for i in range(method.stages)) if method.diagonal else 1
        rtol, eps = tolerances.rtol, torch.finfo(y.dtype).eps
        self._newton_tolerance = torch.full_like(y[:, 0], max(10 * eps / rtol, min(0.03, rtol**0.5)))
        self._interpolant = Interpolant(method)
        self.status = torch.zeros(len(y), dtype=torch.long, device=y.device)
        self.accepted, self.rejected = torch.zeros_like(self.status), torch.zeros_like(self.status)
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []
        self._largest = y.abs().amax(dim=1)

        self._t = times[0].expand(len(y))
        self._running = torch.ones_like(self.status, dtype=torch.bool)
        self._slope = solver.slope(self._at(self._t[:, None]), y)  # f(t, y)
        lost = ~batch.finite(self._slope) | ~batch.finite(y)
        self.status = torch.where(lost, int(Status.non_finite), self.status)
        self._running = ~lost
        self._h = torch.minimum(self._first_step(), self._span)  # |h|
        self._renew, self._fresh = torch.ones_like(lost), torch.zeros_like(lost)  # take J anew; it is J(t, y)
        self._again = torch.ones_like(lost)  # the last try was rejected, or there was none
        self._matrix_h, self._J_h = torch.full_like(self._h, torch.nan), torch.zeros_like(self._h)
        self._error_before = torch.ones_like(y[:, 0])
        # The last accepted step: its size, its start, its rows.
        self._last = torch.zeros_like(self._h), y, y[:, None].expand(-1, len(method.rows), -1)

    def run(self) -> None:
        """Step until every sample has arrived or failed."""
        many = "" if len(self.status) == 1 else f", {len(self.status)} samples"
        table = TimeTable(f"adaptive {type(self._method).__name__}: ode{many}", "error, worst") if asked() else None
        with showing():
            for step in range(self._options.max_steps):
                if not bool(self._running.any()):
                    break
                before = self._t
                size, error = self._step()
                if table is not None:
                    last = not bool(self._running.any())
                    table.row(step + 1, *self._slowest(before, size), self._running, error, last=last)
            self.status = torch.where(self._running, int(Status.max_steps), self.status)
            if table is not None:
                table.close(f"{tally(self.status)}; {int(self.accepted.max())} steps, {int(self.rejected.max())} rejected")

    def _step(self) -> tuple[Tensor, Tensor]:
        """One step of all who run: its sizes and estimated errors, in units of the tolerance, (B,)."""
        y, t, solver, running = self._y, self._t, self._solver, self._running
        last = self._h >= (self._end - t).abs() * (1 - 1e-9)
        ahead = torch.where(running, torch.where(last, self._end, t + self._sign * self._h), t)
        size = ahead - t
        h = size.to(y.dtype).unsqueeze(1)
        at = self._at(t[:, None]) + (h.abs().amax() * self._sign if self._common else h) * self._c
        self._prepare(size, h)
        before = solver.iterations.clone()
        first = h * self._slope if self._method.A[0][0] == 0 else None
        scale = self._tolerances.scale(y.abs())
        G = solver.solve(h, at, y, self._newton_tolerance, running, first, start=self._guess(size), scale=scale)
        rows = solver.rows
        new = rows[:, -1]
        error = self._error(self._at(t[:, None]), h, G, new)
        bad = running & ~(solver.ok & batch.finite(new) & torch.isfinite(error))
        culprits = bad | (running & ~(error < 1))
        if self._common:
            bad, error = (bad.any() & running), torch.where(running, error, 0.0).amax().expand_as(error)
        good = running & ~bad & (error < 1)
        self._control(size, error, good, bad, (solver.iterations - before) / self._solves)
        self.accepted += good
        self.rejected += running & ~good
        self._kept.append((good, ahead, rows))
        if bool(good.any()):
            slope = G[:, -1] / h if solver.carries_slope else solver.slope(self._at(ahead[:, None]), new)
            self._slope = batch.select(good, slope, self._slope)
            length, begin, stages = self._last
            stages = torch.where(good[:, None, None], rows, stages)
            self._last = torch.where(good, size, length), batch.select(good, y, begin), stages
            self._y, self._t = batch.select(good, new, y), torch.where(good, ahead, t)
            self._running = running & ~(good & (self._t == self._end))
        eps = torch.finfo(torch.float64).eps
        short = culprits & ~good & (self._h < 10 * eps * torch.maximum(t.abs(), eps * self._span))
        if bool(short.any()):
            code = torch.where(torch.isfinite(error) & batch.finite(new), int(Status.stagnated), int(Status.non_finite))
            self.status = torch.where(short, code, self.status)
            self._running = self._running & ~short
        return size, torch.where(running, error, torch.nan)

    def _slowest(self, before: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
        """Where the sample is that was the last of all before a step, and the size of the step."""
        last = (self._sign * before).argmin()
        return self._t[last], size[last]

    def _prepare(self, size: Tensor, h: Tensor) -> None:
        """J and its matrix, where they are not up to date."""
        renew = self._renew & self._running
        if bool(renew.any()):
            self._solver.refresh(self._at(self._t[:, None]), self._y, renew)
            self._fresh, self._J_h = self._fresh | renew, torch.where(renew, size.abs(), self._J_h)
        if bool((((size != self._matrix_h) & self._running) | renew).any()):
            self._solver.factorise(h)
            self._matrix_h = size

    def _guess(self, size: Tensor) -> Tensor | None:
        """The stages of a coupled step, by the polynomial of the last, (B, s, D)."""
        if self._method.diagonal:
            return None
        length, start, rows = self._last
        x = 1 + self._c * batch.divide(size, length).to(rows.dtype).unsqueeze(1)
        return torch.where((length != 0)[:, None, None], self._interpolant.at(x, start, rows), self._y.unsqueeze(1))

    def _error(self, at: Tensor, h: Tensor, G: Tensor, new: Tensor) -> Tensor:
        """The estimated error in units of the tolerance, (B,)."""
        y, solver, start = self._y, self._solver, self._method.error_start
        scale = self._method.error_share * self._tolerances.scale(torch.maximum(y.abs(), new.abs()))

        def estimate(slope: Tensor) -> Tensor:
            slopes = torch.cat((G, (h * slope).unsqueeze(1)), dim=1) if start else G
            return solver.filtered(h, at, y, torch.matmul(self._weights, slopes))

        error = estimate(self._slope)
        norm = _rms(error, scale)
        # In the first step and after a rejection, a large estimate may be that of a transient which the step damps.
        doubtful = self._again & (norm >= 1)
        if start and bool(doubtful.any()):
            norm = torch.where(doubtful, _rms(estimate(solver.slope(at, y + error)), scale), norm)
        return norm

    def _control(self, size: Tensor, error: Tensor, good: Tensor, bad: Tensor, iterations: Tensor) -> None:
        """The size of the next step, and whether to take J anew for it."""
        k, h = self._method.error_order + 1, size.abs()
        error = torch.where(error.isfinite(), error, 1.0).clamp_min(_TINY)
        safety = 0.9 * (2 * _ITERATIONS + 1) / (2 * _ITERATIONS + iterations)
        slow = good & (iterations > 2) & (self._solver.rate > _FAST)
        if self._common:
            safety, slow = safety.amin(), slow.any() & good
        factor = safety * error ** (-1 / k)
        length = self._last[0].abs()
        trend = batch.divide(h, length) * (self._error_before / error) ** (1 / k)
        factor = torch.where(good & (length > 0), factor * trend.clamp_max(1.0), factor).clamp(_SHRINK, _GROW)
        factor = torch.where(good & ~slow & (factor < _KEEP), 1.0, factor)
        factor = torch.where(good & self._again & (length > 0), factor.clamp_max(1.0), factor)
        # Newton's iteration failed: J anew first, then a shorter step.
        factor = torch.where(bad, torch.where(self._fresh, _RETREAT, 1.0), factor)
        self._h = torch.where(self._running, h * factor, self._h)
        # A J of much shorter steps may mistake which components are stiff, and no contraction would tell.
        self._renew = slow | (bad & ~self._fresh) | (good & (self._h > _OLD * self._J_h))
        self._fresh = self._fresh & ~good
        self._again = self._running & ~good
        self._error_before = torch.where(good, error.clamp_min(1e-2), self._error_before)

    def _first_step(self) -> Tensor:
        """The size of the first step by the rule of Hairer, Nørsett & Wanner (1993), section II.4, (B,)."""
        if self._options.first_step is not None:
            if self._options.first_step * self._sign < 0:
                raise ValueError(f"first_step must have the sign of the way, got {self._options.first_step!r}.")
            return torch.full_like(self._t, abs(self._options.first_step))
        y, slope = self._y, self._slope
        scale = self._tolerances.scale(y.abs())
        d0, d1 = _rms(y, scale), _rms(slope, scale)
        h0 = torch.where((d0 < 1e-5) | (d1 < 1e-5), 1e-6, 0.01 * d0 / d1)
        h0 = torch.where(h0.isfinite(), h0, 1e-6).clamp_max(float(self._span))
        h0 = h0.amin().expand_as(h0) if self._common else h0
        there = self._at(self._t[:, None] + self._sign * h0[:, None])
        d2 = _rms(self._solver.slope(there, y + self._sign * h0[:, None] * slope) - slope, scale) / h0
        steepest = torch.maximum(d1, d2)
        h1 = (0.01 / steepest) ** (1 / (self._method.error_order + 1))
        h1 = torch.where(steepest <= 1e-15, (1e-3 * h0).clamp_min(1e-6), h1)
        h = torch.where(h1.isfinite(), torch.minimum(100 * h0, h1), h0).double()
        return h.amin().expand_as(h) if self._common else h

    def _at(self, t: Tensor) -> Tensor:
        """Times (B, q) as `StepSolver` takes them."""
        t = t.to(self._y.dtype)
        return t[int(self._running.int().argmax())] if self._common else t

    def path(self) -> tuple[Tensor, Tensor]:
        """The ends of the accepted steps, (B, N), and their rows, (B, N, m, D), padded by steps of nothing.

        Where some samples have failed, the last step is one to t[-1] that nothing was done for: their F is not 0.
        """
        stay = self._y[:, None, None].expand(-1, 1, len(self._method.rows), -1)
        failed, count = self.status != Status.converged, int(self.accepted.max()) if len(self.accepted) else 0
        missing = torch.where(failed, self._end, self._t)[:, None]
        if not count:
            return missing, stay.clone()
        taken, ends = torch.stack([k[0] for k in self._kept], dim=1), torch.stack([k[1] for k in self._kept], dim=1)
        order = torch.sort((~taken).int(), dim=1, stable=True).indices[:, :count]
        used, ends = torch.gather(taken, 1, order), torch.gather(ends, 1, order)
        rows = torch.stack([k[2] for k in self._kept], dim=1)
        rows = torch.gather(rows, 1, order[:, :, None, None].expand(-1, -1, *rows.shape[2:]))
        ends, rows = torch.where(used, ends, self._t[:, None]), torch.where(used[:, :, None, None], rows, stay)
        if bool(failed.any()):
            ends, rows = torch.cat((ends, missing), dim=1), torch.cat((rows, stay), dim=1)
        return ends, rows

    @property
    def reached(self) -> Tensor:
        """How far each sample came, (B,)."""
        return self._t

    def result(self, rows: Tensor) -> Result:
        """The path as a solver returns it."""
        zeros = torch.zeros_like(rows[:, 0, 0, 0])
        stats = AdaptiveStats(
            method=f"adaptive {type(self._method).__name__}",
            steps=self.accepted + self.rejected,
            residual=zeros,
            tolerance=zeros,
            history=[zeros],
            accepted=self.accepted,
            rejected=self.rejected,
            jacobians=self._solver.jacobians,
            factorisations=self._solver.factorisations,
            causes=self._causes(),
        )
        return Result(rows.flatten(1), self.status, stats)

    def _causes(self) -> list[tuple[str, Tensor]]:
        """Where the samples ended that cannot be integrated further, and what that may be."""
        stopped = (self.status == Status.stagnated) | (self.status == Status.non_finite)
        stopped = stopped & (self._t != self._begin)  # at y0 something else is wrong
        far = stopped & (self._y.abs().amax(dim=1) > _FAR * self._largest)
        beyond = "func may jump there, or not be defined beyond"
        if self._y.dtype == torch.float32:
            beyond += ", or float32 has too few digits: use float64, or loosen rtol and atol"
        causes = []
        for samples, why in ((far, "y may be infinite there"), (stopped & ~far, beyond)):
            if bool(samples.any()):
                first = int(torch.where(samples, self._sign * self._t, torch.inf).argmin())
                where, size = float(self._t[first]), float(self._y[first].abs().amax())
                causes.append((f"the steps ended at t = {where:.6g}, where |y| is {size:.1e}: {why}", samples))
        return causes


def _rms(a: Tensor, scale: Tensor) -> Tensor:
    """The root mean square of a / scale, (B, D) -> (B,)."""
    return batch.norm(a / scale) / a.shape[1] ** 0.5
