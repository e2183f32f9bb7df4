"""The convolutions that take the place of cuDNN's and oneDNN's; the kernel itself is tested on a GPU, in test_cuda.py."""

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

import torchdil as dil
from torchdil import convolve
from torchdil.linearize import split

aten = torch.ops.aten
SHAPES = [(1, 8, 5, 5, 0, 0), (3, 5, 3, 4, 1, 2), (1, 1, 1, 1, 0, 0), (2, 7, 7, 3, 3, 0)]


def plainly(x, w, padding, factor=1.0):
    return factor * functional.conv2d(x, w, padding=tuple(padding))


def made(channels, filters, h, v, p, q):
    """x, w, a gradient of the result, and the other arguments of torch's convolutions."""
    torch.manual_seed(0)
    x, w = torch.randn(3, channels, 9, 8, dtype=torch.float64), torch.randn(filters, channels, h, v, dtype=torch.float64)
    g = torch.randn(plainly(x, w, (p, q)).shape, dtype=torch.float64)
    return x, w, g, ([1, 1], [p, q], [1, 1], False, [0, 0], 1)


@pytest.mark.parametrize("kind", [convolve._FEW, convolve._WIDE, convolve._STRIPS], ids=["few", "wide", "strips"])
@pytest.mark.parametrize("shape", SHAPES)
def test_they_are_torchs_convolutions(kind, shape, monkeypatch):
    monkeypatch.setattr(convolve, "correlate", plainly)
    monkeypatch.setattr(convolve, "_COLUMNS_ON_CPU", 1)
    monkeypatch.setattr(convolve, "_STRIP", 2**10)  # of one to nine rows
    x, w, g, others = made(*shape)
    bias = torch.arange(len(w), dtype=x.dtype)
    forward, backward = kind[aten.convolution.default], kind[aten.convolution_backward.default]
    torch.testing.assert_close(forward(x, w, bias, *others), aten.convolution(x, w, bias, *others), rtol=1e-13, atol=1e-13)
    for mask in ([True, False, False], [True, True, True], [False, True, False]):
        expected = aten.convolution_backward(g, x, w, [len(w)], *others, mask)
        found = backward(g, x, w, [len(w)], *others, mask)
        for one, other, wanted in zip(found, expected, mask, strict=True):
            if wanted:
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_large_filters_are_a_gradient_of_small_ones(dtype):
    torch.manual_seed(0)
    x, w = torch.randn(2, 3, 12, 11, dtype=dtype), torch.randn(5, 3, 11, 10, dtype=dtype)
    others = ([1, 1], [1, 2], [1, 1], False, [0, 0], 1)
    torch.testing.assert_close(convolve._as_gradient(x, w, None, *others), aten.convolution(x, w, None, *others))


def test_many_at_once_are_left_to_torch(monkeypatch):
    def refuse(*args):
        raise AssertionError("a kernel cannot read what is mapped")

    monkeypatch.setattr(convolve, "correlate", refuse)
    x, w, _, others = made(*SHAPES[0])
    for ours in (convolve._few, convolve._wide):
        found = torch.func.vmap(lambda x, ours=ours: ours(x.unsqueeze(0), w, None, *others))(x)
        torch.testing.assert_close(found.squeeze(1), plainly(x, w, (0, 0)))


def test_a_factor_is_multiplied_where_the_convolution_is_made(monkeypatch):
    """In place of two operations, where it has the shape of the result."""
    factors = []

    def correlate(x, w, padding, factor=None):
        factors.append(factor)
        return plainly(x, w, padding, 1.0 if factor is None else factor)

    monkeypatch.setattr(convolve, "correlate", correlate)
    monkeypatch.setattr(convolve, "chosen", lambda node: convolve._FEW[node.target])
    x, w, _, _ = made(*SHAPES[0])

    def product(y, p):
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            (F,) = torch.autograd.grad(torch.sqrt(1 + functional.conv2d(leaf, w) ** 2).sum(), leaf, create_graph=True)
            return [(F.detach(),), torch.autograd.grad(F, leaf, p)]

    halves = split(product, x, torch.ones_like(x))
    (part,) = halves.parts
    assert aten.mul.Tensor not in {node.target for node in part.module.graph.nodes}
    p = torch.randn_like(x)
    saved = halves.prelude(x, *halves.captured)
    factors.clear()
    (found,) = part.module(p, *(saved[place] for place in part.places))
    torch.testing.assert_close(found, product(x, p)[1][0])
    assert [factor is not None for factor in factors] == [True, False]
    # One of another shape, and many at once.
    others = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    torch.testing.assert_close(convolve._scaled(torch.tensor(2.0, dtype=x.dtype), x, w, *others), 2 * plainly(x, w, (0, 0)))
    wide = torch.ones_like(plainly(x, w, (0, 0))[:1])
    mapped = torch.func.vmap(lambda x: convolve._scaled(3 * wide, x.unsqueeze(0), w, *others))(x)
    torch.testing.assert_close(mapped.squeeze(1), 3 * plainly(x, w, (0, 0)))


def test_a_result_can_be_viewed_as_torchs_could(monkeypatch):
    """In what is evaluated once a point, too."""
    monkeypatch.setattr(convolve, "chosen", lambda node: convolve._as_gradient)
    torch.manual_seed(0)
    y, w = torch.randn(2, 1, 12, 12, dtype=torch.float64), torch.randn(3, 1, 11, 11, dtype=torch.float64)

    def function(y, p):
        responses = functional.conv2d(y, w)
        return [
            (responses.flatten(1).sum(1) + responses.permute(0, 2, 3, 1).contiguous().view(2, -1).prod(1),),
            (p * responses[0, 0, 0, 0],),
        ]

    halves = split(function, y, torch.ones_like(y))
    torch.testing.assert_close(halves.prelude(y, *halves.captured)[0], function(y, y)[0][0])


def name_of_choice(
    device, dtype, *, channels=1, filters=8, size=5, side=32, stride=1, padding=0, dilation=1, groups=1, samples=2
):
    """Which convolution is chosen: ours for few or many channels, or torch's."""
    graph = fx.Graph()
    with FakeTensorMode():
        x = torch.empty(samples, channels, side, side, device=device, dtype=dtype)
        w = torch.empty(filters, channels // groups, size, size, device=device, dtype=dtype)
        sides = [(side + 2 * padding - dilation * (size - 1) - 1) // stride + 1] * 2
        out = torch.empty(samples, filters, *sides, device=device, dtype=dtype)
    args = [graph.placeholder(name) for name in ("x", "w")]
    for node, value in zip(args, (x, w), strict=True):
        node.meta["val"] = value
    others = (None, [stride] * 2, [padding] * 2, [dilation] * 2, False, [0, 0], groups)
    node = graph.call_function(aten.convolution.default, (*args, *others))
    node.meta["val"] = out
    names = {convolve._few: "few", convolve._wide: "wide", convolve._as_gradient: "gradient"}
    return names.get(convolve.chosen(node), "torch's")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"dtype": torch.float64}, "few"),
        ({"dtype": torch.float32}, "few"),
        ({"dtype": torch.float32, "padding": 2}, "few"),
        ({"dtype": torch.float64, "stride": 2}, "wide"),
        ({"dtype": torch.float64, "padding": 5}, "wide"),
        ({"dtype": torch.float64, "channels": 64, "filters": 64, "size": 3}, "wide"),
        ({"dtype": torch.float64, "size": 16}, "wide"),
        ({"dtype": torch.float64, "size": 30}, "gradient"),
        ({"dtype": torch.float32, "size": 30}, "gradient"),
        ({"dtype": torch.float32, "stride": 2}, "torch's"),
        ({"dtype": torch.float32, "channels": 64, "filters": 64, "size": 3}, "torch's"),
        ({"dtype": torch.float64, "dilation": 2}, "torch's"),
        ({"dtype": torch.float64, "channels": 4, "groups": 4}, "torch's"),
        ({"dtype": torch.float16}, "torch's"),
        ({"dtype": torch.float64, "device": "cpu"}, "torch's"),
        ({"dtype": torch.float64, "samples": 0}, "torch's"),
    ],
)
def test_what_is_chosen(settings, expected, monkeypatch):
    monkeypatch.setattr(convolve, "_compiles", lambda: True)
    assert name_of_choice(**{"device": "cuda"} | settings) == expected


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(convolve, "_compiles", lambda: False)
    assert name_of_choice("cuda", torch.float64) == "wide"
    assert name_of_choice("cuda", torch.float32) == "torch's"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 12])
def test_a_convolution_by_strips_is_the_same_of_views(channels, dtype, monkeypatch):
    """Of tensors that are not contiguous torch's own matrix products would give other numbers."""
    monkeypatch.setattr(convolve, "_COLUMNS_ON_CPU", 1)
    monkeypatch.setattr(convolve, "_STRIP", 2**12)
    torch.manual_seed(0)
    x = torch.randn(channels, 2, 23, 19, dtype=dtype).transpose(0, 1)
    w = torch.randn(4, channels, 5, 3, dtype=dtype).flip(2)
    others = ([1, 1], [2, 1], [1, 1], False, [0, 0], 1)
    g = torch.randn(2, 19, 4, 23, dtype=dtype).permute(0, 2, 3, 1)
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(convolve._by_strips(x, w, None, *others), aten.convolution(x, w, None, *others), **close)
    for mask in ([True, False, False], [False, True, True], [True, True, False]):
        expected = aten.convolution_backward(g, x, w, [4], *others, mask)
        found = convolve._by_strips_backward(g, x, w, [4], *others, mask)
        for one, other, wanted in zip(found, expected, mask, strict=True):
            assert (one is not None) == wanted
            if wanted:
                torch.testing.assert_close(one, other, **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_traced_layer_of_an_image_convolves_by_strips(dtype, monkeypatch):
    monkeypatch.setattr(convolve, "_COLUMNS_ON_CPU", 2**10)
    monkeypatch.setattr(convolve, "_STRIP", 2**14)
    used = []
    wide = convolve._wide_backward
    monkeypatch.setattr(convolve, "_wide_backward", lambda *args: used.append(args[0].shape) or wide(*args))
    torch.manual_seed(0)
    filters, x = (
        torch.randn(3, 1, 5, 5, dtype=dtype, device="cpu").requires_grad_(),
        torch.randn(1, 1, 30, 28, dtype=dtype, device="cpu"),
    )
    found = []
    for _ in range(14):
        y = dil.argmin(lambda y: 0.5 * ((y - x) ** 2).sum() + torch.sqrt(1 + functional.conv2d(y, filters) ** 2).sum(), x).value
        found.append(torch.autograd.grad(y.square().sum(), filters)[0])
    assert used and used[0][2] < 26  # rows of a strip
    rtol = 1e-8 if dtype == torch.float64 else 1e-3
    torch.testing.assert_close(found[-1], found[0], rtol=rtol, atol=rtol)


LINES = [(1, 4, [1], [2]), (3, 2, [2], [0]), (12, 4, [1], [1])]
IMAGES = [(1, 4, [2, 1], [2, 1]), (3, 2, [1, 3], [0, 0])]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("case", LINES + IMAGES, ids=str)
def test_lines_and_strides_are_convolved_as_by_torch(case, dtype):
    channels, filters, stride, padding = case
    torch.manual_seed(0)
    x, w = (
        torch.randn(2, channels, *(17, 23)[: len(stride)], dtype=dtype),
        torch.randn(filters, channels, *(5, 3)[: len(stride)], dtype=dtype),
    )
    others = (stride, padding, [1] * len(stride), False, [0] * len(stride), 1)
    y = convolve._by_strips(x, w, None, *others)
    torch.testing.assert_close(y, aten.convolution(x, w, None, *others))
    for mask in ([True, False, False], [True, False, True], [False, True, False]):
        expected = aten.convolution_backward(y, x, w, [filters], *others, mask)
        found = convolve._by_strips_backward(y, x, w, [filters], *others, mask)
        for one, other, wanted in zip(found, expected, mask, strict=True):
            if wanted:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_what_is_slow_in_float32_stays_in_float64():
    """Convolutions with few channels that are transposed or dilated."""
    w = torch.randn(4, 1, 3, 3, dtype=torch.float64)

    def single(function, y):
        def derivatives(y, p):
            with torch.enable_grad():
                leaf = y.detach().requires_grad_()
                (F,) = torch.autograd.grad(torch.sqrt(1 + function(leaf) ** 2).sum(), leaf, create_graph=True)
                return [(F.detach(),), torch.autograd.grad(F, leaf, p)]

        return split(derivatives, y, torch.ones_like(y)).parts[0].multiplies

    y = torch.randn(1, 1, 12, 12, dtype=torch.float64)
    assert single(lambda y: functional.conv2d(y, w), y)
    assert not single(lambda y: functional.conv2d(y, w, dilation=2), y)
    assert not single(lambda y: functional.conv_transpose2d(y, w.transpose(0, 1)), y)
    assert not single(lambda y: y.diff(dim=2), y)
