"""The table, the verdict and the sentences of `experiments.faults`, from its records alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.tables import markdown
from experiments import page
from experiments.runner import Record


def answer(records: list[Record]) -> str:
    """How many faults were found and named, in a sentence."""
    rows = page.only_run(records)["rows"]
    return f"check_gradient blamed the right part in {_named(rows)} of {len(rows)} layers with a fault each."


def figures(records: list[Record]) -> dict[str, Any]:
    """None."""
    return {}


def section(records: list[Record]) -> page.Section:
    """The faults on the page of all experiments."""
    body = (
        page.paragraph("What check_gradient says of layers with a fault each: named is what it blames.")
        + page.paragraph(answer(records))
        + page.table(page.only_run(records)["rows"])
    )
    return page.Section("Whose fault is a wrong gradient?", body)


def verdicts(records: list[Record]) -> tuple[page.Verdict, ...]:
    """The paper has no such check."""
    rows = page.only_run(records)["rows"]
    what = "Check: the part of a layer that makes its gradient wrong is named"
    return (page.Verdict(what, "-", f"{_named(rows)} of {len(rows)} planted faults", len(rows), "new"),)


def write(records: list[Record], docs: Path) -> None:
    """docs/faults.md."""
    (docs / "faults.md").write_text(text(records))


def text(records: list[Record]) -> str:
    """docs/faults.md."""
    cells = [
        [row["planted"], row["to blame"], row["named"] or "nothing", _error(row["error"]), row["advice"]]
        for row in page.only_run(records)["rows"]
    ]
    return f"""# Whose fault is a wrong gradient?

{page.origin("faults", records)}

`dil.check_gradient(layer, x)` compares the gradient with finite differences of the layer, and where they differ says which part
is to blame: the forward solve, the backward solve or the function. Here: layers with one fault each.

**{answer(records)}**

{markdown(["planted", "to blame", "named", "error of the gradient", "advice"], cells)}
"""


def _named(rows: list[dict[str, Any]]) -> int:
    return sum(row["named"] == row["to blame"] for row in rows)


def _error(error: float | None) -> str:
    return "not finite" if error is None else f"{error:.0e}"
