"""Right-hand sides near the ends of a dtype, whose squares are no numbers of it: they are solved for in other units.

A gradient of 1e-21 is a number in float32, its square is not; norms and inner products of it are wrong, and with them every
step of a Krylov method, though no number is infinite. A power of two as the unit changes no digit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchdil import batch
from torchdil.solution import Result, Stats

# A residual that is so many times smaller than the right-hand side must have a square, too.
_RESIDUAL = 1e-4


@functools.cache
def squares_within(dtype: torch.dtype) -> tuple[float, float]:
    """Numbers between these have squares, those of their residuals included."""
    info = torch.finfo(dtype)
    return info.tiny**0.5 / _RESIDUAL, _RESIDUAL * info.max**0.5


def in_range(rhs: Tensor) -> Tensor:
    """Which samples have squares, those of their residuals included, (B,); zero has."""
    size = torch.linalg.vector_norm(rhs, torch.inf, dim=1)
    if rhs.dtype == torch.float16:  # where hardly a number would be left
        return torch.ones_like(size, dtype=torch.bool)
    least, most = squares_within(rhs.dtype)
    return ((size >= least) & (size <= most)) | (size == 0)


def solve_in_range(solve: Callable[[Tensor], Result], rhs: Tensor, atol: float) -> Result:
    """`solve(rhs)`, by a system in units in which the right-hand sides are neither tiny nor huge; not if atol has units."""
    near = in_range(rhs) | ~batch.finite(rhs)  # which has no units
    if atol or bool(near.all()):
        return solve(rhs)
    size = torch.linalg.vector_norm(rhs, torch.inf, dim=1).double()
    power = size / (2 * torch.frexp(size).mantissa)  # the largest power of two that is not above it
    unit = torch.where(near, 1.0, power).to(rhs.dtype)
    value, status, stats = solve(batch.divide(rhs, unit.unsqueeze(1)))
    known = None if stats.evidence is None else _Rescaled(stats)
    history = [unit * residual for residual in stats.history]
    norm = None if stats.norm is None else unit * stats.norm
    told = replace(
        stats, residual=unit * stats.residual, tolerance=unit * stats.tolerance, history=history, norm=norm, evidence=known
    )
    return Result(batch.scale(unit, value), status, told)


@dataclass
class _Rescaled:
    """What is known of errors that have no units, or those of y."""

    stats: Stats

    def adjoint_error(self, stats: Stats) -> Tensor:
        assert self.stats.evidence is not None
        return self.stats.evidence.adjoint_error(self.stats)

    def value_error(self, stats: Stats) -> Tensor | None:
        assert self.stats.evidence is not None
        return self.stats.evidence.value_error(self.stats)
