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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

import torchdil as dil
from benchmarks.scale import peak_bytes
from experiments.runner import Skip

SWEEPS = ("unknowns", "parameters", "both")
GROUP = 10  # unknowns of a group
LEAST_HIDDEN = 5  # hidden units of a group; then a group's weights are 2 x 10 x 5 = 100
BYTES = 8  # float64
# Of a CPU: the largest D_y and D_θ, and its D_y where D_θ grows.
CPU_LIMITS = {"max_unknowns": 10**6, "max_parameters": 10**7, "base_unknowns": 300}
# Seconds: calls are repeated until they took so long together, and a shorter one says little of the next size.
SLOW, BRIEF = 10.0, 0.1
# Of the messages of errors that are no OutOfMemoryError, such as cuBLAS's.
FULL = ("ALLOC_FAILED", "out of memory", "can't allocate memory")
JOBS = 1  # the most processes: runs measure time, and share one GPU


@dataclass(frozen=True)
class Config:
    """What grows, and how far.

    Attributes:
        sweep: "unknowns", "parameters" or "both", with ten parameters for each unknown.
        device: "cpu", "cuda", or "all" for both; a CPU has smaller limits.
        runs: seeds.
        max_unknowns, max_parameters: the largest D_y and D_θ.
        base_unknowns, base_parameters: what stays where the other grows.
        repeats: timed calls, at least; their median counts.
        timed: seconds of these calls together, at least.
        seconds: naive is not tried where it would take longer, judged from the two sizes before.
        memory: bytes that naive may take; None: those of a GPU, or half of those that are free.
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
    timed: float = 0.7
    seconds: float = 60.0
    memory: float | None = None
    rtol: float = 1e-8

    @staticmethod
    def preset(name: str) -> Config:
        smoke = Config(max_unknowns=10**3, max_parameters=10**4, base_unknowns=100, repeats=1, timed=0, seconds=0.2)
        quick = Config(max_unknowns=10**5, max_parameters=10**5, base_unknowns=100, repeats=1, timed=0.05, seconds=0.5)
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


class Pass:
    """The backward by one solver: `gradients()` are those in x, W₁ and W₂.

    Attributes:
        peak: the most bytes that a call holds.
        first: the gradients of the first call, which is not timed: it measures the memory.
        times: of the other calls, seconds.
    """

    def __init__(self, config: Config, problem: Layer, solver: dil.LinearSolver):
        self.config, self.scale, self.times = config, problem.v.norm(), list[float]()
        args = (problem.x, problem.first, problem.second)
        solution = dil.argmin(energy, problem.y, args, solver=lambda _, y: y, linear_solver=solver, on_failure="raise")
        loss = (solution.value * problem.v).sum()
        self.gradients: Callable[[], tuple[Tensor, ...]] = lambda: torch.autograd.grad(loss, args, retain_graph=True)
        self.report, found = solution.report, list[tuple[Tensor, ...]]()
        self.peak = _peak(config, lambda: found.append(self.gradients()))
        self.first = found[0]

    def time(self) -> None:
        """One more call, unless there are enough."""
        total = sum(self.times)
        if (len(self.times) < self.config.repeats and total < SLOW) or total < self.config.timed:
            self.report.backward = None  # it holds the Hessian
            began = _clock(self.config)
            self.gradients()
            self.times.append(_clock(self.config) - began)

    def numbers(self) -> dict[str, Any]:
        """What was measured."""
        assert self.report.backward is not None
        stats = self.report.backward.stats
        return {
            "status": "converged",
            "seconds": _short(statistics.median(self.times)),
            "calls": len(self.times),
            "peak": self.peak,
            "steps": int(stats.steps),
            "products": stats.products,
            "residual": _short(float(stats.residual / self.scale)),
        }


def in_turns(passes: Sequence[Pass]) -> None:
    """Time all, so that what else the machine does meets them alike."""
    calls = -1
    while calls != (calls := sum(len(one.times) for one in passes)):
        for one in passes:
            one.time()


def cell(config: Config, unknowns: int, parameters: int, seed: int, before: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """CG and naive at one size; by the cells before, naive is judged before it is tried."""
    blocks, hidden = shape(unknowns, parameters)
    full = {"status": "out of memory", "needs": BYTES * unknowns**2, "expected_seconds": 0.0, "tried": True}
    found = {"unknowns": unknowns, "parameters": 2 * blocks * GROUP * hidden, "cg": full, "naive": full, "agreement": None}
    with _memory_permitting(config):
        problem = layer(unknowns, parameters, seed, config.device)
        cg = Pass(config, problem, dil.CG(rtol=config.rtol))
        refused = _refused(config, unknowns, parameters, before)
        if refused is not None:
            found["naive"] = refused
        else:
            with _memory_permitting(config):
                naive = Pass(config, problem, dil.Dense())
                in_turns((cg, naive))
                found |= {"naive": naive.numbers(), "agreement": _short(_distance(cg.first, naive.first))}
        in_turns((cg,))
        found["cg"] = cg.numbers()
    return found


@contextmanager
def _memory_permitting(config: Config) -> Iterator[None]:
    """Leave where memory runs out; other errors are raised."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(text in str(error) for text in FULL):
            raise
    finally:
        _give_back(config)


def _refused(config: Config, unknowns: int, parameters: int, before: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Why naive is not tried, with what it would need; None: it is."""
    hessian = BYTES * unknowns**2
    grows, size = ("parameters", parameters) if config.sweep == "parameters" else ("unknowns", unknowns)
    ran = [(one[grows], one["naive"]) for one in before if "seconds" in one["naive"]][-2:]
    needs, seconds = float(hessian), 0.0
    if len(ran) == 2:
        (n, earlier), (later_n, later) = ran

        def expected(key: str) -> float:
            power = math.log(later[key] / earlier[key]) / math.log(later_n / n)
            return later[key] * (size / later_n) ** power

        seconds = expected("seconds") if later["seconds"] > BRIEF else 0.0
        needs = max(needs, expected("peak"))
    # A GPU says when it has no more: where the Hessian itself would fit, that is tried.
    tried = _on_gpu(config) and config.sweep == "unknowns"
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
    found = []
    for device in ("cpu", "cuda") if config.device == "all" else (config.device,):
        limits = {} if torch.device(device).type == "cuda" else CPU_LIMITS
        least = {key: min(value, getattr(config, key)) for key, value in limits.items()}
        found += [replace(config, sweep=sweep, device=device, **least) for sweep in SWEEPS]
    return found


def run(config: Config, seed: int) -> dict[str, Any]:
    """One sweep; a cell that is in several is measured in the first."""
    if _on_gpu(config):
        if not torch.cuda.is_available():
            raise Skip("The scale experiment up to 10⁷ unknowns needs a GPU: run it on one with --device cuda.")
        cell(config, 100, 1000, seed)  # the first use of a GPU loads its libraries
    cells: list[dict[str, Any]] = []
    for unknowns, parameters in sizes(config):
        key = replace(config, sweep=""), unknowns, parameters, seed
        if key not in _measured:
            _measured[key] = cell(config, unknowns, parameters, seed, cells)
        cells.append(_measured[key])
    return {"memory": int(_memory(config)), "cells": cells}


_measured: dict[tuple[Config, int, int, int], dict[str, Any]] = {}


def _on_gpu(config: Config) -> bool:
    return torch.device(config.device).type == "cuda"


def _memory(config: Config) -> float:
    """Bytes that naive may take."""
    if config.memory is not None:
        return config.memory
    if _on_gpu(config):
        return torch.cuda.get_device_properties(config.device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") / 2


def _clock(config: Config) -> float:
    """Seconds: of the processor on a CPU, where others may be at work; of the wall on a GPU, after what it has to do."""
    if not _on_gpu(config):
        return time.process_time()
    torch.cuda.synchronize(config.device)
    return time.perf_counter()


def _peak(config: Config, work: Callable[[], object]) -> int:
    """The most bytes that `work` holds at a time beyond what there was before."""
    if not _on_gpu(config):
        return peak_bytes(work)
    torch.cuda.reset_peak_memory_stats(config.device)
    before = torch.cuda.memory_allocated(config.device)
    work()
    return torch.cuda.max_memory_allocated(config.device) - before


def _distance(ours: tuple[Tensor, ...], theirs: tuple[Tensor, ...]) -> float:
    """Relative, of all gradients together."""
    difference = sum(float((a - b).square().sum()) for a, b in zip(ours, theirs, strict=True))
    return math.sqrt(difference / sum(float(b.square().sum()) for b in theirs))


def _give_back(config: Config) -> None:
    """Memory that the allocator holds for later, so that sizes do not meet what earlier ones left."""
    if _on_gpu(config):
        torch.cuda.empty_cache()


def _short(number: float) -> float:
    return float(f"{number:.4g}")
