"""Per-sample bookkeeping of an iteration: who still runs, who is done, and why.

Solvers ask `finished()` before each step and tell `advance(residual)` after it. A sample that is done is frozen: it keeps its
status, its step count and, because solvers select what moves, its value.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchdil.batch import check_every
from torchdil.live import LiveTable
from torchdil.solution import Status, tally

_RUNNING = -1
# Rare ends (non-finite values, stagnation) are looked for every so many steps: they cost more to test than convergence.
_REVIEW_EVERY = 10
_IMPROVEMENT = 0.999


class Progress:
    """The state of B solves that advance together.

    Args:
        residual: ‖residual‖ at the start, (B,).
        tolerance: the residual to reach, (B,).
        max_steps: the most steps to take.
        patience: steps without a new best residual after which a sample has stagnated.
        table: where to show each step; None: nowhere.
        score: the objective at the start, (B,), for the table.
    """

    def __init__(
        self,
        residual: Tensor,
        tolerance: Tensor,
        max_steps: int,
        patience: int,
        table: LiveTable | None = None,
        score: Tensor | None = None,
    ):
        self.tolerance = tolerance
        self.history: list[Tensor] = []
        self.running = torch.ones_like(residual, dtype=torch.bool)
        self.steps = torch.zeros_like(residual, dtype=torch.long)
        self._status = torch.full_like(self.steps, _RUNNING)
        self._best, self._best_step = residual, 0
        self._stale = torch.zeros_like(self.steps)
        self._max_steps, self._patience = max_steps, patience
        self._check_every = check_every(residual.device)
        self._taken = 0
        self._table, self._score = table, score
        self._residuals: list[Any] = []
        self._latest: tuple[Any, Any, Any] = self.state
        self._record(residual)
        if not bool(torch.isfinite(residual).all()):
            self._review(residual)

    def finished(self) -> bool:
        """Whether no sample needs another step."""
        if self._taken >= self._max_steps:
            return True
        return self._taken % self._check_every == 0 and not bool(self.running.any())

    def advance(self, residual: Tensor, score: Tensor | None = None) -> None:
        """One step was taken and left `residual`, (B,), and, for the table, the objective, (B,)."""
        self._taken += 1
        self._score = None if self._score is None else score
        self.steps += self.running
        self._record(residual)
        if self._taken % _REVIEW_EVERY == 0:
            self._review(residual)

    @property
    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """Who runs, the codes and the steps, (B,) each: for a solver that keeps these itself."""
        return self.running, self._status, self.steps

    @property
    def room(self) -> int:
        """How many steps may be taken before the next test of convergence."""
        return max(1, min(self._check_every - self._taken % self._check_every, self._max_steps - self._taken))

    def update(self, residuals: list[Any], running: Any, status: Any, steps: Any) -> tuple[bool, tuple[Any, Any, Any]]:
        """Steps were taken by a solver that keeps the state itself, as tensors or, of one sample, as numbers.

        Returns:
            `finished()`, and the state.
        """
        before, self._taken = self._taken, self._taken + len(residuals)
        self._latest = running, status, steps
        self._residuals += residuals
        number = not isinstance(running, Tensor)
        if number and not running:
            self._absorb()
            return True, self._latest
        if self._taken // _REVIEW_EVERY > before // _REVIEW_EVERY:
            self._absorb()
            self._review(self.history[-1])
            kept = self.state
            self._latest = (kept[0].item(), kept[1].item(), kept[2].item()) if number else kept
        elif number:
            return self._taken >= self._max_steps, self._latest
        else:
            self.running = running
        return self.finished(), self._latest

    def _absorb(self) -> None:
        """Take over what such a solver has left."""
        if self._residuals:
            like = self.tolerance
            self.running, self._status, self.steps = (
                part if isinstance(part, Tensor) else torch.full_like(old, part)
                for part, old in zip(self._latest, self.state, strict=True)
            )
            if not isinstance(self._residuals[0], Tensor):
                self._residuals = list(like.new_tensor(self._residuals).unsqueeze(1).unbind())
            self.history += self._residuals
            self._residuals = []

    def stop(self, mask: Tensor, status: Status | Tensor) -> None:
        """End the running samples in `mask` with `status`, one for all or one each."""
        mask = mask & self.running
        self._status = torch.where(mask, status, self._status)
        self.running = self.running ^ mask

    def correct(self, residual: Tensor) -> Tensor:
        """Replace the last residual, a recurrence's estimate, by the true one; who claimed to converge and had not runs again.

        Returns:
            The mask of those, (B,).
        """
        self.history[-1] = residual
        refuted = (self._status == int(Status.converged)) & ~(residual <= self.tolerance)
        self._status = torch.where(refuted, _RUNNING, self._status)
        self.running = self.running | refuted
        self.stop(residual <= self.tolerance, Status.converged)
        return refuted

    def settle(self, mask: Tensor, attainable: Tensor) -> None:
        """End samples that get no further: `converged` where the residual is what rounding leaves, else `stagnated`."""
        mask = mask & self.running
        settled = mask & (self.history[-1] <= attainable)
        self.tolerance = torch.where(settled, attainable, self.tolerance)
        self.stop(settled, Status.converged)
        self.stop(mask, Status.stagnated)

    def status(self) -> Tensor:
        """A `Status` code per sample, (B,); call when finished."""
        self._absorb()
        if bool(self.running.any()):
            self._review(self.history[-1])
        self._show(last=True)
        status = torch.where(self._status == _RUNNING, int(Status.max_steps), self._status)
        if self._table is not None:
            self._table.close(tally(status))
            self._table = None
        return status

    def _record(self, residual: Tensor) -> None:
        self.history.append(residual)
        self.stop(residual <= self.tolerance, Status.converged)
        self._show()

    def _show(self, last: bool = False) -> None:
        if self._table is not None and len(self.steps):
            self._table.row(int(self.steps.max()), self.running, self.history[-1], self._score, last=last)

    def _review(self, residual: Tensor) -> None:
        self.stop(~torch.isfinite(residual), Status.non_finite)
        improved = residual < _IMPROVEMENT * self._best
        for past in self.history[self._best_step + 1 : -1]:
            improved = improved | (past < _IMPROVEMENT * self._best)
            self._best = torch.minimum(self._best, past)
        self._best = torch.minimum(self._best, residual)
        self._stale = torch.where(improved, 0, self._stale + (self._taken - self._best_step))
        self._best_step = self._taken
        self.stop(self._stale > self._patience, Status.stagnated)
