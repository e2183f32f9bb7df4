"""A whole trajectory as one implicit problem.

The unknown of a sample holds, for each of T steps, the m rows of the method (its stages, and the next state unless that is the
last stage). With k_j = f(t_n + c_j h, Y_j) the residual of step n is

    F_i = Y_i - y_{n-1} - h Σ_j a_ij k_j,      i = 1..m,

one batched call of f for all steps, stages and samples. Its Jacobian is block-bidiagonal (`torchdil.ode.bidiagonal`); the
theorem of the core gives the exact gradient of the discrete solution from there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.batch import Layout
from torchdil.linear.base import LinearSolver
from torchdil.ode.bidiagonal import Bidiagonal
from torchdil.ode.field import Field
from torchdil.ode.methods import Method
from torchdil.operator import Operator
from torchdil.problem import Call, Problem, Statement

# Blocks of up to this size are factorised, all of a trajectory together if they are at most so many numbers.
_DENSE_BELOW = 256
_DENSE_NUMBERS = 2**28


class Trajectory(Statement):
    """F of T steps of a method.

    `args` of the problem are (y0, times): the initial state as the user gave it, and the T + 1 grid points, (T + 1,) or, with
    a grid for each sample, (B, T + 1).

    Args:
        method: the tableau.
        state: the structure of y0.
        field: evaluates f at many points.
        steps: T.
    """

    name, argument, symmetric = "ode", "func", False
    advice = 'take shorter steps (substeps or step_size in options), or a method that chooses them, "kvaerno5", or float64'

    def __init__(self, method: Method, state: Layout, field: Field, steps: int):
        self.method, self.state, self.field, self.steps = method, state, field, steps
        size = steps * len(method.rows) * state.size
        super().__init__(Layout.of(torch.empty((*state.batch_shape, size), device="meta"), len(state.batch_shape)))

    @property
    def fits(self) -> bool:
        """Whether the blocks of J, those of all steps, can be formed."""
        return self.fits_up_to(_DENSE_BELOW)

    def fits_up_to(self, size: int) -> bool:
        """The same, where blocks of another size are worth it."""
        k = len(self.method.rows) * self.state.size
        return k <= size and self.state.samples * self.steps * k * k <= _DENSE_NUMBERS

    def direct(self) -> LinearSolver | None:
        return Bidiagonal(steps=self.steps, rows=len(self.method.rows)) if self.fits else None

    def view(self, y: Tensor) -> Tensor:
        """The unknown (B, n) as (B, T, m, D)."""
        return y.reshape(y.shape[0], self.steps, len(self.method.rows), self.state.size)

    def previous(self, y: Tensor, y0: Tensor) -> Tensor:
        """The state before each step, (B, T, D), from the unknown (B, T, m, D) and the initial state (B, D)."""
        return torch.cat((y0.unsqueeze(1), y[:, :-1, -1]), dim=1)

    def residual(self, call: Call, y: Tensor, args: tuple[Any, ...]) -> Tensor:
        y0, times = args
        y = self.view(y)
        return (self.own(call, y, *sizes(times, y)) - self.previous(y, self.state.ravel(y0)).unsqueeze(2)).flatten(1)

    def own(self, call: Call, y: Tensor, begin: Tensor, h: Tensor) -> Tensor:
        """The part of the residual that depends on the unknowns of the same step: Y_i - h Σ_j a_ij f(t_n + c_j h, Y_j).

        Its Jacobian is made of the blocks D_n.

        Args:
            y: the unknowns of S steps, (B, S, m, D).
            begin: where they begin, (S,) or (B, S).
            h: their sizes, likewise.
        """
        rows, c = self.method.tensors(y)
        # The stages, without the row of the next state where that is one of its own.
        stages = y[:, :, : self.method.stages]
        at = h if self.field.mode in ("rows", "still") else (begin[..., None] + h[..., None] * c).flatten(-2)
        slopes = self.field(call, at, stages.flatten(1, 2)).unflatten(1, stages.shape[1:3])
        change = slopes if self.method.rows == ((1.0,),) else torch.matmul(rows, slopes)
        return y - h[..., None, None] * change

    def counted(self, F: Tensor, y: Tensor, start: Tensor | None, operator: Operator | None = None) -> Tensor:
        # The size is that of the largest step. Errors of the first steps of a trajectory that grows, or explodes where it was
        # not solved, are small beside it: a step counts in units of the largest until there.
        parts = [y] if start is None else [y, y - start]
        if operator is not None:
            parts.append(operator.rmv(y))
        sofar = torch.stack([self._lengths(part) for part in parts]).amax(dim=0).cummax(dim=1).values
        share = self._lengths(F) / sofar.clamp_min(torch.finfo(y.dtype).tiny)
        return torch.maximum(batch.length(F), sofar[:, -1] * share.amax(dim=1))

    def _lengths(self, a: Tensor) -> Tensor:
        """The norm of each step, (B, T), of (B, n)."""
        steps = self.view(a).flatten(2)
        return batch.length(steps.flatten(0, 1)).view(steps.shape[:2])

    def quick_size(self, y: Tensor, start: Tensor | None) -> Tensor:
        size = batch.length(y)
        return size if start is None else torch.maximum(size, batch.length(y - start))

    def first_size(self, problem: Problem, start: Tensor) -> Tensor:
        return batch.length(start)


def sizes(times: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Where the steps of a grid, (..., T + 1), begin and how long they are, (..., T) each, in the dtype of `like`."""
    # Differences first: times may have more digits than y.
    return times[..., :-1].to(like.dtype), times.diff(dim=-1).to(like.dtype)
