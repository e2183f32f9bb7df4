"""The tensors from outside that f depends on, for nodes of the graph that evaluate f again in their backward pass."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchdil.graph import age, dependence
from torchdil.modes import full_precision, plain_saving, transforms_active
from torchdil.ode.equation import Equation
from torchdil.ode.field import Field


def boundary(equation: Equation, field: Field, times: Tensor, states: Tensor, asked: str) -> list[Tensor]:
    """What f depends on besides t and y: read off the graph of one evaluation.

    Args:
        times: where to evaluate, (N,).
        states: and at which states, (B, N, D): those of the answer, since f may branch.
        asked: the argument that made this necessary, for the sentences.
    """
    if transforms_active():
        raise RuntimeError(f'{asked} cannot be used inside torch.func transforms: use gradient="ift" without checkpoint.')
    if not torch.is_grad_enabled():
        return []
    with plain_saving(), full_precision(states):
        leaf = states.detach().requires_grad_()
        first = age(leaf)
        slopes = field(equation.func, times.detach().to(leaf.dtype), leaf)
        known = (*pytree.tree_leaves(equation.y0), equation.t)
        _, tensors, hidden = dependence(slopes, leaf, first, known, equation.func)
    if hidden:
        raise RuntimeError(
            f"func uses a non-leaf tensor that is not a variable of its closure, which {asked} cannot differentiate: make it "
            'one, or use gradient="ift" without checkpoint.'
        )
    return tensors
