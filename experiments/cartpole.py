"""Cart-pole swing-up learned from observations of a noisy expert: the paper's Table 2 and Figure 3.

The expert plans on the true system by random shooting, and only its states are seen. MPC_IFT learns a dynamics network and a
target state by Algorithm 2: x̂ = h(x, u_0), u = argmin Σ c(x_t) over the horizon, and the error of x̂ reaches the target through
`dil.control.MPC`. Behavioural cloning (BC) learns a policy in its place, u_0 = π(x), with as many steps of the model.
`python -m experiments.cartpole --jobs 16` writes the results and docs/cartpole.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
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
from experiments.publish import publish
from experiments.spread import spread
from experiments.systems import CartPole


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
        shown = trajectory[: config.drawn, :, list(SEEN)]
        out["trajectories"] = [[[round(v, 3) for v in at] for at in one] for one in shown.tolist()]
    return out


def expert_part(config: Config, integrator: str, seed: int) -> tuple[Tensor, list[dict[str, Any]]]:
    """The expert's trajectories, its own test, and better planners on the true system."""
    torch.set_num_threads(1)
    system, generator = CartPole(integrator), torch.Generator().manual_seed(seed)
    trajectories = expert_trajectories(config, system, generator)
    found = []
    horizons = config.polished_horizons if integrator == MAIN[0] else ()
    better = [(f"true system, polished, horizon {horizon}", True, horizon) for horizon in horizons]
    for name, polished, horizon in (("expert", False, config.horizon), *better):
        mpc = planner(config, system.step_observed, Distance(UPRIGHT).requires_grad_(False), generator, polished, horizon)
        row = tested(config, system, _rolling(config, system, mpc, polished), keep=name == "expert")
        if name == "expert":
            # The figure shows what is learned from, the paper's Figure 3a.
            row["data"] = [[[round(v, 3) for v in at] for at in one] for one in trajectories[: config.drawn, :, SEEN].tolist()]
            row["stationarity"] = stationarity(config, mpc, _some(trajectories))
        found.append({"method": name, "budget": None} | row)
    return trajectories, found


def learned_part(
    config: Config, integrator: str, reading: str, method: str, budget: int, seed: int, expert: Tensor
) -> list[dict[str, Any]]:
    """One training and its tests."""
    torch.set_num_threads(1)
    system, generator = CartPole(integrator), torch.Generator().manual_seed(seed + 1)
    last = budget == config.budgets[-1]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if method == "BC":
            policy, _ = train_bc(config, system, reading, expert, budget, generator)
            row = tested(config, system, lambda x0: closed_loop(system, policy, x0, config.steps), keep=last)
            return [{"method": method, "budget": budget} | row]
        model, cost = train_mpc(config, system, reading, expert, budget, generator, polished=method == EXACT)
    model.requires_grad_(False)
    found = []
    for name, polished in ((method, False), (POLISHED[method], True))[: 1 + last]:
        mpc = planner(config, model, cost, generator, polished)
        row = tested(config, system, _rolling(config, system, mpc, polished), keep=last)
        if last:
            row["stationarity"] = stationarity(config, mpc, _some(expert))
        row["target"] = [_digits(value) for value in cost.target]
        found.append({"method": name, "budget": budget} | row)
    return found


def run(config: Config, seed: int, jobs: int = 1, store: Path | None = None) -> dict[str, Any]:
    """All settings and runs, over so many processes; what is done already is taken from the store, if there is one."""
    seeds = [1000 * (seed + 1) + 10 * k for k in range(max(config.runs, config.other_runs))]
    chosen = {setting: seeds[: config.runs if setting == MAIN else config.other_runs] for setting in config.settings}
    first = list(dict.fromkeys((integrator, s) for (integrator, _), some in chosen.items() for s in some))
    parts = spread(expert_part, [(config, *one) for one in first], jobs, store)
    experts = dict(zip(first, parts, strict=True))
    second = []
    for (integrator, reading), some in chosen.items():
        budgets = config.budgets if (integrator, reading) == MAIN else config.budgets[-1:]
        trainings = [(method, budget) for method in METHODS for budget in budgets]
        if reading == READINGS[0]:
            trainings.append((EXACT, config.budgets[-1]))
        # The longest first, so that none is waited for at the end.
        trainings.sort(key=lambda training: (training[0] == "BC", -training[1]))
        second += [
            (config, integrator, reading, method, budget, s, experts[integrator, s][0])
            for method, budget in trainings
            for s in some
        ]
    rows: dict[str, list[dict[str, Any]]] = {_name(*setting): [] for setting in config.settings}
    for ((integrator, _), some), table in zip(chosen.items(), rows.values(), strict=True):
        for s in some:
            table += [row | {"seed": s} for row in experts[integrator, s][1]]
    for task, found in zip(second, spread(learned_part, second, jobs, store), strict=True):
        rows[_name(task[1], task[2])] += [row | {"seed": task[5]} for row in found]
    return {
        "seed": seed,
        "config": asdict(config),
        "settings": {name: _collected(table, seeds) for name, table in rows.items()},
    }


def _collected(table: list[dict[str, Any]], seeds: list[int]) -> list[dict[str, Any]]:
    """One row for each method and budget, with lists over the runs; trajectories of the first run only."""
    out = []
    for method, budget in dict.fromkeys((row["method"], row["budget"]) for row in table):
        rows = sorted(
            (r for r in table if (r["method"], r["budget"]) == (method, budget)), key=lambda r: seeds.index(r["seed"])
        )
        single = {name: rows[0][name] for name in ("trajectories", "data") if name in rows[0]}
        lists = {name: [r[name] for r in rows] for name in rows[0] if name not in (*single, "method", "budget", "seed")}
        out.append({"method": method, "budget": budget} | lists | single)
    return out


def _rolling(config: Config, system: CartPole, mpc: dil.control.MPC, polished: bool) -> Callable[[Tensor], Tensor]:
    """The closed loop of a planner; only the better one starts from its last plan."""

    @torch.no_grad()
    def roll(x0: Tensor) -> Tensor:
        return mpc.rollout(system.step_observed, x0, config.steps, warm_start=polished).states

    return roll


def _some(expert: Tensor) -> Tensor:
    """A ninth of the expert's states, of all times, (N, 5)."""
    return expert[:, :-1].flatten(0, 1)[::9]


def _name(integrator: str, reading: str) -> str:
    return f"{integrator}, {reading}"


def _digits(number: Tensor | float) -> float:
    return float(f"{float(number):.4g}")


def main() -> None:
    from experiments import cartpole_page

    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--note", default="", help="what else to say of where the numbers were made")
    parser.add_argument("--store", type=Path, help="a folder for what is done, from where a run that was cut short goes on")
    parser.add_argument("--only", nargs="+", metavar="SETTING", help='such as "euler, change" "rk4, change"')

    def experiment(options: argparse.Namespace) -> dict[str, Any]:
        config = Config.preset(options.preset)
        chosen = tuple(s for s in config.settings if options.only is None or _name(*s) in options.only)
        if not chosen:
            parser.error(f"--only must name some of {', '.join(repr(_name(*s)) for s in config.settings)}")
        return run(replace(config, settings=chosen), options.seed, options.jobs, options.store) | {"note": options.note}

    publish("cartpole", experiment, cartpole_page, parser)


if __name__ == "__main__":
    main()
