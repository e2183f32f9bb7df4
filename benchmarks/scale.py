"""One million unknowns: what the backward pass costs beyond its products with the Hessian.

Three strongly convex energies of D unknowns: the paper's kind, a network with hidden layers of 30; smoothed total variation of
an image (a product is a few passes over memory); a field of experts (convolutions). Memory is the peak of what the backward
allocates above what the forward left behind, in vectors of size D, by torch's own record of allocations; beside it the peak of
one product. Time is a whole CG solve over as many products made alone, interleaved in one process, CPU clock, one thread.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.profiler import ProfilerActivity, profile

import torchdil as dil
from torchdil.operator import Operator

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of every start and stop otherwise
HIDDEN = 30
FILTERS = 4


def network(y: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """½‖y - x‖² + Σ softplus(W₂ softplus(W₁ y)): convex in y for W₂ >= 0."""
    return 0.5 * (y - x).square().sum() + softplus(second.square() @ softplus(first @ y)).sum()


def total_variation(y: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """½‖y - x‖² + w Σ √(1 + |∇y|²) of a square image."""
    side = round(y.numel() ** 0.5)
    image = y.view(side, side)
    across = image[1:, :-1] - image[:-1, :-1]
    down = image[:-1, 1:] - image[:-1, :-1]
    return 0.5 * (y - x).square().sum() + weight * (1 + across.square() + down.square()).sqrt().sum()


def field_of_experts(y: Tensor, x: Tensor, filters: Tensor) -> Tensor:
    """½‖y - x‖² + Σ log cosh(K y), K a bank of 3 x 3 filters."""
    side = round(y.numel() ** 0.5)
    response = torch.conv2d(y.view(1, 1, side, side), filters, padding=1)
    return 0.5 * (y - x).square().sum() + (softplus(2 * response) - response).sum()


def energies(unknowns: int) -> dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...]]]:
    """Name -> energy and its parameters."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = random(unknowns)
    filters = random(FILTERS, 1, 3, 3)
    return {
        "network, 2 x 30 hidden": (network, (x, random(HIDDEN, unknowns) * 4 / unknowns**0.5, random(HIDDEN, HIDDEN))),
        "total variation": (total_variation, (x, torch.tensor(4.0, dtype=torch.float64))),
        "field of experts": (field_of_experts, (x, filters - filters.mean(dim=(2, 3), keepdim=True))),
    }


def measure(name: str, unknowns: int, repeats: int) -> dict[str, object]:
    """One row of the table."""
    energy, parameters = energies(unknowns)[name]
    # Gradients for the input alone: those of a 30 x D matrix would be 30 vectors of their own.
    args = (parameters[0].requires_grad_(), *parameters[1:])
    x = args[0].detach()
    vector = x.numel() * x.element_size()
    newton = dil.Newton(rtol=1e-6, linear_solver=dil.CG(rtol=1e-3))
    solution = dil.argmin(energy, x, args, solver=newton, linear_solver=dil.CG(rtol=1e-10))
    solution.value.square().sum().backward(retain_graph=True)  # so that .grad is there already, as in training
    loss = solution.value.square().sum()
    backward_peak = peak_bytes(loss.backward)
    assert solution.report.backward is not None
    stats = solution.report.backward.stats
    steps, y = int(stats.steps), solution.value.detach()
    del solution, loss

    def gradient(u: Tensor) -> Tensor:
        return torch.autograd.grad(energy(u[0], *(a.detach() for a in args)), u, create_graph=True)[0]

    operator = Operator(gradient, y.unsqueeze(0), symmetric=True)
    product, v = operator.product(transpose=True), 2 * y.unsqueeze(0)
    product_peak = peak_bytes(lambda: product(v))
    loop, alone = [], []
    for _ in range(repeats):
        begin = time.process_time()
        dil.CG(rtol=1e-30, max_steps=steps).solve(operator, v, transpose=True)
        middle = time.process_time()
        for _ in range(steps):
            product(v)
        loop.append(middle - begin)
        alone.append(time.process_time() - middle)
    return {
        "energy": name,
        "unknowns": unknowns,
        "cg_steps": steps,
        "relative_residual": float(stats.residual / (2 * y.norm())),
        "backward_peak_vectors": round(backward_peak / vector, 2),
        "one_product_peak_vectors": round(product_peak / vector, 2),
        "loop_over_products": round(statistics.median(a / b for a, b in zip(loop, alone, strict=True)), 3),
    }


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that `work` holds at a time beyond what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record:
        work()
    now = peak = 0
    for event in record.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
