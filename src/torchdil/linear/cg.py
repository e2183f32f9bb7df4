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

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import LinearSolver
from torchdil.linear.evidence import Steps
from torchdil.linear.normal_cg import NormalCG
from torchdil.linear.spectrum import Ritz
from torchdil.operator import Operator
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
        p = z.clone()
        rz = batch.dot(r, z)
        p_norm2 = rz  # pᵀMp by recurrence, since r is M-orthogonal to the last direction
        origin, initial = None if start is None else x.clone(), batch.norm(r)
        largest, least = torch.zeros_like(rz), torch.full_like(rz, torch.inf)
        eps = torch.finfo(rhs.dtype).eps
        alphas: list[Tensor] = []
        betas: list[Tensor] = []
        lengths: list[Tensor] = []
        watched = self.watched(operator, transpose)
        seen, along = torch.zeros_like(rz), torch.zeros_like(rz)  # ‖w‖² and wᵀp, w being the solution of J w = F so far
        progress = self.progress(initial, rhs)
        # Few operations on (B,) vectors: on an accelerator each is a launch. Done samples may divide by zero, and are masked.
        done = progress.finished()
        while not done:
            q = system(p)
            pq = batch.dot(p, q)
            curvature = pq / p_norm2
            largest = torch.where(progress.running, torch.maximum(largest, curvature.abs()), largest)
            floor = 10 * eps * largest
            lower = torch.minimum(least, curvature)
            progress.stop((lower <= floor) & (floor < torch.inf), torch.where(curvature < -floor, *_ENDS))
            running = progress.running
            least = torch.where(running, lower, least)
            alpha = torch.where(running, rz / pq, 0.0)
            x.addcmul_(alpha.unsqueeze(1), p)
            lengths.append(alpha * p_norm2.sqrt())
            r_old = r.clone() if self.flexible else None
            r.addcmul_(alpha.unsqueeze(1), q, value=-1)
            del q
            rr = batch.dot(r, r)
            progress.advance(rr.sqrt())
            done = progress.finished()
            z = r if done else precondition(r)  # which may be dear, and after the last step has no use
            rz_old, rz = rz, rr if z is r else batch.dot(r, z)
            beta = torch.where(running, (rz if r_old is None else rz - batch.dot(z, r_old)) / rz_old, 0.0)
            if watched is not None:
                part = torch.where(running, batch.dot(p, watched) / pq, 0.0)
                seen = seen + part * (2 * along + part * p_norm2)
                along = beta * (along + part * p_norm2)
            torch.addcmul(z, beta.unsqueeze(1), p, out=p)
            p_norm2 = rz + beta.square() * p_norm2
            alphas.append(alpha)
            betas.append(beta)
        # H is singular: near its null space a step divides by a rounding error. Where that led astray, no step is better.
        status, residual = progress.status(), progress.history[-1]
        stuck = (status == int(Status.breakdown)) | (status == int(Status.stagnated))
        astray = (least <= eps * largest) | (stuck & ~(residual <= initial))
        x = x.masked_fill_(astray.unsqueeze(1), 0.0) if origin is None else batch.select(astray, origin, x)
        progress.history[-1] = torch.where(astray, initial, residual)
        method = ("preconditioned " if self.preconditioner is not None else "") + "CG"
        F = None if watched is None else batch.norm(watched)
        evidence = Steps(lengths, progress.history, batch.norm(rhs), largest, "orthogonal", F, seen.clamp_min(0).sqrt())
        return self.result(x, progress, method, operator.products - before, Ritz(alphas, betas), evidence)
