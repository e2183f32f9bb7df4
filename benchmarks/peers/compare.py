"""All systems on all problems: judged against a reference, then timed in turns; `benchmarks/results/peers.json`.

`python -m benchmarks.peers.compare --torch-python PATH --jax-python PATH`, the Pythons of environments with
`benchmarks/peers-torch.txt` and `benchmarks/peers-jax.txt`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse.linalg
import torch

import torchdil as dil
from benchmarks.machine import machine
from benchmarks.peers.problems import Problem, arrays, objective, problems, residual
from benchmarks.peers.torch_side import OPS
from benchmarks.timing import one_core, quartiles

ROOT = Path(__file__).parent.parent.parent
OURS = "torchdil"
TORCH, JAX = ("torchopt", "xitorch", "torchdeq"), ("jaxopt", "optimistix")
# A gradient is wrong if it is off by more than this many times the tolerance of the linear solve, relative.
WRONG = 100.0
ROUNDS, SECONDS = 7, 0.2


def solved(problem: Problem, device: str = "cpu") -> dict[str, np.ndarray]:
    """The arrays with the solution, by a tight solve."""
    found = arrays(problem)
    given = {name: torch.as_tensor(array, device=device) for name, array in found.items()}
    start = torch.zeros(problem.shape, dtype=torch.float64, device=device)
    if problem.kind == "root":
        y = dil.root(lambda y: residual(OPS, problem, y, given), start, batch_dims=1, solver=dil.Anderson(rtol=1e-13)).value
    else:
        solver = dil.Newton(rtol=1e-13, linear_solver=dil.CG(rtol=1e-3))
        y = dil.argmin(lambda y: objective(OPS, problem, y, given), start, solver=solver).value
    return found | {"solution": y.detach().cpu().numpy()}


def reference(problem: Problem, found: dict[str, np.ndarray], device: str = "cpu") -> np.ndarray:
    """The gradient by the theorem, -(∂F/∂θ)ᵀ J⁻ᵀ v, with SciPy's solvers on products of autograd."""
    given = {name: torch.as_tensor(array, device=device) for name, array in found.items()}
    wanted = [given[name].requires_grad_() for name in problem.of]
    y = given["solution"].requires_grad_()
    if problem.kind == "root":
        F = residual(OPS, problem, y, given)
    else:
        (F,) = torch.autograd.grad(objective(OPS, problem, y, given).sum(), y, create_graph=True)

    def product(vector: np.ndarray) -> np.ndarray:
        given = torch.as_tensor(vector, device=device).reshape(y.shape)
        (found,) = torch.autograd.grad(F, y, given, retain_graph=True)
        return found.cpu().numpy().ravel()

    J = scipy.sparse.linalg.LinearOperator((y.numel(), y.numel()), matvec=product, dtype=np.float64)
    v = found["v"].ravel()
    method = scipy.sparse.linalg.gmres if problem.kind == "root" else scipy.sparse.linalg.cg
    g, info = method(J, v, rtol=1e-12, atol=0.0)
    assert info == 0, f"the reference of {problem.label} was not reached"
    parts = torch.autograd.grad(F, wanted, torch.as_tensor(-g, device=device).reshape(y.shape))
    return np.concatenate([part.cpu().numpy().ravel() for part in parts])


class Worker:
    """The process of a system."""

    def __init__(self, name: str, python: str, device: str):
        self.name = name
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        settings = {
            "OMP_NUM_THREADS": "1",
            "XLA_FLAGS": flags if device == "cpu" else "",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *([str(ROOT / "src")] if name == OURS else [])]),
        }
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [python, "-m", "benchmarks.peers.worker", name, device]
        self._process = subprocess.Popen(command, env=os.environ | settings, cwd=ROOT, **pipes)

    def ask(self, **request: Any) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        return json.loads(line) if line else {"error": f"the process ended with status {self._process.wait()}"}

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def case(problem: Problem, workers: dict[str, Worker], folder: str, device: str) -> dict[str, Any]:
    """All systems on one problem."""
    found = solved(problem, device)
    exact = reference(problem, found, device)
    path = str(Path(folder) / "problem.npz")
    np.savez(path, **found)
    systems: dict[str, dict[str, Any]] = {}
    turns: dict[str, tuple[int, int]] = {}
    for name, worker in workers.items():
        answer = worker.ask(load=path, problem=asdict(problem))
        systems[name] = answer
        if "error" in answer:
            continue
        gradient = np.load(f"{path}.{name}.npy")
        answer["gradient_error"] = float(f"{np.linalg.norm(gradient - exact) / np.linalg.norm(exact):.2g}")
        if not answer["gradient_error"] <= WRONG * problem.rtol:
            answer["error"] = f"wrong gradient, off by {answer['gradient_error']:.1g}"
        first = worker.ask(calls=2, before=1)
        if "error" in first:
            answer["error"] = first["error"]
            continue
        seconds = max(1e-5, statistics.median(sum(times) for times in first["times"]))
        turns[name] = (max(1, min(200, round(SECONDS / seconds))), 0 if seconds > SECONDS else 1)
    times: dict[str, list[Any]] = {name: [] for name in turns}
    for _ in range(ROUNDS):
        for name, (calls, before) in turns.items():
            times[name] += workers[name].ask(calls=calls, before=before)["times"]
    for name, pairs in times.items():
        systems[name] |= {"backward": quartiles([b for _, b in pairs]), "both": quartiles([a + b for a, b in pairs])}
    ours = systems[OURS]
    ratios = {
        name: {what: round(system[what]["median"] / ours[what]["median"], 3) for what in ("backward", "both")}
        for name, system in systems.items()
        if name != OURS and "backward" in system
    }
    return {"problem": asdict(problem), "label": problem.label, "systems": systems, "ratios": ratios}


def run(device: str, torch_python: str | None, jax_python: str | None, only: str | None = None) -> dict[str, Any]:
    pythons = {OURS: sys.executable} | dict.fromkeys(TORCH, torch_python) | dict.fromkeys(JAX, jax_python)
    cases = []
    with one_core(device), tempfile.TemporaryDirectory() as folder:
        workers = {name: Worker(name, python, device) for name, python in pythons.items() if python}
        try:
            for problem in problems(device):
                if only is None or only in problem.label:
                    cases.append(case(problem, workers, folder, device))
                    print(
                        problem.label,
                        json.dumps(cases[-1]["ratios"]),
                        {n: s["error"] for n, s in cases[-1]["systems"].items() if "error" in s},
                        {n: s["backward"]["median"] for n, s in cases[-1]["systems"].items() if "backward" in s},
                        file=sys.stderr,
                        flush=True,
                    )
        finally:
            for worker in workers.values():
                worker.close()
    return {"machine": machine() | {"device": device}, "cases": cases}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.compare", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--torch-python")
    parser.add_argument("--jax-python")
    parser.add_argument("--only", help="problems whose label has this in it")
    options = parser.parse_args()
    results = run(options.device, options.torch_python, options.jax_python, options.only)
    print(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
