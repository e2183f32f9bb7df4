"""What is learned of the cart-pole: networks, and how the expert, behavioural cloning and Algorithm 2 make them.

See `experiments.cartpole` for the experiment as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import torchdil as dil
from experiments.systems import CartPole

UPRIGHT = (0.0, 0.0, -1.0)  # of x, sin θ, cos θ
SEEN = (0, 3, 4)  # where these are in an observation
METHODS = ("MPC_IFT", "BC")
EXACT = "MPC_IFT, polished in training"
# How a method is called that plans with the better planner in the test.
POLISHED = {"MPC_IFT": "MPC_IFT, polished in the test", EXACT: "MPC_IFT, polished throughout"}
READINGS = ("change", "literal", "next state")
MAIN = ("euler", "change")
UP, LAST = -0.9, 10  # a success has cos θ < UP for the LAST steps
TEST_STATES = 2020  # the seed of the initial states that all methods and runs share
# Relative, of an eigenvalue of a Hessian in float32: what counts as negative.
NEGATIVE = 1e-4


@dataclass(frozen=True)
class Config:
    """Sizes and choices of the experiment.

    Attributes:
        integrator, reading: of the true system, and of the dynamics network; `Dynamics` says what the readings are.
        runs: independent repetitions of all but the states of the test.
        others: integrator, reading and runs of further variants.
        budgets: steps of the model; MPC_IFT and BC are trained anew for each in the variant `MAIN`, else for the last only.
        variances: of the initial states, the first also of the expert's.
        states, steps: how many initial states to test, and how many controls to apply.
        trajectories: of the expert.
        horizon, particles: of random shooting, by the expert and by what is learned.
        polish_steps, polish_rtol, polished_particles: of the better planner: random shooting and the last plan, then Newton.
        polished_horizons: of the better planner on the true system.
        hidden, batch, target_batch: of the networks, of their steps and of the target's.
        model_rate, policy_rate, target_rate: of Adam, constant for the first half, then falling to zero on a line.
        target_steps: of Algorithm 2, spread evenly among the steps of the model.
        first_target, first_horizon, growing: where the target starts; the horizon grows to `horizon` over this share.
        rk4_first_horizon, rk4_target_rate: the same under RK4, where short horizons mislead the target.
        damping: ε of the backward pass.
        clip: the largest norm of the target's gradient.
        training_polish: steps of Newton that polish the plans in training, where it is tried; the paper does none.
        drawn: how many trajectories to keep for the figures.
    """

    integrator: str = "euler"
    reading: str = "change"
    runs: int = 1
    others: tuple[tuple[str, str, int], ...] = ()
    budgets: tuple[int, ...] = (700, 2000)
    variances: tuple[float, ...] = (0.04, 0.08)
    states: int = 6
    steps: int = 30
    trajectories: int = 30
    horizon: int = 10
    particles: int = 200
    polish_steps: int = 2
    polish_rtol: float = 1e-3
    polished_particles: int = 50
    polished_horizons: tuple[int, ...] = ()
    hidden: int = 64
    batch: int = 256
    target_batch: int = 32
    model_rate: float = 5e-3
    policy_rate: float = 3e-3
    target_rate: float = 0.1
    target_steps: int = 25
    first_target: tuple[float, ...] = (0.0, 0.0, 1.0)
    first_horizon: int = 2
    growing: float = 0.3
    rk4_first_horizon: int = 6
    rk4_target_rate: float = 0.1
    damping: float = 1e-3
    clip: float = 1.0
    training_polish: int = 2
    drawn: int = 6

    @staticmethod
    def preset(name: str) -> Config:
        smoke = Config(
            budgets=(40, 80),
            states=2,
            steps=4,
            trajectories=5,
            horizon=4,
            particles=50,
            polish_steps=2,
            polished_particles=20,
            polished_horizons=(4,),
            target_steps=5,
            drawn=2,
        )
        paper = Config(
            runs=10,
            others=(("rk4", "change", 10), ("euler", "literal", 10), ("euler", "next state", 2)),
            budgets=(2000, 7000, 24000),
            states=50,
            steps=40,
            trajectories=100,
            particles=1000,
            polish_steps=8,
            training_polish=4,
            polished_particles=200,
            polished_horizons=(10,),
            target_rate=0.05,
            target_steps=150,
            drawn=50,
        )
        return {"smoke": smoke, "quick": Config(), "paper": paper}[name]


class Dynamics(nn.Module):
    """The dynamics network h(x, u), 6 -> 64 -> 64 -> 5 with tanh, in one of three readings of the paper.

    "change": it gives the change of the state, inputs and outputs standardised, and errors count in standard deviations of the
    change. "literal": it gives the change, and nothing is scaled. "next state": it gives the next state, and nothing is scaled.

    Args:
        config: for the size.
        reading: one of the three.
        states, u, after: transitions, (N, 5), (N, 1), (N, 5), for the scales.
    """

    def __init__(self, config: Config, reading: str, states: Tensor, u: Tensor, after: Tensor):
        super().__init__()
        if reading not in READINGS:
            raise ValueError(f"reading must be one of {', '.join(map(repr, READINGS))}, got {reading!r}.")
        self.net = network(config, 6, 5)
        self.adds = reading != "next state"
        inputs, change = torch.cat([states, u], dim=1), after - states
        scaled = reading == "change"
        for name, values in (("input", inputs), ("change", change)):
            mean, std = values.mean(dim=0), values.std(dim=0)
            self.register_buffer(f"{name}_mean", mean if scaled else torch.zeros_like(mean))
            self.register_buffer(f"{name}_std", std if scaled else torch.ones_like(std))

    def forward(self, x: Tensor, u: Tensor) -> Tensor:
        inputs = (torch.cat([x, u], dim=-1) - self.input_mean) / self.input_std
        out = self.change_mean + self.change_std * self.net(inputs)
        return x + out if self.adds else out

    def error(self, x: Tensor, u: Tensor, after: Tensor) -> Tensor:
        """The root mean square of x' - h(x, u), scaled, ()."""
        return ((after - self(x, u)) / self.change_std).square().mean().sqrt()


class Policy(nn.Module):
    """What BC learns: u = π(x) in [-1, 1], 5 -> 64 -> 64 -> 1 with tanh, its inputs scaled as the dynamics network's."""

    def __init__(self, config: Config, model: Dynamics):
        super().__init__()
        self.net = nn.Sequential(*network(config, 5, 1), nn.Tanh())
        self.register_buffer("mean", model.input_mean[:5].clone())
        self.register_buffer("std", model.input_std[:5].clone())

    def forward(self, x: Tensor) -> Tensor:
        return self.net((x - self.mean) / self.std)


class Distance(nn.Module):
    """The cost c(x): the mean of the squared distances of x, sin θ and cos θ from a target that can be learned."""

    def __init__(self, target: tuple[float, ...]):
        super().__init__()
        self.target = nn.Parameter(torch.tensor(target))

    def forward(self, observation: Tensor, u: Tensor | None = None) -> Tensor:
        return torch.stack([observation[..., i] - self.target[k] for k, i in enumerate(SEEN)]).square().mean(dim=0)


def network(config: Config, inputs: int, outputs: int) -> nn.Sequential:
    """Two hidden layers with tanh."""
    sizes = config.hidden
    return nn.Sequential(nn.Linear(inputs, sizes), nn.Tanh(), nn.Linear(sizes, sizes), nn.Tanh(), nn.Linear(sizes, outputs))


def planner(
    config: Config,
    dynamics: Callable[[Tensor, Tensor], Tensor],
    cost: Callable[[Tensor, Tensor], Tensor],
    generator: torch.Generator,
    polished: bool = False,
    horizon: int | None = None,
) -> dil.control.MPC:
    """The paper's planner, random shooting, or a better one, which Newton makes stationary."""
    if polished:
        polish = dil.Newton(max_steps=config.polish_steps)
        solver = dil.RandomShooting(config.polish_rtol, seed=generator, particles=config.polished_particles, polish=polish)
    else:
        solver = dil.RandomShooting(seed=generator, particles=config.particles)
    H = config.horizon if horizon is None else horizon
    # Plans that are not stationary fail by design here; their share is reported.
    return dil.control.MPC(
        dynamics,
        cost,
        H,
        1,
        bounds=(-1.0, 1.0),
        solver=solver,
        linear_solver=dil.CG(damping=config.damping),
        on_failure="ignore",
    )


def initial_states(system: CartPole, variance: float, number: int, generator: torch.Generator) -> Tensor:
    """Observations of x_0 ~ N(0, variance I), (number, 5)."""
    return system.observe(math.sqrt(variance) * torch.randn(number, 4, generator=generator))


@torch.no_grad()
def expert_trajectories(config: Config, system: CartPole, generator: torch.Generator) -> Tensor:
    """What the learner sees: observations of the expert, (N, T+1, 5)."""
    x0 = initial_states(system, config.variances[0], config.trajectories, generator)
    mpc = planner(config, system.step_observed, Distance(UPRIGHT), generator)
    return mpc.rollout(system.step_observed, x0, config.steps, warm_start=False).states


class ModelTraining:
    """`train_h` of Algorithm 2: steps on the error of the model at the expert's states, with random controls."""

    def __init__(self, config: Config, system: CartPole, reading: str, states: Tensor, budget: int, generator: torch.Generator):
        self.system, self.states, self.batch, self.generator = system, states, config.batch, generator
        u = self._controls(len(states))
        self.model = Dynamics(config, reading, states, u, system.step_observed(states, u))
        self.optimiser, self.schedule = descent(self.model, config.model_rate, budget)

    def step(self) -> None:
        """One step, for which the true system is asked for a batch of transitions."""
        chosen = torch.randint(len(self.states), (self.batch,), generator=self.generator)
        x, u = self.states[chosen], self._controls(self.batch)
        after = self.system.step_observed(x, u)
        _step(self.model.error(x, u, after), self.optimiser, self.schedule)

    def _controls(self, number: int) -> Tensor:
        return 2 * torch.rand(number, 1, generator=self.generator) - 1


def descent(module: nn.Module, rate: float, steps: int) -> tuple[torch.optim.Adam, torch.optim.lr_scheduler.LRScheduler]:
    """Adam, its rate falling to zero over the second half."""
    optimiser = torch.optim.Adam(module.parameters(), rate, fused=True)
    return optimiser, torch.optim.lr_scheduler.LambdaLR(optimiser, lambda k: min(1.0, 2 * (1 - k / steps)))


def train_bc(
    config: Config, system: CartPole, reading: str, expert: Tensor, budget: int, generator: torch.Generator
) -> tuple[Policy, Dynamics]:
    """Behavioural cloning from observations: h(x, π(x)) is to be the expert's next state."""
    x, after = _transitions(expert)
    training = ModelTraining(config, system, reading, x, budget, generator)
    policy = Policy(config, training.model)
    optimiser, schedule = descent(policy, config.policy_rate, budget)
    for _ in range(budget):
        training.step()
        chosen = torch.randint(len(x), (config.batch,), generator=generator)
        training.model.requires_grad_(False)
        _step(training.model.error(x[chosen], policy(x[chosen]), after[chosen]), optimiser, schedule)
        training.model.requires_grad_(True)
    return policy, training.model


def train_mpc(
    config: Config,
    system: CartPole,
    reading: str,
    expert: Tensor,
    budget: int,
    generator: torch.Generator,
    polished: bool = False,
) -> tuple[Dynamics, Distance]:
    """Algorithm 2: a step of the target (`train_c`) after every few steps of the model (`train_h`)."""
    x, after = _transitions(expert)
    training = ModelTraining(config, system, reading, x, budget, generator)
    model, cost = training.model, Distance(config.first_target)
    steps, short, rate = min(config.target_steps, budget), config.first_horizon, config.target_rate
    if system.integrator == "rk4":
        short, rate = min(config.rk4_first_horizon, config.horizon), config.rk4_target_rate
    optimiser, schedule = descent(cost, rate, steps)
    mpc = planner(config, model, cost, generator)
    if polished:
        polish = dil.Newton(max_steps=config.training_polish)
        mpc.solver = replace(mpc.solver, rtol=config.polish_rtol, polish=polish)
    for k in range(steps):
        for _ in range(budget * (k + 1) // steps - budget * k // steps):
            training.step()
        grown = min(1.0, k / (config.growing * steps))
        mpc.horizon = round(short + grown * (config.horizon - short))
        chosen = torch.randint(len(x), (config.target_batch,), generator=generator)
        model.requires_grad_(False)
        u = mpc(x[chosen])
        loss = model.error(x[chosen], u[:, 0], after[chosen])
        _step(loss, optimiser, schedule, config.clip)
        model.requires_grad_(True)
    return model, cost.requires_grad_(False)


def _transitions(expert: Tensor) -> tuple[Tensor, Tensor]:
    """States and those that followed, (N T, 5) each."""
    return expert[:, :-1].flatten(0, 1), expert[:, 1:].flatten(0, 1)


def _step(
    loss: Tensor, optimiser: torch.optim.Adam, schedule: torch.optim.lr_scheduler.LRScheduler, clip: float = math.inf
) -> None:
    optimiser.zero_grad()
    loss.backward()
    if clip < math.inf:
        nn.utils.clip_grad_norm_([p for group in optimiser.param_groups for p in group["params"]], clip)
    optimiser.step()
    schedule.step()
