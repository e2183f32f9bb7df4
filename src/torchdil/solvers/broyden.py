"""Broyden's method y ← y - t H F(y), with H ≈ J⁻¹ corrected by what each step s = Δy did to q = ΔF.

H ← H + (s - H q) sᵀH / (sᵀH q), the "good" update, after which H q = s (Broyden 1965). H begins as J⁻¹ for small unknowns, else
as a multiple of the identity. A step is one evaluation of F: where ‖F‖ does not fall the sample stays and t is halved, and an H
that was corrected and fails gives way to a fresh one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.auto import direct_pays
from torchdil.problem import Problem
from torchdil.settings import check_count
from torchdil.solution import Result, Status
from torchdil.solvers.base import Solver

# ‖F‖ must fall by this part of the step at least.
_SUFFICIENT = 1e-4
# Halvings of the step along the direction of a fresh H before a sample has stagnated.
_MAX_TRIALS = 30
# sᵀH q over sᵀs: below this the correction would make H nearly singular, or blow it up.
_SMALLEST = 1e-8


@dataclass(frozen=True)
class Broyden(Solver):
    """Broyden's method for roots and fixed points: one evaluation a step, J at the start and where ‖F‖ rises.

    Of an argmin it finds a zero of the gradient, a minimum or not; `LBFGS` is made for those.

    Attributes:
        history: m; where n is too large for J⁻¹, H holds the corrections of m steps, and after those begins anew.

    Example:
        >>> dil.root(residual, y0, solver=dil.Broyden())
    """

    history: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("history", self.history)

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        y, F = y0, problem.evaluate(y0)
        progress = self.progress(problem, F, tolerance, patience=100)
        inverse = _Dense(problem, y) if direct_pays(*y.shape) else _LowRank(problem, y, F, self.history)
        step, failures = torch.ones_like(tolerance), torch.zeros_like(progress.steps)
        fresh = torch.ones_like(progress.running)  # H is not corrected yet
        while not progress.finished():
            running = progress.running
            y_new = batch.select(running, y - batch.scale(step, inverse.apply(F)), y)
            F_new = batch.select(running, problem.evaluate(y_new), F)
            moved = running & (batch.norm(F_new) <= (1 - _SUFFICIENT * step) * batch.norm(F))
            dy, dF = (y_new - y).detach(), (F_new - F).detach()
            problem.remember(batch.select(moved, dy, torch.zeros_like(dy)), dF)
            # Where ‖F‖ did not fall a corrected H learns why; a fresh one is right about the direction, and the step too long.
            inverse.correct(dy, dF, running & (moved | ~fresh))
            y, F = batch.select(moved, y_new, y), batch.select(moved, F_new, F)
            step, failures = torch.where(moved, 1.0, 0.5 * step), torch.where(moved, 0, failures + 1)
            fresh = fresh & ~moved
            progress.stop(fresh & (failures >= _MAX_TRIALS), Status.stagnated)
            again = progress.running & ~fresh & (failures >= inverse.patience)
            if bool(again.any()):
                inverse.restart(problem, y, F, again)
                step, failures = torch.where(again, 1.0, step), torch.where(again, 0, failures)
                fresh = fresh | again
            progress.advance(batch.norm(F))
        return self.result(y, progress)


class _Dense:
    """H as a matrix, (B, n, n)."""

    patience = 1  # a new J is worth more than what one could learn from further failures

    def __init__(self, problem: Problem, y: Tensor):
        self.H = _inverse_jacobian(problem, y)

    def restart(self, problem: Problem, y: Tensor, F: Tensor, mask: Tensor) -> None:
        """J⁻¹ at y for the samples in `mask`."""
        self.H = torch.where(mask[:, None, None], _inverse_jacobian(problem, y), self.H)

    def apply(self, x: Tensor) -> Tensor:
        """H x, (B, n)."""
        return batch.rows(self.H, x)

    def correct(self, s: Tensor, q: Tensor, mask: Tensor) -> None:
        """Make H q = s for the samples in `mask`."""
        u, s = _correction(s, self.apply(q), mask)
        self.H = torch.baddbmm(self.H, u.unsqueeze(2), torch.bmm(s.unsqueeze(1), self.H))


class _LowRank:
    """H = σI + Uᵀ V, U and V (B, m, n), a row a step."""

    patience = 4

    def __init__(self, problem: Problem, y: Tensor, F: Tensor, history: int):
        self.scale = _inverse_size(problem, y, F)
        self.U, self.V = (y.new_zeros(y.shape[0], history, y.shape[1]) for _ in range(2))
        self._next = 0

    def restart(self, problem: Problem, y: Tensor, F: Tensor, mask: Tensor) -> None:
        """σI with σ at y for the samples in `mask`."""
        self.scale = torch.where(mask, _inverse_size(problem, y, F), self.scale)
        for a in (self.U, self.V):
            a.masked_fill_(mask[:, None, None], 0.0)

    def apply(self, x: Tensor) -> Tensor:
        """H x, (B, n)."""
        U, V = (self.U.clone(), self.V.clone()) if x.requires_grad else (self.U, self.V)  # a graph must not see later steps
        return self._product(U, V, x)

    def correct(self, s: Tensor, q: Tensor, mask: Tensor) -> None:
        """Make H q = s for the samples in `mask`."""
        if self._next == 0:  # dropping the oldest alone would spoil those that were built on it
            self.U.zero_()
            self.V.zero_()
        u, s = _correction(s, self.apply(q), mask)
        v = self._product(self.V, self.U, s)
        self.U[:, self._next], self.V[:, self._next] = u, v
        self._next = (self._next + 1) % self.U.shape[1]

    def _product(self, left: Tensor, right: Tensor, x: Tensor) -> Tensor:
        """(σI + leftᵀ right) x."""
        return batch.scale(self.scale, x) + batch.combine(left, batch.rows(right, x))


def _correction(s: Tensor, Hq: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """u = (s - H q) / (sᵀH q) and s, of the update H + u sᵀH; 0 outside of `mask` and where the denominator is near 0."""
    denominator = batch.dot(s, Hq)
    mask = mask & torch.isfinite(denominator) & (denominator.abs() > _SMALLEST * batch.dot(s, s))
    u = (s - Hq) / torch.where(mask, denominator, 1.0).unsqueeze(1)
    return batch.select(mask, u, torch.zeros_like(u)), batch.select(mask, s, torch.zeros_like(s))


def _inverse_jacobian(problem: Problem, y: Tensor) -> Tensor:
    """J⁻¹ at y, (B, n, n); the pseudo-inverse of a singular J, I where J is not finite."""
    with torch.no_grad():
        J = problem.operator(y).dense()
        # The factorisations know float32 and float64 only.
        J = J if J.dtype in (torch.float32, torch.float64) else J.float()
        eye = torch.eye(J.shape[1], dtype=J.dtype, device=J.device)
        J = torch.where(torch.isfinite(J).all(dim=2).all(dim=1)[:, None, None], J, eye)
        H, info = torch.linalg.inv_ex(J)
        floor = 10 * J.shape[1] * torch.finfo(J.dtype).eps
        singular = (info != 0) | ~(torch.linalg.matrix_norm(J) * torch.linalg.matrix_norm(H) < 1 / floor)
        if bool(singular.any()):
            H[singular] = torch.linalg.pinv(J[singular], rtol=floor)
        return H.to(y.dtype)


def _inverse_size(problem: Problem, y: Tensor, F: Tensor) -> Tensor:
    """σ, (B,): 1 over the size of J along F, with the sign for which -σF leads downhill on ‖F‖; 1 where there is none."""
    with torch.no_grad():
        JF = problem.operator(y).rmv(F)
        size = batch.divide(batch.norm(F), batch.norm(JF))
        size = torch.where(torch.isfinite(size) & (size > 0), size, 1.0)
        return torch.where(batch.dot(F, JF) < 0, -size, size)
