"""The tables of README.md and docs/numbers.md, from `benchmarks/results/core.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- numbers -->", "<!-- end of numbers -->"


def markdown(headings: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def scale(results: dict[str, Any]) -> str:
    """The table of the large problems."""
    rows = [
        [
            row["energy"],
            f"{row['unknowns']:,}",
            row["cg_steps"],
            f"{row['backward_peak_vectors']:.1f}",
            f"{row['one_product_peak_vectors']:.1f}",
            f"{row['loop_over_products']:.2f}",
        ]
        for row in results["scale"]
    ]
    headings = ["energy", "unknowns", "CG steps", "peak memory, vectors", "of which one product", "CG loop / its products"]
    return markdown(headings, rows)


def readme(results: dict[str, Any]) -> str:
    """The block of README.md."""
    isolation, warm = results["isolation"], results["warm_start"]
    return f"""{BEGIN}
One backward pass by CG in float64 on one CPU thread: its peak memory beyond the forward's, in vectors of the size of the
unknown, and its time over that of its Hessian-vector products alone.

{scale(results)}

In a batch of {isolation["samples"]}, one sample made ill-conditioned (10¹⁰) {change(isolation)}.
Starting the backward solves of {warm["training_steps"]} training steps from the last one saved {warm["saved"]:.0%} of products.
Measured by `make bench` ({machine(results)}); all of it in [docs/numbers.md](docs/numbers.md).
{END}"""


def numbers(results: dict[str, Any]) -> str:
    """docs/numbers.md."""
    isolation, warm = results["isolation"], results["warm_start"]
    strategies = [[row["unknowns"], row["backward"], row["forward"], row["traced"]] for row in results["strategies"]]
    preconditioners = [list(row.values()) for row in results["preconditioners"]]
    return f"""# Numbers

Written by `make bench` from `benchmarks/results/core.json`: {machine(results)}.

## One million unknowns

One backward pass by CG, float64, one thread. Peak memory is what the backward allocates beyond what the forward left behind,
in vectors of the size of the unknown; the product with the Hessian alone needs the part in the next column. The last column
is the CPU time of the whole CG solve over that of as many products made alone, interleaved, medians.

{scale(results)}

CG itself holds four vectors and makes five passes over memory a step; where a product is no more than a few passes itself,
that shows.

## A hard sample among {isolation["samples"]}

One sample made ill-conditioned (10¹⁰) {change(isolation)}.

## Warm start of the backward solve

Products with the Hessian in {warm["training_steps"]} training steps on the same data, CG to 1e-6: {warm["cold"]} from zero,
{warm["warm"]} from the last solution ({warm["saved"]:.0%} saved).

## Preconditioners

Products of one backward solve by CG to 1e-6, those that make the preconditioner included; 16 problems of 200 unknowns; the
forward solver is gradient descent, whose steps `SecantMemory` re-uses.

{markdown(["curvature", "none", "Jacobi()", "Nystrom()", "SecantMemory()"], preconditioners)}

A preconditioner pays where it fits the curvature, and costs where it does not.

## Ways to make a product

CPU time of one product with the Hessian of a small network's energy, relative to double backward; interleaved, medians.

{markdown(["unknowns", "backward", "forward", "traced"], strategies)}
"""


def change(isolation: dict[str, Any]) -> str:
    """What a hard sample does to the others, in words."""
    largest = isolation["largest_change_of_the_other_gradients"]
    return (
        f"changes the other gradients by at most {largest:.0e}" if largest else "leaves the other gradients the same to the bit"
    )


def machine(results: dict[str, Any]) -> str:
    """Where and with what it was measured."""
    at = results["machine"]
    return f"torchdil {at['torchdil']}, torch {at['torch']}, {at['cpu']}, {at['threads']} thread, seed {at['seed']}"


def update(results: dict[str, Any], root: Path) -> None:
    """Write the tables where readers find them."""
    path = root / "README.md"
    text = path.read_text()
    path.write_text(text[: text.index(BEGIN)] + readme(results) + text[text.index(END) + len(END) :])
    (root / "docs" / "numbers.md").write_text(numbers(results))
