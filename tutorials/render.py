"""From a script in cells to a page, its figures and a notebook.

Cells begin with `# %%` (code) or `# %% [markdown]` (text). They are run one
after another in one namespace; what a cell prints, and the figures that it
shows by `plt.show()`, stand below it. Page and notebook are made from the same
cells.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib import pyplot as plt
from PIL import Image

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "docs" / "tutorials"
# In the order of the pages.
SCRIPTS = (
    "kepler",
    "robertson",
    "digits",
    "hyperparameters",
    "mpc",
    "lqr",
    "denoising",
)
MARK = "# %%"
DPI, COLOURS = 120, 64
# Okabe and Ito's colours, which the colour-blind tell apart.
STYLE = {
    "axes.prop_cycle": matplotlib.cycler(
        color=["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9"]
    ),
    "axes.grid": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


@dataclass
class Cell:
    """A cell, and what came of it.

    Attributes:
        source: code, or text without its comment signs.
        code: which of the two it is.
        line: where in the script its source begins, from 0.
        printed: what it printed.
        figures: (title, PNG) of each that it showed.
    """

    source: str
    code: bool
    line: int
    printed: str = ""
    figures: list[tuple[str, bytes]] = field(default_factory=list)


def cells(text: str) -> list[Cell]:
    """The cells of a script."""
    found: list[Cell] = []
    lines = text.splitlines()
    starts = [
        number for number, line in enumerate(lines) if line.startswith(MARK)
    ]
    if not starts or starts[0] != 0:
        raise ValueError(
            f"A tutorial must begin with a cell, that is with {MARK!r}."
        )
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        code = "[markdown]" not in lines[start]
        body = lines[start + 1 : end]
        if not code:
            body = [line.removeprefix("#").removeprefix(" ") for line in body]
        empty = next((i for i, line in enumerate(body) if line), 0)
        found.append(Cell("\n".join(body).strip("\n"), code, start + 1 + empty))
    return found


def run(name: str) -> list[Cell]:
    """The cells of a tutorial, run."""
    path = ROOT / "tutorials" / f"{name}.py"
    done = cells(path.read_text())
    namespace: dict[str, Any] = {"__name__": "__main__"}
    dtype, show = torch.get_default_dtype(), plt.show
    plt.switch_backend("agg")
    try:
        with matplotlib.rc_context(STYLE):
            for cell in done:
                if cell.code:
                    _run(cell, path, namespace)
    finally:
        plt.show = show
        plt.close("all")
        torch.set_default_dtype(dtype)
    return done


def _run(cell: Cell, path: Path, namespace: dict[str, Any]) -> None:
    """Run a cell and note what it prints and shows."""

    def show() -> None:
        open_now = [plt.figure(number) for number in plt.get_fignums()]
        cell.figures.extend(_png(figure) for figure in open_now)

    plt.show = show
    # Empty lines before it, so that an error names the line of the script.
    code = compile("\n" * cell.line + cell.source, str(path), "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    cell.printed = printed.getvalue()


def _png(figure: Any) -> tuple[str, bytes]:
    """The title of a figure and a small file of it; the figure is closed."""
    drawn, small = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=DPI)
    plt.close(figure)
    with Image.open(drawn) as image:
        few = image.convert("P", palette=Image.Palette.ADAPTIVE, colors=COLOURS)
    few.save(small, "png", optimize=True)
    titles = [
        figure.get_suptitle(),
        *(axis.get_title() for axis in figure.axes),
    ]
    return next(title for title in titles if title), small.getvalue()


def page(name: str, done: list[Cell]) -> str:
    """The tutorial as Markdown."""
    parts, number = [], 0
    for cell in done:
        parts.append(
            f"```python\n{cell.source}\n```" if cell.code else cell.source
        )
        if cell is done[0]:
            command = f"python tutorials/{name}.py"
            parts.append(
                f"Run it: `{command}`, or as a [notebook]({name}.ipynb)."
            )
        if cell.printed.strip():
            parts.append(f"```text\n{cell.printed.rstrip()}\n```")
        for title, _ in cell.figures:
            number += 1
            parts.append(f"![{title}]({name}-{number}.png)")
    return "\n\n".join(parts) + "\n"


def notebook(done: list[Cell]) -> dict[str, Any]:
    """The tutorial as a notebook with its output, format 4.5."""
    found: list[dict[str, Any]] = []
    count = 0
    for number, cell in enumerate(done):
        source = cell.source.splitlines(keepends=True)
        entry = {"id": f"cell-{number}", "metadata": {}, "source": source}
        if not cell.code:
            found.append({"cell_type": "markdown", **entry})
            continue
        count += 1
        outputs: list[dict[str, Any]] = []
        if cell.printed:
            text = cell.printed.splitlines(keepends=True)
            outputs.append(
                {"name": "stdout", "output_type": "stream", "text": text}
            )
        for title, png in cell.figures:
            data = {
                "image/png": base64.b64encode(png).decode(),
                "text/plain": [title],
            }
            shown = {
                "data": data,
                "metadata": {},
                "output_type": "display_data",
            }
            outputs.append(shown)
        entry |= {"execution_count": count, "outputs": outputs}
        found.append({"cell_type": "code", **entry})
    kernel = {
        "display_name": "Python 3",
        "language": "python",
        "name": "python3",
    }
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {
        "cells": found,
        "metadata": metadata,
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def read(book: dict[str, Any]) -> list[Cell]:
    """The cells of a notebook that `notebook` made."""
    found = []
    for entry in book["cells"]:
        cell = Cell("".join(entry["source"]), entry["cell_type"] == "code", 0)
        for output in entry.get("outputs", []):
            if output["output_type"] == "stream":
                cell.printed = "".join(output["text"])
            else:
                data = output["data"]
                png = base64.b64decode(data["image/png"])
                cell.figures.append(("".join(data["text/plain"]), png))
        found.append(cell)
    return found


def write(name: str, done: list[Cell], folder: Path) -> None:
    """Page, figures and notebook; figures of an earlier run are removed."""
    for old in folder.glob(f"{name}-*.png"):
        old.unlink()
    (folder / f"{name}.md").write_text(page(name, done))
    figures = [figure for cell in done for figure in cell.figures]
    for number, (_, png) in enumerate(figures, start=1):
        (folder / f"{name}-{number}.png").write_bytes(png)
    text = json.dumps(notebook(done), indent=1, ensure_ascii=False)
    (folder / f"{name}.ipynb").write_text(text + "\n")
