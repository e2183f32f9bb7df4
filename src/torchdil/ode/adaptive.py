"""Adaptive steps with the exact discrete gradient.

The integration (`torchdil.ode.walk`) leaves a grid for each sample. On it, its sizes held fixed, the solution is a trajectory
like any other (`torchdil.ode.trajectory`) and is attached as one; an output inside a step is where one more, shorter step leads
(`torchdil.ode.outputs`). So the gradient is that of the numbers returned, to the accuracy of Newton's iteration.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torchdil.linear.base import LinearSolver
from torchdil.modes import full_precision, no_tangents, observer, plain_saving, transforms_active
from torchdil.ode.equation import Equation, Options
from torchdil.ode.fixed import structured_solver
from torchdil.ode.held import Held
from torchdil.ode.methods import Method
from torchdil.ode.newton import OdeSolver, SimplifiedNewton
from torchdil.ode.outputs import accepted, outputs
from torchdil.ode.walk import Tolerances, Walk
from torchdil.problem import Problem
from torchdil.solution import Report, Result
from torchdil.solve import Setting
from torchdil.solvers.base import Solver


def adaptive(
    equation: Equation,
    method: Method,
    options: Options,
    tolerances: Tolerances,
    solver: OdeSolver | None,
    linear_solver: LinearSolver | None,
    on_failure: str,
    report: Report,
) -> Tensor:
    """The states at the outputs, (B, T, D), attached."""
    if solver is not None and not isinstance(solver, SimplifiedNewton):
        raise TypeError(f"solver must be a SimplifiedNewton or None with adaptive steps, got {solver!r}.")
    if transforms_active():
        raise RuntimeError("adaptive steps cannot be taken inside torch.func: give options step_size or substeps.")
    evaluate, common = equation.field_for_each()
    with torch.no_grad(), no_tangents(), plain_saving(), full_precision(equation.start):
        walk = Walk(equation, method, evaluate, tolerances, options, solver or SimplifiedNewton(), common)
        walk.run()
        ends, rows = walk.path()
        if (watching := observer.get()) is not None:
            begin, before = equation.t[0].double(), rows
            lengths, rows = watching.stepped(ends - begin, rows)
            ends = ends if rows is before else begin + lengths  # which rounds
        grid = torch.cat((equation.t[:1].double().expand(len(ends), 1), ends), dim=1)
        grid = grid[int(walk.accepted.argmax())] if common else grid
    first = equation.t[0].double()
    times = grid + (first - first.detach())  # the whole grid moves with t[0]
    statement = Held(method, equation.layout, evaluate, rows.shape[1], tolerances)
    args = (equation.y0, times)
    structured = structured_solver(statement, equation.func, args, linear_solver)
    found = Found(answer=walk.result(rows), accept=accepted(tolerances, rows.dtype))
    setting = Setting(statement, equation.func, found, structured, on_failure, report, calls=walk.calls)
    y = setting.attached(statement.layout.unravel(rows.flatten(1)), args)
    return outputs(equation, statement, statement.view(y), times, walk.reached, tolerances, linear_solver, on_failure, report)


@dataclass(frozen=True)
class Found(Solver):
    """Returns what was found before.

    Attributes:
        answer: that.
        accept: the ‖F‖, relative to its size, that is in keeping with it.
    """

    answer: Result = field(kw_only=True)
    accept: float = field(kw_only=True)

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        return self.answer._replace(stats=replace(self.answer.stats, tolerance=tolerance))

    def accepted(self, dtype: torch.dtype) -> float:
        return self.accept
