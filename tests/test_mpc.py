"""`MPC`: plans, their gradients with and without active bounds, every solver, closed loops, bad input."""

import copy
import pickle

import pytest
import scipy.optimize
import torch
from torch import nn

import torchdil as dil
from torchdil import Status
from torchdil.control import DDP, MPC, Riccati
from torchdil.control.plan import Plan

# Relative, of a plan and its gradients where both are closed forms.
EXACT = 1e-8
# Relative, of gradients against central differences through a tight solve.
DIFFERENCES = 1e-5
FLOAT32 = 2e-3

SIZES = [(2, 1, 1), (2, 1, 2), (3, 2, 10), (1, 2, 10), (2, 1, 50)]  # n, m, H


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def relative(a, b):
    return float((a - b).detach().norm() / b.detach().norm())


# Linear-quadratic problems


class Linear:
    """x' = A x + B u, cost ½ (x - target)ᵀQ(x - target) + ½ uᵀRu: a quadratic program in u, stated densely."""

    def __init__(self, n, m, H, samples=3):
        A, B = torch.randn(n, n), torch.randn(n, m)
        A = 0.95 * A / torch.linalg.matrix_norm(A, 2)
        Q, R = torch.randn(n, n), torch.randn(m, m)
        parts = A, B, Q @ Q.T + torch.eye(n), R @ R.T + torch.eye(m), torch.randn(n), torch.randn(samples, n)
        self.A, self.B, self.Q, self.R, self.target, self.x = (part.requires_grad_() for part in parts)
        self.n, self.m, self.H = n, m, H

    @property
    def parameters(self):
        return self.A, self.B, self.Q, self.R, self.target, self.x

    def dynamics(self, x, u):
        return x @ self.A.T + u @ self.B.T

    def cost(self, x, u):
        away = x - self.target
        return 0.5 * ((away @ self.Q * away).sum(dim=-1) + (u @ self.R * u).sum(dim=-1))

    def dense(self):
        """(Hm, Hm), (B, Hm): the Hessian and the gradient at u = 0, from the powers of A."""
        powers = [torch.eye(self.n)]
        for _ in range(self.H):
            powers.append(self.A @ powers[-1])
        zero = torch.zeros(self.n, self.m)
        rows = [torch.cat([powers[t - s] @ self.B if s <= t else zero for s in range(self.H)], dim=1) for t in range(self.H)]
        G, free = torch.cat(rows), torch.cat([self.x @ power.T - self.target for power in powers[1:]], dim=1)
        Q = torch.block_diag(*[0.5 * (self.Q + self.Q.T)] * self.H)
        return G.T @ Q @ G + torch.block_diag(*[0.5 * (self.R + self.R.T)] * self.H), free @ Q @ G

    def exact(self, bounds=None):
        """The plan, (B, H, m), differentiable; in a box the active set is SciPy's."""
        H, g = self.dense()
        plans = []
        for row in g:
            if bounds is None:
                plans.append(torch.linalg.solve(H, -row))
                continue
            low, high = bounds
            factor = torch.linalg.cholesky(H.detach())
            target = torch.linalg.solve_triangular(factor, -row.detach().unsqueeze(1), upper=False).squeeze(1)
            found = scipy.optimize.lsq_linear(factor.T.numpy(), target.numpy(), (low, high), method="bvls", tol=1e-14)
            at_low, at_high = torch.tensor(found.active_mask == -1), torch.tensor(found.active_mask == 1)
            held = torch.where(at_low, low, torch.where(at_high, high, 0.0))
            free = ~(at_low | at_high)
            inner = torch.linalg.solve(H[free][:, free], -(row + H @ held)[free])
            plans.append(held.index_put((free,), inner))
        return torch.stack(plans).view(len(g), self.H, self.m)


@pytest.mark.parametrize(("n", "m", "H"), SIZES)
@pytest.mark.parametrize("bounded", [False, True])
def test_a_linear_quadratic_plan_and_its_gradients_are_exact(n, m, H, bounded):
    problem = Linear(n, m, H)
    largest = float(problem.exact().detach().abs().max())
    bounds = (-0.4 * largest, 0.5 * largest) if bounded else None
    u, exact = MPC(problem.dynamics, problem.cost, H, m, bounds=bounds)(problem.x), problem.exact(bounds)
    assert relative(u, exact) < EXACT
    if bounds is not None:
        assert 0 < int(((u == bounds[0]) | (u == bounds[1])).sum()) < u.numel()
    weights = torch.randn_like(u)
    ours = torch.autograd.grad((weights * u).sum(), problem.parameters)
    theirs = torch.autograd.grad((weights * exact).sum(), problem.parameters, allow_unused=True)
    for a, b in zip(ours, theirs, strict=True):
        # Q and R enter by their symmetric parts only.
        assert float((a - b).norm()) < EXACT * max(1.0, float(b.norm()))


def test_the_cost_may_depend_on_a_time_in_the_state():
    problem = Linear(2, 1, 6)
    weight = torch.rand(6) + 0.5

    def dynamics(x, u):
        return torch.cat((problem.dynamics(x[:, :2], u), x[:, 2:] + 1), dim=1)

    def cost(x, u):
        now = weight[x[:, 2].long().clamp(0, 5)]
        return now * u.square().sum(dim=1) + x[:, :2].square().sum(dim=1)

    u = MPC(dynamics, cost, 6, 1)(torch.cat((problem.x, torch.zeros(3, 1)), dim=1))
    powers = [torch.linalg.matrix_power(problem.A, t) for t in range(7)]
    rows = [torch.cat([powers[t - s] @ problem.B if s <= t else torch.zeros(2, 1) for s in range(6)], dim=1) for t in range(6)]
    G, free = torch.cat(rows), torch.cat([problem.x @ power.T for power in powers[1:]], dim=1)
    exact = -torch.linalg.solve(G.T @ G + torch.diag(weight), (free @ G).T).T
    assert relative(u.flatten(1), exact) < EXACT


# Nonlinear problems


class Pendulum(nn.Module):
    def __init__(self):
        super().__init__()
        self.gravity = nn.Parameter(torch.tensor(9.81))

    def forward(self, x, u):
        speed = x[..., 1] + 0.1 * (self.gravity * torch.sin(x[..., 0]) + 3 * u[..., 0])
        return torch.stack((x[..., 0] + 0.1 * speed, speed), dim=-1)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))

    def forward(self, x, u):
        return x + 0.3 * self.layers(torch.cat((x, u), dim=-1))


class Target(nn.Module):
    def __init__(self):
        super().__init__()
        self.goal = nn.Parameter(torch.tensor([0.2, -0.1]))

    def forward(self, x, u):
        return (x - self.goal).square().sum(dim=-1) + 0.05 * u.square().sum(dim=-1) + 0.01 * u.pow(4).sum(dim=-1)


MODELS = {"pendulum": Pendulum, "network": Network}


def make(model, bounds=None, H=6, **settings):
    torch.manual_seed(1)
    return MPC(MODELS[model](), Target(), H, 1, bounds=bounds, **settings)


def state(samples=3):
    return 0.6 * torch.randn(samples, 2, generator=torch.Generator().manual_seed(2))


def differences(loss, tensors, step=1e-5):
    """Central differences of a loss in every entry of some tensors."""
    grads = []
    for t in tensors:
        grad = torch.zeros_like(t)
        for i in range(t.numel()):
            ends = []
            for sign in (1, -1):
                with torch.no_grad():
                    kept = t.view(-1)[i].item()
                    t.view(-1)[i] = kept + sign * step
                    ends.append(loss().item())
                    t.view(-1)[i] = kept
            grad.view(-1)[i] = (ends[0] - ends[1]) / (2 * step)
        grads.append(grad)
    return grads


@pytest.mark.parametrize(("model", "bound"), [("pendulum", None), ("pendulum", 2.0), ("network", None), ("network", 0.5)])
def test_nonlinear_gradients_equal_differences_through_a_tight_solve(model, bound):
    low, high = -torch.full((6, 1), bound or 0.0), torch.full((1,), bound or 0.0)
    bounds = None if bound is None else (low.requires_grad_(), high.requires_grad_())
    mpc, x = make(model, bounds, solver=DDP(rtol=1e-13)), state().requires_grad_()
    weights = torch.randn(3, 6, 1)
    tensors = [x, *(p for p in mpc.parameters() if p.numel() <= 16), *(() if bounds is None else bounds)]

    def loss():
        return (weights * mpc(x)).sum()

    u = mpc(x)
    if bound is not None:
        assert 0 < int((u.abs() == bound).sum()) < u.numel()
    ours = torch.autograd.grad(loss(), tensors, materialize_grads=True)
    for a, b in zip(ours, differences(loss, tensors), strict=True):
        assert float((a - b).norm()) < DIFFERENCES * max(1.0, float(b.norm()))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("bounds", [None, (-0.5, 0.5)])
def test_gradcheck_to_second_order_and_forward_mode(model, bounds):
    mpc, x = make(model, bounds, H=3, solver=DDP(rtol=1e-13)), state(2).requires_grad_()
    assert torch.autograd.gradcheck(mpc, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(mpc, x)


@pytest.mark.parametrize("bounds", [None, (-0.5, 0.5)])
def test_torch_func_sees_the_same_gradients(bounds):
    mpc, x = make("network", bounds), state()
    parameters = dict(mpc.named_parameters())

    def loss(parameters, x):
        return torch.func.functional_call(mpc, parameters, (x,)).square().sum()

    ours = torch.func.grad(loss, argnums=(0, 1))(parameters, x)
    leaf = x.clone().requires_grad_()
    theirs = torch.autograd.grad(mpc(leaf).square().sum(), [*parameters.values(), leaf])
    for a, b in zip([*ours[0].values(), ours[1]], theirs, strict=True):
        assert relative(a, b) < EXACT
    jacobian = torch.func.jacrev(mpc)(x)
    assert relative(jacobian, torch.func.jacfwd(mpc)(x)) < EXACT
    assert float(jacobian[0, :, :, 1].detach().abs().max()) == 0
    each = torch.vmap(mpc)(x)
    assert relative(each, mpc(x)) < 1e-7


def test_closures_may_hold_a_row_for_each_sample():
    goals = torch.randn(3, 2, requires_grad=True)
    pendulum = Pendulum()
    x = state()

    def cost(x, u, goals=goals):
        return (x - goals).square().sum(dim=1) + 0.1 * u.square().sum(dim=1)

    u = MPC(pendulum, cost, 4, 1)(x)
    (grad,) = torch.autograd.grad(u.square().sum(), goals)
    for i in range(3):
        goal = goals[i : i + 1].detach().requires_grad_()
        alone = MPC(pendulum, lambda x, u, goal=goal: cost(x, u, goal), 4, 1)(x[i : i + 1])
        (expected,) = torch.autograd.grad(alone.square().sum(), goal)
        assert relative(u[i : i + 1], alone) < EXACT and relative(grad[i : i + 1], expected) < EXACT


def test_modes_of_torch():
    mpc, x = make("network", (-0.5, 0.5)), state()
    plan = mpc(x)
    with torch.no_grad():
        assert not mpc(x).requires_grad and torch.equal(mpc(x), plan)
    with torch.inference_mode():
        assert torch.equal(mpc(x), plan)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        assert relative(mpc(x), plan) < EXACT
    single = mpc(x[0])
    assert single.shape == (6, 1) and relative(single, plan[0]) < EXACT
    assert mpc.report.forward.status.shape == ()
    empty = mpc(x[:0])
    assert empty.shape == (0, 6, 1)
    for copied in (copy.deepcopy(mpc), pickle.loads(pickle.dumps(mpc))):
        assert torch.equal(copied(x), plan)
    other = make("network", (-0.5, 0.5))
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(mpc.state_dict())
    assert torch.equal(other(x), plan)


def test_single_precision():
    mpc, x = make("network", (-0.5, 0.5)), state()
    exact = torch.autograd.grad(mpc(x).square().sum(), list(mpc.parameters()))
    mpc.float()
    u = mpc(x.float())
    assert u.dtype == torch.float32
    for a, b in zip(torch.autograd.grad(u.square().sum(), list(mpc.parameters())), exact, strict=True):
        assert relative(a.double(), b) < FLOAT32


@pytest.mark.xdist_group("compile")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning")
def test_torch_compile_goes_around_a_plan():
    torch._dynamo.reset()
    mpc, x = make("network"), state()
    compiled = torch.compile(lambda x: 2 * mpc(x), backend="eager")
    assert relative(compiled(x), 2 * mpc(x)) < EXACT
    inside = MPC(torch.compile(mpc.dynamics, backend="aot_eager"), mpc.cost, 6, 1)
    grads = [torch.autograd.grad(m(x).square().sum(), list(mpc.dynamics.parameters()))[0] for m in (mpc, inside)]
    assert relative(grads[1], grads[0]) < EXACT
    torch._dynamo.reset()


# Solvers


SOLVERS = {
    "DDP": DDP(),
    "Newton": dil.Newton(),
    "Newton, Riccati": dil.Newton(linear_solver=Riccati()),
    "GradientDescent": dil.GradientDescent(),
    "RandomShooting": dil.RandomShooting(particles=100, polish=DDP()),
    "RandomShooting, Newton": dil.RandomShooting(particles=100, polish=dil.Newton()),
    "CEM": dil.CEM(particles=100, max_steps=10, polish=DDP()),
    "CEM, GradientDescent": dil.CEM(particles=100, max_steps=10, polish=dil.GradientDescent()),
    "MPPI": dil.MPPI(particles=100, max_steps=10, polish=DDP()),
}


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("bounds", [None, (-0.5, 0.5)])
def test_every_solver_finds_the_same_plan_and_gradient(name, bounds):
    x = state().requires_grad_()
    results = []
    for solver in (SOLVERS[name], DDP(rtol=1e-13)):
        mpc = make("network", bounds, solver=solver)
        u = mpc(x)
        assert bool(mpc.report.forward.converged.all())
        results.append((u.detach(), torch.autograd.grad(u.square().sum(), x)[0]))
    for a, b in zip(*results, strict=True):
        assert relative(a, b) < 1e-6


@pytest.mark.parametrize("solver", [dil.RandomShooting(), dil.CEM(max_steps=3), dil.MPPI(max_steps=3)])
def test_a_planner_that_does_not_polish_reports_how_far_it_is_from_stationary(solver):
    mpc = make("network", (-0.9, 0.9), solver=solver, on_failure="ignore")
    x = state()
    u = mpc(x)
    status, stats = mpc.report.forward
    assert bool((status == Status.not_stationary).all())
    assert float(u.detach().abs().max()) <= 0.9
    slope = torch.func.grad(lambda u: Plan(mpc.dynamics, mpc.cost, None, (6, 1), None)(u, x).sum())(u).flatten(1)
    flat = u.flatten(1)
    slope = torch.where(((flat == 0.9) & (slope < 0)) | ((flat == -0.9) & (slope > 0)), 0.0, slope)
    assert relative(stats.residual, slope.norm(dim=1)) < EXACT


@pytest.mark.parametrize("solver", [dil.CEM(), dil.MPPI()], ids=repr)
def test_bounds_that_hold_or_let_go_are_no_kink_of_the_cost(solver):
    """What vanishes jumps there, but the cost is smooth; one that is not is still named."""

    def dynamics(x, u):
        return x + 0.1 * torch.cat((x[:, 1:], torch.sin(x[:, :1]) + u), -1)

    x = torch.tensor([[1.0, 0.0], [0.5, -1.0]])
    smooth = MPC(dynamics, lambda x, u: (x**2).sum(-1) + 0.1 * (u**2).sum(-1), 5, 1, bounds=(-1.0, 1.0), solver=solver)
    with pytest.warns(dil.ConvergenceWarning) as caught:
        smooth(x)
    assert "jumps" not in str(caught[0].message)
    kinked = MPC(
        dynamics, lambda x, u: (x**2).sum(-1) + 10 * u.abs().sum(-1), 5, 1, bounds=(-1.0, 1.0), solver=dil.control.DDP()
    )
    with pytest.warns(dil.ConvergenceWarning, match="the derivative of cost jumps at the answer"):
        kinked(x)


def test_a_callable_may_find_the_plan():
    mpc, x = make("network", (-0.5, 0.5)), state().requires_grad_()
    answer = mpc(x).detach()
    foreign = make("network", (-0.5, 0.5), solver=lambda fn, u0: answer)
    grads = [torch.autograd.grad(m(x).square().sum(), x)[0] for m in (mpc, foreign)]
    assert relative(grads[1], grads[0]) < EXACT


@pytest.mark.parametrize("solver", [dil.LBFGS(), dil.SciPy("BFGS"), dil.CEM(polish=dil.LBFGS())])
def test_solvers_that_cannot_keep_bounds_say_so(solver):
    with pytest.raises(ValueError, match=r"\(\) cannot keep bounds: use"):
        make("network", (-0.5, 0.5), solver=solver)(state())


def test_one_sided_bounds():
    x = state()
    free = make("network")(x)
    u = make("network", (float("-inf"), 0.1))(x)
    assert float(u.detach().max()) == 0.1 and float(free.detach().max()) > 0.1
    with pytest.raises(ValueError, match=r"^CEM\(\) cannot draw between infinite bounds"):
        make("network", (float("-inf"), 0.1), solver=dil.CEM())(x)


# Closed loops


def test_act_starts_from_the_last_plan():
    mpc, x = make("pendulum", H=10), state()
    first = mpc.act(x)
    cold = int(mpc.report.forward.stats.steps.max())
    with torch.no_grad():
        ahead = mpc.dynamics(x, first)
    again = mpc.act(ahead)
    assert int(mpc.report.forward.stats.steps.max()) < cold
    assert relative(again, mpc(ahead)[:, 0]) < 1e-7
    for other in (state(2), state(3).float().double()[0]):
        assert mpc.act(other).shape == (*other.shape[:-1], 1)
    mpc.horizon = 4
    assert mpc.act(x).shape == (3, 1) and mpc(x).shape == (3, 4, 1)
    mpc.reset()
    mpc.act(x)
    assert relative(mpc.act(x), mpc(x)[:, 0]) < 1e-7


@pytest.mark.parametrize("warm_start", [True, False])
def test_a_rollout_is_the_loop_written_by_hand(warm_start):
    mpc, x, true = make("pendulum", (-0.5, 0.5)), state(), Pendulum()
    states, controls = mpc.rollout(true, x, 5, warm_start=warm_start)
    assert states.shape == (3, 6, 2) and controls.shape == (3, 5, 1)
    now = x
    for t in range(5):
        u = mpc(now)[:, 0]
        assert relative(controls[:, t], u) < 1e-7
        now = true(now, u)
        assert relative(states[:, t + 1], now) < 1e-7
    single = mpc.rollout(true, x[0], 5)
    assert single.states.shape == (6, 2) and relative(single.controls, controls[0]) < 1e-7


def test_gradients_go_through_a_whole_rollout():
    mpc, x = make("network", (-0.5, 0.5), H=4, solver=DDP(rtol=1e-13)), state(2).requires_grad_()
    true = Pendulum()
    tensors = [x, mpc.cost.goal, mpc.dynamics.layers[2].bias, true.gravity]

    def loss():
        states, controls = mpc.rollout(true, x, 4)
        return states.square().sum() + controls.sum()

    for a, b in zip(torch.autograd.grad(loss(), tensors), differences(loss, tensors), strict=True):
        assert float((a - b).norm()) < DIFFERENCES * max(1.0, float(b.norm()))


def test_the_report_has_both_halves():
    mpc, x = make("network"), state().requires_grad_()
    mpc(x).sum().backward()
    report = mpc.report
    assert report.forward.stats.method == "DDP" and report.backward.stats.method == "Riccati"
    assert bool(report.backward.converged.all())
    assert float(report.adjoint_error.max()) < 1e-8 and float(report.value_error.max()) < 1e-6
    assert "Riccati" in str(report)


@pytest.mark.parametrize("policy", ["raise", "warn", "zero", "nan"])
def test_failures_follow_the_policy(policy):
    mpc = make("pendulum", solver=DDP(max_steps=1), on_failure=policy)
    x = torch.stack((mpc.cost.goal.detach() * 0, torch.tensor([2.0, 1.0])))
    with torch.no_grad():
        mpc.cost.goal.zero_()
    x = x.requires_grad_()
    if policy == "raise":
        with pytest.raises(dil.ConvergenceError, match=r"DDP\) failed for 1 of 2 samples"):
            mpc(x)
        return
    if policy == "warn":
        with pytest.warns(dil.ConvergenceWarning, match="max_steps after 1 steps"):
            mpc(x)
        return
    (grad,) = torch.autograd.grad(mpc(x).sum(), x)
    assert bool((grad[0] != 0).any()) and bool(grad[0].isfinite().all())
    assert bool((grad[1] == 0).all() if policy == "zero" else grad[1].isnan().all())


# Bad input

BAD = {
    "dynamics": (lambda: MPC(None, Target(), 3, 1), "dynamics must be callable"),
    "cost": (lambda: MPC(Pendulum(), 1.0, 3, 1), "cost must be callable"),
    "terminal": (lambda: MPC(Pendulum(), Target(), 3, 1, terminal=3), "terminal must be callable"),
    "horizon": (lambda: MPC(Pendulum(), Target(), 0, 1), "horizon must be an integer >= 1, got 0"),
    "horizon, bool": (lambda: MPC(Pendulum(), Target(), True, 1), "horizon must be an integer"),
    "control_dim": (lambda: MPC(Pendulum(), Target(), 3, 1.5), "control_dim must be an integer"),
    "bounds": (lambda: make("pendulum", (1.0, -1.0)), "bounds must have low < high"),
    "bounds, one": (lambda: make("pendulum", 1.0), "bounds must be None or a pair"),
    "bounds, nan": (lambda: make("pendulum", (float("nan"), 1.0)), "bounds must be numbers"),
    "bounds, shape": (lambda: make("pendulum", (torch.zeros(5), 1.0))(state()), "bounds must broadcast"),
    "solver": (lambda: make("pendulum", solver=DDP), "solver must be a torchdil solver"),
    "solver, name": (lambda: make("pendulum", solver="ddp"), "solver must be a torchdil solver"),
    "linear_solver": (lambda: make("pendulum", linear_solver="cg"), "linear_solver must be a torchdil linear solver"),
    "on_failure": (lambda: make("pendulum", on_failure="cry"), "on_failure must be one of"),
    "x_obs": (lambda: make("pendulum")([1.0, 2.0]), "x_obs must be a tensor"),
    "x_obs, dtype": (lambda: make("pendulum")(torch.zeros(2, 2).long()), "x_obs must have a real floating dtype"),
    "x_obs, shape": (lambda: make("pendulum")(torch.zeros(2, 2, 2)), r"x_obs must be a tensor of shape \(B, n\)"),
    "u0": (lambda: make("pendulum")(state(), torch.zeros(3, 5, 1)), "u0 must be of shape"),
    "u0, list": (lambda: make("pendulum")(state(), [0.0]), "u0 must be a tensor"),
    "u0, one": (lambda: make("pendulum")(state()[0], [0.0]), "u0 must be a tensor"),
    "u0, dtype": (lambda: make("pendulum")(state(), torch.zeros(3, 6, 1).float()), "u0 must be like x_obs"),
    "dynamics, swapped": (
        lambda: MPC(lambda u, x: torch.cat((x, u), -1)[:, 1:], Target(), 3, 1)(state()),
        r"dynamics is called as dynamics\(x, u\), but its parameters are \(u, x\): change their order",
    ),
    "cost, swapped": (
        lambda: MPC(Pendulum(), lambda action, state: (state**2).sum(-1) + (action**2).sum(-1), 3, 1)(state()),
        r"cost is called as cost\(x, u\), but its parameters are \(action, state\): change their order",
    ),
    "true_dynamics, swapped": (
        lambda: make("pendulum").rollout(lambda u, x: x, state(), 3),
        r"true_dynamics is called as true_dynamics\(x, u\), but its parameters are \(u, x\)",
    ),
    "dynamics, shape": (lambda: MPC(lambda x, u: x[:, :1], Target(), 3, 1)(state()), "dynamics must return shape"),
    "dynamics, type": (lambda: MPC(lambda x, u: None, Target(), 3, 1)(state()), "dynamics must return a tensor"),
    "dynamics, dtype": (lambda: MPC(lambda x, u: x.float(), Target(), 3, 1)(state()), "dynamics must return the dtype"),
    "cost, shape": (lambda: MPC(Pendulum(), lambda x, u: x, 3, 1)(state()), "cost must return shape"),
    "cost, constant": (lambda: MPC(Pendulum(), lambda x, u: 0 * x[:, 0].detach(), 3, 1)(state()), "cost must depend on"),
    "terminal, shape": (
        lambda: MPC(Pendulum(), Target(), 3, 1, terminal=lambda x: x)(state()),
        "terminal must return shape",
    ),
    "steps": (lambda: make("pendulum").rollout(Pendulum(), state(), 0), "steps must be an integer"),
    "true_dynamics": (lambda: make("pendulum").rollout(None, state(), 3), "true_dynamics must be callable"),
    "x0": (lambda: make("pendulum").rollout(Pendulum(), [0.0], 3), "x0 must be a tensor"),
    "true_dynamics, shape": (
        lambda: make("pendulum").rollout(lambda x, u: x[:, :1], state(), 3),
        "true_dynamics must return",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_met_with_one_sentence(name):
    call, message = BAD[name]
    with pytest.raises((TypeError, ValueError), match=f"^{message}") as error:
        call()
    assert str(error.value).count(". ") == 0


@pytest.mark.parametrize("horizon", [1, 10, 50])
def test_plan_and_gradient_are_those_of_the_riccati_recursion(horizon):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    A, B, C, D = 0.6 * draw(4, 3, 3), draw(4, 3, 2), draw(3, 3), draw(2, 2)
    Q, R, x, weights = C @ C.T, D @ D.T + torch.eye(2), draw(4, 3), draw(4, horizon, 2)
    leaves = [t.clone().requires_grad_() for t in (A, B, Q, R, x)]

    def planned(A, B, Q, R, x):
        def dynamics(x, u):
            return (A @ x.unsqueeze(2) + B @ u.unsqueeze(2)).squeeze(2)

        def cost(x, u):
            return torch.einsum("bi,ij,bj->b", x, Q, x) + torch.einsum("bi,ij,bj->b", u, R, u)

        return MPC(dynamics, cost, horizon, 2, on_failure="raise")(x)

    by_plan = planned(*leaves)
    by_recursion = dil.control.lqr(*leaves[:4], horizon=horizon).rollout(leaves[4])[1]
    assert relative(by_plan, by_recursion) <= EXACT
    grads = [torch.autograd.grad((u * weights).sum(), leaves) for u in (by_plan, by_recursion)]
    for got, expected in zip(*grads, strict=True):
        assert relative(got, expected) <= EXACT
