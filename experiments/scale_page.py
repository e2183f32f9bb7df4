"""The figures, tables and sentences of `experiments.scale`, from its records alone."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.tables import markdown
from experiments import page
from experiments.page import BLUE, GREEN, STYLE, WIDTH
from experiments.runner import Record
from experiments.scale import SLOW, SWEEPS

TITLES = {
    "unknowns": "The output grows",
    "parameters": "The parameters grow",
    "both": "Both grow, ten parameters for each unknown",
}
METHODS = {"cg": ("CG", "o-"), "naive": ("naive", "s--")}
COLOURS = {"cpu": BLUE, "gpu": GREEN}
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _kind(record: Record) -> str:
    return "cpu" if record["device"] == "cpu" else "gpu"


def _device(kind: str) -> str:
    return {"cpu": "CPU, one thread", "gpu": "GPU"}[kind]


def _sweep(records: Sequence[Record], kind: str, sweep: str) -> list[dict[str, Any]]:
    """The cells of the first run of a sweep on a device; none if there is no such run."""
    found = (r["metrics"]["cells"] for r in records if _kind(r) == kind and r["config"]["sweep"] == sweep)
    return next(found, [])


def _solved(records: Sequence[Record], kind: str, sweep: str) -> list[dict[str, Any]]:
    """Those of these cells that CG had the memory for."""
    return [cell for cell in _sweep(records, kind, sweep) if _ran(cell["cg"])]


def _kinds(records: Sequence[Record]) -> list[str]:
    return [kind for kind in COLOURS if any(_kind(record) == kind for record in records)]


def _sweeps(records: Sequence[Record]) -> list[str]:
    there = {record["config"]["sweep"] for record in records}
    return [sweep for sweep in SWEEPS if sweep in there]


def _ran(one: dict[str, Any]) -> bool:
    return "seconds" in one


def figures(records: Sequence[Record]) -> dict[str, Any]:
    """A figure for each sweep."""
    return {sweep: figure(records, sweep) for sweep in _sweeps(records)}


def figure(records: Sequence[Record], sweep: str) -> Any:
    """Time and memory of the backward, CG and naive, over what grows."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    grows = "parameters" if sweep == "parameters" else "unknowns"
    with rc_context(STYLE):
        fig = Figure(figsize=(WIDTH, 6.6))
        axes = fig.subplots(2, 1, sharex=True)
        for kind in _kinds(records):
            cells = _sweep(records, kind, sweep)
            for method, (label, style) in METHODS.items():
                points = [(cell[grows], cell[method]) for cell in cells if _ran(cell[method])]
                if not points:
                    continue
                for ax, key in zip(axes, ("seconds", "peak"), strict=True):
                    looks = {"color": COLOURS[kind], "markersize": 5, "fillstyle": "none", "label": f"{label}, {_device(kind)}"}
                    ax.plot([x for x, _ in points], [one[key] for _, one in points], style, **looks)
                ended = next((cell["naive"] for cell in cells if not _ran(cell["naive"])), None)
                if method == "naive" and ended is not None:
                    at, place = points[-1], {"color": COLOURS[kind], "textcoords": "offset points", "fontsize": 9.5}
                    axes[0].annotate(ended["status"], (at[0], at[1]["seconds"]), (7, 4), ha="left", va="bottom", **place)
        for ax, label in zip(axes, ("seconds", "bytes beyond the forward's"), strict=True):
            ax.set(xscale="log", yscale="log", ylabel=label)
            ax.grid(alpha=0.3)
            low, high = ax.get_ylim()
            ax.set_ylim(low, 3 * high)
        axes[0].set_title(TITLES[sweep])
        axes[1].set_xlabel("parameters, D_θ" if sweep == "parameters" else "unknowns, D_y")
        fig.legend(*axes[0].get_legend_handles_labels(), loc="lower center", ncols=2)
        fig.tight_layout(rect=(0, 0.045 + 0.025 * len(_kinds(records)), 1, 1))
    return fig


def crossing(cells: Sequence[dict[str, Any]]) -> float | None:
    """D_y from which CG is faster than naive, between two sizes by straight lines in logarithms; None if not seen."""
    both = [(cell["unknowns"], cell["naive"]["seconds"] / cell["cg"]["seconds"]) for cell in cells if _ran(cell["naive"])]
    found = None
    for (n, ratio), (later_n, later) in pairwise(both):
        if ratio < 1 <= later:
            share = math.log(1 / ratio) / math.log(later / ratio)
            found = n * (later_n / n) ** share
    return found


def power(cells: Sequence[dict[str, Any]], method: str) -> float | None:
    """p of time ~ D_y^p over the last decade of the sizes that ran."""
    points = [(cell["unknowns"], cell[method]["seconds"]) for cell in cells if _ran(cell[method])]
    points = [(n, seconds) for n, seconds in points if 10 * n >= points[-1][0]]
    if len(points) < 2:
        return None
    x, y = zip(*((math.log(n), math.log(value)) for n, value in points), strict=True)
    return statistics.linear_regression(x, y).slope


def answer(records: Sequence[Record]) -> str:
    """Where CG overtakes naive, where naive ends, and how far CG goes."""
    return " ".join(filter(None, (_on(records, kind) for kind in _kinds(records))))


def _on(records: Sequence[Record], kind: str) -> str:
    cells = _solved(records, kind, "unknowns")
    if not cells:
        return ""
    common = [cell for cell in cells if _ran(cell["naive"])]
    last = common[-1]
    ended = next((cell for cell in cells if not _ran(cell["naive"])), None)
    ratio, memory = (_two_digits(last["naive"][key] / last["cg"][key]) for key in ("seconds", "peak"))
    ends = f"naive ends at {_power(ended['unknowns'])} ({_why(ended['naive'])})" if ended else "naive does not end"
    both = (_solved(records, kind, "both") or cells)[-1]
    most = max((cell for sweep in SWEEPS for cell in _solved(records, kind, sweep)), key=lambda cell: cell["parameters"])
    beside = f", naive {most['naive']['seconds']:.2g} s" if _ran(most["naive"]) else ""
    p = {method: power(cells, method) for method in METHODS}
    grown = ", ".join(f"{METHODS[m][0]}'s as D_y^{value:.1f}" for m, value in p.items() if value is not None)
    return (
        f"{_device(kind)}: {_begins(records, kind)}; at D_y = {_power(last['unknowns'])} with D_θ = "
        f"{_power(last['parameters'])} naive takes {ratio} times the time and {memory} times the memory, and {ends}. CG goes "
        f"on to D_y = {_power(both['unknowns'])} with D_θ = {_power(both['parameters'])} in {both['cg']['seconds']:.2g} s and "
        f"{_bytes(both['cg']['peak'])}; at D_θ = {_power(most['parameters'])} with D_y = {_power(most['unknowns'])} it takes "
        f"{most['cg']['seconds']:.2g} s{beside}. Over the last tenfold of D_y times grow: {grown}. Gradients by CG and naive "
        f"differ by at most {_worst(records, kind):.0e} (relative)."
    )


def _begins(records: Sequence[Record], kind: str) -> str:
    """From where CG is faster, in both sweeps of D_y."""
    cells = {sweep: _solved(records, kind, sweep) for sweep in ("unknowns", "both")}
    where = {"unknowns": f"D_θ about {_power(cells['unknowns'][-1]['parameters'])}", "both": "D_θ = 10 D_y"}
    found = {sweep: crossing(some) for sweep, some in cells.items()}
    seen = [f"{_two_digits(at)} ({where[sweep]})" for sweep, at in found.items() if at is not None]
    return f"CG is faster than naive from about D_y = {' and '.join(seen)} on" if seen else "CG and naive do not cross"


def _worst(records: Sequence[Record], kind: str) -> float:
    cells = (cell for sweep in SWEEPS for cell in _sweep(records, kind, sweep))
    return max(cell["agreement"] for cell in cells if cell["agreement"] is not None)


def _why(naive: dict[str, Any]) -> str:
    """Why naive ended, in words."""
    if naive["status"] == "too long":
        return f"too long, about {naive['expected_seconds']:.0f} s and {_bytes(naive['needs'])}"
    return f"out of memory, {'the Hessian alone has' if naive['tried'] else 'it would need'} {_bytes(naive['needs'])}"


def verdicts(records: Sequence[Record]) -> tuple[page.Verdict, ...]:
    """The headline, CG against naive, and what CG loses."""
    found = []
    for kind in _kinds(records):
        cells = _solved(records, kind, "unknowns")
        if not cells:
            continue
        runs = len({record["seed"] for record in records if _kind(record) == kind})
        both = (_solved(records, kind, "both") or cells)[-1]
        common = [cell for cell in cells if _ran(cell["naive"])]
        ratios = [cell["naive"]["seconds"] / cell["cg"]["seconds"] for cell in common]
        converged = all(cell["cg"]["status"] == "converged" for s in SWEEPS for cell in _sweep(records, kind, s))
        found += [
            page.Verdict(
                f"Scales to heavily parameterised layers with a large output, {_device(kind)}",
                "claimed, no sizes",
                f"D_y = {_power(both['unknowns'])}, D_θ = {_power(both['parameters'])}: {both['cg']['seconds']:.2g} s, "
                f"{_bytes(both['cg']['peak'])} a backward pass",
                runs,
                "reproduced" if converged else "not reproduced",
            ),
            page.Verdict(
                f"CG's time against naive's as D_y grows, {_device(kind)}",
                "CG is faster for large D_y",
                f"naive / CG: {_two_digits(ratios[0])} at D_y = {common[0]['unknowns']}, {_two_digits(ratios[-1])} at "
                f"{_power(common[-1]['unknowns'])}; {_begins(records, kind)}",
                runs,
                "reproduced" if ratios[-1] > max(1, ratios[0]) else "not reproduced",
            ),
            page.Verdict(
                f"CG loses nothing against naive, {_device(kind)}",
                "yes",
                f"gradients differ by at most {_worst(records, kind):.0e}, CG's rtol being {records[0]['config']['rtol']:g}",
                runs,
                "reproduced" if _worst(records, kind) < 10 * records[0]["config"]["rtol"] else "not reproduced",
            ),
        ]
    return tuple(found)


def rows(records: Sequence[Record], kind: str, sweep: str) -> list[dict[str, Any]]:
    """One sweep as a table."""
    table = []
    for cell in _sweep(records, kind, sweep):
        cg, naive = cell["cg"], cell["naive"]
        solved = _ran(cg)
        table.append(
            {
                "D_y": f"{cell['unknowns']:,}",
                "D_θ": f"{cell['parameters']:,}",
                "CG": _seconds(cg["seconds"]) if solved else cg["status"],
                "its memory": _bytes(cg["peak"]) if solved else "-",
                "its steps": cg["steps"] if solved else "-",
                "its residual": f"{cg['residual']:.0e}" if solved else "-",
                "naive": _seconds(naive["seconds"]) if _ran(naive) else naive["status"],
                "naive's memory": _bytes(naive["peak"]) if _ran(naive) else f"({_bytes(naive['needs'])})",
                "naive / CG": _two_digits(naive["seconds"] / cg["seconds"]) if _ran(naive) and solved else "-",
                "gradients differ by": "-" if cell["agreement"] is None else f"{cell['agreement']:.0e}",
            }
        )
    return table


def section(records: Sequence[Record]) -> page.Section:
    """Scale on the page of all experiments."""
    tables = "".join(
        page.paragraph(f"{_device(kind)}. {TITLES[sweep]}:") + page.table(rows(records, kind, sweep))
        for kind in _kinds(records)
        for sweep in SWEEPS
        if _sweep(records, kind, sweep)
    )
    body = page.paragraph(answer(records)) + page.gallery(list(figures(records).values())) + tables
    return page.Section("Scale: large outputs, many parameters", body)


def write(records: Sequence[Record], docs: Path) -> None:
    """docs/scale.md and its figures."""
    page.save(figures(records), docs, "scale")
    (docs / "scale.md").write_text(text(records))


def text(records: Sequence[Record]) -> str:
    """docs/scale.md."""
    config = records[0]["config"]
    memory = {_kind(record): record["metrics"]["memory"] for record in records}
    limits = " and ".join(f"{_bytes(memory[kind])} ({_device(kind)})" for kind in _kinds(records))
    shown = "\n\n".join(f"![{TITLES[name]}](scale-{name}.svg)" for name in _sweeps(records))
    blocks = "\n\n".join(
        f"## {_device(kind)}: {TITLES[sweep][0].lower()}{TITLES[sweep][1:]}\n\n{_table(rows(records, kind, sweep))}"
        for kind in _kinds(records)
        for sweep in SWEEPS
        if _sweep(records, kind, sweep)
    )
    return f"""# Scale

{page.origin("scale", records)} A run is one of three sweeps, all with one seed.

The paper's headline: implicit layers that are heavily parameterised and have a large output. Here: time and memory of one
backward pass, by CG (`linear_solver=dil.CG(rtol={config["rtol"]:g})`) and naive (`linear_solver=dil.Dense()`, which builds the
Hessian and factorises it), in float64.

**{answer(records)}**

{shown}

The layer is y = argmin_u ½‖u - x‖² + Σ softplus(W₂² softplus(W₁ u)), a convex energy network whose layers act on groups of ten
unknowns, with a shuffle of the hidden units between them; groups share weights where there are few parameters and have more
hidden units where there are many, so that D_y and D_θ are set independently and a product with the Hessian is O(D_y + D_θ).
The gradient is in x, W₁ and W₂. The solution is chosen, and x made to fit, so that the forward solve costs nothing.

*Time* is the median of at least {config["repeats"]} backward passes that take {config["timed"]:g} s together (fewer where they
take more than {SLOW:g} s), CG and naive in turns; processor time on a CPU, wall time on a GPU. *Memory* is the peak of what
another pass allocates beyond what the forward left, the gradient itself included. A size in two sweeps is measured once. Naive
is not tried where it would exceed the memory or take more than {config["seconds"]:g} s, judged from the two sizes before by the
power law through them; what it would need is in brackets. It may take {limits}. Where the output grows, a GPU tries it as long
as the Hessian alone would fit.

{blocks}
"""


def _two_digits(number: float) -> str:
    return f"{float(f'{number:.2g}'):,.15g}"


def _seconds(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def _bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"


def _power(number: int) -> str:
    """10⁴ for what is close to it, else the number."""
    exponent = round(math.log10(number))
    return f"10{str(exponent).translate(SUPERSCRIPTS)}" if abs(number / 10**exponent - 1) < 0.05 else f"{number:,}"


def _table(rows: list[dict[str, Any]]) -> str:
    return markdown(list(rows[0]), [list(row.values()) for row in rows])
