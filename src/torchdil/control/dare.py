"""The discrete algebraic Riccati equation as an implicit layer.

    F(S) = S - Mᵀ S M - Kᵀ R K - Q = 0,      K = (R + Bᵀ S B)⁻¹ Bᵀ S A,      M = A - B K,

which is S = Aᵀ S A - Aᵀ S B K + Q in a form that loses no digits where S is much larger than Q. The stabilising S, for which M
has all eigenvalues inside the unit circle, is found for all samples together by structure-preserving doubling (Chu, Fan, Lin
and Wang 2004), by SciPy where that cannot be; the theorem of the core gives the gradient, `Stein` solves its linear systems.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import LinAlgError, solve_discrete_are
from torch import Tensor

from torchdil import batch
from torchdil.arguments import check_linear_solver
from torchdil.batch import Layout
from torchdil.compiled import Compiled
from torchdil.control.diagnosis import causes, is_positive
from torchdil.control.shapes import broadcast, check_like, check_size, states_and_controls, symmetric
from torchdil.control.stein import AT_ONCE, Loop, Stein, closed_loop, is_stable, look_every, matrices
from torchdil.linear import LinearSolver
from torchdil.modes import eager, full_precision
from torchdil.operator import Operator
from torchdil.problem import Call, Problem, Statement
from torchdil.solution import FailurePolicy, Report, Result, Stats, Status, check_policy
from torchdil.solve import Setting
from torchdil.solvers.base import Solver

# Doublings after which a closed loop cannot be told from one on the unit circle, and those between two looks at the samples on
# an accelerator, where each look is a synchronisation.
_MOST_DOUBLINGS = 32
# Few systems are done before.
_FIRST_LOOK = 3
# How often to square a matrix to see whether its powers go to zero: 1 - 1e-9 does, and rounding is 1e-16 of it each.
_SQUARINGS = 32
# Steps of Newton that refine an answer which is not good enough.
_REFINEMENTS = 3
# How many roundings F may be off, but not more than this part of its natural size: such an F would say nothing of S. At the
# exact S of random systems (2 to 20 states, S / Q up to 1e12), in either precision, F is mostly 0.1 to 5 such roundings.
_ROUNDINGS = 4.0
_MOST_LOST = 0.1


class RiccatiEquation(Statement):
    """F of the discrete algebraic Riccati equation; the unknown is S, row by row, `args` are the rows of A, B, Q and R.

    Args:
        batch_shape: the leading axes.
        n: states.
        guarded: F of a sample whose numbers are no good has no derivatives: zero times infinity would be NaN.
    """

    name, argument, symmetric, rowwise = "dare", "A, B, Q, R", False, True
    advice = "scale the states and controls alike, or use float64"

    def __init__(self, batch_shape: torch.Size, n: int, guarded: bool):
        super().__init__(Layout.of(torch.empty((*batch_shape, n, n), device="meta"), len(batch_shape)))
        self.guarded = guarded

    def residual(self, call: Call, y: Tensor, args: tuple[Any, ...]) -> Tensor:
        S, A, B, Q, R = matrices(y, args)
        if self.guarded:
            with torch.no_grad():
                good = batch.finite(call(S, A, B, Q, R).detach().flatten(1))[:, None, None]
            A, B, Q = (torch.where(good, t, 0.0) for t in (A, B, Q))
            R = torch.where(good, R, torch.eye(R.shape[1], dtype=R.dtype, device=R.device))
        return call(S, A, B, Q, R).flatten(1)

    def size(self, operator: Operator, y: Tensor, start: Tensor | None) -> Tensor:
        # An S that is much larger than Q leaves more roundings in F than a tolerance relative to J S has room for: those of S
        # itself, and those of M, a small difference of A and B K, in Mᵀ S M.
        change, rounding = super().size(operator, y, start), batch.norm(y)
        if operator.bound is not None:
            S, A, B, _, R = matrices(y, operator.bound[1])
            M, K = closed_loop(S, A, B, R)
            lost = batch.norm(A.flatten(1)) + batch.norm(torch.bmm(B, K).flatten(1))
            rounding = rounding + batch.norm(torch.bmm(S, M).flatten(1)) * lost
        rtol = batch.default_rtol(y.dtype)
        rounding = _ROUNDINGS * torch.finfo(y.dtype).eps / rtol * rounding
        return torch.maximum(change, torch.minimum(rounding, _MOST_LOST / rtol * change))

    def quick_size(self, y: Tensor, start: Tensor | None) -> Tensor | None:
        # J S = Q + Kᵀ R K, no less than Q where that is semidefinite, and S starts as Q.
        return None if start is None else batch.norm(start)

    def first_size(self, problem: Problem, start: Tensor) -> Tensor:
        return batch.norm(start)


def riccati_residual(S: Tensor, A: Tensor, B: Tensor, Q: Tensor, R: Tensor) -> Tensor:
    """F(S), (B, n, n)."""
    M, K = closed_loop(S, A, B, R)
    F = torch.baddbmm(S - Q, M.mT, torch.bmm(S, M), alpha=-1)
    return torch.baddbmm(F, K.mT, torch.bmm(R, K), alpha=-1)


@dataclass(frozen=True)
class Doubling(Solver):
    """Finds the stabilising S: doubling for batches and on accelerators, SciPy for one system and for what doubling cannot do.

    A sample without a stabilising S gets NaN, and its cause. An answer that is not good enough is refined by Newton's method.
    """

    max_steps: int = _MOST_DOUBLINGS

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        with torch.no_grad():
            _, A, B, Q, R = matrices(y0, _arguments(problem))
            positive, L = is_positive(R)
            alone = len(A) == 1 and A.device.type == "cpu"
            steps = torch.zeros_like(tolerance, dtype=torch.long)
            S, found = torch.full_like(Q, torch.nan), torch.zeros_like(positive)
            if alone:
                S, found = _by_scipy(S, found, positive, A, B, Q, R)
            by_scipy = alone and bool(found.all())
            if not by_scipy:
                V = torch.linalg.solve_triangular(L, B.mT, upper=False)
                find = at_once if A.is_cuda else doubled
                S, found, steps = find(A, torch.bmm(V.mT, V), Q, self.max_steps)
                # In low precision a mode that Q hardly sees may be lost, and the solution be another one.
                found = found & positive & is_stable(closed_loop(S, A, B, R)[0])
            why: list[tuple[str, Tensor]] = []
            if not bool(found.all()):
                S, found = (S, found) if alone else _by_scipy(S, found, positive, A, B, Q, R)
                why = causes(A, B, Q, R, ~found)
                S = torch.where(found[:, None, None], S, torch.nan)
        zeros = torch.zeros_like(tolerance)
        stats = Stats("SciPy" if by_scipy else "Doubling", steps, zeros, tolerance, causes=why)
        return Result(S.flatten(1), torch.where(found, int(Status.converged), int(Status.non_finite)), stats)

    def resume(self, problem: Problem, y: Tensor, tolerance: Tensor) -> Result:
        """Newton's method, and SciPy where that does not help."""
        with torch.no_grad():
            _, A, B, Q, R = matrices(y, _arguments(problem))
            S = y.reshape(A.shape)
            F = riccati_residual(S, A, B, Q, R)
            steps = torch.zeros_like(tolerance, dtype=torch.long)
            for _ in range(_REFINEMENTS):
                over = batch.norm(F.flatten(1)) > tolerance
                if not bool(over.any()):
                    break
                D, stable, _ = Loop(closed_loop(S, A, B, R)[0]).solve(F)
                S, F, better = _better(S, F, symmetric(S - D), over & stable, A, B, Q, R)
                steps = steps + better
            over = batch.norm(F.flatten(1)) > tolerance
            if bool(over.any()):
                other, found = _by_scipy(S, ~over, over, A, B, Q, R)
                S, F, _ = _better(S, F, other, over & found, A, B, Q, R)
            lost = ~batch.finite(y)
            why = causes(A, B, Q, R, lost) if bool(lost.any()) else []
        stats = Stats("Doubling, then Newton", steps, batch.norm(F.flatten(1)), tolerance, causes=why)
        return Result(S.flatten(1), torch.full_like(steps, int(Status.converged)), stats)


def doubled(A: Tensor, G: Tensor, H: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The stabilising solution of S = Aᵀ S (I + G S)⁻¹ A + H, with the samples that it was found for and their steps.

    With W = I + G H a step is A ← A W⁻¹ A, G ← G + A W⁻¹ G Aᵀ, H ← H + Aᵀ H W⁻¹ A. A goes to zero quadratically and H to S if
    there is a stabilising solution; then, and only then, do G and H converge with A to zero. G and H are symmetric.
    """
    n, every = A.shape[1], look_every(A.device)
    eye = torch.eye(n, dtype=A.dtype, device=A.device)
    S, found = torch.full_like(H, torch.nan), torch.zeros_like(A[:, 0, 0], dtype=torch.bool)
    steps, running = torch.full_like(found, most, dtype=torch.long), torch.arange(len(A), device=A.device)
    pair, H = torch.cat((A, G), dim=2), H.clone()
    for step in range(1, most + 1):
        pair, H, change = _doubling(pair, H, eye)
        if step < most and (step < _FIRST_LOOK or step % every):
            continue
        done, ended = _ended(pair, H, change)
        if not bool(ended.any()):
            continue
        S[running[ended]], found[running], steps[running] = H[ended], done, step
        if bool(ended.all()):
            break
        running, pair, H = (t[~ended] for t in (running, pair, H))
    return symmetric(S), found, steps


def at_once(A: Tensor, G: Tensor, H: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same on a GPU: so many doublings for all samples in one CUDA graph, then those that need more."""
    S, found = Compiled(_doublings, None, _doublings)(A, G, H)
    steps = torch.full_like(found, AT_ONCE, dtype=torch.long)
    rest = ~found
    if bool(rest.any()):
        S[rest], found[rest], steps[rest] = doubled(A[rest], G[rest], H[rest], most)
    return S, found, steps


def _doublings(A: Tensor, G: Tensor, H: Tensor) -> tuple[Tensor, Tensor]:
    pair, eye = torch.cat((A, G), dim=2), torch.eye(A.shape[1], dtype=A.dtype, device=A.device)
    for _ in range(AT_ONCE):
        pair, H, change = _doubling(pair, H, eye)
    return symmetric(H), _ended(pair, H, change)[0]


def _doubling(pair: Tensor, H: Tensor, eye: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """One step: A and G side by side, (B, n, 2n), H, and the change of H."""
    n = H.shape[1]
    A, G = pair.split(n, dim=2)
    X, _ = torch.linalg.solve_ex(torch.baddbmm(eye, G, H), pair)
    AX = torch.bmm(A, X)
    change = torch.bmm(A.mT, torch.bmm(H, X[:, :, :n]))
    AX[:, :, n:] = torch.baddbmm(G, AX[:, :, n:], A.mT)  # the next pair
    return AX, H + change, change


def _ended(pair: Tensor, H: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """Which samples have converged, and which are done with, (B,) each."""
    eps = torch.finfo(H.dtype).eps
    moved, size, left = (batch.norm(t.flatten(1)) for t in (change, H, pair[:, :, : H.shape[1]]))
    # The next change would be the square of this one, relatively.
    done = (moved <= eps**0.5 * size) & (left <= eps**0.25)
    return done, done | ~torch.isfinite(size + left)


def _by_scipy(S: Tensor, found: Tensor, usable: Tensor, A: Tensor, B: Tensor, Q: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """S and `found` with the samples added that SciPy can do, one by one, of those that are usable."""
    usable = usable & ~found
    for t in (A, B, Q, R):
        usable = usable & batch.finite(t.flatten(1))
    S, found = S.clone(), found.clone()
    for i in usable.nonzero().flatten().tolist():
        one = _stabilising(*(t[i].double().cpu().numpy() for t in (A, B, Q, R)))
        if one is not None:
            S[i], found[i] = torch.as_tensor(one, device=S.device), True
    return S, found


def _stabilising(A: NDArray[Any], B: NDArray[Any], Q: NDArray[Any], R: NDArray[Any]) -> NDArray[Any] | None:
    if not Q.any() and _dies_out(A):
        return np.zeros_like(Q)  # nothing to do and nothing to pay, to the last digit
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():  # numbers near the end of the dtype: the answer is looked at
            warnings.simplefilter("ignore")
            S = solve_discrete_are(A, B, Q, R)
    except (LinAlgError, ValueError):
        return None
    M = A - B @ np.linalg.solve(R + B.T @ S @ B, B.T @ S @ A)
    # A double eigenvalue on the unit circle is seen that far from it.
    inside = np.isfinite(M).all() and np.abs(np.linalg.eigvals(M)).max() < 1 - 4 * np.finfo(float).eps ** 0.5
    return 0.5 * (S + S.T) if inside else None


def _dies_out(A: NDArray[Any]) -> bool:
    """Whether the powers of A go to zero; eigenvalues alone would not tell near the unit circle, as a double one is off."""
    with np.errstate(all="ignore"):
        for _ in range(_SQUARINGS):
            A = A @ A
    return bool(np.abs(A).max() < 0.5)  # rounding has changed the size by far less


def _better(S: Tensor, F: Tensor, new: Tensor, mask: Tensor, *matrices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """S and F, replaced by the new ones in `mask` where F gets smaller; and where it does."""
    F_new = riccati_residual(new, *matrices)
    better = mask & (batch.norm(F_new.flatten(1)) < batch.norm(F.flatten(1)))
    chosen = better[:, None, None]
    return torch.where(chosen, new, S), torch.where(chosen, F_new, F), better


def _arguments(problem: Problem) -> tuple[Tensor, ...]:
    assert problem.bound is not None  # the statement is rowwise
    return tuple(t.detach() for t in problem.bound[1])


@eager
def dare(
    A: Tensor,
    B: Tensor,
    Q: Tensor,
    R: Tensor,
    *,
    linear_solver: LinearSolver | None = None,
    on_failure: FailurePolicy = "warn",
) -> Tensor:
    """The stabilising solution S of the discrete algebraic Riccati equation, differentiable in all four matrices.

    S = Aᵀ S A - Aᵀ S B (R + Bᵀ S B)⁻¹ Bᵀ S A + Q: x₀ᵀ S x₀ is the least of Σ xᵀQx + uᵀRu over all u, where x' = A x + B u. Of Q
    and R only the symmetric parts matter. Leading axes number independent systems and broadcast.

    Args:
        A: dynamics, (*batch, n, n).
        B: effect of the controls, (*batch, n, m).
        Q: cost of the states, (*batch, n, n).
        R: cost of the controls, positive definite, (*batch, m, m).
        linear_solver: solves Jᵀ g = v in the backward pass. Default: `Stein()`, O(n³); `CG()` and `Dense()` are the paper's.
        on_failure: "raise", "warn" or "ignore", or "zero" / "nan" for the gradient of the systems that failed. Their S is NaN.

    Returns:
        S, (*batch, n, n), symmetric.

    Example:
        >>> A = torch.tensor([[1.0, 0.1], [0.0, 1.0]], requires_grad=True)
        >>> S = dil.control.dare(A, torch.tensor([[0.0], [0.1]]), torch.eye(2), torch.eye(1))
        >>> S.trace().backward()
    """
    A, B, Q, R = _checked(A, B, Q, R)
    check_policy(on_failure)
    check_linear_solver(linear_solver)
    shape, n = A.shape[:-2], A.shape[-1]
    statement = RiccatiEquation(shape, n, on_failure == "zero")
    Q, R = symmetric(Q), symmetric(R)
    rows = tuple(t.reshape(shape.numel(), t.shape[-2] * t.shape[-1]) for t in (A, B, Q, R))
    setting = Setting(statement, riccati_residual, Doubling(), linear_solver or Stein(), on_failure, Report(shape))
    start = Q.detach().nan_to_num(0.0, 0.0, 0.0)
    S = setting.attached(start, rows).reshape(*shape, n, n)
    forward = setting.report.forward
    if forward is None or forward.status.shape != shape or bool(forward.converged.all()):
        return S
    # Also where a matrix was found that does not solve the equation; of the others, derivatives stay as they are.
    failed = ~forward.converged[..., None, None]
    return torch.where(failed, torch.nan, S) if on_failure == "zero" else S * torch.where(failed, torch.nan, 1.0).to(S.dtype)


@eager
def dlqr(
    A: Tensor,
    B: Tensor,
    Q: Tensor,
    R: Tensor,
    *,
    linear_solver: LinearSolver | None = None,
    on_failure: FailurePolicy = "warn",
) -> Tensor:
    """The gain K of the optimal feedback u = -K x of an infinite horizon, differentiable in all four matrices.

    K = (R + Bᵀ S B)⁻¹ Bᵀ S A with S from `dare`, whose arguments these are.

    Returns:
        K, (*batch, m, n).

    Example:
        >>> K = dil.control.dlqr(A, B, Q, R)
        >>> u = -(K @ x.unsqueeze(-1)).squeeze(-1)
    """
    S = dare(A, B, Q, R, linear_solver=linear_solver, on_failure=on_failure)
    A, B, _, R = _checked(A, B, Q, R)
    with full_precision(A):
        R, lost = symmetric(R), ~torch.isfinite(S.detach()).all(dim=-1).all(dim=-1)[..., None, None]
        if on_failure == "zero":  # K is NaN there, but its derivatives must not be
            S, A, B = (torch.where(lost, 0.0, t) for t in (S, A, B))
            R = torch.where(lost, torch.eye(R.shape[-1], dtype=R.dtype, device=R.device), R)
        K = _gain(S, A, B, R)
        return torch.where(lost, torch.nan, K) if on_failure == "zero" else K


def _gain(S: Tensor, A: Tensor, B: Tensor, R: Tensor) -> Tensor:
    """K = (R + Bᵀ S B)⁻¹ Bᵀ S A, (*batch, m, n), where R is positive definite.

    With more controls than states Bᵀ S B is singular: R alone decides there, and would lose its digits in the sum. So K is read
    off R K = Bᵀ P, P = S (A - B K), whose matrix holds the two apart; R = L Lᵀ and the size of S give all its parts one unit.
    """
    n, m = B.shape[-2:]
    size = S.detach().flatten(-2).norm(dim=-1)[..., None, None]
    size = torch.where(size > 0, size, 1.0)
    L = torch.linalg.cholesky_ex(R)[0]
    V = torch.linalg.solve_triangular(L, B.mT * size.sqrt(), upper=False)
    S = S / size
    I_m, I_n = (torch.eye(k, dtype=S.dtype, device=S.device).expand(*S.shape[:-2], k, k) for k in (m, n))
    matrix = torch.cat((torch.cat((I_m, -V), dim=-1), torch.cat((S @ V.mT, I_n), dim=-1)), dim=-2)
    rhs = torch.cat((torch.zeros_like(B.mT), S @ A * size.sqrt()), dim=-2)
    return torch.linalg.solve_triangular(L.mT, torch.linalg.solve_ex(matrix, rhs)[0][..., :m, :], upper=True)


def _checked(A: Tensor, B: Tensor, Q: Tensor, R: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The matrices with equal leading axes, or one sentence on what is wrong with them."""
    given = {"A": A, "B": B, "Q": Q, "R": R}
    for name, t in given.items():
        check_like(name, t, A, 2)
    n, m = states_and_controls(B)
    shape = torch.Size(())
    for name, t in given.items():
        check_size(name, t, n, m, m if name == "R" else n, m if name in ("B", "R") else n)
        shape = broadcast(name, shape, t.shape[:-2])
    return A.expand(*shape, n, n), B.expand(*shape, n, m), Q.expand(*shape, n, n), R.expand(*shape, m, m)
