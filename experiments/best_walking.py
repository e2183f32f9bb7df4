"""CMU Walking by a latent neural ODE, dz/dt = f(z, c; θ): three frames are given, 297 are predicted.

The encoder sees the pose (in principal components) and its velocity, and gives the state z and a context c that stays constant,
such as the walker's speed. Encoder, f and decoder are tanh networks beside a linear map. Gauss-Legendre steps of several frames
follow the flow so closely that a roll-out frame by frame gives the same, and do not damp the limit cycle. Training is on random
windows of growing length, played at random speeds. How fast a walker is decides where he is after 297 frames, and three frames
hardly tell it: a network falls back on the speeds that it has seen. A run trains one for each range of speeds, and takes one by
the median of its errors over the validation sequences. All networks of all runs are trained side by side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

import torchdil as dil
from experiments import motion
from experiments.forecast import short
from experiments.stack import Perceptrons, clip

if TYPE_CHECKING:
    from experiments.best import Config

GIVEN = 3
# Of a frame, in the unit of time of the ODE: a gait cycle of 135 frames takes 6.75.
FRAME = 0.05
WARM_UP = 50
LAST_RATE = 0.02


Pace = tuple[float, float]  # least and largest speed


class Windows(NamedTuple):
    """Pieces of sequences, (S, B, frames, D)."""

    given: Tensor
    target: Tensor


class Net(nn.Module):
    """A tanh network beside a linear map, for each member: (S, B, in) -> (S, B, out)."""

    def __init__(self, sizes: Sequence[int], generators: Sequence[torch.Generator], linear: Tensor):
        super().__init__()
        self.net = Perceptrons(sizes, generators, torch.float32)
        self.linear = nn.Parameter(linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + x @ self.linear


class Dynamics(Net):
    """dz/dt = f(z, c); c is set before a solve."""

    context: Tensor

    def forward(self, t: Tensor, z: Tensor) -> Tensor:
        return super().forward(torch.cat((z, self.context.expand(*z.shape[:-1], -1)), dim=-1))


class Gait(nn.Module):
    """The networks of all members; `sequences` (S, N, T, D) are those that each is trained on."""

    def __init__(self, config: Config, sequences: Tensor, generators: Sequence[torch.Generator]):
        super().__init__()
        self.config = config
        members, channels = len(sequences), sequences.shape[-1]
        states, inputs, hidden = config.states, config.components, (config.hidden, config.hidden)
        self.mean = sequences.mean(dim=(1, 2)).unsqueeze(1)
        centred = (sequences - self.mean.unsqueeze(1)).flatten(1, 2)
        self.basis = torch.linalg.svd(centred, full_matrices=False).Vh.mT
        scores = (centred @ self.basis[..., :inputs]).unflatten(1, sequences.shape[1:3])
        self.size = scores.std(dim=(1, 2)).unsqueeze(1)
        self.speed = (scores[:, :, 2:] - scores[:, :, :-2]).std(dim=(1, 2)).unsqueeze(1)
        # At first the state is made of principal components, and is decoded as such.
        first = torch.zeros(members, 2 * inputs, states + config.context)
        first[:, range(states), range(states)] = 1.0
        back = torch.zeros(members, states + config.context, channels)
        back[:, range(states), range(states)] = self.size[:, 0, :states]
        self.encoder = Net((2 * inputs, *hidden, states + config.context), generators, first)
        rest = torch.zeros(members, states + config.context, states)
        self.dynamics = Dynamics((states + config.context, *hidden, states), generators, rest)
        self.decoder = Net((states + config.context, *hidden, channels), generators, back)

    def features(self, given: Tensor) -> Tensor:
        """Pose and velocity of three frames (S, B, 3, D), of the size of one."""
        scores = (given - self.mean.unsqueeze(1)) @ self.basis[:, None, :, : self.config.components]
        return torch.cat((scores.mean(dim=2) / self.size, (scores[:, :, 2] - scores[:, :, 0]) / self.speed), dim=-1)

    def forward(self, features: Tensor, steps: int, every: int) -> Tensor:
        """The frames at 0, every, ..., steps · every after the last of those given, (S, B, steps + 1, D)."""
        code = self.encoder(features)
        z, context = code.tensor_split([self.config.states], dim=-1)
        self.dynamics.context = context
        times = FRAME * every * torch.arange(steps + 1)
        path = dil.odeint(self.dynamics, z, times, method=self.config.method, batch_dims=2, on_failure="ignore")
        states = torch.cat((path, context.expand(steps + 1, -1, -1, -1)), dim=-1)
        scores = self.decoder(states.permute(1, 2, 0, 3).flatten(1, 2))
        return (scores @ self.basis.mT + self.mean).unflatten(1, (-1, steps + 1))


def draw(
    config: Config, sequences: Tensor, steps: int, paces: Sequence[Pace], generators: Sequence[torch.Generator]
) -> Windows:
    """Random windows of each member's sequences, played at random speeds by linear interpolation between frames."""
    offsets = torch.cat((torch.arange(GIVEN - 1), GIVEN - 1 + config.every * torch.arange(steps + 1)))
    last = sequences.shape[2] - 1
    found = []
    for own, (least, most), generator in zip(sequences, paces, generators, strict=True):
        which = torch.randint(len(own), (config.batch, 1), generator=generator)
        pace = least + (most - least) * torch.rand(config.batch, 1, generator=generator)
        pace = pace.clamp(max=last / offsets[-1])
        start = torch.rand(config.batch, 1, generator=generator) * (last - pace * offsets[-1])
        place = start + pace * offsets
        before = place.floor().clamp(0, last - 1).long()
        part = (place - before).unsqueeze(-1)
        found.append((1 - part) * own[which, before] + part * own[which, before + 1])
    return Windows(*torch.stack(found).tensor_split([GIVEN], dim=2))


def train(config: Config, sequences: Tensor, paces: Sequence[Pace], generators: Sequence[torch.Generator]) -> Gait:
    """All members; their weights in the end are running means over the last iterations."""
    model = Gait(config, sequences, generators)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=config.rate, weight_decay=config.decay)
    average = [p.detach().clone() for p in parameters]
    dice = torch.Generator().manual_seed(0)  # of its own, so that a member draws the same beside any others
    for iteration in range(config.iterations):
        cosine = (1 + math.cos(math.pi * iteration / config.iterations)) / 2
        for group in optimizer.param_groups:
            group["lr"] = config.rate * min(1, (iteration + 1) / WARM_UP) * (LAST_RATE + (1 - LAST_RATE) * cosine)
        ready = 1 + int(iteration / config.iterations / config.growth * len(config.lengths))
        lengths = config.lengths[:ready]
        steps = lengths[int(torch.randint(len(lengths), (), generator=dice))]
        windows = draw(config, sequences, steps, paces, generators)
        features = model.features(windows.given)
        noise = [torch.randn(features.shape[1:], generator=generator) for generator in generators]
        frames = model(features + config.noise * torch.stack(noise), steps, config.every)[:, :, 1:]
        optimizer.zero_grad()
        (frames - windows.target[:, :, -steps:]).square().mean(dim=(1, 2, 3)).sum().backward()
        clip(model, config.clip)
        optimizer.step()
        keep = min(config.average, (iteration + 1) / (iteration + 10))
        with torch.no_grad():
            for mean, parameter in zip(average, parameters, strict=True):
                mean.lerp_(parameter, 1 - keep)
    with torch.no_grad():
        for mean, parameter in zip(average, parameters, strict=True):
            parameter.copy_(mean)
    return model


@torch.no_grad()
def forecast(model: Gait, sequences: Tensor) -> Tensor:
    """What each member predicts of sequences (N, T, D), frame by frame: (S, N, T - 3, D)."""
    given = sequences[:, :GIVEN].expand(len(model.mean), -1, -1, -1)
    return model(model.features(given), sequences.shape[1] - GIVEN, 1)[:, :, 1:]


def run_together(config: Config, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Train on the sequences for training, then forecast those for validation and test."""
    train_set, validation, test = (part.float() for part in motion.walking(config.data))
    members = [(seed, pace) for seed in seeds for pace in config.paces]
    # The networks of a run begin alike and differ in the speeds alone.
    generators = [torch.Generator().manual_seed(seed) for seed, _ in members]
    model = train(config, train_set.expand(len(members), -1, -1, -1), [pace for _, pace in members], generators)
    ahead = forecast(model, torch.cat((validation, test))).unflatten(0, (len(seeds), -1))
    channel = int(train_set.flatten(0, 1).var(dim=0).argmax())
    return [
        _metrics(config, own, validation, test, channel if seed == 0 else None) for seed, own in zip(seeds, ahead, strict=True)
    ]


def _metrics(config: Config, ahead: Tensor, validation: Tensor, test: Tensor, channel: int | None) -> dict[str, Any]:
    """Of the forecasts (P, N, frames, D) of a run for each range of speeds; with one to draw, if a channel is given."""
    held = torch.cat((validation, test))[:, GIVEN:]
    squares = (ahead - held).square()
    errors = squares.mean(dim=(2, 3)).double()
    tried, tested = errors.split([len(validation), len(test)], dim=1)
    chosen, by_mean = int(tried.median(dim=1).values.argmin()), int(tried.mean(dim=1).argmin())
    over_time = squares[chosen, len(validation) :].mean(dim=(0, 2)).split(33)
    found = {
        "pace": config.paces[chosen],
        "validation": short(tried[chosen].median().item()),
        "validation_each": [short(e) for e in tried[chosen].tolist()],
        "test": short(tested[chosen].mean().item()),
        "test_each": [short(e) for e in tested[chosen].tolist()],
        "test_by_mean": short(tested[by_mean].mean().item()),
        "test_over_time": [short(part.mean().item()) for part in over_time],
        "by_pace": [
            {"pace": pace, "validation_each": [short(e) for e in t.tolist()], "test": short(u.mean().item())}
            for pace, t, u in zip(config.paces, tried, tested, strict=True)
        ],
    }
    if channel is not None:  # of the first test sequence
        frames = ahead[:, len(validation), ::3, channel].tolist()
        found["drawn"] = {
            "channel": channel,
            "true": [short(v) for v in test[0, GIVEN::3, channel].tolist()],
            "chosen": [short(v) for v in frames[chosen]],
            "others": [[short(v) for v in one] for k, one in enumerate(frames) if k != chosen],
        }
    return found
