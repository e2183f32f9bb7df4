"""What a call of `odeint` states, checked: dy/dt = f(t, y), y(t_0) = y0, and the times to answer for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchdil.arguments import check_callable, check_output, check_signature, check_unknown
from torchdil.batch import Layout
from torchdil.compiled import memory
from torchdil.modes import observed_by, plain_saving, transforms_active, uncompiled
from torchdil.ode.field import Field, field_of
from torchdil.settings import check_count


@dataclass(frozen=True)
class Options:
    """What `options` of `odeint` may hold.

    Attributes:
        step_size: the longest step of a fixed grid; each interval between outputs is cut into equal steps.
        substeps: or the number of steps in each interval.
        max_steps: the most steps of an adaptive method, rejected ones included.
        first_step: the size of the first adaptive step; None: chosen from f and its slope at y0.
        checkpoint: True: keep √T states only and compute the others again in the backward pass; or the number of pieces.
        adjoint: "reverse" integrates y backwards beside its adjoint, "stored" takes y from the forward pass.
    """

    step_size: float | None = None
    substeps: int | None = None
    max_steps: int = 10_000
    first_step: float | None = None
    checkpoint: bool | int = False
    adjoint: str = "reverse"

    @staticmethod
    def of(given: dict[str, Any] | None) -> Options:
        if given is not None and not isinstance(given, dict):
            raise TypeError(f"options must be a dict, got {type(given).__name__}.")
        known = [f.name for f in fields(Options)]
        for name in given or {}:
            if name not in known:
                raise ValueError(f"options may hold {', '.join(known)}, got {name!r}.")
        return Options(**(given or {}))

    def __post_init__(self) -> None:
        for name in ("step_size", "first_step"):
            size = getattr(self, name)
            if size is not None and not (isinstance(size, (int, float)) and math.isfinite(size) and size != 0):
                raise ValueError(f"{name} must be a finite number other than 0, got {size!r}.")
        check_count("substeps", self.substeps, optional=True)
        check_count("max_steps", self.max_steps)
        if self.step_size is not None and self.substeps is not None:
            raise ValueError("options may hold step_size or substeps, not both.")
        if not isinstance(self.checkpoint, (bool, int)) or self.checkpoint < 0:
            raise ValueError(f"checkpoint must be True, False or a number of pieces, got {self.checkpoint!r}.")
        if self.adjoint not in ("reverse", "stored"):
            raise ValueError(f'adjoint must be "reverse" or "stored", got {self.adjoint!r}.')

    @property
    def fixed(self) -> bool:
        """Whether a fixed grid is asked for."""
        return self.step_size is not None or self.substeps is not None

    def steps(self, outputs: int, span: float) -> int:
        """How many steps a fixed grid has, about, with so many outputs on a way of this length."""
        return outputs * (self.substeps or 1) if self.step_size is None else math.ceil(span / self.step_size)


@dataclass(frozen=True)
class Equation:
    """One call.

    Attributes:
        func: f(t, y).
        y0: the initial state, a tensor or a nested tuple/dict of tensors.
        t: the times of the answer, (T,), y0 belonging to the first.
        layout: the structure of y0.
        ends: the first and the last time, where they are at hand.
    """

    func: Callable[..., Any]
    y0: Any
    t: Tensor
    layout: Layout
    ends: tuple[float, float] = (0.0, 0.0)

    @staticmethod
    def of(func: Callable[..., Any], y0: Any, t: Any, batch_dims: int) -> Equation:
        """The arguments, or one sentence for what cannot work."""
        check_callable(func, "func", "func(t, y)")
        check_unknown(y0, "y0")
        first = pytree.tree_leaves(y0)[0]
        if first.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"y0 must be float32 or float64 to solve implicit steps, got {first.dtype}.")
        ends = _checked_times(t, first)
        layout = Layout.of(y0, batch_dims)
        func = uncompiled(func)
        key = ("equation", layout, first.dtype, first.device, getattr(func, "training", None))
        known = memory(func)
        if key not in known:  # the call of a check takes as long as a part of the solve
            _check_order(func)
            with observed_by(None), plain_saving():
                check_output(lambda y: func(t.detach()[0].to(first.dtype), y), "func", y0, ())
            known[key] = True
        return Equation(func, y0, t, layout, ends)

    def field(self, per_sample: bool = False) -> Field:
        """How to evaluate f at many points; `per_sample`: with times of its own for each sample."""
        return field_of(self.func, self.t, self.y0, self.layout, per_sample)

    def field_for_each(self) -> tuple[Field, bool]:
        """f with times of their own for the samples; or, where it cannot, with the same for all, and True."""
        field = self.field(per_sample=True)
        common = field.mode in ("loop", "vmap") and self.layout.samples > 1
        return (self.field(), True) if common else (field, False)

    @property
    def start(self) -> Tensor:
        """y0 as a (B, D) matrix."""
        return self.layout.ravel(self.y0)

    def first_slope(self, y: Tensor) -> Tensor:
        """f at the first of the times and y (B, D), as a matrix."""
        return self.layout.ravel(self.func(self.t.detach()[0].to(y.dtype), self.layout.unravel(y)))

    def outputs(self, states: Tensor) -> Any:
        """States (B, T, D) as (T, *y0.shape), in the structure of y0."""
        many = replace(self.layout, batch_shape=torch.Size((states.shape[1], *self.layout.batch_shape)))
        return many.unravel(states.transpose(0, 1).flatten(0, 1))


def _check_order(func: Callable[..., Any]) -> None:
    """Raise one sentence if the function's own names say that it takes the time second, as SciPy's `odeint` wants it."""
    names = check_signature(func, "func", ("t", "y"), (None, None))
    if len(names) > 1 and names[1] == "t" != names[0]:
        raise TypeError(f"func is called as func(t, y), but its parameters are ({', '.join(names)}): change their order.")


def _checked_times(t: Any, first: Tensor) -> tuple[float, float]:
    """The first and the last of the times; raises one sentence if they cannot work."""
    if not isinstance(t, Tensor):
        raise TypeError(f"t must be a tensor of times, got {type(t).__name__}: use torch.tensor or torch.linspace.")
    if t.dim() != 1 or len(t) < 2:
        raise ValueError(f"t must be a 1-D tensor of at least two times, got shape {tuple(t.shape)}.")
    if not t.is_floating_point():
        raise TypeError(f"t must have a floating dtype, got {t.dtype}: use t.to({first.dtype}).")
    if t.device != first.device:
        raise ValueError(f"t must be on the device of y0, {first.device}, got {t.device}.")
    if transforms_active():  # their values may not be at hand
        return 0.0, 0.0
    values = t.detach().tolist()
    pairs = list(pairwise(values))
    monotone = all(a < b for a, b in pairs) or all(a > b for a, b in pairs)  # never with NaN
    if not monotone or math.isinf(values[0]) or math.isinf(values[-1]):
        raise ValueError("t must be strictly increasing or strictly decreasing, and finite.")
    return values[0], values[-1]


@dataclass(frozen=True)
class Grid:
    """A fixed grid.

    Attributes:
        times: the T + 1 points, differentiable in t.
        ends: the step that ends at each output but the first, counted from 0; None: every step ends at one.
    """

    times: Tensor
    ends: list[int] | None

    @staticmethod
    def of(t: Tensor, options: Options) -> Grid:
        """Each interval of t cut into equal steps."""
        lengths = t.detach().diff().tolist() if options.step_size is not None else []
        if options.step_size is not None and (options.step_size > 0) != (lengths[0] > 0):
            raise ValueError(f"step_size must have the sign of the way from t[0] to t[-1], got {options.step_size!r}.")
        if options.step_size is not None:
            # A whole number of steps that rounding put a little above is that number.
            counts = [max(1, math.ceil(length / options.step_size * (1 - 1e-6))) for length in lengths]
        else:
            counts = [options.substeps or 1] * (len(t) - 1)
        if max(counts) == 1:
            return Grid(t, None)
        t = t.double()  # steps may be shorter than the digits of float32 tell
        parts = [t[:1]]
        for n, count in enumerate(counts):
            parts.append(torch.lerp(t[n], t[n + 1], torch.arange(1, count + 1, dtype=t.dtype, device=t.device) / count))
        ends, total = [], 0
        for count in counts:
            total += count
            ends.append(total - 1)
        return Grid(torch.cat(parts), ends)
