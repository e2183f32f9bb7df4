"""Linear systems with the Jacobian of a trajectory.

J couples step n to itself, a block D_n (k x k, k = m d), and to the state before it, by -E with E = (I, ..., I)ᵀ (k x d). With
W_n = D_n⁻¹ E and P_n its last d rows, the derivative of one state by the one before,

    J x = r:     x_n = D_n⁻¹ r_n + W_n s_{n-1},        s_n = P_n s_{n-1} + (last d rows of D_n⁻¹ r_n)
    Jᵀ g = v:    g_n = D_n⁻ᵀ (v_n + L λ_{n+1}),        λ_n = P_nᵀ λ_{n+1} + W_nᵀ v_n

(L puts d numbers into the last d rows). All blocks come from k batched products with J, all inverses (factorisations, where d
is large) from one batched call; only the recursions for s and λ go from step to step, as a scan in about 2 √T launches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import LinearSolver
from torchdil.linear.rounding import left_by_rounding
from torchdil.operator import Operator, Product
from torchdil.solution import Result, Stats, Status

Solve = Callable[[Tensor], Tensor]

# Quick solves are refined so many times before the exact one is called for.
_REFINEMENTS = 12
# Up to so many steps a recursion is not worth cutting into pieces.
_SHORT = 12
# On a CPU, up to so many numbers the recursion is solved as one triangular matrix.
_TRIANGULAR = 2**16
# Beyond this size of the state the products of a scan cost more than the launches that they save.
WIDE = 16


@dataclass(frozen=True)
class Bidiagonal(LinearSolver):
    """A direct solve with the block-bidiagonal J of a trajectory.

    Attributes:
        steps: T.
        rows: m, the unknowns of a step in units of the state.
        fast: (y, transpose) -> (rhs -> x), a quick and perhaps rough solve at y, or None; x is checked and refined with J.
    """

    few_products = True
    steps: int = 1
    rows: int = 1
    fast: Callable[[Tensor, bool], Solve | None] | None = None

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        before = operator.products
        quick = None if self.fast is None or self.damping else self.fast(operator.y, transpose)
        if quick is not None:
            x, r, enough = self._refined(quick, operator.product(transpose), rhs)
            residual = batch.norm(r)
            if bool((residual <= enough).all()):
                evidence = Propagated(partial(self._quickly, operator.y), r, x, transpose, operator.watched)
                stats = self._stats(rhs, residual, enough, operator.products - before, evidence)
                stats.verified = True
                return Result(x, torch.zeros_like(stats.steps), stats)
        D = blocks(operator, self.steps, self.rows)
        whole = torch.isfinite(D).flatten(1).all(dim=1) & batch.finite(rhs)
        D = torch.where(whole[:, None, None, None], D, torch.eye(D.shape[-1], dtype=D.dtype, device=D.device))
        b = torch.where(whole[:, None], rhs, 0.0)
        factors = Factors(D, self.rows, self.damping)
        x, r, tolerance = self._directly(factors, b, transpose)
        missed = ~(batch.norm(r) <= tolerance)
        if factors.inverts and bool(missed.any()):
            # An inverse may leave more than rounding does; another factorisation is for what is badly scaled only.
            stable = Factors(D, self.rows, self.damping, invert=False)
            again = self._directly(stable, b, transpose)
            solved = missed & (batch.norm(again[1]) <= again[2])
            if bool(solved.any()):
                factors = stable
                x, r = batch.select(solved, again[0], x), batch.select(solved, again[1], r)
                tolerance = torch.where(solved, again[2], tolerance)
        residual = batch.norm(r)
        solved = (residual <= tolerance) & batch.finite(x)
        status = torch.where(solved, int(Status.converged), int(Status.breakdown))
        status = torch.where(whole, status, int(Status.non_finite))
        x = x.masked_fill(~solved[:, None], 0.0).masked_fill(~whole[:, None], torch.nan)
        evidence = Propagated(factors.solve, r, x, transpose, operator.watched)
        return Result(x, status, self._stats(rhs, residual, tolerance, operator.products - before, evidence))

    def _directly(self, factors: Factors, b: Tensor, transpose: bool) -> tuple[Tensor, Tensor, Tensor]:
        """x, what it leaves of b, and how much that may be."""
        tolerance, solve = self.tolerance(b), partial(factors.solve, transpose=transpose)
        x = solve(b)
        r = b - factors.product(x, transpose)
        missed = ~(batch.norm(r) <= tolerance)
        if bool(missed.any()):  # one step of iterative refinement
            refined = x + solve(r)
            r_refined = b - factors.product(refined, transpose)
            better = missed & (batch.norm(r_refined) < batch.norm(r))
            x, r = batch.select(better, refined, x), batch.select(better, r_refined, r)
        tolerance = tolerance + self.attainable(factors.size(), x, b)
        missed = ~(batch.norm(r) <= tolerance)
        if bool(missed.any()):
            rounding = left_by_rounding(solve, x, r, factors.sizes(x, transpose) + b.abs())
            tolerance = torch.where(missed, torch.maximum(tolerance, rounding), tolerance)
        return x, r, tolerance

    def _refined(self, quick: Solve, product: Product, rhs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x, what it leaves of rhs and what it may leave: by quick solves for what the last one left, while that falls fast."""
        x = quick(rhs)
        r = rhs - product(x)
        # The coupling alone, I - E, has norm 2.
        enough = self.tolerance(rhs) + self.attainable(torch.full_like(rhs[:, 0], 2.0), x, rhs)
        for _ in range(_REFINEMENTS):
            missed = ~(batch.norm(r) <= enough)
            if not bool(missed.any()):
                break
            better = x + quick(r)
            r_better = rhs - product(better)
            if not bool((missed & (batch.norm(r_better) <= 0.5 * batch.norm(r))).any()):
                break
            closer = missed & (batch.norm(r_better) < batch.norm(r))
            x, r = batch.select(closer, better, x), batch.select(closer, r_better, r)
        return x, r, enough

    def _quickly(self, y: Tensor, rhs: Tensor, transpose: bool) -> Tensor | None:
        quick = None if self.fast is None else self.fast(y, transpose)
        return None if quick is None else quick(rhs)

    @staticmethod
    def _stats(rhs: Tensor, residual: Tensor, tolerance: Tensor, products: int, evidence: Propagated) -> Stats:
        return Stats("Bidiagonal", (batch.norm(rhs) > 0).long(), residual, tolerance, products, evidence=evidence)


def blocks(operator: Operator, steps: int, rows: int) -> Tensor:
    """D_n for every step and sample, (B, T, k, k), from k products with Jᵀ that each serve all steps."""
    return diagonal_blocks(operator.rows(probes(operator.y, steps)), steps, rows)


def probes(y: Tensor, steps: int) -> Tensor:
    """The k vectors whose products with Jᵀ show all blocks, (k, B, n): row i of every step at once."""
    samples, n = y.shape
    k = n // steps
    return torch.eye(k, dtype=y.dtype, device=y.device).repeat(1, steps).unsqueeze(1).expand(k, samples, n)


def diagonal_blocks(found: Tensor, steps: int, rows: int) -> Tensor:
    """D_n, (B, T, k, k), from the products of the probes with Jᵀ, (k, B, n)."""
    k = found.shape[0]
    d = k // rows
    found = found.unflatten(2, (steps, k)).permute(1, 2, 0, 3)
    # Row i of step n + 1 has met the last state of step n, too, with the coefficient -1 at i modulo d.
    met = torch.eye(d, dtype=found.dtype, device=found.device).repeat(rows, 1)
    met = torch.nn.functional.pad(met, (k - d, 0))
    return torch.cat((found[:, :-1] + met, found[:, -1:]), dim=1)


class Factors:
    """The blocks D, (B, T, k, k), ready to be solved with: by inverses where the state is small, if `invert`."""

    def __init__(self, D: Tensor, rows: int, damping: float = 0.0, invert: bool = True):
        self.rows, self.d = rows, D.shape[-1] // rows
        self.inverts = invert and self.d <= WIDE
        self.D = D + damping * torch.eye(D.shape[-1], dtype=D.dtype, device=D.device) if damping else D
        # A failure shows in the residual.
        self._inverse = inverted(self.D) if self.inverts else None
        self._LU = torch.linalg.lu_factor_ex(self.D)[:2] if self._inverse is None else None

    def solve(self, r: Tensor, transpose: bool) -> Tensor:
        """x with J x = r, or Jᵀ x = r, (B, n)."""
        r = r.unflatten(1, self.D.shape[1:3])
        if self._inverse is None:
            return self._one_by_one(r, transpose).flatten(1)
        if not transpose:
            return forward_substitution(self._inverse, r, self.rows).flatten(1)
        return backward_substitution(self._inverse, r, self.rows).flatten(1)

    def _one_by_one(self, r: Tensor, transpose: bool) -> Tensor:
        """The same for a wide state, for which W would cost more than the T solves that it saves."""
        assert self._LU is not None
        k, d = self.D.shape[2], self.d
        LU, order = self._LU
        steps = list(zip(LU.unbind(1), order.unbind(1), r.unsqueeze(3).unbind(1), strict=True))
        found: list[Tensor] = []
        for LU_n, order_n, b in reversed(steps) if transpose else steps:
            if found and transpose:
                last = found[-1] if self.rows == 1 else found[-1].unflatten(1, (self.rows, d)).sum(dim=1)
                b = b + (last if self.rows == 1 else torch.nn.functional.pad(last, (0, 0, k - d, 0)))
            elif found:
                b = b + found[-1][:, k - d :].repeat(1, self.rows, 1)
            found.append(torch.linalg.lu_solve(LU_n, order_n, b, adjoint=transpose))
        return torch.cat(found[::-1] if transpose else found, dim=2).mT

    def product(self, x: Tensor, transpose: bool) -> Tensor:
        """J x or Jᵀ x, (B, n)."""
        return self._product(self.D, x, transpose)

    def sizes(self, x: Tensor, transpose: bool) -> Tensor:
        """|J| |x|, which rounding in a product with J, or Jᵀ, is proportional to, (B, n)."""
        return -self._product(-self.D.abs(), x.abs(), transpose)  # the coupling is -E

    def _product(self, D: Tensor, x: Tensor, transpose: bool) -> Tensor:
        d = self.d
        x = x.unflatten(1, D.shape[1:3])
        y = ((D.mT if transpose else D) @ x.unsqueeze(3)).squeeze(3)
        if transpose:
            y[:, :-1, -d:] -= x[:, 1:].unflatten(2, (-1, d)).sum(dim=2)
        else:
            y[:, 1:] -= x[:, :-1, -d:].repeat(1, 1, D.shape[2] // d)
        return y.flatten(1)

    def size(self) -> Tensor:
        """An estimate of ‖J‖, (B,)."""
        return torch.linalg.matrix_norm(self.D).amax(dim=1) + 1


class Propagated:
    """The errors of a solve, by solving once more for what it left (`torchdil.solution.Evidence`)."""

    def __init__(
        self,
        solve: Callable[[Tensor, bool], Tensor | None],
        remainder: Tensor,
        x: Tensor,
        transpose: bool,
        watched: Tensor | None,
    ):
        self._solve, self._remainder, self._x, self._transpose, self._watched = solve, remainder, x, transpose, watched

    def adjoint_error(self, stats: Stats) -> Tensor:
        error = self._solve(self._remainder, self._transpose)
        assert error is not None
        return batch.divide(batch.norm(error), batch.norm(self._x)).clamp_max(1.0)

    def value_error(self, stats: Stats) -> Tensor | None:
        error = None if self._watched is None else self._solve(self._watched, False)
        return None if error is None else batch.norm(error)


def inverted(D: Tensor) -> Tensor:
    """D⁻¹ of blocks (..., k, k); what cannot be inverted shows in the residual."""
    if D.shape[-1] != 2:
        return torch.linalg.inv_ex(D)[0]
    # A factorisation takes ten times as long to set up as this.
    a, b, c, d = D.flatten(-2).unbind(-1)
    return (torch.stack((d, -b, -c, a), dim=-1) / (a * d - b * c).unsqueeze(-1)).unflatten(-1, (2, 2))


def _columns(inverse: Tensor, rows: int) -> Tensor:
    """W = D⁻¹ E, (B, S, k, d), from D⁻¹, (B, S, k, k)."""
    return inverse if rows == 1 else inverse.unflatten(3, (rows, -1)).sum(dim=3)


def forward_substitution(inverse: Tensor, r: Tensor, rows: int) -> Tensor:
    """x with J x = r, (B, T, k), where S <= T inverses D⁻¹, (B, S, k, k), stand for T blocks: each for T / S neighbours."""
    d = inverse.shape[2] // rows
    W, z = _columns(inverse, rows), _each(inverse, r)
    s = _recur_each(W[..., -d:, :], z[..., -d:])
    return s if rows == 1 else z + _each(W, torch.nn.functional.pad(s[:, :-1], (0, 0, 1, 0)))


def backward_substitution(inverse: Tensor, v: Tensor, rows: int) -> Tensor:
    """g with Jᵀ g = v, (B, T, k), likewise."""
    k = inverse.shape[2]
    d = k // rows
    W = _columns(inverse, rows)
    later = _recur_each(W[..., -d:, :].mT, _each(W.mT, v), back=True)
    return later if rows == 1 else _each(inverse.mT, v + torch.nn.functional.pad(later[:, 1:], (k - d, 0, 0, 1)))


def _each(a: Tensor, x: Tensor) -> Tensor:
    """a x with the a of each step's neighbourhood, (B, S, i, j) and (B, T, j) -> (B, T, i)."""
    some, steps = a.shape[1], x.shape[1]
    if some == steps:
        return (a @ x.unsqueeze(3)).squeeze(3)
    stride = -(-steps // some)
    x = torch.nn.functional.pad(x, (0, 0, 0, some * stride - steps)).unflatten(1, (some, stride)).mT
    return (a @ x).mT.flatten(1, 2)[:, :steps]


def _recur_each(P: Tensor, z: Tensor, back: bool = False) -> Tensor:
    """`recur` with the P of each step's neighbourhood, (B, S, d, d); `back`: from the last step to the first."""
    some, steps = P.shape[1], z.shape[1]
    stride = -(-steps // some)
    if stride > 1 and z.shape[2] > WIDE:  # without a copy for each step
        each = [P_n for P_n in P.unbind(1) for _ in range(stride)][:steps]
        return _one_by_one(each[::-1], z.flip(1)).flip(1) if back else _one_by_one(each, z)
    P = P if stride == 1 else P.repeat_interleave(stride, dim=1)[:, :steps]
    return recur(P.flip(1), z.flip(1)).flip(1) if back else recur(P, z)


def recur(P: Tensor, z: Tensor) -> Tensor:
    """s_n = P_n s_{n-1} + z_n with s_{-1} = 0: (B, T, d, d) and (B, T, d) -> (B, T, d)."""
    samples, steps, d = z.shape
    if steps == 1:
        return z
    if z.device.type == "cpu" and samples * (steps * d) ** 2 <= _TRIANGULAR:
        return _triangular(P, z)
    return _scan(P, z) if steps > _SHORT and d <= WIDE else _one_by_one(P.unbind(1), z)


def _triangular(P: Tensor, z: Tensor) -> Tensor:
    """By one solve with the whole triangular matrix: few operations, for small problems."""
    samples, steps, d = z.shape
    whole = torch.zeros(samples, steps, d, steps, d, dtype=z.dtype, device=z.device)
    whole.diagonal(-1, dim1=1, dim2=3).copy_(-P[:, 1:].permute(0, 2, 3, 1))
    whole = whole.reshape(samples, steps * d, steps * d)
    s = torch.linalg.solve_triangular(whole, z.reshape(samples, steps * d, 1), upper=False, unitriangular=True)
    return s.reshape(samples, steps, d)


def _scan(P: Tensor, z: Tensor) -> Tensor:
    """By pieces of √T steps: inside them, all pieces at once, the products of the P are formed beside the sums; then the pieces
    follow one another, by `recur` again; one product puts both together.
    """
    samples, steps, d = z.shape
    length = math.isqrt(steps - 1) + 1
    pieces = -(-steps // length)
    missing = pieces * length - steps
    if missing:
        P = torch.nn.functional.pad(P, (0, 0, 0, 0, 0, missing))
        z = torch.nn.functional.pad(z, (0, 0, 0, missing))
    # (length, B·pieces, d, d) and (length, B·pieces, d, d + 1), in the order in which they are used.
    P = P.reshape(samples * pieces, length, d, d).transpose(0, 1).contiguous()
    z = torch.nn.functional.pad(z.reshape(samples * pieces, length, d, 1).transpose(0, 1), (d, 0))
    now = torch.cat((P[0], z[0, :, :, d:]), dim=2)
    both = [now]
    for P_n, z_n in zip(P.unbind(0)[1:], z.unbind(0)[1:], strict=True):
        now = torch.baddbmm(z_n, P_n, now)
        both.append(now)
    ends = now.unflatten(0, (samples, pieces))
    before = recur(ends[..., :d], ends[..., d])[:, :-1]
    before = torch.nn.functional.pad(before, (0, 0, 1, 0)).reshape(samples * pieces, d, 1)
    sums = torch.stack(both, dim=1).flatten(1, 2)  # (B·pieces, length·d, d + 1)
    s = torch.baddbmm(sums[..., d:], sums[..., :d], before)
    return s.reshape(samples, pieces * length, d)[:, :steps]


def _one_by_one(P: Sequence[Tensor], z: Tensor) -> Tensor:
    now = z[:, 0].unsqueeze(2)
    s = [now]
    for P_n, z_n in zip(P[1:], z.unsqueeze(3).unbind(1)[1:], strict=True):
        now = torch.baddbmm(z_n, P_n, now)
        s.append(now)
    return torch.cat(s, dim=2).mT
