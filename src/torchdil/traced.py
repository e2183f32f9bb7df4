"""Products with J that are asked for again and again, by the few operations that `linearize` leaves of them.

A layer in a training loop solves with the Jacobian of the same function time and again, only the numbers being others. After a
few solves it is traced, and from then on products are made by what is left of the trace: as a TorchScript graph on a CPU, whose
operations cost a microsecond and not ten. Tensors that the function reads are inputs of the trace, wherever it reads them from
(`captures.signature`), and everything else that it reads is part of the key under which the trace is kept.

That leaves what cannot be seen, a number in a file for example. So whoever solves with these products checks the solution by one
product of autograd, and calls `forget` if it is wrong.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from torchdil.captures import signature
from torchdil.compiled import tracing
from torchdil.linearize import Split, split

Product = Callable[[Tensor], Tensor]
# A function of a product with J and tensors.
Routine = Callable[..., tuple[Tensor, ...]]

# Solves with the Jacobian of one function before it is traced, which takes a tenth of a second, and how many are remembered.
_PATIENCE = 10
_REMEMBERED = 64


class _Memory:
    """What is known of one function: how often its Jacobian was solved with, and its traces, of J and of Jᵀ."""

    def __init__(self) -> None:
        self.solves = 0
        self.refused = False
        self.traces: dict[bool, _Trace] = {}


class _Trace:
    """A traced product, and the routines that were compiled with it."""

    def __init__(self, halves: Split, tensors: list[Tensor]):
        places = {id(t): i for i, t in enumerate(tensors)}
        # By the place in the list of what the function reads; what is not there was made by the function itself.
        self._where = [places.get(id(t), t.detach()) for t in halves.captured]
        self._halves = halves
        self._routines: dict[Hashable, Routine] = {}
        self._lock = threading.Lock()

    def prelude(self, y: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        captured = (tensors[place].detach() if isinstance(place, int) else place for place in self._where)
        return self._call("prelude", self._halves.prelude, (), (y, *captured))

    def run(self, key: Hashable, routine: Routine, saved: tuple[Tensor, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        count, linear = len(tensors), self._halves.linear

        def bound(*inputs: Tensor) -> tuple[Tensor, ...]:
            return routine(lambda p: linear(p, *inputs[count:]), *inputs[:count])

        return self._call((key, *((t.shape, t.dtype) for t in tensors)), bound, tensors, saved)

    def _call(
        self, key: Hashable, function: Routine, tensors: tuple[Tensor, ...], saved: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        with self._lock:
            if key not in self._routines:
                self._routines[key] = _scripted(function, tensors, saved)
        return self._routines[key](*tensors, *saved)


class Linear:
    """J, or Jᵀ, at a point, by a trace.

    Attributes:
        used: whether anything was computed by it.
    """

    def __init__(self, trace: _Trace, memory: _Memory, y: Tensor, tensors: list[Tensor]):
        self._trace, self._memory, self._y, self._tensors = trace, memory, y, tensors
        self._saved: tuple[Tensor, ...] | None = None

    @property
    def used(self) -> bool:
        return self._saved is not None

    def product(self, p: Tensor) -> Tensor:
        """J p, (B, n) -> (B, n)."""
        return self.run("product", lambda product, p: (product(p),), p)[0]

    def rows(self, vectors: Tensor) -> Tensor:
        """J p for k vectors at once, (k, B, n) -> (k, B, n)."""
        return self.run("rows", lambda product, vectors: (torch.func.vmap(product)(vectors),), vectors)[0]

    @torch.no_grad()
    def run(self, key: Hashable, routine: Routine, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`routine(product, *tensors)`, which must depend on nothing else but the key."""
        if self._saved is None:
            self._saved = self._trace.prelude(self._y, self._tensors)
        return self._trace.run(key, routine, self._saved, *tensors)

    def forget(self) -> None:
        """It was wrong: this function is not to be traced again."""
        self._memory.refused = True
        self._memory.traces.clear()


class Source:
    """Where a residual F comes from, so that solves with the Jacobian of the same F are recognised.

    Args:
        parts: what F depends on: the function, its arguments, the problem.
        residual: F, (B, n) -> (B, n).
        y: the point, (B, n).
        symmetric: whether J = Jᵀ.
    """

    def __init__(self, parts: Any, residual: Callable[[Tensor], Tensor], y: Tensor, symmetric: bool):
        self._memory = self._tensors = None
        self._y = y
        if (found := signature((parts, y, symmetric))) is None:
            return
        self._tensors, key = found
        with _lock:
            if key not in _memories:
                while len(_memories) >= _REMEMBERED:
                    del _memories[next(iter(_memories))]
                _memories[key] = _Memory()
            self._memory = _memories[key]
        # Traced now, when the function reads what it read for F, though it is used only in the backward pass.
        if self._memory.solves >= _PATIENCE and not self._memory.traces and not self._memory.refused:
            self._trace(residual, symmetric)

    def solved(self) -> None:
        """Count a solve."""
        if self._memory is not None:
            self._memory.solves += 1

    def linear(self, transpose: bool) -> Linear | None:
        """J, or with `transpose` Jᵀ, traced, if it is worth it."""
        if self._memory is None or (trace := self._memory.traces.get(transpose)) is None:
            return None
        return Linear(trace, self._memory, self._y, self._tensors)

    def _trace(self, residual: Callable[[Tensor], Tensor], symmetric: bool) -> None:
        def transposed(y: Tensor, p: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf = y.detach().requires_grad_()
                (product,) = torch.autograd.grad(residual(leaf), leaf, p)
            return product

        def plain(y: Tensor, p: Tensor) -> Tensor:
            with torch.enable_grad():
                leaf, u = y.detach().requires_grad_(), torch.zeros_like(p).requires_grad_()
                (w,) = torch.autograd.grad(residual(leaf), leaf, u, create_graph=True)
                (product,) = torch.autograd.grad(w, u, p)
            return product

        assert self._memory is not None and self._tensors is not None
        one = torch.ones_like(self._y)
        with tracing:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = {True: _Trace(split(transposed, self._y, one), self._tensors)}
                    found[False] = found[True] if symmetric else _Trace(split(plain, self._y, one), self._tensors)
            except Exception:  # whatever torch could not do: autograd can
                self._memory.refused = True
            else:
                self._memory.traces = found


_memories: dict[Hashable, _Memory] = {}
_lock = threading.Lock()


def _scripted(function: Routine, tensors: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> Routine:
    """The function as a TorchScript graph; itself where that cannot be."""
    if saved[0].is_cuda:
        return function

    def inputs() -> tuple[Tensor, ...]:
        return (*(t.clone() for t in tensors), *saved)  # a routine may change its tensors

    try:
        with tracing, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch, of its own TorchScript
            scripted = torch.jit.trace(function, inputs(), check_trace=False)
            for _ in range(2):  # it is optimised in its first runs
                scripted(*inputs())
    except Exception:
        return function
    return scripted
