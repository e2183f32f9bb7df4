"""Solvers from elsewhere: SciPy against SciPy called by hand, samples in lock-step, torch.optim against a loop by hand."""

import copy
import dataclasses
import pickle
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import scipy.optimize
import torch
from problems import PROBLEMS, flatten, problems
from sklearn.datasets import load_breast_cancer

import torchdil as dil
from torchdil import Status
from torchdil.operator import Operator
from torchdil.problem import Problem as Stated
from torchdil.problem import gradient
from torchdil.solvers import lockstep, scipy_solver

# The same steps of the same method on the same function, written twice: rounding, which finite differences enlarge.
STEPS = 1e-10
DIFFERENCED = 1e-6
# Relative, of a value: the default rtol of 1e-5 times the condition numbers of the problems; and of gradients with rtol 1e-9.
VALUE = 1e-3
GRADIENT = 1e-6
FLOAT32 = 2e-2  # half of float32's digits
# What another sample of the batch may change.
ALONE = 1e-12

VALUES_ONLY = ["Nelder-Mead", "Powell", "COBYLA", "COBYQA"]
PRODUCTS = ["Newton-CG", "trust-ncg", "trust-krylov", "trust-constr"]
DENSE = ["dogleg", "trust-exact"]
GRADIENTS = ["L-BFGS-B", "BFGS", "CG", "TNC", "SLSQP"]
MINIMISERS = [*GRADIENTS, *PRODUCTS, *DENSE, *VALUES_ONLY]
MIXING = ["broyden1", "broyden2", "anderson", "linearmixing", "diagbroyden", "excitingmixing"]
ROOT_FINDERS = ["hybr", "lm", *MIXING, "krylov", "df-sane"]


def running():
    """Without torch's own threads, of which Python hears when they run a backward pass on a GPU."""
    return [thread for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)]


@pytest.fixture(autouse=True)
def no_thread_is_left():
    before = running()
    yield
    assert running() == before


# The methods, against SciPy called by hand with derivatives written by hand.


@dataclass(frozen=True)
class Function:
    """A score for torch, and the same in NumPy with its derivatives."""

    name: str
    score: Callable
    value: Callable
    gradient: Callable
    hessian: Callable
    start: np.ndarray


def named(name):
    (problem,) = (p for p in PROBLEMS if p.name == name)
    return problem


def rosenbrock():
    problem = named("rosenbrock")
    a, b = (float(p) for p in problem.params)
    return Function(
        "rosenbrock",
        lambda y: problem.fn(y, *problem.params),
        lambda y: (a - y[0]) ** 2 + b * (y[1] - y[0] ** 2) ** 2,
        lambda y: np.array([-2 * (a - y[0]) - 4 * b * y[0] * (y[1] - y[0] ** 2), 2 * b * (y[1] - y[0] ** 2)]),
        lambda y: np.array([[2 - 4 * b * (y[1] - 3 * y[0] ** 2), -4 * b * y[0]], [-4 * b * y[0], 2 * b]]),
        problem.y0.numpy(),
    )


def beale():
    """The sum of (cᵢ - y₀ (1 - y₁ⁱ))² for i = 1, 2, 3; its minimum is at (3, 0.5)."""
    c, i = np.array([1.5, 2.25, 2.625]), np.arange(1, 4)

    def parts(y):
        error, by_0, by_1 = c - y[0] * (1 - y[1] ** i), y[1] ** i - 1, i * y[0] * y[1] ** (i - 1)
        return error, by_0, by_1, i * y[1] ** (i - 1), i * (i - 1) * y[0] * y[1] ** np.array([0, 0, 1])

    def hessian(y):
        error, by_0, by_1, by_01, by_11 = parts(y)
        mixed = by_0 @ by_1 + error @ by_01
        return 2 * np.array([[by_0 @ by_0, mixed], [mixed, by_1 @ by_1 + error @ by_11]])

    def score(y):
        return (1.5 - y[0] * (1 - y[1])) ** 2 + (2.25 - y[0] * (1 - y[1] ** 2)) ** 2 + (2.625 - y[0] * (1 - y[1] ** 3)) ** 2

    return Function(
        "beale",
        score,
        lambda y: (parts(y)[0] ** 2).sum(),
        lambda y: 2 * np.array([parts(y)[0] @ parts(y)[1], parts(y)[0] @ parts(y)[2]]),
        hessian,
        np.array([2.0, 0.3]),
    )


def himmelblau():
    def parts(y):
        return y[0] ** 2 + y[1] - 11, y[0] + y[1] ** 2 - 7

    def value(y):
        u, v = parts(y)
        return u**2 + v**2

    def by_hand(y):
        u, v = parts(y)
        return np.array([4 * y[0] * u + 2 * v, 2 * u + 4 * y[1] * v])

    def hessian(y):
        mixed = 4 * (y[0] + y[1])
        return np.array([[12 * y[0] ** 2 + 4 * y[1] - 42, mixed], [mixed, 12 * y[1] ** 2 + 4 * y[0] - 26]])

    return Function("himmelblau", value, value, by_hand, hessian, np.array([4.0, 3.0]))


def logistic():
    problem, data = named("logistic"), load_breast_cancer()
    X, sign = data.data[:60, :8], 2.0 * data.target[:60] - 1
    X, decay = (X - X.mean(0)) / X.std(0, ddof=1), np.exp(problem.params[0].numpy())

    def wrong(w):
        """How sure the model is of the wrong class."""
        return 1 / (1 + np.exp(sign * (X @ w)))

    return Function(
        "logistic",
        lambda w: problem.fn(w, *problem.params),
        lambda w: np.logaddexp(0, -sign * (X @ w)).mean() + 0.5 * decay @ w**2,
        lambda w: -X.T @ (sign * wrong(w)) / 60 + decay * w,
        lambda w: X.T @ ((wrong(w) * (1 - wrong(w)))[:, None] * X) / 60 + np.diag(decay),
        problem.y0.numpy(),
    )


FUNCTIONS = [rosenbrock(), beale(), himmelblau(), logistic()]
# More steps than a test should take; SciPy needs them, too.
SLOW = [("COBYLA", "rosenbrock"), ("COBYLA", "beale"), ("Nelder-Mead", "logistic")]
TOLERANCES = {
    **{method: {"gtol": 1e-13} for method in ("BFGS", "CG", "TNC", *PRODUCTS, *DENSE)},
    "L-BFGS-B": {"gtol": 1e-13, "ftol": 0.0},
    "Newton-CG": {"xtol": 0.0},
    "Powell": {"xtol": 1e-4},
}


def by_hand(function, method, options):
    derivatives = {}
    if method not in VALUES_ONLY:
        derivatives["jac"] = function.gradient
    if method in PRODUCTS:
        derivatives["hessp"] = lambda y, p: function.hessian(y) @ p
    if method in DENSE:
        derivatives["hess"] = function.hessian
    return scipy.optimize.minimize(function.value, function.start, method=method, options=options, **derivatives)


def ours(function, solver, **settings):
    return dil.argmin(function.score, torch.tensor(function.start), solver=solver, **settings)


def test_every_method_of_scipy_is_known():
    names = {name.lower() for name in (*MINIMISERS, *ROOT_FINDERS)}
    assert names == set(scipy.optimize._minimize.MINIMIZE_METHODS) | set(scipy.optimize._root.ROOT_METHODS)
    assert {*MINIMISERS, *ROOT_FINDERS} == set(scipy_solver.METHODS)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
@pytest.mark.parametrize("method", MINIMISERS)
def test_the_first_steps_are_those_of_scipy(method, function):
    """`options` go through, so a run that is cut off early ends where SciPy's own does."""
    limit = {"TNC": {"maxfun": 8}, "COBYLA": {"maxiter": 15}}.get(method, {"maxiter": 3})
    options = {**TOLERANCES.get(method, {}), **limit}
    expected = by_hand(function, method, options)
    assert not expected.success
    got = ours(function, dil.SciPy(method, options, rtol=1e-14), on_failure="ignore")
    assert got.status == Status.max_steps
    assert got.stats.steps == expected.get("nit", expected.nfev)
    assert abs(got.value.numpy() - expected.x).max() <= (DIFFERENCED if method == "TNC" else STEPS) * abs(expected.x).max()


@pytest.mark.parametrize(
    ("method", "function"),
    [
        pytest.param(method, function, id=f"{method}-{function.name}")
        for method in MINIMISERS
        for function in FUNCTIONS
        if (method, function.name) not in SLOW
    ],
)
def test_the_minimum_is_that_of_scipy(method, function):
    """As near as ‖F‖ and the smallest eigenvalue of the Hessian say."""
    derivatives = {"jac": function.gradient, "hess": function.hessian}
    reference = scipy.optimize.minimize(
        function.value, function.start, method="trust-exact", options={"gtol": 1e-10}, **derivatives
    )
    curvature = np.linalg.eigvalsh(function.hessian(reference.x))[0]
    for solver in (dil.SciPy(method), dil.SciPy(method.lower(), rtol=1e-6)):
        solution = ours(function, solver)
        y, tolerance = solution.value.numpy(), float(solution.stats.tolerance)
        assert solution.converged
        assert np.linalg.norm(function.gradient(y)) <= (1 + STEPS) * tolerance
        assert np.linalg.norm(y - reference.x) <= 1.1 * tolerance / curvature


@pytest.mark.parametrize(("method", "name"), SLOW)
def test_a_method_that_runs_out_of_steps_says_so(method, name):
    (function,) = (f for f in FUNCTIONS if f.name == name)
    solution = ours(function, dil.SciPy(method, max_steps=50), on_failure="ignore")
    assert solution.status == Status.max_steps
    assert solution.stats.steps == 50


ROOTS = [p for p in PROBLEMS if p.kind == "root" and not p.batch]


@pytest.mark.parametrize("problem", ROOTS, ids=lambda problem: problem.name)
@pytest.mark.parametrize("method", ROOT_FINDERS)
def test_the_way_to_a_root_is_that_of_scipy(method, problem):
    """Also where it leads nowhere."""

    def F(y):
        return problem.residual(y[0], *problem.params).unsqueeze(0)

    def J(y):
        return torch.func.jacrev(lambda u: problem.residual(u, *problem.params))(torch.as_tensor(y)).numpy()

    y0 = flatten(problem.y0).unsqueeze(0)
    options = {"fatol": 1e-6, "tol_norm": np.linalg.norm, "maxiter": 20}
    if method in ("hybr", "lm", "df-sane"):
        options = {"df-sane": {"fatol": 1e-6, "ftol": 0.0, "maxfev": 40}, "hybr": {"xtol": 1e-14}, "lm": {}}[method]
    more = {"jac": J} if method in ("hybr", "lm") else {}
    result = Counted(F, kind="root").solve(dil.SciPy(method, options), y0)
    expected = scipy.optimize.root(
        lambda y: F(torch.as_tensor(y[None]))[0].numpy(), y0[0].numpy(), method=method, options=options, **more
    )
    if method in ("hybr", "lm"):  # stopped at the tolerance, from where they would go on
        assert abs(result.value[0].numpy() - expected.x).max() <= 1e-5
    else:
        assert abs(result.value[0].numpy() - expected.x).max() <= STEPS * abs(expected.x).max()
        assert result.stats.steps[0] == expected.nit
    converged = np.linalg.norm(expected.fun) <= 1e-6
    assert result.status[0] == (Status.converged if converged else Status.max_steps)


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.kind == "root"], ids=lambda problem: problem.name)
@pytest.mark.parametrize("method", ["hybr", "lm", "broyden1", "krylov"])
def test_methods_that_find_every_root(method, problem):
    solution = problem.solve(problem.params, solver=dil.SciPy(method, rtol=1e-7))
    reference = flatten(problem.solve(problem.params, solver=dil.Newton(rtol=1e-13)).value)
    assert bool(solution.converged.all())
    assert (flatten(solution.value) - reference).norm() <= GRADIENT * reference.norm()


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.kind == "fixed_point"], ids=lambda problem: problem.name)
@pytest.mark.parametrize("method", ROOT_FINDERS)
def test_every_method_finds_a_fixed_point(method, problem):
    """SciPy's mixing methods would go away from y - g(y) = 0; they are given g(y) - y = 0."""
    solution = problem.solve(problem.params, solver=dil.SciPy(method, rtol=1e-7))
    reference = flatten(problem.solve(problem.params, solver=dil.Newton(rtol=1e-13)).value)
    assert bool(solution.converged.all())
    assert (flatten(solution.value) - reference).norm() <= GRADIENT * reference.norm()


# Which derivatives are used, and at what price.


def bowls(samples, n=3, spread=1.0):
    """Quartic bowls, each number by itself: a batch rounds as its samples do."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, n, generator=generator, dtype=torch.float64)
    stiff = torch.exp(spread * torch.randn(samples, n, generator=generator, dtype=torch.float64))
    return x, stiff


def bowl(y, x, stiff):
    # y⁴ by products: pow rounds the last numbers of a tensor, which fill no register, in another way than the others.
    terms = stiff * (y - x) ** 2 + 0.25 * (y**2) ** 2
    return terms[..., 0] + terms[..., 1] + terms[..., 2]


class Counted:
    """A problem by hand that counts its evaluations."""

    def __init__(self, fn, *args, kind="argmin"):
        self.evaluations = 0

        def counted(y):
            self.evaluations += 1
            return fn(y, *args)

        if kind == "argmin":
            self.problem = Stated("argmin", True, lambda y: gradient(counted, y, "score")[0], counted)
        else:
            self.problem = Stated(kind, False, counted)

    def solve(self, solver, y0, tolerance=1e-6):
        return solver.solve(self.problem, y0, torch.full_like(y0[:, 0], tolerance))


@pytest.fixture
def products(monkeypatch):
    """How often J was multiplied with, and how often it was built."""
    counts = {"mv": 0, "dense": 0}
    for name in counts:
        made = getattr(Operator, name)

        def counting(self, *args, made=made, name=name):
            counts[name] += 1
            return made(self, *args)

        monkeypatch.setattr(Operator, name, counting)
    return counts


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("method", MINIMISERS)
def test_methods_are_given_what_they_use(method, samples, products):
    x, stiff = bowls(samples)
    counted = Counted(bowl, x, stiff)
    result = counted.solve(dil.SciPy(method), torch.zeros_like(x), 1e-4)
    assert bool((result.status == Status.converged).all())
    assert (products["mv"] > 0) == (method in PRODUCTS)
    assert (products["dense"] > 0) == (method in DENSE)


@pytest.mark.parametrize("method", ROOT_FINDERS)
def test_root_finders_are_given_what_they_use(method, products):
    x, _ = bowls(3)
    counted = Counted(lambda y: x - 0.1 * torch.tanh(y) - y, kind="root")
    result = counted.solve(dil.SciPy(method), torch.zeros_like(x))
    assert bool((result.status == Status.converged).all())
    assert products["mv"] == 0
    assert (products["dense"] > 0) == (method in ("hybr", "lm"))


def test_value_and_gradient_are_one_evaluation():
    x, stiff = bowls(1)
    for method in ("L-BFGS-B", "BFGS"):
        counted = Counted(bowl, x, stiff)
        counted.solve(dil.SciPy(method), torch.zeros_like(x))
        expected = scipy.optimize.minimize(
            lambda y: (bowl(torch.tensor(y), x[0], stiff[0]).item(), gradient_of_bowl(y, x[0].numpy(), stiff[0].numpy())),
            np.zeros(3),
            jac=True,
            method=method,
            options={"gtol": 1e-6 / 3**0.5, "ftol": 0.0} if method == "L-BFGS-B" else {"gtol": 1e-6, "norm": 2},
        )
        assert counted.evaluations == expected.nfev + 1  # that of the answer


def gradient_of_bowl(y, x, stiff):
    return 2 * stiff * (y - x) + y**3


# Samples in lock-step.


@pytest.mark.parametrize("method", MINIMISERS)
def test_a_batch_is_its_samples(method):
    """To the last steps, and for the evaluations of its slowest sample."""
    x, stiff = bowls(6)
    y0 = torch.zeros_like(x)
    y0[3] = dil.argmin(bowl, y0[3:4], (x[3:4], stiff[3:4]), solver=dil.Newton(rtol=1e-13)).value[0]  # nothing to do
    tolerance = 1e-3 if method in VALUES_ONLY else 1e-6
    together = Counted(bowl, x, stiff)
    result = together.solve(dil.SciPy(method), y0, tolerance)
    assert bool((result.status == Status.converged).all())
    assert len(set(result.stats.steps.tolist())) > 2
    evaluations = []
    for i in range(6):
        one = Counted(bowl, x[i : i + 1], stiff[i : i + 1])
        alone = one.solve(dil.SciPy(method), y0[i : i + 1], tolerance)
        evaluations.append(one.evaluations)
        assert (alone.value[0] - result.value[i]).abs().max() <= ALONE
        assert alone.status[0] == result.status[i] and alone.stats.steps[0] == result.stats.steps[i]
        history = torch.stack(result.stats.history)[:, i]
        own = torch.stack(alone.stats.history)[:, 0]
        torch.testing.assert_close(history[: len(own)], own, rtol=ALONE, atol=ALONE)
        assert bool((history[len(own) :] == history[-1]).all())
    assert torch.equal(result.value[3], y0[3]) and result.stats.steps[3] == 0
    if method != "COBYQA":  # which SciPy runs under a lock
        assert together.evaluations <= 1.2 * max(evaluations) + 2
        assert together.evaluations < 0.5 * sum(evaluations)


@pytest.mark.parametrize("method", ROOT_FINDERS)
def test_a_batch_of_roots_is_its_samples(method):
    x, stiff = bowls(6, spread=0.3)

    def g(y, x, stiff):
        return torch.tanh(x - 0.3 * stiff * y)

    solver = dil.SciPy(method, rtol=1e-7)
    y = dil.fixed_point(g, torch.zeros_like(x), (x, stiff), batch_dims=1, solver=solver)
    assert bool(y.converged.all())
    for i in range(6):
        some = slice(i, i + 1)
        alone = dil.fixed_point(g, torch.zeros_like(x[some]), (x[some], stiff[some]), batch_dims=1, solver=solver)
        assert (alone.value[0] - y.value[i]).abs().max() <= ALONE
        assert alone.stats.steps[0] == y.stats.steps[i]


def test_large_batches_take_turns(monkeypatch):
    """No more threads than allowed, and the same numbers."""
    x, stiff = bowls(20)
    expected = dil.argmin(bowl, torch.zeros_like(x), (x, stiff), solver=dil.SciPy())
    threads, before = [], threading.active_count()

    def watching(y, x, stiff):
        threads.append(threading.active_count() - before)
        return bowl(y, x, stiff)

    monkeypatch.setattr(scipy_solver, "_THREADS", 4)
    solution = dil.argmin(watching, torch.zeros_like(x), (x, stiff), solver=dil.SciPy())
    assert max(threads) == 4
    assert (solution.value - expected.value).abs().max() <= ALONE
    assert solution.stats.products < 20 * expected.stats.products / 3


def test_the_function_runs_in_the_calling_thread():
    x, stiff = bowls(4)

    def score(y, x, stiff):
        assert threading.current_thread() is threading.main_thread()
        assert torch.is_grad_enabled() or not y.requires_grad
        return bowl(y, x, stiff)

    for method in ("L-BFGS-B", "trust-ncg", "Nelder-Mead"):
        assert bool(dil.argmin(score, torch.zeros_like(x), (x, stiff), solver=dil.SciPy(method)).converged.all())


class Broken(BaseException):
    """Not even an Exception."""


@pytest.mark.parametrize("samples", [1, 5])
@pytest.mark.parametrize("error", [ValueError, Broken])
@pytest.mark.parametrize("method", ["L-BFGS-B", "TNC", "trust-ncg", "trust-exact", "COBYLA", "COBYQA", "hybr", "lm", "krylov"])
def test_an_error_of_the_function_is_raised_once(method, error, samples):
    x, stiff = bowls(samples)
    calls, raised = [], []

    def breaking(y):
        calls.append(threading.current_thread())
        if len(calls) == 7:
            raised.append(error("broken"))
            raise raised[0]
        return bowl(y, x, stiff) if method in MINIMISERS else gradient(lambda u: bowl(u, x, stiff), y, "score")[0]

    counted = Counted(breaking, kind="argmin" if method in MINIMISERS else "root")
    with pytest.raises(error, match=r"^broken$") as caught:
        counted.solve(dil.SciPy(method), torch.zeros_like(x), 1e-13)
    assert caught.value is raised[0]
    assert len(calls) == 7


def test_a_run_that_fails_ends_the_others():
    """The caller's mistakes come out; numbers that foreign code cannot digest do not."""

    class Task:
        def __init__(self, row):
            self.row = row

        def __call__(self, ask):
            ask("first")
            if self.row == 2:
                raise ValueError("of one")
            while True:
                ask("more")

    with pytest.raises(ValueError, match="of one"):
        lockstep.run_together([Task(row) for row in range(4)], lambda requests: dict.fromkeys(requests), 4)


def test_warnings_of_the_function_are_not_silenced():
    x, stiff = bowls(3)

    def score(y, x, stiff):
        warnings.warn("of the function", UserWarning, stacklevel=1)
        return bowl(y, x, stiff)

    with pytest.warns(UserWarning, match="of the function"):
        dil.argmin(score, torch.zeros_like(x), (x, stiff), solver=dil.SciPy())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calls = []

        def later(y, x, stiff):
            calls.append(0)
            return score(y, x, stiff) if len(calls) > 8 else bowl(y, x, stiff)

        with pytest.raises(UserWarning, match="of the function"):
            dil.argmin(later, torch.zeros_like(x), (x, stiff), solver=dil.SciPy(rtol=1e-9))


def test_warnings_of_scipy_are():
    x, stiff = bowls(3)
    with pytest.warns(UserWarning, match="Invalid MAXFUN"):
        scipy.optimize.minimize(lambda y: y @ y, np.ones(3), method="COBYLA", options={"maxiter": 2})
    for some in (slice(0, 1), slice(None)):
        solution = dil.argmin(
            bowl, x[some], (x[some], stiff[some]), solver=dil.SciPy("COBYLA", max_steps=2), on_failure="ignore"
        )
        assert bool((solution.status == Status.max_steps).all())


# Numbers that are none.


@pytest.mark.filterwarnings("ignore::torchdil.ConvergenceWarning")
@pytest.mark.parametrize("method", MINIMISERS)
def test_a_sample_that_is_not_finite(method):
    """From the start, or as soon as it has moved; the others do not notice."""
    x, stiff = bowls(3)
    start, alone = torch.zeros_like(x), dil.SciPy(method)
    good = [dil.argmin(bowl, start[i : i + 1], (x[i : i + 1], stiff[i : i + 1]), solver=alone).value[0] for i in (0, 2)]

    def poisoned(y, x, stiff, reach):
        bad = torch.tensor([False, True, False]) & (y.detach().abs().amax(-1) >= reach)
        return torch.where(bad, torch.nan, 1.0) * bowl(y, x, stiff)

    for reach in (0.0, 1e-9):
        solution = dil.argmin(poisoned, start, (x, stiff, reach), solver=dil.SciPy(method, max_steps=300))
        assert solution.status[[0, 2]].tolist() == [Status.converged] * 2
        assert solution.status[1] in (
            [Status.non_finite] if reach == 0 else [Status.non_finite, Status.stagnated, Status.max_steps]
        )
        assert bool(torch.isfinite(solution.value).all())
        for i, y in zip((0, 2), good, strict=True):
            assert (solution.value[i] - y).abs().max() <= ALONE


@pytest.mark.filterwarnings("ignore::torchdil.ConvergenceWarning")
@pytest.mark.parametrize("method", ["hybr", "lm", "broyden1", "anderson", "krylov", "df-sane"])
def test_a_root_that_is_not_finite(method):
    x, _ = bowls(3)

    def residual(y, x, reach):
        bad = torch.tensor([False, True, False]) & (y.detach().abs().amax(-1) >= reach)
        return torch.where(bad, torch.nan, 1.0)[:, None] * (x - y - 0.1 * torch.sin(y))

    for reach in (0.0, 1e-3):
        solution = dil.root(residual, torch.zeros_like(x), (x, reach), batch_dims=1, solver=dil.SciPy(method, max_steps=100))
        assert solution.status[[0, 2]].tolist() == [Status.converged] * 2
        assert solution.status[1] != Status.converged
        assert bool(torch.isfinite(solution.value).all())


# Tolerances, dtypes, structures.


@pytest.mark.parametrize("method", [*GRADIENTS, *PRODUCTS, *DENSE])
def test_a_tolerance_that_was_asked_for_is_met(method):
    problem = named("mlp_energy")
    for rtol in (1e-2, 1e-5, 1e-7):
        solution = problem.solve(problem.params, solver=dil.SciPy(method, rtol=rtol))
        assert solution.converged
        assert solution.stats.residual <= solution.stats.tolerance


def test_options_win_over_ours():
    problem = named("logistic")
    loose = problem.solve(problem.params, solver=dil.SciPy("BFGS", {"gtol": 1e-1}), on_failure="ignore")
    default = problem.solve(problem.params, solver=dil.SciPy("BFGS"))
    assert loose.stats.steps < default.stats.steps
    assert loose.status == Status.stagnated and loose.stats.residual > loose.stats.tolerance
    short = problem.solve(problem.params, solver=dil.SciPy("BFGS", {"maxiter": 2}), on_failure="ignore")
    assert short.status == Status.max_steps and short.stats.steps == 2


@pytest.mark.parametrize("method", [*GRADIENTS, *PRODUCTS, *DENSE, "Powell"])
def test_float32(method):
    """Half the digits, by default; the dtype is kept, and so is the accuracy that was asked for."""
    (single,) = (p for p in problems(torch.float32) if p.name == "argmin_batch4")
    double = named("argmin_batch4")
    solution = single.solve(single.params, solver=dil.SciPy(method))
    reference = double.solve(double.params).value
    assert bool(solution.converged.all()) and solution.value.dtype == torch.float32
    assert (solution.value.double() - reference).norm() <= FLOAT32 * reference.norm()


@pytest.mark.parametrize("name", ["dict", "nested_batch3"])
@pytest.mark.parametrize("method", ["L-BFGS-B", "trust-ncg", "COBYQA"])
def test_nested_unknowns(method, name):
    problem = named(name)
    solution = problem.solve(problem.params, solver=dil.SciPy(method))
    reference = problem.solve(problem.params).value
    assert bool(solution.converged.all())
    assert (flatten(solution.value) - flatten(reference)).norm() <= VALUE * flatten(reference).norm()


def test_a_start_at_the_solution_costs_nothing():
    x, stiff = bowls(3)
    y = dil.argmin(bowl, torch.zeros_like(x), (x, stiff), solver=dil.Newton(rtol=1e-12)).value
    counted = Counted(bowl, x, stiff)
    for solver in (dil.SciPy(), dil.TorchOptim(torch.optim.SGD, lr=0.1)):
        result = counted.solve(solver, y)
        assert torch.equal(result.value, y) and result.stats.steps.tolist() == [0, 0, 0]
    assert counted.evaluations == 2


def test_an_empty_batch():
    for solver in (dil.SciPy(), dil.TorchOptim(torch.optim.Adam)):
        assert dil.argmin(lambda y: y.square().sum(-1), torch.zeros(0, 3), solver=solver).value.shape == (0, 3)


@pytest.mark.parametrize("method", ["L-BFGS-B", "COBYQA"])
def test_progress_is_shown(method, capsys):
    x, stiff = bowls(3)
    solution = dil.argmin(bowl, torch.zeros_like(x), (x, stiff), solver=dil.SciPy(method, verbose=True))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "SciPy: argmin, 3 samples"
    steps = [int(line.split()[0]) for line in lines[2:] if line.split()[0].isdigit()]
    assert len(steps) > 3 and max(steps) <= int(solution.stats.steps.max())


# Through the layer.

EXTERNAL = [
    dil.SciPy(rtol=1e-9),
    dil.SciPy("trust-exact", rtol=1e-9),
    dil.SciPy("trust-ncg", rtol=1e-7),
    dil.TorchOptim(torch.optim.SGD, lr=0.03, momentum=0.8, rtol=1e-9),
]


@pytest.mark.parametrize("solver", EXTERNAL, ids=repr)
def test_gradients_are_those_of_newton(solver):
    x, stiff = bowls(4, spread=0.5)

    def gradients(solver):
        inputs = x.clone().requires_grad_(), stiff.clone().requires_grad_()
        y = dil.argmin(bowl, torch.zeros_like(x), inputs, solver=solver).value
        return torch.autograd.grad((y**3).sum(), inputs)

    for got, expected in zip(gradients(solver), gradients(dil.Newton()), strict=True):
        torch.testing.assert_close(got, expected, rtol=GRADIENT, atol=GRADIENT)


def test_gradients_through_a_root():
    problem = named("root_batch4")

    def gradients(solver):
        params = problem.leaves()
        return torch.autograd.grad(problem.solve(params, solver=solver).value.square().sum(), params)

    for got, expected in zip(gradients(dil.SciPy(rtol=1e-9)), gradients(dil.Newton()), strict=True):
        torch.testing.assert_close(got, expected, rtol=GRADIENT, atol=GRADIENT)


@pytest.mark.parametrize("solver", EXTERNAL, ids=repr)
def test_under_torch_func(solver):
    x, stiff = bowls(4, spread=0.5)

    def value(x, stiff, solver):
        return dil.argmin(bowl, torch.zeros_like(x), (x, stiff), solver=solver).value

    grad = torch.func.grad(lambda x: value(x, stiff, solver).pow(3).sum())(x)
    expected = torch.func.grad(lambda x: value(x, stiff, dil.Newton()).pow(3).sum())(x)
    torch.testing.assert_close(grad, expected, rtol=GRADIENT, atol=GRADIENT)
    each = torch.func.vmap(lambda x, stiff: value(x, stiff, solver))(x, stiff)
    torch.testing.assert_close(each, value(x, stiff, dil.Newton()), rtol=GRADIENT, atol=GRADIENT)


def test_a_layer_inside_a_layer():
    """Both by SciPy: the threads of the outer solve wait while those of the inner one run."""
    x, _ = bowls(3)

    def outer(y, x):
        inner = dil.argmin(
            lambda z, y: ((z - y) ** 2 + 0.1 * z**4).sum(-1), torch.zeros_like(y), (y,), solver=dil.SciPy(rtol=1e-8)
        )
        return (inner.value - x).square().sum(-1) + 0.1 * y.square().sum(-1)

    y, reference = (dil.argmin(outer, torch.zeros_like(x), (x,), solver=solver) for solver in (dil.SciPy(), dil.Newton()))
    assert bool(y.converged.all())
    assert (y.value - reference.value).norm() <= VALUE * reference.value.norm()


# torch.optim.

OPTIMISERS = [
    (torch.optim.SGD, {"lr": 0.05}),
    (torch.optim.SGD, {"lr": 0.02, "momentum": 0.8, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.Adagrad, {"lr": 1.0}),
    (torch.optim.Rprop, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "alpha": 0.9, "centered": True}),
    (torch.optim.LBFGS, {"max_iter": 5, "tolerance_grad": 0.0, "tolerance_change": 0.0}),
    (torch.optim.LBFGS, {"line_search_fn": "strong_wolfe", "tolerance_change": 0.0}),
]


def quadratics(samples):
    generator = torch.Generator().manual_seed(1)
    L = torch.randn(samples, 3, 3, generator=generator, dtype=torch.float64)
    return L @ L.mT + torch.eye(3, dtype=torch.float64), torch.randn(samples, 3, generator=generator, dtype=torch.float64)


def quadratic(y, A, b):
    return 0.5 * torch.einsum("bi,bij,bj->b", y, A, y) - (b * y).sum(-1)


@pytest.mark.parametrize(("cls", "kwargs"), OPTIMISERS)
def test_an_optimiser_finds_the_minimum_of_bowls(cls, kwargs):
    A, b = quadratics(4)
    rtol = 1e-2 if cls is torch.optim.RMSprop else None  # which jumps about by its learning rate
    solution = dil.argmin(quadratic, torch.zeros_like(b), (A, b), solver=dil.TorchOptim(cls, rtol=rtol, **kwargs))
    exact = torch.linalg.solve(A, b)
    assert bool(solution.converged.all())
    assert (solution.value - exact).norm() <= (0.1 if rtol else VALUE) * exact.norm()


@pytest.mark.parametrize(("cls", "kwargs"), OPTIMISERS)
def test_steps_are_those_of_the_optimiser_by_hand(cls, kwargs):
    """To the last bit, for as many evaluations and that of the answer."""
    A, b = quadratics(1)
    for steps in (1, 2, 7):
        y = torch.ones(1, 3, dtype=torch.float64, requires_grad=True)
        optimiser, calls = cls([y], **kwargs), []

        def closure(y=y, optimiser=optimiser, calls=calls):
            calls.append(0)
            optimiser.zero_grad()
            loss = quadratic(y, A, b).sum()
            loss.backward()
            return loss

        for _ in range(steps):
            optimiser.step(closure)
        counted = Counted(quadratic, A, b)
        result = counted.solve(dil.TorchOptim(cls, max_steps=steps, **kwargs), torch.ones_like(b), 1e-30)
        assert torch.equal(result.value, y.detach())
        assert result.stats.steps.tolist() == [steps]
        assert counted.evaluations <= len(calls) + 1


def test_samples_that_are_done_are_frozen():
    """Though momentum, moments and weight decay would move them."""
    A, b = quadratics(4)
    y0 = torch.ones_like(b)
    y0[1] = torch.linalg.solve(A[1], b[1])
    for cls, kwargs in [
        (torch.optim.SGD, {"lr": 0.02, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 1e-6}),
    ]:
        solution = dil.argmin(quadratic, y0, (A, b), solver=dil.TorchOptim(cls, rtol=1e-4, **kwargs))
        assert bool(solution.converged.all())
        assert torch.equal(solution.value[1], y0[1]) and solution.stats.steps[1] == 0
        for i in (0, 2, 3):
            alone = dil.argmin(
                quadratic, y0[i : i + 1], (A[i : i + 1], b[i : i + 1]), solver=dil.TorchOptim(cls, rtol=1e-4, **kwargs)
            )
            assert alone.stats.steps[0] == solution.stats.steps[i]
            assert (alone.value[0] - solution.value[i]).abs().max() <= ALONE


@pytest.mark.parametrize(("cls", "kwargs"), [OPTIMISERS[2], *OPTIMISERS[6:]])
def test_a_sample_that_is_lost_on_the_way(cls, kwargs):
    A, b = quadratics(3)

    def poisoned(y, A, b):
        bad = torch.tensor([False, True, False]) & (y.detach().abs().amax(-1) > 0.1)
        return torch.where(bad, torch.nan, 1.0) * quadratic(y, A, b)

    solver = dil.TorchOptim(cls, **kwargs)
    with pytest.warns(dil.ConvergenceWarning, match="non_finite"):
        solution = dil.argmin(poisoned, torch.zeros_like(b), (A, b), solver=solver)
    assert solution.status.tolist() == [Status.converged, Status.non_finite, Status.converged]
    assert bool(torch.isfinite(solution.value).all())
    exact = torch.linalg.solve(A, b)
    assert (solution.value - exact)[[0, 2]].norm() <= VALUE * exact.norm()
    others = torch.stack(solution.stats.history)[:, [0, 2]]
    assert others.max() <= 10 * others[0].max()


def test_an_optimiser_that_runs_out_of_steps():
    A, b = quadratics(2)
    solver = dil.TorchOptim(torch.optim.SGD, lr=1e-4, max_steps=5)
    solution = dil.argmin(quadratic, torch.zeros_like(b), (A, b), solver=solver, on_failure="ignore")
    assert solution.status.tolist() == [Status.max_steps] * 2 and solution.stats.steps.tolist() == [5, 5]
    assert solution.stats.method == "TorchOptim SGD"


# Values and sentences.


def test_solvers_are_values():
    scipy_ = dil.SciPy("BFGS", {"gtol": 1e-3}, rtol=1e-4)
    adam = dil.TorchOptim(torch.optim.Adam, lr=0.1, betas=(0.8, 0.9), rtol=1e-4)
    for solver in (scipy_, adam):
        for twin in (copy.deepcopy(solver), pickle.loads(pickle.dumps(solver))):
            assert twin == solver and hash(twin) == hash(solver) and twin is not solver
        with pytest.raises(AttributeError):
            solver.rtol = 1.0
    assert dil.SciPy("BFGS", {"gtol": 1e-4}, rtol=1e-4) != scipy_
    assert eval(repr(scipy_), vars(dil)) == scipy_
    assert repr(adam) == "TorchOptim(Adam, lr=0.1, betas=(0.8, 0.9), rtol=0.0001)"
    assert eval(repr(adam), {**vars(dil), **vars(torch.optim)}) == adam
    assert dil.TorchOptim(torch.optim.Adam, lr=0.1) != dil.TorchOptim(torch.optim.Adam, lr=0.2)
    assert dil.TorchOptim(torch.optim.Adam) != dil.TorchOptim(torch.optim.AdamW)


def solve(kind, solver):
    y0 = torch.ones(2, dtype=torch.float64)
    if kind == "argmin":
        return dil.argmin(lambda y: y.square().sum(), y0, solver=solver)
    return getattr(dil, kind)(lambda y: y - 0.5 * torch.sin(y), y0, solver=solver)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: dil.SciPy("newton"), r"method must be one of 'L-BFGS-B', .*'df-sane', got 'newton'\."),
        (lambda: dil.SciPy(3), r"method must be one of .*, got 3\."),
        (lambda: dil.SciPy(options=[1]), r"options must be a dict of options of the method or None, got \[1\]\."),
        (lambda: dil.SciPy(rtol=-1), r"rtol must be a number >= 0 or None, got -1\."),
        (
            lambda: solve("argmin", dil.SciPy("hybr")),
            r"method='hybr' does not solve an argmin: use one of 'L-BFGS-B', .*'COBYQA'\.",
        ),
        (lambda: solve("root", dil.SciPy("bfgs")), r"method='BFGS' does not solve a root: use one of 'hybr', .*'df-sane'\."),
        (lambda: solve("fixed_point", dil.SciPy("TNC")), r"method='TNC' does not solve a fixed_point: use one of 'hybr', "),
        (lambda: solve("argmin", dil.SciPy(options={"gtoll": 1})), r"options do not suit method='L-BFGS-B': .*gtoll"),
        (
            lambda: solve("argmin", dil.SciPy(options={"maxls": 0})),
            r"options do not suit method='L-BFGS-B': maxls must be positive",
        ),
        (lambda: solve("root", dil.SciPy(options={"gtoll": 1})), r"options do not suit method='hybr': .*gtoll"),
        (lambda: dil.TorchOptim(torch.nn.Linear), r"cls must be an optimiser class such as torch.optim.Adam, got .*Linear'>\."),
        (lambda: dil.TorchOptim("Adam"), r"cls must be an optimiser class such as torch.optim.Adam, got 'Adam'\."),
        (
            lambda: dil.TorchOptim(torch.optim.Adam, rate=1),
            r"Adam does not take the arguments {'rate': 1}: .*unexpected keyword",
        ),
        (
            lambda: dil.TorchOptim(torch.optim.SGD, lr=-1.0),
            r"SGD does not take the arguments {'lr': -1.0}: Invalid learning rate",
        ),
        (lambda: dil.TorchOptim(torch.optim.SGD, max_steps=0), r"max_steps must be an integer >= 1, got 0\."),
        (lambda: solve("root", dil.TorchOptim(torch.optim.SGD)), r"solver=TorchOptim\(\) needs an argmin, got a root"),
    ],
)
def test_mistakes_get_one_sentence(make, sentence):
    with pytest.raises((TypeError, ValueError), match=sentence) as caught:
        make()
    assert "\n" not in str(caught.value)


def test_an_optimiser_can_be_replaced_in_part():
    solver = dataclasses.replace(dil.TorchOptim(torch.optim.Adam, lr=0.05), rtol=1e-3)
    assert solver == dil.TorchOptim(torch.optim.Adam, lr=0.05, rtol=1e-3)
