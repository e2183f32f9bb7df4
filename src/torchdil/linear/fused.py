"""Steps of CG on a GPU in as few launches as can be: what is done number by number is one kernel each.

The numbers of a step, some thirty operations on (B,) tensors, take longer to launch than to compute. These are the formulas of
`torchdil.linear.cg` once more, in the language of the device, compiled when they are first needed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.solution import Status

# A comparison with NaN is false: written so that NaN of a curvature gets through, as in torch.maximum and torch.minimum.
_ALONG = """
template <typename T> void along(
    T pq, T p_norm2, T rz, T largest, T least, T running, T status, T eps, T negative, T flat,
    T& alpha, T& largest_now, T& least_now, T& moved, T& status_now
) {
    T curvature = pq / p_norm2;
    T size = curvature < 0 ? -curvature : curvature;
    largest_now = (running != 0 && !(size <= largest)) ? size : largest;
    T floor = 10 * eps * largest_now;
    T lower = curvature >= least ? least : curvature;
    bool ended = running != 0 && lower <= floor && floor < INFINITY;
    bool moves = running != 0 && !ended;
    alpha = moves ? rz / pq : T(0);
    least_now = moves ? lower : least;
    moved = moves ? T(1) : T(0);
    status_now = ended ? (curvature < -floor ? negative : flat) : status;
}
"""
_MOVE = """
template <typename T> void move(T x, T r, T p, T q, T alpha, T& x_now, T& r_now) {
    x_now = x + alpha * p;
    r_now = r - alpha * q;
}
"""
_TURN = """
template <typename T> void turn(
    T rr, T rz, T p_norm2, T tolerance, T moved, T status, T steps, T converged,
    T& residual, T& beta, T& p_norm2_now, T& running, T& status_now, T& steps_now
) {
    bool moves = moved != 0;
    residual = ::sqrt(rr);
    bool met = moves && residual <= tolerance;
    beta = moves ? rr / rz : T(0);
    p_norm2_now = rr + beta * beta * p_norm2;
    running = (moves && !met) ? T(1) : T(0);
    status_now = met ? converged : status;
    steps_now = steps + moved;
}
"""


@cache
def _kernels() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    from torch.cuda.jiterator import _create_multi_output_jit_fn as kernel

    ends = {"negative": float(Status.negative_curvature), "flat": float(Status.breakdown)}
    return kernel(_ALONG, 5, eps=0.0, **ends), kernel(_MOVE, 2), kernel(_TURN, 6, converged=float(Status.converged))


def fused_steps(count: int, system: Callable[[Tensor], Tensor], state: Any, tolerance: Tensor, F: Tensor) -> tuple[Any, Tensor]:
    """So many steps of CG from a `_State` of tensors: the state after them, and what is noted, (count, 6, B)."""
    along, move, turn = _kernels()
    x, r, p, rz, p_norm2, largest, least, *kept = state
    running, status, taken = (part.to(rz.dtype) for part in kept)
    eps = torch.finfo(rz.dtype).eps
    notes: list[Tensor] = []
    for _ in range(count):
        q = system(p)
        pq, pF = batch.dot(p, q), batch.dot(p, F)
        alpha, largest, least, moved, status = along(pq, p_norm2, rz, largest, least, running, status, eps=eps)
        x, r = move(x, r, p, q, alpha.unsqueeze(1))
        rr = batch.dot(r, r)
        noted = alpha, p_norm2, pq, pF
        residual, beta, p_norm2, running, status, taken = turn(rr, rz, p_norm2, tolerance, moved, status, taken)
        p = torch.addcmul(r, beta.unsqueeze(1), p)
        rz = rr
        notes += (residual, *noted, beta)
    back = (part.to(old.dtype) for part, old in zip((running, status, taken), kept, strict=True))
    return type(state)(x, r, p, rz, p_norm2, largest, least, *back), torch.stack(notes).view(count, 6, -1)
