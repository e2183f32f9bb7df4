"""The continuous adjoint, integrated backwards with the method of the forward pass (Chen et al. 2018).

    da/dt = -aᵀ ∂f/∂y,    a jumps by ∂L/∂y(t_i) at each output,    dL/dθ = -∫ aᵀ ∂f/∂θ dt (from t_T to t_0),    dL/dy0 = a(t_0)

First y: integrated backwards from each output ("reverse"), all intervals side by side since each starts from a known state, or
taken from the forward pass ("stored"). With y known the equation of a is linear: one block-bidiagonal system for all steps. Its
stages weigh f in the integral for θ, one product for all of them. That equals integrating (y, a, dL/dθ) together, since y does
not depend on a, nor a on dL/dθ. Unlike "ift" this is the gradient of the exact solution to O(h^p), not of the discrete one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdil import batch
from torchdil.batch import Layout
from torchdil.graph import partial_derivatives
from torchdil.linear.base import LinearSolver
from torchdil.modes import as_in_forward, default_device, full_precision, no_tangents, observed_by, plain_saving
from torchdil.ode.bidiagonal import Bidiagonal
from torchdil.ode.boundary import boundary, check_complete
from torchdil.ode.called import called, changed
from torchdil.ode.equation import Equation, Grid
from torchdil.ode.field import Field
from torchdil.ode.fixed import fixed_grid, structured_solver
from torchdil.ode.march import Marching
from torchdil.ode.methods import Method
from torchdil.ode.newton import OdeSolver
from torchdil.ode.outcomes import first_failed, improved, together
from torchdil.ode.sequential import Sequential
from torchdil.ode.trajectory import Trajectory
from torchdil.ode.whole import WholeTrajectory
from torchdil.operator import Operator
from torchdil.problem import Call
from torchdil.solution import Outcome, Report, Status, handle_failure, mask_failed
from torchdil.solve import Setting
from torchdil.solvers import Newton
from torchdil.solvers.base import Solver

# Iterations of Newton's method on all steps backwards at once, before they are tried one after the other.
_TOGETHER = 50


def adjoint_grid(
    equation: Equation,
    method: Method,
    grid: Grid,
    solver: OdeSolver | None,
    linear_solver: LinearSolver | None,
    on_failure: str,
    report: Report,
    stored: bool,
) -> Tensor:
    """The states at the outputs, (B, T, D), with the continuous adjoint as their gradient."""
    times = grid.times.detach()
    ends = list(range(len(times) - 1)) if grid.ends is None else grid.ends
    with torch.no_grad():
        known = fixed_grid(equation, method, Grid(times, None), solver, linear_solver, on_failure, report)
    outputs = known[:, [0, *(end + 1 for end in ends)]]
    field = equation.field()
    tensors = boundary(equation, field, method, times, known, 'gradient="adjoint"')
    known = known if stored else outputs
    assert report.forward is not None
    past = Past(equation, field, method, times, ends, known, outputs, report.forward.status.reshape(-1))
    backward = Backward(past, solver, linear_solver, on_failure, report, stored)
    return Adjoint.apply(backward, outputs, equation.start, equation.t, *tensors)


@dataclass
class Past:
    """What the backward pass knows of the forward one.

    Attributes:
        times: the grid, (N + 1,).
        ends: the step that ends at each output but the first.
        known: the states that were kept, (B, N + 1, D), or only those at the outputs.
        outputs: the states at the outputs, (B, T, D).
        status: how the solve of each sample ended, (B,).
    """

    equation: Equation
    field: Field
    method: Method
    times: Tensor
    ends: list[int]
    known: Tensor
    outputs: Tensor
    status: Tensor

    def __post_init__(self) -> None:
        self.failed = self.status != Status.converged
        self.lost = (self.status == Status.non_finite) | ~batch.finite(self.known.flatten(1))
        # A lost sample stays where it began: its own gradient is lost, but zero times a derivative at infinity would be NaN.
        self.known, self.outputs = (
            torch.where(self.lost[:, None, None], states[:, :1].nan_to_num(0.0, 0.0, 0.0), states)
            for states in (self.known, self.outputs)
        )
        self.func = called(self.equation.func)
        with torch.no_grad():
            self.rates = self.slopes(self.equation.t.detach(), self.outputs)

    def revive(self) -> None:
        """Take f as it was in the forward pass, and raise if it gives other values now."""
        self.equation = replace(self.equation, func=self.func())
        with torch.no_grad():
            off = (self.slopes(self.equation.t.detach(), self.outputs) - self.rates).flatten(1)
        size = torch.finfo(off.dtype).eps ** 0.5 * batch.norm(self.rates.flatten(1))
        if bool((batch.norm(off) > size).any()):
            raise changed('gradient="adjoint"')

    def slopes(self, t: Tensor, y: Tensor) -> Tensor:
        """f at t (N,) and y (B, N, D)."""
        return self.field(self.equation.func, t.to(y.dtype), y)


class Adjoint(torch.autograd.Function):
    """The outputs as a function of all that they depend on: `apply(backward, outputs, start, t, *tensors) -> outputs`."""

    @staticmethod
    def forward(ctx: Any, backward: Backward, outputs: Tensor, start: Tensor, t: Tensor, *tensors: Tensor) -> Tensor:
        ctx.run = backward
        ctx.default_device = default_device()
        ctx.save_for_backward(t, *tensors)
        return outputs.clone()

    @staticmethod
    @as_in_forward
    def backward(ctx: Any, v: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError('gradient="adjoint" has no second derivative: use gradient="ift" with create_graph=True.')
        t, *tensors = ctx.saved_tensors  # also raises if one was changed in place
        with no_tangents(), plain_saving(), full_precision(v), observed_by(None):
            return None, None, *ctx.run(v, t if ctx.needs_input_grad[3] else None, tensors)


class WayBack(NamedTuple):
    """The adjoint along the way from the last time to the first.

    Attributes:
        leaf: y at all N stages, (B, N, D).
        slopes: f there, with its graph.
        stages: a there, (B, N, D), and `end` where the way ends, (B, D).
        lengths: the weights h b_j of the stages in an integral over t, (N,) or (B, N).
        outcome: how the solves ended, (B,).
    """

    leaf: Tensor
    slopes: Tensor
    stages: Tensor
    end: Tensor
    lengths: Tensor
    outcome: Outcome


@dataclass
class Backward:
    """The backward integration."""

    past: Past
    solver: OdeSolver | None
    linear_solver: LinearSolver | None
    on_failure: str
    report: Report
    stored: bool

    def __call__(self, v: Tensor, t: Tensor | None, tensors: list[Tensor]) -> tuple[Tensor | None, ...]:
        """∂L/∂start (B, D), ∂L/∂t and ∂L/∂θ for each θ in `tensors`, from v = ∂L/∂y(t_i), (B, T, D)."""
        past, policy = self.past, self.on_failure
        past.revive()
        v = torch.where(past.lost[:, None, None], torch.nan, v)
        v = mask_failed(v, past.failed, policy)
        way = self.integrate(v)
        self.report.backward = self.report.outcome(*way.outcome)
        failed = handle_failure("backward", self.report.backward, policy, self.report).reshape(-1)
        lost = way.outcome.status == Status.non_finite
        a = torch.where(lost[:, None, None], torch.nan, torch.cat((way.stages, way.end.unsqueeze(1)), dim=1))
        a = mask_failed(a, failed, policy)
        stages, end = a[:, :-1], a[:, -1]
        weights = -way.lengths.unsqueeze(-1) * stages
        check_complete(way.slopes, way.leaf, tensors, 'gradient="adjoint"')
        grads = partial_derivatives(way.slopes, weights, tensors, way.leaf, create_graph=False) if tensors else ()
        if t is None:
            return end + v[:, 0], None, *grads
        # An output moves along f with its time; the start, seen from a later time, moves against it.
        rates = past.slopes(t, past.outputs) * torch.cat((-end.unsqueeze(1), v[:, 1:]), dim=1)
        return end + v[:, 0], rates.sum(dim=(0, 2)).to(t.dtype), *grads

    def integrate(self, v: Tensor) -> WayBack:
        """The adjoint equation on the grid of the forward pass."""
        past = self.past
        times = past.times.flip(0)
        rows, c = past.method.tensors(v)
        h = times.diff().to(v.dtype)
        at = times[:-1, None].to(v.dtype) + h[:, None] * c
        outcomes = []
        with torch.no_grad():
            if self.stored:
                # A lost sample stays where it began, and f may have no number there.
                stages = torch.where(past.lost[:, None, None, None], past.known[:, :1, None], _interpolated(past, times))
            else:
                stages, outcome = _reversed(past, self.solver)
                outcomes.append(outcome)
                lost = (outcome.status == Status.non_finite) | ~batch.finite(stages.flatten(1))
                stages = torch.where(lost[:, None, None, None], past.outputs[:, :1, None], stages)
        leaf, slopes = recorded(past, at.flatten(), stages.flatten(1, 2))
        a, solved = self.linear(leaf, slopes, v, at, times)
        lengths = (h[:, None] * rows[-1]).flatten()
        return WayBack(leaf, slopes, a[:, :, : len(c)].flatten(1, 2), a[:, -1, -1], lengths, together([*outcomes, solved]))

    def linear(self, leaf: Tensor, slopes: Tensor, v: Tensor, at: Tensor, times: Tensor) -> tuple[Tensor, Outcome]:
        """a at the rows of every step, (B, N, m, D), from f at the stages with its graph; at (N, s), times (N + 1,)."""
        past, method = self.past, self.past.method
        steps, rows = len(times) - 1, len(method.rows)
        state, zero = Layout.of(v[:, 0], 1), torch.zeros_like(v[:, 0])
        field = _Transposed(past.field.layout, "samples", leaf, slopes, None)
        whole = Trajectory(method, state, field, steps)
        solver = structured_solver(whole, past.equation.func, (zero, times), self.linear_solver)
        if isinstance(solver, Bidiagonal):
            whole = Trajectory(method, state, replace(field, J=_jacobians(leaf, slopes)), steps)
        elif isinstance(solver, Sequential):
            solver = replace(solver, local=lambda _, n: block(n))

        def block(n: int) -> Operator:
            points = leaf.detach().unflatten(1, at.shape)[:, n]
            local = _Transposed(past.field.layout, "samples", *recorded(past, at[n], points), None)
            return _operator(Trajectory(method, state, local, 1), zero, times[n : n + 2])

        jumps = torch.zeros_like(v[:, :1]).repeat(1, steps, 1)
        jumps[:, [steps - 1 - end for end in past.ends]] = v[:, 1:]
        with torch.no_grad():
            a, status, stats = solver.solve(_operator(whole, zero, times), jumps.repeat_interleave(rows, dim=1).flatten(1))
        return whole.view(a), Outcome(status, stats)


def recorded(past: Past, at: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf at the points (B, N, D) and f there, with its graph."""
    with torch.enable_grad():
        leaf = points.detach().requires_grad_()
        slopes = past.slopes(at, leaf)
        return leaf, slopes if slopes.requires_grad else slopes + 0 * leaf


def _operator(statement: Trajectory, zero: Tensor, times: Tensor) -> Operator:
    """The linear map of a trajectory whose right-hand side is linear."""
    start = zero.repeat(1, statement.layout.size // zero.shape[1])
    return Operator(lambda a: statement.residual(torch.neg, a, (zero, times)), start, False)


def _interpolated(past: Past, times: Tensor) -> Tensor:
    """y at the stages of the steps backwards, (B, N, s, D): the grid points, and a cubic between them, O(h⁴)."""
    states = past.known.flip(1).unsqueeze(2)
    left, right = states[:, :-1], states[:, 1:]
    nodes, (_, c) = past.method.c, past.method.tensors(states)
    if all(node in (0, 1) for node in nodes):
        return torch.cat([right if node else left for node in nodes], dim=2)
    change = past.slopes(times, states.squeeze(2)).unsqueeze(2)
    h, x = times.diff().to(c.dtype)[:, None, None], c[:, None]
    values = (1 + 2 * x) * (1 - x) ** 2 * left + x**2 * (3 - 2 * x) * right
    return values + h * (x * (1 - x) ** 2 * change[:, :-1] + x**2 * (x - 1) * change[:, 1:])


def _reversed(past: Past, solver: OdeSolver | None) -> tuple[Tensor, Outcome]:
    """y integrated backwards from each output to the one before: its stages (B, N, s, D), in the order of the steps."""
    method, func, device = past.method, past.equation.func, past.times.device
    counts = torch.tensor([-1, *past.ends], device="cpu").diff().flip(0)
    intervals, steps, rows = len(counts), int(counts.max()), len(method.rows)
    # (K, M + 1): an interval with fewer steps ends in steps of length 0.
    index = (counts.cumsum(0) - counts)[:, None] + torch.minimum(torch.arange(steps + 1, device="cpu"), counts[:, None])
    times = past.times.flip(0)[index.to(device)]
    along = ((times - times[:, :1]) / (times[:, -1:] - times[:, :1]))[:, 1:].to(past.outputs.dtype)
    states = past.outputs.flip(1).unsqueeze(2)
    # Between two states of the forward pass, which the way back should meet.
    guess = (
        torch.lerp(states[:, :-1], states[:, 1:], along.unsqueeze(2)).repeat_interleave(rows, dim=2).flatten(2).flatten(0, 1)
    )
    starts = states[:, :-1, 0].flatten(0, 1)
    args = (starts, times.repeat(len(states), 1))
    field = _Intervals(past.field.layout, "samples", past.field, intervals)
    statement = Trajectory(method, Layout.of(starts, 1), field, steps)
    structured = structured_solver(statement, func, args, None)
    if isinstance(solver, WholeTrajectory):  # which is for the way there; the way back is tried all at once anyway
        solver = None
    tries: list[Solver] = [Marching(statement=statement, inner=solver)]
    if solver is None and not method.explicit and isinstance(structured, Bidiagonal):
        tries.insert(0, Newton(max_steps=_TOGETHER, linear_solver=structured))
    y, outcome = guess.flatten(1), None
    for attempt in tries:
        report = Report(torch.Size((len(starts),)))
        found = Setting(statement, func, attempt, structured, "ignore", report).attached(guess.flatten(1), args)
        assert report.forward is not None
        y = found if outcome is None else batch.select(outcome.converged, y, found)
        outcome = report.forward if outcome is None else improved(outcome, report.forward)
        if steps == 1 or bool(outcome.converged.all()):  # one step at once is one step after another
            break
    assert outcome is not None
    status, stats = outcome
    apart = {name: getattr(stats, name).unflatten(0, (-1, intervals)).T for name in ("steps", "residual", "tolerance")}
    used = (torch.arange(steps, device="cpu") < counts[:, None]).to(device)
    stages = statement.view(y)[:, :, : method.stages].unflatten(0, (-1, intervals))[:, used]
    return stages, first_failed(Outcome(status.unflatten(0, (-1, intervals)).T, replace(stats, **apart)))


def _jacobians(leaf: Tensor, slopes: Tensor) -> Tensor:
    """∂f/∂y at every point, (B, N, D, D)."""
    size = leaf.shape[-1]
    eye = torch.eye(size, dtype=leaf.dtype, device=leaf.device)
    vectors = eye[:, None, None].expand(size, *leaf.shape)
    return Operator(torch.neg, leaf, False, graph=(leaf, slopes)).rows(vectors).permute(1, 2, 0, 3)


@dataclass(frozen=True, eq=False)
class _Intervals(Field):
    """f for K intervals side by side: the samples (B·K,) share the times of their interval."""

    inner: Field
    intervals: int

    def __call__(self, call: Call, t: Tensor, y: Tensor) -> Tensor:
        # Where there is no sample, any time will do.
        at = t.unflatten(0, (-1, self.intervals))[0].flatten() if len(t) else t.new_zeros(self.intervals * t.shape[1])
        points = y.unflatten(0, (-1, self.intervals)).flatten(1, 2)
        return self.inner(call, at, points).unflatten(1, (self.intervals, -1)).flatten(0, 1)


@dataclass(frozen=True, eq=False)
class _Transposed(Field):
    """-Jᵀ a at the stages, J = ∂f/∂y as matrices or, where that is None, on the graph of f."""

    leaf: Tensor
    slopes: Tensor
    J: Tensor | None

    def __call__(self, call: Call, t: Tensor, y: Tensor) -> Tensor:
        if self.J is not None:
            return -(self.J.mT @ y.unsqueeze(3)).squeeze(3)
        (product,) = torch.autograd.grad(self.slopes, self.leaf, y, create_graph=True, materialize_grads=True)
        return -product
