"""`product="compile"`: what is often run is compiled by Inductor, and is what it was."""

import shutil
import sysconfig
from pathlib import Path

import pytest
import torch

import torchdil as dil
from torchdil import traced

COMPILER = (shutil.which("g++") or shutil.which("clang++")) and (Path(sysconfig.get_path("include")) / "Python.h").exists()
needs_compiler = pytest.mark.skipif(not COMPILER, reason="needs a C++ compiler and the headers of Python")
CALLS = 8


@pytest.fixture
def compiled(monkeypatch):
    """What was compiled, after two solves in place of ten, and four runs in place of twenty."""
    made, by_inductor = [], traced.by_inductor
    monkeypatch.setattr(traced, "_PATIENCE", 2)
    monkeypatch.setattr(traced, "_CHECKED_FIRST", 0)
    monkeypatch.setattr(traced, "_OFTEN", 4)
    monkeypatch.setattr(traced, "by_inductor", lambda *given: made.append(given) or by_inductor(*given))
    return made


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def score(y, x, W):
    return ((y - x) ** 2).sum(-1) + torch.nn.functional.softplus(torch.sigmoid(y @ W) @ W**2).sum(-1)


def residual(y, x, W):
    return y - 0.3 * torch.tanh(y @ W + x)


def solutions(product, solver, state, start, seed):
    x, W = draw(seed, *start.shape), 0.5 * draw(100, 4, 4)
    function = score if state is dil.argmin else residual
    options = {} if state is dil.argmin else {"batch_dims": start.dim() - 1}
    given = (x.requires_grad_(), W.requires_grad_())
    forward = dil.Newton(rtol=1e-13)
    found = state(function, start, given, solver=forward, linear_solver=solver(rtol=1e-11, product=product), **options)
    return found, torch.autograd.grad((found.value * draw(1, *start.shape)).sum(), given)


@needs_compiler
@pytest.mark.parametrize(
    ("state", "solver", "shape"),
    [(dil.argmin, dil.Dense, (4,)), (dil.argmin, dil.CG, (5, 4)), (dil.root, dil.GMRES, (5, 4))],
    ids=["argmin, direct", "argmin, CG", "root, GMRES"],
)
def test_compiled_gradients_are_those_of_autograd(state, solver, shape, compiled):
    start = torch.zeros(shape, dtype=torch.float64)
    for seed in range(CALLS):
        _, right = solutions("backward", solver, state, start, seed)
        found, grads = solutions("compile", solver, state, start, seed)
        for grad, other in zip(grads, right, strict=True):
            assert torch.allclose(grad, other, rtol=1e-8, atol=1e-10)
        assert bool(found.report.backward.converged.all())
    assert compiled


def test_without_a_compiler_a_warning_says_so_once(compiled, monkeypatch):
    def fail(*given):
        raise FileNotFoundError("no C++ compiler was found\nand this is a long story")

    monkeypatch.setattr(traced, "by_inductor", fail)
    start = torch.zeros(5, 4, dtype=torch.float64)
    with pytest.warns(RuntimeWarning) as caught:
        for seed in range(CALLS):
            _, grads = solutions("compile", dil.CG, dil.argmin, start, seed)
    assert [str(one.message) for one in caught] == [
        "product='compile' could not compile a layer, which goes on as with 'auto': no C++ compiler was found"
    ]
    _, right = solutions("backward", dil.CG, dil.argmin, start, CALLS - 1)
    assert all(torch.allclose(grad, other, rtol=1e-8, atol=1e-10) for grad, other in zip(grads, right, strict=True))


def test_large_layers_are_not_compiled(compiled, monkeypatch):
    monkeypatch.setattr(traced, "_SMALL", 30)
    for seed in range(CALLS):
        solutions("compile", dil.CG, dil.argmin, torch.zeros(5, 4, dtype=torch.float64), seed)
    assert not compiled


def test_other_layers_are_not_compiled(compiled):
    for seed in range(CALLS):
        solutions("auto", dil.CG, dil.argmin, torch.zeros(5, 4, dtype=torch.float64), seed)
    assert not compiled
