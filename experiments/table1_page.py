"""The tables, the verdicts and the sentences of `experiments.table1`, from its records alone."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown
from experiments import motion, page, table1_figures, table1_speed
from experiments.forecast import CG, CONTROL, METHODS, NAIVE
from experiments.runner import Record
from experiments.table1 import FEW_RUNS, PROTOCOL, TASKS, Config, variants
from experiments.table1_figures import NAMES, Cell, collected, number, outcome, plus_minus, stacks, table, within
from experiments.table1_verdicts import ERRORS, RULE, RULES, SAME, SHARE, claims, in_paper, joined, lost, too_short, values

# Tasks of which a shorter training is a part of a longer one: neither rate nor windows depend on the number of iterations.
NESTED = ("vdp", "spiral")


def answer(records: list[Record]) -> str:
    """What came out, in a few sentences."""
    cells = collected(records)
    sentences = []
    for task in TASKS:
        if methods := table(cells, task):
            config = next(iter(methods.values())).config
            runs = _runs(methods.values())
            named = ", ".join(f"{method} {plus_minus(outcome(cell, RULE[task]))}" for method, cell in methods.items())
            sentences.append(f"{NAMES[task]} ({RULES[RULE[task]]}, {config['iterations']:,} iterations, {runs}): {named}.")
    return " ".join([*sentences, _summary(cells)])


def _summary(cells: Sequence[Cell]) -> str:
    """How many values and claims are as in the paper, and how many of the planned runs there are."""
    if any(map(too_short, cells)):
        return "These trainings are too short to judge the paper by."
    found = [verdict.verdict for verdict in values(cells)]
    counts = ", ".join(f"{found.count(kind)} {kind}" for kind in ("reproduced", "better", "not reproduced"))
    claimed = [verdict for verdict in claims(cells) if verdict.verdict != "new"]
    held = sum(verdict.verdict == "reproduced" for verdict in claimed)
    runs, planned = sum(len(cell.runs) for cell in cells), sum(one.runs for one in variants(Config.preset("paper")))
    return (
        f"Of {len(found)} values of the paper: {counts}; of {len(claimed)} claims {held} hold. "
        f"{runs} of {planned} planned runs are there; a cell without all of its own reproduces nothing."
    )


def verdicts(records: list[Record]) -> tuple[page.Verdict, ...]:
    """Task by task, the cells of the table and what the paper concludes from them."""
    cells = collected(records)
    tasks = [f"Table 1, {name}" for name in NAMES.values()]
    return tuple(sorted((*values(cells), *claims(cells)), key=lambda verdict: tasks.index(verdict.what.split(":")[0])))


def figures(records: list[Record]) -> dict[str, Any]:
    """All figures by name."""
    return table1_figures.figures(collected(records))


def section(records: list[Record]) -> page.Section:
    """Table 1 on the page of all experiments."""
    cells = collected(records)
    body = (
        page.paragraph(
            "The paper's Table 1: neural ODEs that forecast a motion, trained through DOPRI5, forward or backward Euler by "
            "the continuous adjoint, or through backward Euler by the implicit function theorem (IFT). Mean squared errors of "
            "free roll-outs."
        )
        + page.paragraph(answer(records))
        + page.table(rows(cells))
        + page.gallery(list(table1_figures.figures(cells).values()))
    )
    for heading, some in _tables(cells, table1_speed.load()).items():
        body += page.paragraph(f"{heading}:") + page.table(some)
    return page.Section("Table 1: neural ODEs", body)


def rows(cells: Sequence[Cell]) -> list[dict[str, str]]:
    """The table as in the paper: mean ± standard error by the rule of the verdicts, in brackets the median."""
    found = []
    for method in METHODS:
        line = {"method": method}
        for k, task in enumerate(TASKS):
            cell = table(cells, task).get(method)
            ours = outcome(cell, RULE[task]) if cell else None
            text = joined(f"{plus_minus(ours)} ({number(ours.median)})", lost(ours)) if ours else "-"
            line |= {NAMES[task]: text, "paper" + " " * k: in_paper(task, method)}
        found.append(line)
    return found


def task_rows(cells: Sequence[Cell], task: str) -> list[dict[str, Any]]:
    """One task by all rules, with what failed on the way."""
    judgements = {verdict.what: verdict.verdict for verdict in values(cells)}
    found = []
    for method, cell in table(cells, task).items():
        metrics = [run["metrics"] for run in cell.runs]
        line: dict[str, Any] = {"method": method, "runs": _count(cell), "diverged": sum(one["diverged"] for one in metrics)}
        for k, (rule, name) in enumerate(RULES.items()):
            if rule in metrics[0]:
                ours = outcome(cell, rule)
                line |= {name: plus_minus(ours), "median" + " " * k: number(ours.median)}
                line["failed" + " " * k] = ours.missing
        line["paper"] = in_paper(task, method)
        line["verdict"] = judgements.get(f"Table 1, {NAMES[task]}: {method}", "new")
        for way in ("forward", "backward"):
            line[f"failed solves a run, {way}"] = f"{statistics.fmean(one[f'failed_{way}'] for one in metrics):.4g}"
        found.append(line)
    return found


def budget_rows(cells: Sequence[Cell], task: str) -> list[dict[str, str]]:
    """The best validation within a part of the iterations: mean ± standard error, in brackets the median."""
    found = []
    for method, cell in table(cells, task).items():
        line = {"method": method}
        for iterations in _budgets(cell):
            ours = within(cell, iterations)
            line[f"{iterations:,} iterations"] = f"{plus_minus(ours)} ({number(ours.median)})"
        found.append(line)
    return found


def ablation_rows(cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """The ablations beside the cells of the table."""
    found = []
    for cell in cells:
        base = table(cells, cell.task).get(cell.method)
        if cell.change:
            line: dict[str, Any] = {"task": NAMES[cell.task], "change": cell.change, "method": cell.method}
            for k, rule in enumerate(("test", "last")):
                ours = outcome(cell, rule)
                line[RULES[rule]] = joined(plus_minus(ours), lost(ours))
                line["median" + " " * k] = number(ours.median)
                line["in the table" + " " * k] = plus_minus(outcome(base, rule)) if base else "-"
            found.append(line | {"runs": _count(cell)})
    return found


def time_rows(cells: Sequence[Cell], speed: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """What an iteration takes with CG and with the naive solve; `speed` is what `experiments.table1_speed` measured.

    Times of runs side by side compare only with those of as many; where these differ the ratio is that of `speed`, each alone.
    """
    alone = {(row["task"], row["method"]): row["alone"] for row in speed["cells"]} if speed else {}
    found = []
    for task in TASKS:
        methods = table(cells, task)
        if CG in methods and NAIVE in methods:
            naive, cg = methods[NAIVE], methods[CG]
            times = [statistics.median(run["metrics"]["seconds_per_iteration"] for run in cell.runs) for cell in (naive, cg)]
            line: dict[str, Any] = {"task": NAMES[task]}
            for name, cell, seconds in zip(("naive", "CG"), (naive, cg), times, strict=True):
                line |= {
                    f"{name}, ms an iteration and run": f"{1000 * seconds:.3g}",
                    f"{name}, runs side by side": stacks(cell),
                }
            if stacks(naive) == stacks(cg):
                ratio = f"{times[1] / times[0]:.2g}"
            elif {(task, NAIVE), (task, CG)} <= alone.keys() and not too_short(naive) and not too_short(cg):
                ratio = f"{alone[task, CG] / alone[task, NAIVE]:.2g}, measured again, each alone"
            else:
                ratio = "- (not as many side by side)"
            found.append(line | {"CG / naive": ratio})
    return found


def speed_rows(speed: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs side by side against runs one after another."""
    return [
        {
            "task": NAMES[row["task"]],
            "method": row["method"],
            "runs side by side": row["stack"],
            "alone, ms": f"{1000 * row['alone']:.3g}",
            "side by side, ms a run": f"{1000 * row['together']:.3g}",
            "times as fast": f"{row['alone'] / row['together']:.2g}",
            f"weights apart after {row['iterations']} iterations": f"{row['apart']:.0e}",
        }
        for row in speed["cells"]
        if row["stack"] > 1
    ]


def write(records: list[Record], docs: Path) -> None:
    """docs/table1.md and its figures."""
    page.save(figures(records), docs, "table1")
    (docs / "table1.md").write_text(text(records))


def text(records: list[Record], speed: dict[str, Any] | None = None) -> str:
    """docs/table1.md; `speed` is what `experiments.table1_speed` measured, its committed result by default."""
    cells = collected(records)
    speed = speed or table1_speed.load()
    judgements = [[v.what.removeprefix("Table 1, "), v.paper, v.ours, v.runs, v.verdict, v.why] for v in verdicts(records)]
    parts = [
        f"""# Table 1: neural ODEs

{page.origin("table1", records)}

The paper's Table 1: networks f learn the right-hand side of dy/dt = f(y) from one trajectory, or from a few sequences, and
forecast what follows. The rows differ in the solver, one step a frame, and in the gradient: the continuous adjoint, or that of
the discrete solution itself by the implicit function theorem (IFT):

```python
import torch
import torchdil as dil

torch.manual_seed(0)
f = torch.nn.Sequential(torch.nn.Linear(2, 50), torch.nn.Tanh(), torch.nn.Linear(50, 2))
start, t = torch.randn(20, 2), 0.1 * torch.arange(6)
y = dil.odeint(lambda t, y: f(y), start, t, method="backward_euler", linear_solver=dil.CG(), batch_dims=1)  # (6, 20, 2)
y.square().mean().backward()
```

**{_summary(cells)}**

Mean squared error of the test, mean ± standard error over the runs, in brackets the median. A run *failed* if no model could
be chosen (for the last iterate: its training diverged) or the roll-out of that model over the test stopped: it is not in the
mean, and the worst in the median.

{_table(rows(cells))}

- *Van der Pol*, *Spiral*: {RULES[RULE["vdp"]]} after a warm-up. *CMU Walking*: {RULES[RULE["cmu"]]}, because in trial runs one
  of its three validation sequences dominated their mean, which chose early, poor models. Below are all rules. This one was set
  before these runs, but, like all that the paper leaves open (rates, iterations, windows, a11), after trial runs whose test
  errors were seen: agreement with the paper is weak evidence.
- *Bwd. Euler IFT-naive* solves the linear system of the backward pass densely, *IFT-CG* by CG on the normal equations.
  *{CONTROL}* is a control that the paper does not have: it tells the exact gradient from the implicit solver.
- The same seed has the same first weights and the same windows with every method.
- To forecast zero would score {_zero():.3f} on Spiral: an error above that is worse than no forecast.""",
        _images(cells, "forecasts"),
        f"""## Value by value, claim by claim

- A value is *reproduced* if neither our mean nor our median is above the paper's by more than {ERRORS:g} of the paper's
  standard errors or {100 * SHARE:.0f} %, whichever is more; *better* if our mean is below it by as much and, with its own
  standard error added, still below.
- One method is below another if mean and median say so, the mean by more than {ERRORS:g} combined standard errors: less is
  *within the noise*. Beside it is how many runs with the same seed say so.
- CG loses nothing if it does not fail more often, if runs with the same seed differ in the mean by no loss of more than
  {ERRORS:g} standard errors or {100 * SAME:.0f} %, and if those that are worse by {100 * SAME:.0f} % outnumber those that are
  better by no more than {ERRORS:g} standard errors of chance.
- Without all of its planned runs ({_planned()}) a cell reproduces nothing.

{markdown(["", "paper", "ours", "runs", "verdict", ""], judgements)}""",
        """## Test error over training

The median test error of the model at that iteration, without any choice by validation, over iterations and over the wall time
of training; a failed run counts as the worst. Bands: quartiles, for three of the methods. Other programs had a share of the
machine, so that times are rough; where the number of runs side by side differs, the legend names it.""",
        _images(cells, "curves"),
    ]
    for heading, some in _tables(cells, speed).items():
        parts.append(f"## {heading}\n\n{_table(some)}")
    if speed:
        parts.append(
            f"""## Runs side by side

The runs of a cell are trained as one batch of models where that is faster. CPU time of an iteration ({speed["machine"]["cpu"]},
one thread), and the relative distance between the weights of seed 0 trained alone and in the batch. The steps of DOPRI5 are
chosen for the batch as a whole.

{_table(speed_rows(speed))}"""
        )
    return "\n\n".join(part for part in parts if part) + "\n"


def _zero() -> float:
    """The test error on Spiral of a forecast of zero."""
    return motion.spiral(Config().a11).test[0, 1:].square().mean().item()


def _images(cells: Sequence[Cell], kind: str) -> str:
    """The figures of one kind, one a line."""
    words = {"forecasts": "Forecasts of one run", "curves": "Test error over training"}[kind]
    tasks = [task for one, task in table1_figures.drawn(cells) if one == kind]
    return "\n\n".join(f"![{words}, {NAMES[task]}](table1-{kind}-{task}.svg)" for task in tasks)


def _table(some: list[dict[str, Any]]) -> str:
    return markdown([heading.strip() for heading in some[0]], [list(line.values()) for line in some])


def _tables(cells: Sequence[Cell], speed: dict[str, Any] | None) -> dict[str, list[dict[str, Any]]]:
    """The tables below the first by what is said of them."""
    found = {f"{NAMES[task]} by all rules": task_rows(cells, task) for task in TASKS}
    found |= {f"{NAMES[task]}, best validation within fewer iterations": budget_rows(cells, task) for task in NESTED}
    found |= {"Ablations": ablation_rows(cells), "CG against the naive solve, wall time": time_rows(cells, speed)}
    return {heading: some for heading, some in found.items() if some}


def _budgets(cell: Cell) -> list[int]:
    """Quarters of the iterations that have a model to choose."""
    first = max(cell.config["warm_up"], cell.config["validate_every"])
    quarters = (cell.config["iterations"] * k // 4 for k in (1, 2, 3, 4))
    return [iterations for iterations in quarters if iterations >= first]


def _count(cell: Cell) -> str:
    """How many runs a cell has, of how many if that is planned."""
    if too_short(cell):
        return str(len(cell.runs))
    ablation = cell.config["substeps"] > 1 or cell.config["adjoint"] == "stored"
    return f"{len(cell.runs)} of {FEW_RUNS if ablation else PROTOCOL[cell.task]['runs']}"


def _runs(cells: Collection[Cell]) -> str:
    """The same for the cells of a task, in words."""
    least, most = (rule(cells, key=lambda cell: len(cell.runs)) for rule in (min, max))
    text = _count(most) if len(least.runs) == len(most.runs) else f"{len(least.runs)} to {_count(most)}"
    return f"{text} run{'s' if text != '1' else ''}"


def _planned() -> str:
    return ", ".join(f"{NAMES[task]} {PROTOCOL[task]['runs']}" for task in TASKS) + " a cell"
