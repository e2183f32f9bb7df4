"""One system in a process of its own: `python -m benchmarks.peers.worker SYSTEM DEVICE`.

Reads requests from stdin and answers on stdout, one JSON object a line: {"load": PATH, "problem": {...}} reads the arrays of a
problem and writes the gradient to PATH.SYSTEM.npy; {"calls": n, "before": m} times n calls after m that do not count;
{"limit": true} asks for the least time possible, {"multiply": n} for the times of n x n matrix products. A system that cannot
answers {"error": ...}.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from benchmarks.peers.problems import Problem


def main() -> None:
    name, device = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # a library that prints must not be taken for an answer
    warnings.simplefilter("ignore")
    system: Any = None
    calls: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "load" in request:
                problem = Problem(**request["problem"] | {"of": tuple(request["problem"]["of"])})
                system = system or importlib.import_module(f"benchmarks.peers.system_{name}")
                calls = None
                calls = system.calls(problem, dict(np.load(request["load"])), device)
                times = []
                for _ in range(getattr(system, "WARM_UP", 1)):
                    began = time.perf_counter()
                    calls()
                    times.append(time.perf_counter() - began)
                np.save(f"{request['load']}.{name}.npy", calls.gradient())
                answer: dict[str, Any] = {"versions": {package: _version(package) for package in system.PACKAGES}}
                compiled = getattr(calls, "compile_seconds", max(times) - min(times))
                answer |= {"compile_seconds": round(compiled, 2), "seconds": times[-1]}
            elif "limit" in request:
                answer = calls.limit()
            elif "multiply" in request:
                answer = {"times": [calls.multiply(request["multiply"]) for _ in range(10)]}
            else:
                for _ in range(request["before"]):
                    calls()
                answer = {"times": [calls() for _ in range(request["calls"])]}
        except Exception as error:  # whatever it is, it is the result
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        print(json.dumps(answer), file=answers, flush=True)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from its source
        return str(importlib.import_module(package).__version__)


if __name__ == "__main__":
    main()
