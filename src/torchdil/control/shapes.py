"""What the matrices of linear systems must look like, and what is done with all of them.

Bad input gets one sentence that names the argument.
"""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch import Tensor


def check_like(name: str, t: object, first: object, axes: int) -> None:
    """Raise one sentence unless `t` is a float32 or float64 tensor with enough axes that goes with A, the `first`."""
    if not isinstance(t, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(t).__name__}.")
    if t.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got {t.layout}: use {name}.to_dense().")
    if t.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} must have dtype float32 or float64, got {t.dtype}.")
    assert isinstance(first, Tensor)
    if t.dtype != first.dtype:
        raise TypeError(f"{name} must have the dtype of A, {first.dtype}, got {t.dtype}.")
    if t.device != first.device:
        raise ValueError(f"{name} must be on the device of A, {first.device}, got {t.device}.")
    if t.dim() < axes:
        raise ValueError(f"{name} must have at least {axes} {'axes' if axes > 1 else 'axis'}, got {tuple(t.shape)}.")


def check_size(name: str, t: Tensor, n: int, m: int, *size: int) -> None:
    """Raise one sentence unless the last axes of `t` are `size`, as they must be with B n x m."""
    if t.shape[-len(size) :] != size:
        expected = ", ".join(map(str, ("...", *size)))
        raise ValueError(f"{name} must have the shape ({expected}), as B is {n} x {m}, got {tuple(t.shape)}.")


def states_and_controls(B: Tensor) -> tuple[int, int]:
    """n and m."""
    n, m = B.shape[-2:]
    if not n or not m:
        raise ValueError(f"B must have the shape (..., n, m) with n, m >= 1, got {tuple(B.shape)}.")
    return n, m


def broadcast(name: str, shape: torch.Size, own: torch.Size) -> torch.Size:
    """The leading axes of two tensors together, or one sentence."""
    both = list(zip_longest(reversed(shape), reversed(own), fillvalue=1))
    if any(i != j and 1 not in (i, j) for i, j in both):
        raise ValueError(f"{name} must have leading axes that broadcast with {tuple(shape)}, got {tuple(own)}.")
    return torch.Size([j if i == 1 else i for i, j in reversed(both)])


def symmetric(a: Tensor) -> Tensor:
    """The symmetric part of matrices, all of them that a quadratic form knows."""
    return 0.5 * (a + a.mT)


def apply(A: Tensor, x: Tensor) -> Tensor:
    """A x, (..., p, k), (..., k) -> (..., p)."""
    return (A @ x.unsqueeze(-1)).squeeze(-1)
