"""Nobody's library: the implicit function theorem written out for the tiny problem, as one would without any."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.peers.problems import Arrays, Problem, objective
from benchmarks.peers.torch_side import OPS, Given, Layer, TorchCalls

PACKAGES = ("torch",)


def make(problem: Problem, solution: Tensor) -> Layer:
    if problem.name != "tiny":
        raise ValueError("written for the tiny problem only")

    class Implicit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
            ctx.save_for_backward(x, weights)
            return solution.clone()

        @staticmethod
        def backward(ctx: Any, v: Tensor) -> tuple[Tensor, ...]:
            x, weights = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            with torch.enable_grad():
                y = solution.detach().requires_grad_()
                value = objective(OPS, problem, y, {"x": x, "weights": weights})
                (F,) = torch.autograd.grad(value, y, create_graph=True)
                H = torch.stack([torch.autograd.grad(part, y, retain_graph=True)[0] for part in F])
                return torch.autograd.grad(F, (x, weights), -torch.linalg.solve(H, v))

    def layer(given: Given) -> Tensor:
        return Implicit.apply(given["x"], given["weights"])

    return layer


def calls(problem: Problem, arrays: Arrays, device: str) -> TorchCalls:
    return TorchCalls(make, problem, arrays, device)
