"""Every forward solver on the standard problems, beside its counterpart in SciPy; and L-BFGS of a batch against loops.

`solvers()` counts steps, calls of the function and backward passes through it; `batch_speed()` times.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor
from torch.nn.functional import softplus

import torchdil as dil


@dataclass(frozen=True)
class Case:
    """A problem of one sample: `fn(y)` is a score, a residual or a map, of y of shape (n,)."""

    name: str
    kind: str
    fn: Callable[[Tensor], Tensor]
    y0: Tensor
    bounds: tuple[float, float] | None = None

    def residual(self, y: Tensor) -> Tensor:
        """F, as SciPy is given it."""
        if self.kind == "argmin":
            return torch.func.grad(self.fn)(y)
        return self.fn(y) if self.kind == "root" else y - self.fn(y)

    def solve(self, fn: Callable[[Tensor], Tensor], solver: Any) -> dil.Solution:
        function = {"argmin": dil.argmin, "root": dil.root, "fixed_point": dil.fixed_point}[self.kind]
        return function(fn, self.y0, solver=solver, on_failure="ignore")


def cases() -> list[Case]:
    """Three functions of the textbooks, a regression on real data, an equilibrium, a stiff step."""
    real = lambda *numbers: torch.tensor(numbers, dtype=torch.float64)  # noqa: E731
    data = load_breast_cancer()
    X = torch.as_tensor(data.data)
    X = (X - X.mean(0)) / X.std(0)
    sign = torch.as_tensor(2.0 * data.target - 1)
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(50, 50, generator=generator, dtype=torch.float64)
    W = 0.95 * W / torch.linalg.matrix_norm(W, 2)
    b = torch.randn(50, generator=generator, dtype=torch.float64)
    # One backward-Euler step of Robertson's reaction, long after the fast transient has begun.
    last, dt = real(1.0, 0.0, 0.0), 100.0

    def robertson(y: Tensor) -> Tensor:
        slow, fast, fastest = 0.04 * y[0], 1e4 * y[1] * y[2], 3e7 * y[1] ** 2
        return y - last - dt * torch.stack([fast - slow, slow - fast - fastest, fastest])

    return [
        Case("Rosenbrock", "argmin", lambda y: (1 - y[0]) ** 2 + 100 * (y[1] - y[0] ** 2) ** 2, real(-1.2, 1.0), (-2.0, 2.0)),
        Case("Beale", "argmin", beale, real(1.0, 1.0), (-4.5, 4.5)),
        Case("Himmelblau", "argmin", himmelblau, real(1.0, 1.0), (-5.0, 5.0)),
        Case(
            "logistic regression, breast cancer",
            "argmin",
            lambda w: softplus(-sign * (X @ w)).mean() + 0.005 * w.square().sum(),
            torch.zeros(30, dtype=torch.float64),
        ),
        Case("DEQ, 50 units", "fixed_point", lambda y: torch.tanh(W @ y + b), torch.zeros(50, dtype=torch.float64)),
        Case("Robertson, one stiff step", "root", robertson, last),
    ]


def beale(y: Tensor) -> Tensor:
    """Minimum 0 at (3, 1/2)."""
    u, v = y[..., 0], y[..., 1]
    return (1.5 - u + u * v) ** 2 + (2.25 - u + u * v**2) ** 2 + (2.625 - u + u * v**3) ** 2


def himmelblau(y: Tensor) -> Tensor:
    """Four minima of value 0, one of them (3, 2)."""
    u, v = y[..., 0], y[..., 1]
    return (u**2 + v - 11) ** 2 + (u + v**2 - 7) ** 2


class Count:
    """A function of y that counts its calls and the backward passes through it."""

    def __init__(self, fn: Callable[[Tensor], Tensor]):
        self.fn, self.calls, self.passes = fn, 0, 0

    def __call__(self, y: Tensor) -> Tensor:
        self.calls += 1
        if y.requires_grad:
            y = y.view_as(y)
            y.register_hook(self._passed)
        return self.fn(y)

    def _passed(self, grad: Tensor) -> None:
        self.passes += 1


def _ours(case: Case) -> dict[str, tuple[Any, str | None]]:
    """The solvers for a case, and SciPy's counterpart of each."""
    if case.kind == "argmin":
        lbfgs = {"max_iter": 1000, "tolerance_grad": 1e-9, "tolerance_change": 0, "line_search_fn": "strong_wolfe"}
        solvers: dict[str, tuple[Any, str | None]] = {
            "Newton()": (dil.Newton(), "trust-exact"),
            "Newton(NormalCG())": (dil.Newton(linear_solver=dil.NormalCG()), "trust-ncg"),
            "LBFGS()": (dil.LBFGS(), "L-BFGS-B"),
            "GradientDescent()": (dil.GradientDescent(), "CG"),
            "GradientDescent(nesterov=True)": (dil.GradientDescent(nesterov=True), None),
            'SciPy("BFGS")': (dil.SciPy("BFGS"), "BFGS"),
            'SciPy("Newton-CG")': (dil.SciPy("Newton-CG"), "Newton-CG"),
            "TorchOptim(Adam, lr=0.1)": (dil.TorchOptim(torch.optim.Adam, lr=0.1, max_steps=5000), None),
            "TorchOptim(LBFGS)": (dil.TorchOptim(torch.optim.LBFGS, max_steps=10, **lbfgs), None),
        }
        if case.bounds is not None:
            box = case.bounds
            solvers |= {
                "RandomShooting()": (dil.RandomShooting(bounds=box), None),
                "CEM(polish=LBFGS())": (dil.CEM(bounds=box, polish=dil.LBFGS()), None),
                "MPPI(polish=LBFGS())": (dil.MPPI(bounds=box, polish=dil.LBFGS()), None),
            }
        return solvers
    common: dict[str, tuple[Any, str | None]] = {
        "Newton()": (dil.Newton(), "hybr"),
        "Broyden()": (dil.Broyden(), "broyden1"),
        "Anderson()": (dil.Anderson(), "anderson"),
        'SciPy("lm")': (dil.SciPy("lm"), "lm"),
    }
    return common | {"Picard()": (dil.Picard(), None)} if case.kind == "fixed_point" else common


def _scipy(case: Case, method: str) -> dict[str, Any]:
    """SciPy's own run, called by hand: steps, calls, gradients or Jacobians, error."""
    F = lambda y: case.residual(torch.as_tensor(y)).numpy()  # noqa: E731
    jacobian = lambda y: torch.func.jacfwd(case.residual)(torch.as_tensor(y)).numpy()  # noqa: E731
    y0 = case.y0.numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if case.kind == "argmin":
            extra: dict[str, Any] = {"hess": jacobian} if method == "trust-exact" else {}
            if method in ("trust-ncg", "Newton-CG"):
                extra = {
                    "hessp": lambda y, p: torch.func.jvp(case.residual, (torch.as_tensor(y),), (torch.as_tensor(p),))[1].numpy()
                }
            tight = {"gtol": 1e-9, "maxiter": 10_000, "ftol": 0} if method == "L-BFGS-B" else {"gtol": 1e-9, "maxiter": 10_000}
            options = {"xtol": 1e-10, "maxiter": 10_000} if method == "Newton-CG" else tight
            value = lambda y: case.fn(torch.as_tensor(y)).item()  # noqa: E731
            found = scipy.optimize.minimize(value, y0, jac=F, method=method, options=options, **extra)
        else:
            found = scipy.optimize.root(F, y0, jac=jacobian if method in ("hybr", "lm") else None, method=method, tol=1e-12)
    steps = found.get("nit", found.get("njev", "-"))
    return {
        "scipy": method,
        "scipy_steps": int(steps) if steps != "-" else "-",
        "scipy_calls": int(found.get("nfev", 0)),
        "scipy_passes": int(found.get("njev", 0)) + int(found.get("nhev", 0)),
        "scipy_success": bool(found.success),
        "scipy_error": _error(case, torch.as_tensor(np.asarray(found.x))),
    }


def _error(case: Case, y: Tensor) -> float:
    """The relative distance to the exact solution that Newton finds from here."""
    if not bool(torch.isfinite(y).all()):
        return float("inf")
    start = Case(case.name, case.kind, case.fn, y.detach())
    exact = start.solve(case.fn, dil.Newton(rtol=1e-14))
    return float((exact.value - y).norm() / exact.value.norm())


def solvers() -> list[dict[str, Any]]:
    """Each solver on each problem that it is for."""
    rows = []
    for case in cases():
        for name, (solver, method) in _ours(case).items():
            count = Count(case.fn)
            solution = case.solve(count, solver)
            row = {
                "problem": case.name,
                "solver": name,
                "status": dil.Status(int(solution.status)).name,
                "steps": int(solution.stats.steps),
                "calls": count.calls,
                "passes": count.passes,
                "error": _error(case, solution.value),
            }
            rows.append(row | (_scipy(case, method) if method is not None else {}))
    return rows


def batch_speed(samples: int = 256, unknowns: int = 32, repeats: int = 3) -> dict[str, Any]:
    """L-BFGS of a batch against Python loops over its samples: CPU time, one thread, interleaved, medians."""
    generator = torch.Generator().manual_seed(0)
    weights = 2 * torch.randn(unknowns, 64, generator=generator, dtype=torch.float64) / unknowns**0.5
    x = torch.randn(samples, unknowns, generator=generator, dtype=torch.float64)
    stiffness = 0.1 + 3 * torch.rand(samples, 1, generator=generator, dtype=torch.float64)
    zeros = torch.zeros_like(x)

    def score(y: Tensor, x: Tensor, stiffness: Tensor) -> Tensor:
        return 0.5 * (stiffness * (y - x).square()).sum(-1) + softplus(y @ weights).sum(-1) + 0.05 * y.pow(4).sum(-1)

    def batch() -> Tensor:
        return dil.argmin(score, zeros, (x, stiffness), solver=dil.LBFGS()).value

    def ours(k: int) -> Tensor:
        return dil.argmin(score, zeros[k], (x[k], stiffness[k]), solver=dil.LBFGS()).value

    def torchs(k: int) -> Tensor:
        y = zeros[k].clone().requires_grad_()
        settings = {"max_iter": 1000, "tolerance_grad": 1e-8, "tolerance_change": 0, "line_search_fn": "strong_wolfe"}
        optimiser = torch.optim.LBFGS([y], **settings)  # type: ignore[arg-type]

        def closure() -> Tensor:
            value = score(y, x[k], stiffness[k])
            y.grad = torch.autograd.grad(value, y)[0]
            return value

        optimiser.step(closure)
        return y.detach()

    def scipys(k: int) -> Tensor:
        def value_and_gradient(y: np.ndarray) -> tuple[float, np.ndarray]:
            u = torch.as_tensor(y).requires_grad_()
            value = score(u, x[k], stiffness[k])
            return value.item(), torch.autograd.grad(value, u)[0].numpy()

        options = {"gtol": 1e-8, "ftol": 0}
        found = scipy.optimize.minimize(value_and_gradient, zeros[k].numpy(), jac=True, method="L-BFGS-B", options=options)
        return torch.as_tensor(found.x)

    ways: dict[str, Callable[[], Tensor]] = {"batch": batch}
    for name, one in (("LBFGS", ours), ("torch.optim.LBFGS", torchs), ("scipy L-BFGS-B", scipys)):
        ways[name] = lambda one=one: torch.stack([one(k) for k in range(samples)])  # type: ignore[misc]
    answers = {name: way() for name, way in ways.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            began = time.thread_time()  # of this thread: SciPy's linear algebra has threads that wait by spinning
            way()
            times[name].append(time.thread_time() - began)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return {
        "samples": samples,
        "unknowns": unknowns,
        "faster_than_a_loop_of": {name: round(t / medians["batch"], 1) for name, t in medians.items() if name != "batch"},
        "largest_difference": max(float((y - answers["batch"]).abs().max()) for y in answers.values()),
    }
