"""argmin_u f(u) by sampling: draw particles u, score them all, and draw the next ones where the good ones were.

The search needs no derivative, so kinks and local minima do not end it; but its answer is stationary only as far as it is
near a minimum. The report says how far, and a `polish` by a solver that follows the gradient makes it exact. All samples share
the random numbers, (P, n), so that none depends on its neighbours.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.batch import Layout
from torchdil.problem import Problem
from torchdil.settings import check_count, check_number
from torchdil.solution import Result, Stats, Status
from torchdil.solvers.base import Solver
from torchdil.solvers.bounds import Box, as_numbers, check_bounds, clip, rows_of

# How many numbers of particles to hold at a time.
_CHUNK = 2**24
# The share of the last covariance that stays: without it a few good particles on one side end the search there.
_MEMORY = 0.5
# Particles for each unknown from which on they tell a covariance, not only its diagonal.
_CORRELATED = 20
# What is learnt is rounded to this part of the last standard deviation.
_GRID = 2**26


@dataclass(frozen=True)
class _Sampling(Solver):
    """Base of the solvers that sample; `RandomShooting` says what the fields are."""

    keeps_bounds = True

    max_steps: int = 100
    bounds: tuple[Any, Any] | None = field(default=None, compare=False)
    particles: int = 1000
    scale: float | None = None
    seed: int | torch.Generator = 0
    polish: Solver | None = None
    _box: Any = field(default=None, init=False, repr=False)  # the bounds as numbers, which can be compared and hashed

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bounds is not None:
            check_bounds(self.bounds)
            object.__setattr__(self, "_box", as_numbers(self.bounds))
        check_count("particles", self.particles, 2)
        check_number("scale", self.scale, above=0, below=math.inf, optional=True)
        if not isinstance(self.seed, (int, torch.Generator)):
            raise TypeError(f"seed must be an integer or a torch.Generator, got {self.seed!r}.")
        if self.polish is not None and (not isinstance(self.polish, Solver) or isinstance(self.polish, _Sampling)):
            raise TypeError(f"polish must be None or a solver that follows the gradient, such as LBFGS(), got {self.polish!r}.")

    @abstractmethod
    def _weights(self, scores: Tensor) -> Tensor | None:
        """How much each particle counts for the next round, (P, B), from their scores, (P, B); None: draw as before."""

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        objective = problem.argmin_only(type(self).__name__)
        box = self._rows(problem, y0)
        start = clip(y0, box)
        F_start, first = problem.measure(start)
        scorer = _Scorer(objective)
        with torch.no_grad():
            best, lowest, steps = self._search(problem, scorer, start, first, box)
        F, score = problem.measure(best)
        before = batch.norm(F).detach()
        method = type(self).__name__ + ("" if scorer.vmapped else ", one particle at a time")
        stats = Stats(method, steps, before, tolerance, history=[batch.norm(F_start).detach(), before])
        status = torch.where(before <= tolerance, int(Status.converged), int(Status.not_stationary))
        result = Result(best, status, stats)
        if self.polish is not None:
            result = self._polished(problem, result, score, y0, box)
        return result._replace(status=torch.where(lowest.isfinite(), result.status, int(Status.non_finite)))

    def resume(self, problem: Problem, y: Tensor, tolerance: Tensor) -> Result:
        if self.polish is None:
            return self.solve(problem, y, tolerance)
        box = self._rows(problem, y)
        F, score = problem.measure(y)
        residual = batch.norm(F)
        stats = Stats(type(self).__name__, torch.zeros_like(residual, dtype=torch.long), residual, tolerance)
        return self._polished(problem, Result(y, stats.steps, stats), score, y, box)

    def _rows(self, problem: Problem, y: Tensor) -> Box | None:
        """The bounds of this solver and of the problem, (B, n) each."""
        box = problem.box
        if self.bounds is not None:
            low, high = (bound.detach() for bound in rows_of(self.bounds, problem.layout or Layout.of(y, 1), y))
            box = (low, high) if box is None else (torch.maximum(low, box[0]), torch.minimum(high, box[1]))
            if not bool((box[0] < box[1]).all()):
                raise ValueError(f"bounds of {type(self).__name__}() must overlap with those of the problem.")
        if box is not None and self.scale is None and not bool((box[0].isfinite() & box[1].isfinite()).all()):
            raise ValueError(
                f"{type(self).__name__}() cannot draw between infinite bounds: give it a scale, or bounds of its own."
            )
        return box

    def _search(
        self, problem: Problem, scorer: _Scorer, start: Tensor, first: Tensor, box: Box | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The best particles (B, n), their scores (B,), and the rounds that it took (B,)."""
        chunk, index = max(1, _CHUNK // max(1, start.numel())), torch.arange(len(start), device=start.device)
        cloud, generator = self._cloud(start, box), self._generator(start.device)
        best, lowest = start, torch.where(first.isfinite(), first, torch.inf)
        running, steps = torch.ones_like(lowest, dtype=torch.bool), torch.zeros_like(index)
        table = self.table(problem, len(start))
        if table is not None:
            table.row(0, running, None, lowest)
        for step in range(1, self.max_steps + 1):
            noise = self._noise(start, box, generator)
            found = []
            for some in noise.split(chunk):
                particles = cloud.particles(some)
                found.append(scorer(particles))
                value, which = found[-1].min(dim=0)
                better = running & (value < lowest)
                best = batch.select(better, particles[which, index], best)
                lowest = torch.where(better, value, lowest)
            scores = torch.cat(found)
            steps = steps + running
            # Where the scores differ by rounding only, there is nothing to learn any more.
            running = running & ~(scores.amax(0) - scores.amin(0) <= 4 * torch.finfo(scores.dtype).eps * lowest.abs())
            done = step == self.max_steps or (step % batch.check_every(start.device) == 0 and not bool(running.any()))
            if table is not None:
                table.row(step, running, None, lowest, last=done)
            if done:
                break
            weights = self._weights(scores)
            if weights is not None:
                cloud = cloud.refit(noise, weights.to(start.dtype), chunk)
        return best, lowest, steps

    def _cloud(self, start: Tensor, box: Box | None) -> _Cloud:
        """Where the first round draws."""
        variance = self._std(start, box).square()
        correlated = self.particles >= _CORRELATED * start.shape[1] and start.dtype in (torch.float32, torch.float64)
        return _Cloud.of(start, torch.diag_embed(variance) if correlated else variance, box)

    def _std(self, start: Tensor, box: Box | None) -> Tensor:
        """How far from the start the first round goes, (B, n)."""
        if self.scale is not None:
            return torch.full_like(start, self.scale)
        if box is not None:
            return 0.25 * (box[1] - box[0])
        return start.square().mean(dim=1, keepdim=True).sqrt().clamp_min(1.0).expand_as(start)

    def _noise(self, start: Tensor, box: Box | None, generator: torch.Generator) -> Tensor:
        """The random numbers of a round, (P, n); the first particle is the mean, in many dimensions the best one as a rule."""
        noise = torch.randn(self.particles, start.shape[1], generator=generator, dtype=start.dtype, device=start.device)
        noise[0] = 0.0
        return noise

    def _generator(self, device: torch.device) -> torch.Generator:
        """One draw from the user's generator seeds the whole solve, however many numbers that takes."""
        if isinstance(self.seed, torch.Generator):
            seed = int(torch.randint(2**62, (), generator=self.seed, device=self.seed.device))
        else:
            seed = self.seed
        return torch.Generator(device).manual_seed(seed)

    def _polished(self, problem: Problem, found: Result, score: Tensor, y0: Tensor, box: Box | None) -> Result:
        """Go on from the best particles; samples that leave the bounds or get worse stay where they were."""
        assert self.polish is not None
        y, _, stats = found
        tolerance = self._tolerance(problem, y, y0, stats.tolerance)
        value, status, after = self.polish.solve(problem, y, tolerance)
        with torch.no_grad():
            reached = problem.argmin_only("polish")(value)
            kept = reached <= score + torch.finfo(score.dtype).eps ** 0.5 * score.abs()  # rounding; False for NaN
            if box is not None:
                kept = kept & ((box[0] <= value) & (value <= box[1])).all(dim=1)
        status = torch.where(kept, status, int(Status.not_stationary))
        residual = torch.where(kept, after.residual, stats.residual)
        method, steps = f"{stats.method}, then {after.method}", stats.steps + after.steps
        return Result(batch.select(kept, value, y), status, replace(after, method=method, steps=steps, residual=residual))

    def _tolerance(self, problem: Problem, y: Tensor, y0: Tensor, tolerance: Tensor) -> Tensor:
        """The tolerance relative to the size of F here, if less than at y0: judged by it later, the search would run again."""
        way = batch.select(batch.norm(y - y0) > batch.norm(y), y - y0, y)
        with torch.no_grad():
            own = (self.accuracy(y.dtype) * batch.norm(problem.operator(y).rmv(way))).clamp_min(self.atol)
        return torch.where((own > 0) & ~(own >= tolerance), own, tolerance)  # a y0 without a score has no tolerance


@dataclass(frozen=True)
class RandomShooting(_Sampling):
    """Random shooting for an argmin: the best of many random particles, and of y0.

    They are uniform in the bounds; without bounds, or with a `scale`, normal around y0.

    Attributes:
        max_steps: rounds, each of as many new particles.
        bounds: (low, high), which no particle leaves: numbers, tensors that broadcast to the shape of y, or nested like y.
        particles: P, how many to draw a round.
        scale: the standard deviation around y0; None: uniform in the bounds, or without them the root mean square of y0, and at
            least one.
        seed: a number, with which every solve draws the same, or a `torch.Generator`, which goes on from solve to solve.
        polish: a solver such as `LBFGS()` that goes on from the best particle to the tolerance; None: leave it there, where it
            is `not_stationary` as a rule.

    Example:
        >>> dil.argmin(cost, controls, (x,), solver=dil.RandomShooting(bounds=(-10.0, 10.0), polish=dil.Newton()))
    """

    max_steps: int = 1

    def _weights(self, scores: Tensor) -> None:
        return None

    def _cloud(self, start: Tensor, box: Box | None) -> _Cloud:
        if box is None or self.scale is not None:
            return _Cloud.of(start, self._std(start, box).square(), box)
        return _Cloud.of(0.5 * (box[0] + box[1]), (0.5 * (box[1] - box[0])).square(), box)

    def _noise(self, start: Tensor, box: Box | None, generator: torch.Generator) -> Tensor:
        uniform = box is not None and self.scale is None
        draw = torch.rand if uniform else torch.randn
        noise = draw(self.particles, start.shape[1], generator=generator, dtype=start.dtype, device=start.device)
        return 2 * noise - 1 if uniform else noise


@dataclass(frozen=True)
class CEM(_Sampling):
    """The cross-entropy method for an argmin (Rubinstein 1999): normal particles, fitted anew to the best of them.

    The covariance is taken around the mean that the particles were drawn from (Hansen 2016), so that the search stays wide
    while it moves; it is a full one where there are at least 20 particles for each unknown, else diagonal.

    Attributes:
        elites: the share of the particles that counts.
        scale: the standard deviation of the first round, around y0; None: a quarter of the bounds' width, or without bounds the
            root mean square of y0, and at least one.
        bounds, particles, seed, polish: as in `RandomShooting`; `max_steps` rounds.

    Example:
        >>> dil.argmin(score, y0, solver=dil.CEM(bounds=(-5.0, 5.0), polish=dil.LBFGS()))
    """

    elites: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("elites", self.elites, above=0, most=1)

    def _weights(self, scores: Tensor) -> Tensor:
        last = scores.sort(dim=0).values[math.ceil(self.elites * len(scores)) - 1]
        return ((scores <= last) & scores.isfinite()).to(scores.dtype)


@dataclass(frozen=True)
class MPPI(_Sampling):
    """Model predictive path integral control as a solver for any argmin (Williams et al. 2017).

    A particle counts by exp(-(f - f_min) / (λ (f_median - f_min))), so that the units of f do not matter. The noise shrinks as
    the particles agree: its covariance is fitted with the same weights, as `CEM` does.

    Attributes:
        temperature: λ, relative to the spread of the particles' scores from the lowest to the median.
        scale: the standard deviation of the first round, around y0; None: a quarter of the bounds' width, or without bounds the
            root mean square of y0, and at least one.
        bounds, particles, seed, polish: as in `RandomShooting`; `max_steps` rounds.

    Example:
        >>> dil.argmin(cost, controls, (x,), solver=dil.MPPI(scale=2.0, polish=dil.Newton()))
    """

    temperature: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("temperature", self.temperature, above=0, below=math.inf)

    def _weights(self, scores: Tensor) -> Tensor:
        ordered, finite = scores.sort(dim=0).values, scores.isfinite()
        middle = (finite.sum(dim=0, keepdim=True) - 1).clamp_min(0) // 2
        spread = (ordered.gather(0, middle) - ordered[:1]).clamp_min(torch.finfo(scores.dtype).tiny)
        return torch.where(finite, torch.exp(-(scores - ordered[:1]) / spread / self.temperature), 0.0)


@dataclass(frozen=True)
class _Cloud:
    """A normal distribution for each sample, held inside the box.

    Attributes:
        mean: (B, n).
        covariance: (B, n, n), or its diagonal, (B, n).
        factor: its square root, of the same shape.
        box: (low, high), (B, n) each, or None.
    """

    mean: Tensor
    covariance: Tensor
    factor: Tensor
    box: Box | None

    @staticmethod
    def of(mean: Tensor, covariance: Tensor, box: Box | None) -> _Cloud:
        if covariance.dim() == 2:
            return _Cloud(mean, covariance, covariance.sqrt(), box)
        diagonal = torch.diagonal(covariance, dim1=1, dim2=2)
        rounding = max(10 * torch.finfo(mean.dtype).eps, mean.shape[1] / _GRID)
        factor, info = torch.linalg.cholesky_ex(covariance + rounding * torch.diag_embed(diagonal))
        # At a bound all particles are equal, and the covariance is singular.
        factor = torch.where((info == 0)[:, None, None], factor, torch.diag_embed(diagonal.sqrt()))
        return _Cloud(mean, covariance, factor, box)

    def particles(self, noise: Tensor) -> Tensor:
        """(P, n) -> (P, B, n)."""
        if self.factor.dim() == 2:
            return clip(self.mean + self.factor * noise.unsqueeze(1), self.box)
        # One product a sample: of a single large one the rounding would depend on the batch.
        moved = torch.bmm(noise.expand(len(self.mean), *noise.shape), self.factor.mT)
        return clip(self.mean + moved.transpose(0, 1).contiguous(), self.box)

    def refit(self, noise: Tensor, weights: Tensor, chunk: int) -> _Cloud:
        """The distribution of the weighted particles; samples whose weights (P, B) are all zero keep theirs."""
        total = weights.sum(dim=0)
        weights = weights / torch.where(total > 0, total, 1.0)
        shift, covariance = torch.zeros_like(self.mean), torch.zeros_like(self.covariance)
        for some, weight in zip(noise.split(chunk), weights.split(chunk), strict=True):
            away = self.particles(some) - self.mean
            weighted = weight.unsqueeze(2) * away
            shift = shift + weighted.sum(dim=0)
            if covariance.dim() == 2:
                covariance = covariance + (weighted * away).sum(dim=0)
            else:
                covariance = covariance + torch.bmm(weighted.permute(1, 2, 0), away.transpose(0, 1))
        mixed = _MEMORY * self.covariance + (1 - _MEMORY) * covariance
        if mixed.dim() == 2:
            std = self.covariance.sqrt()
            unit, learnt = self.covariance, (total > 0).unsqueeze(1)
        else:
            std = torch.diagonal(self.covariance, dim1=1, dim2=2).sqrt()
            unit, learnt = std.unsqueeze(2) * std.unsqueeze(1), (total > 0)[:, None, None]
        mean = self.mean + _rounded(shift, std)
        return _Cloud.of(mean, torch.where(learnt, _rounded(mixed, unit), self.covariance), self.box)


def _rounded(a: Tensor, unit: Tensor) -> Tensor:
    """To the grid: sums over the particles round differently in another batch, and comparisons of scores would magnify that."""
    return unit * (batch.divide(a, unit) * _GRID).round() / _GRID if a.dtype == torch.float64 else a


class _Scorer:
    """f of many particles, (P, B, n) -> (P, B), with infinity for what is not finite.

    All at once by `torch.vmap`; where f has a branch or an operation that it cannot take, one after the other.
    """

    def __init__(self, objective: Callable[[Tensor], Tensor]):
        self.vmapped = True
        self._objective = objective

    def __call__(self, particles: Tensor) -> Tensor:
        if self.vmapped:
            try:
                scores = torch.vmap(self._objective, randomness="different")(particles)
            except Exception:  # of whatever kind: a fault of the function itself shows again without vmap
                self.vmapped = False
        if not self.vmapped:
            scores = torch.stack([self._objective(y) for y in particles])
        return torch.where(scores.isfinite(), scores, torch.inf)
