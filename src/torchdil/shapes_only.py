"""A block in which no value of a tensor may decide what is computed: what is traced there is right for other values, too.

A number that a function reads out of a tensor (`item()`, `if mask.any()`), and a shape that depends on one (`theta[mask]`),
would stand in a trace as they were when it was made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_DEPENDING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Reads values without an operation.
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr}


class ValueReadError(RuntimeError):
    """A function whose operations depend on values; autograd differentiates it."""


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _DEPENDING.intersection(func.tags) and not (func is torch.ops.aten.index.Tensor and _numbered(args[1])):
            raise ValueReadError(f"{func} depends on the values of a tensor")
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING:
            raise ValueReadError(f"{func.__name__} reads the values of a tensor")
        return func(*args, **(kwargs or {}))


def _numbered(indices: Any) -> bool:
    """Whether elements are chosen by their numbers, and not by masks, whose result has a size of its own."""
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in indices)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Raise `ValueReadError` where values are read."""
    with _Operations(), _Methods():
        yield
