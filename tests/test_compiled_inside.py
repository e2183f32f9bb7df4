"""Functions that call what torch.compile has compiled: it runs as it was written where it must be differentiated twice."""

import threading
import warnings

import pytest
import torch
from torch import nn
from torch.autograd import grad, gradcheck, gradgradcheck

import torchdil as dil
from torchdil.as_written import as_written, running_as_written

pytestmark = [
    pytest.mark.xdist_group("compile"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning"),
]
BACKEND = "aot_eager"
F64 = torch.float64


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    assert not running_as_written() and torch._dynamo.eval_frame._stance.stance == "default"


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


class Score(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.Linear(8, 1)).double()

    def forward(self, y, x):
        return self.net(y + x).squeeze(-1) + (y**2).sum(-1)


def in_place(score):
    score.compile(backend=BACKEND)
    return score


def its_network(score):
    score.net = torch.compile(score.net, backend=BACKEND)
    return score


def a_layer_of_it(score):
    score.net[0].compile(backend=BACKEND)
    return score


def in_a_closure(score):
    fast = torch.compile(score, backend=BACKEND)
    return lambda y, x: fast(y, x)


def a_function(score):
    fast = torch.compile(lambda y, x: score(y, x) + torch.cosh(y).sum(-1), backend=BACKEND)
    return lambda y, x: fast(y, x) - torch.cosh(y).sum(-1)


HOW = [in_place, its_network, a_layer_of_it, in_a_closure, a_function]


def gradients(function, parameters, x):
    x = x.clone().requires_grad_()
    y = dil.argmin(function, torch.zeros(4, 3, dtype=F64), (x,), on_failure="raise").value
    return [y.detach(), *grad((y**2).sum(), [x, *parameters], materialize_grads=True)]


@pytest.mark.parametrize("how", HOW)
def test_it_has_the_gradients_of_what_was_written(how):
    x, plain, score = draw(1, 4, 3), Score(), Score()
    expected = gradients(plain, list(plain.parameters()), x)
    parameters = list(score.parameters())
    function = how(score)
    for _ in range(14):  # the first call finds out; the last ones would be traced
        for a, b in zip(expected, gradients(function, parameters, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_second_derivatives_and_checks():
    function, x = its_network(Score()), draw(1, 2, 3).requires_grad_()

    def layer(x):
        return dil.argmin(function, torch.zeros(2, 3, dtype=F64), (x,), solver=dil.Newton(rtol=1e-13)).value

    assert dil.check_gradient(dil.ArgminLayer(its_network(Score()), init=(3,)), x.detach()).ok
    assert gradcheck(layer, x)
    assert gradgradcheck(layer, x)


def test_inside_a_compiled_model():
    score = its_network(Score())
    model = nn.Sequential(nn.Linear(3, 3).double(), dil.ArgminLayer(score, init=(3,)))
    x, parameters = draw(1, 4, 3), list(model.parameters())
    expected = grad((model(x) ** 2).sum(), parameters, materialize_grads=True)
    found = grad((torch.compile(model, backend=BACKEND)(x) ** 2).sum(), parameters, materialize_grads=True)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_what_needs_first_derivatives_only_stays_compiled():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    net = torch.compile(nn.Linear(3, 3).double(), backend=backend)
    dil.fixed_point(lambda z, x: 0.3 * torch.tanh(net(z)) + x, torch.zeros(4, 3, dtype=F64), (draw(1, 4, 3),), batch_dims=1)
    assert graphs


def test_an_error_of_the_function_stays_what_it_is():
    def wrong(y):
        raise RuntimeError("mine")

    fast = torch.compile(wrong, backend=BACKEND)
    with pytest.raises(RuntimeError, match="mine"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dil.argmin(lambda y: fast(y).sum(), torch.zeros(3))


def test_threads_leave_the_state_as_it_was():
    barrier = threading.Barrier(2)

    def first():
        with as_written():
            barrier.wait(10)  # both inside
            barrier.wait(10)  # the other is out

    thread = threading.Thread(target=first)
    thread.start()
    with as_written():
        barrier.wait(10)
    assert running_as_written()
    barrier.wait(10)
    thread.join()
    assert not running_as_written()
