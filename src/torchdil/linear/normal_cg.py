"""CG on the normal equations AᵀA x = Aᵀ b, in the form that keeps the residual b - A x itself (CGLS)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import LinearSolver
from torchdil.linear.evidence import Steps
from torchdil.linear.spectrum import Ritz
from torchdil.operator import Operator
from torchdil.solution import Result, Status


@dataclass(frozen=True)
class NormalCG(LinearSolver):
    """CG on the normal equations AᵀA x = Aᵀ rhs: any square A, two products a step, the condition number squared.

    The paper solves its Newton systems so. The residual that is tested is that of A x = rhs itself. Where A is singular this
    ends at the least-squares solution of minimum norm, as `stagnated`.
    A callable preconditioner applies to AᵀA; one that is built for A, such as `Jacobi()`, is applied twice.

    Example:
        >>> dil.root(residual, y0, solver=dil.Newton(linear_solver=dil.NormalCG()))
    """

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        before = operator.products  # making a preconditioner may cost some
        system, adjoint = self.system(operator, transpose), self.system(operator, not transpose)
        precondition = self._for_normal_equations(operator, transpose)
        x, r = self.begin(system, rhs, start)
        s = adjoint(r)
        z = precondition(s)
        p = z.clone()
        sz = batch.dot(s, z)
        p_norm2 = sz
        largest = torch.zeros_like(sz)
        eps = torch.finfo(rhs.dtype).eps
        alphas: list[Tensor] = []
        betas: list[Tensor] = []
        lengths: list[Tensor] = []
        watched, seen = self.watched(operator, transpose), torch.zeros_like(sz)
        progress = self.progress(batch.norm(r), rhs)
        while not progress.finished():
            q = system(p)
            qq = batch.dot(q, q)
            curvature = batch.divide(qq, p_norm2)
            largest = torch.where(progress.running, torch.maximum(largest, curvature), largest)
            # ‖Ap‖² is a square: below eps² relative to the largest it is rounding, and A is singular.
            progress.stop((curvature <= (10 * eps) ** 2 * largest) & (largest < torch.inf), Status.breakdown)
            alpha = torch.where(progress.running, batch.divide(sz, qq), 0.0)
            x.addcmul_(alpha.unsqueeze(1), p)
            lengths.append(alpha * p_norm2.sqrt())
            if watched is not None:
                seen = seen + torch.where(progress.running, batch.divide(batch.dot(p, watched).square(), qq), 0.0)
            r.addcmul_(alpha.unsqueeze(1), q, value=-1)
            s = adjoint(r)
            z = precondition(s)
            sz_old, sz = sz, batch.dot(s, z)
            beta = batch.divide(sz, sz_old)
            torch.addcmul(z, beta.unsqueeze(1), p, out=p)
            p_norm2 = sz + beta.square() * p_norm2
            alphas.append(alpha)
            betas.append(beta)
            r_norm = batch.norm(r)
            progress.advance(r_norm)
            # Aᵀr is zero to rounding: this is the least-squares solution, and rhs is not in the range of A.
            flat = sz <= (100 * eps * r_norm).square() * largest
            progress.stop(flat & (largest < torch.inf), Status.stagnated)
        F = None if watched is None else batch.norm(watched)
        evidence = Steps(lengths, progress.history, batch.norm(rhs), largest.sqrt(), "minimal", F, seen.sqrt())
        ritz = Ritz(lambda: (torch.stack(alphas), torch.stack(betas)), squared=True)
        return self.result(x, progress, "NormalCG", operator.products - before, ritz, evidence)

    def _for_normal_equations(self, operator: Operator, transpose: bool) -> Callable[[Tensor], Tensor]:
        """s -> M⁻¹ s with M ≈ AᵀA."""
        built = self.preconditioning(operator, transpose)
        if built is None:
            return lambda s: s
        return (lambda s: built(built(s))) if hasattr(self.preconditioner, "build") else built
