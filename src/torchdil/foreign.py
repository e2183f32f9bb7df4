"""Solvers that are not ours: any callable `(function, y0) -> y`, run on the user's own function."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchdil import batch
from torchdil.arguments import check_signature
from torchdil.batch import Layout
from torchdil.graph import leaves_of
from torchdil.modes import no_tangents
from torchdil.problem import Call


def run_foreign(solver: Callable[..., Any], user_call: Call | None, start: Tensor, layout: Layout, first: Any) -> Tensor:
    """Run the user's own solver on the user's own function and check what comes back; `first` is its value, if known."""
    if user_call is None:
        raise RuntimeError("solver is a callable, which torch.vmap cannot batch: use a torchdil solver or loop over the batch.")
    known = torch.is_grad_enabled() and first is not None
    with torch.enable_grad(), no_tangents():
        value = first if known else user_call(layout.unravel(start))
        found = leaves_of(batch.leaves(value))
        grads = [(leaf, leaf.grad, None if leaf.grad is None else leaf.grad._version) for leaf in found]
        given = (user_call, layout.unravel(start.clone()))
        try:
            y = solver(*given)
        except TypeError:
            check_signature(solver, "solver", ("fn", "y0"), given)
            raise
    for leaf, grad, version in grads:
        if leaf.grad is not grad or (grad is not None and grad._version != version):
            raise RuntimeError(
                "solver changed the .grad of a parameter of the function, which would corrupt its gradient: use "
                "torch.autograd.grad(value, y) inside the solver instead of .backward()."
            )
    expected, found = layout.unravel(start), batch.leaves(y)
    same = isinstance(y, Tensor) if layout.spec.is_leaf() else pytree.tree_structure(y) == layout.spec
    if not same or not all(isinstance(leaf, Tensor) for leaf in found):
        got = type(y).__name__
        raise TypeError(f"solver must return y as tensors in the structure of y0, got {got}.")
    for leaf, like in zip(found, batch.leaves(expected), strict=True):
        if leaf.shape != like.shape or leaf.dtype != like.dtype or leaf.device != like.device:
            raise ValueError(
                f"solver must return y like y0 ({tuple(like.shape)}, {like.dtype}, {like.device}), got "
                f"({tuple(leaf.shape)}, {leaf.dtype}, {leaf.device})."
            )
    flat = layout.ravel(y).detach()
    # One number first, as the test of all of them takes three operations.
    if len(flat) and not math.isfinite(flat.sum()) and not bool(batch.finite(flat).any()):
        raise ValueError("solver must return finite numbers, got NaN or infinity in every sample.")
    return flat.clone()
