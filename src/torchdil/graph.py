"""Which tensors from outside an evaluation depends on: read off the autograd graph that it left."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from torchdil.captures import captured_tensors


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
