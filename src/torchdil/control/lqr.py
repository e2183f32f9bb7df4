"""The linear-quadratic regulator with a finite horizon H: the Riccati recursion.

    min  Σ_{t<H} xᵀQx + 2 xᵀNu + uᵀRu + 2 qᵀx + 2 rᵀu  +  xᵀQf x + 2 qfᵀx  at t = H,      x' = A x + B u + c.

The least cost from step t on is xᵀSx + 2 sᵀx and a constant; from S', s' of the next step, with p = S' c + s',

    G = R + BᵀS'B,   K = G⁻¹ (BᵀS'A + Nᵀ),   k = G⁻¹ (Bᵀp + r),   S = Q + AᵀS'A - KᵀG K,   s = q + Aᵀp - KᵀG k,

and u = -K x - k. Plain autograd goes through it, so derivatives of every order are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchdil.control.shapes import broadcast, check_like, check_size, states_and_controls, symmetric
from torchdil.modes import eager, full_precision, transforms_active

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

    def rollout(self, x0: Tensor) -> tuple[Tensor, Tensor]:
        """Follow the policy.

        Args:
            x0: where to begin, (*batch, n); leading axes broadcast.

        Returns:
            The states, (*batch, H + 1, n), and the controls, (*batch, H, m).
        """
        n, batch_shape = self.K.shape[-1], self.K.shape[:-3]
        check_like("x0", x0, self.A, 1)
        if x0.shape[-1] != n:
            raise ValueError(f"x0 must have the shape (..., {n}), got {tuple(x0.shape)}.")
        batch_shape = broadcast("x0", batch_shape, x0.shape[:-1])
        with full_precision(x0):
            xs, us = [x0.expand(*batch_shape, n)], []
            for t in range(self.K.shape[-3]):
                us.append(-_apply(self.K[..., t, :, :], xs[-1]) - self.k[..., t, :])
                moved = _apply(self.A[..., t, :, :], xs[-1]) + _apply(self.B[..., t, :, :], us[-1])
                xs.append(moved + self.c[..., t, :])
            return torch.stack(xs, dim=-2), torch.stack(us, dim=-2)


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

    Returns:
        A `Policy`.

    Example:
        >>> policy = dil.control.lqr(A, B, Q, R, horizon=50)
        >>> states, controls = policy.rollout(x0)
    """
    if horizon is not None and (not isinstance(horizon, int) or isinstance(horizon, bool) or horizon < 1):
        raise ValueError(f"horizon must be an integer >= 1 or None, got {horizon!r}.")
    given = {"A": A, "B": B, "Q": Q, "R": R, "N": N, "q": q, "r": r, "c": c}
    final = {"Qf": Qf, "qf": qf}
    tensors = {name: t for name, t in {**given, **final}.items() if t is not None}
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
        Qs, Rs = symmetric(Qs), symmetric(Rs)
        S = Qs[-1] if Qf is None else symmetric(Qf).expand(*shape, n, n)
        s = qs[-1] if qf is None else qf.expand(*shape, n)
        gains, costs, indefinite = [], [(S, s)], []
        for t in reversed(range(H)):
            Bt = Bs[t].mT
            p = _apply(S, cs[t]) + s
            L, info = torch.linalg.cholesky_ex(Rs[t] + Bt @ S @ Bs[t])
            state, drift = Bt @ S @ As[t] + Ns[t].mT, _apply(Bt, p) + rs[t]
            gain = torch.cholesky_solve(torch.cat((state, drift.unsqueeze(-1)), dim=-1), L)
            K, k = gain[..., :n], gain[..., n]
            S = symmetric(Qs[t] + As[t].mT @ S @ As[t] - state.mT @ K)
            s = qs[t] + _apply(As[t].mT, p) - _apply(state.mT, k)
            gains.append((torch.where((info == 0)[..., None, None], K, torch.nan), k))
            costs.append((S, s))
            indefinite.append(info != 0)
    _check_positive(indefinite)
    K, k = (torch.stack(part[::-1], dim=len(shape)) for part in zip(*gains, strict=True))
    S, s = (torch.stack(part[::-1], dim=len(shape)) for part in zip(*costs, strict=True))
    return Policy(K, k, S, s, *(t.movedim(0, len(shape)) for t in (As, Bs, cs)))


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


def _check_positive(indefinite: list[Tensor]) -> None:
    if transforms_active():
        return  # whose tensors cannot be looked at: the gains are NaN
    wrong = torch.stack(indefinite[::-1])  # (H, *batch)
    if bool(wrong.any()):
        samples = wrong.any(dim=0).reshape(-1).nonzero().flatten().tolist()
        named = ", ".join(map(str, samples[:5])) + (", ..." if len(samples) > 5 else "")
        step = int(wrong.reshape(len(wrong), -1).any(dim=1).nonzero().max())
        raise ValueError(
            f"R + Bᵀ S B must be positive definite at each step, but is not for {len(samples)} of {wrong[0].numel()} samples "
            f"({named}), at step {step} for example."
        )


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
