"""The tables of README.md and of the pages with numbers in docs, from `benchmarks/results/*.json`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

BEGIN, END = "<!-- numbers -->", "<!-- end of numbers -->"


def markdown(headings: list[str], rows: list[list[Any]]) -> str:
    """A Markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def scale(results: dict[str, Any]) -> str:
    """The table of the large problems."""
    rows = [
        [
            row["energy"],
            f"{row['unknowns']:,}",
            row["cg_steps"],
            f"{row['backward_peak_vectors']:.1f}",
            f"{row['one_product_peak_vectors']:.1f}",
            f"{row['loop_over_products']:.2f}",
        ]
        for row in results["scale"]
    ]
    headings = ["energy", "unknowns", "CG steps", "peak memory, vectors", "of which one product", "CG loop / its products"]
    return markdown(headings, rows)


def readme(results: dict[str, Any]) -> str:
    """The block of README.md."""
    isolation, warm = results["isolation"], results["warm_start"]
    return f"""{BEGIN}
One backward pass by CG in float64 on one CPU thread: its peak memory beyond the forward's, in vectors of the size of the
unknown, and its time over that of its Hessian-vector products alone.

{scale(results)}

In a batch of {isolation["samples"]}, one sample made ill-conditioned (10¹⁰) {change(isolation)}.
Starting the backward solves of {warm["training_steps"]} training steps from the last one saved {warm["saved"]:.0%} of products.
Measured by `make bench` ({machine(results)}); all of it in [docs/numbers.md](docs/numbers.md).
{END}"""


def numbers(results: dict[str, Any]) -> str:
    """docs/numbers.md."""
    isolation, warm = results["isolation"], results["warm_start"]
    ill = [
        [row["preconditioner"], "yes" if row["warm_start"] else "no", row["products"], f"{row['saved']:.0%}"]
        for row in results["ill_conditioned"]
    ]
    strategies = [[row["unknowns"], row["backward"], row["forward"], row["traced"]] for row in results["strategies"]]
    preconditioners = [list(row.values()) for row in results["preconditioners"]]
    return f"""# Numbers

Written by `make bench` from `benchmarks/results/core.json`: {machine(results)}.

## One million unknowns

One backward pass by CG, float64, one thread. Peak memory is what the backward allocates beyond what the forward left behind,
in vectors of the size of the unknown; the product with the Hessian alone needs the part in the next column. The last column
is the CPU time of the whole CG solve over that of as many products made alone, interleaved, medians.

{scale(results)}

CG itself holds four vectors and makes five passes over memory and an inner product a step; where a product is no more than a
few passes itself, that shows.

## A hard sample among {isolation["samples"]}

One sample made ill-conditioned (10¹⁰) {change(isolation)}.

## Warm start of the backward solve

Products with the Hessian in {warm["training_steps"]} training steps on the same data, CG to 1e-6: {warm["cold"]} from zero,
{warm["warm"]} from the last solution ({warm["saved"]:.0%} saved).

## An ill-conditioned batch

Eight problems of 100 unknowns with condition numbers from 10 to 10⁵ and unknowns of very different scales, ten training steps:
products with the Hessian in all backward solves, CG to 1e-6.

{markdown(["preconditioner", "warm start", "products", "saved"], ill)}

## Preconditioners

Products of one backward solve by CG to 1e-6, those that make the preconditioner included; 16 problems of 200 unknowns; the
forward solver is L-BFGS, whose steps `SecantMemory` re-uses.

{markdown(["curvature", "none", "Jacobi()", "Nystrom()", "SecantMemory()"], preconditioners)}

A preconditioner pays where it fits the curvature, and costs where it does not. The steps of the forward solver, of which there
are few and all in the directions that it had to go, say too little of the Hessian to help here.

## Ways to make a product

CPU time of one product with the Hessian of a small network's energy, relative to double backward; interleaved, medians.

{markdown(["unknowns", "backward", "forward", "traced"], strategies)}
"""


def solvers(results: dict[str, Any]) -> str:
    """docs/solvers.md."""
    blocks = []
    for problem in dict.fromkeys(row["problem"] for row in results["solvers"]):
        rows = [_solver_row(row) for row in results["solvers"] if row["problem"] == problem]
        headings = ["solver", "status", "steps", "calls", "backward passes", "error"]
        headings += ["SciPy's", "success", "steps", "calls", "derivatives", "error"]
        blocks.append(f"## {problem}\n\n{markdown(headings, rows)}")
    speed = results["batch_speed"]
    tables = "\n\n".join(blocks)
    return f"""# Solvers in numbers

Written by `make bench` from `benchmarks/results/solvers.json`: {machine(results)}.

Every forward solver on the problems it is for, at its default tolerance, beside SciPy's method called by hand with exact
derivatives. *Calls* are calls of the function, those that check its result included; sampling solvers evaluate all particles
in one call. *Backward passes* are gradients and, for Newton's methods, products with the Hessian; *derivatives* are SciPy's
gradients, Jacobians, and Hessians or products with them, as it counts them. The *error* is the relative
distance to the exact solution next to the answer. Foreign solvers (`SciPy`, `TorchOptim`) are accepted with half the digits.

{tables}

## A batch against a loop

{speed["samples"]} problems of {speed["unknowns"]} unknowns, float64, CPU time on one thread, medians of interleaved runs:
`LBFGS()` on the batch against Python loops over its samples.

{markdown(["a loop of", "time / time of the batch"], [list(item) for item in speed["faster_than_a_loop_of"].items()])}

The answers agree to {speed["largest_difference"]:.0e}.
"""


def ode(results: dict[str, Any]) -> str:
    """docs/ode-speed.md."""
    config = results["ode"]["config"]
    parts = "\n".join(_ode_part(results[name]) for name in ("ode", "ode_gpu") if name in results)
    return f"""# Neural ODEs in numbers

Written by `python -m benchmarks --only ode` from `benchmarks/results/ode.json` and, on a GPU, `ode_gpu.json`.

dy/dt = f(y), f a network D-30-30-D with tanh; {config["steps"]} steps of {config["step_size"]}, float32, the loss the sum of
squares of all states, all systems with the same weights. *torchdil* is `dil.odeint(f, y0, t, batch_dims=1)`, backward Euler
with the exact gradient; *CG* is the same with `linear_solver=dil.CG()`, as in the paper. *diffrax* is its `ImplicitEuler` with
`VeryChord(rtol={config["tolerance"]:g}, atol={config["tolerance"]:g})`, `ConstantStepSize` and `DirectAdjoint`, jitted and,
for more than one sample, vmapped. *torchdiffeq* has no implicit method: `odeint_adjoint` with its defaults, and Euler's
explicit method with backpropagation.

The systems take turns in short blocks; medians in milliseconds, in brackets the quartiles. *Backward* is what both take more
than the forward alone in the same round, *by clock* what the backward alone took where that can be timed. *Residual* is
max |y_n - y_{{n-1}} - h f(y_n)|, asked for {config["tolerance"]:g}; *gradient* its relative distance to the exact one in
float64 (a system that misses the former, or the latter by 1e-3, is *rejected*). The last columns are times over torchdil's.

{parts}"""


def _ode_part(results: dict[str, Any]) -> str:
    """The cases of one device."""
    at, blocks = results["machine"], []
    for case in results["cases"]:
        rows = []
        for name, system in case["systems"].items():
            times = [_quartiles(system[what]) for what in ("forward", "backward", "both")]
            clock = short(system["backward_by_clock"]["median"]) if "backward_by_clock" in system else ""
            judged = [f"{system[key]:.0e}" if key in system else "" for key in ("residual", "gradient_error")]
            ratios = [short(ratio) for ratio in case["ratios"].get(name, {"forward": 1, "backward": 1, "both": 1}).values()]
            label = f"{name} (rejected)" if "rejected" in system else name
            rows.append([label, *times[:2], clock, times[2], *judged, *ratios])
        headings = ["system", "forward", "backward", "by clock", "both", "residual", "gradient"]
        headings += ["forward, ratio", "backward, ratio", "both, ratio"]
        note = f"{case['note']}\n\n" if "note" in case else ""  # what has changed since, where it was not measured again
        blocks.append(f"### D = {case['state']}, batch {case['batch']}\n\n{note}{markdown(headings, rows)}\n")
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items() if name != "platform")
    title = at.get("gpu", f"{at['cpu']}, one core")
    return f"## {title}\n\n{machine(results)}, {versions}.\n\n" + "\n".join(blocks)


def control(results: dict[str, Any]) -> str:
    """docs/control-speed.md."""
    config = results["control"]["config"]
    parts = "\n".join(_control_part(results[name]) for name in ("control", "control_gpu") if name in results)
    return f"""# Control in numbers

Written by `python -m benchmarks --only control` from `benchmarks/results/control.json` and, on a GPU, `control_gpu.json`.

*Riccati equations*: {config["systems"]:,} random systems with n = {config["states"]} states and m = {config["controls"]}
controls; S from `dil.control.dare(A, B, Q, R)` and the gradient of a weighted sum of its entries in all four matrices, float64
unless said. *CG* and *Dense* are the linear solvers of the backward pass that the paper compares, the default is
`dil.control.Stein()`. The loop calls SciPy's `solve_discrete_are` system by system; its adjoint equations are dense systems of
n² unknowns that NumPy solves in one call. It is on one core also where the others have a GPU.

*Plans*: `dil.control.MPC` with the dynamics x + (f(x, u) - x) / 10, f a network with two hidden layers of
{config["hidden"]} and tanh, {config["plan_states"]} states, one control, the cost |x|² + |u|², horizon H, batch B, float64.
*DDP, Riccati* is the default; *Newton, Dense* is `solver=dil.Newton(linear_solver=dil.Dense()), linear_solver=dil.Dense()`;
*Newton, unrolled* is backpropagation through as many steps of Newton with dense Hessians, without a line search.

The ways take turns; medians in milliseconds, in brackets the quartiles. *Answer* and *gradient* are relative distances to
SciPy's, or to those of *Newton, Dense*; a way is *rejected* if one exceeds 1e-8 (float32: 1e-3). The last columns are times
over torchdil's default.

{parts}"""


def _control_part(results: dict[str, Any]) -> str:
    """One device."""
    at, equations, long = results["machine"], results["riccati"], results["over_horizon"]
    blocks = [f"### Riccati equations\n\n{_ways(equations['ways'], 'torchdil')}\n"]
    for case in results["plans"]:
        title = f"### Plans, H = {case['horizon']}, B = {case['batch']} ({case['steps']} steps of DDP)"
        blocks.append(f"{title}\n\n{_ways(case['ways'], 'DDP, Riccati')}\n")
    names = list(long["powers"])
    rows = [
        [case["horizon"], case["steps"]]
        + [short(case["ways"][name][what]["median"]) for name in names for what in ("forward", "backward")]
        for case in long["cases"]
    ]
    powers = [f"H^{long['powers'][name][what]}" for name in names for what in ("forward", "backward")]
    headings = ["H", "steps"] + [f"{name}, {what}" for name in names for what in ("forward", "backward")]
    table = markdown(headings, [*rows, ["grows with", "", *powers]])
    blocks.append(
        f"### Plans over the horizon, B = {results['config']['long_batch']}\n\n{table}\n\n"
        f"Milliseconds, medians; the power of H by least squares from H = {long['from_horizon']} on.\n"
    )
    if results.get("peer") is not None:
        blocks.append(_peer_part(results["peer"]))
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    title = at.get("gpu", f"{at['cpu']}, one core")
    return f"## {title}\n\n{machine(results)}, {versions}.\n\n" + "\n".join(blocks)


def _peer_part(peer: dict[str, Any]) -> str:
    held = f"{100 * peer['held']:.0f} % of the controls at a bound"
    return f"""### Beside mpc.pytorch {peer["versions"]["mpc"]}

A pendulum with a quadratic cost, H = {peer["horizon"]}, B = {peer["batch"]}, {held}. *Answer* is the distance to torchdil's
plan, *gradient*, in the weights of the cost, that to central differences. mpc.pytorch differentiates the last linearisation of
the dynamics, not the plan: it leaves out their curvature.

{_ways(peer["ways"], "torchdil")}
"""


def _ways(ways: dict[str, Any], default: str) -> str:
    """Ways to the same answer beside each other."""
    rows = []
    for name, way in ways.items():
        times = [_quartiles(way[what]) for what in ("forward", "backward", "both")]
        judged = [f"{way[key]:.0e}" if key in way else "" for key in ("value_error", "gradient_error")]
        ratios = [short(way[what]["median"] / ways[default][what]["median"]) for what in ("forward", "backward", "both")]
        rows.append([f"{name} (rejected)" if "rejected" in way else name, *times, *judged, *ratios])
    headings = ["way", "forward", "backward", "both", "answer", "gradient", "forward, ratio", "backward, ratio", "both, ratio"]
    return markdown(headings, rows)


def _quartiles(times: dict[str, Any]) -> str:
    low, high = times["quartiles"]
    return f"{short(times['median'])} ({short(low)}, {short(high)})"


def short(number: float) -> str:
    """Three digits, or all of a larger number."""
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.3g}"


def _solver_row(row: dict[str, Any]) -> list[Any]:
    ours = [f"`{row['solver']}`", row["status"], row["steps"], row["calls"], row["passes"], f"{row['error']:.0e}"]
    if "scipy" not in row:
        return ours + [""] * 6
    success = "yes" if row["scipy_success"] else "no"
    theirs = [row["scipy"], success, row["scipy_steps"], row["scipy_calls"], row["scipy_passes"]]
    return [*ours, *theirs, f"{row['scipy_error']:.0e}"]


def change(isolation: dict[str, Any]) -> str:
    """What a hard sample does to the others, in words."""
    largest = isolation["largest_change_of_the_other_gradients"]
    return (
        f"changes the other gradients by at most {largest:.0e}" if largest else "leaves the other gradients the same to the bit"
    )


def machine(results: dict[str, Any]) -> str:
    """Where and with what it was measured."""
    at = results["machine"]
    return f"torchdil {at['torchdil']}, torch {at['torch']}, {at['cpu']}, {at['threads']} thread, seed {at['seed']}"


def update(results: dict[str, Any], root: Path) -> None:
    """Write the tables where readers find them; `results` by the names of their files."""
    path = root / "README.md"
    text = path.read_text()
    path.write_text(text[: text.index(BEGIN)] + readme(results["core"]) + text[text.index(END) + len(END) :])
    (root / "docs" / "numbers.md").write_text(numbers(results["core"]))
    (root / "docs" / "solvers.md").write_text(solvers(results["solvers"]))
    (root / "docs" / "ode-speed.md").write_text(ode(results))
    if "control" in results:
        (root / "docs" / "control-speed.md").write_text(control(results))
