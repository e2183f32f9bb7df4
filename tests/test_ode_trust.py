"""What is assumed of f is looked into: that it does not use t, is no random function, treats samples alone, stays as it was."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import functional_call

import torchdil as dil
from torchdil.compiled import memory
from torchdil.ode import odeint, solve

METHODS = ["backward_euler", "sdirk2", "kvaerno5", "radauIIA5"]
Y0 = torch.tensor([[1.0], [2.0]], dtype=torch.float64)


def real(values):
    return torch.tensor(values, dtype=torch.float64)


def line(*args):
    return torch.linspace(*args, dtype=torch.float64)


def settings(method):
    return {"method": method, "rtol": 1e-6, "atol": 1e-8} if method in ("kvaerno5", "radauIIA5") else {"method": method}


def switched(t, y):
    return torch.where(t > 0.5, 2 * y, -y)


def hidden(kind):
    """`switched`, with its use of t out of sight of Python."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch, of its own TorchScript
        if kind == "scripted":
            inside = torch.jit.script(_switched)
        elif kind == "traced":
            inside = torch.jit.trace(switched, (real(0.1), Y0))
        else:

            def inside(t, y):
                return torch.func.grad(lambda s: torch.where(s > 0.5, 2 * s, -s))(t) * y

    return lambda t, y: 1 * inside(t, y)


def _switched(t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.where(t > 0.5, 2 * y, -y)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", ["scripted", "traced", "torch.func"])
def test_a_use_of_t_that_python_does_not_see_is_seen(kind, method):
    # Alike, so that it makes no difference whether they share their steps, as they do where a fused kernel takes no vmap.
    f, y0 = hidden(kind), Y0[[1, 1]]
    odeint(f, y0, line(0, 0.4, 6), batch_dims=1, **settings(method))  # where t changes nothing
    found = odeint(f, y0, line(0, 1, 11), batch_dims=1, **settings(method))
    assert torch.allclose(found, odeint(switched, y0, line(0, 1, 11), batch_dims=1, **settings(method)), rtol=1e-8)


def test_a_scripted_function_that_does_not_use_t_is_still_one_larger_batch(device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = torch.jit.script(_still)
    odeint(net, Y0, line(0, 1, 6), batch_dims=1)
    expected = "rows" if device == "cpu" else "loop"  # on a GPU TorchScript fuses kernels, which take no vmap
    assert [verdict.mode for key, verdict in memory(net).items() if key[0] == "field"] == [expected]


def _still(t: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return -y.tanh()


@pytest.mark.parametrize("method", ["backward_euler", "gl4"])
def test_a_function_that_comes_to_need_single_calls_is_found_out(method):
    scale = [0.0]

    def f(t, y):
        # As large as what it is called with at once, which is more than the samples where the points are one larger batch.
        return -y + scale[0] * torch.ones_like(y) * len(y)

    t = line(0, 1, 6)
    for _ in range(3):
        odeint(f, Y0, t, batch_dims=1, method=method)
    scale[0] = 0.1
    for _ in range(60):
        found = odeint(f, Y0, t, batch_dims=1, method=method)
    assert torch.allclose(found, odeint(lambda t, y: -y + 0.2, Y0, t, batch_dims=1, method=method), rtol=1e-8)


def mixing(kind, size):
    """A function of which each sample depends on the others a little."""
    torch.manual_seed(0)
    W = torch.randn(2, 2, dtype=torch.float64)
    mixes = {
        "mean": lambda y: y.mean(0, keepdim=True),
        "normalised": lambda y: nn.functional.batch_norm(y, None, None, training=True),
        "neighbour": lambda y: y.roll(1, 0),
        "one way": lambda y: torch.cat((y[:1], y[:1], 0 * y[2:])),
    }
    return lambda t, y: torch.tanh(y @ W) - y + size * mixes[kind](y)


@pytest.mark.parametrize("method, grad", [("backward_euler", True), ("kvaerno5", False), ("radauIIA5", False)])
@pytest.mark.parametrize("size", [0.1, 1e-5])
@pytest.mark.parametrize("kind", ["mean", "normalised", "neighbour", "one way"])
def test_a_function_that_mixes_samples_is_told_of(kind, size, method, grad):
    y0 = torch.randn(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    with torch.set_grad_enabled(grad), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS")  # torch, of threads of autograd
        found = solve(mixing(kind, size), y0, line(0, 1, 6), batch_dims=1, **settings(method))
    assert len(caught) == 1 and "func mixes samples" in str(caught[0].message) and not found.converged.any()
    assert "y[..., 0]" in str(caught[0].message) and caught[0].filename == __file__


@pytest.mark.parametrize("method", ["backward_euler", "kvaerno5"])
def test_a_function_that_mixes_samples_is_refused_by_the_policy(method):
    f, y0 = mixing("mean", 0.01), torch.randn(4, 2, dtype=torch.float64).requires_grad_()
    with pytest.raises(dil.ConvergenceError, match=r"func mixes samples.*batch_dims=0") as refused:
        odeint(f, y0, line(0, 1, 6), batch_dims=1, method=method, on_failure="raise")
    assert not refused.value.report.forward.converged.any()
    for policy, expected in (("zero", 0.0), ("nan", torch.nan)):
        y = odeint(f, y0, line(0, 1, 6), batch_dims=1, method=method, on_failure=policy)
        (gradient,) = torch.autograd.grad(y[-1].sum(), y0)
        assert torch.equal(gradient.nan_to_num(7.0), torch.full_like(y0, expected).nan_to_num(7.0))
    odeint(f, y0, line(0, 1, 6), method=method, on_failure="raise", batch_dims=0)


@pytest.mark.parametrize("method", ["backward_euler", "kvaerno5"])
def test_batch_normalisation_is_told_of_in_training_only(method):
    field = Normalised()
    node, y0 = dil.NeuralODE(field, method=method, on_failure="raise"), torch.randn(6, 2, dtype=torch.float64)
    field.net.eval()
    for _ in range(2):
        node(y0, line(0, 1, 6))
    field.net.train()
    with pytest.raises(dil.ConvergenceError, match="func mixes samples"):
        node(y0, line(0, 1, 6))


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh()).double()

    def forward(self, t, y):
        return 0.1 * self.net(y) - y


@pytest.mark.parametrize("gradient", ["ift", "adjoint"])
@pytest.mark.parametrize("method", ["kvaerno5", "radauIIA5", "trbdf2"])
def test_a_random_function_is_told_of_before_adaptive_steps(method, gradient):
    calls = []

    def f(t, y):
        calls.append(t)
        return nn.functional.dropout(1 - y, 0.2)

    y0 = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    with pytest.warns(dil.ConvergenceWarning, match=r"another value each time.*dropout off with \.eval\(\)") as caught:
        found = solve(f, y0, line(0, 1, 6), method=method, rtol=1e-4, batch_dims=1, gradient=gradient)
    assert len(caught) == 1 and len(calls) < 20 and not found.converged.any()
    assert torch.equal(found.value, y0.expand(6, 8, 2)) and not found.stats.accepted.any()
    with pytest.raises(dil.ConvergenceError, match="another value each time"):
        odeint(f, y0, line(0, 1, 6), method=method, rtol=1e-4, on_failure="raise")


def test_samples_that_only_share_their_size_are_not_said_to_mix():
    def f(t, y):  # the largest is taken out, and put back
        largest = y.abs().amax()
        return -largest * (y / largest) ** 3 * largest**2

    odeint(f, torch.randn(6, 3, dtype=torch.float64), line(0, 1, 6), batch_dims=1, on_failure="raise")


class Context(nn.Module):
    """A field with a number and a tensor that a program may set anew."""

    def __init__(self, size=3):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(size, size).double()
        self.scale, self.context = 1.0, torch.zeros(size, dtype=torch.float64)

    def forward(self, t, y):
        return self.scale * (torch.tanh(self.net(y)) + self.context - y)


AGAIN = [{"options": {"checkpoint": True}}, {"options": {"checkpoint": 3}}, {"gradient": "adjoint"}]
AGAIN += [{"gradient": "adjoint", "method": "kvaerno5"}, {"gradient": "adjoint", "options": {"adjoint": "stored"}}]


def start(size=3):
    return torch.randn(4, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def change_number(field):
    field.scale = 3.0


def change_tensor(field):
    field.context = torch.full((3,), 0.5, dtype=torch.float64)


def change_parameter(field):
    field.net = nn.Linear(3, 3).double()


@pytest.mark.parametrize("change", [change_number, change_tensor, change_parameter])
@pytest.mark.parametrize("again", AGAIN, ids=str)
def test_a_function_that_is_evaluated_again_must_be_what_it_was(again, change):
    field = Context()
    y = odeint(lambda t, y: field(t, y), start(), line(0, 1, 9), batch_dims=1, **again)
    change(field)
    with pytest.raises(RuntimeError, match="func gives other values in the backward pass than in the forward pass"):
        y[-1].square().sum().backward()


@pytest.mark.parametrize("again", AGAIN, ids=str)
def test_the_gradient_of_an_equal_tensor_in_the_place_of_another_is_not_lost(again):
    field = Context()
    field.context = real([0.1, 0.2, 0.3]).requires_grad_()
    y = odeint(lambda t, y: field(t, y), start(), line(0, 1, 9), batch_dims=1, **again)
    field.context = field.context.detach().clone().requires_grad_()
    with pytest.raises(RuntimeError, match="func uses a parameter that it was not seen to use in the forward pass"):
        y[-1].square().sum().backward()


def called_with_others(size, **again):
    """The gradients for other parameters than a module has: by functional_call, and by a module that has them."""
    field, y0, t = Context(size), start(size), line(0, 1, 7)
    node = dil.NeuralODE(field, **again)
    others = {name: (1.5 * value.detach() + 0.01).requires_grad_() for name, value in node.named_parameters()}
    found = torch.autograd.grad(functional_call(node, others, (y0, t))[-1].square().sum(), list(others.values()))
    node.load_state_dict(others)
    return found, torch.autograd.grad(node(y0, t)[-1].square().sum(), list(node.parameters()))


@pytest.mark.parametrize("again", AGAIN, ids=str)
def test_functional_call_counts_where_a_module_is_evaluated_again(again):
    for found, expected in zip(*called_with_others(3, **again), strict=True):
        assert torch.allclose(found, expected, rtol=1e-8)


@pytest.mark.parametrize(
    "size, again",
    [(4, {"linear_solver": dil.CG()}), (4, {"linear_solver": dil.GMRES()}), (4, {"linear_solver": dil.Dense()}), (300, {})],
    ids=str,
)
def test_functional_call_counts_where_steps_are_solved_one_after_another(size, again):
    for found, expected in zip(*called_with_others(size, **again), strict=True):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("solver", [dil.CG(), dil.GMRES()], ids=str)
def test_a_number_that_changes_before_the_backward_pass_changes_no_gradient(solver):
    field, gradients = Context(), []
    for scale in (1.0, 3.0):
        field.scale, node = 1.0, dil.NeuralODE(field, linear_solver=solver)
        y = node(start(), line(0, 1, 9))
        field.scale = scale
        gradients.append(torch.autograd.grad(y[-1].square().sum(), list(field.parameters())))
        assert node.report.backward.converged.all()
    for found, expected in zip(*gradients, strict=True):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-10)


FIXED = ["backward_euler", "sdirk2", "radauIIA3", "gl6", "rk4"]


@pytest.mark.parametrize("given", [{"rtol": 1e-8}, {"atol": 1e-8}, {"rtol": 1e-8, "atol": 1e-8}], ids=str)
@pytest.mark.parametrize("method", FIXED)
def test_tolerances_that_are_not_used_are_told_of(method, given):
    t = real([0.0, 10.0])
    with pytest.warns(UserWarning, match='rtol and atol are not used: .* takes the steps .*"kvaerno5"') as caught:
        odeint(lambda t, y: -0.1 * y, real([1.0]), t, method=method, **given)
        dil.NeuralODE(lambda t, y: -0.1 * y, method, **given)(real([[1.0]]), t)
    assert [warning.filename for warning in caught] == [__file__] * 2


@pytest.mark.parametrize("method", ["kvaerno5", "radauIIA5", "trbdf2"])
def test_tolerances_of_a_method_that_can_adapt_are_no_matter_on_a_fixed_grid(method):
    odeint(lambda t, y: -y, real([1.0]), real([0.0, 1.0]), method=method, rtol=1e-6, options={"substeps": 4})


@pytest.mark.parametrize("offset", [1e6, 1.7e9])
@pytest.mark.parametrize("method", ["trapezoid", "kvaerno5"])
def test_times_that_float32_cannot_tell_apart_are_told_of(method, offset):
    y0, t = torch.zeros(1), offset + line(0, 10, 401)
    with pytest.warns(UserWarning, match="func is given t in the dtype of y, torch.float32.* let t begin near 0") as caught:
        odeint(lambda t, y: torch.cos(t / 1e7) - y, y0, t, method=method, options={} if method == "trapezoid" else None)
    assert len(caught) == 1 and caught[0].filename == __file__


@pytest.mark.parametrize("method", ["trapezoid", "kvaerno5"])
def test_times_that_nobody_looks_at_or_that_are_told_apart_are_no_matter(method):
    def forced(t, y):
        return torch.cos(t) - y

    odeint(forced, torch.zeros(1), line(0, 10, 401), method=method)
    odeint(forced, torch.zeros(1), 100 + line(0, 10, 401), method=method)
    odeint(lambda t, y: 1 - y, torch.zeros(1), 1.7e9 + line(0, 10, 401), method=method)
    odeint(forced, torch.zeros(1, dtype=torch.float64), 1.7e9 + line(0, 10, 401), method=method)


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 1e-17), (torch.float32, 1e-25), (torch.float64, 1e-200)])
@pytest.mark.parametrize("method", ["kvaerno5", "radauIIA5", "trbdf2"])
def test_adaptive_steps_know_no_units(method, dtype, size):
    weights, t = torch.tensor([1.0, 5.0], dtype=dtype), torch.linspace(0, 1, 6, dtype=dtype)

    def relative(size):
        y0 = torch.tensor([1.0, 2.0], dtype=dtype) * size
        return odeint(lambda t, y: -y - (y / size) * y * weights, y0, t, method=method, rtol=1e-4, atol=0) / size

    assert torch.allclose(relative(size), relative(1.0), rtol=1e-3)


@pytest.mark.parametrize("method", ["backward_euler", "kvaerno5"])
def test_a_function_that_mixes_samples_is_told_of_at_each_call(method):
    f, y0 = mixing("mean", 0.1), torch.randn(4, 2, dtype=torch.float64)
    for _ in range(3):
        with pytest.raises(dil.ConvergenceError, match="func mixes samples"):
            odeint(f, y0, line(0, 1, 6), batch_dims=1, method=method, on_failure="raise")


@pytest.mark.parametrize("method", ["backward_euler", "kvaerno5", "gl4"])
def test_a_function_that_was_mended_is_said_to_mix_samples_no_more(method):
    field, y0 = Coupled(), torch.randn(4, 2, dtype=torch.float64)
    for _ in range(2):
        assert not solve(field, y0, line(0, 1, 6), batch_dims=1, method=method, on_failure="ignore").converged.any()
    field.coupling = 0.0
    assert solve(field, y0, line(0, 1, 6), batch_dims=1, method=method, on_failure="raise").converged.all()


class Coupled(nn.Module):
    coupling = 0.1

    def forward(self, t, y):
        return self.coupling * y.mean(0) - y


@pytest.mark.parametrize("method", ["backward_euler", "radauIIA5"])
@pytest.mark.parametrize(
    ("dtype", "exponent"), [(torch.float64, -200), (torch.float64, 200), (torch.float32, -30), (torch.float32, 25)]
)
def test_units_of_the_state_do_not_matter(dtype, exponent, method):
    """The squares of such states are no numbers; the answer is that of states of size one."""
    unit = 10.0**exponent
    decay = torch.tensor([[-3.0, 1.0], [0.5, -2.0]], dtype=dtype)
    found = []
    for size in (1.0, unit):
        y0 = (torch.tensor([[1.0, 2.0]], dtype=dtype) * size).requires_grad_()
        settings = {"method": method, "batch_dims": 1}
        y = dil.odeint(lambda t, y, u=size: y @ decay.T + y * torch.tanh(y / u), y0, line(0, 1, 6).to(dtype), **settings)
        (gradient,) = torch.autograd.grad((y[-1] / size).sum(), y0)
        found.append((y.detach() / size, gradient * size))
    torch.testing.assert_close(found[1], found[0])
