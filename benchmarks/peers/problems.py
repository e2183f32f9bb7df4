"""The problems of the comparison: arrays by NumPy, and functions that PyTorch and JAX both read.

A layer is y = argmin_u f(u) or a root F(y) = 0, the loss Σ v y, and what is timed is the gradient of the loss with respect to
the arrays of `Problem.of`, given the solution. Functions take an `Ops`, the few functions whose names differ between libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

Arrays = dict[str, np.ndarray]


class Ops(NamedTuple):
    """What PyTorch and JAX call differently."""

    softplus: Callable[[Any], Any]
    tanh: Callable[[Any], Any]
    sqrt: Callable[[Any], Any]
    exp: Callable[[Any], Any]
    convolve: Callable[[Any, Any], Any]  # (N, 1, H, W), (K, 1, h, w) -> (N, K, H - h + 1, W - w + 1)


@dataclass(frozen=True)
class Problem:
    """A layer and what its gradient is taken of.

    Attributes:
        name: what it is.
        unknowns: of a sample.
        samples: how many independent ones there are; 0: there is no such axis.
        kind: "argmin" or "root".
        of: names of the arrays that the gradient is taken of.
        rtol: of the linear solve.
    """

    name: str
    unknowns: int
    samples: int = 0
    kind: str = "argmin"
    of: tuple[str, ...] = ("x", "first", "second")
    rtol: float = 1e-6

    @property
    def label(self) -> str:
        return f"{self.name}, {self.samples} x {self.unknowns}" if self.samples else f"{self.name}, {self.unknowns}"

    @property
    def shape(self) -> tuple[int, ...]:
        """Of y."""
        if self.name == "experts":
            side = round(self.unknowns**0.5)
            return (self.samples, 1, side, side)
        return (self.samples, self.unknowns) if self.samples else (self.unknowns,)


HIDDEN = 64
FILTERS = 8
EXAMPLES = 2000


def problems(device: str) -> list[Problem]:
    """Those of the comparison; a GPU has larger ones."""
    sizes = (10, 100, 1000, 10**4, 10**5)
    found = [Problem("tiny", 2, of=("x", "weights"))]
    found += [Problem("energy", size) for size in sizes]
    found += [Problem("energy", 32, samples=256 if device == "cpu" else 4096)]
    found += [
        Problem(
            "experts", 256**2 if device == "cpu" else 512**2, samples=1 if device == "cpu" else 8, of=("x", "filters", "scales")
        )
    ]
    found += [Problem("logistic", 200, of=("penalties",))]
    found += [Problem("deq", 512, samples=64, kind="root", of=("x", "weights", "inputs"))]
    return found


def arrays(problem: Problem, seed: int = 0) -> Arrays:
    """Of the problem, v included; float64."""
    draw = np.random.default_rng(seed)
    n, normal = problem.unknowns, draw.standard_normal
    found: Arrays = {"v": normal(problem.shape)}
    if problem.name == "tiny":
        found |= {"x": normal(n), "weights": normal((n, n))}
    elif problem.name == "energy":
        found |= {
            "x": normal(problem.shape),
            "first": normal((n, HIDDEN)) / n**0.5,
            "second": normal((HIDDEN, HIDDEN)) / HIDDEN**0.5,
        }
    elif problem.name == "experts":
        filters = normal((FILTERS, 1, 5, 5))
        found |= {"x": normal(problem.shape), "filters": filters / np.linalg.norm(filters), "scales": normal(FILTERS)}
    elif problem.name == "logistic":
        data = normal((EXAMPLES, n))
        labels = np.sign(data @ normal(n) + normal(EXAMPLES))
        found |= {"data": data * labels[:, None], "penalties": draw.uniform(-4, 0, n)}
    elif problem.name == "deq":
        weights = normal((n, n))
        found |= {
            "x": normal(problem.shape),
            "weights": 0.8 * weights / np.linalg.norm(weights, 2),
            "inputs": normal((n, n)) / n**0.5,
        }
    else:
        raise ValueError(f"problem must be one of those here, got {problem.name!r}.")
    return found


def objective(ops: Ops, problem: Problem, y: Any, given: dict[str, Any]) -> Any:
    """f(y) of an argmin: a number, or one for each sample."""
    axis = tuple(range(1 if problem.samples else 0, len(problem.shape)))
    if problem.name == "tiny":
        return 0.5 * ((y - given["x"]) ** 2).sum() + ops.softplus(given["weights"] @ y).sum()
    if problem.name == "energy":
        inner = ops.softplus(ops.softplus(y @ given["first"]) @ given["second"] ** 2)
        return (0.5 * (y - given["x"]) ** 2).sum(-1) + inner.sum(-1)
    if problem.name == "experts":
        responses = ops.convolve(y, given["filters"])
        prior = ops.exp(given["scales"])[:, None, None] * ops.sqrt(1e-2 + responses**2)
        return (0.5 * (y - given["x"]) ** 2).sum(axis) + prior.sum(axis)
    assert problem.name == "logistic"
    return ops.softplus(-(given["data"] @ y)).sum() / EXAMPLES + 0.5 * (ops.exp(given["penalties"]) * y**2).sum()


def residual(ops: Ops, problem: Problem, y: Any, given: dict[str, Any]) -> Any:
    """F(y) of a root: here y - tanh(y W + x U), so that y is a fixed point."""
    return y - step(ops, problem, y, given)


def step(ops: Ops, problem: Problem, y: Any, given: dict[str, Any]) -> Any:
    """The map whose fixed point a root is."""
    assert problem.name == "deq"
    return ops.tanh(y @ given["weights"] + given["x"] @ given["inputs"])
