"""The figures, the animation, the tables and the sentences of `experiments.cartpole`, from its results alone."""

from __future__ import annotations

import math
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.tables import machine, markdown

# Okabe and Ito's colours, which the colour-blind tell apart.
BLUE, RED, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A8A8A"
STYLE = {"font.size": 11, "axes.titlesize": 12, "legend.fontsize": 9.5, "legend.frameon": False, "svg.hashsalt": "torchdil"}
WIDTH = 4.6  # inches: narrow enough that the letters stay readable on a phone

PAPER = {"expert": ("9.2 ± 0.0", "9.3 ± 0.1"), "BC": ("14.6 ± 0.6", "18.4 ± 1.4"), "MPC_IFT": ("13.7 ± 0.4", "14.7 ± 1.9")}
SERIES = {
    "BC": ("o-", RED),
    "MPC_IFT": ("s-", BLUE),
    "MPC_IFT, polished in the test": ("^-", GREEN),
    "MPC_IFT, polished throughout": ("D-", PURPLE),
}
TRAINED = ("MPC_IFT", "MPC_IFT, polished in training")
INTEGRATORS = {"euler": "explicit Euler", "rk4": "RK4"}
# Of the animation: carts in a strip, pictures a step, metres to either side, and how long the last picture stays.
CARTS, SMOOTH, ROOM, HOLD = 10, 2, 2.4, 16
LENGTH = 0.6


def figures(result: dict[str, Any]) -> dict[str, Any]:
    """All figures by name."""
    found = {"trajectories": trajectories(result)}
    for name, rows in result["settings"].items():
        if len({row["budget"] for row in rows if row["method"] == "BC"}) > 1:
            found[f"budget-{name.split(',')[0]}"] = budget(result, name)
    return found


def trajectories(result: dict[str, Any]) -> Any:
    """The paper's Figure 3: the tip's height and the cart's place over time, from all initial states."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    variance = result["config"]["variances"][-1]
    rows = [
        ("the expert's trajectories that are learned from", _last(result, "expert")["data"], GREY),
        (f"BC, variance {variance}", _last(result, "BC")["trajectories"], RED),
        (f"MPC_IFT, variance {variance}", _last(result, "MPC_IFT")["trajectories"], BLUE),
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
        fig.suptitle(f"{INTEGRATORS[setting.split(',')[0]]}, {_runs(result, setting)}", fontsize=12)
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

    strips = [(method, _smooth(_last(result, method)["trajectories"][:CARTS])) for method in ("expert", "BC", "MPC_IFT")]
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


def spread(row: dict[str, Any], variance: int) -> tuple[float, float]:
    """Mean over the runs of the mean cost, and its standard error."""
    values = [one[variance] for one in row["mean"]]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def rows(result: dict[str, Any], setting: str) -> list[dict[str, str]]:
    """The table of one setting."""
    table = []
    for row in result["settings"][setting]:
        steps = row["budget"]
        cells = {"method": row["method"], "steps of the model": "-" if steps is None else f"{steps:,}"}
        shown = steps in (None, result["config"]["budgets"][-1])
        for k, variance in enumerate(result["config"]["variances"]):
            cells[f"variance {variance}"] = _plus_minus(row, k)
            cells["median" + " " * k] = f"{statistics.fmean(one[k] for one in row['median']):.1f}"
            cells["up" + " " * k] = _percent(statistics.fmean(one[k] for one in row["success"]))
            cells["paper" + " " * k] = PAPER[row["method"]][k] if row["method"] in PAPER and shown else "-"
        table.append(cells)
    return table


def premise_rows(result: dict[str, Any]) -> list[dict[str, str]]:
    """How stationary the plans are."""
    table = []
    for setting, found in result["settings"].items():
        for row in found:
            if "stationarity" in row:
                parts = {name: [one[name] for one in row["stationarity"]] for name in ("gradient", "negative", "held")}
                table.append(
                    {
                        "setting": setting,
                        "plans of": row["method"],
                        "‖∇‖, median": f"{statistics.median(parts['gradient']):.2g}",
                        "negative curvature": _percent(statistics.fmean(parts["negative"])),
                        "controls at a bound": _percent(statistics.fmean(parts["held"])),
                    }
                )
    return table


def target_rows(result: dict[str, Any]) -> list[dict[str, str]]:
    """The targets that were learned with the largest budget."""
    table = []
    for setting, found in result["settings"].items():
        for row in found:
            if "target" in row and row["budget"] == result["config"]["budgets"][-1] and row["method"] in TRAINED:
                cells = {"setting": setting, "training": row["method"]}
                for name, values in zip(("x", "sin θ", "cos θ"), zip(*row["target"], strict=True), strict=True):
                    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
                    cells[name] = f"{statistics.fmean(values):.2f} ± {deviation:.2f}"
                table.append(cells)
    return table


def answer(result: dict[str, Any]) -> str:
    """What came out, in a few sentences."""
    return " ".join(_sentence(result, setting) for setting in result["settings"])


def _sentence(result: dict[str, Any], setting: str) -> str:
    integrator, reading = setting.split(", ")
    last = {
        row["method"]: row for row in result["settings"][setting] if row["budget"] in (None, result["config"]["budgets"][-1])
    }

    def cost(method: str) -> str:
        return " / ".join(_plus_minus(last[method], k) for k in range(len(result["config"]["variances"])))

    named = ", ".join(f"{method} {cost(method)}" for method in ("expert", *SERIES) if method in last)
    return f"{INTEGRATORS[integrator]}, reading “{reading}”: {named}."


def write(result: dict[str, Any], docs: Path) -> None:
    """docs/cartpole.md, its figures and the animation."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        for name, fig in figures(result).items():
            fig.savefig(docs / f"cartpole-{name}.svg", metadata={"Date": None})
    animation(result, docs / "cartpole.gif")
    (docs / "cartpole.md").write_text(text(result))


def text(result: dict[str, Any]) -> str:
    """docs/cartpole.md."""
    config = result["config"]
    high, note = config["variances"][-1], f"; {result['note']}" if result.get("note") else ""
    drawn = [name for name in figures(result) if name.startswith("budget")]
    settings = result["settings"]
    tables = "\n\n".join(f"### {_heading(result, setting)}\n\n{_table(rows(result, setting))}" for setting in settings)
    sentences = "\n".join(f"- {_sentence(result, setting)}" for setting in result["settings"])
    budgets = "\n\n".join(f"![Cost over the steps of the model](cartpole-{name}.svg)" for name in drawn)
    return f"""# Cart-pole

Written by `python -m experiments.cartpole` from `experiments/results/cartpole.json`: {machine(result)}{note}.

A pole hangs from a cart, and forces on the cart are to swing it up and hold it there. An expert that knows the equations does
it by planning, and only the states that it visits are seen, not its controls. From these the learner finds a dynamics network
and a target state, so that *planning* with them does what the expert does:

```py
mpc = dil.control.MPC(model, cost, horizon=10, control_dim=1, bounds=(-1.0, 1.0), solver=dil.RandomShooting())
loss = model.error(x, mpc(x)[:, 0], x_next)  # of the next state, by the first control of the plan
loss.backward()  # reaches the target inside cost, through the argmin
```

This is the paper's Algorithm 2 (MPC_IFT). Behavioural cloning (BC) learns a policy network in place of the target, with as many
steps of the model.

![The swing-up of expert, BC and MPC_IFT](cartpole.gif)

The same {min(CARTS, config["drawn"])} initial states from N(0, {high} I), twice the variance of what was learned from. A pole
is green where cos θ < -0.9.

## The table

Cost: the mean of squares of x, sin θ and cos θ + 1, summed over t = 0 .. {config["steps"]}; {config["states"]} fixed initial
states for each variance; runs have their own experts, networks and random numbers; mean ± standard error over the
runs. Median: of the states, mean over the runs. Up: cos θ < -0.9 for the last 10 steps. Always what training ended
with, never its best iterate.

{sentences}

{tables}

The means of BC are those of a few carts that run away, since x² has no bound: the median run of BC costs
{_median_run(result, "BC")} in the first table, that of MPC_IFT {_median_run(result, "MPC_IFT")}.

- *expert*: random shooting on the true system, {config["particles"]} uniform particles, horizon {config["horizon"]}, every plan
  from scratch. MPC_IFT plans in the same way, with what it has learned.
- *polished* in the test: random shooting with {config["polished_particles"]} particles and the last plan, then up to
  {config["polish_steps"]} steps of Newton, which keep the bounds; training is the paper's. In training: the
  {config["particles"]} particles, then up to {config["training_polish"]} steps of Newton, so that the gradient is that of a
  stationary plan. Throughout: both.
- Readings of the dynamics network. "change": it predicts the change of the state, inputs and outputs are standardised, errors
  are in standard deviations of the change. "literal": it predicts the change and nothing is scaled. "next state": it predicts
  the next state and nothing is scaled.
- The rates of Adam ({config["model_rate"]:g} for the model, {config["policy_rate"]:g} for the policy,
  {config["target_rate"]:g} for the target) fall to zero over the second half of a training. The target starts at x, sin θ,
  cos θ = {", ".join(f"{v:g}" for v in config["first_target"])}, the horizon at {config["first_horizon"]}. Under RK4 short
  horizons mislead the target: there the rate is {config["rk4_target_rate"]:g}, and the horizon starts at
  {config["rk4_first_horizon"]}.

## Over the training budget

Full lines: mean ± standard error over the runs; dotted: the median of the states. Each point is a training of its own, whose
schedules end there. BC takes a step of the policy with each step of the model,
MPC_IFT {config["target_steps"]} steps of the target in all.

{budgets}

## Trajectories

The paper's Figure 3, the first run under {INTEGRATORS[next(iter(result["settings"])).split(",")[0]]}.

![Trajectories of the expert, BC and MPC_IFT](cartpole-trajectories.svg)

## Does the theorem apply?

The gradient assumes a plan that is a minimum. A plan by random shooting is none: its gradient is far from zero, and its Hessian
often has negative eigenvalues. What keeps training stable is that CG stops where it meets negative curvature and that
ε = {config["damping"]:g} bounds what is left; but the gradient is then not that of the loss. Under explicit Euler the last
control cannot reach the cost at all, so that without ε the Hessian is singular. Polished plans are nearly stationary; what
negative curvature is left there is that of plans whose {config["polish_steps"]} steps were not enough.

{_table(premise_rows(result))}

The loss hardly tells how long the target is: since sin² + cos² = 1, its length only weighs the pole against the cart, and the
noise of the expert hides that. What training ended with, mean and standard deviation over the runs:

{_table(target_rows(result))}
"""


def _last(result: dict[str, Any], method: str) -> dict[str, Any]:
    """A method in the first setting, with the largest budget."""
    found = next(iter(result["settings"].values()))
    return next(row for row in found if row["method"] == method and row["budget"] in (None, result["config"]["budgets"][-1]))


def _median_run(result: dict[str, Any], method: str) -> str:
    """The median over the runs of the mean cost, for each variance."""
    means = _last(result, method)["mean"]
    return " / ".join(f"{statistics.median(one[k] for one in means):.1f}" for k in range(len(result["config"]["variances"])))


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


def _runs(result: dict[str, Any], setting: str) -> str:
    runs = len(result["settings"][setting][0]["mean"])
    return f"{runs} run{'s' * (runs > 1)}"


def _heading(result: dict[str, Any], setting: str) -> str:
    integrator, reading = setting.split(", ")
    name = INTEGRATORS[integrator]
    return f"{name[0].upper()}{name[1:]}, reading “{reading}”, {_runs(result, setting)}"


def _table(rows: list[dict[str, Any]]) -> str:
    return markdown([heading.strip() for heading in rows[0]], [list(row.values()) for row in rows])


def _plus_minus(row: dict[str, Any], variance: int) -> str:
    mean, error = spread(row, variance)
    return f"{mean:.1f} ± {error:.1f}" if len(row["mean"]) > 1 else f"{mean:.1f}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f}\N{NO-BREAK SPACE}%"
