"""The figures, the tables and the verdicts of `experiments.runtime`, from its results alone."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

from benchmarks.tables import short
from experiments import page
from experiments.page import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, SKY, STYLE, WIDTH, markdown_table
from experiments.runner import Record
from experiments.runtime import HIDDEN, SLOW

LOOKS = {
    "default": ("Backward Euler, IFT", "o-", BLUE),
    "cg": ("Backward Euler, IFT-CG", "s-", GREEN),
    "naive": ("Backward Euler, IFT-naive", "^-", PURPLE),
    "adjoint": ("Backward Euler, adjoint", "v--", ORANGE),
    "dopri5": ("DOPRI5, adjoint", "D--", RED),
    "euler": ("Forward Euler, backprop", "x:", GREY),
    "euler_ift": ("Forward Euler, IFT", "+:", SKY),
}
FAMILIES = {
    "size": ("The state grows", "size of the state"),
    "weights": ("The weights grow", "h max|λ|, median"),
    "stiffness": ("A dissipative network gets stiffer", "h max|λ|, median"),
}
IFT = ("cg", "naive", "default")
# What the paper says of the times, and of whose.
COMPARED = (
    ("forward", "dopri5", "“still faster”"),
    ("backward", "dopri5", "“significant decrease” of the time"),
    ("backward", "adjoint", "“significant decrease” of the time"),
)
FLAT = 0.1  # a time ~ stiffness^p with |p| below this does not depend on it: ten times as stiff costs a quarter more at most


def answer(records: list[Record]) -> str:
    """The verdicts in words."""
    return _answer(page.only_run(records))


def figures(records: list[Record]) -> dict[str, Any]:
    """All figures by name."""
    return {family: figure(page.only_run(records), family) for family in FAMILIES}


def section(records: list[Record]) -> page.Section:
    """The times on the page of all experiments."""
    result = page.only_run(records)
    body = (
        page.paragraph(
            "The paper's Figure 2: forward and backward times of backward Euler beside DOPRI5 and forward Euler, mean ± "
            f"standard deviation over {result['config']['initialisations']} random networks with two hidden layers of "
            f"{HIDDEN}; h max|λ| says how stiff they are."
        )
        + page.paragraph(_answer(result))
        + page.gallery(list(figures(records).values()))
        + page.table(claims(result))
        + "".join(page.table(rows(result, family)) for family in FAMILIES)
    )
    return page.Section("How long does a neural ODE take?", body)


def verdicts(records: list[Record]) -> tuple[page.Verdict, ...]:
    """What the paper says of its Figure 2, claim by claim; our default is not in it."""
    result = page.only_run(records)
    runs = len(_distinct(result)) * result["config"]["initialisations"]
    found = []

    def claim(name: str, what: str, paper: str, ours: str, runs: int, holds: bool, why: str) -> None:
        paper, verdict = ("-", "new") if name == "default" else (paper, "reproduced" if holds else "not reproduced")
        found.append(page.Verdict(f"Figure 2, {LOOKS[name][0]}: {what}", paper, ours, runs, verdict, "" if holds else why))

    for name in IFT:
        for way, theirs, paper in COMPARED:
            times = ratios(result, way, name, theirs)
            if times:
                faster = sum(ratio > 1 for ratio in times)
                what, ours = f"{way} faster than {LOOKS[theirs][0]}", f"{_span(times)} times as fast"
                why = f"faster in {faster} of {len(times)} groups"
                claim(name, what, paper, ours, runs, faster == len(times), why)
        p = slope(result, "backward", name)
        if p is not None:
            ours, why = f"time ~ stiffness^{p:.2f}", f"asked for: |power| < {FLAT:g}"
            claim(name, "backward independent of stiffness", "“independence”", ours, _stiff(result), abs(p) < FLAT, why)
    return tuple(found)


def figure(result: dict[str, Any], family: str) -> Any:
    """The paper's Figure 2 for one family: mean ± standard deviation of both times."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    title, label = FAMILIES[family]
    groups = _groups(result, family)
    x = [group["state"] if family == "size" else statistics.median(group["stiffness"]) for group in groups]
    with rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 7.0))
        axes = fig.subplots(2, 1, sharex=True)
        for ax, way in zip(axes, ("forward", "backward"), strict=True):
            for number, (name, (legend, style, colour)) in enumerate(LOOKS.items()):
                points = [(at, group["methods"][name][way]) for at, group in zip(x, groups, strict=True)]
                drawn = [(at * 1.02 ** (number - 3), _mean(times), _deviation(times)) for at, times in points if times]
                if drawn:  # a little apart, so that the bars can be told apart
                    at, mean, deviation = zip(*drawn, strict=True)
                    low = [min(d, 0.999 * m) for m, d in zip(mean, deviation, strict=True)]
                    looks = {"markersize": 6, "capsize": 2, "linewidth": 1.3, "fillstyle": "none", "elinewidth": 1}
                    ax.errorbar(at, mean, (low, deviation), fmt=style, color=colour, label=legend, **looks)
                else:
                    ax.plot([], [], style, color=colour, fillstyle="none", label=legend)
            ax.set(xscale="log", yscale="log", ylabel=f"{way}, ms")
            ax.grid(alpha=0.3)
            means = [_mean(group["methods"][name][way]) for group in groups for name in LOOKS if _ran(group, name)]
            ax.set_ylim(0.5 * min(means), 3 * max(means))
        _show_failures(axes[0], x, groups)
        axes[1].set_xticks(x, [f"{at:g}" if family == "size" else f"{at:.2g}" for at in x])
        axes[1].minorticks_off()
        axes[0].set_title(title)
        axes[1].set_xlabel(label)
        fig.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=2, columnspacing=1.0, handletextpad=0.5)
        fig.tight_layout(rect=(0, 0.14, 1, 1))
    return fig


def _show_failures(ax: Any, x: list[float], groups: list[dict[str, Any]]) -> None:
    """How many runs failed, above each group, in the colour of the method."""
    for position, (at, group) in enumerate(zip(x, groups, strict=True)):
        counts = [(sum(group["methods"][name]["failed"].values()), colour) for name, (_, _, colour) in LOOKS.items()]
        side = "left" if position == 0 else "right" if position == len(x) - 1 else "center"
        for line, (count, colour) in enumerate((count, colour) for count, colour in counts if count):
            where = {"transform": ax.get_xaxis_transform(), "ha": side, "va": "top", "fontsize": 9.5}
            ax.text(at, 0.98 - 0.065 * line, f"{count} failed", color=colour, **where)


def rows(result: dict[str, Any], family: str) -> list[dict[str, Any]]:
    """One family as a table: mean ± standard deviation (median) in ms, failures, errors."""
    table = []
    for group in _groups(result, family):
        for name, (legend, _, _) in LOOKS.items():
            found = group["methods"][name]
            table.append(
                {
                    ("state" if family == "size" else "weights"): f"{group['state' if family == 'size' else 'scale']:g}",
                    "stiffness": f"{statistics.median(group['stiffness']):.2g}",
                    "method": legend,
                    "forward, ms": _times(found["forward"]),
                    "backward, ms": _times(found["backward"]),
                    "failed": _failures(found["failed"]),
                    "error": _typical(found["error"]),
                    "of the gradient": _typical(found["gradient_error"]),
                }
            )
    return table


def ratios(result: dict[str, Any], way: str, ours: str, theirs: str) -> list[float]:
    """The mean time of one method over that of another, in each group where both have one."""
    both = [group["methods"] for group in _distinct(result) if _ran(group, ours) and _ran(group, theirs)]
    return [_mean(methods[theirs][way]) / _mean(methods[ours][way]) for methods in both]


def slope(result: dict[str, Any], way: str, name: str) -> float | None:
    """p of time ~ stiffness^p, by least squares over all dissipative networks; None without two stiffnesses."""
    found = [group["methods"][name] for group in _groups(result, "stiffness") if _ran(group, name)]
    if len(found) < 2:
        return None
    logs = [(math.log(s), math.log(t)) for methods in found for s, t in zip(methods["stiffness"], methods[way], strict=True)]
    x, y = zip(*logs, strict=True)
    return statistics.linear_regression(x, y).slope


def claims(result: dict[str, Any]) -> list[dict[str, str]]:
    """What the paper says, whether it came out so, and the numbers."""
    table = []
    for way, theirs, _ in COMPARED:
        for name in IFT:
            claim = f"{LOOKS[name][0]}: {way} faster than {LOOKS[theirs][0]}"
            table.append(_faster(claim, ratios(result, way, name, theirs)))
    for name in (*IFT, "adjoint", "dopri5"):
        p = slope(result, "backward", name)
        verdict = "not measured" if p is None else "yes" if abs(p) < FLAT else "no"
        numbers = "-" if p is None else f"time ~ stiffness^{p:.2f}"
        table.append({"claim": f"{LOOKS[name][0]}: backward independent of stiffness", "holds": verdict, "measured": numbers})
    return table


def _answer(result: dict[str, Any]) -> str:
    forward, backward = (
        {name: ratios(result, way, name, "dopri5") for name in ("cg", "default")} for way in ("forward", "backward")
    )
    powers = ", ".join(f"{_power(slope(result, 'backward', name))} with {LOOKS[name][0]}" for name in (*IFT, "dopri5"))
    return (
        f"Forward, Backward Euler is {_span(forward['default'])} times as fast as DOPRI5, with the paper's CG "
        f"{_span(forward['cg'])} times (faster in {_wins(forward['default'])} and {_wins(forward['cg'])} groups). Backward, "
        f"it is {_span(backward['default'])} times as fast as DOPRI5's adjoint, with CG {_span(backward['cg'])} times. The "
        f"time of the backward pass grows with the stiffness to the power {powers}. {_counts(result)}"
    )


def write(records: list[Record], docs: Path) -> None:
    """docs/runtime.md and its figures."""
    page.save(figures(records), docs, "runtime")
    (docs / "runtime.md").write_text(text(records))


def text(records: list[Record]) -> str:
    """docs/runtime.md."""
    result = page.only_run(records)
    config = result["config"]
    worst = _worst_gradient(result)
    return f"""# Runtime of neural ODEs

{page.origin("runtime", records)}

The paper's Figure 2: how long a neural ODE takes, forward and backward. dy/dt = f(y), f a network with two hidden layers of
{HIDDEN} and tanh; {config["steps"]} steps of h = {config["step_size"]}, one trajectory, float64; the loss is the sum of squares
of all states. Mean ± standard deviation (and the median) over {config["initialisations"]} random networks; the time of a
network is the median of {config["repeats"]} calls after one to warm up, the methods taking turns (calls beyond {SLOW:g} s are
made once).

**{_answer(result)}**

{markdown_table(claims(result))}

"Faster" means in every group; "independent of stiffness" that |p| < {FLAT:g} in time ~ stiffness^p, by least squares over
the dissipative networks.

![The state grows](runtime-size.svg)

![The weights grow](runtime-weights.svg)

![A dissipative network gets stiffer](runtime-stiffness.svg)

## What is compared

```python
import torch
import torchdil as dil
from torch.nn import Linear, Sequential, Tanh

f = Sequential(Linear(2, {HIDDEN}), Tanh(), Linear({HIDDEN}, {HIDDEN}), Tanh(), Linear({HIDDEN}, 2))
t = torch.linspace(0, {config["steps"] * config["step_size"]:g}, {config["steps"] + 1})
y = dil.odeint(lambda t, y: f(y), torch.randn(1, 2), t, batch_dims=1)
y.square().sum().backward()
```

- *Backward Euler, IFT*: as above, the whole trajectory as one implicit problem. *IFT-CG*: `linear_solver=dil.CG()`, the
  paper's; on the normal equations, as J is not symmetric. *IFT-naive*: `linear_solver=dil.Dense()`. *adjoint*:
  `gradient="adjoint"`.
- *DOPRI5, adjoint*: torchdiffeq's `odeint_adjoint`. *Forward Euler*: torchdiffeq's `odeint` with `method="euler"` and
  backpropagation, and `dil.odeint` with the same method.
- *Equal acceptance*: rtol = atol = {config["tolerance"]:g} for all. A step of DOPRI5 is accepted if the root mean square of its
  estimated error over atol + rtol max(|y|) is at most 1; a step of Backward Euler has to pass the same test with its residual
  y_n - y_{{n-1}} - h f(y_n). That makes the solutions of the steps equally exact, not those of the ODE: Backward Euler keeps
  its error of order h, which the column *error* shows (largest distance to SciPy's LSODA at 1e-9, relative, median).
- *Stiffness*: h max|λ|, λ the eigenvalues of ∂f/∂y at the states of the trajectory. With the usual initialisation larger
  weights make the field expand as much as contract (and near hλ = 1 a step of Backward Euler need not have one solution); the
  third figure has dissipative networks, A₃ = -A₁ᵀ and A₂ = I but for a tenth at random, as stiff systems are.
- *Failed*: not finite, not solved, rejected by the test above, or longer than {config["seconds"]:g} s, forward or backward. The
  times are means over the others.
- *Error of the gradient*: the relative distance to the exact gradient of the method's own answer: for Backward and Forward
  Euler by the chain rule step by step with dense Jacobians, for DOPRI5 by backpropagation through it. {worst}

## {FAMILIES["size"][0]}

{markdown_table(rows(result, "size"))}

## {FAMILIES["weights"][0]}

State of {config["state"]}.

{markdown_table(rows(result, "weights"))}

## {FAMILIES["stiffness"][0]}

State of {config["state"]}.

{markdown_table(rows(result, "stiffness"))}
"""


def _groups(result: dict[str, Any], family: str) -> list[dict[str, Any]]:
    return [group for group in result["groups"] if group["family"] == family]


def _distinct(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups, without the one that "weights" has from "size"."""
    sizes = result["config"]["sizes"]
    return [g for g in result["groups"] if not (g["family"] == "weights" and g["scale"] == 1 and g["state"] in sizes)]


def _stiff(result: dict[str, Any]) -> int:
    """How many dissipative networks there are."""
    return len(_groups(result, "stiffness")) * result["config"]["initialisations"]


def _ran(group: dict[str, Any], name: str) -> bool:
    return bool(group["methods"][name]["forward"])


def _mean(times: list[float]) -> float:
    return statistics.fmean(times)


def _deviation(times: list[float]) -> float:
    return statistics.stdev(times) if len(times) > 1 else 0.0


def _times(times: list[float]) -> str:
    return f"{short(_mean(times))} ± {short(_deviation(times))} ({short(statistics.median(times))})" if times else "-"


def _typical(errors: list[float | None]) -> str:
    known = [error for error in errors if error is not None]
    return f"{statistics.median(known):.0e}" if known else "-"


def _failures(failed: dict[str, int]) -> str:
    return ", ".join(f"{count} ({why})" for why, count in failed.items()) or "0"


def _faster(claim: str, found: list[float]) -> dict[str, str]:
    if not found:
        return {"claim": claim, "holds": "not measured", "measured": "-"}
    wins = sum(ratio > 1 for ratio in found)
    verdict = "yes" if wins == len(found) else "no" if wins == 0 else f"in {wins} of {len(found)} groups"
    return {"claim": claim, "holds": verdict, "measured": f"{_span(found)} times"}


def _span(found: list[float]) -> str:
    return f"{min(found):.2g} to {max(found):.3g}" if found else "(not measured)"


def _wins(found: list[float]) -> str:
    return f"{sum(ratio > 1 for ratio in found)} of {len(found)}"


def _power(p: float | None) -> str:
    return "not measured" if p is None else f"{p:.2f}"


def _counts(result: dict[str, Any]) -> str:
    """How many runs failed, in a sentence."""
    groups = _distinct(result)
    total = len(groups) * result["config"]["initialisations"]
    counts = {name: sum(sum(group["methods"][name]["failed"].values()) for group in groups) for name in LOOKS}
    words = ", ".join(f"{count} ({LOOKS[name][0]})" for name, count in counts.items() if count)
    return f"Of {total} runs each, failed: {words}." if words else f"None of {total} runs of any method failed."


def _worst_gradient(result: dict[str, Any]) -> str:
    """What the adjoints make of the stiffest networks, in a sentence."""
    stiffest = _groups(result, "stiffness")[-1]["methods"]
    found = {name: [e for e in stiffest[name]["gradient_error"] if e is not None] for name in ("dopri5", "adjoint", "default")}
    words = ", ".join(f"{LOOKS[name][0]} {_percent(statistics.median(errors))}" for name, errors in found.items() if errors)
    return f"In the stiffest group it is, median: {words}." if words else ""


def _percent(share: float) -> str:
    return f"{100 * share:.2g}\N{NO-BREAK SPACE}%"
