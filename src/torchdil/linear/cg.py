"""Conjugate gradients: the paper's VJP_CG (Algorithm 1), per sample, preconditioned.

H g = v with H symmetric positive (semi-)definite, one product with H a step. How it differs from the textbook:
1. every sample has its own step size and stops on its own;
2. the curvature pᵀHp is compared with the largest seen: a negative one ends the sample as `negative_curvature`, one that is
   zero to rounding as `breakdown` (H is singular and v is not in its range);
3. `flexible=True` uses the Polak-Ribière β, which stays right when the preconditioner changes from step to step;
4. the coefficients are kept: they are the Lanczos tridiagonal matrix, whose eigenvalues estimate those of H for free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchdil import batch
from torchdil.linear.base import AtOnce, LinearSolver
from torchdil.linear.evidence import Steps
from torchdil.linear.fused import fused_steps
from torchdil.linear.normal_cg import NormalCG
from torchdil.linear.spectrum import Ritz
from torchdil.linear_graph import Bound
from torchdil.operator import Operator, Product
from torchdil.solution import Result, Stats, Status

# The residual that CG keeps by recurrence is off by some eps ‖A‖ ‖x‖ a step; taken so many times for safety ...
_DRIFT = 10.0
# ... or, where that is too much, as in float32, the true residual may be so many times the tolerance.
_SLACK = 10.0
# The same where late steps took products in float32.
_NEARLY = 1.1
# And then it may take longer, by one of so many steps.
_SPARE = 10
# Curvatures so many roundings of the largest are none.
_FLAT = 10
_ENDS = int(Status.negative_curvature), int(Status.breakdown)


@dataclass(frozen=True)
class CG(LinearSolver):
    """Conjugate gradients for a symmetric positive definite J (the Hessian at a minimum).

    Where J is not symmetric (a root, a fixed point) this is CG on the normal equations, as in the paper; the report says so.

    Attributes:
        flexible: use the Polak-Ribière β, for preconditioners that change.

    Example:
        >>> dil.argmin(score, y0, linear_solver=dil.CG(rtol=1e-8, damping=1e-6))
    """

    flexible: bool = False

    def at_once(self, operator: Operator, transpose: bool, expected: int) -> AtOnce | None:
        if not expected or not operator.symmetric or self.preconditioner is not None or self.flexible:
            return None

        full = self.full_steps(operator, transpose, expected)
        single = full < expected
        count = expected + (expected // _SPARE if single else 0)

        def routine(product: Bound, rhs: Tensor, F: Tensor) -> tuple[Tensor, ...]:
            tolerance, initial, eps = self.tolerance(rhs), batch.norm(rhs), torch.finfo(rhs.dtype).eps
            systems = self.systems(product, count, full if single else None)
            x, noted, positive, largest, moved = self.steps_at_once(systems, rhs, tolerance, F)
            residual = noted[-1, 0]
            good = positive & (residual <= tolerance) & (initial < torch.inf)
            if rhs.dtype == torch.float64 and not single:  # what the recurrence may be off by
                good &= _DRIFT * count * eps * largest * batch.norm(x) <= tolerance
            else:
                residual = batch.norm(rhs - systems[0](x))
                good &= residual <= (_NEARLY if single else _SLACK) * tolerance
            return x, good, moved.sum(dim=0), residual, tolerance, largest, initial, batch.norm(F), noted

        def stats(steps: Tensor, residual: Tensor, tolerance: Tensor, *noted: Tensor) -> Stats:
            largest, initial, size, notes = noted
            known = _Steps(_Many, residual, [notes])
            history = [initial, *notes[:, 0].unbind()]
            evidence = Steps(known.lengths, history, initial, largest, "orthogonal", size, known.galerkin)
            products, ritz = count + single, Ritz(known.coefficients)
            return Stats("CG", steps, residual, tolerance, products, history, ritz, evidence=evidence)

        return AtOnce(("CG", self.damping, self.rtol, self.atol, expected, full), routine, stats, single=single)

    def steps_at_once(self, systems: list[Product], rhs: Tensor, tolerance: Tensor, F: Tensor) -> tuple[Tensor, ...]:
        """Steps from zero with these p -> A p, as one function of tensors.

        Returns:
            x, (B, n); what is noted, (count, 6, B); whether all curvatures were positive and the largest of them, (B,) each;
            which samples took which steps, (count, B).
        """
        x, noted = (self._fused if rhs.is_cuda else self._bare)(systems, rhs, tolerance, F)
        _, alpha, p_norm2, pq, _, _ = noted.unbind(1)
        moved, curvature = alpha != 0, pq / p_norm2
        largest = torch.where(moved, curvature.abs(), 0.0).amax(dim=0)
        least = torch.where(moved, curvature, torch.inf).amin(dim=0)
        return x, noted, least > _FLAT * torch.finfo(rhs.dtype).eps * largest, largest, moved

    def solve(self, operator: Operator, rhs: Tensor, start: Tensor | None = None, *, transpose: bool = False) -> Result:
        if not operator.symmetric:
            shared = {f.name: getattr(self, f.name) for f in fields(LinearSolver)}
            result = NormalCG(**shared).solve(operator, rhs, start, transpose=transpose)
            result.stats.method = "CG on the normal equations"
            return result
        before = operator.products  # making a preconditioner may cost some
        system = self.system(operator, transpose)
        precondition = self.preconditioning(operator, transpose) or (lambda r: r)
        x, r = self.begin(system, rhs, start)
        z = precondition(r)
        rz = batch.dot(r, z)
        origin, initial = None if start is None else x.clone(), batch.norm(r)
        progress = self.progress(initial, rhs)
        watched = self.watched(operator, transpose)
        plain = self.preconditioner is None and not self.flexible
        linear = operator.linear(transpose) if plain and self.traces else None
        # Numbers of one problem are Python's: an operation on a tensor takes as long as a hundred on these.
        numbers: Any = _One if len(rhs) == 1 and rhs.device.type == "cpu" else _Many
        first = numbers.of(rz)
        state = _State(x, r, z.clone(), first, first, *numbers.range(rz), *(numbers.of(part) for part in progress.state))
        tolerance, F = numbers.of(progress.tolerance), r if watched is None else watched
        notes: list[Any] = []
        done = progress.finished()
        while not done:
            if linear is not None and numbers is _Many:
                count = progress.room
                operator.products += count
                *found, noted = linear.run(("CG", self.damping, count), partial(self._whole_steps, count), *state, tolerance, F)
                state = _State(*found)
                done, kept = progress.update(list(noted[:, 0].unbind()), *state[-3:])
                notes.append(noted)
            else:
                r_old = state.r.clone() if self.flexible else None
                state, moved, rr, note = _descend(numbers, system, state, tolerance, F)
                done, kept = progress.update([note[0]], *state[-3:])
                z = state.r if done else precondition(state.r)  # which may be dear, and after the last step has no use
                state, beta = _turn(numbers, state, moved, z, rr, r_old)
                notes.append((*note, beta))
            state = _State(*state[:-3], *kept)
        x, largest, least = state.x, *(numbers.tensor(number, rhs) for number in (state.largest, state.least))
        steps = _Steps(numbers, rhs, notes)
        # H is singular: near its null space a step divides by a rounding error. Where that led astray, no step is better.
        status, residual = progress.status(), progress.history[-1]
        stuck = (status == int(Status.breakdown)) | (status == int(Status.stagnated))
        astray = (least <= torch.finfo(rhs.dtype).eps * largest) | (stuck & ~(residual <= initial))
        x = x.masked_fill_(astray.unsqueeze(1), 0.0) if origin is None else batch.select(astray, origin, x)
        progress.history[-1] = torch.where(astray, initial, residual)
        method = ("preconditioned " if self.preconditioner is not None else "") + "CG"
        size = None if watched is None else batch.norm(watched)
        evidence = Steps(steps.lengths, progress.history, batch.norm(rhs), largest, "orthogonal", size, steps.galerkin)
        return self.result(x, progress, method, operator.products - before, Ritz(steps.coefficients), evidence)

    def _whole_steps(self, count: int, product: Bound, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Steps without a preconditioner, as one function of tensors: the state, and what is noted, (count, ·, B)."""
        *parts, tolerance, F = tensors
        state, noted = self._go_on(self.systems(product, count), _State(*parts), tolerance, F)
        return *state, noted

    def _go_on(self, systems: list[Product], state: _State, tolerance: Tensor, F: Tensor) -> tuple[_State, Tensor]:
        return (fused_steps if tolerance.is_cuda else plain_steps)(len(systems), systems[0], state, tolerance, F)

    def _fused(self, systems: list[Product], rhs: Tensor, tolerance: Tensor, F: Tensor) -> tuple[Tensor, Tensor]:
        """Steps from zero on a GPU, all in full precision: x, and what is noted, (count, 6, B)."""
        rr = batch.dot(rhs, rhs)
        running = rr.sqrt() > tolerance
        steps = torch.zeros_like(running, dtype=torch.long)
        status = torch.where(running, -1, int(Status.converged)).to(steps.dtype)
        start = _State(torch.zeros_like(rhs), rhs.clone(), rhs.clone(), rr, rr, *_Many.range(rr), running, status, steps)
        state, noted = self._go_on(systems, start, tolerance, F)
        return state.x, noted

    def _bare(self, systems: list[Product], rhs: Tensor, tolerance: Tensor, F: Tensor) -> tuple[Tensor, Tensor]:
        """The same on a CPU, with a third of the operations on numbers: trouble is not met, it shows in what is noted."""
        one = len(rhs) == 1
        dot: Callable[[Tensor, Tensor], Tensor] = torch.dot if one else batch.dot
        if one:  # a vector, and numbers without an axis
            rhs, F, tolerance = rhs[0], F[0], tolerance[0]
        x, r, p = torch.zeros_like(rhs), rhs.clone(), rhs
        rr = p_norm2 = dot(r, r)
        nothing, enough = torch.zeros_like(rr), (1 - 4 * torch.finfo(rr.dtype).eps) * tolerance.square()
        notes: list[Tensor] = []
        for system in systems:
            q = system(p.unsqueeze(0))[0] if one else system(p)
            pq, running = dot(p, q), rr > enough
            alpha = torch.where(running, rr / pq, nothing)
            length = alpha if one else alpha.unsqueeze(1)
            x.addcmul_(length, p)
            r.addcmul_(length, q, value=-1)
            after = dot(r, r)
            beta = torch.where(running, after / rr, nothing)
            notes += (after.sqrt(), alpha, p_norm2, pq, dot(p, F), beta)
            p_norm2 = torch.addcmul(after, beta * beta, p_norm2)
            p = torch.addcmul(r, beta if one else beta.unsqueeze(1), p)
            rr = after
        return x.unsqueeze(0) if one else x, torch.stack(notes).view(len(systems), 6, -1)


def plain_steps(count: int, system: Product, state: _State, tolerance: Tensor, F: Tensor) -> tuple[_State, Tensor]:
    """So many steps from a state of tensors: the state after them, and what is noted, (count, 6, B)."""
    notes = []
    for _ in range(count):
        state, moved, rr, note = _descend(_Many, system, state, tolerance, F)
        state, beta = _turn(_Many, state, moved, state.r, rr, None)
        notes.append(torch.stack((*note, beta)))
    return state, torch.stack(notes)


class _State(NamedTuple):
    """What one step hands to the next: x, r, p are (B, n) and changed in place, the rest are numbers, one a sample.

    Attributes:
        x, r, p: the solution so far, its residual, the direction.
        rz: rᵀz.
        p_norm2: pᵀMp by recurrence, since r is M-orthogonal to the last direction.
        largest, least: the curvatures seen.
        running, status, steps: as `Progress` has them.
    """

    x: Tensor
    r: Tensor
    p: Tensor
    rz: Any
    p_norm2: Any
    largest: Any
    least: Any
    running: Any
    status: Any
    steps: Any


class _Steps:
    """What was noted of each step: ‖r‖ after it, α, pᵀMp, pᵀAp, pᵀF and β; worked out when a report asks."""

    def __init__(self, numbers: Any, like: Tensor, notes: list[Any]):
        """`notes`: a tuple of numbers a step, or tensors (·, 6, B) of several steps."""
        self._numbers, self._like, self._notes = numbers, like[:0], notes

    def _noted(self) -> tuple[Tensor, ...]:
        """One tensor (steps, B) each."""
        if self._notes and isinstance(self._notes[0], Tensor):
            return torch.cat(self._notes).unbind(1)
        return tuple(self._numbers.stacked(noted, self._like) for noted in zip(*self._notes, strict=True))

    def coefficients(self) -> tuple[Tensor, Tensor]:
        """α and β, (steps, B)."""
        _, alpha, _, _, _, beta = self._noted()
        return alpha, beta

    def lengths(self) -> Tensor:
        """‖αp‖, (steps, B)."""
        _, alpha, p_norm2, _, _, _ = self._noted()
        return alpha * p_norm2.sqrt()

    def galerkin(self) -> Tensor:
        """‖w‖, (B,), of w = Σ p (pᵀF / pᵀAp), the solution of J w = F as far as the directions tell."""
        _, alphas, sizes, products, parts, betas = self._noted()
        square, along = torch.zeros_like(alphas[0]), torch.zeros_like(alphas[0])  # ‖w‖² and wᵀp
        for alpha, p_norm2, pq, pF, beta in zip(alphas, sizes, products, parts, betas, strict=True):
            part = torch.where(alpha != 0, pF / pq, 0.0)
            square = square + part * (2 * along + part * p_norm2)
            along = beta * (along + part * p_norm2)
        return square.clamp_min(0).sqrt()


class _Many:
    """Numbers of many samples, as (B,) tensors."""

    where, maximum, minimum, sqrt = torch.where, torch.maximum, torch.minimum, torch.sqrt
    dot, divide = batch.dot, torch.divide

    @staticmethod
    def of(t: Tensor) -> Tensor:
        return t

    @staticmethod
    def range(like: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(like), torch.full_like(like, torch.inf)

    @staticmethod
    def add(a: Tensor, c: Tensor, b: Tensor) -> None:
        """a + c b, in place of a."""
        a.addcmul_(c.unsqueeze(1), b)

    @staticmethod
    def subtract(a: Tensor, c: Tensor, b: Tensor) -> None:
        a.addcmul_(c.unsqueeze(1), b, value=-1)

    @staticmethod
    def update(p: Tensor, c: Tensor, z: Tensor) -> None:
        """z + c p, in place of p."""
        torch.addcmul(z, c.unsqueeze(1), p, out=p)

    @staticmethod
    def tensor(number: Tensor, like: Tensor) -> Tensor:
        return number

    @staticmethod
    def stacked(numbers: Sequence[Tensor], like: Tensor) -> Tensor:
        return torch.stack(tuple(numbers))


class _One:
    """Those of one sample, as numbers of Python."""

    maximum, minimum = max, min

    @staticmethod
    def where(condition: bool, a: Any, b: Any) -> Any:
        return a if condition else b

    @staticmethod
    def sqrt(a: float) -> float:
        return math.sqrt(a) if a >= 0 else math.nan

    @staticmethod
    def dot(a: Tensor, b: Tensor) -> float:
        return torch.dot(a[0], b[0]).item()

    @staticmethod
    def divide(a: float, b: float) -> float:
        return a / b if b else math.nan

    @staticmethod
    def of(t: Tensor) -> Any:
        return t.item()

    @staticmethod
    def range(like: Tensor) -> tuple[float, float]:
        return 0.0, math.inf

    @staticmethod
    def add(a: Tensor, c: float, b: Tensor) -> None:
        a.add_(b, alpha=c)

    @staticmethod
    def subtract(a: Tensor, c: float, b: Tensor) -> None:
        a.add_(b, alpha=-c)

    @staticmethod
    def update(p: Tensor, c: float, z: Tensor) -> None:
        torch.add(z, p, alpha=c, out=p)

    @staticmethod
    def tensor(number: float, like: Tensor) -> Tensor:
        return like.new_full((1,), number)

    @staticmethod
    def stacked(numbers: Sequence[float], like: Tensor) -> Tensor:
        return like.new_tensor(numbers).unsqueeze(1)


# Few operations on numbers: on an accelerator each is a launch. Done samples may divide by zero, and are masked.


def _descend(o: Any, system: Product, s: _State, tolerance: Any, F: Tensor) -> tuple[_State, Any, Any, tuple[Any, ...]]:
    """To the minimum along p; who moved, rᵀr, and what `_Steps` notes, without β."""
    q = system(s.p)
    pq = o.dot(s.p, q)
    curvature = o.divide(pq, s.p_norm2)
    largest = o.where(s.running, o.maximum(s.largest, abs(curvature)), s.largest)
    floor = _FLAT * torch.finfo(s.p.dtype).eps * largest
    lower = o.minimum(s.least, curvature)
    ended = s.running & (lower <= floor) & (floor < math.inf)
    moved = s.running ^ ended
    alpha = o.where(moved, o.divide(s.rz, pq), 0.0)
    o.add(s.x, alpha, s.p)
    o.subtract(s.r, alpha, q)
    rr = o.dot(s.r, s.r)
    residual = o.sqrt(rr)
    met = moved & (residual <= tolerance)
    status = o.where(met, int(Status.converged), o.where(ended, o.where(curvature < -floor, *_ENDS), s.status))
    least = o.where(moved, lower, s.least)
    state = s._replace(largest=largest, least=least, running=moved ^ met, status=status, steps=s.steps + moved)
    return state, moved, rr, (residual, alpha, s.p_norm2, pq, o.dot(s.p, F))


def _turn(o: Any, s: _State, moved: Any, z: Tensor, rr: Any, r_old: Tensor | None) -> tuple[_State, Any]:
    """The next direction; β."""
    rz = rr if z is s.r else o.dot(s.r, z)
    beta = o.where(moved, o.divide(rz if r_old is None else rz - o.dot(z, r_old), s.rz), 0.0)
    o.update(s.p, beta, z)
    return s._replace(rz=rz, p_norm2=rz + beta * beta * s.p_norm2), beta
