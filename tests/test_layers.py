"""Layers among other layers: training, copies, starts, checkpointing, autocast, compilation, data parallelism."""

import copy
import os
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.autograd import grad
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchdil as dil

RTOL = 1e-9  # of gradients, one road against another


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(actual, expected, tolerance=RTOL):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# Functions of y and x with parameters, at module level: pickles know them by name.


class Score(nn.Module):
    """A strictly convex score, (B,)."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.calls = 0

    def forward(self, y, x):
        self.calls += 1
        return ((y - x) ** 2).sum(-1) + nn.functional.softplus(self.body(y)).sum(-1)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)

    def forward(self, y, x):
        return y**3 + 2 * y + 0.3 * torch.tanh(self.body(y)) - x


class Map(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)

    def forward(self, y, x):
        return 0.5 * torch.tanh(self.body(y) + x)


LAYERS = {
    "argmin": lambda **settings: dil.ArgminLayer(Score(), **{"init": (3,), **settings}),
    "root": lambda **settings: dil.RootLayer(Residual(), **{"init": (3,), **settings}),
    "fixed_point": lambda **settings: dil.FixedPointLayer(Map(), **{"init": (3,), **settings}),
}
KINDS = list(LAYERS)


def make_layer(kind, seed=0, dtype=torch.float64, **settings):
    torch.manual_seed(seed)
    return LAYERS[kind](**settings).to(dtype)


def make_model(kind, seed=0, dtype=torch.float64, **settings):
    layer = make_layer(kind, seed, **settings)
    return nn.Sequential(nn.Linear(2, 3), layer, nn.Linear(3, 1)).to(dtype)


def gradients(model, x, loss=lambda y: (y**2).sum()):
    """The output and the gradients of all parameters and of x."""
    x = x.clone().requires_grad_()
    y = model(x)
    found = grad(loss(y), [x, *model.parameters()], materialize_grads=True, allow_unused=True)
    return [y.detach(), *found]


def assert_same(one, two, tolerance=0.0):
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# --- training ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam], ids=["sgd", "adam"])
def test_training(kind, make):
    model = make_model(kind)
    x, target = draw(1, 16, 2), draw(2, 16, 1)
    optimiser = make(model.parameters(), lr=0.05)
    losses = []
    for _ in range(15):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    inner = [p for name, p in model[1].named_parameters()]
    assert inner and all(p.grad is not None and p.grad.isfinite().all() and (p.grad != 0).any() for p in inner)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_against_differences(kind):
    model = make_model(kind)
    x = draw(1, 4, 2)
    names = [name for name, _ in model.named_parameters()]
    _, _, *found = gradients(model, x)
    step = 1e-6
    for name, p, g in zip(names, model.parameters(), found, strict=True):
        direction = draw(3, *p.shape)
        values = []
        with torch.no_grad():
            for sign in (1, -2, 1):
                p.add_(direction, alpha=sign * step)
                values.append(float((model(x) ** 2).sum()))
        assert float((g * direction).sum()) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6, abs=1e-8), name


@pytest.mark.parametrize("kind", KINDS)
def test_samples_are_independent(kind):
    """A batch is its samples: outputs, input gradients, and the sum of parameter gradients."""
    layer, x = make_layer(kind), draw(1, 4, 3)
    whole = gradients(layer, x)
    each = [gradients(layer, row.unsqueeze(0)) for row in x]
    close(whole[0], torch.cat([one[0] for one in each]))
    close(whole[1], torch.cat([one[1] for one in each]))
    for total, *parts in zip(whole[2:], *(one[2:] for one in each), strict=True):
        close(total, sum(parts))


@pytest.mark.parametrize("kind", KINDS)
def test_more_axes(kind):
    """Unknowns with several axes per sample."""
    layer = make_layer(kind, init=(5, 3)) if kind != "argmin" else None
    if layer is None:
        torch.manual_seed(0)
        layer = dil.ArgminLayer(lambda y, x: ((y - x) ** 2).sum((1, 2)) + (y**4).sum((1, 2)), init=(5, 3))
    y = layer(draw(1, 2, 5, 3))
    assert y.shape == (2, 5, 3)
    assert layer.report.forward.status.shape == (2,)


# --- copies -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_state_dict(kind):
    model, other, x = make_model(kind, 0), make_model(kind, 1), draw(1, 4, 2)
    before = gradients(model, x)
    assert not torch.equal(before[0], other(x).detach())
    state = model.state_dict()
    assert {"1.function.body.weight", "1.function.body.bias"} <= set(state)
    other.load_state_dict(state)
    assert_same(before, gradients(other, x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(kind, duplicate):
    settings = {
        "solver": dil.Newton(rtol=1e-12),
        "linear_solver": dil.Auto(rtol=1e-11),
        "init": dil.LastSolution((3,)),
        "on_failure": "raise",
    }
    layer, x = make_layer(kind, **settings), draw(1, 4, 3)
    y = layer(x)
    (y**2).sum().backward()
    assert layer.report.backward is not None
    twin = duplicate(layer)
    # What the last call left behind belongs to the original.
    assert twin.report is None and twin._last is None
    assert layer.report is not None and layer._last is not None
    assert (twin.solver, twin.linear_solver, twin.init, twin.on_failure) == tuple(settings.values())
    assert twin.function is not layer.function
    layer._last = None
    assert_same(gradients(layer, x), gradients(twin, x))
    with torch.no_grad():
        twin.function.body.bias.add_(1.0)
    assert not torch.equal(layer(x), twin(x))


def test_deepcopy_after_a_call_with_a_graph():
    """A report or a last solution with a graph in it could not be copied."""
    model = make_model("argmin", init=dil.LastSolution((3,)))
    model(draw(1, 4, 2))  # the graph is alive
    assert copy.deepcopy(model)[1].report is None


# --- starts -----------------------------------------------------------------------------------------------------------------


def quartic(y, x):
    return ((y - x) ** 2).sum(-1) + (y**4).sum(-1)


def spied(layer):
    """The starts that a layer's solver gets."""
    starts = []
    inner = layer.solver

    class Spy(dil.Newton):
        def solve(self, problem, y0, tolerance):
            starts.append(y0.clone())
            return dil.Newton.solve(self, problem, y0, tolerance)

    assert inner is None
    layer.solver = Spy()
    return starts


def test_init_shape():
    layer = dil.ArgminLayer(quartic, init=(3,))
    starts = spied(layer)
    y = layer(draw(1, 4, 3))
    assert y.shape == (4, 3) and y.dtype == torch.float64
    assert torch.equal(starts[0], torch.zeros(4, 3, dtype=torch.float64))
    assert layer(draw(1, 4, 3, dtype=torch.float32)).dtype == torch.float32
    assert dil.RootLayer(lambda y, x: y - x.sum(1), init=())(draw(1, 4, 3)).shape == (4,)
    for shape in ([3], torch.Size([3])):
        assert torch.equal(dil.ArgminLayer(quartic, init=shape)(draw(1, 4, 3)), y)


def test_init_nested_shapes():
    def score(y, x):
        return ((y["u"] - x) ** 2).sum(1) + ((y["v"][0] - x.sum(1)) ** 2) + (y["v"][1] ** 2).sum((1, 2)) + y["u"].pow(4).sum(1)

    layer = dil.ArgminLayer(score, init={"u": (3,), "v": ((), (2, 2))})
    x = draw(1, 4, 3).requires_grad_()
    y = layer(x)
    assert y["u"].shape == (4, 3) and y["v"][0].shape == (4,) and y["v"][1].shape == (4, 2, 2)
    close(y["v"][0].detach(), x.detach().sum(1))
    close(y["u"].detach(), dil.ArgminLayer(quartic, init=(3,))(x).detach())
    close(grad(y["v"][0].sum(), x)[0], torch.ones_like(x))


def test_init_callable():
    layer = dil.ArgminLayer(quartic, init=lambda x: x / 2)
    starts = spied(layer)
    x = draw(1, 4, 3)
    layer(x)
    assert torch.equal(starts[0], x / 2)


def test_init_module():
    """A learnt start: its parameters belong to the layer, and get no gradient from y, which does not depend on them."""
    torch.manual_seed(0)
    layer = dil.ArgminLayer(quartic, init=nn.Linear(3, 3)).double()
    starts = spied(layer)
    assert set(layer.state_dict()) == {"init.weight", "init.bias"}
    x = draw(1, 4, 3)
    y = layer(x)
    assert torch.equal(starts[0], layer.init(x).detach())
    assert not y.requires_grad
    close(y, dil.ArgminLayer(quartic, init=(3,))(x))
    # It may be trained beside the layer, on the answers.
    loss = ((layer.init(x) - y.detach()) ** 2).sum()
    loss.backward()
    assert layer.init.weight.grad is not None
    assert "Linear" in repr(layer)


def test_start_in_the_call_wins():
    layer = dil.ArgminLayer(quartic, init=dil.LastSolution((3,)))
    starts = spied(layer)
    x, y0 = draw(1, 4, 3), draw(2, 4, 3)
    layer(x, y0=y0)
    assert torch.equal(starts[0], y0)
    layer(x, y0)
    assert torch.equal(starts[1], y0)


def test_missing_start():
    layer = dil.ArgminLayer(quartic)
    with pytest.raises(ValueError, match=r"^A start is missing: give the layer init=.*, or pass y0 in the call\.$"):
        layer(draw(1, 4, 3))
    assert layer(draw(1, 4, 3), y0=draw(2, 4, 3)).shape == (4, 3)


def test_no_input():
    """x is optional: a layer of its parameters alone."""
    theta = draw(1, 3).requires_grad_()
    layer = dil.ArgminLayer(lambda y: ((y - theta) ** 2).sum(), init=lambda x: torch.zeros(3, dtype=torch.float64))
    y = layer()
    close(y.detach(), theta.detach())
    close(grad(y.sum(), theta)[0], torch.ones(3, dtype=torch.float64))


def test_several_inputs():
    """x may be a tuple or a dict; the samples are the first axis of its first tensor."""
    layer = dil.RootLayer(lambda y, x: y**3 + x["b"] * y - x["a"], init=(3,))
    a, b = draw(1, 4, 3).requires_grad_(), (draw(2, 4, 3).abs() + 1).requires_grad_()
    y = layer({"a": a, "b": b})
    da, db = grad(y.sum(), (a, b))
    slope = (1 / (3 * y**2 + b)).detach()
    close(da, slope)
    close(db, -(y * slope).detach())


@pytest.mark.parametrize("kind", KINDS)
def test_last_solution(kind):
    layer, x = make_layer(kind, init=dil.LastSolution((3,))), draw(1, 4, 3)
    first = layer(x).detach()
    steps = layer.report.forward.stats.steps
    again = layer(x + 1e-4)
    assert (layer.report.forward.stats.steps < steps).all()
    close(again.detach(), make_layer(kind)(x + 1e-4).detach(), 1e-8)
    close(first, make_layer(kind)(x).detach(), 1e-8)
    # Another batch size, or dtype: from `first`.
    assert layer(x[:2]).shape == (2, 3)
    close(layer(x[:2]).detach(), first[:2], 1e-8)
    layer.float()
    assert layer(x.float()).dtype == torch.float32
    # What is remembered has no graph.
    assert not layer._last.requires_grad


def test_last_solution_is_not_an_alias():
    """An output changed in place does not change the start of the next call."""
    layer = dil.ArgminLayer(quartic, init=dil.LastSolution((3,)))
    x = draw(1, 4, 3)
    y = layer(x)
    kept = y.clone()
    y.fill_(torch.nan)
    assert torch.equal(layer(x), kept)


def test_last_solution_that_failed_is_forgotten():
    """A NaN must not be the start of all that follows."""
    layer = dil.RootLayer(lambda y, x: y**3 + y - x, init=dil.LastSolution((1,)), on_failure="ignore")
    x = torch.tensor([[2.0], [10.0]], dtype=torch.float64)
    good = layer(x).clone()
    layer(torch.tensor([[torch.nan], [10.0]], dtype=torch.float64))
    close(layer(x), good, 1e-8)
    assert bool(layer.report.forward.converged.all())
    # Picard runs off to infinity where the map does not contract.
    layer = dil.FixedPointLayer(lambda y, x: x * y + 0.1 * y**2 + 1, init=dil.LastSolution((1,)), on_failure="ignore")
    x = torch.tensor([[0.2], [0.1]], dtype=torch.float64)
    good = layer(x).clone()
    layer(torch.tensor([[5.0], [0.1]], dtype=torch.float64))
    assert layer.report.forward.status.tolist() == [dil.Status.non_finite, dil.Status.converged]
    close(layer(x), good, 1e-8)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_solution_remembered_from_validation_serves_training(mode):
    layer, x = dil.ArgminLayer(quartic, init=dil.LastSolution((3,))), draw(0, 4, 3).requires_grad_()
    with mode():
        layer(x)
    layer(x).sum().backward()
    assert int(layer.report.forward.stats.steps.max()) == 0 and bool(x.grad.isfinite().all())


# --- checkpointing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("linear_solver", [None, dil.Auto(dense_below=0)], ids=["default", "Krylov"])
def test_checkpoint(kind, use_reentrant, linear_solver):
    model, x = make_model(kind, linear_solver=linear_solver), draw(1, 4, 2)
    plain = gradients(model, x)

    def run():
        leaf = x.clone().requires_grad_()
        y = checkpoint(model, leaf, use_reentrant=use_reentrant)
        for p in model.parameters():
            p.grad = None
        (y**2).sum().backward()
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
        return [y.detach(), leaf.grad, *found]

    assert_same(plain, run())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_solves_once_more(use_reentrant):
    """The backward pass repeats the forward pass once, and not for every product with J."""
    layer, x = make_layer("argmin", linear_solver=dil.CG()), draw(1, 4, 3)
    score = layer.function
    layer(x)
    forward, score.calls = score.calls, 0
    leaf = x.clone().requires_grad_()
    y = checkpoint(layer, leaf, use_reentrant=use_reentrant)
    assert score.calls <= 1.5 * forward
    score.calls = 0
    (y**2).sum().backward()
    assert layer.report.backward.stats.products >= 3
    assert score.calls <= 1.5 * forward


# --- autocast ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_autocast(kind):
    """Inside autocast a layer solves in full precision: half of it leaves no digits for a gradient."""
    layer, x = make_layer(kind, dtype=torch.float32), draw(1, 4, 3, dtype=torch.float32)
    plain = gradients(layer, x)
    leaf = x.clone().requires_grad_()
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        y = layer(leaf)
    cast = [y.detach(), *grad((y**2).sum(), [leaf, *layer.parameters()])]
    assert y.dtype == torch.float32
    assert_same(plain, cast, 1e-6)
    exact = gradients(layer.double(), x.double())
    assert_same([t.double() for t in cast], exact, 1e-3 if kind == "fixed_point" else 1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_between_other_layers(kind):
    """What comes from a Linear in bfloat16 is taken up to float32, and backward reaches everything."""
    model, x = make_model(kind, dtype=torch.float32), draw(1, 4, 2, dtype=torch.float32)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        y = model(x)
        assert y.dtype == torch.bfloat16
        loss = (y.float() ** 2).sum()
    loss.backward()
    assert bool(model[1].report.forward.converged.all()) and bool(model[1].report.backward.converged.all())
    plain = make_model(kind, dtype=torch.float32)
    (plain(x) ** 2).sum().backward()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        if two.grad is not None:
            assert one.grad.dtype == torch.float32
            torch.testing.assert_close(one.grad, two.grad, rtol=0.1, atol=0.05)  # the Linears around it are in half precision


# --- compilation ------------------------------------------------------------------------------------------------------------

compiled = [
    pytest.mark.xdist_group("compile"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings(
        "ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning"
    ),
]


def mark_compiled(test):
    for mark in compiled:
        test = mark(test)
    return test


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@mark_compiled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_model(kind, backend, fresh_compiler):
    model, x = make_model(kind), draw(1, 4, 2)
    plain = gradients(model, x)
    fast = torch.compile(model, backend=backend)
    for _ in range(2):
        assert_same(plain, gradients_of(fast, model, x), RTOL)


def gradients_of(call, model, x):
    x = x.clone().requires_grad_()
    y = call(x)
    return [y.detach(), *grad((y**2).sum(), [x, *model.parameters()], materialize_grads=True, allow_unused=True)]


@mark_compiled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_function_with_a_closure(backend, fresh_compiler):
    a = draw(1, 3).requires_grad_()

    def f(x):
        z = x * x.sin()
        y = dil.root(lambda y: y**3 + (1 + a**2) * y - z, torch.zeros(3, dtype=torch.float64)).value
        return (y**2).sum()

    x = draw(2, 3).requires_grad_()
    expected = grad(f(x), (x, a))
    fast = torch.compile(f, backend=backend)
    for _ in range(2):
        assert_same(expected, grad(fast(x), (x, a)), RTOL)


@mark_compiled
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_score(backend, fresh_compiler):
    """A compiled score is differentiated as the function behind it: compiled graphs cannot be, twice."""
    score = Score().double()
    x = draw(1, 4, 3)
    plain = gradients(dil.ArgminLayer(score, init=(3,)), x)
    fast = dil.ArgminLayer(torch.compile(score, backend=backend), init=(3,))
    found = gradients_of(fast, score, x)
    assert_same(plain, found, RTOL)

    @torch.compile(backend=backend)
    def function(y, x):
        return ((y - x) ** 2).sum(-1) + (y**4).sum(-1)

    expected = gradients(dil.ArgminLayer(quartic, init=(3,)), x)
    assert_same(expected, gradients(dil.ArgminLayer(function, init=(3,)), x), RTOL)


@mark_compiled
def test_compiled_training(fresh_compiler):
    model = make_model("argmin")
    fast = torch.compile(model, backend="aot_eager")
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    x, target = draw(1, 16, 2), draw(2, 16, 1)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(fast(x), target)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# --- data parallelism -------------------------------------------------------------------------------------------------------


PARALLEL = [("argmin", False), ("argmin", True), ("root", False), ("fixed_point", True)]  # and find_unused_parameters


def parallel_worker(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    x, target = draw(1, 8, 2), draw(2, 8, 1)
    mine = slice(4 * rank, 4 * rank + 4)
    found = []
    try:
        for kind, find_unused in PARALLEL:
            model = DistributedDataParallel(make_model(kind), find_unused_parameters=find_unused)
            for _ in range(2):  # the second pass uses the buckets that the first one built
                model.zero_grad()
                nn.functional.mse_loss(model(x[mine]), target[mine]).backward()
            found.append([p.grad for p in model.module.parameters()])
        if rank == 0:
            torch.save(found, results)
    finally:
        dist.destroy_process_group()


def test_distributed_data_parallel(tmp_path):
    """Two processes with half the batch each, and one with all of it."""
    results = tmp_path / "gradients.pt"
    mp.spawn(parallel_worker, (str(tmp_path / "store"), str(results)), nprocs=2)
    for (kind, _), found in zip(PARALLEL, torch.load(results), strict=True):
        model = make_model(kind)
        nn.functional.mse_loss(model(draw(1, 8, 2)), draw(2, 8, 1)).backward()
        for mine, p in zip(found, model.parameters(), strict=True):
            close(mine.to(p.grad), p.grad, 1e-10)


# --- the rest ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_fire_once(kind):
    model = make_model(kind)
    x = draw(1, 4, 2).requires_grad_()
    calls = []
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: calls.append(name))
        p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append(f"{name} accumulated"))
    x.register_hook(lambda g: calls.append("x"))
    model[1].register_forward_hook(lambda module, inputs, output: calls.append("forward"))
    model[1].register_full_backward_hook(lambda module, inputs, outputs: calls.append("backward"))
    (model(x) ** 2).sum().backward()
    names = [name for name, _ in model.named_parameters()]
    assert sorted(calls) == sorted([*names, *(f"{name} accumulated" for name in names), "x", "forward", "backward"])


def test_print():
    layer = dil.ArgminLayer(Score(), solver=dil.Newton(rtol=1e-8), linear_solver=dil.CG(damping=1e-3), init=(3,))
    text = repr(layer)
    assert text.startswith("ArgminLayer(\n")
    assert "solver=Newton(rtol=1e-08" in text and "linear_solver=CG(" in text and "init=(3,)" in text
    assert "(function): Score(" in text
    assert "None" not in repr(dil.RootLayer(quartic, init=(3,)))


def test_report_of_the_last_call():
    layer, x = make_layer("argmin"), draw(1, 4, 3)
    assert layer.report is None
    y = layer(x)
    first = layer.report
    assert first.forward.status.shape == (4,) and first.backward is None
    y.sum().backward()
    assert layer.report is first and first.backward.status.shape == (4,)
    layer(x[:2])
    assert layer.report is not first and layer.report.forward.status.shape == (2,)


def test_modes_and_devices_reach_the_function():
    layer = dil.ArgminLayer(nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)), init=(3,))
    assert not layer.eval().function[1].training
    assert layer.to("meta").function[0].weight.is_meta
    assert layer.requires_grad_(False).function[0].weight.requires_grad is False


def test_frozen_function():
    """Parameters that do not require grad get none; gradients still pass through."""
    model = make_model("fixed_point")
    for p in model[1].parameters():
        p.requires_grad_(False)
    (model(draw(1, 4, 2)) ** 2).sum().backward()
    assert model[0].weight.grad is not None and model[1].function.body.weight.grad is None


def test_functional_call_with_double_backward():
    """Parameters swapped in for the call are those of its derivatives, of any order, when the call has returned."""
    layer, other, x = make_layer("fixed_point", 0), make_layer("fixed_point", 1), draw(1, 4, 3)
    swapped = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}

    def second(call, parameters):
        leaf = x.clone().requires_grad_()
        (first,) = grad((call(leaf) ** 2).sum(), leaf, create_graph=True)
        return [first.detach(), *grad((first**2).sum(), [leaf, *parameters])]

    mine = second(lambda x: torch.func.functional_call(layer, swapped, (x,)), list(swapped.values()))
    expected = second(other, list(other.parameters()))
    assert_same(expected, mine, RTOL)


def test_shared_layer():
    """One layer used twice in a network: its gradients add up."""
    layer, x = make_layer("root"), draw(1, 4, 3)
    twice = gradients(lambda_module(lambda x: layer(layer(x)), layer), x)
    first = layer(x.clone().requires_grad_()).detach()
    assert twice[0].shape == first.shape
    step, p = 1e-6, layer.function.body.bias
    direction = draw(3, 3)
    values = []
    with torch.no_grad():
        for sign in (1, -2, 1):
            p.add_(direction, alpha=sign * step)
            values.append(float((layer(layer(x)) ** 2).sum()))
    assert float((twice[3] * direction).sum()) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-6)


def lambda_module(call, layer):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return call(x)

    return Wrapped()


def test_nested_layers():
    """A layer inside the function of another: bilevel problems."""
    inner = dil.RootLayer(lambda z, y: z**3 + z - y, init=(3,))
    outer = dil.ArgminLayer(lambda y, x: ((y - x) ** 2).sum(1) + (inner(y) ** 2).sum(1), init=(3,))
    x = draw(1, 2, 3).requires_grad_()
    y = outer(x)
    (dx,) = grad((y**2).sum(), x)
    step = 1e-5
    for i in range(3):
        e = torch.zeros(2, 3, dtype=torch.float64)
        e[0, i] = step
        difference = ((outer(x + e) ** 2).sum() - (outer(x - e) ** 2).sum()) / (2 * step)
        close(dx[0, i], difference.detach(), 1e-6)


def test_environment_is_left_alone():
    """No default dtype, thread count, grad mode or random state is changed by a call."""
    before = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_rng_state(),
        dict(os.environ),
    )
    layer = make_layer("argmin", linear_solver=dil.CG(preconditioner=dil.Nystrom(rank=2)))
    torch.set_rng_state(before[3])
    layer(draw(1, 4, 3)).sum().backward()
    after = (
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.get_rng_state(),
        dict(os.environ),
    )
    assert before[:3] == after[:3] and torch.equal(before[3], after[3]) and before[4] == after[4]
