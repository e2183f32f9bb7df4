"""Systems to control: the cart-pole of the paper's Table 2 and the mass-spring-damper of its appendix.

Cart-pole: a cart of mass M on a track with friction b, a uniform rod of mass m and length l on it, θ = 0 where the rod hangs,
a force F = 10 u on the cart. With D = 4 (M + m) - 3 m cos²θ:

    ẍ = (2 m l θ̇² sin θ + 3 m g sin θ cos θ + 4 (F - b ẋ)) / D
    θ̈ = (-3 m l θ̇² sin θ cos θ - 6 (M + m) g sin θ - 6 (F - b ẋ) cos θ) / (l D)

No gradient code: these are torch functions of batches of states, which autograd differentiates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class CartPole:
    """The cart-pole with the constants of Gal et al. (2016).

    A state (..., 4) is (x, ẋ, θ, θ̇), an observation (..., 5) is (x, ẋ, θ̇, sin θ, cos θ), a control (..., 1) is in [-1, 1].

    Attributes:
        integrator: "euler" (explicit) or "rk4", with the control held over a step.
        dt: seconds a step.
        cart_mass, pole_mass, length, friction, gravity: M, m, l (of the whole rod), b and g.
        force: F for u = 1.

    Example:
        >>> system = CartPole()
        >>> after = system.step(torch.zeros(8, 4), torch.ones(8, 1))
    """

    integrator: str = "euler"
    dt: float = 0.1
    cart_mass: float = 0.5
    pole_mass: float = 0.5
    length: float = 0.6
    friction: float = 0.1
    gravity: float = 9.82
    force: float = 10.0

    def __post_init__(self) -> None:
        if self.integrator not in ("euler", "rk4"):
            raise ValueError(f"integrator must be 'euler' or 'rk4', got {self.integrator!r}.")

    def derivative(self, state: Tensor, u: Tensor) -> Tensor:
        """d/dt of (x, ẋ, θ, θ̇), (..., 4)."""
        _, speed, angle, spin = state.unbind(-1)
        m, total, length, g = self.pole_mass, self.cart_mass + self.pole_mass, self.length, self.gravity
        sin, cos = torch.sin(angle), torch.cos(angle)
        D = 4 * total - 3 * m * cos.square()
        swing, push = m * length * spin.square() * sin, self.force * u.squeeze(-1) - self.friction * speed
        acceleration = (2 * swing + 3 * m * g * sin * cos + 4 * push) / D
        turn = -(3 * swing * cos + 6 * total * g * sin + 6 * push * cos) / (length * D)
        return torch.stack([speed, acceleration, spin, turn], dim=-1)

    def step(self, state: Tensor, u: Tensor) -> Tensor:
        """The state one step later, (..., 4)."""
        dt, first = self.dt, self.derivative(state, u)
        if self.integrator == "euler":
            return state + dt * first
        second = self.derivative(state + 0.5 * dt * first, u)
        third = self.derivative(state + 0.5 * dt * second, u)
        fourth = self.derivative(state + dt * third, u)
        return state + dt / 6 * (first + 2 * second + 2 * third + fourth)

    def step_observed(self, observation: Tensor, u: Tensor) -> Tensor:
        """The observation one step later, (..., 5)."""
        return self.observe(self.step(self.state(observation), u))

    def observe(self, state: Tensor) -> Tensor:
        """(x, ẋ, θ, θ̇) -> (x, ẋ, θ̇, sin θ, cos θ)."""
        x, speed, angle, spin = state.unbind(-1)
        return torch.stack([x, speed, spin, torch.sin(angle), torch.cos(angle)], dim=-1)

    def state(self, observation: Tensor) -> Tensor:
        """(x, ẋ, θ̇, sin θ, cos θ) -> (x, ẋ, θ, θ̇) with θ in [-π, π]."""
        x, speed, spin, sin, cos = observation.unbind(-1)
        return torch.stack([x, speed, torch.atan2(sin, cos), spin], dim=-1)

    def energy(self, state: Tensor) -> Tensor:
        """Kinetic and potential energy of cart and rod, (...): constant without friction and force."""
        _, speed, angle, spin = state.unbind(-1)
        m, half = self.pole_mass, 0.5 * self.length
        # The rod's centre is at (x + half sin θ, -half cos θ), and the rod turns about it with inertia m l² / 12.
        centre = (speed + half * torch.cos(angle) * spin).square() + (half * torch.sin(angle) * spin).square()
        kinetic = 0.5 * self.cart_mass * speed.square() + 0.5 * m * centre + m * self.length**2 / 24 * spin.square()
        return kinetic - m * self.gravity * half * torch.cos(angle)


class LinearSystem(NamedTuple):
    """x_{t+1} = A x_t + B u_t with the cost xᵀQx + uᵀRu, from x0 (n,); float64."""

    A: Tensor
    B: Tensor
    Q: Tensor
    R: Tensor
    x0: Tensor


def mass_spring_damper(c: float, mass: float = 1.0, stiffness: float = 1.0) -> LinearSystem:
    """The matrices of the paper's appendix for a damping coefficient c, used as those of a discrete system.

    Example:
        >>> A, B, Q, R, x0 = mass_spring_damper(0.1)
    """
    return LinearSystem(
        torch.tensor([[0.0, 1.0], [-stiffness / mass, -c / mass]], dtype=torch.float64),
        torch.tensor([[0.0], [-1 / mass]], dtype=torch.float64),
        torch.eye(2, dtype=torch.float64),
        torch.tensor([[2.0]], dtype=torch.float64),
        torch.tensor([0.0, 3.0], dtype=torch.float64),
    )
