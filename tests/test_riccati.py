"""The Hessian of a planning problem over its horizon: expansion, recursion, linear solver and DDP, against dense oracles."""

import numpy as np
import pytest
import scipy.optimize
import torch

import torchdil as dil
from torchdil import Status
from torchdil.batch import Layout
from torchdil.control.expansion import expand
from torchdil.control.plan import Plan, Planning
from torchdil.control.riccati import factorise
from torchdil.operator import Operator

# Relative, against a dense factorisation of Hessians with a condition of up to 1e4.
LINEAR = 1e-10
# What another sample of the batch may change: the rounding of batched kernels.
ALONE = 1e-12
# Relative, of the cost that SciPy's own solver leaves.
COST = 1e-6

SIZES = [(2, 1, 1), (2, 1, 5), (1, 3, 4), (4, 2, 3)]  # n, m, H


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def wavy(n, m, convex=1.0):
    """Dynamics and cost with curvature of their own; the less `convex`, the more often the Hessian is indefinite."""
    generator = torch.Generator().manual_seed(10 * n + m)
    A, B, C = (torch.randn(n, k, generator=generator) for k in (n, m, n + m))
    A = 0.9 * A / torch.linalg.matrix_norm(A, 2)

    def dynamics(x, u):
        return x @ A.T + u @ B.T + 0.3 * torch.sin(torch.cat((x, u), dim=-1) @ C.T)

    def cost(x, u):
        mixed = torch.cos(x.sum(dim=-1) + u.sum(dim=-1))
        return x.square().sum(dim=-1) + convex * u.square().sum(dim=-1) + (1 - convex) * mixed

    return dynamics, cost


def operator_of(plan, u, x0):
    statement = Planning(Layout.of(u, 1), plan.bounds, guarded=False)
    operator = Operator(lambda y: statement.residual(plan, y, (x0,)), u.flatten(1), True)
    operator.bound = plan, (x0,)
    return operator


def hessians(plan, u, x0):
    """(B, Hm, Hm), sample by sample by torch's own double backward."""
    return torch.stack(
        [
            torch.autograd.functional.hessian(lambda y, i=i: plan(y.view(1, *u.shape[1:]), x0[i : i + 1]).sum(), u[i].flatten())
            for i in range(len(u))
        ]
    )


def relative(a, b):
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize(("n", "m", "H"), SIZES)
@pytest.mark.parametrize("convex", [1.0, 0.1])
def test_the_recursion_solves_with_the_hessian(n, m, H, convex):
    plan = Plan(*wavy(n, m, convex), None, (H, m), None)
    u, x0, r = torch.randn(4, H, m), torch.randn(4, n), torch.randn(4, H, m)
    local = expand(plan, u, x0)
    slope = torch.func.grad(lambda u: plan(u, x0).sum())(u)
    assert relative(local.slope, slope) < LINEAR
    dense, factors = hessians(plan, u, x0), factorise(local)
    expected = torch.linalg.solve(dense, r.flatten(1).unsqueeze(2)).view_as(r)
    assert relative(factors.solve(r), expected) < 100 * LINEAR
    definite = torch.linalg.eigvalsh(dense)[:, 0] > 0
    assert torch.equal(factors.positive, definite)


@pytest.mark.parametrize("damping", [0.0, 0.3])
@pytest.mark.parametrize("bounds", [None, (-0.5, 0.5)])
def test_the_linear_solver_equals_the_dense_one(damping, bounds):
    plan = Plan(*wavy(3, 2), None, (4, 2), bounds)
    u, x0, v = torch.randn(5, 4, 2).clamp(-0.5, 0.5), torch.randn(5, 3), torch.randn(5, 8)
    operator = operator_of(plan, u, x0)
    ours = dil.control.Riccati(damping=damping).solve(operator, v, transpose=True)
    dense = dil.Dense(damping=damping).solve(operator, v, transpose=True)
    assert bool((ours.status == Status.converged).all())
    assert relative(ours.value, dense.value) < LINEAR
    assert bool((ours.stats.residual < LINEAR * v.norm(dim=1)).all())


def test_a_control_without_influence_is_left_alone():
    def dynamics(x, u):
        return 0.5 * x + u[..., :1]

    def cost(x, u):
        return x.square().sum(dim=-1) + u[..., 0].square()

    plan = Plan(dynamics, cost, None, (3, 2), None)
    operator = operator_of(plan, torch.randn(2, 3, 2), torch.randn(2, 1))
    v = torch.randn(2, 3, 2)
    v[0, :, 1] = 0
    result = dil.control.Riccati().solve(operator, v.flatten(1), transpose=True)
    assert result.status.tolist() == [Status.converged, Status.breakdown]
    expected = torch.linalg.pinv(operator.dense()[0]) @ v[0].flatten()
    assert relative(result.value[0], expected) < LINEAR


@pytest.mark.parametrize("damaged", ["nan", "explodes"])
def test_a_damaged_sample_changes_nothing_for_the_others(damaged):
    dynamics, cost = wavy(2, 1)

    def broken(x, u, which):
        ahead = dynamics(x, u)
        return torch.where(which, torch.nan if damaged == "nan" else 1e3 * ahead**3, ahead)

    x0 = torch.randn(4, 2)
    which = torch.tensor([False, True, False, False]).unsqueeze(1)
    mixed = dil.control.MPC(lambda x, u: broken(x, u, which), cost, 8, 1, bounds=(-0.4, 0.4), on_failure="zero")
    clean = dil.control.MPC(dynamics, cost, 8, 1, bounds=(-0.4, 0.4))
    grads = []
    for mpc in (mixed, clean):
        x = x0.clone().requires_grad_()
        u = mpc(x)
        (grad,) = torch.autograd.grad(u[[0, 2, 3]].square().sum(), x)
        grads.append((u[[0, 2, 3]].detach(), grad[[0, 2, 3]]))
    for a, b in zip(*grads, strict=True):
        assert float((a - b).abs().max()) < ALONE


def test_the_work_grows_linearly_with_the_horizon():
    dynamics, cost = wavy(2, 1)
    calls = []

    def counted(x, u):
        calls.append(1)
        return dynamics(x, u)

    counts = []
    for H in (10, 20, 40):
        plan = Plan(counted, cost, None, (H, 1), None)
        operator = operator_of(plan, torch.zeros(1, H, 1), torch.ones(1, 2))
        calls.clear()
        result = dil.control.Riccati().solve(operator, torch.ones(1, H), transpose=True)
        counts.append(len(calls))
        assert result.stats.products == 1
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])


def test_newton_takes_the_recursion_as_its_linear_solver():
    dynamics, cost = wavy(3, 2)
    x = torch.randn(3, 3)
    plans = [
        dil.control.MPC(dynamics, cost, 6, 2, solver=solver)(x)
        for solver in (dil.control.DDP(), dil.Newton(linear_solver=dil.control.Riccati()), dil.Newton())
    ]
    assert relative(plans[1], plans[0]) < 1e-8
    assert relative(plans[2], plans[0]) < 1e-8


def test_structured_solvers_refuse_other_problems():
    with pytest.raises(ValueError, match=r"^solver=DDP\(\) knows the structure of a plan only"):
        dil.argmin(lambda y: y.square().sum(dim=1), torch.ones(1, 2), solver=dil.control.DDP())
    with pytest.raises(ValueError, match=r"^linear_solver=Riccati\(\) knows the structure of a plan only"):
        dil.root(lambda y: y, torch.ones(1, 2), linear_solver=dil.control.Riccati())


# DDP


def pendulum(x, u):
    speed = x[..., 1] + 0.05 * (9.81 * torch.sin(x[..., 0]) + 3 * u[..., 0] - 0.1 * x[..., 1])
    return torch.stack((x[..., 0] + 0.05 * speed, speed), dim=-1)


def swing_up(x, u):
    return 2 * (1 - torch.cos(x[..., 0])) + 0.1 * x[..., 1].square() + 0.01 * u[..., 0].square()


def van_der_pol(x, u):
    a, b = x.unbind(dim=-1)
    return torch.stack((a + 0.1 * b, b + 0.1 * ((1 - a.square()) * b - a + u[..., 0])), dim=-1)


def quadratic(x, u):
    return x.square().sum(dim=-1) + 0.1 * u.square().sum(dim=-1)


def cart_pole(x, u):
    position, speed, angle, turn = x.unbind(dim=-1)
    sine, cosine = torch.sin(angle), torch.cos(angle)
    push = (10 * u[..., 0] + 0.05 * turn.square() * sine) / 1.1
    turning = (9.81 * sine - cosine * push) / (0.5 * (4 / 3 - 0.1 * cosine.square() / 1.1))
    speed = speed + 0.05 * (push - 0.05 * turning * cosine / 1.1)
    turn = turn + 0.05 * turning
    return torch.stack((position + 0.05 * speed, speed, angle + 0.05 * turn, turn), dim=-1)


def upright(x, u):
    position, speed, angle, turn = x.unbind(dim=-1)
    return 0.5 * position**2 + 0.05 * speed**2 + 5 * (1 - torch.cos(angle)) + 0.05 * turn**2 + 0.01 * u[..., 0] ** 2


SWINGS = {  # dynamics, cost, n, H, bound, the largest number of steps
    "pendulum": (pendulum, swing_up, (3.0, 4.0), 20, None, 20),
    "pendulum, bounded": (pendulum, swing_up, (3.0, 4.0), 30, 1.0, 60),
    "van der Pol, bounded": (van_der_pol, quadratic, (2.0, 2.0), 30, 0.5, 20),
    "cart-pole, bounded": (cart_pole, upright, (1.0, 1.0, 3.0, 2.0), 20, 1.0, 100),
}


@pytest.mark.parametrize("name", SWINGS)
def test_ddp_converges_from_random_starts(name):
    dynamics, cost, size, H, bound, most = SWINGS[name]
    x = (2 * torch.rand(60, len(size)) - 1) * torch.tensor(size)
    bounds = None if bound is None else (-bound, bound)
    mpc = dil.control.MPC(dynamics, cost, H, 1, bounds=bounds, on_failure="ignore")
    with torch.no_grad():
        u = mpc(x, torch.randn(60, H, 1))
    status, stats = mpc.report.forward
    assert bool((status == Status.converged).all())
    assert int(stats.steps.max()) <= most
    if bound is not None:
        assert float(u.abs().max()) <= bound
        assert float((u.abs() == bound).double().mean()) > 0.3


@pytest.mark.parametrize("name", ["van der Pol, bounded", "pendulum, bounded"])
def test_ddp_finds_the_cost_that_scipy_finds_from_its_answer(name):
    dynamics, cost, size, H, bound, _ = SWINGS[name]
    plan = Plan(dynamics, cost, None, (H, 1), None)
    x = 0.5 * (2 * torch.rand(3, len(size)) - 1) * torch.tensor(size)
    with torch.no_grad():
        u = dil.control.MPC(dynamics, cost, H, 1, bounds=(-bound, bound))(x)
    for i in range(3):

        def value(vector, i=i):
            y = torch.tensor(vector).requires_grad_()
            total = plan(y.view(1, H, 1), x[i : i + 1]).sum()
            return total.item(), torch.autograd.grad(total, y)[0].numpy()

        start = u[i].flatten().numpy() + 1e-2 * np.cos(np.arange(H))
        found = scipy.optimize.minimize(value, start, jac=True, method="L-BFGS-B", bounds=[(-bound, bound)] * H)
        ours = value(u[i].flatten().numpy())[0]
        assert abs(ours - found.fun) < COST * abs(found.fun)


def test_ddp_converges_quadratically():
    mpc = dil.control.MPC(pendulum, swing_up, 10, 1, solver=dil.control.DDP(rtol=1e-13))
    with torch.no_grad():
        mpc(torch.tensor([[1.0, 0.5]]))
    residuals = torch.stack(mpc.report.forward.stats.history).flatten()
    late = residuals[(residuals < 1e-1) & (residuals > 1e-7)]
    following = residuals[1:][(residuals[:-1] < 1e-1) & (residuals[:-1] > 1e-7)]
    assert len(late) >= 1
    assert bool((following < 10 * late**1.7).all())


def test_the_closed_loop_path_tames_an_unstable_system():
    A = torch.tensor([[1.15, 0.3], [0.0, 1.1]])
    B = torch.tensor([[0.0], [1.0]])

    def dynamics(x, u):
        return x @ A.T + u @ B.T + 0.05 * x**2

    x = torch.tensor([[0.01, 0.0], [0.005, -0.002]])
    steps = {}
    for solver in (dil.control.DDP(), dil.Newton()):
        mpc = dil.control.MPC(dynamics, quadratic, 20, 1, solver=solver, on_failure="ignore")
        with torch.no_grad():
            u = mpc(x)
        steps[type(solver).__name__] = mpc.report.forward.stats.steps
        if isinstance(solver, dil.control.DDP):
            assert bool(mpc.report.forward.converged.all())
            assert float(u.abs().max()) < 1
    assert bool((steps["DDP"] <= steps["Newton"]).all())


@pytest.mark.parametrize("radius", [1.3, 1.6, 2.0])
def test_ddp_solves_unstable_systems_over_long_horizons(radius):
    """The Hessian has a condition of radius^100: ‖F‖ alone would call the first step converged."""
    A, B = torch.randn(3, 3), torch.randn(3, 1)
    A = radius * A / torch.linalg.eigvals(A).abs().max()
    x, P, gains = torch.randn(4, 3), torch.eye(3), []
    for _ in range(50):
        K = torch.linalg.solve(0.1 * torch.eye(1) + B.T @ P @ B, B.T @ P @ A)
        P = torch.eye(3) + A.T @ P @ (A - B @ K)
        gains.append(K)
    now, expected = x, []
    for K in reversed(gains):
        expected.append(-now @ K.T)
        now = now @ A.T + expected[-1] @ B.T
    mpc = dil.control.MPC(lambda x, u: x @ A.T + u @ B.T, quadratic, 50, 1)
    with torch.no_grad():
        u = mpc(x)
    assert relative(u, torch.stack(expected, dim=1)) < 1e-8
    assert int(mpc.report.forward.stats.steps.max()) <= 5


def test_a_start_at_a_maximum_is_reported():
    mpc = dil.control.MPC(lambda x, u: x + u, lambda x, u: torch.cos(u[..., 0]) + 0 * x[..., 0], 3, 1, on_failure="ignore")
    mpc(torch.zeros(2, 1))
    assert mpc.report.forward.status.tolist() == [Status.negative_curvature] * 2


def test_its_stand_in_has_its_settings():
    """Under vmap, where the plan is out of reach, `Auto` solves, with the preconditioner and by the products asked for."""
    seen = []

    def precondition(r):
        seen.append(r.shape)
        return r / 3

    A = 3 * torch.eye(200) + torch.diag(torch.linspace(0, 1, 200))
    operator, b = Operator(lambda y: y @ A, torch.zeros(1, 200), True), torch.ones(1, 200)
    asked, strategies = operator.product, []
    operator.product = lambda transpose, strategy="backward": (strategies.append(strategy), asked(transpose, strategy))[1]
    result = dil.control.Riccati(preconditioner=precondition, product="forward").solve(operator, b)
    assert (result.value - b / torch.diagonal(A)).abs().max() <= LINEAR
    assert seen and set(strategies) == {"forward"}
