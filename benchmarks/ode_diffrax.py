"""diffrax's backward Euler, timed on request: run by `benchmarks.ode` under a Python that has jax and diffrax.

Reads requests from stdin and answers on stdout, one JSON object a line: {"load": PATH} reads the arrays of a problem, compiles,
writes states and gradient to PATH.answer.npz; {"time": "forward" or "both", "calls": n, "before": m} times n calls after m.
"""

from __future__ import annotations

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
import optimistix

# Full float32: on a GPU products would have ten bits otherwise, and no step would come to a residual of 1e-5.
jax.config.update("jax_default_matmul_precision", "highest")


def solve(weights: list[Any], y0: Any, steps: int, step_size: float, tolerance: float) -> Any:
    """The states after each step of one sample, (T, D)."""
    A, a, B, b, C, c = weights

    def slope(t: Any, y: Any, _: Any) -> Any:
        return C @ jnp.tanh(B @ jnp.tanh(A @ y + a) + b) + c

    return diffrax.diffeqsolve(
        diffrax.ODETerm(slope),
        diffrax.ImplicitEuler(root_finder=diffrax.VeryChord(rtol=tolerance, atol=tolerance, norm=optimistix.max_norm)),
        t0=0.0,
        t1=steps * step_size,
        dt0=step_size,
        y0=y0,
        saveat=diffrax.SaveAt(steps=True),
        stepsize_controller=diffrax.ConstantStepSize(),
        adjoint=diffrax.DirectAdjoint(),
        max_steps=steps,
        throw=False,
    ).ys


class Problem:
    """The functions of one problem, compiled."""

    def __init__(self, path: str):
        data = np.load(path)
        self.weights = [jnp.asarray(data[f"weight{i}"]) for i in range(6)]
        self.y0 = jnp.asarray(data["y0"])
        settings = int(data["steps"]), float(data["step_size"]), float(data["tolerance"])

        def states(weights: list[Any], y0: Any) -> Any:
            if len(y0) == 1:
                return solve(weights, y0[0], *settings)[None]
            return jax.vmap(lambda start: solve(weights, start, *settings))(y0)

        self.forward = jax.jit(states)
        self.both = jax.jit(jax.value_and_grad(lambda weights, y0: (states(weights, y0) ** 2).sum(), argnums=(0, 1)))

    def answer(self, path: str) -> None:
        """States (T, B, D) without the first, and the gradient, to a file."""
        _, (weights, y0) = self.both(self.weights, self.y0)
        states = jnp.swapaxes(self.forward(self.weights, self.y0), 0, 1)
        # The loss of the other systems has y0 in it, too.
        gradient = np.concatenate([np.ravel(part) for part in (y0 + 2 * self.y0, *weights)])
        np.savez(path, states=np.asarray(states), gradient=gradient)

    def time(self, what: str, calls: int, before: int) -> list[float]:
        """Seconds of each call, after a few that do not count."""
        function = getattr(self, what)
        times = []
        for _ in range(before + calls):
            began = time.perf_counter()
            jax.block_until_ready(function(self.weights, self.y0))
            times.append(time.perf_counter() - began)
        return times[before:]


def main() -> None:
    problem: Problem | None = None
    for line in sys.stdin:
        request = json.loads(line)
        answer: dict[str, Any] = {"jax": jax.__version__, "diffrax": version("diffrax"), "platform": jax.default_backend()}
        if "load" in request:
            problem = Problem(request["load"])
            problem.answer(request["load"] + ".answer.npz")
        else:
            assert problem is not None
            answer = {"times": problem.time(request["time"], request["calls"], request["before"])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
