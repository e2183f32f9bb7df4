"""Solvers that sample: test functions, planning against LQR, bounds, seeds, batches, and what the report says of an answer."""

import dataclasses
import math

import numpy as np
import pytest
import scipy.optimize
import torch
from problems import PROBLEMS, flatten

import torchdil as dil
from torchdil import Status
from torchdil.batch import check_every
from torchdil.solvers import sampling

# Of an answer that was found by its score alone, which is flat to rounding within √ε ≈ 1e-8 of the minimum, in units of the
# condition number's root.
SAMPLED = 1e-6
# Of a polished one: the default rtol of 1e-10 times the condition numbers (2500 for Rosenbrock's function).
POLISHED = 1e-6
RASTRIGIN = 1e-9  # the same for a Hessian that is a multiple of the identity
FLOAT32 = 2e-3
# What another sample of the batch may change: the rounding of batched kernels.
ALONE = 1e-12

FITTED = [dil.CEM, dil.MPPI]
ALL = [dil.RandomShooting, *FITTED]
POLISHES = [dil.LBFGS(), dil.Newton()]
by_name = {"ids": lambda thing: getattr(thing, "__name__", type(thing).__name__)}


def rosenbrock(y):
    return (1 - y[..., 0]) ** 2 + 100 * (y[..., 1] - y[..., 0] ** 2) ** 2


def beale(y):
    a, b = y[..., 0], y[..., 1]
    return (1.5 - a + a * b) ** 2 + (2.25 - a + a * b**2) ** 2 + (2.625 - a + a * b**3) ** 2


def himmelblau(y):
    a, b = y[..., 0], y[..., 1]
    return (a**2 + b - 11) ** 2 + (a + b**2 - 7) ** 2


def rastrigin(y):
    return (y**2 - 10 * torch.cos(2 * math.pi * y) + 10).sum(-1)


def ackley(y):
    far = -20 * torch.exp(-0.2 * y.square().mean(-1).sqrt())
    return far - torch.exp(torch.cos(2 * math.pi * y).mean(-1)) + 20 + math.e


def tensor(*numbers):
    return torch.tensor(numbers, dtype=torch.float64)


HIMMELBLAU = tensor(
    [3.0, 2.0],
    [-2.805118086952745, 3.131312518250573],
    [-3.779310253377747, -3.283185991286170],
    [3.584428340330492, -1.848126526964404],
)

# The score, y0, the bounds, the minimisers.
FUNCTIONS = {
    "rosenbrock": (rosenbrock, tensor(-1.2, 1.0), None, tensor([1.0, 1.0])),
    "rosenbrock, bounds": (rosenbrock, tensor(-1.2, 1.0), (-5.0, 5.0), tensor([1.0, 1.0])),
    "beale": (beale, tensor(1.0, 1.0), (-4.5, 4.5), tensor([3.0, 0.5])),
    "himmelblau": (himmelblau, tensor(0.0, 0.0), (-5.0, 5.0), HIMMELBLAU),
    "rastrigin": (rastrigin, tensor(*[3.3] * 5), (-5.12, 5.12), tensor([0.0] * 5)),
    "ackley": (ackley, tensor(*[15.0] * 5), (-30.0, 30.0), tensor([0.0] * 5)),
}


def error(y, minimisers):
    """The distance from the nearest one."""
    return float((y - minimisers).norm(dim=-1).min())


def quiet(score, y0, args=(), **settings):
    return dil.argmin(score, y0, args, on_failure="ignore", **settings)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("solver", FITTED, **by_name)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_global_minimum_is_found(name, solver, seed):
    score, y0, bounds, minimisers = FUNCTIONS[name]
    solution = quiet(score, y0, solver=solver(bounds=bounds, seed=seed))
    assert error(solution.value, minimisers) <= SAMPLED
    assert solution.stats.method == solver.__name__  # all particles at once


# Ackley's function has no gradient at its minimum, and random shooting finds some valley of Rastrigin's, not the deepest.
SMOOTH = [(name, solver) for name in FUNCTIONS for solver in ALL if name not in ("ackley", "rastrigin")]


@pytest.mark.parametrize("polish", POLISHES, **by_name)
@pytest.mark.parametrize(("name", "solver"), [*SMOOTH, ("rastrigin", dil.CEM), ("rastrigin", dil.MPPI)])
def test_a_polish_meets_the_tolerance(name, solver, polish):
    score, y0, bounds, minimisers = FUNCTIONS[name]
    solution = dil.argmin(score, y0, solver=solver(bounds=bounds, polish=polish))  # no warning
    assert solution.converged and solution.stats.residual <= solution.stats.tolerance
    assert error(solution.value, minimisers) <= (RASTRIGIN if name == "rastrigin" else POLISHED)
    rounds = quiet(score, y0, solver=solver(bounds=bounds)).stats.steps
    after = len(solution.stats.history) - 1  # steps of the polish
    assert 0 <= rounds + after - solution.stats.steps < check_every(y0.device)
    assert solution.stats.method == f"{solver.__name__}, then {type(polish).__name__}"


@pytest.mark.parametrize("solver", ALL, **by_name)
def test_a_polish_from_a_steep_start_does_not_search_again(solver):
    """F is 1e8 times smaller at the minimum than at y0, and the answer is judged by its size there."""
    y0 = tensor(50.0, -50.0)
    solution = dil.argmin(rosenbrock, y0, solver=solver(bounds=(-60.0, 60.0), max_steps=1, polish=dil.LBFGS()))
    assert solution.converged and error(solution.value, tensor([1.0, 1.0])) <= POLISHED
    assert 0 <= len(solution.stats.history) - solution.stats.steps < check_every(y0.device)


def test_more_unknowns_than_a_covariance_can_be_fitted_to():
    target = torch.linspace(-1, 1, 40, dtype=torch.float64)
    score = lambda y: ((y - target) ** 2 + 0.1 * (y - target) ** 4).sum()  # noqa: E731
    for solver in FITTED:
        solution = quiet(score, torch.zeros_like(target), solver=solver(particles=400, max_steps=150))
        assert (solution.value - target).abs().max() <= SAMPLED


# Planning: a double integrator, whose best controls a Riccati recursion gives in closed form.

HORIZON, DT, EFFORT = 10, 0.3, 0.05
STARTS = tensor([2.0, 0.0], [-1.0, 1.0], [0.5, -2.0], [3.0, 1.5])


def cost(controls, state):
    """(B, HORIZON) and (B, 2) -> (B,)."""
    position, speed = state[..., 0], state[..., 1]
    total = torch.zeros_like(position)
    for t in range(HORIZON):
        position, speed = position + DT * speed, speed + DT * controls[..., t]
        total = total + position**2 + 0.1 * speed**2 + EFFORT * controls[..., t] ** 2
    return total


def lqr(state):
    A, B = tensor([1.0, DT], [0.0, 1.0]), tensor([0.0], [DT])
    Q = torch.diag(tensor(1.0, 0.1))
    S, gains = torch.zeros(2, 2, dtype=torch.float64), []
    for _ in range(HORIZON):
        P = Q + S
        gains.insert(0, torch.linalg.solve(EFFORT + B.mT @ P @ B, B.mT @ P @ A))
        S = A.mT @ P @ (A - B @ gains[0])
    controls = []
    for K in gains:
        controls.append(-state @ K.mT)
        state = state @ A.mT + controls[-1] @ B.mT
    return torch.cat(controls, dim=1)


def plan(solver, starts=STARTS, **settings):
    return dil.argmin(cost, torch.zeros(len(starts), HORIZON, dtype=torch.float64), (starts,), solver=solver, **settings)


@pytest.mark.parametrize("particles", [200, 1000])
@pytest.mark.parametrize("solver", FITTED, **by_name)
def test_a_plan_is_that_of_lqr(solver, particles):
    solution = plan(solver(bounds=(-20.0, 20.0), particles=particles), on_failure="ignore")
    assert (solution.value - lqr(STARTS)).abs().max() <= SAMPLED


@pytest.mark.parametrize("polish", POLISHES, **by_name)
@pytest.mark.parametrize("solver", ALL, **by_name)
def test_a_polished_plan_is_that_of_lqr(solver, polish):
    solution = plan(solver(bounds=(-20.0, 20.0), polish=polish))
    assert bool(solution.converged.all())
    assert (solution.value - lqr(STARTS)).abs().max() <= POLISHED


@pytest.mark.parametrize("solver", ALL, **by_name)
def test_a_plan_within_active_bounds(solver):
    """As good as SciPy's; on a bound it is not stationary, and says so."""
    with pytest.warns(dil.ConvergenceWarning, match="not_stationary"):
        solution = plan(solver(bounds=(-1.0, 1.0)))
    assert solution.value.abs().max() <= 1
    assert bool((solution.status == Status.not_stationary).all())
    for state, found in zip(STARTS, cost(solution.value, STARTS), strict=True):
        f = lambda u, state=state: float(cost(torch.as_tensor(u), state))  # noqa: E731
        best = scipy.optimize.minimize(f, np.zeros(HORIZON), bounds=[(-1, 1)] * HORIZON, tol=1e-12).fun
        assert -1e-6 * best <= found - best <= (math.inf if solver is dil.RandomShooting else 1e-6 * best)


def test_an_unpolished_plan_is_flagged_and_a_polished_one_has_newtons_gradient():
    weights = tensor(*range(1, 1 + HORIZON))

    def solve(solver, **settings):
        starts = STARTS.clone().requires_grad_()
        layer = dil.ArgminLayer(cost, solver=solver, init=lambda x: x.new_zeros(len(x), HORIZON), **settings)
        (layer(starts) * weights).sum().backward()
        return layer.report, starts.grad

    with pytest.warns(dil.ConvergenceWarning, match=r"RandomShooting\) failed for 4 of 4 samples; worst: not_stationary"):
        report, _ = solve(dil.RandomShooting(bounds=(-10.0, 10.0)))
    F = torch.func.grad(lambda u: cost(u, STARTS).sum())(plan(dil.RandomShooting(bounds=(-10, 10)), on_failure="ignore").value)
    torch.testing.assert_close(report.forward.stats.residual, F.norm(dim=1), rtol=ALONE, atol=0)
    assert "not_stationary 4" in str(report)
    _, expected = solve(dil.Newton())
    for solver in ALL:
        _, grad = solve(solver(bounds=(-20.0, 20.0), particles=200, polish=dil.Newton()), on_failure="raise")
        torch.testing.assert_close(grad, expected, rtol=1e-8, atol=0)


# Random shooting is what it says.


def best_of(particles, score, y0):
    y = torch.cat([y0.expand(1, -1), particles])
    return y[score(y).argmin()]


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize(("bounds", "scale"), [((-5.12, 5.12), None), (None, 2.0), ((-5.12, 5.12), 2.0)])
def test_random_shooting_is_the_best_of_its_particles(rounds, bounds, scale):
    score, y0, _, _ = FUNCTIONS["rastrigin"]
    generator = torch.Generator(y0.device).manual_seed(7)
    uniform = scale is None
    like = {"generator": generator, "dtype": torch.float64, "device": y0.device}
    draws = [(torch.rand if uniform else torch.randn)(1000, 5, **like) for _ in range(rounds)]
    particles = torch.cat(draws)
    particles = bounds[0] + (bounds[1] - bounds[0]) * particles if uniform else y0 + scale * particles
    particles = particles.clamp(*bounds) if bounds else particles
    solver = dil.RandomShooting(bounds=bounds, scale=scale, seed=7, max_steps=rounds)
    solution = quiet(score, y0, solver=solver)
    torch.testing.assert_close(solution.value, best_of(particles, score, y0), rtol=0, atol=ALONE)
    assert solution.stats.steps == rounds


@pytest.mark.parametrize("solver", ALL, **by_name)
def test_the_start_competes(solver):
    solution = quiet(rastrigin, torch.zeros(2, 5, dtype=torch.float64), solver=solver(bounds=(-5.12, 5.12)))
    assert bool(solution.converged.all()) and bool((solution.value == 0).all())


# Bounds.

BOUNDS = {
    "numbers": (-0.5, 2),
    "a tensor and a number": (tensor(-0.5, -0.25), 2.0),
    "tensors of one sample": (tensor(-0.5, -0.25), tensor(0.5, 2.0)),
    "tensors of the batch": (tensor([-0.5, -1.0], [-2.0, -3.0], [0.0, 0.0]), tensor([[0.5]], [[1.0]], [[2.0]]).squeeze(2)),
}


def watched(score, seen):
    """The score, one particle at a time, which notes where it is asked for."""

    def call(y, *args):
        if flatten(y).isnan().any():  # a branch that vmap cannot take
            raise AssertionError
        seen.append(torch.utils._pytree.tree_map(torch.Tensor.detach, y))
        return score(y, *args)

    return call


@pytest.mark.parametrize("solver", ALL, **by_name)
@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_no_particle_leaves_the_bounds(solver, bounds):
    seen = []
    y0 = torch.full((3, 2), 0.1, dtype=torch.float64)
    solution = quiet(watched(rosenbrock, seen), y0, solver=solver(bounds=bounds, particles=40, max_steps=5, scale=3.0))
    low, high = (torch.as_tensor(bound, dtype=torch.float64).expand(3, 2) for bound in bounds)
    seen = torch.stack(seen)
    assert len(seen) >= 200 or solver is dil.RandomShooting
    assert bool((seen >= low).all()) and bool((seen <= high).all())
    assert bool((solution.value >= low).all()) and bool((solution.value <= high).all())
    assert bool((seen.amax((0, 1)) == high.amax(0)).any())  # the bounds were met


@pytest.mark.parametrize("solver", ALL, **by_name)
@pytest.mark.parametrize(
    "bounds",
    [
        (-0.1, tensor(0.2).squeeze()),
        ({"w": tensor(0.1, -0.2), "b": -0.3}, {"b": tensor(0.05).squeeze(), "w": 0.2}),
        (-1.0, {"w": tensor(0.3, 0.1), "b": 0.2}),
    ],
    ids=["numbers", "nested, in any order", "a number and nested"],
)
def test_bounds_of_a_nested_unknown(solver, bounds):
    (problem,) = (p for p in PROBLEMS if p.name == "dict")
    seen = []
    sampler = solver(bounds=bounds, particles=40, max_steps=5, scale=2.0)
    y0 = {"w": tensor(0.15, 0.05), "b": tensor(0.0).squeeze()}
    y = quiet(watched(problem.fn, seen), y0, problem.params, solver=sampler).value
    low, high = ({"w": b, "b": b} if not isinstance(b, dict) else b for b in bounds)
    for u in (y, *seen):
        for name in ("w", "b"):
            assert bool((u[name] >= low[name]).all()) and bool((u[name] <= high[name]).all())


@pytest.mark.parametrize("solver", ALL, **by_name)
def test_a_start_outside_of_the_bounds(solver):
    """It competes as the nearest point inside."""
    y0 = tensor([9.0, -9.0], [0.3, 0.4])
    score = lambda y: ((y - tensor(3.0, -3.0)) ** 2).sum(-1)  # noqa: E731
    solution = quiet(score, y0, solver=solver(bounds=(-1.0, 1.0), particles=10))
    torch.testing.assert_close(solution.value[0], tensor(1.0, -1.0), rtol=0, atol=0)  # the corner, which is the best point
    assert solution.value.abs().max() <= 1


@pytest.mark.parametrize("polish", POLISHES, **by_name)
@pytest.mark.parametrize("solver", ALL, **by_name)
def test_a_polish_that_leaves_the_bounds_is_undone(solver, polish):
    """The first sample's minimum is outside, the second one's inside."""
    x = tensor([3.0, 0.0], [0.5, -0.5])
    score = lambda y: ((y - x) ** 2 + 0.1 * (y - x) ** 4).sum(-1)  # noqa: E731
    settings = {"bounds": (-1.0, 1.0), "max_steps": 5}
    plain = quiet(score, torch.zeros_like(x), solver=solver(**settings))
    polished = quiet(score, torch.zeros_like(x), solver=solver(**settings, polish=polish))
    assert polished.status.tolist() == [Status.not_stationary, Status.converged]
    assert torch.equal(polished.value[0], plain.value[0])
    assert polished.stats.residual[0] == plain.stats.residual[0] > 1
    assert (polished.value[1] - x[1]).abs().max() <= POLISHED


def test_a_polish_that_goes_uphill_is_undone():
    score = lambda y: (y**2).sum(-1)  # noqa: E731
    diverging = dil.GradientDescent(step_size=1.5, max_steps=20)
    y0 = torch.ones(2, 3, dtype=torch.float64)
    polished = quiet(score, y0, solver=dil.RandomShooting(polish=diverging))
    assert bool((polished.status == Status.not_stationary).all())
    assert torch.equal(polished.value, quiet(score, y0, solver=dil.RandomShooting()).value)


# Random numbers.


@pytest.mark.parametrize("solver", ALL, **by_name)
def test_a_seed_fixes_every_bit(solver):
    def solve(seed):
        return quiet(rastrigin, tensor(*[3.3] * 5), solver=solver(seed=seed, max_steps=3)).value

    assert torch.equal(solve(3), solve(3))
    assert not torch.equal(solve(3), solve(4))
    generator, same = (torch.Generator().manual_seed(5) for _ in range(2))
    first, second = solve(generator), solve(generator)
    assert not torch.equal(first, second)
    assert torch.equal(first, solve(same)) and torch.equal(second, solve(same))
    torch.manual_seed(0)
    state = torch.get_rng_state()
    solve(3)
    assert torch.equal(state, torch.get_rng_state())  # the global generator is left alone


def test_a_generator_goes_on_alike_however_long_the_solves_were():
    """The second sample is done after one round, the first one after many; what comes next must not tell."""

    def second_call(x):
        generator = torch.Generator().manual_seed(5)
        score = lambda y, x: (x.unsqueeze(1) * (y**2 + torch.cos(3 * y))).sum(-1)  # noqa: E731
        for _ in range(2):
            y0 = torch.ones(len(x), 2, dtype=torch.float64)
            y = quiet(score, y0, (x,), solver=dil.CEM(seed=generator, max_steps=30)).value
        return y[-1]

    assert torch.equal(second_call(tensor(1.0, 0.0)), second_call(tensor(0.0)))


@pytest.mark.parametrize("polish", [None, dil.Newton()], **by_name)
@pytest.mark.parametrize("bounds", [None, (-4.0, tensor([3.0], [4.0], [5.0], [6.0]))], ids=["free", "bounds"])
@pytest.mark.parametrize("solver", ALL, **by_name)
def test_a_sample_does_not_depend_on_its_neighbours(solver, bounds, polish):
    """Not even where the score is flat to rounding, and any other rounding would find another best particle."""
    together = plan(solver(bounds=bounds, particles=300, polish=polish), on_failure="ignore")
    for i in (0, 3):
        own = None if bounds is None else (bounds[0], bounds[1][i : i + 1])
        alone = plan(solver(bounds=own, particles=300, polish=polish), STARTS[i : i + 1], on_failure="ignore")
        assert (together.value[i] - alone.value[0]).abs().max() <= ALONE
        assert together.status[i] == alone.status[0] and together.stats.steps[i] == alone.stats.steps[0]


POISONS = {
    "gradient too": lambda y, x: ((y - x) ** 2).sum(-1) * (1 + torch.sqrt(x).sum(-1)),
    "score only": lambda y, x: ((y - x) ** 2).sum(-1) + torch.sqrt(x).sum(-1),
}


@pytest.mark.parametrize("polish", [None, dil.Newton()], **by_name)
@pytest.mark.parametrize("score", POISONS.values(), ids=POISONS)
@pytest.mark.parametrize("solver", ALL, **by_name)
def test_a_sample_that_is_not_finite(solver, score, polish):
    """The square root of a negative x is NaN, whatever y."""
    x = tensor([1.0, 2.0], [3.0, -1.0], [4.0, 5.0])
    sampler = solver(particles=100, max_steps=20, polish=polish)
    solution = quiet(score, torch.zeros_like(x), (x,), solver=sampler)
    without = quiet(score, torch.zeros(2, 2, dtype=torch.float64), (x[[0, 2]],), solver=sampler)
    assert solution.status[1] == Status.non_finite
    assert torch.equal(solution.value[1], torch.zeros(2, dtype=torch.float64))
    assert torch.equal(solution.status[[0, 2]], without.status)
    assert (solution.value[[0, 2]] - without.value).abs().max() <= ALONE


@pytest.mark.parametrize("solver", ALL, **by_name)
def test_particles_without_a_score_do_not_count(solver):
    """log y of a negative y is NaN, of zero -∞; the minimum of y log y is at 1/e, and y0 itself has no score."""
    y0 = tensor([-0.5, -0.5], [0.5, 0.0])
    score = lambda y: torch.where(y == 0, -math.inf, y * torch.log(y)).sum(-1)  # noqa: E731
    solution = dil.argmin(score, y0, solver=solver(bounds=(-1.0, 1.0), polish=dil.Newton()))
    assert bool(solution.converged.all())
    assert (solution.value - math.exp(-1)).abs().max() <= POLISHED


# Functions of every kind.


def branching(y, *args):
    return rosenbrock(y) if bool((y > -math.inf).all()) else y.sum(-1)


class NoRule(torch.autograd.Function):
    """A square, of which torch.func knows nothing."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y**2

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


def without_rule(y):
    return (1 - y[..., 0]) ** 2 + 100 * NoRule.apply(y[..., 1] - y[..., 0] ** 2)


def filled_in(y):
    terms = torch.zeros(len(y), 2, dtype=y.dtype)
    terms[:, 0] = (1 - y[..., 0]) ** 2
    terms[:, 1] = 100 * (y[..., 1] - y[..., 0] ** 2) ** 2
    return terms.sum(-1)


@pytest.mark.parametrize("score", [branching, without_rule, filled_in], **by_name)
@pytest.mark.parametrize("solver", ALL, **by_name)
def test_functions_that_vmap_cannot_take(solver, score):
    y0 = tensor([-1.2, 1.0], [0.5, 0.5])
    settings = {"particles": 60, "max_steps": 10}
    expected = quiet(rosenbrock, y0, solver=solver(**settings))
    solution = quiet(score, y0, solver=solver(**settings))
    assert solution.stats.method == f"{solver.__name__}, one particle at a time"
    torch.testing.assert_close(solution.value, expected.value, rtol=0, atol=ALONE)
    assert solution.stats.products > 60 > expected.stats.products


def test_a_fault_of_the_function_is_shown():
    calls = []

    def score(y):
        calls.append(1)
        if len(calls) > 5:
            raise KeyError("of the user")
        return (y**2).sum()

    with pytest.raises(KeyError, match="of the user"):
        quiet(score, torch.ones(2, dtype=torch.float64), solver=dil.CEM())


def test_a_function_with_randomness_of_its_own():
    """Each particle sees noise of its own, and the minimum is found all the same."""
    torch.manual_seed(0)
    score = lambda y: ((y - 2) ** 2 * (1 + 0.5 * torch.rand_like(y))).sum(-1)  # noqa: E731
    solution = quiet(score, torch.zeros(2, 3, dtype=torch.float64), solver=dil.MPPI())
    assert solution.stats.method == "MPPI"
    assert (solution.value - 2).abs().max() <= SAMPLED
    seen = sampling._Scorer(score)(torch.zeros(50, 2, 3, dtype=torch.float64))
    assert len(seen.unique()) == seen.numel()


@pytest.mark.parametrize("solver", ALL, **by_name)
def test_chunks_change_nothing(solver, monkeypatch):
    whole = plan(solver(max_steps=3), on_failure="ignore")
    monkeypatch.setattr(sampling, "_CHUNK", 70 * STARTS.shape[0] * HORIZON)
    parts = plan(solver(max_steps=3), on_failure="ignore")
    rounds = int(whole.stats.steps.max())
    assert parts.stats.products - whole.stats.products == rounds * (math.ceil(1000 / 70) - 1)
    assert (parts.value - whole.value).abs().max() <= ALONE


@pytest.mark.parametrize("factor", [2.0**-30, 2.0**30])
@pytest.mark.parametrize("polish", [None, dil.Newton()], **by_name)
@pytest.mark.parametrize("solver", ALL, **by_name)
def test_units_of_the_score_change_nothing(solver, polish, factor):
    """To the bit for powers of two, which do not round."""
    solver = solver(max_steps=40, particles=200, polish=polish)
    for score, y0, _, _ in (FUNCTIONS["rosenbrock"], FUNCTIONS["rastrigin"]):
        plain, scaled = quiet(score, y0, solver=solver), quiet(lambda y, score=score: factor * score(y), y0, solver=solver)
        assert torch.equal(plain.value, scaled.value) and plain.status == scaled.status


@pytest.mark.parametrize("solver", FITTED, **by_name)
def test_a_sample_whose_particles_all_score_the_same_is_done(solver):
    score = lambda y, x: 1 + (x.unsqueeze(1) * y**2).sum(-1)  # noqa: E731
    x = tensor(1.0, 0.0, 1e-6)
    solution = quiet(score, torch.ones(3, 2, dtype=torch.float64), (x,), solver=solver(max_steps=500))
    steps = solution.stats.steps.tolist()
    assert steps[1] == 1 < steps[2] < steps[0] < 500
    assert torch.equal(solution.value[1], torch.ones(2, dtype=torch.float64))


def test_a_sample_that_is_done_is_frozen():
    """The second sample sees a plain in its first round, and would meet a hole in a later one."""
    score = lambda y, x: x * y.square().sum(-1) + (1 - x) * (y[..., 0] < 3)  # noqa: E731
    seen = 0
    for seed in range(5):  # of which not all see the plain
        sampler = dil.RandomShooting(particles=20, max_steps=50, seed=seed)
        solution = quiet(score, torch.ones(2, 2, dtype=torch.float64), (tensor(1.0, 0.0),), solver=sampler)
        if solution.stats.steps.tolist() == [50, 1]:
            assert torch.equal(solution.value[1], torch.ones(2, dtype=torch.float64))
            seen += 1
    assert seen


@pytest.mark.parametrize("solver", ALL, **by_name)
@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p.kind == "argmin" and not p.damping], ids=lambda p: p.name)
def test_problems_of_every_structure(problem, solver):
    """Against Newton alone, values and gradients."""

    def solve(solver):
        params = problem.leaves()
        y = flatten(problem.solve(params, solver=solver, on_failure="raise").value)
        return y.detach(), flatten(torch.autograd.grad(y.square().sum(), params, materialize_grads=True))

    fields = {"particles": 200, "max_steps": 1 if solver is dil.RandomShooting else 20}
    for got, expected in zip(solve(solver(polish=dil.Newton(), **fields)), solve(dil.Newton()), strict=True):
        assert (got - expected).norm() <= POLISHED * expected.norm()


@pytest.mark.parametrize("solver", ALL, **by_name)
def test_float32(solver):
    for name in ("beale", "himmelblau"):
        score, y0, bounds, minimisers = FUNCTIONS[name]
        solution = dil.argmin(score, y0.float(), solver=solver(bounds=bounds, polish=dil.Newton()))
        assert solution.converged and solution.value.dtype == torch.float32
        assert error(solution.value, minimisers.float()) <= FLOAT32
        if solver is not dil.RandomShooting:
            assert error(quiet(score, y0.float(), solver=solver(bounds=bounds)).value, minimisers.float()) <= FLOAT32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("solver", ALL, **by_name)
def test_half_precision(solver, dtype):
    score = lambda y: ((y - 1) ** 2).sum(-1)  # noqa: E731
    solution = quiet(score, torch.zeros(2, 3, dtype=dtype), solver=solver(bounds=(-2.0, 2.0)))
    assert solution.value.dtype == dtype
    assert (solution.value.double() - 1).abs().max() <= (0.5 if solver is dil.RandomShooting else 2e-2)


# torch.func.


@pytest.mark.parametrize("solver", ALL, **by_name)
@pytest.mark.parametrize("bounds", [(-9.0, 9.0), (tensor([-9.0], [-1.0]), 8.0)], ids=["numbers", "of the batch"])
def test_vmap_is_a_loop(solver, bounds):
    """Three copies of two plans; a bound of the batch holds in every copy."""
    starts = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def solve(x):
        fields = {"bounds": bounds, "max_steps": 5}
        return dil.argmin(cost, x.new_zeros(2, HORIZON), (x,), solver=solver(**fields), on_failure="ignore").value

    together = torch.func.vmap(solve)(starts)
    assert (together - torch.stack([solve(x) for x in starts])).abs().max() <= ALONE
    assert together[:, 1].min() >= torch.as_tensor(bounds[0]).expand(2, 1)[1, 0]


@pytest.mark.parametrize("solver", ALL, **by_name)
def test_transforms_are_those_of_newton(solver):
    starts = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def loss(x, solver):
        u = dil.argmin(cost, x.new_zeros(2, HORIZON), (x,), solver=solver, on_failure="raise").value
        return (u.square() * tensor(*range(HORIZON))).sum()

    sampler = solver(bounds=(-30.0, 30.0), max_steps=5, polish=dil.Newton())
    for transform in (torch.func.grad, lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1]):
        got, expected = (transform(lambda x, s=s: loss(x, s))(starts[0]) for s in (sampler, dil.Newton()))
        torch.testing.assert_close(got, expected, rtol=POLISHED, atol=1e-10)
    got, expected = (torch.func.vmap(torch.func.grad(lambda x, s=s: loss(x, s)))(starts) for s in (sampler, dil.Newton()))
    torch.testing.assert_close(got, expected, rtol=POLISHED, atol=1e-10)


# What is shown, and what is refused.


@pytest.mark.parametrize("solver", ALL, **by_name)
def test_verbose_shows_every_round(solver, capsys):
    solution = plan(solver(verbose=True, max_steps=4), on_failure="ignore")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{solver.__name__}: argmin, 4 samples"
    rows = [line.split() for line in lines[2:]]
    assert [int(row[0]) for row in rows] == list(range(5)) and {row[1] for row in rows} == {"4"}
    scores = [float(row[4]) for row in rows]
    assert scores == sorted(scores, reverse=True) and scores[0] > scores[-1]
    assert scores[-1] == pytest.approx(float(cost(solution.value, STARTS).mean()), rel=1e-5)


def test_no_samples():
    for solver in ALL:
        solution = quiet(cost, torch.zeros(0, HORIZON, dtype=torch.float64), (STARTS[:0],), solver=solver(bounds=(-1, 1)))
        assert solution.value.shape == (0, HORIZON)


BAD = [
    ({"bounds": 3.0}, TypeError, r"bounds must be None or a pair \(low, high\), got 3.0"),
    ({"bounds": (1.0, 0.0)}, ValueError, "bounds must have low < high everywhere"),
    ({"bounds": (0.0, 0.0)}, ValueError, "bounds must have low < high everywhere"),
    ({"bounds": (tensor(0.0, 2.0), 1.0)}, ValueError, "bounds must have low < high everywhere"),
    ({"bounds": ({"a": 0.0, "b": 2.0}, 1.0)}, ValueError, "bounds must have low < high everywhere"),
    ({"bounds": (-math.inf, 0.0)}, ValueError, "bounds must be finite, got -inf"),
    ({"bounds": (0.0, tensor(1.0, math.nan))}, ValueError, "bounds must be finite"),
    ({"bounds": (0.0, "1")}, TypeError, "bounds must hold numbers or tensors, got str"),
    ({"bounds": ((0.0, 0.0), (1.0, 1.0, 1.0))}, ValueError, "bounds must be numbers, or low and high nested like y0"),
    ({"particles": 1}, ValueError, "particles must be an integer >= 2, got 1"),
    ({"particles": 10.0}, ValueError, "particles must be an integer >= 2, got 10.0"),
    ({"scale": 0.0}, ValueError, "scale must be a finite number > 0 or None, got 0.0"),
    ({"scale": math.nan}, ValueError, "scale must be a finite number > 0 or None, got nan"),
    ({"seed": 0.5}, TypeError, "seed must be an integer or a torch.Generator, got 0.5"),
    ({"polish": dil.Newton}, TypeError, r"polish must be None or a solver that follows the gradient, such as LBFGS\(\)"),
    ({"polish": dil.CEM()}, TypeError, "polish must be None or a solver that follows the gradient"),
    ({"max_steps": 0}, ValueError, "max_steps must be an integer >= 1, got 0"),
]


@pytest.mark.parametrize("solver", ALL, **by_name)
@pytest.mark.parametrize(("fields", "kind", "message"), BAD)
def test_bad_fields(solver, fields, kind, message):
    with pytest.raises(kind, match=message):
        solver(**fields)


def test_bad_fields_of_one_solver():
    for elites in (0.0, 1.5, math.nan):
        with pytest.raises(ValueError, match="elites must be a number > 0 and <= 1"):
            dil.CEM(elites=elites)
    for temperature in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="temperature must be a finite number > 0"):
            dil.MPPI(temperature=temperature)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((tensor(0.0, 0.0, 0.0), 1.0), r"bounds must broadcast to shape \(2,\), got \(3,\)"),
        (({"w": 0.0}, {"w": 1.0}), "bounds must be numbers, or low and high nested like y0"),
    ],
)
def test_bounds_that_do_not_fit_the_unknown(bounds, message):
    with pytest.raises(ValueError, match=message):
        quiet(rosenbrock, tensor(0.5, 0.5), solver=dil.CEM(bounds=bounds))


@pytest.mark.parametrize("solver", ALL, **by_name)
def test_a_root_has_nothing_to_sample(solver):
    message = rf"solver={solver.__name__}\(\) needs an argmin, got a root: use Newton\(\)"
    with pytest.raises(ValueError, match=message):
        dil.root(lambda y: y - 1, torch.zeros(2, dtype=torch.float64), solver=solver())


@pytest.mark.parametrize("solver", ALL, **by_name)
def test_solvers_with_bounds_can_be_compared(solver):
    low, high = torch.zeros(2), torch.ones(2)
    one, same, other = solver(bounds=(low, high)), solver(bounds=(low.clone(), high.clone())), solver(bounds=(low, 2 * high))
    assert one == same and hash(one) == hash(same) and one != other
    assert solver(bounds=({"a": 0.0}, {"a": 1.0})) == solver(bounds=({"a": 0.0}, {"a": 1.0}))
    assert dataclasses.replace(one, particles=7).bounds[1] is high
