"""How inexact may the solves of an implicit layer be? The paper's open question, measured on five learning problems.

Forward solve: y is found to a tolerance only, the backward solve is exact. Backward solve: y is exact, CG stops at a tolerance.
Either way the gradient is compared with the exact one, at random parameters, and with the error that the report estimates; and
models are trained with it, and their final loss, with exact solves, is compared with that of training with exact solves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchdil as dil
from experiments.inexact_problems import PROBLEMS, Draw, Problem

Solvers = tuple[dil.Solver, dil.LinearSolver]
DIRECT = dil.Dense()
# Models are trained with these tolerances; between those and rounding nothing happens that training would show.
LOOSE = 10**-0.5, 1e-1, 10**-1.5, 1e-2, 10**-2.5, 1e-3
TIGHT = tuple(10.0**-k for k in range(4, 13))
# Of Adam: a shorter memory than usual, since training is short.
BETAS = 0.7, 0.99


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment.

    Attributes:
        problem: a key of `experiments.inexact_problems.PROBLEMS`.
        models: learning problems in one run, solved and trained together.
        noise: in the data, relative to their standard deviation.
        tolerances: of the solves whose gradients are judged.
        training_tolerances: of the solves that models are trained with, some of `tolerances`.
        steps: of Adam.
        runs: seeds.
    """

    problem: str = "Kepler"
    models: int = 8
    noise: float = 0.05
    tolerances: tuple[float, ...] = (1.0, *LOOSE, *TIGHT)
    training_tolerances: tuple[float, ...] = LOOSE
    steps: int = 40
    runs: int = 10

    @staticmethod
    def preset(name: str) -> Config:
        few = 10**-0.5, 1e-1, 1e-2
        smoke = Config(models=3, tolerances=(1.0, *few, *TIGHT[:2]), training_tolerances=few[::2], steps=5, runs=1)
        quick = Config(tolerances=(1.0, *few, *TIGHT[::2]), training_tolerances=few, steps=20, runs=1)
        return {"smoke": smoke, "quick": quick, "paper": Config()}[name]


def variants(config: Config) -> list[Config]:
    """One for each problem."""
    return [replace(config, problem=name) for name in PROBLEMS]


class Gradient(NamedTuple):
    """Solutions and gradients of all models, and what the report says of them.

    Attributes:
        y: the solutions, (models, unknowns).
        adjoint: the solutions of the backward solve, (models, unknowns); None where they cannot be had.
        gradient: of each model's loss, (models, parameters).
        value_estimate: the estimated error of y, (models,), or None.
        adjoint_estimate: the estimated relative error of the adjoint, (models,), not finite where there is none, or None.
        inner_steps, linear_steps: of the solves, the mean over the samples.
    """

    y: Tensor
    adjoint: Tensor | None
    gradient: Tensor
    value_estimate: Tensor | None
    adjoint_estimate: Tensor | None
    inner_steps: float
    linear_steps: float


def gradient_of(problem: Problem, solver: dil.Solver, linear_solver: dil.LinearSolver) -> Gradient:
    """One forward and one backward pass."""
    y, report = problem.solve(solver, linear_solver)
    probe = [problem.probe] if problem.probe.numel() else []
    gradients = torch.autograd.grad(problem.loss(y).sum(), [*problem.parameters(), *probe])
    parts = [problem.by_model(g) for g in gradients]
    assert report.forward is not None and report.backward is not None
    # The samples of a model are parts of one vector: their errors add up as its parts do, and without one there is no estimate.
    value, adjoint, size = report.value_error, report.adjoint_error, report.backward.stats.norm
    if adjoint is not None and size is not None:
        adjoint = problem.by_model(adjoint * size).norm(dim=1) / problem.by_model(size).norm(dim=1)
    return Gradient(
        y=problem.by_model(y.detach()),
        adjoint=parts.pop() if probe else None,
        gradient=torch.cat(parts, dim=1),
        value_estimate=None if value is None else problem.by_model(value).norm(dim=1),
        adjoint_estimate=adjoint,
        inner_steps=float(report.forward.stats.steps.double().mean()),
        linear_steps=float(report.backward.stats.steps.double().mean()),
    )


def judge(found: Gradient, exact: Gradient, solve: str) -> dict[str, Any]:
    """Relative errors of each model: of the inexact solve, true and as reported, and of the gradient."""
    error: Tensor | None
    if solve == "inner":
        error = _relative(found.y, exact.y)
        estimate = None if found.value_estimate is None else found.value_estimate / exact.y.norm(dim=1)
        steps = found.inner_steps
    else:
        error = None if found.adjoint is None or exact.adjoint is None else _relative(found.adjoint, exact.adjoint)
        estimate, steps = found.adjoint_estimate, found.linear_steps
    cosine = torch.nn.functional.cosine_similarity(found.gradient, exact.gradient, dim=1)
    return {
        "solve_error": _numbers(error),
        "solve_estimate": _numbers(estimate),
        "gradient_error": _numbers(_relative(found.gradient, exact.gradient)),
        "one_minus_cosine": _numbers((1 - cosine).clamp_min(0)),
        "solve_steps": round(steps, 2),
    }


def train(config: Config, problem: Problem, solvers: Solvers, warm: bool) -> None:
    """Adam with a learning rate that falls to zero; warm: a solve starts from the last solution."""
    optimiser = torch.optim.Adam(problem.parameters(), lr=problem.learning_rate, betas=BETAS)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, config.steps)
    last = None
    for _ in range(config.steps):
        optimiser.zero_grad()
        y = problem.solve(*solvers, last).y
        problem.loss(y).sum().backward()
        optimiser.step()
        schedule.step()
        last = y.detach() if warm else None


def run(config: Config, seed: int) -> dict[str, Any]:
    """Gradients and training of one problem over the tolerances of either solve, each model's numbers."""
    problem = PROBLEMS[config.problem](config.models, config.noise, Draw(seed))
    exact, inner = problem.exact, problem.inner

    def forward(rtol: float) -> Solvers:
        return inner(rtol=rtol), DIRECT

    def backward(rtol: float) -> Solvers:
        return exact, dil.CG(rtol=rtol)

    reference = gradient_of(problem, exact, DIRECT)
    start = {name: value.clone() for name, value in problem.state_dict().items()}

    def loss() -> list[float] | None:
        with torch.no_grad():
            return _numbers(problem.loss(problem.solve(exact, DIRECT).y), digits=5)

    def trained(solvers: Solvers, warm: bool) -> list[float] | None:
        problem.load_state_dict(start)
        train(config, problem, solvers, warm)
        return loss()

    def judged(solve: str, solvers: Callable[[float], Solvers]) -> list[dict[str, Any]]:
        found = {rtol: gradient_of(problem, *solvers(rtol)) for rtol in config.tolerances}
        return [{"tolerance": rtol} | judge(one, reference, solve) for rtol, one in found.items()]

    def training(solvers: Callable[[float], Solvers], warm: bool) -> list[dict[str, Any]]:
        return [{"tolerance": rtol, "loss": trained(solvers(rtol), warm)} for rtol in config.training_tolerances]

    return {
        "inner_solver": inner.__name__,
        "unknowns": reference.y.shape[1],
        "parameters": reference.gradient.shape[1],
        "gradients": {"inner": judged("inner", forward), "cg": judged("cg", backward)},
        "first_loss": loss(),
        # An exact solution does not depend on where the solver starts: from the last one it is found faster.
        "exact_loss": trained((exact, DIRECT), problem.warm),
        "training": {
            "cold": training(forward, warm=False),
            "warm": training(forward, warm=True) if problem.warm else None,
            "cg": training(backward, problem.warm),
        },
    }


def _relative(a: Tensor, exact: Tensor) -> Tensor:
    return (a - exact).norm(dim=1) / exact.norm(dim=1)


def _numbers(a: Tensor | None, digits: int = 3) -> list[float] | None:
    return None if a is None else [float(f"{number:.{digits}g}") for number in a.tolist()]
