"""A step along a direction, per sample: short enough that the merit falls and, where asked for, long enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchdil import batch
from torchdil.problem import Problem

_SUFFICIENT = 1e-4
_MAX_TRIALS = 40
# How often a step that is too short is doubled: a score without a minimum would have it doubled for ever.
_MAX_DOUBLINGS = 10
# How often a step to where the score is no number is halved. Where rounding passed for curvature it is too long by 1 / eps, and
# half of that forty times over is no less infinite: then it is cut to a tenth.
_HALVINGS = 4


class Iterate(NamedTuple):
    """A point, F there, and the merit that must fall: the objective of an argmin, else ‖F‖."""

    y: Tensor
    F: Tensor
    merit: Tensor

    @staticmethod
    def at(problem: Problem, y: Tensor) -> Iterate:
        """At y, or where the problem's bounds stop it."""
        y = problem.clip(y)
        return Iterate(y, *problem.measure(y))

    def where(self, mask: Tensor, other: Iterate) -> Iterate:
        """This iterate for the samples in `mask`, the other one for the rest."""
        return Iterate(
            batch.select(mask, self.y, other.y),
            batch.select(mask, self.F, other.F),
            torch.where(mask, self.merit, other.merit),
        )


def first_step(problem: Problem, start: Iterate) -> Tensor:
    """How far to go along -F, (B,): to the minimum if f is a parabola there, else as far as y is long, or by one."""
    with torch.no_grad():
        F = start.F.detach()
        curvature = batch.dot(F, problem.operator(start.y).rmv(F))
        parabola, length = batch.divide(batch.dot(F, F), curvature), batch.norm(start.y).clamp_min(1.0)
        return torch.where(curvature > 0, parabola, batch.divide(length, batch.norm(F))).detach()


def search(
    problem: Problem,
    start: Iterate,
    direction: Tensor,
    step: Tensor,
    running: Tensor,
    curvature: float | None = None,
    highest: Tensor | None = None,
    path: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Iterate, Tensor, Tensor]:
    """Change each sample's step until the merit falls enough (Armijo).

    With `curvature` c the step must not be too short either: slope(t) >= c slope(0), the second Wolfe condition, found by
    bracketing (Lewis and Overton 2013). Then Δyᵀ ΔF > 0, which is what quasi-Newton methods live on. A root has no slope.

    With `highest`, (B,), the merit must fall enough below that only, not below the start's: a step that is good in the long run
    may raise it for once (Grippo, Lampariello and Lucidi 1986).

    With `path`, (B,) -> (B, n), the way is not straight: it leaves the start in the direction given.

    A root may not exist: where ‖F‖ is least but not zero J is singular, and Newton's direction is long and leads nowhere. A
    step that would change neither y nor ‖F‖ by anything to speak of is not made shorter still.

    Close to a minimum the objective is flat to rounding long before its gradient is zero. A change that rounding may have made
    is accepted if ‖F‖ and the slope fall instead (the approximate Wolfe condition of Hager and Zhang 2005).

    Returns:
        The new iterates, which samples moved, and the steps that they made, (B,) each.
    """
    is_argmin = problem.objective is not None
    slope = (batch.dot(start.F, direction) if is_argmin else -start.merit).detach()
    eps, size = torch.finfo(start.y.dtype).eps, start.merit.abs()
    # Rounding may have made such a change, the more so where the objective is a difference; and does make one below the second.
    noise, unseen = eps**0.5 * size, step * slope.abs() <= 10 * eps * size
    F_norm = batch.norm(start.F)
    current, moved, open_, made = start, torch.zeros_like(running), running & batch.finite(direction), step
    low, high = torch.zeros_like(step), torch.full_like(step, torch.inf)
    # At a fold a change of y by s changes ‖F‖ by s²: a third of the digits, and two thirds.
    shortest = torch.zeros_like(step)
    if not is_argmin:
        length = batch.norm(start.y).clamp_min(1.0)
        shortest = (eps ** (1 / 3) * batch.divide(length, batch.norm(direction))).clamp_max(eps ** (2 / 3))
    allowed = torch.zeros_like(step) if highest is None else (highest - start.merit).clamp_min(0)
    for number in range(_MAX_TRIALS):
        # Samples that are done are evaluated where they are: elsewhere the function may not even exist.
        ahead = start.y + batch.scale(step, direction) if path is None else path(step)
        trial = Iterate.at(problem, batch.select(open_, ahead, start.y))
        change = (trial.merit - start.merit).detach()
        # In a box the way bends: what the slope promises is that of the step as it was made.
        promised = step * slope
        if problem.box is not None:
            promised = batch.dot(start.F, trial.y - start.y).detach().clamp_max(0)
        enough = change <= allowed + _SUFFICIENT * promised
        flat = ((change <= noise) | unseen) & (batch.norm(trial.F) < F_norm)
        if is_argmin:
            slope_now = batch.dot(trial.F, direction).detach()
            flat = flat & (slope_now.abs() <= (1 - 2 * _SUFFICIENT) * slope.abs())
        exists = batch.finite(trial.F) & torch.isfinite(trial.merit)
        fallen = open_ & (enough | flat) & exists
        # A step that is too short is kept, in case no longer one is good.
        current, moved, made = trial.where(fallen, current), moved | fallen, torch.where(fallen, step, made)
        short = torch.zeros_like(fallen)
        if is_argmin and curvature is not None and number < _MAX_DOUBLINGS:
            short = fallen & ~flat & (slope_now < curvature * slope)
        open_ = open_ & (~fallen | short) & (step > shortest)
        if not bool(open_.any()):
            break
        low, high = torch.where(short, step, low), torch.where(open_ & ~short, step, high)
        # The minimum of the parabola through what is known, kept away from the ends; half where rounding drew it.
        parabola = -0.5 * slope * step.square() / (change - step * slope)
        back = torch.where(change.isfinite() & (change > noise), parabola.clamp(0.1 * step, 0.5 * step), 0.5 * step)
        if number >= _HALVINGS:
            back = torch.where(exists, back, 0.1 * step)
        between = torch.where(low > 0, 0.5 * (low + high), back)
        step = torch.where(open_, torch.where(high.isfinite(), between, 2 * step), step)
    return current, moved, made
