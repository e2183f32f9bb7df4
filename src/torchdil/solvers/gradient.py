"""Gradient descent y ← y - t ∇f(y), t per sample by Barzilai-Borwein and backtracking."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil import batch
from torchdil.problem import Problem
from torchdil.progress import Progress
from torchdil.solution import Result, Status
from torchdil.solvers.base import Solver
from torchdil.solvers.line_search import Iterate, backtrack


@dataclass(frozen=True)
class GradientDescent(Solver):
    """Gradient descent for an argmin.

    Attributes:
        step_size: t; None: the Barzilai-Borwein step of the last move, shortened until the score falls enough.

    Example:
        >>> dil.argmin(score, y0, solver=dil.GradientDescent(rtol=1e-6))
    """

    max_steps: int = 10_000
    step_size: float | None = None

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        if problem.objective is None:
            raise ValueError(f"solver=GradientDescent() needs an argmin, got a {problem.name}: use Newton() or Picard().")
        now = Iterate.at(problem, y0)
        progress = Progress(batch.norm(now.F), tolerance, self.max_steps, patience=1000)
        # The first step moves y by its own size, or by one.
        step = batch.divide(batch.norm(y0).clamp_min(1.0), batch.norm(now.F))
        while not progress.finished():
            if self.step_size is None:
                new, moved = backtrack(problem, now, -now.F, step, progress.running)
                progress.stop(~moved, Status.stagnated)
            else:
                new = Iterate.at(problem, now.y - self.step_size * now.F).where(progress.running, now)
            dy, dF = new.y - now.y, new.F - now.F
            problem.remember(dy, dF)
            curvature = batch.divide(batch.dot(dy, dF), batch.dot(dy, dy))
            step = torch.where(curvature > 0, batch.divide(torch.ones_like(step), curvature), 2 * step)
            now = new
            progress.advance(batch.norm(now.F))
        return self.result(now.y, progress)
