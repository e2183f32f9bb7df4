"""The figures, tables and sentences of `experiments.kepler`, from its results alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from experiments import page
from experiments.kepler import MIXED, PAST
from experiments.page import BLUE, DARK, GREEN, PALE, PURPLE, RED, STYLE, WIDTH, YELLOW, markdown_table, percent
from experiments.runner import Record

# A claim about points holds if it does in this share of them.
MOST = 0.9


def answer(records: list[Record]) -> str:
    """How exact the inner solution must be, in two sentences."""
    return _answer(page.only_run(records))


def figures(records: list[Record]) -> dict[str, Any]:
    """All figures by name."""
    result = page.only_run(records)
    return {
        "field-argmin": field(result, "argmin"),
        "field-root": field(result, "root"),
        "errors": errors(result),
        "success": success(result),
    }


def section(records: list[Record]) -> page.Section:
    """Kepler's equation on the page of all experiments."""
    result = page.only_run(records)
    body = (
        page.paragraph(
            "E(e) = argmin_u (u - e sin u - M)², and e is learned so that E(e) meets a target (the paper's Figure 1). An "
            "arrow is one step of learning at a point (e, u) that need not solve the inner problem: minus the gradient in "
            "e, a step of gradient descent on the score in u."
        )
        + page.paragraph(_answer(result))
        + page.gallery(list(figures(records).values()))
        + page.table(field_rows(result))
        + page.paragraph(
            f"Inexact inner solutions in {result['config']['problems']} random problems: errors at the first e, and how "
            "learning fared from cold and warm starts, judged by the exact E; medians."
        )
        + page.table(inexact_rows(result))
    )
    return page.Section("Kepler's equation: how exact must the inner solution be?", body)


def verdicts(records: list[Record]) -> tuple[page.Verdict, ...]:
    """What the paper says of its Figure 1, claim by claim."""
    result = page.only_run(records)
    config, field, share = result["config"], result["field"]["argmin"], result["reference"]["share"]
    gap = abs(result["path"]["e"][-1] - result["target_e"])
    arrives = f"learning with single inner steps arrives from {percent(field['arrives'], 1)} of the points"
    single = next(row for row in result["inner_steps"] if row["inner_steps"] == 1)

    def claim(what: str, ours: str, runs: int, holds: bool, why: str = "") -> page.Verdict:
        return page.Verdict(f"Figure 1: {what}", "yes", ours, runs, "reproduced" if holds else "not reproduced", why)

    return (
        claim(
            "e is learned so that E(e) meets a target",
            f"|e - e*| = {gap:.0e}; {percent(share, 1)} of {config['problems']} random problems",
            config["problems"],
            gap < config["reached"] and share > MOST,
        ),
        claim(
            "the gradient points to the target, on the argmin-line",
            f"{percent(field['right_on_the_line'], 1)} of the points",
            1,
            field["right_on_the_line"] == 1,
        ),
        claim(
            "points close to the argmin-line also point to the target",
            f"{percent(field['right_by_distance'][0], 1)} of those closer than 0.1",
            1,
            field["right_by_distance"][0] > MOST,
        ),
        claim(
            "points anywhere off the argmin-line also point to the target",
            f"{percent(field['right'], 1)} of the plane",
            1,
            field["right"] > MOST,
            f"further off, the loss pulls on u, which may be past the target; but {arrives}",
        ),
        page.Verdict(
            "Open question: how exact must the inner solution be for learning to succeed?",
            "open; “a generous tolerance”",
            f"one inner step at a time: {percent(single['warm']['share'], 1)} succeed from warm starts, "
            f"{percent(single['cold']['share'], 1)} from cold ones",
            config["problems"],
            "new",
            "with a cold start the target is missed by the inner error, with a warm one the inner error vanishes",
        ),
    )


def field(result: dict[str, Any], statement: str) -> Any:
    """The paper's Figure 1: score, argmin-line, target, learning, and where the gradient leads from any point."""
    import numpy as np
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    config, data = result["config"], result["field"][statement]
    target_e, largest = result["target_e"], config["largest_e"]
    e, u = np.meshgrid(np.linspace(0, largest, 200), np.linspace(0, math.pi, 200))
    r = u - e * np.sin(u) - config["M"]
    causes = np.array([[int(digit) for digit in row] for row in data["causes"]])
    centres = (np.arange(len(causes)) + 0.5) / len(causes)
    arrows = {name: np.array(values) for name, values in data["arrows"].items()}
    towards = arrows["de"] * (target_e - arrows["e"]) > 0
    arrow = {"marker": r"$\rightarrow$", "markersize": 13, "linestyle": ""}
    handles = [
        Line2D([], [], color="black", linewidth=2.2, label="argmin-line E(e)"),
        Line2D([], [], color=PALE, label="level sets of the score"),
        Line2D([], [], color="white", marker="o", markeredgecolor="black", linestyle="", label="learning, exact"),
        Line2D([], [], color=GREEN, marker="s", markersize=4, label="learning, one inner step"),
        Line2D([], [], color=BLUE, label="towards the target's e", **arrow),
        Line2D([], [], color=RED, label="away from it", **arrow),
    ]
    with rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 5.6))
        ax = fig.subplots()
        ax.contour(e, u, r**2, levels=[0.01, 0.1, 0.4, 1.0, 2.0], colors=PALE, linewidths=0.8)
        for code, colour, label in ((PAST, YELLOW, "why: u is past the target"), (MIXED, PURPLE, "why: ∂F/∂e changed sign")):
            if (causes == code).any():
                where = (largest * centres, math.pi * centres, causes == code)
                ax.contourf(*where, levels=[0.5, 1.5], colors=[colour], alpha=0.28)
                handles.append(Rectangle((0, 0), 1, 1, color=colour, alpha=0.28, linewidth=0, label=label))
        if statement == "argmin":
            curvature = (1 - e * np.cos(u)) ** 2 + r * e * np.sin(u)
            ax.contour(e, u, curvature, levels=[0], colors="black", linestyles="dotted", linewidths=1.4)
            handles.insert(4, Line2D([], [], color="black", linestyle="dotted", label="edge of negative curvature"))
        for mask, colour in ((towards, BLUE), (~towards, RED)):
            drawn = [arrows[name][mask] for name in ("e", "u", "de", "du")]
            ax.quiver(*drawn, color=colour, angles="uv", pivot="mid", scale=21, width=0.0055, headwidth=4, headlength=4.5)
        ax.contour(e, u, r, levels=[0], colors="black", linewidths=2.2)
        path = [[first, *data["path"][name]] for name, first in zip("eu", config["off_line"], strict=True)]
        ax.plot(*path, color="white", linewidth=3.5)
        ax.plot(*path, "s-", color=GREEN, markersize=4, linewidth=1.6)
        ax.plot(result["path"]["e"], result["path"]["u"], "o", color="white", markersize=5.5, markeredgecolor="black")
        ax.plot(target_e, config["target"], "*", color=YELLOW, markersize=19, markeredgecolor="black")
        ax.set(xlim=(0, largest), ylim=(0, math.pi), xlabel="eccentricity e", ylabel="eccentric anomaly u")
        ax.set_title(f"Differentiated as {'an argmin' if statement == 'argmin' else 'a root'}")
        fig.legend(handles=handles, loc="lower center", ncols=2, columnspacing=1.2, handletextpad=0.6)
        fig.tight_layout(rect=(0, 0.19, 1, 1))
    return fig


def errors(result: dict[str, Any]) -> Any:
    """What an inner error does to the derivative and to learning, in units of itself."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows = result["tolerances"] + result["inner_steps"]
    learned = [(row["cold"]["last_inner_error"], row["cold"]["final_over_inner"]) for row in rows]
    series = [("|E - target| after learning, cold start", "D-", RED, learned)]
    for label, style, colour, name in (
        ("error of dE/de, argmin", "o-", BLUE, "derivative_error_argmin"),
        ("error of dE/de, root", "^-", GREEN, "derivative_error_root"),
        ("inner error as reported", "s-", DARK, "reported"),
    ):
        series.append((label, style, colour, [(row["inner_error"], row["over_inner_error"][name]) for row in rows]))
    with rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 4.4))
        ax = fig.subplots()
        ax.axhline(1, color=PALE, linewidth=1, zorder=0)
        for label, style, colour, points in series:
            x, y = zip(*sorted(point for point in points if point[1] is not None), strict=True)
            ax.semilogx(x, y, style, color=colour, markersize=6, fillstyle="none", label=label)
        ax.set(xlabel="inner error |u - E|, median", ylabel="in units of the inner error, median", ylim=(0, 2))
        ax.set_title("What an inner error leads to")
        ax.grid(alpha=0.3)
        fig.legend(loc="lower center")
        fig.tight_layout(rect=(0, 0.2, 1, 1))
    return fig


def success(result: dict[str, Any]) -> Any:
    """The share of runs that reach the target, over the tolerance and over the number of inner steps."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    panels = (("tolerances", "tolerance", "inner tolerance"), ("inner_steps", "inner_steps", "inner steps"))
    with rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 4.4))
        axes = fig.subplots(1, 2, sharey=True)
        for ax, (rows, key, label) in zip(axes, panels, strict=True):
            for start, style, colour in (("cold", "o--", RED), ("warm", "s-", BLUE)):
                shares = [100 * row[start]["share"] for row in result[rows]]
                ax.semilogx(
                    [row[key] for row in result[rows]], shares, style, color=colour, markersize=6, label=f"{start} start"
                )
            ax.set_xlabel(label)
            ax.grid(alpha=0.3)
        axes[0].invert_xaxis()
        axes[0].set_ylabel("runs that reach the target, %")
        fig.suptitle("Does learning succeed?", fontsize=12)
        fig.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=2)
        fig.tight_layout(rect=(0, 0.07, 1, 1))
    return fig


def field_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Where the arrows lead, as shares of the points."""
    shells = ("closer to the line than 0.1", "0.1 to 0.3 from it", "0.3 to 1 from it", "further from it")

    def shares(field: dict[str, Any]) -> dict[str, float]:
        causes = field["wrong_by_cause"]
        return {
            "e-arrow towards the target's e: on the argmin-line": field["right_on_the_line"],
            **dict(zip(shells, field["right_by_distance"], strict=True)),
            "in the whole plane": field["right"],
            "away from it: u is past the target": causes["past"],
            "away from it: ∂F/∂e changed sign, J did not": causes["mixed"],
            "away from it: J changed sign, ∂F/∂e did not": causes["curvature"],
            "J < 0": field["negative_curvature"],
            "arrow (e, u) within 90° of the way to the target": field["acute"],
            "learning from there by single inner steps arrives": field["arrives"],
        }

    argmin, root = (shares(result["field"][statement]) for statement in ("argmin", "root"))
    return [
        {"share of the points": name, "argmin": percent(argmin[name], 1), "root": percent(root[name], 1)} for name in argmin
    ]


def inexact_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What inexact inner solutions do; medians over the runs."""
    table = []
    for row in result["tolerances"] + result["inner_steps"]:
        steps = row.get("inner_steps")
        cells = {
            "inner solve": f"to {row['tolerance']:g}" if steps is None else f"{steps} step{'s' * (steps > 1)}",
            "inner error": f"{row['inner_error']:.0e}",
            "as reported": f"{row['reported']:.0e}",
            "error of dE/de": f"{row['derivative_error_argmin']:.0e}",
            "as a root": f"{row['derivative_error_root']:.0e}",
        }
        for start in ("cold", "warm"):
            cells[f"{start}: reached"] = percent(row[start]["share"], 1)
            cells[f"{start}: steps"] = "-" if row[start]["steps"] is None else str(row[start]["steps"])
            cells[f"{start}: error"] = f"{row[start]['final_error']:.0e}"
        table.append(cells)
    return table


def _answer(result: dict[str, Any]) -> str:
    factors, reached = result["factors"], result["config"]["reached"]
    single = next(row for row in result["inner_steps"] if row["inner_steps"] == 1)
    return (
        f"With a cold start, learning ends where the inexact u meets the target, so that E misses it by the inner error "
        f"(median ratio {factors['final_over_inner']:.2f}): of the runs with an inner error below {reached:g} at the end, "
        f"{percent(factors['success_below'], 1)} came within {reached:g} of the target, of the others "
        f"{percent(factors['success_above'], 1)}. With a warm start the inner error vanishes as learning settles: one step of "
        f"gradient descent at a time was enough for {percent(single['warm']['share'], 1)} of the runs "
        f"({percent(single['cold']['share'], 1)} with a cold start)."
    )


def sensitivity(result: dict[str, Any]) -> str:
    """What an inner error does to the derivative, in a sentence or two."""
    measured, closed = result["factors"]["derivative_over_inner"], result["factors"]["closed_form"]
    return (
        f"The error of dE/de is proportional to the inner error, with a median factor of {measured['argmin']:.2f} for the "
        f"argmin and {measured['root']:.2f} for the root (closed form: {closed['argmin']:.2f} and {closed['root']:.2f}). The "
        "squared residual is twice as sensitive as the residual: ∂/∂u of dE/de at the solution is 2s for the argmin and s for "
        "the root, with s = (w cos E - e sin² E) / w² and w = 1 - e cos E."
    )


def write(records: list[Record], docs: Path) -> None:
    """docs/kepler.md and its figures."""
    page.save(figures(records), docs, "kepler")
    (docs / "kepler.md").write_text(text(records))


def text(records: list[Record]) -> str:
    """docs/kepler.md."""
    result = page.only_run(records)
    config, argmin, single = result["config"], result["field"]["argmin"], result["one_inner_step"]
    negative, blamed = (percent(part, 1) for part in (argmin["negative_curvature"], argmin["wrong_by_cause"]["curvature"]))
    failed, met = single["argmin"]["failed"], single["argmin"]["failed_and_met"]
    problems = config["problems"]
    return f"""# Kepler's equation

{page.origin("kepler", records)}

Kepler's equation M = E - e sin E gives E only implicitly. As a layer it is E(e) = argmin_u (u - e sin u - M)², and e is learned
so that E(e) meets a target. (½ (...)² would have the same gradients.)

```python
import torch
import torchdil as dil


def score(u, x):
    e, M = x
    return (u - e * torch.sin(u) - M) ** 2


layer = dil.ArgminLayer(score, init=lambda x: x[1])
e = torch.tensor([{config["first_e"]}], dtype=torch.float64, requires_grad=True)
M = torch.tensor([{config["M"]}], dtype=torch.float64)
for _ in range(50):
    E = layer((e, M))
    (gradient,) = torch.autograd.grad(0.5 * (E - {config["target"]}).square().sum(), e)
    e = (e - {config["learning_rate"]} * gradient).detach().requires_grad_()
assert abs(layer((e, M)).item() - {config["target"]}) < 1e-6
```

## The gradient field

The paper's Figure 1, for M = {config["M"]} and the target {config["target"]}. An arrow is what one step of learning does at a
point (e, u) that need not solve the inner problem: in e, minus the gradient that the theorem gives at that u; in u, one step of
gradient descent on the score. All arrows have the same length. White circles: e and E(e) over learning with exact inner
solutions. Green squares: learning with one inner step at a time, from a point off the line.

![The gradient field, argmin](kepler-field-argmin.svg)

![The gradient field, root](kepler-field-root.svg)

{markdown_table(field_rows(result))}

On the line every arrow points to the target, close to it nearly every one. Far away the gradient in e alone says little: the
loss pulls on u, which may be past the target once it is further from E(e) than the target is. Stated as an argmin, the field
has a second flaw: F = ∂f/∂u is r (1 - e cos u), up to a factor, with r the residual, and off the line the terms with r may turn
the signs of ∂F/∂e and of the Hessian J = (1 - e cos u)² + r e sin u. The Hessian is negative in
{negative} of the plane, but alone to blame in {blamed}:
where it is negative, ∂F/∂e has changed its sign too. Stated as a root, F = r, neither can happen. Still, the paper is right
that inexact points lead to the target, if not at once: the inner solver moves u to the line while e is learned.

## How exact must the inner solution be?

The paper leaves this open. Here: {problems} random problems, M in {_interval(config["M_range"])}, the e of the target and
the first e in {_interval(config["e_range"])}, {config["outer_steps"]} steps of gradient descent in e with step size
{config["learning_rate"]}, the inner solver started from u = M each time (cold) or from its last u (warm). With exact inner
solutions {percent(result["reference"]["share"], 1)} of the runs come within {config["reached"]:g} of the target, after
{result["reference"]["steps"]} steps (median).

**{_answer(result)}**

{sensitivity(result)}

![Errors in units of the inner error](kepler-errors.svg)

![Runs that reach the target](kepler-success.svg)

Upper rows: `GradientDescent(rtol=...)`, which takes the steps it needs. Lower rows:
`GradientDescent(step_size={config["step_size"]}, max_steps=...)`, which stops wherever it is. Inner error and error of dE/de:
at the first e. Reached, steps, error: of learning, judged by the exact E. Medians over the runs.

{markdown_table(inexact_rows(result))}

- The report's estimate of the inner error costs nothing and is, but for the crudest solutions, a tenth larger than the error,
  which is the margin that it keeps.
- A warm start that stops at a tolerance is no better than a cold one: it stops at the edge of the tolerance, where a cold start
  arrives with a last step that leads further. A fixed number of steps has no edge.
- With one inner step at a time from a warm start, {failed} of {problems} runs did not arrive when differentiated as an
  argmin; {met} of these met negative curvature on the way, where the gradient is huge or of the wrong sign. Differentiated as
  a root, {single["root"]["failed"]} did not arrive.

This is one equation with one unknown and a loss without other minima: a layer with a singular Hessian, or several solutions,
may ask for more.
"""


def _interval(bounds: list[float]) -> str:
    return f"[{bounds[0]}, {bounds[1]}]"
