"""One system in a process of its own: `python -m benchmarks.peers.worker SYSTEM DEVICE`.

Reads requests from stdin and answers on stdout, one JSON object a line: {"load": PATH, "problem": {...}} reads the arrays of a
problem and writes the gradient to PATH.SYSTEM.npy; {"calls": n, "before": m} times n calls after m that do not count. A system
that cannot answers {"error": ...}.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from importlib.metadata import version
from typing import Any

import numpy as np

from benchmarks.peers.problems import Problem


def main() -> None:
    name, device = sys.argv[1:]
    answers, sys.stdout = sys.stdout, sys.stderr  # a library that prints must not be taken for an answer
    warnings.simplefilter("ignore")
    system = importlib.import_module(f"benchmarks.peers.system_{name}")
    calls: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "load" in request:
                problem = Problem(**request["problem"] | {"of": tuple(request["problem"]["of"])})
                calls = None
                calls = system.calls(problem, dict(np.load(request["load"])), device)
                calls()
                np.save(f"{request['load']}.{name}.npy", calls.gradient())
                answer: dict[str, Any] = {"versions": {package: version(package) for package in system.PACKAGES}}
                if hasattr(calls, "compile_seconds"):
                    answer["compile_seconds"] = round(calls.compile_seconds, 2)
            else:
                for _ in range(request["before"]):
                    calls()
                answer = {"times": [calls() for _ in range(request["calls"])]}
        except Exception as error:  # whatever it is, it is the result
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
