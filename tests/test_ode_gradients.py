"""Gradients of `odeint` on fixed grids, every one by at least two roads."""

import gc
import warnings
from itertools import pairwise

import pytest
import torch
from problems import Cube
from torch import nn
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck
from torch.func import functional_call, jacfwd, jacrev, jvp, vmap

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

SAME = 1e-10  # two exact roads to one gradient
SOLVED = 1e-8  # two solves to the default tolerances, or one of them by an iterative linear solver
DIFFERENCES = 1e-6

METHODS = [
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
    ForwardEuler(),
    RK4(),
]
SOME = [BackwardEuler(), Trapezoid(), GaussLegendre(4), RK4()]  # one of each kind: m = s = 1; explicit first stage; m > s
each_method = pytest.mark.parametrize("method", METHODS, ids=repr)
some_methods = pytest.mark.parametrize("method", SOME, ids=repr)


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(actual, expected, tolerance=SAME):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def all_close(actual, expected, tolerance=SAME):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        close(a, b, tolerance)


def fixed(func, y0, t, method="backward_euler", **settings):
    """On the grid t itself, for adaptive methods too."""
    return dil.odeint(func, y0, t, method=method, **{"options": {"substeps": 1}, "on_failure": "raise", **settings})


TIGHT = dil.Newton(rtol=1e-13, atol=1e-14)
TIMES = torch.tensor([0.1, 0.3, 0.35, 0.7, 1.0], dtype=torch.float64)


def field(w, c=0.3):
    """y' = tanh(W y) cos(t + c) - y³/4: coupled, nonlinear, driven."""
    return lambda t, y: torch.tanh(y @ w.T) * (t + c).cos() - y**3 / 4


class Net(nn.Module):
    def __init__(self, size=2, hidden=6, timed=True):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(size, hidden), nn.Tanh(), nn.Linear(hidden, size))
        self.timed, self.speed = timed, 1.0
        self.drop = nn.Identity()

    def forward(self, t, y):
        slope = self.speed * self.body(y)
        if not self.training:
            slope = 0.5 * slope
        return slope * t.cos() if self.timed else slope


def make_net(seed=0, **settings):
    torch.manual_seed(seed)
    return Net(**settings).double()


def unrolled(func, y0, t, method):
    """The trajectory step by step, by Newton's method on the stages (s, *y0.shape), and autograd through all of it.

    The Jacobian is a constant of each iteration: where it has converged, first derivatives are exact all the same.
    """
    A, b = torch.tensor(method.A, dtype=y0.dtype), torch.tensor(method.b, dtype=y0.dtype)
    c, shape = torch.tensor(method.c, dtype=y0.dtype), (method.stages, *y0.shape)
    y, states = y0, [y0]
    for now, then in pairwise(t):
        h = then - now

        def slopes(Y, now=now, h=h):
            return torch.stack([func(now + c[i] * h, Y[i]) for i in range(method.stages)])

        def F(Y, y, now=now, h=h):
            return Y - y - h * torch.einsum("ij,j...->i...", A, slopes(Y, now, h))

        Y = y.detach().expand(shape)
        for _ in range(6):
            # Without the history of y, which autograd would walk each time.
            plain = [x.detach() for x in (y, now, h)]
            J = torch.autograd.functional.jacobian(lambda Y, plain=plain: F(Y, *plain), Y.detach())
            Y = Y - torch.linalg.solve(J.reshape(Y.numel(), Y.numel()), F(Y, y).flatten()).reshape(shape)
        y = y + h * torch.einsum("j,j...->...", b, slopes(Y))
        states.append(y)
    return torch.stack(states)


def composed(func, y0, t, method):
    """The trajectory step by step, each step a `dil.root` for its stages."""
    A, b = torch.tensor(method.A, dtype=y0.dtype), torch.tensor(method.b, dtype=y0.dtype)
    c = torch.tensor(method.c, dtype=y0.dtype)
    y, states = y0, [y0]
    for now, then in pairwise(t):

        def slopes(Y, now, then):
            return torch.stack([func(now + c[i] * (then - now), Y[i]) for i in range(method.stages)])

        def F(Y, y, now, then, slopes=slopes):
            return Y - y - (then - now) * torch.einsum("ij,j...->i...", A, slopes(Y, now, then))

        start = y.detach().expand(method.stages, *y.shape).clone()
        Y = dil.root(F, start, (y, now, then), solver=TIGHT, on_failure="raise").value
        y = y + (then - now) * torch.einsum("j,j...->...", b, slopes(Y, now, then))
        states.append(y)
    return torch.stack(states)


# --- every method, every input ----------------------------------------------------------------------------------------------


@each_method
def test_gradcheck(method):
    """y0, t, a leaf of the closure, and a non-leaf."""

    def solve(y0, t, w, c):
        return fixed(field(w.sin(), c), y0, t, method)

    inputs = [draw(1, 2), TIMES[:3].clone(), draw(2, 2, 2), torch.tensor(0.3, dtype=torch.float64)]
    # Every entry of the Jacobian for one method, random combinations of all entries for the others.
    assert gradcheck(solve, [x.requires_grad_() for x in inputs], fast_mode=method != BackwardEuler())


@each_method
def test_gradgradcheck(method):
    def solve(y0, t, w, c):
        return fixed(field(w.sin(), c), y0, t, method)

    inputs = [draw(1, 2), TIMES[:3].clone(), draw(2, 2, 2), torch.tensor(0.3, dtype=torch.float64)]
    assert gradgradcheck(solve, [x.requires_grad_() for x in inputs], fast_mode=method != BackwardEuler())


@pytest.mark.parametrize("timed", [True, False])
@some_methods
def test_gradcheck_of_batches(method, timed):
    w = draw(2, 2, 2)

    def solve(y0, t, w):
        return fixed(lambda t, y: torch.tanh(y @ w) * (t if timed else 1), y0, t, method, batch_dims=1)

    assert gradcheck(solve, [x.requires_grad_() for x in (draw(1, 3, 2), TIMES[:3].clone(), w)], fast_mode=True)


@some_methods
def test_gradcheck_with_substeps_and_backwards(method):
    def solve(y0, t, w):
        return dil.odeint(field(w), y0, t, method=method, options={"substeps": 3})

    assert gradcheck(solve, [x.requires_grad_() for x in (draw(1, 2), TIMES[:3].flip(0), draw(2, 2, 2))], fast_mode=True)


@some_methods
def test_gradcheck_of_structures(method):
    def solve(a, b):
        y = fixed(
            lambda t, y: {"a": y["b"].sum() * t - y["a"], "b": y["b"] * y["a"].sum()}, {"a": a, "b": b}, TIMES[:3], method
        )
        return y["a"], y["b"]

    assert gradcheck(solve, [x.requires_grad_() for x in (draw(1, 2), draw(2, 1, 2))], fast_mode=True)


@pytest.mark.parametrize(("method", "steps"), [*((m, 3) for m in METHODS), *((m, 14) for m in SOME)], ids=str)
def test_equal_to_unrolled_newton_and_to_steps_composed(method, steps):
    """Module parameters, y0 and t; by the whole trajectory, by autograd through Newton, by one root a step."""
    net = make_net()
    y0 = draw(1, 2).requires_grad_()
    t = torch.linspace(0, 2, steps + 1, dtype=torch.float64).requires_grad_()
    v = draw(3, steps + 1, 2)
    roads = {}
    for name, solve in (("whole", fixed), ("unrolled", unrolled), ("composed", composed)):
        y = solve(net, y0, t, method, **({"solver": TIGHT} if solve is fixed else {}))
        roads[name] = [y.detach(), *grad((v * y).sum(), [y0, t, *net.parameters()])]
    all_close(roads["whole"], roads["unrolled"])
    all_close(roads["whole"], roads["composed"])


@some_methods
def test_against_differences(method):
    """Long enough for the recursion in pieces."""
    net, y0, t = make_net(), draw(1, 5, 2).requires_grad_(), torch.linspace(0, 3, 61, dtype=torch.float64)
    v = draw(3, 61, 5, 2)

    def loss():
        return (v * fixed(net, y0, t, method, batch_dims=1)).sum()

    for p, g in zip(net.parameters(), grad(loss(), list(net.parameters())), strict=True):
        direction, step, values = draw(4, *p.shape), 1e-5, []
        with torch.no_grad():
            for sign in (1, -2):
                p.add_(direction, alpha=sign * step)
                values.append(float(loss()))
            p.add_(direction, alpha=step)
        assert float((g * direction).sum()) == pytest.approx((values[0] - values[1]) / (2 * step), rel=DIFFERENCES)


@some_methods
@pytest.mark.parametrize("which", [[-1], [0], [2], [1, 3]], ids=str)
def test_loss_on_a_few_outputs(method, which):
    net, y0 = make_net(), draw(1, 2).requires_grad_()
    t = TIMES.clone().requires_grad_()
    inputs = [y0, t, *net.parameters()]
    settings = {"allow_unused": True, "materialize_grads": True}
    whole = grad((fixed(net, y0, t, method)[which] ** 2).sum(), inputs, **settings)
    all_close(whole, grad((unrolled(net, y0, t, method)[which] ** 2).sum(), inputs, **settings), SOLVED)


def test_closed_form():
    """Backward Euler on y' = -k y: y_n = y0 (1 + k h)⁻ⁿ."""
    k, y0 = (
        torch.tensor(1.3, dtype=torch.float64, requires_grad=True),
        torch.tensor(2.0, dtype=torch.float64, requires_grad=True),
    )
    t = torch.linspace(0, 1, 11, dtype=torch.float64)
    y = fixed(lambda t, y: -k * y, y0, t)
    dk, dy0 = grad(y[-1], (k, y0))
    h = 0.1
    close(dy0, (1 + k.detach() * h) ** -10)
    close(dk, -10 * h * y0.detach() * (1 + k.detach() * h) ** -11)


# --- what a gradient may be asked for ---------------------------------------------------------------------------------------


def test_no_gradient_asked_for_no_graph():
    assert not fixed(make_net().requires_grad_(False), draw(1, 2), TIMES).requires_grad
    with torch.no_grad():
        assert not fixed(make_net(), draw(1, 2), TIMES).requires_grad
    net = make_net()
    with torch.inference_mode():
        y = fixed(net, draw(1, 2), TIMES)
    close(y.clone(), fixed(net, draw(1, 2), TIMES).detach(), SOLVED)


def test_only_one_of_several_is_asked_for():
    net, y0 = make_net().requires_grad_(False), draw(1, 2)
    net.body[0].bias.requires_grad_()
    (fixed(net, y0, TIMES) ** 2).sum().backward()
    assert net.body[0].weight.grad is None and y0.grad is None
    full = make_net()
    (expected,) = grad((unrolled(full, y0, TIMES, BackwardEuler()) ** 2).sum(), full.body[0].bias)
    close(net.body[0].bias.grad, expected, SOLVED)


@some_methods
@pytest.mark.parametrize("timed", [True, False])
def test_shared_parameters_sum_over_the_batch(method, timed):
    net, y0, v = make_net(timed=timed), draw(1, 4, 2), draw(2, 5, 4, 2)
    parameters = list(net.parameters())

    def gradients(y0, v, batch_dims):
        y0 = y0.clone().requires_grad_()
        return grad((v * fixed(net, y0, TIMES, method, batch_dims=batch_dims)).sum(), [y0, *parameters])

    whole = gradients(y0, v, 1)
    each = [gradients(y0[k], v[:, k], 0) for k in range(4)]
    close(whole[0], torch.stack([one[0] for one in each]), SOLVED)
    for total, *parts in zip(whole[1:], *(one[1:] for one in each), strict=True):
        close(total, sum(parts), SOLVED)
    all_close(whole, gradients(y0, v, 0), SOLVED)


@some_methods
def test_a_hard_sample_changes_no_other_gradient(method):
    """One sample a thousand times as fast: each sample's own rate gets the gradient that it has alone."""
    fast = 1000.0 if not method.explicit else 5.0
    rate = torch.tensor([1.0, fast, 0.1], dtype=torch.float64).unsqueeze(1).requires_grad_()
    y0 = draw(1, 3, 2).requires_grad_()
    y = fixed(lambda t, y: -rate * (y + 0.1 * y.sin()) * (1 + t), y0, TIMES, method, batch_dims=1)
    whole = grad((y**2).sum(), (y0, rate))
    for k in range(3):
        one, r = y0[k].detach().requires_grad_(), rate[k].detach().requires_grad_()
        y = fixed(lambda t, y, r=r: -r * (y + 0.1 * y.sin()) * (1 + t), one, TIMES, method)
        all_close([w[k] for w in whole], grad((y**2).sum(), (one, r)), 1e-9)


def test_a_lost_sample_changes_no_other_gradient():
    """NaN in one sample, with the policy that gives it no gradient: shared parameters get the others'."""
    w, bad = draw(1, 2, 2).requires_grad_(), torch.tensor([[0.0], [torch.nan], [0.0]], dtype=torch.float64)
    y0 = draw(2, 3, 2).requires_grad_()
    solution = dil.ode.solve(lambda t, y: torch.tanh(y @ w) * t + bad, y0, TIMES, batch_dims=1, on_failure="zero")
    assert solution.converged.tolist() == [True, False, True]
    y = solution.value
    found = grad((y[:, [0, 2]] ** 2).sum(), (y0, w))
    clean = y0[[0, 2]].detach().requires_grad_()
    y = fixed(lambda t, y: torch.tanh(y @ w) * t, clean, TIMES, batch_dims=1)
    expected = grad((y**2).sum(), (clean, w))
    close(found[0][[0, 2]], expected[0], SOLVED)
    close(found[1], expected[1], SOLVED)


@pytest.mark.parametrize(
    "linear_solver",
    [dil.CG(), dil.NormalCG(), dil.Dense(), dil.GMRES(), dil.BiCGStab(), dil.Auto()],
    ids=lambda solver: type(solver).__name__,
)
@some_methods
def test_linear_solvers_agree(method, linear_solver):
    net, y0 = make_net(), draw(1, 3, 2).requires_grad_()
    inputs = [y0, *net.parameters()]
    exact = grad((fixed(net, y0, TIMES, method, batch_dims=1) ** 2).sum(), inputs)
    solver = type(linear_solver)(rtol=1e-12)
    solution = dil.ode.solve(
        net, y0, TIMES, method=method, batch_dims=1, linear_solver=solver, options={"substeps": 1}, on_failure="raise"
    )
    all_close(grad((solution.value**2).sum(), inputs), exact, SOLVED)
    used = solution.report.backward.stats.method
    # CG means the normal equations where J is not symmetric; Dense may know the blocks of J.
    names = {"CG": ("CG on the normal equations",), "Dense": ("Dense", "Bidiagonal"), "Auto": ("",)}
    name = type(linear_solver).__name__
    assert any(word in used for word in names.get(name, (name,)))


def test_approximate_linear_solvers_are_honoured():
    """JacobianFree takes J for the identity: the gradient of the last state by y0 is then another one, on purpose."""
    net, y0 = make_net(), draw(1, 2).requires_grad_()
    exact = grad(fixed(net, y0, TIMES)[-1].sum(), list(net.parameters()))
    y = fixed(net, y0, TIMES, linear_solver=dil.JacobianFree())
    found = grad(y[-1].sum(), list(net.parameters()))
    assert not torch.allclose(found[0], exact[0], rtol=1e-3)


def test_report_of_the_backward_pass():
    net, y0 = make_net(), draw(1, 3, 2).requires_grad_()
    solution = dil.ode.solve(net, y0, TIMES, batch_dims=1)
    assert solution.report.backward is None
    (solution.value**2).sum().backward()
    backward = solution.report.backward
    assert backward.status.shape == (3,) and bool(backward.converged.all())
    assert (backward.stats.residual <= backward.stats.tolerance).all()
    assert "backward" in str(solution.report)


def test_zero_cotangent_gives_zero():
    net, y0 = make_net(), draw(1, 2).requires_grad_()
    assert all(not g.any() for g in grad((0 * fixed(net, y0, TIMES)).sum(), [y0, *net.parameters()]))


def test_backward_twice_and_accumulation():
    net, y0 = make_net(), draw(1, 2)
    loss = (fixed(net, y0, TIMES) ** 2).sum()
    loss.backward(retain_graph=True)
    once = [p.grad.clone() for p in net.parameters()]
    loss.backward()
    all_close([p.grad for p in net.parameters()], [2 * g for g in once])


def test_float32():
    net, y0 = make_net(), draw(1, 4, 2)
    exact = grad((fixed(net, y0, TIMES, batch_dims=1) ** 2).sum(), list(net.parameters()))
    net.float()
    found = grad((fixed(net, y0.float(), TIMES.float(), batch_dims=1) ** 2).sum(), list(net.parameters()))
    assert all(g.dtype == torch.float32 for g in found)
    all_close([g.double() for g in found], exact, 1e-4)


FUNCTIONS = {
    "custom Function": lambda w: lambda t, y: -w * Cube.apply(y),
    "custom Function, with t": lambda w: lambda t, y: -w * t * Cube.apply(y),
    "branch on a value": lambda w: lambda t, y: -w * y if (y > -100).all() else y,
    "branch on time": lambda w: lambda t, y: -w * y if t > 0.5 else -2 * w * y,
    "closure of the batch": lambda w: lambda t, y: -w.expand(3, 2) * y,
    "non-leaf": lambda w: (lambda v: lambda t, y: -v * y.sin())(w.exp()),
}


@pytest.mark.parametrize("batch_dims", [0, 1])
@pytest.mark.parametrize("make", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_of_all_kinds(make, batch_dims):
    w, y0 = draw(1, 2).abs().requires_grad_(), draw(2, 3, 2).requires_grad_()
    found = grad((fixed(make(w), y0, TIMES, batch_dims=batch_dims) ** 2).sum(), (w, y0))
    all_close(found, grad((unrolled(make(w), y0, TIMES, BackwardEuler()) ** 2).sum(), (w, y0)), SOLVED)


@pytest.mark.parametrize("batch_dims", [0, 1])
def test_constant_fields(batch_dims):
    """y' = w: f does not depend on y, the trajectory does on everything."""
    w, y0 = draw(1, 3, 2).requires_grad_(), draw(2, 3, 2).requires_grad_()
    for func in (lambda t, y: w, lambda t, y: w * t):
        y = fixed(func, y0, TIMES, batch_dims=batch_dims)
        found = grad((y**2).sum(), (w, y0))
        all_close(found, grad((unrolled(func, y0, TIMES, BackwardEuler()) ** 2).sum(), (w, y0)), SOLVED)


# --- forward mode and torch.func --------------------------------------------------------------------------------------------


@each_method
def test_forward_mode(method):
    net, y0, dy0, dt = make_net(), draw(1, 2), draw(2, 2), draw(3, 5)
    with forward_ad.dual_level():
        y = fixed(net, forward_ad.make_dual(y0, dy0), forward_ad.make_dual(TIMES, dt), method)
        tangent = forward_ad.unpack_dual(y).tangent
    v, leaves = draw(4, 5, 2), (y0.clone().requires_grad_(), TIMES.clone().requires_grad_())
    by_y0, by_t = grad((v * unrolled(net, *leaves, method)).sum(), leaves)
    close((v * tangent).sum(), (by_y0 * dy0).sum() + (by_t * dt).sum(), 1e-9)


def test_forward_mode_of_parameters():
    net, y0 = make_net(), draw(1, 2)
    tangents = {name: draw(k, *p.shape) for k, (name, p) in enumerate(net.named_parameters())}
    with forward_ad.dual_level():
        duals = {name: forward_ad.make_dual(p.detach(), tangents[name]) for name, p in net.named_parameters()}
        y = fixed(lambda t, y: functional_call(net, duals, (t, y)), y0, TIMES)
        tangent = forward_ad.unpack_dual(y).tangent
    v = draw(9, *tangent.shape)
    gradients = grad((v * fixed(net, y0, TIMES)).sum(), list(net.parameters()))
    total = sum((g * tangents[name]).sum() for g, name in zip(gradients, tangents, strict=True))
    close((v * tangent).sum(), total, SOLVED)


@some_methods
@pytest.mark.parametrize("batch_dims", [0, 1])
def test_func_transforms_of_the_start(method, batch_dims):
    net = make_net().requires_grad_(False)
    y0 = draw(1, 2, 2)

    def solve(y0):
        return fixed(net, y0, TIMES, method, batch_dims=batch_dims)

    leaf = y0.clone().requires_grad_()
    (gradient,) = grad((solve(leaf) ** 2).sum(), leaf)
    close(torch.func.grad(lambda y0: (solve(y0) ** 2).sum())(y0), gradient, SOLVED)
    jacobian = torch.autograd.functional.jacobian(solve, y0)
    close(jacrev(solve)(y0), jacobian, SOLVED)
    close(jacfwd(solve)(y0), jacobian, SOLVED)
    dy0 = draw(2, 2, 2)
    value, tangent = jvp(solve, (y0,), (dy0,))
    close(value, solve(y0), SOLVED)
    close(tangent, torch.einsum("tbdij,ij->tbd", jacobian, dy0), SOLVED)


@some_methods
def test_func_transforms_of_time(method):
    net, y0 = make_net().requires_grad_(False), draw(1, 2)
    expected = torch.autograd.functional.jacobian(lambda t: fixed(net, y0, t, method), TIMES)
    close(jacrev(lambda t: fixed(net, y0, t, method))(TIMES), expected, SOLVED)
    close(jacfwd(lambda t: fixed(net, y0, t, method))(TIMES), expected, SOLVED)


@some_methods
@pytest.mark.parametrize("timed", [True, False])
def test_vmap_over_starts(method, timed):
    net, starts = make_net(timed=timed).requires_grad_(False), draw(1, 3, 2)
    expected = torch.stack([fixed(net, y0, TIMES, method) for y0 in starts])
    close(vmap(lambda y0: fixed(net, y0, TIMES, method))(starts), expected, SOLVED)
    jacobians = torch.stack([jacrev(lambda y0: fixed(net, y0, TIMES, method))(y0) for y0 in starts])
    close(vmap(jacrev(lambda y0: fixed(net, y0, TIMES, method)))(starts), jacobians, SOLVED)


@some_methods
def test_vmap_over_batches_of_starts(method):
    net, starts = make_net(timed=False).requires_grad_(False), draw(1, 3, 4, 2)
    expected = torch.stack([fixed(net, y0, TIMES, method, batch_dims=1) for y0 in starts])
    close(vmap(lambda y0: fixed(net, y0, TIMES, method, batch_dims=1))(starts), expected, SOLVED)


@some_methods
def test_func_transforms_of_module_parameters(method):
    net, y0 = make_net(), draw(1, 2)
    parameters = {name: p.detach() for name, p in net.named_parameters()}
    node = dil.NeuralODE(net, method, batch_dims=0, options={"substeps": 1})

    def solve(parameters):
        return functional_call(node, {f"field.{name}": p for name, p in parameters.items()}, (y0, TIMES))

    expected = grad((fixed(net, y0, TIMES, method) ** 2).sum(), list(net.parameters()))
    found = torch.func.grad(lambda p: (solve(p) ** 2).sum())(parameters)
    all_close([found[name] for name in parameters], expected, SOLVED)
    reverse, forward = jacrev(solve)(parameters), jacfwd(solve)(parameters)
    for name in parameters:
        close(forward[name], reverse[name], SOLVED)
        close(torch.einsum("td,td...->...", 2 * solve(parameters), reverse[name]), found[name], SOLVED)


def test_vmap_over_parameters():
    """An ensemble: the same start, three sets of parameters."""
    nets = [make_net(seed).requires_grad_(False) for seed in range(3)]
    stacked, _ = torch.func.stack_module_state(nets)
    y0 = draw(1, 2)
    node = dil.NeuralODE(make_net(), batch_dims=0)

    def solve(parameters):
        return functional_call(node, {f"field.{name}": p for name, p in parameters.items()}, (y0, TIMES))

    expected = torch.stack([fixed(net, y0, TIMES) for net in nets])
    close(vmap(solve)({name: p.detach() for name, p in stacked.items()}), expected, SOLVED)


def test_second_order_under_func():
    net, y0 = make_net().requires_grad_(False), draw(1, 2)

    def loss(y0):
        return (fixed(net, y0, TIMES) ** 2).sum()

    expected = torch.autograd.functional.hessian(loss, y0)
    close(torch.func.hessian(loss)(y0), expected, SOLVED)
    close(jacrev(jacrev(loss))(y0), expected, SOLVED)


def test_tensors_captured_under_func_are_never_lost():
    """A tensor of the transform in a closure: its gradient, or one sentence; not zero."""
    w, y0 = draw(1, 2, 2), draw(2, 2)
    leaf = w.clone().requires_grad_()
    (expected,) = grad((fixed(field(leaf), y0, TIMES) ** 2).sum(), leaf)
    try:
        found = torch.func.grad(lambda w: (fixed(field(w), y0, TIMES) ** 2).sum())(w)
    except RuntimeError as error:
        assert "func" in str(error)
    else:
        close(found, expected, SOLVED)


# --- calls in a row ---------------------------------------------------------------------------------------------------------
# Whatever is remembered from one call to the next, it must never be what has changed since.


def fresh(net):
    """A new function object with the same numbers, new tensors all."""
    twin = make_net(timed=net.timed)
    twin.load_state_dict(net.state_dict())
    twin.speed = net.speed
    twin.train(net.training)
    return lambda t, y: twin(t, y), twin


def outcome(func, parameters, y0, t=TIMES, method="backward_euler", **settings):
    y0 = y0.clone().requires_grad_()
    y = fixed(func, y0, t, method, batch_dims=1, **settings)
    found = grad((y**2).sum(), [y0, *parameters], allow_unused=True, materialize_grads=True)
    return [y.detach().clone(), *(g.clone() for g in found)]


def assert_fresh(net, y0, method, calls=3):
    func, twin = fresh(net)
    expected = outcome(func, list(twin.parameters()), y0, method=method)
    for _ in range(calls):
        all_close(outcome(net, list(net.parameters()), y0, method=method), expected, SOLVED)


def in_place(net):
    with torch.no_grad():
        for p in net.parameters():
            p.mul_(0.7).add_(0.05)


def new_parameters(net):
    net.body[0].weight = nn.Parameter(draw(7, 6, 2))
    net.body[2].bias = nn.Parameter(draw(8, 2))


def new_data(net):
    for k, p in enumerate(net.parameters()):
        p.data = 0.5 * draw(20 + k, *p.shape)


def new_speed(net):
    net.speed = net.speed * 1.7


def new_layer(net):
    net.body[1] = nn.Sigmoid() if isinstance(net.body[1], nn.Tanh) else nn.Tanh()


def optimiser_step(net):
    optimiser = torch.optim.Adam(net.parameters(), lr=0.05)
    (fixed(net, draw(6, 4, 2), TIMES, batch_dims=1) ** 2).sum().backward()
    optimiser.step()


CHANGES = {
    "in place": in_place,
    "new parameters": new_parameters,
    "new data": new_data,
    "a number": new_speed,
    "train and eval": lambda net: net.train(not net.training),
    "optimiser": optimiser_step,
    "frozen": lambda net: net.body[0].requires_grad_(not net.body[0].weight.requires_grad),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize(("method", "timed"), [(BackwardEuler(), False), (Trapezoid(), True)], ids=repr)
def test_changes_between_calls_are_seen(change, timed, method):
    net, y0 = make_net(timed=timed), draw(1, 4, 2)
    assert_fresh(net, y0, method)
    for _ in range(2):
        change(net)
        frozen = [p for p in net.parameters() if not p.requires_grad]
        if frozen:
            for _ in range(3):
                y = fixed(net, y0.clone().requires_grad_(), TIMES, method, batch_dims=1)
                net.zero_grad(set_to_none=True)
                (y**2).sum().backward()
                assert all(p.grad is None for p in frozen)
                assert all(p.grad is not None for p in net.parameters() if p.requires_grad)
        else:
            assert_fresh(net, y0, method)


@pytest.mark.parametrize("timed", [True, False])
def test_another_layer_inside_is_seen(timed):
    net, y0 = make_net(timed=timed), draw(1, 4, 2)
    for _ in range(3):
        expected = outcome(lambda t, y: net(t, y), list(net.parameters()), y0)
        all_close(outcome(net, list(net.parameters()), y0), expected, SOLVED)
        new_layer(net)


@pytest.mark.parametrize("batch_dims", [0, 1])
def test_a_number_that_switches_time_on(batch_dims):
    """f looks at t only where an attribute says so."""
    net = make_net(timed=False)
    y0 = draw(1, 4, 2)
    for timed in (False, True, False, True):
        net.timed = timed
        expected = unrolled(net, y0, TIMES, BackwardEuler())
        for _ in range(3):
            close(fixed(net, y0, TIMES, batch_dims=batch_dims).detach(), expected.detach(), SOLVED)


class Conditioned(nn.Module):
    """A field with an input of its own for each sample, set from outside, and a branch on a value that can be switched on."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 2)
        self.context, self.careful = None, False

    def forward(self, t, y):
        slope = torch.tanh(self.body(y))
        if self.context is not None:
            slope = slope + self.context
        return slope.clamp(-9, 9) if self.careful and slope.abs().max().item() > 9 else slope


@pytest.mark.parametrize("batch_dims", [0, 1])
@pytest.mark.parametrize("first", ["without", "with"])
def test_inputs_of_the_samples_that_are_set_between_calls(batch_dims, first):
    torch.manual_seed(0)
    net, y0 = Conditioned().double(), draw(1, 4, 2)
    contexts = [None, draw(2, 4, 2), draw(3, 4, 2), None, draw(4, 4, 2)]
    for context in contexts if first == "without" else contexts[::-1]:
        net.context = context
        expected = unrolled(net, y0, TIMES, BackwardEuler())
        wanted = grad((expected**2).sum(), list(net.parameters()))
        for _ in range(2):
            y = fixed(net, y0, TIMES, batch_dims=batch_dims)
            close(y.detach(), expected.detach(), SOLVED)
            all_close(grad((y**2).sum(), list(net.parameters())), wanted, SOLVED)


@pytest.mark.parametrize("batch_dims", [0, 1])
def test_a_branch_that_is_switched_on_between_calls(batch_dims):
    torch.manual_seed(0)
    net, y0 = Conditioned().double(), draw(1, 4, 2)
    expected = fixed(net, y0, TIMES, batch_dims=batch_dims).detach()
    for careful in (True, False, True):
        net.careful = careful
        for _ in range(3):
            close(fixed(net, y0, TIMES, batch_dims=batch_dims).detach(), expected, SOLVED)


def test_closure_variables_that_change_are_seen():
    y0 = draw(1, 4, 2)
    scale, w, number, table = draw(2, 2).abs(), draw(3, 2, 2), 1.0, {"rate": 0.5}

    def func(t, y):
        return torch.tanh(y @ w) * number - table["rate"] * scale * y

    def copy():
        v, s, n, r = w.detach().clone().requires_grad_(w.requires_grad), scale.clone(), number, table["rate"]
        return (lambda t, y: torch.tanh(y @ v) * n - r * s * y), v

    def check():
        twin, v = copy()
        expected = outcome(twin, [v] if v.requires_grad else [], y0)
        for _ in range(3):
            all_close(outcome(func, [w] if w.requires_grad else [], y0), expected, SOLVED)

    check()
    number = 2.0
    check()
    scale = scale * 2
    check()
    scale.mul_(0.5)
    check()
    table["rate"] = 1.5
    check()
    w.requires_grad_()
    check()
    w = w.detach() * 0.5
    check()
    w = (w + 1).requires_grad_()
    check()


def test_other_shapes_times_and_dtypes_between_calls():
    net = make_net()
    for rows, steps, dtype in ((4, 5, torch.float64), (2, 5, torch.float64), (4, 9, torch.float64), (4, 5, torch.float32)) * 2:
        net.to(dtype)
        t = torch.linspace(0, 1, steps, dtype=dtype)
        y0 = draw(rows, rows, 2, dtype=dtype)
        y = fixed(net, y0, t, batch_dims=1)
        expected = unrolled(net, y0, t, BackwardEuler())
        tolerance = 1e-9 if dtype == torch.float64 else 1e-4
        close(y.detach(), expected.detach(), tolerance)
        found, wanted = (grad((u**2).sum(), list(net.parameters())) for u in (y, expected))
        all_close(found, wanted, tolerance)


def test_outputs_are_not_overwritten_by_later_calls():
    net, y0 = make_net(), draw(1, 4, 2)
    outputs, kept = [], []
    for k in range(4):
        y = fixed(net, y0 + k, TIMES, batch_dims=1)
        outputs.append(y)
        kept.append(y.detach().clone())
    assert all(torch.equal(a.detach(), b) for a, b in zip(outputs, kept, strict=True))
    together = grad(sum((y**2).sum() for y in outputs), list(net.parameters()))
    one_by_one = [grad((fixed(net, y0 + k, TIMES, batch_dims=1) ** 2).sum(), list(net.parameters())) for k in range(4)]
    all_close(together, [sum(parts) for parts in zip(*one_by_one, strict=True)], SOLVED)


def test_no_grad_calls_between_training_calls():
    net, y0 = make_net(), draw(1, 4, 2)
    expected = outcome(net, list(net.parameters()), y0)
    for _ in range(3):
        with torch.no_grad():
            assert not fixed(net, y0, TIMES, batch_dims=1).requires_grad
        all_close(outcome(net, list(net.parameters()), y0), expected, SOLVED)


def test_backward_after_the_parameters_have_changed_is_refused():
    """As everywhere in torch: a gradient at parameters that are no longer there is an error, not a number."""
    net, y0 = make_net(), draw(1, 4, 2)
    y = fixed(net, y0, TIMES, batch_dims=1)
    in_place(net)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (y**2).sum().backward()


def test_training_follows_the_gradient():
    """Gradient descent by hand with the gradients of the oracle reaches the same parameters."""
    net, twin, y0 = make_net(), make_net(), draw(1, 4, 2)
    target = draw(2, 5, 4, 2)
    for model, solve in (
        (net, lambda: fixed(net, y0, TIMES, batch_dims=1)),
        (twin, lambda: unrolled(twin, y0, TIMES, BackwardEuler())),
    ):
        optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(6):
            optimiser.zero_grad()
            ((solve() - target) ** 2).mean().backward()
            optimiser.step()
    all_close([p.detach() for p in net.parameters()], [p.detach() for p in twin.parameters()], SOLVED)


def live_tensors():
    gc.collect()
    with warnings.catch_warnings():  # looking at foreign objects wakes their deprecations
        warnings.simplefilter("ignore")
        return sum(1 for item in gc.get_objects() if type(item) in (torch.Tensor, nn.Parameter))


@pytest.mark.parametrize("timed", [True, False])
def test_memory_is_flat_over_training(timed):
    net = make_net(timed=timed)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.01)
    counts = {}
    for step in range(25):
        optimiser.zero_grad()
        (fixed(net, draw(step, 4, 2), TIMES, batch_dims=1) ** 2).mean().backward()
        optimiser.step()
        if step in (4, 9, 14, 24):
            counts[step] = live_tensors()
    assert counts[4] >= counts[9]
    assert counts[14] >= counts[24]  # with the fast forms that were made at the eleventh call


def test_memory_of_functions_made_anew_is_given_back():
    """A new closure each call: nothing keeps the old ones, or their tensors, alive without end."""
    y0, counts = draw(1, 4, 2), []
    for step in range(30):
        w = draw(step, 2, 2).requires_grad_()
        (fixed(lambda t, y, w=w: torch.tanh(y @ w), y0, TIMES, batch_dims=1) ** 2).sum().backward()
        if step in (14, 29):
            counts.append(live_tensors())
    assert counts[1] <= counts[0] + 5
