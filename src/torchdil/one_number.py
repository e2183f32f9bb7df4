"""Tensors of a trace that are one number everywhere.

Autograd begins with a tensor of ones in the shape of the value, so that what is traced seems to need the value; and it
multiplies on, so that what the derivative of a square is multiplied with is a tensor, too. As numbers they cost nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

# Such tensors: the number, or the place of the argument that it is.
_FILLED = {aten.ones.default: 1.0, aten.ones_like.default: 1.0, aten.new_ones.default: 1.0}
_FILLED |= {aten.zeros.default: 0.0, aten.zeros_like.default: 0.0, aten.new_zeros.default: 0.0}
_FILLED_BY = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2, aten.scalar_tensor.default: 0}
# Nothing at all where the shape stays what it is ...
SHAPED = {aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.unsqueeze.default}
SHAPED |= {aten.squeeze.dim, aten.squeeze.default, aten.detach.default, aten.alias.default, aten.lift_fresh.default}
# ... and what else leaves them what they are.
_MOVED = {aten.t.default, aten.transpose.int, aten.permute.default, aten.clone.default, aten._to_copy.default}


def number_of(node: fx.Node, target: Any, numbers: dict[fx.Node, float]) -> float | None:
    """The number that the result of a call is everywhere, whatever the function reads; those of its arguments are `numbers`."""
    meta, sources = node.meta.get("val"), node.all_input_nodes
    if not isinstance(meta, Tensor) or not meta.dtype.is_floating_point:
        return None
    found: Any = _FILLED.get(target)
    if target in _FILLED_BY:
        found = node.args[_FILLED_BY[target]]
    elif target is aten.pow.Tensor_Scalar and node.args[1] == 0.0:
        found = 1.0
    elif sources and all(source in numbers for source in sources):
        if target in SHAPED or target in _MOVED:
            found = numbers[sources[0]]
        elif torch.Tag.pointwise in getattr(target, "tags", ()) and not node.kwargs:
            found = target(*fx.node.map_arg(node.args, lambda source: _one(source, numbers[source]))).item()
    # Rounded as the tensor is.
    return float(torch.tensor(found, dtype=meta.dtype, device="cpu")) if isinstance(found, (int, float)) else None


def _one(node: fx.Node, number: float) -> Tensor:
    like = node.meta["val"]
    # Where the function computes: a GPU divides by a number in another way than a CPU.
    return torch.full([1] * like.ndim, number, dtype=like.dtype, device=like.device)
