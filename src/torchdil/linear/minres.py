"""MINRES (Paige and Saunders 1975), per sample: A x = rhs with A symmetric, definite or not.

Lanczos turns A into a tridiagonal T, one product a step; rotations turn T into a triangle, and x follows by a three-term
recurrence as the point of the Krylov space with the smallest residual. Negative curvature is nothing special to it. Where A is
singular and rhs not in its range it stops at the least-squares solution of minimum norm, as `stagnated`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import LinearSolver
from torchdil.linear.evidence import Steps
from torchdil.linear.spectrum import Tridiagonal
from torchdil.operator import Operator, Product
from torchdil.progress import Progress
from torchdil.solution import Result, Status


@dataclass(frozen=True)
class MINRES(LinearSolver):
    """The minimum residual method for a symmetric J, indefinite or singular too.

    A preconditioner must be positive definite. The true residual is measured at the end: the recurrence loses up to the square
    of the condition number times the rounding error, and goes on from what it has reached where that is too much.

    Example:
        >>> dil.argmin(score, y0, linear_solver=dil.MINRES(rtol=1e-8))
    """

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        if not operator.symmetric:
            raise ValueError("linear_solver=MINRES() needs a symmetric J, as of an argmin; use GMRES(), BiCGStab() or Dense().")
        before = operator.products  # making a preconditioner may cost some
        system = self.system(operator, transpose)
        precondition = self.preconditioning(operator, transpose)
        x, r = self.begin(system, rhs, start)
        spectrum = None
        least_squares = torch.zeros_like(rhs[:, 0], dtype=torch.bool)
        progress = self.progress(batch.norm(r), rhs)
        watched = self.watched(operator, transpose)
        F = None if watched is None else batch.norm(watched)
        zeros = torch.zeros_like(rhs[:, 0])
        evidence = Steps([], progress.history, batch.norm(rhs), zeros, "minimal", F, zeros)
        while not progress.finished():
            size = batch.divide(batch.norm(rhs - r), batch.norm(x))  # what x says of ‖A‖
            step, size, ritz, stopped = _minimise(system, precondition, r, size, progress, watched, evidence)
            least_squares = least_squares | stopped
            spectrum, evidence.A = spectrum or ritz, torch.maximum(evidence.A, size)  # the first is the longest
            trial = x + step
            r_trial = rhs - system(trial)
            old, new = batch.norm(r), batch.norm(r_trial)
            x, r = batch.select(new < old, trial, x), batch.select(new < old, r_trial, r)
            refuted = progress.correct(batch.norm(r))
            progress.settle(refuted & ~(new < 0.5 * old), self.attainable(size, x, rhs))
        if precondition is None:
            # There A r = 0, and x may have any multiple of r in it: without it, it is the smallest such solution.
            part = torch.where(least_squares, batch.divide(batch.dot(x, r), batch.dot(r, r)), 0.0)
            x = x - batch.scale(part, r)
        method = ("preconditioned " if precondition is not None else "") + "MINRES"
        return self.result(x, progress, method, operator.products - before, spectrum, evidence)


def _minimise(
    system: Product,
    precondition: Callable[[Tensor], Tensor] | None,
    r: Tensor,
    size: Tensor,
    progress: Progress,
    watched: Tensor | None,
    evidence: Steps,
) -> tuple[Tensor, Tensor, Tridiagonal, Tensor]:
    """The step from where the residual is r, ‖A‖, the Lanczos coefficients, and who stopped because A r = 0."""
    eps = torch.finfo(r.dtype).eps
    zero, one = torch.zeros_like(size), torch.ones_like(size)
    x, d, d_old, u_old = (torch.zeros_like(r) for _ in range(4))
    # u are Lanczos vectors and v = M⁻¹ u their images: uᵢᵀ vⱼ = δᵢⱼ. Without a preconditioner both are one.
    u, v, beta = _normalise(r, r if precondition is None else precondition(r))
    c, s, c_old, s_old = one, zero, one, zero  # the last two rotations
    phi = beta  # the residual in the norm of M⁻¹
    norm = size  # of A; below, `size` is that of M⁻¹ᐟ² A M⁻¹ᐟ²
    size = size if precondition is None else zero
    smallest = torch.full_like(size, torch.inf)
    taken = torch.zeros_like(progress.steps)
    least_squares = torch.zeros_like(progress.running)
    diagonal: list[Tensor] = []
    off_diagonal: list[Tensor] = []
    while not progress.finished():
        q = system(v)
        if precondition is not None:
            norm = torch.maximum(norm, batch.divide(batch.norm(q), batch.norm(v)))
        q = q - batch.scale(beta, u_old)
        alpha = batch.dot(v, q)
        q = q - batch.scale(alpha, u)
        u_new, v_new, beta_new = _normalise(q, q if precondition is None else precondition(q))
        # The new column (beta, alpha, beta_new) of T, turned by the last two rotations and then by its own.
        above = s_old * beta
        delta = c * c_old * beta + s * alpha
        rest = c * alpha - s * c_old * beta
        gamma = torch.hypot(rest, beta_new)
        size = torch.where(progress.running, torch.maximum(size, torch.hypot(alpha, beta_new)), size)
        # ‖A r‖ = |φ| hypot(rest, c β): x is the least-squares solution. Below √eps the recurrence is noise.
        flat = (torch.hypot(rest, c * beta_new) <= 2 * eps**0.5 * size) & (size < torch.inf)
        least_squares = least_squares | (flat & progress.running)
        progress.stop(flat, Status.stagnated)
        smallest = torch.where(progress.running, torch.minimum(smallest, gamma), smallest)
        progress.stop((smallest <= 10 * eps * size) & (size < torch.inf), Status.breakdown)
        active = progress.running
        taken += active
        step = batch.scale(delta, d).addcmul_(above.unsqueeze(1), d_old)
        # A frozen sample's directions are set to zero: they might grow without bound, and 0 · inf is NaN.
        d, d_old = batch.scale(torch.where(active, batch.divide(one, gamma), 0.0), v - step), d
        c_old, s_old = c, s
        c, s = batch.divide(rest, gamma), batch.divide(beta_new, gamma)
        move = torch.where(active, c * phi, 0.0)
        x.addcmul_(move.unsqueeze(1), d)
        if precondition is None:
            assert isinstance(evidence.lengths, list)
            evidence.lengths.append(move.abs() * batch.norm(d))
        if watched is not None:  # A d is a unit vector, orthogonal to those before
            evidence.told = torch.hypot(evidence.seen, torch.where(active, batch.dot(d, watched), 0.0))
        phi = torch.where(active, -s * phi, phi)
        if precondition is None:
            estimate = torch.where(active, phi.abs(), progress.history[-1])
        else:  # the residual itself: r = s² r + c φ u
            r = batch.select(active, batch.scale(s.square(), r).addcmul_((c * phi).unsqueeze(1), u_new), r)
            estimate = batch.norm(r)
        u_old, u, v, beta = u, u_new, v_new, beta_new
        diagonal.append(alpha)
        off_diagonal.append(beta)
        progress.advance(estimate)
    norm = size if precondition is None else norm
    # Steps that turned out to have divided by a rounding error: ‖A‖ was not known yet.
    x = torch.where((smallest <= 10 * eps * size).unsqueeze(1), 0.0, x)
    return x, norm, Tridiagonal(diagonal, off_diagonal, taken), least_squares


def _normalise(q: Tensor, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q and z = M⁻¹ q divided by √(qᵀz), and that number; zero where it is zero."""
    length = batch.norm(q) if z is q else batch.dot(q, z).clamp_min(0).sqrt()
    divisor = length.unsqueeze(1)  # not by its inverse, which may be too large a number
    u = batch.divide(q, divisor)
    return u, u if z is q else batch.divide(z, divisor), length
