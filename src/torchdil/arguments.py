"""What the user passed in, checked: bad input gets one sentence that names the argument and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchdil.batch import map_tensors
from torchdil.modes import observed_by
from torchdil.solution import check_policy


def check_arguments(function: Any, name: str, y0: Any, y_name: str, args: Any, on_failure: str) -> tuple[Any, ...]:
    """Raise one sentence for what cannot work; returns `args` as a tuple."""
    if not callable(function):
        raise TypeError(f"{name} must be callable as {name}(y, *args), got {type(function).__name__}.")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple, got {type(args).__name__}: write args=(x,).")
    check_unknown(y0, y_name)
    check_devices(y0, args, y_name)
    check_policy(on_failure)
    return tuple(args)


def check_output(function: Callable[..., Any], name: str, y0: Any, args: tuple[Any, ...]) -> Any:
    """The function's result at y0; raises one sentence if it is not like y."""
    # In the mode of the call: what the function remembers from here (a cached weight) must keep its graph.
    with observed_by(None):
        value = function(map_tensors(Tensor.detach, y0), *args)
    expected, spec = pytree.tree_flatten(y0)
    got, got_spec = pytree.tree_flatten(value)
    if spec != got_spec or not all(isinstance(leaf, Tensor) for leaf in got):
        keys = f" with the keys {list(value)}" if isinstance(value, dict) else ""
        raise TypeError(f"{name} must return tensors in the structure of y, got {type(value).__name__}{keys}.")
    for leaf, like in zip(got, expected, strict=True):
        if leaf.layout != torch.strided:
            raise TypeError(f"{name} must return dense tensors, got {leaf.layout}.")
        if leaf.shape != like.shape:
            raise ValueError(f"{name} must return the shape of y, {tuple(like.shape)}, got {tuple(leaf.shape)}.")
        if leaf.device != like.device:
            raise ValueError(f"{name} must return tensors on the device of y, {like.device}, got {leaf.device}.")
        # Under autocast the check may see half precision; the solve does not.
        if leaf.dtype != like.dtype and not torch.is_autocast_enabled(like.device.type):
            raise TypeError(f"{name} must return the dtype of y, {like.dtype}, got {leaf.dtype}.")
    return value


def check_unknown(y: Any, name: str) -> None:
    """Raise one sentence if `y` is not a (nested) floating-point tensor on one device."""
    leaves = pytree.tree_leaves(y)
    if not leaves:
        raise TypeError(f"{name} must hold at least one tensor, got {y!r}.")
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            raise TypeError(f"{name} must be a tensor or a nested tuple/dict of tensors, got {type(leaf).__name__}.")
        if leaf.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got {leaf.layout}: use {name}.to_dense().")
        if not leaf.is_floating_point():
            raise TypeError(f"{name} must have a real floating dtype, got {leaf.dtype}: use {name}.double() or .float().")
    if len({leaf.dtype for leaf in leaves}) > 1:
        raise TypeError(f"{name} must have one dtype, got {', '.join(str(leaf.dtype) for leaf in leaves)}.")
    if len({leaf.device for leaf in leaves}) > 1:
        raise ValueError(f"{name} must be on one device, got {', '.join(str(leaf.device) for leaf in leaves)}.")


def check_devices(y: Any, args: Any, name: str) -> None:
    """Raise one sentence if a tensor of `args` is on another device than `y` (CPU scalars mix freely in torch)."""
    device = pytree.tree_leaves(y)[0].device
    for leaf in pytree.tree_leaves(args):
        if isinstance(leaf, Tensor) and leaf.device != device and leaf.dim() > 0:
            raise ValueError(f"args must be on the device of {name} ({device}), got a tensor on {leaf.device}.")
