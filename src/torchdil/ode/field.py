"""The right-hand side f(t, y) at many points at once.

A trajectory has T·s stages for each of B samples. The user's function knows one time and the shape of y0; here it is evaluated
at (B, N) points, N times for each sample, in one call where that is possible:

- "rows": f does not look at t and takes any number of samples (batch_dims >= 1): the N·B points are one larger batch.
- "vmap": `torch.vmap` over the N times; y keeps its shape. Right for whatever `vmap` can do.
- "loop": N calls, for functions that `vmap` cannot do, such as a branch on a value.
- "samples": each sample has times of its own: `vmap` over the N·B points, batches of one sample each.

The first call finds out which; "rows" and "samples" are checked against the plain function before they are used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchdil import batch
from torchdil.batch import Layout
from torchdil.modes import no_tangents

Call = Callable[..., Any]


class _Watched(Tensor):
    """A time that notes whether it is used."""

    used: list[bool]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for item in pytree.tree_leaves((args, kwargs or {})):
            if isinstance(item, _Watched):
                item.used.append(True)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def looks_at_time(func: Call, t: Tensor, y: Any) -> tuple[bool, Any]:
    """Whether f(t, y) uses t at all, and its value."""
    if isinstance(func, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):  # they would not tell
        return True, func(t, y)
    watched = t.detach().as_subclass(_Watched)
    watched.used = []
    value = func(watched, y)
    value = pytree.tree_map_only(_Watched, lambda leaf: leaf.as_subclass(Tensor), value)
    return bool(watched.used), value


@dataclass(frozen=True)
class Field:
    """f at (B, N) points.

    Attributes:
        layout: the structure of y0.
        mode: "rows", "vmap", "loop" or "samples", see above.
    """

    layout: Layout
    mode: str

    def __call__(self, call: Call, t: Tensor, y: Tensor) -> Tensor:
        """f(t, y): t of shape (N,), or (B, N) with times per sample; y and the result (B, N, D)."""
        if self.mode == "rows":
            return self._rows(call, t, y)
        if self.mode == "samples":
            return self._samples(call, t.expand(y.shape[:2]), y)
        if t.dim() > 1:
            t = t[0]
        return (self._vmap if self.mode == "vmap" else self._loop)(call, t, y)

    def _rows(self, call: Call, t: Tensor, y: Tensor) -> Tensor:
        ones = (1,) * (len(self.layout.batch_shape) - 1)
        points = replace(self.layout, batch_shape=torch.Size((y.shape[0] * y.shape[1], *ones)))
        return points.ravel(call(t.reshape(-1)[0], points.unravel(y.flatten(0, 1)))).unflatten(0, y.shape[:2])

    def _vmap(self, call: Call, t: Tensor, y: Tensor) -> Tensor:
        def one(t: Tensor, y: Tensor) -> Tensor:
            return self.layout.ravel(call(t, self.layout.unravel(y)))

        return torch.vmap(one, in_dims=(0, 1), out_dims=1)(t, y)

    def _loop(self, call: Call, t: Tensor, y: Tensor) -> Tensor:
        layout = self.layout
        return torch.stack([layout.ravel(call(t[n], layout.unravel(y[:, n]))) for n in range(y.shape[1])], dim=1)

    def _samples(self, call: Call, t: Tensor, y: Tensor) -> Tensor:
        single = replace(self.layout, batch_shape=torch.Size((1,) * len(self.layout.batch_shape)))

        def one(t: Tensor, y: Tensor) -> Tensor:
            return single.ravel(call(t, single.unravel(y.unsqueeze(0)))).squeeze(0)

        return torch.vmap(one)(t.flatten(), y.flatten(0, 1)).unflatten(0, y.shape[:2])


def field_of(func: Call, t: Tensor, y0: Any, layout: Layout, timed: bool, per_sample: bool = False) -> Field:
    """The best field that agrees with the function itself at y0.

    Args:
        timed: whether f uses t.
        per_sample: whether each sample will have times of its own.
    """
    modes = ["loop"]
    if not per_sample:
        modes.insert(0, "vmap")
    if layout.batch_shape and not timed:
        modes.insert(0, "rows")
    elif layout.batch_shape and per_sample:
        modes.insert(0, "samples")
    if per_sample and not layout.batch_shape:
        modes.insert(0, "vmap")  # one system has one time
    with torch.no_grad(), no_tangents():
        y = layout.ravel(y0).detach()
        # Two different points: a field that mixes them up is found out.
        points = torch.stack((y, y + 0.1 * y.abs().clamp_min(1e-3)), dim=1)
        times = torch.stack((t[0], t[1])).detach()
        expected = Field(layout, "loop")(func, times, points)
        for mode in modes[:-1]:
            try:
                got = Field(layout, mode)(func, times, points)
            except (RuntimeError, ValueError, TypeError, IndexError):
                continue
            if got.shape == expected.shape and _same(got, expected):
                return Field(layout, mode)
    return Field(layout, "loop")


def _same(a: Tensor, b: Tensor) -> bool:
    eps = torch.finfo(a.dtype).eps
    size = batch.norm(b.flatten(1)).clamp_min(eps)
    close = batch.norm((a - b).flatten(1)) <= 1e3 * eps * size
    return bool((close | ~torch.isfinite(size)).all())
