"""Products with J that are asked for again and again, by the few operations that `linearize` leaves of them.

A layer in a training loop solves with the Jacobian of the same function time and again, only the numbers being others. After a
few solves it is traced, and from then on products are made by what is left of the trace: as a TorchScript graph on a CPU, or as
what Inductor makes of it for those who ask for that, and as a CUDA graph on a GPU. Tensors that the function reads are inputs
of the trace, wherever it reads them from (`torchdil.signature`), and everything else that it reads is part of the key under
which the trace is kept.

That leaves what cannot be seen, a number in a file for example. So F by the trace is compared with F at every point. A backward
pass that such a thing changes while F stays the same is no more than a possibility: whoever solves checks the first few
solutions, and one of each ten, by one product of autograd, and gᵀ ∂F/∂θ likewise. In doubt the trace is given up.
"""

from __future__ import annotations

import threading
import warnings
import zlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.compiled import by_inductor, fast, quietly, tracing, unless_waited_for
from torchdil.graph import partial_derivatives
from torchdil.linear_graph import Bound, add_in_place
from torchdil.linearize import Split, UntraceableError, split
from torchdil.shapes_only import shapes_only
from torchdil.signature import signature
from torchdil.step_counts import StepCounts

Residual = Callable[[Tensor], Tensor]
# A function of linear functions and tensors.
Routine = Callable[..., tuple[Tensor, ...]]
# Which linear functions: True for Jᵀ, False for J, "pull" for gᵀ ∂F/∂θ.
Parts = tuple[Hashable, ...]

# Solves with the Jacobian of one function before it is traced, which takes a tenth of a second, and how many are remembered.
_PATIENCE = 10
_REMEMBERED = 64
# So many numbers in the products of a solve make it count for one more: what takes seconds is traced after the first.
_LARGE = 2**23
# Of the solves with a trace the first so many are checked by autograd, then one of each so many: not at a fixed distance, as
# what it is looking for may come and go in turn.
_CHECKED_FIRST, _CHECKED_EVERY = 3, 10
# Tensors that are no part of what a function reads, a constant for example: so many, with so many numbers in all.
_MADE, _MADE_NUMBERS = 16, 2**10
# Of one trace so many routines are kept: one for each number of steps, and a CUDA graph has memory of its own.
_ROUTINES = 16
# With `product="compile"` what was run so often is compiled, as a number of steps that came once may not come again, unless it
# is of more numbers: then the time is that of its products, which Inductor leaves to BLAS.
_OFTEN, _SMALL = 20, 2**18


class _Memory:
    """What is known of one function: how often its Jacobian was solved with, in how many steps, and its trace."""

    def __init__(self) -> None:
        self.solves = self.next_check = 0
        self.refused = self.acquitted = False
        self.trace: _Trace | None = None
        self.counts = StepCounts()


class _Trace:
    """Jᵀp, J p and gᵀ ∂F/∂θ, traced, and the routines that were compiled with them.

    Attributes:
        parts: the linear functions, see `Parts`.
        pulled: the places, among what the function reads, of the θ that F depends on.
    """

    def __init__(self, halves: Split, tensors: list[Tensor], pulled: list[int], symmetric: bool, compiled: bool):
        places = {id(t): i for i, t in enumerate(tensors)}
        # By the place in the list of what the function reads; what is not there was made by the function itself, and is small.
        self._where: list[Any] = [places.get(id(t), t) for t in halves.captured]
        made = [t.numel() for t in self._where if isinstance(t, Tensor)]
        if len(made) > _MADE or sum(made) > _MADE_NUMBERS:
            raise UntraceableError("the function reads tensors that cannot be found")
        self._prelude, parts = halves.prelude, list(halves.parts)
        self.parts: dict[Hashable, Any] = {}
        self._places: dict[Parts, list[int]] = {}
        if len(parts) > (1 if symmetric else 2):
            self.parts["pull"] = parts.pop()
            add_in_place(self.parts["pull"])
        self.parts |= {True: parts[0], False: parts[-1]}
        self.pulled, self._to_compile = pulled, compiled
        self._routines: dict[Hashable, tuple[Routine, int]] = {}  # and how often they were run
        self._lock = threading.Lock()

    def prelude(self, y: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        captured = (tensors[at].detach() if isinstance(at, int) else at.detach() for at in self._where)
        inputs = (y, *captured)
        return self._compiled("prelude", self._prelude, (), inputs)(*inputs)

    def bound(
        self, parts: Parts, key: Hashable, routine: Routine, saved: tuple[Tensor, ...], tensors: tuple[Tensor, ...]
    ) -> Callable[..., tuple[Tensor, ...]]:
        """The function `*tensors -> routine(*functions, *tensors)` with the linear functions of those parts."""
        count, linear = len(tensors), [self.parts[part] for part in parts]
        if parts not in self._places:
            self._places[parts] = sorted({place for function in linear for place in function.places})
        places = self._places[parts]

        def plain(*inputs: Tensor) -> tuple[Tensor, ...]:
            at = dict(zip(places, inputs[count:], strict=True))
            bound = (Bound(function, [at[place] for place in function.places]) for function in linear)
            return routine(*bound, *inputs[:count])

        key = (parts, key, *((t.shape, t.dtype) for t in tensors))
        taken = tuple(saved[place] for place in places)
        compiled = self._compiled(key, plain, tensors, taken)
        return lambda *tensors: compiled(*tensors, *taken)

    def _compiled(self, key: Hashable, function: Routine, tensors: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> Routine:
        with self._lock:
            routine, runs = self._routines.pop(key, (None, 0))
        if routine is None and (routine := fast(function, tensors, saved)) is None:  # somebody else is tracing
            return function
        with self._lock:
            if self._to_compile and runs == _OFTEN and sum(t.numel() for t in (*tensors, *saved)) <= _SMALL:
                routine = self._faster(function, tensors, saved) or routine
            self._routines[key] = routine, runs + 1  # at the end, as with the traces
            if len(self._routines) > _ROUTINES:
                del self._routines[next(iter(self._routines))]
            return routine

    def _faster(self, function: Routine, tensors: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> Routine | None:
        try:
            with tracing, quietly():
                return by_inductor(function, tensors, saved)
        except Exception as error:  # a compiler that is missing, or does not take what Inductor has written
            self._to_compile = False
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            message = f"product='compile' could not compile a layer, which goes on as with 'auto': {reason}"
            warnings.warn(message, RuntimeWarning, stacklevel=2)
            return None


class TracedJacobian:
    """J, or Jᵀ, at a point, by a trace."""

    def __init__(self, source: Source, transpose: bool):
        self._source, self._transpose = source, transpose
        self._product: Callable[..., tuple[Tensor, ...]] | None = None

    def product(self, p: Tensor) -> Tensor:
        """J p, (B, n) -> (B, n)."""
        if self._product is None:  # looked up once for all steps of a solve
            with torch.no_grad():
                given = (p.contiguous(),)
                self._product = self._source.bound((self._transpose,), "product", lambda product, p: product(p), given)
        return self._product(p.contiguous())[0]

    def rows(self, vectors: Tensor) -> Tensor:
        """J p for k vectors at once, (k, B, n) -> (k, B, n)."""
        return self.run("rows", lambda product, vectors: torch.func.vmap(product)(vectors), vectors)[0]

    def run(self, key: Hashable, routine: Routine, *tensors: Tensor) -> tuple[Tensor, ...]:
        """`routine(product, *tensors)`, which must depend on nothing else but the key; `product(p)` gives a tuple of one."""
        return self._source.run((self._transpose,), key, routine, tensors)


class Source:
    """Where a residual F comes from, so that solves with the Jacobian of the same F are recognised.

    Args:
        parts: what F depends on: the function, its arguments, the problem.
        residual: F, (B, n) -> (B, n).
        y, F: the point and F there, (B, n).
        symmetric: whether J = Jᵀ.
        boundary: the tensors that gradients are wanted of; none: products with J only.
        compiled: whether to compile, on a CPU, what is often run.

    Attributes:
        used: whether anything was computed by a trace.
    """

    def __init__(
        self, parts: Any, residual: Residual, y: Tensor, F: Tensor, symmetric: bool, boundary: list[Tensor], compiled: bool
    ):
        self._compiled = compiled and y.device.type == "cpu"
        self._y, self._F, self._symmetric = y.contiguous(), F, symmetric
        self._memory: _Memory | None = None
        self._trace: _Trace | None = None
        self._tensors: list[Tensor] = []
        self._versions: list[tuple[Tensor, int]] = []
        # Fixed for this point: two backward passes through it must not differ in a bit.
        self._due, self._single = True, False
        self._expected: dict[Hashable, int] = {}
        self._saved: tuple[Tensor, ...] | None = None
        # Rounding must not depend on how often it was called before; or what is looked for is in autograd's graph.
        if torch.are_deterministic_algorithms_enabled() or torch.is_anomaly_enabled():
            return
        if getattr(_here, "tracing", False):
            return  # a layer inside the layer that is being traced
        if (found := signature((parts, self._y, symmetric, self._compiled))) is None:
            return
        self._tensors, key = found
        self._versions = [(t, t._version) for t in self._tensors if not t.is_inference()]
        with _lock:
            self._memory = _memories.pop(key, None) or _Memory()
            _memories[key] = self._memory  # at the end: those that were not used for longest are forgotten
            if len(_memories) > _REMEMBERED:
                del _memories[next(iter(_memories))]
        self._due = self._memory.solves >= self._memory.next_check
        self._single = y.dtype == torch.float64 and y.device.type == "cpu" and self._memory.counts.single
        # Traced now, when the function reads what it read for F, though it is used only in the backward pass.
        if self._memory.solves >= _PATIENCE and self._memory.trace is None and not self._memory.refused:
            self._make(residual, boundary)
        self._trace = self._memory.trace

    @property
    def used(self) -> bool:
        return self._saved is not None

    @property
    def pulls(self) -> bool:
        """Whether gᵀ ∂F/∂θ is traced."""
        return self._ready() and self._trace is not None and bool(self._trace.pulled)

    @property
    def due(self) -> bool:
        """Whether solves at this point are to be checked by autograd."""
        return self._due or self._changed()

    def solved(self) -> None:
        """Count a solve."""
        if (memory := self._memory) is not None:
            if self._due and memory.solves >= max(memory.next_check, _PATIENCE + _CHECKED_FIRST - 1):
                turn = memory.solves // _CHECKED_EVERY + 1
                memory.next_check = _CHECKED_EVERY * turn + zlib.crc32(turn.to_bytes(8, "little")) % _CHECKED_EVERY
            memory.solves += 1

    @property
    def relied(self) -> bool:
        """Whether solves before this one were not checked."""
        return self._memory is not None and self._memory.solves > _PATIENCE + _CHECKED_FIRST

    @property
    def acquitted(self) -> bool:
        """Whether a solve that failed has failed without the trace as well."""
        return self._memory is not None and self._memory.acquitted

    def acquit(self) -> None:
        """That has been seen."""
        if self._memory is not None:
            self._memory.acquitted = True

    @property
    def pull_count(self) -> int:
        """Of how many θ the trace gives gᵀ ∂F/∂θ."""
        return 0 if self._trace is None else len(self._trace.pulled)

    def expected(self, settings: Hashable) -> int:
        """In how many steps a solver with these settings is to solve as a whole; 0: step by step."""
        if settings not in self._expected and self._memory is not None:
            self._expected[settings] = self._memory.counts.expected(settings, self._y.is_cuda)
        return self._expected.get(settings, 0)

    def took(self, settings: Hashable, steps: int | Tensor, numbers: int) -> None:
        """A solver with these settings took so many steps, or so many each, by products with so many numbers in all."""
        if self._memory is None:
            return
        if self.used:
            steps = steps if isinstance(steps, int) else int(steps.max())
            self._memory.counts.took(settings, steps)
        elif self._memory.trace is None:  # products of autograd: what makes many of them counts for several solves
            patience_left = max(0, _PATIENCE - self._memory.solves)
            self._memory.solves += min(patience_left, numbers // _LARGE)

    def takes_single(self, transpose: bool) -> bool:
        """Whether late steps of a solve at once are to take products in float32, where this pays and has not failed before."""
        part = self._trace.parts[transpose or self._symmetric] if self._trace is not None and self._single else None
        return part is not None and self._saved is not None and part.takes_single(len(self._y), self._saved)

    def took_single(self, good: bool) -> None:
        """A solve with products in float32 was accurate enough, or not."""
        if self._memory is not None:
            self._memory.counts.took_single(good)

    def linear(self, transpose: bool) -> TracedJacobian | None:
        """J, or with `transpose` Jᵀ, if it is traced."""
        return TracedJacobian(self, transpose or self._symmetric) if self._ready() else None

    def pull(self, g: Tensor, boundary: list[Tensor]) -> tuple[Tensor | None, ...] | None:
        """gᵀ ∂F/∂t for each t in `boundary`, if it is traced."""
        if not self.pulls:
            return None
        try:
            return self.pulled(self.run(("pull",), None, lambda pull, g: pull(g), (g,)), boundary)
        except RuntimeError:  # out of memory, for example
            return None

    def pulled(self, found: tuple[Tensor, ...], boundary: list[Tensor]) -> tuple[Tensor | None, ...] | None:
        """What the trace of gᵀ ∂F/∂θ gives, in the order of `boundary`."""
        assert self._trace is not None
        by_id = {id(self._tensors[place]): grad for place, grad in zip(self._trace.pulled, found, strict=True)}
        return tuple(by_id[id(t)] for t in boundary) if all(id(t) in by_id for t in boundary) else None

    def bound(
        self, parts: Parts, key: Hashable, routine: Routine, tensors: tuple[Tensor, ...]
    ) -> Callable[..., tuple[Tensor, ...]]:
        """See `_Trace`; after `linear` or `pulls` only, without grad, as what it gives, which takes contiguous tensors."""
        assert self._trace is not None and self._saved is not None
        return self._trace.bound(parts, key, routine, self._saved, tensors)

    @torch.no_grad()
    def run(self, parts: Parts, key: Hashable, routine: Routine, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """`routine(*functions, *tensors)` with the linear functions of those parts."""
        tensors = tuple(t.contiguous() for t in tensors)
        return self.bound(parts, key, routine, tensors)(*tensors)

    def forget(self) -> None:
        """The trace was wrong: this function is not to be traced again."""
        if self._memory is not None:
            self._memory.refused, self._memory.trace = True, None
        self._trace = self._saved = None

    def _changed(self) -> bool:
        """Whether a tensor was changed in place since F was evaluated: autograd refuses to go on then."""
        return any(t._version != version for t, version in self._versions)

    def _ready(self) -> bool:
        """Whether there is a trace, it gives F, and what it keeps of tensors is still theirs."""
        if self._trace is not None and self._saved is None:
            self._begin(self._trace)
        return self._saved is not None and not self._changed()

    @torch.no_grad()
    def _begin(self, trace: _Trace) -> None:
        """Work out what products at this point are made with, and compare F by the trace with F."""
        try:
            self._saved = trace.prelude(self._y, self._tensors)
            F = self._saved[0].view_as(self._F)
            if not torch.equal(F, self._F) and not self._close(F):
                self.forget()
        except RuntimeError:
            self.forget()

    def _close(self, F: Tensor) -> bool:
        """Whether F is the true one to rounding, of what it is a difference of."""
        (change,) = self.run((True,), "product", lambda product, p: product(p), (self._y,))
        off, *sizes = (t.abs().amax(dim=1) for t in (F - self._F, change, self._F))
        # Not much more than rounding: a small part of F may be all that decides in some direction.
        same = (off <= torch.finfo(F.dtype).eps ** (2 / 3) * sum(sizes)) | ~batch.finite(self._F)
        return bool(same.all())

    def _make(self, residual: Residual, boundary: list[Tensor]) -> None:
        places = {id(t): i for i, t in enumerate(self._tensors)}
        # A tensor that keeps its gradient would keep that of the trace.
        known = all(id(t) in places and not (t.retains_grad and not t.is_leaf) for t in boundary)
        pulled = [places[id(t)] for t in boundary] if known else []

        def derivatives(y: Tensor, *vectors: Tensor) -> list[Sequence[Tensor]]:
            with torch.enable_grad(), shapes_only():
                leaf = y.detach().requires_grad_()
                F = residual(leaf)
                found: list[Sequence[Tensor]] = [(F.detach(),), torch.autograd.grad(F, leaf, vectors[0], retain_graph=True)]
                if not self._symmetric:
                    u = torch.zeros_like(F).requires_grad_()
                    (w,) = torch.autograd.grad(F, leaf, u, create_graph=True)
                    found.append(torch.autograd.grad(w, u, vectors[1], retain_graph=True))
                if pulled:
                    grads = partial_derivatives(F, vectors[-1], boundary, leaf, create_graph=False)
                    found.append([grad for grad in grads if grad is not None])
                    if any(grad.layout != torch.strided for grad in found[-1]):
                        raise UntraceableError("a derivative of the function is sparse")
                    if len(found[-1]) < len(boundary):  # F depended on all of them when it was evaluated before
                        raise UntraceableError("a derivative of the function cannot be found again")
            return found

        assert self._memory is not None
        vectors = [torch.ones_like(self._y) for _ in range((1 if self._symmetric else 2) + bool(pulled))]
        with unless_waited_for(self._y.is_cuda) as free:
            if not free:
                return
            _here.tracing = True
            try:
                devices = [self._y.device] if self._y.is_cuda else []
                with quietly(), torch.random.fork_rng(devices):
                    halves = split(derivatives, self._y, *vectors)
                self._memory.trace = _Trace(halves, self._tensors, pulled, self._symmetric, self._compiled)
            except Exception:  # whatever torch could not do: autograd can
                self._memory.refused = True
            finally:
                _here.tracing = False


_memories: dict[Hashable, _Memory] = {}
_lock = threading.Lock()
_here = threading.local()


def forget_all() -> None:
    """Forget all traces: what follows is rounded as in a new process."""
    with _lock:
        _memories.clear()
