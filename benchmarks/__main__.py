"""`python -m benchmarks`: measure, write `benchmarks/results/*.json`, and from them the tables of README.md and docs."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from benchmarks import control, core, ode, scale, solvers, tables
from benchmarks.machine import machine
from benchmarks.peers import ablation, compare, page

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PARTS = ("core", "solvers", "ode", "control", "peers", "ablation")


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--unknowns", type=int, default=2**20, help="size of the large problems, a square number")
    parser.add_argument("--repeats", type=int, default=5, help="how often each time is taken")
    parser.add_argument("--only", choices=PARTS, help="measure this part and keep the results of the others")
    ode.add_arguments(parser)
    compare.add_arguments(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    RESULTS.mkdir(exist_ok=True)
    if options.only in (None, "core"):
        _write("core", run_core(options.unknowns, options.repeats))
    if options.only in (None, "solvers"):
        _write("solvers", run_solvers(options.repeats))
    if options.only in (None, "ode"):
        ode.measure(options)
    if options.only in (None, "control"):
        control.measure(options)
    if options.only in (None, "peers"):
        compare.measure(options)
    if options.only in (None, "ablation"):
        ablation.run(options.device, options.problems)
    results = {path.stem: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
    tables.update(results, ROOT)
    page.update(results, ROOT / "docs")
    print(tables.numbers(results["core"]))
    print(tables.solvers(results["solvers"]))
    print(tables.ode(results))
    if "control" in results:
        print(tables.control(results))


def _write(name: str, results: dict[str, Any]) -> None:
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
