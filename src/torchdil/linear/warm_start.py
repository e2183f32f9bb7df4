"""Start a linear solve where the last one ended: x₀ = A_old⁻¹ rhs_old.

In training, J and rhs change a little from step to step where the batch is the same; then the last solution saves the first
steps of the next solve. A start that is no better than zero is dropped by the solver, sample by sample (`LinearSolver.begin`).
"""

from __future__ import annotations

import threading
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import LinearSolver
from torchdil.operator import Operator
from torchdil.solution import Result, Status


class WarmStart(LinearSolver):
    """Wraps a linear solver and gives it its last solution as `start`, if shape, dtype, device and transpose are the same.

    For full-batch training, or samples that keep their place in the batch. The memory is this object's: safe to use from
    several threads, and left behind by copies and pickles.

    Args:
        solver: any linear solver that honours `start`.

    Example:
        >>> layer = dil.ArgminLayer(score, linear_solver=dil.WarmStart(dil.CG()))
    """

    solver: LinearSolver

    def __init__(self, solver: LinearSolver):
        if not isinstance(solver, LinearSolver):
            raise TypeError(f"solver must be a linear solver such as CG(), got {solver!r}.")
        # The fields of the solver inside, for those who ask (damping, for one, is part of the problem).
        shared: dict[str, Any] = {f.name: getattr(solver, f.name, f.default) for f in fields(LinearSolver)}
        super().__init__(**shared)
        self.solver = solver
        self._last: dict[bool, Tensor] = {}
        self._lock = threading.Lock()

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        transpose = transpose and not operator.symmetric
        with self._lock:
            last = self._last.get(transpose)
        fits = last is not None and (last.shape, last.dtype, last.device) == (rhs.shape, rhs.dtype, rhs.device)
        if start is None and fits:
            start = last
        result = self.solver.solve(operator, rhs, start, transpose=transpose)
        usable = (result.status == int(Status.converged)) & batch.finite(result.value)
        with self._lock:
            self._last[transpose] = torch.where(usable.unsqueeze(1), result.value.detach(), 0.0)
        if start is not None:
            result.stats.method += ", warm start"
        return result

    def forget(self) -> None:
        """Drop the last solutions."""
        with self._lock:
            self._last.clear()

    # Neither the memory nor the lock goes into copies and pickles; and two memories are never equal.
    def __reduce__(self) -> tuple[Any, ...]:
        return WarmStart, (self.solver,)

    def __repr__(self) -> str:
        return f"WarmStart({self.solver!r})"

    __eq__ = object.__eq__
    __hash__ = object.__hash__
