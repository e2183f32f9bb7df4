"""What a function depends on besides its arguments: cells, globals it names, defaults, attributes of objects."""

from __future__ import annotations

import array
import contextvars
import ctypes
import functools
import importlib.util
import sys
import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchdil.variables import imported_by, mentioned, names_in, reads_in

# A closure may reach large objects; the search for tensors in it ends after so many.
_SEARCH_LIMIT = 20_000
# A key is made at every call, and must cost no more than it can save.
_KEY_LIMIT = 1000
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
# How a signature treats things of a type; the first that fits.
_KINDS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("plain", (int, float, complex, np.number)),
    ("tensor", (Tensor,)),
    # What does not show what it holds.
    ("unknown", (torch.jit.ScriptModule, types.MappingProxyType, types.GeneratorType, contextvars.ContextVar)),
    ("unknown", (bytearray, memoryview, array.array, ctypes._SimpleCData, ctypes.Structure, ctypes.Array)),
    ("weak", (weakref.ref,)),
    ("module", (nn.Module,)),
    ("function", (types.FunctionType,)),
    ("method", (types.MethodType,)),
    ("dict", (dict,)),
    ("parts", (tuple, list, functools.partial, set, frozenset, deque)),
    ("array", (np.ndarray,)),
    ("class", (type,)),
    ("opaque", (types.ModuleType,)),
    ("structure", (pytree.TreeSpec,)),
)
_OF_OTHERS = {"builtins", "torch", "numpy"}
# What nobody changes while a model is trained, and whose classes are large.
_LIBRARIES = {*_OF_OTHERS, *sys.stdlib_module_names, "torchdil", "scipy", "lightning", "pytorch_lightning", "transformers"}
# Methods that are called without their name.
_OPERATORS = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")
_UNNAMED = frozenset(f"__{side}{name}__" for side in ("", "r", "i") for name in _OPERATORS) | {
    *(
        "__call__",
        "__getattr__",
        "__getattribute__",
        "__getitem__",
        "__iter__",
        "__next__",
        "__len__",
        "__contains__",
        "__get__",
    ),
    *("__bool__", "__float__", "__int__", "__index__", "__enter__", "__exit__", "__neg__", "__abs__", "__array__"),
    *("__lt__", "__le__", "__gt__", "__ge__", "__torch_function__"),
}
# What every module has, and what does not change what it computes.
_OF_MODULES = frozenset(nn.Module().__dict__)
# Where it keeps what it gives as attributes.
_TABLES = ("_parameters", "_buffers", "_modules")
_MISSING = object()
# What has no attributes that a function would read one of, or does not show which.
_WHOLE: tuple[type, ...] = (Tensor, type, tuple, list, dict, functools.partial, torch.jit.ScriptModule)
_WHOLE += (types.ModuleType, types.FunctionType, types.MethodType)


def captured_tensors(function: Any) -> list[Tensor]:
    """The tensors that `function` closes over: cells, globals it names, defaults, attributes of objects."""
    return [tensor for tensor, _ in _captured(function)]


def captured_names(function: Any) -> list[tuple[str, Tensor]]:
    """The same with their names, such as "model.net.0.weight"."""
    named = []
    for tensor, place in _captured(function):
        names = []
        while place is not None:
            place, name = place
            names.append(name)
        named.append((".".join(name for name in reversed(names) if name), tensor))
    return named


def _captured(function: Any) -> Iterator[tuple[Tensor, Any]]:
    """With each tensor its place, (that of the object that holds it, its name there)."""
    seen: set[int] = set()
    stack: list[tuple[Any, Any]] = [(function, None)]
    while stack and len(seen) < _SEARCH_LIMIT:
        item, place = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            yield item, place
        else:
            stack.extend((part, (place, name)) for name, part in reversed(list(_parts(item))))


def signature(function: Any) -> tuple[list[Tensor], Hashable] | None:
    """The tensors that `function` closes over, and a key: with equal keys only the tensors may differ between two functions.

    Shapes, numbers, the code of functions and the types of objects are in the key; what cannot be looked into is there by its
    identity. Of an object that functions only read attributes of, those count: a method of a model does not depend on the list
    of losses that the model keeps. Of classes and modules that are reached, what has a name that is mentioned anywhere counts.
    None for a function that reaches too many objects, or things that do not show what they hold, or modules whose hooks want to
    see what autograd does.
    """
    tensors: list[Tensor] = []
    key: list[Any] = []
    seen: dict[Hashable, int] = {}
    stack = [function]
    named: dict[int, tuple[Any, set[str]]] = {}  # dictionaries whose values count by their names, and those that did
    mentions = set(_UNNAMED)
    while stack or (stack := _by_name(named, mentions, key)):
        item = stack.pop()
        kind, way = type(item), _way(item.__class__)
        if way == "plain":
            key += (kind, item)
            continue
        # A method is another object whenever it is looked up.
        identity = (id(item.__func__), id(item.__self__)) if kind is types.MethodType else id(item)
        if identity in seen:
            key.append(seen[identity])
            continue
        seen[identity] = len(seen)
        if len(seen) > _KEY_LIMIT or len(stack) > _KEY_LIMIT:
            return None
        if way == "tensor":
            if item.layout != torch.strided or item.is_nested:
                return None
            tensors.append(item)
            key += (kind, item.shape, item.stride(), item.dtype, item.device, item.requires_grad)
            if item.__dict__:
                named[id(item)] = item.__dict__, set()
        elif way == "function":
            key.append(item.__code__)
            if not _of_torch(item):  # whose functions depend on nothing else
                mentions |= mentioned(item.__code__)
                modules = _imported(item)
                if None in modules:
                    return None
                stack += (*_read(item), *item.__dict__.values(), *modules)
        elif way == "method":
            key.append(kind)
            stack += (item.__func__, *_attributes(item.__self__, _read_of_self(item.__func__)))
            stack += _methods(item.__self__, item.__func__.__name__)  # those of its bases, which `super()` finds
        elif way == "module":
            if item._backward_hooks or item._backward_pre_hooks:
                return None
            left_out = getattr(kind, "_left_by_calls", ())
            names = [name for name in item.__dict__ if name not in _OF_MODULES and name not in left_out]
            key += (kind, *names, *item._parameters, *item._buffers, *item._modules, item.training)
            stack.extend(item.__dict__[name] for name in names)
            stack += (*item._parameters.values(), *item._buffers.values(), *item._modules.values())
            stack += (*item._forward_pre_hooks.values(), *item._forward_hooks.values(), *_methods(item, "forward"))
            named |= {id(base): (vars(base), set()) for base in _own_classes(item.__class__) if id(base) not in named}
        elif way == "dict":
            key += (kind, len(item), *(name if type(name) in _PLAIN else id(name) for name in item))
            stack.extend(item.values())
        elif way == "parts":
            parts = list(_parts(item))
            key += (kind, *((name for name, _ in parts) if isinstance(item, functools.partial) else (len(parts),)))
            stack.extend(part for _, part in parts)
        elif way == "structure":
            key += (kind, repr(item))
        elif way == "weak":
            stack.append(item())
        elif way == "unknown":
            return None
        elif way == "array":
            if item.size > _KEY_LIMIT:  # too many numbers to look at in each call
                return None
            key += (kind, item.shape, item.dtype, item.tobytes())
        elif way == "class":
            key.append(id(item))
            for base in _own_classes(item):
                named.setdefault(id(base), (vars(base), set()))
                # Its numbers, and what a backward of its own reads.
                functions: tuple[type, ...] = (staticmethod,) if issubclass(base, torch.autograd.Function) else ()
                read = (part for part in vars(base).values() if type(part) in _PLAIN or isinstance(part, (Tensor, *functions)))
                stack += (part.__func__ if isinstance(part, staticmethod) else part for part in read)
        elif way == "opaque":
            key.append(id(item))
            if item.__name__.split(".")[0] not in _LIBRARIES:
                named.setdefault(id(item), (vars(item), set()))
        elif (held := _held(item)) is None:
            key += (kind, id(item))
        else:
            key += (kind, *held)
            stack += (*held.values(), *_methods(item, "__call__"))
            named |= {id(base): (vars(base), set()) for base in _own_classes(item.__class__) if id(base) not in named}
    return tensors, tuple(key)


def _by_name(named: dict[int, tuple[Any, set[str]]], names: set[str], key: list[Any]) -> list[Any]:
    """What these dictionaries hold under these names, and was not asked for before."""
    found: list[Any] = []
    for held, known in named.values():
        new = sorted(names.intersection(held).difference(known))
        known.update(new)
        key += new
        for name in new:
            value = held[name]
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            found.append(value.fget if isinstance(value, property) else value)
    return found


@functools.lru_cache(maxsize=1024)
def _own_classes(kind: Hashable) -> tuple[type, ...]:
    """The class and its bases, those of libraries left out."""
    return tuple(base for base in cast(type, kind).__mro__ if base.__module__.split(".")[0] not in _LIBRARIES)


def _imported(function: types.FunctionType) -> list[Any]:
    """The modules that a function imports when it is called; None for one that is not known yet."""
    found: list[Any] = []
    for name, level in imported_by(function.__code__):
        full = importlib.util.resolve_name("." * level + name, function.__globals__.get("__package__")) if level else name
        found.append(sys.modules.get(full))
    return found


@functools.lru_cache(maxsize=1024)
def _way(kind: type) -> str:
    return "plain" if kind in _PLAIN else next((name for name, kinds in _KINDS if issubclass(kind, kinds)), "object")


def _held(item: Any) -> dict[str, Any] | None:
    """The attributes of an object by their names; None where it has no place for any."""
    slots, known = _slots(item.__class__), getattr(item, "__dict__", None)
    if not slots:
        return known
    return (known or {}) | {name: getattr(item, name) for name in slots if hasattr(item, name)}


@functools.lru_cache(maxsize=1024)
def _slots(kind: type) -> list[str]:
    members = (pair for base in kind.__mro__ if "__slots__" in vars(base) for pair in vars(base).items())
    return [name for name, value in members if type(value) is types.MemberDescriptorType]


def _methods(owner: Any, name: str) -> list[Any]:
    """The methods of that name that its class and the bases have, those of torch left out."""
    found = (vars(base).get(name) for base in type(owner).__mro__)
    return [types.MethodType(one, owner) for one in found if isinstance(one, types.FunctionType) and not _of_torch(one)]


def _parts(item: Any) -> Iterable[tuple[str, Any]]:
    """What an object holds that its behaviour may depend on, with the names under which it does."""
    if isinstance(item, types.FunctionType):
        code, defaults = item.__code__, item.__defaults__ or ()
        cells = zip(code.co_freevars, item.__closure__ or (), strict=True)
        held = [(name, cell.cell_contents) for name, cell in cells if cell != types.CellType()]
        held += [(name, item.__globals__[name]) for name in names_in(code) if name in item.__globals__]
        last = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
        return *held, *zip(last, defaults, strict=True), *(item.__kwdefaults__ or {}).items()
    if isinstance(item, types.MethodType):
        return ("", item.__self__), ("", item.__func__)
    if isinstance(item, functools.partial):
        return ("", item.func), *((f"argument {i}", part) for i, part in enumerate(item.args)), *item.keywords.items()
    if isinstance(item, (tuple, list, set, frozenset, deque)):
        return ((str(i), part) for i, part in enumerate(item))
    if isinstance(item, dict):
        return ((str(name), part) for name, part in item.items())
    if isinstance(item, (type, types.ModuleType)):
        return ()
    attributes = getattr(item, "__dict__", {}).items()
    return ((("" if name in _TABLES else name), part) for name, part in attributes)


def _read(function: types.FunctionType) -> Iterator[Any]:
    """What a function depends on; of an object that it only reads attributes of, those."""
    code, reads = function.__code__, reads_in(function.__code__)
    for (everywhere, name), names in reads.items():
        if everywhere and name in function.__globals__:
            yield from _attributes(function.__globals__[name], names)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if cell != types.CellType():
            yield from _attributes(cell.cell_contents, reads.get((False, name)))
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def _read_of_self(function: Any) -> frozenset[str] | None:
    """The attributes that a method reads of its object; None if it does something else with it."""
    if not isinstance(function, types.FunctionType) or _of_torch(function) or not function.__code__.co_argcount:
        return None
    return reads_in(function.__code__).get((False, function.__code__.co_varnames[0]), frozenset())


def _attributes(owner: Any, names: frozenset[str] | None) -> list[Any]:
    """The attributes of an object with these names; the object where they are not known, or not to be found."""
    kind: Any = type(owner)
    if names and kind is types.ModuleType:
        others = owner.__name__.split(".")[0] in _OF_OTHERS  # whose functions are known by their names
        return [owner] if others else [owner, *(vars(owner).get(name) for name in sorted(names))]
    if names is None or isinstance(owner, _WHOLE) or kind.__getattribute__ is not object.__getattribute__:
        return [owner]
    places = [getattr(owner, "__dict__", {})]
    if isinstance(owner, nn.Module) and kind.__getattr__ is nn.Module.__getattr__:
        places += (owner._parameters, owner._buffers, owner._modules)
    found: list[Any] = []
    for name in sorted(names):
        value = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), _MISSING)
        if type(value) is property and value.fget is not None:
            found.append(types.MethodType(value.fget, owner))
        elif not hasattr(value, "__set__") and (there := [place for place in places if name in place]):
            found.append(there[0][name])
        elif isinstance(value, types.FunctionType) and not _of_torch(value):
            found.append(types.MethodType(value, owner))
        elif isinstance(value, staticmethod):
            found.append(value.__func__)
        elif isinstance(value, types.MemberDescriptorType) and hasattr(owner, name):
            found.append(getattr(owner, name))
        elif value is not _MISSING and not hasattr(value, "__get__"):
            found.append(value)
        else:
            return [owner]
    return found


def _of_torch(function: types.FunctionType) -> bool:
    return (function.__module__ or "").startswith("torch.")  # what was made by exec may have no module
