"""Gradients for a solution that was found elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchdil.arguments import check_arguments, check_output
from torchdil.batch import Layout
from torchdil.linear.base import LinearSolver
from torchdil.modes import eager, uncompiled
from torchdil.root import Root
from torchdil.solution import FailurePolicy, Report, Y
from torchdil.solve import Setting, linear_solver_of


@eager
def attach(
    residual: Callable[..., Any],
    y_star: Y,
    args: tuple[Any, ...] = (),
    *,
    linear_solver: LinearSolver | None = None,
    batch_dims: int = 0,
    symmetric: bool = False,
    on_failure: FailurePolicy = "warn",
) -> Y:
    """Give `y_star`, a solution of residual(y, *args) = 0 however found, its derivatives.

    Args:
        residual: F(y, *args), of the structure and shapes of y.
        y_star: the solution: a tensor or a nested tuple/dict of tensors. That it is one is checked.
        args: further arguments of `residual`.
        linear_solver: solves Jᵀ g = v in the backward pass. Default: `Auto()`.
        batch_dims: how many first axes of y number independent problems.
        symmetric: whether ∂F/∂y is symmetric (F is a gradient), so that CG applies.
        on_failure: "raise", "warn" or "ignore", or "zero" / "nan" for the gradient of the samples that failed.

    Returns:
        y in the structure of `y_star`, attached to the graph.

    Example:
        >>> a = torch.tensor(2.0, requires_grad=True)
        >>> y = dil.attach(lambda y: y**2 - a, a.detach().sqrt())  # dy/da = 1 / (2 y)
    """
    args = check_arguments(residual, "residual", y_star, "y_star", args, on_failure)
    check_output(residual, "residual", y_star, args)
    layout = Layout.of(y_star, batch_dims, "y_star")
    function, solver, report = uncompiled(residual), linear_solver_of(linear_solver), Report(layout.batch_shape)
    setting = Setting(Root(layout), function, None, solver, on_failure, report, symmetric)
    y: Y = layout.unravel(setting.attached(y_star, args))
    return y
