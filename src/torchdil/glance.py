"""An answer that is good, recognised by one function of tensors.

Most answers in training are: F is small against its natural size, and no negative curvature is met on the way to a minimum.
Where J is traced, one call of a traced function says so. What it does not confirm is looked into by `torchdil.solve`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torchdil import batch
from torchdil.implicit import Point
from torchdil.linear.curvature import look_at_once
from torchdil.linear.units import squares_within
from torchdil.problem import natural_change
from torchdil.solution import Status


class Good(NamedTuple):
    """The numbers of a good answer, (B,) each: ‖F‖, what it was to be below, ‖y‖."""

    residual: Tensor
    tolerance: Tensor
    norm: Tensor


def glance(point: Point, status: Tensor, start: Tensor | None, rtol: float, atol: float, looks: bool) -> Good | None:
    """Whether y is good in all samples, by J's trace; None where there is none, or it takes a closer look.

    Args:
        point: y, F and J, which is told of a good answer.
        status: of the samples, as the solver left them, (B,).
        start: where it started, (B, n), or None.
        rtol, atol: ‖F‖ is to be below the larger of atol and rtol ‖J c‖, c being the `natural_change`.
        looks: whether to look for negative curvature, too.
    """
    linear, y = point.operator.linear(transpose=True), point.operator.y
    least, most = squares_within(y.dtype)
    if linear is None or not len(y) or least >= most:
        return None
    look = look_at_once(point.operator) if looks else None
    if looks and look is None:
        return None
    given = () if start is None else (start,)

    def routine(
        product: Callable[[Tensor], tuple[Tensor]], status: Tensor, y: Tensor, F: Tensor, *more: Tensor
    ) -> tuple[Tensor, ...]:
        change = natural_change(y, more[0] if given else None, batch.norm)
        moved, *seen = product(change) if look is None else look.routine(product, change, *more[len(given) :])
        size, residual, norm = batch.norm(moved), batch.norm(F), batch.norm(y)
        tolerance = (rtol * size).clamp_min(atol)
        # Norms of numbers whose squares are none are wrong; an F that is too small for its norm is small enough.
        sizes = torch.stack((size, torch.linalg.vector_norm(change, torch.inf, dim=1)))
        plain = ((sizes >= least) & (sizes <= most)).all(dim=0)
        good = plain & (residual <= tolerance) & (norm < torch.inf) & (status == int(Status.converged))
        return (good & seen[0] if seen else good).all(), residual, tolerance, norm, *seen[1:]

    key = ("glance", len(given), rtol, atol, None if look is None else look.key)
    tensors = (status, y, point.F.detach(), *given, *(() if look is None else look.tensors))
    try:
        good, residual, tolerance, norm, *factors = linear.run(key, routine, *tensors)
    except RuntimeError:  # out of memory, for example: step by step takes less
        return None
    if not bool(good):
        return None
    point.good, point.operator.factors = True, tuple(factors)
    return Good(residual, tolerance, norm)
