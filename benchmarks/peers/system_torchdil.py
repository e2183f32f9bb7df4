"""torchdil: `dil.argmin` or `dil.root` with the solution as the solver's answer."""

from __future__ import annotations

import statistics
from functools import partial
from typing import Any

import torch
from torch import Tensor

import torchdil as dil
from benchmarks.peers.problems import Arrays, Problem, objective, residual
from benchmarks.peers.torch_side import OPS, Given, Layer, TorchCalls, now
from torchdil.compiled import CudaGraph
from torchdil.linearize import split

PACKAGES = ("torchdil", "torch")
WARM_UP = 40  # calls until the products are traced, and whole solves compiled


def make(problem: Problem, solution: Tensor, product: str = "auto") -> Layer:
    function = residual if problem.kind == "root" else objective
    state = dil.root if problem.kind == "root" else dil.argmin
    solver = dil.Auto(rtol=problem.rtol, product=product)
    batch = {"batch_dims": 1 if problem.samples else 0} if problem.kind == "root" else {}

    def layer(given: Given) -> Tensor:
        def stated(y: Tensor) -> Tensor:
            return function(OPS, problem, y, given)

        layer.solved = state(stated, solution, solver=known, linear_solver=solver, on_failure="ignore", **batch)
        return layer.solved.value

    def known(function: Any, y: Tensor) -> Tensor:
        return solution

    return layer


class _Nothing(torch.autograd.Function):
    """A layer that has its answers at hand: what is left is torch's own part of a backward pass."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, *given: Tensor) -> Tensor:
        ctx.given = given
        return y.clone()

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.given


class Calls(TorchCalls):
    """With what is the least that any implementation can take: the steps of CG times one product with J."""

    def floor(self) -> float:
        """Seconds of a backward pass through a layer that does nothing, after a forward pass that does all."""
        times = []
        for _ in range(10):
            self.layer(self.given)
            loss = (self.v * _Nothing.apply(self.solution, *self.wanted)).sum()
            began = now(self.device)
            torch.autograd.grad(loss, self.wanted)
            times.append(now(self.device) - began)
        return statistics.median(times)

    def limit(self) -> dict[str, float]:
        """CG's steps, and the seconds of one product, as it is traced, made alone."""
        problem, given = self.problem, {name: t.detach() for name, t in self.given.items()}
        with torch.no_grad():
            halves = split(partial(_product, problem, given), self.solution, self.v)
            saved = halves.prelude(self.solution, *halves.captured)
            (part,) = halves.parts
            inputs = (self.v, *(saved[place] for place in part.places))
            product = CudaGraph(part.module, inputs) if self.device == "cuda" else part.module
            if self.device == "cpu" and problem.name != "experts":  # whose convolutions TorchScript cannot trace
                product = torch.jit.trace(product, inputs, check_trace=False)
            times = []
            for _ in range(20):
                began = now(self.device)
                product(*inputs)
                times.append(now(self.device) - began)
        stats = self.layer.solved.report.backward.stats
        product, floor = statistics.median(times[5:]), self.floor()
        return {"steps": int(stats.steps.max()), "product": product, "method": stats.method, "floor": floor}


def _product(problem: Problem, given: Given, y: Tensor, p: Tensor) -> list[tuple[Tensor, ...]]:
    with torch.enable_grad():
        leaf = y.detach().requires_grad_()
        F = residual(OPS, problem, leaf, given) if problem.kind == "root" else None
        if F is None:
            (F,) = torch.autograd.grad(objective(OPS, problem, leaf, given).sum(), leaf, create_graph=True)
        return [(), torch.autograd.grad(F, leaf, p)]


def calls(problem: Problem, arrays: Arrays, device: str) -> Calls:
    return Calls(make, problem, arrays, device)
