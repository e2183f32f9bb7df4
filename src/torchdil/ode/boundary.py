"""The tensors from outside that f depends on, for nodes of the graph that evaluate f again in their backward pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchdil.graph import Outside, dependence, outside
from torchdil.modes import full_precision, plain_saving, tangents_active, transforms_active
from torchdil.ode.equation import Equation
from torchdil.ode.field import Field
from torchdil.ode.methods import Method


def boundary(equation: Equation, field: Field, method: Method, times: Tensor, states: Tensor, asked: str) -> list[Tensor]:
    """What f depends on besides t and y: read off the graph of one evaluation, since f may branch at all stages.

    Args:
        times: the grid, (N,).
        states: the states there, (B, N, D); stages are taken between them.
        asked: the argument that made this necessary, for the sentences.
    """
    if transforms_active() or tangents_active():
        raise RuntimeError(f'{asked} cannot be used in forward mode or torch.func: use gradient="ift" without checkpoint.')
    if not torch.is_grad_enabled():
        return []
    with plain_saving(), full_precision(states):
        times, states = times.detach(), states.detach()
        inside = [c for c in method.c if c not in (0.0, 1.0)]
        at = torch.cat([times, *(torch.lerp(times[:-1], times[1:], c) for c in inside)])
        leaf = torch.cat([states, *(torch.lerp(states[:, :-1], states[:, 1:], c) for c in inside)], dim=1).requires_grad_()
        before = outside(leaf, equation.func)
        slopes = field(equation.func, at.to(leaf.dtype), leaf)
        known = (*pytree.tree_leaves(equation.y0), equation.t)
        _, tensors, _, hidden = dependence(slopes, leaf, before, known, equation.func)
    if hidden:
        raise RuntimeError(
            f"func uses a non-leaf tensor that is not a variable of its closure, which {asked} cannot differentiate: make it "
            'one, or use gradient="ift" without checkpoint.'
        )
    return tensors


def check_complete(slopes: Tensor, leaf: Tensor, tensors: list[Tensor], asked: str) -> None:
    """Raise if f, evaluated at `leaf` later on, depends on a parameter that was not among `tensors`."""
    known = {id(t) for t in tensors}
    if any(id(t) not in known for t in dependence(slopes, leaf, Outside(0, []), tensors, None).tensors):
        raise RuntimeError(
            f"func uses a parameter that it was not seen to use in the forward pass, whose gradient {asked} would lose: "
            'use gradient="ift" without checkpoint.'
        )
