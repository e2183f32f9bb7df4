"""An experiment whose results are committed: run it in full, write its results, and from these its page."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.__main__ import machine

ROOT = Path(__file__).parent.parent


def results_of(name: str) -> Path:
    """Where the results of an experiment lie."""
    return ROOT / "experiments" / "results" / f"{name}.json"


def publish(name: str, run: Callable[[int], dict[str, Any]], page: Any) -> None:
    """`python -m experiments.NAME`: `run(seed)` in the paper's size; `page` has `write(result, docs)` and `answer(result)`."""
    parser = argparse.ArgumentParser(prog=f"python -m experiments.{name}")
    parser.add_argument("--page", action="store_true", help="only write the page anew from the results")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    path = results_of(name)
    if not options.page:
        torch.set_num_threads(1)
        result = run(options.seed) | {"machine": machine() | {"seed": options.seed}}
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(result) + "\n")
    result = json.loads(path.read_text())
    page.write(result, ROOT / "docs")
    print(page.answer(result))
