"""`NeuralODE` among other layers: training, copies, printing, autocast, compilation."""

import copy
import inspect
import pickle

import pytest
import torch
from torch import nn
from torch.autograd import grad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import torchdil as dil

SOLVED = 1e-9  # two solves to the default tolerance
CLOSE32 = 1e-5
T = torch.linspace(0, 1, 6, dtype=torch.float64)


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def all_close(one, two, tolerance=SOLVED):
    assert len(one) == len(two)
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class Field(nn.Module):
    """At module level: pickles know it by name."""

    def __init__(self, size=3, timed=True):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(size, 8), nn.Tanh(), nn.Linear(8, size))
        self.register_buffer("scale", torch.tensor(0.7))
        self.timed = timed

    def forward(self, t, y):
        slope = self.scale * self.body(y)
        return slope * t.cos() if self.timed else slope


def make_node(seed=0, dtype=torch.float64, timed=True, **settings):
    torch.manual_seed(seed)
    return dil.NeuralODE(Field(timed=timed), **settings).to(dtype)


class Model(nn.Module):
    """Encoder, ODE, decoder of the last state."""

    def __init__(self, **settings):
        super().__init__()
        self.encoder, self.node, self.decoder = nn.Linear(2, 3), dil.NeuralODE(Field(), **settings), nn.Linear(3, 1)
        self.register_buffer("t", torch.linspace(0, 1, 6))

    def forward(self, x):
        return self.decoder(self.node(self.encoder(x), self.t)[-1])


def make_model(seed=0, dtype=torch.float64, **settings):
    torch.manual_seed(seed)
    return Model(**settings).to(dtype)


def gradients(call, module, x):
    x = x.clone().requires_grad_()
    y = call(x)
    return [y.detach(), *grad((y**2).sum(), [x, *module.parameters()])]


# --- the contract -----------------------------------------------------------------------------------------------------------


def test_signature():
    parameters = inspect.signature(dil.NeuralODE).parameters
    assert list(parameters) == [
        "field",
        "method",
        "gradient",
        "solver",
        "linear_solver",
        "batch_dims",
        "rtol",
        "atol",
        "options",
        "on_failure",
        "verbose",
    ]
    ode = inspect.signature(dil.odeint).parameters
    defaults = {name: p.default for name, p in parameters.items() if name not in ("field", "batch_dims")}
    assert defaults == {name: ode[name].default for name in defaults}
    assert parameters["batch_dims"].default == 1
    assert all(p.kind == p.KEYWORD_ONLY for name, p in parameters.items() if name not in ("field", "method"))


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("method", ["backward_euler", "trapezoid", "gl4", "rk4"])
def test_it_is_odeint_with_a_batch(method, timed):
    node, y0 = make_node(method=method, timed=timed), draw(1, 4, 3)
    y = node(y0, T)
    assert y.shape == (6, 4, 3)
    torch.testing.assert_close(y, dil.odeint(node.field, y0, T, method=method, batch_dims=1))
    assert node.report.forward.status.shape == (4,)


def test_settings_reach_odeint():
    y0 = draw(1, 4, 3)
    node = make_node(options={"substeps": 4})
    fine = torch.linspace(0, 1, 21, dtype=torch.float64)
    all_close([node(y0, T)], [make_node()(y0, fine)[::4]])
    assert make_node(batch_dims=0)(y0, T).shape == (6, 4, 3)
    node = make_node(batch_dims=0)
    node(y0, T)
    assert node.report.forward.status.shape == ()
    node = make_node(linear_solver=dil.GMRES())
    node(y0, T).sum().backward()
    assert "GMRES" in node.report.backward.stats.method
    with pytest.raises(dil.ConvergenceError):
        make_node(on_failure="raise")(torch.nan * y0, T)


@pytest.mark.parametrize("shape", [(4, 3), (4, 5, 3), (1, 3), (0, 3)], ids=str)
def test_shapes(shape):
    node = make_node()
    y = node(draw(1, *shape), T)
    assert y.shape == (6, *shape) and node.report.forward.status.shape == shape[:1]


def test_structures():
    def field(t, y):
        return {"q": y["p"], "p": -y["q"] * (1 + y["m"].unsqueeze(-1)), "m": -y["m"]}

    y = dil.NeuralODE(field)({"q": draw(1, 4, 2), "p": draw(2, 4, 2), "m": draw(3, 4).abs()}, T)
    assert y["q"].shape == (6, 4, 2) and y["m"].shape == (6, 4)
    torch.testing.assert_close(y["m"][-1], draw(3, 4).abs() * 1.2**-5, rtol=SOLVED, atol=SOLVED)


def test_a_plain_function_has_no_parameters():
    node = dil.NeuralODE(lambda t, y: -y)
    assert not list(node.parameters()) and not node.state_dict()
    torch.testing.assert_close(node(draw(1, 4, 3), T)[-1], draw(1, 4, 3) * 1.2**-5, rtol=SOLVED, atol=SOLVED)


def test_report_of_the_last_call():
    node, y0 = make_node(), draw(1, 4, 3)
    assert node.report is None
    y = node(y0, T)
    first = node.report
    assert first.backward is None
    y.sum().backward()
    assert node.report is first and first.backward.status.shape == (4,)
    node(y0[:2], T)
    assert node.report is not first and node.report.forward.status.shape == (2,)


def test_print():
    text = repr(make_node(method="radauIIA5", linear_solver=dil.CG(damping=1e-3), options={"substeps": 2}, on_failure="zero"))
    assert text.startswith("NeuralODE(\n")
    for part in ("method=RadauIIA(5)", "linear_solver=CG(", "options={'substeps': 2}", "on_failure='zero'", "(field): Field("):
        assert part in text
    plain = repr(make_node())
    assert "method=BackwardEuler()" in plain and "None" not in plain and "batch_dims" not in plain


# --- copies -----------------------------------------------------------------------------------------------------------------


def test_state_dict_is_that_of_the_field():
    node, other = make_node(0), make_node(1)
    assert list(node.state_dict()) == [f"field.{name}" for name in node.field.state_dict()]
    other.load_state_dict(node.state_dict())
    assert torch.equal(node(draw(1, 4, 3), T), other(draw(1, 4, 3), T))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies(duplicate):
    settings = {
        "method": dil.ode.RadauIIA(3),
        "solver": dil.Newton(rtol=1e-12),
        "linear_solver": dil.Auto(),
        "on_failure": "raise",
    }
    node, y0 = make_node(**settings), draw(1, 4, 3)
    y = node(y0, T)  # the graph is alive
    twin = duplicate(node)
    assert twin.report is None and node.report is not None
    assert all(getattr(twin, name) == value for name, value in settings.items())
    assert twin.field is not node.field
    (y**2).sum().backward()
    assert duplicate(node).report is None
    all_close(gradients(lambda y0: node(y0, T), node, y0), gradients(lambda y0: twin(y0, T), twin, y0))
    with torch.no_grad():
        twin.field.body[0].bias.add_(1.0)
    assert not torch.equal(node(y0, T), twin(y0, T))


def test_modes_and_devices_reach_the_field():
    node = make_node()
    assert not node.eval().field.training
    assert node.to("meta").field.body[0].weight.is_meta
    assert node.requires_grad_(False).field.body[0].weight.requires_grad is False


# --- in a network -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"method": "trapezoid"}, {"method": "gl4", "options": {"substeps": 2}}], ids=str)
def test_training(settings):
    model = make_model(**settings)
    x, target = draw(1, 16, 2), draw(2, 16, 1)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(15):
        optimiser.zero_grad()
        loss = nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() and (p.grad != 0).any() for p in model.parameters())


def test_it_learns_a_rate():
    """y' = -k y from its own trajectory: the discrete gradient leads to the k that made it."""

    class Decay(nn.Module):
        def __init__(self):
            super().__init__()
            self.k = nn.Parameter(torch.tensor(0.2, dtype=torch.float64))

        def forward(self, t, y):
            return -self.k * y

    node, y0 = dil.NeuralODE(Decay(), "implicit_midpoint"), draw(1, 8, 1)
    with torch.no_grad():
        node.field.k.fill_(1.5)
        target = node(y0, T)
        node.field.k.fill_(0.2)
    optimiser = torch.optim.LBFGS(node.parameters(), lr=1.0, max_iter=30, line_search_fn="strong_wolfe")

    def closure():
        optimiser.zero_grad()
        loss = ((node(y0, T) - target) ** 2).mean()
        loss.backward()
        return loss

    optimiser.step(closure)
    assert node.field.k.item() == pytest.approx(1.5, abs=1e-4)


class Last(nn.Module):
    """An ODE as a layer of x alone."""

    def __init__(self, seed, size):
        super().__init__()
        torch.manual_seed(seed)
        self.node = dil.NeuralODE(Field(size))

    def forward(self, x):
        return self.node(x, torch.linspace(0, 1, 4, dtype=x.dtype))[-1]


def test_in_a_sequence():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), Last(1, 3), nn.ReLU(), nn.Linear(3, 4), Last(2, 4), nn.Linear(4, 1)).double()
    x = draw(1, 5, 2)
    _, _, *found = gradients(model, model, x)
    step = 1e-6
    for p, g in zip(model.parameters(), found, strict=True):
        direction, values = draw(3, *p.shape), []
        with torch.no_grad():
            for sign in (1, -2, 1):
                p.add_(direction, alpha=sign * step)
                values.append(float((model(x) ** 2).sum()))
        assert float((g * direction).sum()) == pytest.approx((values[0] - values[1]) / (2 * step), rel=1e-5, abs=1e-7)


def test_shared_node():
    """One node used twice: its gradients add up."""
    node, x = make_node(), draw(1, 4, 3)
    twice = gradients(lambda x: node(node(x, T)[-1], T)[-1], node, x)
    long = torch.cat((T, 1 + T[1:]))  # the field knows t: the second time it begins again
    field = node.field
    joined = gradients(
        lambda x: dil.odeint(lambda t, y: field(t if float(t) < 1 + 1e-9 else t - 1, y), x, long, batch_dims=1)[-1], node, x
    )
    all_close(twice, joined)


def test_hooks_fire_once():
    node, x = make_node(), draw(1, 4, 3).requires_grad_()
    calls = []
    for name, p in node.named_parameters():
        p.register_hook(lambda g, name=name: calls.append(name))
    node.register_forward_hook(lambda module, inputs, output: calls.append("forward"))
    (node(x, T) ** 2).sum().backward()
    assert sorted(calls) == sorted([*(name for name, _ in node.named_parameters()), "forward"])


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint(use_reentrant):
    model, x = make_model(), draw(1, 4, 2)
    plain = gradients(model, model, x)
    leaf = x.clone().requires_grad_()
    y = checkpoint(model, leaf, use_reentrant=use_reentrant)
    (y**2).sum().backward()
    all_close(plain, [y.detach(), leaf.grad, *(p.grad for p in model.parameters())])


def test_functional_call():
    node, other, y0 = make_node(0), make_node(1), draw(1, 4, 3)
    swapped = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}
    y = functional_call(node, swapped, (y0, T))
    found = grad((y**2).sum(), list(swapped.values()))
    expected = grad((other(y0, T) ** 2).sum(), list(other.parameters()))
    all_close(found, expected)


def test_functional_call_with_double_backward():
    node, other = make_node(0), make_node(1)
    swapped = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}

    def second(call, parameters):
        y0 = draw(1, 4, 3).requires_grad_()
        (first,) = grad((call(y0) ** 2).sum(), y0, create_graph=True)
        return [first.detach(), *grad((first**2).sum(), [y0, *parameters], allow_unused=True, materialize_grads=True)]

    mine = second(lambda y0: functional_call(node, swapped, (y0, T)), list(swapped.values()))
    all_close(mine, second(lambda y0: other(y0, T), list(other.parameters())), 1e-8)


def test_environment_is_left_alone():
    node, y0 = make_node(), draw(1, 4, 3)
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state()
    node(y0, T).sum().backward()
    after = torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled(), torch.get_rng_state()
    assert before[:3] == after[:3] and torch.equal(before[3], after[3])


# --- precision --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("timed", [True, False])
def test_autocast(timed):
    """Inside autocast the trajectory is solved in full precision."""
    node, y0 = make_node(dtype=torch.float32, timed=timed), draw(1, 4, 3, dtype=torch.float32)
    t = T.float()
    plain = gradients(lambda y0: node(y0, t), node, y0)
    leaf = y0.clone().requires_grad_()
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        y = node(leaf, t)
    assert y.dtype == torch.float32
    all_close([y.detach(), *grad((y**2).sum(), [leaf, *node.parameters()])], plain, CLOSE32)


def test_autocast_between_other_layers():
    """What comes from a Linear in bfloat16 is taken up to float32, and backward reaches everything."""
    model, x = make_model(dtype=torch.float32), draw(1, 4, 2, dtype=torch.float32)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        y = model(x)
        assert y.dtype == torch.bfloat16
        loss = (y.float() ** 2).sum()
    loss.backward()
    assert bool(model.node.report.forward.converged.all()) and bool(model.node.report.backward.converged.all())
    plain = make_model(dtype=torch.float32)
    (plain(x) ** 2).sum().backward()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert one.grad.dtype == torch.float32
        torch.testing.assert_close(one.grad, two.grad, rtol=0.1, atol=0.05)  # the Linears around it are in half precision


# --- compilation ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.xdist_group("compile")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_model(backend, fresh_compiler):
    model, x = make_model(), draw(1, 4, 2)
    plain = gradients(model, model, x)
    fast = torch.compile(model, backend=backend)
    for _ in range(3):
        all_close(gradients(fast, model, x), plain)


@pytest.mark.xdist_group("compile")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning")
@pytest.mark.parametrize("timed", [True, False])
def test_compiled_field(timed, fresh_compiler):
    """A compiled field is differentiated as the module behind it: compiled graphs cannot be, twice."""
    node, y0 = make_node(timed=timed), draw(1, 4, 3)
    plain = gradients(lambda y0: node(y0, T), node, y0)
    fast = dil.NeuralODE(torch.compile(node.field, backend="aot_eager"))
    for _ in range(3):
        all_close(gradients(lambda y0: fast(y0, T), node, y0), plain)
