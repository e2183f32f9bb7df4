"""The theorem under `torch.func`: explicit operands instead of a graph to walk.

Inside `torch.func.grad`, `vjp`, `jvp` and `vmap` tensors are wrapped level by level, so derivatives must be written as
functions of operands: y = solve(*operands) with F(y, *operands) = 0. `_Transformed` lets the solve itself run at the bottom,
on plain tensors; its derivatives are solves of linear equations in J, which are again `_Transformed` (`_Linear`), so every
order and every mixture of transforms is exact. Under `vmap` the K copies of B problems become one batch of K·B.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.autograd import forward_ad as fwd

from torchdil.condition import Condition
from torchdil.linear.base import LinearSolver
from torchdil.modes import no_tangents, tangents_active
from torchdil.operator import Operator
from torchdil.solution import Report

RowFunction = Callable[..., Tensor]


@dataclass(frozen=True)
class Implicit:
    """y(operands), defined by F(y, *operands) = 0.

    Attributes:
        residual: F(y, *operands) -> (B, n); made of torch.func where it differentiates.
        solver: (residual, objective, bound, *operands) -> y (B, n) and the samples that failed (B, 1), on plain tensors.
        objective: what y minimises, (y, *operands) -> (B,), or None.
        rows: how many leading operands have one row a sample, (B, ·).
        symmetric, linear_solver, on_failure, report: as in `Condition`.
        bind: operands -> the user's function and its arguments.
        rowwise: whether all operands are rows.
        copied: whether this is under a `vmap`.
    """

    residual: RowFunction
    solver: Callable[..., tuple[Tensor, Tensor]]
    objective: RowFunction | None
    rows: int
    symmetric: bool
    linear_solver: LinearSolver
    on_failure: str
    report: Report
    bind: Callable[[tuple[Tensor, ...]], Any]
    rowwise: bool
    copied: bool = False

    def __call__(self, *operands: Tensor) -> Tensor:
        """y, differentiable in every operand under any transform."""
        return _Transformed.apply(self, *operands)[0]

    def solve(self, *operands: Tensor) -> tuple[Tensor, Tensor]:
        return self.solver(self.residual, self.objective, self.bound(operands), *operands)

    def bound(self, operands: tuple[Tensor, ...]) -> Any:
        """The `bound` of an `Operator`."""
        return None if self.copied and not self.rowwise else self.bind(operands[1:])

    def vmapped(self, size: int, each: int, in_dims: Sequence[int | None]) -> Implicit:
        """K copies of B each as one batch: `rows` operands are (K·B, ·), the others have an axis 0 of size K or none."""

        def over(function: RowFunction) -> RowFunction:
            def rows_function(y: Tensor, *operands: Tensor) -> Tensor:
                split = [t.reshape(size, each, t.shape[1]) for t in (y, *operands[: self.rows])]
                dims = (0,) * len(split) + tuple(in_dims)
                return torch.vmap(function, in_dims=dims)(*split, *operands[self.rows :]).flatten(0, 1)

            return rows_function

        objective = None if self.objective is None else over(self.objective)
        return replace(self, residual=over(self.residual), objective=objective, copied=True)

    def linear(self, transpose: bool) -> _Linear:
        return _Linear(self, transpose)

    def point(self, y: Tensor, operands: Sequence[Tensor]) -> Tensor:
        """Where F is differentiated: at y, but lost samples whose gradient is to be zero at their start (0 · inf is NaN)."""
        return y if self.on_failure != "zero" else torch.where(torch.isfinite(y).all(1, keepdim=True), y, operands[0])


@dataclass(frozen=True)
class _Linear:
    """u with J u = rhs, or Jᵀ u = rhs, J being the Jacobian of `parent` at y: operands (rhs, y, failed, *parent's)."""

    parent: Implicit | _Linear
    transpose: bool

    @property
    def rows(self) -> int:
        return 3 + self.parent.rows

    @property
    def condition(self) -> Implicit:
        return self.parent if isinstance(self.parent, Implicit) else self.parent.condition

    def residual(self, u: Tensor, rhs: Tensor, y: Tensor, failed: Tensor, *operands: Tensor) -> Tensor:
        def F(y: Tensor) -> Tensor:
            return self.parent.residual(y, *operands)

        product = torch.func.vjp(F, y)[1](u)[0] if self.transpose else torch.func.jvp(F, (y,), (u,))[1]
        return product - rhs

    def solve(self, rhs: Tensor, y: Tensor, failed: Tensor, *operands: Tensor) -> tuple[Tensor, Tensor]:
        of, at, transpose = self.parent, y, self.transpose
        while isinstance(of, _Linear):  # its Jacobian is its parent's, or the transpose: a structured solver must know which
            transpose ^= of.transpose
            at, operands = operands[1], operands[3:]
            of = of.parent
        condition = Condition(
            lambda u: of.residual(u, *operands),
            of.symmetric,
            of.linear_solver,
            of.on_failure,
            of.report,
            failed=failed[:, 0] > 0,
        )
        operator = Operator(condition.residual, at, condition.symmetric)
        operator.bound = of.bound(operands)
        if isinstance(self.parent, Implicit):
            operator.watched = operator.graph()[1].detach()
        return condition.solve(operator, rhs, transpose), failed.clone()

    def vmapped(self, size: int, each: int, in_dims: Sequence[int | None]) -> _Linear:
        return replace(self, parent=self.parent.vmapped(size, each, in_dims))

    def point(self, y: Tensor, operands: Sequence[Tensor]) -> Tensor:
        return y

    def linear(self, transpose: bool) -> _Linear:
        return _Linear(self, transpose)


class _Transformed(torch.autograd.Function):
    """`apply(spec, *operands) -> (y, failed)`."""

    @staticmethod
    def forward(spec: Any, *operands: Tensor) -> tuple[Tensor, Tensor]:
        return spec.solve(*operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        ctx.spec = inputs[0]
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*output, *inputs[1:])
        ctx.save_for_forward(*output, *inputs[1:])

    @staticmethod
    def backward(ctx: Any, v: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        y, failed, *operands = ctx.saved_tensors
        y = ctx.spec.point(y, operands)
        g, _ = _Transformed.apply(ctx.spec.linear(True), v, y, failed, *operands)
        chosen, F = _in_floating(ctx.spec, y, operands)
        grads = iter(torch.func.vjp(F, *(operands[i] for i in chosen))[1](-g))
        return None, *(next(grads) if i in chosen else None for i in range(len(operands)))

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, None]:
        # torch turns forward mode off in here, for its own level; that would lose the tangents of an outer one.
        with fwd._set_fwd_grad_enabled(True):
            y, failed, *operands = (fwd.unpack_dual(t).primal for t in ctx.saved_tensors)
            y = ctx.spec.point(y, operands)
            chosen, F = _in_floating(ctx.spec, y, operands)
            given = tuple(torch.zeros_like(operands[i]) if tangents[i] is None else tangents[i] for i in chosen)
            F_tangent = torch.func.jvp(F, tuple(operands[i] for i in chosen), given)[1]
            t, _ = _Transformed.apply(ctx.spec.linear(False), -F_tangent, y, failed, *operands)
        return t, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], spec: Any, *operands: Tensor) -> Any:
        size, each, moved, dims = info.batch_size, 0, [], []
        for i, (t, dim) in enumerate(zip(operands, in_dims[1:], strict=True)):
            if dim is not None:
                t = t.movedim(dim, 0)
            elif i < spec.rows:
                t = t.expand(size, *t.shape)
            if i < spec.rows:
                each = t.shape[1]
                t = t.flatten(0, 1).contiguous()  # copies of one sample would share their memory, which forward mode refuses
            else:
                dims.append(None if dim is None else 0)
            moved.append(t)
        y, failed = _Transformed.apply(spec.vmapped(size, each, dims), *moved)
        return (y.unflatten(0, (size, each)), failed.unflatten(0, (size, each))), (0, 0)


def _in_floating(spec: Any, y: Tensor, operands: list[Tensor]) -> tuple[list[int], RowFunction]:
    """Which operands can have derivatives, and F as a function of those alone."""
    chosen = [i for i, t in enumerate(operands) if t.is_floating_point() or t.is_complex()]

    def F(*some: Tensor) -> Tensor:
        full = list(operands)
        for i, t in zip(chosen, some, strict=True):
            full[i] = t
        return spec.residual(y, *full)

    return chosen, F


def check_captures(residual: RowFunction, y: Tensor, operands: Sequence[Tensor], name: str) -> None:
    """Raise one sentence if `residual` depends on a tracked tensor that is not an operand: a transform would lose it."""
    value = residual(*(_plain(t) for t in (y, *operands)))
    tracked = _is_tracked(value)
    while functorch.is_functorch_wrapped_tensor(value) and not tracked:  # one wrapper a level
        value = functorch.get_unwrapped(value)
        tracked = _is_tracked(value)
    if tracked:
        to_do = (
            "pass every such tensor in args (or in x), in tuples, lists or dicts, make the function an nn.Module, or detach "
            "the tensor"
        )
        if name == "func":  # of odeint, which has no args
            to_do = (
                "make func an nn.Module with every such tensor, or the tensor a part of y0 with derivative zero, or detach it"
            )
        raise RuntimeError(
            f"{name} uses a tensor that requires grad or is being transformed without taking it as an argument: under "
            f"torch.func {to_do}."
        )


def _is_tracked(t: Tensor) -> bool:
    tangent = fwd.unpack_dual(t).tangent if tangents_active() else None
    return t.requires_grad or functorch.is_batchedtensor(t) or tangent is not None


def _plain(t: Tensor) -> Tensor:
    """The numbers of t below every transform; of a batch its first member, or zeros where there is none."""
    while functorch.is_functorch_wrapped_tensor(t):
        axis = functorch.maybe_get_bdim(t)
        t = functorch.get_unwrapped(t)
        if axis >= 0:
            t = t.select(axis, 0) if t.shape[axis] else t.sum(axis)
    with no_tangents():
        return t.detach().clone()
