"""Which tensors from outside an evaluation depends on, read off the autograd graph that it left, and derivatives along it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.parameter import is_lazy

from torchdil.captures import captured_tensors


class Dependence(NamedTuple):
    """What an evaluation at a leaf depends on.

    Attributes:
        on_leaf: whether it depends on the leaf at all.
        tensors: the tensors from outside that it depends on, leaves or not.
        edges: where they are in the graph; a tensor that is changed in place is elsewhere from then on.
        hidden: whether there are others, non-leaf, that could not be found.
    """

    on_leaf: bool
    tensors: list[Tensor]
    edges: list[GradientEdge]
    hidden: bool


class Outside(NamedTuple):
    """Where the graph of an evaluation ends, noted before it is made: what was there then is outside of it.

    torch numbers the nodes of a graph in the order in which they are made. So the number of a node tells whether the evaluation
    made it, as long as one thread makes all of them. Where several do, the walk back stops at the tensors that are known.

    Attributes:
        first: the evaluation's own nodes have this number or a larger one; 0: the numbers do not tell.
        tensors: where they do not, the tensors that the function closes over. They are noted before it is called, since it may
            replace them by others.
    """

    first: int
    tensors: list[Tensor]


def outside(leaf: Tensor, function: Any) -> Outside:
    """What is outside of an evaluation of `function` at `leaf` that is about to be made."""
    if threading.current_thread() is threading.main_thread() and not leaf.is_cuda:
        return Outside(age(leaf), [])
    # Each thread counts for itself, and derivatives on a GPU are made in a thread of its own.
    return Outside(0, captured_tensors(function))


def age(leaf: Tensor) -> int:
    """A number that nodes of the graph made from now on have at least."""
    return leaf.view_as(leaf).grad_fn._sequence_nr()  # type: ignore[union-attr]


def dependence(F: Tensor, leaf: Tensor, before: Outside, known: Iterable[Tensor], function: Any) -> Dependence:
    """Walk the graph of F, evaluated at `leaf`, back to where it began.

    Nodes older than that are outside. AccumulateGrad nodes carry their leaf; a non-leaf tensor is recognised by its edge, if
    it is in `known` or in the closure of `function`. Where ages do not tell, what is not known is followed to its leaves.
    """
    edges = {_edge(t): t for t in (*known, *before.tensors) if t.requires_grad and not is_lazy(t)}
    found: dict[int, tuple[Tensor, GradientEdge]] = {}
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
            if tensor is None and is_leaf(child):
                tensor = child.variable  # type: ignore[union-attr]
            if tensor is leaf:
                on_leaf = True
            elif tensor is not None:
                found[id(tensor)] = tensor, GradientEdge(*edge)
            elif child._sequence_nr() < before.first:
                unknown.add(edge)
            elif child not in seen:
                seen.add(child)
                stack.append(child)
    if unknown:
        for tensor in captured_tensors(function):
            if tensor.requires_grad and (edge := _edge(tensor)) in unknown:
                found[id(tensor)] = tensor, GradientEdge(*edge)
                unknown.discard(edge)
    return Dependence(on_leaf, [t for t, _ in found.values()], [edge for _, edge in found.values()], bool(unknown))


def _accumulating() -> Any:
    """The type of the nodes where the gradients of leaves are accumulated, which torch does not name."""
    with torch.inference_mode(False), torch.enable_grad():
        viewed = torch.zeros(1, requires_grad=True, device="cpu").view(1)
    return type(viewed.grad_fn.next_functions[0][0])  # type: ignore[union-attr]


_Accumulate = _accumulating()


def is_leaf(node: Any) -> bool:
    """Whether a node is where the gradient of a leaf is accumulated."""
    return isinstance(node, _Accumulate)


def _nodes(values: Iterable[Tensor], first: int = 0) -> Iterator[Any]:
    """The nodes of the graphs of `values`, back to those that are older than `first`."""
    stack = [t.grad_fn for t in values if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node = stack.pop()
        yield node
        for child, _ in node.next_functions:
            if child is not None and child not in seen and child._sequence_nr() >= first:
                seen.add(child)
                stack.append(child)


def leaves_of(values: Iterable[Tensor]) -> list[Tensor]:
    """The leaves that the graphs of `values` lead back to."""
    return [node.variable for node in _nodes(values) if is_leaf(node)]


def has_custom_function(value: Tensor, first: int) -> bool:
    """Whether the graph of `value` younger than `first` holds an `autograd.Function` written in Python."""
    return any(isinstance(node, BackwardCFunction) for node in _nodes([value], first))


def _edge(t: Tensor) -> tuple[Any, int]:
    edge = get_gradient_edge(t)
    return edge.node, edge.output_nr


def rows_by_autograd(F: Tensor, at: Tensor, vectors: Tensor) -> Tensor:
    """vᵀ ∂F/∂at for each v of `vectors`, (k, *F.shape) -> (k, *at.shape); the graph is kept."""

    def one(v: Tensor) -> Tensor:
        return torch.autograd.grad(F, at, v, retain_graph=True, materialize_grads=True)[0]

    if len(vectors) == 1 or torch.is_anomaly_enabled():  # which cannot look at many at once
        return torch.stack([one(v) for v in vectors])
    try:
        (found,) = torch.autograd.grad(F, at, vectors, retain_graph=True, is_grads_batched=True, materialize_grads=True)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # an operation without a batching rule, e.g. a custom Function
        found = torch.stack([one(v) for v in vectors])
    return found.expand(len(vectors), *at.shape)  # zeros come without the batch of rows where F does not depend on it


def partial_derivatives(
    F: Tensor,
    g: Tensor,
    tensors: list[Tensor],
    output: Tensor,
    create_graph: bool = True,
    edges: Sequence[GradientEdge] | None = None,
) -> tuple[Tensor | None, ...]:
    """gᵀ ∂F/∂t for each t in `tensors`, the others and `output` held fixed.

    `edges` says where they were in the graph when F was evaluated; None: they are still there.

    `autograd.grad` alone would follow one tensor's history into another, and the output's own history into all of them. Hooks
    stop the walk there, for the one walk that starts below. The user's own hooks are for the gradients that come of it later.
    """
    walk: list[int] = []

    def inside() -> bool:
        return torch._C._current_graph_task_id() in walk

    def stop(grads: tuple[Tensor, ...]) -> Any:
        return (None,) * len(grads) if inside() else None

    def outside_only(hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        return lambda grad: None if inside() else hook(grad)

    handles: list[Any] = [F.register_hook(lambda _: walk.append(torch._C._current_graph_task_id()))]
    nodes = [t.grad_fn for t in tensors] if edges is None else [edge.node for edge in edges]
    handles += [node.register_prehook(stop) for node in (output.grad_fn, *nodes) if node is not None and not is_leaf(node)]
    tables: list[Any] = [t._backward_hooks for t in tensors if t._backward_hooks]
    theirs = [(hooks, key, hook) for hooks in tables for key, hook in hooks.items()]
    for hooks, key, hook in theirs:
        hooks[key] = outside_only(hook)
    try:
        # Retained: what lies behind the tensors belongs to others, and the walk that called for this one may need it.
        at: Sequence[Any] = tensors if edges is None else edges
        return torch.autograd.grad(F, at, g, retain_graph=True, create_graph=create_graph, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
        for hooks, key, hook in theirs:
            if key in hooks:
                hooks[key] = hook
