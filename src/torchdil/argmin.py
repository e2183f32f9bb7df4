"""y = argmin_u f(u): at a minimum F = ∇f vanishes, and J is the Hessian of f, symmetric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchdil.arguments import check_arguments, first_value
from torchdil.batch import Layout, leaves
from torchdil.linear.base import LinearSolver
from torchdil.modes import eager
from torchdil.problem import Call, Statement, gradient
from torchdil.solution import FailurePolicy, Solution, Y
from torchdil.solve import solve
from torchdil.solvers.base import Solver


class Argmin(Statement):
    """F(y) = ∇f(y)."""

    name, argument, symmetric, has_objective = "argmin", "score", True, True

    def residual(self, call: Call, y: Tensor, args: tuple[Any, ...]) -> Tensor:
        return gradient(lambda u: self.objective(call, u, args), y, self.argument)[0]

    def objective(self, call: Call, y: Tensor, args: tuple[Any, ...]) -> Tensor:
        value = call(self.layout.unravel(y), *args)
        try:
            return value.reshape(self.layout.samples)
        except (AttributeError, RuntimeError) as error:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            shape = tuple(self.layout.batch_shape)
            raise ValueError(f"score must return a tensor of the same shape, {shape}, at every call, got {got}.") from error


@eager
def argmin(
    score: Callable[..., Tensor],
    y0: Y,
    args: tuple[Any, ...] = (),
    *,
    solver: Solver | Callable[..., Any] | None = None,
    linear_solver: LinearSolver | None = None,
    on_failure: FailurePolicy = "warn",
) -> Solution[Y]:
    """Minimise `score` over y and differentiate through the answer: y = argmin_u f(u, *args).

    Gradients reach `args`, module parameters and whatever else `score` touches. They do not depend on `y0`.

    Args:
        score: f(y, *args) -> () for one problem, or (B,) for B independent ones, y then having a first axis of size B in every
            tensor.
        y0: where the solver starts: a tensor or a nested tuple/dict of tensors.
        args: further arguments of `score`, nested as you like.
        solver: finds y; a `torchdil` solver, or any callable `(score, y0) -> y`. Default: `Newton()`.
        linear_solver: solves H g = v in the backward pass. Default: `Auto()`.
        on_failure: "raise", "warn" or "ignore", or "zero" / "nan" for the gradient of the samples that failed.

    Returns:
        A `Solution`: `.value` in the structure of `y0`, `.status`, `.stats`, `.report`.

    Example:
        >>> theta = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> y = dil.argmin(lambda y: ((y - theta) ** 2).sum() + (y**4).sum(), torch.zeros(2)).value
        >>> y.sum().backward()
    """
    args = check_arguments(score, "score", y0, "y0", args, on_failure)
    value = first_value(score, "score", y0, args)
    layout = Layout.of(y0, _batch_dims(value, y0))
    return solve(Argmin(layout), score, y0, args, solver, linear_solver, on_failure, value)


def _batch_dims(value: Any, y0: Any) -> int:
    """0 or 1 from the shape of the score, or one sentence."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"score must return a floating-point tensor of shape () or (B,), got {got}.")
    if value.layout != torch.strided:
        raise TypeError(f"score must return a dense tensor, got {value.layout}.")
    device = leaves(y0)[0].device
    if value.device != device:
        raise ValueError(f"score must return a tensor on the device of y0, {device}, got {value.device}.")
    sizes = {tuple(leaf.shape[:1]) for leaf in leaves(y0)}
    if value.dim() == 0:
        return 0
    if value.dim() == 1 and sizes == {tuple(value.shape)}:
        return 1
    shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves(y0))
    raise ValueError(
        f"score must return shape () for one problem or (B,) for a batch with B the first axis of y0, got {tuple(value.shape)} "
        f"for y0 of shape {shapes}."
    )
