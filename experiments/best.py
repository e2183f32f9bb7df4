"""The paper's Table 1 with whatever helps: implicit neural ODEs on the same data, judged by the same roll-outs.

Van der Pol and Spiral: dx/dt = A φ(x) + net(φ(x)), φ the coordinates alone or all monomials up to the third degree, which hold
the true right-hand sides. Gauss-Legendre steps of order 6 take the place of Euler's, so that the network need not make up for
the solver, and L-BFGS that of Adam: the data have no noise, and only a very close fit stays in phase. With cubic φ the weights
of the network cost something, so that it is small where A φ is enough. The number of iterations and φ are chosen by the
validation error. CMU Walking: see `experiments.best_walking`. No number of the test decides; `best_page` says what was known of
the test when the choices were made.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import torchdil as dil
from experiments import best_walking, motion
from experiments.forecast import short
from experiments.stack import Perceptrons

RUNS = {"vdp": 20, "spiral": 20, "cmu": 10}  # of the paper's table, by task
A11 = -0.1  # of the Spiral, as in `experiments.table1`


@dataclass(frozen=True)
class Config:
    """Sizes and choices.

    Attributes:
        task: one of `RUNS`; None: all.
        runs: seeds 0 .. runs - 1; None: 20, 20 and 10.
        together: how many seeds are trained side by side at most.
        ablations: whether `variants` has CMU Walking's model with one part changed, too.
        candidates: Van der Pol and Spiral: (degree of the monomials in φ, penalty on the network's squared weights).
        units: of their hidden layer.
        stages: (steps in a window, iterations of L-BFGS) one after the other.
        check: iterations between validations.
        method: of CMU Walking's ODE.
        states, context, hidden, components: sizes of z, c, of the two hidden layers, and principal components of a pose.
        iterations, batch, rate, decay, clip: of AdamW; decay is the weight decay, clip the largest norm of a gradient.
        average: share of the running mean of the weights that an iteration keeps.
        every: frames between the steps of the solver in training.
        lengths, growth: solver steps in a window, drawn from those in use; all are in use after this share of the iterations.
        paces: speeds of windows are uniform between two numbers; a network for each pair, and the validation chooses one.
        noise: standard deviation of what is added to the encoder's inputs, which are of the size of one.
        data: folder of the CMU data; None: the usual places.
    """

    task: str | None = None
    runs: int | None = None
    together: int = 1
    ablations: bool = False
    candidates: tuple[tuple[int, float], ...] = ((1, 0.0), (3, 1e-4))
    units: int = 50
    stages: tuple[tuple[int, int], ...] = ((1, 300), (5, 50))
    check: int = 25
    method: str = "gl4"
    states: int = 8
    context: int = 4
    hidden: int = 64
    components: int = 10
    iterations: int = 600
    batch: int = 16
    rate: float = 5e-3
    decay: float = 0.01
    clip: float = 20.0
    average: float = 0.98
    every: int = 9
    lengths: tuple[int, ...] = (11, 22, 33)
    growth: float = 0.5
    paces: tuple[tuple[float, float], ...] = ((0.95, 1.05), (0.9, 1.0), (0.85, 1.05), (0.8, 1.0))
    noise: float = 0.3
    data: str | None = None

    @staticmethod
    def preset(name: str) -> Config:
        smoke = Config(runs=1, candidates=((1, 0.0),), units=8, stages=((1, 4), (2, 4)), check=4, hidden=8, iterations=4)
        quick = Config(runs=1, stages=((1, 75),), iterations=100)
        return {"smoke": smoke, "quick": quick, "paper": Config(ablations=True)}[name]


def variants(config: Config) -> list[Config]:
    """The three tasks, and CMU Walking's model with one part taken away or changed."""
    tasks = [task for task in RUNS if config.task in (None, task)]
    found = [replace(config, task=task, runs=config.runs or RUNS[task], ablations=False) for task in tasks]
    if "cmu" in tasks:
        walking = found[-1] = replace(found[-1], together=found[-1].runs)
        if config.ablations:
            found += [replace(walking, runs=FEW_RUNS, **change) for change in ABLATIONS.values()]
    return found


# What is changed, in words, and how; and how many runs each has.
ABLATIONS: dict[str, dict[str, Any]] = {
    "no context c": {"context": 0},
    "no noise": {"noise": 0.0},
    "one speed": {"paces": ((1.0, 1.0),)},
}
FEW_RUNS = 3


class Choice(NamedTuple):
    """A field, and how it was chosen."""

    validation: float
    degree: int
    window: int
    iteration: int
    field: PlaneField


class PlaneField(nn.Module):
    """dx/dt = A φ(x) + net(φ(x)), with x in units of `scale`."""

    def __init__(self, degree: int, units: int, scale: Tensor, generator: torch.Generator):
        super().__init__()
        self.scale, self.degree = scale, degree
        features = degree * (degree + 3) // 2
        self.net = Perceptrons((features, units, 2), [generator], scale.dtype)
        self.linear = nn.Parameter(scale.new_zeros(features, 2))

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        x = x / self.scale
        powers = [x]
        for _ in range(self.degree - 1):  # those of one degree more: the first coordinate times all, the second times the last
            powers.append(torch.cat((x[..., :1] * powers[-1], x[..., 1:] * powers[-1][..., -1:]), dim=-1))
        phi = torch.cat(powers, dim=-1)
        return self.scale * (phi @ self.linear + self.net(phi))


def roll_out_error(field: nn.Module, piece: Tensor) -> float:
    """The mean squared error of a free roll-out from the first point of a piece (T, 2); infinite where a step fails.

    Step by step: a cubic step has other roots far away, which Newton's method on a long trajectory at once may find.
    """
    times = motion.DT * torch.arange(len(piece), dtype=piece.dtype)
    with torch.no_grad():
        path = dil.ode.solve(
            field, piece[None, :1], times, method="gl6", batch_dims=2, solver=dil.ode.SimplifiedNewton(), on_failure="ignore"
        )
    error = (path.value[1:, 0, 0] - piece[1:]).square().mean().item()
    return error if math.isfinite(error) and bool(path.report.forward.converged.all()) else math.inf


def fit(config: Config, degree: int, penalty: float, split: motion.Split, seed: int) -> tuple[Choice, list[float]]:
    """L-BFGS on all windows; the field of the smallest validation error on the way, and the errors."""
    points, held = split.train[0], split.validation[0]
    scale = points.std(dim=0)
    field = PlaneField(degree, config.units, scale, torch.Generator().manual_seed(seed))
    chosen = Choice(math.inf, degree, 0, 0, field)
    curve = []
    for window, iterations in config.stages:
        pieces = points.unfold(0, window + 1, 1).permute(2, 0, 1).unsqueeze(1)  # (window + 1, 1, B, 2)
        times = motion.DT * torch.arange(window + 1, dtype=points.dtype)
        optimizer = torch.optim.LBFGS(
            field.parameters(),
            max_iter=config.check,
            history_size=50,
            line_search_fn="strong_wolfe",
            tolerance_grad=0,
            tolerance_change=0,
        )

        def loss(
            optimizer: torch.optim.Optimizer = optimizer, pieces: Tensor = pieces, times: Tensor = times
        ) -> Tensor:  # bound here, since the names change
            optimizer.zero_grad()
            path = dil.odeint(field, pieces[0], times, method="gl6", batch_dims=2, on_failure="ignore")
            value = ((path[1:] - pieces[1:]) / scale).square().mean()
            value = value + penalty * sum(p.square().sum() for p in field.net.parameters())
            value.backward()
            return value

        for done in range(config.check, iterations + 1, config.check):
            optimizer.step(loss)
            error = roll_out_error(field, held)
            curve.append(error)
            if error < chosen.validation:
                chosen = Choice(error, degree, window, done, copy.deepcopy(field))
    return chosen, curve


def run_together(config: Config, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The runs of these seeds; those of CMU Walking side by side."""
    return best_walking.run_together(config, seeds) if config.task == "cmu" else [run(config, seed) for seed in seeds]


def run(config: Config, seed: int) -> dict[str, Any]:
    """One run of one task."""
    if config.task == "cmu":
        return run_together(config, [seed])[0]
    split = motion.van_der_pol() if config.task == "vdp" else motion.spiral(A11)
    fits = [fit(config, degree, penalty, split, seed) for degree, penalty in config.candidates]
    chosen = min((choice for choice, _ in fits), key=lambda choice: choice.validation)
    return {
        "validation": short(chosen.validation),
        "test": short(roll_out_error(chosen.field, split.test[0])),
        "degree": chosen.degree,
        "window": chosen.window,
        "iteration": chosen.iteration,
        "validation_by_degree": {str(choice.degree): short(choice.validation) for choice, _ in fits},
        "curves": {str(choice.degree): [short(error) for error in curve] for choice, curve in fits},
    }
