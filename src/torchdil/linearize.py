"""A product with a Jacobian as a short list of operations: traced once, split, and simplified.

p -> J p is linear, but as autograd leaves it the product is a long way round: derivatives of activation functions are worked
out anew, and each is applied as a chain of products. Here it is traced (`make_fx`) and taken apart:

- the *prelude* is what does not depend on p: activations, their derivatives; evaluated once a point;
- the *linear* rest is what a product costs. Each value in it is kept as Σ cᵢ ⊙ vᵢ, with coefficients cᵢ of the prelude, so that
  a chain of elementwise products, or a sum of them, is one product with a coefficient that the prelude has worked out.

Tensors that are one number everywhere are kept as numbers, and a value of which only derivatives are
wanted is not computed.

What is left of the Hessian of an energy with one hidden layer: two matrix products and an elementwise one between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchdil.linear_graph import LinearGraph
from torchdil.matvec import INSTEAD
from torchdil.one_number import SHAPED, number_of

aten = torch.ops.aten

# Elementwise derivatives op(g, ...), linear in their first argument, that multiply it. Those that select, as relu's does, are
# applied to the value itself: 0 takes the place of what is infinite there, as behind relu(x).sqrt(), and 0 · inf is NaN.
_ELEMENTWISE = {
    aten.sigmoid_backward.default,
    aten.tanh_backward.default,
    aten.softplus_backward.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.elu_backward.default,
    aten.leaky_relu_backward.default,
    aten.log_sigmoid_backward.default,
}
# In-place, but of the shape only.
_RESHAPED = {aten.squeeze_.dim, aten.squeeze_.default, aten.unsqueeze_.default, aten.t_.default, aten.transpose_.default}

_CONVOLUTIONS = {aten.convolution.default, aten.convolution_backward.default}
# What takes half the time in float32, whatever the size of the vector.
_PRODUCTS = {aten.mm.default, aten.mv.default, aten.addmm.default, aten.addmv.default, aten.bmm.default} | _CONVOLUTIONS
_VIEWS = {aten.view.default, aten._unsafe_view.default}

_BY_ONE = {aten.pow.Tensor_Scalar, aten.mul.Scalar}  # nothing, where their second argument is 1

Coefficient = float | fx.Node


class UntraceableError(RuntimeError):
    """A function that cannot be taken apart; autograd differentiates it."""


@dataclass
class Split:
    """A function of a point and of vectors, linear in each of these, taken apart.

    Attributes:
        prelude: a module (y, *captured) -> saved tensors, the first of them being what depends on no vector.
        parts: of each vector, what becomes of it.
        captured: the tensors that the function had closed over, themselves.
    """

    prelude: fx.GraphModule
    parts: list[LinearGraph]
    captured: list[Tensor]


def split(function: Callable[..., Sequence[Sequence[Tensor]]], y: Tensor, *vectors: Tensor) -> Split:
    """Trace `function(y, *vectors)`.

    Its first result, a sequence of tensors, depends on no vector; result 1 + k is linear in the k-th vector, and depends on no
    other.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, and few need it

    traced = make_fx(function)(y, *vectors)
    prelude = _Prelude(traced)
    first, *others = (node for node in traced.graph.nodes if node.op == "placeholder")
    prelude.known[first] = prelude.inputs.first
    parts = [_Part(prelude, vector) for vector in others]
    saved: list[fx.Node] = []
    for node in traced.graph.nodes:
        if node.op == "get_attr":
            prelude.capture(node)
        elif node.op == "call_function":
            _deal(node, prelude, parts)
        elif node.op == "output":
            values, *linear = node.args[0]
            saved = [prelude.known[value] for value in values]
            for part, results in zip(parts, linear, strict=True):
                part.graph.output(tuple(part.value(result) for result in results))
                saved += part.handed
    if any(node.target in _CONVOLUTIONS for node in traced.graph.nodes):
        from torchdil.convolve import fuse

        for part in parts:
            fuse(part.graph)
    for node in (node for part in parts for node in part.graph.nodes):
        node.target = INSTEAD.get(node.target, node.target)
    return Split(prelude.module(saved), [part.linear() for part in parts], prelude.tensors())


def _deal(node: fx.Node, prelude: _Prelude, parts: list[_Part]) -> None:
    """Put a call where it belongs."""
    target = _without_changes(node)
    if target in _CONVOLUTIONS:
        from torchdil.convolve import chosen

        target = chosen(node)
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        raise UntraceableError(f"{target} draws random numbers, which must be new each time")
    for part in parts:
        if any(source in part.terms for source in node.all_input_nodes):
            part.take(node, target)
            return
    prelude.take(node, target)


def _without_changes(node: fx.Node) -> Any:
    """The operation of a call; of one in place that which returns the result instead."""
    target: Any = node.target
    schema = getattr(target, "_schema", None)
    if schema is None or not schema.is_mutable:
        return target
    if schema.name.endswith("_"):
        source: Any = node.args[0]
        made = getattr(source.target, "_schema", None)
        # Of a tensor that was made for it, and is read by nobody else.
        alone = made is not None and all(part.alias_info is None or part.alias_info.is_write for part in made.returns)
        if target in _RESHAPED or (alone and len(source.users) == 1):
            packet = getattr(aten, schema.name.removeprefix("aten::")[:-1], None)
            if hasattr(packet, target._overloadname):
                return getattr(packet, target._overloadname)
    raise UntraceableError(f"{target} changes its argument, which cannot be split")


class _Inputs:
    """The placeholders of a graph, which come first in it."""

    def __init__(self, graph: fx.Graph, first: str):
        self.graph = graph
        self.first = self.last = graph.placeholder(first)

    def add(self, name: str) -> fx.Node:
        with self.graph.inserting_after(self.last):
            self.last = self.graph.placeholder(name)
        return self.last


class _Prelude:
    """What depends on no vector."""

    def __init__(self, traced: fx.GraphModule):
        self.traced, self.graph = traced, fx.Graph()
        self.inputs = _Inputs(self.graph, "y")
        self.known: dict[fx.Node, fx.Node] = {}  # of the traced nodes
        self.saved: dict[fx.Node, int] = {}
        self._captured: dict[str, fx.Node] = {}
        self._called: dict[Any, fx.Node] = {}
        self._numbers: dict[fx.Node, float] = {}  # of the traced nodes that are one number everywhere

    def take(self, node: fx.Node, target: Any) -> None:
        number, source = number_of(node, target, self._numbers), cast(fx.Node, node.args[0] if node.args else None)
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.known.__getitem__)
        by_one = target in _BY_ONE and node.args[1] == 1.0  # as derivatives of powers have it
        if number is not None:
            self._numbers[node], self.known[node] = number, self.filled(number, node.meta["val"])
        elif (by_one or target in SHAPED) and _like(source, node):
            self.known[node] = self.known[source]
        elif (scaled := self.scaled(node)) is not None:
            self.known[node] = scaled
        else:
            self.known[node] = self.call(aten.reshape.default if target in _VIEWS else target, *args, **kwargs)

    def scaled(self, node: fx.Node) -> fx.Node | None:
        """A product with a tensor of one number, as one with the number."""
        if node.target is not aten.mul.Tensor:
            return None
        left, right = (cast(fx.Node, arg) for arg in node.args)
        for source, factor in ((left, right), (right, left)):
            if factor in self._numbers and _like(source, node):
                return self.scale(self.known[source], self._numbers[factor])
        return None

    def scale(self, node: fx.Node, number: float) -> fx.Node:
        if node.target in (aten.mul.Tensor, aten.mul.Scalar) and (node.args[1], number) == (2.0, 0.5):
            return cast(fx.Node, node.args[0])  # half of what the derivative of a square is
        return node if number == 1.0 else self.call(aten.mul.Tensor, node, number)

    def filled(self, number: float, like: Tensor) -> fx.Node:
        """A tensor of one number, of this shape."""
        one = self.call(aten.full.default, [1] * like.ndim, number, dtype=like.dtype, device=like.device)
        return self.call(aten.expand.default, one, list(like.shape)) if like.ndim else one

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A call, or the same one that was made before."""
        if target is aten.t.default and args[0].target is aten.t.default:
            return args[0].args[0]
        key = (target, _hashable(args), _hashable(kwargs))
        if key not in self._called:
            self._called[key] = self.graph.call_function(target, args, kwargs)
        return self._called[key]

    def capture(self, node: fx.Node) -> None:
        name = str(node.target)
        if name not in self._captured:
            self._captured[name] = self.inputs.add(f"captured_{len(self._captured)}")
        self.known[node] = self._captured[name]

    def tensors(self) -> list[Tensor]:
        """What the function had closed over, taken from the traced module, which is garbage now."""
        found = [getattr(self.traced, name) for name in self._captured]
        for name in self._captured:
            delattr(self.traced, name)
        return found

    def module(self, handed: list[fx.Node]) -> fx.GraphModule:
        self.saved = {node: place for place, node in enumerate(dict.fromkeys(handed))}
        self.graph.output(tuple(self.saved))
        self.graph.eliminate_dead_code()
        return fx.GraphModule({}, self.graph)

    def constant(self, given: Any, dtype: torch.dtype) -> Coefficient:
        """A factor in the dtype of what it multiplies: products and sums of masks, counts or float32 are no coefficients."""
        if not isinstance(given, fx.Node) or given in self._numbers:
            return float(self._numbers.get(given, given))
        node = self.known[given]
        return node if given.meta["val"].dtype == dtype else self.call(aten._to_copy.default, node, dtype=dtype)

    def times(self, a: Coefficient, b: Coefficient) -> Coefficient:
        if isinstance(a, float):
            return a * b if isinstance(b, float) else self.scale(b, a)
        return self.scale(a, b) if isinstance(b, float) else self.call(aten.mul.Tensor, a, b)

    def plus(self, a: Coefficient, b: Coefficient) -> Coefficient:
        if isinstance(a, float) and isinstance(b, float):
            return a + b
        node, other = (a, b) if isinstance(a, fx.Node) else (b, a)
        return self.call(aten.add.Tensor, node, other)


class _Part:
    """What depends on one vector."""

    def __init__(self, prelude: _Prelude, vector: fx.Node):
        self.prelude, self.graph = prelude, fx.Graph()
        self.inputs = _Inputs(self.graph, "vector")
        # Of the traced nodes: values of this graph with their coefficients.
        self.terms: dict[fx.Node, dict[fx.Node, Coefficient]] = {vector: {self.inputs.first: 1.0}}
        self.handed: dict[fx.Node, fx.Node] = {}  # by the prelude
        self._made: dict[fx.Node, fx.Node] = {}  # the sums of the terms
        self._multiplies = self._slow_in_single = False

    def linear(self) -> LinearGraph:
        self.graph.eliminate_dead_code()
        named = any("dtype" in node.kwargs for node in self.graph.nodes)
        multiplies = self._multiplies and not self._slow_in_single and not named
        order = {node: i for i, node in enumerate(self.handed)}
        transposes = [order.get(cast(fx.Node, node.args[0])) if node.target is aten.t.default else None for node in order]
        module, places = fx.GraphModule({}, self.graph), [self.prelude.saved[node] for node in order]
        return LinearGraph(module, places, transposes, multiplies)

    def take(self, node: fx.Node, target: Any) -> None:
        terms = self.sum(node) or self.scaled(node) or self.turned(node)
        if terms is None:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value)
            # What was contiguous in the trace need not be so where factors were moved, or for many vectors at once.
            target = aten.reshape.default if target in _VIEWS else target
            call = self.transposed if target is aten.t.default else partial(self.graph.call_function, target)
            terms = {call(args, kwargs): 1.0}
            self._multiplies |= node.target in _PRODUCTS
            if node.target in _CONVOLUTIONS:
                from torchdil.convolve import takes_single  # imports a compiler, and few need it

                self._slow_in_single |= not takes_single(node)
        self.terms[node] = terms

    def sum(self, node: fx.Node) -> dict[fx.Node, Coefficient] | None:
        """The terms of a sum or difference of two values, of one shape."""
        if node.target not in (aten.add.Tensor, aten.sub.Tensor):
            return None
        args: tuple[Any, ...] = node.args
        if not all(isinstance(arg, fx.Node) and arg in self.terms and _like(arg, node) for arg in args):
            return None
        alpha: Any = node.kwargs.get("alpha", 1)
        factor = float(alpha) * (1.0 if node.target is aten.add.Tensor else -1.0)
        terms = dict(self.terms[args[0]])
        for value, coefficient in self.terms[args[1]].items():
            more = self.prelude.times(coefficient, factor)
            terms[value] = self.prelude.plus(terms[value], more) if value in terms else more
        return terms

    def scaled(self, node: fx.Node) -> dict[fx.Node, Coefficient] | None:
        """The terms of a value times something of the prelude."""
        sources = [arg for arg in node.all_input_nodes if arg in self.terms]
        if len(sources) != 1 or not _like(sources[0], node):
            return None
        source, args, prelude, meta = sources[0], node.args, self.prelude, node.meta["val"]
        factor: Coefficient | None = None
        if node.target in SHAPED or node.target is aten.clone.default:
            factor = 1.0
        elif node.target is aten.neg.default:
            factor = -1.0
        elif node.target in (aten.mul.Tensor, aten.mul.Scalar):
            factor = prelude.constant(args[1] if args[0] is source else args[0], meta.dtype)
        elif node.target in (aten.div.Tensor, aten.div.Scalar) and args[0] is source and len(args) == 2:
            divisor = prelude.constant(args[1], meta.dtype)
            factor = 1 / divisor if isinstance(divisor, float) else prelude.call(aten.reciprocal.default, divisor)
        elif node.target in _ELEMENTWISE and args[0] is source:
            ones = prelude.filled(1.0, meta)
            rest, named = fx.node.map_arg((args[1:], node.kwargs), prelude.known.__getitem__)
            factor = prelude.call(node.target, ones, *rest, **named)
        if factor is None:
            return None
        return {value: prelude.times(coefficient, factor) for value, coefficient in self.terms[source].items()}

    def turned(self, node: fx.Node) -> dict[fx.Node, Coefficient] | None:
        """The term of (A B)ᵀ, as Bᵀ Aᵀ."""
        of: Any = node.args[0] if node.args else None
        if node.target is not aten.t.default or len(terms := self.terms[of]) != 1:
            return None
        ((value, coefficient),) = terms.items()
        if value.target is not aten.mm.default or coefficient != 1.0:
            return None
        left, right = (self.transposed((arg,), {}) for arg in reversed(value.args))
        product = self.graph.call_function(aten.mm.default, (left, right))
        return {product: 1.0}

    def transposed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        (value,) = args
        return value.args[0] if value.target is aten.t.default else self.graph.call_function(aten.t.default, args, kwargs)

    def value(self, node: fx.Node) -> fx.Node:
        """A node of this graph: handed over by the prelude, or the sum of its terms."""
        if node in self.prelude.known:
            return self.hand(self.prelude.known[node])
        if node not in self._made:
            # Those with the coefficient 1 first: to add to them takes no product.
            terms = sorted(self.terms[node].items(), key=lambda term: term[1] != 1.0 if isinstance(term[1], float) else 1)
            total: fx.Node | None = None
            for value, coefficient in terms:
                total = self.add(total, value, coefficient if isinstance(coefficient, float) else self.hand(coefficient))
            assert total is not None
            self._made[node] = total
        return self._made[node]

    def hand(self, node: fx.Node) -> fx.Node:
        if node not in self.handed:
            self.handed[node] = self.inputs.add(f"saved_{len(self.handed)}")
        return self.handed[node]

    def add(self, total: fx.Node | None, value: fx.Node, coefficient: Coefficient) -> fx.Node:
        """total + coefficient ⊙ value."""
        call = self.graph.call_function
        if total is None:
            return value if coefficient == 1.0 else call(aten.mul.Tensor, (value, coefficient))
        if not isinstance(coefficient, float):
            return call(aten.addcmul.default, (total, value, coefficient))
        if coefficient == 1.0 and value.target is aten.mm.default:
            return call(aten.addmm.default, (total, *value.args))
        return call(aten.add.Tensor, (total, value), {"alpha": coefficient})


def _hashable(given: Any) -> Any:
    if isinstance(given, dict):
        return tuple((name, _hashable(part)) for name, part in given.items())
    return tuple(map(_hashable, given)) if isinstance(given, (list, tuple)) else (type(given), given)


def _like(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors have one shape and dtype."""
    one, other = a.meta.get("val"), b.meta.get("val")
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype
