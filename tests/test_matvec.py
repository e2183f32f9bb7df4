"""Products of a vector and a large matrix that are not left to BLAS."""

import pytest
import torch

import torchdil as dil
from torchdil import matvec, traced
from torchdil.compiled import scripted


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch):
    monkeypatch.setattr(matvec, "_LARGE", 0)


def draw(seed, *shape, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype, device="cpu")


MATRICES = {
    "rows": lambda n, k, dtype: draw(1, n, k, dtype=dtype),
    "columns": lambda n, k, dtype: draw(1, k, n, dtype=dtype).mT,
    "part of a larger one": lambda n, k, dtype: draw(1, n + 3, k, dtype=dtype)[2:-1],
    "with gaps": lambda n, k, dtype: draw(1, n, 2 * k, dtype=dtype)[:, ::2],
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("form", MATRICES)
@pytest.mark.parametrize("n", [1000, 1001, 1])
@pytest.mark.parametrize("k", [8, 128, 300])
def test_they_are_torchs_products(form, n, k, dtype):
    W = MATRICES[form](n, k, dtype)
    x, y = draw(2, 1, 3 * n, dtype=dtype)[:, ::3], draw(3, k, dtype=dtype)
    close = {"rtol": 0, "atol": 1e-12 if dtype == torch.float64 else 1e-3}
    for found, expected in (
        (matvec.mm(x, W), torch.mm(x, W)),
        (matvec.mm(y[None], W.mT), torch.mm(y[None], W.mT)),
        (matvec.mm(draw(4, 3, n, dtype=dtype), W), torch.mm(draw(4, 3, n, dtype=dtype), W)),
        (matvec.mv(W, y), torch.mv(W, y)),
        (matvec.mv(W.mT, x[0]), torch.mv(W.mT, x[0])),
    ):
        assert found.shape == expected.shape
        torch.testing.assert_close(found, expected, **close)


@pytest.mark.parametrize(
    ("matrix", "ours"),
    [
        (draw(0, 1000, 64), True),
        (draw(0, 1000, 64).mT, True),
        (draw(0, 1000, 512).mT, True),
        (draw(0, 1000, 512), False),
        (draw(0, 1000, 8), False),
        (draw(0, 8, 1000), False),
        (draw(0, 1000, 128)[:, ::2], False),
        (draw(0, 1000, 64).half(), False),
    ],
    ids=lambda value: f"{tuple(value.shape)}" if isinstance(value, torch.Tensor) else str(value),
)
def test_where_they_are_ours(matrix, ours, monkeypatch):
    x = torch.ones(len(matrix), dtype=matrix.dtype, device="cpu")
    assert (matvec._times(x, matrix) is not None) == ours
    monkeypatch.setattr(matvec, "_LARGE", matrix.nbytes + 1)
    assert matvec._times(x, matrix) is None


def test_many_vectors_at_once():
    W, X = draw(0, 1000, 64), draw(1, 5, 1, 1000)
    torch.testing.assert_close(torch.func.vmap(lambda x: matvec.mm(x, W))(X), X @ W)


def test_a_backward_pass_uses_them(device, monkeypatch):
    """Once its products are traced, in one piece."""
    if device != "cpu":
        pytest.skip("of the CPU")
    traced.forget_all()
    used, times = [], matvec._times
    monkeypatch.setattr(matvec, "_times", lambda x, b: used.append(found := times(x, b)) or found)
    W = draw(0, 1001, 64).div_(40).requires_grad_()
    for seed in range(16):
        x = draw(seed + 1, 1, 1001).requires_grad_()
        found = dil.argmin(
            lambda y, x: (0.5 * (y - x) ** 2).sum(-1) + torch.nn.functional.softplus(y @ W).sum(-1),
            torch.zeros_like(x),
            (x,),
            solver=dil.Newton(rtol=1e-12),
            linear_solver=dil.CG(rtol=1e-12),
        ).value
        grads = torch.autograd.grad((found**2).sum(), (x, W))
    assert any(one is not None and one.numel() == 1001 for one in used)
    assert any(one is not None and one.numel() == 64 for one in used)
    with torch.no_grad():
        s = torch.sigmoid(found @ W)
        H = torch.eye(1001, dtype=W.dtype, device="cpu") + (W * (s * (1 - s))) @ W.mT
        u = torch.linalg.solve(H, 2 * found[0])
        of_W = -torch.outer(u, s[0]) - torch.outer(found[0], s[0] * (1 - s[0]) * (u @ W))
    torch.testing.assert_close(grads, (u[None], of_W), rtol=1e-8, atol=1e-10)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_they_can_be_compiled():
    W, x, y = draw(0, 1001, 64), draw(1, 1, 1001), draw(2, 1, 64)
    graph = scripted(lambda x, y, W: (matvec.mm(x, W), matvec.mm(y, W.mT)), (x, y), (W,))
    torch.testing.assert_close(graph(2 * x, y, W), (2 * x @ W, y @ W.mT))
    assert "aten::embedding_bag" in str(graph.graph) and "aten::bmm" in str(graph.graph)
    assert "aten::size" not in str(graph.graph)
