"""Five small learning problems with an implicit layer inside, for `experiments.inexact`.

A problem holds several models, which differ in their data and initial parameters. They are solved and trained together: every
parameter has the models as its first axis, and each model has a loss of its own. All data carry noise, so that the loss of a
perfect fit is not zero and the loss of two fits can be compared.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

import torchdil as dil
from experiments import kepler


class Solved(NamedTuple):
    """The solutions of all samples, the first axis a multiple of the models, and what the layer reports."""

    y: Tensor
    report: dil.Report


class Draw:
    """Random numbers in float64 from one seed."""

    def __init__(self, seed: int):
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64)

    def uniform(self, low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(*shape, generator=self._generator, dtype=torch.float64)


def noisy(data: Tensor, noise: float, draw: Draw) -> Tensor:
    """Data with noise of a share of their standard deviation."""
    return data + noise * data.std() * draw.normal(*data.shape)


class Problem(nn.Module, ABC):
    """Learning problems of one kind; the parameters of the module are those of all models.

    Attributes:
        learning_rate: of Adam.
        exact: the solver of what is called the exact solution.
        inner: the class of the solver that is stopped at a tolerance.
        warm: whether the solver can start from the last solution.
        models: how many.
        probe: zeros of the shape of y that are subtracted from F, so that the gradient with respect to them is the adjoint g;
            empty where F cannot be reached.
    """

    learning_rate: ClassVar[float]
    exact: ClassVar[dil.Solver] = dil.Newton(rtol=1e-14)
    inner: ClassVar[type[dil.Solver]] = dil.GradientDescent
    warm: ClassVar[bool] = True

    def __init__(self, models: int, *unknowns: int):
        super().__init__()
        self.models = models
        self.probe = torch.zeros(unknowns or (0,), dtype=torch.float64, requires_grad=True)

    @abstractmethod
    def solve(self, solver: dil.Solver, linear_solver: dil.LinearSolver, start: Tensor | None = None) -> Solved:
        """y for the present parameters, from `start` or, if that is None, from where the solver starts without knowledge."""

    @abstractmethod
    def loss(self, y: Tensor) -> Tensor:
        """The loss of each model, (models,)."""

    def by_model(self, a: Tensor) -> Tensor:
        """(models * K, ...) as (models, everything else)."""
        return a.reshape(self.models, -1)


class Kepler(Problem):
    """Eccentricity and phase of an orbit from noisy positions E at several times: E = argmin_u (u - e sin u - (M + phase))²."""

    learning_rate = 0.3
    observations, largest_e = 8, 0.9

    def __init__(self, models: int, noise: float, draw: Draw):
        super().__init__(models, models, self.observations)
        shape = models, self.observations
        self.M = draw.uniform(0.3, math.pi - 0.3, *shape)
        positions = kepler.exact(draw.uniform(0.1, 0.8, models, 1), self.M + draw.uniform(-0.2, 0.2, models, 1))
        self.target = noisy(positions, noise, draw)
        self.raw_e = nn.Parameter(draw.normal(models, 1))
        self.phase = nn.Parameter(torch.zeros(models, 1, dtype=torch.float64))

    def score(self, u: Tensor, e: Tensor, M: Tensor) -> Tensor:
        return (kepler.score(u, (e, M)) - self.probe * u).sum(1)

    def solve(self, solver: dil.Solver, linear_solver: dil.LinearSolver, start: Tensor | None = None) -> Solved:
        e, M = self.largest_e * torch.sigmoid(self.raw_e), self.M + self.phase
        first = self.M if start is None else start
        found = dil.argmin(self.score, first, (e, M), solver=solver, linear_solver=linear_solver, on_failure="ignore")
        return Solved(found.value, found.report)

    def loss(self, y: Tensor) -> Tensor:
        return (y - self.target).square().mean(1)


class Energy(Problem):
    """The weights θ of an energy's terms from noisy minima: y(x) = argmin_u 0.1 |u - x|² + Σ θ softplus(A u) + 0.01 |u|⁴."""

    learning_rate = 0.4
    observations, unknowns, terms = 8, 20, 15

    def __init__(self, models: int, noise: float, draw: Draw):
        super().__init__(models, models * self.observations, self.unknowns)
        self.A = draw.normal(models, self.unknowns, self.terms) * 3 / self.unknowns**0.5
        self.x = draw.normal(models * self.observations, self.unknowns)
        self.raw_theta = nn.Parameter(draw.normal(models, 1, self.terms))
        with torch.no_grad():
            minima = self.solve(self.exact, dil.Dense()).y
            self.raw_theta.copy_(draw.normal(models, 1, self.terms))
        self.target = noisy(minima, noise, draw)

    def score(self, y: Tensor, theta: Tensor) -> Tensor:
        z = y.view(self.models, self.observations, self.unknowns) @ self.A
        simple = 0.1 * (y - self.x).square() + 0.01 * y.pow(4) - self.probe * y
        return simple.sum(1) + (theta * softplus(z)).sum(2).view(-1)

    def solve(self, solver: dil.Solver, linear_solver: dil.LinearSolver, start: Tensor | None = None) -> Solved:
        first = torch.zeros_like(self.x) if start is None else start
        args = (softplus(self.raw_theta),)
        found = dil.argmin(self.score, first, args, solver=solver, linear_solver=linear_solver, on_failure="ignore")
        return Solved(found.value, found.report)

    def loss(self, y: Tensor) -> Tensor:
        return self.by_model((y - self.target).square()).mean(1)


class Equilibrium(Problem):
    """A deep equilibrium model, y = tanh(W y + U x + b), and a linear read-out, fitted to noisy values of a function of x.

    The rows of |W| sum to less than 1, so that there is one fixed point and the iteration contracts.
    """

    learning_rate = 0.05
    inner = dil.Picard
    observations, inputs, units, contraction = 32, 2, 20, 0.9

    def __init__(self, models: int, noise: float, draw: Draw):
        super().__init__(models, models * self.observations, self.units)
        self.x = draw.uniform(-1.5, 1.5, models, self.observations, self.inputs)
        function = torch.sin(2 * self.x[..., 0]) * torch.cos(self.x[..., 1])
        self.target = noisy(function, noise, draw)
        self.W = nn.Parameter(draw.normal(models, self.units, self.units) / self.units**0.5)
        self.U = nn.Parameter(draw.normal(models, self.inputs, self.units))
        self.b = nn.Parameter(0.1 * draw.normal(models, 1, self.units))
        self.read_out = nn.Parameter(draw.normal(models, self.units, 1) / self.units**0.5)

    def g(self, y: Tensor, W: Tensor, drive: Tensor) -> Tensor:
        return torch.tanh(y.view(self.models, self.observations, self.units) @ W.mT + drive).view_as(y) + self.probe

    def solve(self, solver: dil.Solver, linear_solver: dil.LinearSolver, start: Tensor | None = None) -> Solved:
        W = self.W * (self.contraction / self.W.abs().sum(2, keepdim=True)).clamp_max(1.0)
        drive = self.x @ self.U + self.b
        first = torch.zeros_like(self.probe) if start is None else start
        settings: dict[str, Any] = {"solver": solver, "linear_solver": linear_solver, "on_failure": "ignore"}
        found = dil.fixed_point(self.g, first, (W, drive), batch_dims=1, **settings)
        return Solved(found.value, found.report)

    def loss(self, y: Tensor) -> Tensor:
        answer = (y.view(self.models, self.observations, self.units) @ self.read_out).squeeze(2)
        return (answer - self.target).square().mean(1)


class NeuralODE(Problem):
    """A network as the right-hand side of dy/dt = f(y), by backward Euler, fitted to noisy windows of coupled spirals."""

    learning_rate = 0.04
    exact = dil.ode.WholeTrajectory(rtol=1e-13)
    inner = dil.Picard
    warm = False  # each step starts from the one before it
    windows, spirals, hidden, times, dt = 8, 4, 50, 6, 0.1

    def __init__(self, models: int, noise: float, draw: Draw):
        super().__init__(models)
        size = 2 * self.spirals
        self.t = self.dt * torch.arange(self.times, dtype=torch.float64)
        coupling = 0.2 * draw.normal(models, size, size) / size**0.5
        turn = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]], dtype=torch.float64)
        A = torch.block_diag(*[turn] * self.spirals) + coupling

        def spiral(t: Tensor, y: Tensor) -> Tensor:
            return (y.view(models, self.windows, size).pow(3) @ A.mT).view_as(y)

        self.first = draw.uniform(-1.2, 1.2, models * self.windows, size)
        path = dil.odeint(spiral, self.first, self.t, method="rk4", options={"substeps": 10}, batch_dims=1)
        self.target = noisy(path[1:], noise, draw)
        self.W = nn.Parameter(draw.normal(models, size, self.hidden) / size**0.5)
        self.b = nn.Parameter(torch.zeros(models, 1, self.hidden, dtype=torch.float64))
        self.V = nn.Parameter(draw.normal(models, self.hidden, size) / self.hidden**0.5)

    def field(self, t: Tensor, y: Tensor) -> Tensor:
        return (torch.tanh(y.view(self.models, -1, y.shape[-1]) @ self.W + self.b) @ self.V).view_as(y)

    def solve(self, solver: dil.Solver, linear_solver: dil.LinearSolver, start: Tensor | None = None) -> Solved:
        settings: dict[str, Any] = {"solver": solver, "linear_solver": linear_solver, "on_failure": "ignore"}
        found = dil.ode.solve(self.field, self.first, self.t, batch_dims=1, **settings)
        return Solved(found.value[1:].transpose(0, 1), found.report)

    def loss(self, y: Tensor) -> Tensor:
        return self.by_model((y - self.target.transpose(0, 1)).square()).mean(1)


class Control(Problem):
    """The goal and the strength of a pendulum's controller from noisy plans: model predictive control.

    A state is (angle, speed, time): the time says which part of the probe belongs to it.
    """

    learning_rate = 0.2
    observations, horizon, dt = 8, 8, 0.1

    def __init__(self, models: int, noise: float, draw: Draw):
        samples = models * self.observations
        super().__init__(models, samples, self.horizon)
        angle, speed = draw.uniform(-1.0, 1.0, 2, samples)
        self.x = torch.stack((angle, speed, torch.zeros_like(angle)), dim=1)
        self.goal = nn.Parameter(draw.uniform(-1.0, 1.0, models, 1))
        self.strength = nn.Parameter(draw.uniform(2.0, 4.0, models, 1))
        with torch.no_grad():
            plans = self.solve(self.exact, dil.Dense()).y
            self.goal.add_(draw.uniform(-0.5, 0.5, models, 1))
            self.strength.mul_(draw.uniform(0.6, 1.6, models, 1))
        self.target = noisy(plans, noise, draw)

    def dynamics(self, x: Tensor, u: Tensor) -> Tensor:
        angle, speed, time = x.unbind(-1)
        push = (self.strength * self.by_model(u)).view_as(angle)
        speed = speed + self.dt * (push - 9.82 * angle.sin())
        return torch.stack((angle + self.dt * speed, speed, time + 1), dim=-1)

    def cost(self, x: Tensor, u: Tensor) -> Tensor:
        angle, speed, time = x.unbind(-1)
        away = (self.by_model(angle) - self.goal).view_as(angle)
        part = self.probe.gather(1, time.detach().long().clamp_max(self.horizon - 1).unsqueeze(1))
        return away.square() + 0.1 * speed.square() + (0.1 * u.square() - part * u).squeeze(1)

    def solve(self, solver: dil.Solver, linear_solver: dil.LinearSolver, start: Tensor | None = None) -> Solved:
        settings: dict[str, Any] = {"solver": solver, "linear_solver": linear_solver, "on_failure": "ignore"}
        mpc = dil.control.MPC(self.dynamics, self.cost, self.horizon, control_dim=1, **settings)
        plan = mpc(self.x, start)
        assert mpc.report is not None
        return Solved(plan, mpc.report)

    def loss(self, y: Tensor) -> Tensor:
        return self.by_model((y - self.target).square()).mean(1)


# By name; each takes the number of models, the noise in the data relative to their standard deviation, and random numbers.
PROBLEMS: dict[str, Callable[[int, float, Draw], Problem]] = {
    "Kepler": Kepler,
    "neural ODE": NeuralODE,
    "MPC": Control,
    "DEQ": Equilibrium,
    "energy": Energy,
}
