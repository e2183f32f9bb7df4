"""What a function depends on besides its arguments: cells, globals it names, defaults, attributes of objects."""

from __future__ import annotations

import functools
import types
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

# A closure may reach large objects; the search for tensors in it ends after so many.
_SEARCH_LIMIT = 20_000
# A key is made at every call, and must cost no more than it can save.
_KEY_LIMIT = 1000
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
_OF_OTHERS = {"builtins", "torch", "numpy"}
# What every module has, and what does not change what it computes.
_OF_MODULES = frozenset(nn.Module().__dict__)


def captured_tensors(function: Any) -> list[Tensor]:
    """The tensors that `function` closes over: cells, globals it names, defaults, attributes of objects; the nearest first."""
    found: list[Tensor] = []
    seen: set[int] = set()
    stack = [function]
    while stack and len(seen) < _SEARCH_LIMIT:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        else:
            stack.extend(_parts(item))
    return found


def signature(function: Any) -> tuple[list[Tensor], Hashable] | None:
    """The tensors that `function` closes over, and a key: with equal keys only the tensors may differ between two functions.

    Shapes, numbers, the code of functions and the types of objects are in the key; what cannot be looked into is there by its
    identity. None for a function that reaches too many objects, or compiled ones.
    """
    tensors: list[Tensor] = []
    key: list[Any] = []
    seen: dict[int, int] = {}
    stack = [function]
    while stack:
        item = stack.pop()
        kind = type(item)
        if kind in _PLAIN:
            key += (kind, item)
            continue
        if id(item) in seen:
            key.append(seen[id(item)])
            continue
        seen[id(item)] = len(seen)
        if len(seen) > _KEY_LIMIT or len(stack) > _KEY_LIMIT:
            return None
        if isinstance(item, Tensor):
            tensors.append(item)
            key += (kind, item.shape, item.stride(), item.dtype, item.device, item.requires_grad)
        elif isinstance(item, torch.jit.ScriptModule):
            return None  # which does not show what it reads
        elif isinstance(item, nn.Module):
            names = [name for name in item.__dict__ if name not in _OF_MODULES]
            key += (kind, *names, *item._parameters, *item._buffers, *item._modules, item.training)
            stack.extend(item.__dict__[name] for name in names)
            stack += (*item._parameters.values(), *item._buffers.values(), *item._modules.values())
            stack += (*item._forward_pre_hooks.values(), *item._forward_hooks.values())
        elif isinstance(item, types.FunctionType):
            key.append(item.__code__)
            if not item.__module__.startswith("torch."):  # whose functions depend on nothing else
                stack.extend(_parts(item))
        elif isinstance(item, dict):
            key += (kind, len(item), *(name if type(name) in _PLAIN else id(name) for name in item))
            stack.extend(item.values())
        elif isinstance(item, (tuple, list, functools.partial, types.MethodType)):
            parts = list(_parts(item))
            key += (kind, len(parts))
            stack += parts
        elif isinstance(item, type) and item.__module__ not in _OF_OTHERS and not item.__module__.startswith("torch."):
            # A class of the user: its numbers, and what a backward of its own reads.
            key.append(id(item))
            functions: tuple[type, ...] = (staticmethod,) if issubclass(item, torch.autograd.Function) else ()
            read = (part for part in vars(item).values() if type(part) in _PLAIN or isinstance(part, (Tensor, *functions)))
            stack += (part.__func__ if isinstance(part, staticmethod) else part for part in read)
        elif isinstance(item, (type, types.ModuleType)) or not hasattr(item, "__dict__"):
            key += (kind, id(item))
        else:
            key += (kind, *item.__dict__)
            stack.extend(item.__dict__.values())
    return tensors, tuple(key)


def _parts(item: Any) -> Iterable[Any]:
    """What an object holds that its behaviour may depend on."""
    if isinstance(item, types.FunctionType):
        cells = (cell.cell_contents for cell in item.__closure__ or () if cell != types.CellType())
        named = (item.__globals__[name] for name in _names(item.__code__) if name in item.__globals__)
        return (*cells, *named, *(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values())
    if isinstance(item, types.MethodType):
        return item.__self__, item.__func__
    if isinstance(item, functools.partial):
        return item.func, *item.args, *item.keywords.values()
    if isinstance(item, (tuple, list)):
        return item
    if isinstance(item, dict):
        return item.values()
    if isinstance(item, (type, types.ModuleType)):
        return ()
    return getattr(item, "__dict__", {}).values()


@functools.cache
def _names(code: types.CodeType) -> list[str]:
    """The names that a function looks up, functions defined inside it included."""
    inside = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names(constant)]
    return [*code.co_names, *inside]
