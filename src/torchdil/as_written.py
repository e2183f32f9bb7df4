"""Functions that call what `torch.compile` has made, whose graphs can be differentiated once only.

Where J is made of second derivatives, such code runs as it was written. That a function calls any shows in the error that torch
raises; it is remembered, and the next call begins that way.
"""

from __future__ import annotations

import functools
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

R = TypeVar("R")

_COMPILERS = ("torch._dynamo.", "torch._functorch._aot_autograd.", "torch._inductor.")
# What was found to call compiled code.
_known: weakref.WeakSet[Any] = weakref.WeakSet()


def compiled_or_as_written(function: Any, run: Callable[[], R]) -> R:
    """`run()`, which differentiates `function`; once more where that calls what is compiled and cannot be differentiated so."""
    key = _kind(function)
    if key not in _known:
        try:
            return run()
        except RuntimeError as error:
            if not _from_compiled(error):
                raise
        _known.add(key)
    with as_written():
        return run()


class _Blocks:
    """How many blocks of `as_written` are open, and what ends the state that the first of them began."""

    def __init__(self) -> None:
        self.lock, self.count, self.ends = threading.Lock(), 0, ExitStack()


_open = _Blocks()


@contextmanager
def as_written() -> Iterator[None]:
    """A block in which compiled functions run as they were written; in all threads, for torch knows this of the process."""
    with _open.lock:
        if not _open.count:
            _open.ends.enter_context(torch.compiler.set_stance("force_eager"))
        _open.count += 1
    try:
        yield
    finally:
        with _open.lock:
            _open.count -= 1
            if not _open.count:
                _open.ends.close()


def running_as_written() -> bool:
    """Whether such a block is open."""
    return _open.count > 0


def _kind(function: Any) -> Any:
    """What calls of the same function have in common: its code, the module, or the class of another object."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__code__", function if isinstance(function, nn.Module) else type(function))


def _from_compiled(error: BaseException) -> bool:
    """Whether an error was raised in what torch.compile has made."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals.get("__name__", "").startswith(_COMPILERS) for frame, _ in frames)
