"""A vector times a large matrix, on a CPU.

Where a matrix does not fit into the caches and its rows have some hundred numbers, BLAS reads it at a third of the speed of the
memory. A batched product, and a sum of weighted rows as it is made for embeddings, read it at full speed. Where a product with
J is traced (`torchdil.linearize`), its matrix products are these.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchdil import batch

aten = torch.ops.aten
# Bytes of a matrix that no cache holds, and of its rows; a sum of rows that are longer is no faster than BLAS.
_LARGE, _ROWS, _SUMMED = 2**24, (512, 4096), 2048


def mm(a: Tensor, b: Tensor) -> Tensor:
    """A B, (m, k) x (k, n) -> (m, n)."""
    # Of many vectors at once TorchScript does not tell the shape.
    product = None if batch.mapped(a, b) or int(a.shape[0]) != 1 else _times(a.squeeze(0), b)
    return torch.mm(a, b) if product is None else product.unsqueeze(0)


def mv(a: Tensor, x: Tensor) -> Tensor:
    """A x, (m, n) x (n,) -> (m,)."""
    product = None if batch.mapped(a, x) else _times(x, a.mT)
    return torch.mv(a, x) if product is None else product


INSTEAD = {aten.mm.default: mm, aten.mv.default: mv}


def _times(x: Tensor, b: Tensor) -> Tensor | None:
    """xᵀ B, (k,) x (k, n) -> (n,); None where BLAS does as well."""
    rows, length = map(int, b.shape)  # plain numbers where TorchScript is traced, which would work them out each time
    contiguous = b.is_contiguous()
    if not contiguous:
        rows, length = length, rows
    size = b.itemsize * length
    known = b.is_cpu and b.dtype in (torch.float32, torch.float64)
    if rows * size < _LARGE or not known:
        return None
    if contiguous and _ROWS[0] <= size <= _SUMMED:
        every, none = torch.arange(rows, device=b.device), torch.zeros(1, dtype=torch.long, device=b.device)
        return torch.embedding_bag(b, every, none, False, 0, False, x.contiguous())[0].squeeze(0)  # Σ x[i] b[i]
    if not contiguous and b.mT.is_contiguous() and _ROWS[0] <= size <= _ROWS[1]:
        half = (rows + 1) // 2
        halves = b.as_strided((2, half, length), ((rows - half) * length, length, 1))  # an odd row is in both
        column = x.contiguous().as_strided((2, length, 1), (0, 1, length))  # by its strides a column, or it is read as a row
        found = torch.bmm(halves, column).squeeze(2)
        return found.view(rows) if rows == 2 * half else torch.cat((found[0], found[1, 1:]))
    return None
