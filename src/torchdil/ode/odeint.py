"""y(t) with dy/dt = f(t, y): implicit methods with exact gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchdil.linear.base import LinearSolver
from torchdil.modes import eager
from torchdil.ode.equation import Equation, Grid, Options
from torchdil.ode.fixed import fixed_grid
from torchdil.ode.methods import Method, method_of
from torchdil.solution import FailurePolicy, Report, Solution, check_policy
from torchdil.solvers.base import Solver

GRADIENTS = ("ift", "adjoint", "backprop")


@eager
def odeint(
    func: Callable[..., Any],
    y0: Any,
    t: Tensor,
    *,
    method: Method | str = "backward_euler",
    gradient: str = "ift",
    solver: Solver | Callable[..., Any] | None = None,
    linear_solver: LinearSolver | None = None,
    batch_dims: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    options: dict[str, Any] | None = None,
    on_failure: FailurePolicy = "warn",
) -> Any:
    """y at the times t, with dy/dt = func(t, y) and y(t[0]) = y0."""
    return solve(
        func,
        y0,
        t,
        method=method,
        gradient=gradient,
        solver=solver,
        linear_solver=linear_solver,
        batch_dims=batch_dims,
        rtol=rtol,
        atol=atol,
        options=options,
        on_failure=on_failure,
    ).value


@eager
def solve(
    func: Callable[..., Any],
    y0: Any,
    t: Tensor,
    *,
    method: Method | str = "backward_euler",
    gradient: str = "ift",
    solver: Solver | Callable[..., Any] | None = None,
    linear_solver: LinearSolver | None = None,
    batch_dims: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    options: dict[str, Any] | None = None,
    on_failure: FailurePolicy = "warn",
) -> Solution:
    """`odeint` with its report: `.value` is what `odeint` returns, `.status` and `.stats` are per sample."""
    method = method_of(method)
    check_policy(on_failure)
    if gradient not in GRADIENTS:
        raise ValueError(f"gradient must be one of {', '.join(map(repr, GRADIENTS))}, got {gradient!r}.")
    chosen = Options.of(options)
    equation = Equation.of(func, y0, t, batch_dims)
    report = Report(equation.layout.batch_shape)
    # adaptive: method.adaptive and not chosen.fixed and (rtol or atol given, or the method is meant for it) -> adaptive.py
    # gradient "adjoint" -> adjoint.py, "backprop" -> backprop.py, options["checkpoint"] -> recompute.py
    states = fixed_grid(equation, method, Grid.of(equation.t, chosen), solver, linear_solver, on_failure, report)
    assert report.forward is not None
    return Solution(equation.outputs(states), *report.forward, report)
