"""The right-hand side f(t, y) at many points at once.

A trajectory has T·s stages for each of B samples. The user's function knows one time and the shape of y0; here it is evaluated
at (B, N) points, N times for each sample, in one call where that is possible:

- "rows": f does not look at t and takes any number of samples (batch_dims >= 1): the N·B points are one larger batch.
- "vmap": `torch.vmap` over the N times; y keeps its shape. Right for whatever `vmap` can do.
- "loop": N calls, for functions that `vmap` cannot do, such as a branch on a value.
- "samples": each sample has times of its own: `vmap` over the N·B points, batches of one sample each.
- "still": likewise, but f does not look at t: `vmap` over N times; y keeps its shape.

The first call finds out which, by a comparison with the plain function. In "rows" the time is one that cannot be looked at: a
function that begins to use it later is found out (`TimeUsedError`); "still" does the same. Now and then the comparison is made
again, at states that were found (`holds`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchdil import batch
from torchdil.batch import Layout
from torchdil.compiled import memory
from torchdil.modes import no_tangents, plain_saving, saving_hooked, transforms_active
from torchdil.problem import Call

# Verdicts are looked at again after every so many solves.
_EVERY = 50


class TimeUsedError(RuntimeError):
    """f has looked at its time, which it had not done before."""


class _Hidden(Tensor):
    """A time that must not be looked at: it has no number, and every operation on it is an error."""

    @staticmethod
    def __new__(cls, dtype: torch.dtype, device: torch.device) -> _Hidden:
        return Tensor._make_wrapper_subclass(cls, (), dtype=dtype, device=device)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise TimeUsedError("func uses t.")

    # TorchScript and torch.func do not call that; the dispatcher below them calls this.
    __torch_dispatch__ = __torch_function__  # type: ignore[assignment]


@functools.cache
def _hidden(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False), torch._C.DisableTorchFunctionSubclass():
        return _Hidden(dtype, device)


@dataclass(frozen=True)
class Field:
    """f at (B, N) points.

    Attributes:
        layout: the structure of y0.
        mode: "rows", "vmap", "loop", "samples" or "still", see above.
        functional: whether torch.func can differentiate it; not an f that writes into a buffer, for example.
    """

    layout: Layout
    mode: str
    functional: bool = field(default=True, kw_only=True)

    def __call__(self, call: Call, t: Tensor, y: Tensor) -> Tensor:
        """f(t, y): t of shape (N,), or (B, N) with times per sample; y and the result (B, N, D)."""
        if self.mode == "rows":
            return self._rows(call, y)
        if self.mode == "samples":
            return self._samples(call, t.expand(y.shape[:2]), y)
        if self.mode == "still":
            return self._still(call, y)
        if t.dim() > 1:
            t = t[0] if len(t) else t.new_zeros(t.shape[1])  # where there is no sample, any time will do
        return (self._vmap if self.mode == "vmap" else self._loop)(call, t, y)

    def _rows(self, call: Call, y: Tensor) -> Tensor:
        layout = self.layout
        many = torch.Size((y.shape[0] * y.shape[1], *(1,) * (len(layout.batch_shape) - 1)))
        time = _hidden(y.dtype, y.device)
        if layout.spec.is_leaf():
            return call(time, y.reshape(many + layout.shapes[0])).reshape(y.shape)
        points = replace(layout, batch_shape=many)
        return points.ravel(call(time, points.unravel(y.flatten(0, 1)))).reshape(y.shape)

    def _vmap(self, call: Call, t: Tensor, y: Tensor) -> Tensor:
        def one(t: Tensor, y: Tensor) -> Tensor:
            return self.layout.ravel(call(t, self.layout.unravel(y)))

        return torch.vmap(one, in_dims=(0, 1), out_dims=1)(t, y)

    def _still(self, call: Call, y: Tensor) -> Tensor:
        time = _hidden(y.dtype, y.device)
        return torch.vmap(lambda y: self.layout.ravel(call(time, self.layout.unravel(y))), in_dims=1, out_dims=1)(y)

    def _loop(self, call: Call, t: Tensor, y: Tensor) -> Tensor:
        layout = self.layout
        return torch.stack([layout.ravel(call(t[n], layout.unravel(y[:, n]))) for n in range(y.shape[1])], dim=1)

    def _samples(self, call: Call, t: Tensor, y: Tensor) -> Tensor:
        single = replace(self.layout, batch_shape=torch.Size((1,) * len(self.layout.batch_shape)))

        def one(t: Tensor, y: Tensor) -> Tensor:
            return single.ravel(call(t, single.unravel(y.unsqueeze(0)))).squeeze(0)

        return torch.vmap(one)(t.flatten(), y.flatten(0, 1)).unflatten(0, y.shape[:2])


@dataclass
class _Verdict:
    """What is known of a function: its mode, and whether torch.func can differentiate it."""

    mode: str
    functional: bool


def _key(layout: Layout, like: Tensor, func: Call, per_sample: bool) -> Hashable:
    return ("field", per_sample, layout, like.dtype, like.device, getattr(func, "training", None), saving_hooked())


def field_of(func: Call, t: Tensor, y0: Any, layout: Layout, per_sample: bool = False) -> Field:
    """The best field that agrees with the function itself at y0; `per_sample`: each sample will have times of its own."""
    key = _key(layout, pytree.tree_leaves(y0)[0], func, per_sample)
    known = memory(func)
    if key not in known and transforms_active():  # no values to compare
        return Field(layout, "samples" if per_sample and layout.batch_shape else "vmap")
    if key not in known:
        known[key] = _Verdict(*_checked(func, t, y0, layout, per_sample))
    verdict: _Verdict = known[key]
    return Field(layout, verdict.mode, functional=verdict.functional)


def uses_time(func: Call, y0: Any) -> bool:
    """Whether f looks at t, here at y0."""
    like = pytree.tree_leaves(y0)[0]
    try:
        with torch.no_grad(), no_tangents():
            func(_hidden(like.dtype, like.device), y0)
    except Exception:  # a `TimeUsedError`, whatever has been made of it on its way
        return True
    return False


def call_singly(func: Call) -> bool:
    """Call a function point by point from now on, whose faster mode ended in an exception. Whether it was called otherwise."""
    fast = [v for v in memory(func).values() if isinstance(v, _Verdict) and v.mode != "loop"]
    for verdict in fast:
        verdict.mode, verdict.functional = "loop", False
    return bool(fast)


def holds(func: Call, t: Tensor, states: Tensor, layout: Layout) -> bool:
    """Whether the verdicts on a function still hold at the states that were found with them, (B, T, D), at the times t, (T,).

    Asked after each solve, and looked into after the first and now and then. Where one does not hold, the function is called
    point by point from now on.
    """
    known, key = memory(func), ("holds", states.shape)
    uses = known.setdefault(key, 0)
    known[key] = uses + 1
    if uses % _EVERY or transforms_active():
        return True
    found = True
    for per_sample in (False, True):
        verdict: _Verdict | None = known.get(_key(layout, states, func, per_sample))
        if verdict is None or verdict.mode == "loop":
            continue
        if not _agrees(Field(layout, verdict.mode), func, t, states, uses):
            verdict.mode, verdict.functional, found = "loop", False, False
    return found


def _agrees(field: Field, func: Call, t: Tensor, states: Tensor, uses: int) -> bool:
    """Whether the field gives what the function gives, at the last of the states and at one before, another each time."""
    at = torch.tensor([uses % (len(t) - 1), len(t) - 1], device=t.device)
    with torch.no_grad(), no_tangents():
        y, times = states.detach()[:, at], t.detach()[at].to(states.dtype)
        plain = Field(field.layout, "loop")
        expected = plain(func, times, y)
        try:
            got = field(func, times, y)
        except Exception:  # whatever the function does not like of it
            return False
        if same(got, expected):
            return True
        # What is left where large parts of f cancel is rounding, which is as large for y next to it; so is what noise does.
        eps = torch.finfo(y.dtype).eps
        rounding = (plain(func, times, y * (1 + 4 * eps)) - expected).flatten(1)
        off, least, size = (batch.norm(a.flatten(1)) for a in (got - expected, rounding, expected))
        return bool((~(off > 100 * least + eps**0.5 * size)).all())


def _checked(func: Call, t: Tensor, y0: Any, layout: Layout, per_sample: bool) -> tuple[str, bool]:
    """The mode of the field, and whether torch.func can differentiate it."""
    with torch.no_grad(), no_tangents():
        y = layout.ravel(y0).detach()
        # Different points: a field that mixes them up is found out. Times far apart: so is one that has lost them. And not as
        # many points as an axis of y is long: one that takes the ones for the others is, too (`vmap` of torch.linalg.solve).
        away = 0.1 * y.abs().clamp_min(1e-3)
        axes = {len(y), *layout.batch_shape, *(n for shape in layout.shapes for n in shape)}
        count = next(n for n in range(3, 4 + len(axes)) if n not in axes)
        points = torch.stack((y, *(y + away * (-1) ** n / (1 + n // 2) for n in range(count - 1))), dim=1)
        times = t.detach()[torch.linspace(0, len(t) - 1, points.shape[1], device=t.device).long()].to(y.dtype)
        expected = Field(layout, "loop")(func, times, points)

        def agrees(mode: str) -> bool:
            try:
                got = Field(layout, mode)(func, times, points)
            except Exception:  # whatever the function does not like of it
                return False
            return got.shape == expected.shape and same(got, expected)

        mode = "samples" if per_sample and layout.batch_shape else "vmap"
        # vmap refuses a branch on a value, which "rows" would take for all points at once.
        usable = agrees("vmap")
        if usable and layout.batch_shape and agrees("rows"):
            mode = "rows"
        elif not (usable and agrees(mode)):
            mode = "still" if usable and per_sample and agrees("still") else "loop"
        if mode == "loop":
            return mode, False
        f = functools.partial(Field(layout, mode), func, times)
        if not saving_hooked() and _works(lambda: torch.func.vjp(f, points)[1](expected)):
            return mode, True
        return (mode, False) if _works(lambda: _differentiated(f, points)) else ("loop", False)


def _works(attempt: Callable[[], Any]) -> bool:
    try:
        attempt()
    except Exception:  # whatever the function does not like of it
        return False
    return True


@torch.enable_grad()
def _differentiated(f: Callable[[Tensor], Tensor], points: Tensor) -> None:
    with plain_saving():
        leaf = points.detach().requires_grad_()
        found = f(leaf)
        if found.requires_grad:
            torch.autograd.grad(found.sum(), leaf, allow_unused=True)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether a is b to rounding, sample by sample, (B, ...); where b is not finite, anything is."""
    eps = torch.finfo(a.dtype).eps
    size = batch.norm(b.flatten(1)).clamp_min(eps)
    close = batch.norm((a - b).flatten(1)) <= 1e3 * eps * size
    return bool((close | ~torch.isfinite(size)).all())
