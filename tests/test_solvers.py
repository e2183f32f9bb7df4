"""Forward solvers: the problems × the solvers that claim to solve them, against SciPy; samples of a batch; every status."""

import numpy as np
import pytest
import scipy.optimize
import torch
from problems import PROBLEMS, Problem, flatten, problems
from torch.utils import _pytree as pytree

import torchdil as dil
from torchdil import Status

# Relative, of a value: the default rtol of 1e-10 times the condition numbers of the problems.
VALUE = 1e-7
FLOAT32 = 2e-3  # the same with rtol 1e-5
# What another sample of the batch may change: the rounding of batched kernels.
ALONE = 1e-12

NEWTONS = {
    "Newton": dil.Newton(),
    "Newton, NormalCG": dil.Newton(linear_solver=dil.NormalCG()),
    "Newton, CG": dil.Newton(linear_solver=dil.CG()),
    "Newton, GMRES": dil.Newton(linear_solver=dil.GMRES()),
    "Newton, Dense": dil.Newton(linear_solver=dil.Dense()),
}
DESCENTS = {
    "GradientDescent": dil.GradientDescent(),
    "GradientDescent, momentum": dil.GradientDescent(momentum=0.5),
    "GradientDescent, nesterov": dil.GradientDescent(nesterov=True),
    "LBFGS": dil.LBFGS(),
    "LBFGS, history 3": dil.LBFGS(history=3),
}


def to_numpy(y):
    return flatten(y).detach().numpy()


def like(y0, vector):
    """The numbers of a vector in the structure of y0."""
    leaves, spec = pytree.tree_flatten(y0)
    parts = torch.as_tensor(vector).split([leaf.numel() for leaf in leaves])
    return pytree.tree_unflatten([part.view_as(leaf).to(leaf) for part, leaf in zip(parts, leaves, strict=True)], spec)


def scipy_minimize(score, y0):
    """A solver that knows nothing of torch's graph."""

    def value_and_gradient(vector):
        y = pytree.tree_map(lambda t: t.requires_grad_(), like(y0, vector.copy()))
        value = score(y).sum()
        grad = torch.autograd.grad(value, pytree.tree_leaves(y))
        return value.item(), to_numpy(grad)

    options = {"gtol": 1e-9}
    return like(y0, scipy.optimize.minimize(value_and_gradient, to_numpy(y0), jac=True, method="BFGS", options=options).x)


def scipy_root(residual, y0):
    def F(vector):
        with torch.no_grad():
            return to_numpy(residual(like(y0, vector)))

    return like(y0, scipy.optimize.root(F, to_numpy(y0), tol=1e-13).x)


def scipy_fixed_point(g, y0):
    return scipy_root(lambda y: flatten(y) - flatten(g(y)), y0)


def torch_lbfgs(score, y0):
    y = pytree.tree_map(lambda t: t.clone().requires_grad_(), y0)
    leaves = pytree.tree_leaves(y)
    optimiser = torch.optim.LBFGS(leaves, max_iter=300, tolerance_grad=1e-11, tolerance_change=0, line_search_fn="strong_wolfe")

    def closure():
        value = score(y).sum()
        for leaf, grad in zip(leaves, torch.autograd.grad(value, leaves), strict=True):
            leaf.grad = grad
        return value

    optimiser.step(closure)
    return y


def claims(problem):
    if problem.kind == "argmin":
        return {
            **NEWTONS,
            **DESCENTS,
            "scipy.optimize.minimize": scipy_minimize,
            "torch.optim.LBFGS": torch_lbfgs,
        }
    if problem.kind == "root":
        return {**NEWTONS, "scipy.optimize.root": scipy_root}
    return {**NEWTONS, "Picard": dil.Picard(), "Picard, relaxed": dil.Picard(relaxation=0.8), "scipy": scipy_fixed_point}


def reference(problem):
    """y by SciPy: a trust region for an argmin, Powell's hybrid method for the others."""
    params = tuple(p.detach() for p in problem.params)

    def F(vector):
        return problem.residual(torch.as_tensor(vector), *params)

    y0 = to_numpy(problem.y0)
    if problem.kind != "argmin":
        return torch.as_tensor(scipy.optimize.root(lambda y: F(y).numpy(), y0, tol=1e-14).x)
    with torch.no_grad():
        found = scipy.optimize.minimize(
            lambda y: problem.fn(like(problem.y0, y), *params).sum().item(),
            y0,
            method="trust-exact",
            jac=lambda y: F(y).numpy(),
            hess=lambda y: torch.func.jacrev(F)(torch.as_tensor(y)).numpy(),
            options={"gtol": 1e-11},
        )
    return torch.as_tensor(found.x)


def relative(a, b):
    return float((a - b).detach().norm() / b.detach().norm())


# The answer of the singular problem is not unique; it has tests of its own.
PAIRS = [
    pytest.param(problem, solver, id=f"{problem.name}-{name}")
    for problem in PROBLEMS
    if not problem.damping
    for name, solver in claims(problem).items()
]


@pytest.mark.parametrize(("problem", "solver"), PAIRS)
def test_value_is_that_of_scipy(problem, solver):
    solution = problem.solve(problem.leaves(), solver=solver)
    assert bool(solution.converged.all())
    assert relative(flatten(solution.value).detach(), reference(problem)) <= VALUE


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.exact], ids=lambda p: p.name)
def test_a_closed_form_is_a_solver(problem):
    params = problem.leaves()
    solution = problem.solve(params, solver=lambda fn, y0: problem.exact(*(p.detach() for p in params)))
    y = flatten(problem.exact(*params))
    expected = torch.autograd.grad(y.square().sum(), params, materialize_grads=True)
    got = torch.autograd.grad(flatten(solution.value).square().sum(), params, materialize_grads=True)
    assert bool(solution.converged.all())
    assert relative(flatten(got), flatten(expected)) <= VALUE


@pytest.mark.parametrize("solver", [*NEWTONS.values(), *DESCENTS.values()], ids=[*NEWTONS, *DESCENTS])
def test_a_flat_direction_is_left_alone(solver):
    (problem,) = (p for p in PROBLEMS if p.damping)
    y = problem.solve(problem.params, solver=solver).value
    assert abs(y[0] - y[1]) <= VALUE


# One hard sample among easy ones.

EASY = 3


def hard_batch(condition):
    """Quartic bowls; the first sample has the given condition number and a far start."""
    generator = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(1 + EASY, 4, 4, generator=generator, dtype=torch.float64))[0]
    eigenvalues = torch.linspace(1, 3, 4, dtype=torch.float64).repeat(1 + EASY, 1)
    eigenvalues[0] = torch.logspace(0, -np.log10(condition), 4, dtype=torch.float64)
    H = Q @ torch.diag_embed(eigenvalues) @ Q.mT
    x = torch.randn(1 + EASY, 4, generator=generator, dtype=torch.float64)
    y0 = torch.zeros(1 + EASY, 4, dtype=torch.float64)
    y0[0] = 100.0
    return H, x, y0


def bowl(y, H, x):
    d = y - x
    return 0.5 * torch.einsum("bi,bij,bj->b", d, H, d) + 0.1 * (d**4).sum(-1) + torch.cos(y).sum(-1) * 0.1


def bowl_gradient(y, H, x):
    return torch.func.grad(lambda u: bowl(u, H, x).sum())(y)


def contraction(y, H, x):
    return torch.tanh(0.3 * torch.einsum("bij,bj->bi", H, y) + x)


BATCHED = {
    "argmin": [
        *NEWTONS.values(),
        dil.GradientDescent(max_steps=300),
        dil.GradientDescent(max_steps=300, nesterov=True),
        dil.LBFGS(),
    ],
    "root": list(NEWTONS.values()),
    "fixed_point": [dil.Picard(max_steps=200), dil.Newton()],
}


@pytest.mark.filterwarnings("ignore::torchdil.ConvergenceWarning")  # of the hard sample
@pytest.mark.parametrize("condition", [1e4, 1e10])
@pytest.mark.parametrize(("kind", "solver"), [(kind, solver) for kind, group in BATCHED.items() for solver in group])
def test_a_hard_sample_changes_nothing_for_the_others(kind, solver, condition):
    H, x, y0 = hard_batch(condition)
    fn = {"argmin": bowl, "root": bowl_gradient, "fixed_point": contraction}[kind]
    if kind == "fixed_point":
        H[0] *= -20  # no contraction: y ← g(y) jumps to and fro

    def solve(some):
        inputs = H[some].clone().requires_grad_(), x[some].clone().requires_grad_()
        problem = Problem("hard", kind, fn, y0[some], inputs, batch=len(y0[some]))
        solution = problem.solve(inputs, solver=solver)
        return solution, torch.autograd.grad(solution.value.square().sum(), inputs)

    together, grads = solve(slice(None))
    without, grads_without = solve(slice(1, None))
    assert together.stats.steps[0] > together.stats.steps[1:].max()
    assert bool(without.converged.all())
    assert torch.equal(together.status[1:], without.status) and torch.equal(together.stats.steps[1:], without.stats.steps)
    assert (together.value[1:] - without.value).abs().max() <= ALONE
    for grad, grad_without in zip(grads, grads_without, strict=True):
        assert (grad[1:] - grad_without).abs().max() <= ALONE


def test_converged_samples_are_frozen():
    H, x, y0 = hard_batch(1e4)
    y0[1] = dil.argmin(bowl, y0, (H, x), solver=dil.Newton(rtol=1e-13)).value[1]
    for solver in (dil.Newton(), dil.Newton(linear_solver=dil.CG()), *DESCENTS.values()):
        solution = dil.argmin(bowl, y0, (H, x), solver=solver)
        assert bool(solution.converged.all())
        assert torch.equal(solution.value[1], y0[1]) and solution.stats.steps[1] == 0
        assert min(solution.stats.steps[0], solution.stats.steps[2]) > 0
        residuals = torch.stack(solution.stats.history)[:, 2]
        assert int((residuals.diff() != 0).sum()) == solution.stats.steps[2]


def poisoned(y, x):
    """NaN for the sample whose x is negative, whatever y."""
    return (y - x) ** 2 + torch.sqrt(x)


@pytest.mark.parametrize("solver", [dil.Newton(), dil.Newton(linear_solver=dil.CG()), *DESCENTS.values()])
def test_a_sample_that_is_not_finite(solver):
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0], [4.0, 5.0]], dtype=torch.float64)
    score = lambda y, x: poisoned(y, x).sum(-1) * (1 + torch.sqrt(x).sum(-1))  # noqa: E731
    with pytest.warns(dil.ConvergenceWarning, match="non_finite"):
        solution = dil.argmin(score, torch.zeros_like(x), (x,), solver=solver)
    assert solution.status.tolist() == [Status.converged, Status.non_finite, Status.converged]
    assert (solution.value - x)[[0, 2]].abs().max() <= VALUE


@pytest.mark.parametrize("solver", [*NEWTONS.values(), dil.Picard(relaxation=0.4)])
def test_a_root_that_is_not_finite(solver):
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0], [4.0, 5.0]], dtype=torch.float64)
    residual = lambda y, x: y - torch.sqrt(x) + 0.1 * torch.sin(y)  # noqa: E731
    with pytest.warns(dil.ConvergenceWarning, match="non_finite"):
        solution = dil.root(residual, torch.zeros_like(x), (x,), batch_dims=1, solver=solver)
    assert solution.status.tolist() == [Status.converged, Status.non_finite, Status.converged]
    assert residual(solution.value, x)[[0, 2]].abs().max() <= VALUE


def test_a_root_that_does_not_exist_is_given_up_soon():
    """e^y - y - 1 + x has none for x > 0: at y = 0, where it is least, J is singular and no step of Newton's helps."""
    calls = []

    def residual(y, x):
        calls.append(1)
        return torch.stack([y[..., 0].exp() - y[..., 0] - 1 + x, y[..., 1] - torch.sin(y[..., 0])], -1)

    x = torch.tensor([1.0, 0.3, 2.0, -1.0], dtype=torch.float64)
    y0 = torch.tensor([[3.0, 1.0], [0.7, 1.0], [5.0, 1.0], [2.0, 1.0]], dtype=torch.float64)
    solution = dil.root(residual, y0, (x,), batch_dims=1, solver=dil.Newton(), on_failure="ignore")
    assert solution.status.tolist() == 3 * [Status.stagnated] + [Status.converged]
    assert solution.value[:3, 0].abs().max() < 1e-5 and len(calls) < 300
    # A short step along a long direction is another matter, if it leads somewhere: here d is 1e13 and 3e-12 d is right.
    far = dil.root(lambda y: torch.exp(y) - 1, torch.tensor([-30.0], dtype=torch.float64))
    assert bool(far.converged) and far.value.abs() < 1e-12


def test_a_score_that_rounding_flattens():
    """Near its minimum the change of this score is below the rounding of cosh: steps must be judged by the gradient."""
    x = torch.randn(2000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    score = lambda y: (0.5 * (y - x) ** 2 + 0.5 * torch.log(torch.cosh(y))).sum(-1)  # noqa: E731
    for solver in (dil.Newton(), dil.Newton(linear_solver=dil.CG()), dil.GradientDescent(), dil.LBFGS()):
        solution = dil.argmin(score, torch.zeros_like(x), solver=solver)
        assert bool(solution.converged.all())


# Saddles and maxima.


def double_well(y):
    """A saddle at 0, minima at y_last = ±1/√2."""
    return y[:-1].square().sum() - y[-1] ** 2 + y[-1] ** 4


@pytest.mark.parametrize("n", [2, 100, 200])
@pytest.mark.parametrize("linear_solver", [None, dil.CG(), dil.Dense()])
@pytest.mark.parametrize("along", [0.0, 1.0])
def test_newton_that_ends_at_a_saddle_says_so(n, linear_solver, along):
    """Started there, or on the ridge that leads there, where the gradient has no part along the negative curvature."""
    y0 = torch.full((n,), along, dtype=torch.float64)
    y0[-1] = 0
    with pytest.warns(dil.ConvergenceWarning, match="negative_curvature"):
        solution = dil.argmin(double_well, y0, solver=dil.Newton(linear_solver=linear_solver))
    assert solution.status == Status.negative_curvature


def test_newton_started_at_a_maximum_says_so():
    with pytest.warns(dil.ConvergenceWarning, match="negative_curvature"):
        solution = dil.argmin(lambda y: torch.cos(y).sum(), torch.zeros(3, dtype=torch.float64))
    assert solution.status == Status.negative_curvature


@pytest.mark.parametrize("n", [2, 200])
@pytest.mark.parametrize("linear_solver", [None, dil.CG()])
def test_newton_started_near_a_saddle_finds_a_minimum(n, linear_solver):
    y0 = torch.full((n,), 1e-3, dtype=torch.float64)
    solution = dil.argmin(double_well, y0, solver=dil.Newton(linear_solver=linear_solver))
    assert solution.status == Status.converged
    assert abs(abs(solution.value[-1]) - 0.5**0.5) <= VALUE


# Answers from elsewhere are judged.


def off_by(error):
    """A black box whose answer is off by `error`, relative."""
    return lambda problem: lambda fn, y0: like(y0, reference(problem) * (1 + error))


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if not p.damping], ids=lambda p: p.name)
def test_a_wrong_answer_is_flagged_and_a_good_one_is_not(problem):
    with pytest.warns(dil.ConvergenceWarning, match="not_stationary"):
        wrong = problem.solve(problem.leaves(), solver=off_by(1e-2)(problem))
    assert bool((wrong.status == Status.not_stationary).all())
    assert bool(problem.solve(problem.leaves(), solver=off_by(0)(problem)).converged.all())


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("factor", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("name", ["mlp_energy", "rosenbrock", "huber_pooling", "logistic", "argmin_batch4", "kepler_root"])
def test_units_change_no_verdict(name, factor, unit):
    """f -> factor f and y -> unit y: the same statuses, and the same number of steps."""
    (problem,) = (p for p in PROBLEMS if p.name == name)
    y0 = problem.y0 + 0.1
    scaled = Problem(
        name, problem.kind, lambda y, *p: factor * problem.fn(y / unit, *p), unit * y0, problem.params, batch=problem.batch
    )
    for solver in NEWTONS.values():
        plain, changed = problem.solve(problem.params, y0, solver=solver), scaled.solve(problem.params, solver=solver)
        assert bool(changed.converged.all())
        assert relative(flatten(changed.value) / unit, flatten(plain.value)) <= VALUE
        assert bool(((changed.stats.steps - plain.stats.steps).abs() <= 1).all())
    solution = reference(problem).view_as(problem.y0)
    for error, status in ((0, Status.converged), (1e-2, Status.not_stationary)):
        answer = unit * solution * (1 + error)
        judged = scaled.solve(problem.params, solver=lambda fn, y0, answer=answer: answer, on_failure="ignore")
        assert bool((judged.status == status).all())


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_a_start_at_the_solution_is_recognised(problem):
    y = problem.solve(problem.params, solver=dil.Newton(rtol=1e-13)).value
    start = pytree.tree_map(lambda t: t.detach(), y)
    for name, solver in claims(problem).items():
        solution = problem.solve(problem.params, start, solver=solver)
        assert bool(solution.converged.all()), name
        assert int(solution.stats.steps.max()) <= 1, name
        assert relative(flatten(solution.value), flatten(start)) <= VALUE


@pytest.mark.parametrize("i", range(len(PROBLEMS)), ids=[p.name for p in PROBLEMS])
def test_float32(i):
    """Default tolerances, no warnings, and the dtype is kept."""
    single, double = problems(torch.float32)[i], PROBLEMS[i]
    linear_solver = dil.Auto(damping=double.damping)

    def value_and_gradient(problem):
        params = problem.leaves()
        y = flatten(problem.value(params, linear_solver=linear_solver))
        return y.detach(), flatten(torch.autograd.grad(y.square().sum(), params, materialize_grads=True))

    y, grad = value_and_gradient(single)
    y_exact, grad_exact = value_and_gradient(double)
    assert y.dtype == grad.dtype == torch.float32
    assert relative(y.double(), y_exact) <= FLOAT32
    assert relative(grad.double(), grad_exact) <= FLOAT32


@pytest.mark.parametrize("kind", ["argmin", "root", "fixed_point"])
def test_max_steps(kind):
    problem = next(p for p in PROBLEMS if p.kind == kind and not p.exact)
    for solver in claims(problem).values():
        if isinstance(solver, dil.Solver):
            short = type(solver)(**{**vars(solver), "max_steps": 1})
            solution = problem.solve(problem.params, solver=short, on_failure="ignore")
            assert bool((solution.status == Status.max_steps).all())
            assert int(solution.stats.steps.max()) == 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "linear_solver", [dil.Auto(), dil.CG(), dil.NormalCG(), dil.MINRES(), dil.GMRES(), dil.BiCGStab()], ids=repr
)
def test_half_precision(dtype, linear_solver):
    """Two digits, but no crash and no warning."""
    theta = torch.tensor([1.0, 2.0, -1.0], dtype=dtype, requires_grad=True)
    score = lambda y: ((y - theta) ** 2 + y**4).sum()  # noqa: E731
    solution = dil.argmin(score, torch.zeros(3, dtype=dtype), linear_solver=linear_solver)
    solution.value.sum().backward()
    assert solution.value.dtype == theta.grad.dtype == dtype
    expected = 2 / (2 + 12 * solution.value.detach().double() ** 2)
    torch.testing.assert_close(theta.grad.double(), expected, rtol=3e-2, atol=0)
