"""The modes of torch that a solve must know of, or must not be in."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad as fwd
from torch.autograd.graph import saved_tensors_hooks

from torchdil.as_written import as_written
from torchdil.batch import map_tensors

P = ParamSpec("P")
R = TypeVar("R")


# Who looks over the shoulder of the solves of a call (`torchdil.solve.Observer`): `check_gradient` does.
observer: ContextVar[Any] = ContextVar("observer", default=None)


@contextmanager
def observed_by(who: Any) -> Iterator[None]:
    """A block whose solves `who` sees; None: they are part of something else that is seen as a whole."""
    token = observer.set(who)
    try:
        yield
    finally:
        observer.reset(token)


def tangents_active() -> bool:
    """Whether `torch.autograd.forward_ad` is at work."""
    return fwd._current_level >= 0


def transforms_active() -> bool:
    """Whether this code runs inside `torch.func.grad`, `jvp`, `vmap` or the like."""
    return functorch.peek_interpreter_stack() is not None


def no_tangents() -> Any:
    """A context in which forward mode is off: solver loops must not carry tangents along."""
    return fwd._set_fwd_grad_enabled(False)


def full_precision(y: Tensor) -> Any:
    """A context in which autocast is off: half-precision products inside a solve leave no digits for the gradient."""
    kind = y.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def cast_up(args: tuple[Any, ...], start: Tensor) -> tuple[Any, ...]:
    """Under autocast: what earlier layers left in half precision, in the precision of the unknown."""
    if not torch.is_autocast_enabled(start.device.type):
        return args
    half = (torch.float16, torch.bfloat16)
    return map_tensors(lambda t: t.to(start.dtype) if t.dtype in half else t, args)


def plain_saving() -> Any:
    """A context in which tensors are saved as they are: hooks of checkpointing would run for every product with J."""
    return saved_tensors_hooks(_keep, _keep) if saving_hooked() else nullcontext()


def saving_hooked() -> bool:
    """Whether hooks on saved tensors are at work, those of checkpointing for example: torch.func refuses to run then."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _keep(t: Tensor) -> Tensor:
    return t


def default_device() -> torch.device | None:
    """Torch's default device, if one is set."""
    return torch.get_default_device() if torch._C._len_torch_function_stack() else None


def as_in_forward(backward: Callable[[Any, Tensor], R]) -> Callable[[Any, Tensor], R]:
    """A backward pass with torch's default device of the forward pass, `ctx.default_device`, and code compiled or not as there.

    Torch calls functions of autograd without one, and these call the user's function, which may make tensors.
    """

    @functools.wraps(backward)
    def wrapper(ctx: Any, v: Tensor) -> R:
        with as_written() if getattr(ctx, "as_written", False) else nullcontext():
            return on_default_device(ctx.default_device, backward)(ctx, v)

    return wrapper


def on_default_device(device: torch.device | None, function: Callable[P, R]) -> Callable[P, R]:
    """The function, called with this default device; None: as it is."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        assert device is not None
        with device:
            return function(*args, **kwargs)

    return function if device is None else call


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` outside a compiled graph: `torch.compile` breaks the graph here and goes on behind it."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return wrapper


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind `torch.compile`, whose graphs can be differentiated once only, and not repeatedly."""
    return getattr(function, "_orig_mod", getattr(function, "_torchdynamo_orig_callable", function))
