"""Plans for systems that amplify a million times over the horizon: their numbers, their gradients, what is said of them."""

import pytest
import torch

from torchdil.control import MPC, lqr

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
