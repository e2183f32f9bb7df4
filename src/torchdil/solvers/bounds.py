"""low <= y <= high: the user's bounds, checked, as matrices like the unknown."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchdil.batch import Layout
from torchdil.problem import Box as Box


def clip(y: Tensor, box: Box | None) -> Tensor:
    """The nearest point inside; `y` itself without a box."""
    return y if box is None else torch.clamp(y, box[0], box[1])


def check_bounds(bounds: Any, finite: bool = True) -> None:
    """Raise one sentence unless `bounds` is (low, high) with low < high, and finite or at least numbers."""
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise TypeError(f"bounds must be None or a pair (low, high), got {bounds!r}.")
    for leaf in pytree.tree_leaves(bounds):
        if not isinstance(leaf, (int, float, Tensor)):
            raise TypeError(f"bounds must hold numbers or tensors, got {type(leaf).__name__}.")
        number = _tensor(leaf)
        if not bool((number.isfinite() if finite else ~number.isnan()).all()):
            raise ValueError(f"bounds must be {'finite' if finite else 'numbers'}, got {leaf!r}.")
    spec = max((pytree.tree_structure(bound) for bound in bounds), key=lambda spec: spec.num_leaves)
    low, high = (_leaves(bound, spec) for bound in bounds)
    if not all(bool(torch.all(_tensor(a) < _tensor(b))) for a, b in zip(low, high, strict=True)):
        raise ValueError(f"bounds must have low < high everywhere, got {bounds!r}.")


def as_numbers(bounds: Any) -> tuple[Any, ...]:
    """The bounds as a tuple that is equal for equal bounds."""
    leaves, spec = pytree.tree_flatten(bounds)
    numbers = tuple(tuple(_tensor(leaf).double().flatten().tolist()) for leaf in leaves)
    return (str(spec), *numbers)


def _tensor(bound: float | Tensor) -> Tensor:
    return bound if isinstance(bound, Tensor) else torch.tensor(bound, dtype=torch.float64, device="cpu")


def _leaves(bound: Any, spec: pytree.TreeSpec) -> list[Any]:
    """The numbers and tensors of one bound in the order of `spec`; one number stands for all."""
    if isinstance(bound, (int, float)) or (isinstance(bound, Tensor) and bound.dim() == 0):
        return [bound] * spec.num_leaves
    try:
        leaves = spec.flatten_up_to(bound)
    except ValueError:
        leaves = [None]
    if not all(isinstance(leaf, (int, float, Tensor)) for leaf in leaves):
        raise ValueError(f"bounds must be numbers, or low and high nested like y0, got {bound!r}.")
    return leaves


def rows_of(bounds: tuple[Any, Any], layout: Layout, y: Tensor) -> Box:
    """The bounds as matrices like y, (B, n), whose rows under `vmap` are copies of the layout's samples."""
    copies = len(y) // max(1, layout.samples)
    low, high = (layout.ravel(_like_unknown(bound, layout, y)).repeat(copies, 1) for bound in bounds)
    return low, high


def _like_unknown(bound: Any, layout: Layout, y: Tensor) -> Any:
    """One bound in the structure and the shapes of the unknown."""
    expanded = []
    for leaf, shape in zip(_leaves(bound, layout.spec), layout.shapes, strict=True):
        if isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.device != y.device:
            raise ValueError(f"bounds must be on the device of y0 ({y.device}), got a tensor on {leaf.device}.")
        leaf, shape = torch.as_tensor(leaf, dtype=y.dtype, device=y.device), layout.batch_shape + shape
        try:
            expanded.append(leaf.expand(shape))
        except RuntimeError as error:
            raise ValueError(f"bounds must broadcast to shape {tuple(shape)}, got {tuple(leaf.shape)}.") from error
    return pytree.tree_unflatten(expanded, layout.spec)
