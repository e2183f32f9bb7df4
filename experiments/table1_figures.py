"""The runs of `experiments.table1` by cell, what they come to, and their figures, from its records alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

from experiments import motion
from experiments.forecast import BACKWARD, CG, CONTROL, DOPRI5, FORWARD, METHODS, NAIVE
from experiments.page import BLUE, DARK, GREEN, ORANGE, PALE, PURPLE, RED, SKY, STYLE, WIDTH
from experiments.runner import Record
from experiments.table1 import TASKS, Config

NAMES = {"vdp": "Van der Pol", "spiral": "Spiral", "cmu": "CMU Walking"}
LOOKS = {
    DOPRI5: (RED, "-"),
    FORWARD: (ORANGE, "--"),
    BACKWARD: (PURPLE, "-."),
    NAIVE: (SKY, "-"),
    CG: (BLUE, "--"),
    CONTROL: (GREEN, ":"),
}
BANDS = (DOPRI5, BACKWARD, NAIVE)


class Cell(NamedTuple):
    """The runs of one method on one task, by seed; `change` names what an ablation does otherwise, "" in the table."""

    task: str
    method: str
    change: str
    config: dict[str, Any]
    runs: list[Record]


class Outcome(NamedTuple):
    """The errors of a cell's runs.

    Attributes:
        mean, error: over the runs that did not fail, and its standard error; None if there are none.
        median: over all runs, one that failed being the worst.
        values: by seed; None: it failed, that is, no model could be chosen, or its roll-out stopped on its way.
    """

    mean: float | None
    error: float
    median: float
    values: dict[int, float | None]

    @property
    def missing(self) -> int:
        """How many runs failed."""
        return sum(value is None for value in self.values.values())


def change(config: dict[str, Any]) -> str:
    """What an ablation does otherwise than the table."""
    usual = Config()
    parts = [f"{config['substeps']} sub-steps a frame"] if config["substeps"] != usual.substeps else []
    parts += ["adjoint along the stored trajectory"] if config["adjoint"] != usual.adjoint else []
    parts += [f"a11 = {config['a11']:g}, as printed"] if config["task"] == "spiral" and config["a11"] != usual.a11 else []
    return ", ".join(parts)


def collected(records: Sequence[Record]) -> list[Cell]:
    """The cells that have runs: the table in its order, then the ablations."""
    cells: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        config = record["config"]
        cells.setdefault((config["task"], config["method"], change(config)), []).append(record)
    order = sorted(cells, key=lambda key: (key[2] != "", TASKS.index(key[0]), key[2], METHODS.index(key[1])))
    by_seed = {key: sorted(cells[key], key=lambda record: record["seed"]) for key in order}
    return [Cell(*key, runs[0]["config"], runs) for key, runs in by_seed.items()]


def table(cells: Sequence[Cell], task: str) -> dict[str, Cell]:
    """The cells of a task by method, without ablations."""
    return {cell.method: cell for cell in cells if cell.task == task and not cell.change}


def outcome(cell: Cell, rule: str) -> Outcome:
    """What the runs come to; rule: "test" (best mean validation), "last" or "test_by_median"."""
    return summary({run["seed"]: _value(run["metrics"], rule) for run in cell.runs})


def within(cell: Cell, iterations: int) -> Outcome:
    """The same for the best validation within the first iterations, as if training had ended there."""
    values: dict[int, float | None] = {}
    for run in cell.runs:
        curve = run["metrics"]["curve"]
        rows = zip(*(curve[key] for key in ("iteration", "validation", "test")), strict=True)
        usable = [row for row in rows if cell.config["warm_up"] <= row[0] <= iterations and row[1] is not None]
        values[run["seed"]] = min(usable, key=lambda row: row[1])[2] if usable else None
    return summary(values)


def summary(values: dict[int, float | None]) -> Outcome:
    """Of the errors of some runs."""
    there = [value for value in values.values() if value is not None]
    error = statistics.stdev(there) / math.sqrt(len(there)) if len(there) > 1 else 0.0
    median = statistics.median(math.inf if value is None else value for value in values.values()) if values else math.inf
    return Outcome(statistics.fmean(there) if there else None, error, median, values)


def stacks(cell: Cell) -> str:
    """How many runs were trained side by side."""
    return "/".join(str(size) for size in sorted({run["metrics"]["stack"] for run in cell.runs}))


def _value(metrics: dict[str, Any], rule: str) -> float | None:
    # What was chosen before a training diverged is a model like others. Without a validation that ended, none was chosen.
    lost = metrics["diverged"] if rule == "last" else metrics["validation"] is None
    return None if lost or metrics.get(f"{rule}_failed", False) else metrics[rule]


def number(value: float | None) -> str:
    """An error as text, with three digits."""
    return "failed" if value is None or not math.isfinite(value) else f"{value:#.3g}"


def plus_minus(found: Outcome) -> str:
    """The mean and its standard error, with two digits of the latter; without it where there are not runs enough."""
    if found.mean is None or len(found.values) - found.missing < 2:
        return number(found.mean)
    if found.error == 0 or found.mean >= 1000:
        return f"{number(found.mean)} ± {found.error:.2g}"
    decimals = max(0, 1 - math.floor(math.log10(found.error)))
    return f"{found.mean:.{decimals}f} ± {found.error:.{decimals}f}"


def drawn(cells: Sequence[Cell]) -> list[tuple[str, str]]:
    """Kind and task of the figures that there are runs for."""
    found = []
    for task in TASKS:
        runs = [run for cell in table(cells, task).values() for run in cell.runs]
        found += [("curves", task)] if runs else []
        found += [("forecasts", task)] if task != "cmu" and any("forecast" in run["metrics"] for run in runs) else []
    return found


def figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """All figures by name."""
    draw = {"curves": curves, "forecasts": forecasts}
    return {f"{kind}-{task}": draw[kind](task, table(cells, task)) for kind, task in drawn(cells)}


def curves(task: str, methods: dict[str, Cell]) -> Any:
    """The median test error over iterations and over the time of training, with quartiles for some."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    with rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 6.8))
        axes = fig.subplots(2, 1, sharey=True)
        seen = []
        sizes = {method: stacks(cell) for method, cell in methods.items()}
        unequal = len(set(sizes.values())) > 1
        for method, cell in methods.items():
            colour, line = LOOKS[method]
            label = f"{method} ({sizes[method]})" if unequal else method
            found = _curve(cell)
            seen += found["middle"]
            for ax, key in zip(axes, ("iteration", "seconds"), strict=True):
                ax.plot(found[key], found["middle"], line, color=colour, linewidth=1.7, label=label)
                if method in BANDS:
                    ax.fill_between(found[key], found["low"], found["high"], color=colour, alpha=0.15, linewidth=0)
        finite = [value for value in seen if math.isfinite(value)]
        if finite:  # a band that leaves the picture would squeeze the lines
            axes[0].set_ylim(0.7 * min(finite), min(2 * max(finite), 300 * statistics.median(finite)))
        axes[0].set(xlabel="iterations", title=f"{NAMES[task]}: test error, median of the runs")
        aside = "\n(in brackets: runs side by side)" if unequal else ""
        axes[1].set(xlabel=f"seconds of training a run{aside}", xscale="log")
        for ax in axes:
            ax.set(yscale="log", ylabel="mean squared error")
            low, high = ax.get_ylim()
            ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 100 * low else (1.0,)))
            ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.grid(alpha=0.3)
        handles, labels = axes[0].get_legend_handles_labels()
        fig.legend(handles, labels, loc="lower center", ncols=2, columnspacing=1.0, handlelength=2.6)
        fig.tight_layout(rect=(0, 0.01 + 0.033 * math.ceil(len(methods) / 2), 1, 1))
    return fig


def _curve(cell: Cell) -> dict[str, list[float]]:
    """Quartiles of the test error at each validation, a run that failed being the worst, and the median time until there.

    Runs that all ended early have a last validation of their own, at which the others have none: what most have is shown.
    """
    points: dict[int, list[tuple[float, float]]] = {}
    for run in cell.runs:
        curve = run["metrics"]["curve"]
        for iteration, seconds, test in zip(curve["iteration"], curve["seconds"], curve["test"], strict=True):
            points.setdefault(iteration, []).append((seconds, math.inf if test is None else test))
    found: dict[str, list[float]] = {key: [] for key in ("iteration", "seconds", "low", "middle", "high")}
    for iteration in sorted(key for key, some in points.items() if 2 * len(some) > len(cell.runs)):
        times, tests = zip(*points[iteration], strict=True)
        # A run that ended early is missing: it failed.
        ordered = sorted([*tests, *[math.inf] * (len(cell.runs) - len(tests))])
        found["iteration"].append(iteration)
        found["seconds"].append(statistics.median(times))
        quarter = len(ordered) // 4
        shown = ordered[quarter], statistics.median(ordered), ordered[-1 - quarter]
        for key, value in zip(("low", "middle", "high"), shown, strict=True):
            found[key].append(value if math.isfinite(value) else math.nan)
    return found


def forecasts(task: str, methods: dict[str, Cell]) -> Any:
    """The test of one run in phase space: the truth, and what each method forecasts."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    config = next(iter(methods.values())).config
    truth = (motion.van_der_pol() if task == "vdp" else motion.spiral(config["a11"])).test[0].numpy()
    runs = {method: run for method, cell in methods.items() for run in cell.runs if "forecast" in run["metrics"]}
    rows = math.ceil(len(runs) / 2)
    with rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 0.9 + 1.75 * rows))
        axes = list(fig.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flat)
        for ax, (method, run) in zip(axes, runs.items(), strict=False):
            metrics = run["metrics"]
            path = [(math.nan if x is None else x, math.nan if y is None else y) for x, y in metrics["forecast"]]
            ax.plot(truth[:, 0], truth[:, 1], color=PALE, linewidth=3.5, label="truth")
            ax.plot(*zip(*path, strict=True), color=DARK, linewidth=1.1, label="forecast")
            ax.plot(*truth[0], "o", color=DARK, markersize=4, label="start")
            # A forecast on the right orbit may still be late: its end tells.
            ax.plot(*truth[-1], "s", color=PALE, markersize=8)
            ax.plot(*path[-1], "s", color=DARK, markersize=4, label="ends")
            ax.set_title(f"{method}\n{number(_value(metrics, 'test'))}", fontsize=9.5)
            ax.grid(alpha=0.3)
        low, high = truth.min(axis=0), truth.max(axis=0)
        room = 0.25 * (high - low)
        for ax in axes[len(runs) :]:
            ax.axis("off")
        axes[0].set(xlim=(low[0] - room[0], high[0] + room[0]), ylim=(low[1] - room[1], high[1] + room[1]))
        fig.suptitle(f"{NAMES[task]}: the test of seed 0", fontsize=12)
        fig.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=4, columnspacing=1.0)
        fig.tight_layout(rect=(0, 0.45 / fig.get_figheight(), 1, 1))
    return fig
