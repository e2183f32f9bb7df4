"""The figures and the animation of `experiments.cartpole`, and its runs as they need them, from its records alone."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from experiments.page import BLUE, GREEN, GREY, PURPLE, RED, STYLE, WIDTH
from experiments.runner import Record

SERIES = {
    "BC": ("o-", RED),
    "MPC_IFT": ("s-", BLUE),
    "MPC_IFT, polished in the test": ("^-", GREEN),
    "MPC_IFT, polished throughout": ("D-", PURPLE),
}
INTEGRATORS = {"euler": "explicit Euler", "rk4": "RK4"}
# Of the animation: carts in a strip, pictures a step, metres to either side, and how long the last picture stays.
CARTS, SMOOTH, ROOM, HOLD = 10, 2, 2.4, 16
LENGTH = 0.6


def collected(records: list[Record]) -> dict[str, Any]:
    """The runs by setting, "integrator, reading": a row for each method and budget, with lists over the runs."""
    by_setting: dict[str, list[Record]] = {}
    for record in records:
        config = record["config"]
        by_setting.setdefault(f"{config['integrator']}, {config['reading']}", []).append(record)
    settings = {}
    for setting, runs in by_setting.items():
        table = [row for run in sorted(runs, key=lambda run: run["seed"]) for row in run["metrics"]["rows"]]
        settings[setting] = [
            _over_runs([row for row in table if (row["method"], row["budget"]) == key])
            for key in dict.fromkeys((row["method"], row["budget"]) for row in table)
        ]
    return {"config": records[0]["config"], "settings": settings}


def _over_runs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One method with one budget; one run has trajectories."""
    single, whole = ("trajectories", "data"), ("method", "budget")
    out = {name: rows[0][name] for name in whole}
    out |= {name: [row[name] for row in rows] for name in rows[0] if name not in (*single, *whole)}
    return out | {name: row[name] for row in rows for name in single if name in row}


def with_most_steps(result: dict[str, Any], setting: str) -> dict[str, dict[str, Any]]:
    """The methods of a setting, each with the largest budget."""
    most = result["config"]["budgets"][-1]
    return {row["method"]: row for row in result["settings"][setting] if row["budget"] in (None, most)}


def first_setting(result: dict[str, Any], method: str) -> dict[str, Any]:
    """A method in the first setting, with the largest budget."""
    return with_most_steps(result, next(iter(result["settings"])))[method]


def has_trajectories(result: dict[str, Any]) -> bool:
    """Whether the run that has them is there."""
    return "trajectories" in first_setting(result, "expert")


def spread(row: dict[str, Any], variance: int) -> tuple[float, float]:
    """Mean over the runs of the mean cost, and its standard error."""
    values = [one[variance] for one in row["mean"]]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def runs_in_words(result: dict[str, Any], setting: str) -> str:
    runs = len(result["settings"][setting][0]["mean"])
    return f"{runs} run{'s' * (runs > 1)}"


def trajectories(result: dict[str, Any]) -> Any:
    """The paper's Figure 3: the tip's height and the cart's place over time, from all initial states."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    variance = result["config"]["variances"][-1]
    rows = [
        ("the expert's trajectories that are learned from", first_setting(result, "expert")["data"], GREY),
        (f"BC, variance {variance}", first_setting(result, "BC")["trajectories"], RED),
        (f"MPC_IFT, variance {variance}", first_setting(result, "MPC_IFT")["trajectories"], BLUE),
    ]
    with rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 6.4))
        axes = fig.subplots(3, 2, sharex=True, sharey="col")
        for (left, right), (label, paths, colour) in zip(axes, rows, strict=True):
            for path in paths:
                times = [0.1 * t for t in range(len(path))]
                left.plot(times, [-cos for _, _, cos in path], color=colour, alpha=0.3, linewidth=0.8)
                right.plot(times, [x for x, _, _ in path], color=colour, alpha=0.3, linewidth=0.8)
            left.set(ylim=(-1.1, 1.1), yticks=[-1, 0, 1], yticklabels=["down", "0", "up"])
            right.set(ylim=(-ROOM, ROOM))
            left.set_title(label, loc="left", fontsize=11)
            for ax in (left, right):
                ax.grid(alpha=0.3)
                ax.margins(x=0)
            left.set_ylabel("tip", labelpad=-8)
            right.set_ylabel("cart, m", labelpad=0)
        for ax in axes[-1]:
            ax.set_xlabel("time, s")
        fig.tight_layout()
    return fig


def budget(result: dict[str, Any], setting: str) -> Any:
    """The cost over the steps of the model, with standard errors."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows, variances = result["settings"][setting], result["config"]["variances"]
    with rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 4.7))
        axes = fig.subplots(1, len(variances), sharey=True)
        for k, (ax, variance) in enumerate(zip(axes, variances, strict=True)):
            mean, _ = spread(rows[0], k)
            ax.axhline(mean, color=GREY, linestyle="--", label="expert")
            for method, (style, colour) in SERIES.items():
                line = sorted((row for row in rows if row["method"] == method), key=lambda row: row["budget"])
                points = [(row["budget"], *spread(row, k)) for row in line]
                steps, means, errors = zip(*points, strict=True)
                ax.errorbar(steps, means, errors, fmt=style, color=colour, markersize=5, capsize=2, label=method)
                # Of a few run-aways the mean is full, the median is not.
                medians = [statistics.fmean(one[k] for one in row["median"]) for row in line]
                ax.plot(steps, medians, style[0], color=colour, markersize=5, fillstyle="none", linestyle=":")
            ax.set(xscale="log", yscale="log", xlabel="steps of the model", title=f"variance {variance}")
            ax.grid(alpha=0.3)
            budgets = result["config"]["budgets"]
            ax.set_xticks(budgets, [f"{steps / 1000:g}k" for steps in budgets])
            ax.set_xticks([], minor=True)
            low, high = ax.get_ylim()
            ticks = [tick for tick in (5, 7, 10, 15, 20, 50, 100, 200, 500, 1000, 2000) if low < tick < high]
            ax.set_yticks(ticks, [str(tick) for tick in ticks])
            ax.set_yticks([], minor=True)
        axes[0].set_ylabel("cost")
        fig.suptitle(f"{INTEGRATORS[setting.split(',')[0]]}, {runs_in_words(result, setting)}", fontsize=12)
        fig.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=2, columnspacing=1.0)
        fig.tight_layout(rect=(0, 0.17, 1, 1))
    return fig


def animation(result: dict[str, Any], path: Path) -> None:
    """A GIF of the swing-up: expert, BC and MPC_IFT from the same initial states."""
    from matplotlib import rc_context
    from matplotlib.animation import PillowWriter
    from matplotlib.collections import LineCollection, PatchCollection
    from matplotlib.figure import Figure
    from matplotlib.patches import Rectangle

    strips = [
        (method, _smooth(first_setting(result, method)["trajectories"][:CARTS])) for method in ("expert", "BC", "MPC_IFT")
    ]
    frames = len(strips[0][1][0])
    with rc_context(STYLE | {"font.size": 10}):
        fig = Figure(figsize=(5.6, 5.2), facecolor="white")
        axes = fig.subplots(3, 1)
        fig.subplots_adjust(left=0.01, right=0.99, top=0.95, bottom=0.01, hspace=0.17)
        writer = PillowWriter(fps=10 * SMOOTH)
        with writer.saving(fig, str(path), dpi=90):
            for frame in [*range(frames), *[frames - 1] * HOLD]:
                up = []
                for ax, (method, paths) in zip(axes, strips, strict=True):
                    ax.clear()
                    ax.plot([-ROOM, ROOM], [0, 0], color="#C8C8C8", linewidth=1.5, zorder=0)
                    ax.plot([0, 0], [-0.09, 0.09], color="#C8C8C8", linewidth=1.5, zorder=0)
                    at = [one[frame] for one in paths]
                    poles = [[(x, 0), (x + LENGTH * math.sin(a), -LENGTH * math.cos(a))] for x, a in at]
                    upright = [math.cos(a) < -0.9 for _, a in at]
                    colours = [GREEN if good else RED for good in upright]
                    carts = [Rectangle((x - 0.13, -0.06), 0.26, 0.12) for x, _ in at]
                    ax.add_collection(PatchCollection(carts, facecolor="#4A4A4A", alpha=0.35, edgecolor="none"))
                    ax.add_collection(LineCollection(poles, colors=colours, linewidths=3, alpha=0.75, capstyle="round"))
                    ax.set(xlim=(-ROOM, ROOM), ylim=(-0.75, 0.75), aspect="equal")
                    ax.axis("off")
                    up.append(sum(upright))
                    ax.set_title(f"{method}: {up[-1]} of {len(at)} up", loc="left", fontsize=11)
                axes[0].set_title(f"{min(frame, frames - 1) / SMOOTH / 10:.1f} s", loc="right", fontsize=11)
                writer.grab_frame()


def _smooth(paths: list[Any]) -> list[list[tuple[float, float]]]:
    """(x, θ) of each path, with pictures in between."""
    out = []
    for path in paths:
        angles = [math.atan2(path[0][1], path[0][2])]
        for _, sin, cos in path[1:]:
            turned = math.atan2(sin, cos) - angles[-1]
            angles.append(angles[-1] + math.remainder(turned, math.tau))
        points = [(x, angle) for (x, _, _), angle in zip(path, angles, strict=True)]
        fine = []
        for (x, a), (y, b) in pairwise(points):
            fine += [(x + (y - x) * k / SMOOTH, a + (b - a) * k / SMOOTH) for k in range(SMOOTH)]
        out.append([*fine, points[-1]])
    return out
