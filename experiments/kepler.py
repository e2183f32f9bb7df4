"""Kepler's equation M = E - e sin E as a layer, E(e) = argmin_u (u - e sin u - M)², and e learned so that E meets a target.

The paper's Figure 1, the gradient field also at points u that do not solve the inner problem, and a measured answer to its open
question: how exact must the inner solution be? The derivative is known, dE/de = sin E / (1 - e cos E). The score is the one of
the paper; a factor ½ would change no implicit gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchdil as dil

STATEMENTS = ("argmin", "root")
# Distances from the argmin-line, |u - E(e)|, between which the field is judged.
DISTANCES = (0.0, 0.1, 0.3, 1.0, math.inf)
# Why the e-arrow at a point leads away from the target's e.
RIGHT, PAST, MIXED, CURVATURE = range(4)


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment.

    Attributes:
        M, target, first_e: the problem of Figure 1, and where learning starts.
        off_line: a point (e, u) from where learning with one inner step at a time is shown.
        largest_e: e is kept in [0, largest_e].
        learning_rate, outer_steps: of the gradient descent in e.
        step_size: of the inner gradient descent that is stopped after a few steps.
        arrows, points: of the field, along each axis: to draw, and to judge.
        problems: random ones, M and e uniform in their ranges.
        reached: learning has succeeded when |E(e) - target| is less.
        tolerances: of the inner solver, which then takes as many steps as it needs.
        inner_steps: of the inner solver, which then stops wherever it is.
        runs: one is the whole experiment.
    """

    M: float = 1.0
    target: float = 1.5
    first_e: float = 0.05
    off_line: tuple[float, float] = (0.15, 2.7)
    largest_e: float = 0.95
    learning_rate: float = 0.5
    outer_steps: int = 100
    step_size: float = 0.2
    arrows: int = 14
    points: int = 60
    problems: int = 128
    M_range: tuple[float, float] = (0.3, 2.0)
    e_range: tuple[float, float] = (0.05, 0.9)
    reached: float = 1e-3
    tolerances: tuple[float, ...] = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-12)
    inner_steps: tuple[int, ...] = (1, 5, 20)
    runs: int = 1

    @staticmethod
    def preset(name: str) -> Config:
        smoke = Config(outer_steps=40, arrows=8, points=16, problems=16, tolerances=(1.0, 1e-2, 1e-6), inner_steps=(1,))
        tolerances = tuple(10.0**-k for k in range(13))
        paper = Config(
            outer_steps=200, points=160, problems=1000, tolerances=tolerances, inner_steps=(1, 2, 5, 10, 20, 50, 100, 200)
        )
        return {"smoke": smoke, "quick": Config(), "paper": paper}[name]


class Problems(NamedTuple):
    """A batch of learning problems, (B,) each: find e with E(e) = target; `e` and `u` are where to start."""

    M: Tensor
    target: Tensor
    e: Tensor
    u: Tensor


class Learning(NamedTuple):
    """A batch of runs: e (T+1, B) before each step and after the last, and the inner solution u (T, B) of each step."""

    e: Tensor
    u: Tensor


def residual(u: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
    """Kepler's equation, (B,)."""
    e, M = x
    return u - e * torch.sin(u) - M


def score(u: Tensor, x: tuple[Tensor, Tensor]) -> Tensor:
    """What E minimises, (B,)."""
    return residual(u, x).square()


def exact(e: Tensor, M: Tensor) -> Tensor:
    """E for 0 <= e < 1 and 0 <= M <= π: Newton from π, which descends on a convex function and cannot miss."""
    u = torch.full_like(e + M, math.pi)
    for _ in range(40):
        u = u - (u - e * torch.sin(u) - M) / (1 - e * torch.cos(u))
    return u


def exact_derivative(e: Tensor, M: Tensor) -> Tensor:
    """dE/de in closed form."""
    E = exact(e, M)
    return torch.sin(E) / (1 - e * torch.cos(E))


def parts(statement: str, u: Tensor, e: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """-∂F/∂e and J = ∂F/∂u, up to a common factor: their quotient is what the theorem says of dE/de at u."""
    r, J = residual(u, (e, M)), 1 - e * torch.cos(u)
    if statement == "root":  # F = r
        return torch.sin(u), J
    return torch.sin(u) * J + r * torch.cos(u), J.square() + r * e * torch.sin(u)  # F = ∂(½ r²)/∂u = r (1 - e cos u)


def derivative(statement: str, u: Tensor, e: Tensor, M: Tensor) -> Tensor:
    """dE/de as the layer gives it at u, which need not solve anything, (B,)."""
    e = e.clone().requires_grad_()
    if statement == "root":
        value = dil.attach(residual, u, ((e, M),), batch_dims=1, on_failure="ignore")
    else:
        value = dil.argmin(score, u, ((e, M),), solver=lambda _, u: u, on_failure="ignore").value
    return torch.autograd.grad(value.sum(), e)[0]


def learn(config: Config, problems: Problems, solver: dil.Solver, warm: bool, statement: str = "argmin") -> Learning:
    """Gradient descent in e on ½ (u - target)², u being what the inner solver leaves; warm: it starts from its last u."""
    M, target, e, start = problems
    init = dil.LastSolution(lambda _: start) if warm else lambda _: start
    layer = dil.ArgminLayer(score, solver=solver, init=init, on_failure="ignore")
    path, values = [e], []
    for _ in range(config.outer_steps):
        e = e.detach().requires_grad_()
        u = layer((e, M))
        if statement == "root":  # the same u, differentiated as a root
            u = dil.attach(residual, u.detach(), ((e, M),), batch_dims=1, on_failure="ignore")
        (gradient,) = torch.autograd.grad(0.5 * (u - target).square().sum(), e)
        e = (e.detach() - config.learning_rate * gradient).clamp(0, config.largest_e)
        path.append(e)
        values.append(u.detach())
    return Learning(torch.stack(path), torch.stack(values))


def run(config: Config, seed: int) -> dict[str, Any]:
    """The field, the paths and what inexact inner solutions do."""
    problems = _random_problems(config, seed)
    pooled: list[Tensor] = []
    tolerances = [_judge(config, problems, dil.GradientDescent(rtol=rtol), pooled) for rtol in config.tolerances]
    steps = [_judge(config, problems, _slow(config, n), pooled) for n in config.inner_steps]
    return {
        "target_e": (config.target - config.M) / math.sin(config.target),
        "path": _path(config, dil.Newton(), (config.first_e, config.M), "argmin"),
        "field": {statement: _field(config, statement) for statement in STATEMENTS},
        "reference": _success(config, problems, learn(config, problems, dil.Newton(), warm=False)),
        "tolerances": [{"tolerance": rtol} | row for rtol, row in zip(config.tolerances, tolerances, strict=True)],
        "inner_steps": [{"inner_steps": n} | row for n, row in zip(config.inner_steps, steps, strict=True)],
        "one_inner_step": {statement: _one_inner_step(config, problems, statement) for statement in STATEMENTS},
        "factors": _factors(config, problems, torch.cat(pooled, dim=1)),
    }


def _random_problems(config: Config, seed: int) -> Problems:
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(config.problems, generator=generator, dtype=torch.float64)

    M, target_e, e = uniform(*config.M_range), uniform(*config.e_range), uniform(*config.e_range)
    return Problems(M, exact(target_e, M), e, M)


def _path(config: Config, solver: dil.Solver, start: tuple[float, float], statement: str) -> dict[str, list[float]]:
    """The points (e, u) of one run, the inner solver warm."""
    problem = Problems(*torch.tensor([[config.M], [config.target], [start[0]], [start[1]]], dtype=torch.float64))
    learning = learn(config, problem, solver, warm=True, statement=statement)
    return {"e": _numbers(learning.e[:-1, 0]), "u": _numbers(learning.u[:, 0])}


def _slow(config: Config, steps: int) -> dil.Solver:
    """Gradient descent that stops after a few steps, wherever it is."""
    return dil.GradientDescent(rtol=1e-12, max_steps=steps, step_size=config.step_size)


def _grid(config: Config, points: int) -> tuple[Tensor, Tensor, Tensor]:
    """e, u and M at the centres of the cells of [0, largest_e] × [0, π], (points²,), u by rows."""
    centres = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    u, e = torch.meshgrid(math.pi * centres, config.largest_e * centres, indexing="ij")
    return e.reshape(-1), u.reshape(-1), torch.full((points**2,), config.M, dtype=torch.float64)


def _moves(config: Config, statement: str, e: Tensor, u: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    """The changes of e and u in one step of learning with one inner step, relative to the sizes of the plane."""
    de = -config.learning_rate * (u - config.target) * derivative(statement, u, e, M)
    du = -config.step_size * 2 * residual(u, (e, M)) * (1 - e * torch.cos(u))
    return de / config.largest_e, du / math.pi


def _field(config: Config, statement: str) -> dict[str, Any]:
    """Where the arrows point, as arrows to draw and as shares of the plane."""
    target_e = (config.target - config.M) / math.sin(config.target)
    e, u, M = _grid(config, config.arrows)
    de, du = _moves(config, statement, e, u, M)
    length = torch.hypot(de, du)
    arrows = {"e": e, "u": u, "de": de / length, "du": du / length}

    e, u, M = _grid(config, config.points)
    de, du = _moves(config, statement, e, u, M)
    mixed, J = parts(statement, u, e, M)
    right = de * (target_e - e) > 0
    # The e-arrow is minus (u - target) · mixed / J: it errs where an odd number of the factors has the wrong sign.
    cause = torch.where(mixed / J > 0, PAST, torch.where(J < 0, CURVATURE, MIXED))
    cause = torch.where(right, RIGHT, cause)
    distance = (u - exact(e, M)).abs()
    shells = [(distance >= near) & (distance < far) for near, far in pairwise(DISTANCES)]
    acute = de * (target_e - e) / config.largest_e + du * (config.target - u) / math.pi > 0
    plane = Problems(M, torch.full_like(M, config.target), e, u)
    end = learn(config, plane, _slow(config, 1), warm=True, statement=statement).e[-1]

    along = torch.linspace(0, config.largest_e, 201, dtype=torch.float64)
    line = exact(along, torch.full_like(along, config.M))
    on_line, _ = _moves(config, statement, along, line, torch.full_like(along, config.M))
    return {
        "path": _path(config, _slow(config, 1), config.off_line, statement),
        "arrows": {name: _numbers(values) for name, values in arrows.items()},
        "causes": ["".join(map(str, row)) for row in cause.reshape(config.points, -1).tolist()],
        "right_on_the_line": _share(on_line * (target_e - along) > 0),
        "right_by_distance": [_share(right[shell]) for shell in shells],
        "right": _share(right),
        "wrong_by_cause": {
            name: _share(cause == code) for name, code in (("past", PAST), ("mixed", MIXED), ("curvature", CURVATURE))
        },
        "negative_curvature": _share(J < 0),
        "acute": _share(acute),
        "arrives": _share((exact(end, M) - config.target).abs() < config.reached),
    }


def _judge(config: Config, problems: Problems, solver: dil.Solver, pooled: list[Tensor]) -> dict[str, Any]:
    """One inner solver: its error, that of the derivative, what the report says, and how learning fares."""
    M, _, e, start = problems
    leaf = e.clone().requires_grad_()
    solution = dil.argmin(score, start, ((leaf, M),), solver=solver, on_failure="ignore")
    (by_argmin,) = torch.autograd.grad(solution.value.sum(), leaf)
    u, right = solution.value.detach(), exact_derivative(e, M)
    assert solution.report.value_error is not None
    errors = {
        "inner_error": (u - exact(e, M)).abs(),
        "reported": solution.report.value_error,
        "derivative_error_argmin": (by_argmin - right).abs(),
        "derivative_error_root": (derivative("root", u, e, M) - right).abs(),
    }
    cold, warm = (learn(config, problems, solver, warm) for warm in (False, True))
    inner, final = last = _last_errors(problems, cold)
    pooled.append(last)
    return {
        **{name: _median(values) for name, values in errors.items()},
        "over_inner_error": {name: _ratio(values, errors["inner_error"]) for name, values in errors.items()},
        "negative_curvature": _share(parts("argmin", u, e, M)[1] < 0),
        "cold": _success(config, problems, cold) | {"final_over_inner": _ratio(final, inner)},
        "warm": _success(config, problems, warm),
    }


def _one_inner_step(config: Config, problems: Problems, statement: str) -> dict[str, Any]:
    """Learning with one inner step at a time, and which of its failures met negative curvature on the way."""
    learning = learn(config, problems, _slow(config, 1), warm=True, statement=statement)
    failed = _last_errors(problems, learning)[1] >= config.reached
    met = (parts("argmin", learning.u, learning.e[:-1], problems.M)[1] < 0).any(dim=0)
    return {"failed": int(failed.sum()), "failed_and_met": int((failed & met).sum()), "met": int(met.sum())}


def _last_errors(problems: Problems, learning: Learning) -> Tensor:
    """|u - E| of the last inner solve and |E - target| of the last e, (2, B)."""
    inner = (learning.u[-1] - exact(learning.e[-2], problems.M)).abs()
    return torch.stack([inner, (exact(learning.e[-1], problems.M) - problems.target).abs()])


def _success(config: Config, problems: Problems, learning: Learning) -> dict[str, Any]:
    """How many runs reached the target, judged by the exact E, in how many steps, and what was left."""
    error = (exact(learning.e, problems.M) - problems.target).abs()
    reached = error < config.reached
    # The steps after which it stayed reached.
    steps = (~reached).flip(0).to(torch.int8).argmax(dim=0)
    steps = torch.where(reached.all(dim=0), 0, config.outer_steps + 1 - steps)[reached[-1]]
    return {
        "share": _share(reached[-1]),
        "steps": int(steps.median()) if len(steps) else None,
        "final_error": _median(error[-1]),
        "last_inner_error": _median(_last_errors(problems, learning)[0]),
    }


def _factors(config: Config, problems: Problems, pooled: Tensor) -> dict[str, Any]:
    """How the error of dE/de grows with a small inner error, and what the inner error means for learning from cold starts."""
    M, _, e, _ = problems
    E = exact(e, M)
    w = 1 - e * torch.cos(E)
    slope = (w * torch.cos(E) - e * torch.sin(E).square()) / w.square()  # ∂/∂u of the root's dE/de; the argmin's is twice that
    small = 1e-6
    measured = {s: (derivative(s, E + small, e, M) - exact_derivative(e, M)).abs() / small for s in STATEMENTS}
    inner, final = pooled
    below, off = inner < config.reached, inner > 1e-10
    return {
        "derivative_over_inner": {s: _median(values) for s, values in measured.items()},
        "closed_form": {"argmin": _median(2 * slope.abs()), "root": _median(slope.abs())},
        "final_over_inner": _median(final[off] / inner[off]),
        "success_below": _share(final[below] < config.reached),
        "success_above": _share(final[~below] < config.reached),
    }


def _median(a: Tensor) -> float:
    return float(a.median())


def _ratio(a: Tensor, b: Tensor) -> float | None:
    """The median of a / b where b is more than rounding; None where it seldom is."""
    seen = b > 1e-10
    return _median(a[seen] / b[seen]) if 2 * int(seen.sum()) >= len(b) else None


def _share(mask: Tensor) -> float:
    return round(float(mask.double().mean()), 4)


def _numbers(a: Tensor) -> list[float]:
    return [round(number, 5) for number in a.tolist()]
