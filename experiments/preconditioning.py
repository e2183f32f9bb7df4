"""Preconditioners of the backward solve J g = v by conjugate gradients: steps saved against cost, in training runs.

Ordinary CG asks for one preconditioner M in all its steps; flexible CG (Notay 2000) chooses β = zᵀ(r - r_old) / (zᵀr)_old,
which stays right when M changes from step to step, as when z = M⁻¹r comes from a few steps of another solver. All ways solve
the very systems of one training run, in turn, so that they differ in nothing else; what a preconditioner costs to make is
counted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import torchdil as dil
from experiments.preconditioning_problems import PROBLEMS, Problem
from torchdil.operator import Operator
from torchdil.solution import Result

Apply = Callable[[Tensor], Tensor]
# The most points of a residual history that are kept.
POINTS = 120


@dataclass(frozen=True)
class Config:
    """What is solved, and how often.

    Attributes:
        problem: one of `PROBLEMS`.
        runs: seeds of the problem.
        size: of the problem, relative.
        steps: of training, one backward solve each.
        rtol: of the backward solves.
        rank: of Nyström's approximation.
        inner_steps: of CG as a preconditioner of CG.
        inner_rtol: of CG in float32 as a preconditioner of CG in float64.
    """

    problem: str = "network"
    runs: int = 5
    size: float = 1.0
    steps: int = 10
    rtol: float = 1e-8
    rank: int = 30
    inner_steps: int = 5
    inner_rtol: float = 1e-4

    @staticmethod
    def preset(name: str) -> Config:
        smoke = Config(runs=1, size=0.1, steps=2, rtol=1e-5, rank=5)
        quick = Config(runs=1, size=0.3, steps=3, rtol=1e-6, rank=15)
        return {"smoke": smoke, "quick": quick, "paper": Config()}[name]


class Kept:
    """A preconditioner that is made in the first solve of a training run and kept in the others.

    Args:
        made: any preconditioner with `build`.
    """

    def __init__(self, made: Any):
        self.made = made
        self._apply: Apply | None = None

    def build(self, operator: Operator, transpose: bool, damping: float) -> Apply:
        if self._apply is None:
            self._apply = self.made.build(operator, transpose, damping)
        return self._apply


class Factor:
    """M = J itself, factorised: as dear as a direct solve, and useful only to those who keep it."""

    def build(self, operator: Operator, transpose: bool, damping: float) -> Apply:
        L = torch.linalg.cholesky(operator.dense())
        return lambda r: torch.cholesky_solve(r.unsqueeze(2), L).squeeze(2)


class Diagonal:
    """M = diag(J), exact, from all rows of J; `dil.Jacobi()` estimates it beyond 64 unknowns."""

    def build(self, operator: Operator, transpose: bool, damping: float) -> Apply:
        diagonal = operator.diagonal()
        return lambda r: r / diagonal


class InnerCG:
    """M⁻¹ r by a few steps of CG on J, which is another M for each r.

    Args:
        steps: of the inner CG.
    """

    def __init__(self, steps: int):
        self.solver = dil.CG(rtol=0.0, max_steps=steps)

    def build(self, operator: Operator, transpose: bool, damping: float) -> Apply:
        return lambda r: self.solver.solve(operator, r, transpose=transpose).value


class InnerFloat32:
    """M⁻¹ r by CG in float32, to a low tolerance: the products with J that are many are the cheap ones.

    Args:
        problem: whose energy is evaluated in float32.
        parameters: of the energy, as training changes them.
        rtol: of the inner CG.
    """

    def __init__(self, problem: Problem, parameters: tuple[Tensor, ...], rtol: float):
        self.problem, self.parameters = problem, parameters
        self.solver = dil.CG(rtol=rtol, max_steps=1000)
        self.products = 0

    def build(self, operator: Operator, transpose: bool, damping: float) -> Apply:
        parameters = tuple(p.detach().float() for p in self.parameters)
        data = tuple(d.float() for d in self.problem.data)

        def gradient(y: Tensor) -> Tensor:
            energy = self.problem.energy(y, parameters, data)
            return torch.autograd.grad(energy.sum(), y, create_graph=True)[0]

        cheap = Operator(gradient, operator.y.float(), symmetric=True)

        def apply(r: Tensor) -> Tensor:
            norm = r.norm(dim=1, keepdim=True).clamp_min(torch.finfo(r.dtype).tiny)  # float32 has a narrow range
            before = cheap.products
            z = self.solver.solve(cheap, (r / norm).float(), transpose=transpose).value
            self.products += cheap.products - before
            return norm * z.double()

        return apply


def ways(config: Config, problem: Problem, parameters: tuple[Tensor, ...]) -> dict[str, dil.LinearSolver]:
    """Name -> solver; those that remember something are new for each training run."""

    def cg(preconditioner: Any = None, flexible: bool = False) -> dil.CG:
        return dil.CG(rtol=config.rtol, max_steps=1000, preconditioner=preconditioner, flexible=flexible)

    nystrom = dil.Nystrom(rank=config.rank)
    return {
        "none": cg(),
        "direct": dil.Dense(),
        "warm start": dil.WarmStart(cg()),
        "Jacobi": cg(dil.Jacobi()),
        "Jacobi, kept": cg(Kept(dil.Jacobi())),
        "diagonal, kept": cg(Kept(Diagonal())),
        "Nyström": cg(nystrom),
        "Nyström, kept": cg(Kept(nystrom)),
        "secants": cg(dil.SecantMemory()),
        "factor, kept": cg(Kept(Factor())),
        "inner CG": cg(InnerCG(config.inner_steps)),
        "inner CG, flexible": cg(InnerCG(config.inner_steps), flexible=True),
        "float32, flexible": cg(InnerFloat32(problem, parameters, config.inner_rtol), flexible=True),
    }


class Compared(dil.LinearSolver):
    """Solves each system in all ways, in turn, and answers with the first.

    Args:
        solvers: the ways by name.

    Attributes:
        solves: for each way what each solve took.
        reference: the first system's solution by a direct solve.
    """

    def __init__(self, solvers: dict[str, dil.LinearSolver]):
        super().__init__(preconditioner=dil.SecantMemory())  # so that the steps of the forward solver are kept
        self.solvers = solvers
        self.solves: dict[str, list[dict[str, Any]]] = {name: [] for name in solvers}
        self.reference: Tensor | None = None

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        if self.reference is None:
            self.reference = dil.Dense().solve(operator, rhs, transpose=transpose).value
            self.solvers["none"].solve(operator, rhs, transpose=transpose)  # the first product is slow
        first = not self.solves["none"]
        results = {}
        for name, solver in self.solvers.items():
            cheap, before = _cheap_products(solver), operator.products
            began = time.process_time()
            result = results[name] = solver.solve(operator, rhs, transpose=transpose)
            seconds = time.process_time() - began
            solve = {
                "steps": int(result.stats.steps.max()),
                "products": operator.products - before,
                "cheap": _cheap_products(solver) - cheap,
                "seconds": seconds,
                "failed": int((result.status != int(dil.Status.converged)).sum()),
            }
            if first:
                solve["error"] = float((result.value - self.reference).norm() / self.reference.norm())
                solve["history"] = _history(result, rhs)
            self.solves[name].append(solve)
        return results["none"]

    # Dataclasses compare by their fields, and this one has none of its own.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def _cheap_products(solver: dil.LinearSolver) -> int:
    return getattr(solver.preconditioner, "products", 0)


def _history(result: Result, rhs: Tensor) -> list[list[float]]:
    """Pairs (step, log₁₀ of the relative residual of the worst sample), thinned out."""
    norm = rhs.norm(dim=1)
    worst = [float((residual / norm).max()) for residual in result.stats.history]
    kept = sorted({round(k) for k in torch.linspace(0, len(worst) - 1, min(POINTS, len(worst))).tolist()})
    return [[k, round(math.log10(max(worst[k], 1e-99)), 3)] for k in kept]


def train(config: Config, seed: int) -> tuple[dict[str, list[dict[str, Any]]], dict[str, Any]]:
    """All solves of one training run in all ways, and numbers of the problem."""
    problem = PROBLEMS[config.problem](seed, config.size)
    parameters = tuple(p.clone().requires_grad_() for p in problem.parameters)
    compared = Compared(ways(config, problem, parameters))
    optimiser = torch.optim.Adam(parameters, lr=problem.learning_rate)
    losses, forward, condition = [], [], 0.0
    for _ in range(config.steps):
        solution = dil.argmin(
            problem.energy,
            problem.start,
            (parameters, problem.data),
            solver=dil.LBFGS(rtol=1e-6, max_steps=5000, history=30),  # leaves the steps that SecantMemory uses
            linear_solver=compared,
            on_failure="raise",
        )
        loss = problem.loss(solution.value)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
        forward.append(int(solution.stats.steps.max()))
        if not condition:
            assert solution.report.ritz is not None
            condition = float((solution.report.ritz[1] / solution.report.ritz[0]).max())
    samples, n = problem.start.shape
    about = {"samples": samples, "unknowns": n, "condition": condition, "losses": losses, "forward_steps": forward}
    return compared.solves, about


def variants(config: Config) -> list[Config]:
    """One for each problem."""
    return [replace(config, problem=name) for name in PROBLEMS]


def run(config: Config, seed: int) -> dict[str, Any]:
    """One problem: what each way took in the first solve, and in the training run."""
    solved, about = train(config, seed)
    found = {}
    for name, solves in solved.items():
        total = {key: sum(solve[key] for solve in solves) for key in ("steps", "products", "cheap", "failed", "seconds")}
        found[name] = {
            "first": {key: solves[0][key] for key in ("steps", "products", "cheap", "seconds")},
            "run": total,
            "error": solves[0]["error"],
            "history": solves[0]["history"],
        }
    return _short(about | {"ways": found})


def _short(value: Any) -> Any:
    """With four digits of each number."""
    if isinstance(value, dict):
        return {key: _short(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_short(part) for part in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
