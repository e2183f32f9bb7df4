"""What is assumed of f is looked into: that it does not use t, is no random function, treats samples alone, stays as it was."""

import warnings

import pytest
import torch

from torchdil.compiled import memory
from torchdil.ode import odeint

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
    f = hidden(kind)
    odeint(f, Y0, line(0, 0.4, 6), batch_dims=1, **settings(method))  # where t changes nothing
    found = odeint(f, Y0, line(0, 1, 11), batch_dims=1, **settings(method))
    assert torch.allclose(found, odeint(switched, Y0, line(0, 1, 11), batch_dims=1, **settings(method)), rtol=1e-8)


def test_a_scripted_function_that_does_not_use_t_is_still_one_larger_batch():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = torch.jit.script(_still)
    odeint(net, Y0, line(0, 1, 6), batch_dims=1)
    assert [verdict.mode for key, verdict in memory(net).items() if key[0] == "field"] == ["rows"]


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
    for _ in range(10):
        found = odeint(f, Y0, t, batch_dims=1, method=method)
    assert torch.allclose(found, odeint(lambda t, y: -y + 0.2, Y0, t, batch_dims=1, method=method), rtol=1e-8)
