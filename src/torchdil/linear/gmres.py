"""Restarted GMRES, per sample, right-preconditioned.

A M⁻¹ u = r with x += M⁻¹ u: of all u in the Krylov space span{r, AM⁻¹r, ...} the one with the smallest residual, for any square
A. Preconditioning from the right leaves the residual that is minimised, and tested, the true one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import AtOnce, LinearSolver
from torchdil.linear.evidence import Steps
from torchdil.linear.spectrum import Matrix
from torchdil.linear_graph import Bound
from torchdil.operator import Operator, Product
from torchdil.settings import check_count
from torchdil.solution import Result, Stats, Status


@dataclass(frozen=True)
class GMRES(LinearSolver):
    """GMRES(restart) for any J: one product a step, `restart` + 1 basis vectors of memory.

    A singular system whose right-hand side is not in the range ends as `breakdown` or `stagnated`.

    Attributes:
        restart: how many basis vectors to keep before starting anew from the true residual.

    Example:
        >>> dil.root(residual, y0, linear_solver=dil.GMRES(restart=50))
    """

    restart: int = 30

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("restart", self.restart)

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        before = operator.products  # making a preconditioner may cost some
        system = self.system(operator, transpose)
        precondition = self.preconditioning(operator, transpose) or (lambda r: r)
        x, r = self.begin(system, rhs, start)
        watched, progress = self.watched(operator, transpose), self.progress(batch.norm(r), rhs)
        samples, n = rhs.shape
        m = min(self.restart, n) if self.max_steps is None else min(self.restart, n, self.max_steps)
        eps = torch.finfo(rhs.dtype).eps
        largest, size = torch.zeros_like(rhs[:, 0]), torch.zeros_like(rhs[:, 0])  # of A M⁻¹, of A
        first, seen = rhs.new_zeros(samples, 1, 0), torch.zeros_like(largest)
        lengths: list[Tensor] = []
        while not progress.finished():
            beta = batch.norm(r)
            V = rhs.new_empty(samples, m + 1, n)
            V[:, 0] = batch.scale(batch.divide(torch.ones_like(beta), beta), r)
            H = rhs.new_zeros(samples, m + 1, m)
            # H = QᵀR: Q, the product of all Givens rotations so far, turns a new column in one product.
            Q = torch.eye(m + 1, dtype=rhs.dtype, device=rhs.device).repeat(samples, 1, 1)
            # Columns that a sample does not take stay unit vectors, with nothing on their right-hand side.
            R = torch.eye(m, dtype=rhs.dtype, device=rhs.device).repeat(samples, 1, 1)
            g = rhs.new_zeros(samples, m)
            estimates = [torch.where(progress.running, beta, progress.history[-1])]
            for k in range(m):
                if progress.finished():
                    break
                z = precondition(V[:, k])
                w = system(z)
                # Without a preconditioner z is a unit vector.
                grown = batch.norm(w) if self.preconditioner is None else batch.divide(batch.norm(w), batch.norm(z))
                size = torch.where(progress.running, torch.maximum(size, grown), size)
                w, h = _orthogonalise(w, V[:, : k + 1])
                below = batch.norm(w)
                column = batch.rows(Q[:, : k + 1, : k + 1], h)
                pivot = torch.hypot(column[:, k], below)
                grown = torch.maximum(largest, torch.hypot(batch.norm(column), below))
                largest = torch.where(progress.running, grown, largest)
                # A pivot that is zero to rounding: the system is singular, and dividing by it would add noise.
                progress.stop((pivot <= 10 * eps * largest) & (largest < torch.inf), Status.breakdown)
                active = progress.running
                c, s = batch.divide(column[:, k], pivot), batch.divide(below, pivot)
                _rotate(Q, k, torch.where(active, c, 1.0), torch.where(active, s, 0.0))
                R[:, :k, k] = torch.where(active.unsqueeze(1), column[:, :k], 0.0)
                R[:, k, k] = torch.where(active, pivot, 1.0)
                g[:, k] = torch.where(active, beta * Q[:, k, 0], 0.0)
                # Not by 1 / below, which may be too large a number; and what a sample that is done would add is noise.
                V[:, k + 1] = torch.where(active.unsqueeze(1), batch.divide(w, below.unsqueeze(1)), 0.0)
                # Untaken columns of H: one entry ‖A v₀‖, which lies between the extreme singular values of the rest.
                H[:, : k + 1, k] = torch.where(active.unsqueeze(1), h, 0.0)
                H[:, k + 1, k] = torch.where(active, below, batch.norm(H[:, :2, 0]))
                estimates.append(torch.where(active, beta * Q[:, k + 1, 0].abs(), estimates[-1]))
                progress.advance(estimates[-1])
            k = len(estimates) - 1
            if not first.numel():  # the first cycle is the longest
                stepped = (progress.steps > 0)[:, None, None]
                first = torch.where(stepped, H[:, : k + 1, :k], torch.nan)
            inverse = _inverse(R[:, :k, :k])
            u = _trusted(inverse, g[:, :k], torch.stack(estimates, dim=1), eps * largest)
            lengths += torch.linalg.vector_norm(inverse * g[:, None, :k], dim=1).unbind(1)
            if watched is not None:  # A V R⁻¹ has orthonormal columns
                parts = torch.where(g[:, :k] != 0, batch.rows(V[:, :k], watched), 0.0)
                seen = torch.maximum(seen, batch.norm(batch.combine(inverse, parts)))
            trial = x + precondition(batch.combine(V[:, :k], u))
            r_trial = rhs - system(trial)
            better = (batch.norm(r_trial) < beta) & (u != 0).any(dim=1)
            x, r = batch.select(better, trial, x), batch.select(better, r_trial, r)
            refuted = progress.correct(batch.norm(r))
            progress.settle(refuted & ~(batch.norm(r) < 0.5 * beta), self.attainable(size, x, rhs))
        travelled = torch.stack(lengths) if lengths else rhs.new_zeros(0, samples)
        x = self.tamed(x, size, rhs, progress)
        method = ("preconditioned " if self.preconditioner is not None else "") + f"GMRES({self.restart})"
        size_of_F = None if watched is None else batch.norm(watched)
        evidence = _Way(first, size, seen, travelled).evidence(batch.norm(rhs), size_of_F, progress.history)
        return self.result(x, progress, method, operator.products - before, Matrix(first), evidence)

    def at_once(self, operator: Operator, transpose: bool, expected: int) -> AtOnce | None:
        known = operator.y.dtype in (torch.float32, torch.float64)  # to LAPACK
        if not known or not 0 < expected <= self.restart or self.preconditioner is not None:
            return None

        full = self.full_steps(operator, transpose, expected)
        single = full < expected

        def routine(product: Bound, rhs: Tensor, F: Tensor) -> tuple[Tensor, ...]:
            return self._all_steps(self.systems(product, expected, full), single, rhs, F)

        def stats(steps: Tensor, residual: Tensor, tolerance: Tensor, *noted: Tensor) -> Stats:
            history, size, way = [*noted[0].unbind(1)[:-1], residual], noted[1], _Way(*noted[2:])
            evidence = way.evidence(history[0], size if transpose else None, history)
            method, spectrum = f"GMRES({self.restart})", Matrix(way.H)
            return Stats(method, steps, residual, tolerance, expected + single, history, spectrum, evidence=evidence)

        return AtOnce(("GMRES", self.damping, self.rtol, self.atol, expected, full), routine, stats, single=single)

    def _all_steps(self, systems: list[Product], single: bool, rhs: Tensor, F: Tensor) -> tuple[Tensor, ...]:
        """What `AtOnce` asks for: m steps of all samples, and only then the least-squares problem, by its normal equations.

        HᵀH = RᵀR with the R of H = QR, which is as good as H where H is not ill-conditioned; the residual tells.
        """
        (samples, n), m = rhs.shape, len(systems)
        beta, tiny = batch.norm(rhs), torch.finfo(rhs.dtype).tiny
        # A vector of all samples is one piece of memory, written once.
        vectors, H = rhs.new_empty(m + 1, samples, n), rhs.new_zeros(samples, m + 1, m)
        V = vectors.transpose(0, 1)
        torch.div(rhs, beta.clamp_min(tiny).unsqueeze(1), out=vectors[0])
        for k, system in enumerate(systems):
            w, H[:, : k + 1, k] = _projected(system(vectors[k]), V[:, : k + 1])
            below = batch.norm(w)
            H[:, k + 1, k] = below
            torch.div(w, below.clamp_min(tiny).unsqueeze(1), out=vectors[k + 1])
        nothing = torch.where(beta > 0, 0.0, 1.0)[:, None, None]  # to solve: then any R will do
        L, info = torch.linalg.cholesky_ex(H.mT @ H + nothing * torch.eye(m, dtype=rhs.dtype, device=rhs.device))
        inverse = _inverse(L.mT)
        g = beta.unsqueeze(1) * (inverse.mT @ H[:, 0].unsqueeze(2)).squeeze(2)
        u = batch.rows(inverse, g)
        x = batch.combine(V[:, :m], u)
        size, tolerance = torch.linalg.vector_norm(H, dim=1).amax(dim=1), self.tolerance(rhs)
        if rhs.dtype == torch.float64 and not single:  # A V = V H to rounding, however far V is from orthogonal
            residual = batch.norm(rhs - batch.combine(V, batch.rows(H, u)))
            hidden = 100 * torch.finfo(rhs.dtype).eps * size * batch.norm(u)  # in x = V u
        else:
            residual = batch.norm(rhs - systems[0](x))
            hidden = torch.zeros_like(residual)
        # Each step multiplies the residual by the sine of its Givens rotation.
        sines = torch.diagonal(H, -1, dim1=1, dim2=2) / torch.diagonal(L, dim1=1, dim2=2)
        history = beta.unsqueeze(1) * torch.nn.functional.pad(sines.cumprod(dim=1), (1, 0), value=1.0)
        seen = batch.norm(batch.combine(inverse, batch.rows(V[:, :m], F)))  # A V R⁻¹ has orthonormal columns
        lengths = torch.linalg.vector_norm(inverse * g.unsqueeze(1), dim=1).mT
        good = (info == 0) & (residual <= tolerance) & (hidden <= tolerance) & (beta < torch.inf)
        return x, good, m * (beta > 0).long(), residual, tolerance, history, batch.norm(F), H, size, seen, lengths


class _Way(NamedTuple):
    """What the steps have told.

    Attributes:
        H: the Hessenberg matrix of the first cycle, (B, k + 1, k).
        size: ‖A‖, (B,).
        seen: ‖J⁻¹F‖ as far as seen, (B,).
        lengths: of the steps, (steps, B).
    """

    H: Tensor
    size: Tensor
    seen: Tensor
    lengths: Tensor

    def evidence(self, rhs_norm: Tensor, F_norm: Tensor | None, history: list[Tensor]) -> Steps:
        return Steps(list(self.lengths.unbind()), history, rhs_norm, self.size, "minimal", F_norm, self.seen)


def _orthogonalise(w: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """w minus its projection on the basis (B, k, n), and the coefficients (B, k).

    Classical Gram-Schmidt, twice: two batched products a pass, and as orthogonal as rounding allows.
    """
    w, first = _projected(w, basis)
    w, second = _projected(w, basis)
    return w, first + second


def _projected(w: Tensor, basis: Tensor) -> tuple[Tensor, Tensor]:
    """The same once: enough where J is not ill-conditioned."""
    parts = batch.rows(basis, w)
    return torch.baddbmm(w.unsqueeze(1), parts.unsqueeze(1), basis, alpha=-1).squeeze(1), parts


def _inverse(R: Tensor) -> Tensor:
    """R⁻¹ of triangles, (B, k, k)."""
    known = R if R.dtype in (torch.float32, torch.float64) else R.float()  # LAPACK knows no half precision
    eye = torch.eye(R.shape[1], dtype=known.dtype, device=R.device)
    return torch.linalg.solve_triangular(known, eye, upper=True).to(R.dtype)


def _trusted(inverse: Tensor, g: Tensor, estimates: Tensor, rounding: Tensor) -> Tensor:
    """The solution u = R⁻¹ g by as many columns as do good, (B, k).

    With j columns the residual is estimates[j] plus what rounding makes of the product A u, some eps ‖A‖ ‖u‖. Where A is
    singular the last columns lower the former and blow up the latter; the first j that is as good as any is taken.
    """
    eps = torch.finfo(g.dtype).eps
    solutions = torch.nn.functional.pad((inverse * g.unsqueeze(1)).cumsum(dim=2), (1, 0))  # column j: by j columns
    expected = estimates + 20 * rounding.unsqueeze(1) * torch.linalg.vector_norm(solutions, dim=1)
    good = expected <= (1 + min(1e4 * eps, 0.1)) * expected.amin(dim=1, keepdim=True)
    chosen = good.long().argmax(dim=1)  # the first True
    return solutions.gather(2, chosen[:, None, None].expand(-1, g.shape[1], 1)).squeeze(2)


def _rotate(Q: Tensor, k: int, c: Tensor, s: Tensor) -> None:
    """Rows k and k + 1 of Q turned by the rotation (c, s), in place."""
    upper, lower = Q[:, k].clone(), Q[:, k + 1].clone()
    Q[:, k] = batch.scale(c, upper) + batch.scale(s, lower)
    Q[:, k + 1] = batch.scale(c, lower) - batch.scale(s, upper)
