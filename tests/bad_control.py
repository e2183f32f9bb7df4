"""Random Riccati equations, regulators and plans, most of them bad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bad_faults import expect, heard, junk, spoil_number
from bad_problems import MOST, POLICIES, ROUNDING, SINGULAR, Case, Draw, Wrong
from torch import Tensor

import torchdil as dil

# --- Riccati equations and regulators ---------------------------------------------------------------------------------------


def system(draw: Draw) -> tuple[dict[str, Any], tuple[int, ...], torch.dtype]:
    """A, B, Q, R of a system with an answer."""
    n, m, shape = draw.randint(1, 3), draw.randint(1, 2), draw.choice([(), (), (0,), (1,), (3,)])
    dtype = draw.choice([torch.float64, torch.float64, torch.float32])
    made = {
        "A": draw.normal(*shape, n, n),
        "B": draw.normal(*shape, n, m),
        "Q": draw.matrices(shape, [draw.uniform(0.5, 3) for _ in range(n)]),
        "R": draw.matrices(shape, [draw.uniform(0.5, 3) for _ in range(m)]),
    }
    return {name: t.to(dtype) for name, t in made.items()}, shape, dtype


def spoil_system(draw: Draw, made: dict[str, Any], case: Case) -> None:
    """What may be wrong with a system."""
    n, m = made["B"].shape[-2:]
    shape, like = made["A"].shape[:-2], made["A"]
    common, others = ["number", "number", "number", "junk"], ["not symmetric", "large A"]
    ill_posed = ["no control", "circle", "no cost", "R indefinite", "R zero", "Q indefinite"]
    fault = draw.choice([*common, *ill_posed, *others])
    case.faults.append(fault)
    if fault == "number":
        name = draw.choice(list("ABQR"))
        made[name] = spoil_number(draw, made[name])
    elif fault == "junk":
        name = draw.choice(list("ABQR"))
        made[name] = junk(draw, made[name])
    elif fault == "no control":
        made["B"] = 0 * made["B"]
    elif fault == "circle":
        made["A"], made["B"] = torch.linalg.qr(made["A"])[0], 0 * made["B"]
    elif fault == "no cost":
        made["Q"] = 0 * made["Q"]
    elif fault == "R indefinite":
        made["R"] = draw.matrices(shape, [draw.uniform(-3, 1) for _ in range(m)]).to(like)
    elif fault == "R zero":
        made["R"] = 0 * made["R"]
    elif fault == "Q indefinite":
        made["Q"] = draw.matrices(shape, [draw.uniform(-3, 1) for _ in range(n)]).to(like)
    elif fault == "not symmetric":
        made["Q"], made["R"] = made["Q"] + draw.normal(n, n).to(like), made["R"] + 0.1 * draw.normal(m, m).to(like)
    else:
        made["A"] = 10.0 ** draw.randint(1, 8) * made["A"]


def leaves(made: dict[str, Any]) -> dict[str, Any]:
    """Copies that require grad, where they can; None is as good as nothing for what need not be given."""
    made = {name: t for name, t in made.items() if t is not None or name in "ABQR"}
    able = {k: isinstance(t, Tensor) and t.is_floating_point() and t.layout == torch.strided for k, t in made.items()}
    return {k: t.detach().clone().requires_grad_() if able[k] else t for k, t in made.items()}


def riccati(draw: Draw) -> Case:
    made, shape, dtype = system(draw)
    policy, gain = draw.choice(POLICIES), draw.random() < 0.4
    linear_solver = draw.choice(
        [None, None, dil.control.Stein(), dil.CG(), dil.Dense(), dil.GMRES(), "cg", dil.control.Riccati()]
    )
    v = draw.normal(*made["B"].mT.shape if gain else made["A"].shape).to(dtype)
    case = Case("", lambda: run_riccati(made, gain, linear_solver, policy, v, shape))
    for _ in range(draw.choice([0, 1, 1, 1])):
        spoil_system(draw, made, case)
        if not all(isinstance(t, Tensor) and t.dim() >= 2 for t in made.values()):
            break
    case.name = f"{'dlqr' if gain else 'dare'} ({linear_solver!r}, {policy!r}, {shape}, {dtype})"
    return case


def run_riccati(made: dict[str, Any], gain: bool, linear_solver: Any, policy: str, v: Tensor, shape: tuple[int, ...]) -> str:
    given = leaves(made)

    def call() -> Any:
        find = dil.control.dlqr if gain else dil.control.dare
        S = find(*given.values(), linear_solver=linear_solver, on_failure=policy)
        inputs = [t for t in given.values() if t.requires_grad]
        grads = torch.autograd.grad(S, inputs, v if v.shape == S.shape else torch.ones_like(S)) if S.requires_grad else None
        return S.detach(), grads

    found, messages = heard(policy, call)
    if found is None:
        return "reported"
    S, grads = found
    count, dtype = S.shape[:-2].numel(), S.dtype
    fine = S.flatten(-2).isfinite().all(-1).reshape(-1)
    if policy in ("warn", "raise") and not bool(fine.all()) and not messages:
        raise Wrong("NaN without a word")
    if messages or v.shape != S.shape or S.shape[:-2] != shape:
        return "reported" if messages else "right"
    full = [t.detach().double().expand(*shape, *t.shape[-2:]).reshape(count, *t.shape[-2:]) for t in given.values()]
    for i in range(count):
        if bool(fine[i]) and policy != "ignore":  # when only S itself could tell
            grad = [g.double().reshape(count, *g.shape[-2:])[i] for g in grads] if grads else None
            # The gradient tells of a failure.
            if grad and (
                (policy == "nan" and any(bool(g.isnan().any()) for g in grad))
                or (policy == "zero" and all(bool((g == 0).all()) for g in grad))
            ):
                fine[i] = False
                continue
            one = (S.double().reshape(count, *S.shape[-2:])[i], *(t[i] for t in full))
            check_riccati(*one, v.double().reshape(count, *v.shape[-2:])[i], grad, gain, dtype, i)
    return "right" if bool(fine.all()) else "reported"


def check_riccati(
    found: Tensor, A: Tensor, B: Tensor, Q: Tensor, R: Tensor, v: Tensor, grads: Any, gain: bool, dtype: torch.dtype, i: int
) -> None:
    """The stabilising solution, refined in float64, and its derivatives by dense linear algebra."""
    n = len(A)

    def sym(a: Tensor) -> Tensor:
        return 0.5 * (a + a.mT)

    def feedback(S: Tensor, A: Tensor, B: Tensor, R: Tensor) -> Tensor:
        return torch.linalg.solve_ex(sym(R) + B.mT @ S @ B, B.mT @ S @ A)[0]

    def F(s: Tensor, A: Tensor, B: Tensor, Q: Tensor, R: Tensor) -> Tensor:
        S = s.view(n, n)
        return (S - A.mT @ S @ A + A.mT @ S @ B @ feedback(S, A, B, R) - sym(Q)).reshape(-1)

    if gain:
        radius = float(torch.linalg.eigvals(A - B @ found).abs().max())
        # K has its own rounding.
        if not radius < 1 + 100 * torch.finfo(dtype).eps * float(A.norm() + B.norm() * found.norm()):
            raise Wrong(f"the gain of system {i} does not stabilise it: {radius}")
        # S of a stabilising gain: its cost, then Newton's steps, each a Stein equation.
        S, K = torch.zeros(n, n).to(A), found
        for _ in range(30):
            M = A - B @ K
            system = torch.eye(n * n).to(A) - torch.kron(M.mT.contiguous(), M.mT.contiguous())
            S = sym(torch.linalg.solve(system, (sym(Q) + K.mT @ sym(R) @ K).reshape(-1)).view(n, n))
            K = feedback(S, A, B, R)
    else:
        S = found
        radius = float(torch.linalg.eigvals(A - B @ feedback(S, A, B, R)).abs().max())
        if not radius < 1 + 1e-6:
            raise Wrong(f"S of system {i} is not the stabilising one: {radius}")
    J, *partial = torch.func.jacrev(F, (0, 1, 2, 3, 4))(S.reshape(-1), A, B, Q, R)
    values = torch.linalg.svdvals(J)
    if not bool(values.isfinite().all()) or float(values[0]) >= SINGULAR[dtype] * float(values[-1]):
        return
    # Where S is far larger than Q, its own rounding is in F.
    condition = float(values[0] / values[-1]) * max(float(S.norm() / sym(Q).norm().clamp_min(1e-300)), 1.0)
    if gain:  # where R is nothing beside the rest, K hardly depends on S
        condition *= max(float((B.mT @ S @ B).norm() / sym(R).norm().clamp_min(1e-300)), 1.0)
    tolerance = ROUNDING[dtype] * condition
    if not tolerance <= MOST[dtype]:
        return
    if gain:
        expect(found.to(dtype), feedback(S, A, B, R), tolerance, float(found.norm()) + 1e-3, f"K of system {i}")
    else:
        off = torch.linalg.solve_ex(J, F(S.reshape(-1), A, B, Q, R))[0]
        if not float(off.norm()) <= tolerance * float(S.norm()) + 1e-300:
            raise Wrong(f"S of system {i} is off by {float(off.norm()):.1e}, S = {S.tolist()}")
    if grads is None:
        return
    if gain:
        explicit = torch.func.grad(lambda *t: (v * feedback(*t)).sum(), (0, 1, 2, 3))(S, A, B, R)
        v, direct = explicit[0], [explicit[1], explicit[2], torch.zeros_like(Q), explicit[3]]
    else:
        direct = [torch.zeros_like(t) for t in (A, B, Q, R)]
    g = torch.linalg.solve(J.mT, v.reshape(-1))
    for name, mine, extra, P in zip("ABQR", grads, direct, partial, strict=True):
        expected = extra - torch.tensordot(g, P, dims=1)
        size = float(extra.norm() + g.norm() * P.norm())
        expect(mine.to(dtype), expected, tolerance, size, f"gradient of {name} of system {i}")


def linear_quadratic(draw: Draw) -> Case:
    made, shape, dtype = system(draw)
    n, m = made["B"].shape[-2:]
    horizon: Any = draw.choice([1, 2, 4])
    policy = draw.choice(POLICIES)
    if draw.random() < 0.5:
        made["N"], made["q"], made["c"] = 0.2 * draw.normal(*shape, n, m), draw.normal(*shape, n), draw.normal(*shape, n)
        made |= {name: made[name].to(dtype) for name in ("N", "q", "c")}
    x0, v = draw.normal(*shape, n).to(dtype), draw.normal(*shape, horizon, m).to(dtype)
    case = Case("", lambda: run_regulator(made, horizon, policy, x0, v, shape))
    kind = draw.randrange(6)
    if kind == 0:
        horizon = draw.choice([0, -1, 1.5, "3", True, None])
        case.faults.append("horizon")
    elif kind == 1:
        name = draw.choice(list(made))
        made[name] = spoil_number(draw, made[name])
        case.faults.append(f"number in {name}")
    elif kind == 2:
        name = draw.choice(list(made))
        made[name] = junk(draw, made[name])
        case.faults.append(f"junk as {name}")
    else:
        spoil_system(draw, made, case)
    case.name = f"lqr (horizon {horizon}, {policy!r}, {shape}, {dtype}, {list(made)})"
    return case


def run_regulator(made: dict[str, Any], horizon: Any, policy: str, x0: Tensor, v: Tensor, shape: tuple[int, ...]) -> str:
    given = leaves(made)

    def call() -> Any:
        found = dil.control.lqr(**given, horizon=horizon, on_failure=policy)
        u = found.rollout(x0)[1]
        grad = (
            torch.autograd.grad(u, given["A"], v if v.shape == u.shape else torch.ones_like(u))[0] if u.requires_grad else None
        )
        return u.detach(), grad

    found, messages = heard(policy, call)
    if found is None:
        return "reported"
    u, grad = found
    fine = u.flatten(-2).isfinite().all(-1).reshape(-1)
    if policy in ("warn", "raise") and not bool(fine.all()) and not messages and bool(x0.isfinite().all()):
        raise Wrong("NaN without a word")
    count = u.shape[:-2].numel()
    if u.shape != v.shape or messages:
        return "reported" if messages else "right"
    for i in range(count):
        if bool(fine[i]):
            axes = {name: 1 if name in "qc" else 2 for name in given}
            one = {
                name: t.detach().double().expand(*shape, *t.shape[-axes[name] :]).reshape(count, *t.shape[-axes[name] :])[i]
                for name, t in given.items()
            }
            mine = u.reshape(count, *u.shape[-2:])[i]
            cotangent = v.double().reshape(count, *v.shape[-2:])[i]
            gradient = None if grad is None else grad.reshape(count, *grad.shape[-2:])[i]
            check_regulator(mine, one, x0.double().reshape(count, -1)[i], cotangent, gradient, i)
    return "right" if bool(fine.all()) else "reported"


def check_regulator(u: Tensor, one: dict[str, Tensor], x0: Tensor, v: Tensor, grad: Tensor | None, i: int) -> None:
    """The controls minimise the summed cost, which is quadratic in them."""

    def cost(u: Tensor, A: Tensor) -> Tensor:
        x, total = x0, x0.new_zeros(())
        for control in u.view(-1, one["B"].shape[1]):
            total = total + x @ one["Q"] @ x + control @ one["R"] @ control
            if "N" in one:
                total = total + 2 * x @ one["N"] @ control + 2 * one["q"] @ x
            x = A @ x + one["B"] @ control + one.get("c", 0.0)
        return total + x @ one["Q"] @ x + (2 * one["q"] @ x if "q" in one else 0.0)

    gradient = torch.func.grad(cost)
    flat, dtype = u.double().reshape(-1), u.dtype
    H = torch.func.jacrev(gradient)(flat, one["A"])
    if not bool(H.isfinite().all()):
        return  # too large in float64, too
    values = torch.linalg.eigvalsh(0.5 * (H + H.mT))
    if not float(values[0]) > -ROUNDING[dtype] * float(values[-1].abs()):
        raise Wrong(
            f"sample {i} has a policy and no minimum: an eigenvalue is {float(values[0]):.1e} of {float(values[-1]):.1e}"
        )
    tolerance = ROUNDING[dtype] * float(values[-1]) / max(float(values[0]), 1e-300)
    if not tolerance < MOST[dtype]:
        return
    start = torch.zeros_like(flat)
    exact = torch.linalg.solve(H, -gradient(start, one["A"]))
    if not bool(exact.isfinite().all()):
        return
    expect(flat.to(dtype), exact, tolerance, float(exact.norm()) + 1e-3, f"controls of sample {i}")
    if grad is not None:
        P = torch.func.jacrev(gradient, 1)(flat, one["A"])
        g = torch.linalg.solve(H, v.reshape(-1))
        expected = -torch.tensordot(g, P, dims=1)
        expect(grad, expected, tolerance, float(g.norm() * P.norm()), f"gradient of A of sample {i}")


# --- plans ------------------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    """x' = A x + B u (+ a nonlinear part), cost xᵀQx + uᵀRu + θ Σ cos u, within bounds or not."""

    A: Tensor
    B: Tensor
    Q: Tensor
    R: Tensor
    theta: Tensor
    x: Any
    horizon: Any
    bounds: Any
    policy: Any
    settings: dict[str, Any]
    v: Tensor
    dtype: torch.dtype
    change: Callable[..., Any] | None = None  # of the dynamics
    cost_change: Callable[..., Any] | None = None
    checkable: bool = True

    def good(self, x: Tensor, u: Tensor) -> Tensor:
        return x @ self.A.mT.to(x.dtype) + torch.tanh(u) @ self.B.mT.to(x.dtype)

    def dynamics(self, x: Tensor, u: Tensor) -> Any:
        return self.good(x, u) if self.change is None else self.change(self.good(x, u))

    def cost(self, x: Tensor, u: Tensor, theta: Tensor) -> Any:
        quadratic = torch.einsum("...i,ij,...j->...", x, self.Q.to(x.dtype), x)
        value = quadratic + torch.einsum("...i,ij,...j->...", u, self.R.to(x.dtype), u) + theta * u.sum(-1)
        return value if self.cost_change is None else self.cost_change(value)


def plan(draw: Draw) -> Case:
    n, m = draw.randint(1, 2), draw.randint(1, 2)
    dtype = draw.choice([torch.float64, torch.float64, torch.float32])
    horizon, shape = draw.choice([1, 2, 3]), draw.choice([(), (0,), (1,), (3,)])
    problem = Plan(
        draw.normal(n, n).to(dtype),
        draw.normal(n, m).to(dtype),
        draw.matrices((), [draw.uniform(0.5, 2) for _ in range(n)]).to(dtype),
        draw.matrices((), [draw.uniform(0.5, 2) for _ in range(m)]).to(dtype),
        draw.normal().to(dtype),
        draw.normal(*shape, n).to(dtype),
        horizon,
        draw.choice([None, None, (-0.5, 0.5), (-0.1, 2.0)]),
        draw.choice(POLICIES),
        {"control_dim": m},
        draw.normal(*shape, horizon, m).to(dtype),
        dtype,
    )
    solvers = [None, None, None, dil.Newton(), dil.GradientDescent(max_steps=200), dil.RandomShooting(particles=50)]
    problem.settings |= {"solver": draw.choice(solvers), "linear_solver": draw.choice([None, None, dil.CG(), dil.Dense()])}
    case = Case("", lambda: run_plan(problem))
    for _ in range(draw.choice([1, 1, 2])):
        fault = draw.choice(PLAN_FAULTS)
        fault(draw, problem, case)
        case.faults.append(fault.__name__)
    settings = f"{problem.settings}, bounds {problem.bounds}, horizon {problem.horizon!r}, {problem.policy!r}, {shape}, {dtype}"
    case.name = f"MPC ({settings})"
    return case


def run_plan(problem: Plan) -> str:
    x, theta = (
        t.detach().clone().requires_grad_()
        if isinstance(t, Tensor) and t.is_floating_point() and t.layout == torch.strided
        else t
        for t in (problem.x, problem.theta)
    )

    def call() -> Any:
        mpc = dil.control.MPC(
            problem.dynamics,
            lambda x, u: problem.cost(x, u, theta),
            problem.horizon,
            bounds=problem.bounds,
            on_failure=problem.policy,
            **problem.settings,
        )
        u = mpc(x)
        inputs = [t for t in (x, theta) if t.requires_grad]
        v = problem.v if problem.v.shape == u.shape else torch.ones_like(u)
        grads = torch.autograd.grad(u, inputs, v, allow_unused=True, materialize_grads=True) if u.requires_grad else None
        str(mpc.report)
        return u.detach(), grads, mpc.report

    found, messages = heard(problem.policy, call)
    if found is None:
        return "reported"
    u, grads, report = found
    forward = report.forward.converged.reshape(-1)
    good = forward & (forward if report.backward is None else report.backward.converged.reshape(-1))
    if problem.policy in ("warn", "raise") and not bool(good.all()) and not messages:
        raise Wrong("a failure without a word")
    if problem.checkable and u.shape == problem.v.shape:
        for i in range(len(good)):
            if bool(forward[i]):
                check_plan(problem, u, grads if bool(good[i]) else None, i, len(good))
    return "right" if bool(good.all()) else "reported"


def check_plan(problem: Plan, u: Tensor, grads: Any, i: int, samples: int) -> None:
    """A stationary point of the summed cost inside the box, a minimum, and its derivative in x."""
    H, m = u.shape[-2:]
    flat = u.double().reshape(samples, H * m)[i]
    x0, theta = problem.x.detach().double().reshape(samples, -1)[i], problem.theta.detach().double()
    if not bool(flat.isfinite().all()):
        raise Wrong(f"sample {i} is converged at {flat.tolist()}")

    def total(flat: Tensor, x0: Tensor) -> Tensor:
        x, value = x0[None], theta.new_zeros(1)
        for control in flat.view(H, 1, m):
            value = value + problem.cost(x, control, theta)
            x = problem.dynamics(x, control)
        return (value + problem.cost(x, torch.zeros_like(control), theta)).sum()

    gradient = torch.func.grad(total)
    slope = gradient(flat, x0)
    J, P = torch.func.jacrev(gradient, (0, 1))(flat, x0)
    if not bool(J.isfinite().all() and slope.isfinite().all()):
        raise Wrong(f"sample {i} is converged where the cost has no derivatives")
    free = torch.ones_like(flat, dtype=torch.bool)
    eps = torch.finfo(problem.dtype).eps
    if problem.bounds is not None:
        low, high = (torch.as_tensor(b, dtype=torch.float64, device=flat.device).expand_as(flat) for b in problem.bounds)
        if not bool((flat >= low - 10 * eps).all() and (flat <= high + 10 * eps).all()):
            raise Wrong(f"sample {i} is outside its bounds: {flat.tolist()}")
        on_low, on_high = (flat - low).abs() <= 10 * eps, (flat - high).abs() <= 10 * eps
        free = ~((on_low & (slope > 0)) | (on_high & (slope < 0)))
    if not bool(free.any()):
        return
    J, P = J[free][:, free], P[free]
    values = torch.linalg.eigvalsh(0.5 * (J + J.mT))
    largest = float(values.abs().max())
    if not float(values[0]) >= -max(1e-6, ROUNDING[problem.dtype]) * largest:
        raise Wrong(f"sample {i} is no minimum: an eigenvalue is {float(values[0]):.1e}")
    condition = largest / max(float(values[0]), 1e-300)
    tolerance = ROUNDING[problem.dtype] * condition
    if not tolerance < MOST[problem.dtype] or condition > SINGULAR[problem.dtype]:
        return
    if not float(torch.linalg.solve(J, slope[free]).norm()) <= tolerance * max(float(flat.norm()), 1.0):
        raise Wrong(f"sample {i} is off by {float(torch.linalg.solve(J, slope[free]).norm()):.1e}")
    if grads is not None and len(grads) == 2:
        v = problem.v.double().reshape(samples, -1)[i][free]
        g = torch.linalg.solve(J, v)
        expected = -(g @ P)
        size = float(g.norm() * P.norm())
        expect(grads[0].reshape(samples, -1)[i], expected, tolerance, size, f"gradient of x of sample {i}")


def numbers_of_a_plan(draw: Draw, problem: Plan, case: Case) -> None:
    name = draw.choice(["A", "B", "Q", "R", "theta", "x", "v"])
    t = getattr(problem, name)
    if isinstance(t, Tensor) and t.is_floating_point() and t.layout == torch.strided and t.device.type != "meta":
        setattr(problem, name, spoil_number(draw, t))


def no_minimum(draw: Draw, problem: Plan, case: Case) -> None:
    name = draw.choice(["Q", "R"])
    setattr(problem, name, -3 * getattr(problem, name))


def no_curvature(draw: Draw, problem: Plan, case: Case) -> None:
    problem.R, problem.B = 0 * problem.R, 0 * problem.B


def state_of_a_plan(draw: Draw, problem: Plan, case: Case) -> None:
    if isinstance(problem.x, Tensor):
        case.own, problem.checkable, problem.x = True, False, junk(draw, problem.x)


def bounds_of_a_plan(draw: Draw, problem: Plan, case: Case) -> None:
    problem.checkable = False
    nan = float("nan")
    choices = [(1.0, -1.0), (nan, 1.0), (0.0, 0.0), (1,), 3.0, "bounds", (None, 1.0), (-1, 1, 2), (torch.ones(7), 2.0)]
    problem.bounds = draw.choice([*choices, (-float("inf"), float("inf")), (0.2, 0.3), (1e300, 2e300), ("a", "b")])


def settings_of_a_plan(draw: Draw, problem: Plan, case: Case) -> None:
    problem.checkable = False
    which = draw.randrange(4)
    if which == 0:
        problem.horizon = draw.choice([0, -1, 1.5, "3", None, True])
    elif which == 1:
        case.own = True
        problem.settings["control_dim"] = draw.choice([0, -1, 2.0, "1", None, 5])
    elif which == 2:
        problem.settings["solver"] = draw.choice(["ddp", dil.control.DDP, dil.CG(), 3, dil.Picard(), dil.LBFGS()])
    else:
        problem.settings["linear_solver"] = draw.choice(["cg", dil.CG, dil.Newton(), 3, dil.control.Stein()])


def functions_of_a_plan(draw: Draw, problem: Plan, case: Case) -> None:
    problem.checkable = False
    other = torch.float32 if problem.dtype == torch.float64 else torch.float64
    convert = draw.choice(
        [
            lambda value: None,
            lambda value: 1.0,
            lambda value: (value, value),
            lambda value: value.detach(),
            lambda value: value.long(),
            lambda value: value.to(other),
            lambda value: value.to("meta"),
            lambda value: value.unsqueeze(0),
            lambda value: value.unsqueeze(-1),
            lambda value: value.sum(),
            lambda value: value * torch.nan,
            lambda value: value.to_sparse(),
            lambda value: value + torch.floor(3 * value),
        ]
    )
    case.own = True
    if draw.random() < 0.5:
        problem.change = convert
    else:
        problem.cost_change = convert


PLAN_FAULTS = [
    numbers_of_a_plan,
    numbers_of_a_plan,
    no_minimum,
    no_curvature,
    state_of_a_plan,
    bounds_of_a_plan,
    settings_of_a_plan,
    functions_of_a_plan,
]
