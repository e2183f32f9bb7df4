"""The seam between an operator and a linear solver.

`solve(operator, rhs, start, transpose)` finds x with (J + εI) x = rhs, or with Jᵀ, for B independent systems, and returns the
value, a status per sample and numbers. The same object serves Newton's step and the backward pass; a solver may know the
structure of its problem and ignore the products.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear_graph import Bound
from torchdil.operator import KEPT, STRATEGIES, Operator, Product
from torchdil.progress import Progress
from torchdil.settings import check_count, check_number
from torchdil.solution import Evidence, Result, Spectrum, Stats, Status

# ‖A‖ ‖x‖ / ‖rhs‖ beyond which the x of a failed solve is the noise of a singular A, not a part of a solution.
_WILD = 1e8
# The rounding of a product in float32, in units of its last digit; and how many such products make up for the one in full
# precision that checks the answer.
_SINGLE, _WORTHWHILE = 30.0, 6


class AtOnce(NamedTuple):
    """A solve as one function of tensors, that asks nothing of them on its way: a single launch on a GPU.

    Attributes:
        key: what the function depends on, besides its arguments.
        routine: `(product, rhs, F, *known) -> (x, good, steps, residual, tolerance, *noted)`, where `product(p)` is a tuple of
            one and `good`, (B,), says which samples were solved without any trouble, their true residual being below the
            tolerance.
        stats: `(steps, residual, tolerance, *noted) -> Stats`, where all samples are good.
        known: what the forward pass has worked out for it.
        single: whether its late steps take products in float32.
    """

    key: Hashable
    routine: Callable[..., tuple[Tensor, ...]]
    stats: Callable[..., Stats]
    known: tuple[Tensor, ...] = ()
    single: bool = False

    def finished(self, norm: Tensor, damping: float, steps: Tensor, *found: Tensor) -> tuple[Tensor, Stats]:
        """Status and numbers, ‖x‖ and the damping among them."""
        stats = self.stats(steps, *found)
        stats.norm, stats.damping = norm, damping
        return torch.zeros_like(steps), stats


@dataclass(frozen=True)
class LinearSolver(ABC):
    """Base of the linear solvers.

    Attributes:
        rtol: stop a sample when ‖rhs - A x‖ <= rtol ‖rhs‖; None: 1e-10 in float64, 1e-5 in float32, 1e-2 in half
            precision.
        atol: or when ‖rhs - A x‖ <= atol.
        max_steps: the most iterations; None: 10 n + 50, but not over 1000.
        damping: ε; A = J + εI (Jᵀ + εI when transposed), the same in every solver.
        preconditioner: `Jacobi()`, `Nystrom()`, `SecantMemory()` or any callable r -> M⁻¹ r on (B, n) tensors.
        product: how products with J are made: "auto", "compile", "backward", "forward", "traced" or "measure" (see
            `torchdil.operator`).
    """

    only: ClassVar[str] = ""  # the one problem whose structure it knows; empty: any
    few_products: ClassVar[bool] = False  # so few that on a CPU a trace costs more than it saves

    rtol: float | None = None
    atol: float = 0.0
    max_steps: int | None = None
    damping: float = 0.0
    preconditioner: Any = None
    product: str = "auto"

    def __post_init__(self) -> None:
        check_number("rtol", self.rtol, least=0, optional=True)
        check_number("atol", self.atol, least=0)
        check_count("max_steps", self.max_steps, optional=True)
        check_number("damping", self.damping, least=0)
        if self.product not in STRATEGIES:
            raise ValueError(f"product must be one of {', '.join(map(repr, STRATEGIES))}, got {self.product!r}.")
        usable = callable(self.preconditioner) or hasattr(self.preconditioner, "build")
        if self.preconditioner is not None and (isinstance(self.preconditioner, type) or not usable):
            raise TypeError(f"preconditioner must be a callable r -> M⁻¹ r or have `build`, got {self.preconditioner!r}.")

    @abstractmethod
    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        """Solve A x = rhs, A = J + εI or, with `transpose`, Jᵀ + εI, for each sample.

        Args:
            operator: J at a point, (B, n).
            rhs: the right-hand sides, (B, n).
            start: an initial guess, (B, n); None: zero.
            transpose: solve with Jᵀ.
        """

    def at_once(self, operator: Operator, transpose: bool, expected: int) -> AtOnce | None:
        """The solve with a traced J, in about as many steps as expected (0: not known); None where it cannot be so."""
        return None

    @property
    def settings(self) -> Hashable:
        """What the number of steps depends on; no tensors, which would be kept alive by whoever remembers it."""
        return type(self), self.rtol, self.atol, self.damping

    @property
    def traces(self) -> bool:
        """Whether products may be made by a trace that is kept from solve to solve."""
        return self.product in KEPT

    def system(self, operator: Operator, transpose: bool) -> Product:
        """p -> A p with the damping."""
        product, damping = operator.product(transpose, self.product), self.damping
        # Not in place: the product of a linear function (F = y - a) may be p itself.
        return (lambda p: product(p).add(p, alpha=damping)) if damping else product

    def full_steps(self, operator: Operator, transpose: bool, steps: int) -> int:
        """How many of the steps of a solve at once must take products in full precision: the first so many, at least one.

        The later a step, the smaller it is, and the larger the error that its product may have: with ‖r‖ left to solve for, ‖r‖
        times the rounding of float32 is no more than the tolerance will be (inexact Krylov methods, Simoncini & Szyld 2003). A
        residual that falls evenly on the way is assumed. The answer is checked by a product in full precision.
        """
        rtol = batch.default_rtol(operator.y.dtype) if self.rtol is None else self.rtol
        if operator.source is None or not 0 < rtol < 1 or not operator.source.takes_single(transpose):
            return steps
        reached = min(1.0, rtol / (_SINGLE * torch.finfo(torch.float32).eps))
        full = max(1, math.ceil(steps * math.log(reached) / math.log(rtol)))
        return full if steps - full >= _WORTHWHILE else steps

    def systems(self, product: Bound, steps: int, full: int | None = None) -> list[Product]:
        """p -> A p for each step of a solve at once, in float32 after so many in full precision; None: none in float32."""

        def system(product: Callable[[Tensor], tuple[Tensor, ...]]) -> Product:
            return (lambda p: product(p)[0].add(p, alpha=self.damping)) if self.damping else lambda p: product(p)[0]

        early = [system(product)] * steps
        if full is None or full == steps:
            return early
        return early[:full] + [system(product.single())] * (steps - full)

    def begin(self, system: Product, rhs: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor]:
        """x and rhs - A x to start from. A start that is worse than zero, or not finite, is dropped per sample."""
        if start is None:
            return torch.zeros_like(rhs), rhs.clone()
        r = rhs - system(start)
        useful = batch.norm(r) <= batch.norm(rhs)
        return torch.where(useful.unsqueeze(1), start, 0.0), batch.select(useful, r, rhs)

    def preconditioning(self, operator: Operator, transpose: bool) -> Callable[[Tensor], Tensor] | None:
        """r -> M⁻¹ r, or None."""
        if hasattr(self.preconditioner, "build"):
            return self.preconditioner.build(operator, transpose, self.damping)
        return self.preconditioner

    def watched(self, operator: Operator, transpose: bool) -> Tensor | None:
        """F, if the steps can tell something of J⁻¹F: those of a solve with Jᵀ, without a preconditioner."""
        return operator.watched if (transpose or operator.symmetric) and self.preconditioner is None else None

    def tolerance(self, rhs: Tensor) -> Tensor:
        """The residual to reach per sample, (B,)."""
        rtol = batch.default_rtol(rhs.dtype) if self.rtol is None else self.rtol
        return (rtol * batch.norm(rhs)).clamp_min(self.atol)

    def attainable(self, size: Tensor, x: Tensor, rhs: Tensor) -> Tensor:
        """The residual that rounding in products with A, ‖A‖ = `size`, leaves of any x of this norm, (B,)."""
        eps = torch.finfo(rhs.dtype).eps
        # Capped, lest the huge x of a singular A pass for a solution.
        return torch.minimum(100 * eps * size * batch.norm(x), eps ** (1 / 3) * batch.norm(rhs))

    def tamed(self, x: Tensor, size: Tensor, rhs: Tensor, progress: Progress) -> Tensor:
        """x, or zero where a solve failed and left an x out of all proportion: A, ‖A‖ = `size`, is singular to rounding."""
        wild = (progress.status() != Status.converged) & (size * batch.norm(x) > _WILD * batch.norm(rhs))
        progress.history[-1] = torch.where(wild, batch.norm(rhs), progress.history[-1])
        return torch.where(wild.unsqueeze(1), 0.0, x)

    def progress(self, residual: Tensor, rhs: Tensor) -> Progress:
        """Bookkeeping for an iterative solver that starts with `residual`, (B,)."""
        n = rhs.shape[1]
        max_steps = min(10 * n + 50, 1000) if self.max_steps is None else self.max_steps
        return Progress(residual, self.tolerance(rhs), max_steps, patience=max(100, min(n, 1000)))

    def result(
        self,
        x: Tensor,
        progress: Progress,
        method: str,
        products: int,
        spectrum: Spectrum | None = None,
        evidence: Evidence | None = None,
        exact: bool = True,
    ) -> Result:
        """What an iterative solver returns once `progress` is finished; with a preconditioner J itself is not known."""
        status = progress.status()
        known = self.preconditioner is None and len(progress.history) > 1
        stats = Stats(
            method=method,
            steps=progress.steps,
            residual=progress.history[-1],
            tolerance=progress.tolerance,
            products=products,
            history=progress.history,
            spectrum=spectrum if known else None,
            evidence=evidence if known else None,
            exact=exact,
        )
        return Result(x, status, stats)
