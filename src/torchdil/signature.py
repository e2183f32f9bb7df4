"""The key under which what is known of a function is kept: what it reads, but for the numbers in its tensors."""

from __future__ import annotations

import abc
import array
import contextvars
import ctypes
import datetime
import decimal
import fractions
import functools
import importlib.util
import operator
import re
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterator, MappingView
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._library.custom_ops import CustomOpDef
from torch._ops import OpOverload, OpOverloadPacket
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree

from torchdil.batch import Layout
from torchdil.captures import attributes, by_torch, closed_over, of_torch, parts_of, read_of_self, reads
from torchdil.variables import composes_names, imported_by, mentioned, reads_gradient

# A key is made at every call, and must cost no more than it can save.
_KEY_LIMIT = 1000
_PLAIN = {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
# How a signature treats things of a type; the first that fits.
_KINDS: tuple[tuple[str, tuple[type, ...]], ...] = (
    ("plain", (int, float, complex, str, bytes, np.number)),
    ("plain", (range, decimal.Decimal, fractions.Fraction, datetime.date, datetime.timedelta)),
    ("tensor", (Tensor,)),
    # What does not show what it holds.
    ("unknown", (torch.jit.ScriptModule, types.MappingProxyType, types.GeneratorType, contextvars.ContextVar)),
    ("unknown", (bytearray, memoryview, array.array, ctypes._SimpleCData, ctypes.Structure, ctypes.Array)),
    ("unknown", (Iterator, MappingView, types.CellType, torch.ScriptObject, torch._C.ScriptDict, torch._C.ScriptList)),
    ("weak", (weakref.ref,)),
    ("module", (nn.Module,)),
    ("function", (types.FunctionType,)),
    ("method", (types.MethodType,)),
    ("builtin", (types.BuiltinMethodType, types.MethodWrapperType)),
    ("dict", (dict,)),
    ("parts", (tuple, list, set, frozenset, deque)),
    ("named", (functools.partial, slice)),
    ("array", (np.ndarray,)),
    ("type", (type,)),
    ("library", (types.ModuleType,)),
    ("structure", (pytree.TreeSpec,)),
    ("layout", (Layout,)),
    ("getter", (operator.attrgetter, operator.methodcaller)),
    ("operation", (OpOverload, OpOverloadPacket)),
    ("custom", (CustomOpDef,)),
)
# What shows nothing of what it holds, which nobody can change; or is not read, as of locks; or drawn from, which F shows.
_FIXED: tuple[type, ...] = (re.Pattern, re.Match, datetime.time, datetime.tzinfo, operator.itemgetter, np.dtype)
_FIXED += (types.CodeType, types.GenericAlias, types.UnionType, types.EllipsisType, types.NotImplementedType)
_FIXED += (np.random.Generator, np.random.BitGenerator, np.random.RandomState)
_FIXED += (type(threading.Lock()), type(threading.RLock()), type(vars(abc.ABC)["_abc_impl"]))
# What nobody changes while a model is trained, and whose classes are large.
_LIBRARIES = {*sys.stdlib_module_names, "torch", "torchdil", "numpy", "scipy", "lightning", "pytorch_lightning", "transformers"}
# What is called without its name, besides the special methods of classes, of which these make objects: where there are objects
# only, and not their class, they are of no concern.
_UNNAMED = frozenset({"__getattr__"})
_MAKE = frozenset({"__new__", "__init__", "__post_init__"})
# These are for people and for files, and may reach far.
_ASIDE = "repr str format dir sizeof del copy deepcopy reduce reduce_ex getstate setstate getnewargs getnewargs_ex"
_LEFT = frozenset(_MAKE.union(f"__{name}__" for name in _ASIDE.split()))
# What every module has, and what does not change what it computes.
_OF_MODULES = frozenset(nn.Module().__dict__)

# Functions that name one of these read what nothing shows.
_BLIND = frozenset({"globals", "eval", "exec", "__import__", "import_module", "to_dlpack"})
# These want to see what autograd does, which a trace would not show them, and a check by autograd would at another vector.
_BLIND |= {"register_hook", "register_prehook", "register_multi_grad_hook", "register_post_accumulate_grad_hook", "retain_grad"}


def signature(function: Any) -> tuple[list[Tensor], Hashable] | None:
    """The tensors that `function` closes over, and a key: with equal keys only the tensors may differ between two functions.

    Shapes, numbers, the code of functions and the types of objects are in the key; what cannot be looked into is there itself.
    Of an object that functions only read attributes of, those count: a method of a model does not depend on the list of losses
    that the model keeps. Of classes and modules that are reached, what has a name that is mentioned anywhere counts, or all,
    where names are composed. None for a function that reaches too many objects, or things that do not show what they hold, or
    modules whose hooks want to see what autograd does; and while there are hooks of all modules.
    """
    if _has_any_global_hook():
        return None
    try:
        return _Walk().over(function)
    except Exception:  # an object may refuse to be looked at
        return None


class _UnknownError(Exception):
    """Something is reached that does not show what it holds."""


class _Walk:
    """Visits all that a function reads, object by object.

    Most objects are looked into as a whole. Classes and imported files of the user's, and tensors with attributes, may hold
    much that the function never touches: of that only counts what some function that was visited names. Such names turn up
    along the way, so these objects are asked again whenever nothing else is left (`by_name`).

    Attributes:
        tensors, key: those that were found; all else, in the order of the visit.
        stack: objects that are yet to be visited.
        named: the attributes of the objects that are looked into by name, and the names that were asked for; by `id`.
        mentions: the names in the code of the functions visited so far, and those that Python uses by itself.
        composed: whether some function makes names while it runs (by `getattr`, say): then all attributes count.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.key: list[Any] = []
        self.stack: list[Any] = []
        self.named: dict[int, tuple[Any, set[str]]] = {}
        self.mentions, self.composed = set(_UNNAMED), False

    def over(self, function: Any) -> tuple[list[Tensor], Hashable] | None:
        seen: dict[Hashable, int] = {}
        key, stack = self.key, self.stack
        stack.append(function)
        while stack or self.by_name():
            item = stack.pop()
            seeming: Any = item.__class__  # which proxies have from what they stand for
            kind, (way, own) = type(item), _way(seeming)
            if way == "plain":
                key += (kind, item)
                if not own:
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
                self.tensors.append(item)
                key += (kind, item.shape, item.stride(), item.dtype, item.device, item.requires_grad)
                if item.__dict__:
                    self.names_of(item)
            elif way == "unknown":
                return None
            elif way != "plain":
                _HOW[way](self, item, kind)
            if own:
                self.names_of(*own)
                if way in ("plain", "dict", "parts", "array"):  # of a class of one's own they have attributes, too
                    stack += getattr(item, "__dict__", {}).values()
        return self.tensors, tuple(key)

    def names_of(self, *owners: Any) -> None:
        """What these hold counts by its names."""
        for owner in owners:
            if id(owner) not in self.named:
                held = vars(owner)
                self.named[id(owner)] = held, set(_MAKE)
                if isinstance(owner, type):
                    self.mentions.update(_special(owner, len(held)))

    def by_name(self) -> bool:
        """Whether there is more to look at: what these dictionaries hold under names that were met since."""
        for held, known in self.named.values():
            names = (name for name in held if not name.startswith("__")) if self.composed else ()
            new = sorted(self.mentions.intersection(held).union(names).difference(known))
            known.update(new)
            self.key += new
            for name in new:
                value = held[name]
                if isinstance(value, (staticmethod, classmethod)):
                    value = value.__func__
                self.stack += (value.fget, value.fset, value.fdel) if isinstance(value, property) else (value,)
        return bool(self.stack)

    def _function(self, item: types.FunctionType, kind: type) -> None:
        self.key.append(item.__code__)
        if by_torch(item):  # which depends on nothing else
            self.stack += closed_over(item)
        else:
            names = mentioned(item.__code__)
            if not _BLIND.isdisjoint(names) or ("ops" in names and not _in_python().isdisjoint(names)):
                raise _UnknownError
            if "grad" in names and reads_gradient(item.__code__):
                raise _UnknownError
            self.mentions |= names
            self.composed |= composes_names(item.__code__)
            self.stack += (*reads(item), *item.__dict__.values(), *_imported(item))

    def _method(self, item: types.MethodType, kind: type) -> None:
        self.key.append(kind)
        self.stack += (item.__func__, *attributes(item.__self__, read_of_self(item.__func__)))
        # Those of its bases, too, which `super()` finds.
        self.stack += _methods(item.__self__, getattr(item.__func__, "__name__", ""))

    def _builtin(self, item: Any, kind: type) -> None:
        owner = item.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            self.key.append(_Itself(item))
        else:
            self.key += (kind, item.__name__)
            self.stack.append(owner)

    def _module(self, item: nn.Module, kind: type) -> None:
        if item._backward_hooks or item._backward_pre_hooks:
            raise _UnknownError
        left_out = getattr(kind, "_left_by_calls", ())
        names = [name for name in item.__dict__ if name not in _OF_MODULES and name not in left_out]
        self.key += (kind, *names, *item._parameters, *item._buffers, *item._modules, item.training)
        self.stack += (item.__dict__[name] for name in names)
        self.stack += (*item._parameters.values(), *item._buffers.values(), *item._modules.values())
        self.stack += (*item._forward_pre_hooks.values(), *item._forward_hooks.values(), *_methods(item, "forward"))

    def _dict(self, item: dict[Any, Any], kind: type) -> None:
        self.key += (kind, len(item), *(name if type(name) in _PLAIN else id(name) for name in item))
        self.stack += item.values()

    def _parts(self, item: Any, kind: type) -> None:
        self.key += (kind, len(item))
        self.stack += item

    def _named(self, item: Any, kind: type) -> None:
        parts = list(parts_of(item))
        self.key += (kind, *(name for name, _ in parts))
        self.stack += (part for _, part in parts)

    def _structure(self, item: pytree.TreeSpec, kind: type) -> None:
        self.key += (kind, repr(item))

    def _layout(self, item: Layout, kind: type) -> None:
        self.key += (item.shapes, item.batch_shape, None if item.spec.is_leaf() else repr(item.spec))

    def _weak(self, item: Any, kind: type) -> None:
        self.stack.append(item())

    def _array(self, item: np.ndarray[Any, Any], kind: type) -> None:
        if item.size > _KEY_LIMIT or item.dtype.hasobject:  # too many numbers to look at in each call, or places of objects
            raise _UnknownError
        self.key += (kind, item.shape, item.dtype, item.tobytes())

    def _type(self, item: type, kind: type) -> None:
        self.key.append(id(item))
        self.names_of(*_own_classes(item))
        for base in _own_classes(item):
            # Its numbers, what makes one of it, and what a backward of its own reads.
            functions: tuple[type, ...] = (staticmethod,) if issubclass(base, torch.autograd.Function) else ()
            made = {*_MAKE, "forward"} if issubclass(base, nn.Module) else _MAKE
            for name, part in vars(base).items():
                if type(part) in _PLAIN or isinstance(part, (Tensor, *functions)) or (name in made and not _of_library(part)):
                    self.stack.append(part.__func__ if isinstance(part, staticmethod) else part)

    def _library(self, item: types.ModuleType, kind: type) -> None:
        self.key.append(id(item))
        if item.__name__.split(".")[0] not in _LIBRARIES:
            self.names_of(item)

    def _object(self, item: Any, kind: type) -> None:
        held = _held(item)
        if held is None and not _is_fixed(kind):
            raise _UnknownError
        if held is None:
            self.key += (kind, _Itself(item))
        else:
            self.key += (kind, *held)
            self.stack += (*held.values(), *_methods(item, "__call__"))

    def _getter(self, item: Any, kind: type) -> None:
        make, given = item.__reduce__()
        if isinstance(make, functools.partial):  # of a method that is called with keywords
            given = (*make.args, *given, *make.keywords, *make.keywords.values())
        names = given if kind is operator.attrgetter else given[:1]
        self.mentions.update(part for name in names for part in name.split("."))
        self.key += (kind, len(given))
        self.stack += given

    def _operation(self, item: Any, kind: type) -> None:
        if str(item).partition(".")[0] in _in_python():
            raise _UnknownError
        self.key += (kind, _Itself(item))

    def _custom(self, item: CustomOpDef, kind: type) -> None:
        self.key += (kind, _Itself(item))
        self.stack += (part for part in vars(item).values() if isinstance(part, (types.FunctionType, dict)))


# By the name of a way.
_HOW: dict[str, Callable[[_Walk, Any, type], None]] = {
    name[1:]: method for name, method in vars(_Walk).items() if name[0] == "_" != name[1]
}


class _Itself:
    """An object in a key: as long as the key is kept, no other can have its place in memory."""

    def __init__(self, item: Any):
        self._item = item

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Itself) and self._item is other._item

    def __hash__(self) -> int:
        return id(self._item)


@functools.lru_cache(maxsize=1024)
def _own_classes(kind: type) -> tuple[type, ...]:
    """The class and its bases, those of libraries left out."""
    return tuple(base for base in kind.__mro__ if base.__module__.split(".")[0] not in _LIBRARIES)


@functools.lru_cache(maxsize=1024)
def _special(kind: type, count: int) -> frozenset[str]:
    """The names of the special methods of a class with so many names, which operators, functions and statements call.

    Those that a dataclass has been given read its fields only, which are looked at anyway.
    """
    held = vars(kind)
    special = {name: value for name, value in held.items() if name[:2] == "__" and name not in _LEFT}
    if "__dataclass_fields__" in held:
        files = {name: getattr(getattr(value, "__code__", None), "co_filename", "") for name, value in special.items()}
        special = {name: value for name, value in special.items() if files[name] != "<string>"}
    called = (name for name, value in special.items() if callable(value) or isinstance(value, (property, classmethod)))
    return frozenset(name for name in called if not _of_library(special[name]))


def _in_python() -> frozenset[str]:
    """The namespaces of operations whose derivatives are in Python, where they may read anything."""
    return _namespaces(len(torch.library._impls))


@functools.lru_cache(maxsize=1)
def _namespaces(count: int) -> frozenset[str]:
    found = (name.split("/") for name in torch.library._impls)
    return frozenset(namespace for namespace, *_, key in found if "Autograd" in key and namespace not in ("aten", "prims"))


@functools.lru_cache(maxsize=1024)
def _is_fixed(kind: type) -> bool:
    described = hasattr(kind, "__get__")  # an attribute of a class, which holds nothing
    return kind is object or described or issubclass(kind, _FIXED) or kind.__module__.split(".")[0] == "torch"


def _of_library(function: Any) -> bool:
    """Whether it is a function of a library's that closes over nothing, as an enumeration has them."""
    known = isinstance(function, types.FunctionType) and function.__closure__ is None
    return known and str(function.__globals__.get("__name__")).split(".")[0] in _LIBRARIES


def _imported(function: types.FunctionType) -> list[Any]:
    """The modules that a function imports when it is called; None for one that has not been imported, and was not read."""
    found: list[Any] = []
    for name, level in imported_by(function.__code__):
        try:
            full = importlib.util.resolve_name("." * level + name, function.__globals__.get("__package__"))
        except ImportError:  # it cannot be, which the function sees to
            full = ""
        found.append(sys.modules.get(full))
    return found


@functools.lru_cache(maxsize=1024)
def _way(kind: type) -> tuple[str, tuple[type, ...]]:
    """How to treat things of a type, and which classes of one's own it has."""
    way = "plain" if kind in _PLAIN else next((name for name, kinds in _KINDS if issubclass(kind, kinds)), "object")
    return way, _own_classes(kind)


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
    found = (vars(base).get(name) for base in owner.__class__.__mro__)
    return [types.MethodType(one, owner) for one in found if isinstance(one, types.FunctionType) and not of_torch(one)]
