"""A fixed grid with the exact discrete gradient: the whole trajectory as one implicit problem."""

from __future__ import annotations

import torch
from torch import Tensor

from torchdil.linear.base import LinearSolver
from torchdil.ode.bidiagonal import Bidiagonal
from torchdil.ode.equation import Equation, Grid
from torchdil.ode.methods import Method
from torchdil.ode.trajectory import Trajectory
from torchdil.solution import Report
from torchdil.solve import Setting
from torchdil.solvers import Newton
from torchdil.solvers.base import Solver


def fixed_grid(
    equation: Equation,
    method: Method,
    grid: Grid,
    solver: Solver | None,
    linear_solver: LinearSolver | None,
    on_failure: str,
    report: Report,
) -> Tensor:
    """The states at the outputs, (B, T, D), attached."""
    steps, rows = len(grid.times) - 1, len(method.rows)
    statement = Trajectory(method, equation.layout, equation.field(), steps)
    start = equation.start.detach().unsqueeze(1).expand(-1, steps * rows, -1)
    structured = Bidiagonal(steps=steps, rows=rows)
    setting = Setting(statement, equation.func, solver or Newton(linear_solver=structured), structured, on_failure, report)
    y = setting.attached(start.reshape(*equation.layout.batch_shape, -1), (equation.y0, grid.times))
    states = statement.view(y)[:, :, -1]
    if grid.ends is not None:
        states = states[:, grid.ends]
    return torch.cat((equation.start.unsqueeze(1), states), dim=1)
