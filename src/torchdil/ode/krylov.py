"""Solves with the Jacobian of a step that is too large to form, in one fast call.

The block of a step, G(Y) = Y - h Σ a f(Y), changes little from step to step, and GMRES needs about as many steps as it needed
for the last ones. So it takes as many, without a look at the numbers in between, and the whole of it is compiled
(`torchdil.compiled`). A solve that needed more is made again, one step after another; every tenth is checked by autograd.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.compiled import Compiled, memory
from torchdil.linear import GMRES
from torchdil.linear.base import LinearSolver
from torchdil.modes import saving_hooked, transforms_active
from torchdil.ode.field import Field
from torchdil.operator import Operator
from torchdil.solution import Result, Stats

# A compiled solve takes a fixed number of steps: the most that any of the last `_RECENT` solves needed. Where that falls, the
# number stays as long as it is no more than `_SPARE` above it.
_RECENT, _SPARE = 100, 2
# Compiling takes half a second: it must be worth it, so the number has to have been right for so many solves. In the call in
# which a function is first met it takes `_AT_FIRST` times as many: the function may be made anew for each call.
_PATIENCE, _AT_FIRST = 100, 10
# Once in so many solves the answer of compiled code is checked by a product of autograd's.
_CHECKED_EVERY = 10
# On a CPU, only vectors of up to so many numbers are solved with by compiled code. What that saves is Python's part in a solve,
# which is small for larger ones; and it cannot begin from a guess, as a solve step by step can.
_SMALL = 2**15
# In that check, how many times its tolerance the residual may be, since other operations make it; and how many times where the
# tolerance is no more than `_ROUNDINGS` roundings of the right-hand side, so that rounding is a part of what is compared.
_SLACK, _SLACK_OF_ROUNDING, _ROUNDINGS = 1.5, 10.0, 1e4


def at_hand(f: Field) -> bool:
    """Whether f can be differentiated by itself, by torch.func."""
    return type(f) is Field and f.functional and not transforms_active() and not saving_hooked()


def confirmed(left: Tensor, tolerance: Tensor, rhs: Tensor) -> bool:
    """Whether what a solve left of rhs, (B, n), is what it should be."""
    rounding = tolerance <= _ROUNDINGS * torch.finfo(rhs.dtype).eps * batch.norm(rhs)
    missed = ~(batch.norm(left) <= torch.where(rounding, _SLACK_OF_ROUNDING, _SLACK) * tolerance)
    return not bool((missed & torch.isfinite(tolerance)).any())


class _Needed:
    """How many steps the last solves needed, how many the next is to take, and how many solves ago that has changed.

    Args:
        block: the token of the block that asked first.
    """

    def __init__(self, block: object) -> None:
        self.block = block
        self.recent: deque[int] = deque(maxlen=_RECENT)
        self.steps = self.since = 0
        self.refused = False

    def add(self, steps: int) -> None:
        self.recent.append(steps)
        self.since += 1
        most = max(self.recent)
        if not most <= self.steps <= most + _SPARE:
            self.steps, self.since = most, 0


@dataclass(frozen=True, eq=False)
class Block:
    """G, whose Jacobian J is solved with, in one call of the user's.

    Attributes:
        func: the user's function; what is compiled is kept as long as it lives.
        key: what G depends on, besides `func` and its arguments.
        function: G(Y, *data), (B, q) -> (B, q), where data are tensors.
        gmres: solves with J where it is known how many steps that takes.
        inner: solves with it where it is not.
    """

    func: Any
    key: Hashable
    function: Callable[..., Tensor]
    gmres: GMRES
    inner: LinearSolver
    token: object = field(default_factory=object)

    def operator(self, Y: Tensor, data: tuple[Tensor, ...]) -> Operator:
        """J at Y, (B, q)."""
        return Operator(lambda u: self.function(u, *data), Y, False)

    def expected(self, transpose: bool = False) -> int:
        """How many steps the next solve will take, if the last ones did not differ much; else 0."""
        needed = self._needed(transpose)
        patience = _AT_FIRST * _PATIENCE if needed.block is self.token else _PATIENCE
        return needed.steps if needed.since >= patience and not needed.refused else 0

    def solve(
        self,
        Y: Tensor,
        data: tuple[Tensor, ...],
        rhs: Tensor,
        taken: int,
        transpose: bool = False,
        guess: Tensor | None = None,
    ) -> Result:
        """x with J x = rhs, or Jᵀ x = rhs: by so many steps of `gmres` if these suffice, or else by `inner`."""
        gmres, inner = self.gmres, self.inner
        operator = self.operator(Y, data)
        small = rhs.numel() and (rhs.is_cuda or rhs.numel() <= _SMALL)
        if not small or torch.are_deterministic_algorithms_enabled():  # rounding must not depend on calls before
            return inner.solve(operator, rhs, guess, transpose=transpose)
        needed = self._needed(transpose)
        at_once = gmres.at_once(operator, transpose, taken)
        if at_once is not None:

            def routine(Y: Tensor, rhs: Tensor, *data: Tensor) -> tuple[Tensor, ...]:
                product = _product(lambda u: self.function(u, *data), Y, transpose)
                x, good, _, residual, tolerance, history, *_ = at_once.routine(product, rhs, rhs)
                steps = (history > tolerance.unsqueeze(1)).sum(dim=1)
                return x, torch.stack((good.all().long(), steps.amax())), steps, residual, tolerance

            fast = Compiled(self.func, ("block", transpose, at_once.key, self.key), routine, patience=0)
            x, told, steps, residual, tolerance = fast(Y, rhs, *data)
            needed.refused = not fast.was_fast  # torch cannot compile it: step by step is faster then
            good, most = told.tolist()
            if good and needed.since % _CHECKED_EVERY == 0:
                good = confirmed(rhs - operator.product(transpose)(x) - gmres.damping * x, tolerance, rhs)
                if not good:  # f is not what it was
                    self.forget()
            if good:
                needed.add(most)
                stats = Stats(f"GMRES({gmres.restart})", steps, residual, tolerance, taken)
                return Result(x, torch.zeros_like(steps), stats)
            needed.since = 0
        result = inner.solve(operator, rhs, transpose=transpose)
        needed.add(int(result.stats.steps.max()))
        return result

    def _needed(self, transpose: bool) -> _Needed:
        key = ("needed", self.gmres.settings, self.key, transpose)
        needed: _Needed = memory(self.func).setdefault(key, _Needed(self.token))
        return needed

    def forget(self) -> None:
        """What was compiled is out of date."""
        memory(self.func).clear()


def _product(function: Callable[[Tensor], Tensor], Y: Tensor, transpose: bool) -> Callable[[Tensor], tuple[Tensor]]:
    """Jᵀ p from the backward pass; J p from the backward pass of that, which is linear in p."""
    _, pull = torch.func.vjp(function, Y)  # type: ignore[misc]  # annotated with three results
    return pull if transpose else torch.func.vjp(lambda p: pull(p)[0], torch.zeros_like(Y))[1]
