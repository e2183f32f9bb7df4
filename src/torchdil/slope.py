"""Whether the derivative that autograd gives of a function is its slope.

It is not where a part of the function is computed by numpy, or behind `detach()` or `item()`. A solve may succeed all the same:
an argmin is then the minimum of something else, and the gradient of a root is wrong. So the first solve with a function looks
at it, by differences along one random direction.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.modes import no_tangents, plain_saving
from torchdil.problem import Problem
from torchdil.solution import ConvergenceError, ConvergenceWarning, user_frame

# What was looked at: code, or callable objects.
_seen: weakref.WeakSet[Any] = weakref.WeakSet()


def look_once(problem: Problem, y: Tensor, function: Any, argument: str, on_failure: str) -> None:
    """Say so, as the policy wants it, if the derivative of a function is not its slope; at the first solve with it only.

    Args:
        problem: what is made of the function.
        y: where to look, (B, n).
        function: the user's.
        argument: the name under which it was given.
        on_failure: the policy.
    """
    while isinstance(function, functools.partial):
        function = function.func
    try:
        known = getattr(function, "__code__", function)
        if on_failure not in ("raise", "warn") or known in _seen or not len(y):
            return
        _seen.add(known)
        with torch.no_grad(), no_tangents(), plain_saving(), torch.random.fork_rng([y.device] if y.is_cuda else []):
            right = is_slope(problem, y)
    except Exception:  # a function may refuse the points that are tried here, or cannot be remembered
        return
    if not right:
        message = (
            f"The derivative of {argument} is not its slope, so the solution or its gradient is wrong: use no detach(), item() "
            "or numpy on the way from y to its value, and check the backward of each autograd.Function in it."
        )
        if on_failure == "raise":
            raise ConvergenceError(message)
        warnings.warn(message, ConvergenceWarning, stacklevel=user_frame())


def is_slope(problem: Problem, y: Tensor) -> bool:
    """Whether the derivative of what the user gave is its slope, at a point aside of y, where a kink would be.

    True where that cannot be told. The slope is that of the objective of an argmin, else of cᵀF(y) with a random c.
    """
    eps, d = torch.finfo(y.dtype).eps, direction(y)
    y = y + 0.1 * d
    c = None if problem.objective is not None else direction(y.flip(1)).flip(1)

    def value(y: Tensor) -> tuple[Tensor, Tensor]:
        if c is None:
            assert problem.objective is not None
            found = problem.objective(y)
            return found, found.abs()
        F = problem.evaluate(y)
        return batch.dot(c, F), batch.norm(c) * batch.norm(F)

    slopes, rounding = [], torch.zeros_like(y[:, 0])
    for way in (eps ** (1 / 3), eps ** (1 / 3) / 2):
        (high, size), (low, other) = (value(y + sign * way * d) for sign in (1, -1))
        slopes.append((high - low) / (2 * way))
        rounding = 10 * eps * torch.maximum(size, other) / way
    said = batch.dot(problem.evaluate(y) if c is None else problem.operator(y).rmv(c), d)
    sure = (slopes[0] - slopes[1]).abs() <= 0.01 * slopes[1].abs() + rounding  # never with NaN
    return not bool((sure & ((slopes[1] - said).abs() > 0.05 * slopes[1].abs() + 2 * rounding)).any())


def direction(y: Tensor) -> Tensor:
    """A step in a random direction, the same each time, of the size of y or 1, (B, n)."""
    generator = torch.Generator("cpu").manual_seed(0)  # whatever torch's default device is
    d = torch.randn(y.shape, generator=generator, dtype=torch.float64, device="cpu").to(y)
    return batch.scale(batch.norm(y).clamp_min(1.0) / batch.norm(d), d)
