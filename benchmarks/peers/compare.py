"""All systems on all problems: judged against a reference, then timed in turns; `benchmarks/results/peers.json`.

`python -m benchmarks --only peers --torch-python PATH --jax-python PATH`, the Pythons of environments with
`benchmarks/peers-torch.txt` and `benchmarks/peers-jax.txt`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
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
RESULTS = ROOT / "benchmarks" / "results"
OURS = "torchdil"
TORCH, JAX = ("torchopt", "xitorch", "torchdeq"), ("jaxopt", "optimistix")
# A gradient is wrong if it is off by more than this many times the tolerance of the linear solve, relative.
WRONG = 100.0
ROUNDS, SECONDS = 7, 0.2
PATIENCE = 90.0  # seconds that a system has for an answer
PRODUCT = 512  # the size of the matrices that torch and JAX are to multiply
FEW_ROUNDS, LONG = 3, 5.0  # where one turn of all systems takes so many seconds; a system that alone does has one turn


def solved(problem: Problem, device: str = "cpu") -> dict[str, np.ndarray]:
    """The arrays with the solution: all systems are asked for the derivative of the formula there, which need not be exact."""
    found = arrays(problem)
    given = {name: torch.as_tensor(array, device=device) for name, array in found.items()}
    start = torch.zeros(problem.shape, dtype=torch.float64, device=device)
    if problem.kind == "root":
        y = dil.root(lambda y: residual(OPS, problem, y, given), start, batch_dims=1, solver=dil.Anderson(rtol=1e-13)).value
    else:
        solver = dil.Newton(rtol=1e-8, linear_solver=dil.CG(rtol=1e-2))
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
    g, info = method(J, v, rtol=1e-10, atol=0.0)
    assert info == 0, f"the reference of {problem.label} was not reached"
    parts = torch.autograd.grad(F, wanted, torch.as_tensor(-g, device=device).reshape(y.shape))
    return np.concatenate([part.cpu().numpy().ravel() for part in parts])


class Worker:
    """The process of a system."""

    def __init__(self, name: str, python: str, device: str):
        self.name = name
        flags = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        paths = [str(ROOT), *([str(ROOT / "src")] if python == sys.executable else [])]
        settings = {
            "OMP_NUM_THREADS": "1",
            "XLA_FLAGS": flags if device == "cpu" else "",
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        command = [python, "-m", "benchmarks.peers.worker", name, device]
        self._start = lambda: subprocess.Popen(command, env=os.environ | settings, cwd=ROOT, **pipes)
        self._process = self._start()

    def ask(self, **request: Any) -> dict[str, Any]:
        if "load" in request and self._process.poll() is not None:  # what a problem has done to it is not the next one's fault
            self.close()
            self._process = self._start()
        line = ""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            if not select.select([self._process.stdout], [], [], PATIENCE)[0]:
                self._process.kill()
                self._process.wait()
                return {"error": f"no answer after {PATIENCE:.0f} s"}
            line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": f"the process ended with status {self._process.wait()}"}

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def case(problem: Problem, workers: dict[str, Worker], folder: str, device: str) -> dict[str, Any]:
    """All systems on one problem."""
    with torch.backends.cudnn.flags(enabled=False):  # whose convolutions in float64 take minutes
        found = solved(problem, device)
        exact = reference(problem, found, device)
    path = str(Path(folder) / "problem.npz")
    np.savez(path, **found)
    systems: dict[str, dict[str, Any]] = {}
    turns: dict[str, tuple[int, int]] = {}
    times: dict[str, list[Any]] = {}
    one_turn = 0.0
    for name, worker in workers.items():
        print(f"{problem.label}: {name}", file=sys.stderr, flush=True)
        answer = worker.ask(load=path, problem=asdict(problem))
        systems[name] = answer
        if "error" in answer:
            continue
        gradient = np.load(f"{path}.{name}.npy")
        answer["gradient_error"] = float(f"{np.linalg.norm(gradient - exact) / np.linalg.norm(exact):.2g}")
        if not answer["gradient_error"] <= WRONG * problem.rtol:
            answer["error"] = f"wrong gradient, off by {answer['gradient_error']:.1g}"
        first = worker.ask(calls=1, before=0) if answer.pop("seconds") > LONG else worker.ask(calls=2, before=1)
        if "error" in first:
            answer["error"] = first["error"]
            continue
        seconds = max(1e-5, statistics.median(sum(times) for times in first["times"]))
        turns[name] = (max(1, min(200, round(SECONDS / seconds))), 0 if seconds > SECONDS else 1)
        times[name] = first["times"] if seconds > LONG else []
        one_turn += max(seconds, SECONDS)
    limits: list[float] = []
    floors: list[float] = []
    for number in range(ROUNDS if one_turn < LONG else FEW_ROUNDS):
        for name, (calls, before) in turns.items():
            if not (number and times[name] and sum(times[name][0]) > LONG):
                answer = workers[name].ask(calls=calls, before=before)
                times[name] += answer.get("times", [])
                systems[name] |= {"error": answer["error"]} if "error" in answer else {}
    for _ in range(ROUNDS):  # afterwards: large arrays of another kind leave memory in pieces, which no peer has to live with
        workers[OURS].ask(calls=1, before=0)  # whose steps are asked for
        limit = workers[OURS].ask(limit=True)
        assert "error" not in limit, limit["error"]
        limits.append(limit["steps"] * limit["product"])
        floors.append(limit["floor"])
    for name, pairs in ((name, pairs) for name, pairs in times.items() if pairs):
        systems[name] |= {"backward": quartiles([b for _, b in pairs]), "both": quartiles([a + b for a, b in pairs])}
    ours = systems[OURS]
    assert "backward" in ours, ours["error"]
    ratios = {
        name: {what: round(system[what]["median"] / ours[what]["median"], 3) for what in ("backward", "both")}
        for name, system in systems.items()
        if name != OURS and "backward" in system
    }
    return {
        "problem": asdict(problem),
        "label": problem.label,
        "systems": systems,
        "ratios": ratios,
        "limit": quartiles(limits) | {"steps": limit["steps"], "method": limit["method"]},
        "floor": quartiles(floors),
    }


def products(workers: dict[str, Worker]) -> dict[str, Any]:
    """How long torch and JAX, which the systems stand on, take for a product of two matrices."""
    times: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        for library, name in (("torch", OURS), ("jax", JAX[0])):
            if name in workers:
                times.setdefault(library, []).extend(workers[name].ask(multiply=PRODUCT).get("times", ())[1:])
    return {"size": PRODUCT, **{library: quartiles(found) for library, found in times.items() if found}}


def run(
    device: str,
    torch_python: str | None,
    jax_python: str | None,
    only: str | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda results: None,
) -> dict[str, Any]:
    """All problems, or those with `only` in their label; what is there after each of them is handed to `keep`."""
    others = ("untraced", "handwritten") if device == "cuda" else ("untraced", "compiled", "handwritten")
    pythons = dict.fromkeys((OURS, *others), sys.executable)
    pythons |= {name: python for names, python in ((TORCH, torch_python), (JAX, jax_python)) if python for name in names}
    results: dict[str, Any] = {"machine": machine() | {"device": device}, "cases": []}
    cases = results["cases"]
    with one_core(device), tempfile.TemporaryDirectory() as folder:
        workers = {name: Worker(name, python, device) for name, python in pythons.items()}
        try:
            for problem in problems(device):
                if only is None or only in problem.label:
                    cases.append(case(problem, workers, folder, device))
                    print(problem.label, _shown(cases[-1]), file=sys.stderr, flush=True)
                    results["products"] = products(workers)
                    keep(results)
        finally:
            for worker in workers.values():
                worker.close()
    return results


def _shown(found: dict[str, Any]) -> str:
    """The ratios of a case, for whoever waits."""
    return ", ".join(f"{name} {ratio['backward']:.2g}" for name, ratio in found["ratios"].items())


def check(new: dict[str, Any], old: dict[str, Any]) -> list[str]:
    """What has fallen behind the committed results: a ratio to a peer, by more than the spread of both measurements."""
    committed = {found["label"]: found for found in old["cases"]}
    behind = []
    for found in new["cases"]:
        before = committed.get(found["label"])
        for name, ratio in found["ratios"].items():
            if before is None or name not in before["ratios"]:
                continue
            noise = 1.0
            for measured in (found, before):
                for system in (name, OURS):
                    low, high = measured["systems"][system]["backward"]["quartiles"]
                    noise *= high / low
            if ratio["backward"] * noise < before["ratios"][name]["backward"]:
                behind.append(f"{found['label']}: {ratio['backward']} of {name}, was {before['ratios'][name]['backward']}")
    return behind


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--torch-python", default=os.environ.get("TORCHDIL_TORCH_PYTHON"), help="a Python with benchmarks/peers-torch.txt"
    )
    parser.add_argument("--check", action="store_true", help="compare with the committed results of the peers, and write none")


def measure(options: argparse.Namespace) -> None:
    """Run as the options say; write the results, or check them against those that are there."""
    for name, python in (("PyTorch", options.torch_python), ("JAX", options.jax_python)):
        if python is None:
            print(f"peers on {name} are left out: give --torch-python and --jax-python", file=sys.stderr)
    path = RESULTS / ("peers_gpu.json" if options.device == "cuda" else "peers.json")
    before = json.loads(path.read_text()) if path.exists() else {"cases": []}

    def keep(results: dict[str, Any]) -> None:
        """Written after each problem: a run may be cut short, and another may go on with the problems that are left."""
        known = {one["label"]: one for one in (*before["cases"], *results["cases"])}
        order = [problem.label for problem in problems(options.device)]
        merged = results | {"cases": [known[label] for label in order if label in known]}
        path.write_text(json.dumps(merged, indent=2) + "\n")

    settings = options.device, options.torch_python, options.jax_python, options.problems
    if not options.check:
        run(*settings, keep)
        return
    behind = check(run(*settings), before)
    sys.exit("\n".join(["behind the committed results:", *behind]) if behind else 0)
