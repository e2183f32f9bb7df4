"""gradient="adjoint" and gradient="backprop" of odeint: against closed forms, torchdiffeq and the exact discrete gradient."""

import math
import warnings
from types import MappingProxyType

import pytest
import torch
import torchdiffeq

from torchdil import GMRES, Anderson, Newton, Picard, SciPy
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
    WholeTrajectory,
    odeint,
    solve,
)
from torchdil.solution import ConvergenceError, ConvergenceWarning, Status

RATE_TOL = 0.25  # of the observed order
COARSE_RTOL = 0.02  # of a gradient on the finer of the grids that show the order
EXACT_RTOL = 1e-8  # where two ways give the same number but for the tolerance of the solver
FINE_RTOL = 1e-6  # a method of order 5 or 6 on a fine grid against the exact flow
LAGGING_RTOL = 1e-6  # the derivative of an iteration that converges linearly lags behind its value
TIGHT = Newton(rtol=1e-13)

IMPLICIT = [
    BackwardEuler(),
    ImplicitMidpoint(),
    Trapezoid(),
    TRBDF2(),
    SDIRK2(),
    Kvaerno5(),
    GaussLegendre(4),
    GaussLegendre(6),
    RadauIIA(3),
    RadauIIA(5),
]
EXPLICIT = [ForwardEuler(), RK4()]


def relative(a, b):
    return float((a - b).norm() / b.norm())


def order_of(coarse, fine, exact):
    """The observed order of a gradient, all its tensors together, from a grid and one twice as fine."""
    first, second = (sum(float((a - b).norm() ** 2) for a, b in zip(found, exact, strict=True)) for found in (coarse, fine))
    return 0.5 * math.log2(first / second)


class Logistic:
    """y' = r cos(t) y (1 - y / k), two samples of two states; y(t) is known."""

    def __init__(self):
        self.y0 = torch.tensor([[0.5, 1.0], [1.5, 0.2]], dtype=torch.float64, requires_grad=True)
        self.r = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
        self.k = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
        self.t = torch.tensor([0.1, 0.5, 1.2], dtype=torch.float64, requires_grad=True)
        self.weights = torch.randn(3, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def __call__(self, t, y):
        return self.r * torch.cos(t) * y * (1 - y / self.k)

    def exact(self):
        decay = torch.exp(-self.r * (torch.sin(self.t) - torch.sin(self.t[0])))[:, None, None]
        return self.k / (1 + (self.k / self.y0 - 1) * decay)

    def gradient(self, y):
        return torch.autograd.grad((self.weights * y).sum(), (self.y0, self.r, self.k, self.t))

    def found(self, method, substeps, gradient="adjoint", adjoint="reverse", solver=None):
        settings = {"method": method, "gradient": gradient, "solver": solver, "batch_dims": 1}
        return self.gradient(odeint(self, self.y0, self.t, options={"substeps": substeps, "adjoint": adjoint}, **settings))


@pytest.mark.parametrize("adjoint", ["reverse", "stored"])
@pytest.mark.parametrize(
    "method, substeps",
    [
        (BackwardEuler(), 64),
        (Trapezoid(), 16),
        (SDIRK2(), 16),
        (TRBDF2(), 16),
        (RadauIIA(3), 16),
        (GaussLegendre(4), 4),
        (RK4(), 8),
    ],
    ids=repr,
)
def test_the_adjoint_approaches_the_gradient_of_the_exact_flow_at_the_order_of_the_method(method, substeps, adjoint):
    problem = Logistic()
    exact = problem.gradient(problem.exact())
    coarse, fine = (problem.found(method, n, adjoint=adjoint) for n in (substeps, 2 * substeps))
    assert order_of(coarse, fine, exact) == pytest.approx(method.order, abs=RATE_TOL)
    for a, b in zip(fine, exact, strict=True):
        assert relative(a, b) < COARSE_RTOL


@pytest.mark.parametrize("method, substeps", [(BackwardEuler(), 64), (Trapezoid(), 16), (GaussLegendre(4), 4)], ids=repr)
def test_the_adjoint_and_the_discrete_gradient_differ_by_the_order_of_the_method(method, substeps):
    problem = Logistic()
    differences = []
    for n in (substeps, 2 * substeps):
        adjoint, exact = problem.found(method, n, adjoint="stored"), problem.found(method, n, gradient="ift")
        differences.append([a - b for a, b in zip(adjoint, exact, strict=True)])
    nothing = [torch.zeros_like(difference) for difference in differences[0]]
    assert order_of(*differences, nothing) == pytest.approx(method.order, abs=RATE_TOL)


@pytest.mark.parametrize("method", [ImplicitMidpoint(), GaussLegendre(4), GaussLegendre(6)], ids=repr)
def test_a_symplectic_method_run_backwards_gives_the_discrete_gradient_itself(method):
    problem = Logistic()
    adjoint, exact = (problem.found(method, 2, gradient=gradient, solver=TIGHT) for gradient in ("adjoint", "ift"))
    for a, b in zip(adjoint[:3], exact[:3], strict=True):  # t moves the exact flow, not the grid
        assert relative(a, b) < EXACT_RTOL


@pytest.mark.parametrize("adjoint", ["reverse", "stored"])
@pytest.mark.parametrize("batch_dims", [0, 1])
@pytest.mark.parametrize("times", [[0.0, 0.3, 1.0], [1.0, 0.6, -0.2]], ids=["forward", "backward in time"])
def test_a_linear_equation_has_the_gradient_of_the_matrix_exponential(times, batch_dims, adjoint):
    torch.manual_seed(1)
    A = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    y0 = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    t = torch.tensor(times, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 2, 3, dtype=torch.float64)
    flow = torch.stack([y0 @ torch.linalg.matrix_exp(A.T * (x - t[0])) for x in t])
    wanted = torch.autograd.grad((weights * flow).sum(), (y0, A, t))
    # Steps of different numbers in the two intervals, 6 and 12 or 8 and 16.
    options = {"adjoint": adjoint, "step_size": math.copysign(0.05, times[1] - times[0])}
    y = odeint(lambda t, y: y @ A.T, y0, t, method="radau5", gradient="adjoint", batch_dims=batch_dims, options=options)
    for a, b in zip(torch.autograd.grad((weights * y).sum(), (y0, A, t)), wanted, strict=True):
        assert relative(a, b) < FINE_RTOL


class Dynamics(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()

    def forward(self, t, y):
        return self.net(y) * torch.cos(t) - 0.5 * y


def test_the_adjoint_agrees_with_torchdiffeq():
    func = Dynamics()
    y0 = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    t = torch.linspace(0, 2, 5, dtype=torch.float64).requires_grad_()
    weights = torch.randn(5, 4, 3, dtype=torch.float64)
    tensors = (y0, t, *func.parameters())
    theirs = torchdiffeq.odeint_adjoint(func, y0, t, method="dopri8", rtol=1e-11, atol=1e-11)
    ours = odeint(func, y0, t, method="gl6", gradient="adjoint", batch_dims=1, options={"substeps": 8})
    wanted, found = (torch.autograd.grad((weights * y).sum(), tensors) for y in (theirs, ours))
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < FINE_RTOL


@pytest.mark.parametrize("gradient", ["adjoint", "backprop"])
def test_a_nested_state_has_the_gradient_of_the_same_state_in_one_tensor(gradient):
    torch.manual_seed(3)
    A = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    x0 = torch.randn(2, 2, dtype=torch.float64, requires_grad=True)
    z0 = torch.randn(2, 1, dtype=torch.float64, requires_grad=True)
    t = torch.linspace(0, 1, 3, dtype=torch.float64)

    def whole(t, y):
        return torch.sin(y @ A.T)

    def parts(t, y):
        slope = whole(t, torch.cat((y[0], y[1][0]), dim=-1))
        return slope[..., :2], (slope[..., 2:],)

    settings = {"method": "sdirk2", "gradient": gradient, "batch_dims": 1, "options": {"substeps": 2}}
    x, (z,) = odeint(parts, (x0, (z0,)), t, **settings)
    y = odeint(whole, torch.cat((x0, z0), dim=1), t, **settings)
    assert x.shape == (3, 2, 2) and z.shape == (3, 2, 1)
    wanted = torch.autograd.grad(y.square().sum(), (x0, z0, A))
    for a, b in zip(torch.autograd.grad(x.square().sum() + z.square().sum(), (x0, z0, A)), wanted, strict=True):
        assert relative(a, b) < EXACT_RTOL


def test_a_tensor_and_one_made_from_it_are_not_counted_twice():
    w = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    twice = 2 * w
    y0 = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    t = torch.linspace(0, 1, 4, dtype=torch.float64)
    grads = []
    for gradient in ("adjoint", "ift"):
        y = odeint(lambda t, y: torch.sin(w * y) + twice * torch.cos(y) + y0, y0, t, method="gl2", gradient=gradient)
        grads.append(torch.autograd.grad(y.square().sum(), (w, twice, y0), retain_graph=True))
    for a, b in zip(*grads, strict=True):
        assert relative(a, b) < EXACT_RTOL


def test_a_slope_that_does_not_depend_on_the_state_has_an_adjoint():
    a = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    y0 = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.0, 3.0], dtype=torch.float64)
    y = odeint(lambda t, y: a * torch.ones_like(y), y0, t, gradient="adjoint")
    assert [float(g) for g in torch.autograd.grad(y[-1].sum(), (a, y0))] == [3.0, 1.0]
    y = odeint(lambda t, y: torch.ones_like(y), y0, t, gradient="adjoint")
    assert float(torch.autograd.grad(y[-1].sum(), y0)[0]) == 1.0


def test_the_linear_solver_may_be_chosen():
    problem = Logistic()
    settings = {"method": "trapezoid", "gradient": "adjoint", "batch_dims": 1, "options": {"substeps": 4}}
    direct, products = (
        problem.gradient(odeint(problem, problem.y0, problem.t, linear_solver=linear, **settings))
        for linear in (None, GMRES(rtol=1e-12))
    )
    for a, b in zip(products, direct, strict=True):
        assert relative(a, b) < EXACT_RTOL


def test_single_precision_keeps_its_dtype_and_times_may_have_more_digits():
    problem = Logistic()
    y0 = problem.y0.detach().float().requires_grad_()
    r = problem.r.detach().float().requires_grad_()
    t = problem.t.detach().requires_grad_()
    y = odeint(
        lambda t, y: r * torch.cos(t) * y * (1 - y / problem.k.detach().float()),
        y0,
        t,
        method="gl4",
        gradient="adjoint",
        batch_dims=1,
        options={"substeps": 8},
    )
    found = torch.autograd.grad((problem.weights.float() * y).sum(), (y0, r, t))
    exact = problem.gradient(problem.exact())
    for a, b, dtype in zip(found, (exact[0], exact[1], exact[3]), (torch.float32, torch.float32, torch.float64), strict=True):
        assert a.dtype == dtype and relative(a.double(), b) < 1e-4


@pytest.mark.parametrize("gradient", ["adjoint", "backprop"])
def test_nothing_is_recorded_where_nothing_asks_for_a_gradient(gradient):
    problem = Logistic()
    with torch.no_grad():
        assert not odeint(problem, problem.y0, problem.t, gradient=gradient, batch_dims=1).requires_grad
    y0, t = problem.y0.detach(), problem.t.detach()
    assert not odeint(lambda t, y: -y, y0, t, gradient=gradient, batch_dims=1).requires_grad


# Adaptive steps


@pytest.mark.parametrize("batch_dims", [0, 1])
@pytest.mark.parametrize("method", [RadauIIA(5), Kvaerno5()], ids=repr)
def test_with_adaptive_steps_the_way_back_is_as_exact_as_asked_for(method, batch_dims):
    problem = Logistic()
    exact = problem.gradient(problem.exact())
    errors = []
    for tolerance in (1e-4, 1e-8):
        settings = {"method": method, "gradient": "adjoint", "rtol": tolerance, "atol": tolerance, "batch_dims": batch_dims}
        solution = solve(problem, problem.y0, problem.t, **settings)
        found = problem.gradient(solution.value)
        errors.append(max(relative(a, b) for a, b in zip(found, exact, strict=True)))
        assert bool(solution.report.backward.converged.all())
        assert solution.report.backward.status.shape == problem.y0.shape[:batch_dims]
    assert errors[0] < 1e-2 and errors[1] < FINE_RTOL


def relaxing(rate, shift):
    """y' = -λ (y - s): y = s + (y0 - s) exp(-λ t). Back in time y grows by exp(λ t), and the steps follow it."""
    return lambda t, y: -rate * (y - shift)


@pytest.mark.parametrize("method", [RadauIIA(5), Kvaerno5()], ids=repr)
def test_the_adjoint_of_a_transient_is_found_by_adaptive_steps(method):
    rate, shift, y0 = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (20.0, 0.5, 1.0))
    t = torch.tensor([0.0, 0.3], dtype=torch.float64)
    y = odeint(relaxing(rate, shift), y0, t, method=method, gradient="adjoint", rtol=1e-9, atol=1e-9, on_failure="raise")
    exact = shift + (y0 - shift) * torch.exp(-rate * t[1])
    found, wanted = (torch.autograd.grad(x, (rate, shift, y0)) for x in (y[-1], exact))
    for a, b in zip(found, wanted, strict=True):
        assert relative(a, b) < 10 * FINE_RTOL


def test_an_adaptive_way_back_that_takes_too_many_steps_is_reported():
    rate, shift = (torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (1e2, 0.5))
    y0, t = torch.ones(1, dtype=torch.float64), torch.tensor([0.0, 1.0], dtype=torch.float64)
    # 36 steps forward, and some 600 back, where y grows by exp(100).
    settings = {"method": "radau5", "gradient": "adjoint", "rtol": 1e-6, "atol": 1e-6, "options": {"max_steps": 150}}
    solution = solve(relaxing(rate, shift), y0, t, on_failure="raise", **settings)
    with pytest.raises(ConvergenceError, match=r"The backward solve .* max_steps"):
        solution.value[-1].sum().backward()


# Failures


def turning(t, y):
    """x' = -λ x, λ' = 0. A step of backward Euler back in time divides by 1 - λ h: at λ = 10 and h = 0.1 it does not exist."""
    return torch.stack((-y[..., 1] * y[..., 0], 0 * y[..., 1]), dim=-1)


def backwards(rates, on_failure, adjoint="reverse"):
    """The gradient with respect to y0 of samples with these λ, and the report."""
    y0 = torch.tensor([[1.0, rate] for rate in rates], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.0, 0.1, 0.2], dtype=torch.float64)
    options = {"adjoint": adjoint}
    solution = solve(turning, y0, t, gradient="adjoint", batch_dims=1, on_failure=on_failure, options=options)
    assert bool(solution.converged.all())
    (grad,) = torch.autograd.grad(solution.value[1:].square().sum(), y0)
    return grad, solution.report


def test_a_step_backwards_that_does_not_exist_is_reported_and_the_policy_obeyed():
    with pytest.warns(ConvergenceWarning, match=r"The backward solve .* failed for 1 of 2 samples"):
        backwards([10.0, 1.0], "warn")
    with pytest.raises(ConvergenceError, match=r"The backward solve .* failed for 1 of 2 samples"):
        backwards([10.0, 1.0], "raise")
    alone, _ = backwards([1.0], "raise")
    for policy in ("ignore", "zero", "nan"):
        grad, report = backwards([10.0, 1.0], policy)
        assert report.backward.converged.tolist() == [False, True]
        assert relative(grad[1], alone[0]) < EXACT_RTOL
    assert bool((backwards([10.0, 1.0], "zero")[0][0] == 0).all())
    assert bool(backwards([10.0, 1.0], "nan")[0][0].isnan().all())


def test_the_stored_states_do_without_the_step_backwards():
    grad, report = backwards([10.0, 1.0], "raise", adjoint="stored")
    assert bool(report.backward.converged.all()) and bool(grad.isfinite().all())


@pytest.mark.parametrize("policy", ["zero", "nan"])
@pytest.mark.parametrize("adjoint", ["reverse", "stored"])
def test_a_sample_that_is_lost_on_the_way_leaves_its_neighbours_alone(adjoint, policy):
    w = torch.tensor(0.1, dtype=torch.float64, requires_grad=True)

    def gradients(starts):
        y0 = torch.tensor(starts, dtype=torch.float64).unsqueeze(1).requires_grad_()
        settings = {"method": "euler", "gradient": "adjoint", "options": {"adjoint": adjoint}}
        t = torch.linspace(0, 1, 5, dtype=torch.float64)
        solution = solve(lambda t, y: w * y**5, y0, t, batch_dims=1, on_failure=policy, **settings)
        return *torch.autograd.grad(solution.value[:, -1].sum(), (y0, w)), solution

    wanted, wanted_w, _ = gradients([0.5])
    found, found_w, solution = gradients([1e30, 0.5])  # grows beyond the largest number in two steps
    assert solution.converged.tolist() == [False, True]
    assert relative(found[1], wanted[0]) < EXACT_RTOL
    if policy == "zero":
        assert float(found[0]) == 0 and relative(found_w, wanted_w) < EXACT_RTOL
    else:
        assert math.isnan(float(found[0]))


def test_what_the_adjoint_cannot_do_gets_its_sentence():
    problem = Logistic()
    y = odeint(problem, problem.y0, problem.t, gradient="adjoint", batch_dims=1)
    with pytest.raises(RuntimeError, match='gradient="adjoint" has no second derivative: use gradient="ift"'):
        torch.autograd.grad(y.sum(), problem.y0, create_graph=True)
    hidden = MappingProxyType({0: 2 * problem.r})
    if problem.r.device.type == "cpu":  # else it is followed to its leaves
        with pytest.raises(RuntimeError, match="func uses a non-leaf tensor that is not a variable of its closure"):
            odeint(lambda t, y: hidden[0] * y, problem.y0, problem.t, gradient="adjoint", batch_dims=1)
    for gradient in ("adjoint", "backprop"):
        with pytest.raises(RuntimeError, match=f'gradient="{gradient}" cannot be used in(side| forward mode or) torch.func'):
            torch.func.grad(lambda y0, g=gradient: odeint(lambda t, y: -y, y0, problem.t.detach(), gradient=g).sum())(
                problem.y0.detach()
            )


def test_what_adaptive_steps_cannot_do_gets_its_sentence():
    problem = Logistic()
    settings = {"method": "kvaerno5", "rtol": 1e-6, "batch_dims": 1}
    with pytest.raises(ValueError, match='adjoint="stored" is for a fixed grid'):
        odeint(problem, problem.y0, problem.t, gradient="adjoint", options={"adjoint": "stored"}, **settings)
    with pytest.raises(ValueError, match='gradient="backprop" is for a fixed grid'):
        odeint(problem, problem.y0, problem.t, gradient="backprop", **settings)
    with pytest.raises(ValueError, match="options checkpoint is for a fixed grid"):
        odeint(problem, problem.y0, problem.t, options={"checkpoint": True}, **settings)


def test_a_parameter_changed_in_place_after_the_forward_pass_is_noticed():
    problem = Logistic()
    y = odeint(problem, problem.y0, problem.t, gradient="adjoint", batch_dims=1)
    with torch.no_grad():
        problem.r.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# Through the iterations


@pytest.mark.parametrize("method", IMPLICIT + EXPLICIT, ids=repr)
def test_backpropagation_through_the_steps_gives_the_discrete_gradient(method):
    problem = Logistic()
    unrolled, exact = (problem.found(method, 2, gradient=gradient, solver=TIGHT) for gradient in ("backprop", "ift"))
    for a, b in zip(unrolled, exact, strict=True):
        assert relative(a, b) < EXACT_RTOL


@pytest.mark.parametrize("method", [BackwardEuler(), Trapezoid(), GaussLegendre(4), RK4()], ids=repr)
def test_backpropagation_has_first_and_second_derivatives(method):
    w = torch.tensor([[0.3, -1.0], [0.8, 0.1]], dtype=torch.float64, requires_grad=True)
    y0 = torch.tensor([0.4, -0.2], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.0, 0.4, 0.6], dtype=torch.float64, requires_grad=True)

    def final(w, y0, t):
        return odeint(lambda t, y: torch.tanh(w @ y) + t, y0, t, method=method, gradient="backprop")

    assert torch.autograd.gradcheck(final, (w, y0, t))
    assert torch.autograd.gradgradcheck(final, (w, y0, t))


def test_backpropagation_from_a_steady_state_has_second_derivatives():
    # The first iterate solves the step already; its derivatives do not.
    y0 = torch.tensor([1.0], dtype=torch.float64, requires_grad=True)
    t = torch.tensor([0.0, 0.3], dtype=torch.float64)
    assert torch.autograd.gradgradcheck(lambda y0: odeint(lambda t, y: y * (1 - y), y0, t, gradient="backprop"), y0)


@pytest.mark.parametrize("solver", [Picard(rtol=1e-12), Anderson(rtol=1e-12)], ids=lambda s: type(s).__name__)
def test_backpropagation_goes_through_other_solvers_too(solver):
    problem = Logistic()
    settings = {"batch_dims": 1, "options": {"substeps": 4}}
    y = odeint(problem, problem.y0, problem.t, gradient="backprop", solver=solver, **settings)
    for a, b in zip(problem.gradient(y), problem.found(BackwardEuler(), 4, gradient="ift"), strict=True):
        assert relative(a, b) < LAGGING_RTOL


def test_backpropagation_reports_its_steps_and_their_failure():
    y0 = torch.tensor([[1.0], [-1.0]], dtype=torch.float64, requires_grad=True)
    t = torch.linspace(0, 0.4, 3, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        solution = solve(lambda t, y: -torch.log(y), y0, t, gradient="backprop", batch_dims=1, on_failure="zero")
    assert solution.status.tolist() == [Status.converged, Status.non_finite]
    assert int(solution.stats.steps[0]) > 2
    with pytest.raises(ConvergenceError):
        odeint(lambda t, y: -torch.log(y), y0, t, gradient="backprop", batch_dims=1, on_failure="raise")
    # y = 1 - y² + ... has no real solution: Newton wanders.
    with pytest.warns(ConvergenceWarning, match="max_steps"):
        odeint(lambda t, y: y**2 + 10, y0[:1], t * 10, gradient="backprop", solver=Newton(max_steps=8))


def test_backpropagation_refuses_a_solver_that_leaves_no_graph():
    problem = Logistic()
    with pytest.raises(TypeError, match=r'solver must be one of Newton, .* with gradient="backprop"'):
        odeint(problem, problem.y0, problem.t, gradient="backprop", solver=SciPy(), batch_dims=1)


def test_the_solver_of_the_whole_trajectory_is_for_the_way_there():
    W, y0 = torch.randn(3, 3, dtype=torch.float64).requires_grad_(), torch.randn(2, 3, dtype=torch.float64)
    t = torch.linspace(0.0, 1.0, 6, dtype=torch.float64)
    found = []
    for solver in (None, WholeTrajectory()):
        y = odeint(lambda t, y: torch.tanh(y @ W), y0, t, batch_dims=1, gradient="adjoint", solver=solver)
        found.append(torch.autograd.grad(y[-1].sum(), W)[0])
    torch.testing.assert_close(*found, rtol=1e-9, atol=0)
