"""y = g(y): a fixed point, the root of F(y) = y - g(y)."""

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


class FixedPoint(Statement):
    """F(y) = y - g(y)."""

    name, argument, symmetric = "fixed_point", "g", False
    advice = "use another solver, Anderson(), Newton() or Broyden(), raise its max_steps, loosen rtol or use float64"

    def residual(self, call: Call, y: Tensor, args: tuple[Any, ...]) -> Tensor:
        return y - self.layout.ravel(call(self.layout.unravel(y), *args))


@eager
def fixed_point(
    g: Callable[..., Any],
    y0: Y,
    args: tuple[Any, ...] = (),
    *,
    solver: Solver | Callable[..., Any] | None = None,
    linear_solver: LinearSolver | None = None,
    batch_dims: int = 0,
    on_failure: FailurePolicy = "warn",
) -> Solution[Y]:
    """Find y with y = g(y, *args) and differentiate through the answer.

    Args:
        g: the map, of the structure and shapes of y.
        y0: where the solver starts: a tensor or a nested tuple/dict of tensors.
        args: further arguments of `g`, nested as you like.
        solver: finds y; a `torchdil` solver, or any callable `(g, y0) -> y`. Default: `Picard()`, y ← g(y).
        linear_solver: solves (I - ∂g/∂y)ᵀ g = v in the backward pass. Default: `Auto()`.
        batch_dims: how many first axes of y number independent problems; 0: all of y is one system, right for any function.
        on_failure: "raise", "warn" or "ignore", or "zero" / "nan" for the gradient of the samples that failed.

    Returns:
        A `Solution`: `.value` in the structure of `y0`, `.status`, `.stats`, `.report`.

    Example:
        >>> w = torch.tensor(0.5, requires_grad=True)
        >>> dil.fixed_point(lambda y: torch.cos(w * y), torch.ones(())).value.backward()
    """
    args = check_arguments(g, "g", y0, "y0", args, on_failure)
    first = check_output(g, "g", y0, args)
    return solve(FixedPoint(Layout.of(y0, batch_dims)), g, y0, args, solver, linear_solver, on_failure, first)
