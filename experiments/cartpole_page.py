"""The tables, the verdicts and the sentences of `experiments.cartpole`, from its records alone."""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from experiments import page
from experiments.cartpole_figures import (
    CARTS,
    INTEGRATORS,
    SERIES,
    animation,
    budget,
    collected,
    first_setting,
    has_trajectories,
    runs_in_words,
    spread,
    trajectories,
    with_most_steps,
)
from experiments.runner import Record

PAPER = {"expert": ("9.2 ± 0.0", "9.3 ± 0.1"), "BC": ("14.6 ± 0.6", "18.4 ± 1.4"), "MPC_IFT": ("13.7 ± 0.4", "14.7 ± 1.9")}
# A mean cost is reproduced if it is within this share of the paper's.
CLOSE = 0.1
TRAINED = ("MPC_IFT", "MPC_IFT, polished in training")


def answer(records: list[Record]) -> str:
    """What came out, in a few sentences."""
    result = collected(records)
    return " ".join(_sentence(result, setting) for setting in result["settings"])


def figures(records: list[Record]) -> dict[str, Any]:
    """All figures by name."""
    result = collected(records)
    found = {"trajectories": trajectories(result)} if has_trajectories(result) else {}
    for name, rows in result["settings"].items():
        if len({row["budget"] for row in rows if row["method"] == "BC"}) > 1:
            found[f"budget-{name.split(',')[0]}"] = budget(result, name)
    return found


def section(records: list[Record]) -> page.Section:
    """The cart-pole on the page of all experiments."""
    result = collected(records)
    moving = ""
    if has_trajectories(result):
        with tempfile.TemporaryDirectory() as folder:
            animation(result, Path(folder) / "cartpole.gif")
            moving = page.picture(Path(folder) / "cartpole.gif", "The swing-up by the expert, BC and MPC_IFT")
    body = (
        page.paragraph(
            "The paper's Table 2 and Figure 3: dynamics and target are learned from the states of a noisy expert, through "
            "the planning step of model predictive control (MPC_IFT), beside behavioural cloning (BC)."
        )
        + page.paragraph(answer(records))
        + moving
        + page.gallery(list(figures(records).values()))
        + "".join(page.paragraph(_heading(result, s)) + page.table(rows(result, s)) for s in result["settings"])
    )
    return page.Section("Cart-pole swing-up from observations", body)


def verdicts(records: list[Record]) -> tuple[page.Verdict, ...]:
    """The cells of Table 2, in the first variant, and what the paper concludes from them, in all."""
    result = collected(records)
    found = []
    for number, setting in enumerate(result["settings"]):
        last = with_most_steps(result, setting)
        for k, variance in enumerate(result["config"]["variances"]):
            where = f"Table 2, {_setting(setting)}, variance {variance}"
            if number == 0:
                found += [_cell(f"{where}: {name}", last[name], k, PAPER[name][k]) for name in PAPER]
            found.append(_below(f"{where}: MPC_IFT below BC", last["MPC_IFT"], last["BC"], k))
            better = last["MPC_IFT, polished in the test"]
            what, expert = f"{where}: MPC_IFT, polished in the test", f"the expert: {_plus_minus(last['expert'], k)}"
            found.append(page.Verdict(what, "-", _plus_minus(better, k), len(better["mean"]), "new", expert))
    return tuple(found)


def _cell(what: str, row: dict[str, Any], variance: int, paper: str) -> page.Verdict:
    """A mean cost beside the paper's; less is better."""
    (ours, _), theirs = spread(row, variance), float(paper.split()[0])
    close = abs(ours - theirs) <= CLOSE * theirs
    verdict = "reproduced" if close else "better" if ours < theirs else "not reproduced"
    mean, median, up = ([one[variance] for one in row[key]] for key in ("mean", "median", "success"))
    typical = f"the median run costs {statistics.median(mean):.1f}, the median state {statistics.fmean(median):.1f}"
    why = f"{typical}; {page.percent(statistics.fmean(up))} of the poles end up" if verdict == "not reproduced" else ""
    return page.Verdict(what, paper, _plus_minus(row, variance), len(row["mean"]), verdict, why)


def _below(what: str, ours: dict[str, Any], theirs: dict[str, Any], variance: int) -> page.Verdict:
    """Whether one method costs less than another, in the mean and run by run."""
    pairs = [(one[variance], other[variance]) for one, other in zip(ours["mean"], theirs["mean"], strict=True)]
    wins, (mean, _), (other, _) = sum(a < b for a, b in pairs), spread(ours, variance), spread(theirs, variance)
    verdict = "reproduced" if mean < other else "not reproduced"
    return page.Verdict(what, "yes", f"{mean:.1f} and {other:.1f}", len(pairs), verdict, f"in {wins} of {len(pairs)} runs")


def rows(result: dict[str, Any], setting: str) -> list[dict[str, str]]:
    """The table of one setting."""
    table = []
    for row in result["settings"][setting]:
        steps = row["budget"]
        cells = {"method": row["method"], "steps of the model": "-" if steps is None else f"{steps:,}"}
        shown = steps in (None, result["config"]["budgets"][-1])
        for k, variance in enumerate(result["config"]["variances"]):
            cells[f"variance {variance}"] = _plus_minus(row, k)
            cells["median" + " " * k] = f"{statistics.fmean(one[k] for one in row['median']):.1f}"
            cells["up" + " " * k] = page.percent(statistics.fmean(one[k] for one in row["success"]))
            cells["paper" + " " * k] = PAPER[row["method"]][k] if row["method"] in PAPER and shown else "-"
        table.append(cells)
    return table


def premise_rows(result: dict[str, Any]) -> list[dict[str, str]]:
    """How stationary the plans are."""
    table = []
    for setting, found in result["settings"].items():
        for row in found:
            if "stationarity" in row:
                parts = {name: [one[name] for one in row["stationarity"]] for name in ("gradient", "negative", "held")}
                table.append(
                    {
                        "setting": setting,
                        "plans of": row["method"],
                        "‖∇‖, median": f"{statistics.median(parts['gradient']):.2g}",
                        "negative curvature": page.percent(statistics.fmean(parts["negative"])),
                        "controls at a bound": page.percent(statistics.fmean(parts["held"])),
                    }
                )
    return table


def target_rows(result: dict[str, Any]) -> list[dict[str, str]]:
    """The targets that were learned with the largest budget."""
    table = []
    for setting, found in result["settings"].items():
        for row in found:
            if "target" in row and row["budget"] == result["config"]["budgets"][-1] and row["method"] in TRAINED:
                cells = {"setting": setting, "training": row["method"]}
                for name, values in zip(("x", "sin θ", "cos θ"), zip(*row["target"], strict=True), strict=True):
                    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
                    cells[name] = f"{statistics.fmean(values):.2f} ± {deviation:.2f}"
                table.append(cells)
    return table


def _sentence(result: dict[str, Any], setting: str) -> str:
    integrator, reading = setting.split(", ")
    last = with_most_steps(result, setting)

    def cost(method: str) -> str:
        return " / ".join(_plus_minus(last[method], k) for k in range(len(result["config"]["variances"])))

    named = ", ".join(f"{method} {cost(method)}" for method in ("expert", *SERIES) if method in last)
    return f"{INTEGRATORS[integrator]}, reading “{reading}”: {named}."


def write(records: list[Record], docs: Path) -> None:
    """docs/cartpole.md, its figures and the animation."""
    page.save(figures(records), docs, "cartpole")
    animation(collected(records), docs / "cartpole.gif")
    (docs / "cartpole.md").write_text(text(records))


def text(records: list[Record]) -> str:
    """docs/cartpole.md."""
    result = collected(records)
    config, high = result["config"], result["config"]["variances"][-1]
    drawn = [name for name in figures(records) if name.startswith("budget")]
    settings = result["settings"]
    tables = "\n\n".join(
        f"### {_heading(result, setting)}\n\n{page.markdown_table(rows(result, setting))}" for setting in settings
    )
    sentences = "\n".join(f"- {_sentence(result, setting)}" for setting in result["settings"])
    budgets = "\n\n".join(f"![Cost over the steps of the model](cartpole-{name}.svg)" for name in drawn)
    return f"""# Cart-pole

{page.origin("cartpole", records)}

A pole hangs from a cart, and forces on the cart are to swing it up and hold it there. An expert that knows the equations does
it by planning, and only the states that it visits are seen, not its controls. From these the learner finds a dynamics network
and a target state, so that *planning* with them does what the expert does:

```python
import torch
from torch import nn
import torchdil as dil

net, target = nn.Linear(5, 4), nn.Parameter(torch.zeros(4))  # what is learned: dynamics and target
model = lambda x, u: x + net(torch.cat((x, u), dim=-1))
cost = lambda x, u: (x - target).square().sum(-1)
shooting = dil.RandomShooting()  # drawn plans are not stationary, and that is meant
mpc = dil.control.MPC(model, cost, horizon=10, control_dim=1, bounds=(-1.0, 1.0), solver=shooting, on_failure="ignore")

x, x_next = torch.randn(2, 8, 4)  # the expert's states
loss = (model(x, mpc(x)[:, 0]) - x_next).square().mean()  # of the next state, by the first control of the plan
loss.backward()  # reaches the target inside cost, through the argmin
assert target.grad is not None
```

This is the paper's Algorithm 2 (MPC_IFT). Behavioural cloning (BC) learns a policy network in place of the target, with as many
steps of the model.

![The swing-up of expert, BC and MPC_IFT](cartpole.gif)

The same {min(CARTS, config["drawn"])} initial states from N(0, {high} I), twice the variance of what was learned from. A pole
is green where cos θ < -0.9.

## The table

Cost: the mean of squares of x, sin θ and cos θ + 1, summed over t = 0 .. {config["steps"]}; {config["states"]} fixed initial
states for each variance; runs have their own experts, networks and random numbers; mean ± standard error over the
runs. Median: of the states, mean over the runs. Up: cos θ < -0.9 for the last 10 steps. Always what training ended
with, never its best iterate.

{sentences}

{tables}

The means of BC are those of a few carts that run away, since x² has no bound: the median run of BC costs
{_median_run(result, "BC")} in the first table, that of MPC_IFT {_median_run(result, "MPC_IFT")}.

- *expert*: random shooting on the true system, {config["particles"]} uniform particles, horizon {config["horizon"]}, every plan
  from scratch. MPC_IFT plans in the same way, with what it has learned.
- *polished* in the test: random shooting with {config["polished_particles"]} particles and the last plan, then up to
  {config["polish_steps"]} steps of Newton, which keep the bounds; training is the paper's. In training: the
  {config["particles"]} particles, then up to {config["training_polish"]} steps of Newton, so that the gradient is that of a
  stationary plan. Throughout: both.
- Readings of the dynamics network. "change": it predicts the change of the state, inputs and outputs are standardised, errors
  are in standard deviations of the change. "literal": it predicts the change and nothing is scaled. "next state": it predicts
  the next state and nothing is scaled.
- The rates of Adam ({config["model_rate"]:g} for the model, {config["policy_rate"]:g} for the policy,
  {config["target_rate"]:g} for the target) fall to zero over the second half of a training. The target starts at x, sin θ,
  cos θ = {", ".join(f"{v:g}" for v in config["first_target"])}, the horizon at {config["first_horizon"]}. Under RK4 short
  horizons mislead the target: there the rate is {config["rk4_target_rate"]:g}, and the horizon starts at
  {config["rk4_first_horizon"]}.

## Over the training budget

Full lines: mean ± standard error over the runs; dotted: the median of the states. Each point is a training of its own, whose
schedules end there. BC takes a step of the policy with each step of the model,
MPC_IFT {config["target_steps"]} steps of the target in all.

{budgets}

## Trajectories

The paper's Figure 3, the first run under {INTEGRATORS[next(iter(result["settings"])).split(",")[0]]}.

![Trajectories of the expert, BC and MPC_IFT](cartpole-trajectories.svg)

## Does the theorem apply?

The gradient assumes a plan that is a minimum. A plan by random shooting is none: its gradient is far from zero, and its Hessian
often has negative eigenvalues. What keeps training stable is that CG stops where it meets negative curvature and that
ε = {config["damping"]:g} bounds what is left; but the gradient is then not that of the loss. Under explicit Euler the last
control cannot reach the cost at all, so that without ε the Hessian is singular. Polished plans are nearly stationary; what
negative curvature is left there is that of plans whose {config["polish_steps"]} steps were not enough.

{page.markdown_table(premise_rows(result))}

The loss hardly tells how long the target is: since sin² + cos² = 1, its length only weighs the pole against the cart, and the
noise of the expert hides that. What training ended with, mean and standard deviation over the runs:

{page.markdown_table(target_rows(result))}
"""


def _median_run(result: dict[str, Any], method: str) -> str:
    """The median over the runs of the mean cost, for each variance."""
    means = first_setting(result, method)["mean"]
    return " / ".join(f"{statistics.median(one[k] for one in means):.1f}" for k in range(len(result["config"]["variances"])))


def _setting(setting: str) -> str:
    integrator, reading = setting.split(", ")
    name = INTEGRATORS[integrator]
    return f"{name[0].upper()}{name[1:]}, reading “{reading}”"


def _heading(result: dict[str, Any], setting: str) -> str:
    return f"{_setting(setting)}, {runs_in_words(result, setting)}"


def _plus_minus(row: dict[str, Any], variance: int) -> str:
    mean, error = spread(row, variance)
    return f"{mean:.1f} ± {error:.1f}" if len(row["mean"]) > 1 else f"{mean:.1f}"
