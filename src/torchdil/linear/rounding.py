"""Whether x solves A x = b as well as rounding lets, in whatever units the rows and columns of A are.

A norm of the residual compares rows with one another, and after a long step of a stiff equation these differ by 1e13: rounding
in the large ones hides everything else. Row by row what rounding leaves is known, a few eps (|A| |x| + |b|) (Oettli and Prager
1964; Higham 2002, section 7.1). A singular A passes that test, too, with an x that is noise: so the same errors are solved for,
and must change x little.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchdil import batch

# A row of the residual may be so many roundings of its terms.
_ROUNDINGS = 100


def left_by_rounding(solve: Callable[[Tensor], Tensor], x: Tensor, r: Tensor, terms: Tensor) -> Tensor:
    """The norm of the residual that rounding accounts for, (B,); 0 where x is not what it should be but for rounding.

    Args:
        solve: b -> A⁻¹ b, (B, n), the one that x was found with.
        x: the solution.
        r: b - A x.
        terms: |A| |x| + |b|.
    """
    eps = torch.finfo(x.dtype).eps
    noise = eps * terms
    small = (r.abs() <= _ROUNDINGS * noise).all(dim=1) & batch.finite(x)
    # Errors without a pattern that A could share, in each row by one of the two at least.
    place = torch.arange(1, x.shape[1] + 1, dtype=x.dtype, device=x.device).square()
    for error in (place.cos(), place.sin()):
        small &= batch.norm(solve(error * noise)) <= eps ** (1 / 3) * batch.norm(x)
    return torch.where(small, _ROUNDINGS * batch.norm(noise), 0.0)
