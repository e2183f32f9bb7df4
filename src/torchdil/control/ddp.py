"""Newton's method for planning, its steps taken by the closed loop (differential dynamic programming, Jacobson and Mayne 1970).

The direction is that of Newton, by the Riccati recursion; the way there is u_t + s k_t - K_t (x_t' - x_t), where x' is what the
new controls really lead to: the feedback keeps an unstable system near the trajectory that the model was made at. Controls at a
bound that they press against are left out, the others are clipped (Bertsekas 1982).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil import batch
from torchdil.control.plan import Plan
from torchdil.control.riccati import Factors, factorise, local_problem
from torchdil.problem import Problem
from torchdil.solution import Result
from torchdil.solvers.line_search import Iterate
from torchdil.solvers.newton import Direction, Newton, NewtonSteps


@dataclass(frozen=True)
class DDP(NewtonSteps):
    """The default solver of `MPC`: exact second derivatives, O(H) a step, quadratic convergence, bounds kept.

    Under `torch.vmap`, where dynamics and cost are not at hand by themselves, `Newton()` takes its place.

    Example:
        >>> dil.control.MPC(dynamics, cost, 10, 1, bounds=(-1.0, 1.0), solver=dil.RandomShooting(polish=dil.control.DDP()))
    """

    only = "plan"

    max_steps: int = 100

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        if problem.bound is None:
            return Newton(self.rtol, self.atol, self.max_steps, self.verbose).solve(problem, y0, tolerance)
        return super().solve(problem, y0, tolerance)

    def _factorises(self, y: Tensor) -> bool:
        return True

    def _curved(self, problem: Problem, y: Tensor) -> Tensor:
        return factorise(local_problem(problem.operator(y))[0]).negative

    def _direction(self, problem: Problem, now: Iterate) -> Direction:
        with torch.no_grad():
            local, held = local_problem(problem.operator(now.y))
            factors = factorise(local, downhill=True)
            k = factors.feed_forward(-now.F.view_as(held))
            d = factors.roll(k).flatten(1)
        uphill = ~(batch.dot(d, now.F) < 0)
        d = batch.select(uphill, -now.F, d)

        def path(step: Tensor) -> Tensor:
            straight = now.y + batch.scale(step, d)
            return batch.select(uphill, straight, _closed_loop(problem, factors, now.y, k, step))

        return Direction(d, factors.negative, path)


def _closed_loop(problem: Problem, factors: Factors, y: Tensor, k: Tensor, step: Tensor) -> Tensor:
    """The controls that the policy u_t + s k_t - K_t (x_t' - x_t) applies, (B, n)."""
    assert problem.bound is not None
    call, args = problem.bound
    states = factors.local.x

    def look(plan: Plan, x0: Tensor) -> Tensor:
        box = None if problem.box is None else [bound.view_as(k) for bound in problem.box]
        u, x, controls = y.view_as(k), x0.detach(), []
        for t in range(k.shape[1]):
            control = u[:, t] + step.unsqueeze(1) * k[:, t] - (factors.K[t] @ (x - states[:, t]).unsqueeze(2)).squeeze(2)
            if box is not None:
                control = control.clamp(box[0][:, t], box[1][:, t])
            controls.append(control)
            x = plan.dynamics(x, control)
        return torch.stack(controls, dim=1).flatten(1)

    with torch.no_grad():
        return call(look, *args)
