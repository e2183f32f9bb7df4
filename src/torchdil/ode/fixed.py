"""A fixed grid with the exact discrete gradient: the whole trajectory as one implicit problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from torchdil.linear import GMRES, Auto, Dense
from torchdil.linear.base import LinearSolver
from torchdil.modes import transforms_active
from torchdil.ode.bidiagonal import Bidiagonal
from torchdil.ode.called import called
from torchdil.ode.equation import Equation, Grid
from torchdil.ode.krylov import Block, at_hand
from torchdil.ode.march import Marching
from torchdil.ode.methods import Method
from torchdil.ode.newton import OdeSolver
from torchdil.ode.sequential import Sequential
from torchdil.ode.trajectory import Trajectory, sizes
from torchdil.ode.whole import Linearised, WholeTrajectory
from torchdil.operator import Operator
from torchdil.problem import Call
from torchdil.solution import Report
from torchdil.solve import Setting
from torchdil.solvers.base import Solver


def fixed_grid(
    equation: Equation,
    method: Method,
    grid: Grid,
    solver: OdeSolver | None,
    linear_solver: LinearSolver | None,
    on_failure: str,
    report: Report,
) -> Tensor:
    """The states at the outputs, (B, T, D), attached."""
    steps, rows = len(grid.times) - 1, len(method.rows)
    statement = Trajectory(method, equation.layout, equation.field(), steps)
    start = equation.start.detach().unsqueeze(1).expand(-1, steps * rows, -1)
    linearised = _linearised(statement, equation, grid.times)
    args, fast = (equation.y0, grid.times), None if linearised is None else linearised.solver
    structured = structured_solver(statement, equation.func, args, linear_solver, fast)
    exact = structured if linear_solver is None else structured_solver(statement, equation.func, args, None, fast)
    marching = Marching(statement=statement, linear=exact, owner=equation.func)
    setting = Setting(statement, equation.func, _forward(marching, solver, linearised), structured, on_failure, report)
    y = setting.attached(statement.layout.unravel(start.flatten(1)), args)
    states = statement.view(y)[:, :, -1]
    if grid.ends is not None:
        states = states[:, grid.ends]
    return torch.cat((equation.start.unsqueeze(1), states), dim=1)


def structured_solver(
    statement: Trajectory,
    func: Call,
    args: tuple[Any, ...],
    given: LinearSolver | None,
    fast: Callable[[Tensor, bool], Callable[[Tensor], Tensor] | None] | None = None,
) -> LinearSolver:
    """The linear solver for the Jacobian of a trajectory that goes with the one asked for.

    None and `Auto`: direct for blocks that can be formed, else GMRES for one step after another. `Dense`: direct. Others: one
    step after another.
    """
    steps, rows = statement.steps, len(statement.method.rows)
    asked = given if given is not None else Auto()
    small = statement.fits or fast is not None
    if isinstance(asked, Auto) and asked.dense_below is not None:
        small = rows * statement.state.size <= asked.dense_below
    settings = {f.name: getattr(asked, f.name) for f in fields(LinearSolver)}
    if isinstance(asked, Dense) or (isinstance(asked, Auto) and small):
        return Bidiagonal(**settings, steps=steps, rows=rows, fast=fast)

    then = called(func)

    def function(u: Tensor, begin: Tensor, h: Tensor) -> Tensor:
        return statement.own(then(), u.unflatten(1, (1, rows, -1)), begin, h).flatten(1)

    def place(y: Tensor, step: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return statement.view(y)[:, step].flatten(1), sizes(args[1][..., step : step + 2].detach(), y)

    def local(y: Tensor, step: int) -> Operator:
        return block.operator(*place(y, step))

    gmres = asked if isinstance(asked, GMRES) else GMRES(**settings)
    block = Block(func, (statement.method, statement.field.mode, statement.state), function, gmres, asked)
    found = Sequential(**settings, steps=steps, rows=rows, inner=asked, local=None if transforms_active() else local)
    plain = isinstance(asked, (Auto, GMRES)) and asked.preconditioner is None and asked.traces
    return replace(found, block=block, place=place) if plain and at_hand(statement.field) else found


def _linearised(statement: Trajectory, equation: Equation, times: Tensor) -> Linearised | None:
    """f differentiated by itself, where that pays."""
    if not at_hand(statement.field):
        return None
    found = Linearised(statement, equation.func, equation.start, times)
    return found if found.pays else None


def _forward(marching: Marching, solver: OdeSolver | None, linearised: Linearised | None) -> Solver:
    """The solver of the trajectory that goes with what was asked for."""
    if isinstance(solver, WholeTrajectory):
        return replace(solver, linearised=linearised, fallback=marching)
    at_once = transforms_active() if linearised is None else not (linearised.large and linearised.on_cpu)
    if solver is None and at_once and not marching.statement.method.explicit:
        return WholeTrajectory(linearised=linearised, fallback=marching)
    return replace(marching, inner=solver)
