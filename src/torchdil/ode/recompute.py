"""Checkpointing: the exact discrete gradient of T steps with the graph of about √T of them at a time.

The trajectory is cut into pieces. The forward pass solves one after the other without a graph and keeps the states between
them. The backward pass solves each piece again from the state it began with, this time with its graph, pulls the cotangent
through it and drops it: one more forward solve for O(√T) memory. Its states are compared with those of the forward pass.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.graph import partial_derivatives
from torchdil.linear.base import LinearSolver
from torchdil.modes import as_in_forward, default_device, observed_by, plain_saving
from torchdil.ode.boundary import boundary, check_complete
from torchdil.ode.called import called, changed
from torchdil.ode.equation import Equation, Grid
from torchdil.ode.fixed import fixed_grid
from torchdil.ode.methods import Method
from torchdil.ode.newton import OdeSolver, SimplifiedNewton
from torchdil.ode.outcomes import together
from torchdil.solution import ConvergenceWarning, Outcome, Report, handle_failure, mask_failed
from torchdil.solvers.base import Solver

_ASKED = 'options["checkpoint"]'


def recomputed(
    equation: Equation,
    method: Method,
    grid: Grid,
    solver: OdeSolver | None,
    linear_solver: LinearSolver | None,
    on_failure: str,
    report: Report,
    pieces: bool | int,
) -> Tensor:
    """The states at the outputs, (B, T, D), attached; `pieces`: how many, or True for √T."""
    steps = len(grid.times) - 1
    trajectory = _Trajectory(equation, method, solver, linear_solver, on_failure, report)
    cuts = _cut(grid, math.isqrt(steps - 1) + 1 if pieces is True else min(int(pieces), steps))
    outcome, solved, y = None, [], equation.start.detach()
    evaluate = equation.field()
    tensors: dict[int, Tensor] = {}
    lost = torch.zeros(len(y), dtype=torch.bool, device=y.device)
    for piece in cuts:
        inner = Report(equation.layout.batch_shape)
        with torch.no_grad():
            # Those policies that speak do so once, below.
            times = grid.times.detach()[piece.first : piece.last + 1]
            states = trajectory.solve(replace(piece, ends=list(range(len(times) - 1))), y, times, "ignore", inner)
        assert inner.forward is not None
        outcome = together([inner.forward] if outcome is None else [outcome, inner.forward])
        lost = lost | ~batch.finite(states.flatten(1))
        # A lost sample stays at its last good state: the pieces to come need numbers to work with.
        states = torch.where(lost[:, None, None], y.unsqueeze(1), states)
        points = torch.cat((y.unsqueeze(1), states), dim=1)
        tensors |= {id(a): a for a in boundary(equation, evaluate, method, times, points, _ASKED)}
        solved.append(states[:, piece.ends])
        y = states[:, -1]
    assert outcome is not None
    report.forward = outcome
    trajectory.failed = handle_failure("forward", report.forward, on_failure, report).reshape(-1)
    trajectory.lost = lost
    found, y = [equation.start.unsqueeze(1)], equation.start
    for piece in cuts:
        times = grid.times[piece.first : piece.last + 1]
        states = _Recomputed.apply(trajectory, piece, solved.pop(0), y, times, *tensors.values())
        found.append(states[:, : piece.outputs])
        y = states[:, -1]
    return torch.where(lost[:, None, None], torch.nan, torch.cat(found, dim=1))


@dataclass(frozen=True)
class _Piece:
    """A part of the grid.

    Attributes:
        first: the grid point where it begins.
        last: the one where it ends.
        ends: the steps, counted from its own first, whose states are wanted: those of the outputs, then its last.
        outputs: how many of them are outputs.
    """

    first: int
    last: int
    ends: list[int]
    outputs: int


def _cut(grid: Grid, count: int) -> list[_Piece]:
    """The grid in pieces of about equal length."""
    steps = len(grid.times) - 1
    wanted = range(steps) if grid.ends is None else grid.ends
    pieces = []
    for n in range(count):
        first, last = n * steps // count, (n + 1) * steps // count
        ends = [end - first for end in wanted if first <= end < last]
        final = last - first - 1
        pieces.append(_Piece(first, last, ends if final in ends else [*ends, final], len(ends)))
    return pieces


@dataclass
class _Trajectory:
    """What all pieces have in common.

    Attributes:
        failed: samples whose forward solve failed in some piece, (B,).
        lost: those whose states are not finite, (B,).
        backward: the last piece that the backward pass has been through, and how the solves so far have ended.
    """

    equation: Equation
    method: Method
    solver: OdeSolver | None
    linear_solver: LinearSolver | None
    on_failure: str
    report: Report
    failed: Tensor = field(default_factory=lambda: torch.tensor(False, device="cpu"))
    lost: Tensor = field(default_factory=lambda: torch.tensor(False, device="cpu"))
    backward: tuple[_Piece, Outcome] | None = None

    def __post_init__(self) -> None:
        self.func = called(self.equation.func)

    def solve(self, piece: _Piece, y: Tensor, times: Tensor, on_failure: str, report: Report) -> Tensor:
        """The states of a piece that are wanted, (B, E, D), from the state y that it begins with."""
        equation = replace(self.equation, func=self.func(), y0=self.equation.layout.unravel(y))
        grid = Grid(times, piece.ends)
        return fixed_grid(equation, self.method, grid, self.solver, self.linear_solver, on_failure, report)[:, 1:]

    def check(self, piece: _Piece, states: Tensor, known: Tensor, times: Tensor, tensors: list[Tensor]) -> None:
        """Raise if f is not what it was: the states are others, beyond the tolerance of their steps, or f depends on others."""
        accuracy = self.solver.accuracy(known.dtype) if isinstance(self.solver, (Solver, SimplifiedNewton)) else 0.0
        rtol = max(accuracy, batch.default_rtol(known.dtype)) ** 0.5
        off = batch.norm((states - known).flatten(1)) > rtol * batch.norm(known.flatten(1))
        if bool((off & ~self.failed & ~self.lost).any()):
            raise changed(_ASKED)
        equation, leaf = replace(self.equation, func=self.func()), known.detach().requires_grad_()
        at = times.detach()[1:][piece.ends].to(leaf.dtype)
        check_complete(equation.field()(equation.func, at, leaf), leaf, tensors, _ASKED)

    def note(self, piece: _Piece, outcome: Outcome) -> None:
        """Add a piece to the report of the backward pass."""
        outcomes = [outcome]
        if self.backward is not None and piece.first < self.backward[0].first:  # a pass goes from the last piece to the first
            outcomes.insert(0, self.backward[1])
        self.backward = piece, together(outcomes)
        self.report.backward = self.backward[1]


class _Recomputed(torch.autograd.Function):
    """The wanted states of a piece: `apply(trajectory, piece, states, y, times, *tensors) -> states`."""

    @staticmethod
    def forward(
        ctx: Any, trajectory: _Trajectory, piece: _Piece, states: Tensor, y: Tensor, times: Tensor, *tensors: Tensor
    ) -> Tensor:
        ctx.trajectory, ctx.piece = trajectory, piece
        ctx.default_device = default_device()
        ctx.save_for_backward(states, y, times, *tensors)
        return states

    @staticmethod
    @as_in_forward
    def backward(ctx: Any, v: Tensor) -> tuple[Any, ...]:
        trajectory, piece, create_graph = ctx.trajectory, ctx.piece, torch.is_grad_enabled()
        known, y, times, *tensors = ctx.saved_tensors  # also raises if one was changed in place
        if not create_graph:
            y, times = y.detach().requires_grad_(), times.detach().requires_grad_(ctx.needs_input_grad[4])
        v = torch.where(trajectory.lost[:, None, None], torch.nan, v)
        v = mask_failed(v, trajectory.failed, trajectory.on_failure)
        inner = Report(trajectory.equation.layout.batch_shape)
        with torch.enable_grad(), plain_saving(), observed_by(None):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ConvergenceWarning)  # the forward pass has said it
                states = trajectory.solve(piece, y, times, trajectory.on_failure, inner)
            trajectory.check(piece, states.detach(), known, times, tensors)
            sources = [y, times, *tensors]
            asked = [t for t in sources if t.requires_grad]
            found = iter(partial_derivatives(states, v, asked, y, create_graph=create_graph))
        if inner.backward is not None:
            trajectory.note(piece, inner.backward)
        return None, None, None, *(next(found) if t.requires_grad else None for t in sources)
