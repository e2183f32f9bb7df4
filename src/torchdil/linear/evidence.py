"""What a backward solve knows of the errors of g and of y, without a further product; worked out when a report asks.

A x = rhs was solved down to a residual ρ, where A = Jᵀ + εI, x = g and rhs = v.

- Error of g. The last step went ℓ far and took the residual from ρ' to ρ, so A⁻¹ stretches residuals by about G = ℓ / (ρ' - ρ),
  and ‖x - A⁻¹ rhs‖ ≈ ρ G. After a sudden fall f = ρ' / ρ, though, the direction which G belongs to is done with, and the others
  are stretched by anything down to 1 / ‖A‖: with s = log₁₀ f / 3, at most 1, the guess is ρ G^(1-s) ‖A‖^-s.
- Damping adds ε J⁻ᵀg. What J⁻ᵀ does to g lies between what it did to v, ‖g‖ / ‖v‖, and the most that a step saw of it.
- Error of y. e = J⁻¹F is not sought, but each product tells a part of it, as (A d)ᵀ e = dᵀF. Where the A d are orthonormal,
  ‖e‖² >= Σ (dᵀF)². The p of CG are conjugate instead, and Σ p (pᵀF) / (pᵀA p) is the Galerkin solution of J e = F. The adjoint
  tells one part more, gᵀF = vᵀe, so that ‖e‖ ≈ √n |gᵀF| / ‖v‖ if e is as far from v as from any other direction.

A direct solve has J itself. All estimates are doubled, which makes them bounds in nine cases out of ten (docs/quality.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchdil import batch
from torchdil.solution import Evidence, Stats

_SAFETY = 2.0
# A residual that falls by this many decades in one step is done with the direction of that step.
_SUDDEN = 3.0
# Residuals that are closer than this, relatively, say nothing of the step between them.
_FALL = 1e-3


@dataclass
class Steps:
    """The way of an iterative solver.

    Attributes:
        lengths: ‖x_k - x_{k-1}‖, one (B,) tensor a step; 0 marks a sample that was done.
        history: the residual before the first step and after each, one (B,) tensor each.
        residuals: "minimal" over the Krylov space, "orthogonal" to one another (CG) or "irregular" (BiCGStab).
        seen: what the steps tell of ‖J⁻¹F‖, (B,); None: F was not looked at.
    """

    lengths: list[Tensor]
    history: list[Tensor]
    residuals: Literal["minimal", "orthogonal", "irregular"] = "minimal"
    seen: Tensor | None = None

    def adjoint_error(self, stats: Stats) -> Tensor:
        residual, norm = _flat(stats.residual), _flat(stats.norm)
        lengths, history = (_promoted(torch.stack(a)) for a in (self.lengths, self.history))
        moved, changes = lengths > 0, history.diff(dim=0).abs()
        number = torch.arange(1, len(lengths) + 1, device=lengths.device).unsqueeze(1)
        last = (moved * number).amax(dim=0, keepdim=True)  # 0: nothing to solve
        length, before, after = _at(lengths, last), _at(self._falling(history), last), residual
        if self.residuals == "orthogonal":
            after = (before**-2 + after**-2).rsqrt()
        size = torch.where(moved, changes / lengths, 0.0).amax(dim=0)  # ‖A‖, as far as it is known
        gain = length / torch.maximum(before - after, _FALL * before)
        sudden = (torch.log10(before / after) / _SUDDEN).clamp(0, 1) if self.residuals != "irregular" else torch.zeros_like(gain)
        error = residual * torch.maximum(gain ** (1 - sudden) * size**-sudden, 1 / size)
        if stats.damping:
            noise = torch.finfo(history.dtype).eps ** 0.5 * history[:-1]
            widest = torch.where(moved, lengths / torch.maximum(changes, noise), 0.0).amax(dim=0)
            error = error + 2 * stats.damping * norm * (widest * norm / history[0]).sqrt()
        return torch.where(last.squeeze(0) > 0, _relative(error, norm), torch.nan)

    def value_error(self, stats: Stats) -> Tensor | None:
        if self.seen is None or stats.hint is None:
            return None
        # What the Krylov space lacks for v it lacks for F as well.
        return _SAFETY * torch.maximum(_promoted(self.seen), _flat(stats.hint)) * (1 + self.adjoint_error(stats))

    def _falling(self, history: Tensor) -> Tensor:
        """Residuals that never rise; those of MINRES for CG, 1 / ρ² = Σ 1 / ρ_k² over the steps so far."""
        return history.square().reciprocal().cumsum(dim=0).rsqrt() if self.residuals == "orthogonal" else history.cummin(dim=0)[0]


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
        J = self._undamped(stats)
        error = _length_of_solution(J, self.rhs - (J @ self.value.unsqueeze(2)).squeeze(2))
        return _relative(error, _flat(stats.norm))

    def value_error(self, stats: Stats) -> Tensor | None:
        if self.watched is None:
            return None
        return _SAFETY * _length_of_solution(self._undamped(stats).mT, self.watched.to(self.matrix.dtype))

    def _undamped(self, stats: Stats) -> Tensor:
        return self.matrix - stats.damping * torch.eye(self.matrix.shape[1], dtype=self.matrix.dtype, device=self.matrix.device)


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
    return (_SAFETY * error / norm).clamp_max(1.0)


def _length_of_solution(A: Tensor, b: Tensor) -> Tensor:
    """‖A⁻¹b‖, (B,); infinite where A is singular."""
    x, _ = torch.linalg.solve_ex(A, b.unsqueeze(2))
    return torch.where(batch.finite(b), batch.norm(x.squeeze(2)).nan_to_num(nan=torch.inf), torch.nan)


def _at(rows: Tensor, number: Tensor) -> Tensor:
    """Per sample the row of this number, counted from 1: (K, B), (1, B) -> (B,)."""
    return rows.gather(0, (number - 1).clamp_min(0)).squeeze(0)


def _flat(a: Tensor | None) -> Tensor:
    assert a is not None
    return _promoted(a.reshape(-1))


def _promoted(a: Tensor) -> Tensor:
    """In float32 at least."""
    return a.to(torch.promote_types(a.dtype, torch.float32))
