"""Per-sample vectors.

Inside the library an unknown is one matrix `y` of shape (B, n): B independent problems of n unknowns each. `Layout` converts
between that and what the user has (a tensor or a nested tuple/dict of tensors, with or without a batch axis); the functions
below are the only linear algebra that solvers need on it. One problem is a batch of one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch.utils import _pytree as pytree

from torchdil.settings import check_count


def mapped(*tensors: Tensor) -> bool:
    """Whether any is many tensors at once, of `torch.func.vmap`, which only torch's own operations can read."""
    return any(functorch.is_batchedtensor(tensor) for tensor in tensors)


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Per-sample inner product, (B, n) x (B, n) -> (B,)."""
    # One large problem: no temporary. A batched matrix product would need none either, but may round to TF32 on a GPU.
    return torch.dot(a[0], b[0]).view(1) if a.shape[0] == 1 else (a * b).sum(dim=1)


def norm(a: Tensor) -> Tensor:
    """Per-sample Euclidean norm, (B, n) -> (B,)."""
    return torch.linalg.vector_norm(a, dim=1)


def length(a: Tensor) -> Tensor:
    """The same in units of the largest number, whose square may be 0 or infinite in this dtype: what decides must not be."""
    unit = a.abs().amax(dim=1)
    unit = torch.where((unit > 0) & (unit < torch.inf), unit, 1.0)
    return unit * norm(a / unit.unsqueeze(1))


def scale(c: Tensor, a: Tensor) -> Tensor:
    """Per-sample scaling: row b of `a` times c[b]."""
    return c.unsqueeze(1) * a


def rows(A: Tensor, x: Tensor) -> Tensor:
    """A x per sample: the inner products of x with m rows, (B, m, n) x (B, n) -> (B, m)."""
    return torch.bmm(x.unsqueeze(1), A.mT).squeeze(1)  # and not A x: up to seven times faster on a CPU


def combine(A: Tensor, c: Tensor) -> Tensor:
    """Aᵀ c per sample: a combination of m rows, (B, m, n) x (B, m) -> (B, n)."""
    return torch.bmm(c.unsqueeze(1), A).squeeze(1)


def cholesky_solve(b: Tensor, L: Tensor) -> Tensor:
    """(L Lᵀ)⁻¹ b, (*, n, m): on a GPU by two triangles, as torch's own takes memory there, which no graph can."""
    if not L.is_cuda:
        return torch.cholesky_solve(b, L)
    return torch.linalg.solve_triangular(L.mT, torch.linalg.solve_triangular(L, b, upper=False), upper=True)


def select(mask: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Row b of `a` where mask[b], else of `b`. Unlike a product with the mask, this keeps a NaN of one side out."""
    return torch.where(mask.unsqueeze(1), a, b)


def finite(a: Tensor) -> Tensor:
    """Which samples hold finite numbers only, (B, n) -> (B,)."""
    return torch.isfinite(a).all(dim=1)


def divide(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0: a finished sample must not turn into NaN."""
    return torch.where(b != 0, a / torch.where(b != 0, b, 1.0), 0.0)


def check_every(device: torch.device) -> int:
    """How many steps to take between two tests of convergence: on an accelerator each test is a synchronisation."""
    return 1 if device.type == "cpu" else 5


def default_rtol(dtype: torch.dtype) -> float:
    """The relative tolerance used where the user gives none: 1e-10 (float64), 1e-5 (float32), 1e-2 (half precision)."""
    return {torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 1e-2)


@dataclass(frozen=True)
class Layout:
    """How the user's unknown maps to a (B, n) matrix.

    Attributes:
        spec: the nesting of the unknown.
        shapes: the per-sample shape of each leaf.
        batch_shape: the leading axes that number the problems; () for one problem.
    """

    spec: pytree.TreeSpec
    shapes: tuple[torch.Size, ...]
    batch_shape: torch.Size

    @staticmethod
    def of(y: Any, batch_dims: int, name: str = "y0") -> Layout:
        check_count("batch_dims", batch_dims, 0)
        leaves, spec = pytree.tree_flatten(y)
        first = leaves[0]
        if any(leaf.dim() < batch_dims for leaf in leaves):
            raise ValueError(f"{name} must have at least batch_dims={batch_dims} axes in every tensor.")
        batch_shape = first.shape[:batch_dims]
        if any(leaf.shape[:batch_dims] != batch_shape for leaf in leaves):
            shapes = ", ".join(str(tuple(leaf.shape)) for leaf in leaves)
            raise ValueError(f"{name} must have the same first {batch_dims} axes (the batch) in every tensor, got {shapes}.")
        layout = Layout(spec, tuple(leaf.shape[batch_dims:] for leaf in leaves), batch_shape)
        if layout.size == 0:
            raise ValueError(f"{name} must hold at least one number per problem, got none.")
        return layout

    @property
    def samples(self) -> int:
        return math.prod(self.batch_shape)

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def ravel(self, y: Any) -> Tensor:
        """The user's unknown as a (B, n) matrix; a view where the unknown is one contiguous tensor."""
        found = leaves(y if self.spec.is_leaf() else in_order(y, self.spec))
        try:
            parts = [leaf.reshape(self.samples, math.prod(shape)) for leaf, shape in zip(found, self.shapes, strict=True)]
        except (AttributeError, RuntimeError, ValueError) as error:
            # The first call was checked.
            expected = ", ".join(str(tuple(self.batch_shape + shape)) for shape in self.shapes)
            got = ", ".join(str(tuple(leaf.shape)) if isinstance(leaf, Tensor) else type(leaf).__name__ for leaf in found)
            raise ValueError(f"The function must return the shape of y, {expected}, at every call, got {got}.") from error
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def unravel(self, y: Tensor) -> Any:
        """The inverse of `ravel`."""
        if self.spec.is_leaf():
            return y.reshape(self.batch_shape + self.shapes[0])
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = [y] if len(sizes) == 1 else y.split(sizes, dim=1)
        leaves = [part.reshape(self.batch_shape + shape) for part, shape in zip(parts, self.shapes, strict=True)]
        return pytree.tree_unflatten(leaves, self.spec)


def in_order(tree: Any, spec: pytree.TreeSpec) -> Any:
    """The same with the keys of its dicts in the order of `spec`, where these are the same."""
    if pytree.tree_structure(tree) == spec:
        return tree

    def like(part: Any, model: Any) -> Any:
        if isinstance(part, dict) and isinstance(model, dict) and part.keys() == model.keys():
            return {key: like(part[key], model[key]) for key in model}
        if type(part) in (tuple, list) and type(model) is type(part) and len(part) == len(model):
            return type(part)(like(*pair) for pair in zip(part, model, strict=True))
        return part

    return like(tree, pytree.tree_unflatten(range(spec.num_leaves), spec))


def leaves(tree: Any) -> list[Any]:
    """What a nested structure holds."""
    # A tensor, or no arguments, is what most are; torch's own way takes as long as some solves.
    if isinstance(tree, Tensor):
        return [tree]
    return [] if isinstance(tree, tuple) and not tree else pytree.tree_leaves(tree)


def map_tensors(fn: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply `fn` to every tensor in a nested structure and leave the rest alone."""
    return fn(tree) if isinstance(tree, Tensor) else pytree.tree_map_only(Tensor, fn, tree)
