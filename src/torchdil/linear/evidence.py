"""What a backward solve knows of the errors of g and of y, without a further product; worked out when a report asks.

A x = rhs was solved down to a residual ρ, where A = Jᵀ + εI, x = g and rhs = v.

- Error of g. The last step went ℓ far and took the residual from ρ' to ρ, so A⁻¹ stretches residuals by about G = ℓ / (ρ' - ρ),
  and ‖x - A⁻¹ rhs‖ ≈ ρ G. After a sudden fall f = ρ' / ρ, though, the direction which G belongs to is done with, and the others
  may be stretched as little as G₀ = ℓ / |ρ' - ρ| of any step: with s = log₁₀ f / 3, at most 1, the guess is ρ G^(1-s) G₀^s. The
  residuals of CG go up and down: there G is the largest ‖x - x_k‖ / ρ_k over the last tenth of the steps, ρ_k being what MINRES
  would have had.
- Damping adds ε J⁻ᵀg. What J⁻ᵀ does to g lies between what it did to v, ‖g‖ / ‖v‖, and the largest ℓ / |ρ' - ρ| of any step.
- Error of y. e = J⁻¹F is not sought, but each product tells a part of it, as (A d)ᵀ e = dᵀF. Where the A d are orthonormal,
  ‖e‖² >= Σ (dᵀF)². The p of CG are conjugate instead, and Σ p (pᵀF) / (pᵀA p) is the Galerkin solution of J e = F. What the
  steps tell nothing of is at least ‖F‖ / ‖A‖ long.

A direct solve has J itself, and ‖J⁻ᵀ(v - Jᵀg)‖ and ‖J⁻¹F‖ are but two solves more. These get a margin of a tenth for the
curvature of F, the others are doubled, which makes them bounds in nine cases out of ten (docs/quality.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchdil import batch
from torchdil.solution import Evidence, Stats

# What the estimates of an iterative and of a direct solve are multiplied by.
_ITERATIVE, _DIRECT = 2.0, 1.1
# A residual that falls by this many decades in one step is done with the direction of that step.
_SUDDEN = 3.0
# CG's gain is the largest over one in so many of its steps.
_WINDOW = 10
# Residuals that are closer than this, relatively, say nothing of the step between them.
_FALL = 1e-3


@dataclass
class Steps:
    """The way of an iterative solver.

    Attributes:
        lengths: ‖x_k - x_{k-1}‖, one (B,) tensor a step, or what works these out; 0 marks a sample that was done.
        history: the residual before the first step and after each, one (B,) tensor each.
        rhs: ‖rhs‖, (B,).
        A: ‖A‖, (B,), as far as the products have shown it.
        residuals: "minimal" over the Krylov space, "orthogonal" to one another (CG) or "irregular" (BiCGStab).
        F: ‖F‖, (B,); None: it was not looked at.
        told: ‖J⁻¹F‖ as far as the steps tell, (B,), or what works it out.
    """

    lengths: list[Tensor] | Callable[[], Tensor]
    history: list[Tensor]
    rhs: Tensor
    A: Tensor
    residuals: Literal["minimal", "orthogonal", "irregular"]
    F: Tensor | None
    told: Tensor | Callable[[], Tensor]

    @property
    def seen(self) -> Tensor:
        """‖J⁻¹F‖ as far as the steps tell, (B,)."""
        return self.told if isinstance(self.told, Tensor) else self.told()

    def adjoint_error(self, stats: Stats) -> Tensor:
        assert stats.norm is not None
        # In float64: the square of a small residual is zero in float32.
        way = torch.stack(self.lengths) if isinstance(self.lengths, list) else self.lengths()
        lengths, history = (a.cpu().double() for a in (way, torch.stack(self.history)))
        residual, norm, rhs = (a.reshape(-1).cpu().double() for a in (stats.residual, stats.norm, self.rhs))
        moved, changes = lengths > 0, history.diff(dim=0).abs()
        lengths = torch.where(moved, lengths, 0.0)
        number = torch.arange(1, len(lengths) + 1, device=lengths.device).unsqueeze(1)
        last = (moved * number).amax(dim=0, keepdim=True)  # 0: nothing to solve
        oscillating = self.residuals == "orthogonal"
        # In the Krylov space of CG, MINRES would have 1 / ρ² = Σ 1 / ρ_k².
        falling = (history[:-1] ** -2).cumsum(dim=0).rsqrt() if oscillating else history[:-1].cummin(dim=0).values
        before = falling.gather(0, (last - 1).clamp_min(0)).squeeze(0)
        after = (before**-2 + residual**-2).rsqrt() if oscillating else residual
        first = last - (last - 1) // _WINDOW if oscillating else last
        travelled = lengths.flip(0).cumsum(dim=0).flip(0)  # from before a step to the end
        gains = travelled / (falling if oscillating else torch.maximum(falling - after, _FALL * falling))
        gain = torch.where((first <= number) & (number <= last), gains, 0.0).amax(dim=0)
        decades = torch.zeros_like(gain) if self.residuals == "irregular" else torch.log10(before / after)
        sudden = (decades / _SUDDEN).clamp(0, 1)
        least = 1 / torch.where(moved, changes / lengths, 0.0).amax(dim=0)
        error = residual * torch.maximum(gain ** (1 - sudden) * least**sudden, least)
        if stats.damping:
            noise = torch.finfo(self.rhs.dtype).eps ** 0.5 * history[:-1]
            most = torch.where(moved, lengths / torch.maximum(changes, noise), 0.0).amax(dim=0)
            error = error + 2 * stats.damping * norm * (most * norm / rhs).sqrt()
        return torch.where(last.squeeze(0) > 0, _relative(_ITERATIVE * error, norm), torch.nan).to(stats.residual)

    def value_error(self, stats: Stats) -> Tensor | None:
        if self.F is None:
            return None
        # What the Krylov space lacks for v it lacks for F as well.
        return _ITERATIVE * torch.hypot(self.seen, self.F / self.A) * (1 + 2 * self.adjoint_error(stats))


@dataclass
class Factored:
    """The matrix of a direct solve.

    Attributes:
        matrix: A, (B, n, n).
        rhs, value: of A x = rhs, (B, n).
        watched: F, (B, n), or None.
    """

    matrix: Tensor
    rhs: Tensor
    value: Tensor
    watched: Tensor | None = None

    def adjoint_error(self, stats: Stats) -> Tensor:
        assert stats.norm is not None
        J = self._undamped(stats)
        error = _length_of_solution(J, self.rhs - (J @ self.value.unsqueeze(2)).squeeze(2))
        return _relative(_DIRECT * error, stats.norm.reshape(-1)).to(stats.residual)

    def value_error(self, stats: Stats) -> Tensor | None:
        if self.watched is None:
            return None
        error = _length_of_solution(self._undamped(stats).mT, self.watched.to(self.matrix.dtype))
        return (_DIRECT * error).to(stats.residual)

    def _undamped(self, stats: Stats) -> Tensor:
        return self.matrix - stats.damping * torch.eye(self.matrix.shape[1], dtype=self.matrix.dtype, device=self.matrix.device)


@dataclass
class Structured:
    """A direct solver that knows the structure of J, and can solve again.

    Attributes:
        solve: b -> A⁻¹ b without damping, (B, n) -> (B, n).
        transposed: b -> A⁻ᵀ b, likewise.
        remainder: rhs - A x without damping, (B, n).
        watched: F, (B, n), or None.
    """

    solve: Callable[[Tensor], Tensor]
    transposed: Callable[[Tensor], Tensor]
    remainder: Tensor
    watched: Tensor | None = None

    def adjoint_error(self, stats: Stats) -> Tensor:
        assert stats.norm is not None
        error = batch.norm(self.solve(self.remainder))
        return _relative(_DIRECT * error, stats.norm.reshape(-1))

    def value_error(self, stats: Stats) -> Tensor | None:
        return None if self.watched is None else _DIRECT * batch.norm(self.transposed(self.watched))


@dataclass
class Chosen:
    """Of each sample what the solver that solved it knows: `second` where `mask`, else `first`."""

    mask: Tensor
    first: Evidence
    second: Evidence

    def adjoint_error(self, stats: Stats) -> Tensor:
        return torch.where(self.mask, self.second.adjoint_error(stats), self.first.adjoint_error(stats))

    def value_error(self, stats: Stats) -> Tensor | None:
        first, second = self.first.value_error(stats), self.second.value_error(stats)
        return None if first is None or second is None else torch.where(self.mask, torch.fmax(first, second), first)


def _relative(error: Tensor, norm: Tensor) -> Tensor:
    """The error over ‖g‖, at most 1: a g that is wrong altogether. NaN where both are zero: there was nothing to solve."""
    return (error / norm).clamp_max(1.0)


def _length_of_solution(A: Tensor, b: Tensor) -> Tensor:
    """‖A⁻¹b‖, (B,); infinite where A is singular."""
    x, _ = torch.linalg.solve_ex(A, b.unsqueeze(2))
    return torch.where(batch.finite(b), batch.norm(x.squeeze(2)).nan_to_num(nan=torch.inf), torch.nan)
