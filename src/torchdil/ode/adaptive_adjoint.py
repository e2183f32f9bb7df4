"""The continuous adjoint with adaptive steps, in the forward pass and, with the same tolerances, in the backward pass.

Between two outputs (y, a) is one system, f(t, y) and -aᵀ ∂f/∂y, whose error decides the steps (`torchdil.ode.adaptive`). y
starts anew from each output of the forward pass. The stages of the accepted steps weigh f in the integral for θ, as on a fixed
grid.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from torchdil.batch import Layout, map_tensors
from torchdil.linear.base import LinearSolver
from torchdil.ode.adaptive import adaptive
from torchdil.ode.adjoint import Adjoint, Backward, Past, WayBack
from torchdil.ode.boundary import boundary
from torchdil.ode.equation import Equation, Options
from torchdil.ode.methods import Method
from torchdil.ode.newton import OdeSolver, SimplifiedNewton
from torchdil.ode.outcomes import together
from torchdil.ode.walk import Tolerances, Walk
from torchdil.solution import Outcome, Report, Status


def adaptive_adjoint(
    equation: Equation,
    method: Method,
    options: Options,
    tolerances: Tolerances,
    solver: OdeSolver | None,
    linear_solver: LinearSolver | None,
    on_failure: str,
    report: Report,
) -> Tensor:
    """The states at the outputs, (B, T, D), with the continuous adjoint as their gradient."""
    if options.adjoint == "stored":
        raise ValueError('adjoint="stored" is for a fixed grid: give options step_size or substeps, or use "reverse".')
    times = equation.t.detach()
    still = replace(equation, y0=map_tensors(Tensor.detach, equation.y0), t=times)
    with torch.no_grad():
        outputs = adaptive(still, method, options, tolerances, solver, linear_solver, on_failure, report)
    field = equation.field()
    tensors = boundary(equation, field, method, times, outputs, 'gradient="adjoint"')
    assert report.forward is not None
    past = Past(equation, field, method, times, [], outputs, outputs, report.forward.status.reshape(-1))
    backward = _AdaptiveBackward(past, solver, linear_solver, on_failure, report, False, options, tolerances)
    return Adjoint.apply(backward, outputs, equation.start, equation.t, *tensors)


@dataclass
class _AdaptiveBackward(Backward):
    options: Options
    tolerances: Tolerances

    def integrate(self, v: Tensor) -> WayBack:
        past, d, s = self.past, v.shape[2], self.past.method.stages
        layout = past.equation.layout
        call = _augmented(past.equation.func)
        weights, c = past.method.tensors(v)
        a, points, times, lengths, outcomes = torch.zeros_like(v[:, 0]), [], [], [], []
        for n in reversed(range(1, v.shape[1])):
            a = a + v[:, n]
            lost = ~torch.isfinite(a).all(dim=1)
            state = (layout.unravel(past.outputs[:, n]), layout.unravel(torch.where(lost[:, None], 0.0, a)))
            both = Layout.of(state, len(layout.batch_shape))
            equation = Equation(call, state, past.times[[n, n - 1]], both)
            evaluate, common = equation.field_for_each()
            with torch.no_grad():
                newton = self.solver if isinstance(self.solver, SimplifiedNewton) else SimplifiedNewton()
                walk = Walk(equation, past.method, evaluate, self.tolerances, self.options, newton, common)
                walk.run()
                ends, rows = walk.path()
            status = torch.where(lost, int(Status.non_finite), walk.status)
            outcomes.append(Outcome(status, walk.result(rows).stats))
            begins = torch.cat((past.times[n].double().expand(len(ends), 1), ends[:, :-1]), dim=1)
            h = (ends - begins).to(v.dtype).unsqueeze(2)
            times.append((begins.to(v.dtype).unsqueeze(2) + h * c).flatten(1))
            lengths.append((h * weights[-1]).flatten(1))
            points.append(rows[:, :, :s].flatten(1, 2))
            a = torch.where(lost[:, None], torch.nan, rows[:, -1, -1, d:])
        y, stages = torch.cat(points, dim=1).split([d, d], dim=2)
        at = torch.cat(times, dim=1)
        evaluate, common = past.equation.field_for_each()
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            slopes = evaluate(past.equation.func, at[0] if common else at, leaf)
            slopes = slopes if slopes.requires_grad else slopes + 0 * leaf
        return WayBack(leaf, slopes, stages, a, torch.cat(lengths, dim=1), together(outcomes))


def _augmented(func: Callable[..., Any]) -> Callable[..., Any]:
    """(t, (y, a)) -> (f(t, y), -aᵀ ∂f/∂y)."""

    def call(t: Tensor, state: Any) -> Any:
        y, a = state
        slope, pull = torch.func.vjp(lambda y: func(t, y), y)  # type: ignore[misc]
        return slope, map_tensors(torch.neg, pull(a)[0])

    return call
