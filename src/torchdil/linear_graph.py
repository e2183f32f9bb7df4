"""A linear function as a list of operations, of a vector and of what was worked out before; also in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, fx

from torchdil.matvec import mm

aten = torch.ops.aten

# Numbers that a product is made with, of all samples, from which on float32 pays.
_MANY = 2**17
# Their results are nobody else's.
_FRESH = {mm, aten.mm.default, aten.addmm.default, aten.addmm_.default}


@dataclass
class LinearGraph:
    """A linear function, as operations: `module(vector, *(saved[i] for i in places))` gives its outputs.

    Attributes:
        module: the operations.
        places: of what it takes from the prelude.
        transposes: of those that are the transpose of another of them, which; else None.
        multiplies: whether matrices are multiplied or images convolved, and no operation names a dtype.
    """

    module: fx.GraphModule
    places: list[int]
    transposes: list[int | None]
    multiplies: bool

    def takes_single(self, samples: int, saved: Sequence[Tensor]) -> bool:
        """Whether it takes less time in float32, so much that converting what it is made with pays."""
        return self.multiplies and samples * sum(saved[place].numel() for place in self.places) >= _MANY


class Bound:
    """A linear function at a point: vector -> tuple of tensors."""

    def __init__(self, function: LinearGraph, saved: Sequence[Tensor]):
        self._module: Any = function.module
        self._transposes, self._saved = function.transposes, saved

    def __call__(self, vector: Tensor) -> tuple[Tensor, ...]:
        return cast(tuple[Tensor, ...], self._module(vector, *self._saved))

    def single(self) -> Callable[[Tensor], tuple[Tensor, ...]]:
        """The same for float64, worked out in float32: products of matrices, and reading them, take half the time."""
        given = zip(self._saved, self._transposes, strict=True)
        once = [t.float() if of is None and t.dtype == torch.float64 else t for t, of in given]
        saved = [t if of is None else once[of].t() for t, of in zip(once, self._transposes, strict=True)]
        return lambda vector: tuple(t.double() for t in self._module(vector.float(), *saved))


def add_in_place(part: LinearGraph) -> None:
    """Let sums of matrix products, gradients as large as matrices of weights, be made in one place."""
    for node in part.module.graph.nodes:
        if node.target is aten.addmm.default and node.args[0].target in _FRESH and len(node.args[0].users) == 1:
            node.target = aten.addmm_.default
    part.module.recompile()
