"""The implicit function theorem, once.

At a solution F(y, θ) = 0. With v = ∂L/∂y the gradient is dL/dθ = -gᵀ ∂F/∂θ where Jᵀ g = v and J = ∂F/∂y; the tangent is
ẏ = -J⁻¹ (∂F/∂θ θ̇). `Point.attach` gives a solution, however it was found, exactly these derivatives:

1. F is evaluated once, with grad, at a fresh leaf equal to y; the graph of F reaches whatever the function touched.
2. `_Implicit` returns y with an edge to that F. Its backward solves Jᵀ g = v on the graph of F and sends -g into F: ordinary
   autograd does the rest, so closures, module parameters, hooks and DDP behave as for any layer.
3. Under `create_graph=True` the result must itself depend on y(θ), which the leaf of step 1 does not. So F is evaluated again
   at the attached output, g becomes an implicit solution of its own (Jᵀ g - v = 0, the same Function), and -g is pulled back to
   the tensors that F depends on: they were found by walking the graph of F, and `_Implicit` has an edge to each. The next order
   repeats this.
4. Forward mode: the tangent of F arrives with F, and J ẏ = -Ḟ is one more solve.

Inside `torch.func` transforms there is no such graph to walk; `torchdil.transform` does the same with explicit operands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad as fwd

from torchdil import batch
from torchdil.as_written import running_as_written
from torchdil.condition import Condition, Residual
from torchdil.graph import Dependence, dependence, is_leaf, outside, partial_derivatives
from torchdil.modes import (
    as_in_forward,
    default_device,
    full_precision,
    no_tangents,
    plain_saving,
    tangents_active,
)
from torchdil.operator import Operator
from torchdil.traced import Source


class Point:
    """F at y with its graph: what the theorem needs, and what tells how good y is.

    Attributes:
        F: F(y), (B, n).
        operator: J at y, on that graph.
        good: whether y was seen to be a solution in all samples, a minimum where that is asked for.
    """

    def __init__(self, condition: Condition, y: Tensor):
        self.condition, self.y, self.good = condition, y, False
        with torch.enable_grad(), plain_saving():
            leaf, self.F, self._on = _evaluate(condition, y)
        primal = fwd.unpack_dual(self.F).primal if tangents_active() else self.F
        self.operator = Operator(condition.residual, y, condition.symmetric, graph=(leaf, primal), key=condition.key)
        self.operator.watched, self.operator.bound = primal.detach(), condition.bound
        self.operator.boundary = self._on.tensors
        self.operator.versions = [(t, t._version) for t in condition.tensors if not t.is_inference()]
        tracked = torch.is_grad_enabled() and (self._on.tensors or self._on.hidden)
        # A solver that knows the structure of J makes no products, or few.
        solver = condition.linear_solver
        by_products = solver.traces and not solver.only and (y.is_cuda or not solver.few_products)
        if tracked and by_products and condition.parts is not None and condition.replay is not None:
            boundary = [] if self._on.hidden else self._on.tensors
            given = (condition.parts, condition.replay, y.detach(), primal.detach(), condition.symmetric, boundary)
            self.operator.source = Source(*given, compiled=solver.product == "compile")

    def attach(self) -> Tensor:
        """y (B, n) with the derivatives that the condition implies; y itself where nothing asks for any."""
        on = self._on
        tracked = torch.is_grad_enabled() and bool(on.tensors or on.hidden)
        tangent = fwd.unpack_dual(self.F).tangent if tangents_active() else None
        if not tracked and tangent is None:
            return self.y
        _refuse_batched(tangent)
        self.operator.pairs = self.condition.pairs
        if tracked:
            link = _Link(self.condition, self.operator, True, self.F, on, self.y)
            # Where derivatives of F are traced, its own graph is left to those that are not.
            source = self.operator.source
            link.cut = tangent is None and not on.hidden and source is not None and source.pulls
            return _Implicit.apply(link, self.F.detach() if link.cut else self.F, *on.tensors)
        # F requires grad because of its leaf; nothing else does, so y must not.
        assert tangent is not None
        link = _Link(self.condition, self.operator, True, self.F, Dependence(True, [], [], False), self.y)
        return _Implicit.apply(link, fwd.make_dual(self.F.detach(), tangent.detach()))


@dataclass
class _Link:
    """What the node of a solution knows.

    Attributes:
        condition: F and its solver.
        operator: J at the solution of the original problem, whatever the order of the derivative.
        transpose: whether this node's adjoint is solved with Jᵀ; it alternates from order to order.
        F: the value of F, with its graph.
        on: what F depends on.
        y: the solution (detached: a reference to the output itself would be a cycle).
        cut: whether the node is not linked to the graph of F, and works out the derivatives of F itself.
    """

    condition: Condition
    operator: Operator
    transpose: bool
    F: Tensor
    on: Dependence
    y: Tensor
    cut: bool = False

    @property
    def boundary(self) -> list[Tensor]:
        """The tensors that F depends on."""
        return self.on.tensors

    def pull(self, g: Tensor) -> tuple[Tensor | None, ...]:
        """gᵀ ∂F/∂t for each t of the boundary that the backward pass asks for."""
        asked, source = self._asked(), self.operator.source
        if all(asked) and source is not None and (found := source.pull(g, self.boundary)) is not None:
            if not source.due or not self.operator.stale_pull(self.F, self.on):
                return found
            self.condition.give_up(self.operator)
        needed = [k for k, wanted in enumerate(asked) if wanted]
        tensors, edges = [self.boundary[k] for k in needed], [self.on.edges[k] for k in needed]
        leaf, _ = self.operator.graph()
        grads = iter(partial_derivatives(self.F, g, tensors, leaf, create_graph=False, edges=edges))
        return tuple(next(grads) if wanted else None for wanted in asked)

    def pull_at_once(self, v: Tensor) -> tuple[Tensor | None, ...] | None:
        """-gᵀ ∂F/∂t for each t of the boundary, Jᵀ g = v, if all of them are asked for and all can be had in one go."""
        return self.condition.solve_at_once(self.operator, v, self.boundary) if all(self._asked()) else None

    def _asked(self) -> list[bool]:
        """Which tensors of the boundary the backward pass asks for; of a leaf the engine does not tell."""
        return [is_leaf(edge.node) or torch._C._will_engine_execute_node(edge.node) for edge in self.on.edges]

    def solve(self, rhs: Tensor, transpose: bool) -> Tensor:
        return self.condition.solve(self.operator, rhs, transpose)

    def evaluate(self, output: Tensor) -> Tensor:
        """F once more, at the attached output."""
        if self.condition.on_failure == "zero":  # a lost sample is replaced by its start, as in the first evaluation
            output = batch.select(batch.finite(output), output, self.operator.y)
        return (self.condition.replay or self.condition.residual)(output)

    def attach(self, residual: Residual, value: Tensor, transpose: bool, output: Tensor, *others: Tensor) -> Tensor:
        """`value` as the solution of a linear equation in J, with the derivatives that this implies."""
        outer = self.condition
        condition = Condition(residual, outer.symmetric, outer.linear_solver, outer.on_failure, outer.report, outer.failed)
        condition.tensors = (output, *others, *self.boundary)
        _, F, on = _evaluate(condition, value)
        return _Implicit.apply(_Link(condition, self.operator, transpose, F, on, value), F, *on.tensors)


def _refuse_batched(v: Tensor | None) -> None:
    """Raise one sentence for many cotangents or tangents at once, by what torch had before torch.func."""
    if v is not None and functorch.is_legacy_batchedtensor(v):
        raise RuntimeError(
            "is_grads_batched=True and vectorize=True cannot go through an implicit layer: use torch.func.jacrev with "
            "explicit args, or one gradient at a time."
        )


class _Implicit(torch.autograd.Function):
    """y, as a function of the tensors that F depends on: `apply(link, F, *boundary) -> y`."""

    @staticmethod
    def forward(ctx: Any, link: _Link, F: Tensor, *boundary: Tensor) -> Tensor:
        ctx.link = link
        ctx.default_device, ctx.as_written = default_device(), running_as_written()
        ctx.set_materialize_grads(False)
        y = link.y
        link.y = y.detach()
        ctx.save_for_backward(y, *boundary)
        return y

    @staticmethod
    @as_in_forward
    def backward(ctx: Any, v: Tensor | None) -> tuple[Any, ...]:
        link: _Link = ctx.link
        nothing = (None,) * len(link.boundary)
        if v is None:
            return None, None, *nothing
        _refuse_batched(v)
        if not torch.is_grad_enabled() and not tangents_active():
            if link.cut and (found := link.pull_at_once(v)) is not None:
                return None, None, *found
            g = link.solve(v, link.transpose)
            return (None, None, *link.pull(-g)) if link.cut else (None, -g, *nothing)
        output, *_ = ctx.saved_tensors  # also raises if a tensor of the boundary was changed in place
        return None, None, *_pull_back(link, output, v)

    @staticmethod
    def jvp(ctx: Any, _: None, F_tangent: Tensor | None, *__: Tensor | None) -> Tensor | None:
        link: _Link = ctx.link
        if F_tangent is None:  # something that F was made of has a tangent, F has none
            return torch.zeros_like(link.y)
        # Ḟ may be constant and J, hence ẏ, still depend on the parameters.
        if torch.is_grad_enabled() and (link.boundary or link.on.hidden):
            return _attached_tangent(link)
        return -link.solve(F_tangent, not link.transpose)


def _pull_back(link: _Link, output: Tensor, v: Tensor) -> tuple[Tensor | None, ...]:
    """-gᵀ ∂F/∂θ for each θ of the boundary, differentiable in everything; Jᵀ g = v."""
    if link.on.hidden:
        raise RuntimeError(
            "The function of this implicit layer uses a non-leaf tensor that is neither in args nor a variable of its closure: "
            "pass it in args for derivatives of higher order."
        )

    def adjoint(g: Tensor) -> Tensor:
        (product,) = torch.autograd.grad(link.evaluate(output), output, g, create_graph=True, materialize_grads=True)
        return product - v

    with torch.enable_grad(), full_precision(output):
        before = outside(link.y.detach().requires_grad_(), None)
        F = link.evaluate(output)
        _check_same(link, F, dependence(F, output, before, (output, *link.boundary), None))
        g = link.attach(adjoint, link.solve(v, link.transpose), not link.transpose, output, v)
        return partial_derivatives(F, -g, link.boundary, output)


def _attached_tangent(link: _Link) -> Tensor:
    """ẏ with J ẏ + Ḟ = 0, itself differentiable: reverse mode over forward mode."""
    with no_tangents():
        output = _Implicit.apply(replace(link, y=link.y.clone()), link.F, *link.boundary)

    def tangent(t: Tensor) -> Tensor:
        with fwd._set_fwd_grad_enabled(True):  # it is off while a jvp is worked out
            F, F_tangent = fwd.unpack_dual(link.evaluate(output))
        with no_tangents():
            u = torch.zeros_like(F, requires_grad=True)
            (transposed,) = torch.autograd.grad(F, output, u, create_graph=True, materialize_grads=True)
            (product,) = torch.autograd.grad(transposed, u, t, create_graph=True, materialize_grads=True)
        return product + F_tangent

    F_tangent = tangent(torch.zeros_like(link.y))
    return link.attach(tangent, -link.solve(F_tangent, not link.transpose), link.transpose, output)


def _evaluate(condition: Condition, y: Tensor) -> tuple[Tensor, Tensor, Dependence]:
    """F at a leaf equal to y: the leaf, F, and what F depends on."""
    leaf = y.detach().requires_grad_()
    before = outside(leaf, condition.function)
    F = condition.residual(leaf)
    if not F.requires_grad and not condition.argument:
        F = F + 0 * leaf
    on = dependence(F, leaf, before, condition.tensors, condition.function)
    if condition.argument and not on.on_leaf:
        raise ValueError(f"{condition.argument} must depend on y, but its value does not change with y.")
    return leaf, F, on


def _check_same(link: _Link, F: Tensor, now: Dependence) -> None:
    """Raise if F, evaluated again at the same y, has changed: its parameters were updated or replaced, or it is random."""
    if link.condition.replay is None:
        return  # an adjoint equation: what it is made of was checked one order below
    if now.hidden or {id(t) for t in now.tensors} != {id(t) for t in link.boundary}:
        raise RuntimeError(
            "The function of this implicit layer used other tensors when evaluated again for a derivative of higher order: "
            "what it reads from objects or closures must not be replaced between forward and backward; pass it in args."
        )
    leaf, before = (t.detach() for t in link.operator.graph())
    with torch.no_grad(), no_tangents():
        change = batch.norm(F.detach() - before)
        size = batch.norm(link.operator.rmv(leaf)) + batch.norm(before)
        eps = torch.finfo(F.dtype).eps
        if bool((change > eps**0.5 * size + eps).any()):
            raise RuntimeError(
                "The function of this implicit layer gave another value when evaluated again for a derivative of higher order: "
                "it must be deterministic (no dropout), and its parameters must not change between forward and backward."
            )
