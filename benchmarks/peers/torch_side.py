"""What all systems on PyTorch share: the functions, the arrays as tensors, and a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.peers.problems import Arrays, Ops, Problem

OPS = Ops(functional.softplus, torch.tanh, torch.sqrt, torch.exp, functional.conv2d)
Given = dict[str, Tensor]
Layer = Callable[[Given], Tensor]


def now(device: str) -> float:
    """Seconds: of the processor on a CPU, of the wall after what a GPU still has to do."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class TorchCalls:
    """Calls of a layer that finds its solution at once, and of its backward."""

    def __init__(self, make: Callable[[Problem, Tensor], Layer], problem: Problem, arrays: Arrays, device: str):
        torch.set_num_threads(1)
        tensors = {name: torch.as_tensor(array, device=device) for name, array in arrays.items()}
        self.problem, self.device, self.v, self.solution = problem, device, tensors.pop("v"), tensors.pop("solution")
        self.given = {name: tensor.requires_grad_(name in problem.of) for name, tensor in tensors.items()}
        self.wanted = [self.given[name] for name in problem.of]
        self.layer: Any = make(problem, self.solution)

    def __call__(self) -> tuple[float, float]:
        """Seconds of the forward, given the solution, and of the backward."""
        began = now(self.device)
        loss = (self.v * self.layer(self.given)).sum()
        middle = now(self.device)
        self.gradients = torch.autograd.grad(loss, self.wanted, allow_unused=True)
        return middle - began, now(self.device) - middle

    def multiply(self, size: int) -> float:
        """Seconds of a product of two square matrices, what large problems are made of."""
        A = torch.ones(size, size, dtype=torch.float64, device=self.device)
        began = now(self.device)
        A @ A
        return now(self.device) - began

    def gradient(self) -> np.ndarray:
        """Of the last call, as one vector; zeros where there is none."""
        parts = (torch.zeros_like(t) if g is None else g for g, t in zip(self.gradients, self.wanted, strict=True))
        return np.concatenate([part.detach().cpu().numpy().ravel() for part in parts])
