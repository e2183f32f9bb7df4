"""The methods of `odeint` on fixed grids: order, stability, structure, and what their functions may look like."""

import functools
import math
from itertools import combinations_with_replacement, pairwise

import numpy as np
import pytest
import torch
import torchdiffeq
from scipy.integrate import solve_ivp
from torch import nn

import torchdil as dil
from torchdil.ode import (
    RK4,
    SDIRK2,
    TRBDF2,
    BackwardEuler,
    ForwardEuler,
    GaussLegendre,
    ImplicitMidpoint,
    Kvaerno5,
    RadauIIA,
    Trapezoid,
)
from torchdil.ode.methods import method_of

EXACT = 1e-14  # coefficients
SOLVED = 1e-9  # two solves of the same equations, each to the default tolerance
ROUNDING = 1e-13  # the same arithmetic in another order
SLOPE = 0.25  # observed order

EXPLICIT = [ForwardEuler(), RK4()]
L_STABLE = [BackwardEuler(), TRBDF2(), SDIRK2(), Kvaerno5(), RadauIIA(3), RadauIIA(5)]
A_STABLE = [ImplicitMidpoint(), Trapezoid(), GaussLegendre(4), GaussLegendre(6)]  # and not L-stable
SYMPLECTIC = [ImplicitMidpoint(), GaussLegendre(4), GaussLegendre(6)]
IMPLICIT = L_STABLE + A_STABLE
METHODS = IMPLICIT + EXPLICIT
# Gauss and Radau collocation, those of one stage among them: (method, p of B(p), q of C(q), r of D(r)).
COLLOCATION = [
    (BackwardEuler(), 1, 1, 0),
    (RadauIIA(3), 3, 2, 1),
    (RadauIIA(5), 5, 3, 2),
    (ImplicitMidpoint(), 2, 1, 1),
    (GaussLegendre(4), 4, 2, 2),
    (GaussLegendre(6), 6, 3, 3),
]
EACH = {"ids": repr}

each_method = pytest.mark.parametrize("method", METHODS, **EACH)


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def grid(stop, steps, start=0.0):
    return torch.linspace(start, stop, steps + 1, dtype=torch.float64)


def fixed(func, y0, t, method="backward_euler", **settings):
    """On the grid t itself, for adaptive methods too."""
    return dil.odeint(func, y0, t, method=method, **{"options": {"substeps": 1}, "on_failure": "raise", **settings})


def close(actual, expected, tolerance=SOLVED):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- tableaus ---------------------------------------------------------------------------------------------------------------


def trees(order):
    """The rooted trees with `order` nodes, each as the tuple of the trees at its root."""
    if order == 1:
        return [()]
    return forests(order - 1, order - 1)


def forests(nodes, largest):
    """The multisets of trees with so many nodes in all, none larger than `largest`."""
    if nodes == 0:
        return [()]
    found = []
    for size in range(min(nodes, largest), 0, -1):
        for count in range(1, nodes // size + 1):
            for chosen in combinations_with_replacement(trees(size), count):
                found += [chosen + rest for rest in forests(nodes - size * count, size - 1)]
    return found


def nodes(tree):
    return 1 + sum(nodes(child) for child in tree)


def density(tree):
    return nodes(tree) * math.prod(density(child) for child in tree)


def stage_weights(A, tree):
    """Φ_i of a tree, for each stage."""
    weights = np.ones(len(A))
    for child in tree:
        weights = weights * (A @ stage_weights(A, child))
    return weights


def arrays(method):
    return np.array(method.A), np.array(method.b), np.array(method.c)


def test_trees_are_counted_right():
    assert [len(trees(order)) for order in range(1, 8)] == [1, 1, 2, 4, 9, 20, 48]


@each_method
def test_tableau_has_its_order_and_not_more(method):
    A, b, _ = arrays(method)
    for order in range(1, method.order + 1):
        for tree in trees(order):
            assert b @ stage_weights(A, tree) == pytest.approx(1 / density(tree), abs=EXACT), tree
    assert any(abs(b @ stage_weights(A, tree) - 1 / density(tree)) > 1e-6 for tree in trees(method.order + 1))


@each_method
def test_times_of_the_stages_are_the_row_sums(method):
    A, b, c = arrays(method)
    assert c == pytest.approx(A.sum(1), abs=EXACT)
    assert A.shape == (method.stages, method.stages) and b.shape == (method.stages,)


@pytest.mark.parametrize(("method", "p", "q", "r"), COLLOCATION, ids=lambda value: repr(value))
def test_simplifying_assumptions_of_collocation(method, p, q, r):
    A, b, c = arrays(method)
    for k in range(1, p + 1):
        assert b @ c ** (k - 1) == pytest.approx(1 / k, abs=EXACT)
    for k in range(1, q + 1):
        assert A @ c ** (k - 1) == pytest.approx(c**k / k, abs=EXACT)
    for k in range(1, r + 1):
        assert (b * c ** (k - 1)) @ A == pytest.approx(b * (1 - c**k) / k, abs=EXACT)


@pytest.mark.parametrize("method", [TRBDF2(), Kvaerno5()], **EACH)
def test_embedded_weights_estimate_the_error_to_their_order(method):
    A, e = np.array(method.A), np.array(method.error_weights)
    for order in range(1, method.error_order + 1):
        for tree in trees(order):
            assert e @ stage_weights(A, tree) == pytest.approx(0, abs=EXACT), tree
    assert any(abs(e @ stage_weights(A, tree)) > 1e-4 for tree in trees(method.error_order + 1))


def stability(method, z):
    """R(z): the factor of one step on y' = λ y, z = λ h."""
    A, b, _ = arrays(method)
    return 1 + z * (b @ np.linalg.solve(np.eye(len(b)) - z * A, np.ones(len(b))))


@pytest.mark.parametrize("method", IMPLICIT, **EACH)
def test_implicit_methods_are_stable_in_the_left_half_plane(method):
    # R has no pole there, so its largest modulus is on the axis.
    eigenvalues = np.linalg.eigvals(np.array(method.A))
    assert (eigenvalues.real > -EXACT).all()
    assert max(abs(stability(method, 1j * w)) for w in np.logspace(-3, 4, 400)) <= 1 + 1e-12


@pytest.mark.parametrize("method", METHODS, **EACH)
def test_factor_at_infinity(method):
    limit = abs(stability(method, -1e9))
    if method in L_STABLE:
        assert limit < 1e-7
    elif method in A_STABLE:
        assert limit == pytest.approx(1, abs=1e-6)
    else:
        assert limit > 1e8


@each_method
def test_kinds(method):
    assert method.explicit == (method in EXPLICIT)
    assert method.stiffly_accurate == (method in [*L_STABLE, Trapezoid()])
    assert method.diagonal == (method not in [RadauIIA(3), RadauIIA(5), GaussLegendre(4), GaussLegendre(6)])


@pytest.mark.parametrize("method", SYMPLECTIC, **EACH)
def test_symplectic_tableaus(method):
    A, b, _ = arrays(method)
    M = b[:, None] * A
    np.testing.assert_allclose(M + M.T, np.outer(b, b), rtol=0, atol=EXACT)


NAMES = {
    "backward_euler": BackwardEuler(),
    "implicit_euler": BackwardEuler(),
    "implicit_midpoint": ImplicitMidpoint(),
    "trapezoid": Trapezoid(),
    "radauIIA3": RadauIIA(3),
    "radauIIA5": RadauIIA(5),
    "gl2": ImplicitMidpoint(),
    "gl4": GaussLegendre(4),
    "gl6": GaussLegendre(6),
    "sdirk2": SDIRK2(),
    "trbdf2": TRBDF2(),
    "kvaerno5": Kvaerno5(),
    "euler": ForwardEuler(),
    "forward_euler": ForwardEuler(),
    "rk4": RK4(),
}


@pytest.mark.parametrize(("name", "method"), NAMES.items(), ids=str)
def test_names(name, method):
    assert method_of(name) == method
    assert type(method_of(name)) is type(method)
    assert method_of(name.upper()) == method
    y0, t = draw(1, 2), grid(0.5, 2)
    assert torch.equal(fixed(spiral, y0, t, name), fixed(spiral, y0, t, method))


@each_method
def test_methods_are_values(method):
    assert eval(repr(method), vars(dil.ode)) == method
    assert hash(eval(repr(method), vars(dil.ode))) == hash(method)
    assert sum(method == other for other in METHODS) == 1
    with pytest.raises(AttributeError):
        method.order = 7


# --- order ------------------------------------------------------------------------------------------------------------------


def spiral(t, y):
    """y = (exp(sin t²), exp(cos t²)): nonlinear, coupled, driven by t."""
    u, v = y.clamp_min(1e-3).unbind(-1)
    return torch.stack((2 * t * u * v.log(), -2 * t * v * u.log()), dim=-1)


def spiral_exact(t):
    return torch.stack(((t**2).sin().exp(), (t**2).cos().exp()), dim=-1)


def own_spiral():
    """The same as a function of its own, that does not come so often that it is traced."""
    return lambda t, y: spiral(t, y)


# Grids on which the error is far above rounding and the next power of h below.
STEPS = {1: (400, 800), 2: (80, 160), 3: (40, 80), 4: (20, 40), 5: (16, 32), 6: (10, 20)}


@each_method
@pytest.mark.parametrize("spacing", ["even", "uneven"])
def test_observed_order(method, spacing):
    errors = []
    for steps in STEPS[method.order]:
        t = grid(1.0, steps)
        t = 0.5 + (t if spacing == "even" else t + 0.1 * (2 * math.pi * t).sin())
        y = fixed(spiral, spiral_exact(t[0]), t, method, batch_dims=0)
        errors.append(float((y - spiral_exact(t)).abs().max()))
    assert errors[1] < 1e-2
    assert math.log2(errors[0] / errors[1]) == pytest.approx(method.order, abs=SLOPE)


def driven(t, y):
    """A driven Van der Pol oscillator, of which no closed form is known."""
    u, v = y.unbind(-1)
    return torch.stack((v, 2 * (1 - u**2) * v - u + (3 * t).cos()), dim=-1)


@functools.cache
def driven_by_scipy():
    slope = lambda t, y: driven(torch.tensor(t), torch.as_tensor(y)).numpy()  # noqa: E731
    found = solve_ivp(slope, (0, 2), [1.0, -0.5], t_eval=grid(2.0, 8).numpy(), rtol=1e-12, atol=1e-12, method="DOP853")
    return torch.tensor(found.y.T)


@pytest.mark.parametrize("method", [RadauIIA(5), GaussLegendre(6), Kvaerno5()], **EACH)
def test_against_scipy(method):
    y = fixed(driven, torch.tensor([1.0, -0.5], dtype=torch.float64), grid(2.0, 8), method, options={"substeps": 32})
    close(y, driven_by_scipy(), 1e-7)


# --- stability --------------------------------------------------------------------------------------------------------------

STIFFNESS = -1e6


def prothero_robinson(t, y):
    return STIFFNESS * (y - t.cos()) - t.sin()


def wrong_start(method, steps=6):
    """The distance from cos t at each step, when the initial state is off by 1."""
    t = grid(0.1 * steps, steps)
    y = dil.odeint(prothero_robinson, torch.tensor([2.0], dtype=torch.float64), t, method=method, options={"substeps": 1})
    return (y[:, 0] - t.cos()).abs()


@pytest.mark.parametrize("method", L_STABLE, **EACH)
def test_l_stable_methods_forget_a_wrong_start(method):
    error = wrong_start(method)
    assert error[0] == 1
    assert (error[2:] < 1e-4).all()


@pytest.mark.parametrize("method", A_STABLE, **EACH)
def test_a_stable_methods_carry_a_wrong_start_along(method):
    error = wrong_start(method)
    assert (error > 0.9).all() and (error < 1.1).all()


@pytest.mark.parametrize("method", EXPLICIT, **EACH)
def test_explicit_methods_blow_up(method):
    error = wrong_start(method)
    assert (error[1:] > 1e4 * error[:-1]).all()


@pytest.mark.parametrize("method", IMPLICIT, **EACH)
def test_stiff_solutions_are_followed(method):
    """A start on the solution stays on it, with steps 10⁵ times the time scale of the system."""
    t = grid(2.0, 20)
    y = fixed(prothero_robinson, torch.tensor([1.0], dtype=torch.float64), t, method)
    assert float((y[:, 0] - t.cos()).abs().max()) < 1e-2


def oscillator(t, y):
    q, p = y.unbind(-1)
    return torch.stack((p, -q), dim=-1)


def pendulum(t, y):
    q, p = y.unbind(-1)
    return torch.stack((p, -q.sin()), dim=-1)


@pytest.mark.parametrize("method", [*SYMPLECTIC, Trapezoid()], **EACH)
def test_quadratic_invariants_are_kept(method):
    y = fixed(oscillator, torch.tensor([1.0, 0.5], dtype=torch.float64), grid(40.0, 200), method)
    energy = (y**2).sum(-1)
    assert float((energy - energy[0]).abs().max()) < 1e-8


@pytest.mark.parametrize("method", SYMPLECTIC, **EACH)
def test_energy_of_a_pendulum_does_not_drift(method):
    y = fixed(pendulum, torch.tensor([1.5, 0.0], dtype=torch.float64), grid(80.0, 400), method)
    error = (y[:, 1] ** 2 / 2 - y[:, 0].cos() + math.cos(1.5)).abs()
    assert float(error.max()) < 1e-2
    assert float(error[200:].max()) < 1.1 * float(error[:200].max()) + 1e-8


def test_euler_loses_or_gains_energy():
    y0, t, h = torch.tensor([1.0, 0.5], dtype=torch.float64), grid(4.0, 40), 0.1
    for name, factor in (("backward_euler", 1 / (1 + h**2)), ("euler", 1 + h**2)):
        energy = (fixed(oscillator, y0, t, name) ** 2).sum(-1)
        close(energy, energy[0] * factor ** torch.arange(41, dtype=torch.float64))


# --- grids ------------------------------------------------------------------------------------------------------------------

TIMES = torch.tensor([0.5, 0.6, 0.9, 1.0, 1.7], dtype=torch.float64)  # sparse and uneven


@each_method
def test_substeps_are_a_finer_grid(method):
    y0 = spiral_exact(TIMES[0])
    fine = torch.cat([torch.linspace(a, b, 4, dtype=torch.float64)[:-1] for a, b in pairwise(TIMES)])
    fine = torch.cat((fine, TIMES[-1:]))
    close(fixed(spiral, y0, TIMES, method, options={"substeps": 3}), fixed(spiral, y0, fine, method)[::3])


@each_method
def test_step_size_is_the_longest_step(method):
    """Each interval is cut into the fewest equal steps that are not longer."""
    y0, spiral = spiral_exact(TIMES[0]), own_spiral()
    counts = [1, 3, 1, 7]  # intervals of 0.1, 0.3, 0.1, 0.7
    parts = [torch.linspace(a, b, n + 1, dtype=torch.float64)[1:] for (a, b), n in zip(pairwise(TIMES), counts, strict=True)]
    ends = torch.tensor([0, *counts]).cumsum(0)
    expected = fixed(spiral, y0, torch.cat((TIMES[:1], *parts)), method)[ends]
    close(fixed(spiral, y0, TIMES, method, options={"step_size": 0.1}), expected)
    close(fixed(spiral, y0, TIMES, method, options={"step_size": 0.1001}), expected)
    counts = [1, 2, 1, 4]
    parts = [torch.linspace(a, b, n + 1, dtype=torch.float64)[1:] for (a, b), n in zip(pairwise(TIMES), counts, strict=True)]
    ends = torch.tensor([0, *counts]).cumsum(0)
    expected = fixed(spiral, y0, torch.cat((TIMES[:1], *parts)), method)[ends]
    close(fixed(spiral, y0, TIMES, method, options={"step_size": 0.2}), expected)


def test_long_step_size_is_the_grid_itself():
    y0 = spiral_exact(TIMES[0])
    assert torch.equal(fixed(spiral, y0, TIMES, options={"step_size": 10.0}), fixed(spiral, y0, TIMES))


def test_step_size_backwards():
    y0 = spiral_exact(TIMES[-1])
    back = TIMES.flip(0)
    counts = [7, 1, 3, 1]
    parts = [torch.linspace(a, b, n + 1, dtype=torch.float64)[1:] for (a, b), n in zip(pairwise(back), counts, strict=True)]
    expected = fixed(spiral, y0, torch.cat((back[:1], *parts)))[torch.tensor([0, *counts]).cumsum(0)]
    close(fixed(spiral, y0, back, options={"step_size": -0.1}), expected)


@each_method
def test_decreasing_times_are_the_mirrored_system(method):
    y0 = spiral_exact(TIMES[-1])
    y = fixed(spiral, y0, TIMES.flip(0), method)
    close(y, fixed(lambda t, y: -spiral(-t, y), y0, -TIMES.flip(0), method))


@pytest.mark.parametrize("method", METHODS, **EACH)
def test_forth_and_back(method):
    t = grid(1.5, 64, start=0.5)
    forth = fixed(spiral, spiral_exact(t[0]), t, method)
    back = fixed(spiral, forth[-1], t.flip(0), method)
    symmetric = method in A_STABLE
    close(back.flip(0), forth, SOLVED if symmetric else 8 * 0.05**method.order)
    if not symmetric and method.order < 5:
        assert float((back[-1] - forth[0]).abs().max()) > SOLVED


@pytest.mark.parametrize("t", [TIMES, TIMES.flip(0), grid(1.0, 30, start=0.5)], ids=["uneven", "backwards", "even"])
def test_euler_is_torchdiffeqs(t):
    y0 = spiral_exact(t[0])
    close(fixed(spiral, y0, t, "euler"), torchdiffeq.odeint(spiral, y0, t, method="euler"), ROUNDING)


def test_rk4_by_hand():
    t = grid(1.5, 12, start=0.5)
    states = [spiral_exact(t[0])]
    for now, then in pairwise(t):
        y, h = states[-1], then - now
        k1 = spiral(now, y)
        k2 = spiral(now + h / 2, y + h / 2 * k1)
        k3 = spiral(now + h / 2, y + h / 2 * k2)
        k4 = spiral(then, y + h * k3)
        states.append(y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
    close(fixed(spiral, states[0], t, "rk4"), torch.stack(states), ROUNDING)


@functools.cache
def long_spiral(method):
    t = grid(2.0, 101, start=0.5)
    return t, fixed(spiral, spiral_exact(t[0]), t, method)


@pytest.mark.parametrize("method", [BackwardEuler(), GaussLegendre(4), Kvaerno5()], **EACH)
@pytest.mark.parametrize("steps", [1, 2, 3, 16, 17, 18, 100])
def test_length_does_not_change_what_came_before(method, steps):
    """The recursion over steps changes its form with their number; the answer does not."""
    t, whole = long_spiral(method)
    close(fixed(spiral, spiral_exact(t[0]), t[: steps + 1], method), whole[: steps + 1])


def test_first_output_is_the_initial_state_itself():
    y0 = 1 + draw(1, 3, 2).abs()
    assert torch.equal(fixed(spiral, y0, TIMES, batch_dims=1)[0], y0)


# --- states of any shape ----------------------------------------------------------------------------------------------------

T = grid(1.0, 6)


def logistic(t, y):
    """Each number on its own."""
    return y * (1.5 - y) * (1 + t.sin())


def still(t, y):
    """The same without t."""
    return y * (1.5 - y)


@pytest.mark.parametrize("func", [logistic, still])
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 1, 3), (1, 1)], ids=str)
@pytest.mark.parametrize("method", [BackwardEuler(), Trapezoid(), GaussLegendre(4), RK4()], **EACH)
def test_any_shape_and_any_batch_dims(shape, method, func):
    y0 = draw(2, *shape).abs()
    # Functions of their own, lest they come so often that they are traced.
    numbers = torch.stack([fixed(lambda t, y: func(t, y), y, T, method) for y in y0.flatten()], dim=1)
    for batch_dims in range(len(shape) + 1):
        solution = dil.ode.solve(lambda t, y: func(t, y), y0, T, method=method, batch_dims=batch_dims)
        y = solution.value
        assert y.shape == (7, *shape) and y.dtype == torch.float64
        close(y.reshape(7, -1), numbers)
        assert solution.status.shape == shape[:batch_dims] and bool(solution.converged.all())


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("batch_dims", [1, 2])
@pytest.mark.parametrize("method", [BackwardEuler(), RadauIIA(5)], **EACH)
def test_no_samples(timed, batch_dims, method):
    y0 = torch.ones(0, 2, 3, dtype=torch.float64, requires_grad=True)
    y = fixed(logistic if timed else still, y0, T, method, batch_dims=batch_dims)
    assert y.shape == (7, 0, 2, 3)
    y.sum().backward()
    assert y0.grad.shape == (0, 2, 3)


@pytest.mark.parametrize("batch_dims", [0, 1])
def test_states_in_a_structure(batch_dims):
    def coupled(t, y):
        position, (speed, heat) = y["position"], y["rest"]
        force = -position - 0.1 * speed * t.cos() + heat.unsqueeze(-1)
        return {"position": speed, "rest": (force, (speed**2).sum(-1) - heat)}

    def flat(t, y):
        made = coupled(t, {"position": y[..., :2], "rest": (y[..., 2:4], y[..., 4])})
        return torch.cat((made["position"], made["rest"][0], made["rest"][1].unsqueeze(-1)), dim=-1)

    y0 = draw(1, 3, 5)
    start = {"position": y0[:, :2], "rest": (y0[:, 2:4], y0[:, 4])}
    for method in (BackwardEuler(), GaussLegendre(4), RK4()):
        y = fixed(coupled, start, T, method, batch_dims=batch_dims)
        assert isinstance(y, dict) and isinstance(y["rest"], tuple)
        assert y["position"].shape == (7, 3, 2) and y["rest"][1].shape == (7, 3)
        expected = fixed(flat, y0, T, method, batch_dims=batch_dims)
        close(torch.cat((y["position"], y["rest"][0], y["rest"][1].unsqueeze(-1)), dim=-1), expected)


def test_a_tuple_as_torchdiffeq_has_it():
    y0 = (draw(1, 2, 3), draw(2, 4))

    def func(t, y):
        return (-y[0] * t, y[1].sin() + y[0].sum())

    mine, theirs = fixed(func, y0, T, "euler"), torchdiffeq.odeint(func, y0, T, method="euler")
    assert isinstance(mine, tuple)
    for a, b in zip(mine, theirs, strict=True):
        close(a, b, ROUNDING)


def test_float32():
    y0 = spiral_exact(TIMES[0])
    for method in METHODS:
        y = fixed(spiral, y0.float(), TIMES.float(), method)
        assert y.dtype == torch.float32
        close(y.double(), fixed(spiral, y0, TIMES, method), 1e-4)


def test_times_may_have_more_digits_than_the_state():
    """Steps of 1e-3 at t = 1e4: float32 has no such times, the differences survive."""
    t = 1e4 + grid(0.01, 10)
    y = fixed(still, torch.full((3,), 0.5), t)
    assert y.dtype == torch.float32
    close(y.double(), fixed(still, torch.full((3,), 0.5, dtype=torch.float64), t - 1e4), 1e-5)


# --- functions of all kinds -------------------------------------------------------------------------------------------------


def by_hand(func, y0, t):
    """Backward Euler by Newton's method on one state after the other: y (T, *y0.shape)."""
    states = [y0.detach()]
    for now, then in pairwise(t):
        before, y = states[-1], states[-1].clone()
        for _ in range(30):
            F = y - before - (then - now) * func(then, y)
            if F.abs().max() < ROUNDING * (1 + y.abs().max()) / 10:
                break
            J = torch.autograd.functional.jacobian(lambda y, b=before, s=then, h=then - now: y - b - h * func(s, y), y)
            y = y - torch.linalg.solve(J.reshape(y.numel(), y.numel()), F.flatten()).reshape(y.shape)
        states.append(y.detach())
    return torch.stack(states)


class Square(torch.autograd.Function):
    """y², with a backward of its own and no rule for vmap."""

    @staticmethod
    def forward(ctx, y):
        ctx.save_for_backward(y)
        return y**2

    @staticmethod
    def backward(ctx, v):
        (y,) = ctx.saved_tensors
        return 2 * y * v


class Net(nn.Module):
    """With parameters, a buffer that is used, one that counts calls, and a plain number."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))
        self.register_buffer("shift", torch.linspace(-1, 1, 3))
        self.speed = 0.7

    def forward(self, t, y):
        return self.speed * self.body(y + self.shift)


def make_net():
    torch.manual_seed(0)
    return Net().double().requires_grad_(False)


RATES = draw(5, 4, 3).abs()
FUNCTIONS = {
    "uses t": lambda t, y: -y * t,
    "ignores t": lambda t, y: -y.sin(),
    "time as a number": lambda t, y: -y * float(t),
    "branch on time": lambda t, y: -y if t > 0.5 else -2 * y,
    "branch on a value": lambda t, y: -y if (y > -100).all() else y,
    "item": lambda t, y: -y * (1 + 0 * y.abs().max().item()),
    "closure of the batch": lambda t, y: -RATES * y,
    "closure of the batch, with t": lambda t, y: -RATES * y * t,
    "custom Function": lambda t, y: -y * Square.apply(y),
    "custom Function, with t": lambda t, y: -t * y * Square.apply(y),
    "module": make_net(),
    "index": lambda t, y: torch.stack((y[..., 1], -y[..., 0], -y[..., 2] * y[..., 0]), dim=-1),
    "mask": lambda t, y: torch.where(y > 0.3, -y, -0.3),
    "in place": lambda t, y: torch.zeros_like(y).add_(y).mul_(-0.5),
    "numbers of t's dtype": lambda t, y: -y * torch.ones((), dtype=t.dtype),
}


@pytest.mark.parametrize("batch_dims", [0, 1])
@pytest.mark.parametrize("func", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_of_all_kinds(func, batch_dims):
    y0 = draw(3, 4, 3)
    close(fixed(func, y0, T, batch_dims=batch_dims), by_hand(func, y0, T))


@pytest.mark.parametrize("func", [f for name, f in FUNCTIONS.items() if "closure" not in name])
@pytest.mark.parametrize("batch_dims", [0, 1])
def test_one_sample(func, batch_dims):
    y0 = draw(4, 1, 3)
    close(fixed(func, y0, T, batch_dims=batch_dims), by_hand(func, y0, T))


@pytest.mark.parametrize("batch_dims", [0, 1])
def test_a_branch_that_changes_on_the_way(batch_dims):
    """One sample, whose slope follows another line below 1/2: no two states may share a decision."""

    def func(t, y):
        return -y if y.sum() > 0.5 else -0.5 + 3 * (0.5 - y)

    y0 = torch.tensor([[1.0]], dtype=torch.float64)
    expected = by_hand(func, y0, T)
    assert float(expected[-1]) > 0.4  # the other line leads elsewhere
    close(fixed(func, y0, T, batch_dims=batch_dims), expected)


@pytest.mark.parametrize("batch_dims", [0, 1])
def test_time_that_is_looked_at_only_on_the_way(batch_dims):
    def func(t, y):
        return -y if y.sum() > 0.8 else -y - 3 * t * (0.8 - y)

    y0 = torch.tensor([[1.0]], dtype=torch.float64)
    close(fixed(func, y0, T, batch_dims=batch_dims), by_hand(func, y0, T))


@pytest.mark.parametrize("timed", [True, False])
def test_a_function_that_asserts_the_shape_of_its_state(timed):
    def func(t, y):
        assert y.shape == (4, 3)
        return -y * t if timed else -y

    y0 = draw(3, 4, 3)
    close(fixed(func, y0, T, batch_dims=1), by_hand(func, y0, T))


def test_a_function_sees_its_state_as_it_was_given():
    """Shape, dtype, structure; and the time as a tensor without axes."""
    seen = set()

    def func(t, y):
        seen.add((t.shape, t.dtype, y.shape, y.dtype))
        return -y * t

    fixed(func, draw(1, 2, 3), T)
    assert seen == {(torch.Size(()), torch.float64, torch.Size((2, 3)), torch.float64)}


def test_a_hard_sample_changes_nothing_for_the_others():
    """One sample 10⁶ times as stiff, in another place of the batch: the others are the same to rounding."""
    rate = torch.tensor([1.0, 1e6, 0.1, 3.0], dtype=torch.float64).unsqueeze(1)

    def func(t, y):
        return -rate * (y**3 + y) + t.sin()

    y0 = draw(1, 4, 2)
    whole = fixed(func, y0, T, batch_dims=1)
    for k in range(4):
        alone = fixed(lambda t, y, r=rate[k]: -r * (y**3 + y) + t.sin(), y0[k], T)
        close(whole[:, k], alone)


@pytest.mark.filterwarnings("ignore::torchdil.ConvergenceWarning")
def test_random_functions_are_reported():
    """Dropout has no trajectory; nothing pretends that it has."""
    torch.manual_seed(0)
    drop = nn.Dropout(0.5)
    solution = dil.ode.solve(lambda t, y: -drop(y), draw(1, 4, 3), T)
    assert not bool(solution.converged)
