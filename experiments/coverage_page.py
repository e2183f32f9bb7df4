"""The figure, the tables and the sentences of `experiments.coverage`, from its results alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from experiments import page
from experiments.coverage import FACTOR, LINEAR, PAIRS
from experiments.page import BLUE, GREEN, RED, markdown_table, percent
from experiments.runner import Record

KINDS = {"argmin": ("o", BLUE), "root": ("^", RED), "fixed point": ("s", GREEN)}
STYLE = page.STYLE | {"axes.titlesize": 11.5, "legend.fontsize": 11}
TITLES = {"value": "error of y", "adjoint": "relative error of g"}
BANDS = ("all", "CG", "MINRES", "GMRES", "NormalCG", "BiCGStab", "Dense")


def answer(records: list[Record]) -> str:
    """What was found, in a sentence or two."""
    return _answer(page.only_run(records))


def figures(records: list[Record]) -> dict[str, Any]:
    """The figure by its name."""
    return {"errors": figure(page.only_run(records))}


def section(records: list[Record]) -> page.Section:
    """The estimates on the page of all experiments."""
    result = page.only_run(records)
    body = page.paragraph(_answer(result)) + page.vector_graphic(figure(result)) + page.table(rows(result))
    return page.Section("How often is an estimated error right?", body)


def verdicts(records: list[Record]) -> tuple[page.Verdict, ...]:
    """The paper has no estimates."""
    result = page.only_run(records)
    found = {error: _find(result, error, "all", "all") for error in TITLES}
    return tuple(
        page.Verdict(
            f"Report: estimated {TITLES[error]}",
            "-",
            f"within a factor of {FACTOR:g} in {percent(one['within'], 1)}, "
            f"a bound in {percent(one['bounds'], 1)} of the problems",
            one["samples"],
            "new",
        )
        for error, one in found.items()
    )


def figure(result: dict[str, Any]) -> Any:
    """True against estimated errors: on the diagonal they agree, above it the estimate is a bound."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    table = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    with rc_context(STYLE):
        fig = Figure(figsize=(7.4, 4.2))
        for ax, error in zip(fig.subplots(1, 2), TITLES, strict=True):
            drawn = [row for row in table if None not in (row[f"{error}_true"], row[f"{error}_estimate"])]
            numbers = [row[f"{error}_{number}"] for row in drawn for number in ("true", "estimate")]
            ends = 0.3 * min(numbers), 3 * max(numbers)
            ax.fill_between(ends, [e / FACTOR for e in ends], [e * FACTOR for e in ends], color="#E6E6E6", linewidth=0)
            ax.plot(ends, ends, color="black", linewidth=1)
            for kind, (marker, colour) in KINDS.items():
                points = [(row[f"{error}_true"], row[f"{error}_estimate"]) for row in drawn if row["kind"] == kind]
                style = {"markersize": 3, "color": colour, "alpha": 0.5, "markeredgewidth": 0}
                ax.plot(*zip(*points, strict=True), linestyle="", marker=marker, label=kind, **style)
            ax.set(xscale="log", yscale="log", xlim=ends, ylim=ends, xlabel=f"true {TITLES[error]}", ylabel="estimated")
            found = _find(result, error, "all", "all")
            ax.set_title(
                f"{percent(found['within'], 1)} within a factor of 10,\n{percent(found['bounds'], 1)} above the diagonal"
            )
            ax.set_box_aspect(1)
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_major_locator(LogLocator(numticks=6))
        fig.legend(*fig.axes[0].get_legend_handles_labels(), loc="lower center", ncols=3, markerscale=2.5)
        fig.tight_layout(rect=(0, 0.07, 1, 1))
    return fig


def rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The table by backward solver."""
    table = [
        _row(TITLES[error], name, _find(result, error, "all" if name == "all" else "linear", name))
        for error in TITLES
        for name in BANDS
    ]
    table += [_row(f"{TITLES[error]}, by θ_min", "all", _find(result, error, "all", "all", "classic")) for error in TITLES]
    return table + [
        _row("of the gradient", f"all, {loss} loss", _find(result, "gradient", "loss", loss)) for loss in ("squared", "linear")
    ]


def forward_rows(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The table by kind of problem and by forward solver."""
    groups = [(by, entry["name"]) for by in ("kind", "forward") for entry in result["summary"] if _is(entry, "value", by)]
    return [_row(TITLES[error], name, _find(result, error, by, name), "of") for error in TITLES for by, name in groups]


def _answer(result: dict[str, Any]) -> str:
    value, adjoint = (_find(result, error, "all", "all") for error in TITLES)
    old_value, old_adjoint = (_find(result, error, "all", "all", "classic") for error in TITLES)
    return (
        f"The estimated error of y is within a factor of 10 of the true one in {percent(value['within'], 1)} of the problems "
        f"and bounds it in {percent(value['bounds'], 1)}; the estimated error of the adjoint g in "
        f"{percent(adjoint['within'], 1)} and {percent(adjoint['bounds'], 1)}. The textbook's estimates, which divide a "
        f"residual by the smallest Ritz value θ_min that was seen, are within that factor in {percent(old_value['within'], 1)} "
        f"and {percent(old_adjoint['within'], 1)}."
    )


def misses(result: dict[str, Any]) -> tuple[int, int]:
    """How many estimates of the error of y fall short by more than the factor; how many of these have a g that is off too."""
    table = [dict(zip(result["columns"], row, strict=True)) for row in result["rows"]]
    known = [row for row in table if None not in (row["value_true"], row["value_estimate"])]
    short = [row for row in known if FACTOR * row["value_estimate"] < row["value_true"]]
    return len(short), sum((row["adjoint_true"] or 0) > 0.1 for row in short)


def write(records: list[Record], docs: Path) -> None:
    """docs/quality.md and its figure."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure(page.only_run(records)).savefig(docs / "quality.svg", metadata={"Date": None})
    (docs / "quality.md").write_text(text(records))


def text(records: list[Record]) -> str:
    """docs/quality.md."""
    result = page.only_run(records)
    config, total = result["config"], len(result["rows"])
    (tight, loose), (least, most) = config["tolerances"], config["unknowns"]
    left = [_find(result, error, "all", "all")["left_out"] for error in TITLES]
    squared, linear = (percent(_find(result, "gradient", "loss", loss)["within"], 1) for loss in ("squared", "linear"))
    solvers = ", ".join(solver.__name__ for solver in LINEAR["argmin"])
    short, blind = misses(result)
    return f"""# Gradient quality in numbers

{page.origin("coverage", records)}

After a backward pass the report says how far y and the adjoint g may be from the exact ones, for each sample, at the price of
one inner product a step. Here: how often that is true.

**{_answer(result)}**

![True against estimated errors](quality.svg)

## What is estimated, and how

`report.adjoint_error` is about ‖g - g\\*‖ / ‖g\\*‖, where Jᵀ g\\* = v at the y that was found, without damping. The last
step of the backward solver went ℓ far and took the residual from ρ' to ρ, so that J⁻ᵀ stretches residuals by about
G = ℓ / (ρ' - ρ), and the error of g is about ρ G. (CG's residuals go up and down: there G is the largest ‖g - g_k‖ / ρ_k over
the last tenth of the steps, ρ_k being the residual that MINRES would have had.) A sudden fall of ρ means that the direction of
the step is done with: over three decades G gives way to the smallest ℓ / |ρ' - ρ| of any step. Damping ε adds 2 ε ‖g‖ times the
root of ‖g‖ / ‖v‖ and the largest of these. The sum is doubled, divided by ‖g‖ and cut off at 1: a g that is wrong altogether.

`report.value_error` is about ‖y - y\\*‖. To first order y - y\\* = J⁻¹F, and each product Jᵀd of the backward solve tells a
component of it, as (Jᵀd)ᵀ J⁻¹F = dᵀF. MINRES, GMRES and NormalCG take steps d whose Jᵀd are orthonormal, so that
‖J⁻¹F‖² >= Σ (dᵀF)²; BiCGStab is treated as if it did. The directions p of CG give the Galerkin solution Σ p (pᵀF) / (pᵀJp)
instead, whose length follows from scalars alone. What the steps tell nothing of is at least ‖F‖ / ‖J‖ long, and is added at a
right angle. The result is doubled, and multiplied by 1 + 2 `adjoint_error`: what the space lacks for v it lacks for F as well.

`Dense` has J and solves with it for both, and adds a tenth. Nothing costs a further product with J. With a preconditioner, and
for `Neumann` and `JacobianFree`, the estimates are None.

## The problems

{total} problems F(y) = A y + s Rᵀ(w ∘ tanh(R y)) - x = 0 of {least} to {most} unknowns, as argmins (A symmetric), roots and
fixed points. The condition number of A is between 1 and {_power(config["condition"])}, its spectrum uniform, uniform in the
logarithm, in three clusters or with a few outliers; J is scaled by 10⁻² to 10². The forward solver (Newton, gradient descent,
L-BFGS or Picard) and the backward solver ({solvers}; the first two for argmins only) stop
at tolerances from {_power(loose)} to {_power(tight)}, one in five after a few steps instead, wherever it is. One backward solve
in four is damped. The loss is ½‖y - t‖² or tᵀy. Each of the {len(PAIRS)} pairs of a kind of problem and a backward solver
occurs equally often, in batches of {config["samples"]} with the same settings. The estimates were tuned on other draws.

y\\* is refined to rounding, g\\* and the exact gradient come from dense solves. A problem is left out where the true error is
less than 100 times what rounding leaves: {left[0]} for y, {left[1]} for g, where the backward solve was exact.

## How good it is

Bounds: the share of problems whose true error is no larger than the estimate. Both: that, and the estimate no larger than 10
times the true error. The ratio is estimate / true error. BiCGStab has no θ_min.

{markdown_table(rows(result))}

- Of the {short} estimates of the error of y that fall short by more than a factor of 10, {blind} belong to a backward solve
  whose g is wrong by more than a tenth: it had stopped before it saw the directions in which J is small.
- The error of the gradient has a part from g and a part from y. The former is `adjoint_error`. The latter depends on how the
  loss and ∂F/∂θ curve, of which the layer knows nothing: `adjoint_error + value_error / ‖y‖`, in the last two rows, is within a
  factor of 10 in {squared} of the problems with the squared loss, but in {linear} of those with the linear
  one, where it is too large as a rule. So the report has no such number; `check_gradient` measures it.

{markdown_table(forward_rows(result))}
"""


_SHARES = ("bounds", "within 10", "both", "median ratio", "5 % to 95 %")


def _find(result: dict[str, Any], error: str, by: str, name: str, number: str = "estimate") -> dict[str, Any]:
    return next(entry for entry in result["summary"] if _is(entry, error, by, number) and entry["name"] == name)


def _is(entry: dict[str, Any], error: str, by: str, number: str = "estimate") -> bool:
    return (entry["error"], entry["by"], entry["number"]) == (error, by, number)


def _row(error: str, name: str, found: dict[str, Any], heading: str = "backward solver") -> dict[str, Any]:
    if found["quantiles"] is None:  # every error was at rounding level
        return {"estimate": error, heading: name, "problems": 0} | dict.fromkeys(_SHARES, "-")
    quantiles = found["quantiles"] or [math.nan] * 3  # nothing to count: in a small run
    low, median, high = (f"{q:.0f}" if q >= 100 else f"{q:.2g}" for q in quantiles)
    return {
        "estimate": error,
        heading: name,
        "problems": found["samples"],
        "bounds": percent(found["bounds"], 1),
        "within 10": percent(found["within"], 1),
        "both": percent(found["both"], 1),
        "median ratio": median,
        "5 % to 95 %": f"{low} to {high}",
    }


def _power(number: float) -> str:
    """A power of ten in words: 10⁻⁹."""
    digits = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    return "10" + f"{number:.0e}".split("e")[1].lstrip("+").replace("-0", "-").lstrip("0").translate(digits)
