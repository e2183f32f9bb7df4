"""Newton's method on all steps of a trajectory at once.

Each iteration evaluates f at every step, stage and sample in one batched call and solves the block-bidiagonal system J δ = F
(`torchdil.ode.bidiagonal`). On smooth dynamics a few iterations replace T times as many, one after the other.

J need not be exact for that, as long as F is: on an even grid its blocks change slowly from step to step, so they are taken at
every q-th step and used for its neighbours: at y0 for the start, the trajectory of the linearised equation; then, for small
problems, at every step (Newton's method), for larger ones at a few, each time for several iterations.

The iteration may not contract where the dynamics are stiff, chaotic or long: then the trajectory is found step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchdil import batch
from torchdil.compiled import Compiled
from torchdil.live import LiveTable
from torchdil.ode.bidiagonal import WIDE, Bidiagonal, Factors, backward_substitution, forward_substitution, inverted, probes
from torchdil.ode.trajectory import Trajectory, sizes
from torchdil.problem import Problem
from torchdil.solution import Result, Stats, Status
from torchdil.solvers.base import Solver
from torchdil.solvers.newton import Newton

# Newton's own iteration while the blocks of all steps are at most so many numbers; beyond, blocks of every eighth step.
_EXACT_NUMBERS = 2**11
_STRIDE = 8
# Blocks of a step of more numbers than this: on a CPU one step after the other is faster.
_LARGE_NUMBERS = 2**13
# On a GPU blocks pay up to this size.
_GPU_SIZE = 1024
# Iterations that a small problem needs at least: they are taken together. A test of convergence costs more on a GPU.
_FIRST, _FIRST_ON_GPU = 2, 3
# Iterations of each step where nobody looks.
_EACH = 5
# Blocks of a few steps serve so many iterations.
_AGAIN = 4
# A residual that falls by this factor an iteration is about to be small, if it is not a large one that came down from worse.
_FAST, _NEAR = 0.2, 0.1
# A solve whose residual has not halved in three iterations is given up.
_PATIENCE = 3
_CONTRACTION = 0.5
# How far below the tolerance to go, if rounding lets: Newton's next digits are cheap, and gradients are the better for it.
_MARGIN = 0.01
_ROUNDINGS, _EXPECTED = 6, 25
_ACCEPTABLE = 0.1


class Linearised:
    """The Jacobian of a trajectory, factorised in one fast call.

    Args:
        statement: the trajectory.
        func: the user's function.
        y0: the initial state, (B, D).
        times: the grid.
    """

    def __init__(self, statement: Trajectory, func: Any, y0: Tensor, times: Tensor):
        self._statement, self._func = statement, func
        self._data = y0.detach(), times.detach()
        self._rows = len(statement.method.rows)
        self._k = self._rows * statement.state.size
        self._key = (statement.method, statement.steps, statement.field.mode, statement.state)

    @property
    def pays(self) -> bool:
        """Whether blocks are faster than a solve of each step without."""
        return self._statement.fits if self.on_cpu else self._statement.fits_up_to(_GPU_SIZE)

    @property
    def small(self) -> bool:
        """Whether the blocks of all steps are cheap to form."""
        if not self.on_cpu:
            return self._k <= WIDE
        return self._data[0].shape[0] * self._statement.steps * self._k**2 <= _EXACT_NUMBERS

    @property
    def large(self) -> bool:
        """Whether the blocks of one step are more work than Python's share in it."""
        return self._data[0].shape[0] * self._k**2 > _LARGE_NUMBERS

    @property
    def stride(self) -> int:
        """At which distance to take blocks where each stands for its neighbours."""
        return min(_STRIDE, self._statement.steps)

    @property
    def on_cpu(self) -> bool:
        """Whether the launch of an operation costs little."""
        return self._data[0].device.type == "cpu"

    @property
    def even(self) -> bool:
        """Whether all steps have the same size."""
        h = self._data[1].diff(dim=-1)
        return bool((h - h[..., :1]).abs().max() <= 0.01 * h.abs().min())

    def begin(self) -> tuple[Tensor, ...]:
        """The trajectory of the equation linearised at y0, Newton's first iterate if all states were y0 before; where blocks
        are cheap, a few more iterates behind it, in one call: y, (B, n), and how large F was before each, (3, B).
        """
        count = (_FIRST if self.on_cpu else _FIRST_ON_GPU) if self.small else 0
        return Compiled(self._func, ("begin", *self._key), lambda *inputs: self._begin(count, *inputs))(*self._data)

    def refresh(self, y: Tensor, running: Tensor, stride: int) -> tuple[Tensor, ...]:
        """One iteration with new blocks: the next y (B, n), how large F was before it (3, B), see `_measured`, and the
        inverses of the blocks."""
        fast = Compiled(self._func, ("refresh", stride, *self._key), lambda *inputs: self._refresh(stride, *inputs))
        return fast(y, running, *self._data)

    def again(self, y: Tensor, running: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """One iteration with the inverses of an earlier one."""
        fast = Compiled(self._func, ("again", *self._key), lambda *inputs: self._again(*inputs))
        new, largest = fast(y, running, *self._data, inverse)
        return new, largest, inverse

    def march(self) -> tuple[Tensor, Tensor]:
        """The trajectory step by step, each by a few iterations of Newton's method, without a look at the numbers in between:
        y, (B, n), and how large F is, (3, B).
        """
        fast = Compiled(self._func, ("step", *self._key), lambda *inputs: self._step(*inputs))
        state, times = self._data
        found: list[Tensor] = []
        for n in range(self._statement.steps):
            found.append(fast(state if n == 0 else found[-1][:, -state.shape[1] :], times[n : n + 2])[0])
        y = torch.cat(found, dim=1)
        return y, self.refresh(y, torch.zeros_like(y[:, 0], dtype=torch.bool), 1)[1]

    def solver(self, y: Tensor, transpose: bool) -> Callable[[Tensor], Tensor] | None:
        """rhs -> x with J x = rhs (or Jᵀ x = rhs) at y, not checked, rough for large blocks; None: f is not at hand alone."""
        if y.shape[0] != self._data[0].shape[0]:  # the copies of a vmap
            return None
        if self.large and self.even:
            invert = Compiled(self._func, ("invert", *self._key), lambda *inputs: self._invert(*inputs))
            (inverse,) = invert(y, *self._data)
            substitute = backward_substitution if transpose else forward_substitution
            steps = self._statement.steps
            return lambda rhs: substitute(inverse, rhs.unflatten(1, (steps, -1)), self._rows).flatten(1)
        kind = ("adjoint" if transpose else "solve", *self._key)
        fast = Compiled(self._func, kind, lambda *inputs: self._solve(transpose, *inputs))
        return lambda rhs: fast(y, rhs, *self._data)[0]

    def start(self) -> Tensor:
        """y0 at every step, (B, n)."""
        return self._data[0].repeat(1, self._rows * self._statement.steps)

    def forget(self) -> bool:
        """What was remembered of f is out of date. Whether there was a fast form."""
        return Compiled(self._func, self._key, self._again).forget()

    def _own(self, y: Tensor, times: Tensor) -> Tensor:
        return self._statement.own(self._func, self._statement.view(y), *sizes(times, y))

    def _blocks(self, y: Tensor, times: Tensor, at: slice) -> tuple[Tensor, Tensor]:
        """Of the steps `at` the part of F that is their own, (B, S, m, D), and its Jacobian, the blocks D_n, (B, S, k, k)."""
        begin, h = (a[..., at] for a in sizes(times, y))
        return self._block(self._statement.view(y)[:, at], begin, h)

    def _block(self, some: Tensor, begin: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        """The same for S steps with the unknowns `some`, (B, S, m, D), that begin at `begin` and are of size h."""
        flat = some.flatten(1)

        def part(u: Tensor) -> Tensor:
            return self._statement.own(self._func, u.reshape(some.shape), begin, h).flatten(1)

        own, pull = torch.func.vjp(part, flat)  # type: ignore[misc]  # annotated with three results
        rows = torch.vmap(pull)(probes(flat, some.shape[1]))[0]
        return own.reshape(some.shape), rows.unflatten(2, (some.shape[1], -1)).permute(1, 2, 0, 3)

    def _begin(self, count: int, state: Tensor, times: Tensor) -> tuple[Tensor, ...]:
        steps = self._statement.steps
        y = state.repeat(1, self._rows * steps)
        own, D = self._blocks(y, times, slice(1))
        F = (own - state[:, None, None]).flatten(2)
        # Both are proportional to the size of the step.
        h = times.diff(dim=-1).to(y.dtype)
        ratio = (h / h[..., :1])[..., None]
        if self.small:
            eye = torch.eye(self._k, dtype=y.dtype, device=y.device)
            D = eye + ratio[..., None] * (D - eye)
        y = y - forward_substitution(inverted(D), ratio * F, self._rows).flatten(1)
        everyone, found = torch.ones_like(y[:, 0], dtype=torch.bool), []
        for _ in range(count):
            y, largest, _ = self._refresh(1, y, everyone, state, times)
            found.append(largest)
        return y, *found

    def _refresh(self, stride: int, y: Tensor, running: Tensor, state: Tensor, times: Tensor) -> tuple[Tensor, ...]:
        own, D = self._blocks(y, times, slice(stride // 2, None, stride))
        inverse = inverted(D)
        own = own if stride == 1 else self._own(y, times)
        return *self._corrected(own, y, running, state, inverse), inverse

    def _again(self, y: Tensor, running: Tensor, state: Tensor, times: Tensor, inverse: Tensor) -> tuple[Tensor, ...]:
        return self._corrected(self._own(y, times), y, running, state, inverse)

    def _corrected(self, own: Tensor, y: Tensor, running: Tensor, state: Tensor, inverse: Tensor) -> tuple[Tensor, ...]:
        F = (own - self._statement.previous(self._statement.view(y), state).unsqueeze(2)).flatten(2)
        new = y - forward_substitution(inverse, F, self._rows).flatten(1)
        return batch.select(running, new, y), self._measured(F, y, state)

    def _measured(self, F: Tensor, y: Tensor, state: Tensor) -> Tensor:
        """The largest |F| of each sample against the largest |y| until there, (3, B): of the same component, of all, and of the
        same again.

        What comes later does not count: beside a trajectory that explodes, errors of its first steps would look small.
        """
        F, y = (self._statement.view(a).abs().amax(dim=2) for a in (F, y))
        first = torch.minimum(state.abs(), y.amax(dim=1)).unsqueeze(1)
        y = torch.maximum(y.cummax(dim=1).values, first)
        largest = y.amax(dim=2, keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)
        # A component that is small beside the others is worth half their digits at least: it may be made of them. More in the
        # last measure, which counts as long as it falls: it may also be of other units.
        eps = torch.finfo(y.dtype).eps
        units = (torch.maximum(y, eps**0.5 * largest), largest, torch.maximum(y, eps * largest))
        return torch.stack([(F / unit).flatten(1).amax(dim=1) for unit in units])

    def _step(self, y: Tensor, times: Tensor) -> tuple[Tensor, ...]:
        Y = y.repeat(1, self._rows).unflatten(1, (1, self._rows, -1))
        for _ in range(_EACH):
            own, D = self._block(Y, *sizes(times, y))
            F = (own - y[:, None, None]).flatten(2)
            Y = Y - (inverted(D) @ F.unsqueeze(3)).reshape(Y.shape)
        return (Y.flatten(1),)

    def _invert(self, y: Tensor, state: Tensor, times: Tensor) -> tuple[Tensor, ...]:
        stride = min(2 * self.stride, self._statement.steps)
        return (inverted(self._blocks(y, times, slice(stride // 2, None, stride))[1]),)

    def _solve(self, transpose: bool, y: Tensor, rhs: Tensor, state: Tensor, times: Tensor) -> tuple[Tensor, ...]:
        _, D = self._blocks(y, times, slice(None))
        return (Factors(D, self._rows).solve(rhs, transpose),)


@dataclass(frozen=True)
class WholeTrajectory(Solver):
    """Newton on all steps at once; where it does not contract, the trajectory is found step by step.

    Example:
        >>> dil.odeint(func, y0, t, solver=dil.ode.WholeTrajectory(max_steps=20))
    """

    max_steps: int = 15
    fallback: Solver | None = None
    linearised: Linearised | None = None

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        if self.linearised is None:
            result = self._newton(problem).solve(problem, y0, tolerance)
        else:
            with torch.no_grad():
                result, some_failed = self._iterate(self.linearised, y0, tolerance, self.table(problem, len(y0)))
            if not some_failed:
                return result
        failed = result.status != Status.converged
        if self.linearised is not None and not self.linearised.on_cpu and self.linearised.small and bool(failed.any()):
            result = self._march(self.linearised, result, failed)
            failed = result.status != Status.converged
        if self.fallback is None or problem.bound is None or not bool(failed.any()):
            return result
        value, status, stats = self.fallback.solve(problem, y0, tolerance)
        stats.method = f"whole trajectory, then {stats.method}"
        stats.steps = result.stats.steps + torch.where(failed, stats.steps, 0)
        return Result(batch.select(failed, value, result.value), torch.where(failed, status, result.status), stats)

    def _march(self, linearised: Linearised, result: Result, failed: Tensor) -> Result:
        """The result with those of the failed samples that a march without tests can solve, which a GPU is fast at."""
        with torch.no_grad():
            y, measured = linearised.march()
        solved = failed & (measured[1] <= _ACCEPTABLE * self.accuracy(y.dtype))
        result.stats.method = "whole trajectory, then step by step"
        status = torch.where(solved, int(Status.converged), result.status)
        return Result(batch.select(solved, y, result.value), status, result.stats)

    def resume(self, problem: Problem, y: Tensor, tolerance: Tensor) -> Result:
        far = _ACCEPTABLE * self.accuracy(y.dtype) * y.abs().amax(dim=1)
        missed = self.linearised is not None and bool((problem.evaluate(y).abs().amax(dim=1) > far).any())
        if self.linearised is not None and missed and self.linearised.forget():
            # The fast form said otherwise. Its answer, to another equation, is no start: it may lead to another root.
            return self.solve(problem, self.linearised.start(), tolerance)
        return self._newton(problem).solve(problem, y, tolerance)

    def _enough(self, dtype: torch.dtype) -> float:
        """How large F may be, see `Linearised`."""
        return max(_MARGIN * self.accuracy(dtype), _ROUNDINGS * torch.finfo(dtype).eps)

    def _iterate(self, linearised: Linearised, y: Tensor, tolerance: Tensor, table: LiveTable | None) -> tuple[Result, bool]:
        enough, acceptable = self._enough(y.dtype), _ACCEPTABLE * self.accuracy(y.dtype)
        # The estimate is high, as a rule.
        expected = max(enough, _EXPECTED * torch.finfo(y.dtype).eps)

        def small_enough(residual: Any, ratio: Any, stride: int) -> Any:
            # What the step just taken has left: r, c r, c² r with old blocks, and r, c r², ... with new ones.
            left = residual * ratio * (ratio if stride == 1 else 1)
            return (residual <= enough) | ((left <= expected) & (ratio < _FAST) & (residual < _NEAR))

        mask = torch.ones(len(y), dtype=torch.bool, device=y.device)
        # The bookkeeping is on the host, in numpy: the convergence test has to come there anyway.
        running, failed = np.ones(len(y), dtype=bool), np.zeros(len(y), dtype=bool)
        steps = np.zeros(len(y), dtype=np.int64)
        history: list[np.ndarray[Any, Any]] = []
        fine: list[np.ndarray[Any, Any]] = []
        told: list[Tensor] = []
        inverse = y
        small = linearised.small
        stride = 1 if small or not linearised.even else linearised.stride
        ahead: list[Tensor] = []
        calls = 0
        if small or stride > 1:
            y, *ahead = linearised.begin()
            calls = 1
        with np.errstate(all="ignore"):
            for k in range(self.max_steps):
                if k < len(ahead):
                    measured = ahead[k]
                    calls += 1
                elif stride > 1 and k % _AGAIN:
                    y, measured, inverse = linearised.again(y, mask, inverse)
                    calls += 1
                else:
                    # The same for every sample, whatever the others do.
                    stride = max(1, stride // 4) if k else stride
                    y, measured, inverse = linearised.refresh(y, mask, stride)
                    calls += 1 if stride == 1 else 2
                residual, overall, finer = measured.cpu().numpy()
                steps += running
                ratio = residual / history[-1] if k else np.full_like(residual, np.inf)
                stuck = ~np.isfinite(residual)
                if k > _PATIENCE + 1:
                    stuck |= ~(residual <= _CONTRACTION * history[-_PATIENCE])
                good = small_enough(residual, ratio, stride)
                # Rounding, then; but of one component far from its solution that alone is no proof.
                good |= (overall <= acceptable) & (ratio > _CONTRACTION) & ((residual <= acceptable**0.5) | stuck)
                falling = finer / fine[-1] if k else ratio
                end = small_enough(finer, falling, stride)
                # Or no more is to be had: at what rounding of the others leaves, or for long.
                if k:
                    end |= ~(falling <= _CONTRACTION) & (overall <= expected)
                if k > _PATIENCE:
                    end |= ~(finer <= _CONTRACTION * fine[-_PATIENCE])
                done = good & end
                fine.append(finer)
                failed |= running & stuck & ~good
                history.append(residual)
                told.append(measured[0])
                if table is not None:
                    table.row(k + 1, torch.from_numpy(running), measured[0])
                if k + 1 >= len(ahead) and (running & (done | stuck)).any():
                    running = running & ~done & ~stuck
                    if not running.any():
                        break
                    mask = torch.from_numpy(running).to(y.device)
        failed |= running & ~good
        if table is not None:
            table.close(f"converged {int((~failed).sum())} of {len(y)}")
        count = torch.from_numpy(steps).to(y.device)
        stats = Stats("whole trajectory", count, told[-1], tolerance, calls, told)
        status = torch.zeros_like(count)
        if failed.any():
            status = torch.where(torch.from_numpy(failed).to(y.device), int(Status.stagnated), status)
        return Result(y, status, stats), bool(failed.any())

    def _newton(self, problem: Problem) -> Newton:
        """The core's, with the same linear solver."""
        statement = problem.statement
        assert isinstance(statement, Trajectory)
        linear = Bidiagonal(steps=statement.steps, rows=len(statement.method.rows))
        return Newton(rtol=self.rtol, atol=self.atol, verbose=self.verbose, linear_solver=linear)
