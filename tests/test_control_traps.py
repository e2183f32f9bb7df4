"""What goes wrong quietly: things that change between forward and backward, bounds that are close, samples that are lost."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import torchdil as dil
from torchdil.control import MPC, Riccati, Stein, dare

VALUE = 1e-8  # relative, of plans and gradients by different ways
F64 = torch.float64


def pendulum(x, u):
    speed = x[:, 1] + 0.1 * (3.0 * u[:, 0] - 9.82 * x[:, 0].sin())
    return torch.stack((x[:, 0] + 0.1 * speed, speed), dim=1)


def states(samples, seed=0):
    return torch.randn(samples, 2, generator=torch.Generator().manual_seed(seed), dtype=F64)


class Follow(nn.Module):
    """A cost whose goal is an attribute, as in path following."""

    def __init__(self):
        super().__init__()
        self.goal = torch.tensor(0.5, dtype=F64)
        self.weight = nn.Parameter(torch.tensor(0.3, dtype=F64))

    def forward(self, x, u):
        return (x[:, 0] - self.goal) ** 2 + self.weight * u[:, 0] ** 2


def system(seed=0, samples=()):
    generator = torch.Generator().manual_seed(seed)
    A = torch.randn(*samples, 2, 2, generator=generator, dtype=F64)
    return A, torch.randn(*samples, 2, 1, generator=generator, dtype=F64), torch.eye(2, dtype=F64), torch.eye(1, dtype=F64)


# What has changed since the forward pass


def test_a_goal_that_is_replaced_before_the_backward_pass_does_not_change_the_gradient():
    def gradient(replaced):
        cost = Follow()
        mpc = MPC(pendulum, cost, 8, 1)
        u = mpc(states(3))
        if replaced:
            cost.goal = torch.tensor(2.0, dtype=F64)
        (grad,) = torch.autograd.grad(u.sum(), cost.weight)
        assert mpc.report.backward.converged.all()
        return grad

    torch.testing.assert_close(gradient(True), gradient(False), rtol=VALUE, atol=0)


def test_a_buffer_for_observations_may_be_used_again():
    cost, buffer = Follow(), states(3)
    mpc = MPC(pendulum, cost, 8, 1)
    (expected,) = torch.autograd.grad(mpc(buffer.clone()).sum(), cost.weight)
    u = mpc(buffer)
    buffer.copy_(states(3, seed=1))
    (grad,) = torch.autograd.grad(u.sum(), cost.weight)
    torch.testing.assert_close(grad, expected, rtol=VALUE, atol=0)


def test_parameters_swapped_for_one_call_count_in_its_backward_pass_though_a_closure_holds_them():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(0.3, dtype=F64))
            self.mpc = MPC(pendulum, lambda x, u: (x[:, 0] - 0.5) ** 2 + self.w * u[:, 0] ** 2, 8, 1)

        def forward(self, x):
            return self.mpc(x)

    model, w = Model(), torch.tensor(0.6, dtype=F64, requires_grad=True)
    (grad,) = torch.autograd.grad(torch.func.functional_call(model, {"w": w}, states(3)).sum(), w)
    model.w.data.fill_(0.6)
    (expected,) = torch.autograd.grad(model(states(3)).sum(), model.w)
    torch.testing.assert_close(grad, expected, rtol=VALUE, atol=0)


def test_a_bound_changed_in_place_after_the_plan():
    high = torch.full((1,), 0.2, dtype=F64)
    cost = Follow()
    mpc = MPC(pendulum, cost, 8, 1, bounds=(-1.0, high))
    (expected,) = torch.autograd.grad(mpc(states(3)).sum(), cost.weight)
    u = mpc(states(3))
    mpc.high.fill_(0.9)
    (grad,) = torch.autograd.grad(u.sum(), cost.weight)
    torch.testing.assert_close(grad, expected, rtol=VALUE, atol=0)


def test_a_matrix_changed_in_place_after_dare_is_an_error():
    A, B, Q, R = system()
    Q.requires_grad_()
    S = dare(A, B, Q, R)
    A.mul_(0.5)
    with pytest.raises(RuntimeError, match="changed in place between forward and backward"):
        S.sum().backward()


# Structured solvers where they do not belong


@pytest.mark.parametrize("linear_solver", [Stein(), Riccati()])
def test_structured_linear_solvers_refuse_other_problems(linear_solver):
    a = torch.ones(3, 1, dtype=F64, requires_grad=True)
    with pytest.raises(ValueError, match=r"knows the structure of a (dare|plan) only"):
        dil.root(lambda y, a: a * y**3 + y - a, torch.zeros(3, 1, dtype=F64), (a,), batch_dims=1, linear_solver=linear_solver)


# Bounds


@pytest.mark.parametrize(("dtype", "low", "high"), [(F64, 0.0, 1e6), (F64, 0.0, float("inf")), (torch.float32, 0.0, 2.0)])
def test_a_free_control_next_to_a_bound_is_free(dtype, low, high):
    """The minimum is inside, by less than the square root of a rounding."""
    inside = torch.logspace(-7, -3, 50).to(dtype)
    goal = inside.clone().requires_grad_()
    mpc = MPC(lambda x, u: x + u, lambda x, u: (u[:, 0] - goal) ** 2, 1, 1, terminal=lambda x: 0 * x[:, 0], bounds=(low, high))
    u = mpc(torch.zeros(50, 1, dtype=dtype))
    torch.testing.assert_close(u.detach().flatten(), inside)
    assert mpc.report.forward.stats.steps.max() <= 2
    (grad,) = torch.autograd.grad(u.sum(), goal)
    torch.testing.assert_close(grad, torch.ones_like(grad))


@pytest.mark.parametrize("planner", [dil.RandomShooting, dil.CEM, dil.MPPI])
def test_a_sampler_with_wider_bounds_of_its_own_keeps_those_of_the_controls(planner):
    def cost(x, u):
        return (x[:, 0] - 5) ** 2

    mpc = MPC(pendulum, cost, 5, 1, bounds=(-1.0, 1.0), solver=planner(bounds=(-3.0, 3.0), max_steps=3), on_failure="ignore")
    assert mpc(states(3)).abs().max() <= 1
    apart = MPC(pendulum, cost, 5, 1, bounds=(-1.0, 1.0), solver=planner(bounds=(2.0, 3.0)))
    with pytest.raises(ValueError, match="must overlap"):
        apart(states(3))


def test_bounds_that_are_tensors_belong_to_the_module():
    low, high = nn.Parameter(torch.tensor([-0.2], dtype=F64)), torch.tensor([0.2], dtype=F64)
    mpc = MPC(pendulum, Follow(), 8, 1, bounds=(low, high))
    assert any(p is low for p in mpc.parameters()) and set(mpc.state_dict()) >= {"low", "high"}
    mpc(states(3)).sum().backward()
    assert low.grad is not None
    assert copy.deepcopy(mpc).low is not low


# Samples that are lost


def test_a_state_that_is_no_number_leaves_shared_parameters_alone():
    x = states(3)
    x[1, 0] = torch.nan
    good, cost = [0, 2], Follow()
    (expected,) = torch.autograd.grad(MPC(pendulum, cost, 8, 1)(x[good]).sum(), cost.weight)
    x.requires_grad_()
    mpc = MPC(pendulum, cost, 8, 1, on_failure="zero", bounds=(-50.0, 50.0))
    own, shared = torch.autograd.grad(mpc(x).sum(), (x, cost.weight))
    assert mpc.report.forward.status.tolist()[1] == dil.Status.non_finite
    assert own[1].tolist() == [0.0, 0.0]
    torch.testing.assert_close(shared, expected, rtol=VALUE, atol=0)


def test_samples_without_a_cause_are_named_beside_those_that_have_one():
    from torchdil.solution import Outcome, Report, Stats, Status, handle_failure

    status = torch.tensor([0, int(Status.non_finite), int(Status.not_stationary)])
    zeros = torch.zeros(3)
    stats = Stats("test", status, zeros, zeros, causes=[("B is zero", torch.tensor([False, True, False]))])
    with pytest.raises(dil.ConvergenceError, match=r"B is zero \(sample 1\); the point returned does not .* \(sample 2\)"):
        handle_failure("forward", Outcome(status, stats), "raise", Report())


def test_one_system_near_the_unit_circle_is_solved_as_in_a_batch():
    one = torch.ones(1, 1, dtype=F64)
    S = dare(one, one, 1e-15 * one, one, on_failure="raise")
    pair = dare(one.expand(2, 1, 1), one, 1e-15 * one, one, on_failure="raise")
    torch.testing.assert_close(S, pair[0], rtol=1e-6, atol=0)


# The rest


def test_vmap_with_one_copy():
    mpc, x = MPC(pendulum, Follow(), 4, 1), states(3)
    torch.testing.assert_close(torch.vmap(mpc)(x[None]), mpc(x)[None], rtol=VALUE, atol=VALUE)


@pytest.mark.parametrize("horizon", [0, 2.5, True, "4"])
def test_a_horizon_is_checked_whenever_it_is_set(horizon):
    mpc = MPC(pendulum, Follow(), 4, 1)
    with pytest.raises(ValueError, match="horizon must be an integer >= 1"):
        mpc.horizon = horizon
    assert mpc.horizon == 4


@pytest.mark.parametrize("radius", [1.2, 1.4])
def test_ill_conditioned_plans_are_solved_backward_as_well_as_by_factorising(radius):
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(4, 4, generator=generator, dtype=F64)
    A = radius * A / torch.linalg.eigvals(A).abs().max()
    B = torch.randn(4, 3, generator=generator, dtype=F64)
    x = torch.randn(32, 4, generator=generator, dtype=F64).requires_grad_()
    found = []
    for linear_solver in (None, dil.Dense()):
        mpc = MPC(
            lambda x, u: x @ A.T + u @ B.T,
            lambda x, u: x.square().sum(1) + 1e-3 * u.square().sum(1),
            20,
            3,
            linear_solver=linear_solver,
        )
        u = mpc(x)
        found.append(torch.autograd.grad((u * torch.linspace(-1, 1, u.numel(), dtype=F64).view_as(u)).sum(), x)[0])
        assert mpc.report.backward.converged.all()
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6 * float(found[1].abs().max()))


def test_the_graph_of_a_plan_is_freed_with_the_plan():
    """Not by the garbage collector: on a GPU it does not see what there is to collect."""
    gc.collect()
    gc.disable()
    try:
        cost = Follow()
        mpc = MPC(pendulum, cost, 8, 1)
        u = mpc(states(3))
        u.sum().backward()
        node = weakref.ref(mpc.report.backward.stats)
        mpc(states(3)).sum().backward()
        del u
        assert node() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("solver", [None, dil.Newton()], ids=["DDP", "Newton"])
@pytest.mark.parametrize("bounds", [None, (-0.5, 0.5)], ids=["free", "bounded"])
def test_a_plan_that_creeps_along_a_kink_stops_and_says_so(bounds, solver):
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.ReLU(), torch.nn.Linear(16, 2)).double()
    x0 = torch.randn(3, 2, dtype=torch.float64)
    mpc = dil.control.MPC(
        lambda x, u: x + 0.3 * net(torch.cat((x, u), dim=-1)),
        lambda x, u: x.square().sum(dim=-1) + 0.1 * u.square().sum(dim=-1),
        8,
        1,
        bounds=bounds,
        solver=solver,
    )
    with pytest.warns(dil.ConvergenceWarning, match=r"derivative of dynamics.* jumps.*relu"):
        mpc(x0)
    assert int(mpc.report.forward.stats.steps.max()) < 80


@pytest.mark.parametrize("solver", [None, dil.Newton()], ids=["DDP", "Newton"])
def test_a_long_plan_with_bounds_is_not_said_to_creep(solver):
    """Bounds begin and cease to hold controls on the way, where F jumps, too."""

    def pendulum(x, u):
        angle, speed = x.unbind(-1)
        speed = speed + 0.05 * (9.81 * angle.sin() + 3 * u[..., 0])
        return torch.stack((angle + 0.05 * speed, speed), dim=-1)

    def cost(x, u):
        return 2 - 2 * x[..., 0].cos() + 0.1 * x[..., 1] ** 2 + 0.01 * u.square().sum(dim=-1)

    x0 = torch.tensor([[3.0, 0.0], [1.0, -0.5], [-2.0, 1.0]], dtype=torch.float64)
    mpc = dil.control.MPC(pendulum, cost, 60, 1, bounds=(-2.0, 2.0), solver=solver, on_failure="ignore")
    mpc(x0)
    assert not mpc.report.forward.stats.causes


@pytest.mark.parametrize("gap", [1e-7, 1e-8, 1e-9])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_system_that_is_stable_by_little_costs_nothing_where_nothing_is_paid_for(samples, gap):
    A = torch.full((samples, 1, 1), 1 - gap, dtype=F64)
    one = torch.ones_like(A)
    S = dare(A, one, torch.zeros_like(A), one, on_failure="raise")
    assert torch.equal(S, torch.zeros_like(A))


@pytest.mark.parametrize("entry", [0.0, 1.0])
def test_a_system_on_the_unit_circle_that_nothing_is_paid_for_is_named(entry):
    A = torch.tensor([[1.0, entry], [0.0, 1.0]], dtype=F64)
    with pytest.raises(dil.ConvergenceError, match="Q does not see"):
        dare(A, torch.eye(2, dtype=F64), torch.zeros_like(A), torch.eye(2, dtype=F64), on_failure="raise")


@pytest.mark.parametrize("cost", [lambda x, u: x.square().sum(dim=1), lambda x, u: (x + 0 * u.detach()).square().sum(dim=1)])
def test_a_cost_without_the_control_is_told_by_its_name(cost):
    with pytest.raises(ValueError, match=r"^cost must depend on u differentiably"):
        MPC(lambda x, u: 0.9 * x, cost, 4, 1)(torch.ones(1, 2, dtype=F64))
