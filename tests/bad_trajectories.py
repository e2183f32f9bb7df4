"""Random ordinary differential equations, most of them bad."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from bad_faults import expect, heard, junk, spoil_number
from bad_problems import MOST, NUMBERS, POLICIES, ROUNDING, SINGULAR, Case, Draw, Own, Wrong
from scipy.integrate import solve_ivp
from torch import Tensor

import torchdil as dil


@dataclass
class Trajectory:
    """dy/dt = A y - q y³ + θ cos t, B systems (`batch` None: one)."""

    batch: int | None
    n: int
    dtype: torch.dtype
    A: Tensor
    q: float
    theta: Tensor
    y0: Any
    t: Any
    v: Tensor
    policy: Any
    method: Any
    settings: dict[str, Any] = field(default_factory=dict)
    change: Callable[..., Any] | None = None
    checkable: bool = True

    def good(self, t: Tensor, y: Tensor, A: Tensor, theta: Tensor) -> Tensor:
        return torch.einsum("...ij,...j->...i", A, y) - self.q * y**3 + theta * torch.cos(t)

    def function(self, t: Tensor, y: Tensor, A: Tensor, theta: Tensor) -> Any:
        if self.change is None:
            return self.good(t, y, A, theta)
        return self.change(t, y, lambda t, y: self.good(t, y, A, theta))

    def residual(self, Y: Tensor, y0: Tensor, A: Tensor, theta: Tensor, t: Tensor) -> Tensor:
        """The equations of all steps of one system, (T - 1, n)."""
        before = torch.cat((y0[None], Y[:-1]))
        h, name = (t[1:] - t[:-1])[:, None], str(self.method)

        def f(t: Tensor, Y: Tensor) -> Tensor:
            return torch.stack([self.function(time, y, A, theta) for time, y in zip(t, Y, strict=True)])

        if name == "backward_euler":
            slope = f(t[1:], Y)
        elif name == "trapezoid":
            slope = 0.5 * (f(t[:-1], before) + f(t[1:], Y))
        else:
            slope = f(0.5 * (t[:-1] + t[1:]), 0.5 * (before + Y))
        return Y - before - h * slope


def trajectory(draw: Draw) -> Case:
    batch, n = draw.choice([None, 0, 1, 3]), draw.randint(1, 3)
    dtype = draw.choice([torch.float64, torch.float64, torch.float32])
    shape = () if batch is None else (batch,)
    steps = draw.randint(1, 6)
    problem = Trajectory(
        batch,
        n,
        dtype,
        (draw.normal(n, n) - 2 * torch.eye(n, dtype=torch.float64, device=draw.device)).to(dtype),
        draw.choice([0.0, 0.3]),
        draw.normal().to(dtype),
        draw.normal(*shape, n).to(dtype),
        torch.linspace(0, 1, steps + 1, dtype=dtype, device=draw.device),
        draw.normal(steps + 1, *shape, n).to(dtype),
        draw.choice(POLICIES),
        draw.choice(["backward_euler", "backward_euler", "trapezoid", "implicit_midpoint", "radauIIA5", "kvaerno5", "rk4"]),
        {"batch_dims": int(batch is not None)},
    )
    if problem.method == "kvaerno5" or (problem.method == "radauIIA5" and draw.random() < 0.5):
        problem.settings |= {"rtol": 1e-5, "atol": 1e-6, "options": {"max_steps": 200}}
    if draw.random() < 0.3:
        problem.settings["gradient"] = draw.choice(["adjoint", "backprop"])
        if problem.settings["gradient"] == "backprop" and (problem.method == "kvaerno5" or "rtol" in problem.settings):
            problem.settings["gradient"] = "ift"
    if draw.random() < 0.3:
        problem.settings["solver"] = draw.choice([dil.Newton(), dil.Picard(max_steps=50), dil.Broyden(max_steps=50)])
    if draw.random() < 0.3:
        problem.settings["linear_solver"] = draw.choice([dil.CG(), dil.GMRES(), dil.Dense(), dil.BiCGStab(), dil.Auto()])
    case = Case("odeint", lambda: run_trajectory(problem))
    for _ in range(draw.choice([1, 1, 2])):
        fault = draw.choice(TRAJECTORY_FAULTS)
        fault(draw, problem, case)
        case.faults.append(fault.__name__)
    case.name = f"odeint ({problem.method!r}, {problem.settings}, {problem.policy!r}, batch {batch}, n {n}, {dtype})"
    return case


def run_trajectory(problem: Trajectory) -> str:
    A, theta, y0 = (
        t.detach().clone().requires_grad_()
        if isinstance(t, Tensor) and t.is_floating_point() and t.layout == torch.strided
        else t
        for t in (problem.A, problem.theta, problem.y0)
    )
    inputs = [t for t in (A, theta, y0) if isinstance(t, Tensor) and t.requires_grad]

    def call() -> Any:
        solution = dil.ode.solve(
            lambda t, y: problem.function(t, y, A, theta),
            y0,
            problem.t,
            method=problem.method,
            on_failure=problem.policy,
            **problem.settings,
        )
        grads, y = None, solution.value
        if isinstance(y, Tensor) and y.requires_grad:
            v = problem.v if problem.v.shape == y.shape else torch.ones_like(y)
            grads = torch.autograd.grad(y, inputs, v.to(y), allow_unused=True, materialize_grads=True)
        str(solution.report)
        return solution, grads

    found, messages = heard(problem.policy, call)
    if found is None:
        return "reported"
    solution, grads = found
    report, y = solution.report, solution.value
    forward = report.forward.converged.reshape(-1).cpu()
    backward = forward if report.backward is None else report.backward.converged.reshape(-1).cpu()
    good = forward & (backward if backward.shape == forward.shape else bool(backward.all()))
    if problem.policy in ("warn", "raise") and not bool(good.all()) and not messages:
        raise Wrong("a failure without a word")
    if y.numel() and y.numel() % len(good) == 0:
        rows = y.detach().reshape(len(y), len(good), -1)[:, good.to(y.device)]
        if not bool(rows.isfinite().all()):
            raise Wrong("converged where y is not finite")
    shape = () if problem.batch is None else (problem.batch,)
    known = problem.method in ("backward_euler", "trapezoid", "implicit_midpoint")
    if problem.checkable and y.shape[1:] == (*shape, problem.n):
        if known:
            check_trajectory(problem, y, grads, forward, good)
        elif "rtol" in problem.settings or problem.method == "kvaerno5":
            compare_trajectory(problem, y, forward)
    return "right" if bool(good.all()) else "reported"


def check_trajectory(problem: Trajectory, y: Tensor, grads: Any, forward: Tensor, good: Tensor) -> None:
    samples, n, steps = len(good), problem.n, len(problem.t) - 1
    Y = y.detach().double().reshape(steps + 1, samples, n)
    v = problem.v.double().reshape(steps + 1, samples, n)
    A, theta, t = problem.A.double(), problem.theta.double(), problem.t.double()
    y0 = problem.y0.detach().double().reshape(samples, n)
    total, size, complete, tolerance = torch.zeros_like(theta), 0.0, True, 0.0
    exact = problem.settings.get("gradient") != "adjoint"
    for i in range(samples):
        if not bool(forward[i]):
            complete = False
            continue
        F = problem.residual(Y[1:, i], y0[i], A, theta, t).reshape(-1)
        J, J_y, J_theta = torch.func.jacrev(problem.residual, (0, 1, 3))(Y[1:, i], y0[i], A, theta, t)
        J, J_y, J_theta = J.reshape(F.numel(), -1), J_y.reshape(F.numel(), n), J_theta.reshape(-1)
        if not bool(J.isfinite().all()):
            raise Wrong(f"system {i} is converged where J is not finite")
        values = torch.linalg.svdvals(J)
        condition = float(values[0] / values[-1]) if float(values[-1]) > 0 else float("inf")
        if condition > SINGULAR[problem.dtype]:
            complete = False
            continue
        if problem.method != "backward_euler":
            # The next state is a row of its own, a difference of numbers as large as the slopes.
            condition *= float(values[0])
            if condition > SINGULAR[problem.dtype]:
                complete = False
                continue
        tolerance = min(ROUNDING[problem.dtype] * condition, MOST[problem.dtype])
        if not float(torch.linalg.solve(J, F).norm()) <= tolerance * max(float(Y[:, i].norm()), 1.0):
            raise Wrong(f"system {i} is off by {float(torch.linalg.solve(J, F).norm()):.1e}, y = {Y[:, i].tolist()}")
        if grads is None or not bool(good[i]) or not exact:
            complete = False
            continue
        g = torch.linalg.solve(J.mT, v[1:, i].reshape(-1))
        scale = float(g.norm() * J_y.norm() + v[0, i].norm())
        if len(grads) == 3:
            expect(grads[2].reshape(samples, n)[i], v[0, i] - g @ J_y, tolerance, scale, f"gradient of y0 of system {i}")
        total, size = total - g @ J_theta, size + float(g.norm() * J_theta.norm())
    if complete and grads is not None:
        expect(grads[1], total, max(tolerance, ROUNDING[problem.dtype]), size + 1e-300, "gradient of θ")


def compare_trajectory(problem: Trajectory, y: Tensor, forward: Tensor) -> None:
    """Adaptive steps against SciPy's."""
    t = problem.t.detach().double().cpu().numpy()
    rows = y.detach().double().reshape(len(t), len(forward), problem.n)
    A, theta, y0 = problem.A.double(), problem.theta.double(), problem.y0.detach().double().reshape(len(forward), problem.n)
    if not all(bool(part.isfinite().all()) for part in (A, theta, y0)):
        if bool(forward.any()) and len(forward) == 1:
            raise Wrong("converged though the numbers are none")
        return
    for i in range(len(forward)):
        if not bool(forward[i]):
            continue

        def f(time: float, u: Any) -> Any:
            time, u = (torch.as_tensor(part, dtype=torch.float64, device=y.device) for part in (time, u))
            return problem.function(time, u, A, theta).cpu().numpy()

        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                exact = solve_ivp(f, (t[0], t[-1]), y0[i].cpu().numpy(), "Radau", t, rtol=1e-9, atol=1e-9)
            except ValueError:  # numbers that SciPy cannot digest
                continue
        if exact.success:
            truth = torch.as_tensor(exact.y.T, device="cpu")
            off = float((rows[:, i].cpu() - truth).norm())
            if not off <= 0.02 * max(float(truth.norm()), 1e-3):
                raise Wrong(f"system {i} is off by {off:.1e}, y = {rows[:, i].tolist()}, SciPy {truth.tolist()}")
        else:
            raise Wrong(f"system {i} is converged where SciPy says: {exact.message}")


def numbers_of_a_trajectory(draw: Draw, problem: Trajectory, case: Case) -> None:
    name = draw.choice(["A", "theta", "y0", "v", "t"])
    t = getattr(problem, name)
    if isinstance(t, Tensor) and t.is_floating_point() and t.layout == torch.strided and t.device.type != "meta":
        setattr(problem, name, spoil_number(draw, t))


def times(draw: Draw, problem: Trajectory, case: Case) -> None:
    t = problem.t
    problem.checkable = False
    if not isinstance(t, Tensor) or t.dim() != 1:
        return
    choices = [t.flip(0), t[:1], t[:0], t.repeat(2), t.unsqueeze(0), t * 0, t.long(), t.to(torch.complex64), t.to("meta")]
    choices += [
        t.tolist(),
        None,
        1.0,
        "t",
        t.half(),
        t.double(),
        t.float(),
        t[torch.randperm(len(t), generator=draw._generator)],
    ]
    problem.t = draw.choice([*choices, t * 1e6, t + 1e12, t * 1e-14])


def state(draw: Draw, problem: Trajectory, case: Case) -> None:
    if isinstance(problem.y0, Tensor):
        case.own, problem.checkable, problem.y0 = True, False, junk(draw, problem.y0)


def explosion(draw: Draw, problem: Trajectory, case: Case) -> None:
    """A solution that ends before t does, or steps without one."""
    problem.q = -draw.choice([1.0, 30.0, 1e6])


def steps_without_an_answer(draw: Draw, problem: Trajectory, case: Case) -> None:
    """h λ = 1, so that I - h A is singular, if steps are those of backward Euler."""
    if isinstance(problem.t, Tensor) and problem.t.dim() == 1 and len(problem.t) > 1:
        problem.q = 0.0
        problem.A = torch.eye(problem.n, dtype=problem.dtype, device=draw.device) * (len(problem.t) - 1)


def stiff(draw: Draw, problem: Trajectory, case: Case) -> None:
    problem.A = problem.A * 10.0 ** draw.uniform(2, 9)


def field_of_another_kind(draw: Draw, problem: Trajectory, case: Case) -> None:
    problem.checkable = False
    other = torch.float32 if problem.dtype == torch.float64 else torch.float64
    convert = draw.choice(
        [
            lambda f: None,
            lambda f: 1.0,
            lambda f: (f, f),
            lambda f: f.detach().cpu().numpy(),
            lambda f: f.long(),
            lambda f: f.to(other),
            lambda f: f.to("meta"),
            lambda f: f.unsqueeze(0),
            lambda f: f.unsqueeze(-1),
            lambda f: f.sum(),
            lambda f: f.detach(),
            lambda f: f.to_sparse(),
        ]
    )
    case.own = True
    problem.change = lambda t, y, good: convert(good(t, y))


def field_without_numbers(draw: Draw, problem: Trajectory, case: Case) -> None:
    """From some time on, or somewhere, f is no number."""
    problem.checkable = False
    number, place = draw.choice(NUMBERS), draw.choice([0.0, 0.3, 0.99])
    problem.change = draw.choice(
        [
            lambda t, y, good: torch.where(t > place, number, good(t, y)),
            lambda t, y, good: torch.where(good(t, y) > place, number, good(t, y)),
            lambda t, y, good: torch.where(y > place, number, good(t, y)),
        ]
    )


def field_that_raises(draw: Draw, problem: Trajectory, case: Case) -> None:
    calls, at = [0], draw.randint(1, 10)
    problem.checkable = False

    def change(t: Tensor, y: Tensor, good: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise Own("enough")
        return good(t, y)

    problem.change = change


def field_with_a_jump(draw: Draw, problem: Trajectory, case: Case) -> None:
    problem.checkable = False
    problem.change = draw.choice(
        [
            lambda t, y, good: good(t, y) - 10 * y.sign(),
            lambda t, y, good: good(t, y) + 100 * torch.floor(3 * y),
            lambda t, y, good: good(t, y) + torch.sqrt(y),
            lambda t, y, good: good(t, y) / y,
        ]
    )


def field_that_mixes(draw: Draw, problem: Trajectory, case: Case) -> None:
    """Samples that are said to be independent and are not."""
    if problem.batch is not None and problem.batch > 1:
        problem.checkable = False
        problem.change = lambda t, y, good: good(t, y + 0.5 * y.mean(0))


def settings_of_a_trajectory(draw: Draw, problem: Trajectory, case: Case) -> None:
    name, values = draw.choice(
        [
            ("batch_dims", [-1, 5, 1.0, "1", None]),
            ("gradient", ["autograd", None, 3]),
            ("rtol", [-1.0, "small", float("nan"), 0.0, float("inf"), 1e300, 1e-300]),
            ("atol", [-1.0, "small", float("nan"), float("inf"), 1e-300]),
            (
                "options",
                [[], {"step": 1}, {"step_size": 0.0}, {"substeps": -1}, {"max_steps": 0}, {"first_step": float("nan")}],
            ),
            ("options", [{"max_steps": 1}, {"first_step": 1e-300}, {"first_step": 1e300}, {"checkpoint": 3}, {"substeps": 2}]),
            ("solver", ["newton", dil.Newton, dil.CG(), dil.GradientDescent(), 3, dil.control.DDP()]),
            ("linear_solver", ["cg", dil.CG, dil.Newton(), dil.MINRES(), 3, dil.control.Stein()]),
        ]
    )
    problem.settings[name] = draw.choice(values)
    problem.checkable = False


TRAJECTORY_FAULTS = [
    numbers_of_a_trajectory,
    numbers_of_a_trajectory,
    numbers_of_a_trajectory,
    times,
    state,
    explosion,
    steps_without_an_answer,
    stiff,
    field_of_another_kind,
    field_without_numbers,
    field_that_raises,
    field_with_a_jump,
    field_that_mixes,
    settings_of_a_trajectory,
]
