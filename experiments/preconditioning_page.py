"""The figures, tables and sentences of `experiments.preconditioning`, from its records alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import page
from experiments.page import BLUE, DARK, GREEN, GREY, ORANGE, PALE, PURPLE, RED, SKY, STYLE, WIDTH, YELLOW, markdown_table
from experiments.preconditioning_problems import PROBLEMS
from experiments.runner import Record

LOOKS = {
    "none": ("none", "black"),
    "direct": ("direct solve", GREY),
    "warm start": ("warm start", SKY),
    "Jacobi": ("Jacobi", GREEN),
    "Jacobi, kept": ("Jacobi, kept", GREEN),
    "diagonal, kept": ("exact diagonal, kept", YELLOW),
    "Nyström": ("Nyström", BLUE),
    "Nyström, kept": ("Nyström, kept", BLUE),
    "secants": ("secants of the forward", PALE),
    "factor, kept": ("factor of J, kept", PURPLE),
    "inner CG": ("inner CG, ordinary β", RED),
    "inner CG, flexible": ("inner CG, flexible β", ORANGE),
    "float32, flexible": ("CG in float32, flexible β", DARK),
}
MARKERS = {
    "network": ("network", "o"),
    "scales": ("scales", "s"),
    "few_large": ("few large", "^"),
    "regression": ("regression", "D"),
    "denoising": ("denoising", "v"),
    "implicit_euler": ("backward Euler", "P"),
}
# Of the figure of costs: what one would use in training.
DRAWN = tuple(name for name in LOOKS if name not in ("none", "Jacobi", "Nyström"))
# Of the figure of residuals.
SHOWN = {"implicit_euler": "One stiff step of backward Euler", "few_large": "A few large eigenvalues"}
HISTORIES = ("none", "Jacobi", "Nyström", "inner CG", "inner CG, flexible", "float32, flexible")
# A way pays if it takes less than this share of the time of plain CG, and costs if it takes more than its inverse.
PAYS = 0.9
FLEXIBLE = ("inner CG, flexible", "float32, flexible")


def _of(records: Sequence[Record], problem: str) -> list[dict[str, Any]]:
    """The ways of each seed."""
    return [record["metrics"]["ways"] for record in records if record["config"]["problem"] == problem]


def _by_seed(records: Sequence[Record], problem: str, way: str, part: str, key: str) -> list[float]:
    """Over plain CG, for each seed; nothing if a solve failed in one of them."""
    found = _of(records, problem)
    if any(ways[way]["run"]["failed"] for ways in found):
        return []
    return [ways[way][part][key] / ways["none"][part][key] for ways in found]


def _ratio(records: Sequence[Record], problem: str, way: str, part: str, key: str) -> float | None:
    """Over plain CG: the geometric mean over the seeds; None if a solve failed."""
    found = _by_seed(records, problem, way, part, key)
    return math.exp(statistics.fmean(map(math.log, found))) if found else None


def _ratios(records: Sequence[Record], way: str, part: str, key: str) -> list[float]:
    """For each problem where it did not fail."""
    found = (_ratio(records, problem, way, part, key) for problem in _problems(records))
    return [ratio for ratio in found if ratio is not None]


def _paying(records: Sequence[Record], way: str) -> tuple[int, int]:
    """On how many layers a way pays, and on how many it costs more, with every seed."""
    found = [_by_seed(records, problem, way, "run", "seconds") for problem in _problems(records)]
    return sum(max(some) < PAYS for some in found if some), sum(min(some) > 1 / PAYS for some in found if some)


def _problems(records: Sequence[Record]) -> list[str]:
    there = {record["config"]["problem"] for record in records}
    return [name for name in PROBLEMS if name in there]


def _runs(records: Sequence[Record]) -> int:
    return len({record["seed"] for record in records})


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """All figures by name."""
    return {"cost": cost(records), "residuals": residuals(records)}


def cost(records: Sequence[Record]) -> Any:
    """Steps saved against cost in the training runs, a point for each way and problem."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    with rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 6.4))
        ax = fig.subplots()
        ax.axhspan(1e-9, 1, color=GREEN, alpha=0.08, linewidth=0)
        ax.axhline(1, color=PALE, linewidth=1)
        points, drawn = [], DRAWN
        for way in drawn:
            for problem in _problems(records):
                steps, seconds = (_ratio(records, problem, way, "run", key) for key in ("steps", "seconds"))
                if steps is None or seconds is None:
                    continue
                points.append((steps, seconds))
                filled = {"markerfacecolor": LOOKS[way][1], "markeredgecolor": "black", "markeredgewidth": 0.6}
                ax.plot(steps, seconds, MARKERS[problem][1], markersize=7.5, **filled)
        ax.set(xscale="log", yscale="log", xlabel="CG steps, over those of plain CG", ylabel="time, over that of plain CG")
        ax.set_ylim(0.6 * min(y for _, y in points), 1.6 * max(y for _, y in points))
        ax.text(0.98, 0.02, "pays", transform=ax.transAxes, ha="right", va="bottom", color=GREEN)
        ax.grid(alpha=0.3)
        ax.set_title("Training runs: steps saved against cost")
        colours = [Line2D([], [], color=LOOKS[way][1], marker="o", linestyle="", label=LOOKS[way][0]) for way in drawn]
        shapes = [
            Line2D([], [], color="white", markeredgecolor="black", marker=marker, linestyle="", label=label)
            for label, marker in (MARKERS[problem] for problem in _problems(records))
        ]
        fig.legend(handles=[*colours, *shapes], loc="lower center", ncols=2, columnspacing=0.8, handletextpad=0.3)
        fig.tight_layout(rect=(0, 0.27, 1, 1))
    return fig


def residuals(records: Sequence[Record]) -> Any:
    """The first backward solve of the first run: relative residual of the worst sample over products with J."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    shown = [problem for problem in SHOWN if problem in _problems(records)] or _problems(records)[:1]
    with rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 1.4 + 2.9 * len(shown)))
        axes = fig.subplots(len(shown), 1, squeeze=False)[:, 0]
        for ax, problem in zip(axes, shown, strict=True):
            ways = next(record["metrics"]["ways"] for record in records if record["config"]["problem"] == problem)
            for way in HISTORIES:
                first, history = ways[way]["first"], ways[way]["history"]
                products, steps = first["products"] + first["cheap"], max(first["steps"], 1)
                made = 0 if way.startswith(("inner", "float32")) else products - steps  # before the first step
                x = [max(0.5, made + step * (products - made) / steps) for step, _ in history]
                style = {"linestyle": "--" if way == "inner CG" else "-", "marker": "o" if len(x) < 8 else None}
                ax.plot(x, [10**y for _, y in history], color=LOOKS[way][1], label=LOOKS[way][0], markersize=4, **style)
            ax.set(xscale="log", yscale="log", ylabel="relative residual", title=SHOWN.get(problem, problem))
            ax.grid(alpha=0.3)
        axes[-1].set_xlabel("products with J, those in float32 included")
        fig.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=2, columnspacing=0.8)
        fig.tight_layout(rect=(0, 0.75 / fig.get_figheight(), 1, 1))
    return fig


def summary(records: Sequence[Record]) -> list[dict[str, str]]:
    """Time in the training runs over that of plain CG, its range over the seeds, in brackets the steps; a row for each way."""
    rows = []
    for way in list(LOOKS)[1:]:
        row = {"preconditioner": LOOKS[way][0]}
        for problem in _problems(records):
            seconds, steps = (_ratio(records, problem, way, "run", key) for key in ("seconds", "steps"))
            by_seed = _by_seed(records, problem, way, "run", "seconds")
            spread = f", {_span(by_seed)}" if len(by_seed) > 1 else ""
            shown = "failed" if seconds is None or steps is None else f"{seconds:.2g}{spread} ({steps:.2g})"
            row[MARKERS[problem][0]] = shown
        rows.append(row)
    return rows


def rows(records: Sequence[Record], problem: str) -> list[dict[str, Any]]:
    """One problem: the first backward solve and the training run, means over the runs."""
    found = _of(records, problem)

    def mean(way: str, part: str, key: str) -> float:
        return statistics.fmean(ways[way][part][key] for ways in found)

    table = []
    for way in LOOKS:
        row: dict[str, Any] = {"preconditioner": LOOKS[way][0]}
        for part, title in (("first", "first solve"), ("run", "training run")):
            cheap = mean(way, part, "cheap")
            row[f"{title}: steps"] = f"{mean(way, part, 'steps'):.0f}"
            row["products" if part == "first" else "their products"] = f"{mean(way, part, 'products'):.0f}" + (
                f" + {cheap:.0f} in float32" if cheap else ""
            )
            row["ms" if part == "first" else "their ms"] = f"{1e3 * mean(way, part, 'seconds'):.3g}"
        row["failed"] = sum(ways[way]["run"]["failed"] for ways in found)
        row["error"] = f"{max(ways[way]['error'] for ways in found):.0e}"
        table.append(row)
    return table


def answer(records: Sequence[Record]) -> str:
    """Which pay, which do not."""
    total, config, seeds = len(_problems(records)), records[0]["config"], _runs(records)
    found = {way: _paying(records, way) for way in list(LOOKS)[1:]}
    order = sorted((way for way in found if found[way][0]), key=lambda way: -found[way][0])
    paying = "; ".join(
        f"{LOOKS[way][0]}: on {found[way][0]}, and costs more on {found[way][1]} "
        f"({_span(_ratios(records, way, 'run', 'seconds'))})"
        for way in order
    )
    never = "; ".join(LOOKS[way][0] for way in found if not found[way][0])
    return (
        f"Training runs of {config['steps']} steps on {total} layers: what solves the backward systems in less than {PAYS:g} "
        f"of the time of plain CG, its making included, with each of {seeds} seeds (in brackets least and most of that time "
        f"over the layers): {paying or 'nothing'}. On no layer: {never or '-'}. {flexible(records)}"
    )


def flexible(records: Sequence[Record]) -> str:
    """What β does for a preconditioner that changes from step to step, and why the two that were tried save so little."""
    total, inner = len(_problems(records)), records[0]["config"]["inner_steps"]
    more = []
    for problem in _problems(records):
        pair = [_ratio(records, problem, way, "run", "steps") for way in ("inner CG", "inner CG, flexible")]
        if pair[0] is not None and pair[1] is not None:
            more.append(pair[0] / pair[1])
    products = _ratios(records, "inner CG, flexible", "run", "products")
    failed = sum(record["metrics"]["ways"]["inner CG"]["run"]["failed"] for record in records)
    flexible_failed = sum(record["metrics"]["ways"]["inner CG, flexible"]["run"]["failed"] for record in records)
    return (
        f"With a preconditioner that changes, {inner} steps of CG, the ordinary β takes {_span(more)} times the steps of the "
        f"flexible β ({failed} and {flexible_failed} solves of a sample failed). Only two flexible preconditioners were tried. "
        f"CG on the same J cannot save products by itself, since plain CG makes the best use of its products, and it made more "
        f"on {sum(ratio > 1 for ratio in products)} of {total} layers ({_span(products)} times). CG in float32 could pay "
        f"only by cheaper products, and at these sizes a product, with what goes with it, took {_span(_of_float32(records))} "
        "times as long as in float64: this says nothing of larger layers or of a GPU."
    )


def _of_float32(records: Sequence[Record]) -> list[float]:
    """For each problem: the time of the way in float32 for each of its products, over that of plain CG."""

    def each(solves: dict[str, Any]) -> float:
        return solves["seconds"] / (solves["products"] + solves["cheap"])

    return [
        statistics.geometric_mean(
            each(ways["float32, flexible"]["run"]) / each(ways["none"]["run"]) for ways in _of(records, problem)
        )
        for problem in _problems(records)
    ]


def verdicts(records: Sequence[Record]) -> tuple[page.Verdict, ...]:
    """The paper leaves preconditioning open."""
    shown = ("Nyström, kept", "Jacobi, kept", *FLEXIBLE)
    ours = "; ".join(f"{LOOKS[way][0]}: {_span(_ratios(records, way, 'run', 'seconds'))}" for way in shown)
    paying = {LOOKS[way][0]: _paying(records, way)[0] for way in FLEXIBLE}
    counted = ", ".join(f"{label} on {count}" for label, count in paying.items() if count)
    return (
        page.Verdict(
            "Open question: does (flexible) preconditioning speed up the backward pass?",
            "open",
            f"time over plain CG, {len(_problems(records))} layers: {ours}",
            _runs(records),
            "new",
            "ordinary preconditioners pay where they fit the curvature, more so when kept; of the two flexible ones tried "
            "(inner CG on the same J, which cannot save products by itself; float32, at sizes where overhead dominates) "
            + (f"paid: {counted}" if counted else "neither paid"),
        ),
    )


def section(records: Sequence[Record]) -> page.Section:
    """Preconditioning on the page of all experiments."""
    body = (
        page.paragraph(answer(records))
        + page.gallery(list(figures(records).values()))
        + page.paragraph(f"Time of the backward solves in a training run over that of plain CG{_seeds(records)}.")
        + page.table(summary(records))
    )
    return page.Section("Preconditioning: steps saved against cost", body)


def write(records: Sequence[Record], docs: Path) -> None:
    """docs/preconditioning.md and its figures."""
    page.save(figures(records), docs, "preconditioning")
    (docs / "preconditioning.md").write_text(text(records))


def text(records: Sequence[Record]) -> str:
    """docs/preconditioning.md."""
    config = records[0]["config"]
    outer = [record["metrics"]["ways"]["float32, flexible"]["first"]["products"] for record in records]
    about = []
    for problem in _problems(records):
        metrics = [record["metrics"] for record in records if record["config"]["problem"] == problem]
        condition = statistics.fmean(one["condition"] for one in metrics)
        purpose = (PROBLEMS[problem].__doc__ or "").split("\n")[0]
        size = f"{metrics[0]['samples']} x {metrics[0]['unknowns']} unknowns, condition number about {condition:.2g}"
        about.append(f"- *{MARKERS[problem][0]}*: {purpose} {size}.")
    labels = {name: MARKERS[name][0] for name in _problems(records)}
    blocks = "\n\n".join(
        f"### {label[0].upper()}{label[1:]}\n\n{markdown_table(rows(records, name))}" for name, label in labels.items()
    )
    return f"""# Preconditioning

{page.origin("preconditioning", records)}

The paper leaves flexible preconditioning as a perspective for faster backward passes. Here: what preconditioners save in CG
steps, and what they cost. {config["steps"]} steps of Adam on each of {len(_problems(records))} layers, {_runs(records)} seeds;
in each step the backward system J g = v (a relative residual of {config["rtol"]:g}, float64, one thread) is solved in all ways,
one after the other; the time is that of the processor.

**{answer(records)}**

![Steps saved against cost](preconditioning-cost.svg)

![Residual histories](preconditioning-residuals.svg)

Time of all backward solves of a training run, what it takes to make the preconditioner included, over that of plain
CG{_seeds(records)}.

{markdown_table(summary(records))}

## The layers

{chr(10).join(about)}

## The preconditioners
- *Direct solve*: `dil.Dense()`, no CG.
- *warm start*: `dil.WarmStart(dil.CG())`, no preconditioner, but a start from the last solution.
- *Jacobi*: `dil.Jacobi()`, whose diagonal is estimated from 32 products beyond 64 unknowns. *Exact diagonal*: from all rows of
  J, which tells what the estimate loses.
- *Nyström*: `dil.Nystrom(rank={config["rank"]})`. *Secants*: `dil.SecantMemory()`, from the steps of the forward L-BFGS, for no
  product.
- *Factor of J*: the Cholesky factor of the first step's J, from all rows of J.
- *Kept*: made in the first step of training and used in all, though J changes.
- *Inner CG*: M⁻¹ r by {config["inner_steps"]} steps of CG on the same J, with the ordinary β and with `dil.CG(flexible=True)`.
- *CG in float32*: M⁻¹ r by CG on the same J in float32 to {config["inner_rtol"]:g}, which leaves {min(outer)} to {max(outer)}
  products in float64 for a solve.

Any object with `build(operator, transpose, damping)`, or any function r -> M⁻¹ r, is a preconditioner: that is how the kept
ones, the factor and the inner solvers are made in `experiments/preconditioning.py`.

## In full

Means over the seeds; the products include those that make the preconditioner; *error* is the largest relative distance of the
first solution to that of a direct solve.

{blocks}
"""


def _span(found: Sequence[float]) -> str:
    return f"{min(found):.2g} to {max(found):.2g}" if found else "-"


def _seeds(records: Sequence[Record]) -> str:
    """What the cells of the summary hold beside the ratio."""
    count = _runs(records)
    if count == 1:
        return "; in brackets the CG steps over those of plain CG"
    return f": geometric mean and range over {count} seeds; in brackets the CG steps over those of plain CG"
