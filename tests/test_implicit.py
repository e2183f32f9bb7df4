"""The theorem: what it reaches, what it leaves behind, and what it refuses."""

import gc
import os
import sys
import threading
import time

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import nn
from torch.autograd import grad

import torchdil as dil

RTOL = 1e-8  # of derivatives, against formulas


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def close(actual, expected):
    torch.testing.assert_close(actual, torch.as_tensor(expected, dtype=actual.dtype), rtol=RTOL, atol=RTOL)


# y³ + y = a for every entry, whose derivatives are known: y' = 1 / (3y² + 1), y'' = -6 y y'³.


def cubic_root(a):
    y = torch.ones_like(a)
    for _ in range(60):
        y = y - (y**3 + y - a) / (3 * y**2 + 1)
    return y


def first(y):
    return 1 / (3 * y**2 + 1)


def second(y):
    return -6 * y * first(y) ** 3


GLOBAL = None


class Holder:
    """An object with a tensor inside, and a method that uses it."""

    def __init__(self, a):
        self.a = a

    def residual(self, y):
        return y**3 + y - self.a

    def __call__(self, y):
        return self.residual(y)


def by_cell(a):
    return lambda y: y**3 + y - a


def by_list(a):
    held = [None, (a,)]
    return lambda y: y**3 + y - held[1][0]


def by_dict(a):
    held = {"inner": {"a": a}}
    return lambda y: y**3 + y - held["inner"]["a"]


def by_attribute(a):
    holder = Holder(a)
    return lambda y: y**3 + y - holder.a


def by_method(a):
    return Holder(a).residual


def by_callable_object(a):
    return Holder(a)


def by_global(a):
    global GLOBAL
    GLOBAL = a
    return lambda y: y**3 + y - GLOBAL


def by_default(a):
    return lambda y, a=a: y**3 + y - a


def by_keyword_default(a):
    def residual(y, *, a=a):
        return y**3 + y - a

    return residual


def by_partial(a):
    from functools import partial

    return partial(lambda y, a: y**3 + y - a, a=a)


def by_inner_function(a):
    def inner():
        return a

    return lambda y: y**3 + y - inner()


def by_buffer(a):
    module = nn.Module()
    module.register_buffer("a", a)
    return lambda y: y**3 + y - module.a


WAYS = [
    by_cell,
    by_list,
    by_dict,
    by_attribute,
    by_method,
    by_callable_object,
    by_global,
    by_default,
    by_keyword_default,
    by_partial,
    by_inner_function,
    by_buffer,
]


def solve_root(residual, y0):
    return dil.root(residual, y0).value


def solve_fixed_point(residual, y0):
    return dil.fixed_point(lambda y: y - residual(y) / 10, y0, solver=dil.Newton()).value


def solve_attach(residual, y0):
    with torch.no_grad():
        y = dil.root(residual, y0).value
    return dil.attach(residual, y)


def solve_argmin(residual, y0):
    # f with ∇f = residual: f(y) = ∫ residual. y⁴/4 + y²/2 - a y, written by the residual at 0, which is -a.
    return dil.argmin(lambda y: (y**4 / 4 + y**2 / 2 + residual(torch.zeros_like(y)) * y).sum(), y0).value


SOLVES = [solve_root, solve_fixed_point, solve_attach, solve_argmin]


@pytest.mark.parametrize("solve", SOLVES)
@pytest.mark.parametrize("way", WAYS)
def test_closures_over_a_leaf(way, solve):
    a = tensor(0.5, 2.0, -3.0).requires_grad_()
    y = solve(way(a), torch.ones_like(a))
    exact = cubic_root(a.detach())
    close(y.detach(), exact)
    (da,) = grad(y.sum(), a, create_graph=True)
    close(da.detach(), first(exact))
    (dda,) = grad(da.sum(), a)
    close(dda, second(exact))


@pytest.mark.parametrize("solve", SOLVES)
@pytest.mark.parametrize("way", WAYS)
def test_closures_over_a_non_leaf(way, solve):
    """a = x sin x: derivatives to x and to a itself, of both orders."""
    x = tensor(0.5, 2.0, -3.0).requires_grad_()
    a = x * x.sin()
    y = solve(way(a), torch.ones_like(a))
    exact, da_dx = cubic_root(a.detach()), (x.sin() + x * x.cos()).detach()
    dda_dx = (2 * x.cos() - x * x.sin()).detach()
    (dx,) = grad(y.sum(), x, create_graph=True)
    close(dx.detach(), first(exact) * da_dx)
    (ddx,) = grad(dx.sum(), x, retain_graph=True)
    close(ddx, second(exact) * da_dx**2 + first(exact) * dda_dx)
    (da,) = grad(y.sum(), a, create_graph=True)
    close(da.detach(), first(exact))
    (dda,) = grad(da.sum(), a)
    close(dda, second(exact))


def test_first_order_without_create_graph_needs_no_search():
    """A tensor that no closure shows: its gradient is right, and only the second order is refused."""
    x = tensor(0.5, 2.0).requires_grad_()

    class Hiding:
        __slots__ = ("make",)  # nothing in a __dict__ to look at

        def __init__(self, make):
            self.make = make

        def __call__(self, y):
            return y**3 + y - self.make()

    a = x * x.sin()
    box = np.array([None], dtype=object)
    box[0] = a
    residual = Hiding(lambda: box[0])
    y = dil.root(residual, torch.ones_like(a)).value
    exact, da_dx = cubic_root(a.detach()), (x.sin() + x * x.cos()).detach()
    (dx,) = grad(y.sum(), x, retain_graph=True)
    close(dx, first(exact) * da_dx)
    if a.device.type == "cpu":  # else it is followed to its leaves
        with pytest.raises(
            RuntimeError, match=r"^The function of this implicit layer uses a non-leaf tensor .* pass it in args .*\.$"
        ):
            grad(y.sum(), x, create_graph=True)
    else:
        close(grad(y.sum(), x, create_graph=True)[0].detach(), dx)
    # Said in args it is no longer hidden.
    y = dil.root(lambda y, a: y**3 + y - a, torch.ones_like(a), (a,)).value
    (dx,) = grad(y.sum(), x, create_graph=True)
    assert dx.requires_grad


def test_a_hidden_leaf_needs_no_search_at_all():
    """Leaves are found in the graph itself."""
    a = tensor(0.5, 2.0).requires_grad_()
    box = np.array([None], dtype=object)
    box[0] = a
    y = dil.root(lambda y: y**3 + y - box[0], torch.ones_like(a)).value
    (da,) = grad(y.sum(), a, create_graph=True)
    (dda,) = grad(da.sum(), a)
    close(dda, second(cubic_root(a.detach())))


def test_a_tensor_made_inside_the_function():
    """The non-leaf is made afresh at each call: then it is no boundary, and its leaf is."""
    x = tensor(0.5, 2.0).requires_grad_()
    y = dil.root(lambda y: y**3 + y - x * x.sin(), torch.ones_like(x)).value
    (dx,) = grad(y.sum(), x, create_graph=True)
    (ddx,) = grad(dx.sum(), x)
    exact, da = cubic_root((x * x.sin()).detach()), (x.sin() + x * x.cos()).detach()
    close(ddx, second(exact) * da**2 + first(exact) * (2 * x.cos() - x * x.sin()).detach())


def test_a_leaf_and_a_tensor_made_of_it():
    """z = x sin x and x itself, both used inside: each keeps its own share."""
    x = tensor(0.5, 1.2).requires_grad_()
    z = x * x.sin()

    def explicit(x):
        return cubic_root(x * x.sin() + 2 * x)

    y = dil.root(lambda y: y**3 + y - z - 2 * x, torch.ones_like(x)).value
    dx, dz = grad(y.sum(), (x, z), create_graph=True)
    exact = cubic_root((z + 2 * x).detach())
    close(dz.detach(), first(exact))  # z's own share
    (expected,) = grad(explicit(x).sum(), x, create_graph=True)
    close(dx.detach(), expected.detach())
    close(grad(dx.sum(), x, retain_graph=True)[0], grad(expected.sum(), x)[0])
    close(grad(dz.sum(), z, retain_graph=True)[0], second(exact))
    close(grad(dz.sum(), x)[0], second(exact) * (x.sin() + x * x.cos() + 2).detach())


def test_retain_grad_and_hooks_on_intermediates():
    x = tensor(0.5, 2.0).requires_grad_()
    z = 3 * x
    z.retain_grad()
    seen = {"x": [], "z": [], "y": []}
    x.register_hook(lambda g: seen["x"].append(g.clone()))
    z.register_hook(lambda g: seen["z"].append(g.clone()))
    y = dil.root(lambda y: y**3 + y - z, torch.ones_like(x)).value
    y.register_hook(lambda g: seen["y"].append(g.clone()))
    y.sum().backward()
    exact = cubic_root(z.detach())
    close(z.grad, first(exact))
    close(x.grad, 3 * first(exact))
    assert {name: len(calls) for name, calls in seen.items()} == {"x": 1, "z": 1, "y": 1}
    close(seen["z"][0], first(exact))


@pytest.mark.parametrize("leaf", [True, False], ids=["leaf", "non-leaf"])
def test_a_hook_that_changes_the_gradient(leaf):
    """It is called once in each backward pass, whatever walks the library makes of its own."""
    x = tensor(0.5, 2.0).requires_grad_()
    z = x if leaf else 1 * x
    calls = []
    handle = z.register_hook(lambda g: calls.append(1) or 10 * g)
    y = dil.root(lambda y: y**3 + y - z, torch.ones_like(x)).value
    exact = cubic_root(x.detach())
    for create_graph in (False, True):
        calls.clear()
        (dx,) = grad(y.sum(), x, create_graph=create_graph, retain_graph=True)
        close(dx.detach(), 10 * first(exact))
        assert len(calls) == 1
    (ddx,) = grad(dx.sum(), x, retain_graph=True)
    close(ddx, 100 * second(exact))
    handle.remove()
    close(grad(y.sum(), x)[0], first(exact))


@pytest.mark.parametrize("solve", SOLVES)
def test_plain_tensors_give_plain_tensors(solve):
    a = tensor(0.5, 2.0)
    y = solve(by_cell(a), torch.ones_like(a))
    assert not y.requires_grad and y.is_leaf
    np.testing.assert_allclose(y.numpy(), cubic_root(a).numpy(), rtol=RTOL)


def test_a_start_that_requires_grad_does_not_matter():
    y0 = torch.ones(2, dtype=torch.float64, requires_grad=True)
    with pytest.warns(UserWarning, match="y has no gradient: y0 requires grad"):
        y = dil.root(by_cell(tensor(0.5, 2.0)), y0).value
    assert not y.requires_grad
    a = tensor(0.5, 2.0).requires_grad_()
    y = dil.root(by_cell(a), 1 * y0).value
    assert grad(y.sum(), y0, allow_unused=True, retain_graph=True) == (None,)


def test_a_view_of_a_parameter_that_was_made_without_grad():
    """Torch says of such a view that it requires grad, and has no edge for it."""
    theta = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        row = theta.view(1, 3)
        y = dil.argmin(lambda y, a: ((y - a[0]) ** 2).sum(), torch.zeros(3), (row,)).value
    assert not y.requires_grad and torch.allclose(y, torch.ones(3))


def test_no_grad():
    a = tensor(0.5, 2.0).requires_grad_()
    with torch.no_grad():
        sol = dil.root(by_cell(a), torch.ones_like(a))
    assert not sol.value.requires_grad
    assert int(sol.status) == dil.Status.converged
    close(torch.tensor(sol.value.numpy()), cubic_root(a.detach()))
    # The outside does not matter to the inside: a gradient within a solve that is not tracked.
    with torch.no_grad():
        y = dil.argmin(lambda y: (y**4 / 4 + y**2 / 2 - a * y).sum(), torch.ones_like(a)).value
    close(y, cubic_root(a.detach()))


@pytest.mark.parametrize("solve", SOLVES)
def test_inference_mode(solve):
    a = tensor(0.5, 2.0)
    with torch.inference_mode():
        y = solve(by_cell(a), torch.ones_like(a))
    close(y.clone(), cubic_root(a))


def test_backward_twice():
    a = tensor(0.5, 2.0).requires_grad_()

    def loss():
        return (dil.root(lambda y: y**3 + y - a.sin() * a, torch.ones_like(a)).value ** 2).sum()

    once = loss()
    once.backward(retain_graph=True)
    kept = a.grad.clone()
    once.backward()
    assert torch.equal(a.grad, 2 * kept)
    again = loss()
    again.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        again.backward()


def test_parameters_changed_in_between():
    """In place between forward and double backward: torch notices what is saved, the library what is not."""
    for change in (lambda a: a.add_(1.0), lambda a: a.data.add_(1.0)):
        a = tensor(0.5, 2.0).requires_grad_()
        y = dil.root(lambda y, a: y**3 + a * y - 1, torch.ones_like(a), (a,)).value
        with torch.no_grad():
            change(a)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|gave another value"):
            grad(y.sum(), a, create_graph=True)


def test_a_module_trained_in_between():
    linear = nn.Linear(2, 2).double()
    with torch.no_grad():
        linear.weight.mul_(0.3)
    y = dil.fixed_point(lambda y: torch.tanh(linear(y)), torch.zeros(2, dtype=torch.float64)).value
    optimiser = torch.optim.SGD(linear.parameters(), lr=0.1)
    for p in linear.parameters():
        p.grad = torch.ones_like(p)
    optimiser.step()
    with pytest.raises(RuntimeError):
        grad(y.sum(), linear.weight, create_graph=True)


def test_a_random_function():
    """A dropout mask that is drawn anew would make a second order that belongs to another function."""
    torch.manual_seed(0)
    a = torch.ones(50, dtype=torch.float64, requires_grad=True)
    frozen = []

    def residual(y):
        mask = nn.functional.dropout(torch.ones_like(y), 0.5)
        return y - 0.1 * (frozen[0] if frozen else mask) * y - a

    frozen.append(torch.ones(50, dtype=torch.float64))
    y = dil.root(residual, torch.ones_like(a)).value
    frozen.clear()
    grad(y.sum(), a, retain_graph=True)  # the first order runs on the graph that is there
    with pytest.raises(RuntimeError, match=r"gave another value when evaluated again .* deterministic \(no dropout\)"):
        grad(y.sum(), a, create_graph=True)


def test_dropout_in_the_layer_is_not_silent():
    torch.manual_seed(0)
    linear, dropout = nn.Linear(20, 20).double(), nn.Dropout(0.5)
    with torch.no_grad():
        linear.weight.mul_(0.3)
    with pytest.warns(dil.ConvergenceWarning):
        dil.fixed_point(lambda y: dropout(torch.tanh(linear(y))), torch.zeros(20, dtype=torch.float64))


# --- nothing stays behind ---------------------------------------------------------------------------------------------------


def live_tensors():
    return sum(1 for item in gc.get_objects() if issubclass(type(item), torch.Tensor))  # isinstance would wake lazy modules


def rss():
    """Resident memory in bytes."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def forward_backward(a, linear_solver=None):
    z = 2 * a
    y = dil.root(lambda y: y**3 + y - z, torch.ones_like(a), linear_solver=linear_solver).value
    return grad((y**2).sum(), a)[0]


def argmin_backward(a):
    y = dil.argmin(lambda y, a: (y**4 / 4 + y**2 / 2 - a * y).sum(-1), torch.zeros(3, 2, dtype=torch.float64), (a,)).value
    return grad((y**2).sum(), a)[0]


def double_backward(a):
    z = 2 * a
    y = dil.root(lambda y: y**3 + y - z, torch.ones_like(a)).value
    (da,) = grad((y**2).sum(), a, create_graph=True)
    return grad(da.sum(), a)[0]


def forward_only(a):
    return dil.root(lambda y: y**3 + y - 2 * a, torch.ones_like(a)).value


def failed_backward(a):
    y = dil.root(lambda y: y**3 + y - 2 * a, torch.ones_like(a), on_failure="raise", linear_solver=dil.GMRES(max_steps=1)).value
    with pytest.raises(dil.ConvergenceError):
        y.backward(tensor(1.0, 2.0))


@pytest.mark.parametrize(
    "run, calls",
    [(forward_backward, 200), (argmin_backward, 50), (forward_only, 50), (double_backward, 30), (failed_backward, 10)],
    ids=lambda item: getattr(item, "__name__", None),
)
def test_no_reference_cycles(run, calls):
    """Without the garbage collector nothing piles up: memory is free as soon as it is not needed."""
    a = tensor(0.5, 2.0).requires_grad_()
    for _ in range(15):  # until it is traced, once and for all
        run(a)
    gc.collect()
    gc.disable()
    try:
        before = live_tensors()
        for _ in range(calls):
            run(a)
        for _ in range(100):  # threads of autograd on a GPU may be late to let go
            if live_tensors() <= before + 2:
                break
            time.sleep(0.05)
        assert live_tensors() <= before + 2
    finally:
        gc.enable()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_flat():
    a = tensor(*([0.5] * 500)).requires_grad_()

    def run(calls):
        for _ in range(calls):
            z = 2 * a
            y = dil.attach(lambda y, z=z: 2 * y - z, a.detach(), linear_solver=dil.CG(), symmetric=True)
            grad(y.sum(), a)

    run(200)
    before = rss()
    run(2000)
    assert rss() - before < 4 * 2**20  # one tensor of this size a call would be 8 MB


def test_the_graph_goes_with_the_answer():
    """A report, kept, does not keep the graph."""
    import weakref

    a = tensor(0.5, 2.0).requires_grad_()
    z = 2 * a
    there = weakref.ref(z)
    report = dil.root(lambda y, z: y**3 + y - z, torch.ones_like(a), (z,)).report
    del z
    assert there() is None
    assert bool(report.forward.converged)


@pytest.mark.parametrize("linear_solver", [dil.Dense(), dil.CG(), dil.GMRES()])
def test_the_report_of_a_second_derivative_keeps_no_graph(linear_solver):
    """It would lead back to the report, in a cycle that the garbage collector cannot see."""
    a = tensor(0.5, 2.0).requires_grad_()
    counts = []
    for _ in range(3):
        for _ in range(20):
            y = dil.argmin(
                lambda y: (0.25 * y**4 + 0.5 * y**2 - a * y).sum(), torch.ones_like(a), linear_solver=linear_solver
            ).value
            (first,) = grad(y.sum(), a, create_graph=True)
        del y, first
        gc.collect()
        counts.append(live_tensors())
    assert counts[2] <= counts[1] + 2  # by then all is traced that will be


def test_deterministic():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.randn(5, 4, dtype=torch.float64)

    def run():
        layer = dil.ArgminLayer(
            lambda y, x: ((y - x) ** 2).sum(1) + model(y).squeeze(1) ** 2, init=(4,), linear_solver=dil.Auto(dense_below=0)
        )
        y = layer(x)
        return [y.detach(), *grad((y**3).sum(), list(model.parameters()))]

    for one, two in zip(run(), run(), strict=True):
        assert torch.equal(one, two)


def test_threads():
    """One layer, four threads, different problems: each gets what it would get alone."""
    torch.manual_seed(0)
    function = nn.Sequential(nn.Linear(3, 3), nn.Tanh()).double()
    with torch.no_grad():
        function[0].weight.mul_(0.4)
    layer = dil.FixedPointLayer(lambda y, x: function(y) + x, init=(3,))
    inputs = [torch.randn(50, 2, 3, dtype=torch.float64) for _ in range(4)]

    def run(xs, out):
        for x in xs:
            x = x.clone().requires_grad_()
            y = layer(x)
            out.append((y.detach(), *grad((y**2).sum(), [x, *function.parameters()])))

    alone = [[] for _ in inputs]
    for xs, out in zip(inputs, alone, strict=True):
        run(xs, out)
    together = [[] for _ in inputs]
    threads = [threading.Thread(target=run, args=pair) for pair in zip(inputs, together, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, theirs in zip(together, alone, strict=True):
        assert len(mine) == 50
        for one, two in zip(mine, theirs, strict=True):
            assert all(torch.equal(s, t) for s, t in zip(one, two, strict=True))


@pytest.mark.parametrize("order", [1, 2])
def test_saved_tensor_hooks(order):
    """Offloading what is saved changes nothing."""

    def derivative():
        a = tensor(0.5, 2.0).requires_grad_()
        z = a * a.sin()
        y = dil.root(lambda y: y**3 + y - z, torch.ones_like(a)).value
        (da,) = grad((y**2).sum(), a, create_graph=order == 2)
        return da if order == 1 else grad(da.sum(), a)[0]

    with torch.autograd.graph.save_on_cpu():
        offloaded = derivative()
    assert torch.equal(offloaded, derivative())


def test_hooks_on_saved_tensors_are_not_called_for_every_product():
    """Checkpointing recomputes, offloading copies: once a backward pass, not once a product with J."""
    a = torch.linspace(0.1, 2.0, 40, dtype=torch.float64).requires_grad_()
    A = torch.diag(torch.linspace(1, 9, 40, dtype=torch.float64))
    unpacked = []

    def unpack(t):
        unpacked.append(1)
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        sol = dil.root(lambda y: y**3 + A @ y - a, torch.ones_like(a), linear_solver=dil.GMRES())
        loss = (sol.value**2).sum()
    unpacked.clear()
    loss.backward()
    assert sol.report.backward.stats.products > 8
    assert len(unpacked) <= 4


# --- attach -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("linear_solver", [None, dil.CG(), dil.Auto(dense_below=0)], ids=["default", "CG", "Krylov"])
def test_attach_a_solution_of_scipy(symmetric, linear_solver):
    """Rosenbrock with parameters, minimised by SciPy; derivatives of both orders against those of dil.argmin."""
    theta = tensor(1.3, 20.0).requires_grad_()

    def score(y, theta):
        return (theta[0] - y[0]) ** 2 + theta[1] * (y[1] - y[0] ** 2) ** 2 + 0.1 * y[1] ** 2

    def gradient(y, theta):
        d1 = -2 * (theta[0] - y[0]) - 4 * theta[1] * y[0] * (y[1] - y[0] ** 2)
        return torch.stack([d1, 2 * theta[1] * (y[1] - y[0] ** 2) + 0.2 * y[1]])

    fixed = theta.detach()
    found = scipy.optimize.minimize(
        lambda y: float(score(torch.tensor(y), fixed)),
        np.zeros(2),
        jac=lambda y: gradient(torch.tensor(y), fixed).numpy(),
        method="BFGS",
        options={"gtol": 1e-12},
    )
    y = dil.attach(gradient, torch.tensor(found.x), (theta,), symmetric=symmetric, linear_solver=linear_solver)
    assert np.array_equal(y.detach().numpy(), found.x)
    reference = dil.argmin(score, tensor(1.0, 1.0), (theta,)).value
    for i in range(2):
        (mine,) = grad(y[i], theta, create_graph=True)
        (other,) = grad(reference[i], theta, create_graph=True)
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)
        for k in range(2):
            hessians = (grad(d[k], theta, retain_graph=True)[0] for d in (mine, other))
            torch.testing.assert_close(*hessians, rtol=1e-5, atol=1e-7)


def test_attach_nested_solutions():
    a = tensor(0.5, 2.0).requires_grad_()
    exact = cubic_root(a.detach())

    def residual(y):
        return {"u": y["u"] ** 3 + y["v"][0] - a, "v": (y["v"][0] - y["u"],)}

    y = dil.attach(residual, {"u": exact, "v": (exact.clone(),)})
    (da,) = grad(y["v"][0].sum() + y["u"].sum(), a)
    close(da, 2 * first(exact))


def test_attach_something_that_is_no_solution():
    a = tensor(0.5, 2.0).requires_grad_()
    with pytest.warns(dil.ConvergenceWarning, match=r"^The forward solve \(given\) failed .*not_stationary"):
        dil.attach(by_cell(a), torch.ones_like(a))
    with pytest.raises(dil.ConvergenceError):
        dil.attach(by_cell(a), torch.ones_like(a), on_failure="raise")


def test_attach_does_not_change_its_argument():
    a = tensor(0.5, 2.0).requires_grad_()
    found = cubic_root(a.detach())
    y = dil.attach(by_cell(a), found)
    assert y is not found and not found.requires_grad and y.requires_grad


def test_the_answer_is_no_view_of_the_start():
    """A solver that returns its start hands out no alias of the user's tensor."""
    a = tensor(0.5, 2.0)
    y0 = cubic_root(a)
    kept = y0.clone()
    for y in (
        dil.root(by_cell(a), y0).value,
        dil.root(by_cell(a), y0, solver=lambda f, y: y).value,
        dil.attach(by_cell(a), y0),
    ):
        y.add_(1.0)
        assert torch.equal(y0, kept)


def test_in_place_use_of_the_answer():
    """The backward pass needs the answer, as that of torch.exp does: changed in place, it raises rather than errs."""
    a = tensor(0.5, 2.0).requires_grad_()
    y = dil.root(by_cell(a), torch.ones_like(a)).value
    y *= 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        grad(y.sum(), a)


class Square(torch.autograd.Function):
    """x², with a backward that cannot be differentiated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        ctx.variable = "not a tensor"
        return x * x

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, v):
        return 2 * ctx.saved_tensors[0] * v


class NumpySquare(Square):
    @staticmethod
    def backward(ctx, v):
        return torch.as_tensor(2 * ctx.saved_tensors[0].detach().numpy() * v.numpy(), device=v.device)


@pytest.mark.parametrize("function", [Square, NumpySquare])
def test_a_backward_without_derivative_is_not_taken_for_constant(function):
    t = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|requires grad"):
        dil.argmin(lambda y: (function.apply(y) + y**4 - t * y).sum(), torch.ones(2, dtype=torch.float64))


def test_a_residual_needs_one_derivative_only():
    t = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    y = dil.root(lambda y: Square.apply(y) + y - t, torch.ones(2, dtype=torch.float64), linear_solver=dil.Dense()).value
    (gradient,) = torch.autograd.grad(y.sum(), t)
    torch.testing.assert_close(gradient, 1 / (2 * y.detach() + 1))


def test_a_tensor_replaced_before_the_second_order_raises():
    class Closure(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.tensor([0.7, 1.3], dtype=torch.float64))

        def forward(self, x):
            score = lambda y: (0.5 * self.w**2 * y**2 + 0.1 * y**4 - y * x).sum()  # noqa: E731
            return dil.argmin(score, torch.zeros_like(x)).value

    module, x = Closure(), torch.ones(2, dtype=torch.float64)
    w = module.w.detach().clone().requires_grad_()
    value = torch.func.functional_call(module, {"w": w}, (x,)).sum()
    with pytest.raises(RuntimeError, match="used other tensors"):
        torch.autograd.grad(value, w, create_graph=True)


def test_cached_parametrisations_keep_their_gradient():
    torch.manual_seed(0)
    net = torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(3, 3, dtype=torch.float64))
    x = torch.ones(3, dtype=torch.float64)
    weights = list(net.parameters())

    def gradient():
        y = dil.fixed_point(lambda y: torch.tanh(0.3 * net(y) + x), torch.zeros(3, dtype=torch.float64)).value
        return torch.autograd.grad(y.sum(), weights)

    plain = gradient()
    with torch.nn.utils.parametrize.cached():
        cached = gradient()
    for a, b in zip(plain, cached, strict=True):
        torch.testing.assert_close(a, b)


def test_higher_order_in_a_worker_thread():
    theta = torch.tensor([1.0, 2.0], dtype=torch.float64, requires_grad=True)
    for _ in range(2000):
        theta * 2  # this thread's graph is older than anything the worker makes
    x = theta * 3
    found = []

    def work():
        for order in (False, True):
            y = dil.argmin(lambda y: ((y - x) ** 2 + y**4).sum(), torch.zeros_like(theta)).value
            found.append(torch.autograd.grad(y.sum(), x, create_graph=order))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.testing.assert_close(found[0][0], found[1][0].detach())


def test_zero_policy_leaves_shared_parameters_finite_at_every_order():
    start = torch.tensor([[0.3], [9.0]], dtype=torch.float64)  # the second sample diverges

    def first(p):
        y = dil.fixed_point(lambda y, p: p * y**2 + 0.2, start, (p,), batch_dims=1, on_failure="zero").value
        return y[0].sum()

    p = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (plain,) = torch.autograd.grad(first(p), p)
    (graph,) = torch.autograd.grad(first(p), p, create_graph=True)
    functional = torch.func.grad(first)(p.detach())
    for other in (graph.detach(), functional):
        torch.testing.assert_close(other, plain)


def test_a_layer_inside_a_layer():
    def outer(t):
        def score(y):
            inner = dil.root(lambda z: z + 0.3 * z**3 - y, torch.zeros(2, dtype=torch.float64)).value
            return ((inner - t) ** 2).sum() + 0.1 * (y**2).sum()

        return dil.argmin(score, torch.zeros(2, dtype=torch.float64)).value

    t = torch.tensor([0.5, -1.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(outer, t)


def test_batched_cotangents_get_their_sentence():
    t = torch.ones(2, dtype=torch.float64, requires_grad=True)
    f = lambda t: dil.root(lambda y: y**3 + y - t, torch.zeros(2, dtype=torch.float64)).value  # noqa: E731
    with pytest.raises(RuntimeError, match=r"use torch\.func\.jacrev"):
        torch.autograd.functional.jacobian(f, t, vectorize=True)
    with pytest.raises(RuntimeError, match=r"use torch\.func\.jacrev"):
        torch.autograd.functional.jacobian(f, t.detach(), vectorize=True, strategy="forward-mode")
    torch.testing.assert_close(
        torch.autograd.functional.jacobian(f, t),
        torch.func.jacrev(lambda t: dil.root(lambda y, t: y**3 + y - t, torch.zeros(2, dtype=torch.float64), (t,)).value)(
            t.detach()
        ),
    )


@pytest.mark.parametrize(
    "settings",
    [{"gradient": "adjoint"}, {"options": {"checkpoint": 4}}, {"gradient": "adjoint", "method": "kvaerno5", "rtol": 1e-6}],
)
def test_the_default_device_of_the_forward_pass_is_that_of_an_odeint_backwards(settings):
    """Torch calls backward passes without one, and a function may make tensors."""
    seen, w = [], tensor(0.5, 1.0).requires_grad_()

    def func(t, y):
        seen.append(torch.get_default_device())
        return -w * y

    with torch.device("cpu:0"):
        t = torch.linspace(0, 1, 9, dtype=w.dtype, device=w.device)
        y = dil.odeint(func, torch.ones_like(w), t, **settings)
        forward = len(seen)
        y.sum().backward()
    assert len(seen) > forward and set(seen) == {torch.device("cpu:0")}


def test_the_default_device_of_the_forward_pass_is_that_of_all_evaluations():
    seen, x = [], tensor(0.5, 1.0).requires_grad_()

    def score(y, x):
        seen.append(torch.get_default_device())
        return ((y - x) ** 2 + y**4).sum()

    with torch.device("cpu:0"):
        y = dil.argmin(score, torch.zeros_like(x), (x,)).value
        (first,) = grad(y.sum(), x, create_graph=True)
        first.sum().backward()
        torch.func.hessian(lambda x: dil.argmin(score, torch.zeros_like(x), (x,)).value.sum())(x.detach())
    assert set(seen) == {torch.device("cpu:0")}


def test_tensors_need_not_be_on_the_default_device():
    """Reports and checks, too."""
    x = tensor([0.5, 1.0], [2.0, -1.0]).requires_grad_()
    with torch.device("meta"):
        for solver in (dil.CG(), dil.GMRES(), dil.MINRES(), dil.Dense()):
            y = dil.argmin(lambda y, x: ((y - x) ** 2 + y**4).sum(-1), torch.zeros_like(x), (x,), linear_solver=solver)
            (dx,) = grad(y.value.sum(), x)
            torch.testing.assert_close(dx, 2 / (2 + 12 * y.value.detach() ** 2), rtol=1e-8, atol=0)
            assert float(y.report.adjoint_error.max()) < 1e-6
        layer = lambda x: dil.argmin(lambda y, x: ((y - x) ** 2 + y**4).sum(-1), torch.zeros_like(x), (x,)).value  # noqa: E731
        assert dil.check_gradient(layer, x).ok


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("size", [3, 200])
def test_detect_anomaly_finds_nothing(size):
    """It cannot look at many gradients at once, and would say so of each solve."""
    x = torch.randn(2, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    with torch.autograd.detect_anomaly():
        y = dil.argmin(lambda y, x: ((y - x) ** 2 + torch.cosh(y)).sum(-1), torch.zeros_like(x), (x,)).value
        y.sum().backward()
    expected = 2 / (2 + torch.cosh(y.detach()))
    torch.testing.assert_close(x.grad, expected)
