"""Whether the derivative that autograd gives of a function is its slope.

It is not where a part of the function is computed by numpy, or behind `detach()` or `item()`. A solve may succeed all the same:
an argmin is then the minimum of something else, and the gradient of a root is wrong. So the first solve with a function looks
at it, by differences along two directions.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.captures import functions_read
from torchdil.modes import no_tangents, plain_saving
from torchdil.probe import direction, mixing
from torchdil.problem import Problem
from torchdil.solution import ConvergenceError, ConvergenceWarning, user_frame

_WRONG = (
    "The derivative of {} is not its slope, so the solution or its gradient is wrong: use no detach(), item() or numpy on the "
    "way from y to its value, and check the backward of each autograd.Function in it."
)
# The slope along a direction is that of a cubic, fitted to the values at so many points.
_POINTS = 9
# They reach this part of the direction to either side, in a second look; in the first a much smaller part.
_LONG = 0.03
# Autograd's derivative is off if it differs from that slope clearly, and by more than so many times the noise: what the cubic
# misses of the values.
_NOISES = 20.0
# The functions that were looked at, by their code (or the object that is called), each with a number for each set of other
# functions and modules that it used. So code that makes a function anew at each call is looked at once, and once more for each
# other set, up to so many.
_seen: weakref.WeakKeyDictionary[Any, set[int]] = weakref.WeakKeyDictionary()
_LOOKS = 16


def look_once(problem: Problem, y: Tensor, function: Any, argument: str, on_failure: str) -> None:
    """Say so, as the policy wants it, if the derivative of a function is not its slope; at the first solve with it only.

    A function made anew by the code that made one before is looked at if it calls other functions or modules.

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
        if on_failure not in ("raise", "warn") or not len(y):
            return
        seen, read = _seen.setdefault(getattr(function, "__code__", function), set()), functions_read(function)
        if read in seen or len(seen) == _LOOKS:
            return
        seen.add(read)
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

    True where that cannot be told. The slope is that of the objective of an argmin, else of two combinations cᵀF(y).
    """
    for d in _ways(y):
        off = _is_off(problem, y + 0.1 * d, d)
        # Once more from elsewhere: the differences that a kink or low precision spoils there are not those spoiled here.
        if bool(off.any()) and bool((off & _is_off(problem, y - 0.07 * d.flip(1), d)).any()):
            return False
    return True


def _ways(y: Tensor) -> list[Tensor]:
    """Two directions, of random signs and along all of y: a sum or a mean may change by next to nothing along the first."""
    d = direction(y)
    ahead = d.abs() + d.abs().mean(dim=1, keepdim=True)
    return [d, batch.scale(batch.norm(d) / batch.norm(ahead), ahead)]


def _is_off(problem: Problem, y: Tensor, d: Tensor) -> Tensor:
    """Where the derivative along d is not the slope, (B,), be it over a short way or a long one.

    A function that computes in half precision inside has steps that are longer than the short way, and goes nowhere on it.
    """
    objective = problem.objective
    parts = [] if objective is not None else [c.flip(1) for c in _ways(y.flip(1))]

    def value(y: Tensor) -> tuple[Tensor, Tensor]:
        """What is looked at, (B, ·), and of what size it is made."""
        if objective is not None:
            found = objective(y).unsqueeze(1)
            return found, found.abs()
        F = problem.evaluate(y)
        columns = [(batch.dot(c, F), batch.norm(c) * batch.norm(F)) for c in parts]
        return torch.stack([c for c, _ in columns], dim=1), torch.stack([size for _, size in columns], dim=1)

    if objective is not None:
        said = batch.dot(problem.evaluate(y), d).unsqueeze(1)
    else:
        operator = problem.operator(y)
        said = torch.stack([batch.dot(operator.rmv(c), d) for c in parts], dim=1)
    eps, off = torch.finfo(y.dtype).eps, torch.ones_like(said[:, 0], dtype=torch.bool)
    x = torch.linspace(-1, 1, _POINTS, dtype=torch.float64, device="cpu")
    powers = x[:, None] ** torch.arange(4, device="cpu")  # a cubic is fitted
    inverse = torch.linalg.pinv(powers)
    for way in sorted({eps ** (1 / 3), max(_LONG, eps ** (1 / 3))}):
        found, sizes = zip(*(value(y + way * step * d) for step in x.tolist()), strict=True)
        values = torch.stack([f - found[_POINTS // 2] for f in found]).cpu().double()
        fitted = torch.tensordot(inverse, values, 1)
        # What the cubic misses is noise, of whatever precision, or a kink.
        noise = (values - torch.tensordot(powers, fitted, 1)).abs().amax(dim=0).to(said)
        noise += 2 * eps * torch.stack(sizes).amax(dim=0)
        slope = fitted[1].to(said) / way
        wrong = (slope - said).abs() > 0.05 * slope.abs() + _NOISES * noise / way  # never with NaN
        off &= wrong.any(dim=1)
        if not bool(off.any()):
            break
    return off
