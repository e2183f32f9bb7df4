"""Models of many seeds trained side by side: a leading axis S of all weights numbers them.

The models share nothing, so with a loss that is a sum over seeds and an optimiser that works elementwise the numbers are those
of S separate runs; only the cost of the Python around them is shared. Each seed draws from a generator of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn


class Perceptrons(nn.Module):
    """A tanh network for each seed, with the weights that `nn.Linear` would draw: (S, B, in) -> (S, B, out)."""

    def __init__(self, sizes: Sequence[int], generators: Sequence[torch.Generator], dtype: torch.dtype):
        super().__init__()
        self.weights, self.biases = nn.ParameterList(), nn.ParameterList()
        for inputs, outputs in pairwise(sizes):
            bound = inputs**-0.5
            drawn = [torch.rand(inputs + 1, outputs, generator=g, dtype=torch.float64) for g in generators]
            both = (bound * (2 * torch.stack(drawn) - 1)).to(dtype)
            self.weights.append(nn.Parameter(both[:, :-1].clone()))
            self.biases.append(nn.Parameter(both[:, -1:].clone()))

    def forward(self, y: Tensor) -> Tensor:
        for k, (weight, bias) in enumerate(zip(self.weights, self.biases, strict=True)):
            y = (torch.tanh(y) if k else y) @ weight + bias
        return y


class Field(Perceptrons):
    """A network as the right-hand side of an ODE."""

    def forward(self, t: Tensor, y: Tensor) -> Tensor:
        return super().forward(y)


def alone(model: nn.Module, k: int) -> nn.Module:
    """A copy that has seed number k only."""
    part = copy.deepcopy(model)
    for parameter in part.parameters():
        parameter.data, parameter.grad = parameter.data[k : k + 1].clone(), None
    return part


def choose(mask: Tensor, yes: Tensor, no: Tensor | float) -> Tensor:
    """`yes` for the seeds in the mask (S,), `no` for the others."""
    return torch.where(mask.view(-1, *[1] * (yes.ndim - 1)), yes, no)


def clip(model: nn.Module, largest: float | None) -> Tensor:
    """Scales the gradient of each seed to a norm of at most `largest`; returns which seeds have a finite one, (S,).

    The gradient of the others becomes zero.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    norm = sum(g.flatten(1).square().sum(dim=1) for g in grads).sqrt()
    finite = norm.isfinite()
    share = torch.ones_like(norm) if largest is None else largest / norm.clamp_min(largest)
    for grad in grads:
        grad.copy_(choose(finite, share.view(-1, 1, 1) * grad, 0.0))
    return finite
