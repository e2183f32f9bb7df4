"""What the paper's Table 1 says, value by value and claim by claim, beside the runs of `experiments.table1`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments import page
from experiments.forecast import BACKWARD, CG, CONTROL, DOPRI5, FORWARD, NAIVE
from experiments.table1 import PROTOCOL, TASKS
from experiments.table1_figures import NAMES, Cell, Outcome, number, outcome, plus_minus, table

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
# A mean is reproduced if it is within so many combined standard errors of the paper's, or within this share of it, and if not
# more than this share of the runs failed.
ERRORS, SHARE, MOST = 2.0, 0.15, 0.5
# CG loses nothing if its mean is above naive's by no more than a standard error, or than this share.
SAME = 0.01


def values(cells: Sequence[Cell]) -> list[page.Verdict]:
    """The cells that the paper has."""
    found = []
    for task in TASKS:
        for method, cell in table(cells, task).items():
            if method in PAPER[task]:
                ours = outcome(cell, RULE[task])
                verdict = "not reproduced" if too_short(cell) else judged(ours, *PAPER[task][method])
                what, text = f"Table 1, {NAMES[task]}: {method}", in_paper(task, method)
                why = joined(f"median {number(ours.median)}", lost(ours), _other_rule(cell), too_short(cell))
                found.append(page.Verdict(what, text, plus_minus(ours), len(cell.runs), verdict, why))
    return found


def judged(ours: Outcome, mean: float, error: float) -> str:
    """The verdict on a cell; less is better."""
    if ours.mean is None or ours.missing > MOST * len(ours.values):
        return "not reproduced"
    if abs(ours.mean - mean) <= max(ERRORS * math.hypot(ours.error, error), SHARE * mean):
        return "reproduced"
    return "better" if ours.mean < mean else "not reproduced"


def claims(cells: Sequence[Cell]) -> list[page.Verdict]:
    """What the paper says of the table, where the runs for it are there, and the control."""
    found = []
    for task in TASKS:
        methods = table(cells, task)
        ours = methods.get(CG, methods.get(NAIVE))
        if ours and BACKWARD in methods:
            found.append(_below(f"Table 1, {NAMES[task]}: IFT below the adjoint of Bwd. Euler", ours, methods[BACKWARD]))
        if ours and all(method in methods for method in ADJOINTS):
            means = {method: outcome(methods[method], RULE[task]).mean for method in ADJOINTS}
            best = min(ADJOINTS, key=lambda method: math.inf if means[method] is None else means[method])
            verdict = _below(f"Table 1, {NAMES[task]}: IFT below all adjoints", ours, methods[best])
            paper = f"{PAPER[task][ours.method][0]:.2f} and {min(PAPER[task][method][0] for method in ADJOINTS):.2f}"
            found.append(verdict._replace(paper=paper, why=f"the best is {best}; {verdict.why}"))
        if CG in methods and NAIVE in methods:
            found.append(_no_loss(f"Table 1, {NAMES[task]}: CG loses nothing against naive", methods[CG], methods[NAIVE]))
        if CONTROL in methods:
            found.append(_control(methods))
    return found


def _below(what: str, ours: Cell, theirs: Cell) -> page.Verdict:
    """Whether the mean error of one method is below that of another; also run by run, as seeds share their first weights."""
    task = ours.task
    a, b = (outcome(cell, RULE[task]) for cell in (ours, theirs))
    pairs = [(_worst(a.values[seed]), _worst(b.values[seed])) for seed in a.values if seed in b.values]
    below = _worst(a.mean) < _worst(b.mean) and not too_short(ours)
    close = None not in (a.mean, b.mean) and abs(a.mean - b.mean) < ERRORS * math.hypot(a.error, b.error)
    why = joined(
        f"in {sum(x < y for x, y in pairs)} of {len(pairs)} runs",
        f"medians {number(a.median)} and {number(b.median)}",
        "the difference is within the noise" if close else "",
        f"failed: {a.missing} and {b.missing} runs" if a.missing or b.missing else "",
        too_short(ours),
    )
    paper = f"{PAPER[task][ours.method][0]:.2f} and {PAPER[task][theirs.method][0]:.2f}"
    text = f"{plus_minus(a)} and {plus_minus(b)}"
    return page.Verdict(what, paper, text, len(pairs), "reproduced" if below else "not reproduced", why)


def _no_loss(what: str, cg: Cell, naive: Cell) -> page.Verdict:
    """CG against naive, run by run and in the mean."""
    task = cg.task
    a, b = (outcome(cell, RULE[task]) for cell in (cg, naive))
    pairs = [(a.values[seed], b.values[seed]) for seed in a.values if seed in b.values]
    both = [(x, y) for x, y in pairs if None not in (x, y)]
    apart = max((abs(x - y) / max(x, y) for x, y in both), default=0.0)
    room = max(a.error, b.error, SAME * (b.mean or 0))
    kept = a.mean is not None and (b.mean is None or a.mean <= b.mean + room)
    why = joined(
        f"run by run {f'apart by {apart:.1g} at most' if apart else 'equal to five digits'}" if both else "no run to compare",
        f"failed: {a.missing} and {b.missing} runs" if a.missing or b.missing else "",
        too_short(cg),
    )
    text = f"{plus_minus(a)} and {plus_minus(b)}"
    return page.Verdict(what, "no loss", text, len(pairs), "reproduced" if kept else "not reproduced", why)


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
    what, why = f"Table 1, {NAMES[cell.task]}: control, {CONTROL}", joined(*texts, lost(ours), too_short(cell))
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
    return f"by {RULES['test']} {plus_minus(other)}, {judged(other, *PAPER[cell.task][cell.method])}"


def too_short(cell: Cell) -> str:
    """Of a training that is shorter than it should be: that it is; it reproduces nothing."""
    iterations, full = cell.config["iterations"], PROTOCOL[cell.task]["iterations"]
    return f"too short to judge: {iterations:,} of {full:,} iterations" if iterations < full else ""
