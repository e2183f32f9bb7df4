"""Why a forward solve failed: what can be seen of the function, once it is known that there is something to look for.

Nothing here runs for a solve that succeeds. Each test is a few evaluations of F near the answer.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchdil import batch
from torchdil.probe import direction, is_random, mixes, mixes_samples
from torchdil.problem import Problem, gradient
from torchdil.slope import is_slope
from torchdil.solution import Result, Status, which

# By how much y has grown if it runs away, and how small the slope of ‖F‖ is where F cannot be made smaller.
_FAR, _FLAT = 1e6, 1e-3


def diagnose(problem: Problem, start: Tensor, result: Result, args: Any, solver: str) -> str:
    """The cause and what to change, as a part of a sentence; empty where none is seen.

    Args:
        problem: what was to be solved.
        start: where the solver started, (B, n).
        result: what it returned; some samples have failed.
        args: the arguments of the user's function.
        solver: the name of the solver's class.
    """
    try:
        with torch.no_grad():
            return _cause(problem, start, result, args, solver)
    except Exception:  # a function may refuse the points that are tried here
        return ""


def _cause(problem: Problem, start: Tensor, result: Result, args: Any, solver: str) -> str:
    assert problem.statement is not None
    name, kind = problem.statement.argument, problem.name
    failed = result.status != Status.converged
    y = batch.select(batch.finite(result.value), result.value, start)
    F = problem.evaluate(start)
    if not bool(batch.finite(F)[failed].all()):
        return _not_finite(name, start, args)
    F = problem.evaluate(y)
    if not torch.equal(F.nan_to_num(), problem.evaluate(y).nan_to_num()):
        return is_random(name)
    if mixes(problem.evaluate, y, F):
        return mixes_samples(name, kind)
    if kind in ("argmin", "root", "fixed_point") and not is_slope(problem, y):
        return f"the derivative of {name} is not its slope: use no detach(), item() or numpy on the way from y to its value"
    if bool((result.status[failed] == Status.negative_curvature).any()):
        return "the point is a maximum or a saddle: start elsewhere, or, to maximise a score, minimise its negative"
    if kind == "plan" and bool((failed & _beyond(F, problem.evaluate(start))).any()):
        wider = "use float64 or " if y.dtype != torch.float64 else ""
        return f"the states grow until {name} and its derivative are too large for {y.dtype}: {wider}a shorter horizon"
    if problem.objective is not None and problem.box is None and _falls(problem, start, y, failed):
        return f"{name} falls without end, so it has no minimum: add a term that grows, or check its sign"
    if bool((failed & jumps(problem, result.value)).any()):
        return f"the derivative of {name} jumps at the answer: smooth what makes it (relu, abs, max), or use bounds"
    if bool((result.status[failed] == Status.max_steps).all()):
        return ""  # all may be well so far
    if kind == "fixed_point" and solver == "Picard":
        return "y <- g(y) does not settle, because g does not contract: use solver=Anderson(), Broyden() or Newton()"
    if kind == "root" and _is_stuck(problem, result.value, failed):
        return f"{name} cannot be made smaller near here, and it is not 0: there may be no root, or start elsewhere"
    return ""


def _not_finite(name: str, start: Tensor, args: Any) -> str:
    if not bool(torch.isfinite(start).all()):
        return "y0 holds NaN or infinity: start elsewhere"
    for k, arg in enumerate(args):
        for t in (leaf for leaf in pytree.tree_leaves(arg) if isinstance(leaf, Tensor)):
            if bool((lost := ~torch.isfinite(t)).any()):
                rows = lost.flatten(1).any(dim=1) if t.dim() > 1 and len(t) == len(start) else None
                return f"args[{k}] holds NaN or infinity{'' if rows is None else f' ({which(rows)})'}: clean it"
    return f"{name} or its derivative is not finite at y0: start elsewhere, or check it there (a root or a logarithm of 0?)"


def _falls(problem: Problem, start: Tensor, y: Tensor, failed: Tensor) -> bool:
    """Whether y has run away, the objective has sunk as far, or it is linear."""
    assert problem.objective is not None
    far = batch.norm(y) > _FAR * (1 + batch.norm(start))
    sunk = problem.objective(y) < -_FAR * (1 + problem.objective(start).abs())
    F, elsewhere = problem.evaluate(y), problem.evaluate(y + direction(y))
    size = batch.length(F)
    same = batch.length(F - elsewhere) <= 4 * math.sqrt(y.shape[1]) * torch.finfo(y.dtype).eps * size
    return bool((failed & (far | sunk | (same & (size > 0)))).any())


def _beyond(*Fs: Tensor) -> Tensor:
    """Whose squares of F are no numbers of their dtype, at any of the points, (B,)."""
    return torch.stack([batch.finite(F) & ~batch.norm(F).isfinite() for F in Fs]).any(dim=0)


def jumps(problem: Problem, y: Tensor) -> Tensor:
    """Which samples' F changes by as much over a short way across y as over a longer one, (B,).

    Of a problem in a box ∇f is looked at: F jumps wherever a bound begins or ceases to hold y back, however smooth f is.
    """
    d, eps = direction(y), torch.finfo(y.dtype).eps

    def slope(y: Tensor) -> Tensor:
        if problem.box is None or problem.objective is None:
            return problem.evaluate(y)
        return gradient(problem.objective, y, "score")[0].detach()

    # Unstable dynamics turn a short way into a long one; what is a jump is one over a still shorter way, too.
    powers = (0.25, 0.4, 0.6) if problem.name == "plan" else (0.25, 0.4)
    changes = [batch.length(slope(y + eps**power * d) - slope(y - eps**power * d)) for power in powers]
    return torch.stack([near > 0.5 * far for far, near in itertools.pairwise(changes)]).all(dim=0)


def _is_stuck(problem: Problem, y: Tensor, failed: Tensor) -> bool:
    """Whether no direction makes ‖F‖ smaller to first order."""
    operator = problem.operator(y)
    F = operator.graph()[1].detach()
    fall = batch.norm(operator.rmv(F)) * batch.norm(y).clamp_min(1.0)
    return bool((failed & (fall <= _FLAT * batch.dot(F, F))).any())
