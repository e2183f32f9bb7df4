"""Approximations of A⁻¹ that are cheap on purpose: the Neumann series, and its first term.

With A = I - B, A⁻¹ = I + B + B² + ...; for a fixed point y = g(y), B is the Jacobian of g, and the series converges where g
contracts. Their gradients are biased; the report says "approximate", and they count as failed only where the series diverges.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import LinearSolver
from torchdil.operator import Operator
from torchdil.solution import Result, Stats, Status

# A residual may rise before it falls (B is seldom normal); beyond this factor over the best it is a series that diverges.
_DIVERGED = 10.0


@dataclass(frozen=True)
class Neumann(LinearSolver):
    """The truncated Neumann series: x ← x + (rhs - A x), at most `max_steps` terms, one product each.

    A sample whose series diverges stops as `stagnated` at the best point it has seen. There is nothing to precondition.

    Example:
        >>> dil.fixed_point(g, y0, linear_solver=dil.Neumann(max_steps=10))
    """

    max_steps: int | None = 20

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        system = self.system(operator, transpose)
        before = operator.products
        x, r = self.begin(system, rhs, start)
        best, best_norm = x, batch.norm(r)
        progress = self.progress(best_norm, rhs)
        while not progress.finished():
            active = progress.running
            x = batch.select(active, x + r, x)
            r = batch.select(active, r - system(r), r)  # rhs - A (x + r)
            residual = batch.norm(r)
            better = active & (residual < best_norm)
            best, best_norm = batch.select(better, x, best), torch.where(better, residual, best_norm)
            progress.advance(residual)
            progress.stop((residual > _DIVERGED * best_norm) & (residual < torch.inf), Status.stagnated)
        result = self.result(best, progress, "Neumann", operator.products - before, exact=False)
        result.stats.residual = best_norm
        result.stats.advice = "the series diverges, as the function does not contract there: use GMRES() or Auto()"
        return result


@dataclass(frozen=True)
class JacobianFree(LinearSolver):
    """A⁻¹ ≈ I: x = rhs, no product at all (the "Jacobian-free" or one-step gradient of a fixed point).

    Its residual is not known without a product, hence NaN, and the status `max_steps`: it asks for no trust.

    Example:
        >>> dil.fixed_point(g, y0, linear_solver=dil.JacobianFree())
    """

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        size = batch.norm(rhs)
        status = torch.where(size == 0, int(Status.converged), int(Status.max_steps))
        stats = Stats(
            method="JacobianFree",
            steps=torch.zeros_like(status),
            residual=torch.where(size == 0, 0.0, torch.nan),
            tolerance=self.tolerance(rhs),
            exact=False,
        )
        return Result(rhs.clone(), torch.where(torch.isfinite(size), status, int(Status.non_finite)), stats)
