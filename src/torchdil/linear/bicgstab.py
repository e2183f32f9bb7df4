"""BiCGStab (van der Vorst 1992), per sample, right-preconditioned: A x = rhs for any square A.

Short recurrences, two products a step, no basis to keep: where GMRES would need more memory than there is. The price is an
irregular residual and breakdowns: ρ = r̂ᵀr or ω of zero. A sample that breaks down starts anew from its residual, twice, with
another shadow r̂, since the old one may be what is orthogonal to all that follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import LinearSolver
from torchdil.linear.evidence import Steps
from torchdil.operator import Operator
from torchdil.solution import Result, Status

_RESTARTS = 2


@dataclass(frozen=True)
class BiCGStab(LinearSolver):
    """The stabilised biconjugate gradient method for any J, in the memory of eight vectors.

    Example:
        >>> dil.root(residual, y0, linear_solver=dil.BiCGStab())
    """

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        before = operator.products  # making a preconditioner may cost some
        system = self.system(operator, transpose)
        precondition = self.preconditioning(operator, transpose) or (lambda r: r)
        x, r = self.begin(system, rhs, start)
        eps = torch.finfo(rhs.dtype).eps
        progress = self.progress(batch.norm(r), rhs)
        restarts = torch.zeros_like(progress.steps)
        size = torch.zeros_like(progress.tolerance)  # ‖A‖ as far as it is known
        watched, seen = self.watched(operator, transpose), torch.zeros_like(size)
        lengths: list[Tensor] = []
        generator = torch.Generator(rhs.device).manual_seed(0)
        noise = torch.randn(rhs.shape, generator=generator, dtype=rhs.dtype, device=rhs.device) / rhs.shape[1] ** 0.5
        while not progress.finished():
            origin, r_origin = x, r
            best, best_expected = x, batch.norm(r)
            shadow, p, v = r.clone(), torch.zeros_like(r), torch.zeros_like(r)
            rho, alpha, omega = (torch.ones_like(size) for _ in range(3))
            broken = torch.zeros_like(progress.running)
            while not progress.finished():
                rho_old, rho = rho, batch.dot(shadow, r)
                broken = broken | (rho.abs() <= eps * batch.norm(shadow) * batch.norm(r))
                restarts = restarts + (broken & progress.running)
                progress.stop(restarts > _RESTARTS, Status.breakdown)
                active = progress.running
                shadow = batch.select(broken, r + batch.scale(batch.norm(r), noise), shadow)
                rho = batch.dot(shadow, r)
                beta = torch.where(broken, 0.0, batch.divide(rho, rho_old) * batch.divide(alpha, omega))
                p = batch.select(active & ~broken, r + batch.scale(beta, p - batch.scale(omega, v)), r)
                p_hat = precondition(p)
                v = system(p_hat)
                v_norm = batch.norm(v)
                size = torch.where(active, torch.maximum(size, batch.divide(v_norm, batch.norm(p_hat))), size)
                sigma = batch.dot(shadow, v)
                blocked = sigma.abs() <= eps * batch.norm(shadow) * v_norm
                alpha = torch.where(active & ~blocked, batch.divide(rho, sigma), 0.0)
                s = r - batch.scale(alpha, v)
                s_hat = precondition(s)
                t = system(s_hat)
                omega = torch.where(active, batch.divide(batch.dot(t, s), batch.dot(t, t)), 0.0)
                step = batch.scale(alpha, p_hat) + batch.scale(omega, s_hat)
                x, r_new = x + step, s - batch.scale(omega, t)
                lengths.append(batch.norm(step))
                if watched is not None:  # as if the changes of the residual were orthogonal
                    seen = torch.hypot(seen, batch.divide(batch.dot(step, watched), batch.norm(r - r_new)))
                r = r_new
                # An ω of zero leaves nothing to divide by in the next β.
                broken = blocked | (omega.abs() * batch.norm(t) <= eps * batch.norm(s))
                residual = batch.norm(r)
                # The residual, and what rounding makes of A x: where A is singular, x grows and the first says little.
                expected = residual + 20 * eps * size * batch.norm(x)
                better = active & ((expected < best_expected) | (residual <= progress.tolerance))
                best, best_expected = batch.select(better, x, best), torch.where(better, expected, best_expected)
                progress.advance(torch.where(active, residual, progress.history[-1]))
            # The true residual of the best point: the recurrence may have drifted from it.
            r = rhs - system(best)
            old, new = batch.norm(r_origin), batch.norm(r)
            x, r = batch.select(new < old, best, origin), batch.select(new < old, r, r_origin)
            refuted = progress.correct(batch.norm(r))
            progress.settle(refuted & ~(new < 0.5 * old), self.attainable(size, x, rhs))
        x = self.tamed(x, size, rhs, progress)
        method = ("preconditioned " if self.preconditioner is not None else "") + "BiCGStab"
        F = None if watched is None else batch.norm(watched)
        evidence = Steps(lengths, progress.history, batch.norm(rhs), size, "irregular", F, seen)
        return self.result(x, progress, method, operator.products - before, evidence=evidence)
