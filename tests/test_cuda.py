"""What is done otherwise on a GPU: kernels of our own, and CUDA graphs. `pytest --device cuda` runs all other tests there."""

import copy
import math

import pytest
import torch

import torchdil as dil
from torchdil import compiled, convolve
from torchdil.compiled import Compiled, CudaGraph
from torchdil.linear import cg
from torchdil.linear.fused import fused_steps
from torchdil.solution import Status
from torchdil.traced import _memories, forget_all

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def draw(seed, *shape, dtype=torch.float64):
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to("cuda", dtype)


class Decay(torch.nn.Module):
    def __init__(self, f):
        super().__init__()
        self.f = f

    def forward(self, t, y):
        return torch.tanh(self.f(y)) - y


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_fused_steps_are_the_plain_ones(dtype):
    """With samples that converge on the way, that meet a negative or no curvature, whose product is NaN, with nothing to do."""
    n = 12
    spectra = torch.ones(6, n, dtype=torch.float64, device="cuda")
    spectra[0] = torch.linspace(1, 30, n)
    spectra[2, -1], spectra[3, -1], spectra[4, 0] = -5.0, 0.0, math.nan
    Q = torch.linalg.qr(draw(0, 6, n, n))[0]
    A = (Q * spectra.unsqueeze(1) @ Q.mT).to(dtype)
    rhs, F = draw(1, 6, n, dtype=dtype), draw(2, 6, n, dtype=dtype)
    rhs[5] = 0
    rr = (rhs * rhs).sum(1)
    running = rr > 0
    least, largest = torch.full_like(rr, torch.inf), torch.zeros_like(rr)
    status = torch.where(running, -1, int(Status.converged))
    state = cg._State(
        torch.zeros_like(rhs), rhs, rhs.clone(), rr, rr, largest, least, running, status, torch.zeros_like(status)
    )
    tolerance = (1e-8 if dtype == torch.float64 else 1e-3) * rr.sqrt()
    system = lambda p: (A @ p.unsqueeze(2)).squeeze(2)  # noqa: E731
    expected, noted = cg.plain_steps(8, system, copy.deepcopy(state), tolerance, F)
    found, told = fused_steps(8, system, copy.deepcopy(state), tolerance, F)
    rtol, atol = (1e-6, 1e-9) if dtype == torch.float64 else (1e-2, 1e-3)
    close = {"rtol": rtol, "atol": atol, "equal_nan": True}
    for name, a, b in zip(expected._fields, expected, found, strict=True):
        torch.testing.assert_close(b, a, msg=lambda text, name=name: f"{name}: {text}", **close)
    torch.testing.assert_close(told, noted, **close)
    assert len(set(found.status.tolist())) >= 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 8, 5, 5, 0, 0), (3, 5, 3, 4, 1, 2), (1, 1, 1, 1, 0, 0), (16, 4, 5, 5, 2, 2)])
def test_convolutions_with_few_channels(dtype, shape):
    channels, filters, h, v, *padding = shape
    x, w = draw(0, 3, channels, 45, 150, dtype=dtype), draw(1, filters, channels, h, v, dtype=dtype)
    exact = torch.nn.functional.conv2d(x.cpu().double(), w.cpu().double(), padding=tuple(padding))
    close = {"rtol": 0, "atol": (1e-13 if dtype == torch.float64 else 1e-5) * exact.norm().item()}
    torch.testing.assert_close(convolve.correlate(x, w, padding).cpu().double(), exact, **close)
    factor = draw(2, *exact.shape, dtype=dtype)
    scaled = convolve.correlate(x, w, padding, factor).cpu().double()
    torch.testing.assert_close(scaled, factor.cpu().double() * exact, **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_convolutional_energy_has_the_gradient_of_the_cpu(dtype, monkeypatch):
    """By kernels of our own, once its products are traced."""
    forget_all()
    gradients, factors, correlate = [], [], convolve.correlate

    def watched(x, w, padding, factor=None):
        factors.append(factor is not None)
        return correlate(x, w, padding, factor)

    monkeypatch.setattr(convolve, "correlate", watched)
    for device, precision in (("cpu", torch.float64), ("cuda", dtype)):
        x, filters = (draw(seed, *shape).to(device, precision) for seed, shape in ((0, (2, 1, 24, 24)), (1, (4, 1, 3, 3))))
        filters.requires_grad_()

        def energy(y, x=x, filters=filters):
            responses = torch.nn.functional.conv2d(y, filters, padding=1)
            return (0.5 * (y - x) ** 2).sum((1, 2, 3)) + torch.sqrt(1 + responses**2).sum((1, 2, 3))

        for _ in range(1 if device == "cpu" else 20):
            filters.grad = None
            solution = dil.argmin(energy, torch.zeros_like(x), linear_solver=dil.CG())
            solution.value.square().sum().backward()
        gradients.append(filters.grad.cpu().double())
    assert set(factors) == {True, False}
    assert [memory.solves for memory in _memories.values() if memory.trace is not None] == [20]  # used to the end
    rtol = 1e-9 if dtype == torch.float64 else 1e-4
    torch.testing.assert_close(gradients[1], gradients[0], rtol=rtol, atol=rtol * gradients[0].norm().item())


def from_the_cpu(x):
    """A copy from memory that the device does not know cannot be captured."""
    return (x + torch.ones(len(x), device="cpu", dtype=x.dtype).to(x.device),)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_that_fails_leaves_torch_as_it_was():
    x, stream = draw(3, 4), torch.cuda.current_stream()
    torch.cuda.manual_seed(0)
    numbers = [torch.randn(3, device="cuda") for _ in range(2)]
    torch.cuda.manual_seed(0)
    with pytest.raises(RuntimeError):
        CudaGraph(from_the_cpu, (x,))
    assert torch.cuda.current_stream() == stream and not torch.cuda.is_current_stream_capturing()
    assert all(torch.equal(torch.randn(3, device="cuda"), expected) for expected in numbers)
    graph = CudaGraph(lambda x: (2 * x,), (x,))
    assert torch.equal(graph(x + 1)[0], 2 * (x + 1))


def test_a_function_that_cannot_be_captured_is_called_as_it_is():
    owner = torch.nn.Module()
    for seed in range(14):
        x = draw(seed, 4)
        assert torch.equal(Compiled(owner, "plus", from_the_cpu)(x)[0], x + 1)


@pytest.mark.parametrize("size", [(3, 2), (20, 20), (5, 50), (3, 520)], ids=str)
@pytest.mark.parametrize("how", ["inverse", "LU"])
def test_factorisations_of_batches_are_captured(how, size, capfd):
    count, n = size
    preferred = torch.backends.cuda.preferred_linalg_library()

    def solved(A, b):
        if how == "inverse":
            return (torch.linalg.inv_ex(A)[0] @ b,)
        return (torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(A)[:2], b),)

    A, b = torch.eye(n, device="cuda") + draw(5, count, n, n) / (2 * n**0.5), draw(6, count, n, 1)
    graph = CudaGraph(solved, (A, b))
    found = graph(A + 1, 2 * b)[0]
    assert torch.backends.cuda.preferred_linalg_library() == preferred
    torch.testing.assert_close(found, torch.linalg.solve(A + 1, 2 * b))
    assert capfd.readouterr().err == ""
    assert graph.pool >= found.nbytes


@pytest.mark.parametrize("size", [6, 20, 300])
def test_the_trajectories_of_a_larger_state_are_cuda_graphs(size):
    f = torch.nn.Linear(size, size, bias=False).to("cuda", torch.float64)
    f.weight.data = draw(7, size, size) / size**0.5
    func = Decay(f)
    y0, times = draw(8, 4, size).requires_grad_(), torch.linspace(0, 1, 33, device="cuda", dtype=torch.float64)
    answers = []
    for _ in range(14):
        y = dil.odeint(func, y0, times, batch_dims=1)
        answers.append((y, *torch.autograd.grad(y.square().sum(), (y0, f.weight))))
    kinds = [kind for kind in compiled.memory(func).values() if getattr(kind, "calls", 0) > 11]
    assert kinds and all(isinstance(kind.fast, CudaGraph) for kind in kinds)
    for first, last in zip(answers[0], answers[-1], strict=True):
        torch.testing.assert_close(last, first, rtol=1e-6, atol=1e-6)


def test_a_graph_that_would_need_too_much_memory_is_not_kept(monkeypatch):
    forget_all()
    monkeypatch.setattr(compiled, "_PART", 2**27 / torch.cuda.get_device_properties(0).total_memory)
    for count, kept in ((2**16, True), (2**22, False)):
        owner, x = torch.nn.Module(), draw(9, count)
        for _ in range(12):
            (found,) = Compiled(owner, "sum", lambda x: (torch.stack([x + i for i in range(8)]).sum(),))(x)
        (kind,) = compiled.memory(owner).values()
        assert (kind.fast is not None) == kept
        torch.testing.assert_close(found, 8 * x.sum() + 28 * count)


def test_the_other_devices_of_a_layer_are_none():
    """A layer of the CPU beside one of the GPU, with torch's default device on either."""
    for default in ("cpu", "cuda"):
        with torch.device(default):
            for place in ("cpu", "cuda"):
                x = draw(4, 3, 2).to(place).requires_grad_()
                y = dil.argmin(lambda y, x: ((y - x) ** 2 + y**4).sum(-1), torch.zeros_like(x), (x,), linear_solver=dil.CG())
                y.value.sum().backward()
                assert y.value.device.type == x.grad.device.type == place
                torch.testing.assert_close(x.grad, 2 / (2 + 12 * y.value.detach() ** 2))
                assert "CG" in str(y.report)
