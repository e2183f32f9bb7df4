"""The seam between a problem and a forward solver.

`solve(problem, y0, tolerance)` looks for y with ‖F(y)‖ <= tolerance for B problems at once, without a graph, and returns the
value, a status per sample and numbers. A sample that is done is frozen while the others go on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchdil import batch
from torchdil.live import LiveTable, asked
from torchdil.problem import Problem
from torchdil.progress import Progress
from torchdil.settings import check_count, check_number
from torchdil.solution import Result, Stats, Status


@dataclass(frozen=True)
class Solver(ABC):
    """Base of the forward solvers.

    Attributes:
        rtol: solved when ‖F(y)‖ <= rtol times the natural size of F, which is how much F changes when y does by its own size;
            None: 1e-10 in float64, 1e-5 in float32, 1e-2 in half precision.
        atol: or when ‖F(y)‖ <= atol.
        max_steps: the most iterations.
        verbose: show a table that grows by one line a step, redrawn in place in a terminal if `rich` is installed.
    """

    keeps_bounds: ClassVar[bool] = False  # whether it can solve an argmin in a box
    only: ClassVar[str] = ""  # the one problem whose structure it knows; empty: any
    sees_curvature: ClassVar[bool] = False  # whether it finds out itself that what it found is no minimum

    rtol: float | None = None
    atol: float = 0.0
    max_steps: int = 1000
    verbose: bool = False

    def __post_init__(self) -> None:
        check_number("rtol", self.rtol, least=0, optional=True)
        check_number("atol", self.atol, least=0)
        check_count("max_steps", self.max_steps)

    @abstractmethod
    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        """Look for a solution.

        Args:
            problem: F and, for an argmin, the objective.
            y0: where to start, (B, n).
            tolerance: ‖F‖ to reach, (B,).
        """

    def resume(self, problem: Problem, y: Tensor, tolerance: Tensor) -> Result:
        """Go on from an answer of this solver's that turned out not to be good enough."""
        return self.solve(problem, y, tolerance)

    def accuracy(self, dtype: torch.dtype) -> float:
        """What is asked for: rtol, or the default for the dtype."""
        return batch.default_rtol(dtype) if self.rtol is None else self.rtol

    def accepted(self, dtype: torch.dtype) -> float:
        """What counts as solved: the same, unless a solver cannot be expected to reach what it is asked for."""
        return self.accuracy(dtype)

    def progress(self, problem: Problem, F: Tensor, tolerance: Tensor, patience: int, score: Tensor | None = None) -> Progress:
        """Bookkeeping for an iteration that starts with F, (B, n), and with the merit that must fall, (B,), if one does."""
        shown = None if problem.objective is None else score
        progress = Progress(batch.norm(F), tolerance, self.max_steps, patience, self.table(problem, len(F)), shown)
        if score is not None:
            progress.stop(~torch.isfinite(score), Status.non_finite)
        return progress

    def table(self, problem: Problem, samples: int) -> LiveTable | None:
        """Where to show each step, if asked for."""
        return LiveTable(self.title(problem, samples)) if self.verbose or asked() else None

    def title(self, problem: Problem, samples: int) -> str:
        """Who solves what."""
        return f"{type(self).__name__}: {problem.name}{'' if samples == 1 else f', {samples} samples'}"

    def result(self, y: Tensor, progress: Progress) -> Result:
        """What a solver returns once `progress` is finished."""
        status = progress.status()
        stats = Stats(
            method=type(self).__name__,
            steps=progress.steps,
            residual=progress.history[-1],
            tolerance=progress.tolerance,
            history=progress.history,
        )
        return Result(y, status, stats)


def check_solver(given: Any, *others: type) -> None:
    """Raise one sentence unless it is a solver, one of the `others`, a callable that takes the place of one, or None."""
    usable = given is None or isinstance(given, (Solver, *others)) or callable(given)
    if isinstance(given, type) or not usable:
        raise TypeError(f"solver must be a torchdil solver such as Newton() or a callable (fn, y0) -> y, got {given!r}.")
