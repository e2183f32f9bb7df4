"""Backward Euler of a neural ODE, forward and backward, against torchdiffeq and diffrax.

dy/dt = f(y), f a network D-30-30-D with tanh, 100 steps of 0.1, float32, the loss the sum of squares of all states, and each
step solved to |y_n - y_{n-1} - h f(y_n)| < 1e-5. All systems have the same weights; gradients are compared with a float64
reference first. The systems take turns in short blocks, diffrax in a process of its own on the same core.
`python -m benchmarks.ode [--device cuda]` writes `benchmarks/results/ode.json` or `ode_gpu.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import chain, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torchdiffeq
from torch import Tensor, nn

import torchdil as dil
from benchmarks.machine import machine
from benchmarks.timing import now, one_core, quartiles

RESULTS = Path(__file__).parent / "results"
WORKER = Path(__file__).parent / "ode_diffrax.py"
HIDDEN = 30
# Relative: what float32 may cost a gradient that is exact otherwise; beyond it, or the tolerance, a system is `rejected`.
EXACT = 1e-3
WARM_UP = 15  # torchdil traces what came ten times with the same shapes
PATIENCE = 10.0  # seconds
LONG = 0.3  # seconds; such a call needs no other before it, and one a round is enough


@dataclass(frozen=True)
class Config:
    """Sizes of the benchmark.

    Attributes:
        states, batches: D and B, all pairs.
        large: further D, with one trajectory only: of a batch each call takes minutes.
        steps, step_size: T and h.
        tolerance: the largest |y_n - y_{n-1} - h f(y_n)|.
        rounds, calls: a system has its turn in each round, for as many timed calls after one more.
        long_rounds: the rounds of a system whose calls take long.
        device: where.
    """

    states: tuple[int, ...] = (2, 50)
    batches: tuple[int, ...] = (1, 64)
    large: tuple[int, ...] = (500,)
    steps: int = 100
    step_size: float = 0.1
    tolerance: float = 1e-5
    rounds: int = 20
    calls: int = 2
    long_rounds: int = 5
    device: str = "cpu"

    @property
    def cases(self) -> tuple[tuple[int, int], ...]:
        """D and B."""
        return (*product(self.states, self.batches), *((state, 1) for state in self.large))

    @staticmethod
    def preset(name: str, device: str = "cpu") -> Config:
        if name == "smoke":
            return Config(states=(2,), batches=(2,), large=(), steps=10, rounds=2, calls=1, long_rounds=1, device=device)
        if device == "cuda":
            return Config(batches=(64, 1024), long_rounds=3, device=device)
        return Config()


class Dynamics(nn.Module):
    """f(t, y), y of shape (..., D)."""

    def __init__(self, state: int):
        super().__init__()
        layers = nn.Linear(state, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, state)
        self.network = nn.Sequential(*layers)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return self.network(y)


Solve = Callable[[Dynamics, Tensor, Tensor], Tensor]


def _ours(**settings: Any) -> Solve:
    return lambda f, y0, t: dil.odeint(f, y0, t, batch_dims=1, on_failure="raise", **settings)


ADJOINT, DIFFRAX = "torchdiffeq, dopri5 adjoint", "diffrax, ImplicitEuler"
SYSTEMS: dict[str, Solve] = {
    "torchdil": _ours(),
    "torchdil, CG": _ours(linear_solver=dil.CG()),
    ADJOINT: lambda f, y0, t: torchdiffeq.odeint_adjoint(f, y0, t),
    "torchdiffeq, euler": lambda f, y0, t: torchdiffeq.odeint(f, y0, t, method="euler"),
}
BACKWARD_EULER = ("torchdil", "torchdil, CG", DIFFRAX)


class Problem:
    """One pair of D and B: the network, y0 and t, and what is timed."""

    def __init__(self, config: Config, state: int, samples: int, seed: int):
        torch.manual_seed(seed)
        self.config, self.f = config, Dynamics(state).to(config.device)
        self.y0 = torch.randn(samples, state).to(config.device).requires_grad_()
        self.t = config.step_size * torch.arange(config.steps + 1, dtype=torch.float32, device=config.device)
        self.inputs = [self.y0, *self.f.parameters()]

    def save(self, path: str) -> None:
        """For the other process."""
        arrays = {f"weight{i}": p.detach().cpu().numpy() for i, p in enumerate(self.f.parameters())}
        settings = {name: getattr(self.config, name) for name in ("steps", "step_size", "tolerance")}
        np.savez(path, y0=self.y0.detach().cpu().numpy(), **arrays, **settings)

    def answer(self, solve: Solve) -> tuple[Tensor, Tensor]:
        """The states after each step and the gradient, by which a system is judged."""
        y = solve(self.f, self.y0, self.t)
        gradient = torch.autograd.grad(y.square().sum(), self.inputs)
        return y[1:].detach().cpu(), torch.cat([g.flatten() for g in gradient]).cpu()

    def exact(self) -> Tensor:
        """The gradient in float64."""
        f = Dynamics(self.y0.shape[1])
        f.load_state_dict(self.f.state_dict())
        y0 = self.y0.detach().cpu().double().requires_grad_()
        y = dil.odeint(f.double(), y0, self.t.cpu().double(), batch_dims=1, on_failure="raise")
        gradient = torch.autograd.grad(y.square().sum(), [y0, *f.parameters()])
        return torch.cat([g.flatten() for g in gradient])

    def residual(self, states: Tensor) -> float:
        """max |y_n - y_{n-1} - h f(y_n)| of states (T, B, D), evaluated in float64."""
        f = Dynamics(self.y0.shape[1])
        f.load_state_dict(self.f.state_dict())
        y = torch.cat((self.y0.detach().cpu().unsqueeze(0), states)).double()
        with torch.no_grad():
            return float((y[1:] - y[:-1] - self.config.step_size * f.double()(self.t, y[1:])).abs().max())

    def time(self, solve: Solve, what: str, calls: int, before: int = 1) -> list[tuple[float, ...]]:
        """Seconds of each call: forward, or both in all and the backward of it."""
        times = []
        for _ in range(before + calls):
            began = now(self.config.device)
            y = solve(self.f, self.y0, self.t)
            middle = now(self.config.device)
            if what == "both":
                torch.autograd.grad(y.square().sum(), self.inputs)
            ended = now(self.config.device)
            times.append((middle - began,) if what == "forward" else (ended - began, ended - middle))
        return times[before:]


class Worker:
    """The process with diffrax."""

    def __init__(self, python: str):
        settings = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([python, str(WORKER)], env=os.environ | settings, **pipes)

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"The process with diffrax ended with status {self._process.wait()}.")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


def run(
    config: Config,
    jax_python: str | None = None,
    seed: int = 0,
    only: str | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda results: None,
) -> dict[str, Any]:
    """A case for each pair of D and B: medians and quartiles of every system, in milliseconds.

    Of those with `only` in their label, such as "50 x 64"; what is there after each of them is handed to `keep`.
    """
    versions = {"torchdiffeq": version("torchdiffeq")}
    results: dict[str, Any] = {}
    with one_core(config.device), tempfile.TemporaryDirectory() as folder:
        about = machine() | {"seed": seed, "device": config.device}
        if config.device == "cuda":
            about["gpu"] = torch.cuda.get_device_name()
        worker = Worker(jax_python) if jax_python else None
        try:
            for state, samples in config.cases:
                if only is not None and only not in f"{state} x {samples}":
                    continue
                problem = Problem(config, state, samples, seed)
                path = str(Path(folder) / f"{state}-{samples}.npz")
                problem.save(path)
                if worker is not None:
                    versions |= worker.ask(load=path)
                cases = [*results.get("cases", []), {"state": state, "batch": samples} | _case(problem, worker, path)]
                results = {"machine": about, "versions": versions, "config": asdict(config), "cases": cases}
                keep(results)
        finally:
            if worker is not None:
                worker.close()
    return results


def _case(problem: Problem, worker: Worker | None, path: str) -> dict[str, Any]:
    """All systems on one problem: judged, then timed in turns."""
    config, exact = problem.config, problem.exact()
    systems: dict[str, dict[str, Any]] = {}
    names = [*SYSTEMS, DIFFRAX] if worker is not None else list(SYSTEMS)
    for name in names:
        if name == DIFFRAX:
            data = np.load(path + ".answer.npz")
            states, gradient = (torch.as_tensor(data[key]) for key in ("states", "gradient"))
        else:
            states, gradient = problem.answer(SYSTEMS[name])
        systems[name] = {"finite": bool(torch.isfinite(states).all())}
        if name in BACKWARD_EULER:
            error = float((gradient - exact).norm() / exact.norm())
            residual = problem.residual(states)
            systems[name] |= {"residual": residual, "gradient_error": error}
            if not (error < EXACT and residual < config.tolerance):
                systems[name]["rejected"] = True
    times: dict[str, dict[str, list[Any]]] = {name: {"forward": [], "both": []} for name in names}

    def block(name: str, what: str, calls: int, before: int = 1) -> list[Any]:
        if name == DIFFRAX:
            assert worker is not None
            return [(seconds,) for seconds in worker.ask(time=what, calls=calls, before=before)["times"]]
        return problem.time(SYSTEMS[name], what, calls, before)

    def warm(name: str) -> float:
        """Seconds of the last call of those that it takes to get fast, or of as many as there is patience for."""
        began = time.perf_counter()
        for _ in range(WARM_UP):
            _, seconds = (block(name, what, 1, before=0)[0][0] for what in ("forward", "both"))
            if time.perf_counter() - began > PATIENCE:
                break
        return float(seconds)

    turns = {name: (1, 0) if warm(name) > LONG else (config.calls, 1) for name in names}
    for number in range(config.rounds):
        for name in names:
            if turns[name][1] or number < config.long_rounds:
                for what in ("forward", "both"):
                    times[name][what].append(block(name, what, *turns[name]))
    for name in names:
        systems[name] |= _summary(times[name])
    ours = systems["torchdil"]
    ratios = {
        name: {what: round(system[what]["median"] / ours[what]["median"], 3) for what in ("forward", "backward", "both")}
        for name, system in systems.items()
        if name != "torchdil"
    }
    return {"systems": systems, "ratios": ratios}


def _summary(times: dict[str, list[list[tuple[float, ...]]]]) -> dict[str, Any]:
    """Forward, both, and their difference in each round; beside it the backward by its own clock, where there is one."""
    forward, both = ([[call[0] for call in calls] for calls in times[what]] for what in ("forward", "both"))
    differences = [statistics.median(b) - statistics.median(f) for f, b in zip(forward, both, strict=True)]
    clock = [call[1] for calls in times["both"] for call in calls if len(call) > 1]
    summary = {
        "forward": quartiles(list(chain(*forward))),
        "both": quartiles(list(chain(*both))),
        "backward": quartiles(differences),
    }
    return summary | ({"backward_by_clock": quartiles(clock)} if clock else {})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the benchmarks of ODEs and control")
    parser.add_argument(
        "--jax-python", default=os.environ.get("TORCHDIL_JAX_PYTHON"), help="a Python with jax and diffrax, to compare with"
    )
    parser.add_argument("--problems", help="of ODEs and of the comparison with peers: those with this in their label")


def measure(options: argparse.Namespace) -> None:
    """Run as the options say; written after each case, besides what is known of the others."""
    if options.jax_python is None:
        print("diffrax is left out: give --jax-python or TORCHDIL_JAX_PYTHON", file=sys.stderr)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / ("ode_gpu.json" if options.device == "cuda" else "ode.json")
    before = json.loads(path.read_text())["cases"] if path.exists() else []
    config = Config.preset("full", options.device)

    def keep(results: dict[str, Any]) -> None:
        known = {(one["state"], one["batch"]): one for one in (*before, *results["cases"])}
        merged = results | {"cases": [known[case] for case in config.cases if case in known]}
        path.write_text(json.dumps(merged, indent=2) + "\n")

    run(config, options.jax_python, only=options.problems, keep=keep)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ode", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="only see that everything runs, and print what it measures")
    add_arguments(parser)
    options = parser.parse_args()
    if options.smoke:
        print(json.dumps(run(Config.preset("smoke", options.device), options.jax_python)["cases"], indent=2))
    else:
        measure(options)


if __name__ == "__main__":
    main()
