"""Planted faults of every kind, and what `check_gradient` says of each.

The layers are y = argmin of an energy, y = tanh(W y + net(x)) and a few of single numbers; each has one fault, in the forward
solve, in the backward solve or in the function, and the check is right if it blames that part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchdil as dil


@dataclass(frozen=True)
class Config:
    """All there is to choose.

    Attributes:
        runs: one is the whole experiment.
    """

    runs: int = 1

    @staticmethod
    def preset(name: str) -> Config:
        return {"smoke": Config(), "quick": Config(), "paper": Config()}[name]


class Fault(NamedTuple):
    """A layer with a fault, inputs for it, and who is to blame."""

    layer: Callable[..., Any]
    inputs: tuple[Tensor, ...]
    blame: str


def run(config: Config, seed: int) -> dict[str, Any]:
    """One row a fault."""
    rows = []
    for name, fault in faults().items():
        check = dil.check_gradient(fault.layer, *fault.inputs)
        rows.append(
            {"planted": name, "to blame": fault.blame, "named": check.blame, "error": check.error, "advice": check.advice}
        )
    return {"rows": rows}


def faults() -> dict[str, Fault]:
    """Five in the forward solve, six in the backward solve, seven in the function."""
    x, theta = draw(4, 5), torch.tensor([1.0, 2.0], dtype=torch.float64)
    forward, backward, function = "forward solve", "backward solve", "function"
    return {
        "few steps": Fault(argmin_layer(solver=dil.GradientDescent(max_steps=3)), (x,), forward),
        "loose rtol": Fault(argmin_layer(solver=dil.LBFGS(rtol=0.1)), (x,), forward),
        "few steps of Picard": Fault(equilibrium(solver=dil.Picard(max_steps=5)), (x,), forward),
        "a solver that stops early": Fault(argmin_layer(solver=stops_early), (x,), forward),
        "no solution attached": Fault(attach_roughly, (theta,), forward),
        "one step of CG": Fault(argmin_layer(linear_solver=dil.CG(max_steps=1)), (x,), backward),
        "loose CG": Fault(argmin_layer(linear_solver=dil.CG(rtol=0.5)), (x,), backward),
        "loose GMRES": Fault(equilibrium(linear_solver=dil.GMRES(rtol=0.3)), (x,), backward),
        "damping": Fault(argmin_layer(linear_solver=dil.CG(damping=0.5)), (x,), backward),
        "no Jacobian": Fault(equilibrium(linear_solver=dil.JacobianFree()), (x,), backward),
        "three terms": Fault(equilibrium(linear_solver=dil.Neumann(max_steps=3)), (x,), backward),
        "a kink of the score": Fault(dil.ArgminLayer(kinked_score, solver=lambda fn, y0: 0 * y0, init=(3,)), (x,), function),
        "a kink of the residual": Fault(dil.RootLayer(kinked_residual, init=(2,)), (0 * theta.unsqueeze(0),), function),
        "detach": Fault(dil.ArgminLayer(Energy(cut=True), init=(3,)), (x,), function),
        "item": Fault(through_item, (theta[1],), function),
        "a wrong backward": Fault(
            dil.RootLayer(lambda y, x: y + 0.1 * y**3 - Wrong.apply(x), init=(5,)),  # type: ignore[no-untyped-call]
            (x,),
            function,
        ),
        "dropout": Fault(nn.Sequential(nn.Dropout(0.5), argmin_layer()), (x,), function),
        "a wrong backward outside": Fault(Wrong.apply, (x,), function),
    }


def draw(*shape: int) -> Tensor:
    """Normal random numbers, the same for the same shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


class Energy(nn.Module):
    """A convex score of y with a network of x inside and unequal curvatures; `cut`: the network gets no gradient."""

    def __init__(self, cut: bool = False):
        super().__init__()
        self.net, self.cut = network(), cut

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        target = self.net(x).detach() if self.cut else self.net(x)
        return (torch.tensor([1.0, 3.0, 9.0]).to(y) * (y - target) ** 2 + torch.cosh(y)).sum(-1)


def network() -> nn.Linear:
    """Five inputs, three outputs."""
    net = nn.Linear(5, 3).double()
    with torch.no_grad():
        net.weight.copy_(draw(3, 5))
        net.bias.copy_(draw(3))
    return net


def argmin_layer(**settings: Any) -> dil.ArgminLayer:
    """y = argmin of the energy."""
    return dil.ArgminLayer(Energy(), init=(3,), **settings)


def equilibrium(**settings: Any) -> dil.FixedPointLayer:
    """y = tanh(W y + net(x))."""
    net, turn = network(), torch.linalg.qr(draw(3, 3))[0]
    return dil.FixedPointLayer(lambda y, x: torch.tanh(0.9 * y @ turn.mT + net(x)), init=(3,), **settings)


def stops_early(fn: Callable[[Tensor], Tensor], y0: Tensor) -> Tensor:
    """A solver of the user's that takes three steps of gradient descent."""
    y = y0
    for _ in range(3):
        y = y.detach().requires_grad_()
        y = y - 0.05 * torch.autograd.grad(fn(y).sum(), y)[0]
    return y.detach()


def attach_roughly(a: Tensor) -> Tensor:
    """Square roots that are off by 0.02."""
    return dil.attach(lambda y: y**2 - a, a.detach().sqrt() + 0.02)


def kinked_score(y: Tensor, x: Tensor) -> Tensor:
    """Its minimiser is 0, where the score has a kink, for every small x."""
    return ((y - 0.1 * x[:, :3]) ** 2).sum(-1) + 5 * y.abs().sum(-1)


def kinked_residual(y: Tensor, x: Tensor) -> Tensor:
    """At x = 0 the solution is 0: its slope is 1 to the left and 1/2 to the right."""
    return y + torch.relu(y) - x


def through_item(a: Tensor) -> dil.Solution:
    """y³ + y = a, a being but a number."""
    return dil.root(lambda y: y**3 + y - a.item(), torch.ones_like(a))


class Wrong(torch.autograd.Function):
    """2 t, with the derivative of 3 t."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return 2 * t

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad
