"""Which tensors from outside an evaluation depends on: read off the autograd graph that it left."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

# A closure may reach large objects; the search for tensors in it ends after so many.
_SEARCH_LIMIT = 20_000


class Dependence(NamedTuple):
    """What an evaluation at a leaf depends on.

    Attributes:
        on_leaf: whether it depends on the leaf at all.
        tensors: the tensors from outside that it depends on, leaves or not.
        hidden: whether there are others, non-leaf, that could not be found.
    """

    on_leaf: bool
    tensors: list[Tensor]
    hidden: bool


def age(leaf: Tensor) -> int:
    """A number that nodes of the graph made from now on have at least."""
    return leaf.view_as(leaf).grad_fn._sequence_nr()  # type: ignore[union-attr]


def dependence(F: Tensor, leaf: Tensor, first: int, known: Iterable[Tensor], function: Any) -> Dependence:
    """Walk the graph of F, evaluated at `leaf`, back to where it began.

    Nodes older than `first` are outside. AccumulateGrad nodes carry their leaf; a non-leaf tensor is recognised by its edge,
    if it is in `known` or in the closure of `function`.
    """
    if threading.current_thread() is not threading.main_thread():  # ages are counted per thread: outside cannot be told
        known = (*known, *captured_tensors(function))
    edges = {_edge(t): t for t in known if t.requires_grad}
    found: dict[int, Tensor] = {}
    unknown = set()
    on_leaf = False
    seen = {F.grad_fn}
    stack = [F.grad_fn] if F.requires_grad else []
    while stack:
        node = stack.pop()
        if node.name() == "torch::autograd::Error":  # type: ignore[union-attr]
            # It would raise if it were run, but no path leads from it to the leaf, so it never is.
            raise RuntimeError("A custom Function marked once_differentiable has no second derivative, which an argmin needs.")
        for edge in node.next_functions:  # type: ignore[union-attr]
            child = edge[0]
            if child is None:
                continue
            tensor = edges.get(edge)
            if tensor is None and child.name().endswith("AccumulateGrad"):
                tensor = child.variable  # type: ignore[union-attr]
            if tensor is leaf:
                on_leaf = True
            elif tensor is not None:
                found[id(tensor)] = tensor
            elif child._sequence_nr() < first:
                unknown.add(edge)
            elif child not in seen:
                seen.add(child)
                stack.append(child)
    if unknown:
        for tensor in captured_tensors(function):
            if tensor.requires_grad and _edge(tensor) in unknown:
                found[id(tensor)] = tensor
                unknown.discard(_edge(tensor))
    return Dependence(on_leaf, list(found.values()), bool(unknown))


def has_custom_function(value: Tensor, first: int) -> bool:
    """Whether the graph of `value` younger than `first` holds an `autograd.Function` written in Python."""
    seen = {value.grad_fn}
    stack = [value.grad_fn]
    while stack:
        node = stack.pop()
        if isinstance(node, BackwardCFunction):
            return True
        for child, _ in node.next_functions:  # type: ignore[union-attr]
            if child is not None and child not in seen and child._sequence_nr() >= first:
                seen.add(child)
                stack.append(child)
    return False


def _edge(t: Tensor) -> tuple[Any, int]:
    edge = get_gradient_edge(t)
    return edge.node, edge.output_nr


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
        elif isinstance(item, types.FunctionType):
            stack.extend(cell.cell_contents for cell in item.__closure__ or () if cell != types.CellType())
            stack.extend(item.__globals__[name] for name in _names(item.__code__) if name in item.__globals__)
            stack.extend((*(item.__defaults__ or ()), *(item.__kwdefaults__ or {}).values()))
        elif isinstance(item, types.MethodType):
            stack.extend((item.__self__, item.__func__))
        elif isinstance(item, partial):
            stack.extend((item.func, *item.args, *item.keywords.values()))
        elif isinstance(item, (tuple, list)):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item.values())
        elif not isinstance(item, (type, types.ModuleType)):
            stack.extend(getattr(item, "__dict__", {}).values())
    return found


def _names(code: types.CodeType) -> list[str]:
    """The names that a function looks up, functions defined inside it included."""
    inside = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names(constant)]
    return [*code.co_names, *inside]
