"""Derivatives by every road: torch.func transforms, forward mode, mixtures and third order, against differences and loops."""

import dataclasses
import warnings

import pytest
import torch
import torch.autograd.forward_ad as fwd
from torch import nn
from torch.autograd import grad
from torch.func import functional_call, grad_and_value, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

import torchdil as dil

RTOL = 1e-8  # one exact derivative against another
DIFFERENCE = 1e-6  # against finite differences

# torch loads its forward-mode rules at the first use, with a deprecation warning about itself.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual, expected, tolerance=RTOL):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


W = 0.3 * draw(0, 3, 3)
ZERO = torch.zeros(3, dtype=torch.float64)


def by_argmin(x, a):
    """argmin of a strictly convex score with a full Hessian."""

    def score(y, x, a):
        return 0.5 * ((y - x) ** 2).sum() + 0.25 * (a * y**4).sum() + torch.logsumexp(W @ y, 0)

    return dil.argmin(score, ZERO, (x, a)).value


def by_root(x, a):
    return dil.root(lambda y, x, a: a * y**3 + y + W @ torch.tanh(y) - x, ZERO, (x, a)).value


def by_fixed_point(x, a):
    return dil.fixed_point(lambda y, x, a: torch.tanh(W @ y + x) / (1 + a**2), ZERO, (x, a)).value


def by_attach(x, a):
    """A solution found without torch looking on."""

    def residual(y, x, a):
        return a * y**3 + y + W @ torch.tanh(y) - x

    def plain(t):
        while torch._C._functorch.is_functorch_wrapped_tensor(t):
            t = torch._C._functorch.get_unwrapped(t)
        return fwd.unpack_dual(t).primal.detach() if fwd._current_level >= 0 else t.detach()

    y = dil.root(residual, ZERO, (plain(x), plain(a))).value
    return dil.attach(residual, y, (x, a))


def by_krylov(x, a):
    def score(y, x, a):
        return 0.5 * ((y - x) ** 2).sum() + 0.25 * (a * y**4).sum() + torch.logsumexp(W @ y, 0)

    solver = dil.Newton(linear_solver=dil.CG())
    return dil.argmin(score, ZERO, (x, a), solver=solver, linear_solver=dil.Auto(dense_below=0)).value


def by_layer(x, a):
    layer = dil.RootLayer(lambda y, pair: pair[1] * y**3 + y + W @ torch.tanh(y) - pair[0], init=lambda x: ZERO, batch_dims=0)
    return layer((x, a))


SOLVES = [by_argmin, by_root, by_fixed_point, by_krylov, by_layer]
ALL = [*SOLVES, by_attach]
X, A = draw(1, 3), draw(2, 3).abs() + 0.5


def differences(fn, x, step=1e-5):
    """Central differences of fn along every entry of x; the last axes are those of x."""
    columns = []
    for e in torch.eye(x.numel(), dtype=x.dtype).view(-1, *x.shape):
        columns.append((fn(x + step * e) - fn(x - step * e)) / (2 * step))
    return torch.stack(columns, dim=-1).unflatten(-1, x.shape)


def plain_jacobian(solve, x, a):
    """dy/dx by ordinary autograd, row by row."""
    x = x.detach().clone().requires_grad_()
    y = solve(x, a)
    return torch.stack([grad(entry, x, retain_graph=True)[0] for entry in y])


@pytest.mark.parametrize("solve", ALL)
def test_plain_jacobian(solve):
    """The yardstick of all that follows."""
    close(plain_jacobian(solve, X, A), differences(lambda x: by(solve)(x, A), X), DIFFERENCE)


def by(solve):
    """For differences of a solution found elsewhere: the function that finds it."""
    return by_root if solve is by_attach else solve


@pytest.mark.parametrize("solve", ALL)
@pytest.mark.parametrize("jacobian", [jacrev, jacfwd])
def test_jacobians(solve, jacobian):
    J = plain_jacobian(solve, X, A)
    close(jacobian(solve)(X, A), J)
    both = jacobian(solve, argnums=(0, 1))(X, A)
    close(both[0], J)
    close(both[1], differences(lambda a: by(solve)(X, a), A), DIFFERENCE)


@pytest.mark.parametrize("solve", ALL)
def test_grad_vjp_jvp(solve):
    J, v = plain_jacobian(solve, X, A), draw(3, 3)
    close(torch.func.grad(lambda x: (v * solve(x, A)).sum())(X), v @ J)
    gradient, value = grad_and_value(lambda x: (v * solve(x, A)).sum())(X)
    close(gradient, v @ J)
    close(value, (v * solve(X, A)).sum())
    y, pull = vjp(lambda x: solve(x, A), X)
    close(pull(v)[0], v @ J)
    y2, tangent = jvp(lambda x: solve(x, A), (X,), (v,))
    close(tangent, J @ v)
    close(y, y2)
    assert not y.requires_grad and not tangent.requires_grad


@pytest.mark.parametrize("solve", ALL)
def test_second_order(solve):
    """Hessian tensors of y, by every pair of modes."""
    expected = differences(lambda x: plain_jacobian(by(solve), x, A), X)
    for outer in (jacrev, jacfwd):
        for inner in (jacrev, jacfwd):
            close(outer(inner(solve))(X, A), expected, DIFFERENCE)
    close(jacrev(jacrev(solve))(X, A), jacfwd(jacrev(solve))(X, A))
    close(jacfwd(jacfwd(solve))(X, A), jacfwd(jacrev(solve))(X, A))
    close(hessian(lambda x: solve(x, A).sum())(X), expected.sum(0), DIFFERENCE)


@pytest.mark.parametrize("solve", [by_argmin, by_root])
def test_mixed_second_order(solve):
    """∂²y/∂x∂a."""
    mixed = jacrev(jacfwd(solve, argnums=0), argnums=1)(X, A)
    close(mixed, differences(lambda a: plain_jacobian(solve, X, a), A), DIFFERENCE)
    close(mixed, jacfwd(jacrev(solve, argnums=1), argnums=0)(X, A).transpose(1, 2))


@pytest.mark.parametrize("solve", [by_argmin, by_root])
def test_third_order(solve):
    def second(x):
        return jacfwd(jacrev(lambda x: solve(x, A).sum()))(x)

    expected = differences(second, X)
    close(jacrev(second)(X), expected, DIFFERENCE)
    close(jacfwd(second)(X), expected, DIFFERENCE)


# --- vmap -------------------------------------------------------------------------------------------------------------------

XS = draw(4, 4, 3)


def loop(fn, *batches):
    return torch.stack([fn(*row) for row in zip(*batches, strict=True)])


@pytest.mark.parametrize("solve", SOLVES)
def test_vmap(solve):
    close(vmap(solve, in_dims=(0, None))(XS, A), loop(lambda x: solve(x, A), XS))
    both = draw(5, 4, 3).abs() + 0.5
    close(vmap(solve)(XS, both), loop(solve, XS, both))
    close(vmap(solve, in_dims=(1, 0), out_dims=1)(XS.T, both), loop(solve, XS, both).T)


@pytest.mark.parametrize("solve", [by_root, by_fixed_point, by_layer])
def test_vmap_over_no_copies(solve):
    """Of no copies there are no results, as of torch's own functions (whose rule for `0.5 * x.sum()` fails, though)."""
    none, shape = XS[:0], solve(X, A).shape
    assert vmap(solve, in_dims=(0, None))(none, A).shape == (0, *shape)
    assert vmap(jacrev(solve), in_dims=(0, None))(none, A).shape == (0, *shape, *X.shape)
    assert vmap(jacfwd(solve), in_dims=(0, None))(none, A).shape == (0, *shape, *X.shape)
    assert vmap(vmap(solve, in_dims=(0, None)), in_dims=(0, None))(none.expand(2, 0, 3), A).shape == (2, 0, *shape)


@pytest.mark.parametrize("solve", SOLVES)
def test_vmap_of_jacobians(solve):
    expected = loop(lambda x: plain_jacobian(solve, x, A), XS)
    close(vmap(jacrev(solve), in_dims=(0, None))(XS, A), expected)
    close(vmap(jacfwd(solve), in_dims=(0, None))(XS, A), expected)
    whole = torch.zeros(4, 3, 4, 3, dtype=torch.float64)
    for i in range(4):
        whole[i, :, i] = expected[i]
    close(jacrev(vmap(solve, in_dims=(0, None)))(XS, A), whole)
    close(jacfwd(vmap(solve, in_dims=(0, None)))(XS, A), whole)


@pytest.mark.parametrize("solve", SOLVES)
def test_grad_of_vmap(solve):
    """Of a shared and of a per-sample argument."""
    v = draw(6, 4, 3)

    def loss(xs, a):
        return (v * vmap(solve, in_dims=(0, None))(xs, a)).sum()

    xs, a = XS.clone().requires_grad_(), A.clone().requires_grad_()
    expected = grad(sum((v[i] * solve(xs[i], a)).sum() for i in range(4)), (xs, a))
    for mine, other in zip(torch.func.grad(loss, argnums=(0, 1))(XS, A), expected, strict=True):
        close(mine, other)
    # Ordinary autograd through vmap.
    for mine, other in zip(grad(loss(xs, a), (xs, a)), expected, strict=True):
        close(mine, other)
    close(vmap(torch.func.grad(lambda x, v: (v * solve(x, A)).sum()))(XS, v), expected[0])


@pytest.mark.parametrize("solve", [by_argmin, by_root, by_fixed_point])
def test_vmap_of_second_order(solve):
    expected = loop(lambda x: hessian(lambda x: solve(x, A).sum())(x), XS)
    close(vmap(hessian(lambda x: solve(x, A).sum()))(XS), expected)
    close(vmap(jacrev(jacrev(lambda x: solve(x, A).sum())))(XS), expected)


@pytest.mark.parametrize("solve", SOLVES)
def test_nested_vmap(solve):
    a = draw(7, 2, 3).abs() + 0.5
    close(
        vmap(lambda a: vmap(lambda x: solve(x, a))(XS))(a),
        torch.stack([loop(lambda x, a=row: solve(x, a), XS) for row in a]),
    )


def test_vmap_over_a_batched_problem():
    """K copies of B problems: one batch of K·B."""

    def solve(x):  # (B, 3)
        return dil.argmin(
            lambda y, x: ((y - x) ** 2).sum(1) + (y**4).sum(1), torch.zeros(4, 3, dtype=torch.float64), (x,)
        ).value

    stack = draw(8, 2, 4, 3)
    close(vmap(solve)(stack), loop(solve, stack))
    close(vmap(jacrev(lambda x: solve(x).sum()))(stack), loop(jacrev(lambda x: solve(x).sum()), stack))


def test_vmap_over_the_start():
    starts = 2 * torch.sign(draw(9, 4, 1))

    def solve(y0, a):
        return dil.argmin(lambda y, a: ((y**2 - a) ** 2).sum(), y0, (a,)).value

    a = torch.tensor([1.5], dtype=torch.float64)
    close(vmap(solve, in_dims=(0, None))(starts, a), loop(lambda y0: solve(y0, a), starts))
    J = vmap(jacrev(solve, argnums=1), in_dims=(0, None))(starts, a)
    close(J, (torch.sign(starts) / (2 * a.sqrt())).unsqueeze(2))
    close(jacrev(solve, argnums=0)(starts[0], a), torch.zeros(1, 1, dtype=torch.float64))


def test_vmap_freezes_what_is_done():
    """Samples of a vmapped solve stop on their own, as in a batch."""
    xs = torch.tensor([[0.0], [1.0], [100.0]], dtype=torch.float64)
    reports = []

    def solve(x):
        sol = dil.root(lambda y, x: y**3 + y - x, torch.zeros(1, dtype=torch.float64), (x,))
        reports.append(sol.report)
        return sol.value

    vmap(solve)(xs)
    steps = reports[0].forward.stats.steps
    assert steps.shape == (3,) and steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize("transform", [vmap, jacrev, jacfwd], ids=["vmap", "jacrev", "jacfwd"])
def test_failures_are_not_lost_in_a_transform(transform):
    def solve(x, policy):
        return dil.root(lambda y, x: y**2 + x, torch.ones(1, dtype=torch.float64), (x,), on_failure=policy).value

    xs = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    x = xs if transform is vmap else xs[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", dil.ConvergenceWarning)
        transform(lambda x: solve(x, "warn"))(x)
    assert str(caught[0].message).startswith("The forward solve (Newton) failed for 1 of")
    assert {w.filename for w in caught if xs.device.type == "cpu" or "forward" in str(w.message)} == {__file__}
    with pytest.raises(dil.ConvergenceError):
        transform(lambda x: solve(x, "raise"))(x)


def test_policy_per_sample_under_vmap():
    xs = torch.tensor([[-1.0], [1.0], [-4.0]], dtype=torch.float64)

    def solve(x, policy):
        return dil.root(lambda y, x: y**2 + x, torch.ones(1, dtype=torch.float64), (x,), on_failure=policy).value.sum()

    good = torch.tensor([[-0.5], [0.0], [-0.25]], dtype=torch.float64)
    close(vmap(torch.func.grad(lambda x: solve(x, "zero")))(xs), good)
    marked = vmap(torch.func.grad(lambda x: solve(x, "nan")))(xs)
    assert marked.isnan().flatten().tolist() == [False, True, False]


# --- arguments --------------------------------------------------------------------------------------------------------------


def test_dict_arguments():
    def residual(y, args):
        return args["a"]["inner"] * y**3 + y - args["x"][0]

    def solve(x, a):
        return dil.root(residual, ZERO, ({"x": [x], "a": {"inner": a}, "name": "text", "number": 3},)).value

    expected = plain_jacobian(solve, X, A)
    close(jacrev(solve)(X, A), expected)
    close(jacfwd(solve)(X, A), expected)
    close(vmap(jacrev(solve), in_dims=(0, None))(XS, A), loop(lambda x: plain_jacobian(solve, x, A), XS))


def test_nested_unknown():
    def residual(y, x):
        return {"u": y["u"] ** 3 + y["v"][0] - x, "v": (y["v"][0] - y["u"],)}

    def solve(x):
        y = dil.root(residual, {"u": ZERO, "v": (ZERO,)}, (x,)).value
        return y["u"] + 2 * y["v"][0]

    expected = plain_jacobian(lambda x, _: solve(x), X, None)
    for jacobian in (jacrev, jacfwd):
        close(jacobian(solve)(X), expected)
    close(vmap(jacrev(solve))(XS), loop(lambda x: plain_jacobian(lambda x, _: solve(x), x, None), XS))


def test_integers_among_the_arguments():
    index, mask = torch.tensor([2, 0, 1]), torch.tensor([True, False, True])

    def solve(x, index=index):
        def residual(y, x, index, mask):
            return y**3 + y[index] * 0.3 + y - torch.where(mask, x, 2 * x)

        return dil.root(residual, ZERO, (x, index, mask)).value

    expected = plain_jacobian(lambda x, _: solve(x), X, None)
    for jacobian in (jacrev, jacfwd):
        close(jacobian(solve)(X), expected)
    close(jacrev(jacrev(solve))(X), jacfwd(jacrev(solve))(X))
    close(vmap(jacrev(solve))(XS), loop(jacrev(solve), XS))
    orders = torch.tensor([[2, 0, 1], [0, 1, 2], [1, 2, 0], [2, 1, 0]])
    close(vmap(solve)(XS, orders), loop(solve, XS, orders))


@pytest.mark.parametrize("transform", [torch.func.grad, jacfwd, jacrev], ids=["grad", "jacfwd", "jacrev"])
def test_captured_tensors_are_refused(transform):
    """A closure over what is being transformed would lose its derivative: an error, never a silent zero."""
    sentence = r"^residual uses a tensor that requires grad or is being transformed .* pass every such tensor in args .*\.$"
    with pytest.raises(RuntimeError, match=sentence):
        transform(lambda x: dil.root(lambda y: y**3 + y - x, ZERO).value.sum())(X)
    tracked = A.clone().requires_grad_()
    with pytest.raises(RuntimeError, match=sentence):
        transform(lambda x: dil.root(lambda y, x: y**3 + tracked * y - x, ZERO, (x,)).value.sum())(X)
    # What is not tracked may be captured.
    transform(lambda x: dil.root(lambda y, x: y**3 + A * y - x, ZERO, (x,)).value.sum())(X)


@dataclasses.dataclass
class Held:
    """No part of a tree of tensors."""

    x: torch.Tensor


def test_tensors_in_objects_are_refused():
    with pytest.raises(RuntimeError, match=r"pass every such tensor in args \(or in x\), in tuples, lists or dicts, "):
        torch.func.grad(lambda x: dil.root(lambda y, a: y**3 + y - a.x, ZERO, (Held(x),)).value.sum())(X)


def test_captured_batches_are_refused():
    with pytest.raises(RuntimeError, match=r"^score uses a tensor .* being transformed"):
        vmap(lambda x: dil.argmin(lambda y: ((y - x) ** 2).sum(), ZERO).value)(XS)
    with pytest.raises(RuntimeError, match=r"^g uses a tensor"):
        vmap(lambda x: dil.fixed_point(lambda y: 0.5 * y + x, ZERO).value)(XS)


def test_callable_solvers():
    """Under grad and jvp any solver will do; vmap cannot batch what it cannot look into."""

    def newton(fn, y0):
        y = y0
        for _ in range(50):
            J = torch.autograd.functional.jacobian(fn, y)
            y = y - torch.linalg.solve(J, fn(y))
        return y.detach()

    def solve(x):
        return dil.root(lambda y, x: y**3 + y + W @ y - x, ZERO, (x,), solver=newton).value

    expected = plain_jacobian(lambda x, _: solve(x), X, None)
    close(jacrev(solve)(X), expected)
    close(jacfwd(solve)(X), expected)
    with pytest.raises(RuntimeError, match=r"^solver is a callable, which torch.vmap cannot batch: .*\.$"):
        vmap(solve)(XS)
    # The jacobian of a solve batches only cotangents, not the solve.
    close(jacrev(jacrev(solve))(X), jacfwd(jacrev(solve))(X))


# --- modules ----------------------------------------------------------------------------------------------------------------


class Energy(nn.Module):
    """A small convex-enough score with parameters."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 5), nn.Softplus(), nn.Linear(5, 1))
        self.register_buffer("scale", torch.tensor(1.5))

    def forward(self, y, x):
        return self.scale * ((y - x) ** 2).sum(-1) + 0.3 * self.body(y).squeeze(-1)


def make_layer(seed=0):
    torch.manual_seed(seed)
    return dil.ArgminLayer(Energy(), init=(3,)).double()


def test_functional_call():
    layer = make_layer()
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(parameters, x):
        return (functional_call(layer, parameters, (x,)) ** 2).sum()

    y = (layer(XS) ** 2).sum()
    gradients = grad(y, list(layer.parameters()), materialize_grads=True)  # a constant in a score moves no minimum
    expected = dict(zip(parameters, gradients, strict=True))
    mine = torch.func.grad(loss)(parameters, XS)
    for name in parameters:
        close(mine[name], expected[name])
    # Per-sample gradients, as for any module.
    each = vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, XS.unsqueeze(1))
    for name in parameters:
        close(each[name].sum(0), expected[name])
    # Forward mode along the gradient.
    _, along = jvp(lambda p: loss(p, XS), (parameters,), (expected,))
    close(along, sum((g**2).sum() for g in expected.values()))


def test_functional_call_uses_the_parameters_given():
    layer, other = make_layer(0), make_layer(1)
    swapped = {name: p.detach() for name, p in other.named_parameters()}
    close(functional_call(layer, swapped, (XS,)), other(XS).detach())
    mine = torch.func.grad(lambda p: (functional_call(layer, p, (XS,)) ** 2).sum())(swapped)
    expected = grad((other(XS) ** 2).sum(), list(other.parameters()), materialize_grads=True)
    for value, like in zip(mine.values(), expected, strict=True):
        close(value, like)


def test_hessian_of_a_module():
    layer = make_layer()
    bias = layer.function.body[0].bias
    name = "function.body.0.bias"

    def loss(value):
        return (functional_call(layer, {name: value}, (XS,)) ** 2).sum()

    H = hessian(loss)(bias.detach())
    close(H, differences(lambda b: torch.func.grad(loss)(b), bias.detach()), DIFFERENCE)
    (first,) = grad((layer(XS) ** 2).sum(), bias, create_graph=True)
    close(H, torch.stack([grad(entry, bias, retain_graph=True)[0] for entry in first]))


def test_ensemble():
    """Three models as one: torch.func.stack_module_state."""
    layers = [make_layer(seed) for seed in range(3)]
    parameters, buffers = stack_module_state(layers)
    base = make_layer(3)

    def call(parameters, buffers, x):
        return functional_call(base, (parameters, buffers), (x,))

    out = vmap(call, in_dims=(0, 0, None))(parameters, buffers, XS)
    close(out, torch.stack([layer(XS) for layer in layers]))
    (out**2).sum().backward()
    for i, layer in enumerate(layers):
        expected = grad((layer(XS) ** 2).sum(), list(layer.parameters()), materialize_grads=True)
        for (name, _), value in zip(layer.named_parameters(), expected, strict=True):
            close(parameters[name].grad[i], value)


def test_last_solution_under_transforms():
    """The start that a layer remembers must not be a tensor of a transform that has ended."""
    torch.manual_seed(0)
    layer = dil.ArgminLayer(Energy(), init=dil.LastSolution((3,))).double()
    expected = layer(XS[:1]).detach()
    layer = dil.ArgminLayer(layer.function, init=dil.LastSolution((3,)))
    detached = {name: p.detach() for name, p in layer.named_parameters()}
    vmap(lambda x: functional_call(layer, detached, (x,)))(XS.unsqueeze(1))
    close(layer(XS[:1]).detach(), expected)
    torch.func.grad(lambda x: functional_call(layer, detached, (x,)).sum())(XS[:1])
    close(layer(XS[:1]).detach(), expected)


# --- forward mode without torch.func ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("solve", ALL)
def test_dual_numbers(solve):
    t, s = draw(10, 3), draw(11, 3)
    J = plain_jacobian(solve, X, A)
    J_a = jacrev(by(solve), argnums=1)(X, A)
    with fwd.dual_level():
        y = solve(fwd.make_dual(X, t), A)
        value, tangent = fwd.unpack_dual(y)
        close(tangent, J @ t)
        close(value, by(solve)(X, A))
        both = fwd.unpack_dual(solve(fwd.make_dual(X, t), fwd.make_dual(A, s))).tangent
        close(both, J @ t + J_a @ s)
        assert not tangent.requires_grad


def test_dual_numbers_by_a_closure():
    """Outside torch.func captured tensors are as good as args, in forward mode too."""
    t = draw(10, 3)
    J = plain_jacobian(by_root, X, A)
    with fwd.dual_level():
        x = fwd.make_dual(X, t)
        y = dil.root(lambda y: A * y**3 + y + W @ torch.tanh(y) - x, ZERO).value
        close(fwd.unpack_dual(y).tangent, J @ t)
        plain = dil.root(lambda y: y**3 + y - X, ZERO).value
        assert fwd.unpack_dual(plain).tangent is None


@pytest.mark.parametrize("solve", [by_argmin, by_root, by_fixed_point, by_krylov, by_layer])
def test_reverse_over_forward(solve):
    """d/dx of vᵀ J(x) t, by a backward pass through a tangent."""
    t, v = draw(10, 3), draw(12, 3)
    H = jacfwd(jacrev(solve))(X, A)  # (y, x, x)
    x = X.clone().requires_grad_()
    with fwd.dual_level():
        y = solve(fwd.make_dual(x, t), A)
        tangent = fwd.unpack_dual(y).tangent
        close(tangent.detach(), plain_jacobian(solve, X, A) @ t)
        (mine,) = grad((v * tangent).sum(), x)
    close(mine, torch.einsum("i,ijk,j->k", v, H, t))


@pytest.mark.parametrize("solve", [by_argmin, by_root, by_fixed_point, by_krylov, by_layer])
def test_forward_over_reverse(solve):
    """The tangent of a gradient: a Hessian-vector product."""
    t, v = draw(10, 3), draw(12, 3)
    H = jacfwd(jacrev(solve))(X, A)
    x = X.clone().requires_grad_()
    with fwd.dual_level():
        dual = fwd.make_dual(x, t)
        y = solve(dual, A)
        (gradient,) = grad((v * y).sum(), dual, create_graph=True)
        close(fwd.unpack_dual(gradient).tangent.detach(), torch.einsum("i,ijk,j->k", v, H, t))


# --- third order by ordinary autograd ---------------------------------------------------------------------------------------


def third_order_loss(x):
    """A closure over z = x sin x and x at once, beside an explicit argument."""
    z = x * x.sin()
    y = dil.root(lambda y, a: a * y**3 + (1 + z**2) * y + W @ torch.tanh(y) - x, ZERO, (A,)).value
    return (y**2 + z * y).sum()


def third_order_argmin_loss(x):
    z = x * x.sin()
    y = dil.argmin(lambda y: ((1 + z**2) * (y - x) ** 2).sum() + 0.25 * (y**4).sum() + torch.logsumexp(W @ y, 0), ZERO).value
    return (y**2 + z * y).sum()


def nth_gradient(loss, x, order, directions):
    """The gradient of the directional derivatives of orders below."""
    x = x.detach().clone().requires_grad_()
    value = loss(x)
    for k in range(order):
        (value,) = grad(value, x, create_graph=k < order - 1)
        if k < order - 1:
            value = (value * directions[k]).sum()
    return value.detach()


@pytest.mark.parametrize("loss", [third_order_loss, third_order_argmin_loss])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_orders_with_a_closure_over_a_leaf_and_its_product(loss, order):
    directions = [draw(13, 3), draw(14, 3)]
    mine = nth_gradient(loss, X, order, directions)
    if order == 1:
        expected = differences(lambda x: loss(x).detach(), X)
    else:

        def below(x):
            return (nth_gradient(loss, x, order - 1, directions) * directions[order - 2]).sum()

        expected = differences(below, X)
    close(mine, expected, DIFFERENCE)


def test_torch_func_and_autograd_agree_on_third_order():
    def loss(x):
        return (by_argmin(x, A) ** 2).sum()

    directions = [draw(13, 3), draw(14, 3)]
    T = jacfwd(hessian(loss))(X)
    expected = torch.einsum("ijk,i,j->k", T, *directions)
    close(nth_gradient(loss, X, 3, directions), expected)


def test_complex_arguments_have_gradients():
    t = torch.tensor([1.0 + 0.6j, 1.2 - 0.2j], dtype=torch.complex128)

    def f(t):
        score = lambda y, t: (0.5 * y**2 + 0.1 * y**4 - y * (t * t).real).sum()  # noqa: E731
        return dil.argmin(score, torch.zeros(2, dtype=torch.float64), (t,)).value.sum()

    leaf = t.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(f)(t), expected)


def test_functions_that_need_a_regular_matrix():
    A, b = 2 * torch.eye(2, dtype=torch.float64) + 0.1, torch.ones(2, dtype=torch.float64)

    def f(A):
        return dil.root(lambda y, A: y**3 + torch.linalg.solve(A, y - b), torch.zeros_like(b), (A,)).value.sum()

    leaf = A.clone().requires_grad_()
    (expected,) = torch.autograd.grad(f(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(f)(A), expected)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(f))(A.expand(3, 2, 2))[1], expected)


def test_a_callable_solver_under_vmap_is_refused_also_without_args():
    def score(y):
        return ((y - 1) ** 2).sum()

    with pytest.raises(RuntimeError, match=r"torch\.vmap cannot batch"):
        torch.vmap(lambda y0: dil.argmin(score, y0, solver=lambda fn, y0: torch.ones_like(y0)).value)(torch.zeros(3, 2))
