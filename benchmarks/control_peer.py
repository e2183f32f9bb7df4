"""`dil.control.MPC` beside mpc.pytorch (Amos et al. 2018): a pendulum, a quadratic cost, bounds that many controls meet.

Both plan; the gradient of a weighted sum of the controls in the weights of the cost is compared with differences of a tight
solution. mpc.pytorch is no dependency: `pip install --no-deps mpc==0.0.6` for this comparison.
"""

from __future__ import annotations

import warnings
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

import torchdil as dil
from benchmarks.timing import Way, timed

OURS, PEER = "torchdil", "mpc.pytorch"
BATCH, HORIZON = 32, 20
BOUND = 1.0
SHIFT = 1e-5  # of the differences


def installed() -> bool:
    """Whether the peer can be compared with."""
    return find_spec("mpc") is not None


class Pendulum(nn.Module):
    """x = (angle, speed), pushed by a torque."""

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        angle, speed = x.unbind(-1)
        speed = speed + 0.1 * (3.0 * u[:, 0] - 9.82 * angle.sin())
        return torch.stack((angle + 0.1 * speed, speed), dim=-1)


class Problem:
    """½ zᵀ diag(w) z - (w g)ᵀ z over z = (x, u) and the H states before the last, which is how the peer counts."""

    def __init__(self, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.x = 0.3 * torch.randn(BATCH, 2, generator=generator, dtype=torch.float64)
        self.v = torch.randn(BATCH, HORIZON, 1, generator=generator, dtype=torch.float64)
        self.goal = torch.tensor([0.8, 0.0, 0.0], dtype=torch.float64)
        self.w = torch.tensor([1.0, 0.1, 0.01], dtype=torch.float64, requires_grad=True)
        self.dynamics = Pendulum()

    def ours(self, w: Tensor) -> Tensor:
        def cost(x: Tensor, u: Tensor) -> Tensor:
            z = torch.cat((x, u), dim=-1)
            return (0.5 * w * z.square() - w * self.goal * z).sum(dim=-1)

        layer = dil.control.MPC(
            self.dynamics,
            cost,
            HORIZON,
            1,
            terminal=lambda x: 0 * x.sum(dim=-1),
            bounds=(-BOUND, BOUND),
            on_failure="raise",
        )
        return layer(self.x)

    def peer(self, w: Tensor) -> Tensor:
        from mpc import mpc

        C = torch.diag(w).expand(HORIZON, BATCH, 3, 3)
        c = (-w * self.goal).expand(HORIZON, BATCH, 3)
        solver = mpc.MPC(
            2,
            1,
            HORIZON,
            u_lower=-BOUND,
            u_upper=BOUND,
            lqr_iter=100,
            eps=1e-9,
            verbose=-1,
            exit_unconverged=False,
            grad_method=mpc.GradMethods.AUTO_DIFF,
        )
        return solver(self.x, mpc.QuadCost(C, c), self.dynamics)[1].transpose(0, 1)

    def differences(self) -> Tensor:
        """The gradient in w by central differences of our solution."""
        slopes = []
        for unit in torch.eye(3, dtype=torch.float64):
            with torch.no_grad():
                ahead, behind = ((self.ours(self.w + sign * SHIFT * unit) * self.v).sum() for sign in (1, -1))
            slopes.append((ahead - behind) / (2 * SHIFT))
        return torch.stack(slopes)


def run(rounds: int, warm_up: int, seed: int = 0) -> dict[str, Any]:
    """Plans, gradients and times of both."""
    problem = Problem(seed)

    def way(plan: Any) -> Way:
        return Way(lambda: plan(problem.w), lambda u: torch.autograd.grad((u * problem.v).sum(), problem.w)[0])

    ways = {OURS: way(problem.ours), PEER: way(problem.peer)}
    exact, plan = problem.differences(), problem.ours(problem.w).detach()
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the peer's, of torch functions that have changed since
        for name, each in ways.items():
            u = each.forward()
            found[name] = {
                "value_error": float((u.detach() - plan).norm() / plan.norm()),
                "gradient_error": float((each.backward(u) - exact).norm() / exact.norm()),
            }
        for name, times in timed(ways, "cpu", rounds, warm_up).items():
            found[name] |= times
    held = float((plan.abs() >= BOUND).double().mean())
    return {"batch": BATCH, "horizon": HORIZON, "held": held, "versions": {"mpc": version("mpc")}, "ways": found}
