"""Polynomials through the stages of a step, or the slopes of the last ones: where an implicit solve begins."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchdil.ode.methods import Method

# Stages nearer than this to others are left out: a polynomial through them would swing.
_APART = 0.1
# Slopes to extrapolate from.
POINTS = 3

# A slope of a past step: where, in units of this step from its beginning, of which step and stage, and its factor.
Place = tuple[float, int, int, float]


class Interpolant:
    """The polynomial through y_n and those stages of a step that lie in it and well apart.

    For collocation methods with c_s = 1 it is the solution's own polynomial.

    Args:
        method: the tableau.
    """

    def __init__(self, method: Method):
        c = method.places
        self._which = [len(c) - 1]
        places = [1.0]
        for i, ci in enumerate(c[:-1]):
            if _APART <= ci <= 1 - _APART and all(abs(ci - x) >= _APART for x in places):
                self._which.append(i)
                places.append(ci)
        self._places = (0.0, *places)

    def at(self, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        """Its values, (..., k, D), at x (..., k) in units of the step, from y_n, (..., D), and the step's rows, (..., m, D)."""
        values = torch.cat((y.unsqueeze(-2), rows[..., self._which, :]), dim=-2)
        coefficients = _coefficients(self._places, y.dtype, y.device)
        powers = x.unsqueeze(-1) ** torch.arange(len(self._places), device=x.device)
        return (powers @ coefficients) @ values


@functools.lru_cache(maxsize=64)
def _coefficients(places: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Column j: the coefficients, from the constant on, of the j-th Lagrange polynomial."""
    with torch.inference_mode(False):
        return torch.tensor(np.linalg.inv(np.vander(places, increasing=True)), dtype=dtype, device=device)


def guess_in_turn(method: Method, places: list[Place]) -> list[Any]:
    """For each stage: the slopes of this step in it, those of past steps and of this one in its guess, with their weights.

    The slope of the stage is guessed by the polynomial through the last slopes before it.
    """
    plan = []
    for i, ci in enumerate(method.c):
        a = method.A[i]
        known = [(j, a[j]) for j in range(i) if a[j]]
        points: list[Place] = []
        for place in [*places, *((cj, -1, j, 1.0) for j, cj in enumerate(method.c[:i]))]:
            points = [*(p for p in points if abs(p[0] - place[0]) > 1e-6), place]
        points = points[-POINTS:]
        weights = [a[i] * w * p[3] for w, p in zip(_lagrange([p[0] for p in points], ci), points, strict=True)]
        earlier = [(p[1], p[2], w) for w, p in zip(weights, points, strict=True) if p[1] >= 0]
        plan.append((known, earlier, [(p[2], w) for w, p in zip(weights, points, strict=True) if p[1] < 0]))
    return plan


def guess_coupled(method: Method, places: list[Place]) -> Any:
    """Which slopes of past steps the guess is made of, and their weights in each stage, (s, ·): the polynomial, integrated."""
    points = places[-max(POINTS, method.stages) :]
    # Gauss' rule with as many nodes as points is exact.
    nodes, lengths = np.polynomial.legendre.leggauss(len(points))
    where = [p[0] for p in points]
    rows = []
    for c in method.c:
        values = [_lagrange(where, c * (1 + float(x)) / 2) for x in nodes]
        rows.append([c / 2 * p[3] * sum(w * v[j] for w, v in zip(lengths, values, strict=True)) for j, p in enumerate(points)])
    return [(p[1], p[2]) for p in points], torch.tensor(rows, dtype=torch.float64, device="cpu")


def _lagrange(points: list[float], x: float) -> list[float]:
    """The weights of values at `points` in the polynomial through them, at x."""
    weights = []
    for j, p in enumerate(points):
        weights.append(math.prod((x - other) / (p - other) for i, other in enumerate(points) if i != j))
    return weights
