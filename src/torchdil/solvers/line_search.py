"""A step along a direction, per sample: short enough that the merit falls and, where asked for, long enough."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchdil import batch
from torchdil.problem import Problem

_SUFFICIENT = 1e-4
_MAX_TRIALS = 40


class Iterate(NamedTuple):
    """A point, F there, and the merit that must fall: the objective of an argmin, else ‖F‖."""

    y: Tensor
    F: Tensor
    merit: Tensor

    @staticmethod
    def at(problem: Problem, y: Tensor) -> Iterate:
        return Iterate(y, *problem.measure(y))

    def where(self, mask: Tensor, other: Iterate) -> Iterate:
        """This iterate for the samples in `mask`, the other one for the rest."""
        return Iterate(
            batch.select(mask, self.y, other.y),
            batch.select(mask, self.F, other.F),
            torch.where(mask, self.merit, other.merit),
        )


def search(
    problem: Problem,
    start: Iterate,
    direction: Tensor,
    step: Tensor,
    running: Tensor,
    curvature: float | None = None,
) -> tuple[Iterate, Tensor]:
    """Change each sample's step until the merit falls enough (Armijo); returns the new iterates and which samples moved.

    With `curvature` c the step must not be too short either: slope(t) >= c slope(0), the second Wolfe condition, found by
    bracketing (Lewis and Overton 2013). Then Δyᵀ ΔF > 0, which is what quasi-Newton methods live on.

    Close to a minimum the objective is flat to rounding long before its gradient is zero. A change that rounding may have made
    is accepted if ‖F‖ and the slope fall instead (the approximate Wolfe condition of Hager and Zhang 2005).
    """
    is_argmin = problem.objective is not None
    slope = (batch.dot(start.F, direction) if is_argmin else -start.merit).detach()
    eps, size = torch.finfo(start.y.dtype).eps, start.merit.abs()
    # Rounding may have made such a change, the more so where the objective is a difference; and does make one below the second.
    noise, unseen = eps**0.5 * size, step * slope.abs() <= 10 * eps * size
    F_norm = batch.norm(start.F)
    current, moved, open_ = start, torch.zeros_like(running), running
    low, high = torch.zeros_like(step), torch.full_like(step, torch.inf)
    for _ in range(_MAX_TRIALS):
        trial = Iterate.at(problem, start.y + batch.scale(step, direction))
        change = (trial.merit - start.merit).detach()
        enough = change <= _SUFFICIENT * step * slope
        flat = ((change <= noise) | unseen) & (batch.norm(trial.F) < F_norm)
        if is_argmin:
            slope_now = batch.dot(trial.F, direction).detach()
            flat = flat & (slope_now.abs() <= (1 - 2 * _SUFFICIENT) * slope.abs())
        fallen = open_ & (enough | flat) & batch.finite(trial.F)
        # A step that is too short is kept, in case no longer one is good.
        current, moved = trial.where(fallen, current), moved | fallen
        short = fallen & ~flat & (slope_now < curvature * slope) if curvature is not None else torch.zeros_like(fallen)
        open_ = open_ & (~fallen | short)
        if not bool(open_.any()):
            break
        low, high = torch.where(short, step, low), torch.where(open_ & ~short, step, high)
        # The minimum of the parabola through what is known, kept away from the ends; half where rounding drew it.
        parabola = -0.5 * slope * step.square() / (change - step * slope)
        back = torch.where(change.isfinite() & (change > noise), parabola.clamp(0.1 * step, 0.5 * step), 0.5 * step)
        between = torch.where(low > 0, 0.5 * (low + high), back)
        step = torch.where(open_, torch.where(high.isfinite(), between, 2 * step), step)
    return current, moved
