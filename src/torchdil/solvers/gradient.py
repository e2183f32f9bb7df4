"""Gradient descent y ← y - t ∇f(y), plain, with momentum or Nesterov's, t per sample.

The step of Barzilai and Borwein (1988), 1 over the curvature along the last move, is far better than steepest descent because
it lets the score rise now and then. So it is shortened only where the score would exceed the largest of the last ten (Raydan
1997).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil import batch
from torchdil.problem import Problem
from torchdil.settings import check_number
from torchdil.solution import Result, Status
from torchdil.solvers.base import Solver
from torchdil.solvers.line_search import Iterate, first_step, search

# How many of the last scores a new one is compared with.
_LOOK_BACK = 10


@dataclass(frozen=True)
class GradientDescent(Solver):
    """Gradient descent for an argmin.

    Attributes:
        step_size: t; None: the Barzilai-Borwein step of the last move, shortened where the score rises too much.
        momentum: μ; the direction is d ← μ d - ∇f (Polyak's heavy ball).
        nesterov: take the gradient at the point y + μ (y - y_last) that the momentum leads to. Without a `momentum`, μ grows as
            (k - 1) / (k + 2) and starts anew where it leads uphill (O'Donoghue and Candès 2015).

    Example:
        >>> dil.argmin(score, y0, solver=dil.GradientDescent(nesterov=True, rtol=1e-6))
    """

    max_steps: int = 10_000
    keeps_bounds = True

    step_size: float | None = None
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("step_size", self.step_size, above=0, optional=True)
        check_number("momentum", self.momentum, least=0, below=1)

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        problem.argmin_only("GradientDescent")
        now = Iterate.at(problem, y0)
        progress = self.progress(problem, now.F, tolerance, 1000, now.merit)
        step = first_step(problem, now) if self.step_size is None else torch.zeros_like(tolerance)
        move, age = torch.zeros_like(y0), torch.zeros_like(step)
        scores = [now.merit]
        while not progress.finished():
            running = progress.running
            start, direction = self._lead(problem, now, batch.select(running, move, torch.zeros_like(move)), age)
            stuck = torch.zeros_like(running)
            if self.step_size is None:
                plain = not (self.momentum or self.nesterov)
                highest = torch.stack(scores).amax(dim=0) if plain else None
                new, moved, _ = search(problem, start, direction, step, running, highest=highest)
                new, stuck = new.where(moved, now), running & ~moved
                progress.stop(stuck & (batch.norm(move) == 0), Status.stagnated)  # else it goes on without its momentum
            else:
                new = Iterate.at(problem, batch.select(running, start.y + self.step_size * direction, now.y))
                lost = ~(batch.finite(new.F) & torch.isfinite(new.merit))
                progress.stop(lost, Status.non_finite)
                new = new.where(~lost, now)
            dy, dF = (new.y - start.y).detach(), (new.F - start.F).detach()
            problem.remember(dy, dF)
            curvature = batch.divide(batch.dot(dy, dF), batch.dot(dy, dy))
            longer = torch.where(curvature > 0, batch.divide(torch.ones_like(step), curvature), 2 * step)
            step = torch.where(running, longer, step)
            lost = stuck | (batch.dot(start.F, new.y - now.y) > 0) if self.nesterov else stuck
            age = torch.where(lost, 0.0, age + 1)
            move = batch.select(lost, torch.zeros_like(dy), new.y - now.y if self.nesterov else self.momentum * direction)
            now, scores = new, [*scores[1 - _LOOK_BACK :], new.merit]
            progress.advance(batch.norm(now.F), now.merit)
        return self.result(now.y, progress)

    def _lead(self, problem: Problem, now: Iterate, move: Tensor, age: Tensor) -> tuple[Iterate, Tensor]:
        """Where to start the step, and where to: `move` is what the last step leads to: μ d, or Nesterov's y - y_last."""
        if self.nesterov:
            weight = torch.full_like(age, self.momentum) if self.momentum else (age - 1).clamp_min(0) / (age + 2)
            if not bool((weight > 0).any()):
                return now, -now.F
            ahead = Iterate.at(problem, now.y + batch.scale(weight, move))
            ahead = ahead.where(batch.finite(ahead.F), now)
            return ahead, -ahead.F
        direction = move - now.F
        if self.step_size is None:  # a search needs a slope to descend
            direction = batch.select(batch.dot(direction, now.F) < 0, direction, -now.F)
        return now, direction
