"""Motions to forecast, for the paper's Table 1: the Van der Pol oscillator, the Spiral, and CMU Walking.

    Van der Pol: x'' - μ (1 - x²) x' + x = 0, μ = 3          Spiral: dx/dt = A x³ (elementwise)

Both start from (2, 0) and are observed every 0.1 s, without noise; SciPy solves them to 1e-12. One trajectory is cut into
pieces for training, validation and test, the last two with the point before them, from where a roll-out begins. CMU Walking is
subject 35 of the CMU motion capture library in the preprocessing of ODE2VAE (Yıldız et al. 2019): 16, 3 and 4 sequences of 300
frames.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.integrate
import scipy.io
import torch
from torch import Tensor

from experiments.runner import Skip

DT = 0.1
MU = 3.0
START = (2.0, 0.0)
# Of SciPy's solver, relative and absolute.
TOLERANCE = 1e-12
WALKING = "mocap35.mat"
WALKING_SHA256 = "105484f138487f10209cce883d26e2e030d10a6df6f10159f4e6e253f9b03b8d"
WALKING_SOURCE = "the data folder that the README of github.com/cagatayyildiz/ODE2VAE links"


class Split(NamedTuple):
    """Sequences (N, T, D) in float64. The first frames of a sequence are given, the others are to be predicted."""

    train: Tensor
    validation: Tensor
    test: Tensor


def van_der_pol() -> Split:
    """320 points (x, x'): 107 to train, 106 to validate, 106 to test; point 213 only starts the test."""
    points = trajectory(lambda x: np.array([x[1], MU * (1 - x[0] ** 2) * x[1] - x[0]]), 320)
    return Split(points[None, :107], points[None, 106:213], points[None, 213:])


def spiral(a11: float) -> Split:
    """300 points: 100 to train, 50 to validate, 150 to test."""
    A = np.array([[a11, 2.0], [-2.0, -0.1]])
    points = trajectory(lambda x: A @ x**3, 300)
    return Split(points[None, :100], points[None, 99:150], points[None, 149:])


def trajectory(field: Callable[[np.ndarray], np.ndarray], points: int) -> Tensor:
    """The solution from `START`, (points, 2)."""
    times = DT * np.arange(points)
    solution = scipy.integrate.solve_ivp(
        lambda t, x: field(x), (0.0, times[-1]), START, method="DOP853", t_eval=times, rtol=TOLERANCE, atol=TOLERANCE
    )
    return torch.from_numpy(solution.y.T.copy())


def walking(folder: str | None) -> Split:
    """CMU Walking from `folder`, else $TORCHDIL_DATA, else the user's cache folder."""
    cache = Path.home() / ".cache" / "torchdil"
    places = [Path(place) for place in (folder, os.environ.get("TORCHDIL_DATA"), cache) if place]
    found = next((place / WALKING for place in places if (place / WALKING).is_file()), None)
    if found is None:
        raise Skip(f"CMU Walking needs {WALKING}: get it from {WALKING_SOURCE} and put it into {cache} or $TORCHDIL_DATA.")
    if hashlib.sha256(found.read_bytes()).hexdigest() != WALKING_SHA256:
        raise Skip(
            f"{found} is another file than the one meant (sha256 {WALKING_SHA256[:12]}...): get it from {WALKING_SOURCE}."
        )
    arrays = scipy.io.loadmat(found)
    return Split(*(torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in ("Xtr", "Xval", "Xtest")))
