"""Whether a symmetric J has a negative eigenvalue: a stationary point of an argmin that is no minimum."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor

from torchdil.linear.auto import direct_pays
from torchdil.linear.cg import CG
from torchdil.linear.dense import factorised
from torchdil.linear_graph import Bound
from torchdil.operator import Operator
from torchdil.solution import Status

# Steps of Lanczos, from a random start, that look for negative curvature where J is too large to factorise. Where J is not
# ill-conditioned few are taken: they end when what is left is less than the part of any direction in that start.
_PROBE_STEPS = 200
_PROBE = "probe"


def negative_curvature(operator: Operator) -> Tensor:
    """Which samples have it, (B,): exactly for small unknowns, else as Lanczos steps see it."""
    with torch.no_grad():
        samples = len(operator.y)
        if not _directly(operator):
            _, status, stats = _cg(operator).solve(operator, _probe(operator))
            if operator.source is not None:
                operator.source.took(_PROBE, stats.steps, 0)
            return status == Status.negative_curvature
        H = operator.dense()
        H = H if H.dtype in (torch.float32, torch.float64) else H.float()  # LAPACK knows no half precision
        if not bool(torch.linalg.cholesky_ex(H)[1].any()):  # positive definite, all of them
            return torch.zeros(samples, dtype=torch.bool, device=H.device)
        finite = torch.isfinite(H).all(dim=2).all(dim=1)
        H, slack = torch.where(finite[:, None, None], 0.5 * (H + H.mT), 0.0), torch.finfo(operator.y.dtype).eps ** 0.5
        # A Cholesky factor of H with that slack, no diagonal entry being larger than the largest eigenvalue, settles most cases
        # for a fraction of the price.
        diagonal = torch.diagonal(H, dim1=1, dim2=2).abs().amax(dim=1, keepdim=True)
        if not bool(torch.linalg.cholesky_ex(H + torch.diag_embed((slack * diagonal).expand(H.shape[:2])))[1].any()):
            return torch.zeros_like(finite)
        values = torch.linalg.eigvalsh(H)
        return values[:, 0] < -slack * values.abs().amax(dim=1)


class Look(NamedTuple):
    """A look at the curvature as one function of tensors.

    Attributes:
        key: what the function depends on, besides its arguments.
        routine: `(product, p, *tensors) -> (J p, good, *factors)`, where `product(p)` is a tuple of one and `good`, (B,), says
            which samples have no negative curvature, as far as `negative_curvature` sees it.
        tensors: its arguments.
    """

    key: Hashable
    routine: Callable[..., tuple[Tensor, ...]]
    tensors: tuple[Tensor, ...] = ()


def look_at_once(operator: Operator) -> Look | None:
    """How to look with a traced J; None where it cannot be so. A direct look leaves the factors of J for `Dense`."""
    if operator.source is None or operator.y.dtype not in (torch.float32, torch.float64):
        return None
    if _directly(operator):
        return Look("factorised", factorised) if operator.shape[1] <= operator.dense_chunk else None
    cg, count = _cg(operator), operator.source.expected(_PROBE)

    def probed(product: Bound, p: Tensor, probe: Tensor) -> tuple[Tensor, ...]:
        tolerance = cg.tolerance(probe)
        _, noted, positive, *_ = cg.steps_at_once(cg.systems(product, count), probe, tolerance, probe)
        met = noted[-1, 0] <= tolerance
        return product(p)[0], positive & met

    return Look((_PROBE, count), probed, (_probe(operator),)) if count else None


def _directly(operator: Operator) -> bool:
    samples, n = operator.shape
    return direct_pays(samples, n, beside_cg=operator.y.device.type == "cpu")


def _cg(operator: Operator) -> CG:
    # A direction of negative curvature has a part of some 1/√n in the probe, and is met before the rest is below that.
    return CG(rtol=0.01 / operator.shape[1] ** 0.5, max_steps=_PROBE_STEPS)


def _probe(operator: Operator) -> Tensor:
    # The same for all samples, whose verdict must not depend on their place.
    y = operator.y
    generator = torch.Generator(y.device).manual_seed(0)
    return torch.randn(y.shape[1], generator=generator, dtype=y.dtype, device=y.device).expand_as(y).contiguous()
