"""Whether a symmetric J has a negative eigenvalue: a stationary point of an argmin that is no minimum."""

from __future__ import annotations

import torch
from torch import Tensor

from torchdil.linear.auto import direct_pays
from torchdil.linear.cg import CG
from torchdil.operator import Operator
from torchdil.solution import Status

# Steps of Lanczos, from a random start, that look for negative curvature where J is too large to factorise.
_PROBE_STEPS = 20


def negative_curvature(operator: Operator) -> Tensor:
    """Which samples have it, (B,): exactly for small unknowns, else as a few Lanczos steps see it."""
    with torch.no_grad():
        samples, n = operator.shape
        if not direct_pays(samples, n, beside_cg=operator.y.device.type == "cpu"):
            generator = torch.Generator(operator.y.device).manual_seed(0)
            probe = torch.randn(operator.shape, generator=generator, dtype=operator.y.dtype, device=operator.y.device)
            # A direction of negative curvature has a part of some 1/√n in the probe, and is met before the rest is below that.
            rtol = 0.01 / n**0.5
            return CG(rtol=rtol, max_steps=_PROBE_STEPS).solve(operator, probe).status == Status.negative_curvature
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
