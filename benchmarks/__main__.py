"""`python -m benchmarks`: measure, write `benchmarks/results/core.json`, and from it the tables of README.md and docs."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import torchdil
from benchmarks import core, scale, tables

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "core.json"


def machine() -> dict[str, Any]:
    """Where and with what the numbers were made."""
    return {
        "seed": 0,
        "torchdil": torchdil.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


def run(unknowns: int, repeats: int) -> dict[str, Any]:
    """All measurements; `unknowns` is the size of the large problems."""
    return {
        "machine": machine(),
        "scale": [scale.measure(name, unknowns, repeats) for name in scale.energies(16)],
        "isolation": core.isolation(),
        "warm_start": core.warm_start(),
        "preconditioners": core.preconditioners(),
        "strategies": core.strategies(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--unknowns", type=int, default=2**20, help="size of the large problems, a square number")
    parser.add_argument("--repeats", type=int, default=5, help="how often each time is taken")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = run(options.unknowns, options.repeats)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")
    tables.update(results, ROOT)
    print(tables.numbers(results))


if __name__ == "__main__":
    main()
