"""What bad trajectories and bad control problems share: spoiled numbers, what was heard, and how results are compared."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bad_problems import NUMBERS, Draw, Wrong
from torch import Tensor

import torchdil as dil


def junk(draw: Draw, t: Tensor) -> Any:
    """Something in place of a tensor."""
    other = torch.float32 if t.dtype == torch.float64 else torch.float64
    return draw.choice(
        [
            None,
            1.0,
            "A",
            t.tolist(),
            np.zeros(t.shape),
            t.long(),
            t.isnan(),
            t.half(),
            t.to(torch.complex64),
            t.to(other),
            t.to("meta"),
            t.unsqueeze(-1),
            t.reshape(-1)[:0],
            t.reshape(-1),
            t[..., :1] if t.dim() else t.view(1),
            torch.cat([t, t], -1) if t.dim() else t.view(1, 1),
            t.sum(),
            t.to_sparse() if t.dim() and t.numel() else t.long(),
        ]
    )


def spoil_number(draw: Draw, t: Tensor) -> Tensor:
    """A number that is none, somewhere or everywhere; or a size near the ends of the dtype."""
    t = t.clone()
    if t.numel() == 0:
        return t
    powers = (300, 160, 100, -100, -160, -300) if t.dtype == torch.float64 else (37, 25, 15, -15, -25, -37)
    kind = draw.randrange(3)
    if kind == 0:
        t.view(-1)[draw.randrange(t.numel())] = draw.choice(NUMBERS)
    elif kind == 1:
        t.fill_(draw.choice(NUMBERS))
    else:
        t *= 10.0 ** draw.choice(powers)
    return t


def heard(policy: Any, call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """The result of a call, None if it raised as the policy says, and what it warned of."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("always", dil.ConvergenceWarning)
        try:
            found = call()
        except dil.ConvergenceError as error:
            if policy != "raise":
                raise Wrong("raised although the policy is another") from error
            return None, []
    messages = [str(w.message) for w in said]
    if messages and policy != "warn":
        raise Wrong("a warning although the policy is another")
    return found, messages


def length(t: Tensor) -> float:
    """The norm, also of numbers whose squares are none."""
    t = t.detach()
    largest = t.abs().max() if t.numel() else t.new_zeros(())
    return float(largest * (t / largest).norm()) if float(largest) > 0 else float(largest)


def expect(found: Tensor, expected: Tensor, tolerance: float, size: float, what: str) -> None:
    """Raise if a result, in its own dtype, is not the expected one; where that is no number, nothing is known."""
    if not bool(expected.isfinite().all()):
        return
    tiny = max(100 * torch.finfo(found.dtype).tiny ** 0.5, 1e-30)
    if not length(found.double() - expected) <= tolerance * max(size, length(expected)) + tiny:
        raise Wrong(f"{what}: {found.tolist()}, by the oracle {expected.tolist()}")
