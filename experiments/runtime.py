"""How long neural ODEs take, forward and backward: the paper's Figure 2.

dy/dt = f(y), f a random network with two hidden layers of 30, over T steps of h; the loss is the sum of squares of all states.
Backward Euler with each of its gradients stands beside DOPRI5 with the adjoint and Forward Euler, as the state and the
stiffness h max|λ| grow, λ the eigenvalues of ∂f/∂y along the way. Equal acceptance: a step of Backward Euler must pass, with
its residual y_n - y_{n-1} - h f(y_n), the test that DOPRI5 makes of its error, at the same rtol and atol.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.integrate
import torch
import torchdiffeq
from torch import Tensor, nn

import torchdil as dil

HIDDEN = 30
SLOW = 0.3  # seconds
WARM_UP, TRACED = 2, 12  # torchdil traces what came ten times with the same shapes
# What may go wrong in a solver: torchdiffeq asserts, torchdil raises ConvergenceError, a RuntimeError.
FAILURES = (AssertionError, RuntimeError, TimeoutError, ValueError)
BACKWARD_EULER = ("default", "cg", "naive", "adjoint")


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment.

    Attributes:
        initialisations: random networks in each group.
        sizes: of the state, with the usual initialisation.
        state: its size where the weights grow.
        scales: factors of the usual weights.
        dissipative_scales: factors of the weights of dissipative networks, whose h max|λ| grows with the square.
        steps, step_size: T and h.
        tolerance: rtol and atol, of the error of DOPRI5 and of the residual of Backward Euler.
        repeats: how often each time is taken, after a call to warm up; if that took long (`SLOW`), it is the one that counts.
        seconds: a call that takes longer, forward or backward, has failed.
        device: where.
        runs: one is the whole experiment.
    """

    initialisations: int = 3
    sizes: tuple[int, ...] = (2, 10, 50, 200)
    state: int = 10
    scales: tuple[float, ...] = (1.0, 2.0, 3.0)
    dissipative_scales: tuple[float, ...] = (1.0, 3.0, 10.0)
    steps: int = 10
    step_size: float = 0.1
    tolerance: float = 1e-5
    repeats: int = 2
    seconds: float = 1.0
    device: str = "cpu"
    runs: int = 1

    @staticmethod
    def preset(name: str) -> Config:
        smoke = Config(initialisations=2, sizes=(2, 10), scales=(1.0,), dissipative_scales=(1.0, 3.0), steps=5, repeats=1)
        paper = Config(initialisations=100, steps=20, seconds=2.0)
        return {"smoke": smoke, "quick": Config(), "paper": paper}[name]


class Dynamics(nn.Module):
    """f(t, y) = A₃ tanh(A₂ tanh(A₁ y)), each A with a bias, which gives up at a deadline.

    Args:
        state: D.
        scale: a factor of the weights.
        dissipative: whether ∂f/∂y = -A₁ᵀ S A₁ with a diagonal S > 0, but for a tenth.
    """

    def __init__(self, state: int, scale: float, dissipative: bool):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(state, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, HIDDEN), nn.Tanh())
        self.last = nn.Linear(HIDDEN, state)
        self.scale, self.dissipative = scale, dissipative
        self.deadline = float("inf")
        self.double()

    @torch.no_grad()
    def initialise(self, seed: int) -> Tensor:
        """Draw the weights anew, in place as a training step would; an initial state (1, D)."""
        generator = torch.Generator().manual_seed(seed)
        layers = self.hidden[0], self.hidden[2], self.last
        drawn = []
        for layer in layers:  # as nn.Linear does
            bound = layer.in_features**-0.5
            drawn.append(
                [bound * (2 * torch.rand(p.shape, generator=generator, dtype=p.dtype) - 1) for p in layer.parameters()]
            )
        (A, _), (B, _), (C, _) = drawn
        if self.dissipative:
            C.mul_(0.1).sub_(A.mT)
            B.mul_(0.1).add_(torch.eye(HIDDEN))
        for layer, parts in zip(layers, drawn, strict=True):
            scale = 1.0 if self.dissipative and layer is self.hidden[2] else self.scale
            for parameter, part in zip(layer.parameters(), parts, strict=True):
                parameter.copy_(scale * part)
        return torch.randn(1, A.shape[1], generator=generator, dtype=torch.float64).to(self.last.weight.device)

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        if time.perf_counter() > self.deadline:
            raise TimeoutError
        return self.last(self.hidden(y))

    def jacobians(self, y: Tensor) -> Tensor:
        """∂f/∂y at states (N, D), (N, D, D), without a graph."""
        return self.last.weight.detach() @ self._first_two(y)

    def largest_eigenvalue(self, y: Tensor) -> float:
        """max|λ| over states (N, D); the eigenvalues of A₃ M are those of M A₃, but for zeros."""
        return float(torch.linalg.eigvals(self._first_two(y) @ self.last.weight.detach()).abs().max())

    def _first_two(self, y: Tensor) -> Tensor:
        """M, the derivative of the last hidden layer, (N, 30, D)."""
        return torch.vmap(torch.func.jacrev(self.hidden))(y).detach()


Method = Callable[[Dynamics, Tensor, Tensor, float], Tensor]


def _ours(**settings: Any) -> Method:
    def solve(f: Dynamics, y0: Tensor, t: Tensor, _: float) -> Tensor:
        return dil.odeint(f, y0, t, batch_dims=1, on_failure="raise", **settings)

    return solve


def _dopri5(f: Dynamics, y0: Tensor, t: Tensor, tolerance: float) -> Tensor:
    return torchdiffeq.odeint_adjoint(f, y0, t, rtol=tolerance, atol=tolerance, method="dopri5")


METHODS: dict[str, Method] = {
    "default": _ours(),
    "cg": _ours(linear_solver=dil.CG()),
    "naive": _ours(linear_solver=dil.Dense()),
    "adjoint": _ours(gradient="adjoint"),
    "dopri5": _dopri5,
    "euler": lambda f, y0, t, tolerance: torchdiffeq.odeint(f, y0, t, method="euler"),
    "euler_ift": _ours(method="euler"),
}


def families(config: Config) -> dict[str, list[tuple[int, float, bool]]]:
    """The members of each family: size of the state, scale of the weights, dissipative."""
    return {
        "size": [(size, 1.0, False) for size in config.sizes],
        "weights": [(config.state, scale, False) for scale in config.scales],
        "stiffness": [(config.state, scale, True) for scale in config.dissipative_scales],
    }


def run(config: Config, seed: int) -> dict[str, Any]:
    """The groups of each family: times of every method for every initialisation, in milliseconds, failures and errors."""
    groups = []
    measured: dict[tuple[int, float, bool], dict[str, Any]] = {}  # the families have a member in common
    for family, variants in families(config).items():
        for variant in variants:
            if variant not in measured:
                f = Dynamics(*variant).to(config.device)
                seeds = [10**6 * seed + number for number in range(config.initialisations)]
                _warm_up(config, f, seeds[0])
                measured[variant] = _collect([_initialisation(config, f, s) for s in seeds])
            groups.append({"family": family, "state": variant[0], "scale": variant[1]} | measured[variant])
    return {"groups": groups}


def _warm_up(config: Config, f: Dynamics, seed: int) -> None:
    """The first calls load what they need, and may compile."""
    y0, t, inputs = _problem(config, f, seed)
    for name, method in METHODS.items():
        for _ in range(TRACED if name in ("default", "euler_ift") else WARM_UP):
            timed(config, f, method, y0, t, inputs)


def _problem(config: Config, f: Dynamics, seed: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y0, the times, and what to differentiate by."""
    y0 = f.initialise(seed).requires_grad_()
    t = config.step_size * torch.arange(config.steps + 1, dtype=torch.float64, device=config.device)
    return y0, t, [y0, *f.parameters()]


def _initialisation(config: Config, f: Dynamics, seed: int) -> dict[str, Any]:
    """One network: what each method needs and what it gives, or why it failed."""
    y0, t, inputs = _problem(config, f, seed)
    exact = reference(f, y0, t)
    found: dict[str, dict[str, Any]] = {}
    path = exact
    for name, method in METHODS.items():
        times, outcome = timed(config, f, method, y0, t, inputs)
        if "failed" not in outcome:
            y, gradient = outcome["y"], outcome["gradient"]
            own = own_gradient(config, f, name, y, y0, t, inputs)
            outcome = {
                "times": [times],
                "error": float((y - exact).abs().max() / exact.abs().max()),
                "gradient_error": None if own is None else float((gradient - own).norm() / own.norm()),
            }
            if name in BACKWARD_EULER:
                path = y
                outcome = outcome if accepted(config, f, y) else {"failed": "residual"}
        found[name] = outcome
    short = [name for name, outcome in found.items() if "failed" not in outcome and sum(outcome["times"][0]) <= SLOW]
    for name in short:
        found[name]["times"] = []  # what warmed up does not count
    for _ in range(config.repeats):
        for name in short:
            found[name]["times"].append(timed(config, f, METHODS[name], y0, t, inputs)[0])
    return {"stiffness": config.step_size * f.largest_eigenvalue(path[1:, 0]), "methods": found}


def timed(
    config: Config, f: Dynamics, method: Method, y0: Tensor, t: Tensor, inputs: list[Tensor]
) -> tuple[tuple[float, float], dict[str, Any]]:
    """Forward and backward time in seconds, and the states and the gradient, or why there are none."""
    times = [_now(config)]
    try:
        f.deadline = times[0] + config.seconds
        y = method(f, y0, t, config.tolerance)
        times.append(_now(config))
        f.deadline = times[1] + config.seconds
        gradient = torch.autograd.grad(y.square().sum(), inputs)
        times.append(_now(config))
    except FAILURES as failure:
        return (config.seconds, config.seconds), {"failed": "time" if isinstance(failure, TimeoutError) else "no solution"}
    finally:
        f.deadline = float("inf")
    flat = torch.cat([g.flatten() for g in gradient])
    finite = bool(torch.isfinite(y).all() & torch.isfinite(flat).all())
    outcome = {"y": y.detach(), "gradient": flat} if finite else {"failed": "not finite"}
    return (times[1] - times[0], times[2] - times[1]), outcome


def accepted(config: Config, f: Dynamics, y: Tensor) -> bool:
    """DOPRI5's test of each step: the root mean square of the residual over atol + rtol max(|y_{n-1}|, |y_n|) is at most 1."""
    with torch.no_grad():
        residual = y[1:] - y[:-1] - config.step_size * f(y, y[1:])
    allowed = config.tolerance * (1 + torch.maximum(y[1:].abs(), y[:-1].abs()))
    return bool(((residual / allowed).square().mean(dim=-1) <= 1).all())


def reference(f: Dynamics, y0: Tensor, t: Tensor) -> Tensor:
    """The solution of the ODE itself, by SciPy's LSODA to nine digits."""
    weights = [p.detach().cpu().numpy() for p in f.parameters()]

    def slope(_: float, y: np.ndarray) -> np.ndarray:
        A, a, B, b, C, c = weights
        return C @ np.tanh(B @ np.tanh(A @ y + a) + b) + c

    start, times = (a.detach().cpu().numpy() for a in (y0[0], t))
    found = scipy.integrate.solve_ivp(slope, times[[0, -1]], start, "LSODA", times, rtol=1e-9, atol=1e-9)
    return torch.as_tensor(found.y.T, device=t.device).unsqueeze(1)


def own_gradient(
    config: Config, f: Dynamics, name: str, y: Tensor, y0: Tensor, t: Tensor, inputs: list[Tensor]
) -> Tensor | None:
    """The exact gradient of the method's own answer: what rounding alone keeps it from; None where it cannot be had in time."""
    if name == "dopri5":
        f.deadline = time.perf_counter() + 2 * config.seconds
        try:
            z = torchdiffeq.odeint(f, y0, t, rtol=config.tolerance, atol=config.tolerance, method="dopri5")
            gradient = torch.autograd.grad(z.square().sum(), inputs)
        except FAILURES:
            return None
        finally:
            f.deadline = float("inf")
    else:
        # Step by step: g_n = (I - h J_n)⁻ᵀ (2 y_n + g_{n+1}) for Backward Euler, and h g_n is the cotangent of f(y_n);
        # g_n = 2 y_n + (I + h J_n)ᵀ g_{n+1} for Forward Euler, and h g_{n+1} is.
        implicit, h = name in BACKWARD_EULER, config.step_size
        J = h * f.jacobians(y[:, 0])
        eye = torch.eye(J.shape[1], dtype=J.dtype, device=J.device)
        g, into = torch.zeros_like(y[0, 0]), []
        for n in reversed(range(len(y))):
            if implicit and n:
                g = torch.linalg.solve((eye - J[n]).mT, 2 * y[n, 0] + g)
                into.append(h * g)
            else:
                into.append(torch.zeros_like(g) if implicit else h * g)
                g = 2 * y[n, 0] + g + (0 if implicit else J[n].mT @ g)
        value = f(t, y[:, 0])
        gradient = (g, *torch.autograd.grad(value, inputs[1:], torch.stack(into[::-1])))
    return torch.cat([part.flatten() for part in gradient])


def _collect(found: list[dict[str, Any]]) -> dict[str, Any]:
    """One group: lists over the initialisations that did not fail, times in milliseconds."""
    methods: dict[str, Any] = {}
    for name in METHODS:
        outcomes = [one["methods"][name] for one in found]
        good = [(one["stiffness"], outcome) for one, outcome in zip(found, outcomes, strict=True) if "failed" not in outcome]
        methods[name] = {
            "failed": dict(Counter(outcome["failed"] for outcome in outcomes if "failed" in outcome)),
            "stiffness": [_digits(stiffness) for stiffness, _ in good],
            "forward": [_digits(1e3 * statistics.median(f for f, _ in outcome["times"])) for _, outcome in good],
            "backward": [_digits(1e3 * statistics.median(b for _, b in outcome["times"])) for _, outcome in good],
            "error": [_digits(outcome["error"]) for _, outcome in good],
            "gradient_error": [_digits(outcome["gradient_error"]) for _, outcome in good],
        }
    return {"stiffness": [_digits(one["stiffness"]) for one in found], "methods": methods}


def _now(config: Config) -> float:
    if config.device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter()


def _digits(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.3g}")
