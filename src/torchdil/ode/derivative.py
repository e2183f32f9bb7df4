"""∂f/∂y as a matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchdil.ode.field import Field

# A plain call and a backward pass for each row are faster than one vmapped call up to so many rows.
_FEW = 3


def jacobian(
    field: Field, call: Callable[..., Any], slope: Callable[[Tensor, Tensor], Tensor], at: Tensor, y: Tensor
) -> Tensor:
    """∂f/∂y at a point of each sample: at (1,) or (B, 1), y (B, D) -> (B, D, D); `slope` is f there."""
    samples, d = y.shape
    with torch.enable_grad():
        if field.mode == "loop" or (field.mode == "vmap" and d <= _FEW):
            point = y.detach().requires_grad_()
            f = slope(at, point)
            wanted = f.sum(dim=0).unbind() if f.requires_grad else ()
            rows = [torch.autograd.grad(w, point, retain_graph=True, materialize_grads=True)[0] for w in wanted]
            return torch.stack(rows, dim=1) if rows else y.new_zeros(samples, d, d)
        # A copy of y for each row: one forward and one backward pass, both over a larger batch.
        point = y.detach().unsqueeze(1).repeat(1, d, 1).requires_grad_()
        f = field(call, at.expand(*at.shape[:-1], d), point)
        if not f.requires_grad:
            return y.new_zeros(samples, d, d)
        (J,) = torch.autograd.grad(f.diagonal(dim1=1, dim2=2).sum(), point, materialize_grads=True)
    return J
