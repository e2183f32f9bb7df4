"""Linear systems with the Jacobian of the Riccati equation: discrete Lyapunov (Stein) equations, by doubling.

At a symmetric S the Riccati residual changes by J X = X - Mᵀ X M, where M = A - B K is the closed loop. Hence

    (1 + ε) X - Mᵀ X M = Y      is solved by      X = Σ_k (Mᵀ)ᵏ Y Mᵏ / (1 + ε)ᵏ⁺¹,

and Jᵀ by the same sum with Mᵀ. X ← X + Mᵀ X M, M ← M² doubles the number of terms: O(n³) a step, a few steps in all, where
a factorisation of J takes O(n⁶).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.compiled import Compiled
from torchdil.linear import Auto, LinearSolver
from torchdil.linear.auto import combine
from torchdil.linear.evidence import Structured
from torchdil.operator import Operator
from torchdil.solution import Result, Stats, Status

# 2⁴⁰ terms: a closed loop that close to the unit circle cannot be told from one on it.
_MOST_DOUBLINGS = 40
# Doublings between two looks at the powers of M on an accelerator, where each look is a synchronisation; and before the first,
# which are one CUDA graph.
_LOOK_EVERY = 3
AT_ONCE = 9


@dataclass(frozen=True)
class Stein(LinearSolver):
    """The default linear solver of `dare`: direct, O(n³) a sample, all samples together.

    The residual may reach rtol ‖rhs‖ plus what rounding leaves, 100 n eps (1 + ‖M‖²) ‖X‖ (but not more than eps^(1/3) ‖rhs‖).
    Samples whose closed loop is not stable are solved by `Auto`. Of the base's fields, `preconditioner` and `product` are for
    those; `max_steps` is the most doublings (None: 40).

    Example:
        >>> dil.control.dare(A, B, Q, R, linear_solver=dil.control.Stein(damping=1e-6))
    """

    only = "dare"

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        if operator.bound is None:  # the matrices are out of reach
            return self._otherwise(operator, rhs, start, transpose)
        operator.check_unchanged()
        with torch.no_grad():
            S, A, B, _, R = matrices(operator.y, operator.bound[1])
            M = closed_loop(S, A, B, R)[0]
            loop = Loop(M.mT if transpose else M, self.damping, self.max_steps or _MOST_DOUBLINGS)
            Y = rhs.reshape(M.shape)
            X, stable, doublings = loop.solve(Y)
            size = 1 + self.damping + batch.norm(loop.M.flatten(1)).square()
            left = loop.remainder(X, Y)
            remainder = batch.norm(left.flatten(1))
            left = left + self.damping * X  # without damping
            allowed = self.tolerance(rhs) + self.attainable(M.shape[1] * size, X.flatten(1), rhs)
            whole = batch.finite(rhs) & size.isfinite()
            # NaN is not small either: what is left are samples that doubling could not do, and those that are not finite.
            solved = stable & (remainder <= allowed)
        status = torch.where(whole, int(Status.breakdown), int(Status.non_finite))
        stats = Stats(
            method="Stein",
            steps=torch.where(batch.norm(rhs) > 0, doublings, 0),
            residual=torch.where(whole, remainder, torch.nan),
            tolerance=allowed,
            evidence=Structured(loop.again, loop.transposed, left.flatten(1), operator.watched if transpose else None),
            verified=True,
        )
        value = batch.select(whole, X.flatten(1), torch.full_like(rhs, torch.nan))
        result = Result(value, torch.where(solved, int(Status.converged), status), stats)
        rest = whole & ~solved
        if not bool(rest.any()):
            return result
        other = self._otherwise(operator, torch.where(rest.unsqueeze(1), rhs, 0.0), None, transpose)
        return combine(result, other, rest)

    def _otherwise(self, operator: Operator, rhs: Tensor, start: Tensor | None, transpose: bool) -> Result:
        settings = {f.name: getattr(self, f.name) for f in fields(LinearSolver)}
        return Auto(**settings).solve(operator, rhs, start, transpose=transpose)


@dataclass
class Loop:
    """(1 + ε) X - Mᵀ X M = Y for B samples.

    Attributes:
        M: (B, n, n).
        damping: ε.
        most: the most doublings.
    """

    M: Tensor
    damping: float = 0.0
    most: int = _MOST_DOUBLINGS

    def solve(self, Y: Tensor) -> tuple[Tensor, Tensor, int]:
        """X, (B, n, n), which samples the sum converged for, (B,), and how many doublings were made."""
        shrink = 1 / (1 + self.damping)
        X, M = (Y * shrink, self.M * math.sqrt(shrink)) if self.damping else (Y, self.M)
        every = look_every(Y.device)
        small, taken = torch.finfo(Y.dtype).eps ** 0.5, 0
        if Y.is_cuda and self.most > AT_ONCE:
            (X, M), taken = Compiled(_doublings, None, _doublings)(X, M), AT_ONCE
        total, running = torch.empty_like(X), torch.arange(len(X), device=X.device)
        converged = torch.zeros_like(running, dtype=torch.bool)
        while True:
            if taken % every == 0 or taken >= self.most:
                left = batch.norm(M.flatten(1))  # what is not summed yet is Mᵀ X M of the whole sum
                short = left > small
                number = int(short.sum()) if taken < self.most else 0
                if 2 * number <= len(M):  # the others need not go on
                    total[running], converged[running] = X, left <= small
                    if not number:
                        return total, converged, taken
                    running, X, M = (t[short] for t in (running, X, M))
            X, M = _doubling(X, M)
            taken += 1

    def again(self, b: Tensor) -> Tensor:
        """X without damping, for another right-hand side, (B, n²) each."""
        return Loop(self.M).solve(b.reshape(self.M.shape))[0].flatten(1)

    def transposed(self, b: Tensor) -> Tensor:
        """Likewise with Mᵀ."""
        return Loop(self.M.mT).again(b)

    def remainder(self, X: Tensor, Y: Tensor) -> Tensor:
        """Y - (1 + ε) X + Mᵀ X M."""
        return torch.baddbmm(Y - (1 + self.damping) * X, torch.bmm(self.M.mT, X), self.M)


def _doubling(X: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    return torch.baddbmm(X, torch.bmm(M.mT, X), M), torch.bmm(M, M)


def _doublings(X: Tensor, M: Tensor) -> tuple[Tensor, Tensor]:
    for _ in range(AT_ONCE):
        X, M = _doubling(X, M)
    return X, M


def look_every(device: torch.device) -> int:
    """After how many doublings it is worth a look at what they have led to."""
    return 1 if device.type == "cpu" else _LOOK_EVERY


def is_stable(M: Tensor) -> Tensor:
    """Which matrices have all eigenvalues inside the unit circle, (B,): a power of theirs is less than 1."""
    every = look_every(M.device)
    if M.is_cuda:
        (M,) = Compiled(_powers, None, _powers)(M)
    for step in range(_MOST_DOUBLINGS):
        if step:
            M = torch.bmm(M, M)
        size = batch.norm(M.flatten(1))
        if step % every == 0 and not bool(((size >= 1) & size.isfinite()).any()):
            break
    return size < 1


def _powers(M: Tensor) -> tuple[Tensor]:
    for _ in range(AT_ONCE):
        M = torch.bmm(M, M)
    return (M,)


def matrices(y: Tensor, args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """S, A, B, Q, R as (B, ·, ·) from their rows, (B, ·) each."""
    n = math.isqrt(y.shape[1])
    A, B, Q, R = args
    m = B.shape[1] // n
    return y.reshape(-1, n, n), A.reshape(-1, n, n), B.reshape(-1, n, m), Q.reshape(-1, n, n), R.reshape(-1, m, m)


def closed_loop(S: Tensor, A: Tensor, B: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """A - B K and K = (R + Bᵀ S B)⁻¹ Bᵀ S A, (B, n, n) and (B, m, n)."""
    BS = torch.bmm(B.mT, S)
    inner = torch.baddbmm(R, BS, B)
    # A sample whose matrix is not finite must not raise for the others, as it would in a second derivative on a GPU.
    finite = batch.finite(inner.flatten(1))[:, None, None]
    inner = torch.where(finite, inner, torch.eye(inner.shape[1], dtype=inner.dtype, device=inner.device))
    K = torch.linalg.solve_ex(inner, torch.bmm(BS, A))[0]
    return torch.baddbmm(A, B, K, alpha=-1), K
