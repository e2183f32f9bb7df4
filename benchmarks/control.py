"""Riccati equations and planning, forward and backward.

1. 1024 random systems, n = 8, m = 3: `dil.control.dare` and its gradient in A, B, Q and R against a loop over SciPy's
   `solve_discrete_are` with a dense adjoint, (n² × n²), in NumPy on one core.
2. `dil.control.MPC` with a network as dynamics: DDP and the Riccati recursion against dense Newton and against
   backpropagation through the steps of Newton; and over the horizon, O(H) against O(H³).
3. Beside mpc.pytorch, if that is installed (`benchmarks.control_peer`).

All answers are compared first. The ways take turns. `python -m benchmarks.control [--device cuda]` writes
`benchmarks/results/control.json` or `control_gpu.json`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from scipy.linalg import solve_discrete_are
from torch import Tensor, nn

import torchdil as dil
from benchmarks import control_peer
from benchmarks.machine import machine
from benchmarks.timing import Way, one_core, timed
from torchdil.control.plan import Plan

RESULTS = Path(__file__).parent / "results"
# Relative, to the reference in float64: an answer or a gradient beyond it is `rejected`.
EXACT = {torch.float64: 1e-8, torch.float32: 1e-3}
SCIPY, OURS = "SciPy loop, dense adjoint", "torchdil"
PLANNED = "DDP, Riccati"


@dataclass(frozen=True)
class Config:
    """Sizes of the benchmark.

    Attributes:
        systems, states, controls: of the Riccati equations: how many, n and m.
        batches, horizons: B and H of the plans, all pairs.
        unrolled: the largest H for which the steps of Newton are differentiated.
        long_horizons, long_batch: H and B of the plans whose time is shown over H.
        hidden, plan_states: the network that is controlled: width of its two hidden layers, and n; m is 1.
        rounds: turns that each way has.
        warm_up: calls before them, unless they are long; torchdil traces what came ten times with the same shapes.
        device: where; the loop over SciPy is always on the CPU.
    """

    systems: int = 1024
    states: int = 8
    controls: int = 3
    batches: tuple[int, ...] = (1, 32, 256)
    horizons: tuple[int, ...] = (10, 50)
    unrolled: int = 10
    long_horizons: tuple[int, ...] = (10, 20, 50, 100, 200)
    long_batch: int = 8
    hidden: int = 64
    plan_states: int = 5
    rounds: int = 9
    warm_up: int = 12
    device: str = "cpu"

    @staticmethod
    def preset(name: str, device: str = "cpu") -> Config:
        if name == "smoke":
            small: dict[str, Any] = {"batches": (2,), "horizons": (5,), "unrolled": 5, "long_horizons": (4, 8), "long_batch": 2}
            return Config(systems=16, states=4, controls=2, hidden=8, rounds=1, warm_up=0, device=device, **small)
        if device == "cuda":  # eager planning is bound by launches there, whatever its sizes: a few of them will do
            return Config(device=device, batches=(32, 256), horizons=(10,), long_horizons=(10, 50))
        return Config(device=device)


# --- Riccati equations -------------------------------------------------------------------------------------------------------


def random_systems(config: Config, seed: int) -> list[Tensor]:
    """A, B, Q, R and the weights of S in the loss: A's spectral radius is about 1, Q and R have eigenvalues in [1, 2]."""
    generator = torch.Generator().manual_seed(seed)
    n, m = config.states, config.controls

    def normal(*shape: int) -> Tensor:
        return torch.randn(config.systems, *shape, generator=generator, dtype=torch.float64)

    def definite(size: int) -> Tensor:
        axes = torch.linalg.qr(normal(size, size))[0]
        values = 1 + torch.rand(config.systems, 1, size, generator=generator, dtype=torch.float64)
        return (axes * values) @ axes.mT

    return [normal(n, n) / n**0.5, normal(n, m), definite(n), definite(m), normal(n, n)]


def by_scipy(systems: list[Tensor]) -> Way:
    """A loop over `solve_discrete_are`, and the adjoint equations as dense systems, which NumPy solves in one call."""
    A, B, Q, R, G = (t.numpy() for t in systems)
    n = A.shape[1]

    def forward() -> NDArray[Any]:
        return np.stack([solve_discrete_are(*system) for system in zip(A, B, Q, R, strict=True)])

    def backward(S: NDArray[Any]) -> list[NDArray[Any]]:
        BS = B.mT @ S
        K = np.linalg.solve(R + BS @ B, BS @ A)
        M = A - B @ K
        kronecker = (M[:, :, None, :, None] * M[:, None, :, None, :]).reshape(-1, n * n, n * n)
        v = (0.5 * (G + G.mT)).reshape(-1, n * n, 1)
        W = np.linalg.solve(np.eye(n * n) - kronecker, v).reshape(-1, n, n)
        dA = 2 * S @ M @ W
        return [dA, -dA @ K.mT, W, K @ W @ K.mT]

    return Way(forward, backward)


def by_torchdil(systems: list[Tensor], device: str, dtype: torch.dtype, linear_solver: dil.LinearSolver | None) -> Way:
    """`dare` of the whole batch."""
    *matrices, weights = (t.to(device, dtype) for t in systems)
    leaves = [t.clone().requires_grad_() for t in matrices]

    def forward() -> Tensor:
        return dil.control.dare(*leaves, linear_solver=linear_solver, on_failure="raise")

    return Way(forward, lambda S: torch.autograd.grad(S, leaves, weights))


def riccati(config: Config, seed: int = 0) -> dict[str, Any]:
    """All ways for one batch of systems: judged by SciPy's, then timed."""
    systems = random_systems(config, seed)
    dtypes = {
        OURS: torch.float64,
        f"{OURS}, float32": torch.float32,
        f"{OURS}, CG": torch.float64,
        f"{OURS}, Dense": torch.float64,
    }
    solvers = {f"{OURS}, CG": dil.CG(), f"{OURS}, Dense": dil.Dense()}
    ways = {name: by_torchdil(systems, config.device, dtype, solvers.get(name)) for name, dtype in dtypes.items()}
    loop = by_scipy(systems)
    reference = loop.forward()
    gradients = loop.backward(reference)
    found: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        S = way.forward()
        value_error = _distance([S], [torch.as_tensor(reference)])
        gradient_error = _distance(way.backward(S), [torch.as_tensor(g) for g in gradients])
        found[name] = {"value_error": value_error, "gradient_error": gradient_error}
        if not max(value_error, gradient_error) < EXACT[dtypes[name]]:
            found[name]["rejected"] = True
    for name, times in timed(ways | {SCIPY: loop}, config.device, config.rounds, config.warm_up).items():
        found.setdefault(name, {}).update(times)
    sizes = {"systems": config.systems, "states": config.states, "controls": config.controls}
    return sizes | {"ways": found, "faster": _ratios(found, SCIPY, OURS)}


# --- planning ----------------------------------------------------------------------------------------------------------------


class Dynamics(nn.Module):
    """x + 0.1 (f(x, u) - x), f a network with two hidden layers; stable, so that plans of any length are alike."""

    def __init__(self, states: int, hidden: int):
        super().__init__()
        layers = nn.Linear(states + 1, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, states)
        self.network = nn.Sequential(*layers)

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        return x + 0.1 * (self.network(torch.cat((x, u), dim=-1)) - x)


def cost(x: Tensor, u: Tensor) -> Tensor:
    return x.square().sum(dim=-1) + u.square().sum(dim=-1)


class Planner:
    """One pair of B and H: the network, the states, and the ways to plan, in float64."""

    def __init__(self, config: Config, samples: int, horizon: int, seed: int):
        torch.manual_seed(seed)
        self.dynamics = Dynamics(config.plan_states, config.hidden).double().to(config.device)
        x = torch.randn(samples, config.plan_states, dtype=torch.float64)
        self.x, self.horizon = x.to(config.device).requires_grad_(), horizon
        self.weights = torch.randn(samples, horizon, 1, dtype=torch.float64).to(config.device)
        self.inputs = [self.x, *self.dynamics.parameters()]

    def way(self, forward: Callable[[], Tensor]) -> Way:
        return Way(forward, lambda u: torch.autograd.grad(u, self.inputs, self.weights))

    def layer(self, **settings: Any) -> dil.control.MPC:
        return dil.control.MPC(self.dynamics, cost, self.horizon, 1, on_failure="raise", **settings)

    def unrolled(self, steps: int) -> Tensor:
        """Newton's steps from zero with dense Hessians, part of the graph."""
        plan = Plan(self.dynamics, cost, None, (self.horizon, 1), None)

        def total(u: Tensor, x: Tensor) -> Tensor:
            return plan(u.view(1, -1, 1), x.unsqueeze(0)).squeeze(0)

        u = torch.zeros_like(self.weights).flatten(1)
        for _ in range(steps):
            slope = torch.vmap(torch.func.grad(total))(u, self.x)
            u = u - torch.linalg.solve(torch.vmap(torch.func.hessian(total))(u, self.x), slope)
        return u.view_as(self.weights)


def plans(config: Config, samples: int, horizon: int, seed: int = 0, *, unrolled: bool = False) -> dict[str, Any]:
    """All ways for one B and H: judged by the dense one, then timed."""
    planner = Planner(config, samples, horizon, seed)
    structured = planner.layer()
    dense = planner.layer(solver=dil.Newton(linear_solver=dil.Dense()), linear_solver=dil.Dense())
    ways = {PLANNED: planner.way(lambda: structured(planner.x)), "Newton, Dense": planner.way(lambda: dense(planner.x))}
    reference = ways["Newton, Dense"].forward()
    gradients = ways["Newton, Dense"].backward(reference)
    ways[PLANNED].forward()
    assert structured.report is not None
    steps = int(structured.report.forward.stats.steps.max())
    if unrolled:
        ways["Newton, unrolled"] = planner.way(lambda: planner.unrolled(steps))
    found: dict[str, dict[str, Any]] = {}
    for name, way in ways.items():
        u = way.forward()
        found[name] = {"value_error": _distance([u], [reference]), "gradient_error": _distance(way.backward(u), gradients)}
        if not max(found[name].values()) < EXACT[torch.float64]:
            found[name]["rejected"] = True
    for name, times in timed(ways, config.device, config.rounds, config.warm_up).items():
        found[name] |= times
    case = {"batch": samples, "horizon": horizon, "steps": steps, "ways": found}
    return case | {"faster": {name: _ratios(found, name, PLANNED) for name in found if name != PLANNED}}


def over_horizon(config: Config, seed: int = 0) -> dict[str, Any]:
    """Times over H and the power of H that they grow with, by least squares over the upper half of the horizons."""
    cases = [plans(config, config.long_batch, horizon, seed) for horizon in config.long_horizons]
    powers: dict[str, dict[str, float]] = {}
    for name in cases[0]["ways"]:
        upper = cases[(len(cases) - 1) // 2 :]
        logs = [math.log(case["horizon"]) for case in upper]
        powers[name] = {}
        for what in ("forward", "backward", "both"):
            times = [math.log(case["ways"][name][what]["median"]) for case in upper]
            powers[name][what] = round(float(np.polyfit(logs, times, 1)[0]), 2)
    return {"cases": cases, "powers": powers, "from_horizon": cases[(len(cases) - 1) // 2]["horizon"]}


def _distance(found: Any, expected: Any) -> float:
    """Relative, of all together."""
    a, b = (torch.cat([t.detach().double().cpu().flatten() for t in tensors]) for tensors in (found, expected))
    return float((a - b).norm() / b.norm())


def _ratios(found: dict[str, Any], slow: str, fast: str) -> dict[str, float]:
    return {
        what: round(found[slow][what]["median"] / found[fast][what]["median"], 2) for what in ("forward", "backward", "both")
    }


def run(config: Config, seed: int = 0) -> dict[str, Any]:
    """Everything, on one device."""
    with one_core(config.device):
        about = machine() | {"seed": seed, "device": config.device}
        if config.device == "cuda":
            about["gpu"] = torch.cuda.get_device_name()
        if config.device == "cpu" and not control_peer.installed():
            print("mpc is not installed: the comparison with it is left out", flush=True)
        beside = config.device == "cpu" and control_peer.installed()
        pairs = [(samples, horizon) for horizon in config.horizons for samples in config.batches]
        return {
            "machine": about,
            "versions": {"numpy": np.__version__, "scipy": scipy.__version__},
            "config": asdict(config),
            "riccati": riccati(config, seed),
            "plans": [plans(config, b, h, seed, unrolled=h <= config.unrolled) for b, h in pairs],
            "over_horizon": over_horizon(config, seed),
            "peer": control_peer.run(config.rounds, config.warm_up, seed) if beside else None,
        }


def measure(options: argparse.Namespace) -> None:
    """Run as the options say and write the results."""
    results = run(replace(Config.preset("full", options.device), rounds=options.repeats))
    RESULTS.mkdir(exist_ok=True)
    name = "control_gpu" if options.device == "cuda" else "control"
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.control", description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="only see that everything runs, and print what it measures")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=Config.rounds, help="how often each time is taken")
    options = parser.parse_args()
    if options.smoke:
        print(json.dumps(run(Config.preset("smoke", options.device)), indent=2))
    else:
        measure(options)


if __name__ == "__main__":
    main()
