"""What of f no solve can work with: it is random, or mixes samples that are said to be independent.

The residual at the answer does not always show it: with adaptive steps as much error is allowed as a weak coupling makes.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchdil.compiled import memory
from torchdil.modes import no_tangents, observed_by, plain_saving, transforms_active
from torchdil.ode.equation import Equation
from torchdil.ode.field import same, uses_time
from torchdil.ode.walk import AdaptiveStats
from torchdil.probe import is_random, mixes_samples
from torchdil.problem import Problem
from torchdil.slope import look_once
from torchdil.solution import Report, Status, handle_failure, mask_failed, user_frame

# Whether a function mixes samples is looked at again at every so many calls, and where a part of it begins or ends training.
_EVERY = 50
# A step should be so many roundings of t at least.
_DIGITS = 4


class Flaw(NamedTuple):
    """What is wrong with f.

    Attributes:
        text: what to say of it, as a part of a sentence.
        random: whether it is that f is random, so that no solve of it can be made sense of.
    """

    text: str
    random: bool = False


def flaw(equation: Equation, adaptive: bool) -> Flaw | None:
    """What is wrong with f; None where nothing is seen."""
    if transforms_active():  # no values to compare
        return None
    func = equation.func
    training = tuple([part.training for part in func.modules()]) if isinstance(func, nn.Module) else ()
    key, known = ("flaw", equation.layout.batch_shape, equation.layout.shapes, training), memory(func)
    mixing: Flaw | None
    mixing, calls = known.get(key, (None, 0))
    thorough = mixing is not None or calls % _EVERY == 0  # it may have been mended
    seen = _seen(equation, adaptive, thorough) if adaptive or thorough else None
    random = seen is not None and seen.random
    if thorough and not random:
        mixing = seen
    known[key] = mixing, calls + (not random)
    return mixing if seen is None else seen


def _seen(equation: Equation, adaptive: bool, thorough: bool) -> Flaw | None:
    y, f = equation.start.detach(), equation.first_slope
    thorough = thorough and len(y) > 1
    if not (adaptive or thorough):
        return None
    with torch.no_grad(), no_tangents(), plain_saving(), observed_by(None):
        value = f(y)
        # An integration with steps that no error can be made small for takes all steps that it may.
        if adaptive and not same(f(y), value):
            return Flaw(is_random("func"), random=True)
        if not thorough:
            return None
        size = y.abs().nan_to_num(0.0, 0.0, 0.0).amax()
        away = (size + (size == 0)) * torch.linspace(0.5, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)
        even = torch.arange(len(y), device=y.device) % 2 == 0
        for moved in (even, ~even):
            try:
                others = f(torch.where(moved[:, None], y + away, y))[~moved]
            except Exception:  # a function may refuse the points that are tried here
                continue
            if not same(others, value[~moved]) and same(f(y), value):
                return Flaw(mixes_samples("func", "ode"))
    return None


def look_at_slope(equation: Equation, on_failure: str) -> None:
    """Tell, at the first call with f, if its derivative is not its slope: a step of an implicit method hides much of that."""
    if transforms_active():
        return
    look_once(Problem("ode", False, equation.first_slope), equation.start.detach(), equation.func, "func", on_failure)


def warn_of_rounded_times(equation: Equation, steps: int) -> None:
    """Warn if f is given times that differ by less than the digits of y can tell, on a way of so many steps."""
    if transforms_active():
        return
    first, last = equation.ends
    if max(abs(first), abs(last)) <= 2 * abs(last - first):  # it would take millions of steps
        return
    dtype = pytree.tree_leaves(equation.y0)[0].dtype
    digits, step = torch.finfo(dtype).eps * max(abs(first), abs(last)), abs(last - first) / max(steps, len(equation.t) - 1)
    if step < _DIGITS * digits and uses_time(equation.func, equation.y0):
        warnings.warn(
            f"func is given t in the dtype of y, {dtype}, whose numbers near {last:.6g} are {digits:.1g} apart, too much for "
            f"steps of {step:.1g}: let t begin near 0, or use float64.",
            UserWarning,
            stacklevel=user_frame(),
        )


def tell(cause: str, name: str, equation: Equation, on_failure: str, report: Report) -> None:
    """Report all samples as failed for this cause and apply the policy; `name`: of the method."""
    start = equation.start.detach()
    status = torch.full((len(start),), int(Status.not_stationary), device=start.device)
    zeros, everyone = torch.zeros_like(start[:, 0]), torch.ones_like(status, dtype=torch.bool)
    none = torch.zeros_like(status)
    stats = AdaptiveStats(name, none, zeros, zeros, causes=[(cause, everyone)], accepted=none, rejected=none)
    report.forward = report.outcome(status, stats)
    handle_failure("forward", report.forward, on_failure, report)


def unsolved(cause: str, states: Tensor, on_failure: str, report: Report) -> Tensor:
    """The states that were found all the same, (B, T, D), with the gradient that the policy has for failed samples."""
    assert report.forward is not None
    status, stats = report.forward
    failed = torch.ones_like(status, dtype=torch.bool).reshape(-1)
    stats.causes = [(cause, failed)]
    report.forward = report.forward._replace(status=torch.full_like(status, int(Status.not_stationary)))
    if states.requires_grad and on_failure in ("zero", "nan"):
        states = states.clone()
        states.register_hook(lambda v: mask_failed(v, failed, on_failure))
    return states
