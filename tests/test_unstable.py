"""Plans for systems that amplify a million times over the horizon: their numbers, their gradients, what is said of them."""

import pytest
import torch

import torchdil as dil
from torchdil.control import DDP, MPC, Riccati, lqr

F32, F64 = torch.float32, torch.float64
# Relative, in float32: of a plan, as DDP is asked for it, and of its gradient, whose error is a few times that of the plan.
PLAN, GRADIENT = 1e-5, 5e-5


def states(seed=0, dtype=F64):
    return torch.randn(3, 2, generator=torch.Generator().manual_seed(seed), dtype=F64).to(dtype)


def unstable(growth, dtype=F64, **options):
    """x' = growth x + u, cost ‖x‖² + ‖u‖², over 20 steps, and its matrix A."""
    A = (growth * torch.eye(2, dtype=dtype)).requires_grad_()
    return MPC(lambda x, u: x @ A.T + u, lambda x, u: (x**2).sum(dim=1) + (u**2).sum(dim=1), 20, 2, **options), A


def regulator(growth, x):
    """The same by the Riccati recursion in float64, and its matrix A."""
    A, one = (growth * torch.eye(2, dtype=F64)).requires_grad_(), torch.eye(2, dtype=F64)
    return lqr(A, one, one, one, horizon=20).rollout(x.double())[1], A


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("growth", [1.1, 1.3, 2.0])
def test_a_plan_in_single_precision_is_as_good_as_its_numbers(growth, seed):
    x = states(seed, F32)
    mpc, A = unstable(growth, F32)
    plan, (exact, A_exact) = mpc(x), regulator(growth, x)
    assert mpc.report.forward.converged.all()
    for u, known in zip(plan, exact, strict=True):
        assert (u - known).norm() <= PLAN * known.norm()
        (grad,) = torch.autograd.grad(u[0].sum(), A, retain_graph=True)
        (known_grad,) = torch.autograd.grad(known[0].sum(), A_exact, retain_graph=True)
        assert (grad - known_grad).norm() <= GRADIENT * known_grad.norm()


def test_numbers_that_are_too_large_for_their_dtype_are_named():
    mpc, _ = unstable(3.0, F32)
    with pytest.warns(dil.ConvergenceWarning, match="too large for torch.float32: use float64 or a shorter horizon"):
        mpc(states(dtype=F32))


def pendulum(x, u):
    speed = x[:, 1] + 0.1 * (3.0 * u[:, 0] - 9.82 * x[:, 0].sin())
    return torch.stack((x[:, 0] + 0.1 * speed, speed), dim=1)


def upright(x, u):
    return 1 + x[:, 0].cos() + 0.01 * x[:, 1] ** 2 + 0.001 * u[:, 0] ** 2


def swing_up(start, **options):
    """A plan of bounded controls, nearly all at their bounds, and where it starts."""
    return MPC(pendulum, upright, 60, 1, bounds=(-1.0, 1.0), **options), torch.tensor([start], dtype=F64)


def test_what_unstable_dynamics_amplify_is_no_jump():
    mpc, x = swing_up([3.0, 0.5], solver=DDP(max_steps=3))
    with pytest.warns(dil.ConvergenceWarning, match="after 3 steps") as told:
        mpc(x)
    assert not any("jumps" in str(warning.message) for warning in told)


def test_a_free_control_that_is_next_to_its_bound_does_not_end_the_search():
    mpc, x = swing_up([-2.3104, -0.3733])
    mpc(x)
    assert mpc.report.forward.converged.all()


@pytest.mark.parametrize("growth", [1.5, 3.0])
def test_a_right_gradient_is_called_right(growth):
    x = states()
    mpc, A = unstable(growth)
    (grad,) = torch.autograd.grad(mpc(x)[:, 0].sum(), A)
    exact, A_exact = regulator(growth, x)
    (known,) = torch.autograd.grad(exact[:, 0].sum(), A_exact)
    assert (grad - known).norm() <= 1e-10 * known.norm()
    found = dil.check_gradient(mpc, x)
    assert found.ok, found
    assert max(found.errors.values()) <= 1e-5


@pytest.mark.parametrize(("option", "blame"), [("solver", "forward solve"), ("linear_solver", "backward solve")])
def test_a_solve_that_is_inexact_is_still_blamed(option, blame):
    loose = {"solver": dil.GradientDescent(rtol=1e-2), "linear_solver": Riccati(damping=0.3)}[option]
    mpc, _ = unstable(1.1, **{option: loose})
    found = dil.check_gradient(mpc, states())
    assert found.blame == blame, found
