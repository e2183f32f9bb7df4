"""Linear systems with the Jacobian of a trajectory.

J couples step n to itself, a block D_n (k x k, k = m d), and to the state before it, by -E with E = (I, ..., I)ᵀ (k x d). With
W_n = D_n⁻¹ E and P_n its last d rows, the derivative of one state by the one before,

    J x = r:     x_n = D_n⁻¹ r_n + W_n s_{n-1},        s_n = P_n s_{n-1} + (last d rows of D_n⁻¹ r_n)
    Jᵀ g = v:    g_n = D_n⁻ᵀ (v_n + L λ_{n+1}),        λ_n = P_nᵀ λ_{n+1} + W_nᵀ v_n

(L puts d numbers into the last d rows). All blocks come from k batched products with J, all factorisations from one batched
call; only the recursions for s and λ go from step to step, and these as a scan in about 2 √T launches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import LinearSolver
from torchdil.operator import Operator
from torchdil.solution import Result, Stats, Status


@dataclass(frozen=True)
class Bidiagonal(LinearSolver):
    """A direct solve with the block-bidiagonal J of a trajectory.

    Attributes:
        steps: T.
        rows: m, the unknowns of a step in units of the state.
    """

    steps: int = 1
    rows: int = 1

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        before = operator.products
        factors = Factors(blocks(operator, self.steps, self.rows), self.rows, self.damping)
        b = torch.where(factors.whole[:, None] & batch.finite(rhs)[:, None], rhs, 0.0)
        x = factors.solve(b, transpose)
        r = b - factors.product(x, transpose)
        tolerance = self.tolerance(b)
        if not bool((batch.norm(r) <= tolerance).all()):  # one step of iterative refinement
            refined = x + factors.solve(r, transpose)
            r_refined = b - factors.product(refined, transpose)
            better = batch.norm(r_refined) < batch.norm(r)
            x, r = batch.select(better, refined, x), batch.select(better, r_refined, r)
        residual = batch.norm(r)
        tolerance = tolerance + self.attainable(factors.size(), x, b)
        solved = (residual <= tolerance) & batch.finite(x)
        status = torch.where(solved, int(Status.converged), int(Status.breakdown))
        status = torch.where(factors.whole & batch.finite(rhs), status, int(Status.non_finite))
        stats = Stats(
            method="Bidiagonal",
            steps=(batch.norm(rhs) > 0).long(),
            residual=residual,
            tolerance=tolerance,
            products=operator.products - before,
            evidence=Propagated(factors, r, transpose, operator.watched),
        )
        x = torch.where(solved[:, None], x, torch.where(factors.whole[:, None], 0.0, torch.nan))
        return Result(x, status, stats)


def blocks(operator: Operator, steps: int, rows: int) -> Tensor:
    """D_n for every step and sample, (B, T, k, k), from k products with Jᵀ that each serve all steps."""
    samples, n = operator.shape
    k = n // steps
    d = k // rows
    vectors = torch.eye(k, dtype=operator.y.dtype, device=operator.y.device).repeat(1, steps).unsqueeze(1)
    found = operator.rows(vectors.expand(k, samples, n)).unflatten(2, (steps, k)).permute(1, 2, 0, 3)
    # Row i of step n + 1 has met the last state of step n, too, with the coefficient -1 at i modulo d.
    met = torch.zeros(k, k, dtype=found.dtype, device=found.device)
    met[:, k - d :] = torch.eye(d, dtype=found.dtype, device=found.device).repeat(rows, 1)
    return torch.cat((found[:, :-1] + met, found[:, -1:]), dim=1)


class Factors:
    """The factorised blocks.

    Attributes:
        whole: which samples have finite blocks, (B,).
    """

    def __init__(self, D: Tensor, rows: int, damping: float = 0.0):
        k = D.shape[-1]
        self.d = d = k // rows
        eye = torch.eye(k, dtype=D.dtype, device=D.device)
        D = D + damping * eye if damping else D
        self.whole = torch.isfinite(D).flatten(1).all(dim=1)
        self.D = torch.where(self.whole[:, None, None, None], D, eye)
        self._LU, self._order, _ = torch.linalg.lu_factor_ex(self.D)
        # W (B, T, k, d) and P (B, T, d, d); a failed factorisation shows in the residual.
        self.W = torch.linalg.lu_solve(self._LU, self._order, eye[:d, :d].repeat(rows, 1).expand(*D.shape[:2], k, d))
        self.P = self.W[..., k - d :, :]

    def solve(self, r: Tensor, transpose: bool) -> Tensor:
        """x with J x = r, or Jᵀ x = r, (B, n)."""
        D, d = self.D, self.d
        r = r.unflatten(1, D.shape[1:3])
        if transpose:
            later = recur(self.P.mT.flip(1), (self.W.mT @ r.unsqueeze(3)).squeeze(3).flip(1)).flip(1)
            r = r.clone()
            r[:, :-1, -d:] += later[:, 1:]
            return torch.linalg.lu_solve(self._LU, self._order, r.unsqueeze(3), adjoint=True).flatten(1)
        z = torch.linalg.lu_solve(self._LU, self._order, r.unsqueeze(3)).squeeze(3)
        s = recur(self.P, z[..., -d:])
        z[:, 1:] += (self.W[:, 1:] @ s[:, :-1].unsqueeze(3)).squeeze(3)
        return z.flatten(1)

    def product(self, x: Tensor, transpose: bool) -> Tensor:
        """J x or Jᵀ x, (B, n)."""
        D, d = self.D, self.d
        x = x.unflatten(1, D.shape[1:3])
        y = ((D.mT if transpose else D) @ x.unsqueeze(3)).squeeze(3)
        if transpose:
            y[:, :-1, -d:] -= x[:, 1:].unflatten(2, (-1, d)).sum(dim=2)
        else:
            y[:, 1:] -= x[:, :-1, -d:].repeat(1, 1, D.shape[2] // d)
        return y.flatten(1)

    def size(self) -> Tensor:
        """An estimate of ‖J‖, (B,)."""
        return torch.linalg.matrix_norm(self.D).amax(dim=1) + 1


class Propagated:
    """The errors of a solve, by solving once more for what it left (`torchdil.solution.Evidence`)."""

    def __init__(self, factors: Factors, remainder: Tensor, transpose: bool, watched: Tensor | None):
        self._factors, self._remainder, self._transpose, self._watched = factors, remainder, transpose, watched

    def adjoint_error(self, stats: Stats) -> Tensor:
        error = batch.norm(self._factors.solve(self._remainder, self._transpose))
        norm = batch.norm(self._remainder) if stats.norm is None else stats.norm.reshape(-1)
        return batch.divide(error, norm).clamp_max(1.0)

    def value_error(self, stats: Stats) -> Tensor | None:
        return None if self._watched is None else batch.norm(self._factors.solve(self._watched, False))


def recur(P: Tensor, z: Tensor) -> Tensor:
    """s_n = P_n s_{n-1} + z_n with s_{-1} = 0: (B, T, d, d) and (B, T, d) -> (B, T, d).

    T steps are cut into pieces of √T. Inside the pieces, all of them at once, the products of the P are formed beside the sums;
    then the pieces follow one another, by this function again; one product puts both together.
    """
    samples, steps, d = z.shape
    length = math.isqrt(max(steps - 1, 0)) + 1
    if steps <= 16:
        return torch.stack(_one_by_one(P, z), dim=1)
    pieces = -(-steps // length)
    missing = pieces * length - steps
    P = torch.nn.functional.pad(P, (0, 0, 0, 0, 0, missing)).unflatten(1, (pieces, length))
    z = torch.nn.functional.pad(z, (0, 0, 0, missing)).unflatten(1, (pieces, length))
    inputs = torch.cat((torch.zeros_like(P), z.unsqueeze(4)), dim=4).flatten(0, 1)  # (B·pieces, length, d, d + 1)
    P = P.flatten(0, 1)
    now = torch.cat((P[:, 0], inputs[:, 0, :, d:]), dim=2)
    both = [now]
    for n in range(1, length):
        now = torch.baddbmm(inputs[:, n], P[:, n], now)
        both.append(now)
    sums = torch.stack(both, dim=1).unflatten(0, (samples, pieces))  # (B, pieces, length, d, d + 1)
    ends = recur(sums[:, :, -1, :, :d], sums[:, :, -1, :, d])
    before = torch.cat((torch.zeros_like(ends[:, :1]), ends[:, :-1]), dim=1)
    s = (sums[..., :d] @ before[:, :, None, :, None]).squeeze(4) + sums[..., d]
    return s.flatten(1, 2)[:, :steps]


def _one_by_one(P: Tensor, z: Tensor) -> list[Tensor]:
    s = [z[:, 0]]
    for n in range(1, z.shape[1]):
        s.append(torch.baddbmm(z[:, n].unsqueeze(2), P[:, n], s[-1].unsqueeze(2)).squeeze(2))
    return s
