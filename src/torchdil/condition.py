"""What must hold at a solution, F(y) = 0, and the solves with its Jacobian: checked, reported, under the failure policy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import LinearSolver
from torchdil.linear.units import in_range, solve_in_range
from torchdil.modes import full_precision, no_tangents
from torchdil.operator import Operator
from torchdil.solution import ConvergenceWarning, Outcome, Report, Result, Status, handle_failure, mask_failed

Residual = Callable[[Tensor], Tensor]

_STALE = (
    "The derivatives of this implicit layer's function have changed while its value has not, by something that is neither a "
    "tensor nor a number it reads: the gradients since the last check, as a rule up to eighteen, may be wrong; to prevent it, "
    "give linear_solver=Auto(product='backward')."
)

# How far the true residual may exceed the one that a solver kept by recurrence before the solve counts as failed, or how many
# roundings it may lie above zero, which no solver in that precision can improve upon.
_SLACK, _ROUNDINGS = 10.0, 100.0


@dataclass
class Condition:
    """F(y) = 0 at the solution, and how to solve with its Jacobian.

    Attributes:
        residual: F, (B, n) -> (B, n); may close over anything.
        symmetric: whether J = Jᵀ.
        linear_solver: for Jᵀ g = v and J ẏ = -Ḟ.
        on_failure: the policy for those solves.
        report: where the backward solve leaves its numbers.
        failed: samples whose forward solve failed, (B,).
        tensors: tensors that `residual` may depend on, as far as known; leaves are found without.
        function: what `residual` calls; its closure is searched for non-leaf tensors that are not in `tensors`.
        parts: what `residual` depends on, if its Jacobian may be traced, see `torchdil.traced`.
        replay: F for derivatives of higher order, evaluated after the forward pass; None: `residual`.
        bound: see `Operator`.
        pairs: secant pairs of the forward solver, for preconditioners.
        key: identifies the function, see `Operator`.
        argument: the name under which F, which must depend on y, was given; empty: F may be constant.
        minimum: whether y is to be a minimum.
        look_back: see `torchdil.problem.Statement`.
    """

    residual: Residual
    symmetric: bool
    linear_solver: LinearSolver
    on_failure: str
    report: Report
    failed: Tensor
    tensors: tuple[Tensor, ...] = ()
    function: Any = None
    parts: Any = None
    replay: Residual | None = None
    bound: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    key: Hashable = None
    argument: str = ""
    minimum: bool = False
    look_back: Callable[[Operator, Tensor, Tensor, Report, str], None] | None = None

    def solve(self, operator: Operator, rhs: Tensor, transpose: bool) -> Tensor:
        """g with Jᵀ g = rhs (or J g = rhs), checked by one more product, under the failure policy; no graph."""
        with torch.no_grad(), no_tangents(), full_precision(rhs):
            rhs = rhs.detach()
            if operator.source is not None:
                operator.source.solved()
            solve = partial(solve_in_range, partial(self._solve, operator, transpose), rhs, self.linear_solver.atol)
            try:
                value, status, stats = self._confirmed(operator, solve, rhs, transpose)
            except RuntimeError:  # out of memory, for example
                if not operator.distrust():
                    raise
                value, status, stats = solve()
            doubtful = bool((status != int(Status.converged)).any())
            if self.minimum and stats.indefinite is not None:
                self._is_no_minimum(stats.indefinite)
            if transpose and self.look_back is not None:
                self.look_back(operator, rhs, value, self.report, self.on_failure)
            if not doubtful:
                self.report.backward = self.report.outcome(status, stats)
                if operator.source is not None and len(rhs):
                    operator.source.took(self.linear_solver.settings, stats.steps, stats.products * rhs.numel())
                # Another tensor than the one that the report keeps: it may get a graph, which leads back to the report.
                return mask_failed(value.detach(), self.failed, self.on_failure)
            status = torch.where(batch.finite(rhs), status, int(Status.non_finite))
            stats.causes.append((f"{'gradients' if transpose else 'tangents'} that are not finite came in", ~batch.finite(rhs)))
            self.report.backward = self.report.outcome(status, stats)
            failed = handle_failure("backward" if transpose else "tangent", self.report.backward, self.on_failure, self.report)
            value = batch.select(status == Status.non_finite, torch.full_like(value, float("nan")), value)
            return mask_failed(value, failed.reshape(-1) | self.failed, self.on_failure)

    def _is_no_minimum(self, indefinite: Tensor) -> None:
        """The backward solve has met negative curvature, which the look at y before was too short to see, in these samples."""
        assert self.report.forward is not None
        status, stats = self.report.forward
        missed = indefinite.reshape(status.shape) & (status == Status.converged)
        if bool(missed.any()) or (self.on_failure == "raise" and bool((status == Status.negative_curvature).any())):
            self.report.forward = Outcome(torch.where(missed, int(Status.negative_curvature), status), stats)
            self.failed = self.failed | handle_failure("forward", self.report.forward, self.on_failure, self.report).reshape(-1)

    def _confirmed(self, operator: Operator, solve: Callable[[], Result], rhs: Tensor, transpose: bool) -> Result:
        """What a trace has found, or what autograd finds in its place if the trace is wrong, or may be why samples failed.

        A trace is given up where it is to blame, and for nothing else: samples fail for reasons of their own.
        """
        found, source = solve(), operator.source
        failed = found.status != int(Status.converged)
        if source is None or not operator.traced or not bool(failed.any()):
            return found
        meant = not found.stats.exact or self.linear_solver.max_steps is not None  # to stop short
        if meant and not source.due:
            return found
        if operator.wrong(found.value, transpose):
            self.give_up(operator)
            return solve()
        if meant or (source.acquitted and not source.due) or not bool((failed & batch.finite(rhs)).any()):
            return found
        with operator.surely():
            again = solve()
        if bool((failed & (again.status == int(Status.converged))).any()):
            operator.distrust()
        else:
            source.acquit()
        return again

    def give_up(self, operator: Operator) -> None:
        """Give up the trace of J, which is wrong; say so where solves before this one have relied on it."""
        if operator.source is not None and operator.source.relied and self.on_failure in ("raise", "warn"):
            warnings.warn(_STALE, ConvergenceWarning, stacklevel=4)
        operator.distrust()

    def solve_at_once(self, operator: Operator, rhs: Tensor, boundary: list[Tensor]) -> tuple[Tensor | None, ...] | None:
        """-gᵀ ∂F/∂t for each t of the boundary, Jᵀ g = rhs, by one function; None without one, or in trouble."""
        source, F, solver = operator.source, operator.watched, self.linear_solver
        if source is None or F is None or self.on_failure in ("zero", "nan"):
            return None
        if source.due or not (rhs.numel() and source.pulls):
            return None
        at_once = solver.at_once(operator, True, source.expected(solver.settings))
        if at_once is None:
            return None

        def routine(product: Any, pull: Any, rhs: Tensor, F: Tensor, *known: Tensor) -> tuple[Tensor, ...]:
            x, good, steps, *noted = at_once.routine(product, rhs, F, *known)
            told = torch.stack(((good & in_range(rhs)).all().long(), steps.amax()))  # one tensor, to wait for it once
            return *pull(-x), told, batch.norm(x), steps, *noted

        with torch.no_grad(), no_tangents(), full_precision(rhs):
            rhs = rhs.detach()
            try:
                found = source.run((True, "pull"), ("solve", at_once.key), routine, (rhs, F, *at_once.known))
            except RuntimeError:  # out of memory, for example: step by step takes less
                return None
            count = source.pull_count
            grads, (told, norm, *rest) = source.pulled(found[:count], boundary), found[count:]
            solved, steps = told.tolist()
            if at_once.single:
                source.took_single(bool(solved))
            if grads is None or not solved:
                return None
            source.solved()
            # With products in float32 it may take one or two more, which are there, and are no reason to compile another one.
            source.took(solver.settings, min(steps, source.expected(solver.settings)) if at_once.single else steps, 0)
            self.report.backward_by(partial(at_once.finished, norm, solver.damping, *rest))
            return grads

    def _solve(self, operator: Operator, transpose: bool, rhs: Tensor) -> Result:
        """What the linear solver gives, converged only where one product more confirms it."""
        value, status, stats = self.linear_solver.solve(operator, rhs, transpose=transpose)
        # What a solver keeps by recurrence drifts from the true residual, and knows nothing of a function that mixes samples,
        # nor of a trace that is out of date. One product, now and then of autograd, tells.
        trusted = operator.source is not None and operator.traced and not operator.source.due
        if not stats.verified or operator.traced:
            remainder = rhs - operator.product(transpose, "auto" if trusted else "backward")(value)
            if self.linear_solver.damping:
                remainder -= self.linear_solver.damping * value
            stats.residual, stats.products = batch.norm(remainder), stats.products + 1
        stats.norm, stats.damping = batch.norm(value), self.linear_solver.damping
        # A difference, for infinite is not small: right-hand sides near the end of the dtype have no norm.
        missed = (status == Status.converged) & ~(stats.residual.sub(stats.tolerance, alpha=_SLACK) <= 0)
        if bool(missed.any()):
            if stats.spectrum is not None:
                attainable = _ROUNDINGS * torch.finfo(rhs.dtype).eps * stats.spectrum.extremes()[1].abs() * stats.norm
                missed = missed & ~(stats.residual <= attainable)
            status = torch.where(missed, int(Status.stagnated), status)
            status = torch.where(missed & ~torch.isfinite(stats.residual), int(Status.non_finite), status)
        return Result(value, status, stats)
