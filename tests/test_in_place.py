"""What becomes of the tensors that a layer has read between its forward and its backward pass, as far as autograd allows it."""

import pytest
import torch
from torch import nn

import torchdil as dil
from torchdil import traced

CALLS = traced._PATIENCE + 15


@pytest.fixture(autouse=True)
def _new():
    traced.forget_all()


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


START = torch.zeros(3, 4, dtype=torch.float64)


def score(y, h):
    return ((y - h) ** 2).sum(-1) + torch.cosh(y).sum(-1)


# y of h, and the derivative of each of its numbers by that of h; no derivative reads h.
LAYERS = {
    "argmin": (lambda h: dil.argmin(score, START, (h,)).value, lambda y: 2 / (2 + y.cosh())),
    "layer": (dil.ArgminLayer(score, init=(4,)), lambda y: 2 / (2 + y.cosh())),
    "root": (lambda h: dil.root(lambda y, h: y + y.sinh() - h, START, (h,), batch_dims=1).value, lambda y: 1 / (1 + y.cosh())),
    "closure": (lambda h: dil.root(lambda y: y + y.sinh() - h, START, batch_dims=1).value, lambda y: 1 / (1 + y.cosh())),
    "fixed point": (
        lambda h: dil.fixed_point(lambda y, h: h - 0.5 * y.sin(), START, (h,), batch_dims=1).value,
        lambda y: 1 / (1 + 0.5 * y.cos()),
    ),
    "attach": (lambda h: dil.attach(lambda y, h: 2 * y - h, 0.5 * h.detach(), (h,), batch_dims=1), lambda y: 0.5 + 0 * y),
}
# What is made of h and y, and the derivative by h.
CHANGES = {
    "a residual connection": (lambda h, y: h.add_(y), lambda h: 1.0),
    "an activation": (lambda h, y: h.relu_() + y, lambda h: (h > 0).double()),
    "a view": (lambda h, y: h.view(-1).mul_(3.0).view_as(y) + y, lambda h: 3.0),
    "detached": (lambda h, y: h.detach_() + y, lambda h: 0.0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_tensor_that_is_changed_after_the_call(name, change):
    (layer, slope), (made, direct) = LAYERS[name], CHANGES[change]
    net = nn.Linear(4, 4, dtype=torch.float64)
    for call in range(CALLS):
        x = draw(call, 3, 4)
        h = net(x)
        before, y = h.detach().clone(), layer(h)
        (found,) = torch.autograd.grad(made(h, y).sum(), net.weight)
        v = slope(y.detach()) + direct(before)
        torch.testing.assert_close(found, v.T @ x, rtol=1e-6, atol=1e-8, msg=lambda text, call=call: f"call {call}: {text}")
    assert any(memory.trace is not None for memory in traced._memories.values())


@pytest.mark.parametrize("name", ["argmin", "root"])
def test_parameters_that_are_frozen_after_the_call(name):
    """As those of a critic are while its actor learns."""
    net = nn.Linear(4, 4, dtype=torch.float64)
    energy = lambda y, x: ((y - x) ** 2).sum(-1) + torch.cosh(net(y)).sum(-1)  # noqa: E731
    residual = lambda y, x: y + 0.1 * net(y).tanh() - x  # noqa: E731
    for call in range(CALLS):
        net.requires_grad_(True)
        x = draw(call, 3, 4).requires_grad_()
        y = dil.argmin(energy, START, (x,)).value if name == "argmin" else dil.root(residual, START, (x,), batch_dims=1).value
        net.requires_grad_(False)
        y.sum().backward()
        function = torch.func.grad(lambda y, x: energy(y, x).sum()) if name == "argmin" else residual
        J, of_x = torch.func.jacrev(function, (0, 1))(y.detach(), x.detach())
        g = torch.linalg.solve(J.reshape(12, 12).mT, torch.ones(12, dtype=torch.float64))
        torch.testing.assert_close(x.grad, -(g @ of_x.reshape(12, 12)).view(3, 4), rtol=1e-6, atol=1e-8)
        assert net.weight.grad is None


def test_checks_are_not_missed_where_one_solution_has_many_gradients(tmp_path):
    """They are solves of one point; a change that nothing shows is found as soon as where each has one gradient."""
    path = tmp_path / "number"

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, y):
            return y.clone()

        @staticmethod
        def backward(ctx, v):
            return v * float(path.read_text())

    theta = torch.ones(3, dtype=torch.float64, requires_grad=True)
    path.write_text("1")
    start, passes = torch.zeros(3, dtype=torch.float64), 10

    def gradients():
        y = dil.root(lambda y: 2 * y - Scale.apply(theta), start).value
        return [float(torch.autograd.grad(y.sum(), theta, retain_graph=True)[0][0]) for _ in range(passes)]

    for _ in range(6):
        gradients()
    path.write_text("3")
    wrong = 0
    with pytest.warns(dil.ConvergenceWarning, match="have changed while its value has not"):
        for _ in range(6):
            wrong += sum(abs(found - 1.5) > 1e-9 for found in gradients())
    assert wrong <= 2 * traced._CHECKED_EVERY + passes
