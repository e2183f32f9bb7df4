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
from torchdil.probe import direction, mixing
from torchdil.problem import Problem
from torchdil.solution import ConvergenceError, ConvergenceWarning, user_frame

_WRONG = (
    "The derivative of {} is not its slope, so the solution or its gradient is wrong: use no detach(), item() or numpy on the "
    "way from y to its value, and check the backward of each autograd.Function in it."
)
# At how many points, and how far apart at most, relative to y; how many times what a cubic misses of them its slope may be off.
_POINTS, _LONG, _NOISES = 9, 0.03, 20.0
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
            if is_slope(problem, y):
                return
            # The slope of one sample's F by its own y is then not all that there is.
            mixed = mixing(problem.evaluate, y, argument, problem.name)
    except Exception:  # a function may refuse the points that are tried here, or cannot be remembered
        return
    message = f"The solution or its gradient is wrong. The cause: {mixed}." if mixed else _WRONG.format(argument)
    if on_failure == "raise":
        raise ConvergenceError(message)
    warnings.warn(message, ConvergenceWarning, stacklevel=user_frame())


def is_slope(problem: Problem, y: Tensor) -> bool:
    """Whether the derivative of what the user gave is its slope, at points aside of y, where a kink would be.

    True where that cannot be told. The slope is that of the objective of an argmin, else of cᵀF(y) with a random c.
    """
    d = direction(y)
    # Once more from elsewhere: the differences that a kink or low precision spoils there are not those spoiled here.
    return not bool((_is_off(problem, y + 0.1 * d, d) & _is_off(problem, y - 0.07 * d.flip(1), d)).any())


def _is_off(problem: Problem, y: Tensor, d: Tensor) -> Tensor:
    """Where the derivative along d is not the slope, (B,), be it over a short way or a long one.

    A function that computes in half precision inside has steps that are longer than the short way, and goes nowhere on it.
    """
    c = None if problem.objective is not None else direction(y.flip(1)).flip(1)

    def value(y: Tensor) -> tuple[Tensor, Tensor]:
        if c is None:
            assert problem.objective is not None
            found = problem.objective(y)
            return found, found.abs()
        F = problem.evaluate(y)
        return batch.dot(c, F), batch.norm(c) * batch.norm(F)

    said = batch.dot(problem.evaluate(y) if c is None else problem.operator(y).rmv(c), d)
    eps, off = torch.finfo(y.dtype).eps, torch.ones_like(said, dtype=torch.bool)
    x = torch.linspace(-1, 1, _POINTS, dtype=torch.float64, device="cpu")
    powers = x[:, None] ** torch.arange(4, device="cpu")  # a cubic is fitted
    inverse = torch.linalg.pinv(powers)
    for way in {eps ** (1 / 3): None, max(_LONG, eps ** (1 / 3)): None}:
        found, sizes = zip(*(value(y + way * step * d) for step in x.tolist()), strict=True)
        middle = found[_POINTS // 2]
        values = torch.stack([f - middle for f in found]).double().cpu()
        fitted = inverse @ values
        # What the cubic misses is noise, of whatever precision, or a kink.
        noise = (values - powers @ fitted).abs().amax(dim=0).to(said) + 2 * eps * torch.stack(sizes).amax(dim=0)
        slope = fitted[1].to(said) / way
        off &= (slope - said).abs() > 0.05 * slope.abs() + _NOISES * noise / way  # never with NaN
        if not bool(off.any()):
            break
    return off
