"""What a move of y tells of a function, and what to say of it: it mixes samples, or is random."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torchdil import batch


def direction(y: Tensor) -> Tensor:
    """A step in a random direction, the same each time, of the size of y or 1, (B, n)."""
    generator = torch.Generator("cpu").manual_seed(0)  # whatever torch's default device is
    d = torch.randn(y.shape, generator=generator, dtype=torch.float64, device="cpu").to(y)
    return batch.scale(batch.norm(y).clamp_min(1.0) / batch.norm(d), d)


def mixes(evaluate: Callable[[Tensor], Tensor], y: Tensor, F: Tensor) -> bool:
    """Whether F, (B, n), of the other samples changes when y of the first one does."""
    if len(y) < 2:
        return False
    moved = y.clone()
    moved[0] += 0.1 * direction(y)[0]
    change = batch.norm(evaluate(moved) - F)[1:]
    return bool((change > torch.finfo(y.dtype).eps ** 0.5 * (batch.norm(F) + batch.norm(y))[1:]).any())


def mixing(evaluate: Callable[[Tensor], Tensor], y: Tensor, name: str, kind: str) -> str:
    """What to say of a function that mixes samples; empty if it does not, is random, or refuses the points tried here."""
    try:
        with torch.no_grad():
            F = evaluate(y)
            mixed = torch.equal(evaluate(y), F) and mixes(evaluate, y, F)
    except Exception:
        return ""
    return mixes_samples(name, kind) if mixed else ""


def is_random(name: str) -> str:
    """What to say of such a function."""
    return (
        f"{name} gives another value each time it is called: switch dropout off with .eval(), or draw the noise outside, or, "
        "if a module in it updates itself in training, as spectral_norm does, call it under torch.nn.utils.parametrize.cached()"
    )


def mixes_samples(name: str, kind: str) -> str:
    """What to say of such a function of a problem of this kind."""
    ways = {
        "argmin": "return one score of shape () for all",
        "plan": "treat each row of x and u alone",
        "ode": "use batch_dims=0, or index the last axis, y[..., 0]",
    }
    whole = ways.get(kind, "use batch_dims=0")
    return f"{name} mixes samples, which are solved on their own: {whole}, or switch batch normalisation to .eval()"
