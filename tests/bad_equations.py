"""Bad argmins, roots, fixed points and layers, for `bad_problems`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from bad_problems import MOST, NUMBERS, POLICIES, ROUNDING, SINGULAR, Case, Draw, Own, Wrong
from torch import Tensor, nn

import torchdil as dil


@dataclass
class Equation:
    """A problem with a dense oracle: J = M + 3 q diag(y²), right-hand side eᶿ x; a batch, or one problem (`batch` None)."""

    kind: str
    batch: int | None
    n: int
    dtype: torch.dtype
    M: Tensor
    x: Tensor
    theta: Tensor
    q: float
    y0: Any
    v: Tensor
    policy: Any
    solver: Any
    linear_solver: Any
    attach: bool = False
    layer: bool = False
    change: Callable[[Any, Equation, Callable[..., Any]], Any] | None = None  # a spoilt function: (y, problem, good) -> value
    args: Any = None  # in place of the right ones
    options: dict[str, Any] = field(default_factory=dict)
    checkable: bool = True  # whether the oracle knows the spoilt function, too
    must_fail: bool = False  # whether a report of success would be a lie

    @property
    def batched(self) -> bool:
        return self.batch is not None

    @property
    def loose(self) -> float:
        """Half the digits are accepted of solvers that stop at tolerances of their own."""
        foreign = callable(self.solver) or isinstance(self.solver, (dil.SciPy, dil.TorchOptim))
        return (1e-4 if self.dtype == torch.float64 else 0.1) if foreign else 0.0

    @property
    def tiny(self) -> float:
        """What may be lost of a gradient where the squares of numbers end."""
        return 100 * torch.finfo(self.dtype).tiny ** 0.5

    def spoil(self, change: Callable[..., Any], checkable: bool = True, must_fail: bool = False) -> None:
        """Another function, in place of one that was spoilt before."""
        self.change, self.checkable, self.must_fail = change, checkable, must_fail and self.batch != 0

    def force(self, u: Tensor, M: Tensor, x: Tensor, theta: Tensor) -> Tensor:
        """F of an argmin or a root, or g, for one sample or many."""
        linear = torch.einsum("...ij,...j->...i", M, u)
        if self.kind == "fixed_point":
            return torch.tanh(linear) + theta.exp() * x + self.q * u**3
        return linear + self.q * u**3 - theta.exp() * x

    def good(self, y: Any, M: Tensor, x: Tensor, theta: Tensor) -> Any:
        """The user's function, before it is spoilt."""
        if self.kind != "argmin":
            return self.force(y, M, x, theta)
        linear = torch.einsum("...ij,...j->...i", M, y)
        return (y * (0.5 * linear + 0.25 * self.q * y**3 - theta.exp() * x)).sum(-1)

    def function(self, y: Any, *args: Any) -> Any:
        """The user's function."""
        return self.good(y, *args) if self.change is None else self.change(y, self, lambda u: self.good(u, *args))

    def residual(self, u: Tensor, M: Tensor, x: Tensor, theta: Tensor) -> Tensor:
        """F of one sample, (n,), of the function as it is."""

        def function(u: Tensor) -> Any:
            return (
                self.good(u, M, x, theta) if self.change is None else self.change(u, self, lambda w: self.good(w, M, x, theta))
            )

        if self.kind == "argmin":
            return torch.func.grad(lambda w: function(w).sum())(u)
        return function(u) if self.kind == "root" else u - function(u)


def equation(draw: Draw) -> Case:
    kind = draw.choice(["argmin", "argmin", "root", "fixed_point"])
    batch = draw.choice([None, 0, 1, 2, 3, 4])
    n = draw.randint(1, 4)
    dtype = draw.choice([torch.float64, torch.float64, torch.float32])
    shape = () if batch is None else (batch,)
    eigenvalues = [draw.uniform(1, 5) for _ in range(n)]
    M = draw.matrices(shape, eigenvalues)
    if kind == "root":
        M = M + 0.5 * draw.normal(*shape, n, n)
    if kind == "fixed_point":
        M = draw.matrices(shape, [draw.uniform(-0.8, 0.8) for _ in range(n)])
    made = Equation(
        kind,
        batch,
        n,
        dtype,
        M.to(dtype),
        draw.normal(*shape, n).to(dtype),
        (0.3 * draw.normal()).to(dtype),
        0.0 if kind == "fixed_point" else draw.choice([0.0, 0.3]),
        (0.3 * draw.normal(*shape, n)).to(dtype),
        draw.normal(*shape, n).to(dtype),
        draw.choice(POLICIES),
        draw.choice(SOLVERS[kind]),
        draw.choice(LINEAR_SOLVERS),
        layer=draw.random() < 0.3,
    )
    if kind == "root" and draw.random() < 0.25:
        made.attach, made.layer = True, False
    case = Case(kind, lambda: run(made))
    for _ in range(draw.choice([1, 1, 1, 2])):
        fault = draw.choice(FAULTS)
        if fault(draw, made, case) is not False:
            case.faults.append(fault.__name__)
    where = "attach" if made.attach else "layer" if made.layer else "function"
    settings = f"{made.solver!r}, {made.linear_solver!r}, {made.policy!r}, batch {batch}, n {n}, {dtype}"
    case.name = f"{kind} ({where}; {settings})"
    return case


def run(problem: Equation) -> str:
    """Solve, go back, and compare with the oracle whatever is said to be right."""
    x, theta = (t.detach().clone().requires_grad_() if t.is_floating_point() else t for t in (problem.x, problem.theta))
    args = (problem.M, x, theta) if problem.args is None else problem.args
    settings = {"linear_solver": problem.linear_solver, "on_failure": problem.policy}
    if problem.kind != "argmin":
        settings["batch_dims"] = int(problem.batched)
    settings |= problem.options
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("always", dil.ConvergenceWarning)
        try:
            if problem.attach:
                y0 = problem.y0
                if isinstance(y0, Tensor) and y0.is_floating_point():
                    with torch.no_grad():
                        y0 = dil.root(problem.function, y0, args, batch_dims=settings["batch_dims"], on_failure="ignore").value
                y, report = dil.attach(problem.function, y0, args, **settings), None
            elif problem.layer:
                settings.pop("batch_dims", None)
                made = {"argmin": dil.ArgminLayer, "root": dil.RootLayer, "fixed_point": dil.FixedPointLayer}[problem.kind]
                options = {} if problem.kind == "argmin" else {"batch_dims": int(problem.batched)}
                layer = made(lambda y, args: problem.function(y, *args), solver=problem.solver, **settings, **options)
                y = layer(args, problem.y0)
                report = layer.report
            else:
                find = {"argmin": dil.argmin, "root": dil.root, "fixed_point": dil.fixed_point}[problem.kind]
                solution = find(problem.function, problem.y0, args, solver=problem.solver, **settings)
                y, report = solution.value, solution.report
            str(report)
            grads = None
            if isinstance(y, Tensor) and y.requires_grad:
                grads = torch.autograd.grad(
                    y,
                    (x, theta),
                    problem.v if problem.v.shape == y.shape else torch.ones_like(y),
                    allow_unused=True,
                    materialize_grads=True,
                )
            str(report)
        except dil.ConvergenceError as error:
            if problem.policy != "raise":
                raise Wrong("raised although the policy is another") from error
            return "reported"
    return judge(problem, y, report, grads, said)


def judge(problem: Equation, y: Tensor, report: Any, grads: Any, said: list[Any]) -> str:
    samples = 1 if problem.batch is None else problem.batch
    shape = () if problem.batch is None else (problem.batch,)
    if y.shape != problem.y0.shape or y.dtype != problem.y0.dtype:
        raise Wrong(f"y has shape {tuple(y.shape)}, {y.dtype}")
    if y.shape != (*shape, problem.n):
        return "right"  # another problem than was meant, but one
    messages = [str(w.message) for w in said]
    fine = torch.ones(samples, dtype=torch.bool, device="cpu")
    if report is None:  # of attach: only its warnings tell
        if problem.policy == "ignore":
            return "reported"
        if problem.policy in ("zero", "nan"):
            return "reported" if problem.must_fail else "right"
        forward = backward = ~fine if messages else fine
    else:
        forward = report.forward.converged.reshape(-1).cpu()
        backward = forward if report.backward is None else report.backward.converged.reshape(-1).cpu()
    approximate = isinstance(problem.linear_solver, (dil.Neumann, dil.JacobianFree))
    good = forward & (fine if approximate else backward)
    if problem.policy == "warn" and not bool(good.all()) and not messages:
        raise Wrong("a failure without a warning")
    if problem.policy != "warn" and messages:
        raise Wrong("a warning although the policy is another")
    if problem.policy == "raise" and not bool(good.all()):
        raise Wrong("a failure without an error")
    if problem.must_fail and bool(good.any()):
        raise Wrong(f"said to be solved: y = {y.tolist()}")
    check_values(problem, y, grads, forward, good, approximate)
    return "right" if bool(good.all()) else "reported"


def check_values(problem: Equation, y: Tensor, grads: Any, forward: Tensor, good: Tensor, approximate: bool) -> None:
    """What is said to be converged, against dense linear algebra in float64, sample by sample."""
    if not problem.checkable:
        return
    samples, n = len(good), problem.n
    rows = y.detach().double().reshape(samples, n)
    M, x, v = (t.detach().double() for t in (problem.M, problem.x, problem.v))
    M, x, v = (
        M.expand(*y.shape, n).reshape(samples, n, n),
        x.expand_as(y).reshape(samples, n),
        v.expand_as(y).reshape(samples, n),
    )
    starts, finite = problem.y0.detach().double().reshape(samples, n), M.flatten(1).isfinite().all(1) & x.isfinite().all(1)
    theta, eps = problem.theta.detach().double(), ROUNDING[problem.dtype]
    total, scale, complete = torch.zeros_like(theta), 1e-30, True
    for i in range(samples):
        if not bool(forward[i]):
            continue
        if not bool(rows[i].isfinite().all()):
            raise Wrong(f"sample {i} is converged at {rows[i].tolist()}")
        F = problem.residual(rows[i], M[i], x[i], theta)
        J, J_x, J_theta = torch.func.jacrev(problem.residual, (0, 2, 3))(rows[i], M[i], x[i], theta)
        if not bool(F.isfinite().all() and J.isfinite().all()):
            raise Wrong(f"sample {i} is converged where F = {F.tolist()}")
        far = max(float(rows[i].norm()), float((rows[i] - starts[i]).norm()), 1.0)
        size = float(torch.linalg.matrix_norm(J, 2)) * far
        rounded = problem.residual(y.detach().reshape(samples, n)[i], *(t.to(problem.dtype) for t in (M[i], x[i], theta)))
        if bool((rounded == 0).all()):
            F = rounded.double()  # all that the dtype can tell
        if not float(F.norm()) <= MOST[problem.dtype] * size + 1e-300:
            raise Wrong(f"sample {i} is converged with ‖F‖ = {float(F.norm()):.1e}, of size {size:.1e}")
        values = torch.linalg.svdvals(J)
        condition = float(values[0] / values[-1]) if float(values[-1]) > 0 else float("inf")
        if problem.kind == "argmin":
            lowest = float(torch.linalg.eigvalsh(0.5 * (J + J.mT))[0])
            if not lowest >= -max(1e-6, 100 * eps) * float(values[0]):
                raise Wrong(f"sample {i} is no minimum: an eigenvalue is {lowest:.1e}")
        if condition > SINGULAR[problem.dtype]:
            complete = False
            if bool(good[i]) and grads is not None and not approximate:
                consistent(J, v[i], i)
            continue
        tolerance = min(eps * condition, MOST[problem.dtype]) + 1e-12
        step, accepted = torch.linalg.solve(J, F), max(tolerance, problem.loose)
        if not float(step.norm()) <= accepted * far:
            raise Wrong(f"sample {i} is off by {float(step.norm()):.1e}, y = {rows[i].tolist()}")
        if grads is None or approximate or not bool(good[i]) or not bool(v[i].isfinite().all()):
            complete = complete and bool(good[i]) and bool(v[i].isfinite().all())
            continue
        g = torch.linalg.solve(J.mT, v[i])
        expected, found = -(g @ J_x), grads[0].double().reshape(samples, n)[i]
        size = float(g.norm() * torch.linalg.matrix_norm(J_x))
        if bool(expected.isfinite().all()) and not float((found - expected).norm()) <= tolerance * size + problem.tiny:
            raise Wrong(f"sample {i}: gradient {found.tolist()}, by the oracle {expected.tolist()}")
        total, scale = total - g @ J_theta, max(scale, tolerance * float(g.norm() * J_theta.norm()))
    lost, known = ~good, finite.cpu() & bool(theta.isfinite())
    if grads is None or approximate:
        return
    # Zero times a derivative with respect to a number that is none is none.
    rest = grads[0].reshape(samples, n)[(lost & known).to(grads[0].device)]
    if problem.policy == "zero" and bool((rest != 0).any()):
        raise Wrong(f"gradients of failed samples are {rest.tolist()}, not zero")
    # A function that replaces its result (torch.where) has no derivatives that could be NaN.
    if problem.policy == "nan" and problem.change is None and not bool(rest.isnan().all()):
        raise Wrong(f"gradients of failed samples are {rest.tolist()}, not NaN")
    sure = complete and ((problem.policy == "zero" and bool(known.all())) or not bool(lost.any()))
    sure = sure and bool(theta.isfinite()) and bool(total.isfinite())
    if sure and not abs(float(grads[1]) - float(total)) <= scale * max(samples, 1) + problem.tiny:
        raise Wrong(f"gradient of θ {float(grads[1])}, by the oracle {float(total)}")


def consistent(J: Tensor, v: Tensor, i: int) -> None:
    """A solve with a singular J that counts as converged must have an answer."""
    g = torch.linalg.pinv(J.mT, rtol=1e-10) @ v
    off = float((J.mT @ g - v).norm())
    if off > 1e-3 * float(v.norm()):
        raise Wrong(f"sample {i}: J is singular, no g solves Jᵀg = v (off by {off:.1e}), and the solve is converged")


def a_step_aside(fn: Callable[..., Any], y0: Any) -> Any:
    """A solver of the user's, who did not try hard."""
    return y0 - 0.1


SOLVERS: dict[str, list[Any]] = {
    "argmin": [
        None,
        None,
        dil.Newton(),
        dil.Newton(linear_solver=dil.CG()),
        dil.Newton(max_steps=2),
        dil.GradientDescent(max_steps=100),
        dil.GradientDescent(step_size=0.05, max_steps=100),
        dil.LBFGS(max_steps=100),
        dil.SciPy(max_steps=100),
        dil.SciPy("Nelder-Mead", max_steps=100),
        dil.SciPy("trust-ncg", max_steps=100),
        dil.TorchOptim(torch.optim.Adam, lr=0.1, max_steps=50),
        dil.RandomShooting(particles=50, polish=dil.Newton()),
        dil.CEM(particles=30, max_steps=5),
        dil.MPPI(particles=30, max_steps=5),
        a_step_aside,
    ],
    "root": [
        None,
        None,
        dil.Newton(),
        dil.Newton(linear_solver=dil.GMRES()),
        dil.Newton(max_steps=2),
        dil.Broyden(max_steps=100),
        dil.Anderson(max_steps=100),
        dil.Picard(max_steps=50),
        dil.SciPy(max_steps=100),
        dil.SciPy("krylov", max_steps=50),
        a_step_aside,
    ],
    "fixed_point": [
        None,
        None,
        dil.Picard(max_steps=100),
        dil.Picard(relaxation=0.5, max_steps=100),
        dil.Anderson(max_steps=100),
        dil.Broyden(max_steps=100),
        dil.Newton(),
        dil.SciPy("anderson", max_steps=50),
        a_step_aside,
    ],
}
LINEAR_SOLVERS = [
    None,
    None,
    dil.Auto(),
    dil.Auto(dense_below=0),
    dil.CG(),
    dil.NormalCG(),
    dil.MINRES(),
    dil.GMRES(),
    dil.GMRES(restart=1),
    dil.BiCGStab(),
    dil.Dense(),
    dil.Neumann(),
    dil.JacobianFree(),
    dil.CG(max_steps=1),
    dil.CG(preconditioner=dil.Jacobi()),
    dil.GMRES(product="backward"),
]


# Faults: each spoils a problem; False: it does not apply.


def number_that_is_none(draw: Draw, problem: Equation, case: Case) -> Any:
    name = draw.choice(["M", "x", "theta", "y0", "v"])
    t = getattr(problem, name)
    if not isinstance(t, Tensor) or t.numel() == 0 or not t.is_floating_point():
        return False
    t = t.clone()
    t.view(-1)[draw.randrange(t.numel())] = draw.choice(NUMBERS)
    setattr(problem, name, t)
    return None


def all_numbers_are_none(draw: Draw, problem: Equation, case: Case) -> Any:
    name = draw.choice(["M", "x", "theta", "y0", "v"])
    t = getattr(problem, name)
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return False
    setattr(problem, name, torch.full_like(t, draw.choice(NUMBERS)))
    return None


def size_of_numbers(draw: Draw, problem: Equation, case: Case) -> Any:
    name = draw.choice(["M", "x", "y0", "v"])
    t = getattr(problem, name)
    if not isinstance(t, Tensor) or not t.is_floating_point():
        return False
    powers = (300, 160, 100, -100, -160, -300) if problem.dtype == torch.float64 else (37, 25, 15, -15, -25, -37)
    setattr(problem, name, t * 10.0 ** draw.choice(powers))
    return None


def singular(draw: Draw, problem: Equation, case: Case) -> Any:
    rank = draw.randrange(problem.n)
    problem.M = draw.matrices(problem.M.shape[:-2], [2.0] * rank + [0.0] * (problem.n - rank)).to(problem.dtype)
    problem.q = draw.choice([0.0, problem.q])
    if problem.kind == "fixed_point":
        problem.M = problem.M - 0.0


def consistent_but_singular(draw: Draw, problem: Equation, case: Case) -> Any:
    singular(draw, problem, case)
    problem.q = 0.0
    problem.x = torch.einsum("...ij,...j->...i", problem.M, problem.x)
    problem.v = torch.einsum("...ij,...j->...i", problem.M, problem.v)


def indefinite(draw: Draw, problem: Equation, case: Case) -> Any:
    eigenvalues = [draw.choice([-1, 1]) * draw.uniform(0.5, 3) for _ in range(problem.n)]
    problem.M = draw.matrices(problem.M.shape[:-2], eigenvalues).to(problem.dtype)


def concave(draw: Draw, problem: Equation, case: Case) -> Any:
    problem.M, problem.q = -problem.M, draw.choice([0.0, -0.3])


def unbounded(draw: Draw, problem: Equation, case: Case) -> Any:
    problem.M, problem.q = 0 * problem.M, 0.0


def ill_conditioned(draw: Draw, problem: Equation, case: Case) -> Any:
    eigenvalues = [10.0 ** draw.uniform(-14, 0) for _ in range(problem.n)]
    problem.M, problem.q = draw.matrices(problem.M.shape[:-2], eigenvalues).to(problem.dtype), 0.0


def expanding_map(draw: Draw, problem: Equation, case: Case) -> Any:
    if problem.kind != "fixed_point":
        return False
    problem.M, problem.q = 5 * problem.M, draw.choice([0.0, 0.5])
    return None


def no_answer(draw: Draw, problem: Equation, case: Case) -> Any:
    """F² + 1 has no root; y + F² + 1 (as a map) no fixed point; eʸ no minimum."""
    change = {
        "argmin": lambda y, problem, good: 0 * good(y) + y.exp().sum(-1),
        "root": lambda y, problem, good: good(y) ** 2 + 1,
        "fixed_point": lambda y, problem, good: y + good(y) ** 2 + 1,
    }[problem.kind]
    problem.spoil(change, must_fail=True)


def double_root(draw: Draw, problem: Equation, case: Case) -> Any:
    change = {
        "argmin": lambda y, problem, good: 0 * good(y) + ((y - 0.5) ** 4).sum(-1),
        "root": lambda y, problem, good: (y - 0.5) ** 2 + 0 * good(y),
        "fixed_point": lambda y, problem, good: y + (y - 0.5) ** 2 + 0 * good(y),
    }[problem.kind]
    problem.spoil(change)


def not_smooth(draw: Draw, problem: Equation, case: Case) -> Any:
    """The answer is at a kink, or behind a jump."""
    change = draw.choice(
        {
            "argmin": [
                lambda y, problem, good: good(y) + 10 * y.abs().sum(-1),
                lambda y, problem, good: good(y) + torch.floor(3 * y).sum(-1),
                lambda y, problem, good: torch.floor(good(y)) + 0 * y.sum(-1),
            ],
            "root": [
                lambda y, problem, good: good(y) + 10 * y.sign(),
                lambda y, problem, good: torch.floor(good(y)) + 0.5 + 0 * y,
            ],
            "fixed_point": [lambda y, problem, good: good(y) - 10 * y.sign()],
        }[problem.kind]
    )
    problem.spoil(change, checkable=False)


def nan_outside(draw: Draw, problem: Equation, case: Case) -> Any:
    """Not defined everywhere: NaN beyond a radius, log, sqrt."""
    radius = draw.choice([0.01, 0.3, 1.0])
    scores = [
        lambda y, problem, good: good(y) + torch.sqrt(radius - y).sum(-1),
        lambda y, problem, good: good(y) - torch.log(y).sum(-1),
        lambda y, problem, good: torch.where((y.abs() > radius).any(-1), torch.nan, good(y)),
    ]
    others = [
        lambda y, problem, good: good(y) + torch.sqrt(radius - y),
        lambda y, problem, good: torch.where((y.abs() > radius).any(-1, keepdim=True), torch.nan, good(y)),
    ]
    problem.spoil(draw.choice(scores if problem.kind == "argmin" else others))


def explodes(draw: Draw, problem: Equation, case: Case) -> Any:
    change = {
        "argmin": lambda y, problem, good: good(y) + torch.exp(torch.exp(3 * y)).sum(-1),
        "root": lambda y, problem, good: good(y) + torch.exp(torch.exp(3 * y)),
        "fixed_point": lambda y, problem, good: good(y) + torch.exp(torch.exp(y)),
    }[problem.kind]
    problem.spoil(change)


def random_function(draw: Draw, problem: Equation, case: Case) -> Any:
    """Another problem with each call."""
    noise = torch.Generator().manual_seed(0)

    def change(y: Tensor, problem: Equation, good: Any) -> Any:
        moved = torch.randn(y.shape, generator=noise, dtype=torch.float64).to(y) * 0.1
        return good(y) + ((moved * y).sum(-1) if problem.kind == "argmin" else moved)

    problem.spoil(change, checkable=False, must_fail=True)


def half_of_the_digits(draw: Draw, problem: Equation, case: Case) -> Any:
    """A function that rounds inside."""
    problem.spoil(lambda y, problem, good: good(y.to(torch.bfloat16).to(y.dtype)), checkable=False)


def mixes_samples(draw: Draw, problem: Equation, case: Case) -> Any:
    """Batch normalisation: samples are not independent, and the gradient by sample would be wrong."""
    if problem.batch is None or problem.batch < 2:
        return False
    problem.spoil(lambda y, problem, good: good(y + 0.5 * y.mean(0)), checkable=False)
    return None


def raises_later(draw: Draw, problem: Equation, case: Case) -> Any:
    calls, at = [0], draw.randint(1, 12)

    def change(y: Any, problem: Equation, good: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise Own("enough")
        return good(y)

    problem.spoil(change, checkable=False)


def other_shape_later(draw: Draw, problem: Equation, case: Case) -> Any:
    calls, at = [0], draw.randint(1, 8)
    case.own = True

    def change(y: Any, problem: Equation, good: Any) -> Any:
        calls[0] += 1
        value = good(y)
        return value if calls[0] < at else value.unsqueeze(0).expand(2, *value.shape)

    problem.spoil(change, checkable=False)


def nan_later(draw: Draw, problem: Equation, case: Case) -> Any:
    calls, at = [0], draw.randint(1, 8)

    def change(y: Any, problem: Equation, good: Any) -> Any:
        calls[0] += 1
        return good(y) if calls[0] < at else good(y) * torch.nan

    problem.spoil(change, checkable=False)


def changes_y_in_place(draw: Draw, problem: Equation, case: Case) -> Any:
    case.own = True

    def change(y: Any, problem: Equation, good: Any) -> Any:
        return good(y.mul_(0.5))

    problem.spoil(change, checkable=False)


def result_of_another_kind(draw: Draw, problem: Equation, case: Case) -> Any:
    convert = draw.choice(
        [
            lambda value: None,
            lambda value: 1.0,
            lambda value: "0",
            lambda value: [value],
            lambda value: (value, value),
            lambda value: {"value": value},
            lambda value: value.detach(),
            lambda value: value.detach().cpu().numpy(),
            lambda value: value.detach().tolist(),
            lambda value: value.long(),
            lambda value: value.isnan(),
            lambda value: value.to(torch.float32 if problem.dtype == torch.float64 else torch.float64),
            lambda value: value.half(),
            lambda value: value.to(torch.complex64),
            lambda value: value.to("meta"),
            lambda value: value.unsqueeze(0),
            lambda value: value.unsqueeze(-1),
            lambda value: value.sum() if problem.batched else value.view(-1),
            lambda value: torch.cat([value.reshape(-1), value.reshape(-1)]),
            lambda value: value.reshape(-1)[:0],
            lambda value: value.to_sparse() if value.dim() else value,
            lambda value: torch.zeros_like(value),
            lambda value: value.detach() + 0 * value,
            lambda value: nn.Parameter(value.detach()),
        ]
    )
    problem.spoil(lambda y, problem, good: convert(good(y)), checkable=False)


def start_of_another_kind(draw: Draw, problem: Equation, case: Case) -> Any:
    y = problem.y0
    if not isinstance(y, Tensor):
        return False
    case.own, problem.checkable = True, False
    problem.y0 = draw.choice(
        [
            None,
            0,
            1.0,
            "zero",
            [],
            {},
            [1.0, 2.0],
            y.tolist(),
            np.zeros(y.shape),
            (y, y),
            {"y": y},
            y.long(),
            y.isnan(),
            y.half(),
            y.bfloat16(),
            y.to(torch.complex64),
            y.to(torch.float32 if problem.dtype == torch.float64 else torch.float64),
            y.to("meta"),
            y.to_sparse() if y.numel() else y,
            y.unsqueeze(0),
            y.unsqueeze(-1),
            y.reshape(-1)[:0],
            y.sum(),
            torch.cat([y, y]),
            y.detach().requires_grad_(),
            (y * 1.0).requires_grad_() * 2,
            y.to(torch.float8_e5m2),
        ]
    )
    return None


def arguments_of_another_kind(draw: Draw, problem: Equation, case: Case) -> Any:
    case.own, problem.checkable = True, False
    right = [problem.M, problem.x, problem.theta]
    place = draw.randrange(3)
    t = right[place]
    right[place] = draw.choice(
        [
            None,
            "x",
            2,
            t.tolist(),
            t.long(),
            t.half(),
            t.to(torch.complex64),
            t.to(torch.float32 if problem.dtype == torch.float64 else torch.float64),
            t.to("meta"),
            t.unsqueeze(0),
            t.unsqueeze(-1),
            torch.cat([t.reshape(-1)] * 3),
            t.reshape(-1)[:0],
            t.to_sparse() if t.dim() and t.numel() else t,
        ]
    )
    problem.args = draw.choice(
        [tuple(right), tuple(right), tuple(right), right, tuple(right[:2]), (*right, t), t, None, "args", {}, 3]
    )


def settings_of_another_kind(draw: Draw, problem: Equation, case: Case) -> Any:
    problem.checkable = False
    which = draw.randrange(4)
    if which == 0:
        problem.solver = draw.choice(
            ["newton", dil.Newton, dil.CG(), 3, dil.Picard(), dil.GradientDescent(), dil.control.DDP()]
        )
    elif which == 1:
        solvers = ["cg", dil.CG, dil.Newton(), 3, dil.MINRES(), dil.control.Stein(), dil.control.Riccati()]
        problem.linear_solver = draw.choice(solvers)
    elif which == 2:
        problem.policy = draw.choice(["stop", None, 3, "Raise", ["warn"]])
    else:
        problem.options["batch_dims" if problem.kind != "argmin" else "on_failure"] = draw.choice([-1, 3, 1.5, "1", None])


def expanded(draw: Draw, problem: Equation, case: Case) -> Any:
    """Right, but with strides of zero, or backwards."""
    if not isinstance(problem.y0, Tensor) or problem.y0.dim() == 0 or problem.y0.shape[0] == 0:
        return False
    problem.y0 = problem.y0[:1].expand_as(problem.y0)
    problem.M = problem.M.mT.contiguous().mT
    problem.v = problem.v[:1].expand_as(problem.v)
    return None


FAULTS = [
    number_that_is_none,
    number_that_is_none,
    all_numbers_are_none,
    size_of_numbers,
    size_of_numbers,
    singular,
    consistent_but_singular,
    indefinite,
    concave,
    unbounded,
    ill_conditioned,
    expanding_map,
    no_answer,
    double_root,
    not_smooth,
    nan_outside,
    explodes,
    random_function,
    half_of_the_digits,
    mixes_samples,
    raises_later,
    other_shape_later,
    nan_later,
    changes_y_in_place,
    result_of_another_kind,
    result_of_another_kind,
    start_of_another_kind,
    start_of_another_kind,
    arguments_of_another_kind,
    arguments_of_another_kind,
    settings_of_another_kind,
    expanded,
]
