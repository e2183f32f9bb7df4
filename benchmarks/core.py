"""What the parts of the core give: independence of samples, warm starts, preconditioners, ways to make a product."""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor
from torch.nn.functional import softplus

import torchdil as dil
from torchdil.operator import Operator


def _random(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def isolation(samples: int = 256, unknowns: int = 8) -> dict[str, object]:
    """The gradients of a batch with one sample made ill-conditioned (10¹⁰), against the same batch without."""
    generator = torch.Generator().manual_seed(0)
    scale = torch.ones(samples, unknowns, dtype=torch.float64)
    hard = scale.clone()
    hard[0] = torch.logspace(0, 10, unknowns, dtype=torch.float64)
    x = _random(generator, samples, unknowns)
    mixing = _random(generator, unknowns, unknowns)

    def gradient(scale: Tensor) -> Tensor:
        def score(y: Tensor, x: Tensor) -> Tensor:
            return 0.5 * (scale * (y - x).square()).sum(1) + softplus(y @ mixing).sum(1)

        inputs = x.clone().requires_grad_()
        solver = dil.CG(max_steps=200)
        solution = dil.argmin(score, torch.zeros_like(x), (inputs,), linear_solver=solver, on_failure="ignore")
        solution.value.square().sum().backward()
        assert inputs.grad is not None
        return inputs.grad

    difference = (gradient(scale) - gradient(hard))[1:].abs().max()
    return {"samples": samples, "largest_change_of_the_other_gradients": float(difference)}


def warm_start(steps: int = 50, unknowns: int = 200) -> dict[str, object]:
    """Products in the backward passes of a training run, with and without the last solution as a start."""
    products = {}
    for name, solver in (("cold", dil.CG(rtol=1e-6)), ("warm", dil.WarmStart(dil.CG(rtol=1e-6)))):
        generator = torch.Generator().manual_seed(0)
        weights = (_random(generator, unknowns, unknowns) / unknowns**0.5).requires_grad_()
        x, target = _random(generator, 4, unknowns), _random(generator, 4, unknowns)

        def score(y: Tensor, x: Tensor, weights: Tensor = weights) -> Tensor:
            return 0.05 * (y - x).square().sum(1) + softplus(y @ weights).sum(1)

        layer = dil.ArgminLayer(score, linear_solver=solver, init=dil.LastSolution((unknowns,)), on_failure="raise")
        products[name] = _products_of_training(layer, weights, x, target, steps, lr=1e-3)
    return {"training_steps": steps, **products, "saved": round(1 - products["warm"] / products["cold"], 3)}


def preconditioners(samples: int = 16, unknowns: int = 200) -> list[dict[str, object]]:
    """Products of the backward's CG, those that make the preconditioner included, on two ill-conditioned batches."""
    generator = torch.Generator().manual_seed(0)
    x, coupling = _random(generator, samples, unknowns), _random(generator, unknowns, unknowns) / unknowns**0.5
    strong = 5 * _random(generator, samples, unknowns, 40) / torch.arange(1, 41)

    def diagonal(y: Tensor) -> Tensor:
        curvature = torch.logspace(0, 3, unknowns, dtype=torch.float64)
        return 0.5 * (curvature * (y - x).square()).sum(1) + softplus(y @ coupling).sum(1)

    def low_rank(y: Tensor) -> Tensor:
        along = torch.einsum("bnk,bn->bk", strong, y)
        return 0.5 * (y - x).square().sum(1) + 0.5 * along.square().sum(1) + softplus(4 * y @ coupling).sum(1)

    choices = {"none": None, "Jacobi()": dil.Jacobi(), "Nystrom()": dil.Nystrom(), "SecantMemory()": dil.SecantMemory()}
    rows: list[dict[str, object]] = []
    for problem in (diagonal, low_rank):
        row: dict[str, object] = {"curvature": problem.__name__}
        for name, preconditioner in choices.items():
            parameter = torch.zeros(samples, unknowns, dtype=torch.float64, requires_grad=True)
            solution = dil.argmin(
                lambda y, parameter=parameter, problem=problem: problem(y) + (parameter * y).sum(1),
                torch.zeros_like(x),
                solver=dil.LBFGS(rtol=1e-6),
                linear_solver=dil.CG(rtol=1e-6, preconditioner=preconditioner),
            )
            solution.value.sum().backward()
            assert solution.report.backward is not None
            row[name] = solution.report.backward.stats.products
        rows.append(row)
    return rows


def ill_conditioned(steps: int = 10, samples: int = 8, unknowns: int = 100) -> list[dict[str, object]]:
    """Products in the backward passes of a training run on a batch with condition numbers from 10 to 10⁵, the ways combined."""
    rows: list[dict[str, object]] = []
    plain = 0
    for preconditioner in (None, dil.Jacobi()):
        for warm in (False, True):
            generator = torch.Generator().manual_seed(0)
            powers = torch.linspace(1, 5, samples, dtype=torch.float64).unsqueeze(1)
            curvature = 10 ** (powers * torch.linspace(0, 1, unknowns, dtype=torch.float64))
            weights = (_random(generator, unknowns, unknowns) / unknowns**0.5).requires_grad_()
            x, target = _random(generator, samples, unknowns), _random(generator, samples, unknowns)

            def score(y: Tensor, x: Tensor, weights: Tensor = weights, curvature: Tensor = curvature) -> Tensor:
                return 0.5 * (curvature * (y - x).square()).sum(1) + softplus(y @ weights).sum(1)

            cg = dil.CG(rtol=1e-6, preconditioner=preconditioner)
            layer = dil.ArgminLayer(
                score, linear_solver=dil.WarmStart(cg) if warm else cg, init=dil.LastSolution((unknowns,)), on_failure="raise"
            )
            products = _products_of_training(layer, weights, x, target, steps, lr=1e-2)
            plain = plain or products
            name = "none" if preconditioner is None else "Jacobi()"
            saved = round(1 - products / plain, 3)
            rows.append({"preconditioner": name, "warm_start": warm, "products": products, "saved": saved})
    return rows


def _products_of_training(layer: dil.ArgminLayer, weights: Tensor, x: Tensor, target: Tensor, steps: int, lr: float) -> int:
    """Products with the Hessian in all backward passes of a few steps of training on the same data."""
    optimiser = torch.optim.SGD([weights], lr=lr)
    products = 0
    for _ in range(steps):
        optimiser.zero_grad()
        (layer(x) - target).square().mean().backward()
        optimiser.step()
        assert layer.report is not None and layer.report.backward is not None
        products += layer.report.backward.stats.products
    return products


def strategies(sizes: tuple[int, ...] = (10, 1000), repeats: int = 200) -> list[dict[str, object]]:
    """The time of one product with the Hessian of an MLP energy, relative to double backward; interleaved, CPU clock."""
    rows: list[dict[str, object]] = []
    for unknowns in sizes:
        generator = torch.Generator().manual_seed(0)
        first, second = _random(generator, unknowns, 64) / unknowns**0.5, _random(generator, 64, 64) / 8

        def gradient(y: Tensor, first: Tensor = first, second: Tensor = second) -> Tensor:
            def score(y: Tensor) -> Tensor:
                return 0.5 * y.square().sum() + softplus(softplus(y @ first) @ second).sum()

            if torch._C._functorch.peek_interpreter_stack() is not None:
                return torch.func.grad(score)(y)
            return torch.autograd.grad(score(y), y, create_graph=True)[0]

        operator = Operator(gradient, _random(generator, 1, unknowns), symmetric=True)
        p = _random(generator, 1, unknowns)
        products = {name: operator.product(True, name) for name in ("backward", "forward", "traced")}
        times: dict[str, list[float]] = {name: [] for name in products}
        for product in products.values():
            product(p)
        for _ in range(repeats):
            for name, product in products.items():
                begin = time.process_time()
                product(p)
                times[name].append(time.process_time() - begin)
        medians = {name: statistics.median(values) for name, values in times.items()}
        rows.append({"unknowns": unknowns, **{name: round(t / medians["backward"], 2) for name, t in medians.items()}})
    return rows
