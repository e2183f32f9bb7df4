"""The figures, tables and sentences of `experiments.lqr`, from its results alone."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments import page
from experiments.lqr import LOSSES, NUDGED, REFERENCE
from experiments.page import BLUE, DARK, GREEN, ORANGE, PALE, PURPLE, RED, SKY, STYLE, WIDTH, markdown_table
from experiments.runner import Record

SYSTEMS = ((BLUE, "-"), (RED, "--"), (GREEN, ":"))
METHODS = {
    "cg": ("IFT-CG", "s", PURPLE),
    "naive": ("IFT-naive", "^", ORANGE),
    "stein": ("IFT-Stein", "o", SKY),
}
NAMES = {REFERENCE: "analytic", **{name: look[0] for name, look in METHODS.items()}, NUDGED: "analytic, Â moved by a rounding"}
TITLES = {"model": "Model loss ‖A - Â‖", "imitation": "Imitation loss ‖u - û‖², whole trajectory"}
AGREED = 1e-8  # curves that are no further apart, relatively, are the same
CONVERGED = 1e-12  # an imitation loss that small is that of the solution
# Of verdicts: curves show the same learning if they are no further apart; a loss is low if it is below this share of its first.
SAME, LOW = 1e-6, {"imitation": 0.01, "model": 0.25}
PAPER = (1, False)


def answer(records: list[Record]) -> str:
    """Whether the methods agree and what is learned, in a few sentences."""
    return _answer(page.only_run(records))


def section(records: list[Record]) -> page.Section:
    """The regulator on the page of all experiments."""
    result = page.only_run(records)
    body = (
        page.paragraph(
            "The paper's appendix: the dynamics of a mass-spring-damper are learned from an expert's controls alone, "
            "through the Riccati equation of the optimal regulator."
        )
        + page.paragraph(_answer(result))
        + page.gallery([figure(result, loss, PAPER) for loss in TITLES])
        + page.table(rows(result))
    )
    return page.Section("Imitating a regulator", body)


def verdicts(records: list[Record]) -> tuple[page.Verdict, ...]:
    """What the paper says of the figure in its appendix, claim by claim."""
    result = page.only_run(records)
    groups = _groups(result, PAPER)
    ruler = max(_furthest(group, NUDGED) for group in groups)
    found = []
    for name, (label, _, _) in METHODS.items():
        apart = [run for group in groups for run in _by_run(group, name)]
        agreed = f"to {AGREED:g} in {sum(run < AGREED for run in apart)} runs; a rounding of the start alone makes {ruler:.0e}"
        known = name != "stein"
        verdict = "new" if not known else "reproduced" if max(apart) < SAME else "not reproduced"
        what = f"Appendix, regulator: {label} learns as the analytic gradient does"
        ours = f"curves agree to {max(apart):.0e}"
        found.append(page.Verdict(what, "the same" if known else "-", ours, len(apart), verdict, agreed))
    for loss, words in (("imitation", "a low value"), ("model", "declines")):
        runs = [run for group in groups for run in group["methods"][REFERENCE]["curves"][loss]]
        shares = [run[-1] / run[0] for run in runs]
        low = sum(share < LOW[loss] for share in shares)
        ours = f"to {statistics.fmean(run[-1] for run in runs):.1e} from {statistics.fmean(run[0] for run in runs):.1e}"
        verdict = "reproduced" if low == len(runs) else "not reproduced"
        why = f"below {LOW[loss]:g} of the first in {low} of {len(runs)} runs"
        found.append(page.Verdict(f"Appendix, regulator: {loss} loss in the end", words, ours, len(runs), verdict, why))
    return tuple(found)


def figures(records: list[Record]) -> dict[str, Any]:
    """All figures by name."""
    result = page.only_run(records)
    return {name: figure(result, loss, setting) for name, (loss, setting) in _drawn(result).items()}


def figure(result: dict[str, Any], loss: str, setting: tuple[int, bool]) -> Any:
    """The paper's figure for each c: mean and standard deviation over the runs, and how far the methods are apart."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    kept, groups = result["kept"], _groups(result, setting)
    gap = max(1, len(kept) // 15)
    with rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 6.6))
        axes = fig.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        for group, (colour, line) in zip(groups, SYSTEMS, strict=False):
            runs = group["methods"][REFERENCE]["curves"][loss]
            mean, low, high = zip(*(_band(values) for values in zip(*runs, strict=True)), strict=True)
            axes[0].fill_between(kept, low, high, color=colour, alpha=0.15, linewidth=0)
            axes[0].plot(kept, mean, line, color=colour, linewidth=1.6, label=f"c = {group['c']:g}")
            # The methods share their curves: each marks other points of them.
            for shift, (name, (_, marker, _)) in enumerate(METHODS.items()):
                own = zip(*group["methods"][name]["curves"][loss], strict=True)
                points = list(zip(kept, map(statistics.fmean, own), strict=True))[(shift + 1) * gap :: 3 * gap]
                axes[0].plot(*zip(*points, strict=True), marker, color=colour, markersize=5, fillstyle="none")
        looks = [*METHODS.items(), (NUDGED, (NAMES[NUDGED], "", DARK))]
        for name, (label, marker, colour) in looks:
            worst = [max(values) for values in zip(*(g["methods"][name]["apart"][loss] for g in groups), strict=True)]
            style = {"linestyle": "-" if marker else ":", "marker": marker, "markevery": max(1, len(worst) // 8)}
            axes[1].plot(kept[1:], worst, color=colour, fillstyle="none", markersize=6, label=label, **style)
        axes[1].axhline(AGREED, color=PALE, linewidth=1, zorder=0)
        axes[0].set(yscale="log", ylabel="loss", title=TITLES[loss])
        axes[1].set(yscale="log", ylim=(1e-17, 10), xlabel="iterations", ylabel="relative difference")
        axes[1].set_yticks([10.0**power for power in range(-16, 1, 4)])
        for ax in axes:
            ax.grid(alpha=0.3)
        marks = [
            Line2D([], [], color="black", marker=m, linestyle="", fillstyle="none", label=n) for n, m, _ in METHODS.values()
        ]
        handles, labels = axes[0].get_legend_handles_labels()
        axes[0].legend([*handles, *marks], [*labels, *(f"{m.get_label()}, mean" for m in marks)], ncols=2)
        fig.legend(*axes[1].get_legend_handles_labels(), loc="lower center", ncols=2, columnspacing=1.0, handletextpad=0.5)
        fig.tight_layout(rect=(0, 0.09, 1, 1))
    return fig


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The losses before and after learning, mean ± standard deviation over the runs, and how far the methods are apart."""
    table = []
    for group in result["groups"]:
        curves = group["methods"][REFERENCE]["curves"]
        cells = _setting(group)
        for loss in TITLES:
            for when, at in (("first", 0), ("last", -1)):
                cells[f"{loss}, {when}"] = _spread([run[at] for run in curves[loss]])
            cells[f"{loss}, lowest mean"] = f"{min(map(statistics.fmean, zip(*curves[loss], strict=True))):.2g}"
        table.append(cells)
    return table


def agreement_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """How far the methods are from the oracle with one start a step: at the same Â, and in their loss curves, run by run."""
    table = []
    for group in result["groups"]:
        if group["batch"] > 1:
            continue
        for name in (*METHODS, NUDGED):
            same = group["methods"][name].get("same_point")
            cells = _setting(group) | {"method": NAMES[name], "same Â: dK/dÂ": f"{same['derivative']:.0e}" if same else ""}
            table.append(cells | {f"run {i + 1}": f"{apart:.0e}" for i, apart in enumerate(_by_run(group, name))})
    return table


def converged_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """How many runs reach the solution, and how many are there in the end."""
    table = []
    for batch, amsgrad in result["config"]["settings"]:
        groups = _groups(result, (batch, amsgrad))
        runs = [run for group in groups for run in group["methods"][REFERENCE]["curves"]["imitation"]]
        apart = [max(_furthest(group, name) for group in groups) for name in (*METHODS, NUDGED)]
        cells: dict[str, Any] = {"setting": _name(batch, amsgrad), "runs": len(runs)}
        cells[f"imitation loss below {CONVERGED:g} on the way"] = sum(min(run) < CONVERGED for run in runs)
        cells["in the end"] = sum(run[-1] < CONVERGED for run in runs)
        names = (*(look[0] for look in METHODS.values()), "a rounding")
        table.append(cells | {f"{name} apart": f"{a:.0e}" for name, a in zip(names, apart, strict=True)})
    return table


def system_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The Riccati solver on many random Â."""
    return [
        {
            "c": f"{row['c']:g}",
            "random Â": f"{row['systems']:,}",
            "failed": row["failed"],
            "largest distance to SciPy, relative": f"{row['largest_error']:.0e}",
            "largest spectral radius of a closed loop": f"{row['largest_radius']:.2f}",
        }
        for row in result["systems"]
    ]


def _answer(result: dict[str, Any]) -> str:
    groups, config = _groups(result, PAPER), result["config"]
    same = _by_method(max(group["methods"][name]["same_point"]["derivative"] for group in result["groups"]) for name in METHODS)
    apart = _by_method(max(_furthest(group, name) for group in groups) for name in METHODS)
    ruler = max(_furthest(group, NUDGED) for group in groups)
    agreed = [max(run) < AGREED for group in groups for run in zip(*(_by_run(group, name) for name in METHODS), strict=True)]
    first, last = (_means(result, "model", at) for at in (0, -1))
    before, after = (_means(result, "imitation", at) for at in (0, -1))
    systems, failed = (sum(row[key] for row in result["systems"]) for key in ("systems", "failed"))
    trained = sum(method["failed_systems"] for group in result["groups"] for method in group["methods"].values())
    damping = ", ".join(f"{c:g}" for c in config["dampings"])
    return (
        f"At the same  the derivatives dK/d of the layer agree with the analytic formula to {same}, relatively. In the paper's "
        f"setting the loss curves agree to {apart} over {len(agreed)} runs of {config['iterations']} iterations, in "
        f"{sum(agreed)} of the runs to {AGREED:g}; the analytic gradient agrees with itself, from a first  that differs by one "
        f"rounding, to {ruler:.0e}. For c = {damping} the mean model loss goes from {first} to {last}, the mean imitation loss "
        f"from {before} to {after}. The Riccati equation could not be solved for {failed} of {systems:,} random Â, and for "
        f"{trained} of those met in learning."
    )


def write(records: list[Record], docs: Path) -> None:
    """docs/lqr.md and its figures."""
    page.save(figures(records), docs, "lqr")
    (docs / "lqr.md").write_text(text(records))


def text(records: list[Record]) -> str:
    """docs/lqr.md."""
    result = page.only_run(records)
    config = result["config"]
    more = [
        f"{_name(*setting)}:\n\n![{TITLES[loss]}, {_name(*setting)}](lqr-{name}.svg)"
        for name, (loss, setting) in _drawn(result).items()
        if setting != PAPER
    ]
    shown = "\n\n".join(more)
    return f"""# Imitating a regulator

{page.origin("lqr", records)}

The paper's appendix: the dynamics A of a mass-spring-damper are learned from the controls of an expert alone. The expert
applies u = -K x, the gain K being that of the optimal regulator for A, B, Q and R; the learner knows B, Q and R, has  in place
of A, and descends on ‖u - û‖² through the Riccati equation.

```python
import torch
import torchdil as dil

torch.manual_seed(0)
A = torch.tensor([[0.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)
B = torch.tensor([[0.0], [-1.0]], dtype=torch.float64)
Q, R = torch.eye(2, dtype=torch.float64), torch.tensor([[2.0]], dtype=torch.float64)


def controls(A, x, steps={config["ahead"]}):
    K = dil.control.dlqr(A, B, Q, R)
    u = []
    for _ in range(steps):
        u.append(-K @ x)
        x = A @ x + B @ u[-1]
    return torch.stack(u)


x = torch.tensor([0.0, 3.0], dtype=torch.float64)
learner = (A + torch.rand_like(A) - {config["perturbation"]}).requires_grad_()
optimiser = torch.optim.Adam([learner], lr={config["learning_rate"]:g})
for _ in range(100):
    optimiser.zero_grad()
    loss = (controls(A, x) - controls(learner, x)).square().sum()
    loss.backward()
    optimiser.step()
assert loss < 0.1
```

## Do the gradients agree?

**{_answer(result)}**

- *Setting*: m = k = 1, c = {", ".join(f"{c:g}" for c in config["dampings"])}; A is used as the matrix of a discrete system, as
  in the paper; Q = I, R = 2, x0 = (0, 3), float64. The expert's trajectory has {config["length"]} steps. Each step of Adam
  ({config["learning_rate"]:g}) takes one random start on it and compares the {config["ahead"]} controls from there with those
  that the learner's own closed loop  - BK̂ makes. {config["initialisations"]} first Â, A plus a number in
  [-{config["perturbation"]}, {config["perturbation"]}] for each entry.
- *Gradients*: *IFT-CG* is `dil.control.dlqr(A, B, Q, R, linear_solver=dil.CG())`, *IFT-naive* has `dil.Dense()`, *IFT-Stein* is
  the default. *Analytic*: S by SciPy and the gradient by a formula that is written out in the experiment, with a dense solve
  of W = M W Mᵀ + sym(G), M = A - BK. All have the same first  and the same starts.
- *Losses*: the model loss is ‖A - Â‖ (Frobenius). The imitation loss shown is that over the whole trajectory from x0: the
  expert comes to rest within a few steps, so that most starts carry next to no signal, and the loss of one start says little.
- *Relative difference*: |a - b| / max(a, b) of two losses at the same iteration, 1 at most. As a ruler, the analytic run is
  made again with every entry of the first  moved to the next number of float64.

![{TITLES["model"]}](lqr-model.svg)

![{TITLES["imitation"]}](lqr-imitation.svg)

Lines: the analytic gradient, mean over the runs; bands: the standard deviation about it, not below the smallest of the runs.
The methods lie on top of each other, so each of them marks other points of its own mean. Below: the largest relative difference
to the analytic curve up to that iteration, over all runs and all c; the line at {AGREED:g} is what was asked for.

## Why the curves part in the end

Not because of the gradients, which agree at the same Â: learning itself magnifies roundings, of the analytic gradient as of the
others. A likely reason is that Adam divides by the root of a second moment that forgets: where the gradients are small for
long, after many starts where the expert is at rest or close to the solution, its steps can grow to
{config["learning_rate"]:g} / 1e-8 times the gradient and leave the valley. With 16 starts a step all runs reach the solution,
and some leave it again; AMSGrad, which keeps the largest second moment, stays there. The losses of a run that has converged to
rounding are rounding, and their relative difference means nothing any more.

{markdown_table(converged_rows(result))}

{shown}

{markdown_table(rows(result))}

Analytic gradient; mean ± standard deviation over the runs, and the lowest mean on the way.

## Run by run

With one start a step, the largest relative differences to the analytic gradient: of the derivative dK/dÂ at the same Â, over
those met in learning (every {config["every"]} iterations), and of the model, imitation and sampled losses at any iteration.

{markdown_table(agreement_rows(result))}

## The Riccati equation

`dil.control.dare` on random  as above, beside SciPy's `solve_discrete_are`.

{markdown_table(system_rows(result))}
"""


def _drawn(result: dict[str, Any]) -> dict[str, tuple[str, tuple[int, bool]]]:
    """Loss and setting of each figure by its name: both losses as in the paper, of the other settings the imitation loss."""
    others = [(batch, amsgrad) for batch, amsgrad in result["config"]["settings"] if (batch, amsgrad) != PAPER]
    more = {f"imitation-{batch}{'-amsgrad' * amsgrad}": ("imitation", (batch, amsgrad)) for batch, amsgrad in others}
    return {loss: (loss, PAPER) for loss in TITLES} | more


def _groups(result: dict[str, Any], setting: tuple[int, bool]) -> list[dict[str, Any]]:
    return [group for group in result["groups"] if (group["batch"], group["amsgrad"]) == setting]


def _name(batch: int, amsgrad: bool) -> str:
    return f"{batch} start{'s' * (batch > 1)} a step, {'AMSGrad' if amsgrad else 'Adam'}"


def _setting(group: dict[str, Any]) -> dict[str, Any]:
    return {"setting": _name(group["batch"], group["amsgrad"]), "c": f"{group['c']:g}"}


def _by_method(numbers: Iterable[float]) -> str:
    return ", ".join(f"{number:.0e} ({look[0]})" for number, look in zip(numbers, METHODS.values(), strict=True))


def _band(values: tuple[float, ...]) -> tuple[float, float, float]:
    """The mean, and a standard deviation below and above it; not below the smallest, as the axis is logarithmic."""
    mean, deviation = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
    return mean, max(mean - deviation, min(values)), mean + deviation


def _by_run(group: dict[str, Any], name: str) -> list[float]:
    found = group["methods"][name]["furthest_apart"]
    return [max(values) for values in zip(*(found[loss] for loss in LOSSES), strict=True)]


def _furthest(group: dict[str, Any], name: str) -> float:
    return max(_by_run(group, name))


def _means(result: dict[str, Any], loss: str, at: int) -> str:
    """The mean over the runs for each c, with one start a step."""
    runs = [[run[at] for run in group["methods"][REFERENCE]["curves"][loss]] for group in _groups(result, PAPER)]
    return ", ".join(f"{statistics.fmean(values):.2g}" for values in runs)


def _spread(values: list[float]) -> str:
    return f"{statistics.fmean(values):.2g} ± {statistics.stdev(values):.1g}"
