"""What named peers get wrong: one test for each failure that was met in another library."""

import warnings

import pytest
import torch
from torch import nn

import torchdil as dil
from torchdil import Status
from torchdil.linear.base import LinearSolver
from torchdil.operator import Operator

RTOL = 1e-8  # relative, of a gradient in float64
LOUD = pytest.warns(dil.ConvergenceWarning)
EXACT = [dil.CG(), dil.NormalCG(), dil.MINRES(), dil.GMRES(), dil.BiCGStab(), dil.Dense(), dil.Auto(), dil.Auto(dense_below=0)]
NAMES = [*(type(solver).__name__ for solver in EXACT[:-1]), "Auto, Krylov"]


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def relative(a, b):
    return float((a - b).detach().norm() / b.detach().norm())


def quartic(y, theta):
    return (y - torch.sin(theta)).square().sum() + 0.25 * (y**4).sum() + 0.5 * y.sum() ** 2


def quartic_gradient(theta, v):
    """vᵀ ∂y/∂θ by the theorem, dense."""
    y = dil.argmin(quartic, torch.zeros_like(theta), (theta.detach(),), solver=dil.Newton(rtol=1e-13)).value
    F = torch.func.grad(quartic)
    H, P = torch.func.jacrev(F, (0, 1))(y, theta.detach())
    return -P.mT @ torch.linalg.solve(H, v)


# TorchOpt, TorchDEQ and DDN return wrong second derivatives.
@pytest.mark.parametrize("linear_solver", EXACT, ids=NAMES)
def test_second_derivative_of_a_nonlinear_dependence(linear_solver):
    def y(theta):
        return dil.argmin(
            quartic, torch.zeros(3).double(), (theta,), solver=dil.Newton(rtol=1e-13), linear_solver=linear_solver
        ).value

    theta = draw(0, 3).requires_grad_()
    assert torch.autograd.gradgradcheck(y, theta)
    # y³ + y = sin θ for one unknown: y' = cos θ / (3 y² + 1), and y'' from that.
    t = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    u = dil.argmin(
        lambda u: u**4 / 4 + u**2 / 2 - torch.sin(t) * u, torch.tensor(0.0).double(), linear_solver=linear_solver
    ).value
    (first,) = torch.autograd.grad(u, t, create_graph=True)
    (second,) = torch.autograd.grad(first, t)
    slope = 1 / (3 * u**2 + 1)
    expected = -torch.sin(t) * slope - torch.cos(t) * slope**2 * 6 * u * first
    assert relative(second, expected) <= RTOL


# TorchOpt and xitorch give None.
def test_closure_over_linear():
    torch.manual_seed(0)
    linear = nn.Linear(3, 3).double()
    y = dil.argmin(lambda y: 0.5 * (y - linear(torch.ones_like(y))).square().sum(), torch.zeros(3).double()).value
    y.sum().backward()
    assert torch.allclose(linear.weight.grad, torch.ones(3, 3).double(), rtol=RTOL)
    assert torch.allclose(linear.bias.grad, torch.ones(3).double(), rtol=RTOL)


# xitorch gives no gradient.
def test_dict_parameters():
    params = {"shift": draw(0, 3).requires_grad_(), "inner": {"scale": torch.tensor(2.0).double().requires_grad_()}}

    def score(y, params):
        return 0.5 * (y - params["inner"]["scale"] * params["shift"]).square().sum()

    y = dil.argmin(score, torch.zeros(3).double(), (params,)).value
    y.sum().backward()
    assert relative(params["shift"].grad, torch.full((3,), 2.0).double()) <= RTOL
    assert relative(params["inner"]["scale"].grad, params["shift"].sum()) <= RTOL


# TorchOpt takes no step and returns a gradient of exactly 0.
@pytest.mark.parametrize("linear_solver", EXACT, ids=NAMES)
def test_scalar_unknown(linear_solver):
    theta = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    y = dil.argmin(lambda y: (y - theta**2) ** 2, torch.tensor(0.0).double(), linear_solver=linear_solver).value
    y.backward()
    assert y.shape == () and relative(theta.grad, 2 * theta) <= RTOL


# JAXopt, TorchOpt, xitorch (with a forward of one's own) and TorchDEQ are silent.
@pytest.mark.parametrize("solver", [dil.Newton(max_steps=1), dil.GradientDescent(max_steps=1), lambda f, y: y + 0.1])
def test_unsolved_inner_problem_warns(solver):
    with LOUD as caught:
        solution = dil.argmin(quartic, torch.zeros(3).double(), (draw(0, 3),), solver=solver)
    assert len(caught) == 1 and "residual" in str(caught[0].message) and "tolerance" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert not bool(solution.converged) and not bool(solution.report.forward.converged)
    with pytest.raises(dil.ConvergenceError) as error:
        dil.argmin(quartic, torch.zeros(3).double(), (draw(0, 3),), solver=solver, on_failure="raise")
    assert error.value.report.forward.stats.residual > error.value.report.forward.stats.tolerance


def test_unsolved_fixed_point_warns():
    with LOUD:
        dil.fixed_point(lambda y: torch.cos(y), torch.ones(3).double(), solver=dil.Picard(max_steps=1))


# A y off by 1e-2 gives a wrong gradient without a word everywhere.
def test_value_off_by_a_hundredth_warns():
    theta = draw(0, 3)
    good = dil.argmin(quartic, torch.zeros(3).double(), (theta,)).value
    with LOUD:
        solution = dil.argmin(quartic, torch.zeros(3).double(), (theta,), solver=lambda f, y: good + 1e-2)
    assert solution.status == Status.not_stationary
    with LOUD:
        dil.attach(torch.func.grad(quartic), good + 1e-2, (theta,), symmetric=True)
    dil.attach(torch.func.grad(quartic), good, (theta,), symmetric=True)


# JAXopt and TorchOpt are silent.
@pytest.mark.parametrize("linear_solver", [dil.CG, dil.NormalCG, dil.MINRES, dil.GMRES, dil.BiCGStab])
def test_unsolved_backward_warns(linear_solver):
    theta = draw(0, 5).requires_grad_()
    solution = dil.argmin(quartic, torch.zeros(5).double(), (theta,), linear_solver=linear_solver(max_steps=1))
    assert solution.report.backward is None
    with LOUD as caught:
        (solution.value * draw(1, 5)).sum().backward()
    assert len(caught) == 1 and "backward" in str(caught[0].message)
    assert not bool(solution.report.backward.converged.any())
    solution = dil.argmin(
        quartic, torch.zeros(5).double(), (theta,), linear_solver=linear_solver(max_steps=1), on_failure="raise"
    )
    with pytest.raises(dil.ConvergenceError):
        (solution.value * draw(1, 5)).sum().backward()


# TorchOpt and xitorch raise under torch.func.
def test_vmap_jacrev_jvp():
    thetas, v = draw(0, 4, 3), draw(1, 3)

    def y(theta):
        return dil.argmin(quartic, torch.zeros(3).double(), (theta,), solver=dil.Newton(rtol=1e-13)).value

    rows = torch.vmap(y)(thetas)
    jacobians = torch.vmap(torch.func.jacrev(y))(thetas)
    for theta, row, jacobian in zip(thetas, rows, jacobians, strict=True):
        assert relative(row, y(theta)) <= RTOL
        assert relative(jacobian.mT @ v, quartic_gradient(theta, v)) <= RTOL
        value, tangent = torch.func.jvp(y, (theta,), (v,))
        assert relative(value, row) <= RTOL and relative(tangent, jacobian @ v) <= RTOL


# qpth returns the mean.
def test_shared_parameter_gets_the_sum_over_the_batch():
    x, theta = draw(0, 5, 3), torch.tensor(0.8, dtype=torch.float64, requires_grad=True)

    def score(y, x):
        return (y - theta * x).square().sum(-1) + (theta * y**2).square().sum(-1)

    def grad(some):
        y = dil.argmin(score, torch.zeros_like(some), (some,)).value
        return torch.autograd.grad(y.sum(), theta)[0]

    assert relative(grad(x), sum(grad(x[i : i + 1]) for i in range(5))) <= RTOL


# A joint CG stops when the norm over the batch is small: TorchOpt is off by more than 1e-3 on that sample in 14 draws of 20,
# its normal-CG and xitorch in all.
@pytest.mark.parametrize(
    "linear_solver", [dil.CG(), dil.MINRES(), dil.GMRES(), dil.BiCGStab(), dil.Auto(dense_below=0), dil.Auto()]
)
def test_ill_conditioned_sample_of_small_cotangent(linear_solver):
    for seed in range(20):
        Q = torch.linalg.qr(draw(seed, 4, 10, 10))[0]
        eigenvalues = torch.linspace(1, 2, 10).double().repeat(4, 1)
        eigenvalues[0] = torch.logspace(0, -4, 10)
        H = Q @ torch.diag_embed(eigenvalues) @ Q.mT
        x = draw(100 + seed, 4, 10).requires_grad_()
        v = draw(200 + seed, 4, 10)
        v[0] *= 1e-6
        y = dil.argmin(
            lambda y, H=H, x=x: 0.5 * torch.einsum("bi,bij,bj->b", y, H, y) - (x * y).sum(-1),
            torch.zeros(4, 10).double(),
            linear_solver=linear_solver,
        ).value
        (grad,) = torch.autograd.grad(y, x, v)
        for got, matrix, cotangent in zip(grad, H, v, strict=True):
            assert relative(got, torch.linalg.solve(matrix, cotangent)) <= 1e-5  # rtol 1e-10 times a condition number of 1e4


# xitorch and TorchOpt treat a batch as one system.
@pytest.mark.parametrize("linear_solver", EXACT, ids=NAMES)
def test_a_hard_sample_leaves_the_other_gradients_alone(linear_solver):
    Q = torch.linalg.qr(draw(0, 3, 6, 6))[0]
    eigenvalues = torch.linspace(1, 2, 6).double().repeat(3, 1)
    eigenvalues[0] = torch.logspace(0, -8, 6)
    H = Q @ torch.diag_embed(eigenvalues) @ Q.mT
    x, v = draw(1, 3, 6), draw(2, 3, 6)

    def grad(some):
        inputs = x[some].clone().requires_grad_()
        y = dil.argmin(
            lambda y: 0.5 * torch.einsum("bi,bij,bj->b", y, H[some], y) - (inputs * y).sum(-1),
            torch.zeros_like(inputs),
            linear_solver=linear_solver,
            on_failure="ignore",
        ).value
        return torch.autograd.grad(y, inputs, v[some])[0]

    together = grad(slice(0, 3))
    for i in (1, 2):
        assert (together[i] - grad(slice(i, i + 1))[0]).abs().max() <= 1e-12


# hypertorch breaks off before it stores the last iterate: on A = 2I it returns zero.
@pytest.mark.parametrize("linear_solver", EXACT, ids=NAMES)
def test_cg_converging_in_one_step(linear_solver):
    theta = draw(0, 4).requires_grad_()
    solution = dil.argmin(lambda y: (y - theta).square().sum(), torch.zeros(4).double(), linear_solver=linear_solver)
    v = draw(1, 4)
    (grad,) = torch.autograd.grad(solution.value, theta, v)
    assert relative(grad, v) <= RTOL
    assert int(solution.report.backward.stats.steps) == 1


# TorchOpt and JAXopt give finite garbage of 1e15 to 1e17, silently.
@pytest.mark.parametrize("linear_solver", EXACT, ids=NAMES)
def test_singular_hessian_without_damping(linear_solver):
    A = draw(0, 3, 5)  # rank 3 of 5
    theta = draw(1, 3).requires_grad_()
    H = A.mT @ A

    def solve():
        return dil.argmin(
            lambda y: 0.5 * (A @ y - torch.sin(theta)).square().sum(), torch.zeros(5).double(), linear_solver=linear_solver
        )

    # A cotangent in the range of H: the gradient is that of A y = sin θ, and all is well.
    solution = solve()
    (grad,) = torch.autograd.grad(solution.value, theta, H @ draw(2, 5))
    assert relative(grad, torch.cos(theta) * (torch.linalg.pinv(A).mT @ (H @ draw(2, 5)))) <= 1e-6
    assert bool(solution.report.backward.converged)
    # One that is not: y is not determined along it. Finite, of a sane size, and not silent.
    solution = solve()
    with LOUD:
        (grad,) = torch.autograd.grad(solution.value, theta, draw(3, 5))
    assert bool(torch.isfinite(grad).all()) and float(grad.abs().max()) <= 1e3
    assert not bool(solution.report.backward.converged)


# TorchOpt divides by zero: its first curvature pᵀHp is 0. Those that cannot go on from there say so.
@pytest.mark.parametrize("linear_solver", EXACT, ids=NAMES)
def test_indefinite_system(linear_solver):
    H = torch.diag(torch.tensor([1.0, -1.0])).double()
    theta = draw(0, 2).requires_grad_()
    y_star = torch.linalg.solve(H, theta.detach())
    y = dil.attach(lambda y, theta: H @ y - theta, y_star, (theta,), linear_solver=linear_solver, symmetric=True)
    v = torch.ones(2).double()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (grad,) = torch.autograd.grad(y, theta, v)
    assert bool(torch.isfinite(grad).all())
    if caught:
        assert isinstance(linear_solver, (dil.CG, dil.BiCGStab)) and caught[0].category is dil.ConvergenceWarning
    else:
        assert relative(grad, torch.linalg.solve(H, v)) <= RTOL


# xitorch's "cg" solves the normal equations and does not say so.
def test_cg_says_when_it_solves_the_normal_equations():
    theta = draw(0, 2).requires_grad_()
    A = torch.tensor([[1.0, 2.0], [-1.0, 1.0]]).double()
    solution = dil.root(lambda y: A @ y - theta, torch.zeros(2).double(), linear_solver=dil.CG())
    solution.value.sum().backward()
    assert "normal equations" in solution.report.backward.stats.method
    solution = dil.argmin(lambda y: (y - theta).square().sum(), torch.zeros(2).double(), linear_solver=dil.CG())
    solution.value.sum().backward()
    assert solution.report.backward.stats.method == "CG"


# Betty updates the residual by the unscaled Hv and the iterate by a scaled one.
@pytest.mark.parametrize("linear_solver", EXACT, ids=NAMES)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_residual_kept_is_the_true_one(linear_solver: LinearSolver, scale):
    Q = torch.linalg.qr(draw(0, 2, 8, 8))[0]
    A = scale * (Q @ torch.diag(torch.logspace(0, -3, 8)).double() @ Q.mT)
    operator = Operator(lambda y: (A @ y.unsqueeze(2)).squeeze(2), torch.zeros(2, 8).double(), symmetric=True)
    rhs = draw(1, 2, 8)
    value, status, stats = linear_solver.solve(operator, rhs)
    residual = (rhs - (A @ value.unsqueeze(2)).squeeze(2)).norm(dim=1)
    assert bool((status == Status.converged).all())
    assert bool((residual <= 10 * stats.tolerance).all()) and bool((stats.residual <= stats.tolerance).all())
    assert relative(value, torch.linalg.solve(A, rhs)) <= 1e-6


# torchdyn's implicit Euler evaluates f at t instead of t + dt and cuts the graph: the step as a root does neither.
def test_implicit_euler_step_has_its_gradient():
    rate = torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    y, t, dt = torch.tensor(1.0).double(), 0.0, 0.1
    expected = y
    for k in range(5):
        y = dil.root(lambda u, y, k=k: u - y + dt * rate * (t + (k + 1) * dt) * u, y.detach(), (y,)).value
        expected = expected / (1 + dt * rate * (t + (k + 1) * dt))
    assert relative(y, expected) <= RTOL
    assert relative(torch.autograd.grad(y, rate)[0], torch.autograd.grad(expected, rate)[0]) <= RTOL


# JAXopt's CG "just returns the initial starting value, which is a zero vector": right for a zero cotangent only.
@pytest.mark.parametrize("linear_solver", EXACT, ids=NAMES)
def test_zero_cotangent(linear_solver):
    theta = draw(0, 3).requires_grad_()
    solution = dil.argmin(quartic, torch.zeros(3).double(), (theta,), linear_solver=linear_solver)
    (grad,) = torch.autograd.grad(solution.value, theta, torch.zeros(3).double())
    assert torch.equal(grad, torch.zeros(3).double()) and bool(solution.report.backward.converged)
    assert int(solution.report.backward.stats.steps) == 0


# deepinv's gradient is wrong for non-leaf parameters in a closure.
def test_closure_over_a_tensor_with_a_history():
    theta, v = draw(0, 3).requires_grad_(), draw(1, 3)
    shifted = 2 * theta
    y = dil.argmin(lambda y: quartic(y, shifted), torch.zeros(3).double()).value
    (grad,) = torch.autograd.grad(y, theta, v)
    assert relative(grad, 2 * quartic_gradient(shifted.detach(), v)) <= RTOL


# acados is wrong when started at the solution.
def test_gradient_when_started_at_the_solution():
    theta, v = draw(0, 3).requires_grad_(), draw(1, 3)
    y_star = dil.argmin(quartic, torch.zeros(3).double(), (theta,), solver=dil.Newton(rtol=1e-13)).value.detach()
    y = dil.argmin(quartic, y_star, (theta,)).value
    (grad,) = torch.autograd.grad(y, theta, v)
    assert relative(grad, quartic_gradient(theta, v)) <= RTOL


# JAXopt users ask why: y does not depend on where the solver started.
def test_start_gets_no_gradient():
    theta, y0 = draw(0, 3).requires_grad_(), draw(1, 3).requires_grad_()
    y = dil.argmin(quartic, y0, (theta,)).value
    assert torch.autograd.grad(y.sum(), y0, allow_unused=True, retain_graph=True)[0] is None
    assert torch.autograd.grad(y.sum(), theta)[0] is not None


# optimistix and cvxpylayers lose the whole batch to one bad sample.
@pytest.mark.parametrize("policy", ["zero", "nan"])
def test_policy_for_the_gradient_of_a_failed_sample(policy):
    x = torch.tensor([[1.0], [2.0], [3.0]], dtype=torch.float64, requires_grad=True)

    def score(y, x):  # without a minimum where x > 2.5
        return torch.where(x > 2.5, -y, (y - x) ** 2).sum(-1)

    solution = dil.argmin(score, torch.zeros(3, 1).double(), (x,), solver=dil.GradientDescent(max_steps=20), on_failure=policy)
    assert solution.converged.tolist() == [True, True, False]
    (grad,) = torch.autograd.grad(solution.value.sum(), x)
    assert torch.allclose(grad[:2], torch.ones(2, 1).double(), rtol=RTOL)
    assert float(grad[2]) == 0 if policy == "zero" else bool(grad[2].isnan())
