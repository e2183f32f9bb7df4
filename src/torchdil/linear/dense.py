"""The paper's "naive" solve: build J, factorise it.

A x = rhs with A = J + εI from all rows of J in batched products. Cholesky where J is symmetric, LU for the samples that are
not positive definite, the pseudo-inverse for those that are singular. For tens of unknowns nothing is faster.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import AtOnce, LinearSolver
from torchdil.linear.evidence import Factored
from torchdil.linear.rounding import left_by_rounding
from torchdil.linear.spectrum import Matrix
from torchdil.operator import Operator
from torchdil.solution import Result, Stats, Status


@dataclass(frozen=True)
class Dense(LinearSolver):
    """A direct solve with the explicit J, O(n³) a sample.

    The residual may reach rtol ‖rhs‖ plus what rounding leaves of a backward-stable solve, 100 n eps ‖A‖ ‖x‖ (but not more than
    eps^(1/3) ‖rhs‖), or, where A is badly scaled, 100 eps (|A| |x| + |rhs|) row by row. An indefinite A is solved like
    any other. A singular A gets the least-squares solution of minimum norm: `converged` where rhs is in the range, `breakdown`
    where it is not. Of the base's fields, `max_steps`, `preconditioner` and `product` have no use here.

    Example:
        >>> dil.argmin(score, y0, linear_solver=dil.Dense())
    """

    def at_once(self, operator: Operator, transpose: bool, expected: int) -> AtOnce | None:
        n, y, symmetric = operator.shape[1], operator.y, operator.symmetric
        known = operator.factors if symmetric and not self.damping else ()
        if (not known and operator.dense_chunk < n) or y.dtype not in (torch.float32, torch.float64):
            return None

        def routine(product: Callable[[Tensor], tuple[Tensor]], rhs: Tensor, F: Tensor, *known: Tensor) -> tuple[Tensor, ...]:
            A, *factor = known or (columns(product, rhs),)
            if self.damping:
                torch.diagonal(A, dim1=1, dim2=2).add_(self.damping)
            x, residual, tolerance, good = self._easily(A, rhs, symmetric, _rank_floor(n, rhs.dtype), *factor)
            return x, good, (tolerance > 0).long(), residual, tolerance, A, rhs, x, F

        def stats(steps: Tensor, residual: Tensor, tolerance: Tensor, *noted: Tensor) -> Stats:
            A, rhs, x, F = noted
            evidence = Factored(A, rhs, x, watched=F if transpose or symmetric else None)
            return Stats("Dense", steps, residual, tolerance, n, spectrum=Matrix(A, symmetric), evidence=evidence)

        return AtOnce(("Dense", self.damping, self.rtol, self.atol, len(known)), routine, stats, known)

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        before = operator.products
        # The factorisations know float32 and float64 only.
        dtype = rhs.dtype if rhs.dtype in (torch.float32, torch.float64) else torch.float32
        A = operator.dense().to(dtype)  # ours, so it is changed in place: at scale it is what fills the memory
        A = A.mT if transpose and not operator.symmetric else A
        diagonal = torch.diagonal(A, dim1=1, dim2=2)
        diagonal += self.damping
        evidence = partial(Factored, watched=operator.watched if transpose or operator.symmetric else None)
        floor = _rank_floor(A.shape[1], A.dtype)
        easy = self._easily(A, rhs, operator.symmetric, floor) if A.dtype == rhs.dtype else None
        if easy is not None and bool(easy[3].all()):
            x, residual, tolerance, _ = easy
            stats = Stats(
                method="Dense",
                steps=(tolerance > 0).long(),
                residual=residual,
                tolerance=tolerance,
                products=operator.products - before,
                spectrum=Matrix(A, operator.symmetric),
                evidence=evidence(A, rhs, x),
            )
            return Result(x, torch.zeros_like(stats.steps), stats)
        # A sample that is not finite makes LAPACK raise for the whole batch: it is solved as x = 0 and marked afterwards.
        whole = torch.isfinite(A).all(dim=2).all(dim=1) & batch.finite(rhs)
        if not bool(whole.all()):
            A = torch.where(whole[:, None, None], A, torch.eye(A.shape[1], dtype=dtype, device=A.device))
        b = torch.where(whole.unsqueeze(1), rhs.to(dtype), 0.0)
        tolerance = self.tolerance(b)
        x, singular, indefinite, rounding = self._factor_and_solve(A, b, tolerance, operator.symmetric)
        if bool(singular.any()):
            least = _minimum_norm(A[singular], b[singular], operator.symmetric)
            first, second = (batch.norm(_residual(A[singular], b[singular], u)) for u in (x[singular], least))
            # Tiny pivots are no proof: a badly scaled A, diag(1, 1e-20), is solved well by LU and only by LU.
            keep = (rounding[singular] > 0) | (first <= tolerance[singular]) & (first < 1e-3 * second)
            x[singular] = batch.select(keep, x[singular], least)
        residual = batch.norm(_residual(A, b, x))
        tolerance = torch.maximum(tolerance + _rounding(A, b, x), rounding)
        status = torch.where(residual <= tolerance, int(Status.converged), int(Status.breakdown))
        stats = Stats(
            method="Dense, not positive definite" if indefinite else "Dense",
            steps=(batch.norm(rhs) > 0).long(),
            residual=torch.where(whole, residual, torch.nan).to(rhs.dtype),
            tolerance=tolerance.to(rhs.dtype),
            products=operator.products - before,
            spectrum=Matrix(A, operator.symmetric),
            evidence=evidence(A, b, x),
        )
        value = torch.where(whole.unsqueeze(1), x, torch.nan).to(rhs.dtype)
        return Result(value, torch.where(whole, status, int(Status.non_finite)), stats)

    def _easily(
        self, A: Tensor, b: Tensor, symmetric: bool, floor: float, L: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, its residual, its tolerance, and which samples are far from singular (and positive definite) and solved well.

        L: the Cholesky factor of A, if it is known and A positive definite.
        """
        info = None
        if symmetric:
            if L is None:
                L, info = torch.linalg.cholesky_ex(A)
            x = batch.cholesky_solve(b.unsqueeze(2), L).squeeze(2)
            pivots, floor = torch.diagonal(L, dim1=1, dim2=2), floor**0.5  # of their roots
        else:
            LU, order, info = torch.linalg.lu_factor_ex(A)
            x = torch.linalg.lu_solve(LU, order, b.unsqueeze(2)).squeeze(2)
            pivots = torch.diagonal(LU, dim1=1, dim2=2).abs()
        residual, tolerance = batch.norm(_residual(A, b, x)), self.tolerance(b)
        good = (pivots.amin(dim=1) > floor * pivots.amax(dim=1)) & (residual <= tolerance) & (tolerance < torch.inf)
        return x, residual, tolerance, good if info is None else good & (info == 0)

    @staticmethod
    def _factor_and_solve(A: Tensor, b: Tensor, tolerance: Tensor, symmetric: bool) -> tuple[Tensor, Tensor, bool, Tensor]:
        """x, which samples seem singular to rounding, whether a symmetric one is not positive definite, and, of those that only
        seem singular in the units of their rows, what rounding leaves of the residual (else 0).
        """
        solve, pivots, indefinite = _factorise(A, symmetric)
        x = solve(b)
        r = _residual(A, b, x)
        if not bool((batch.norm(r) <= tolerance).all()):  # one step of iterative refinement
            refined = x + solve(r)
            r_refined = _residual(A, b, refined)
            better = batch.norm(r_refined) < batch.norm(r)
            x, r = batch.select(better, refined, x), batch.select(better, r_refined, r)
        solved = (batch.norm(r) <= tolerance + _rounding(A, b, x)) & batch.finite(x)
        singular = ~solved | (pivots.amin(dim=1) <= _rank_floor(A.shape[1], A.dtype) * pivots.amax(dim=1))
        rounding = torch.zeros_like(tolerance)
        if bool(singular.any()):
            terms = (A.abs() @ x.abs().unsqueeze(2)).squeeze(2) + b.abs()
            rounding = torch.where(singular, left_by_rounding(solve, x, r, terms), 0.0)
        return x, singular, indefinite, rounding


def factorised(product: Callable[[Tensor], tuple[Tensor]], p: Tensor) -> tuple[Tensor, ...]:
    """J p, (B, n), where a symmetric J is positive definite, (B,), J and its Cholesky factor, by columns of J."""
    A = columns(product, p)
    L, info = torch.linalg.cholesky_ex(A)
    return (A @ p.unsqueeze(2)).squeeze(2), info == 0, A, L


def columns(product: Callable[[Tensor], tuple[Tensor]], like: Tensor) -> Tensor:
    """The matrix of a linear function of (B, n), `product(p)` being a tuple of one, in one batched product: (B, n, n)."""
    samples, n = like.shape
    units = torch.eye(n, dtype=like.dtype, device=like.device).unsqueeze(1).expand(-1, samples, -1)
    return torch.func.vmap(product)(units)[0].permute(1, 2, 0).contiguous()


def _factorise(A: Tensor, symmetric: bool) -> tuple[Callable[[Tensor], Tensor], Tensor, bool]:
    """The function b -> A⁻¹ b on (B, n), the sizes of the pivots, (B, n), and whether Cholesky failed for a sample."""
    if not symmetric:
        LU, order, _ = torch.linalg.lu_factor_ex(A)
        backward = partial(torch.linalg.lu_solve, LU, order)
        return lambda b: backward(b.unsqueeze(2)).squeeze(2), torch.diagonal(LU, dim1=1, dim2=2).abs(), False
    L, info = torch.linalg.cholesky_ex(A)
    pivots = torch.diagonal(L, dim1=1, dim2=2).square()
    indefinite = info != 0
    if not bool(indefinite.any()):
        return lambda b: batch.cholesky_solve(b.unsqueeze(2), L).squeeze(2), pivots, False
    solve_rest, rest_pivots, _ = _factorise(A[indefinite], symmetric=False)

    def solve(b: Tensor) -> Tensor:
        x = batch.cholesky_solve(b.unsqueeze(2), L).squeeze(2)
        x[indefinite] = solve_rest(b[indefinite])
        return x

    return solve, pivots.index_put((indefinite,), rest_pivots), True


def _minimum_norm(A: Tensor, b: Tensor, symmetric: bool) -> Tensor:
    inverse = torch.linalg.pinv(A, rtol=_rank_floor(A.shape[1], A.dtype), hermitian=symmetric)
    return (inverse @ b.unsqueeze(2)).squeeze(2)


def _residual(A: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return b - (A @ x.unsqueeze(2)).squeeze(2)


def _rounding(A: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """What rounding may leave of the residual; capped, lest a huge x of a singular A pass for a solution."""
    eps = torch.finfo(A.dtype).eps
    size = torch.linalg.matrix_norm(A) * batch.norm(x)
    return torch.minimum(100 * A.shape[1] * eps * size, eps ** (1 / 3) * batch.norm(b))


def _rank_floor(n: int, dtype: torch.dtype) -> float:
    """Pivots and singular values of n x n matrices below this, relative to the largest, are rounding errors of zero."""
    return 10 * n * torch.finfo(dtype).eps
