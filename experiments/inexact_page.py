"""The figures, tables and sentences of `experiments.inexact`, from its records alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from experiments import page
from experiments.inexact_findings import (
    FACTOR,
    MARGIN,
    MOST,
    ROUNDING,
    estimates,
    harmful,
    losses,
    numbers,
    over_error,
    over_tolerance,
    problems,
    right,
    saved,
    share,
    spread,
    tolerated,
    unharmed,
    usual,
    value_error,
)
from experiments.inexact_problems import PROBLEMS, Control, Energy, Equilibrium, Kepler, NeuralODE
from experiments.page import BLUE, DARK, GREEN, GREY, ORANGE, PURPLE, RED, STYLE, WIDTH, markdown_table, percent
from experiments.runner import Record, finished

# The least that figures show.
SMALLEST = 1e-16
SOLVES = {"inner": "inner tolerance", "cg": "tolerance of CG"}
STOPPED = {"inner": "cold", "cg": "cg"}  # the training that shows what a solve tolerates
# The unknowns of one system: a sample, and of a neural ODE one step in time.
SYSTEMS = {
    "Kepler": Kepler.observations,
    "neural ODE": 2 * NeuralODE.spirals,
    "MPC": Control.horizon,
    "DEQ": Equilibrium.units,
    "energy": Energy.unknowns,
}
# Where J is not symmetric, and CG solves the normal equations.
NORMAL = ("neural ODE", "DEQ")
CURVES = {
    "solve_error": ("error of the solve, true", "o-", BLUE),
    "solve_estimate": ("the same, as reported", "s--", ORANGE),
    "gradient_error": ("error of the gradient", "^-", GREEN),
    "one_minus_cosine": ("1 - cosine of the gradient", "D:", PURPLE),
}
TRAININGS = {
    "cold": ("inner", "loss, cold start", "o-", RED),
    "warm": ("inner", "loss, warm start", "s--", DARK),
    "cg": ("cg", "loss, CG stopped", "D-", RED),
}


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """One for each problem."""
    return {name.replace(" ", "-").lower(): figure(name, some) for name, some in problems(records).items()}


def figure(name: str, records: Sequence[Record]) -> Any:
    """Errors (above) and the loss after training (below) over the two tolerances; medians and quartiles."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

    with rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 6.6))
        axes = fig.subplots(2, 2, sharey="row", height_ratios=(1.4, 1))
        for (above, below), (solve, label) in zip(axes.T, SOLVES.items(), strict=True):
            for quantity, (text, style, colour) in CURVES.items():
                _curve(above, numbers(records, solve, quantity), text, style, colour)
            for training, (of, text, style, colour) in TRAININGS.items():
                if of == solve:
                    _curve(below, losses(records, training), text, style, colour)
            below.axhspan(1, MARGIN, color=GREY, alpha=0.4, linewidth=0)
            above.set(xscale="log", yscale="log", xlim=(3, 3e-13), ylim=(SMALLEST, 30))
            below.set(xscale="log", yscale="log", xlim=(0.5, 6e-4), ylim=(0.93, 6), xlabel=label)
            above.xaxis.set_major_locator(FixedLocator([1, 1e-4, 1e-8, 1e-12]))
            above.yaxis.set_major_locator(LogLocator(numticks=6))
            below.xaxis.set_major_locator(FixedLocator([1e-1, 1e-2, 1e-3]))
            below.yaxis.set_major_locator(FixedLocator([1, 1.5, 2, 3, 5]))
            below.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            for axis in (above.xaxis, above.yaxis, below.xaxis, below.yaxis):
                axis.set_minor_locator(NullLocator())
            for ax in (above, below):
                ax.grid(alpha=0.3)
        axes[0, 0].set(title="y inexact", ylabel="relative error")
        axes[0, 1].set(title="backward inexact")
        axes[1, 0].set_ylabel("final loss / exact")
        fig.suptitle(_title(name), fontsize=12)
        handles = [handle for ax in (*axes[:, 0], axes[1, 1]) for handle in ax.get_legend_handles_labels()[0]]
        fig.legend(handles=handles, loc="lower center", ncols=2, columnspacing=1.0, handletextpad=0.5)
        fig.tight_layout(rect=(0, 0.14, 1, 1.01))
    return fig


def rows(records: Sequence[Record]) -> list[dict[str, str]]:
    """What each problem tolerates, and what the errors are then."""
    table = []
    for name, some in problems(records).items():
        metrics, size = some[0]["metrics"], SYSTEMS[name]
        table.append(
            {
                "problem": name,
                "systems x unknowns": f"{metrics['unknowns'] // size} x {size}",
                "inner solver": metrics["inner_solver"],
                "inner tolerance": _loosest(some, "cold"),
                "error of y then": _error(some, "inner", "solve_error", tolerated(some, "cold")),
                "of the gradient": _error(some, "inner", "gradient_error", tolerated(some, "cold")),
                "steps saved": percent(saved(some, "inner", tolerated(some, "cold"))),
                "from warm starts": _loosest(some, "warm"),
                "tolerance of CG": _loosest(some, "cg"),
                "of the gradient then": _error(some, "cg", "gradient_error", tolerated(some, "cg")),
                "CG steps saved": percent(saved(some, "cg", tolerated(some, "cg"))),
                "gradient / y": f"{over_error(some):.2g}",
                "gradient / CG": f"{over_tolerance(some):.1g}",
            }
        )
    return table


def estimate_rows(records: Sequence[Record]) -> list[dict[str, str]]:
    """How right the reported errors are."""
    table = []
    for name, some in problems(records).items():
        for solve, of in (("inner", "error of y"), ("cg", "error of g")):
            ratios = estimates(some, solve)
            low, middle, high = spread(ratios) if ratios else (None, None, None)
            cells = ["-" if value is None else f"{value:.2f}" for value in (low, middle, high)]
            table.append(
                {
                    "problem": name,
                    "estimate of": of,
                    "over the true one: median": cells[1],
                    "quartiles": "-" if low is None else f"{cells[0]} to {cells[2]}",
                    f"within a factor of {FACTOR:g}": percent(share(ratios, right)),
                    "is a bound": percent(share(ratios, lambda ratio: ratio >= 1)),
                    "cases": f"{len(ratios)}",
                }
            )
    return table


def answer(records: Sequence[Record]) -> str:
    """How inexact the solves may be, in a few sentences."""
    by_name = problems(records)
    config = next(iter(by_name.values()))[0]["config"]

    def each(value: Callable[[list[Record]], str]) -> str:
        return ", ".join(f"{value(some)} ({name})" for name, some in by_name.items())

    all_ratios = {solve: [r for some in by_name.values() for r in estimates(some, solve)] for solve in SOLVES}
    shares = {solve: percent(share(ratios, right)) for solve, ratios in all_ratios.items()}
    return (
        f"With {percent(config['noise'])} noise in the data, training is unharmed (at least {percent(MOST)} of the models end "
        f"within {percent(MARGIN - 1)} of the loss of exact solves) as long as the inner solver stops at a relative tolerance "
        f"of {each(lambda some: _loosest(some, 'cold'))} or below; y is then off by "
        f"{each(lambda some: _error(some, 'inner', 'solve_error', tolerated(some, 'cold')))}. CG may stop at "
        f"{each(lambda some: _loosest(some, 'cg'))}; {_sizes(by_name)}. A gradient "
        "that starts in the right direction is not enough: at the next looser inner tolerance, which does harm, 1 - cosine is "
        f"{each(lambda some: _error(some, 'inner', 'one_minus_cosine', harmful(some, 'cold')))}. The gradient's relative error "
        "is about "
        f"{each(lambda some: f'{over_error(some):.2g}')} times that of y, and "
        f"{each(lambda some: f'{over_tolerance(some):.1g}')} times the tolerance of CG. The report knows: its estimate of y's "
        f"error, with a direct backward solve, is within a factor of {FACTOR:g} of the true one in {shares['inner']} of the "
        f"cases, that of the adjoint's, by CG, in {shares['cg']}.{_for_all(by_name)}"
    )


def _for_all(by_name: dict[str, list[Record]]) -> str:
    """The tolerances that no problem minds, if there are any."""
    found = {solve: [tolerated(some, training) for some in by_name.values()] for solve, training in STOPPED.items()}
    common = {solve: min(rtol or 0.0 for rtol in tolerances) for solve, tolerances in found.items()}
    if not all(common.values()):
        return ""
    shares = {solve: [saved(some, solve, rtol) or 0.0 for some in by_name.values()] for solve, rtol in common.items()}
    spans = {solve: f"{percent(min(some))} to {percent(max(some))}" for solve, some in shares.items()}
    kept = {
        solve: percent(min(unharmed(some, STOPPED[solve], rtol) for some in by_name.values())) for solve, rtol in common.items()
    }
    first = next(iter(by_name.values()))
    return (
        f" As a rule: an inner tolerance of {_tolerance(common['inner'])} with an exact backward solve and, separately, one of "
        f"{_tolerance(common['cg'])} for CG with an exact y did no harm to at least {kept['inner']} and {kept['cg']} of the "
        f"models of each problem, and saved {spans['inner']} of the inner solver's steps and {spans['cg']} of CG's, "
        f"beside a tolerance of {_tolerance(usual(first))}. Both at once were not tried."
    )


def _sizes(by_name: dict[str, list[Record]]) -> str:
    """What is to know of the tolerances of CG."""
    sizes = [SYSTEMS[name] for name in by_name]
    normal = " and ".join(name for name in NORMAL if name in by_name)
    equations = f", and for {normal} of CG on the normal equations" if normal else ""
    return f"these are tolerances for small systems, of {min(sizes)} to {max(sizes)} unknowns{equations}"


def _harm(by_name: dict[str, list[Record]]) -> str:
    """Between which errors of y harm begins, over the problems; nothing if no tolerance did harm."""
    pairs = [[value_error(some, find(some, "cold")) for find in (tolerated, harmful)] for some in by_name.values()]
    fine, harm = ([error for error in side if error is not None] for side in zip(*pairs, strict=True))
    if not fine or not harm:
        return ""
    noise = next(iter(by_name.values()))[0]["config"]["noise"]
    return (
        f" Over the problems, the largest errors of y without harm were {_span(fine)}, and harm began at errors of y of "
        f"{_span(harm)}; the noise is {percent(noise)}."
    )


def _span(shares: Sequence[float]) -> str:
    return " to ".join(f"{100 * share:.1g}\N{NO-BREAK SPACE}%" for share in (min(shares), max(shares)))


def section(records: Sequence[Record]) -> page.Section:
    """The experiment on the page of all."""
    body = (
        page.paragraph(_question(records))
        + page.gallery(list(figures(records).values()))
        + page.table(rows(records))
        + page.table(estimate_rows(records))
        + page.paragraph("Answer. " + answer(records))
    )
    return page.Section("How inexact may the solves be?", body)


def verdicts(records: Sequence[Record]) -> tuple[page.Verdict, ...]:
    """The open question, problem by problem."""
    return tuple(
        page.Verdict(
            f"Open question: how inexact may the solves be? {_title(name)}",
            "open; “a generous tolerance”",
            f"inner {_loosest(some, 'cold')}, CG {_loosest(some, 'cg')}",
            len(some),
            "new",
            f"loosest relative tolerances, each with the other solve exact, that leave the final loss of at least "
            f"{percent(MOST)} of the models within {percent(MARGIN - 1)}; systems of {SYSTEMS[name]} unknowns",
        )
        for name, some in problems(records).items()
    )


def write(records: Sequence[Record], docs: Path) -> None:
    """docs/inexact.md and its figures."""
    page.save(figures(records), docs, "inexact")
    (docs / "inexact.md").write_text(text(records))


def text(records: Sequence[Record]) -> str:
    """docs/inexact.md."""
    by_name = problems(records)
    about = "\n".join(f"- **{name}**: {_first_line(PROBLEMS[name])}" for name in by_name)
    able = {name: some for name, some in by_name.items() if losses(some, "warm")}
    warm, cold = (
        ", ".join(f"{_loosest(some, training)} ({name})" for name, some in able.items()) for training in ("warm", "cold")
    )
    shown = "\n\n".join(f"![{_title(name)}](inexact-{name.replace(' ', '-').lower()}.svg)" for name in by_name)
    return f"""# How inexact may the solves be?

{page.origin("inexact", finished(records))}

{_question(records)}

{about}

## Errors and training

Above: relative errors at random parameters. Blue is the error of what was solved inexactly (left y, right the adjoint g),
orange what the report says of it, green the error of the gradient with respect to all parameters. Below: the loss after
training with these solves, judged with exact ones, over the loss after training with exact solves; grey: within
{percent(MARGIN - 1)}. Medians and quartiles.

{shown}

## What is tolerated

The loosest tolerances that leave training unharmed, the errors (medians, at the first parameters) and the share of the solver's
steps saved at these, compared with a tolerance of {_tolerance(usual(records))}. "systems x unknowns": of one model, each
system solved by itself (of a neural ODE one step in time after the other). "gradient / y": the relative error of the gradient
over that of y; "gradient / CG": over the tolerance of CG.

{markdown_table(rows(records))}

- The error of an inexact y is part of what the loss compares with the data, and does not vanish as the fit gets better: it
  displaces the optimum.{_harm(by_name)}
- An inexact backward solve leaves the loss exact, and only the way down is a little off: a looser tolerance will do.
- From warm starts an inner tolerance of {warm} is harmless; from cold ones, of the same problems, {cold}. A warm start is
  nearer to the solution, but a solver that stops at a tolerance stops at its edge, from wherever it came.

## Does the report know?

Estimated over true relative errors, of all models and tolerances with a true error above {_tolerance(ROUNDING)}. The error of y
is estimated with a direct backward solve, that of g is of a backward solve by CG. There is no estimate where CG takes no step
at all, and none for the backward solve of a neural ODE by CG, one step after another.

{markdown_table(estimate_rows(records))}

## Answer

{answer(records)}
"""


def _question(records: Sequence[Record]) -> str:
    by_name = problems(records)
    some = next(iter(by_name.values()))
    config = some[0]["config"]
    return (
        "The paper leaves open up to which error of the argmin a layer still learns. Here the forward solve is stopped at a "
        "tolerance, with an exact backward solve, or CG is stopped at one in the backward solve, with an exact y; in "
        f"{len(by_name)} learning problems with noisy data, {len(some)} run{'s' if len(some) > 1 else ''} of "
        f"{config['models']} models each, trained by {config['steps']} steps of Adam. Exact means "
        "solved to rounding, and a dense factorisation."
    )


def _curve(ax: Any, found: dict[float, list[float]], label: str, style: str, colour: str) -> None:
    shown = {rtol: spread(values) for rtol, values in sorted(found.items()) if median(values) > SMALLEST}
    if not shown:
        return
    low, middle, high = zip(*shown.values(), strict=True)
    ax.fill_between(list(shown), [max(value, SMALLEST) for value in low], high, color=colour, alpha=0.2, linewidth=0)
    hollow = {"fillstyle": "none", "markersize": 7} if "s" in style else {"markersize": 4}
    ax.plot(list(shown), middle, style, color=colour, linewidth=1.5, label=label, **hollow)


def _loosest(records: Sequence[Record], training: str) -> str:
    tried, found = losses(records, training), tolerated(records, training)
    if found is None:
        return "none that was tried" if tried else "-"
    return f"{_tolerance(found)} or more" if found == max(tried) else _tolerance(found)


def _error(records: Sequence[Record], solve: str, name: str, tolerance: float | None) -> str:
    found = numbers(records, solve, name)
    return "-" if tolerance not in found else _tolerance(median(found[tolerance]))


def _title(name: str) -> str:
    return name[0].upper() + name[1:]


def _first_line(kind: Callable[..., Any]) -> str:
    return (kind.__doc__ or "").splitlines()[0]


def _tolerance(value: float) -> str:
    return f"{value:.1g}" if value >= 1e-3 else f"{value:.0e}".replace("e-0", "e-")
