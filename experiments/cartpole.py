"""Cart-pole swing-up learned from observations of a noisy expert: the paper's Table 2 and Figure 3.

The expert plans on the true system by random shooting, and only its states are seen. MPC_IFT learns a dynamics network and a
target state by Algorithm 2: x̂ = h(x, u_0), u = argmin Σ c(x_t) over the horizon, and the error of x̂ reaches the target through
`dil.control.MPC`. Behavioural cloning (BC) learns a policy in its place, u_0 = π(x), with as many steps of the model.
A run is one seed of one integrator and one reading of the dynamics network: an expert, all trainings, their tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import torchdil as dil
from experiments.cartpole_learning import (
    EXACT,
    LAST,
    MAIN,
    METHODS,
    NEGATIVE,
    POLISHED,
    READINGS,
    SEEN,
    TEST_STATES,
    UP,
    UPRIGHT,
    Config,
    Distance,
    expert_trajectories,
    initial_states,
    planner,
    train_bc,
    train_mpc,
)
from experiments.systems import CartPole

# The random numbers of run k follow from FIRST + APART k; an expert and a training take a few of the seeds from there on.
FIRST, APART = 1000, 10
# Whose trajectories the figures show.
SHOWN = ("expert", *METHODS)


def variants(config: Config) -> list[Config]:
    """The variant of the table, and others."""
    first = replace(config, others=())
    return [first, *(replace(first, integrator=i, reading=r, runs=runs) for i, r, runs in config.others)]


def run(config: Config, seed: int) -> dict[str, Any]:
    """A row for each method and budget."""
    derived, shown = FIRST + APART * seed, seed == 0
    expert, rows = expert_part(config, derived, shown)
    for method, budget in trainings(config):
        rows += learned_part(config, method, budget, derived, expert, shown)
    return {"rows": rows}


def trainings(config: Config) -> list[tuple[str, int]]:
    """Methods and budgets."""
    budgets = config.budgets if (config.integrator, config.reading) == MAIN else config.budgets[-1:]
    found = [(method, budget) for method in METHODS for budget in budgets]
    if config.reading == READINGS[0]:
        found.append((EXACT, config.budgets[-1]))
    return sorted(found, key=lambda training: (training[0] == "BC", -training[1]))


@torch.no_grad()
def closed_loop(system: CartPole, policy: Callable[[Tensor], Tensor], x0: Tensor, steps: int) -> Tensor:
    """The trajectory of a policy on the true system, (B, T+1, 5)."""
    x = [x0]
    for _ in range(steps):
        x.append(system.step_observed(x[-1], policy(x[-1])))
    return torch.stack(x, dim=1)


def total_cost(trajectory: Tensor) -> Tensor:
    """What the table compares: the distance from upright, summed over all times, (B, T+1, 5) -> (B,)."""
    with torch.no_grad():
        return Distance(UPRIGHT).to(trajectory)(trajectory).sum(dim=1)


def success(trajectory: Tensor) -> Tensor:
    """Which trajectories end with the pole up, (B,)."""
    return (trajectory[:, -LAST:, 4] < UP).all(dim=1)


def stationarity(config: Config, mpc: dil.control.MPC, x: Tensor) -> dict[str, float]:
    """How far plans are from what the theorem assumes: the norm of the gradient, and the curvature."""
    with torch.no_grad():
        u = mpc(x)
    assert mpc.report is not None and mpc.report.forward is not None
    norm = mpc.report.forward.stats.residual

    def total(u: Tensor, x: Tensor) -> Tensor:
        cost = mpc.cost(x, u[0])
        for control in u:
            x = mpc.dynamics(x, control)
            cost = cost + mpc.cost(x, control)
        return cost

    H = torch.vmap(torch.func.hessian(total))(u, x).reshape(len(x), config.horizon, config.horizon)
    # A control at a bound does not move, and says nothing of the curvature.
    free = (u.abs() < 1).flatten(1).to(H)
    H = free.unsqueeze(2) * H * free.unsqueeze(1)
    eigenvalues = torch.linalg.eigvalsh(H)
    size = eigenvalues.abs().amax(dim=1)
    return {
        "gradient": _digits(norm.median()),
        "negative": _digits((eigenvalues[:, 0] < -NEGATIVE * size).double().mean()),
        "held": _digits(1 - free.mean()),
    }


def tested(config: Config, system: CartPole, roll: Callable[[Tensor], Tensor], keep: bool) -> dict[str, Any]:
    """A method on the fixed initial states of each variance: mean and median cost, successes; and trajectories, if to keep."""
    out: dict[str, Any] = {"mean": [], "median": [], "success": [], "worst": []}
    for variance in config.variances:
        x0 = initial_states(system, variance, config.states, torch.Generator().manual_seed(TEST_STATES))
        trajectory = roll(x0)
        cost = total_cost(trajectory)
        for name, value in (("mean", cost.mean()), ("median", cost.median()), ("worst", cost.max())):
            out[name].append(_digits(value))
        out["success"].append(_digits(success(trajectory).double().mean()))
    if keep:
        out["trajectories"] = _drawn(config, trajectory)
    return out


def expert_part(config: Config, seed: int, shown: bool) -> tuple[Tensor, list[dict[str, Any]]]:
    """The expert's trajectories, its own test, and better planners on the true system."""
    system, generator = CartPole(config.integrator), torch.Generator().manual_seed(seed)
    trajectories = expert_trajectories(config, system, generator)
    found = []
    horizons = config.polished_horizons if config.integrator == MAIN[0] else ()
    better = [(f"true system, polished, horizon {horizon}", True, horizon) for horizon in horizons]
    for name, polished, horizon in (("expert", False, config.horizon), *better):
        mpc = planner(config, system.step_observed, Distance(UPRIGHT).requires_grad_(False), generator, polished, horizon)
        row = tested(config, system, _rolling(config, system, mpc, polished), keep=shown and name in SHOWN)
        if name == "expert":
            if shown:  # what is learned from, the paper's Figure 3a
                row["data"] = _drawn(config, trajectories)
            row["stationarity"] = stationarity(config, mpc, _some(trajectories))
        found.append({"method": name, "budget": None} | row)
    return trajectories, found


def learned_part(config: Config, method: str, budget: int, seed: int, expert: Tensor, shown: bool) -> list[dict[str, Any]]:
    """One training and its tests."""
    system, generator = CartPole(config.integrator), torch.Generator().manual_seed(seed + 1)
    last = budget == config.budgets[-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if method == "BC":
            policy, _ = train_bc(config, system, config.reading, expert, budget, generator)
            row = tested(config, system, lambda x0: closed_loop(system, policy, x0, config.steps), keep=shown and last)
            return [{"method": method, "budget": budget} | row]
        model, cost = train_mpc(config, system, config.reading, expert, budget, generator, polished=method == EXACT)
    model.requires_grad_(False)
    found = []
    for name, polished in ((method, False), (POLISHED[method], True))[: 1 + last]:
        mpc = planner(config, model, cost, generator, polished)
        row = tested(config, system, _rolling(config, system, mpc, polished), keep=shown and last and name in SHOWN)
        if last:
            row["stationarity"] = stationarity(config, mpc, _some(expert))
        row["target"] = [_digits(value) for value in cost.target]
        found.append({"method": name, "budget": budget} | row)
    return found


def _rolling(config: Config, system: CartPole, mpc: dil.control.MPC, polished: bool) -> Callable[[Tensor], Tensor]:
    """The closed loop of a planner; only the better one starts from its last plan."""

    @torch.no_grad()
    def roll(x0: Tensor) -> Tensor:
        return mpc.rollout(system.step_observed, x0, config.steps, warm_start=polished).states

    return roll


def _some(expert: Tensor) -> Tensor:
    """A ninth of the expert's states, of all times, (N, 5)."""
    return expert[:, :-1].flatten(0, 1)[::9]


def _drawn(config: Config, trajectories: Tensor) -> list[list[list[float]]]:
    """As many as the figures show, to three digits."""
    shown = trajectories[: config.drawn, :, list(SEEN)].tolist()
    return [[[round(value, 3) for value in at] for at in one] for one in shown]


def _digits(number: Tensor | float) -> float:
    return float(f"{float(number):.4g}")
