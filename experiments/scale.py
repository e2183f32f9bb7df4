"""The paper's headline, heavily parameterised layers with a large output: time and memory of the backward over D_y and D_θ.

y = argmin_u ½‖u - x‖² + Σ softplus(W₂² softplus(W₁ u)), a convex energy network whose layers act on groups of ten; between the
layers the hidden units are shuffled, so that groups mix. Groups share weights or have their own, and have few or many hidden
units, which sets D_y and D_θ independently at O(D_y + D_θ) a product with the Hessian. The solution is chosen and x made to
fit, so that the forward solve costs nothing. CG is `dil.CG()`, naive `dil.Dense()`, which builds the Hessian and factorises it.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

import torchdil as dil
from benchmarks.scale import peak_bytes
from benchmarks.timing import now
from experiments.runner import Skip

SWEEPS = ("unknowns", "parameters", "both")
GROUP = 10  # unknowns of a group
LEAST_HIDDEN = 5  # hidden units of a group; then a group's weights are 2 x 10 x 5 = 100
BYTES = 8  # float64
# Of a CPU: the largest D_y and D_θ, its D_y where D_θ grows, and the time for naive.
CPU_LIMITS = {"max_unknowns": 10**6, "max_parameters": 10**7, "base_unknowns": 300, "seconds": 60.0}
# Seconds: a longer call is not repeated, and a shorter one says little of the next size.
SLOW, BRIEF = 10.0, 0.1


@dataclass(frozen=True)
class Config:
    """What grows, and how far.

    Attributes:
        sweep: "unknowns", "parameters" or "both", with ten parameters for each unknown.
        device: "cpu", "cuda", or "all" for both; a CPU has smaller limits.
        runs: seeds.
        max_unknowns, max_parameters: the largest D_y and D_θ.
        base_unknowns, base_parameters: what stays where the other grows.
        repeats: timed calls; their median counts.
        seconds: naive is not tried where it would take longer, judged from the size before.
        memory: bytes that naive may take; None: those of a GPU, or half of those of the machine.
        rtol: of CG.
    """

    sweep: str = "unknowns"
    device: str = "cpu"
    runs: int = 1
    max_unknowns: int = 10**7
    max_parameters: int = 10**8
    base_unknowns: int = 10**4
    base_parameters: int = 10**4
    repeats: int = 3
    seconds: float = 600.0
    memory: float | None = None
    rtol: float = 1e-8

    @staticmethod
    def preset(name: str) -> Config:
        smoke = Config(max_unknowns=10**3, max_parameters=10**4, base_unknowns=100, repeats=1, seconds=0.2)
        quick = Config(max_unknowns=10**5, max_parameters=10**5, base_unknowns=100, repeats=1, seconds=0.5)
        return {"smoke": smoke, "quick": quick, "paper": Config(device="all")}[name]


class Layer(NamedTuple):
    """A layer at its solution.

    Attributes:
        y: the solution, (D_y,).
        x: (D_y,), such that y is the solution.
        first, second: W₁ (K, 10, H) and W₂ (K, H, 10); D_θ is what they have together.
        v: the cotangent of y, (D_y,).
    """

    y: Tensor
    x: Tensor
    first: Tensor
    second: Tensor
    v: Tensor


def energy(y: Tensor, x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """½‖y - x‖² + Σ softplus(W₂² softplus(W₁ y)), both layers by groups."""
    blocks, group, hidden = first.shape
    units = softplus(y.view(-1, blocks, group).transpose(0, 1) @ first)  # (K, R, H)
    shuffled = units.reshape(-1, hidden).T.reshape(blocks, -1, hidden)  # a group gets units of H others
    return 0.5 * (y - x).square().sum() + softplus(shuffled @ second.square()).sum()


def shape(unknowns: int, parameters: int) -> tuple[int, int]:
    """K and H for about these D_y and D_θ: groups share weights until each has its own, then these grow."""
    groups = unknowns // GROUP
    blocks = max(1, min(groups, parameters // (2 * GROUP * LEAST_HIDDEN)))
    if blocks < groups:
        return blocks, LEAST_HIDDEN
    return groups, max(LEAST_HIDDEN, round(parameters / (2 * unknowns)))


def layer(unknowns: int, parameters: int, seed: int, device: str) -> Layer:
    """A random one."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device=device)

    blocks, hidden = shape(unknowns, parameters)
    first = (3 * random(blocks, GROUP, hidden) / GROUP**0.5).requires_grad_()
    second = (2 * random(blocks, hidden, GROUP) / hidden**0.5).requires_grad_()
    y = random(unknowns).requires_grad_()
    (slope,) = torch.autograd.grad(energy(y, y.detach(), first, second), y)
    x = (y + slope).detach().requires_grad_()
    return Layer(y.detach(), x, first, second, random(unknowns))


def backward(problem: Layer, solver: dil.LinearSolver) -> tuple[Callable[[], tuple[Tensor, ...]], dil.Report]:
    """The function that gives the gradients in x, W₁ and W₂, and the report it fills in."""
    args = (problem.x, problem.first, problem.second)
    solution = dil.argmin(energy, problem.y, args, solver=lambda _, y: y, linear_solver=solver, on_failure="raise")
    loss = (solution.value * problem.v).sum()
    return lambda: torch.autograd.grad(loss, args, retain_graph=True), solution.report


def measure(config: Config, problem: Layer, solver: dil.LinearSolver) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
    """Time and memory of the backward, and its gradients."""
    gradients, report = backward(problem, solver)
    found: list[tuple[Tensor, ...]] = []
    began = _clock(config)
    peak = _peak(config, lambda: found.append(gradients()))
    times = [_clock(config) - began]
    if times[0] < SLOW:
        times = []
        for _ in range(config.repeats):
            began = _clock(config)
            gradients()
            times.append(_clock(config) - began)
    assert report.backward is not None
    stats = report.backward.stats
    numbers = {
        "status": "converged",
        "seconds": _short(statistics.median(times)),
        "calls": len(times),
        "peak": peak,
        "steps": int(stats.steps),
        "products": stats.products,
        "residual": _short(float(stats.residual / problem.v.norm())),
    }
    return numbers, found[0]


def cell(config: Config, unknowns: int, parameters: int, seed: int, last: dict[str, Any] | None) -> dict[str, Any]:
    """CG and naive at one size; `last` is the cell before, by which naive is judged before it is tried."""
    problem = layer(unknowns, parameters, seed, config.device)
    cg, by_cg = measure(config, problem, dil.CG(rtol=config.rtol))
    naive = _refused(config, unknowns, parameters, last)
    agreement = None
    if naive is None:
        try:
            naive, by_naive = measure(config, problem, dil.Dense())
            agreement = _short(_distance(by_cg, by_naive))
        except torch.OutOfMemoryError:
            naive = {"status": "out of memory", "needs": BYTES * unknowns**2, "expected_seconds": 0.0, "tried": True}
        _give_back(config)
    true = problem.first.numel() + problem.second.numel()
    return {"unknowns": unknowns, "parameters": true, "cg": cg, "naive": naive, "agreement": agreement}


def _refused(config: Config, unknowns: int, parameters: int, last: dict[str, Any] | None) -> dict[str, Any] | None:
    """Why naive is not tried, with what it would need; None: it is."""
    hessian = BYTES * unknowns**2
    needs, seconds = float(hessian), 0.0
    if last is not None:
        before, growth = last["naive"], unknowns / last["unknowns"]
        rows = growth * parameters / last["parameters"]  # D_y products, O(D_θ) each
        took = before.get("seconds", before.get("expected_seconds", 0.0))
        seconds = took * max(growth**3, rows) if took > BRIEF else 0.0
        needs = max(needs, before.get("peak", before.get("needs", 0.0)) * max(growth**2, rows))
    # A GPU says when it has no more: where the Hessian itself would fit, that is tried.
    tried = config.device == "cuda" and config.sweep == "unknowns"
    if (hessian if tried else needs) > _memory(config):
        status = "out of memory"
    elif seconds > config.seconds:
        status = "too long"
    else:
        return None
    return {"status": status, "needs": int(needs), "expected_seconds": _short(seconds), "tried": False}


def sizes(config: Config) -> list[tuple[int, int]]:
    """D_y and D_θ of the cells of a sweep, rising."""
    if config.sweep == "parameters":
        powers = range(2, round(math.log10(config.max_parameters)) + 1)
        return [(config.base_unknowns, 10**k) for k in powers]
    powers = range(1, round(math.log10(config.max_unknowns)) + 1)
    unknowns = sorted([10**k for k in powers] + [3 * 10**k for k in powers][:-1])
    return [(n, 10 * n if config.sweep == "both" else config.base_parameters) for n in unknowns]


def variants(config: Config) -> list[Config]:
    """Each sweep on each device."""
    devices = ("cpu", "cuda") if config.device == "all" else (config.device,)
    found = []
    for device in devices:
        limits = {key: min(value, getattr(config, key)) for key, value in CPU_LIMITS.items()} if device == "cpu" else {}
        found += [replace(config, sweep=sweep, device=device, **limits) for sweep in SWEEPS]
    return found


def run(config: Config, seed: int) -> dict[str, Any]:
    """One sweep."""
    if config.device == "cuda" and not torch.cuda.is_available():
        raise Skip("The scale experiment up to 10⁷ unknowns needs a GPU: run it on one with --device cuda.")
    cells: list[dict[str, Any]] = []
    for unknowns, parameters in sizes(config):
        last = cells[-1] if cells else None
        cells.append(cell(config, unknowns, parameters, seed, last))
    return {"memory": int(_memory(config)), "cells": cells}


def _memory(config: Config) -> float:
    if config.memory is not None:
        return config.memory
    if config.device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2


def _clock(config: Config) -> float:
    """Seconds: of the processor on a CPU, where others may be at work; of the wall on a GPU, after what it has to do."""
    return now("cuda") if config.device == "cuda" else time.process_time()


def _peak(config: Config, work: Callable[[], object]) -> int:
    """The most bytes that `work` holds at a time beyond what there was before."""
    if config.device != "cuda":
        return peak_bytes(work)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _distance(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    """Relative, of all gradients together."""
    difference = sum(float((a - b).square().sum()) for a, b in zip(ours, theirs, strict=True))
    return math.sqrt(difference / sum(float(b.square().sum()) for b in theirs))


def _give_back(config: Config) -> None:
    """Memory that the allocator holds for later, so that sizes do not meet what earlier ones left."""
    if config.device == "cuda":
        torch.cuda.empty_cache()


def _short(number: float) -> float:
    return float(f"{number:.4g}")
