"""Gradient descent with its momenta, and L-BFGS: against the textbooks, torch.optim and SciPy."""

import math

import pytest
import scipy.optimize
import torch

import torchdil as dil
from benchmarks.solvers import cases
from torchdil.solvers.lbfgs import _Memory

# Relative: the default rtol of 1e-10 times the condition numbers of the functions (Rosenbrock's is 2500).
VALUE = 1e-6
ROUNDING = 1e-12
SINGLE = 1e-3  # float32: rtol 1e-5 times the condition number 100

MINIMA = {
    "Rosenbrock": [(1.0, 1.0)],
    "Beale": [(3.0, 0.5)],
    "Himmelblau": [
        (3.0, 2.0),
        (-2.805118086952745, 3.131312518250573),
        (-3.779310253377747, -3.283185991286170),
        (3.584428340330492, -1.848126526964404),
    ],
}
ARGMINS = [case for case in cases() if case.kind == "argmin"]
DESCENTS = [
    dil.LBFGS(),
    dil.LBFGS(history=1),
    dil.Newton(),
    dil.GradientDescent(),
    dil.GradientDescent(momentum=0.9),
    dil.GradientDescent(nesterov=True),
]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def minimum(case):
    """The known minima, or what SciPy's trust region finds to rounding."""
    if case.name in MINIMA:
        return torch.tensor(MINIMA[case.name], dtype=torch.float64)
    found = scipy.optimize.minimize(
        lambda y: case.fn(torch.as_tensor(y)).item(),
        case.y0.numpy(),
        method="trust-exact",
        jac=lambda y: case.residual(torch.as_tensor(y)).numpy(),
        hess=lambda y: torch.func.jacfwd(case.residual)(torch.as_tensor(y)).numpy(),
        options={"gtol": 1e-12},
    )
    return torch.as_tensor(found.x).unsqueeze(0)


@pytest.mark.parametrize("solver", DESCENTS, ids=repr)
@pytest.mark.parametrize("case", ARGMINS, ids=lambda case: case.name)
def test_standard_functions(case, solver):
    solution = dil.argmin(case.fn, case.y0, solver=solver)
    assert solution.converged
    nearest = (minimum(case) - solution.value).norm(dim=1).min()
    assert nearest <= VALUE * solution.value.norm()


@pytest.mark.parametrize("case", ARGMINS, ids=lambda case: case.name)
def test_lbfgs_needs_about_as_many_evaluations_as_scipys(case):
    calls = []

    def value_and_gradient(y):
        calls.append(y)
        y = torch.as_tensor(y).requires_grad_()
        value = case.fn(y)
        return value.item(), torch.autograd.grad(value, y)[0].numpy()

    solution = dil.argmin(case.fn, case.y0, solver=dil.LBFGS())
    options = {"ftol": 0, "gtol": float(solution.stats.residual), "maxiter": 1000}
    scipy.optimize.minimize(value_and_gradient, case.y0.numpy(), jac=True, method="L-BFGS-B", options=options)
    assert solution.stats.products <= 1.5 * len(calls) + 10


def two_loops(pairs, r):
    """L-BFGS as in Nocedal and Wright (2006), algorithm 7.4, for one sample."""
    alphas = []
    for s, q in reversed(pairs):
        alphas.append((s @ r) / (s @ q))
        r = r - alphas[-1] * q
    s, q = pairs[-1]
    r = (s @ q) / (q @ q) * r
    for (s, q), alpha in zip(pairs, reversed(alphas), strict=True):
        r = r + (alpha - (q @ r) / (s @ q)) * s
    return r


@pytest.mark.parametrize("steps", [1, 3, 4, 9])
def test_the_memory_is_that_of_the_textbook(steps):
    """Four slots, written round and round; in the second sample every other step has negative curvature and is left out."""
    samples, n, history = 3, 6, 4
    root = draw(samples, n, n)
    H = root @ root.mT + torch.eye(n, dtype=torch.float64)
    memory, known = _Memory(torch.zeros(samples, n, dtype=torch.float64), history), [[] for _ in range(samples)]
    for k in range(steps):
        s = draw(samples, n, seed=k + 1)
        q = torch.einsum("bij,bj->bi", H, s)
        if k % 2:
            q[1] = -q[1]
        memory.add(s, q)
        for b in range(samples):
            known[b].append((s[b], q[b]) if s[b] @ q[b] > 0 else None)
    r = draw(samples, n, seed=99)
    expected = torch.stack([two_loops([p for p in pairs[-history:] if p], r[b]) for b, pairs in enumerate(known)])
    assert (memory.apply(r) - expected).norm() <= ROUNDING * expected.norm()


def test_a_forgotten_memory_is_the_identity():
    memory = _Memory(torch.zeros(2, 3, dtype=torch.float64), 4)
    s = draw(2, 3)
    memory.add(s, 2 * s)
    memory.forget(torch.tensor([True, False]))
    r = draw(2, 3, seed=1)
    assert torch.equal(memory.apply(r)[0], r[0])
    assert not torch.equal(memory.apply(r)[1], r[1])
    assert memory.fresh.tolist() == [True, False]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_fixed_step_is_torchs_sgd(momentum):
    target, steps = draw(4), 30
    score = lambda y: (torch.arange(1, 5) * (y - target) ** 2).sum() + 0.1 * (y**4).sum()  # noqa: E731
    solver = dil.GradientDescent(step_size=0.01, momentum=momentum, max_steps=steps)
    solution = dil.argmin(score, torch.zeros_like(target), solver=solver, on_failure="ignore")
    y = torch.zeros_like(target, requires_grad=True)
    optimiser = torch.optim.SGD([y], lr=0.01, momentum=momentum)
    for _ in range(steps):
        y.grad = torch.autograd.grad(score(y), y)[0]
        optimiser.step()
    assert (solution.value - y).norm() <= ROUNDING * y.norm()


CURVATURE = torch.logspace(0, -4, 20, dtype=torch.float64)


def quadratic(steps, **settings):
    """Where a fixed number of steps of length 1/λ_max leads on ½ Σ λ y², from ones."""
    solver = dil.GradientDescent(step_size=1.0, max_steps=steps, **settings)
    y0 = torch.ones_like(CURVATURE)
    return dil.argmin(lambda y: 0.5 * (CURVATURE * y**2).sum(), y0, solver=solver, on_failure="ignore").value


def test_momentum_has_the_rate_of_the_textbook():
    """(1 - λ)^k for each unknown by gradient descent; (1 - 1/√κ)^k for all by Nesterov's momentum (√κ - 1)/(√κ + 1)."""
    steps, root = 1000, (CURVATURE[0] / CURVATURE[-1]).sqrt().item()
    plain = quadratic(steps)
    assert (plain - (1 - CURVATURE) ** steps).norm() <= ROUNDING
    best = quadratic(steps, momentum=(root - 1) / (root + 1), nesterov=True)
    assert best.norm() <= 10 * (1 - 1 / root) ** steps * 20**0.5
    assert quadratic(steps, nesterov=True).norm() <= 0.05 * plain.norm()


def test_a_step_that_is_too_long_ends_as_non_finite():
    solver = dil.GradientDescent(step_size=10.0)
    x = torch.tensor([0.0, 1.0], dtype=torch.float64)
    with pytest.warns(dil.ConvergenceWarning, match="non_finite"):
        solution = dil.argmin(lambda y: (y[:, 0] - x) ** 4, x.unsqueeze(1) * 0, solver=solver)
    assert solution.status.tolist() == [dil.Status.converged, dil.Status.non_finite]


@pytest.mark.parametrize("solver", [dil.LBFGS(), dil.GradientDescent(nesterov=True)], ids=repr)
def test_many_unknowns_and_single_precision(solver):
    x = draw(3, 5000).float()
    weight = torch.linspace(0.1, 10, 5000)
    score = lambda y: (weight * (y - x) ** 2).sum(1) + torch.cosh(0.1 * y).sum(1)  # noqa: E731
    solution = dil.argmin(score, torch.zeros_like(x), solver=solver)
    assert bool(solution.converged.all()) and solution.value.dtype == torch.float32
    expected = dil.argmin(score, torch.zeros_like(x)).value
    assert (solution.value - expected).norm() <= SINGLE * expected.norm()


@pytest.mark.parametrize(
    "solver", [dil.Newton(), dil.LBFGS(), dil.GradientDescent(), dil.GradientDescent(nesterov=True)], ids=repr
)
def test_half_precision_does_not_fail(solver):
    x = draw(2, 4).to(torch.bfloat16)
    score = lambda y: ((y - x) ** 2).sum(1)  # noqa: E731
    solution = dil.argmin(score, torch.zeros_like(x), solver=solver, on_failure="ignore")
    assert (solution.value - x).norm() <= 0.05 * x.norm()


@pytest.mark.parametrize("solver", [dil.LBFGS(), dil.GradientDescent(), dil.GradientDescent(nesterov=True)], ids=repr)
def test_gradients_and_transforms(solver):
    def solve(x, a, solver=solver):
        score = lambda y, x, a: 0.5 * (y - x).square().sum() + a * (y**4).sum()  # noqa: E731
        return dil.argmin(score, torch.zeros(2, dtype=torch.float64), (x, a), solver=solver).value

    xs, a = draw(5, 2), torch.tensor(0.3, dtype=torch.float64)
    exact = [torch.func.jacrev(lambda x, x0=x: solve(x, a, dil.Newton(rtol=1e-14)))(x) for x in xs]
    for x, jacobian in zip(xs, exact, strict=True):
        assert (torch.func.jacrev(solve)(x, a) - jacobian).norm() <= VALUE * jacobian.norm()
    many = torch.func.vmap(torch.func.jacrev(solve), (0, None))(xs, a)
    assert (many - torch.stack(exact)).norm() <= VALUE * many.norm()
    assert torch.func.grad(lambda x: solve(x, a).sum())(xs[0]).shape == (2,)


@pytest.mark.parametrize("condition", [1e3, 1e4])
def test_a_search_does_not_spoil_the_step_of_barzilai_and_borwein(condition):
    """Without any search the step needs 215 and 420 evaluations here; a search that lets no score rise, 9779 and 17473."""
    curvature = torch.logspace(0, torch.log10(torch.tensor(condition)).item(), 10, dtype=torch.float64)
    score = lambda y: 0.5 * (curvature * (y - 1) ** 2).sum()  # noqa: E731
    solution = dil.argmin(score, torch.zeros_like(curvature), solver=dil.GradientDescent())
    assert solution.converged and solution.stats.products <= condition


@pytest.mark.parametrize("solver", [*DESCENTS, dil.GradientDescent(step_size=1e-8, max_steps=50)], ids=repr)
def test_finished_samples_are_evaluated_where_they_are(solver):
    """The first sample starts at its solution; the second is hard."""
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    scale = torch.tensor([[1.0, 1.0], [1.0, 300.0]], dtype=torch.float64)
    seen = []

    def score(y):
        seen.append(y.detach()[0].clone())
        return (scale * (y - x) ** 2).sum(-1) + 0.1 * (scale * (y - x)).pow(4).sum(-1)

    y0 = torch.tensor([[1.0, 2.0], [-5.0, 9.0]], dtype=torch.float64)
    dil.argmin(score, y0, solver=solver, on_failure="ignore")
    assert len(seen) > 5 and all(torch.equal(y, y0[0]) for y in seen)


def test_a_neighbour_that_goes_on_gives_no_second_budget():
    """The first sample's tolerance, taken at its far start, turns out too loose; the second has used up its steps."""
    kind = torch.tensor([True, False])
    weight = torch.logspace(0, 3, 6, dtype=torch.float64)

    def score(y, kind):
        far = y[:, 0] ** 4 / 4 + 0.5e-4 * y[:, 0] ** 2 + 0.5 * (y[:, 1:] ** 2).sum(-1)
        return torch.where(kind, far, (weight * (y - 1) ** 2).sum(-1))

    y0 = torch.zeros(2, 6, dtype=torch.float64)
    y0[0] = 100.0
    solver = dil.GradientDescent(max_steps=30)
    both = dil.argmin(score, y0, (kind,), solver=solver, on_failure="ignore")
    alone = dil.argmin(score, y0[1:], (kind[1:],), solver=solver, on_failure="ignore")
    assert both.stats.steps[1] == alone.stats.steps[0] == 30 < both.stats.steps[0]
    assert torch.equal(both.status[1:], alone.status) and (both.value[1] - alone.value[0]).norm() <= 1e-9


def test_a_score_that_is_no_number_ends_as_non_finite():
    """Its gradient is finite."""
    score = lambda y: ((y - 2) ** 2).sum(-1) + torch.log(y[:, 0])  # noqa: E731
    y0 = torch.tensor([[-1.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    for solver in (dil.LBFGS(), dil.Newton(), dil.GradientDescent()):
        solution = dil.argmin(score, y0, solver=solver, on_failure="ignore")
        assert solution.status[0] == dil.Status.non_finite


def test_a_score_without_a_minimum_ends_soon():
    solution = dil.argmin(lambda y: y.sum(), torch.zeros(3, dtype=torch.float64), solver=dil.LBFGS(), on_failure="ignore")
    assert not solution.converged and solution.stats.products <= 3000


@pytest.mark.parametrize("factor", [1e-20, 1e20])
def test_units_of_the_score_do_not_matter(factor):
    score = lambda y: factor * ((y - 1) ** 2 + (y - 1) ** 4).sum()  # noqa: E731
    assert dil.argmin(score, torch.zeros(3, dtype=torch.float64), solver=dil.LBFGS()).converged


ROBUST = {
    "Huber": lambda r: torch.where(r.abs() < 1, 0.5 * r**2, r.abs() - 0.5),
    "log cosh": lambda r: r.abs() + torch.nn.functional.softplus(-2 * r.abs()),
    "pseudo-Huber": lambda r: torch.sqrt(1 + r**2),
}


@pytest.mark.parametrize("linear_solver", [None, dil.CG()], ids=repr)
@pytest.mark.parametrize("far", [0.0, 10.0, 1e3, 1e6])
@pytest.mark.parametrize("name", ROBUST)
def test_newton_comes_from_afar_where_the_hessian_says_nothing(name, far, linear_solver):
    """The Hessian of a robust loss vanishes far from the data; a root of the slope by bisection is the oracle."""
    data, loss = draw(7, 5, 3), ROBUST[name]
    y0 = torch.full((5, 3), far, dtype=torch.float64)
    solution = dil.argmin(lambda y: loss(y - data).sum(dim=(0, 2)), y0, solver=dil.Newton(linear_solver=linear_solver))
    assert solution.converged.all() and solution.stats.steps.max() <= 30
    low, high = data.amin(dim=0), data.amax(dim=0)
    for _ in range(60):
        middle = (0.5 * (low + high)).requires_grad_()
        (slope,) = torch.autograd.grad(loss(middle - data).sum(), middle)
        low, high = torch.where(slope < 0, middle.detach(), low), torch.where(slope < 0, high, middle.detach())
    torch.testing.assert_close(solution.value, high, rtol=VALUE, atol=VALUE)


def test_a_neighbour_far_away_changes_nothing():
    data, y0 = draw(7, 2, 3), torch.tensor([[0.1], [1e4]], dtype=torch.float64).expand(2, 3)
    score = lambda y, data: ROBUST["log cosh"](y - data).sum(dim=(0, 2))  # noqa: E731
    both, alone = dil.argmin(score, y0, (data,)), dil.argmin(score, y0[:1], (data[:, :1],))
    assert both.converged.all() and both.stats.steps[0] == alone.stats.steps[0]
    torch.testing.assert_close(both.value[:1], alone.value, rtol=ROUNDING, atol=ROUNDING)


SINGLES = {
    "Huber": (ROBUST["Huber"], 0.0),
    "log cosh": (ROBUST["log cosh"], 0.0),
    "logistic": (lambda r: torch.nn.functional.softplus(r) - 0.3 * r, math.log(3 / 7)),
}


@pytest.mark.parametrize("name", SINGLES)
def test_newton_begins_anew_where_no_part_of_a_step_is_short_enough(name):
    """The Hessian is zero but for rounding: all forty parts of such a step were too long still."""
    loss, exact = SINGLES[name]
    solution = dil.argmin(lambda y: loss(y).sum(), torch.full((1,), 1e6, dtype=torch.float64))
    assert solution.converged and (solution.value - exact).abs() <= VALUE


@pytest.mark.parametrize(
    ("name", "start", "dtype", "most"), [("pseudo-Huber", 1e6, torch.float64, 110), ("logistic", -1e4, torch.float32, 150)]
)
def test_newton_does_not_try_a_far_too_long_step_again(name, start, dtype, most):
    """It needs 72 and 98 evaluations; 221 and 258 where each step is searched for from the far end."""
    data = draw(7, 2).to(dtype) if name in ROBUST else torch.zeros(1, 1, dtype=dtype)
    loss = ROBUST[name] if name in ROBUST else SINGLES[name][0]
    solution = dil.argmin(lambda y: loss(y - data).sum(), torch.full(data.shape[1:], start, dtype=dtype))
    assert solution.converged and solution.stats.products <= most


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("linear_solver", [None, dil.CG()], ids=repr)
def test_newton_sees_that_a_score_has_no_minimum(linear_solver, n, dtype):
    """Run after for long enough, y comes to where the natural size of F is infinite and any F a solution."""
    score = lambda y: (ROBUST["pseudo-Huber"](y) - 1.1 * y).sum()  # noqa: E731
    solver = dil.Newton(linear_solver=linear_solver)
    solution = dil.argmin(score, torch.zeros(n, dtype=dtype), solver=solver, on_failure="ignore")
    assert solution.status == dil.Status.stagnated and solution.stats.products <= 250


@pytest.mark.parametrize("start", [10.0, 1e3])
def test_newton_looks_at_the_curvature_where_a_step_came_from_afar(start):
    """An obstacle at the goal: the Hessian is zero at the start, whose first damped step ends on the maximum."""
    score = lambda y: (ROBUST["Huber"](y) + 2 * torch.exp(-(y**2))).sum()  # noqa: E731
    solution = dil.argmin(score, torch.full((1,), start, dtype=torch.float64), on_failure="ignore")
    assert solution.status == dil.Status.negative_curvature and solution.value.abs() <= VALUE


def test_newton_makes_a_step_longer_that_leaves_all_of_the_slope():
    """The naive log cosh, next to where it overflows, with second derivatives that are rounding errors.

    Between 11 and 27 steps are taken; without the second Wolfe condition up to 69, and the first sample gets stuck.
    """
    A, x = (torch.stack([draw(*shape, seed=k + first) for k in range(4)]) for shape, first in (((8, 2), 0), ((8,), 10)))
    residual = lambda y: torch.einsum("bij,bj->bi", A, y) - 3 * x  # noqa: E731
    y0 = torch.full((4, 2), 200.0, dtype=torch.float64)
    solution = dil.argmin(lambda y: torch.log(torch.cosh(residual(y))).sum(1), y0)
    assert solution.converged.all() and solution.stats.steps.max() <= 35
    near = dil.argmin(lambda y: ROBUST["log cosh"](residual(y)).sum(1), torch.zeros_like(y0))
    torch.testing.assert_close(solution.value, near.value, rtol=VALUE, atol=VALUE)


@pytest.mark.parametrize("linear_solver", [None, dil.CG()], ids=repr)
def test_newton_goes_down_the_slope_where_a_damped_hessian_is_not_positive(linear_solver):
    """Far out Cauchy's loss is concave; a grid is the oracle."""
    data, loss = draw(7, 2), lambda r: torch.log1p(r**2)
    y0 = torch.full((2,), 10.0, dtype=torch.float64)
    solution = dil.argmin(lambda y: loss(y - data).sum(), y0, solver=dil.Newton(linear_solver=linear_solver))
    grid = torch.linspace(-3, 3, 6001, dtype=torch.float64)
    best = grid[loss(grid[:, None, None] - data).sum(1).argmin(dim=0)]
    assert solution.converged and (solution.value - best).abs().max() <= 1e-3


def test_a_search_comes_back_from_where_nothing_is_a_number():
    """Newton's step is e^40 there; half of that, forty times over, has an infinite exponential still."""
    solution = dil.root(lambda y: torch.exp(y) - 1, torch.full((1,), -40.0, dtype=torch.float64))
    assert solution.converged and solution.value.abs() <= VALUE


@pytest.mark.parametrize(
    ("x", "dtype"), [(-1.2, torch.float32), (-2.0, torch.float32), (-3.0, torch.float64), (-4.0, torch.float64)]
)
def test_newton_goes_on_down_an_exponential(x, dtype):
    """It gains 1/20 a step, and the natural size of F, which the tolerance is relative to, falls by e."""
    score = lambda y: (torch.exp(20 * (y - x)) - 20 * (y - x)).sum()  # noqa: E731
    solution = dil.argmin(score, torch.zeros(3, dtype=dtype))
    assert solution.converged and solution.stats.steps <= 100
    assert (solution.value - x).norm() <= (VALUE if dtype == torch.float64 else SINGLE)


@pytest.mark.parametrize("solver", [dil.LBFGS(), dil.GradientDescent()], ids=repr)
def test_a_root_is_refused(solver):
    with pytest.raises(ValueError, match=rf"solver={type(solver).__name__}\(\) needs an argmin, got a root"):
        dil.root(lambda y: y - 1, torch.zeros(2), solver=solver)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dil.LBFGS(history=0), "history must be an integer >= 1, got 0"),
        (lambda: dil.GradientDescent(momentum=1.0), "momentum must be a number >= 0 and < 1, got 1.0"),
        (lambda: dil.GradientDescent(step_size=0.0), "step_size must be a number > 0 or None, got 0.0"),
    ],
)
def test_bad_fields(make, message):
    with pytest.raises(ValueError, match=message):
        make()
