"""A small program with types, as a user would write it; tests/test_typing.py runs it and has it checked in strict mode."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torchdil as dil


class Energy(nn.Module):
    """A learned score."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 3)

    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        target: Tensor = self.net(x)
        return ((y - target) ** 2 + torch.cosh(y)).sum(-1)


def nearest(energy: Energy, x: Tensor) -> Tensor:
    solution = dil.argmin(energy, torch.zeros(len(x), 3), (x,), solver=dil.Newton(rtol=1e-6), linear_solver=dil.CG())
    converged: Tensor = solution.converged
    assert bool(converged.all())
    return solution.value


def both(a: Tensor) -> tuple[Tensor, Tensor]:
    def residual(y: tuple[Tensor, Tensor], a: Tensor) -> tuple[Tensor, Tensor]:
        return y[0] ** 3 + y[0] - a, y[1] + y[0] - 1

    solution: dil.Solution[tuple[Tensor, Tensor]] = dil.root(
        residual, (torch.zeros(2), torch.zeros(2)), (a,), on_failure="raise"
    )
    return solution.value


def halves(square: Tensor) -> Tensor:
    return dil.attach(lambda y: y**2 - square, square.detach().sqrt())


def decay(rate: Tensor) -> Tensor:
    def slope(t: Tensor, y: Tensor) -> Tensor:
        return -rate * y

    start, t = torch.ones(2), torch.linspace(0, 1, 5)
    y = dil.odeint(slope, start, t, method=dil.ode.RadauIIA(5), solver=dil.ode.WholeTrajectory())
    again = dil.odeint(slope, start, t, gradient="adjoint", solver=dil.ode.SimplifiedNewton())
    return y[-1] + again[-1] + dil.odeint(slope, start, t, solver=dil.Picard(), batch_dims=0)[-1]


def settled(w: Tensor) -> Tensor:
    return dil.fixed_point(lambda y: torch.cos(w * y), torch.ones(2), solver=dil.Anderson()).value


def planned(state: Tensor) -> Tensor:
    mpc = dil.control.MPC(lambda x, u: x + u, lambda x, u: (x**2 + u**2).sum(-1), horizon=3, control_dim=2, bounds=(-1.0, 1.0))
    gain: Tensor = dil.control.dlqr(torch.eye(2), torch.eye(2), torch.eye(2), torch.eye(2))
    controls: Tensor = mpc(state)
    return controls[:, 0] - state @ gain.mT


def main() -> None:
    energy, x = Energy(), torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    layer = dil.ArgminLayer(energy, init=(3,), on_failure="zero")
    node = dil.NeuralODE(lambda t, y: -y, "trbdf2", rtol=1e-3, solver=dil.ode.SimplifiedNewton())
    two = torch.full((2,), 2.0, requires_grad=True)
    results = [nearest(energy, x), layer(x), *both(two), halves(two), decay(two), settled(two), planned(torch.ones(1, 2))]
    results.append(node(torch.ones(3, 2), torch.linspace(0, 1, 3)))
    sum((y.sum() for y in results), torch.zeros(())).backward()
    report: dil.Report | None = layer.report
    if report is not None and report.backward is not None:
        worst: Tensor = report.backward.stats.residual.max()
        print(f"{float(worst):.0e}", report.backward.converged.all().item())


if __name__ == "__main__":
    main()
