"""Anderson acceleration of y ← y - ρ F(y): for a fixed point with ρ = 1, of y ← g(y).

With the last m steps Δy of a sample as the rows of S and their ΔF as those of Q, y ← y - Sᵀγ - ρ (F - Qᵀγ), γ minimising
‖F - Qᵀγ‖ (Anderson 1965): a Newton step as far as the steps span the space, a plain one for the rest. Where that leads astray
the sample goes back to its best point and takes shorter steps; where that fails too, it forgets what it knew and begins as
plain iteration does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil import batch
from torchdil.problem import Problem
from torchdil.settings import check_count, check_number
from torchdil.solution import Result, Status
from torchdil.solvers.base import Solver
from torchdil.solvers.line_search import Iterate

# ‖F‖ may grow this much over its least value: acceleration is not monotone, and needs room.
_GROWTH = 10.0
# Steps without a new best point after which a sample goes back to that.
_STALE = 10


@dataclass(frozen=True)
class Anderson(Solver):
    """Anderson acceleration, at one evaluation a step.

    Made for fixed points. Of a root or an argmin F is taken relative to the size of J at the start, and the score of an argmin
    may not rise.

    Attributes:
        history: m, how many steps to remember.
        relaxation: ρ, between 0 and 1 as a rule.

    Example:
        >>> dil.fixed_point(torch.cos, torch.ones(3), solver=dil.Anderson(history=3))
    """

    history: int = 5
    relaxation: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("history", self.history)
        check_number("relaxation", self.relaxation, above=0)

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        now = best = Iterate.at(problem, y0)
        progress = self.progress(problem, now.F, tolerance, 200, now.merit)
        memory = _Memory(y0, min(self.history, y0.shape[1]))  # more steps than unknowns say nothing new
        relaxation, trust = self.relaxation * _inverse_size(problem, now), torch.ones_like(tolerance)
        failures = stale = torch.zeros_like(progress.steps)
        while not progress.finished():
            running, fresh = progress.running, memory.fresh
            y = batch.select(running, now.y + batch.scale(trust, memory.step(now.F, relaxation)), now.y)
            new = Iterate.at(problem, y)
            better, worse = _compare(problem, new, best)
            stale = torch.where(better, 0, stale + 1)
            tired = stale > _STALE
            lost = running & (worse | tired)
            dy, dF = (new.y - now.y).detach(), (new.F - now.F).detach()
            problem.remember(batch.select(lost, torch.zeros_like(dy), dy), dF)
            # The first step that fails still tells of F; where that did not help, the memory is to blame.
            failures = torch.where(better, 0, failures + lost)
            misleading = lost & (tired | ((failures > 1) & ~fresh))
            memory.forget(misleading)
            # The memory leads to where F vanishes: of an argmin, to a saddle if it knows of negative curvature.
            curved = problem.objective is None or batch.dot(dy, dF) > 0
            memory.add(dy, dF, running & ~misleading & curved)
            trust = torch.where(lost, 0.5 * trust, torch.where(better, (1.5 * trust).clamp_max(1.0), trust))
            progress.stop(trust < torch.finfo(trust.dtype).eps, Status.stagnated)
            stale = torch.where(lost, 0, stale)
            now, best = best.where(lost, new), new.where(running & better, best)
            progress.advance(batch.norm(now.F), now.merit)
        progress.correct(batch.norm(best.F))  # of what is returned
        return self.result(best.y, progress)


def _compare(problem: Problem, new: Iterate, best: Iterate) -> tuple[Tensor, Tensor]:
    """Which samples are better than their best, and which are too bad to go on from."""
    # The objective of an argmin must not rise, up to rounding.
    allowed = _GROWTH - 1 if problem.objective is None else torch.finfo(new.y.dtype).eps ** 0.5
    slack, size = allowed * best.merit.abs(), batch.norm(new.F)
    good = (new.merit <= best.merit + slack) & (size < torch.inf)  # False for NaN
    return good & ((size < batch.norm(best.F)) | (new.merit < best.merit - slack)), ~good


def _inverse_size(problem: Problem, start: Iterate) -> Tensor:
    """1 over the size of J along F, (B,): ρ F is then in the units of y, which for a fixed point it is anyway."""
    if problem.name == "fixed_point":
        return torch.ones_like(start.merit)
    with torch.no_grad():
        size = batch.divide(batch.norm(start.F), batch.norm(problem.operator(start.y).rmv(start.F)))
    return torch.where(torch.isfinite(size) & (size > 0), size, 1.0)


class _Memory:
    """The last m steps of each sample, S and Q (B, m, n), over the length of ΔF, written round and round."""

    def __init__(self, y: Tensor, history: int):
        samples, n = y.shape
        self.S, self.Q = y.new_zeros(samples, history, n), y.new_zeros(samples, history, n)
        self.QQ = y.new_zeros(samples, history, history)
        self.known = torch.zeros(samples, history, dtype=torch.bool, device=y.device)
        self._next = 0

    @property
    def fresh(self) -> Tensor:
        """Which samples remember no step, (B,)."""
        return ~self.known.any(dim=1)

    def add(self, s: Tensor, q: Tensor, mask: Tensor) -> None:
        """Remember a step of the samples in `mask`; in place of the oldest, which all lose."""
        size, k = batch.norm(q), self._next
        used = mask & (size < torch.inf) & (batch.norm(s) / size < torch.inf)  # not where F did not change, nor for NaN
        self.S[:, k], self.Q[:, k] = (torch.where(used.unsqueeze(1), a / size.unsqueeze(1), 0.0) for a in (s, q))
        self.QQ[:, :, k] = self.QQ[:, k] = batch.rows(self.Q, self.Q[:, k])
        self.known[:, k] = used
        self._next = (k + 1) % self.S.shape[1]

    def forget(self, mask: Tensor) -> None:
        """Drop all steps of the samples in `mask`."""
        self.known = self.known & ~mask.unsqueeze(1)

    def step(self, F: Tensor, relaxation: Tensor) -> Tensor:
        """-Sᵀγ - ρ (F - Qᵀγ), (B, n)."""
        # The factorisation knows float32 and float64 only.
        dtype = F.dtype if F.dtype in (torch.float32, torch.float64) else torch.float32
        # Rows of Q have length 1, so this ridge is a few roundings: it settles what they leave open, zero rows included.
        ridge = 10 * self.known.shape[1] * torch.finfo(F.dtype).eps
        both = self.known.unsqueeze(1) & self.known.unsqueeze(2)
        A = torch.where(both, self.QQ, 0.0).to(dtype) + torch.diag_embed(torch.where(self.known, ridge, 1.0).to(dtype))
        L, info = torch.linalg.cholesky_ex(A)
        S, Q = (self.S.clone(), self.Q.clone()) if F.requires_grad else (self.S, self.Q)  # a graph must not see later steps
        gamma, r = torch.zeros_like(self.QQ[:, 0]), F
        for _ in range(2):  # the second time gives back the digits that normal equations lose
            b = torch.where(self.known, batch.rows(Q, r), 0.0).to(dtype).unsqueeze(2)
            change = batch.cholesky_solve(b, L).squeeze(2).to(F.dtype)
            gamma = gamma + batch.select(info == 0, change, torch.zeros_like(change))
            r = F - batch.combine(Q, gamma)
        return -batch.combine(S, gamma) - batch.scale(relaxation, r)
