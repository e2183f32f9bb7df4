"""Imitating a linear-quadratic regulator: the dynamics A of a mass-spring-damper are learned from an expert's controls alone.

The paper's appendix. The expert applies u = -K x with K = (R + BᵀSB)⁻¹ BᵀSA, S the solution of the discrete Riccati equation of
the true A; the learner has  instead, and descends on ‖u - û‖² through the Riccati equation. The gradient comes from the layer
with three linear solvers, and from a formula written out here, an oracle that shares no code with the layer.
All systems and initialisations are trained together as one batch: one run is the whole experiment.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from scipy.linalg import solve_discrete_are
from torch import Tensor

import torchdil as dil
from experiments.systems import mass_spring_damper

Gain = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
LOSSES = ("model", "imitation", "sampled")


@dataclass(frozen=True)
class Config:
    """Sizes of the experiment.

    Attributes:
        dampings: c of the systems.
        initialisations: random first Â, the same for every c.
        perturbation: they are A plus a number in [-perturbation, perturbation] for each entry.
        settings: starts a step, and whether Adam keeps its largest second moment (AMSGrad); (1, False) is the paper's.
        iterations, learning_rate: of Adam.
        length: steps of the expert's trajectory.
        ahead: controls that the learner predicts from a start on it.
        every: iterations between two points of a curve.
        systems: random Â for each c, on which the Riccati solver is tried.
        runs: one is the whole experiment.
    """

    dampings: tuple[float, ...] = (1.0, 0.1, -0.6)
    initialisations: int = 5
    perturbation: float = 0.5
    settings: tuple[tuple[int, bool], ...] = ((1, False), (16, False))
    iterations: int = 200
    learning_rate: float = 1e-2
    length: int = 50
    ahead: int = 6
    every: int = 10
    systems: int = 300
    runs: int = 1

    @staticmethod
    def preset(name: str) -> Config:
        smoke = Config(initialisations=2, settings=((1, False), (4, True)), iterations=20, every=5, systems=20)
        settings = ((1, False), (1, True), (16, False), (16, True))
        paper = Config(settings=settings, iterations=3000, every=50, systems=1500)
        return {"smoke": smoke, "quick": Config(), "paper": paper}[name]


class Expert(NamedTuple):
    """C systems that differ in c: A (C, n, n), B (n, m), Q (n, n), R (m, m), the states (C, T, n) and controls (C, T, m)."""

    A: Tensor
    B: Tensor
    Q: Tensor
    R: Tensor
    states: Tensor
    controls: Tensor


class Learning(NamedTuple):
    """I runs for each of C systems.

    Attributes:
        A, K: Â and its gain before each step and after the last, (T+1, C, I, n, n) and (T+1, C, I, m, n).
        sampled: the loss of each step, (T, C, I).
        warned: the iterations in which the layer warned, forward or backward.
    """

    A: Tensor
    K: Tensor
    sampled: Tensor
    warned: int


class AnalyticDare(torch.autograd.Function):
    """S by SciPy and its gradient by the formula, of batches of systems; the oracle.

    With K and M = A - BK at the solution, and G the gradient of the loss in S: W = M W Mᵀ + (G + Gᵀ)/2, then
    dA = 2 S M W, dB = -2 S M W Kᵀ, dQ = W, dR = K W Kᵀ.
    """

    @staticmethod
    def forward(ctx: Any, A: Tensor, B: Tensor, Q: Tensor, R: Tensor) -> Tensor:
        systems = zip(*(t.flatten(0, -3).numpy() for t in (A, B, Q, R)), strict=True)
        S = torch.stack([torch.as_tensor(solve_discrete_are(*system)) for system in systems]).view_as(A)
        ctx.save_for_backward(S, A, B, R)
        return S

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        S, A, B, R = ctx.saved_tensors
        (G,) = grads
        n = A.shape[-1]
        K = gain(S, A, B, R)
        M = A - B @ K
        kronecker = torch.einsum("...ij,...kl->...ikjl", M, M).flatten(-4, -3).flatten(-2)
        v = (0.5 * (G + G.mT)).flatten(-2)
        W = torch.linalg.solve(torch.eye(n * n, dtype=A.dtype) - kronecker, v).view_as(A)
        SMW = S @ M @ W
        return 2 * SMW, -2 * SMW @ K.mT, W, K @ W @ K.mT


def gain(S: Tensor, A: Tensor, B: Tensor, R: Tensor) -> Tensor:
    """K, (..., m, n)."""
    return torch.linalg.solve(R + B.mT @ S @ B, B.mT @ S @ A)


def analytic(A: Tensor, B: Tensor, Q: Tensor, R: Tensor) -> Tensor:
    """K of batches of systems, (..., m, n), with the oracle's gradient."""
    return gain(AnalyticDare.apply(A, B, Q, R), A, B, R)


REFERENCE, NUDGED = "analytic", "nudged"
METHODS: dict[str, Gain] = {
    REFERENCE: analytic,
    "cg": partial(dil.control.dlqr, linear_solver=dil.CG()),
    "naive": partial(dil.control.dlqr, linear_solver=dil.Dense()),
    "stein": dil.control.dlqr,
}


def expert(config: Config) -> Expert:
    """The expert of each c and its trajectory from x0."""
    systems = [mass_spring_damper(c) for c in config.dampings]
    A = torch.stack([system.A for system in systems])
    _, B, Q, R, x0 = systems[0]
    K = analytic(A, *(t.expand(len(A), -1, -1) for t in (B, Q, R)))
    states, controls = follow(A - B @ K, K, x0.expand(len(A), 1, -1), config.length)
    return Expert(A, B, Q, R, states.squeeze(1), controls.squeeze(1))


def follow(M: Tensor, K: Tensor, x: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """States (..., b, steps, n) and controls (..., b, steps, m) of the closed loop M (..., n, n) from x (..., b, n)."""
    states = [x]
    for _ in range(steps - 1):
        states.append(states[-1] @ M.mT)
    along = torch.stack(states, dim=-2)
    return along, -along @ K.mT.unsqueeze(-3)


def draws(config: Config, batch: int, seed: int) -> tuple[Tensor, Tensor]:
    """What is added to A at first, (I, n, n), and the starts of all iterations, (T, I, batch); the same for every method."""
    generator = torch.Generator().manual_seed(seed)
    offsets = config.perturbation * _uniform(generator, config.initialisations, 2, 2)
    shape = (config.iterations, config.initialisations, batch)
    return offsets, torch.randint(config.length - config.ahead + 1, shape, generator=generator)


def learn(config: Config, method: Gain, target: Expert, first: Tensor, starts: Tensor, amsgrad: bool = False) -> Learning:
    """Adam on  (C, I, n, n) from `first`, all runs at once: the losses are summed, and Adam treats each entry by itself."""
    A = first.clone().requires_grad_()
    B, Q, R = (t.expand(*A.shape[:-2], -1, -1) for t in (target.B, target.Q, target.R))
    optimiser = torch.optim.Adam([A], lr=config.learning_rate, amsgrad=amsgrad)
    window, warned = torch.arange(config.ahead), 0
    matrices, gains, losses = [], [], []
    for start in [*starts, None]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            K = method(A, B, Q, R)
            matrices.append(A.detach().clone())
            gains.append(K.detach())
            if start is not None:
                _, predicted = follow(A - B @ K, K, target.states[:, start], config.ahead)
                error = predicted - target.controls[:, start.unsqueeze(-1) + window]
                loss = error.square().sum(dim=(-2, -1)).mean(dim=-1)
                losses.append(loss.detach())
                (A.grad,) = torch.autograd.grad(loss.sum(), A)
                optimiser.step()
        warned += bool(caught)
    return Learning(torch.stack(matrices), torch.stack(gains), torch.stack(losses), warned)


def curves(config: Config, target: Expert, learning: Learning) -> dict[str, Tensor]:
    """‖A - Â‖ and ‖u - û‖² over the whole trajectory, (T+1, C, I), and the loss of the sampled starts, (T, C, I)."""
    M = learning.A - target.B @ learning.K
    x0 = target.states[0, :1].expand(*M.shape[:-2], 1, -1)
    _, controls = follow(M, learning.K, x0, config.length)
    return {
        "model": torch.linalg.matrix_norm(learning.A - target.A.unsqueeze(1)),
        "imitation": (controls.squeeze(-3) - target.controls.unsqueeze(1)).square().sum(dim=(-2, -1)),
        "sampled": learning.sampled,
    }


def run(config: Config, seed: int) -> dict[str, Any]:
    """The curves of all methods, how far they are apart, and how often the Riccati solver failed."""
    return {
        "kept": list(range(0, config.iterations + 1, config.every)),
        "groups": [group for setting in config.settings for group in _groups(config, *setting, seed)],
        "systems": _systems(config, seed),
    }


def derivatives(target: Expert, method: Gain, A: Tensor) -> tuple[Tensor, Tensor]:
    """K of  (..., n, n), and the derivative in  of a fixed combination of its entries."""
    A = A.clone().requires_grad_()
    K = method(A, *(t.expand(*A.shape[:-2], -1, -1) for t in (target.B, target.Q, target.R)))
    return K.detach(), torch.autograd.grad(K, A, torch.tensor([[1.0, -2.0]], dtype=A.dtype).expand_as(K))[0]


def _groups(config: Config, batch: int, amsgrad: bool, seed: int) -> list[dict[str, Any]]:
    """One for each c: all methods from the same first  on the same starts."""
    target, (offsets, starts) = expert(config), draws(config, batch, seed)
    first = target.A.unsqueeze(1) + offsets
    learned = {name: learn(config, method, target, first, starts, amsgrad) for name, method in METHODS.items()}
    met = learned[REFERENCE].A[:: config.every]
    right = derivatives(target, METHODS[REFERENCE], met)
    same = {
        name: [_error(*pair) for pair in zip(derivatives(target, m, met), right, strict=True)] for name, m in METHODS.items()
    }
    # A ruler for the differences: what the smallest change of the first  does to the oracle's own curves.
    nudged = torch.nextafter(first, torch.full_like(first, torch.inf))
    learned[NUDGED] = learn(config, METHODS[REFERENCE], target, nudged, starts, amsgrad)
    found = {name: curves(config, target, learning) for name, learning in learned.items()}
    groups = []
    for at, c in enumerate(config.dampings):
        methods: dict[str, Any] = {}
        for name, learning in learned.items():
            own = {loss: found[name][loss][:, at] for loss in LOSSES}
            methods[name] = {
                "curves": {loss: _kept(config, own[loss], loss) for loss in _stored(name)},
                "failed_systems": int((~learning.K[:, at].isfinite().flatten(2).all(dim=2)).sum()),
                "warned_iterations": learning.warned,
            }
            if name != REFERENCE:
                apart = {loss: _apart(own[loss], found[REFERENCE][loss][:, at]) for loss in LOSSES}
                methods[name]["apart"] = {loss: _rounded(_worst(config, apart[loss])) for loss in LOSSES}
                methods[name]["furthest_apart"] = {loss: _rounded(apart[loss].amax(dim=0)) for loss in LOSSES}
            if name in METHODS and name != REFERENCE:
                gains, slopes = (float(error[:, at].max()) for error in same[name])
                methods[name]["same_point"] = {"gain": gains, "derivative": slopes}
        groups.append({"c": c, "batch": batch, "amsgrad": amsgrad, "methods": methods})
    return groups


def _systems(config: Config, seed: int) -> list[dict[str, Any]]:
    """The Riccati solver on many random Â: how many it failed on, and how far it is from SciPy."""
    target, generator = expert(config), torch.Generator().manual_seed(seed + 1)
    rows = []
    for c, A in zip(config.dampings, target.A, strict=True):
        A = A + config.perturbation * _uniform(generator, config.systems, 2, 2)
        B, Q, R = (t.expand(config.systems, -1, -1) for t in (target.B, target.Q, target.R))
        S, right = dil.control.dare(A, B, Q, R, on_failure="ignore"), AnalyticDare.apply(A, B, Q, R)
        failed = ~S.isfinite().flatten(1).all(dim=1)
        error = _error(S, right)
        K = gain(right, A, B, R)
        radius = torch.linalg.eigvals(A - B @ K).abs().amax(dim=1)
        row = {"c": c, "systems": config.systems, "failed": int(failed.sum()), "largest_radius": float(radius.max())}
        rows.append(row | {"largest_error": float(error[~failed].max())})
    return rows


def _stored(name: str) -> tuple[str, ...]:
    """The losses whose curves are worth their place."""
    return LOSSES if name == REFERENCE else () if name == NUDGED else LOSSES[:2]


def _kept(config: Config, curve: Tensor, loss: str) -> list[list[float]]:
    """Every so many points of a curve (T, I), by runs; of the sampled loss the mean since the last one."""
    if loss == "sampled":
        return _rounded(curve.unflatten(0, (-1, config.every)).mean(dim=1).mT)
    return _rounded(curve[:: config.every].mT)


def _error(found: Tensor, right: Tensor) -> Tensor:
    """The relative distance of matrices."""
    return torch.linalg.matrix_norm(found - right) / torch.linalg.matrix_norm(right)


def _apart(curve: Tensor, reference: Tensor) -> Tensor:
    """The difference relative to the larger loss, at most 1; two losses that are zero are equal."""
    larger = torch.maximum(curve, reference)
    return torch.where(larger > 0, (curve - reference).abs() / larger, torch.where(larger == 0, 0.0, torch.nan))


def _worst(config: Config, apart: Tensor) -> Tensor:
    """The largest of (T, I) or (T+1, I) over the runs and up to each kept iteration but the first."""
    return apart[-config.iterations :].amax(dim=1).cummax(dim=0).values[config.every - 1 :: config.every]


def _rounded(values: Tensor) -> Any:
    """Five digits."""
    if values.dim() > 1:
        return [_rounded(row) for row in values]
    return [float(f"{value:.4e}") for value in values.tolist()]


def _uniform(generator: torch.Generator, *shape: int) -> Tensor:
    """In [-1, 1]."""
    return 2 * torch.rand(*shape, generator=generator, dtype=torch.float64) - 1
