"""What Krylov coefficients and small matrices say of the extreme eigenvalues; worked out only when a report asks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import eigvalsh_tridiagonal
from torch import Tensor

from torchdil.solution import Spectrum


@dataclass
class Ritz:
    """Ritz values from CG's coefficients.

    CG's step sizes α_k and ratios β_k are the Lanczos matrix T in disguise: T_kk = 1/α_k + β_{k-1}/α_{k-1} and
    T_{k,k+1} = √β_k / α_k. Its extreme eigenvalues approach those of the operator from inside.

    Attributes:
        coefficients: gives the α and the β, (steps, B) each; α = 0 marks a sample that was done.
        squared: the operator was AᵀA; report singular values of A.
    """

    coefficients: Callable[[], tuple[Tensor, Tensor]]
    squared: bool = False

    def extremes(self) -> tuple[Tensor, Tensor]:
        alphas, betas = self.coefficients()
        like = alphas[0]
        found = (part.double().cpu().numpy().T for part in (alphas, betas))
        pairs = np.array([_extreme_ritz(a, b) for a, b in zip(*found, strict=True)])
        if self.squared:
            pairs = np.sqrt(np.maximum(pairs, 0))
        low, high = torch.as_tensor(pairs.T, dtype=like.dtype, device=like.device)
        return low, high


def _extreme_ritz(alpha: np.ndarray, beta: np.ndarray) -> tuple[float, float]:
    steps = int(np.argmin(alpha != 0)) if (alpha == 0).any() else len(alpha)
    if steps == 0 or not np.isfinite(alpha[:steps]).all():
        return float("nan"), float("nan")
    alpha, beta = alpha[:steps], np.maximum(beta[: steps - 1], 0)
    diagonal = 1 / alpha
    diagonal[1:] += beta / alpha[:-1]
    values = eigvalsh_tridiagonal(diagonal, np.sqrt(beta) / alpha[:-1])
    return float(values[0]), float(values[-1])


@dataclass
class Tridiagonal:
    """Ritz values from the Lanczos coefficients themselves (MINRES).

    Attributes:
        diagonal: one (B,) tensor a step.
        off_diagonal: one (B,) tensor a step; entry k couples steps k and k + 1.
        steps: how many steps each sample took, (B,).
    """

    diagonal: list[Tensor]
    off_diagonal: list[Tensor]
    steps: Tensor

    def extremes(self) -> tuple[Tensor, Tensor]:
        like = self.diagonal[0]
        diagonal = torch.stack(self.diagonal, dim=1).double().cpu().numpy()
        off = torch.stack(self.off_diagonal, dim=1).double().cpu().numpy()
        pairs = []
        for d, o, k in zip(diagonal, off, self.steps.tolist(), strict=True):
            known = k > 0 and np.isfinite(d[:k]).all() and np.isfinite(o[: k - 1]).all()
            values = eigvalsh_tridiagonal(d[:k], o[: k - 1]) if known else np.array([np.nan])
            # The value nearest zero, with its sign, and the largest in size: what an indefinite system's error depends on.
            pairs.append((values[np.abs(values).argmin()], values[np.abs(values).argmax()]))
        low, high = torch.as_tensor(np.array(pairs).T, dtype=like.dtype, device=like.device)
        return low, high


@dataclass
class Matrix:
    """Singular values of small matrices: J itself (Dense) or a Hessenberg matrix (GMRES).

    Attributes:
        matrix: (B, m, n).
        symmetric: report signed eigenvalues, the nearest to zero first.
    """

    matrix: Tensor
    symmetric: bool = False

    def extremes(self) -> tuple[Tensor, Tensor]:
        known = torch.isfinite(self.matrix).all(dim=2).all(dim=1)
        matrix = torch.where(known[:, None, None], self.matrix, 0.0)  # LAPACK raises on NaN, for all samples
        unknown = torch.where(known, 0.0, torch.nan).to(matrix.dtype)
        if not self.symmetric:
            values = torch.linalg.svdvals(matrix)
            return values[:, -1] + unknown, values[:, 0] + unknown
        values = torch.linalg.eigvalsh(matrix)
        low = values.gather(1, values.abs().argmin(dim=1, keepdim=True))
        high = values.gather(1, values.abs().argmax(dim=1, keepdim=True))
        return low.squeeze(1) + unknown, high.squeeze(1) + unknown


@dataclass
class Either:
    """Of each sample what the solver that solved it learnt: `second` where `mask`, else `first`."""

    mask: Tensor
    first: Spectrum
    second: Spectrum

    def extremes(self) -> tuple[Tensor, Tensor]:
        (low, high), (second_low, second_high) = self.first.extremes(), self.second.extremes()
        return torch.where(self.mask, second_low, low), torch.where(self.mask, second_high, high)
