"""A result that is taken for the tensor inside it says where the tensor is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from torch import Tensor

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_OTHERS = ("neg", "pos", "abs", "invert", "lt", "le", "gt", "ge", "getitem", "setitem", "iter", "len", "float", "int", "array")
_NAMES = (*_OPERATORS, *(f"r{name}" for name in _OPERATORS), *_OTHERS)


class NotATensor:
    """Base of results whose tensor is in `.value`: using them as that tensor raises one sentence."""

    if not TYPE_CHECKING:  # a type checker finds these mistakes by itself, if it does not see that they are caught

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            if name.startswith("_") or not hasattr(Tensor, name):
                raise AttributeError(f"{kind!r} object has no attribute {name!r}")
            raise AttributeError(f"a {kind} is no tensor and has no .{name}: the answer is its .value, write .value.{name}.")

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
            name = getattr(func, "__name__", str(func))
            raise TypeError(f"{name} needs a tensor, got a {cls.__name__}: the answer is its .value, pass that.")

    def __eq__(self, other: object) -> bool:
        return _refuse(self) if isinstance(other, (Tensor, int, float)) else self is other

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        return True  # and not by its length


def _refuse(self: NotATensor, *_: Any, **__: Any) -> NoReturn:
    raise TypeError(f"a {type(self).__name__} is no tensor: the answer is its .value, use that.")


for _name in _NAMES:
    setattr(NotATensor, f"__{_name}__", _refuse)
