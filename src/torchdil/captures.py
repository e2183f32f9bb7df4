"""What a function depends on besides its arguments: cells, globals it names, defaults, attributes of objects."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from torchdil.variables import names_in, reads_in

# A closure may reach large objects; the search for tensors in it ends after so many.
_SEARCH_LIMIT = 20_000
_OF_OTHERS = {"builtins", "torch", "numpy"}
# Where it keeps what it gives as attributes.
_TABLES = ("_parameters", "_buffers", "_modules")
_PLAIN = {type(None), bool, int, float, complex, str, bytes}
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
        try:
            found, parts = isinstance(item, Tensor), list(parts_of(item))
        except Exception:  # an object may refuse to be looked at
            continue
        if found:
            yield item, place
        else:
            stack.extend((part, (place, name)) for name, part in reversed(parts) if not _holds_nothing(part))


def _holds_nothing(item: Any) -> bool:
    """Whether there can be no tensor in it: most of what a list of numbers, or a module without hooks, is made of."""
    return type(item) in _PLAIN or (type(item) in (dict, OrderedDict) and not item)


def functions_read(function: Any) -> int:
    """A number that tells functions of the same code apart, by the functions, modules and kinds of objects that they use."""
    of_self: list[Any] = []
    if isinstance(function, types.MethodType):
        of_self, function = attributes(function.__self__, read_of_self(function.__func__)), function.__func__
    read = [*of_self, *reads(function)] if isinstance(function, types.FunctionType) else []
    kinds = (id(item) if isinstance(item, nn.Module) else id(getattr(item, "__code__", type(item))) for item in read)
    return hash(tuple(kinds))


def parts_of(item: Any) -> Iterable[tuple[str, Any]]:
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
    if isinstance(item, slice):
        return ("start", item.start), ("stop", item.stop), ("step", item.step)
    if isinstance(item, dict):
        return ((str(name), part) for name, part in item.items())
    if isinstance(item, (type, types.ModuleType)):
        return ()
    attributes = getattr(item, "__dict__", {}).items()
    return ((("" if name in _TABLES else name), part) for name, part in attributes)


def reads(function: types.FunctionType) -> Iterator[Any]:
    """What a function depends on; of an object that it only reads attributes of, those."""
    code, reads = function.__code__, reads_in(function.__code__)
    for (everywhere, name), names in reads.items():
        if everywhere and name in function.__globals__:
            yield from attributes(function.__globals__[name], names)
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        of_super = name == "__class__" and "super" in code.co_names  # which looks at `self`
        if cell != types.CellType() and not of_super:
            yield from attributes(cell.cell_contents, reads.get((False, name)))
    yield from (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())


def read_of_self(function: Any) -> frozenset[str] | None:
    """The attributes that a method reads of its object; None if it does something else with it."""
    if not isinstance(function, types.FunctionType) or of_torch(function) or not function.__code__.co_argcount:
        return None
    return reads_in(function.__code__).get((False, function.__code__.co_varnames[0]), frozenset())


def attributes(owner: Any, names: frozenset[str] | None) -> list[Any]:
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
        elif isinstance(value, types.FunctionType) and not of_torch(value):
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


def of_torch(function: types.FunctionType) -> bool:
    """Whether it is torch's or ours, and depends on nothing else."""
    return by_torch(function) and not closed_over(function)


def by_torch(function: types.FunctionType) -> bool:
    """Whether its code is torch's or ours: what wraps a function of torch's may have the name of that."""
    return (function.__globals__.get("__name__") or "").startswith(("torch.", "torchdil."))


def closed_over(function: types.FunctionType) -> list[Any]:
    """What it closes over, as what torch wraps around a function (`vmap`, `no_grad`) does over that."""
    if function.__closure__ is None:
        return []
    cells = zip(function.__code__.co_freevars, function.__closure__, strict=True)
    return [cell.cell_contents for name, cell in cells if name != "__class__" and cell != types.CellType()]
