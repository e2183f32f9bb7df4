"""y(t) with dy/dt = f(t, y): implicit methods with exact gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from torchdil.arguments import check_linear_solver
from torchdil.batch import map_tensors
from torchdil.compiled import memory
from torchdil.linear.base import LinearSolver
from torchdil.live import showing
from torchdil.modes import eager, full_precision, uncompiled
from torchdil.ode.adaptive import adaptive
from torchdil.ode.adaptive_adjoint import adaptive_adjoint
from torchdil.ode.adjoint import adjoint_grid
from torchdil.ode.backprop import unrolled_grid
from torchdil.ode.equation import Equation, Grid, Options
from torchdil.ode.field import call_singly, holds
from torchdil.ode.fixed import fixed_grid
from torchdil.ode.flaws import flaw, look_at_slope, tell, unsolved, warn_of_rounded_times
from torchdil.ode.methods import Method, method_of
from torchdil.ode.newton import OdeSolver, SimplifiedNewton
from torchdil.ode.recompute import recomputed
from torchdil.ode.walk import AdaptiveStats, Tolerances
from torchdil.solution import ConvergenceError, FailurePolicy, Report, Solution, Y, check_policy, user_frame
from torchdil.solvers.base import check_solver

Gradient = Literal["ift", "adjoint", "backprop"]
# What may be wrong with how func was called, and not with func.
_OF_FUNC = (RuntimeError, TypeError, ValueError, IndexError, AssertionError)


@eager
def odeint(
    func: Callable[..., Any],
    y0: Y,
    t: Tensor,
    *,
    method: Method | str = "backward_euler",
    gradient: Gradient = "ift",
    solver: OdeSolver | None = None,
    linear_solver: LinearSolver | None = None,
    batch_dims: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    options: dict[str, Any] | None = None,
    on_failure: FailurePolicy = "warn",
    verbose: bool = False,
) -> Y:
    """y at the times t, with dy/dt = func(t, y) and y(t[0]) = y0, and its exact derivatives.

    A drop-in for `torchdiffeq.odeint`, for stiff and implicit problems. Gradients reach y0, t and every tensor that `func`
    depends on: parameters of a module, tensors of a closure.

    Args:
        func: f(t, y) with the shapes of y; t has no axes.
        y0: the initial state: a tensor of any shape, or a nested tuple/dict of tensors; float32 or float64.
        t: the times of the answer, (T,), increasing or decreasing.
        method: a method of `torchdil.ode` such as `RadauIIA(5)`, or its name: "backward_euler", "trapezoid",
            "implicit_midpoint", "trbdf2", "sdirk2", "gl4", "gl6", "radauIIA3", "radauIIA5", "kvaerno5", and for comparison
            "euler" and "rk4".
        gradient: "ift": of the discrete solution, exact, by the implicit function theorem on the whole trajectory; "adjoint":
            the continuous adjoint, integrated backwards; "backprop": through the iterations of the solver, for tests.
        solver: finds the trajectory. Default: Newton on all steps at once (`WholeTrajectory`), step by step where that does not
            contract or does not pay. A `SimplifiedNewton`, a solver of the core such as `Picard()` or `Newton()`, or a callable
            (fn, y) -> y solves one step after another.
        linear_solver: for the backward pass. Default: direct where the blocks of J can be formed, else GMRES for one step after
            another. `CG()` is the paper's (on the normal equations of each step), `Dense()` its "naive".
        batch_dims: how many first axes of y number independent systems; 0: all of y is one system, right for any func.
        rtol: the relative error of a step that an adaptive method (TRBDF2, Kvaerno5, RadauIIA(5)) aims at. These are adaptive
            if rtol or atol is given and options has neither step_size nor substeps, `Kvaerno5` also without; other methods take
            a fixed grid, and use neither, which a warning says.
        atol: the absolute one.
        options: a dict of `step_size` or `substeps` (the grid between outputs; one step each by default), `max_steps` and
            `first_step` (adaptive), `checkpoint` (True: O(√T) memory), `adjoint` ("reverse" or "stored").
        on_failure: "raise", "warn" or "ignore", or "zero" / "nan" for the gradient of the samples that failed.
        verbose: show a table that grows while the equation is solved: a line a step, or an iteration on all steps.

    Returns:
        y at the times t, (T, *y0.shape), in the structure of y0. `torchdil.ode.solve` gives the report, too.

    Example:
        >>> k = torch.tensor(50.0, requires_grad=True)
        >>> y = dil.odeint(lambda t, y: -k * (y - t.cos()), torch.zeros(1), torch.linspace(0, 1, 11))
    """
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
        verbose=verbose,
    ).value


@eager
def solve(
    func: Callable[..., Any],
    y0: Y,
    t: Tensor,
    *,
    method: Method | str = "backward_euler",
    gradient: Gradient = "ift",
    solver: OdeSolver | None = None,
    linear_solver: LinearSolver | None = None,
    batch_dims: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    options: dict[str, Any] | None = None,
    on_failure: FailurePolicy = "warn",
    verbose: bool = False,
) -> Solution[Y]:
    """`odeint` with its report.

    Args: as in `odeint`.

    Returns:
        A `Solution`: `.value` is what `odeint` returns, `.status` and `.stats` are per sample, `.report` keeps the forward and
        the backward solve.

    Example:
        >>> solution = dil.ode.solve(func, y0, t, batch_dims=1)
        >>> print(solution.report)
    """
    settings = (method, gradient, solver, linear_solver, batch_dims, rtol, atol, options, on_failure)
    with showing(True if verbose else None):
        if torch.is_inference_mode_enabled():  # solvers need gradients, which its tensors cannot have
            with torch.inference_mode(False), torch.no_grad():
                y0, t = map_tensors(lambda a: a.clone() if a.is_inference() else a, (y0, t))
                return _solve(func, y0, t, *settings)
        return _solve_again(func, y0, t, *settings)


def check_kind(gradient: str) -> None:
    """Raise one sentence if there is no such gradient."""
    if gradient not in get_args(Gradient):
        raise ValueError(f"gradient must be one of {', '.join(map(repr, get_args(Gradient)))}, got {gradient!r}.")


def _solve_again(func: Callable[..., Any], y0: Any, t: Tensor, *settings: Any) -> Solution[Any]:
    """Solve, and once more if what is remembered of func is out of date, or with func called point by point."""
    known = memory(uncompiled(func))
    before = bool(known)
    try:
        return _solve(func, y0, t, *settings)
    except _OF_FUNC as error:
        if isinstance(error, ConvergenceError) or not (before or call_singly(uncompiled(func))):
            raise
    if before:
        known.clear()  # what is remembered of func may be out of date: it uses t now, or inputs of another shape
        try:
            return _solve(func, y0, t, *settings)
        except _OF_FUNC as error:
            if isinstance(error, ConvergenceError) or not call_singly(uncompiled(func)):
                raise
    try:
        return _solve(func, y0, t, *settings)  # as many points at once may be more than vmap can do
    except _OF_FUNC:
        known.clear()  # the mode was not to blame
        raise


def _solve(
    func: Callable[..., Any],
    y0: Any,
    t: Tensor,
    method: Method | str,
    gradient: Gradient,
    solver: OdeSolver | None,
    linear_solver: LinearSolver | None,
    batch_dims: int,
    rtol: float | None,
    atol: float | None,
    options: dict[str, Any] | None,
    on_failure: str,
) -> Solution[Any]:
    method = method_of(method)
    check_policy(on_failure)
    check_kind(gradient)
    check_solver(solver, SimplifiedNewton)
    check_linear_solver(linear_solver)
    chosen = Options.of(options)
    equation = Equation.of(func, y0, t, batch_dims)
    report = Report(equation.layout.batch_shape)
    tolerances = Tolerances.of(rtol, atol, equation.start.dtype)
    if chosen.checkpoint and gradient != "ift":
        raise ValueError(f'checkpoint is for gradient="ift", got gradient={gradient!r}.')
    if not method.adaptive and not rtol is atol is None:
        warnings.warn(
            f"rtol and atol are not used: {method!r} takes the steps that it is given. Use one that chooses its steps by them, "
            'method="kvaerno5", "radauIIA5" or "trbdf2", or leave them out and set substeps or step_size in options.',
            UserWarning,
            stacklevel=user_frame(),
        )
    adapts = method.adaptive and not chosen.fixed and (method.always_adaptive or not rtol is atol is None)
    with full_precision(equation.start):
        cause = flaw(equation, adapts)
        if cause is not None:
            tell(cause.text, type(method).__name__, equation, on_failure, report)
        else:
            look_at_slope(equation, on_failure)
        if cause is not None and cause.random:
            states = equation.start.unsqueeze(1).expand(-1, len(t), -1)
        else:
            # What has been said once is not said again.
            common = (solver, linear_solver, "ignore" if cause is not None and on_failure == "warn" else on_failure, report)
            states = (_adaptive if adapts else _fixed)(equation, method, gradient, chosen, tolerances, common)
            holding = cause is not None or holds(equation.func, equation.t, states, equation.layout)
            if not holding:  # with f called point by point, which is right in any case
                return _solve(func, y0, t, method, gradient, solver, linear_solver, batch_dims, rtol, atol, options, on_failure)
        if cause is not None:
            states = unsolved(cause.text, states, on_failure, report)
    assert report.forward is not None
    stats, steps = report.forward.stats, chosen.steps(len(t) - 1, equation.ends[1] - equation.ends[0])
    if isinstance(stats, AdaptiveStats):
        steps = max(stats.accepted.reshape(-1).tolist(), default=0)
    warn_of_rounded_times(equation, steps)
    return Solution(equation.outputs(states), *report.forward, report)


def _adaptive(
    equation: Equation, method: Method, gradient: Gradient, chosen: Options, tolerances: Tolerances, common: Any
) -> Tensor:
    """The states at the outputs, (B, T, D), by adaptive steps."""
    if gradient == "backprop" or chosen.checkpoint:
        what = "options checkpoint" if chosen.checkpoint else 'gradient="backprop"'
        raise ValueError(f"{what} is for a fixed grid: give options step_size or substeps too.")
    walk = adaptive if gradient == "ift" else adaptive_adjoint
    return walk(equation, method, chosen, tolerances, *common)


def _fixed(equation: Equation, method: Method, gradient: Gradient, chosen: Options, _: Tolerances, common: Any) -> Tensor:
    """The same on a fixed grid."""
    grid = Grid.of(equation.t, chosen)
    solver, linear_solver, on_failure, report = common
    if gradient == "adjoint":
        stored = chosen.adjoint == "stored"
        return adjoint_grid(equation, method, grid, solver, linear_solver, on_failure, report, stored)
    if gradient == "backprop":
        return unrolled_grid(equation, method, grid, solver, on_failure, report)
    if chosen.checkpoint:
        return recomputed(equation, method, grid, solver, linear_solver, on_failure, report, chosen.checkpoint)
    return fixed_grid(equation, method, grid, *common)
