"""Backtracking along a direction, per sample."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchdil import batch
from torchdil.problem import Problem

_SUFFICIENT = 1e-4
_SHRINK = 0.5
_MAX_HALVINGS = 40


class Iterate(NamedTuple):
    """A point, F there, and the merit that must fall: the objective of an argmin, else ‖F‖."""

    y: Tensor
    F: Tensor
    merit: Tensor

    @staticmethod
    def at(problem: Problem, y: Tensor) -> Iterate:
        F = problem.evaluate(y)
        return Iterate(y, F, batch.norm(F) if problem.objective is None else problem.value(y))

    def where(self, mask: Tensor, other: Iterate) -> Iterate:
        """This iterate for the samples in `mask`, the other one for the rest."""
        return Iterate(
            batch.select(mask, self.y, other.y),
            batch.select(mask, self.F, other.F),
            torch.where(mask, self.merit, other.merit),
        )


def backtrack(problem: Problem, start: Iterate, direction: Tensor, step: Tensor, running: Tensor) -> tuple[Iterate, Tensor]:
    """Halve each sample's step until the merit falls enough (Armijo); returns the new iterates and which samples moved.

    Close to a minimum the objective is flat to rounding long before its gradient is zero. A change that rounding may have made
    is accepted if ‖F‖ and the slope fall instead (the approximate Wolfe condition of Hager and Zhang 2005).
    """
    slope = batch.dot(start.F, direction) if problem.objective is not None else -start.merit
    eps, size = torch.finfo(start.y.dtype).eps, start.merit.abs()
    # Rounding may have made such a change, the more so where the objective is a difference; and does make one below the second.
    noise, unseen = eps**0.5 * size, step * slope.abs() <= 10 * eps * size
    F_norm = batch.norm(start.F)
    current, moved = start, torch.zeros_like(running)
    for _ in range(_MAX_HALVINGS):
        trial = Iterate.at(problem, start.y + batch.scale(step, direction))
        enough = trial.merit <= start.merit + _SUFFICIENT * step * slope
        flat = ((trial.merit <= start.merit + noise) | unseen) & (batch.norm(trial.F) < F_norm)
        if problem.objective is not None:
            flat = flat & (batch.dot(trial.F, direction).abs() <= (1 - 2 * _SUFFICIENT) * slope.abs())
        accepted = running & ~moved & (enough | flat) & batch.finite(trial.F)
        current, moved = trial.where(accepted, current), moved | accepted
        if not bool((running & ~moved).any()):
            break
        step = torch.where(moved, step, _SHRINK * step)
    return current, moved
