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
from torchdil.linear.base import LinearSolver
from torchdil.linear.bicgstab import BiCGStab
from torchdil.linear.cg import CG
from torchdil.linear.dense import Dense
from torchdil.linear.evidence import Chosen
from torchdil.linear.gmres import GMRES
from torchdil.linear.minres import MINRES
from torchdil.linear.spectrum import Either
from torchdil.operator import Operator
from torchdil.solution import Result, Stats, Status

# Where the direct solve stops paying. Dense / Krylov, ms, one CPU thread, float32, rtol 1e-5 (float64 is alike):
#
#                            n = 32         64          128         256
#   MLP energy,  batch 1:    1.0 / 1.7   1.3 / 1.7    2.0 / 1.7   3.6 / 1.8    (4 steps of CG)
#                batch 256:  13 / 2.6    46 / 2.9     165 / 3.2
#   convex MLP,  batch 1:    1.1 / 7.3   1.4 / 12     2.1 / 8.2   3.6 / 6.2    (20 to 40 steps of CG)
#                batch 16:   1.8 / 7.3   3.2 / 14     8.9 / 10    33 / 7.9
#                batch 256:  11 / 15     33 / 22      165 / 19
#   DEQ root,    batch 1:    0.6 / 3.6   0.7 / 4.0    1.0 / 4.1   2.3 / 4.2    (10 steps of GMRES)
#                batch 256:  5.7 / 9.9   22 / 11      140 / 14
#
# One problem is solved directly up to 128 unknowns, a batch while all of J is at most 2¹⁸ numbers: 32 unknowns at 256 samples.
_DENSE_BELOW = 128
_DENSE_NUMBERS = 2**18


def direct_pays(samples: int, n: int) -> bool:
    """Whether B systems of n unknowns are better solved by factorising J."""
    return n <= _DENSE_BELOW and samples * n * n <= _DENSE_NUMBERS


@dataclass(frozen=True)
class Auto(LinearSolver):
    """Chooses by the size and the symmetry of J, and goes on where a method cannot.

    Small n: `Dense`. Else, J symmetric: `CG`, then `MINRES` for samples with negative curvature or a singular J, or that are
    stuck; J not symmetric: `GMRES`, then `BiCGStab` for samples that are left. The report names what was used.

    Attributes:
        dense_below: solve directly up to this n, whatever the batch; None: up to 128 where B n² <= 2¹⁸.

    Example:
        >>> dil.argmin(score, y0, linear_solver=dil.Auto(rtol=1e-8))
    """

    dense_below: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dense_below is not None and self.dense_below < 0:
            raise ValueError(f"dense_below must be at least 0, got {self.dense_below!r}.")

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        samples, n = rhs.shape
        if direct_pays(samples, n) if self.dense_below is None else n <= self.dense_below:
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
        return combine(result, second.solve(operator, rest, reached, transpose=transpose), failed)

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
