"""Why a system has no stabilising solution, for the samples that failed.

A stabilising solution needs R positive definite, every eigenvalue of A on or outside the unit circle within reach of B, and
those on the unit circle seen by Q. The test for both is that of Popov, Belevitch and Hautus: B does not reach, or Q does not
see, the eigenvalue λ where [A - λI, B], or [A - λI; Q], loses rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchdil import batch

# How near to the unit circle counts as on it: a double eigenvalue is known to half the digits.
_NEAR = 1e-6


def is_positive(R: Tensor) -> tuple[Tensor, Tensor]:
    """Which matrices are positive definite, beyond rounding, (B,); and their Cholesky factors, for those."""
    L, info = torch.linalg.cholesky_ex(R)
    pivots = torch.diagonal(L, dim1=1, dim2=2).square()
    floor = 10 * R.shape[1] * torch.finfo(R.dtype).eps * torch.diagonal(R, dim1=1, dim2=2)
    return (info == 0) & (pivots > floor).all(dim=1), L


def causes(A: Tensor, B: Tensor, Q: Tensor, R: Tensor, failed: Tensor) -> list[tuple[str, Tensor]]:
    """For each cause part of a sentence and the samples, (B,), that failed for it; no sample has two."""
    found: list[tuple[str, Tensor]] = []
    open_ = failed.clone()

    def settle(text: str, mask: Tensor) -> None:
        nonlocal open_
        if bool(mask.any()):
            found.append((text, mask))
            open_ = open_ & ~mask

    for name, t in (("A", A), ("B", B), ("Q", Q), ("R", R)):
        settle(f"a value of {name} is not finite", open_ & ~batch.finite(t.flatten(1)))
    settle("R is not positive definite", open_ & ~is_positive(R)[0])
    which = open_.nonzero().flatten()
    if not len(which):
        return found
    eps = torch.finfo(A.dtype).eps
    A, B, Q = (t[which].double().cpu() for t in (A, B, Q))
    values = torch.linalg.eigvals(A)
    unstable, critical = values.abs() >= 1 - _NEAR, (values.abs() - 1).abs() <= _NEAR
    tests = (
        (A.mT, B.mT, unstable, "(A, B) is not stabilisable: no control moves {} of A"),
        (A, Q, critical, "Q does not see {} of A, which is on the unit circle"),
    )
    for square, below, suspect, text in tests:
        lost = suspect & open_[which].cpu().unsqueeze(1) & _loses_rank(square, below, values, eps**0.5)
        mask = torch.zeros_like(open_).index_put((which,), lost.any(dim=1).to(open_.device))
        settle(text.format(_named(values[lost])), mask)
    settle("no stabilising solution was found", open_)
    return found


def _loses_rank(A: Tensor, C: Tensor, values: Tensor, rtol: float) -> Tensor:
    """For which values λ the rank of [A - λI; C] is less than n, (F, n)."""
    shifted = A.unsqueeze(1) - values[:, :, None, None] * torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
    pencil = torch.cat((shifted, C.unsqueeze(1).expand(-1, values.shape[1], -1, -1).to(values.dtype)), dim=2)
    return torch.linalg.svdvals(pencil)[..., -1] <= rtol * torch.linalg.matrix_norm(pencil)


def _named(values: Tensor) -> str:
    """One eigenvalue, or the first of several."""
    if not len(values):
        return ""
    z = complex(values[0])
    shown = f"{z.real:.4g}" if abs(z.imag) <= _NEAR * abs(z) else f"{z.real:.4g} ± {abs(z.imag):.4g}i"
    alike = bool(((values.real - z.real).abs() + (values.imag.abs() - abs(z.imag)).abs() <= _NEAR * abs(z)).all())
    return f"the eigenvalue {shown}" if alike else f"eigenvalues such as {shown}"
