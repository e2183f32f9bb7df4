"""The default linear solver: direct where n is small, elsewhere the Krylov method that fits J.

Samples that the first method could not solve go on with a second from where the first left them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import AtOnce, LinearSolver
from torchdil.linear.bicgstab import BiCGStab
from torchdil.linear.cg import CG
from torchdil.linear.dense import Dense
from torchdil.linear.evidence import Chosen
from torchdil.linear.gmres import GMRES
from torchdil.linear.minres import MINRES
from torchdil.linear.spectrum import Either
from torchdil.operator import Operator
from torchdil.settings import check_count
from torchdil.solution import Result, Stats, Status

# One problem is solved directly up to so many unknowns, a batch while all of J is at most so many numbers.
_DENSE_BELOW = 128
_DENSE_NUMBERS = 2**18
# The same where CG, which then takes a small part of a millisecond a step, would do.
_DENSE_BESIDE_CG = 2**14


def direct_pays(samples: int, n: int, beside_cg: bool = False) -> bool:
    """Whether B systems of n unknowns are better solved by factorising J, or than by CG, on a CPU."""
    return n <= _DENSE_BELOW and samples * n * n <= (_DENSE_BESIDE_CG if beside_cg else _DENSE_NUMBERS)


@dataclass(frozen=True)
class Auto(LinearSolver):
    """Chooses a method by the size and the symmetry of J, and has another go on where that one fails.

    Where n is small it is `Dense`. Where it is not: for a symmetric J `CG`, then `MINRES` for the samples that have negative
    curvature or a singular J, or that are stuck; for any other J `GMRES`, then `BiCGStab` for the samples that are not solved
    yet. The report names what was used.

    Attributes:
        dense_below: solve directly up to this n, whatever the batch; None: up to 128 where B n² <= 2¹⁸,
            or 2¹⁴ on a CPU where J is symmetric.

    Example:
        >>> dil.argmin(score, y0, linear_solver=dil.Auto(rtol=1e-8))
    """

    dense_below: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("dense_below", self.dense_below, 0, optional=True)

    def at_once(self, operator: Operator, transpose: bool, expected: int) -> AtOnce | None:
        krylov = CG if operator.symmetric else GMRES
        solver = self._as(Dense) if self._directly(operator) else self._as(krylov, self.preconditioner)
        return solver.at_once(operator, transpose, expected)

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        if self._directly(operator):
            return self._as(Dense).solve(operator, rhs, start, transpose=transpose)
        # Built once, for both methods.
        precondition = self.preconditioning(operator, transpose)
        if operator.symmetric:
            first, second = self._as(CG, precondition), self._as(MINRES, precondition)
            hard = (Status.negative_curvature, Status.breakdown, Status.stagnated)
        else:
            first, second = self._as(GMRES, precondition), self._as(BiCGStab, precondition)
            hard = (Status.max_steps, Status.stagnated, Status.breakdown)
        result = first.solve(operator, rhs, start, transpose=transpose)
        failed = torch.isin(result.status, torch.tensor([int(s) for s in hard], device=rhs.device))
        if not bool(failed.any()):
            return result
        # The others have nothing left to solve, and are done at step 0.
        rest, reached = (torch.where(failed.unsqueeze(1), a, 0.0) for a in (rhs, result.value))
        combined = combine(result, second.solve(operator, rest, reached, transpose=transpose), failed)
        combined.stats.indefinite = result.status == Status.negative_curvature
        return combined

    def _directly(self, operator: Operator) -> bool:
        samples, n = operator.shape
        beside_cg = operator.symmetric and operator.y.device.type == "cpu"
        return direct_pays(samples, n, beside_cg) if self.dense_below is None else n <= self.dense_below

    def _as(self, solver: type[LinearSolver], preconditioner: Callable[[Tensor], Tensor] | None = None) -> LinearSolver:
        return solver(self.rtol, self.atol, self.max_steps, self.damping, preconditioner, self.product)


def combine(first: Result, second: Result, failed: Tensor) -> Result:
    """The second result for those of the failed samples that it left no worse, else the first."""
    a, b = first.stats, second.stats
    better = failed & ~(b.residual > a.residual)

    def pick(old: Any, new: Any) -> Tensor:
        return torch.where(better, new, old)

    stats = Stats(
        method=f"{a.method}, then {b.method}",
        steps=a.steps + torch.where(failed, b.steps, 0),
        residual=pick(a.residual, b.residual),
        tolerance=a.tolerance,
        products=a.products + b.products,
        history=a.history + [torch.where(failed, residual, a.residual) for residual in b.history[1:]],
        spectrum=Either(better, a.spectrum, b.spectrum) if a.spectrum and b.spectrum else a.spectrum or b.spectrum,
        evidence=Chosen(better, a.evidence, b.evidence) if a.evidence and b.evidence else a.evidence or b.evidence,
    )
    return Result(batch.select(better, second.value, first.value), pick(first.status, second.status), stats)
