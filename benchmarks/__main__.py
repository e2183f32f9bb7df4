"""`python -m benchmarks`: measure, write `benchmarks/results/*.json`, and from them the tables of README.md and docs."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import torchdil
from benchmarks import core, scale, solvers, tables

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


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


def run_core(unknowns: int, repeats: int) -> dict[str, Any]:
    """The core; `unknowns` is the size of the large problems."""
    return {
        "machine": machine(),
        "scale": [scale.measure(name, unknowns, repeats) for name in scale.energies(16)],
        "isolation": core.isolation(),
        "warm_start": core.warm_start(),
        "preconditioners": core.preconditioners(),
        "ill_conditioned": core.ill_conditioned(),
        "strategies": core.strategies(),
    }


def run_solvers(repeats: int) -> dict[str, Any]:
    """The forward solvers."""
    return {"machine": machine(), "solvers": solvers.solvers(), "batch_speed": solvers.batch_speed(repeats=repeats)}


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
    parser.add_argument("--only", choices=("core", "solvers"), help="measure this part and keep the results of the other")
    options = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    if options.only != "solvers":
        _write("core", run_core(options.unknowns, options.repeats))
    if options.only != "core":
        _write("solvers", run_solvers(options.repeats))
    results = {name: json.loads((RESULTS / f"{name}.json").read_text()) for name in ("core", "solvers")}
    tables.update(results["core"], results["solvers"], ROOT)
    print(tables.numbers(results["core"]))
    print(tables.solvers(results["solvers"]))


def _write(name: str, results: dict[str, Any]) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
