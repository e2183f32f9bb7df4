"""What all systems on JAX share: the functions, the arrays, compilation, and a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.problems import Arrays, Ops, Problem

jax.config.update("jax_enable_x64", True)


def _convolve(images: Any, filters: Any) -> Any:
    return jax.lax.conv_general_dilated(images, filters, (1, 1), "VALID")


OPS = Ops(jax.nn.softplus, jnp.tanh, jnp.sqrt, jnp.exp, _convolve)
Given = dict[str, Any]


class JaxCalls:
    """Calls of the compiled gradient; the solution is an argument, so that nothing can be computed ahead."""

    def __init__(
        self, make: Callable[[Problem], Callable[[Any, Given, Given], Any]], problem: Problem, arrays: Arrays, device: str
    ):
        parts = {name: jax.device_put(jnp.asarray(array)) for name, array in arrays.items()}
        self._clock = time.process_time if device == "cpu" else time.perf_counter
        self.order = problem.of
        self.wanted = {name: parts[name] for name in problem.of}
        layer = make(problem)
        rest = {name: part for name, part in parts.items() if name not in problem.of}

        def loss(wanted: Given, rest: Given) -> Any:
            others = {name: part for name, part in rest.items() if name not in ("v", "solution")}
            return (rest["v"] * layer(rest["solution"], wanted, others)).sum()

        self.rest, self.compiled = rest, jax.jit(jax.grad(loss))
        began = time.perf_counter()
        self()
        self.compile_seconds = time.perf_counter() - began

    def __call__(self) -> tuple[float, float]:
        """Seconds of the whole gradient, given the solution; the forward is no part by itself."""
        began = self._clock()
        self.gradients = jax.block_until_ready(self.compiled(self.wanted, self.rest))
        return 0.0, self._clock() - began

    def multiply(self, size: int) -> float:
        """Seconds of a product of two square matrices, what large problems are made of."""
        A = jax.block_until_ready(jnp.ones((size, size)))
        began = self._clock()
        jax.block_until_ready(A @ A)
        return self._clock() - began

    def gradient(self) -> np.ndarray:
        return np.concatenate([np.asarray(self.gradients[name]).ravel() for name in self.order])
