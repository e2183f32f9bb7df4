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
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_DEPENDING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
# Reads values without an operation, or without one that is seen, as tensors of numbers do: `torch.Tensor([t])`.
_READING = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.untyped_storage}
_READING |= {Tensor.__float__, Tensor.__int__, Tensor.__index__, Tensor.__complex__, Tensor.__bool__}
_READING |= {Tensor.__cuda_array_interface__.__get__}
_READING |= {Tensor.__repr__, Tensor.__format__, Tensor.__deepcopy__}
# Reads those in a sequence of tensors: `torch.tensor([t])`, `y[:, [i, j]]` ...
_OF_SEQUENCES = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor, Tensor.new}
_BY_INDEX = {Tensor.__getitem__, Tensor.__setitem__}
_OF_SEQUENCES |= {torch.sparse_coo_tensor, torch.sparse_csr_tensor, *_BY_INDEX}
# ... and those of a second tensor.
_OF_SECOND = {torch.tensor_split, Tensor.tensor_split}


class ValueReadError(RuntimeError):
    """A function whose operations depend on values; autograd differentiates it."""


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _DEPENDING.intersection(func.tags) and not (func is torch.ops.aten.index.Tensor and _numbered(args[1])):
            raise ValueReadError(f"{func} depends on the values of a tensor")
        return func(*args, **(kwargs or {}))


class _Methods(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READING or _reads(func, [*args, *(kwargs or {}).values()]):
            raise ValueReadError(f"{func.__name__} reads the values of a tensor")
        return func(*args, **(kwargs or {}))


def _reads(func: Any, given: list[Any]) -> bool:
    """Whether a call reads tensors by being given them in a place for numbers."""
    if func in _OF_SECOND:
        return sum(isinstance(one, Tensor) for one in given) > 1
    if func in _BY_INDEX and isinstance(given[1], tuple):
        given = [*given.pop(1), *given]
    sequences = (one for one in given if func in _OF_SEQUENCES and isinstance(one, (list, tuple)))
    return any(isinstance(t, Tensor) for one in sequences for t in pytree.tree_leaves(one))


def _numbered(indices: Any) -> bool:
    """Whether elements are chosen by their numbers, and not by masks, whose result has a size of its own."""
    return all(index is None or index.dtype not in (torch.bool, torch.uint8) for index in indices)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Raise `ValueReadError` where values are read."""
    with _Operations(), _Methods():
        yield
