"""Anderson acceleration and Broyden's method: the problems against SciPy, what acceleration gains, batches, every status."""

import numpy as np
import pytest
import scipy.optimize
import torch
from problems import PROBLEMS, Problem, flatten, problems
from torch.func import grad, jacrev, vmap
from torch.utils import _pytree as pytree

import torchdil as dil
from torchdil import Status
from torchdil.problem import Problem as Statement
from torchdil.solvers.anderson import _Memory
from torchdil.solvers.broyden import _Dense, _LowRank

# Relative, of a value: the default rtol of 1e-10 times the condition numbers of the problems.
VALUE = 1e-7
FLOAT32 = 2e-3  # the same with rtol 1e-5
# What another sample of the batch may change: the rounding of batched kernels.
ALONE = 1e-12
# Two ways of the same arithmetic.
ROUNDING = 1e-10
# Evaluations of Anderson over those of Picard near the edge of contraction; 0.37 and 0.29 were measured.
GAIN = 0.5

SOLVERS = [dil.Anderson(), dil.Broyden()]
NAMES = ["Anderson", "Broyden"]
each_solver = pytest.mark.parametrize("solver", SOLVERS, ids=NAMES)

# The answer of the singular problem is not unique; it has a test of its own.
REGULAR = [p for p in PROBLEMS if not p.damping]
EQUATIONS = [p for p in REGULAR if p.kind != "argmin"]


def name(thing):
    return thing.name


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative(a, b):
    return float((a - b).detach().norm() / b.detach().norm())


def numpy_residual(problem):
    params = tuple(p.detach() for p in problem.params)
    return lambda vector: problem.residual(torch.as_tensor(vector), *params).numpy()


def reference(problem):
    """y by SciPy: Powell's hybrid method, of an argmin from where BFGS ends."""
    F, start = numpy_residual(problem), flatten(problem.y0).numpy()
    if problem.kind == "argmin":
        like, spec = pytree.tree_flatten(problem.y0)

        def score(vector):
            parts = torch.as_tensor(vector).split([leaf.numel() for leaf in like])
            y = pytree.tree_unflatten([part.view_as(leaf) for part, leaf in zip(parts, like, strict=True)], spec)
            return problem.fn(y, *(p.detach() for p in problem.params)).sum().item()

        start = scipy.optimize.minimize(score, start, jac=F, method="BFGS", options={"gtol": 1e-6}).x
    return torch.as_tensor(scipy.optimize.root(F, start, tol=1e-14).x)


@pytest.mark.parametrize("problem", REGULAR, ids=name)
@each_solver
def test_value_is_that_of_scipy(problem, solver):
    solution = problem.solve(problem.leaves(), solver=solver)
    assert bool(solution.converged.all())
    assert relative(flatten(solution.value), reference(problem)) <= VALUE


@pytest.mark.filterwarnings("ignore::scipy.linalg.LinAlgWarning")  # SciPy's memory may be singular
@pytest.mark.parametrize("problem", EQUATIONS, ids=name)
@pytest.mark.parametrize(("solver", "method"), [(dil.Anderson(), "anderson"), (dil.Broyden(), "broyden1")], ids=NAMES)
def test_scipys_method_of_the_name_agrees_and_needs_more_evaluations(problem, solver, method):
    count, F = 0, numpy_residual(problem)

    def counted(vector):
        nonlocal count
        count += 1
        return F(vector)

    solution = problem.solve(problem.params, solver=solver)
    y = getattr(scipy.optimize, method)(counted, flatten(problem.y0).numpy(), f_tol=1e-11)
    assert relative(flatten(solution.value), torch.as_tensor(y)) <= VALUE
    assert solution.stats.products <= count


@pytest.mark.parametrize("i", range(len(PROBLEMS)), ids=[p.name for p in PROBLEMS])
@each_solver
def test_float32(i, solver):
    single, double = problems(torch.float32)[i], PROBLEMS[i]
    solution = single.solve(single.leaves(), solver=solver)
    assert bool(solution.converged.all())
    assert flatten(solution.value).dtype == torch.float32
    assert relative(flatten(solution.value).double(), flatten(double.solve(double.leaves()).value)) <= FLOAT32


@pytest.mark.parametrize("problem", REGULAR, ids=name)
@each_solver
def test_the_gradient_is_that_of_newton(problem, solver):
    grads = []
    for chosen in (solver, dil.Newton()):
        params = problem.leaves()
        loss = flatten(problem.value(params, solver=chosen)).square().sum()
        grads.append(flatten(torch.autograd.grad(loss, params, materialize_grads=True)))
    assert relative(*grads) <= VALUE


@pytest.mark.parametrize("problem", PROBLEMS, ids=name)
@each_solver
def test_a_start_at_the_solution_is_recognised(problem, solver):
    y = pytree.tree_map(lambda t: t.detach(), problem.solve(problem.params, solver=dil.Newton(rtol=1e-13)).value)
    solution = problem.solve(problem.params, y, solver=solver)
    assert bool(solution.converged.all())
    assert int(solution.stats.steps.max()) <= 1


@pytest.mark.parametrize("unit", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("factor", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("which", ["kepler_root", "root_batch4", "saddle", "logistic"])
@each_solver
def test_units_change_nothing(which, factor, unit, solver):
    """f -> factor f and y -> unit y."""
    (problem,) = (p for p in PROBLEMS if p.name == which)
    y0 = problem.y0 + 0.1
    scaled = Problem(
        which, problem.kind, lambda y, *p: factor * problem.fn(y / unit, *p), unit * y0, problem.params, batch=problem.batch
    )
    plain, changed = problem.solve(problem.params, y0, solver=solver), scaled.solve(problem.params, solver=solver)
    assert bool(changed.converged.all())
    assert relative(flatten(changed.value) / unit, flatten(plain.value)) <= VALUE


# What acceleration is for.


def equilibrium(samples, n, seed, symmetric):
    """tanh(W y + x), W of norm 1 if it is symmetric, else of spectral radius 0.98 and norm about 2."""
    W = draw(seed, n, n)
    W = (W + W.mT) / torch.linalg.matrix_norm(W + W.mT, 2) if symmetric else 0.98 * W / torch.linalg.eigvals(W).abs().max()
    params = W, 0.3 * draw(seed + 1, samples, n)
    return Problem("deq", "fixed_point", lambda y, W, x: torch.tanh(y @ W.mT + x), 0 * params[1], params, batch=samples)


@pytest.mark.parametrize("symmetric", [True, False])
def test_anderson_needs_fewer_evaluations_than_picard(symmetric):
    problem = equilibrium(64, 50, 0, symmetric)
    picard, anderson = (problem.solve(problem.params, solver=solver) for solver in (dil.Picard(), dil.Anderson()))
    assert bool(picard.converged.all()) and bool(anderson.converged.all())
    assert anderson.stats.products <= GAIN * picard.stats.products
    assert relative(anderson.value, picard.value) <= VALUE


# y - g(y) with slopes of the map between -4 and -2, and between 2.5 and 3.5: unique solutions, from which y ← g(y) runs away.
EXPANDING = {
    "to and fro": lambda y, x: x - 3 * y + torch.sin(y),
    "one way": lambda y, x: 3 * y + 0.5 * torch.sin(y) - x,
}


@pytest.mark.parametrize("n", [1, 3, 200])
@pytest.mark.parametrize("which", EXPANDING)
@each_solver
def test_a_map_that_does_not_contract(n, which, solver):
    x = draw(0, 8, n)
    g = EXPANDING[which]
    problem = Problem(which, "fixed_point", g, torch.zeros_like(x), (x,), batch=8)
    assert not bool(problem.solve((x,), solver=dil.Picard(), on_failure="ignore").converged.any())
    solution = problem.solve((x,), solver=solver)
    assert bool(solution.converged.all())
    F = scipy.optimize.root(
        lambda y: y - g(torch.as_tensor(y), x.flatten()).numpy(), np.zeros(8 * n), tol=1e-13, method="krylov"
    )
    assert relative(solution.value.flatten(), torch.as_tensor(F.x)) <= VALUE


def test_anderson_with_all_steps_is_gmres():
    """On a linear fixed point the iterate after step k + 1 is g of what GMRES has after k (Walker and Ni 2011)."""
    n = 8
    M, b = 0.9 * draw(0, n, n) / torch.linalg.matrix_norm(draw(0, n, n), 2), draw(1, n)
    J = torch.eye(n, dtype=torch.float64) - M
    krylov = torch.stack([torch.linalg.matrix_power(J, i) @ b for i in range(n)], dim=1)
    for k in range(1, n):
        basis = torch.linalg.qr(krylov[:, :k])[0]
        y = basis @ torch.linalg.lstsq(J @ basis, b).solution
        solver = dil.Anderson(history=n, max_steps=k + 1)
        solution = dil.fixed_point(lambda y: M @ y + b, torch.zeros_like(b), solver=solver, on_failure="ignore")
        assert relative(solution.value, M @ y + b) <= ROUNDING
    assert dil.fixed_point(lambda y: M @ y + b, torch.zeros_like(b), solver=dil.Anderson(history=n)).stats.steps <= n + 1


@pytest.mark.parametrize("condition", [1e1, 1e5])
def test_the_coefficients_of_anderson_are_least_squares(condition):
    """For nearly parallel ΔF too; samples that forgot or never knew a step take a plain one."""
    n, m, samples = 20, 5, 4
    U, V = (torch.linalg.qr(draw(k, samples, n, m))[0] for k in (0, 1))
    mix = torch.linalg.qr(draw(2, m, m))[0] @ torch.diag(torch.logspace(0, -np.log10(condition), m, dtype=torch.float64))
    Q, S, F = (U @ (mix @ draw(3, m, m))).mT, V.mT, draw(4, samples, n)
    memory, known = _Memory(F, m), torch.ones(samples, dtype=torch.bool)
    known[2] = False
    for k in range(m):
        memory.add(S[:, k], Q[:, k], known)
    memory.forget(torch.tensor([False, False, False, True]))
    step = memory.step(F, torch.full((samples,), 0.5, dtype=torch.float64))
    for i in (0, 1):
        gamma = np.linalg.lstsq(Q[i].mT.numpy(), F[i].numpy(), rcond=None)[0]
        expected = -S[i].mT.numpy() @ gamma - 0.5 * (F[i].numpy() - Q[i].mT.numpy() @ gamma)
        np.testing.assert_allclose(step[i].numpy(), expected, rtol=0, atol=1e-15 * condition**2 * np.abs(expected).max())
    assert torch.equal(step[2:], -0.5 * F[2:])


@pytest.mark.parametrize("history", [1, 5, 20])
@pytest.mark.parametrize("n", [1, 5, 200])
def test_a_memory_of_equal_steps_is_no_obstacle(history, n):
    """All entries of y go the same way, so that the steps span one direction; of a constant map they do not change F at all."""
    for g, y in ((torch.cos, 0.7390851332151607), (lambda y: 0 * y + 2, 2.0)):
        solution = dil.fixed_point(g, torch.ones(n, dtype=torch.float64), solver=dil.Anderson(history=history))
        assert bool(solution.converged)
        assert (solution.value - y).abs().max() <= VALUE


def test_acceleration_gives_way_where_the_map_has_kinks():
    """Picard converges on these; secants across a kink mislead, and the safeguard must not cost more than it."""
    for seed in range(20):
        M, b = draw(seed, 2, 2), draw(seed + 100, 16, 2)
        M = 0.9 * M / torch.linalg.matrix_norm(M, 2)
        g = lambda y, M, b: (y @ M.mT + b).abs()  # noqa: E731
        problem = Problem("kinks", "fixed_point", g, torch.zeros_like(b), (M, b), batch=16)
        picard, anderson = (problem.solve((M, b), solver=solver) for solver in (dil.Picard(), dil.Anderson()))
        assert bool(anderson.converged.all())
        assert relative(anderson.value, picard.value) <= VALUE
        assert bool((anderson.stats.steps <= picard.stats.steps + 5).all())


# Broyden: the update, and stiff systems.


@pytest.mark.parametrize("kind", [_Dense, _LowRank])
def test_the_update_is_broydens(kind):
    """Six corrections of a non-symmetric H, against the formula in NumPy; one that would divide by zero is left out."""
    n, samples = 5, 3
    A, b = draw(0, samples, n, n) + 4 * torch.eye(n, dtype=torch.float64), draw(1, samples, n)
    problem = Statement("root", False, lambda y: torch.einsum("bij,bj->bi", A, y) - b)
    y = torch.zeros_like(b)
    inverse = _Dense(problem, y) if kind is _Dense else _LowRank(problem, y, problem.evaluate(y), 6)
    columns = torch.eye(n, dtype=torch.float64).unsqueeze(1).expand(-1, samples, -1)

    def matrix():
        return torch.stack([inverse.apply(e) for e in columns], dim=2).numpy()

    expected = matrix()
    everyone = torch.ones(samples, dtype=torch.bool)
    for k in range(6):
        s, q = draw(10 + k, samples, n), draw(20 + k, samples, n)
        mask = everyone.clone()
        if k == 2:
            mask[1] = False
            q[2] = 0.0
        inverse.correct(s, q, mask)
        for i in range(samples):
            if mask[i] and q[i].any():
                Hq, sH = expected[i] @ q[i].numpy(), s[i].numpy() @ expected[i]
                expected[i] += np.outer(s[i].numpy() - Hq, sH) / (sH @ q[i].numpy())
        np.testing.assert_allclose(matrix(), expected, rtol=0, atol=ROUNDING * np.abs(expected).max())
    assert relative(inverse.apply(q), s) <= ROUNDING


def test_a_full_memory_of_broyden_begins_anew():
    problem = Statement("root", False, lambda y: 2 * y - 1)
    y = torch.zeros(2, 5, dtype=torch.float64)
    whole, last = (_LowRank(problem, y, problem.evaluate(y), 3) for _ in range(2))
    for k in range(4):
        pair = draw(k, 2, 5), draw(10 + k, 2, 5), torch.ones(2, dtype=torch.bool)
        whole.correct(*pair)
    last.correct(*pair)
    x = draw(20, 2, 5)
    assert torch.equal(whole.apply(x), last.apply(x))


def test_a_misled_broyden_begins_anew():
    """arctan from afar, where its slope is 1 % of that at the root: 38 evaluations, and 99 without new starts."""
    x = torch.linspace(-1, 1, 200, dtype=torch.float64)
    solution = dil.root(lambda y: torch.arctan(y - x), torch.full_like(x, 10.0), solver=dil.Broyden())
    assert bool(solution.converged) and relative(solution.value, x) <= VALUE
    assert solution.stats.products <= 60


def robertson(y, before, dt):
    """One step of backward Euler of Robertson's reactions, whose rates differ by nine orders of magnitude."""
    a, b, c = y.unbind(-1)
    slow, fast = -0.04 * a + 1e4 * b * c, 3e7 * b**2
    return y - before - dt * torch.stack([slow, -slow - fast, fast], dim=-1)


def van_der_pol(y, before, dt):
    """The same of Van der Pol's oscillator with μ = 1000."""
    position, speed = y.unbind(-1)
    return y - before - dt * torch.stack([speed, 1000 * (1 - position**2) * speed - position], dim=-1)


def robertson_by_bisection(dt):
    """All in terms of b > 0; there is a second solution with b < 0, which `scipy.optimize.root` finds for some dt."""

    def concentrations(b):
        c = dt * 3e7 * b**2
        return np.array([1 - b - c, b, c])

    def excess(b):
        a, b, c = concentrations(b)
        return a - 1 - dt * (-0.04 * a + 1e4 * b * c)

    return concentrations(scipy.optimize.brentq(excess, 0, 1e-4, xtol=1e-30, rtol=1e-15))


def van_der_pol_by_root(dt):
    start = torch.tensor([2.0, 0.0], dtype=torch.float64)
    return scipy.optimize.root(lambda y: van_der_pol(torch.as_tensor(y), start, dt).numpy(), start.numpy(), tol=1e-14).x


STIFF = {
    "robertson": (robertson, robertson_by_bisection, [1.0, 0.0, 0.0], [0.01, 0.1, 1.0, 10.0, 1e2, 1e3, 1e4, 1e5]),
    "van_der_pol": (van_der_pol, van_der_pol_by_root, [2.0, 0.0], [0.1, 1.0, 10.0, 100.0]),
}


@pytest.mark.parametrize("which", STIFF)
def test_a_stiff_step(which):
    """Every size of the step at once, each like SciPy's answer in every component."""
    residual, by_scipy, start, steps = STIFF[which]
    dt = torch.tensor(steps, dtype=torch.float64).unsqueeze(1)
    before = torch.tensor(start, dtype=torch.float64).repeat(len(steps), 1)
    solution = dil.root(residual, before, (before, dt), batch_dims=1, solver=dil.Broyden())
    assert bool(solution.converged.all())
    expected = np.stack([by_scipy(step) for step in steps])
    np.testing.assert_allclose(solution.value.numpy(), expected, rtol=VALUE, atol=0)


def test_a_linear_system_is_one_step_of_broyden():
    A, b = draw(0, 4, 6, 6), draw(1, 4, 6)
    solution = dil.root(lambda y: torch.einsum("bij,bj->bi", A, y) - b, torch.zeros_like(b), batch_dims=1, solver=dil.Broyden())
    assert solution.stats.steps.tolist() == [1] * 4
    assert relative(solution.value, torch.linalg.solve(A, b)) <= VALUE


def test_a_singular_jacobian_at_the_start_of_broyden():
    """y³ has slope 0 where the first sample starts."""
    y0 = torch.tensor([[0.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    residual = lambda y: torch.stack([y[:, 0] ** 3, y[:, 1] ** 3 - 8], dim=1)  # noqa: E731
    solution = dil.root(residual, y0, batch_dims=1, solver=dil.Broyden())
    assert bool(solution.converged.all())
    assert (solution.value[:, 1] - 2).abs().max() <= VALUE


@each_solver
def test_a_flat_direction_is_left_alone(solver):
    (problem,) = (p for p in PROBLEMS if p.damping)
    y = problem.solve(problem.params, solver=solver).value
    assert abs(y[0] - y[1]) <= VALUE


def double_well(y):
    """A saddle at 0, minima at y_last = ±1/√2."""
    return y[:-1].square().sum() - y[-1] ** 2 + y[-1] ** 4


@pytest.mark.parametrize("n", [2, 200])
def test_a_saddle_is_left_by_anderson_and_owned_up_to_by_broyden(n):
    y0 = torch.full((n,), 1e-3, dtype=torch.float64)
    minimum = dil.argmin(double_well, y0, solver=dil.Anderson())
    assert minimum.status == Status.converged
    assert abs(abs(minimum.value[-1]) - 0.5**0.5) <= VALUE
    with pytest.warns(dil.ConvergenceWarning, match="negative_curvature"):
        saddle = dil.argmin(double_well, y0, solver=dil.Broyden())
    assert saddle.status == Status.negative_curvature


# Samples of a batch.

EASY = 3


def hard_batch(n):
    """Contractions, and first a map that is far from one, with a far start."""
    Q = torch.linalg.qr(draw(0, 1 + EASY, n, n))[0]
    H = Q @ torch.diag_embed(torch.linspace(0.1, 0.5, n, dtype=torch.float64).repeat(1 + EASY, 1)) @ Q.mT
    H[0] *= -40
    y0 = torch.zeros(1 + EASY, n, dtype=torch.float64)
    y0[0] = 100.0
    return H, draw(1, 1 + EASY, n), y0


def contraction(y, H, x):
    return torch.tanh(torch.einsum("bij,bj->bi", H, y) + x)


def poisoned(y, H, x):
    """NaN for the sample whose H is negative, wherever it is."""
    trace = torch.diagonal(H, dim1=1, dim2=2).sum(1, keepdim=True)
    return contraction(y, H, x) + torch.where(trace < 0, torch.nan, 0.0)


@pytest.mark.filterwarnings("ignore::torchdil.ConvergenceWarning")  # of the first sample
@pytest.mark.parametrize("n", [4, 150])
@pytest.mark.parametrize("kind", ["root", "fixed_point"])
@pytest.mark.parametrize("g", [contraction, poisoned])
@each_solver
def test_a_hard_sample_changes_nothing_for_the_others(g, kind, n, solver):
    H, x, y0 = hard_batch(n)
    fn = {"root": lambda y, H, x: y - g(y, H, x), "fixed_point": g}[kind]

    def solve(some):
        inputs = H[some].clone().requires_grad_(), x[some].clone().requires_grad_()
        problem = Problem("hard", kind, fn, y0[some], inputs, batch=len(y0[some]))
        solution = problem.solve(inputs, solver=solver)
        return solution, torch.autograd.grad(solution.value[-EASY:].square().sum(), inputs)

    together, grads = solve(slice(None))
    without, grads_without = solve(slice(1, None))
    assert bool(without.converged.all())
    if g is poisoned:
        assert together.status[0] == Status.non_finite and together.stats.steps[0] == 0
    else:
        assert together.stats.steps[0] > together.stats.steps[1:].max()
    assert torch.equal(together.status[1:], without.status) and torch.equal(together.stats.steps[1:], without.stats.steps)
    assert (together.value[1:] - without.value).abs().max() <= ALONE
    for gradient, gradient_without in zip(grads, grads_without, strict=True):
        assert (gradient[1:] - gradient_without).abs().max() <= ALONE


@each_solver
def test_converged_samples_are_frozen(solver):
    H, x, y0 = hard_batch(4)
    y0[1] = dil.fixed_point(contraction, y0, (H, x), batch_dims=1, solver=dil.Newton(rtol=1e-14)).value[1]
    solution = dil.fixed_point(contraction, y0, (H, x), batch_dims=1, solver=solver)
    assert bool(solution.converged.all())
    assert torch.equal(solution.value[1], y0[1]) and solution.stats.steps[1] == 0
    assert solution.stats.steps[0] > solution.stats.steps[2] > 0
    residuals = torch.stack(solution.stats.history)[:, 2]
    assert bool((residuals[solution.stats.steps[2] :] == residuals[solution.stats.steps[2]]).all())


@pytest.mark.parametrize("n", [2, 200])
@each_solver
def test_values_that_are_not_finite_on_the_way_are_stepped_back_from(n, solver):
    """A full step from 10 towards log y = x leads to negative y."""
    x = torch.linspace(-1, 1, n, dtype=torch.float64)
    solution = dil.root(lambda y: torch.log(y) - x, torch.full_like(x, 10.0), solver=solver)
    assert bool(solution.converged)
    assert relative(solution.value, torch.exp(x)) <= VALUE


@each_solver
def test_nested_unknowns(solver):
    g = lambda y, a: {"u": torch.tanh(y["v"][0] + a), "v": (0.5 * torch.sin(y["u"]), y["v"][1] / 2 + y["u"].sum(-1))}  # noqa: E731
    a = draw(0, 4, 3)
    y0 = {"u": torch.ones(4, 3).double(), "v": (torch.ones(4, 3).double(), torch.ones(4).double())}
    y = dil.fixed_point(g, y0, (a,), batch_dims=1, solver=solver)
    expected = dil.fixed_point(g, y0, (a,), batch_dims=1, solver=dil.Picard(rtol=1e-14)).value
    assert bool(y.converged.all()) and y.value["v"][1].shape == (4,)
    assert (flatten(y.value) - flatten(expected)).abs().max() <= VALUE


# Statuses and settings.


@pytest.mark.parametrize("n", [2, 200])
@each_solver
def test_statuses(n, solver):
    y0 = torch.ones(3, n, dtype=torch.float64)

    def end(residual, chosen=solver):
        return dil.root(residual, y0, batch_dims=1, solver=chosen, on_failure="ignore")

    short = end(lambda y: torch.exp(y) - 2, type(solver)(max_steps=1))
    assert (short.status == Status.max_steps).all() and (short.stats.steps == 1).all()
    none = end(lambda y: y**2 + 1)
    assert (none.status == Status.stagnated).all()
    assert (none.stats.residual <= n**0.5 * 2).all()  # no worse than the start
    nowhere = end(lambda y: torch.where(y == 1, y, torch.nan))  # finite at the start alone
    assert (nowhere.status == Status.stagnated).all() and torch.equal(nowhere.value, y0)
    lost = end(lambda y: y + torch.nan)
    assert (lost.status == Status.non_finite).all() and (lost.stats.steps == 0).all()


BAD = {
    "history": (lambda: dil.Anderson(history=0), "history must be an integer >= 1, got 0."),
    "relaxation": (lambda: dil.Anderson(relaxation=0.0), "relaxation must be a number > 0, got 0.0."),
    "NaN": (lambda: dil.Anderson(relaxation=float("nan")), "relaxation must be a number > 0, got nan."),
    "Broyden's history": (lambda: dil.Broyden(history=0), "history must be an integer >= 1, got 0."),
    "the base's fields": (lambda: dil.Broyden(max_steps=0), "max_steps must be an integer >= 1, got 0."),
}


@pytest.mark.parametrize("which", BAD)
def test_bad_fields(which):
    make, sentence = BAD[which]
    with pytest.raises(ValueError) as error:
        make()
    assert str(error.value) == sentence


@each_solver
def test_verbose_shows_a_table(solver, capsys):
    dil.fixed_point(torch.cos, torch.ones(2, 1).double(), batch_dims=1, solver=type(solver)(verbose=True))
    title, headings, *rows = capsys.readouterr().out.splitlines()
    assert title == f"{type(solver).__name__}: fixed_point, 2 samples"
    assert headings.split()[:2] == ["step", "running"]
    assert rows[0].split()[:2] == ["0", "2"] and rows[-2].split()[1] == "0"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [3, 200])
@each_solver
def test_half_precision(dtype, n, solver):
    """Two digits, but no crash and no warning."""
    x = torch.linspace(-1, 1, n, dtype=dtype)
    solution = dil.fixed_point(lambda y: 0.5 * torch.cos(y) + x, torch.zeros(n, dtype=dtype), solver=solver)
    assert solution.value.dtype == dtype
    exact = dil.fixed_point(lambda y: 0.5 * torch.cos(y) + x.double(), torch.zeros(n).double()).value
    assert relative(solution.value.double(), exact) <= 3e-2


@each_solver
def test_steps_are_remembered_for_preconditioners(solver):
    A = draw(0, 3, 3) + 4 * torch.eye(3, dtype=torch.float64)
    problem = Statement("root", False, lambda y: y @ A.mT + 0.1 * y**3 - 1, keep=2)
    y0 = torch.zeros(2, 3, dtype=torch.float64)
    result = solver.solve(problem, y0, torch.full((2,), 1e-10, dtype=torch.float64))
    assert (result.status == Status.converged).all()
    assert len(problem.pairs) == 2
    for s, q in problem.pairs:
        assert (s.norm(dim=1) > 0).all()
        assert relative(q, s @ A.mT + 0.3 * result.value**2 * s) <= 1e-2  # the last steps are short


# Differentiation other than by `.backward()`.


def layer(solver, n):
    W = 0.4 * draw(0, n, n) / n**0.5
    y0 = torch.zeros(n, dtype=torch.float64)
    return lambda a: dil.fixed_point(lambda y, a: torch.tanh(W @ y + a), y0, (a,), solver=solver).value


@pytest.mark.parametrize("n", [3, 150])
@each_solver
def test_transforms(n, solver):
    a = draw(1, 4, n)
    y, exact = layer(solver, n), layer(dil.Newton(), n)
    assert relative(vmap(y)(a), torch.stack([exact(row) for row in a])) <= VALUE
    assert relative(grad(lambda a: y(a).square().sum())(a[0]), grad(lambda a: exact(a).square().sum())(a[0])) <= VALUE
    assert relative(vmap(jacrev(y))(a), vmap(jacrev(exact))(a)) <= VALUE
    assert relative(grad(lambda a: vmap(y)(a).square().sum())(a), grad(lambda a: vmap(exact)(a).square().sum())(a)) <= VALUE


@pytest.mark.parametrize("n", [3, 200])
@each_solver
def test_unrolling_agrees_with_differences(n, solver):
    check = dil.check_gradient(layer(solver, n), draw(1, n))
    assert check.ok
    headings, row = check.tensors
    assert headings[4] == f"unrolled {type(solver).__name__}"
    assert abs(float(row[4]) - float(row[3])) <= 1e-5 * abs(float(row[3]))
