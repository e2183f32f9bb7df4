"""An experiment whose results are committed: run it in full, write its results, and from these its page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import machine

ROOT = Path(__file__).parent.parent


def results_of(name: str) -> Path:
    """Where the results of an experiment lie."""
    return ROOT / "experiments" / "results" / f"{name}.json"


def publish(
    name: str,
    run: Callable[[argparse.Namespace], dict[str, Any]],
    page: Any,
    parser: argparse.ArgumentParser | None = None,
) -> None:
    """`python -m experiments.NAME`: run it, and in the paper's preset write the results and their page.

    Args:
        name: of the experiment.
        run: takes the options: `preset`, `seed` and what `parser` has added.
        page: has `write(result, docs)` and `answer(result)`.
        parser: with options of this experiment's own.
    """
    parser = parser or argparse.ArgumentParser()
    parser.prog = f"python -m experiments.{name}"
    parser.add_argument("--preset", choices=("smoke", "quick", "paper"), default="paper", help="others write no page")
    parser.add_argument("--page", action="store_true", help="only write the page anew from the results")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    path = results_of(name)
    if not options.page:
        torch.set_num_threads(1)
        result = run(options) | {"machine": machine() | {"seed": options.seed}}
        if options.preset != "paper":
            print(page.answer(json.loads(json.dumps(result))))
            return
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result) + "\n")
    result = json.loads(path.read_text())
    page.write(result, ROOT / "docs")
    print(page.answer(result))
