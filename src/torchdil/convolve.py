"""Convolutions with few channels, or in float64, which cuDNN and oneDNN are not made for.

A prior of images has one channel and a handful of filters; these libraries are made for many channels and low precision, and
take many times as long as they have to. Where a product with J is traced (`torchdil.linearize`) its convolutions are these
instead. On a GPU: a kernel for few channels, torch's own matrix products else. On a CPU: torch's own matrix products, of some
rows of the image at a time, as the matrix of a whole large image fits into no cache and is fresh memory each time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from torchdil import batch

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for a CPU comes without it
    triton = None

aten = torch.ops.aten
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]

# Few channels, and few filters, of so many numbers each: a thread keeps all filters of a pixel. And an index has 32 bits.
_CHANNELS, _TAPS, _NUMBERS = 16, 81, 2**31
# Samples are the second axis of a launch.
_SAMPLES = 2**16
# What torch's own convolutions keep of a sample.
_COLUMNS = 2**27
# Bytes of that matrix on a CPU: from the first on it is made in strips of the second; and so few channels that its products
# are faster than oneDNN's gradient of an image.
_COLUMNS_ON_CPU, _STRIP, _NARROW = 2**23, 2**22, 8
_KNOWN = (torch.float32, torch.float64)
# Pixels of a program, in one row; four of them to a thread where a pixel that was read is used for many filters, else two.
_BLOCK, _MANY = 128, 4


def chosen(node: fx.Node) -> Any:
    """The operation to use in place of that of a traced call."""
    target: Any = node.target
    if target not in _FEW:
        return target
    backward = target is aten.convolution_backward.default
    args: Sequence[Any] = node.args[1:] if backward else node.args
    x, w = (arg.meta["val"] for arg in args[:2])
    stride, padding, dilation, transposed, _, groups = args[3:9]
    dilated, empty = any(d != 1 for d in dilation), not x.numel() * w.numel()
    if (
        x.device.type == "cpu"
        and x.ndim in (3, 4)
        and x.dtype in _KNOWN
        and not (transposed or groups != 1 or dilated or empty)
    ):
        return _STRIPS[target]
    if x.ndim != 4 or not x.is_cuda or transposed or groups != 1 or dilated or empty:
        return target
    made = node.args[0].meta["val"] if backward else node.meta["val"]  # type: ignore[union-attr]
    kernel, result = w.shape[2:].numel(), made.shape[2:].numel()
    known, plain = x.dtype in _KNOWN, all(s == 1 for s in stride)
    if known and plain and not backward and args[2] is None and kernel > max(_TAPS, result):
        return _as_gradient if len(x) * result * kernel <= _COLUMNS else target
    inside = all(p < k for p, k in zip(padding, w.shape[2:], strict=True))
    few = max(w.shape[:2]) <= _CHANNELS and kernel <= _TAPS
    sizes = max(x.numel(), made.numel()) < _NUMBERS and len(x) < _SAMPLES
    if known and plain and inside and few and sizes and _compiles():
        return _FEW[target]
    return _WIDE[target] if _by_columns(x, w, made) else target


def _by_columns(x: Tensor, w: Tensor, made: Tensor) -> bool:
    """Whether a convolution is one for torch's own."""
    return x.dtype == torch.float64 and w.numel() // len(w) * made.shape[2:].numel() <= _COLUMNS


def takes_single(node: fx.Node) -> bool:
    """Whether a traced convolution on a CPU takes less time in float32: with few channels oneDNN is slow where it is spread."""
    backward = node.target is aten.convolution_backward.default
    args: Sequence[Any] = node.args[1:] if backward else node.args
    w, dilation, transposed, groups = args[1].meta["val"], args[5], args[6], args[8]
    spread = transposed or (backward and any(d != 1 for d in dilation))
    return not spread or groups != 1 or w.shape[1] > _NARROW


def fuse(graph: fx.Graph) -> None:
    """Multiply what a convolution with few channels gives, which is large, where it is made."""
    for node in graph.nodes:
        made, factor = node.args if node.target is aten.mul.Tensor else (None, None)
        if isinstance(made, fx.Node) and isinstance(factor, fx.Node) and made.target is _few and len(made.users) == 1:
            node.target, node.args = _scaled, (factor, *made.args)
    graph.eliminate_dead_code()


def correlate(x: Tensor, w: Tensor, padding: Sequence[int], factor: Tensor | None = None) -> Tensor:
    """Σ w[o, c, a, b] x[:, c, i + a - p, j + b - q] at each i, j, (N, C, H, W) -> (N, O, H + 2p - h + 1, W + 2q - v + 1).

    With a factor of that shape, times it.
    """
    (samples, channels, height, width), (filters, _, h, v) = x.shape, w.shape
    rows, columns = _sides(x, w, padding)
    out = x.new_empty(samples, filters, rows, columns)
    block = min(_BLOCK, max(32, 1 << (columns - 1).bit_length()))
    sizes = height, width, rows, columns, *padding, channels, filters, h, v, 1 << (filters - 1).bit_length(), block
    scale = out if factor is None else factor.contiguous()
    with torch.cuda.device(x.device):
        grid, warps = (rows * triton.cdiv(columns, block), samples), 1 if filters >= _MANY else max(1, block // 64)
        _kernel[grid](x.contiguous(), w.contiguous(), scale, out, *sizes, factor is not None, num_warps=warps)
    return out


def _sides(x: Tensor, w: Tensor, padding: Sequence[int]) -> list[int]:
    """Height and width of what a convolution gives."""
    return [int(side) + 2 * pad - int(size) + 1 for side, pad, size in zip(x.shape[2:], padding, w.shape[2:], strict=True)]


@functools.cache
def _compiles() -> bool:
    """Whether a kernel can be made here, which takes a C compiler."""
    try:
        square = torch.ones(1, 1, 2, 2, device="cuda")
        return triton is not None and correlate(square, square, (0, 0)).item() == 4
    except Exception:  # whatever it is, torch's convolutions do without it
        return False


# Without the types of its arguments, which the compiler would look up.
def _correlate(  # type: ignore[no-untyped-def]
    x,
    w,
    scale,
    out,
    height,
    width,
    rows,
    columns,
    up,
    left,
    channels: tl.constexpr,
    filters: tl.constexpr,
    h: tl.constexpr,
    v: tl.constexpr,
    filters_to: tl.constexpr,
    block: tl.constexpr,
    scaled: tl.constexpr,
):
    """A block of pixels of one row of one sample, all filters."""
    sample, blocks = tl.program_id(1), (columns + block - 1) // block
    i, j = tl.program_id(0) // blocks, tl.program_id(0) % blocks * block + tl.arange(0, block)
    o = tl.arange(0, filters_to)
    total = tl.zeros((filters_to, block), dtype=out.dtype.element_ty)
    for c in range(channels):
        for a in tl.static_range(h):
            row = i + a - up
            if (row >= 0) & (row < height):
                for b in tl.static_range(v):
                    column = j + b - left
                    at = x + ((sample * channels + c) * height + row) * width + column
                    value = tl.load(at, mask=(column >= 0) & (column < width), other=0.0)
                    weight = tl.load(w + ((o * channels + c) * h + a) * v + b, mask=o < filters, other=0.0)
                    total += weight[:, None] * value[None, :]
    where = ((sample * filters + o[:, None]) * rows + i) * columns + j[None, :]
    written = (o[:, None] < filters) & (j[None, :] < columns)
    if scaled:
        total *= tl.load(scale + where, mask=written, other=0.0)
    tl.store(out + where, total, mask=written)


_kernel: Any = None if triton is None else triton.jit(_correlate)


def _unless_mapped(torchs: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorates what takes the place of torch's operation, and its arguments, where a kernel can read them."""

    def decorate(ours: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(ours)
        def call(*args: Any) -> Any:
            return torchs(*args) if batch.mapped(*(arg for arg in args if isinstance(arg, Tensor))) else ours(*args)

        return call

    return decorate


@_unless_mapped(aten.convolution.default)
def _few(x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, *_: Any) -> Tensor:
    out = correlate(x, w, padding)
    return out if bias is None else out + bias[:, None, None]


@_unless_mapped(aten.convolution_backward.default)
def _few_backward(g: Tensor, x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, *others: Any) -> Gradients:
    of_x, *of_others = others[-1]
    found: Gradients = (None, None, None)
    if any(of_others):
        backward = _wide_backward if _by_columns(x, w, g) else aten.convolution_backward.default
        found = backward(g, x, w, bias, stride, padding, *others[:-1], [False, *of_others])
    around = [size - 1 - pad for size, pad in zip(w.shape[2:], padding, strict=True)]
    return correlate(g, w.flip(2, 3).transpose(0, 1), around) if of_x else None, *found[1:]


@_unless_mapped(aten.convolution.default)
def _wide(x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, *_: Any) -> Tensor:
    return aten._slow_conv2d_forward.default(x.contiguous(), w.contiguous(), w.shape[2:], bias, stride, padding)


@_unless_mapped(aten.convolution_backward.default)
def _wide_backward(g: Tensor, x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, *others: Any) -> Gradients:
    # Of tensors that are not contiguous torch gives other numbers here, and says nothing.
    given = (t.contiguous() for t in (g, x, w))
    return aten._slow_conv2d_backward.output_mask(*given, w.shape[2:], stride, padding, others[-1])


@_unless_mapped(aten.convolution.default)
def _as_gradient(x: Tensor, w: Tensor, bias: None, stride: Any, padding: Any, *others: Any) -> Tensor:
    """A convolution with filters larger than its result, which is what the gradient of filters looks like."""
    like = w.new_empty(len(w), len(x), *_sides(x, w, padding))
    backward = _wide_backward if x.dtype == torch.float64 else aten.convolution_backward.default
    given = w.transpose(0, 1).contiguous(), x.transpose(0, 1).contiguous(), like
    _, found, _ = backward(*given, [0], stride, padding, *others, [False, True, False])
    assert found is not None
    return found.transpose(0, 1).contiguous()


@_unless_mapped(aten.convolution.default)
def _by_strips(x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, *others: Any) -> Tensor:
    """On a CPU, float64; oneDNN is as good in float32."""
    if x.dtype == torch.float32 or not _is_large(x, w, stride, padding):
        return aten.convolution.default(x, w, bias, stride, padding, *others)
    around, more = _padded(x, padding), int(w.shape[2]) - 1
    parts = (_wide(around[:, :, i : j + more], w, bias, stride, [0, 0]) for i, j in _strips(x, w, padding))
    return torch.cat(list(parts), dim=2)


@_unless_mapped(aten.convolution_backward.default)
def _by_strips_backward(g: Tensor, x: Tensor, w: Tensor, bias: Any, stride: Any, padding: Any, *others: Any) -> Gradients:
    """On a CPU; in float32 with few channels, where oneDNN takes many times as long, and in float64."""
    of_x, of_w, of_bias = others[-1]
    large = _is_large(x, w, stride, padding)
    if (of_w or w.shape[1] > _NARROW) if x.dtype == torch.float32 else not large:
        return aten.convolution_backward.default(g, x, w, bias, stride, padding, *others)
    b_grad = g.transpose(0, 1).flatten(1).sum(dim=1) if of_bias else None
    if x.ndim == 3:  # a line is an image of one row
        image = (t.unsqueeze(2) for t in (g, x, w))
        found, *_ = _wide_backward(*image, bias, [1, *stride], [0, *padding], [of_x, False, False])
        return None if found is None else found.squeeze(2), None, b_grad
    if not large:
        return *_wide_backward(g, x, w, bias, stride, padding, [of_x, of_w, False])[:2], b_grad
    around, more = _padded(x, padding), int(w.shape[2]) - 1
    x_grad, w_grads = (torch.zeros_like(around) if of_x else None), []
    for i, j in _strips(x, w, padding):
        given = g[:, :, i:j], around[:, :, i : j + more], w, bias, stride, [0, 0]
        part, w_grad, _ = _wide_backward(*given, [of_x, of_w, False])
        if x_grad is not None:
            x_grad[:, :, i : j + more] += part
        w_grads.append(w_grad)
    if x_grad is not None:
        up, left = padding
        x_grad = x_grad[:, :, up : x_grad.shape[2] - up, left : x_grad.shape[3] - left]
    return x_grad, sum(w_grads) if of_w else None, b_grad


def _is_large(x: Tensor, w: Tensor, stride: Any, padding: Any) -> bool:
    """Whether the matrix of a sample is made in strips."""
    return x.ndim == 4 and all(s == 1 for s in stride) and _columns(x, w, padding) >= _COLUMNS_ON_CPU


def _columns(x: Tensor, w: Tensor, padding: Sequence[int]) -> int:
    """Bytes of the matrix that a convolution of one sample is a product with."""
    rows, columns = _sides(x, w, padding)
    return w[0].numel() * rows * columns * x.itemsize


def _strips(x: Tensor, w: Tensor, padding: Sequence[int]) -> list[tuple[int, int]]:
    """Rows of the result, from and to, whose columns fit into a cache."""
    rows = _sides(x, w, padding)[0]
    step = max(1, rows * _STRIP // _columns(x, w, padding))
    return [(i, min(i + step, rows)) for i in range(0, rows, step)]


def _padded(x: Tensor, padding: Sequence[int]) -> Tensor:
    up, left = padding
    return torch.nn.functional.pad(x, (left, left, up, up)) if up or left else x


def _scaled(factor: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, stride: Any, padding: Any, *others: Any) -> Tensor:
    """A convolution times a factor."""
    shape = (len(x), len(w), *_sides(x, w, padding))
    if bias is not None or factor.shape != shape or factor.dtype != x.dtype or batch.mapped(factor, x, w):
        return _few(x, w, bias, stride, padding, *others) * factor
    return correlate(x, w, padding, factor)


_FEW = {aten.convolution.default: _few, aten.convolution_backward.default: _few_backward}
_STRIPS = {aten.convolution.default: _by_strips, aten.convolution_backward.default: _by_strips_backward}
_WIDE = {aten.convolution.default: _wide, aten.convolution_backward.default: _wide_backward}
