"""The linear-quadratic regulator with a finite horizon H: the Riccati recursion.

    min  Σ_{t<H} xᵀQx + 2 xᵀNu + uᵀRu + 2 qᵀx + 2 rᵀu  +  xᵀQf x + 2 qfᵀx  at t = H,      x' = A x + B u + c.

The least cost from step t on is xᵀSx + 2 sᵀx and a constant; from S', s' of the next step, with p = S' c + s',

    G = R + BᵀS'B,   K = G⁻¹ (BᵀS'A + Nᵀ),   k = G⁻¹ (Bᵀp + r),   S = Q + AᵀS'A - KᵀG K,   s = q + Aᵀp - KᵀG k,

and u = -K x - k. Plain autograd goes through it, so derivatives of every order are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.control.plan import Rollout
from torchdil.control.shapes import apply, broadcast, check_like, check_size, states_and_controls, symmetric
from torchdil.modes import eager, full_precision, transforms_active
from torchdil.settings import check_count
from torchdil.solution import FailurePolicy, Outcome, Report, Stats, Status, check_policy, handle_failure

_REQUIRED = ("A", "B", "Q", "R")
_VECTORS = ("q", "r", "c", "qf")


@dataclass(frozen=True)
class Policy:
    """What to do in each state: u = -K x - k.

    Attributes:
        K: gains, (*batch, H, m, n).
        k: offsets, (*batch, H, m).
        S: xᵀSx + 2 sᵀx is the least cost from each step on, but for a constant, (*batch, H + 1, n, n).
        s: likewise, (*batch, H + 1, n).
        A, B, c: the dynamics, (*batch, H, n, n), (*batch, H, n, m) and (*batch, H, n).
    """

    K: Tensor
    k: Tensor
    S: Tensor
    s: Tensor
    A: Tensor
    B: Tensor
    c: Tensor

    def rollout(self, x0: Tensor) -> Rollout:
        """Follow the policy.

        Args:
            x0: where to begin, (*batch, n); leading axes broadcast.

        Returns:
            A `Rollout`: the states, (*batch, H + 1, n), and the controls, (*batch, H, m).
        """
        n, batch_shape = self.K.shape[-1], self.K.shape[:-3]
        check_like("x0", x0, self.A, 1)
        if x0.shape[-1] != n:
            raise ValueError(f"x0 must have the shape (..., {n}), got {tuple(x0.shape)}.")
        batch_shape = broadcast("x0", batch_shape, x0.shape[:-1])
        with full_precision(x0):
            xs, us = [x0.expand(*batch_shape, n)], []
            for t in range(self.K.shape[-3]):
                us.append(-apply(self.K[..., t, :, :], xs[-1]) - self.k[..., t, :])
                moved = apply(self.A[..., t, :, :], xs[-1]) + apply(self.B[..., t, :, :], us[-1])
                xs.append(moved + self.c[..., t, :])
            return Rollout(torch.stack(xs, dim=-2), torch.stack(us, dim=-2))


@eager
def lqr(
    A: Tensor,
    B: Tensor,
    Q: Tensor,
    R: Tensor,
    *,
    horizon: int | None = None,
    N: Tensor | None = None,
    q: Tensor | None = None,
    r: Tensor | None = None,
    c: Tensor | None = None,
    Qf: Tensor | None = None,
    qf: Tensor | None = None,
    on_failure: FailurePolicy = "warn",
) -> Policy:
    """The optimal policy of a linear system with quadratic cost over H steps, differentiable in everything.

    With `horizon`, matrices are (*batch, ·, ·), vectors (*batch, ·), and the same at each step. Without, the last axis before
    those is time, H steps. All leading axes broadcast, time included; the terminal `Qf` and `qf` have no time. Of Q, R and Qf
    only the symmetric parts matter.

    Args:
        A: dynamics x' = A x + B u + c: (n, n).
        B: effect of the controls: (n, m).
        Q: cost xᵀQx: (n, n).
        R: cost uᵀRu: (m, m).
        horizon: H, if the matrices do not depend on time.
        N: cost 2 xᵀNu: (n, m).
        q: cost 2 qᵀx: (n,).
        r: cost 2 rᵀu: (m,).
        c: drift: (n,).
        Qf: terminal cost xᵀQf x: (n, n); None: Q of the last step.
        qf: terminal cost 2 qfᵀx: (n,); None: q of the last step.
        on_failure: "raise", "warn" or "ignore", or "zero" / "nan" for the gradient of the samples that failed. Their policy is
            NaN.

    Returns:
        A `Policy`.

    Example:
        >>> policy = dil.control.lqr(A, B, Q, R, horizon=50)
        >>> states, controls = policy.rollout(x0)
    """
    check_count("horizon", horizon, optional=True)
    check_policy(on_failure)
    given = {"A": A, "B": B, "Q": Q, "R": R, "N": N, "q": q, "r": r, "c": c}
    final = {"Qf": Qf, "qf": qf}
    tensors: dict[str, Any] = {k: t for k, t in {**given, **final}.items() if t is not None or k in _REQUIRED}
    n, m = _check(tensors)
    shape, H = _leading(tensors, horizon)

    def timed(name: str) -> Tensor:
        """(H, *batch, ...)."""
        t, size = given[name], _size(name, n, m)
        if t is None:
            return A.new_zeros(()).expand(H, *shape, *size)
        t = t if horizon is None else t.unsqueeze(-1 - len(size))
        return t.expand(*shape, H, *size).movedim(len(shape), 0)

    with full_precision(A):
        As, Bs, Qs, Rs, Ns, qs, rs, cs = (timed(name) for name in given)
        last = (Qs[-1] if Qf is None else Qf.expand(*shape, n, n), qs[-1] if qf is None else qf.expand(*shape, n))
        parts, indefinite = _recursion(As, Bs, Qs, Rs, Ns, qs, rs, cs, *last)
        if transforms_active():  # whose tensors cannot be looked at
            return _policy(parts, As, Bs, cs)
        failed = _failed(parts, indefinite, on_failure)
        if not bool(failed.any()):
            return _policy(parts, As, Bs, cs)
        failed = failed.reshape(shape)
        if on_failure == "zero":  # zero times what is not finite would be NaN: they are worked out without their numbers
            eye = torch.eye(m, dtype=A.dtype, device=A.device)
            matrices = [_replaced(t, 2, failed, value) for t, value in ((As, 0), (Bs, 0), (Qs, 0), (Rs, eye), (Ns, 0))]
            vectors = [_replaced(t, 1, failed, 0) for t in (qs, rs, cs)]
            ends = [_replaced(t, axes, failed, 0) for t, axes in zip(last, (2, 1), strict=True)]
            parts, _ = _recursion(*matrices, *vectors, *ends)
        return _policy(_spoilt(parts, failed, on_failure), As, Bs, cs)


def _replaced(t: Tensor, axes: int, failed: Tensor, value: Tensor | float) -> Tensor:
    """t, the last `axes` of which belong to a sample, with another value for the samples that failed, (*batch,)."""
    return torch.where(failed.reshape(*failed.shape, *(1,) * axes), value, t)


def _spoilt(parts: list[list[Tensor]], failed: Tensor, on_failure: str) -> list[list[Tensor]]:
    """K, k, S and s, NaN for the samples that failed, with derivatives that are NaN or zero; the others keep theirs."""

    def spoil(t: Tensor, axes: int) -> Tensor:
        if on_failure == "zero":
            return _replaced(t, axes, failed, torch.nan)
        return t * _replaced(torch.ones((), dtype=t.dtype, device=t.device), axes, failed, torch.nan)

    return [[spoil(t, axes) for t in part] for part, axes in zip(parts, (2, 1, 2, 1), strict=True)]


def _policy(parts: list[list[Tensor]], A: Tensor, B: Tensor, c: Tensor) -> Policy:
    """From lists over time, and dynamics with time as the first axis."""
    axis = A.dim() - 3
    K, k, S, s = (torch.stack(part, dim=axis) for part in parts)
    return Policy(K, k, S, s, *(t.movedim(0, axis) for t in (A, B, c)))


def _recursion(
    A: Tensor, B: Tensor, Q: Tensor, R: Tensor, N: Tensor, q: Tensor, r: Tensor, c: Tensor, Qf: Tensor, qf: Tensor
) -> tuple[list[list[Tensor]], Tensor]:
    """K, k, S and s of each step, the first one first, and where G is not positive definite, (H, *batch)."""
    n, Q, R, S, s = A.shape[-1], symmetric(Q), symmetric(R), symmetric(Qf), qf
    found: list[list[Tensor]] = [[], [], [S], [s]]
    indefinite = []
    for t in reversed(range(len(A))):
        Bt = B[t].mT
        p = apply(S, c[t]) + s
        L, info = torch.linalg.cholesky_ex(R[t] + Bt @ S @ B[t])
        state, drift = Bt @ S @ A[t] + N[t].mT, apply(Bt, p) + r[t]
        gain = batch.cholesky_solve(torch.cat((state, drift.unsqueeze(-1)), dim=-1), L)
        gain = torch.where((info == 0)[..., None, None], gain, torch.nan)
        K, k = gain[..., :n], gain[..., n]
        S = symmetric(Q[t] + A[t].mT @ S @ A[t] - state.mT @ K)
        s = q[t] + apply(A[t].mT, p) - apply(state.mT, k)
        for part, each in zip(found, (K, k, S, s), strict=True):
            part.append(each)
        indefinite.append(info != 0)
    return [part[::-1] for part in found], torch.stack(indefinite[::-1])


def _failed(parts: list[list[Tensor]], indefinite: Tensor, on_failure: str) -> Tensor:
    """The samples without a policy, (B,), under the failure policy."""
    wrong = indefinite.reshape(len(indefinite), -1)  # (H, B)
    each = [t.isfinite().reshape(wrong.shape[1], -1).all(dim=1) if t.numel() else wrong[0] for part in parts for t in part]
    finite = torch.stack(each).all(dim=0)
    status = torch.where(wrong.any(dim=0) | ~finite, int(Status.non_finite), int(Status.converged))
    zeros = torch.zeros(status.shape, dtype=parts[1][0].dtype, device=status.device)
    stats = Stats("Riccati recursion", torch.full_like(status, len(wrong)), zeros, zeros)
    if bool((status != Status.converged).any()):
        spoilt = torch.stack([S.isnan().flatten(-2).any(dim=-1).reshape(-1) for S in parts[2][1:]])
        # G of a step is as good as the S behind it: where that is no number, something was not finite.
        indefinite_first = wrong & ~spoilt
        step = int(indefinite_first.any(dim=1).nonzero().max()) if bool(indefinite_first.any()) else 0
        own = indefinite_first.any(dim=0)
        stats.causes = [
            (f"R + Bᵀ S B is not positive definite at step {step}", own),
            ("a value of the matrices is not finite", (status != Status.converged) & ~own),
        ]
    return handle_failure("forward", Outcome(status, stats), on_failure, Report()).reshape(-1)


def _check(tensors: dict[str, Tensor]) -> tuple[int, int]:
    """n and m, or one sentence on what is wrong."""
    for name, t in tensors.items():
        check_like(name, t, tensors["A"], 1 if name in _VECTORS else 2)
    n, m = states_and_controls(tensors["B"])
    for name, t in tensors.items():
        check_size(name, t, n, m, *_size(name, n, m))
    return n, m


def _size(name: str, n: int, m: int) -> tuple[int, ...]:
    if name in _VECTORS:
        return (m,) if name == "r" else (n,)
    return (m if name == "R" else n, m if name in ("B", "R", "N") else n)


def _leading(tensors: dict[str, Tensor], horizon: int | None) -> tuple[torch.Size, int]:
    """The axes of the batch, and H; or one sentence."""
    shape = torch.Size(())
    for name, t in tensors.items():
        own = t.shape[: -1 if name in _VECTORS else -2]
        if name in ("Qf", "qf") and horizon is None:
            own = torch.Size((*own, 1))
        shape = broadcast(name, shape, own)
    if horizon is not None:
        return shape, horizon
    if not shape or not shape[-1]:
        raise ValueError("horizon must be given where no matrix has an axis of time.")
    return shape[:-1], shape[-1]
