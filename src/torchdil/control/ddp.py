"""Newton's method for planning, its steps taken by the closed loop (differential dynamic programming, Jacobson and Mayne 1970).

The direction is that of Newton, by the Riccati recursion; the way there is u_t + s k_t - K_t (x_t' - x_t), where x' is what the
new controls really lead to: the feedback keeps an unstable system near the trajectory that the model was made at. Controls at a
bound that they press against are left out; the others stay inside by a small quadratic program at each time (Tassa, Mansard and
Todorov 2014). Where the Hessian is not positive definite, that of each time loses its negative eigenvalues (Verschueren et al.
2017).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchdil import batch
from torchdil.control.expansion import Expansion
from torchdil.control.plan import Plan
from torchdil.control.riccati import inverse_of, invert, local_problem, roll, size_of
from torchdil.control.shapes import apply, symmetric
from torchdil.problem import Box, Problem
from torchdil.solution import Result, Status
from torchdil.solvers.line_search import Iterate
from torchdil.solvers.newton import Direction, Newton, NewtonSteps

# In a box a shorter step than this goes straight: clipping may keep the closed loop from going downhill, however short. But a
# straight way bends where the first control meets its bound, and an unstable system allows short steps only on it.
_STRAIGHT = 1e-3
# How often, and how much further, to go on where F met its tolerance but Newton's step is still long.
_ROUNDS = 5
_FURTHER = 1e-3


@dataclass(frozen=True)
class DDP(NewtonSteps):
    """The default solver of `MPC`: exact second derivatives, O(H) a step, quadratic convergence, bounds kept.

    Under `torch.vmap`, where dynamics and cost are not at hand by themselves, `Newton()` takes its place.

    Example:
        >>> dil.control.MPC(dynamics, cost, 10, 1, bounds=(-1.0, 1.0), solver=dil.RandomShooting(polish=dil.control.DDP()))
    """

    only = "plan"
    curvature = 0.9  # a model without its negative eigenvalues leaves a saddle in steps that are too short

    max_steps: int = 200

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        if problem.bound is None:
            return Newton(self.rtol, self.atol, self.max_steps, self.verbose).solve(problem, y0, tolerance)
        result = super().solve(problem, y0, tolerance)
        for rounds in range(_ROUNDS + 1):
            now = Iterate.at(problem, result.value)
            direction = self._direction(problem, now)
            # An unstable system makes F huge along a few directions, and small against that everywhere else.
            way = torch.maximum(batch.norm(now.y), batch.norm(now.y - y0))
            left, met = batch.norm(direction.d), result.status == Status.converged
            loose = met & (left > self.accuracy(y0.dtype) ** 0.5 * way)
            if rounds == _ROUNDS or not bool(loose.any()):
                break
            more = super().solve(problem, now.y, torch.where(loose, _FURTHER * batch.norm(now.F), torch.inf))
            more.stats.steps = more.stats.steps + result.stats.steps
            more.stats.history = result.stats.history + more.stats.history[1:]
            more.stats.causes = result.stats.causes + more.stats.causes
            # Where F is as small as rounding lets it be, the search for more ends by stagnation.
            worse = loose & (more.status != Status.stagnated)
            result = more._replace(status=torch.where(worse, more.status, result.status))
        return self._ended(problem, result, now, direction, met & (left > self.accuracy(y0.dtype) * way), tolerance)

    def _ended(
        self, problem: Problem, result: Result, now: Iterate, direction: Direction, due: Tensor, tolerance: Tensor
    ) -> Result:
        """The result after the step that is left, which is known, where that is `due`: half the digits become all."""
        due = due & ~direction.saddle
        if not bool(due.any()) or direction.path is None:
            return result
        new = Iterate.at(problem, batch.select(due, direction.path(torch.ones_like(tolerance)), now.y))
        size = batch.norm(new.F)
        noise = torch.finfo(now.y.dtype).eps ** 0.5 * now.merit.abs()
        fine = due & (size <= torch.maximum(batch.norm(now.F), tolerance)) & (new.merit - now.merit <= noise)
        stats = result.stats
        stats.steps = stats.steps + fine
        stats.history = [*stats.history, torch.where(fine, size, stats.history[-1])]
        return result._replace(value=batch.select(fine, new.y, now.y))

    def _factorises(self, y: Tensor) -> bool:
        return True

    def _direction(self, problem: Problem, now: Iterate) -> Direction:
        with torch.no_grad():
            local, held = local_problem(problem.operator(now.y))
            u, r = now.y.view_as(held), -now.F.view_as(held)
            room = None if problem.box is None else (problem.box[0].view_as(u) - u, problem.box[1].view_as(u) - u)
            policy = _policy(local, r, room)
            exact = policy.positive
            if not bool(exact.all()):
                policy = _policy(_convex(local, ~exact), r, room)
            d = roll(local, policy.K, policy.k).flatten(1)
        uphill = ~(batch.dot(d, now.F) < 0)
        d = batch.select(uphill, -now.F, d)

        def path(step: Tensor) -> Tensor:
            straight = uphill if problem.box is None else uphill | (step < _STRAIGHT)
            closed = _closed_loop(problem, local.x, policy, now.y, step)
            return batch.select(straight, now.y + batch.scale(step, d), closed)

        return Direction(d, ~exact, path)


class _Policy(NamedTuple):
    """du_t = k_t - K_t dx_t.

    Attributes:
        k: (B, H, m).
        K: (B, m, n) each.
        positive: whether every U_t is positive definite, (B,).
    """

    k: Tensor
    K: list[Tensor]
    positive: Tensor


def _policy(local: Expansion, r: Tensor, room: Box | None) -> _Policy:
    """What minimises ½ duᵀ H du - rᵀ du, time by time from the last; each k_t stays within `room`, (B, H, m) each."""
    A, B, Q, M, R, P = local.A, local.B, local.Q, local.M, local.R, local.P
    size, p = size_of(local), torch.zeros_like(local.x[:, 0])
    positive, k, K = torch.ones_like(size, dtype=torch.bool), [], []
    for t in reversed(range(r.shape[1])):
        PB = P @ B[:, t]
        U, W = symmetric(R[:, t] + B[:, t].mT @ PB), M[:, t] + PB.mT @ A[:, t]
        q = r[:, t] + apply(B[:, t].mT, p)
        inverse, fine = invert(U, size)
        k.append(apply(inverse, q))
        if room is not None:
            k[-1], inverse = _within(U, q, inverse, room[0][:, t], room[1][:, t])
        K.append(inverse @ W)
        # p and P for any k and K: neither is that of the minimum where a bound stops a control.
        p = apply(A[:, t].mT, p) - apply(K[-1].mT, q - apply(U, k[-1])) - apply(W.mT, k[-1])
        cross = K[-1].mT @ W
        P = symmetric(Q[:, t] + A[:, t].mT @ P @ A[:, t] - cross - cross.mT + K[-1].mT @ U @ K[-1])
        positive = positive & fine
    return _Policy(torch.stack(k[::-1], dim=1), K[::-1], positive)


def _within(U: Tensor, q: Tensor, inverse: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """argmin ½ kᵀUk - qᵀk with low <= k <= high, (B, m), and U⁻¹ on the controls that are free there, zero elsewhere.

    By projected Newton steps (Bertsekas 1982); with a single control the first one is exact.
    """

    def pressed(k: Tensor) -> Tensor:
        slope = apply(U, k) - q
        return ((k <= low) & (slope > 0)) | ((k >= high) & (slope < 0))

    def without(held: Tensor) -> Tensor:
        free = ~held
        both = free.unsqueeze(2) & free.unsqueeze(1)
        if U.shape[-1] == 1:
            return torch.where(both, inverse, 0.0)
        reduced = torch.where(both, U, torch.diag_embed(held.to(U.dtype)))
        return torch.where(both, inverse_of(torch.linalg.cholesky_ex(reduced)[0]), 0.0)

    def value(k: Tensor) -> Tensor:
        return batch.dot(0.5 * apply(U, k) - q, k)

    k = apply(inverse, q).clamp(low, high)
    for _ in range(U.shape[-1] if U.shape[-1] > 1 else 0):
        ahead = (k + apply(without(pressed(k)), q - apply(U, k))).clamp(low, high)
        k = batch.select(value(ahead) <= value(k), ahead, k)
    return k, without(pressed(k))


def _convex(local: Expansion, where: Tensor) -> Expansion:
    """For the samples in `where`, (B,), ∇²(c + λᵀh) and ∇²c_f without negative eigenvalues: then every U_t is positive."""
    n, finite = local.x.shape[2], torch.stack([a.isfinite().flatten(1).all(dim=1) for a in local]).all(dim=0)
    floor = torch.finfo(local.x.dtype).eps ** 0.5 * torch.where(finite, size_of(local), 1.0)
    where = where & finite
    whole = torch.cat((torch.cat((local.Q, local.M.mT), dim=3), torch.cat((local.M, local.R), dim=3)), dim=2)

    def positive(a: Tensor) -> Tensor:
        chosen = where.view(-1, *(1,) * (a.dim() - 1))
        values, vectors = torch.linalg.eigh(torch.where(chosen, a, 0.0))
        values = torch.maximum(values, floor.view(-1, *(1,) * (a.dim() - 2)))
        return torch.where(chosen, (vectors * values.unsqueeze(-2)) @ vectors.mT, a)

    whole = positive(whole)
    return local._replace(Q=whole[..., :n, :n], M=whole[..., n:, :n], R=whole[..., n:, n:], P=positive(local.P))


def _closed_loop(problem: Problem, states: Tensor, policy: _Policy, y: Tensor, step: Tensor) -> Tensor:
    """The controls that the policy u_t + s k_t - K_t (x_t' - x_t) applies, (B, n)."""
    assert problem.bound is not None
    call, args = problem.bound
    k = policy.k

    def look(plan: Plan, x0: Tensor) -> Tensor:
        box = None if problem.box is None else [bound.view_as(k) for bound in problem.box]
        u, x, controls = y.view_as(k), x0.detach(), []
        for t in range(k.shape[1]):
            control = u[:, t] + step.unsqueeze(1) * k[:, t] - apply(policy.K[t], x - states[:, t])
            if box is not None:
                control = control.clamp(box[0][:, t], box[1][:, t])
            controls.append(control)
            x = plan.dynamics(x, control)
        return torch.stack(controls, dim=1).flatten(1)

    with torch.no_grad():
        return call(look, *args)
