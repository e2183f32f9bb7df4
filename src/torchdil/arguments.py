"""What the user passed in, checked: bad input gets one sentence that names the argument and what was expected."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchdil.batch import in_order, leaves, map_tensors
from torchdil.linear.base import LinearSolver
from torchdil.modes import observed_by
from torchdil.solution import check_policy, user_frame


def check_callable(function: Any, name: str, call: str) -> None:
    """Raise one sentence if the function cannot be called, or is a class; `call`: how it is called."""
    if isinstance(function, type):
        raise TypeError(f"{name} must be callable as {call}, got the class {function.__name__}: make one of it first.")
    if not callable(function):
        raise TypeError(f"{name} must be callable as {call}, got {type(function).__name__}.")


def check_linear_solver(given: Any) -> None:
    """Raise one sentence unless it is a linear solver, or None."""
    if given is not None and not isinstance(given, LinearSolver):
        raise TypeError(f"linear_solver must be a torchdil linear solver such as CG(), got {given!r}.")


def check_arguments(function: Any, name: str, y0: Any, y_name: str, args: Any, on_failure: str) -> tuple[Any, ...]:
    """Raise one sentence for what cannot work; returns `args` as a tuple."""
    check_callable(function, name, f"{name}(y, *args)")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args must be a tuple, got {type(args).__name__}: write args=(x,).")
    check_unknown(y0, y_name)
    check_devices(y0, args, y_name)
    check_policy(on_failure)
    return tuple(args)


def first_value(function: Callable[..., Any], name: str, y0: Any, args: tuple[Any, ...]) -> Any:
    """The function's value at y0; raises one sentence if it cannot be called so, or changes y."""
    y = map_tensors(lambda t: t.detach().clone(), y0)
    versions = [leaf._version for leaf in leaves(y) if not leaf.is_inference()]  # not 0 if y0 was made under inference_mode
    try:
        # In the mode of the call: what the function remembers from here (a cached weight) must keep its graph.
        with observed_by(None):
            value = function(y, *args)
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        check_signature(function, name, ("y", *(f"args[{k}]" for k in range(len(args)))), (y, *args))
        given = ", ".join(_described(leaf) for leaf in pytree.tree_leaves((y, args)) if isinstance(leaf, Tensor))
        error.add_note(f"This was the first call of {name}, with y and then args of: {given}.")
        raise
    if versions != [leaf._version for leaf in leaves(y) if not leaf.is_inference()]:
        raise RuntimeError(f"{name} must not change y in place: write y = y - x and not y -= x, or work on y.clone().")
    return value


def check_signature(function: Any, name: str, parameters: tuple[str, ...], values: tuple[Any, ...]) -> list[str]:
    """Raise one sentence if the function does not take these; returns its own names for them, as far as they are known."""
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):  # some built-in and scripted functions have none
        return []
    try:
        signature.bind(*values)
    except TypeError as error:
        call = f"{name}({', '.join(parameters)})"
        takes = f"it takes ({', '.join(map(str, signature.parameters.values()))})"
        fewer = len(signature.parameters) < len(values)
        to_do = f": wrap it, lambda {', '.join(parameters)}: {name}({parameters[-1]})" if fewer and "]" not in call else ""
        raise TypeError(f"{name} must be callable as {call}: {error}, {takes}{to_do}.") from None
    return list(signature.parameters)


def _described(t: Tensor) -> str:
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')} {t.device}"


def check_output(function: Callable[..., Any], name: str, y0: Any, args: tuple[Any, ...]) -> Any:
    """The function's result at y0; raises one sentence if it is not like y."""
    value = first_value(function, name, y0, args)
    expected, spec = pytree.tree_flatten(y0)
    got, got_spec = pytree.tree_flatten(in_order(value, spec))
    if spec != got_spec or not all(isinstance(leaf, Tensor) for leaf in got):
        keys = f" with the keys {list(value)}" if isinstance(value, dict) else ""
        to_do = ": make one tensor of it by torch.stack" if isinstance(value, (list, tuple)) and isinstance(y0, Tensor) else ""
        raise TypeError(f"{name} must return tensors in the structure of y, got {type(value).__name__}{keys}{to_do}.")
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
    found = leaves(y)
    if not found:
        raise TypeError(f"{name} must hold at least one tensor, got {y!r}.")
    for leaf in found:
        if not isinstance(leaf, Tensor):
            given = type(leaf).__name__ if leaf is y else f"{type(y).__name__} of {type(leaf).__name__}"
            raise TypeError(f"{name} must be a tensor or a nested tuple/dict of tensors, got {given}: use torch.tensor.")
        if leaf.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got {leaf.layout}: use {name}.to_dense().")
        if not leaf.is_floating_point():
            to_do = "torch.view_as_real" if leaf.is_complex() else f"{name}.double() or .float()"
            raise TypeError(f"{name} must have a real floating dtype, got {leaf.dtype}: use {to_do}.")
    if len({leaf.dtype for leaf in found}) > 1:
        raise TypeError(f"{name} must have one dtype, got {', '.join(str(leaf.dtype) for leaf in found)}.")
    if len({leaf.device for leaf in found}) > 1:
        raise ValueError(f"{name} must be on one device, got {', '.join(str(leaf.device) for leaf in found)}.")


def check_devices(y: Any, args: Any, name: str) -> None:
    """Raise one sentence if a tensor of `args` is on another device than `y` (CPU scalars mix freely in torch)."""
    device = leaves(y)[0].device
    for leaf in leaves(args):
        if isinstance(leaf, Tensor) and leaf.device != device and leaf.dim() > 0:
            raise ValueError(f"args must be on the device of {name} ({device}), got a tensor on {leaf.device}.")


def warn_of_no_gradient(name: str, y0: Any, given: Any) -> None:
    """The answer has no gradient: warn if what was given says that somebody waits for one."""
    if any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(given)):
        why = f"{name} was given tensors that require grad, but depends on none of them: look for detach(), .data or item()"
    elif any(t.requires_grad and t.is_leaf for t in pytree.tree_leaves(y0)):
        why = f"y0 requires grad, but y does not depend on where the solver starts, and {name} on nothing that requires grad"
    else:
        return
    warnings.warn(f"y has no gradient: {why}.", UserWarning, stacklevel=user_frame())
