"""What a solve says of itself: `Status`, `Stats`, `Solution`, `Report`, and what to do when it failed.

Every solve, forward or backward, ends with one `Status` per sample. `Report` keeps both solves of a layer and estimates how far
the answers are from the exact ones, from what the backward solve has seen of J anyway (`torchdil.linear.evidence`).
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, get_args

import torch
from torch import Tensor

from torchdil.not_a_tensor import NotATensor
from torchdil.status import Status as Status

Y = TypeVar("Y")
FailurePolicy = Literal["raise", "warn", "ignore", "zero", "nan"]
# From where on the error of a gradient that holds adaptive steps fixed is told.
GRID_ERROR = 0.2
# How many samples a message names.
_NAMED = 5


class ConvergenceError(RuntimeError):
    """A forward or backward solve failed and `on_failure="raise"`. `error.report` holds the numbers."""

    def __init__(self, message: str, report: Report | None = None):
        super().__init__(message)
        self.report = report


class ConvergenceWarning(UserWarning):
    """A forward or backward solve failed and `on_failure="warn"`."""


class Spectrum(Protocol):
    """What a linear solver learnt of the size of J."""

    def extremes(self) -> tuple[Tensor, Tensor]:
        """Per sample the smallest and the largest value, (B,) each: signed Ritz values or singular values."""
        ...


class Evidence(Protocol):
    """What a linear solver knows of its own error and of the forward solve's."""

    def adjoint_error(self, stats: Stats) -> Tensor:
        """Estimate of ‖g - g*‖ / ‖g*‖, (B,); `stats` are those of the solve."""
        ...

    def value_error(self, stats: Stats) -> Tensor | None:
        """Estimate of ‖y - y*‖, (B,); None where F was not looked at."""
        ...


@dataclass
class Stats:
    """The numbers of one solve, per sample.

    Attributes:
        method: the solver's name, and what it had to turn to.
        steps: iterations, (B,).
        residual: ‖F(y)‖ (forward) or ‖v - Jᵀg - εg‖ (backward), (B,).
        tolerance: the residual that was asked for, (B,).
        products: calls of the function (forward) or products with J (backward), for the whole batch.
        history: the residual after each step, a list of (B,) tensors.
        spectrum: extreme Ritz or singular values, worked out when asked for.
        exact: False for methods that approximate on purpose (`JacobianFree`, `Neumann`): they do not "fail".
        norm: ‖y‖ (forward) or ‖g‖ (backward), (B,).
        damping: ε of the backward solve.
        evidence: what the backward solve knows of the errors, worked out when asked for.
        verified: whether `residual` is the true one, by a product with J, and not a recurrence's.
        advice: what to change if the solve got stuck; empty: what the status says.
        diagnosis: why the solve failed and what to change, where that was seen of the function; comes before `advice`.
        indefinite: where a symmetric J was found to have negative curvature, though the solve went on, (B,).
        causes: why samples failed, where the problem knows better than the status: a sentence's part and its samples, (B,).
    """

    method: str
    steps: Tensor
    residual: Tensor
    tolerance: Tensor
    products: int = 0
    history: list[Tensor] = field(default_factory=list)
    spectrum: Spectrum | None = None
    exact: bool = True
    norm: Tensor | None = None
    damping: float = 0.0
    evidence: Evidence | None = None
    verified: bool = False
    advice: str = ""
    diagnosis: str = ""
    indefinite: Tensor | None = None
    causes: list[tuple[str, Tensor]] = field(default_factory=list)

    def copied(self) -> Stats:
        """As `copy.copy`, which takes as long as some solves."""
        copy = object.__new__(type(self))
        vars(copy).update(vars(self))
        return copy


class Result(NamedTuple):
    """What a solver returns: the value (B, n), a `Status` code per sample (B,), the numbers."""

    value: Tensor
    status: Tensor
    stats: Stats


class Outcome(NamedTuple):
    """One half of a `Report`: a `Result` without its value."""

    status: Tensor
    stats: Stats

    @property
    def converged(self) -> Tensor:
        """Which samples converged."""
        return self.status == Status.converged


class Report:
    """The forward and backward solve of one call, per sample. `print(report)` gives a table.

    Attributes:
        forward: status and numbers of the solve that found y; None for `attach` before its check.
        backward: the same of the last solve of the backward pass; None until it has run.
        grid_error: after a backward pass through adaptive steps, how far its gradient may be off because they were held fixed,
            relative, per sample; else None.
    """

    def __init__(self, batch_shape: torch.Size | None = None) -> None:
        self.forward: Outcome | None = None
        self.grid_error: Tensor | None = None
        self._backward: Outcome | Callable[[], tuple[Tensor, Stats]] | None = None
        self._batch_shape = batch_shape

    @property
    def backward(self) -> Outcome | None:
        known = self._backward
        if callable(known):
            with torch.no_grad():
                outcome = self.outcome(*known())
            if self._backward is known:  # another thread may have asked, or solved
                self._backward = outcome
            return outcome
        return known

    @backward.setter
    def backward(self, outcome: Outcome | None) -> None:
        self._backward = outcome

    def backward_by(self, solve: Callable[[], tuple[Tensor, Stats]]) -> None:
        """The solve of the backward pass, its numbers taken apart when somebody asks: in training hardly anybody does."""
        self._backward = solve

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_backward": self.backward}  # a function could not be copied to another process

    def outcome(self, status: Tensor, stats: Stats) -> Outcome:
        """A finished solve in the user's batch shape, () for one problem; flat under `vmap`, where there are more samples."""
        shape = self._batch_shape
        if shape is None or status.shape == shape or status.numel() != shape.numel():
            return Outcome(status, stats)
        stats = stats.copied()
        for name, value in vars(stats).items():
            if isinstance(value, Tensor):
                setattr(stats, name, value.reshape(shape))
        return Outcome(status.reshape(shape), stats)

    @property
    def ritz(self) -> tuple[Tensor, Tensor] | None:
        """Smallest and largest Ritz (CG, MINRES) or singular value (others) of J + εI that the backward solve saw."""
        if self.backward is None or self.backward.stats.spectrum is None:
            return None
        low, high = self.backward.stats.spectrum.extremes()
        return low.reshape(self.backward.status.shape), high.reshape(self.backward.status.shape)

    @property
    def value_error(self) -> Tensor | None:
        """Estimate of ‖y - y*‖ per sample, meant as a bound: ‖J⁻¹F‖ as far as the backward solve has seen J, and a margin.

        None before the backward pass, with a preconditioner or an approximate solver, and after a tangent with J not symmetric.
        """
        if self.forward is None or self.backward is None or self.forward.status.shape != self.backward.status.shape:
            return None
        status, stats = self.backward
        error = None if stats.evidence is None else stats.evidence.value_error(stats)
        return None if error is None else error.reshape(status.shape)

    @property
    def adjoint_error(self) -> Tensor | None:
        """Estimate of ‖g - g*‖ / ‖g*‖ per sample, meant as a bound: what the backward solve adds to the gradient's error.

        At most 1, a g that is wrong altogether. g* solves the system without damping, at the y that was found. 0 where
        there was nothing to solve; None before the backward pass, with a preconditioner or an approximate solver.
        """
        if self.backward is None:
            return None
        status, stats = self.backward
        if stats.evidence is None:
            return None
        error = stats.evidence.adjoint_error(stats).reshape(status.shape)
        if stats.norm is None:
            return error
        return torch.where((stats.norm.reshape(status.shape) == 0) & (status == Status.converged), 0.0, error)

    def plot(self) -> Any:
        """A matplotlib figure: residuals of both solves step by step, extreme Ritz values, estimated errors."""
        from torchdil.plot import plot_report  # matplotlib is for those who plot

        return plot_report(self)

    def __repr__(self) -> str:
        first, second = _describe(self.forward), _describe(self.backward)
        rows = [(key, first.get(key, "-"), second.get(key, "-")) for key in _ROWS]
        if self.ritz is not None:
            low, high = (_numbers(t) for t in self.ritz)
            if low.numel():
                rows.append(("smallest, largest Ritz value", "", f"{float(low.min()):.2e}, {float(high.max()):.2e}"))
        known = [None if error is None else _numbers(error) for error in (self.value_error, self.adjoint_error)]
        errors = ["" if error is None or not error.numel() else f"{float(error.max()):.2e}" for error in known]
        if any(errors):
            rows.append(("estimated error of y, of g (relative)", errors[0], errors[1]))
        if self.grid_error is not None and self.grid_error.numel():
            rows.append(("the same of the steps, held fixed", "", f"{float(self.grid_error.max()):.2e}"))
        return text_table([("", "forward", "backward"), *rows])


@dataclass(frozen=True, eq=False, repr=False)
class Solution(NotATensor, Generic[Y]):
    """The answer of `argmin`, `root` or `fixed_point`. `print(solution)` shows it with its report.

    Attributes:
        value: y, in the structure of y0, attached to the graph.
        status: a `Status` code per sample, of shape () or (B,).
        stats: the numbers of the forward solve.
        report: forward and, once `.backward()` has run, backward solve.
    """

    value: Y
    status: Tensor
    stats: Stats
    report: Report

    @property
    def converged(self) -> Tensor:
        """Which samples converged, of shape () or (B,)."""
        return self.status == Status.converged

    def __repr__(self) -> str:
        return f"Solution: value\n{self.value}\n{self.report}"


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text, the first one the headings, in aligned columns."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def check_policy(on_failure: str) -> None:
    """Raise one sentence if the failure policy is not one of the five."""
    if on_failure not in get_args(FailurePolicy):
        raise ValueError(f"on_failure must be one of {', '.join(map(repr, get_args(FailurePolicy)))}, got {on_failure!r}.")


def handle_failure(phase: str, outcome: Outcome, on_failure: str, report: Report) -> Tensor:
    """Apply the policy to one finished solve and return the mask of failed samples, (B,)."""
    failed = outcome.status != Status.converged
    if not outcome.stats.exact:  # on purpose, but not where it diverges
        failed = (outcome.status == Status.non_finite) | (outcome.status == Status.stagnated)
    if on_failure in ("raise", "warn") and bool(failed.any()):
        message = _sentence(phase, outcome, failed)
        if on_failure == "raise":
            raise ConvergenceError(message, report)
        warnings.warn(message, ConvergenceWarning, stacklevel=user_frame())
    return failed


def tally(status: Tensor) -> str:
    """How many samples ended how, such as "converged 3, stagnated 1"."""
    return ", ".join(f"{Status(code).name} {int((status == code).sum())}" for code in status.unique().tolist())


def mask_failed(g: Tensor, failed: Tensor, on_failure: str) -> Tensor:
    """The gradient g (B, ...) of failed samples (B,) as the policy wants it."""
    if on_failure not in ("zero", "nan"):
        return g
    return torch.where(failed.reshape(-1, *(1,) * (g.dim() - 1)), 0.0 if on_failure == "zero" else float("nan"), g)


def _sentence(phase: str, outcome: Outcome, failed: Tensor) -> str:
    stats = outcome.stats
    worst = worst_sample(stats, failed)
    status = Status(int(outcome.status.reshape(-1)[worst]))
    residual, tolerance = float(stats.residual.reshape(-1)[worst]), float(stats.tolerance.reshape(-1)[worst])
    stuck = status in (Status.max_steps, Status.stagnated, Status.breakdown, Status.not_stationary)
    usual = status.forward_advice if phase == "forward" else status.advice
    advice = f"To mend it: {stats.advice if stuck and stats.advice else usual}"
    if stats.diagnosis:
        advice = f"The cause: {stats.diagnosis}"
    known = [(cause, samples & failed.reshape(-1)) for cause, samples in stats.causes]
    causes = [f"{cause} ({which(samples)})" for cause, samples in known if bool(samples.any())]
    if causes:
        others = failed.reshape(-1) & ~torch.stack([samples for _, samples in known]).any(dim=0)
        if bool(others.any()):
            causes.append(f"{Status(int(outcome.status.reshape(-1)[others][0])).message} ({which(others)})")
        return (
            f"The {phase} solve ({stats.method}) failed for {int(failed.sum())} of {failed.numel()} samples: "
            f"{'; '.join(causes)}."
        )
    return (
        f"The {phase} solve ({stats.method}) failed for {int(failed.sum())} of {failed.numel()} samples; worst: "
        f"{status.name} after {int(stats.steps.reshape(-1)[worst])} steps ({status.message}), residual {residual:.2e}, "
        f"tolerance {tolerance:.2e}. {advice}."
    )


def which(samples: Tensor) -> str:
    """The numbers of the samples in a mask, the first few of many."""
    numbers = samples.nonzero().flatten().tolist()
    shown = ", ".join(str(number) for number in numbers[:_NAMED]) + (", ..." if len(numbers) > _NAMED else "")
    return f"sample{'s' if len(numbers) > 1 else ''} {shown}"


def user_frame() -> int:
    """The stack level of the first caller outside this package and torch, where a warning is of use."""
    inside = tuple(os.path.join(os.path.dirname(file), "") for file in (__file__, torch.__file__))
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(inside):
        frame, level = frame.f_back, level + 1
    return level


_ROWS = ("method", "status", "steps", "evaluations", "residual, worst sample", "tolerance of that sample")


def _describe(outcome: Outcome | None) -> dict[str, str]:
    if outcome is None:
        return {}
    status, stats = outcome
    if status.numel() == 0:
        return {"method": stats.method, "status": "no samples"}
    worst = worst_sample(stats)
    low, high = int(stats.steps.min()), int(stats.steps.max())
    return {
        "method": stats.method + ("" if stats.exact else " (approximate)"),
        "status": tally(status) if status.numel() > 1 else Status(int(status)).name,
        "steps": str(low) if low == high else f"{low} to {high}",
        "evaluations": str(stats.products),
        "residual, worst sample": f"{float(stats.residual.reshape(-1)[worst]):.2e}",
        "tolerance of that sample": f"{float(stats.tolerance.reshape(-1)[worst]):.2e}",
    }


def _numbers(a: Tensor) -> Tensor:
    """Without the NaN of samples that had nothing to solve."""
    return a[~a.isnan()]


def excess(stats: Stats) -> Tensor:
    """The residuals in units of their tolerances; infinite where a residual is no number."""
    found = stats.residual / stats.tolerance.clamp_min(torch.finfo(stats.tolerance.dtype).tiny)
    return found.nan_to_num(nan=float("inf"))


def worst_sample(stats: Stats, among: Tensor | None = None) -> int:
    """The sample whose residual is largest against its tolerance."""
    found = excess(stats)
    return int((found if among is None else torch.where(among, found, -1.0)).argmax())
