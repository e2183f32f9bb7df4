"""Preconditioners: positive definite M ≈ A for which M⁻¹ r is cheap.

Each is built once a solve by `build(operator, transpose, damping)`, which returns the function r -> M⁻¹ r on (B, n) tensors;
any such function serves as a preconditioner too. Random probes come from a generator of their own and are the same for all
samples: results are repeatable and no sample depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil import batch
from torchdil.operator import Operator
from torchdil.settings import check_count

Preconditioner = Callable[[Tensor], Tensor]

# Up to this many unknowns all rows of J, in one batched product, cost less than a good estimate.
_EXACT_BELOW = 64


@dataclass(frozen=True)
class Jacobi:
    """M = |diag(J) + ε|: for unknowns of very different scales.

    Exact up to 64 unknowns; beyond, the mean of z ∘ (J z) over random signs z (Hutchinson), one product each, which is only as
    good as J is dominated by its diagonal.

    Attributes:
        samples: how many products to spend on the estimate.
        seed: of the random signs.

    Example:
        >>> dil.CG(preconditioner=dil.Jacobi())
    """

    samples: int = 32
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("samples", self.samples)

    def build(self, operator: Operator, transpose: bool, damping: float) -> Preconditioner:
        diagonal = operator.diagonal() if operator.shape[1] <= _EXACT_BELOW else self._estimate(operator)
        size = (diagonal + damping).abs()
        largest = size.amax(dim=1, keepdim=True)
        size = torch.maximum(size, torch.finfo(size.dtype).eps ** 0.75 * largest)
        inverse = 1 / torch.where(largest > 0, size, 1.0)
        return lambda r: inverse * r

    def _estimate(self, operator: Operator) -> Tensor:
        y = operator.y
        signs = _generator(self.seed, y)(torch.randint, 0, 2, (self.samples, y.shape[1])).to(y.dtype) * 2 - 1
        total = torch.zeros_like(y)
        for z in signs:  # Jᵀ has the same diagonal, and its products are the cheap ones
            total += z * operator.rmv(z.expand_as(y))
        return total / self.samples


@dataclass(frozen=True)
class Nystrom:
    """A randomised Nyström approximation of rank k (Frangella, Tropp and Udell 2023): for a J with few large eigenvalues.

    J ≈ U Λ Uᵀ from k products; M⁻¹ = (λ_k + ε) U (Λ + ε)⁻¹ Uᵀ + (I - U Uᵀ) flattens the k largest eigenvalues to the next.

    Attributes:
        rank: k, at most n.
        seed: of the random test vectors.

    Example:
        >>> dil.CG(damping=1e-3, preconditioner=dil.Nystrom(rank=30))
    """

    rank: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("rank", self.rank)

    def build(self, operator: Operator, transpose: bool, damping: float) -> Preconditioner:
        if not operator.symmetric:
            raise ValueError("preconditioner=Nystrom() needs a symmetric J, as of an argmin; use Jacobi() or none.")
        y = operator.y
        n = y.shape[1]
        probes = _generator(self.seed, y)(torch.randn, n, min(self.rank, n)).to(y.dtype)
        probes = torch.linalg.qr(probes)[0]
        sketch = torch.stack([operator.rmv(z.expand_as(y)) for z in probes.mT.contiguous()], dim=2)
        sketch = torch.where(batch.finite(sketch.flatten(1))[:, None, None], sketch, 0.0)  # else LAPACK raises for all
        eps = torch.finfo(y.dtype).eps
        shift = eps * torch.linalg.matrix_norm(sketch)[:, None, None]  # makes the core below safely invertible
        sketch = sketch + shift * probes
        core = probes.mT @ sketch
        values, vectors = torch.linalg.eigh((core + core.mT) / 2)
        # Directions of negative or no curvature are left out, which keeps M positive definite for any J.
        kept = values > 10 * eps * values.abs().amax(dim=1, keepdim=True)
        root = torch.where(kept, values, 1.0).rsqrt() * kept
        U, sigma, _ = torch.linalg.svd(sketch @ (vectors * root.unsqueeze(1)), full_matrices=False)
        eigenvalues = (sigma.square() - shift.squeeze(2)).clamp_min(0) + damping
        floor = (eps**0.75 * eigenvalues[:, :1]).clamp_min(torch.finfo(y.dtype).tiny)
        last = torch.maximum(eigenvalues[:, -1:], floor)
        change = (last / torch.maximum(eigenvalues, last) - 1).unsqueeze(2)
        return lambda r: r + (U @ (change * (U.mT @ r.unsqueeze(2)))).squeeze(2)


@dataclass(frozen=True)
class SecantMemory:
    """The inverse L-BFGS matrix of the secant pairs (Δy, ΔF) that the forward solver left behind: no product at all.

    Pairs without positive curvature are skipped, sample by sample; without pairs this is the identity.

    Attributes:
        history: how many of the last pairs to use.

    Example:
        >>> dil.CG(preconditioner=dil.SecantMemory())
    """

    history: int = 10

    def __post_init__(self) -> None:
        check_count("history", self.history)

    def build(self, operator: Operator, transpose: bool, damping: float) -> Preconditioner:
        pairs: list[tuple[Tensor, Tensor, Tensor]] = []
        scaling = torch.ones_like(operator.y[:, 0])
        for s, q in operator.pairs[-self.history :]:
            q = q + damping * s
            curvature = batch.dot(s, q)
            usable = curvature > 1e-8 * batch.norm(s) * batch.norm(q)  # False for NaN
            s, q = (torch.where(usable.unsqueeze(1), a, 0.0) for a in (s, q))
            pairs.append((s, q, torch.where(usable, batch.divide(torch.ones_like(curvature), curvature), 0.0)))
            scaling = torch.where(usable, batch.divide(curvature, batch.dot(q, q)), scaling)

        def apply(r: Tensor) -> Tensor:
            coefficients = []
            for s, q, inverse in reversed(pairs):
                coefficients.append(inverse * batch.dot(s, r))
                r = r - batch.scale(coefficients[-1], q)
            r = batch.scale(scaling, r)
            for (s, q, inverse), a in zip(pairs, reversed(coefficients), strict=True):
                r = r + batch.scale(a - inverse * batch.dot(q, r), s)
            return r

        return apply


def _generator(seed: int, y: Tensor) -> Callable[..., Tensor]:
    """Calls a random function of torch on y's device, with a generator of its own."""
    generator = torch.Generator(device=y.device).manual_seed(seed)
    return lambda draw, *args: draw(*args, generator=generator, device=y.device)
