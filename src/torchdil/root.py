"""F(y) = 0: a root. J is any square matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchdil.arguments import check_arguments, check_output
from torchdil.batch import Layout
from torchdil.linear.base import LinearSolver
from torchdil.modes import eager
from torchdil.problem import Call, Statement
from torchdil.solution import FailurePolicy, Solution, Y
from torchdil.solve import solve
from torchdil.solvers.base import Solver


class Root(Statement):
    """F(y) = residual(y)."""

    name, argument, symmetric = "root", "residual", False

    def residual(self, call: Call, y: Tensor, args: tuple[Any, ...]) -> Tensor:
        return self.layout.ravel(call(self.layout.unravel(y), *args))


@eager
def root(
    residual: Callable[..., Any],
    y0: Y,
    args: tuple[Any, ...] = (),
    *,
    solver: Solver | Callable[..., Any] | None = None,
    linear_solver: LinearSolver | None = None,
    batch_dims: int = 0,
    on_failure: FailurePolicy = "warn",
) -> Solution[Y]:
    """Find y with residual(y, *args) = 0 and differentiate through the answer.

    Args:
        residual: F(y, *args), of the structure and shapes of y.
        y0: where the solver starts: a tensor or a nested tuple/dict of tensors.
        args: further arguments of `residual`, nested as you like.
        solver: finds y; a `torchdil` solver, or any callable `(residual, y0) -> y`. Default: `Newton()`.
        linear_solver: solves Jᵀ g = v in the backward pass. Default: `Auto()`.
        batch_dims: how many first axes of y number independent problems; 0: all of y is one system, right for any function.
        on_failure: "raise", "warn" or "ignore", or "zero" / "nan" for the gradient of the samples that failed.

    Returns:
        A `Solution`: `.value` in the structure of `y0`, `.status`, `.stats`, `.report`.

    Example:
        >>> a = torch.tensor([2.0, 3.0], requires_grad=True)
        >>> dil.root(lambda y: y**2 - a, torch.ones(2)).value  # the square roots of 2 and 3
    """
    args = check_arguments(residual, "residual", y0, "y0", args, on_failure)
    first = check_output(residual, "residual", y0, args)
    return solve(Root(Layout.of(y0, batch_dims)), residual, y0, args, solver, linear_solver, on_failure, first)
