"""A product with a Jacobian as a short list of operations: traced once, split, and simplified.

p -> J p is linear, but as autograd leaves it the product is a long way round: derivatives of activation functions are worked out
anew, and each is applied as a chain of products. Here it is traced (`make_fx`) and taken apart:

- the *prelude* is what does not depend on p: activations, their derivatives; evaluated once a point;
- the *linear* rest is what a product costs. Each value in it is kept as Σ cᵢ ⊙ vᵢ, with coefficients cᵢ of the prelude, so that
  a chain of elementwise products, or a sum of them, is one product with a coefficient that the prelude has worked out.

What is left of the Hessian of an energy with one hidden layer: a matrix product, an elementwise one, the transposed matrix product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

# Elementwise derivatives op(g, ...), linear in their first argument.
_ELEMENTWISE = {
    aten.sigmoid_backward.default,
    aten.tanh_backward.default,
    aten.softplus_backward.default,
    aten.threshold_backward.default,
    aten.gelu_backward.default,
    aten.silu_backward.default,
    aten.elu_backward.default,
    aten.leaky_relu_backward.default,
    aten.hardtanh_backward.default,
    aten.log_sigmoid_backward.default,
}
_SAME = {aten.detach.default, aten.alias.default, aten.clone.default, aten.lift_fresh.default}
# In-place, but of the shape only.
_RESHAPED = {aten.squeeze_.dim, aten.squeeze_.default, aten.unsqueeze_.default, aten.t_.default, aten.transpose_.default}

Coefficient = float | fx.Node


@dataclass
class Split:
    """The two halves: `linear(p, *prelude(y, *captured))` is the product.

    Attributes:
        prelude: a module (y, *captured) -> tensors.
        linear: a module (p, *tensors) -> product.
        captured: the tensors that the function had closed over, themselves.
    """

    prelude: fx.GraphModule
    linear: fx.GraphModule
    captured: list[Tensor]


def split(product: Callable[[Tensor, Tensor], Tensor], y: Tensor, p: Tensor) -> Split:
    """Trace `product(y, p)`, which is linear in p, and split it."""
    from torch.fx.experimental.proxy_tensor import make_fx  # slow to import, and few need it

    return _Splitter(make_fx(product)(y, p)).split()


class _Inputs:
    """The placeholders of a graph, which come first in it."""

    def __init__(self, graph: fx.Graph, first: str):
        self.graph = graph
        self.first = self.last = graph.placeholder(first)

    def add(self, name: str) -> fx.Node:
        with self.graph.inserting_after(self.last):
            self.last = self.graph.placeholder(name)
        return self.last


class _Splitter:
    """The nodes of a traced product, dealt out to two new graphs."""

    def __init__(self, traced: fx.GraphModule):
        self.traced = traced
        self.prelude, self.linear = fx.Graph(), fx.Graph()
        self.point, self.vector = _Inputs(self.prelude, "y"), _Inputs(self.linear, "p")
        self.known: dict[fx.Node, fx.Node] = {}  # in the prelude, of nodes that do not depend on p
        self.terms: dict[fx.Node, dict[fx.Node, Coefficient]] = {}  # of nodes that do: values of `linear`, their coefficients
        self.handed: dict[fx.Node, fx.Node] = {}  # from the prelude to `linear`
        self.made: dict[fx.Node, fx.Node] = {}  # the sums of the terms
        self.captured: dict[str, fx.Node] = {}

    def split(self) -> Split:
        y, p = (node for node in self.traced.graph.nodes if node.op == "placeholder")
        self.known[y], self.terms[p] = self.point.first, {self.vector.first: 1.0}
        for node in self.traced.graph.nodes:
            if node.op == "get_attr":
                self.known[node] = self.capture(node.target)
            elif node.op == "call_function":
                self.deal(node)
            elif node.op == "output":
                self.linear.output(self.value(node.args[0]))
        self.prelude.output(tuple(self.handed))
        for graph in (self.prelude, self.linear):
            graph.eliminate_dead_code()
        captured = [getattr(self.traced, name) for name in self.captured]
        return Split(fx.GraphModule({}, self.prelude), fx.GraphModule({}, self.linear), captured)

    def capture(self, name: str) -> fx.Node:
        if name not in self.captured:
            self.captured[name] = self.point.add(f"captured_{len(self.captured)}")
        return self.captured[name]

    def deal(self, node: fx.Node) -> None:
        """Put a call where it belongs."""
        if node.target not in _RESHAPED and getattr(node.target, "_schema", None) is not None and node.target._schema.is_mutable:
            raise NotImplementedError(f"{node.target} changes its argument, which cannot be split")
        if not any(source in self.terms for source in node.all_input_nodes):
            self.known[node] = self.prelude.node_copy(node, self.known.__getitem__)
            return
        terms = self.sum(node) or self.scaled(node)
        if terms is None:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.value)
            terms = {self.linear.call_function(node.target, args, kwargs): 1.0}
        self.terms[node] = terms

    def sum(self, node: fx.Node) -> dict[fx.Node, Coefficient] | None:
        """The terms of a sum or difference of two values that depend on p, of one shape."""
        if node.target not in (aten.add.Tensor, aten.sub.Tensor):
            return None
        if not all(isinstance(arg, fx.Node) and arg in self.terms and _like(arg, node) for arg in node.args):
            return None
        factor = node.kwargs.get("alpha", 1) * (1.0 if node.target is aten.add.Tensor else -1.0)
        terms = dict(self.terms[node.args[0]])
        for value, coefficient in self.terms[node.args[1]].items():
            more = self.times(coefficient, factor)
            terms[value] = self.plus(terms[value], more) if value in terms else more
        return terms

    def scaled(self, node: fx.Node) -> dict[fx.Node, Coefficient] | None:
        """The terms of one value that depends on p times one that does not."""
        sources = [arg for arg in node.all_input_nodes if arg in self.terms]
        if len(sources) != 1 or not _like(sources[0], node):
            return None
        source, args, factor = sources[0], node.args, None
        if node.target in _SAME:
            factor = 1.0
        elif node.target is aten.neg.default:
            factor = -1.0
        elif node.target in (aten.mul.Tensor, aten.mul.Scalar):
            factor = self.constant(args[1] if args[0] is source else args[0])
        elif node.target in (aten.div.Tensor, aten.div.Scalar) and args[0] is source and len(args) == 2:
            divisor = self.constant(args[1])
            factor = 1 / divisor if isinstance(divisor, float) else self.prelude.call_function(aten.reciprocal.default, (divisor,))
        elif node.target in _ELEMENTWISE and args[0] is source:
            meta = node.meta["val"]
            ones = self.prelude.call_function(
                aten.ones.default, (list(meta.shape),), {"dtype": meta.dtype, "device": meta.device}
            )
            rest = fx.node.map_arg((args[1:], node.kwargs), self.known.__getitem__)
            factor = self.prelude.call_function(node.target, (ones, *rest[0]), rest[1])
        if factor is None:
            return None
        return {value: self.times(coefficient, factor) for value, coefficient in self.terms[source].items()}

    def constant(self, given: Any) -> Coefficient:
        return self.known[given] if isinstance(given, fx.Node) else float(given)

    def times(self, a: Coefficient, b: Coefficient) -> Coefficient:
        if isinstance(a, float) and isinstance(b, float):
            return a * b
        if isinstance(a, float) or isinstance(b, float):
            node, number = (b, a) if isinstance(a, float) else (a, b)
            return node if number == 1.0 else self.prelude.call_function(aten.mul.Tensor, (node, number))
        return self.prelude.call_function(aten.mul.Tensor, (a, b))

    def plus(self, a: Coefficient, b: Coefficient) -> Coefficient:
        if isinstance(a, float) and isinstance(b, float):
            return a + b
        node, other = (a, b) if isinstance(a, fx.Node) else (b, a)
        return self.prelude.call_function(aten.add.Tensor, (node, other))

    def value(self, node: fx.Node) -> fx.Node:
        """A node in `linear`: handed over by the prelude, or the sum of its terms."""
        if node in self.known:
            return self.hand(self.known[node])
        if node not in self.made:
            # Those with the coefficient 1 first: to add to them takes no product.
            terms = sorted(self.terms[node].items(), key=lambda term: term[1] != 1.0 if isinstance(term[1], float) else 1)
            total: fx.Node | None = None
            for value, coefficient in terms:
                total = self.add(total, value, coefficient if isinstance(coefficient, float) else self.hand(coefficient))
            assert total is not None
            self.made[node] = total
        return self.made[node]

    def hand(self, node: fx.Node) -> fx.Node:
        if node not in self.handed:
            self.handed[node] = self.vector.add(f"saved_{len(self.handed)}")
        return self.handed[node]

    def add(self, total: fx.Node | None, value: fx.Node, coefficient: Coefficient) -> fx.Node:
        """total + coefficient ⊙ value."""
        call = self.linear.call_function
        if total is None:
            return value if coefficient == 1.0 else call(aten.mul.Tensor, (value, coefficient))
        if isinstance(coefficient, float):
            return call(aten.add.Tensor, (total, value), {"alpha": coefficient})
        return call(aten.addcmul.default, (total, value, coefficient))


def _like(a: fx.Node, b: fx.Node) -> bool:
    """Whether two tensors have one shape and dtype."""
    one, other = a.meta.get("val"), b.meta.get("val")
    return isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype
