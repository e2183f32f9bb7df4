"""Linear systems with the Jacobian of a trajectory, one step after another, matrix-free.

With the blocks D_n of `torchdil.ode.bidiagonal`, a solve with D_n or D_nᵀ at a time by any linear solver of the core:

    J x = r:     D_n x_n = r_n + E x_{n-1}        (n = 1..T; the last state of x_{n-1} enters every row)
    Jᵀ g = v:    D_nᵀ g_n = v_n + L Eᵀ g_{n+1}    (n = T..1)

This is the paper's way (CG on the normal equations of each step), and the way for states too large to form D_n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import LinearSolver
from torchdil.ode.krylov import Block, confirmed
from torchdil.operator import Operator
from torchdil.solution import Result, Stats, Status


@dataclass(frozen=True)
class Sequential(LinearSolver):
    """A solve with each block in turn.

    Attributes:
        steps: T.
        rows: m, the unknowns of a step in units of the state.
        inner: solves with one block.
        local: (y (B, n), step) -> the operator D_n, (B, k); None: f is not at hand by itself, J is solved with as a whole.
        block: D_n, to be solved with by what was compiled, if anything; None: by `inner`.
        place: (y (B, n), step) -> where D_n is, as `block` takes it.
    """

    steps: int = 1
    rows: int = 1
    inner: LinearSolver | None = None
    local: Callable[[Tensor, int], Operator] | None = None
    block: Block | None = None
    place: Callable[[Tensor, int], tuple[Tensor, tuple[Tensor, ...]]] | None = None

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        assert self.inner is not None
        if self.local is None:
            return self.inner.solve(operator, rhs, start, transpose=transpose)
        inner, local = self.inner, self.local

        def step(n: int, right: Tensor, guess: Tensor | None) -> Result:
            return inner.solve(local(operator.y, n), right, guess, transpose=transpose)

        for block in (self.block, None) if self.block is not None else (None,):
            solve = step if block is None else self._quickly(block, operator, transpose)
            value, status, stats = self._walk(rhs, transpose, solve)
            operator.products += stats.products
            remainder = rhs - operator.product(transpose)(value) - self.damping * value
            solved = (status == Status.converged).unsqueeze(1)
            if not stats.exact or confirmed(torch.where(solved, remainder, 0.0), stats.tolerance, rhs):
                stats.residual, stats.verified = batch.norm(remainder), True
                return Result(value, status, stats)
            if block is not None:  # what was compiled is out of date
                block.forget()
        # D_n is made by another call of f, which may have changed since the graph of J was made: then J as a whole.
        return inner.solve(operator, rhs, transpose=transpose)

    def _quickly(self, block: Block, operator: Operator, transpose: bool) -> Callable[[int, Tensor, Tensor | None], Result]:
        """A step by what was compiled."""
        taken, place = operator.memo.setdefault(("taken", transpose), {}), self.place
        assert place is not None

        def step(n: int, right: Tensor, guess: Tensor | None) -> Result:
            # Fixed for this point: two backward passes through it must not differ in a bit.
            steps = taken.setdefault(n, block.expected(transpose))
            return block.solve(*place(operator.y, n), right, steps, transpose, guess)

        return step

    def _walk(self, rhs: Tensor, transpose: bool, solve: Callable[[int, Tensor, Tensor | None], Result]) -> Result:
        """All steps, each by `solve(step, rhs, guess)`."""
        k = rhs.shape[1] // self.steps
        d = k // self.rows
        b = rhs.unflatten(1, (self.steps, k))
        found: list[Tensor] = []
        carried = torch.zeros(rhs.shape[0], d, dtype=rhs.dtype, device=rhs.device)
        guess: Tensor | None = None
        results = []
        for n in reversed(range(self.steps)) if transpose else range(self.steps):
            if transpose:
                right = torch.cat((b[:, n, : k - d], b[:, n, k - d :] + carried), dim=1)
            else:
                right = b[:, n] + carried.repeat(1, self.rows)
            result = solve(n, right, guess)
            guess = result.value
            carried = guess.unflatten(1, (self.rows, d)).sum(dim=1) if transpose else guess[:, k - d :]
            found.append(guess)
            results.append(result)
        value = torch.stack(found[::-1] if transpose else found, dim=1).flatten(1)
        return Result(value, _worst([r.status for r in results]), self._stats(rhs, [r.stats for r in results]))

    def _stats(self, rhs: Tensor, stats: list[Stats]) -> Stats:
        return Stats(
            method=f"step by step, {stats[0].method}",
            steps=torch.stack([s.steps for s in stats]).sum(dim=0),
            residual=torch.stack([s.residual for s in stats]).square().sum(dim=0).sqrt(),
            # What is left of each step adds up.
            tolerance=torch.maximum(self.tolerance(rhs), torch.stack([s.tolerance for s in stats]).square().sum(dim=0).sqrt()),
            products=sum(s.products for s in stats),
            exact=stats[0].exact,
        )


def _worst(statuses: list[Tensor]) -> Tensor:
    """The first status of each sample that is not `converged`."""
    stacked = torch.stack(statuses)
    first = (stacked != int(Status.converged)).int().argmax(dim=0)
    return stacked.gather(0, first.unsqueeze(0)).squeeze(0)
