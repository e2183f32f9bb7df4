"""H x = r with H the Hessian of a planning problem, by a Riccati recursion over the horizon: O(H) instead of O(H³).

Eliminating the controls from the last to the first leaves, with the blocks of `torchdil.control.expansion`,

    U_t = R + BᵀP_{t+1}B,    K_t = U_t⁻¹ (M + BᵀP_{t+1}A),    P_t = Q + AᵀP_{t+1}A - K_tᵀ U_t K_t,

a block factorisation of H: it is positive definite exactly where every U_t is. Controls that a bound holds are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import torch
from torch import Tensor

from torchdil import batch
from torchdil.control.expansion import Expansion, expand
from torchdil.control.plan import Plan
from torchdil.control.shapes import apply, symmetric
from torchdil.linear import Auto
from torchdil.linear.auto import combine
from torchdil.linear.base import LinearSolver
from torchdil.linear.evidence import Structured
from torchdil.operator import Operator
from torchdil.problem import active
from torchdil.solution import Result, Stats, Status


@dataclass(frozen=True)
class Factors:
    """The factorised Hessian; `U`'s inverses, K and P a time, see the module.

    Attributes:
        local: the expansion that it was made of.
        inverse: U_t⁻¹, (B, m, m) each, t = 0..H-1; the pseudo-inverse where U_t is singular.
        K: (B, m, n) each.
        U: (B, m, m) each.
        positive: whether H is positive definite, (B,).
    """

    local: Expansion
    inverse: list[Tensor]
    K: list[Tensor]
    U: list[Tensor]
    positive: Tensor

    def solve(self, r: Tensor) -> Tensor:
        """x with H x = r, (B, H, m)."""
        return roll(self.local, self.K, self.feed_forward(r))

    def feed_forward(self, r: Tensor) -> Tensor:
        """k with du_t = k_t - K_t dx_t, (B, H, m)."""
        return torch.stack([apply(inverse, q) for inverse, q in zip(self.inverse, self._reduced(r), strict=True)], dim=1)

    def unserved(self, r: Tensor) -> Tensor:
        """What of r a singular U_t cannot serve, (B, H, m)."""
        each = zip(self.U, self.inverse, self._reduced(r), strict=True)
        return torch.stack([q - apply(U, apply(inverse, q)) for U, inverse, q in each], dim=1)

    def _reduced(self, r: Tensor) -> list[Tensor]:
        """What is left for each U_t to solve for when the later controls are eliminated, (B, m) each, t = 0..H-1."""
        A, B = self.local.A, self.local.B
        p, found = torch.zeros_like(self.local.x[:, 0]), list[Tensor]()
        for t in reversed(range(r.shape[1])):
            found.append(r[:, t] + apply(B[:, t].mT, p))
            p = apply(A[:, t].mT, p) - apply(self.K[t].mT, found[-1])
        return found[::-1]


def roll(local: Expansion, K: list[Tensor], k: Tensor) -> Tensor:
    """du_t = k_t - K_t dx_t along the linear dynamics, (B, H, m)."""
    dx, du = torch.zeros_like(local.x[:, 0]), []
    for t in range(k.shape[1]):
        du.append(k[:, t] - apply(K[t], dx))
        dx = apply(local.A[:, t], dx) + apply(local.B[:, t], du[-1])
    return torch.stack(du, dim=1)


def factorise(local: Expansion, damping: float = 0.0) -> Factors:
    """The recursion. Cholesky first: only where a U_t is not positive definite are its eigenvalues worked out."""
    factors = _recursion(local, damping, cautious=False)
    return factors if bool(factors.positive.all()) else _recursion(local, damping, cautious=True)


@dataclass(frozen=True)
class Riccati(LinearSolver):
    """The linear solver of `MPC`: one factorisation over the horizon, exact, O(H).

    A Hessian that is not positive definite is solved with like any other, which the report says; a singular one, as of a
    control without influence, gets the solution that leaves such a control alone: `converged` where the right-hand side does,
    `breakdown` where it does not. `Auto` takes its place under `torch.vmap`, where dynamics and cost are not at hand by
    themselves, and where they have changed since the forward pass. Of the base's fields `max_steps`, `preconditioner` and
    `product` are for `Auto`.

    Example:
        >>> dil.control.MPC(dynamics, cost, 10, 1, linear_solver=dil.control.Riccati(damping=1e-3))
    """

    only = "plan"

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        otherwise = Auto(**{f.name: getattr(self, f.name) for f in fields(LinearSolver)})
        if operator.bound is None:
            return otherwise.solve(operator, rhs, start, transpose=transpose)
        factors, system = self._factors(operator), self.system(operator, True)
        shape = factors.local.slope.shape[1:]
        value = factors.solve(rhs.unflatten(1, shape)).flatten(1)
        r, allowed = rhs - system(value), self.tolerance(rhs)
        definite = bool(factors.positive.all())
        unserved = torch.zeros_like(allowed, dtype=torch.bool)
        if not definite:  # a control without influence cannot serve a loss that asks for it
            left = batch.norm(factors.unserved(rhs.unflatten(1, shape)).flatten(1))
            unserved = left > torch.finfo(rhs.dtype).eps ** 0.5 * batch.norm(rhs)
        if not bool((unserved | (batch.norm(r) <= allowed)).all()):  # one step of iterative refinement
            refined = value + factors.solve(r.unflatten(1, shape)).flatten(1)
            r_refined = rhs - system(refined)
            better = batch.norm(r_refined) < batch.norm(r)
            value, r = batch.select(better, refined, value), batch.select(better, r_refined, r)
            size = batch.divide(batch.norm(system(rhs)), batch.norm(rhs))
            allowed = allowed + self.attainable(size, value, rhs)
        status = torch.where(unserved, int(Status.breakdown), int(Status.converged))
        status = torch.where(batch.finite(value), status, int(Status.non_finite))
        stats = Stats(
            method="Riccati" if definite else "Riccati, not positive definite",
            steps=(batch.norm(rhs) > 0).long(),
            residual=batch.norm(r),
            tolerance=allowed,
            products=1,
            evidence=Structured(*2 * (partial(_solved, factors.local),), r + self.damping * value, operator.watched),
            verified=True,
        )
        result = Result(value, status, stats)
        # Dynamics or cost may have changed since the forward pass (a goal that was replaced): F's own graph has not.
        missed = batch.finite(rhs) & ~unserved & ~(stats.residual <= allowed)
        if not bool(missed.any()):
            return result
        return combine(
            result, otherwise.solve(operator, torch.where(missed.unsqueeze(1), rhs, 0.0), transpose=transpose), missed
        )

    def _factors(self, operator: Operator) -> Factors:
        key = "Riccati", self.damping
        if key not in operator.memo:
            operator.memo[key] = factorise(local_problem(operator)[0], self.damping)
        return operator.memo[key]


def _solved(local: Expansion, b: Tensor) -> Tensor:
    """x with H x = b, (B, n), without damping."""
    with torch.no_grad():
        return factorise(local).solve(b.unflatten(1, local.slope.shape[1:])).flatten(1)


def local_problem(operator: Operator) -> tuple[Expansion, Tensor]:
    """The expansion at the operator's point without the controls that a bound holds, and those, (B, H, m)."""
    assert operator.bound is not None
    call, args = operator.bound

    def look(plan: Plan, x0: Tensor) -> tuple[Expansion, Tensor]:
        u = operator.y.unflatten(1, plan.shape)
        local, box = expand(plan, u, x0), plan.box(u)
        if box is None:
            return local, torch.zeros_like(u, dtype=torch.bool)
        on_low, on_high = active(u, local.slope, box)
        held = on_low | on_high
        return local.hold(held), held

    return call(look, *args)


def _recursion(local: Expansion, damping: float, cautious: bool) -> Factors:
    A, B, Q, M, R, P = local.A, local.B, local.Q, local.M, local.R, local.P
    damped = damping * torch.eye(R.shape[-1], dtype=R.dtype, device=R.device)
    size = size_of(local)
    positive = torch.ones_like(size, dtype=torch.bool)
    inverses, gains, Us = [], [], []
    for t in reversed(range(R.shape[1])):
        PB = P @ B[:, t]
        U = symmetric(R[:, t] + B[:, t].mT @ PB + damped)
        inverse, fine = invert(U, size, cautious)
        K = inverse @ (M[:, t] + PB.mT @ A[:, t])
        # In this form P stays what it is by definition also where U is singular.
        AK = A[:, t] - B[:, t] @ K
        cross = K.mT @ M[:, t]
        P = symmetric(Q[:, t] - cross - cross.mT + K.mT @ (R[:, t] + damped) @ K + AK.mT @ P @ AK)
        positive = positive & fine
        inverses.append(inverse)
        gains.append(K)
        Us.append(U)
    return Factors(local, inverses[::-1], gains[::-1], Us[::-1], positive)


def invert(U: Tensor, size: Tensor, cautious: bool = False) -> tuple[Tensor, Tensor]:
    """U⁻¹ (B, m, m), and where U is positive definite, (B,); `size` is that of H.

    By Cholesky; `cautious` also by eigenvalues for the samples that need it: those of a singular U are left out.
    """
    eps, m = torch.finfo(U.dtype).eps, U.shape[-1]
    floor = 10 * m * eps * size
    if m == 1:
        inverse, pivots, info = 1 / U, U[..., 0], torch.zeros_like(size, dtype=torch.int32)
    else:
        factor, info = torch.linalg.cholesky_ex(U)
        inverse, pivots = inverse_of(factor), torch.diagonal(factor, dim1=-2, dim2=-1).square()
    positive = (info == 0) & (pivots > floor.unsqueeze(1)).all(dim=1)
    if not cautious:
        return inverse, positive
    finite = torch.isfinite(U).all(dim=-1).all(dim=-1)
    whole = torch.where(finite[:, None, None], U, 0.0)
    values, vectors = (whole[..., 0], torch.ones_like(U)) if m == 1 else torch.linalg.eigh(whole)
    reciprocal = torch.where(values.abs() > floor.unsqueeze(1), 1 / values, 0.0)
    by_values = (vectors * reciprocal.unsqueeze(1)) @ vectors.mT
    by_values = torch.where(finite[:, None, None], by_values, torch.nan)
    return torch.where(positive[:, None, None], inverse, by_values), positive


def inverse_of(factor: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹; unlike `torch.cholesky_inverse` it does not raise for a whole batch where one L is singular."""
    return batch.cholesky_solve(torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device).expand_as(factor), factor)


def size_of(local: Expansion) -> Tensor:
    """A bound for the entries of the terms that make up U_t, (B,): what rounding is relative to."""

    def largest(a: Tensor) -> Tensor:
        return a.abs().flatten(1).amax(dim=1)

    return largest(local.R) + largest(local.B).square() * torch.maximum(largest(local.Q), largest(local.P))
