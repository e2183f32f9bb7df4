"""Limited-memory BFGS: d = -H ∇f, H ≈ (∇²f)⁻¹ from the last m steps s = Δy and their changes of the gradient q = ΔF.

All samples at once: with S, Q the last steps of a sample as rows, R the upper triangle of S Qᵀ and D its diagonal,
H = γI + Sᵀ R⁻ᵀ (D + γ Q Qᵀ) R⁻¹ S - γ (Sᵀ R⁻ᵀ Q + Qᵀ R⁻¹ S) (Byrd, Nocedal and Schnabel 1994), which is a few batched
products instead of a loop over the steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil import batch
from torchdil.problem import Problem
from torchdil.settings import check_count
from torchdil.solution import Result, Status
from torchdil.solvers.base import Solver
from torchdil.solvers.line_search import Iterate, first_step, search

# Δyᵀ ΔF over the lengths: below this a step says nothing certain of the curvature and is not used.
_CURVED = 1e-10


@dataclass(frozen=True)
class LBFGS(Solver):
    """L-BFGS for an argmin, with a Wolfe line search for each sample.

    Attributes:
        history: m, how many steps to remember.

    Example:
        >>> dil.argmin(score, y0, solver=dil.LBFGS())
    """

    history: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("history", self.history)

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        problem.argmin_only("LBFGS")
        now = Iterate.at(problem, y0)
        progress = self.progress(problem, now.F, tolerance, 200, now.merit)
        memory = _Memory(y0, self.history)
        step = first_step(problem, now)
        while not progress.finished():
            direction = -memory.apply(now.F)
            uphill = ~(batch.dot(direction, now.F) < 0)  # rounding, or NaN
            direction = batch.select(uphill, -now.F, direction)
            new, moved, _ = search(problem, now, direction, step, progress.running, curvature=0.9)
            stuck = progress.running & ~moved
            progress.stop(stuck & (memory.fresh | uphill), Status.stagnated)
            begins_anew = bool(stuck.any())
            if begins_anew:
                memory.forget(stuck)  # where the memory led nowhere, the gradient may lead on
            dy, dF = (new.y - now.y).detach(), (new.F - now.F).detach()
            memory.add(dy, dF)
            problem.remember(dy, dF)
            now = new
            step = torch.where(stuck, first_step(problem, now), 1.0) if begins_anew else torch.ones_like(step)
            progress.advance(batch.norm(now.F), now.merit)
        return self.result(now.y, progress)


class _Memory:
    """The last m steps of each sample, S and Q (B, m, n), written round and round; a step that is not used is zero."""

    def __init__(self, y: Tensor, history: int):
        samples, n = y.shape
        self.S, self.Q = y.new_zeros(samples, history, n), y.new_zeros(samples, history, n)
        self.SQ, self.QQ = y.new_zeros(samples, history, history), y.new_zeros(samples, history, history)
        self.scaling = torch.ones_like(y[:, 0])
        self.fresh = torch.ones_like(self.scaling, dtype=torch.bool)  # no step known
        self._next, self._filled = 0, 0

    def add(self, s: Tensor, q: Tensor) -> None:
        """Remember a step where its curvature is positive."""
        curvature = batch.dot(s, q)
        used = curvature > _CURVED * batch.norm(s) * batch.norm(q)  # False for NaN
        s, q = (torch.where(used.unsqueeze(1), a, 0.0) for a in (s, q))
        k = self._next
        self.S[:, k], self.Q[:, k] = s, q
        self.SQ[:, :, k], self.SQ[:, k] = batch.rows(self.S, q), batch.rows(self.Q, s)
        self.QQ[:, :, k] = self.QQ[:, k] = batch.rows(self.Q, q)
        self.scaling = torch.where(used, batch.divide(curvature, batch.dot(q, q)), self.scaling)
        self.fresh = self.fresh & ~used
        self._next, self._filled = (k + 1) % self.S.shape[1], min(self._filled + 1, self.S.shape[1])

    def forget(self, mask: Tensor) -> None:
        """Drop all steps of the samples in `mask`."""
        for a in (self.S, self.Q, self.SQ, self.QQ):
            a.masked_fill_(mask[:, None, None], 0.0)
        self.scaling, self.fresh = torch.where(mask, 1.0, self.scaling), self.fresh | mask

    def apply(self, r: Tensor) -> Tensor:
        """H r, (B, n)."""
        if self._filled == 0:
            return r
        order = torch.arange(self._next - self._filled, self._next, device=r.device) % self.S.shape[1]  # oldest first
        SQ, QQ = self.SQ[:, order][:, :, order], self.QQ[:, order][:, :, order]
        D = torch.diagonal(SQ, dim1=1, dim2=2)
        R = SQ.triu() + torch.diag_embed((D == 0).to(r.dtype))  # a step that is not used takes no part
        gamma = self.scaling[:, None]
        S, Q = (self.S.clone(), self.Q.clone()) if r.requires_grad else (self.S, self.Q)  # a graph must not see later steps
        Sr, Qr = batch.rows(S, r)[:, order], batch.rows(Q, r)[:, order]
        a = _triangular(R, Sr, upper=True)
        b = _triangular(R.mT, D * a + gamma * (batch.rows(QQ, a) - Qr), upper=False)
        b, a = (self._spread(c, order) for c in (b, a))
        return gamma * r + batch.combine(S, b) - gamma * batch.combine(Q, a)

    def _spread(self, c: Tensor, order: Tensor) -> Tensor:
        """Coefficients in the order of storage, (B, m)."""
        return c.new_zeros(c.shape[0], self.S.shape[1]).index_copy(1, order, c)


def _triangular(R: Tensor, b: Tensor, upper: bool) -> Tensor:
    """R⁻¹ b per sample, (B, m, m) x (B, m) -> (B, m)."""
    dtype = R.dtype if R.dtype in (torch.float32, torch.float64) else torch.float32  # LAPACK knows no half precision
    return torch.linalg.solve_triangular(R.to(dtype), b.to(dtype).unsqueeze(2), upper=upper).squeeze(2).to(b.dtype)
