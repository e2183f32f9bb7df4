"""The Jacobian J = ∂F/∂y at a point, matrix-free.

F maps (B, n) to (B, n) and row b of F depends on row b of y only, so J is block-diagonal and one product serves all samples.
How a product is made is a strategy, because it decides the speed of everything above it:

- "auto": "backward", until the same layer has been solved with a few times; then what a trace of it leaves (`torchdil.traced`).
- "compile": the same, and on a CPU what such a trace is often asked for is compiled by torch.compile's Inductor. That takes a
  C++ compiler and some seconds for each layer and set of shapes; it pays for small problems that are solved ten thousand times.
- "backward": `autograd.grad` on the graph of F, built once (double backward for an argmin). Works for every torch function.
- "forward": forward mode through F, re-evaluated for each product. Often the fastest on a GPU; needs forward-mode rules.
- "traced": the backward product, traced at once for this solve alone (`torchdil.linearize`). For long solves.
- "measure": time one product of each and keep the fastest; the choice is remembered for the function and the shapes.

A strategy that cannot do the function at hand falls back to "backward" without a word: the numbers are the same.
"""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.graph import Dependence, partial_derivatives, rows_by_autograd
from torchdil.linearize import split
from torchdil.traced import Source, TracedJacobian

Product = Callable[[Tensor], Tensor]
# Those that a trace is kept for from solve to solve, and those that "measure" chooses from.
KEPT, _TIMED = ("auto", "compile"), ("backward", "forward", "traced")
STRATEGIES = (*KEPT, *_TIMED, "measure")

# Of the rows of the Jacobian that are computed in one batched product: at most this many, and this many numbers. More are no
# faster, and a batched product may copy the weights for each of its rows.
_DENSE_ROWS = 128
_DENSE_CHUNK = 2**22
# Tracing costs once what is divided over the products of a solve; this many are assumed when strategies are timed.
_ASSUMED_PRODUCTS = 50

_choices: dict[Hashable, str] = {}
_choices_lock = threading.Lock()


class Operator:
    """J at `y`, with products J p (`mv`) and Jᵀ p (`rmv`).

    Args:
        residual: F, a function (B, n) -> (B, n) whose rows are independent.
        y: the point, (B, n).
        symmetric: whether J = Jᵀ (the Hessian of an argmin).
        graph: `(leaf, F(leaf))` where the graph of F at y exists already; else it is built when first needed.
        key: identifies the function for remembered choices of "measure".

    Attributes:
        products: how many products have been made.
        pairs: secant pairs (Δy, ΔF) left by the forward solver, for preconditioners that use them.
        watched: F, (B, n), where the solve with J is to learn of J⁻¹F on the side.
        bound: the user's function and its arguments, for linear solvers that know the structure of J; None under a `vmap` that
            these do not take part in row by row.
        versions: of the tensors among these arguments, when F was evaluated.
        boundary: the tensors that F depends on besides y, as far as they were found.
        memo: what such a solver has worked out at this point, for its next solve.
        factors: J and its Cholesky factor, (B, n, n) each, where the forward pass has worked them out by a trace.
        source: where F comes from, if it may be traced.
        sure: whether to make products by autograd only, whatever is traced.
    """

    def __init__(
        self,
        residual: Callable[[Tensor], Tensor],
        y: Tensor,
        symmetric: bool,
        *,
        graph: tuple[Tensor, Tensor] | None = None,
        key: Hashable = None,
    ):
        self.residual = residual
        self.y = y.detach()
        self.symmetric = symmetric
        self.products = 0
        self.pairs: list[tuple[Tensor, Tensor]] = []
        self.watched: Tensor | None = None
        self.bound: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self.versions: list[tuple[Tensor, int]] = []
        self.boundary: list[Tensor] = []
        self.memo: dict[Hashable, Any] = {}
        self.factors: tuple[Tensor, ...] = ()
        self.source: Source | None = None
        self.sure = False
        self._graph = graph
        self._key = key
        self._made: dict[tuple[str, bool], Product] = {}
        self._transposed_graph: tuple[Tensor, Tensor] | None = None

    def check_unchanged(self) -> None:
        """Raise if an argument was changed in place since, as autograd does for its graph, which such a solver goes round."""
        if any(t._version != version for t, version in self.versions):
            raise RuntimeError(
                "An argument of this implicit layer was changed in place between forward and backward: clone it first."
            )

    @property
    def shape(self) -> torch.Size:
        """(B, n)."""
        return self.y.shape

    def linear(self, transpose: bool) -> TracedJacobian | None:
        """J or Jᵀ by a trace, where there is one; to be checked, see `torchdil.traced`."""
        return None if self.source is None or self.sure else self.source.linear(transpose)

    @property
    def traced(self) -> bool:
        """Whether a trace was used."""
        return self.source is not None and self.source.used

    @contextmanager
    def surely(self) -> Iterator[None]:
        """A block in which products are made by autograd only."""
        self.sure = True
        try:
            yield
        finally:
            self.sure = False

    def wrong(self, p: Tensor, transpose: bool) -> bool:
        """Whether the trace, if one was used, gives another product than autograd; p: with rows that are not finite, or not."""
        if not self.traced:
            return False
        p = batch.select(batch.finite(p), p, torch.zeros_like(p))
        true, traced = (self.product(transpose, strategy)(p) for strategy in ("backward", "auto"))
        return _differs(true - traced, true, p.dtype)

    def stale_pull(self, F: Tensor, on: Dependence) -> bool:
        """Whether a trace gives another pᵀ ∂F/∂t than autograd for a t that F depends on; F: with its graph.

        p is random: of the gradient that is asked for, little may be left but rounding.
        """
        generator = torch.Generator(F.device).manual_seed(0)
        p = torch.randn(F.shape, generator=generator, dtype=F.dtype, device=F.device)
        found = None if self.source is None else self.source.pull(p, on.tensors)
        if found is None:
            return False
        sure = partial_derivatives(F, p, on.tensors, self.graph()[0], create_graph=False, edges=on.edges)
        for traced, true in zip(found, sure, strict=True):
            assert traced is not None
            true = torch.zeros_like(traced) if true is None else true
            if _differs(traced - true, true, p.dtype):
                return True
        return False

    def distrust(self) -> bool:
        """Give up the trace for good, if one was used."""
        if self.source is None or not self.source.used:
            return False
        self.source.forget()
        self.source, self.factors = None, ()
        self._made.clear()
        return True

    def mv(self, p: Tensor, strategy: str = "backward") -> Tensor:
        """J p, (B, n) -> (B, n)."""
        return self.product(transpose=False, strategy=strategy)(p)

    def rmv(self, p: Tensor, strategy: str = "backward") -> Tensor:
        """Jᵀ p, (B, n) -> (B, n)."""
        return self.product(transpose=True, strategy=strategy)(p)

    def product(self, transpose: bool, strategy: str = "backward") -> Product:
        """The function p -> J p or Jᵀ p, made once per strategy."""
        if strategy not in STRATEGIES:
            raise ValueError(f"product must be one of {', '.join(map(repr, STRATEGIES))}, got {strategy!r}.")
        transpose = transpose or self.symmetric
        if strategy in KEPT:
            strategy = "backward" if self.sure else "auto"
        if (strategy, transpose) not in self._made:
            self._made[strategy, transpose] = self._make(strategy, transpose)
        made = self._made[strategy, transpose]

        def counted(p: Tensor) -> Tensor:
            self.products += 1
            with torch.no_grad():  # forward and traced products would record a graph of the parameters
                return made(p)

        return counted

    @property
    def dense_chunk(self) -> int:
        """How many rows of J are made at once."""
        tensors = [] if self.bound is None else batch.leaves(self.bound[1])
        weights = sum(t.numel() for t in tensors if isinstance(t, Tensor))
        return max(1, min(_DENSE_ROWS, _DENSE_CHUNK // max(1, self.y.numel(), weights)))

    def dense(self) -> Tensor:
        """J as a (B, n, n) tensor: all rows in batched products, in chunks that bound the memory."""
        (samples, n), chunk = self.shape, self.dense_chunk
        if n <= chunk:
            units = torch.eye(n, dtype=self.y.dtype, device=self.y.device).unsqueeze(1).expand(-1, samples, -1)
            return self.rows(units).transpose(0, 1).contiguous()
        J = self.y.new_empty(n, samples, n)
        for i in range(0, n, chunk):
            units = self.y.new_zeros(min(chunk, n - i), n)
            units.diagonal(i).fill_(1)
            J[i : i + chunk] = self.rows(units.unsqueeze(1).expand(-1, samples, -1))
        return J.transpose(0, 1)

    def rows(self, vectors: Tensor) -> Tensor:
        """Jᵀ p for k vectors at once, (k, B, n) -> (k, B, n)."""
        y, F = self.graph()
        self.products += len(vectors)
        if not F.requires_grad:
            return torch.zeros_like(vectors)
        linear = self.linear(transpose=True)
        if linear is not None:
            return linear.rows(vectors)
        return rows_by_autograd(F, y, vectors)

    def diagonal(self) -> Tensor:
        """The diagonal of J, (B, n), exact."""
        return torch.diagonal(self.dense(), dim1=1, dim2=2)

    def graph(self) -> tuple[Tensor, Tensor]:
        """`(leaf, F(leaf))`, the graph of F at the point."""
        if self._graph is None:
            with torch.enable_grad():
                leaf = self.y.detach().requires_grad_()
                self._graph = leaf, self.residual(leaf)
        return self._graph

    def _make(self, strategy: str, transpose: bool) -> Product:
        if strategy == "measure":
            return self._fastest(transpose)
        if strategy == "forward":
            return self._with_fallback(self._forward_product, transpose)
        linear = self.linear(transpose) if strategy == "auto" else None
        if linear is not None:
            return linear.product
        if strategy == "traced":
            return self._with_fallback(self._traced_product, transpose)
        return self._backward_product(transpose)

    def _backward_product(self, transpose: bool) -> Product:
        y, F = self.graph()
        if transpose:
            return lambda p: _vjp(y, F, p)
        if not F.requires_grad:
            return torch.zeros_like
        # J p from Jᵀ u, which is linear in u: its graph is built once, and its transpose is J.
        if self._transposed_graph is None:
            with torch.enable_grad():
                u = torch.zeros_like(F, requires_grad=True)
                (w,) = torch.autograd.grad(F, y, u, create_graph=True, materialize_grads=True)
            self._transposed_graph = u, w
        u, w = self._transposed_graph
        if not w.requires_grad:  # F does not depend on y
            return torch.zeros_like
        return lambda p: _vjp(u, w, p)

    def _forward_product(self, transpose: bool) -> Product:
        if transpose and not self.symmetric:
            raise RuntimeError("forward mode gives J p only")  # taken for a missing rule, see _with_fallback
        y, residual = self.y, self.residual
        return lambda p: torch.func.jvp(residual, (y,), (p,))[1]

    def _traced_product(self, transpose: bool) -> Product:
        made = self._backward_product(transpose)
        halves = split(lambda _, p: [(), (made(p),)], self.y, torch.zeros_like(self.y))
        saved, (part,) = halves.prelude(self.y, *halves.captured), halves.parts
        taken = [saved[place] for place in part.places]
        return lambda p: part.module(p, *taken)[0]

    def _with_fallback(self, make: Callable[[bool], Product], transpose: bool) -> Product:
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # torch loads its forward-mode rules at the first use, with a deprecation warning about itself.
                warnings.filterwarnings("ignore", message=".*torch.jit", category=DeprecationWarning)
                product = make(transpose)
                product(torch.zeros_like(self.y))  # rules that are missing show only in a call
        except (RuntimeError, ValueError, TypeError):
            return self._backward_product(transpose)
        return product

    def _fastest(self, transpose: bool) -> Product:
        key = (self._key, self.shape, self.y.dtype, self.y.device, transpose)
        with _choices_lock:
            choice = _choices.get(key) if self._key is not None else None
        if choice is None:
            choice = min(_TIMED, key=lambda strategy: self._seconds(strategy, transpose))
            with _choices_lock:
                _choices[key] = choice
        return self._make(choice, transpose)

    def _seconds(self, strategy: str, transpose: bool) -> float:
        """The time of one product, its making shared out over the products of a typical solve."""
        p = torch.ones_like(self.y)
        start = _clock(self.y)
        product = self._make(strategy, transpose)
        making = _clock(self.y) - start
        times = []
        for _ in range(3):
            start = _clock(self.y)
            product(p)
            times.append(_clock(self.y) - start)
        return min(times) + making / _ASSUMED_PRODUCTS


def _differs(off: Tensor, true: Tensor, dtype: torch.dtype) -> bool:
    """Whether a result is off by more than rounding in this dtype; NaN is, in place of a number."""
    error, size = (float(torch.linalg.vector_norm(t)) for t in (off, true))
    eps = max(torch.finfo(given).eps for given in (dtype, off.dtype))
    return math.isfinite(size) and not error <= eps**0.5 * size


def _vjp(y: Tensor, F: Tensor, p: Tensor) -> Tensor:
    if not F.requires_grad:  # F depends on nothing
        return torch.zeros_like(p)
    (product,) = torch.autograd.grad(F, y, p, retain_graph=True, materialize_grads=True)
    return product


def _clock(y: Tensor) -> float:
    if y.is_cuda:
        torch.cuda.synchronize(y.device)
    return time.perf_counter()
