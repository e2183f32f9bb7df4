"""A function called with its implicit solves changed: refined to rounding, solved exactly backward, or unrolled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from torchdil import batch
from torchdil.diagnosis import jumps
from torchdil.linear import Auto, LinearSolver
from torchdil.operator import Operator
from torchdil.problem import Problem
from torchdil.progress import Progress
from torchdil.solution import Report, Result
from torchdil.solve import Setting
from torchdil.solvers.base import Solver
from torchdil.solvers.newton import Newton, NewtonSteps

# J of up to so many numbers is formed to solve with it exactly.
_DENSE_LIMIT = 2**22
# More steps than this are not unrolled: their graph would be large, and of no use.
_UNROLL_LIMIT = 2000
# With J held fixed Newton's steps converge linearly, and fast where they start close.
_NEWTON_STEPS = 10


@dataclass
class Solve:
    """One solve of a run: its settings, its report, its answer (B, n), whether that is exact, and whether F jumps there."""

    setting: Setting
    report: Report
    y: Tensor
    exact: bool
    jumps: bool


@dataclass
class Watch:
    """Changes the solves of one run, which are numbered in their order, and remembers them.

    Attributes:
        refine: where to start the exact solve, for those that are to be exact.
        exact: whose backward system is to be solved exactly.
        unroll: how to differentiate through steps instead; None in the end where that failed.
        blind: whether there were solves under torch.func, which cannot be changed.
        grids: the adaptive steps, those of an earlier run being taken again: the gradient is that on their grid, and a grid
            that follows the inputs jumps as they move.
        walks: how many times there were such steps in this run.
    """

    refine: dict[int, Tensor] = field(default_factory=dict)
    exact: set[int] = field(default_factory=set)
    unroll: Callable[..., Tensor | None] | None = None
    solves: list[Solve] = field(default_factory=list)
    blind: bool = False
    grids: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    walks: int = 0

    def begins(self, setting: Setting) -> None:
        k = len(self.solves)
        if k in self.refine or setting.on_failure in ("raise", "warn"):
            setting.on_failure = "ignore"  # "zero" and "nan" are part of the layer's gradient
        if k in self.refine:
            inner = setting.statement.newton() or Newton(linear_solver=setting.statement.direct())
            setting.solver = _Refine(y=self.refine[k], inner=inner)
        if k in self.exact:
            setting.linear_solver = setting.statement.direct() or _Exact()

    def missed(self) -> None:
        self.blind = True

    def stepped(self, ends: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        k, self.walks = self.walks, self.walks + 1
        if k == len(self.grids):
            self.grids.append((ends, rows))
        # A function that makes problems of other shapes than before has no grid to go on with.
        known = self.grids[k][1]
        same = (len(rows), *rows.shape[2:]) == (len(known), *known.shape[2:])
        return self.grids[k] if same else (ends, rows)

    def found(self, setting: Setting, problem: Problem, start: Tensor, result: Result) -> Tensor | None:
        # What rounding leaves is a multiple of the tolerance of the exact solve, which asks for everything.
        exact = not isinstance(setting.solver, _Refine) or bool((result.stats.residual <= 1e6 * result.stats.tolerance).all())
        broken = not exact and bool(jumps(problem, result.value).any())
        self.solves.append(Solve(setting, setting.report, result.value.detach().clone(), exact, broken))
        y = None if self.unroll is None else self.unroll(setting, problem, start, result)
        self.unroll = None if y is None else self.unroll
        return y


@dataclass(frozen=True)
class _Refine(Solver):
    """Newton's method, `inner`, from a known point, until rounding stops it."""

    keeps_bounds = True

    y: Tensor | None = None
    inner: Solver | None = None

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        start = y0 if self.y is None or self.y.shape != y0.shape else self.y.to(y0)
        return (self.inner or Newton()).solve(problem, start, tolerance)

    def accuracy(self, dtype: torch.dtype) -> float:
        return 4 * torch.finfo(dtype).eps


@dataclass(frozen=True)
class _Exact(LinearSolver):
    """The pseudo-inverse of J where it fits into memory, else Krylov to rounding."""

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        samples, n = operator.shape
        if samples * n * n > _DENSE_LIMIT:
            return Auto(rtol=100 * torch.finfo(rhs.dtype).eps).solve(operator, rhs, transpose=transpose)
        J = operator.dense().double()
        J = torch.where(torch.isfinite(J).all(dim=2).all(dim=1)[:, None, None], J, 0.0)
        # What is zero to the rounding of J: its own solution leaves a flat direction alone.
        inverse = torch.linalg.pinv(J.mT if transpose else J, rtol=4 * n**0.5 * torch.finfo(rhs.dtype).eps)
        g = (inverse @ rhs.double().unsqueeze(2)).squeeze(2).to(rhs.dtype)
        zeros = torch.zeros_like(batch.norm(rhs))
        return self.result(g, Progress(zeros, zeros, 1, patience=1), "exact", operator.products)


def own_steps(setting: Setting, problem: Problem, start: Tensor, result: Result) -> Tensor | None:
    """y (B, n) with the graph of the steps that the solver itself took, if it leaves one."""
    # The directions of Newton's method have no graph.
    own = isinstance(setting.solver, Solver) and not isinstance(setting.solver, NewtonSteps)
    if not own or int(result.stats.steps.max()) > _UNROLL_LIMIT:
        return None
    assert isinstance(setting.solver, Solver)
    with torch.enable_grad():
        y = setting.solver.solve(replace(problem, unrolled=True), start, result.stats.tolerance).value
    return y if y.requires_grad else None


def newton_steps(setting: Setting, problem: Problem, start: Tensor, result: Result) -> Tensor | None:
    """y (B, n) with the graph of a few of Newton's steps, J held fixed."""
    samples, n = start.shape
    if samples * n * n > _DENSE_LIMIT:
        return None
    y, J = result.value, problem.operator(result.value).dense()
    with torch.enable_grad():
        for _ in range(_NEWTON_STEPS):
            y = y - torch.linalg.solve_ex(J, problem.residual(y).unsqueeze(2))[0].squeeze(2)
    return y
