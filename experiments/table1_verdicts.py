"""What the paper's Table 1 says, value by value and claim by claim, beside the runs of `experiments.table1`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from experiments import page
from experiments.forecast import BACKWARD, CG, CONTROL, DOPRI5, FORWARD, NAIVE
from experiments.table1 import PROTOCOL, TASKS
from experiments.table1_figures import NAMES, Cell, Outcome, number, outcome, plus_minus, summary, table

# Mean and standard error.
PAPER = {
    "vdp": {DOPRI5: (0.89, 0.15), FORWARD: (0.68, 0.07), BACKWARD: (0.67, 0.12), NAIVE: (0.38, 0.05), CG: (0.40, 0.06)},
    "spiral": {DOPRI5: (0.13, 0.01), FORWARD: (0.20, 0.01), BACKWARD: (0.09, 0.01), NAIVE: (0.09, 0.00), CG: (0.09, 0.01)},
    "cmu": {DOPRI5: (15.92, 2.10), FORWARD: (12.17, 1.39), BACKWARD: (13.68, 2.02), NAIVE: (11.57, 1.79), CG: (11.43, 1.27)},
}
ADJOINTS = (DOPRI5, FORWARD, BACKWARD)
# The model that verdicts are about, and what is shown beside it.
RULE = {"vdp": "test", "spiral": "test", "cmu": "last"}
RULES = {"test": "best validation", "last": "last iterate", "test_by_median": "best median validation"}
# A value is reproduced if it is above the paper's by so many of the paper's standard errors at most, or by this share. Our own
# error must not widen this, else a run far off would make any mean agree.
ERRORS, SHARE = 2.0, 0.15
# Runs of CG and naive that are apart by no more than this share are as good as equal.
SAME = 0.01


def values(cells: Sequence[Cell]) -> list[page.Verdict]:
    """The cells that the paper has."""
    found = []
    for task in TASKS:
        for method, cell in table(cells, task).items():
            if method in PAPER[task]:
                ours = outcome(cell, RULE[task])
                verdict = "unfinished" if unfinished(cell) else judged(ours, *PAPER[task][method])
                what, text = f"Table 1, {NAMES[task]}: {method}", in_paper(task, method)
                why = joined(f"median {number(ours.median)}", lost(ours), _other_rule(cell), unfinished(cell))
                found.append(page.Verdict(what, text, plus_minus(ours), len(cell.runs), verdict, why))
    return found


def judged(ours: Outcome, mean: float, error: float) -> str:
    """The verdict on a cell, by mean and median; less is better, and if half of the runs failed the median did."""
    room = max(ERRORS * error, SHARE * mean)
    if ours.mean is None or max(ours.mean, ours.median) > mean + room:
        return "not reproduced"
    return "better" if ours.mean < mean - room and ours.mean + ours.error < mean else "reproduced"


def claims(cells: Sequence[Cell]) -> list[page.Verdict]:
    """What the paper says of the table, where the runs for it are there, and the control."""
    found = []
    for task in TASKS:
        methods = table(cells, task)
        ours = methods.get(CG, methods.get(NAIVE))
        if ours and BACKWARD in methods:
            found.append(_below(f"Table 1, {NAMES[task]}: IFT below the adjoint of Bwd. Euler", ours, methods[BACKWARD]))
        if ours and all(method in methods for method in ADJOINTS):
            found.append(_below_all(f"Table 1, {NAMES[task]}: IFT below all adjoints", ours, methods))
        if CG in methods and NAIVE in methods:
            found.append(_no_loss(f"Table 1, {NAMES[task]}: CG loses nothing against naive", methods[CG], methods[NAIVE]))
        if CONTROL in methods:
            found.append(_control(methods))
    return found


def _below(what: str, ours: Cell, theirs: Cell) -> page.Verdict:
    """Whether the error of one method is below that of another, in the mean, by more than the noise, and in the median.

    In the median a run that failed is the worst, so that it is no method's if half of its runs failed.
    """
    task = ours.task
    a, b = (outcome(cell, RULE[task]) for cell in (ours, theirs))
    pairs = [(_worst(a.values[seed]), _worst(b.values[seed])) for seed in a.values if seed in b.values]
    noise = None not in (a.mean, b.mean) and abs(a.mean - b.mean) <= ERRORS * math.hypot(a.error, b.error)
    below = _worst(a.mean) < _worst(b.mean) and a.median < b.median and not noise
    why = joined(
        "within the noise" if noise else "",
        f"in {sum(x < y for x, y in pairs)} of {len(pairs)} runs",
        f"medians {number(a.median)} and {number(b.median)}",
        _failed(a, b),
        unfinished(ours, theirs),
    )
    paper = f"{PAPER[task][ours.method][0]:.2f} and {PAPER[task][theirs.method][0]:.2f}"
    text = f"{plus_minus(a)} and {plus_minus(b)}"
    return page.Verdict(what, paper, text, len(pairs), _holds(below, ours, theirs), why)


def _below_all(what: str, ours: Cell, methods: dict[str, Cell]) -> page.Verdict:
    """The same for all adjoints; shown beside the best of them, by the median, if possible of those that ours is not below."""
    task = ours.task
    found = {method: _below(what, ours, methods[method]) for method in ADJOINTS}
    shown = min(ADJOINTS, key=lambda m: (found[m].verdict == "reproduced", outcome(methods[m], RULE[task]).median))
    paper = f"{PAPER[task][ours.method][0]:.2f} and {min(PAPER[task][method][0] for method in ADJOINTS):.2f}"
    return found[shown]._replace(paper=paper, why=f"beside {shown}: {found[shown].why}")


def _no_loss(what: str, cg: Cell, naive: Cell) -> page.Verdict:
    """CG against naive by the differences of runs with the same seed: their mean, and how many have either sign.

    The mean alone would let one run far off hide what the others lose.
    """
    a, b = (outcome(cell, RULE[cg.task]) for cell in (cg, naive))
    seeds = [seed for seed in a.values if seed in b.values]
    both = [(a.values[seed], b.values[seed]) for seed in seeds if None not in (a.values[seed], b.values[seed])]
    loss = summary({k: x - y for k, (x, y) in enumerate(both)})
    apart = [abs(x - y) / y for x, y in both]
    worse, better = (sum(sign * (x - y) > SAME * y for x, y in both) for sign in (1, -1))
    kept = (
        loss.mean is not None
        and loss.mean <= max(ERRORS * loss.error, SAME * statistics.fmean(y for _, y in both))
        and worse - better <= ERRORS * math.sqrt(worse + better)
        and sum(a.values[seed] is None for seed in seeds) <= sum(b.values[seed] is None for seed in seeds)
    )
    run_by_run = "equal to five digits" if both else "nothing to compare"
    if any(apart):
        run_by_run = f"apart by {statistics.median(apart):.1g} in the median, {max(apart):.1g} at most"
    why = joined(
        f"run by run {run_by_run}",
        f"more than {100 * SAME:.0f} % worse in {worse}, better in {better} of {len(both)}" if worse or better else "",
        _failed(a, b),
        unfinished(cg, naive),
    )
    text = f"{plus_minus(a)} and {plus_minus(b)}"
    return page.Verdict(what, "no loss", text, len(seeds), _holds(kept, cg, naive), why)


def _holds(claim: bool, *cells: Cell) -> str:
    return "unfinished" if unfinished(*cells) else "reproduced" if claim else "not reproduced"


def _failed(a: Outcome, b: Outcome) -> str:
    return f"failed: {a.missing} and {b.missing} runs" if a.missing or b.missing else ""


def _control(methods: dict[str, Cell]) -> page.Verdict:
    """Forward Euler with its exact gradient: what exactness alone does."""
    cell = methods[CONTROL]
    beside = {"its adjoint": FORWARD, "Bwd. Euler IFT": CG}
    texts = [
        f"{name}: {plus_minus(outcome(methods[method], RULE[cell.task]))}"
        for name, method in beside.items()
        if method in methods
    ]
    ours = outcome(cell, RULE[cell.task])
    what, why = f"Table 1, {NAMES[cell.task]}: control, {CONTROL}", joined(*texts, lost(ours), unfinished(cell))
    return page.Verdict(what, "-", plus_minus(ours), len(cell.runs), "new", why)


def _worst(value: float | None) -> float:
    return math.inf if value is None else value


def in_paper(task: str, method: str) -> str:
    if method not in PAPER[task]:
        return "-"
    mean, error = PAPER[task][method]
    return f"{mean:.2f} ± {error:.2f}"


def joined(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def lost(found: Outcome) -> str:
    return f"{found.missing} of {len(found.values)} runs failed" if found.missing else ""


def _other_rule(cell: Cell) -> str:
    """Where the rule is not the best validation, what that one gives."""
    if RULE[cell.task] == "test":
        return ""
    other = outcome(cell, "test")
    verdict = "" if unfinished(cell) else f", {judged(other, *PAPER[cell.task][cell.method])}"
    return f"by {RULES['test']} {plus_minus(other)}{verdict}"


def too_short(cell: Cell) -> str:
    """Of a training that is shorter than it should be: that it is."""
    iterations, full = cell.config["iterations"], PROTOCOL[cell.task]["iterations"]
    return f"too short to judge: {iterations:,} of {full:,} iterations" if iterations < full else ""


def too_few(cell: Cell) -> str:
    """Of a cell that has not all of its runs yet: how many it has. Short trainings have a number of their own."""
    runs, full = len(cell.runs), PROTOCOL[cell.task]["runs"]
    return f"{runs} of {full} runs so far" if runs < full and not too_short(cell) else ""


def unfinished(*cells: Cell) -> str:
    """What these cells lack; such a cell reproduces nothing."""
    return joined(*dict.fromkeys(too_short(cell) or too_few(cell) for cell in cells))
