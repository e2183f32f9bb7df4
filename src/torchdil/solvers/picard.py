"""Picard iteration y ← y - ρ F(y): for a fixed point with ρ = 1 this is y ← g(y)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from torchdil import batch
from torchdil.problem import Problem
from torchdil.settings import check_number
from torchdil.solution import Result
from torchdil.solvers.base import Solver


@dataclass(frozen=True)
class Picard(Solver):
    """Fixed-point iteration. Converges where g contracts; below 1, `relaxation` helps where it oscillates.

    Attributes:
        relaxation: ρ, between 0 and 1 as a rule.

    Example:
        >>> dil.fixed_point(torch.cos, torch.ones(3), solver=dil.Picard(relaxation=0.7))
    """

    relaxation: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("relaxation", self.relaxation, above=0)

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        if problem.objective is not None:
            raise ValueError("Picard() finds fixed points and roots: use Newton(), LBFGS() or GradientDescent() for an argmin.")
        y, F = y0, problem.evaluate(y0)
        progress = self.progress(problem, F, tolerance, patience=100)
        while not progress.finished():
            y_new = batch.select(progress.running, y - self.relaxation * F, y)
            F_new = batch.select(progress.running, problem.evaluate(y_new), F)
            problem.remember(y_new - y, F_new - F)
            y, F = y_new, F_new
            progress.advance(batch.norm(F))
        return self.result(y, progress)
