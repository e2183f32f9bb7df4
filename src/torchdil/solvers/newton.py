"""Newton's method J d = -F, y ← y + t d, with t per sample by backtracking.

For an argmin J is the Hessian, and a direction must go downhill: a small Hessian that is not positive definite is made so by
taking its eigenvalues' absolute values, a large one is met by CG, which stops at negative curvature with what it has. A
solution whose Hessian has a negative eigenvalue, a saddle or a maximum, is reported as `negative_curvature`.

Far from the minimum of a robust loss (Huber, log-cosh) the Hessian is zero, or next to it, and says nothing of how far to go.
There the step solves (H + λ I) d = -F, λ = ‖F‖ / r (Li, Fukushima, Qi and Yamashita 2004), which is no longer than r, and may
be made longer by the search; r, of each sample, is how far the last such step led, or twice as far.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from torchdil import batch
from torchdil.arguments import check_linear_solver
from torchdil.linear import CG, GMRES, Dense, LinearSolver
from torchdil.linear.auto import direct_pays
from torchdil.linear.curvature import negative_curvature
from torchdil.operator import Operator
from torchdil.problem import Problem
from torchdil.solution import Result, Status
from torchdil.solvers.base import Solver
from torchdil.solvers.line_search import Iterate, search

# An inexact direction costs an extra step of Newton at most; four digits make that rare.
_INNER_RTOL = 1e-4
# A step of Newton's that must be made so much shorter before the score falls is not of the score's curvature.
_SHORT = 1e-3
# A plan that gains less than this in so many steps, each shorter than that and each with a change of F so much larger than a
# step of that length should make, creeps along a kink.
_CREEPING, _LONG, _CUT, _JUMP = 1e-6, 10, 0.5, 2.0
_KINK = "it creeps, as where a derivative of dynamics or cost jumps: smooth what makes it (relu, abs, max)"


class Direction(NamedTuple):
    """Where Newton's method goes.

    Attributes:
        d: with J d ≈ -F, downhill for an argmin, (B, n); infinite where J does not say how far.
        saddle: where J was seen not to be positive definite, (B,).
        path: how far along the way (B,) -> the point there (B, n), if that is not y + t d.
    """

    d: Tensor
    saddle: Tensor
    path: Callable[[Tensor], Tensor] | None = None


class NewtonSteps(Solver):
    """The iteration, whatever the direction comes from."""

    keeps_bounds, sees_curvature = True, True
    curvature: ClassVar[float | None] = None  # how much of the slope may be left after a step, see `search`

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        now = Iterate.at(problem, y0)
        progress = self.progress(problem, now.F, tolerance, max(50, self.max_steps // 2), now.merit)
        step = torch.ones_like(tolerance)
        indefinite = torch.zeros_like(progress.running)
        reach = self._reach(problem, now.y)
        creep = _Creep(now) if problem.name == "plan" else None
        while not progress.finished():
            direction, saddle, path = self._direction(problem, now)
            if reach is not None and (far := reach.exceeded(now.y, direction, progress.running)) is not None:
                direction = batch.select(far, reach.damped(now, reach.length), direction)
                saddle = saddle | far  # a Hessian that says nothing of the way says nothing of its end, which may be a maximum
            indefinite = torch.where(progress.running, saddle, indefinite)
            new, moved, made = search(problem, now, direction, step, progress.running, self.curvature, path=path)
            lost = ~moved if reach is None else reach.learn(new.y, direction, progress.running, moved, made)
            progress.stop(lost, Status.stagnated)
            problem.remember(new.y - now.y, new.F - now.F)
            if creep is not None:
                far = None if reach is None else reach.length.isfinite()
                progress.stop(creep.caught(now, new, made, far, progress.running), Status.stagnated)
            now = new
            progress.advance(batch.norm(now.F), now.merit)
        result = self.result(now.y, progress)
        if creep is not None and bool(creep.found.any()):
            result.stats.causes = [(_KINK, creep.found)]
        # A factorisation shows the curvature in every direction, a Krylov solve along its own only: where unsure, look.
        certain = (progress.steps > 0) & ~indefinite if self._factorises(now.y) else torch.zeros_like(indefinite)
        suspect = (result.status == Status.converged) & ~certain
        if problem.objective is None or not bool(suspect.any()):
            return result
        saddle = suspect & self._curved(problem, now.y)
        return result._replace(status=torch.where(saddle, int(Status.negative_curvature), result.status))

    def _curved(self, problem: Problem, y: Tensor) -> Tensor:
        """Which samples have negative curvature at y, (B,)."""
        return negative_curvature(problem.operator(y))

    @abstractmethod
    def _factorises(self, y: Tensor) -> bool:
        """Whether the direction is of a factorisation, which shows the curvature in every direction."""

    @abstractmethod
    def _direction(self, problem: Problem, now: Iterate) -> Direction:
        """Where to go from here."""

    def _reach(self, problem: Problem, start: Tensor) -> _Reach | None:
        """Where to go where the direction leads far too far; None: a part of the way."""
        return None


class _Creep:
    """Whether a sample creeps along a kink, where no step is as long as the model has it, but all go on downhill for ever.

    Attributes:
        found: who did, (B,).
    """

    def __init__(self, start: Iterate):
        self.found = torch.zeros_like(start.merit, dtype=torch.bool)
        self._count = torch.zeros_like(self.found, dtype=torch.long)
        self._merits = [start.merit] * _LONG

    def caught(self, now: Iterate, new: Iterate, made: Tensor, far: Tensor | None, running: Tensor) -> Tensor:
        """Which samples have crept for long, (B,), with this step; `far`: whose steps are shorter than Newton's anyway."""
        # A step s of Newton's changes F by s F, if its derivative is what was taken for it.
        cut = (made < _CUT) & (batch.norm(new.F - now.F) > _JUMP * made * batch.norm(now.F))
        cut = cut if far is None else cut | far
        self._count = torch.where(cut, self._count + 1, 0)
        before, self._merits = self._merits[0], [*self._merits[1:], new.merit]
        caught = running & (self._count >= _LONG) & (before - new.merit <= _CREEPING * before.abs())
        self.found = self.found | caught
        return caught


class _Reach:
    """How far a sample may go where Newton's step has turned out far too long.

    Attributes:
        damped: (now, length) -> a direction downhill that is no longer than this, (B,) -> (B, n).
        length: (B,); infinite as long as Newton's steps are good.
    """

    def __init__(self, start: Tensor, damped: Callable[[Iterate, Tensor], Tensor]):
        eps = torch.finfo(start.dtype).eps
        self.damped = damped
        self.length = torch.full_like(start[:, 0], torch.inf)
        # Who has come so far runs away; still further out the natural size of F may overflow, and any F is small against that.
        self._most = _size(start) / eps**2
        self._far: Tensor | None = None

    def exceeded(self, y: Tensor, direction: Tensor, running: Tensor) -> Tensor | None:
        """Which samples, (B,), have no use for Newton's direction; None: all have."""
        far = running & ~(batch.norm(direction) < self.length)
        self._far = far if bool(far.any()) else None
        if self._far is not None:
            self.length = torch.where(far & ~self.length.isfinite(), _size(y), self.length)
        return self._far

    def learn(self, y: Tensor, direction: Tensor, running: Tensor, moved: Tensor, made: Tensor) -> Tensor:
        """What the search has shown, at its end y; which samples get no further, (B,)."""
        if self._far is None and not bool((running & ~(moved & (made == 1))).any()):
            return ~moved
        far = torch.zeros_like(moved) if self._far is None else self._far
        length, first = batch.norm(direction), _size(y)
        went = made * length
        # All that were tried were parts of a long step, which says nothing of a short one.
        astray = ~moved & ~self.length.isfinite() & (length > first)
        cut = moved & torch.where(far, made < 1, made < _SHORT)
        longer = torch.where(moved & far, 2 * torch.maximum(self.length, went), self.length)
        self.length = torch.where(astray, first, torch.where(cut, went, longer))
        return (~moved & ~astray) | (batch.norm(y) > self._most)


def _size(y: Tensor) -> Tensor:
    """A length to begin with, (B,)."""
    return batch.norm(y).clamp_min(1.0)


@dataclass(frozen=True)
class Newton(NewtonSteps):
    """Damped Newton, dense for small unknowns, else matrix-free.

    Attributes:
        linear_solver: solves J d = -F: `NormalCG()` is the paper's choice. None: batched dense factorisations for small
            unknowns, else CG (argmin) or GMRES (root).

    Example:
        >>> dil.root(residual, y0, solver=dil.Newton(linear_solver=dil.NormalCG()))
    """

    curvature = 0.9  # Newton's steps leave little; what leaves nearly all of it is too short, J being wrong about the way

    max_steps: int = 100
    linear_solver: LinearSolver | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_linear_solver(self.linear_solver)

    def _factorises(self, y: Tensor) -> bool:
        return self.linear_solver is None and direct_pays(*y.shape)

    def _direction(self, problem: Problem, now: Iterate) -> Direction:
        return self._solved(problem, problem.operator(now.y), now)

    def _reach(self, problem: Problem, start: Tensor) -> _Reach | None:
        return None if problem.objective is None else _Reach(start, functools.partial(self._damped, problem))

    def _damped(self, problem: Problem, now: Iterate, length: Tensor) -> Tensor:
        """-(J + λ I)⁻¹ F, or -F / λ where that is no direction."""
        # Of samples with a length that is infinite, λ is 0 and the direction not used.
        damping = batch.divide(batch.norm(now.F), length)
        operator = Operator(lambda y: problem.residual(y) + batch.scale(damping, y - now.y), now.y, problem.symmetric)
        d = self._solved(problem, operator, now).d
        fine = batch.finite(d) & (batch.norm(d) <= 2 * length)  # λ may meet a negative eigenvalue, or J be no number
        slope = batch.scale(batch.divide(torch.ones_like(damping), damping), now.F)
        return batch.select(fine, d, -slope)

    def _solved(self, problem: Problem, operator: Operator, now: Iterate) -> Direction:
        """-J⁻¹ F, downhill for an argmin."""
        is_argmin = problem.objective is not None
        if is_argmin and self._factorises(now.y):
            return Direction(*_downhill(operator, now.F))
        krylov = CG(rtol=_INNER_RTOL) if is_argmin else GMRES(rtol=_INNER_RTOL)
        solver = self.linear_solver or (Dense() if self._factorises(now.y) else krylov)
        with torch.no_grad():
            direction, status, _ = solver.solve(operator, -now.F)
        saddle = status == Status.negative_curvature
        if not is_argmin:
            return Direction(direction, torch.zeros_like(saddle))
        uphill = ~(batch.dot(direction, now.F) < 0)
        return Direction(batch.select(uphill, torch.full_like(now.F, torch.inf), direction), saddle)


def _downhill(operator: Operator, F: Tensor) -> tuple[Tensor, Tensor]:
    """-|H|⁻¹ F by a factorisation, and where H has a negative eigenvalue."""
    with torch.no_grad():
        # The factorisations know float32 and float64 only.
        dtype = F.dtype if F.dtype in (torch.float32, torch.float64) else torch.float32
        H, b = operator.dense().to(dtype), F.to(dtype).unsqueeze(2)
        H = 0.5 * (H + H.mT)
        factor, info = torch.linalg.cholesky_ex(H)
        eps = torch.finfo(F.dtype).eps
        # A pivot that is zero to rounding: H is singular, and along its flat direction Cholesky divides noise by noise.
        pivots = torch.diagonal(factor, dim1=1, dim2=2).square()
        flat = pivots <= 10 * H.shape[1] * eps * torch.diagonal(H, dim1=1, dim2=2)
        weak = (info != 0) | flat.any(dim=1)
        newton = -batch.cholesky_solve(b, factor).squeeze(2).to(F.dtype)
        if not bool(weak.any()):
            return newton, weak
        finite = torch.isfinite(H).all(dim=2).all(dim=1)
        values, vectors = torch.linalg.eigh(torch.where(finite[:, None, None], H, 0.0))
        size = values.abs().amax(dim=1, keepdim=True)
        safe = values.abs().clamp_min(eps**0.5 * size).clamp_min(torch.finfo(dtype).tiny)
        direction = -(vectors @ ((vectors.mT @ b) / safe.unsqueeze(2))).squeeze(2).to(F.dtype)
        return batch.select(weak, direction, newton), weak & (values[:, 0] < -(eps**0.5) * size[:, 0])
