"""Training of neural ODEs that forecast a motion, many seeds side by side: the models, the methods, the loop's body.

A model is judged by free roll-outs over the sequences for validation and test, each of its own length. Every choice is a field
of `experiments.table1.Config`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torchdiffeq
from torch import Tensor, nn

import torchdil as dil
from experiments import motion
from experiments.stack import Field, Perceptrons, alone, choose, clip

if TYPE_CHECKING:
    from experiments.table1 import Config

DOPRI5, FORWARD, BACKWARD = "DOPRI5 adj.", "Fwd. Euler adj.", "Bwd. Euler adj."
NAIVE, CG, CONTROL = "Bwd. Euler IFT-naive", "Bwd. Euler IFT-CG", "Fwd. Euler, exact gradient"
METHODS = (DOPRI5, FORWARD, BACKWARD, NAIVE, CG, CONTROL)
# Of `dil.odeint`.
SCHEMES: dict[str, dict[str, Any]] = {
    FORWARD: {"method": "euler", "gradient": "adjoint"},
    BACKWARD: {"method": "backward_euler", "gradient": "adjoint"},
    NAIVE: {"method": "backward_euler", "gradient": "ift", "linear_solver": dil.Dense()},
    CG: {"method": "backward_euler", "gradient": "ift", "linear_solver": dil.CG()},
    CONTROL: {"method": "euler", "gradient": "ift"},
}


def data(config: Config) -> motion.Split:
    """The sequences of the task."""
    if config.task == "cmu":
        return motion.walking(config.data)
    return motion.van_der_pol() if config.task == "vdp" else motion.spiral(config.a11)


def steps_of(config: Config, iteration: int) -> int:
    """How long windows are: a few lengths only, since the library prepares for each."""
    first, last = config.window
    stage = min(int(config.stages * iteration / (config.growth * config.iterations)), config.stages - 1)
    return first + round((last - first) * stage / (config.stages - 1))


class Forecast(NamedTuple):
    """Predicted frames (S, B, steps, D), and what the library says of the solve, if it was the library's."""

    frames: Tensor
    solution: dil.Solution | None


class Scores(NamedTuple):
    """What one validation found.

    Attributes:
        iteration, seconds: how many of training until there, seconds a run.
        validation: mean squared errors, (S, N), infinite where a roll-out failed.
        test: their mean over the sequences for test, (S,), NaN where one of these roll-outs failed.
        lost: whether one failed, (S,).
        shown: two coordinates of the first of these, (S, steps, 2).
    """

    iteration: int
    seconds: float
    validation: Tensor
    test: Tensor
    lost: Tensor
    shown: Tensor


class RollOuts(NamedTuple):
    """Free roll-outs over N sequences.

    Attributes:
        frames: (S, N, steps, D).
        errors: mean squared, (S, N), NaN for a run that has ended.
        failed: which stopped on their way, (S, N).
    """

    frames: Tensor
    errors: Tensor
    failed: Tensor


class Model(nn.Module):
    """An encoder, the field and a decoder for each seed; without a latent state the field alone."""

    def __init__(self, config: Config, size: int, generators: Sequence[torch.Generator]):
        super().__init__()
        self.config, state = config, config.latent or size
        rest = generators, getattr(torch, config.dtype)
        self.field = Field((state, *config.hidden, state), *rest)
        if config.latent:
            self.encoder = Perceptrons((config.given * size, *config.hidden, state), *rest)
            self.decoder = Perceptrons((state, *config.hidden, size), *rest)

    def forward(self, given: Tensor, steps: int) -> Forecast:
        """The `steps` frames after those that are given, (S, B, given, D)."""
        start = self.encoder(given.flatten(2)) if self.config.latent else given[:, :, -1]
        states, solution = integrate(self.config, self.field, start, steps)
        frames = states[1:].permute(1, 2, 0, 3)
        if self.config.latent:
            frames = self.decoder(frames.flatten(1, 2)).unflatten(1, frames.shape[1:3])
        return Forecast(frames, solution)


def integrate(config: Config, field: Field, start: Tensor, steps: int) -> tuple[Tensor, dil.Solution | None]:
    """The states from `start` (S, B, D) on, (steps + 1, S, B, D)."""
    t = motion.DT * torch.arange(steps + 1, dtype=start.dtype, device=start.device)
    if config.method == DOPRI5:
        tolerances = {"rtol": config.rtol, "atol": config.atol, "options": {"max_num_steps": config.max_steps}}
        return torchdiffeq.odeint_adjoint(field, start, t, method="dopri5", **tolerances), None
    options = {"substeps": config.substeps, "adjoint": config.adjoint}
    scheme = SCHEMES[config.method]
    solution = dil.ode.solve(field, start, t, batch_dims=2, options=options, on_failure=config.on_failure, **scheme)
    return solution.value, solution


class Training:
    """The models of some seeds, their training, and what is known of them so far.

    A run whose loss or gradient is not finite has ended: its model goes back to where it began, so that it costs and harms
    nothing, and its numbers from there on are missing.
    """

    def __init__(self, config: Config, seeds: Sequence[int]):
        self.config, self.seeds = config, seeds
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.split = motion.Split(*(part.to(getattr(torch, config.dtype)) for part in data(config)))
        self.model = Model(config, self.split.train.shape[-1], self.generators).to(config.device)
        self.parameters = list(self.model.parameters())
        self.first = [p.detach().clone() for p in self.parameters]
        self.optimizer = torch.optim.Adam(self.parameters, lr=config.rate)
        self.alive = torch.ones(len(seeds), dtype=torch.bool, device=config.device)
        # What DOPRI5 raises if it gives up; the library reports, so that with it such an error is one.
        self.giving_up = (AssertionError,) if config.method == DOPRI5 else ()
        # Samples whose solve failed in training, forward and backward.
        self.failed = torch.zeros(2, len(seeds), dtype=torch.int64, device=config.device)
        self.seconds, self.iterations = 0.0, 0
        self.scores: list[Scores] = []

    def step(self, iteration: int) -> None:
        """One iteration of Adam."""
        began = time.perf_counter()
        config = self.config
        cosine = (1 + math.cos(math.pi * iteration / config.iterations)) / 2
        for group in self.optimizer.param_groups:
            group["lr"] = config.rate * (config.last_rate + (1 - config.last_rate) * cosine)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.gradient(self.windows(steps_of(config, iteration)))
        finite = clip(self.model, config.clip)
        alive = self.alive & loss.isfinite() & finite
        self.optimizer.step()
        if not alive.all():
            self.alive = alive
            with torch.no_grad():
                for parameter, first in zip(self.parameters, self.first, strict=True):
                    parameter.copy_(choose(alive, parameter, first))
        self.seconds += time.perf_counter() - began
        self.iterations += 1

    def windows(self, steps: int) -> Tensor:
        """Pieces of the sequences for training, (S, B, given + steps, D)."""
        sequences = self.split.train
        length = self.config.given + steps
        starts = sequences.shape[1] - length + 1
        total = len(sequences) * starts
        if self.config.batch is None:
            drawn = torch.arange(total).expand(len(self.seeds), -1)
        else:
            drawn = torch.stack([torch.randint(total, (self.config.batch,), generator=g) for g in self.generators])
        frames = (drawn % starts).unsqueeze(-1) + torch.arange(length)
        return sequences[(drawn // starts).unsqueeze(-1), frames].to(self.config.device)

    def gradient(self, windows: Tensor) -> Tensor:
        """The loss of each seed, (S,); its gradient is left at the parameters."""
        try:
            return self.descend(self.model, windows, slice(None))
        except self.giving_up:  # for all, although one seed is enough to cause it
            loss = torch.full((len(self.seeds),), math.nan, device=windows.device)
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter)
        for k in range(len(self.seeds)):
            part = alone(self.model, k)
            with contextlib.suppress(*self.giving_up):
                loss[k] = self.descend(part, windows[k : k + 1], slice(k, k + 1))
                for parameter, own in zip(self.parameters, part.parameters(), strict=True):
                    parameter.grad[k] = own.grad[0]
        return loss

    def descend(self, model: nn.Module, windows: Tensor, which: slice) -> Tensor:
        """The same for a model of the seeds `which`."""
        given, target = windows.tensor_split([self.config.given], dim=2)
        frames, solution = model(given, target.shape[2])
        loss = (frames - target).square().mean(dim=(1, 2, 3))
        loss.sum().backward()
        if solution is not None:
            for k, outcome in enumerate((solution.report.forward, solution.report.backward)):
                self.failed[k, which] += self.alive[which] * (~outcome.converged).sum(dim=1)
        return loss.detach()

    @torch.no_grad()
    def validate(self, iteration: int) -> None:
        """Free roll-outs over the sequences for validation and test."""
        held = [part.to(self.config.device) for part in self.split[1:]]
        if held[0].shape[1] == held[1].shape[1]:  # one batch is faster
            split = (t.split([len(part) for part in held], dim=1) for t in self.judged(torch.cat(held)))
            parts = [RollOuts(*some) for some in zip(*split, strict=True)]
        else:
            parts = [self.judged(part) for part in held]
        validation, test = (RollOuts(*(t.cpu() for t in part)) for part in parts)
        lost = test.failed.any(dim=1)
        self.scores.append(
            Scores(
                iteration,
                self.seconds / len(self.seeds),
                # A roll-out that stopped on its way is no forecast: such a model is not chosen.
                validation.errors.double().masked_fill(validation.failed, math.inf),
                test.errors.double().mean(dim=1).masked_fill(lost, math.nan),
                lost,
                test.frames[:, 0, :, :2],
            )
        )

    def judged(self, sequences: Tensor) -> RollOuts:
        """Roll-outs over these sequences (N, T, D), by every seed."""
        given, target = sequences.tensor_split([self.config.given], dim=1)
        frames, failed = self.roll_out(given.expand(len(self.seeds), -1, -1, -1), target.shape[1])
        errors = (frames - target).square().mean(dim=(2, 3))
        return RollOuts(frames, choose(self.alive, errors, math.nan), failed)

    def roll_out(self, given: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """The frames (S, B, steps, D), and which roll-outs failed, (S, B)."""
        try:
            frames, solution = self.model(given, steps)
        except self.giving_up:
            frames, solution = given.new_full((*given.shape[:2], steps, given.shape[-1]), math.nan), None
            for k in range(len(self.seeds)):
                part = alone(self.model, k)
                for b in range(given.shape[1]):
                    with contextlib.suppress(*self.giving_up):
                        frames[k, b] = part(given[k : k + 1, b : b + 1], steps).frames[0, 0]
        failed = ~frames.isfinite().all(dim=(2, 3))
        return frames, failed if solution is None else failed | ~solution.report.forward.converged

    def metrics(self, k: int) -> dict[str, Any]:
        """Of seed number k."""
        scores = self.scores
        means, medians = ([rule(s.validation[k]).item() for s in scores] for rule in (Tensor.mean, Tensor.median))
        tests, lost = [short(s.test[k].item()) for s in scores], [bool(s.lost[k]) for s in scores]
        # The mean is finite if no roll-out failed; by the median, too, only such models are chosen.
        usable = [m for m, s in enumerate(scores) if s.iteration >= self.config.warm_up and math.isfinite(means[m])]
        best, by_median = (min(usable, key=values.__getitem__, default=None) for values in (means, medians))

        def model(number: int | None, name: str) -> dict[str, Any]:
            parts = (None, False, None) if number is None else (tests[number], lost[number], scores[number].iteration)
            return dict(zip((f"test{name}", f"test{name}_failed", f"chosen{name}"), parts, strict=True))

        found = model(best, "") | {
            "validation": None if best is None else short(means[best]),
            "last": tests[-1],
            "last_failed": lost[-1],
            "diverged": not bool(self.alive[k]),
            "failed_forward": int(self.failed[0, k]),
            "failed_backward": int(self.failed[1, k]),
            "seconds_per_iteration": short(self.seconds / self.iterations / len(self.seeds)),
            "stack": len(self.seeds),
            "curve": {
                "iteration": [s.iteration for s in scores],
                "seconds": [short(s.seconds) for s in scores],
                "validation": [short(value) for value in means],
                "test": tests,
            },
        }
        if scores[0].validation.shape[1] > 1:
            found |= model(by_median, "_by_median")
            found["curve"]["validation_median"] = [short(value) for value in medians]
        if self.seeds[k] == 0 and best is not None:  # one to draw: two coordinates of the first test sequence
            found["forecast"] = [[short(value) for value in frame] for frame in scores[best].shown[k].tolist()]
        return found


def short(value: float) -> float | None:
    """Five digits; None for what is not finite."""
    return float(f"{value:.5g}") if math.isfinite(value) else None
