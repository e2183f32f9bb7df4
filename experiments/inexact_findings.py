"""What the records of `experiments.inexact` say of all models of all runs: errors, harm to training, what is tolerated."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import NamedTuple

from experiments.inexact_problems import PROBLEMS
from experiments.runner import Record, finished

# Training is unharmed if the loss of three models in four is at most this many times that of training with exact solves.
MARGIN, MOST = 1.05, 0.75
# Relative errors between which factors are measured: below the first terms of higher order, above rounding.
LINEAR = 1e-9, 1e-2
# An estimate is judged where the true error is more than rounding, and counts as right within this factor.
ROUNDING, FACTOR = 1e-13, 3.0
# The library's tolerance unless another is given: what steps are compared with.
USUAL = 1e-10


class Spread(NamedTuple):
    """Quartiles over all models of all runs."""

    low: float
    middle: float
    high: float


def problems(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The finished records by problem, in the order of the experiment."""
    there = finished(records)
    found = {name: [record for record in there if record["config"]["problem"] == name] for name in PROBLEMS}
    return {name: some for name, some in found.items() if some}


def numbers(records: Sequence[Record], solve: str, name: str) -> dict[float, list[float]]:
    """A quantity by tolerance, of all models; tolerances where a run does not know it, models without an estimate left out."""
    found: dict[float, list[float]] = {}
    for record in records:
        for row in record["metrics"]["gradients"][solve]:
            known = [value for value in row[name] or [] if value is not None or name != "solve_estimate"]
            if known:
                found.setdefault(row["tolerance"], []).extend(map(_infinite_if_lost, known))
    return found


def losses(records: Sequence[Record], training: str) -> dict[float, list[float]]:
    """The final loss over that of training with exact solves, by tolerance, of all models."""
    found: dict[float, list[float]] = {}
    for record in records:
        metrics = record["metrics"]
        for row in metrics["training"][training] or []:
            found.setdefault(row["tolerance"], []).extend(
                _infinite_if_lost(a) / b for a, b in zip(row["loss"], metrics["exact_loss"], strict=True)
            )
    return found


def spread(values: Sequence[float]) -> Spread:
    """The quartiles."""
    return Spread(*quantiles(values, n=4, method="inclusive"))


def tolerated(records: Sequence[Record], training: str) -> float | None:
    """The loosest tolerance that leaves training unharmed, as all tighter ones do; None if there is none."""
    best = None
    for tolerance in sorted(losses(records, training)):
        if unharmed(records, training, tolerance) < MOST:
            break
        best = tolerance
    return best


def unharmed(records: Sequence[Record], training: str, tolerance: float) -> float:
    """The share of models whose loss is within the margin."""
    return share(losses(records, training)[tolerance], lambda ratio: ratio <= MARGIN) or 0.0


def harmful(records: Sequence[Record], training: str) -> float | None:
    """The next looser tolerance, which does harm; None if there is none."""
    best = tolerated(records, training) or 0.0
    return min((tolerance for tolerance in losses(records, training) if tolerance > best), default=None)


def value_error(records: Sequence[Record], tolerance: float | None) -> float | None:
    """The median relative error of y at an inner tolerance, at the first parameters; None if it is not known."""
    found = numbers(records, "inner", "solve_error")
    return median(found[tolerance]) if tolerance in found else None


def over_error(records: Sequence[Record]) -> float:
    """The median of the gradient's error over that of y, both relative, where both are small."""
    gradient, value = (numbers(records, "inner", name) for name in ("gradient_error", "solve_error"))
    pairs = [pair for tolerance in value for pair in zip(gradient[tolerance], value[tolerance], strict=True)]
    return median(a / b for a, b in pairs if LINEAR[0] < b < LINEAR[1])


def over_tolerance(records: Sequence[Record]) -> float:
    """The median of the gradient's error over the tolerance of CG, where that is small and CG did not end exactly."""
    found = numbers(records, "cg", "gradient_error")
    pairs = [(error, rtol) for rtol, errors in found.items() for error in errors if error > ROUNDING]
    return median(error / rtol for error, rtol in pairs if LINEAR[0] < rtol <= LINEAR[1])


def estimates(records: Sequence[Record], solve: str) -> list[float]:
    """Estimated over true errors of the solve, of all models and tolerances with an estimate and an error beyond rounding."""
    rows = [row for record in records for row in record["metrics"]["gradients"][solve]]
    both = [row for row in rows if row["solve_estimate"] is not None and row["solve_error"] is not None]
    pairs = [pair for row in both for pair in zip(row["solve_estimate"], row["solve_error"], strict=True)]
    judged = [(estimated, _infinite_if_lost(true)) for estimated, true in pairs if estimated is not None]
    return [estimated / true for estimated, true in judged if true > ROUNDING]


def steps(records: Sequence[Record], solve: str, tolerance: float) -> float:
    """The mean number of steps of the solve at a tolerance."""
    rows = [row for record in records for row in record["metrics"]["gradients"][solve] if row["tolerance"] == tolerance]
    return sum(row["solve_steps"] for row in rows) / len(rows)


def usual(records: Sequence[Record]) -> float:
    """The tolerance that steps are compared with: the usual one, or the tightest that was tried."""
    return max(USUAL, min(records[0]["config"]["tolerances"]))


def saved(records: Sequence[Record], solve: str, tolerance: float | None) -> float | None:
    """The share of steps that a tolerance saves."""
    return None if tolerance is None else 1 - steps(records, solve, tolerance) / steps(records, solve, usual(records))


def right(ratio: float) -> bool:
    """Whether an estimate is within the factor of the true error."""
    return 1 / FACTOR <= ratio <= FACTOR


def share(values: Sequence[float], holds: Callable[[float], bool]) -> float | None:
    """Of the values, how many; None if there are none."""
    return sum(map(holds, values)) / len(values) if values else None


def _infinite_if_lost(number: float | None) -> float:
    return float("inf") if number is None else number
