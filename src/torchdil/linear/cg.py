"""Conjugate gradients: the paper's VJP_CG (Algorithm 1), per sample, preconditioned.

H g = v with H symmetric positive (semi-)definite, one product with H a step. How it differs from the textbook:
1. every sample has its own step size and stops on its own;
2. the curvature pᵀHp is compared with the largest seen: a negative one ends the sample as `negative_curvature`, one that is
   zero to rounding as `breakdown` (H is singular and v is not in its range);
3. `flexible=True` uses the Polak-Ribière β, which stays right when the preconditioner changes from step to step;
4. the coefficients are kept: they are the Lanczos tridiagonal matrix, whose eigenvalues estimate those of H for free.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import LinearSolver
from torchdil.linear.evidence import Steps
from torchdil.linear.normal_cg import NormalCG
from torchdil.linear.spectrum import Ritz
from torchdil.operator import Operator, Product
from torchdil.solution import Result, Status

_ENDS = int(Status.negative_curvature), int(Status.breakdown)


@dataclass(frozen=True)
class CG(LinearSolver):
    """Conjugate gradients for a symmetric positive definite J (the Hessian at a minimum).

    Where J is not symmetric (a root, a fixed point) this is CG on the normal equations, as in the paper; the report says so.

    Attributes:
        flexible: use the Polak-Ribière β, for preconditioners that change.

    Example:
        >>> dil.argmin(score, y0, linear_solver=dil.CG(rtol=1e-8, damping=1e-6))
    """

    flexible: bool = False

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        if not operator.symmetric:
            shared = {f.name: getattr(self, f.name) for f in fields(LinearSolver)}
            result = NormalCG(**shared).solve(operator, rhs, start, transpose=transpose)
            result.stats.method = "CG on the normal equations"
            return result
        before = operator.products  # making a preconditioner may cost some
        system = self.system(operator, transpose)
        precondition = self.preconditioning(operator, transpose) or (lambda r: r)
        x, r = self.begin(system, rhs, start)
        z = precondition(r)
        rz = batch.dot(r, z)
        origin, initial = None if start is None else x.clone(), batch.norm(r)
        progress = self.progress(initial, rhs)
        watched = self.watched(operator, transpose)
        state = _State(x, r, z.clone(), rz, rz, torch.zeros_like(rz), torch.full_like(rz, torch.inf), *progress.state)
        plain = self.preconditioner is None and not self.flexible
        linear = operator.linear(transpose) if plain and self.product == "auto" else None
        fixed = (progress.tolerance, r if watched is None else watched)
        notes: list[tuple[Tensor, ...]] = []
        done = progress.finished()
        while not done:
            if linear is not None:
                operator.products += 1
                found = linear.run(("CG", self.damping), self._whole_step, *state, *fixed)
                state, note = _State(*found[: len(state)]), found[len(state) :]
                progress.update(note[-1], *state[-3:])
                done = progress.finished()
            else:
                r_old = state.r.clone() if self.flexible else None
                state, moved, note = _descend(system, state, *fixed)
                progress.update(note[-1], *state[-3:])
                done = progress.finished()
                z = state.r if done else precondition(state.r)  # which may be dear, and after the last step has no use
                state, beta = _turn(state, moved, z, r_old)
                note = (beta, *note)
            notes.append(note)
        largest, least = state.largest, state.least
        betas, alphas, parts, lengths, _ = (list(noted) for noted in zip(*notes, strict=True)) if notes else [[]] * 5
        # H is singular: near its null space a step divides by a rounding error. Where that led astray, no step is better.
        status, residual = progress.status(), progress.history[-1]
        stuck = (status == int(Status.breakdown)) | (status == int(Status.stagnated))
        astray = (least <= torch.finfo(rhs.dtype).eps * largest) | (stuck & ~(residual <= initial))
        x = x.masked_fill_(astray.unsqueeze(1), 0.0) if origin is None else batch.select(astray, origin, x)
        progress.history[-1] = torch.where(astray, initial, residual)
        method = ("preconditioned " if self.preconditioner is not None else "") + "CG"
        F = None if watched is None else batch.norm(watched)
        seen = partial(_galerkin, alphas, betas, lengths, parts)
        evidence = Steps(lengths, progress.history, batch.norm(rhs), largest, "orthogonal", F, seen)
        return self.result(x, progress, method, operator.products - before, Ritz(alphas, betas), evidence)

    def _whole_step(self, product: Product, *tensors: Tensor) -> tuple[Tensor, ...]:
        """A step without a preconditioner, as one function of tensors: the state, then what is noted of it."""
        *parts, tolerance, watched = tensors
        system = (lambda p: product(p).add(p, alpha=self.damping)) if self.damping else product
        state, moved, note = _descend(system, _State(*parts), tolerance, watched)
        state, beta = _turn(state, moved, state.r, None)
        return (*state, beta, *note)


class _State(NamedTuple):
    """What one step hands to the next: x, r, p are (B, n) and changed in place, the rest is (B,).

    Attributes:
        x, r, p: the solution so far, its residual, the direction.
        rz: rᵀz.
        p_norm2: pᵀMp by recurrence, since r is M-orthogonal to the last direction.
        largest, least: the curvatures seen.
        running, status, steps: as `Progress` has them.
    """

    x: Tensor
    r: Tensor
    p: Tensor
    rz: Tensor
    p_norm2: Tensor
    largest: Tensor
    least: Tensor
    running: Tensor
    status: Tensor
    steps: Tensor


# Few operations on (B,) vectors: on an accelerator each is a launch. Done samples may divide by zero, and are masked.


def _descend(system: Product, s: _State, tolerance: Tensor, watched: Tensor) -> tuple[_State, Tensor, tuple[Tensor, ...]]:
    """To the minimum along p; who moved, and for the notes α, pᵀF / pᵀAp, ‖αp‖ and ‖r‖."""
    q = system(s.p)
    pq = batch.dot(s.p, q)
    curvature = pq / s.p_norm2
    largest = torch.where(s.running, torch.maximum(s.largest, curvature.abs()), s.largest)
    floor = 10 * torch.finfo(s.p.dtype).eps * largest
    lower = torch.minimum(s.least, curvature)
    ended = s.running & (lower <= floor) & (floor < torch.inf)
    moved = s.running ^ ended
    alpha = torch.where(moved, s.rz / pq, 0.0)
    s.x.addcmul_(alpha.unsqueeze(1), s.p)
    s.r.addcmul_(alpha.unsqueeze(1), q, value=-1)
    residual = batch.norm(s.r)
    met = moved & (residual <= tolerance)
    status = torch.where(met, int(Status.converged), torch.where(ended, torch.where(curvature < -floor, *_ENDS), s.status))
    state = s._replace(
        largest=largest,
        least=torch.where(moved, lower, s.least),
        running=moved ^ met,
        status=status,
        steps=s.steps + moved,
    )
    return state, moved, (alpha, batch.dot(s.p, watched) / pq, alpha * s.p_norm2.sqrt(), residual)


def _turn(s: _State, moved: Tensor, z: Tensor, r_old: Tensor | None) -> tuple[_State, Tensor]:
    """The next direction; β."""
    rz = batch.dot(s.r, z)
    beta = torch.where(moved, (rz if r_old is None else rz - batch.dot(z, r_old)) / s.rz, 0.0)
    p_norm2 = rz + beta.square() * s.p_norm2
    return s._replace(p=torch.addcmul(z, beta.unsqueeze(1), s.p, out=s.p), rz=rz, p_norm2=p_norm2), beta


def _galerkin(alphas: list[Tensor], betas: list[Tensor], lengths: list[Tensor], parts: list[Tensor]) -> Tensor:
    """‖w‖, (B,), of w = Σ p (pᵀF / pᵀAp), the solution of J w = F as far as the directions tell."""
    square, along = torch.zeros_like(alphas[0]), torch.zeros_like(alphas[0])  # ‖w‖² and wᵀp
    for alpha, beta, length, part in zip(alphas, betas, lengths, parts, strict=True):
        part = torch.where(alpha != 0, part, 0.0)
        more = part * torch.where(alpha != 0, (length / alpha).square(), 0.0)
        square = square + part * (2 * along + more)
        along = beta * (along + more)
    return square.clamp_min(0).sqrt()
