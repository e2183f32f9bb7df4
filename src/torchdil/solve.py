"""From a stated problem to an attached `Solution`: solve without grad, check, apply the failure policy, attach.

Whatever solver ran, the answer is accepted only if ‖F(y)‖ is small against the natural size of F there: how much F changes when
y changes by its own size, or by the way it came from y0. That does not depend on the units of f or y, nor on how good y0 was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchdil import batch, modes
from torchdil.arguments import check_linear_solver, warn_of_no_gradient
from torchdil.as_written import compiled_or_as_written
from torchdil.batch import Layout, map_tensors
from torchdil.condition import Condition
from torchdil.diagnosis import diagnose, jumps
from torchdil.foreign import run_foreign
from torchdil.glance import glance
from torchdil.implicit import Point
from torchdil.linear import Auto, LinearSolver
from torchdil.linear.curvature import negative_curvature
from torchdil.live import showing
from torchdil.modes import (
    cast_up,
    full_precision,
    no_tangents,
    observed_by,
    observer,
    plain_saving,
    tangents_active,
    transforms_active,
    uncompiled,
)
from torchdil.problem import Call, Problem, Statement, as_called, call_with, parameters_of, without_backward
from torchdil.slope import look_once
from torchdil.solution import Report, Result, Solution, Stats, Status, handle_failure
from torchdil.solvers.base import Solver, check_solver
from torchdil.solvers.newton import Newton
from torchdil.solvers.picard import Picard
from torchdil.transform import Implicit, check_captures

# A solve that met its tolerance, taken relative to where it started, goes on if that was not enough where it ended; after so
# many rounds only if the last made F so much smaller, as on the way down an exponential, where the tolerance falls as F does.
_ROUNDS = 3
_FALLEN = 1e-3
# By how much the natural size of F has grown on the way to an answer that is looked at for kinks.
_GROWN = 1e4
_NONE = torch.tensor(False, device="cpu")  # no sample has failed yet


class Observer(Protocol):
    """Looks over the shoulder of the solves of a call: `check_gradient` does."""

    def begins(self, setting: Setting) -> None:
        """A solve is about to begin; its settings may be changed."""

    def missed(self) -> None:
        """A solve under `torch.func`, which cannot be watched."""

    def stepped(self, ends: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Adaptive steps were taken, which end so long after t[0]; the ends and rows to go on with."""

    def found(self, setting: Setting, problem: Problem, start: Tensor, result: Result) -> Tensor | None:
        """A solve has ended; a tensor is returned in place of the attached y."""


def solve(
    statement: Statement,
    function: Callable[..., Any],
    y0: Any,
    args: tuple[Any, ...],
    solver: Solver | Callable[..., Any] | None,
    linear_solver: LinearSolver | None,
    on_failure: str,
    first: Any = None,
) -> Solution[Any]:
    """Solve, check and attach; `first` is the function's value at y0, in the mode of the call, if it is known."""
    check_solver(solver)
    solver = (Picard() if statement.name == "fixed_point" else Newton()) if solver is None else solver
    report = Report(statement.layout.batch_shape)
    setting = Setting(statement, uncompiled(function), solver, linear_solver_of(linear_solver), on_failure, report, first=first)
    y = setting.attached(y0, args)
    if torch.is_grad_enabled() and not (y.requires_grad or transforms_active() or observer.get() is not None):
        warn_of_no_gradient(statement.argument, y0, (args, parameters_of(function)))
    assert setting.report.forward is not None
    status, stats = setting.report.forward
    return Solution(statement.layout.unravel(y), status, stats, setting.report)


@dataclass
class Setting:
    """One call: the problem, its solvers, its policy; `solver` None: y0 is the answer; `first`: the function's value at y0."""

    statement: Statement
    function: Callable[..., Any]
    solver: Solver | Callable[..., Any] | None
    linear_solver: LinearSolver
    on_failure: str
    report: Report
    symmetric: bool | None = None
    first: Any = None
    calls: int = 0

    def __post_init__(self) -> None:
        for argument, part in (("solver", self.solver), ("linear_solver", self.linear_solver)):
            only = getattr(part, "only", "")
            if only not in ("", self.statement.name):
                name = type(part).__name__
                raise ValueError(f"{argument}={name}() knows the structure of a {only} only, not of this problem.")

    def counted(self, function: Call) -> Call:
        """The function, its calls counted."""

        def call(*args: Any) -> Any:
            self.calls += 1
            return function(*args)

        return call

    @property
    def layout(self) -> Layout:
        return self.statement.layout

    def attached(self, y0: Any, args: tuple[Any, ...]) -> Tensor:
        """y (B, n), found and attached."""
        return compiled_or_as_written(self.function, lambda: self._attached(y0, args))

    def _attached(self, y0: Any, args: tuple[Any, ...]) -> Tensor:
        if torch.is_inference_mode_enabled():  # solvers need gradients, which its tensors cannot have
            with torch.inference_mode(False), torch.no_grad():
                return self.attached(*map_tensors(lambda t: t.clone() if t.is_inference() else t, (y0, args)))
        if not (torch.is_grad_enabled() or tangents_active() or transforms_active()):
            args = map_tensors(Tensor.detach, args)  # a view of a leaf that was made without grad says that it requires grad
        first = batch.leaves(y0)[0]
        args = cast_up(args, first)
        with full_precision(first):
            watching = observer.get()
            if transforms_active():
                if watching is not None:
                    watching.missed()
                self.first = None
                return self.transformed(y0, args)
            if watching is None:
                try:
                    return self.plain(y0, args)
                except RuntimeError as error:
                    if "setStorage" not in str(error):
                        raise
                    raise RuntimeError(
                        f"{self.statement.argument} uses parameters that are freed after each call, as fully_shard does: shard "
                        "the layer as a whole, fully_shard(layer), so that they stay for all calls of a solve."
                    ) from error
            with observed_by(None):  # solves inside the function are part of the function
                watching.begins(self)
                return self.plain(y0, args, watching)

    def plain(self, y0: Any, args: tuple[Any, ...], watching: Observer | None = None) -> Tensor:
        """y (B, n), found and attached by autograd."""
        statement, start = self.statement, self.layout.ravel(y0).detach().clone()  # the answer may be the start itself
        call, replay = self.counted(self.function), as_called(self.function)

        def residual(y: Tensor) -> Tensor:
            return without_backward(lambda y: statement.residual(call, y, args), y, statement.argument)

        problem = self.problem(residual, lambda y: statement.objective(call, y, args))
        problem.bound = call, args
        condition = self.condition(residual, problem)
        condition.tensors = tuple(t for t in batch.leaves(args) if isinstance(t, Tensor))
        condition.function = (self.function, args)
        condition.parts = (self.function, args, statement)
        condition.replay = lambda y: statement.residual(replay, y, args)
        condition.bound = replay, args
        with plain_saving(), showing():
            result, point = self.find(problem, condition, start)
        if not point.good and bool((result.status != Status.converged).any()):
            if self.on_failure in ("raise", "warn"):
                result.stats.diagnosis = diagnose(problem, start, result, args, type(self.solver).__name__)
        elif watching is None and statement.box(start) is None:  # in a box, what must vanish has kinks of its own
            look_once(problem, result.value, self.function, statement.functions or statement.argument, self.on_failure)
        condition.failed = self.conclude(result)
        if watching is not None and (replaced := watching.found(self, problem, start, result)) is not None:
            return replaced
        if self.on_failure == "zero" and bool((lost := result.status == Status.non_finite).any()):
            # Their gradient is zero, but zero times a derivative at infinity would be NaN, in parameters shared with others.
            point = Point(condition, batch.select(lost, start.nan_to_num(0.0, 0.0, 0.0), result.value))
            point.y = result.value
        return point.attach()

    def transformed(self, y0: Any, args: tuple[Any, ...]) -> Tensor:
        """y (B, n), found and attached under torch.func."""
        statement = self.statement
        leaves, spec = pytree.tree_flatten((parameters_of(self.function), args))
        where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        device = modes.default_device()  # torch.func calls functions of autograd without it

        def bind(operands: tuple[Tensor, ...]) -> tuple[Call, tuple[Any, ...]]:
            full = list(leaves)
            for i, t in zip(where, operands, strict=True):
                full[i] = t
            parameters, args = pytree.tree_unflatten(full, spec)
            return self.counted(modes.on_default_device(device, call_with(self.function, parameters))), args

        def stated(part: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def value(y: Tensor, _: Tensor, *operands: Tensor) -> Tensor:
                call, args = bind(operands)
                return part(call, y, args)

            return value

        def solver(residual: Any, objective: Any, bound: Any, start: Tensor, *operands: Tensor) -> tuple[Tensor, Tensor]:
            problem = self.problem(lambda y: residual(y, start, *operands), lambda y: objective(y, start, *operands))
            problem.bound = bound
            with torch.enable_grad(), plain_saving(), showing():
                result, _ = self.find(problem, self.condition(problem.residual, problem), start)
            failed = self.conclude(result)
            return result.value.clone(), failed.unsqueeze(1).to(start.dtype)

        residual, objective = stated(statement.residual), stated(statement.objective)
        start, operands = self.layout.ravel(y0), [leaves[i] for i in where]
        check_captures(residual, start, [start, *operands], statement.argument)
        implicit = Implicit(
            residual,
            solver,
            objective if statement.has_objective else None,
            rows=1 + len(operands) if statement.rowwise else 1,
            symmetric=self.is_symmetric,
            linear_solver=self.linear_solver,
            on_failure=self.on_failure,
            report=self.report,
            bind=bind,
            rowwise=statement.rowwise,
        )
        return implicit(start, *operands)

    @property
    def looks(self) -> bool:
        """Whether curvature is looked at after the solver, which has not seen to it."""
        return self.statement.has_objective and not (isinstance(self.solver, Solver) and self.solver.sees_curvature)

    @property
    def is_symmetric(self) -> bool:
        return self.statement.symmetric if self.symmetric is None else self.symmetric

    def problem(self, residual: Callable[[Tensor], Tensor], objective: Callable[[Tensor], Tensor]) -> Problem:
        keep = getattr(self.linear_solver.preconditioner, "history", 0)
        key: Any = getattr(self.function, "__code__", type(self.function))
        aim = objective if self.statement.has_objective else None
        given = (self.statement.name, self.is_symmetric, residual, aim, self.layout, key, keep)
        return Problem(*given, statement=self.statement)

    def condition(self, residual: Callable[[Tensor], Tensor], problem: Problem) -> Condition:
        return Condition(
            residual,
            self.is_symmetric,
            self.linear_solver,
            self.on_failure,
            self.report,
            failed=_NONE,
            key=problem.key,
            argument="" if self.statement.has_objective else self.statement.argument,
            minimum=self.statement.has_objective,
            look_back=self.statement.look_back,
            bound=problem.bound,
        )

    def find(self, problem: Problem, condition: Condition, start: Tensor) -> tuple[Result, Point]:
        """Run the solver and judge its answer, which comes with its graph."""
        solver = self.solver
        first, self.first = self.first, None  # its graph must not live as long as the answer
        if not isinstance(solver, Solver):
            bound = problem.bound
            call = None if bound is None else lambda y: bound[0](y, *bound[1])
            y = start if solver is None else run_foreign(solver, call, start, self.layout, first)
            point = Point(condition, y)
            name = "given" if solver is None else getattr(solver, "__name__", type(solver).__name__)
            none, unknown = torch.zeros(len(y), dtype=torch.long, device=y.device), y.new_zeros(len(y))
            result = Result(y, none, Stats(name, none, unknown, unknown))
            # Foreign solvers stop at tolerances of their own: ask for half the digits.
            judged = self.judge(result, point, start if solver is not None else None, batch.default_rtol(y.dtype) ** 0.5, 0.0)
            return self.curved(judged, point), point
        box = self.statement.box(start)
        if box is not None:
            for part in (solver, getattr(solver, "polish", None)):
                if part is not None and not part.keeps_bounds:
                    raise ValueError(f"{type(part).__name__}() cannot keep bounds: use Newton() or GradientDescent().")
            problem.box = box[0].detach(), box[1].detach()
        rtol = solver.accuracy(start.dtype)
        with no_tangents():
            size = self.statement.first_size(problem, start)
            result = solver.solve(problem, start, (rtol * size).clamp_min(solver.atol))
        history, steps = result.stats.history, result.stats.steps
        before = torch.full_like(size, torch.inf)
        for again in itertools.count(1):
            point = Point(condition, result.value)
            judged = self.judge(result, point, start, solver.accepted(start.dtype), solver.atol)
            if point.good:
                break
            refuted = (judged.status == Status.not_stationary) & (result.status == Status.converged)
            if again >= _ROUNDS:
                refuted = refuted & (judged.stats.residual <= _FALLEN * before) & (steps < solver.max_steps)
            if not bool(refuted.any()):
                break
            before = judged.stats.residual
            # The others have ended, whatever their neighbours do.
            with no_tangents():
                more = solver.resume(problem, result.value, torch.where(refuted, judged.stats.tolerance, torch.inf))
            history = history + [torch.where(refuted, r, history[-1]) for r in more.stats.history[1:]]
            steps = steps + torch.where(refuted, more.stats.steps, 0)
            value = batch.select(refuted, more.value, result.value)
            result = Result(value, torch.where(refuted, more.status, result.status), more.stats)
        if self.statement.has_objective:
            judged = self.smooth(judged, point, problem, _GROWN * solver.accepted(start.dtype) * size)
        judged.stats.history, judged.stats.steps = history, steps
        condition.pairs = problem.pairs
        # What a solver gave up on it has not looked at, though it may be good enough.
        looked = result.status == Status.converged if solver.sees_curvature else None
        return self.curved(judged, point, looked), point

    def judge(self, result: Result, point: Point, start: Tensor | None, rtol: float, atol: float) -> Result:
        """The result with ‖F‖ at its value, and the status that follows from it."""
        with torch.no_grad(), no_tangents():
            y, F = result.value, point.F.detach()
            status, size = result.status, self.statement.quick_size(y, start)
            if size is None and (good := glance(point, status, start, rtol, atol, self.looks)) is not None:
                stats = self.told(result.stats, good.residual, good.norm)
                stats.tolerance = good.tolerance
                return Result(y, status, stats)
            residual = batch.length(F)
            stats = self.told(result.stats, residual, batch.length(y))
            if size is not None:
                stats.tolerance = (rtol * size).clamp_min(atol)
                # A difference, for infinite is not small: numbers near the end of the dtype have no norm.
                met = self.statement.counted(F, y, start) - stats.tolerance <= 0
                if bool((met & (status == Status.converged)).all()):  # then y is finite, too
                    return Result(y, status, stats)
            full = self.statement.size(point.operator, y, start)
            stats.tolerance = (rtol * (full if size is None else torch.fmax(size, full))).clamp_min(atol)
            solved = self.statement.counted(F, y, start, point.operator) <= stats.tolerance
            if not bool(solved.all()) and point.operator.traced and not point.operator.sure:
                with point.operator.surely():
                    return self.judge(result, point, start, rtol, atol)
            status = torch.where(~solved & (status == Status.converged), int(Status.not_stationary), status)
            near = (status == Status.max_steps) | (status == Status.stagnated) | (status == Status.not_stationary)
            status = torch.where(solved & near, int(Status.converged), status)
            status = torch.where(batch.finite(y) & torch.isfinite(residual), status, int(Status.non_finite))
            return Result(y, status, stats)

    def smooth(self, result: Result, point: Point, problem: Problem, small: Tensor) -> Result:
        """The result, `not_stationary` at kinks of the objective.

        Next to a kink J is as large as y is near, and no F is large against J y; it is not small against where the solve began.
        """
        suspect = (result.status == Status.converged) & (result.stats.residual > small) & (small > 0)
        if not bool(suspect.any()):
            return result
        with torch.no_grad(), no_tangents():
            kinks = suspect & jumps(problem, result.value)
        point.good = point.good and not bool(kinks.any())
        return result._replace(status=torch.where(kinks, int(Status.not_stationary), result.status))

    def told(self, stats: Stats, residual: Tensor, norm: Tensor) -> Stats:
        """The numbers of a solver with those of its answer."""
        stats = stats.copied()
        stats.residual, stats.norm = residual, norm
        stats.products, stats.advice = self.calls + stats.products, self.statement.advice
        return stats

    def curved(self, result: Result, point: Point, looked: Tensor | None = None) -> Result:
        """The result, `negative_curvature` where what was found is no minimum; `looked`: where that was seen to, (B,)."""
        if not self.statement.has_objective or point.good:
            return result
        met = result.status == Status.converged
        met = met if looked is None else met & ~looked
        if not bool(met.any()):
            return result
        with no_tangents():
            saddle = met & negative_curvature(point.operator)
            if bool(saddle.any()) and point.operator.traced:
                with point.operator.surely():
                    saddle = met & negative_curvature(point.operator)
        return result._replace(status=torch.where(saddle, int(Status.negative_curvature), result.status))

    def conclude(self, result: Result) -> Tensor:
        """Write the forward half of the report, apply the policy; the samples that failed, (B,)."""
        self.report.forward = self.report.outcome(result.status, result.stats)
        return handle_failure("forward", self.report.forward, self.on_failure, self.report).reshape(-1)


def linear_solver_of(given: LinearSolver | None) -> LinearSolver:
    """The linear solver of the backward pass."""
    check_linear_solver(given)
    return Auto() if given is None else given
