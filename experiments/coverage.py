"""Does the report know how wrong it is? Estimated against true errors, over random problems solved badly in random ways.

Each problem is F(y) = A y + s Rᵀ(w ∘ tanh(R y)) - x = 0, A with a random spectrum, stated as an argmin (A symmetric), a root or
a fixed point. Both solvers, their tolerances or numbers of steps, the damping and the loss are drawn too; y* and the exact
gradient are known to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

import torchdil as dil

SPECTRA = ("uniform", "log-uniform", "clustered", "outliers")
LOSSES = ("squared", "linear")
FORWARD: dict[str, tuple[type[dil.Solver], ...]] = {
    "argmin": (dil.Newton, dil.GradientDescent, dil.LBFGS),
    "root": (dil.Newton,),
    "fixed point": (dil.Newton, dil.Picard),
}
ANY = (dil.GMRES, dil.NormalCG, dil.BiCGStab, dil.Dense)
LINEAR: dict[str, tuple[type[dil.LinearSolver], ...]] = {"argmin": (dil.CG, dil.MINRES, *ANY), "root": ANY, "fixed point": ANY}
PAIRS = [(kind, linear) for kind, solvers in LINEAR.items() for linear in solvers]
# The most steps of first-order solvers: with a condition number of 10⁶ they would go on for ever.
PATIENCE = 500
# An error is counted if it is this many times what rounding leaves.
ROUNDINGS = 100
FACTOR = 10.0
QUANTILES = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
ERRORS = ("value", "adjoint", "gradient")
KINDS_OF_NUMBER = ("true", "estimate", "classic")  # None where it is not known, or the true error is at rounding level
COLUMNS = ["kind", "forward", "linear", "loss", "unknowns", "condition"]
COLUMNS += [f"{error}_{number}" for error in ERRORS for number in KINDS_OF_NUMBER]
T = TypeVar("T")


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment.

    Attributes:
        rounds: how often each pair of a kind of problem and a linear solver is drawn.
        samples: problems of one size, solved together with the same settings.
        unknowns: the smallest and the largest problem.
        condition: the largest condition number of A.
        tolerances: the tightest and the loosest of both solves.
        runs: one is the whole experiment.
    """

    rounds: int = 8
    samples: int = 4
    unknowns: tuple[int, int] = (2, 100)
    condition: float = 1e6
    tolerances: tuple[float, float] = (1e-9, 1e-1)
    runs: int = 1

    @staticmethod
    def preset(name: str) -> Config:
        smoke = Config(rounds=4, unknowns=(2, 40))
        return {"smoke": smoke, "quick": Config(), "paper": Config(rounds=24, unknowns=(2, 200))}[name]


class Draw:
    """Random numbers in float64 from one seed."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self._generator, dtype=torch.float64)

    def between(self, low: float, high: float) -> float:
        """A number whose logarithm is uniform."""
        return low * (high / low) ** float(self.uniform(1))

    def one(self, of: Sequence[T]) -> T:
        return of[int(torch.randint(len(of), (1,), generator=self._generator))]

    def chance(self, share: float) -> bool:
        return float(self.uniform(1)) < share

    def spectrum(self, n: int, condition: float) -> Tensor:
        """n eigenvalues from 1/condition to 1, both ends among them."""
        name, u = self.one(SPECTRA), self.uniform(n)
        if name == "uniform":
            values = u
        elif name == "log-uniform":
            values = condition**-u
        elif name == "clustered":
            centres = condition ** -self.uniform(3)
            values = centres[torch.randint(3, (n,), generator=self._generator)] * (0.99 + 0.02 * u)
        else:
            few = max(1, n // 20)
            values = torch.cat([condition ** -self.uniform(few), 0.5 + 0.5 * u[few:]])
        values = values.clamp(1 / condition, 1.0)
        values[0], values[-1] = 1.0, 1 / condition
        return values


class Problems:
    """A batch of problems of one kind and size.

    Attributes:
        y: the exact solutions, (B, n).
        parameters: x (B, n) and w (B, m), which the loss is differentiated with respect to.
        scale: the size of J.
    """

    def __init__(self, draw: Draw, kind: str, config: Config):
        samples, n = config.samples, round(draw.between(*config.unknowns))
        m = max(1, n // 4)
        self.kind, self.scale = kind, draw.between(1e-2, 1e2)
        values = torch.stack([draw.spectrum(n, draw.between(1, config.condition)) for _ in range(samples)])
        Q = torch.linalg.qr(draw.normal(samples, n, n))[0]
        root, turn = (Q * values.sqrt().unsqueeze(1)) @ Q.mT, torch.eye(n, dtype=torch.float64)
        if kind != "argmin":  # eigenvalues off the real axis
            skew = draw.normal(samples, n, n)
            skew = skew - skew.mT
            turn = turn + draw.uniform(samples, 1, 1) * skew / torch.linalg.matrix_norm(skew, 2)[:, None, None]
        self.A = self.scale * root @ turn @ root
        R = draw.normal(samples, m, n)
        self.R = R / R.norm(dim=2, keepdim=True)
        self.s = self.scale * 10 ** (-3 * draw.uniform(samples, 1))
        w = 0.5 + draw.uniform(samples, m)
        if kind == "fixed point":  # y - F(y) must contract
            size = torch.linalg.matrix_norm(self.A, 2) + 1.5 * self.s[:, 0] * torch.linalg.matrix_norm(self.R, 2).square()
            self.A, self.s, self.scale = self.A / size[:, None, None], self.s / size[:, None], 1.0
        self.y = draw.normal(samples, n)
        self.parameters = self.residual(self.y, torch.zeros(()), w), w
        for _ in range(3):  # to the last digit
            self.y = self.y - solve(self.jacobian(self.y), self.residual(self.y, *self.parameters))

    def residual(self, y: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """F, (B, n)."""
        return times(self.A, y) + self.s * times(self.R.mT, w * torch.tanh(times(self.R, y))) - x

    def score(self, y: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """What an argmin minimises, (B,)."""
        z = times(self.R, y).abs()
        log_cosh = z + softplus(-2 * z)  # but for a constant
        return (0.5 * y * times(self.A, y) - x * y).sum(1) + (self.s * w * log_cosh).sum(1)

    def jacobian(self, y: Tensor) -> Tensor:
        """J, (B, n, n)."""
        slope = self.s * self.parameters[1] * (1 - torch.tanh(times(self.R, y)).square())
        return self.A + self.R.mT @ (slope.unsqueeze(2) * self.R)

    def gradient(self, y: Tensor, g: Tensor) -> Tensor:
        """-gᵀ ∂F/∂(x, w), (B, n + m)."""
        return torch.cat([g, -self.s * times(self.R, g) * torch.tanh(times(self.R, y))], dim=1)

    def solve(self, parameters: Sequence[Tensor], solver: dil.Solver, linear_solver: dil.LinearSolver) -> dil.Solution:
        settings: dict[str, Any] = {"solver": solver, "linear_solver": linear_solver, "on_failure": "ignore"}
        start, args = torch.zeros_like(self.y), tuple(parameters)
        if self.kind == "argmin":
            return dil.argmin(self.score, start, args, **settings)
        if self.kind == "root":
            return dil.root(self.residual, start, args, batch_dims=1, **settings)
        return dil.fixed_point(lambda y, x, w: y - self.residual(y, x, w), start, args, batch_dims=1, **settings)


def times(A: Tensor, y: Tensor) -> Tensor:
    """A y per sample, (B, m, n) x (B, n) -> (B, m)."""
    return (A @ y.unsqueeze(2)).squeeze(2)


def solve(A: Tensor, b: Tensor) -> Tensor:
    """A⁻¹ b per sample, (B, n, n) x (B, n) -> (B, n)."""
    return torch.linalg.solve(A, b.unsqueeze(2)).squeeze(2)


def solvers(
    draw: Draw, problems: Problems, linear: type[dil.LinearSolver], config: Config
) -> tuple[dil.Solver, dil.LinearSolver]:
    """Each ends at a random tolerance or, one in five, after a few steps; one backward solve in four is damped."""
    forward = draw.one(FORWARD[problems.kind])
    first, second = (draw.between(*config.tolerances) for _ in range(2))
    most, few = (100, draw.between(1, 8)) if forward is dil.Newton else (PATIENCE, draw.between(5, 100))
    steps = round(few) if draw.chance(0.2) else most
    linear_steps = round(draw.between(2, 50)) if draw.chance(0.2) else None
    damping = problems.scale * draw.between(1e-6, 1e-2) if draw.chance(0.25) else 0.0
    return forward(rtol=first, max_steps=steps), linear(rtol=second, max_steps=linear_steps, damping=damping)


def measure(draw: Draw, kind: str, linear: type[dil.LinearSolver], config: Config) -> list[list[Any]]:
    """One batch: a row a problem, with true and estimated errors."""
    problems = Problems(draw, kind, config)
    solver, linear_solver = solvers(draw, problems, linear, config)
    loss, target = draw.one(LOSSES), draw.normal(*problems.y.shape)

    def cotangent(y: Tensor) -> Tensor:
        return y - target if loss == "squared" else target

    parameters = [p.clone().requires_grad_() for p in problems.parameters]
    solution = problems.solve(parameters, solver, linear_solver)
    solution.value.backward(cotangent(solution.value.detach()))
    gradient, report, y = torch.cat([p.grad for p in parameters], dim=1), solution.report, solution.value.detach()
    assert report.forward is not None and report.forward.stats.norm is not None
    J, J_exact = problems.jacobian(y), problems.jacobian(problems.y)
    g, g_exact = solve(J.mT, cotangent(y)), solve(J_exact.mT, cotangent(problems.y))
    exact_gradient = problems.gradient(problems.y, g_exact)
    condition, eps = torch.linalg.cond(J), torch.finfo(torch.float64).eps
    left = solve(J_exact, problems.residual(problems.y, *problems.parameters)).norm(dim=1) / problems.y.norm(dim=1) + eps
    true = {
        "value": (y - problems.y).norm(dim=1),
        "adjoint": relative(parameters[0].grad, g),  # ∂F/∂x = -I
        "gradient": relative(gradient, exact_gradient),
    }
    rounding = {"value": left * problems.y.norm(dim=1), "adjoint": eps * condition, "gradient": eps * condition + left}
    guess = None
    if report.value_error is not None and report.adjoint_error is not None:
        guess = (report.adjoint_error + report.value_error / report.forward.stats.norm).clamp_max(1.0)
    estimates = {"value": report.value_error, "adjoint": report.adjoint_error, "gradient": guess}
    classics = dict(zip(ERRORS, classic(report), strict=False))
    columns: list[list[Any]] = [condition.tolist()]
    for name in ERRORS:
        counted = true[name] > ROUNDINGS * rounding[name]
        for error in (true[name], estimates[name], classics.get(name)):
            known = [None] * len(y) if error is None else error.tolist()
            columns.append([number if keep else None for number, keep in zip(known, counted.tolist(), strict=True)])
    names = [kind, type(solver).__name__, linear.__name__, loss, y.shape[1]]
    return [
        names + [None if number is None else float(f"{number:.3g}") for number in row] for row in zip(*columns, strict=True)
    ]


def classic(report: dil.Report) -> tuple[Tensor, Tensor] | tuple[()]:
    """The textbook's estimates: ‖F‖ / θ_min and ‖v - Jᵀg‖ / (θ_min ‖g‖), θ_min the smallest Ritz or singular value seen."""
    if report.ritz is None or report.forward is None or report.backward is None:
        return ()
    stats = report.backward.stats
    assert stats.norm is not None
    smallest = torch.minimum(*(value.abs() for value in report.ritz)) - stats.damping
    residual = (stats.residual + stats.damping * stats.norm) / stats.norm
    return report.forward.stats.residual / smallest.clamp_min(1e-300), residual / smallest.clamp_min(1e-300)


def relative(a: Tensor | None, exact: Tensor) -> Tensor:
    assert a is not None
    return (a - exact).norm(dim=1) / exact.norm(dim=1)


def run(config: Config, seed: int) -> dict[str, Any]:
    """A row for each problem, see `COLUMNS`, and what they say: shares and ratios by solver and by kind."""
    rows = [
        row
        for number in range(config.rounds)
        for pair, (kind, linear) in enumerate(PAIRS)
        for row in measure(Draw(10**7 * (seed + 1) + 1000 * number + pair), kind, linear, config)
    ]
    return {"columns": COLUMNS, "rows": rows, "summary": summary(rows)}


def summary(rows: list[list[Any]]) -> list[dict[str, Any]]:
    """How often estimates bound the true errors, and how tight they are; by solver, kind and loss."""
    table = [dict(zip(COLUMNS, row, strict=True)) for row in rows]
    names = {"linear": [solver.__name__ for solver in LINEAR["argmin"]], "kind": list(LINEAR), "loss": list(LOSSES)}
    names["forward"] = sorted({solver.__name__ for solvers in FORWARD.values() for solver in solvers})
    groups = [("all", "all", table)] + [
        (column, name, [row for row in table if row[column] == name]) for column, values in names.items() for name in values
    ]
    return [
        {"error": error, "number": number, "by": column, "name": name, **shares(group, error, number)}
        for error in ERRORS
        for number in ("estimate", "classic")
        if (error, number) != ("gradient", "classic")
        for column, name, group in groups
    ]


def shares(table: list[dict[str, Any]], error: str, number: str) -> dict[str, Any]:
    """Of the samples whose true error is more than rounding, and whose estimate is known."""
    counted = [(row[f"{error}_true"], row[f"{error}_{number}"]) for row in table if row[f"{error}_true"] is not None]
    known = [estimate / true for true, estimate in counted if estimate is not None]
    ratios = torch.tensor(known, dtype=torch.float64)
    bounds, within = ratios >= 1, (ratios <= FACTOR) & (ratios >= 1 / FACTOR)
    masks = {"bounds": bounds, "within": within, "both": bounds & within}
    return {
        "samples": len(known),
        "left_out": len(table) - len(counted),
        **{name: round(int(mask.sum()) / len(known), 4) if known else None for name, mask in masks.items()},
        "quantiles": [float(f"{q:.3g}") for q in ratios.quantile(QUANTILES.to(ratios.device))] if known else None,
    }
