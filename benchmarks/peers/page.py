"""docs/performance.md and its figure, from `benchmarks/results/peers*.json`."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from benchmarks import tables
from benchmarks.peers.compare import JAX, OURS, TORCH

NAMES = {
    "torchopt": "TorchOpt",
    "xitorch": "xitorch",
    "torchdeq": "TorchDEQ",
    "jaxopt": "JAXopt",
    "optimistix": "Optimistix",
    "untraced": "torchdil, not traced",
    "compiled": "torchdil, compiled",
    "handwritten": "written by hand",
}
COLOURS = {
    "torchopt": "#c44e52",
    "xitorch": "#dd8452",
    "torchdeq": "#937860",
    "jaxopt": "#4c72b0",
    "optimistix": "#64b5cd",
    "untraced": "#8c8c8c",
}
FELT = 0.1  # a difference that is more than noise
SCALE = Path(__file__).parent.parent.parent / "experiments" / "results" / "scale.jsonl"
WHERE = {"peers": "CPU, one thread", "peers_gpu": "H200"}


def update(results: dict[str, Any], docs: Path) -> None:
    """Write the page and its figure, where there are results."""
    found = {name: results[name] for name in WHERE if name in results}
    if found:
        from matplotlib import rc_context

        (docs / "performance.md").write_text(text(found, results))
        with rc_context({"svg.hashsalt": "torchdil"}):  # the same file from the same results
            figure(found).savefig(docs / "performance.svg", metadata={"Date": None})


def text(results: dict[str, Any], others: dict[str, Any]) -> str:
    """The page, from the comparisons and from what else was measured."""
    parts = "\n\n".join(_part(name, found) for name, found in results.items())
    return f"""# Performance

{_origin(results)}

The backward pass is timed given the solution, so that no forward solver takes part: the same problem, the same data, the same
solution and the same relative tolerance of the linear solve (1e-6, float64) for all. Gradients are compared with a reference
(SciPy's solvers to 1e-10) before anything is timed. Every library runs in a process of its own; they take turns; the numbers
are ratios of medians. What runs on JAX is compiled and warm, and what torchdil traces is traced. The second table counts the
forward, too, which has nothing to solve: torchdil checks that what it was handed is stationary and a minimum, the others do
not.
On a CPU torchdil makes [late products in float32](mathematics.md#conjugate-gradients) where they are worth it, and checks the
answer in float64, against the same tolerance; the others compute in float64 throughout.

![Times](performance.svg)

{parts}

## What makes it fast

A layer in a training loop solves with the Jacobian of the same function again and again. What is asked for more than ten times
is traced (`torchdil.traced`), and from then on products are made by what is left of the trace.

{_tried(others)}

All of it together, the backward pass not traced over traced: {_gain(results)}, each problem in the column "not traced".

What a function reads, its tensors, numbers, code and classes, is looked at in every call, and a change of anything but the
tensors is another trace. Of an object whose attributes it reads, only those count: where the function of a layer is a method
of the model that the layer is part of, the losses, counters and optimizers that the model keeps make no difference. A function
that reads values of tensors (`item()`, `if mask.any()`, `theta[mask]`), that hooks into gradients or whose modules do, or that
uses what does not show its numbers (`globals()`, an array of numpy with more than 1000 of them, an iterator, a queue), is not
traced; nor is any while there are hooks of all modules.

That leaves what cannot be seen, a number in a file for example. So F by the trace is compared with F, which was evaluated
anyway, at every solve; and at the first three solves with a trace and at one of each ten after that the solution of the linear
system is checked by one product of autograd, and gᵀ ∂F/∂θ with a random g. If one of them does not fit, the trace is given up
and the system is solved again; where solves before this one were not checked, a warning says so.
`torch.use_deterministic_algorithms(True)`, or a linear solver with `product="backward"`, keeps a layer from being traced:
rounding then does not depend on how often it was called before.

## Growth

{_growth()}

Of one backward pass by CG, the number of steps being nearly the same at all sizes ([Scale](scale.md) has all of them).

## Where it falls short

{_short(results)}

{_others(results, others)}

Other comparisons: [neural ODEs](ode-speed.md) with torchdiffeq and diffrax, [Riccati equations](control-speed.md) with SciPy.
"""


# What was tried: its name in the results of `ablation`, its gain as predicted, and whether it was kept if that is no yes.
_TRIED = (
    (
        "the product p ↦ J p traced; what does not depend on p once a point",
        "traced",
        "3.3 to 4.7; convolutions, GPU 57",
        "",
    ),
    ("the trace kept under code, numbers and shapes, its tensors as inputs", "", "the 0.1 s of tracing, each time", ""),
    (
        "what is left simplified: chains and sums of elementwise products are one, their coefficient once, numbers as numbers",
        "simplified",
        "-",
        "",
    ),
    ("gᵀ ∂F/∂θ traced along with it", "pulled", "-", ""),
    ("all columns of J as one batched product, up to 128 unknowns", "columns", "-", ""),
    ("the traced operations compiled: TorchScript on a CPU, CUDA graphs on a GPU", "compiled", "2.2 to 2.8; on a GPU 4", ""),
    ("the whole solve and gᵀ ∂F/∂θ as one function: one launch, one look at its result", "at once", "-", ""),
    ("a trace checked by autograd at one of ten solves, by its own products in between", "checked now and then", "-", ""),
    (
        "convolutions by a kernel for few channels, in float64 by torch's matrix products (GPU); by strips of the image (CPU)",
        "convolutions",
        "GPU 57; CPU 1.3",
        "",
    ),
    ("late products of a solve in float64 made in float32, the answer checked in float64 (CPU)", "single", "1.3 to 2", ""),
    ("numbers of a report taken apart when it is read", "reports", "-", ""),
    (
        "a good answer judged by one function, the size of F and the curvature; its factors of J kept for the backward pass",
        "glance",
        "-",
        "",
    ),
    ("whole solves as one function for numbers of steps that come again and again, not for each new one", "", "-", ""),
    ("numbers of a step of CG in three kernels in place of thirty (GPU)", "fused", "-", ""),
    ("numbers of a step of CG as numbers of Python, for one problem on a CPU", "numbers", "-", ""),
    ("batches on a CPU by CG, and not directly, from 2¹⁴ numbers in J on", "few direct", "-", ""),
    ("inner products of GMRES with its basis as x Vᵀ and not as V x", "rows", "-", ""),
    ("a vector times a matrix that no cache holds, read at the speed of the memory (CPU)", "matrices", "-", ""),
    (
        "the same function compiled by Inductor, torch.compile's code generator, up to 2¹⁸ numbers (CPU)",
        "inductor",
        "1.4 on a GPU",
        'for those who ask, `product="compile"`: it takes a C++ compiler and seconds a layer; not tried on a GPU',
    ),
    ("pipelined CG, one reduction a step", "", "-", "no, not tried: on one device a reduction is no message"),
)


def _tried(results: dict[str, Any]) -> str:
    rows = [[what, predicted, _gains(name, results), kept or "yes"] for what, name, predicted, kept in _TRIED]
    return (
        tables.markdown(["what", "predicted gain", "measured gain", "kept"], rows)
        + """

*Measured gain*: the backward pass without it over the backward pass with it, everything else being there, on the problems where
it makes a difference of 10 % or more (`make bench ARGS="--only ablation"`; of Inductor, the column "torchdil, compiled" above;
of the judged answer, forward and backward pass together, given the solution);
"-": not measured, or nowhere that much. Below 1: there it costs time."""
    )


def _gains(name: str, results: dict[str, Any]) -> str:
    """On how many problems it pays, and how much."""
    spans = []
    for where, suffix in (("CPU", ""), ("H200", "_gpu")):
        cases = results.get(f"ablation{suffix}", {"cases": []})["cases"]
        # Without the columns nothing is at once either: what is theirs is the rest.
        shared = "at once" if name == "columns" else name
        gains = [one["gains"][name] / (one["gains"][shared] if shared != name else 1) for one in cases if name in one["gains"]]
        if name == "inductor":
            ratios = [one["ratios"].get("compiled") for one in results.get(f"peers{suffix}", {"cases": []})["cases"]]
            gains = [1 / ratio["backward"] for ratio in ratios if ratio]
        if felt := [gain for gain in gains if abs(gain - 1) >= FELT]:
            span = f"{min(felt):.2g}" + (f" to {max(felt):.2g}" if len(felt) > 1 else "")
            spans.append(f"{span} ({where}, {len(felt)} of {len(gains)} problems)")
    return "; ".join(spans) or "-"


def _growth() -> str:
    return tables.markdown(["where", "layer", "D_y", "time a step ~ D_y^", "memory ~ D_y^"], _growth_rows())


def _growth_rows() -> list[list[str]]:
    """Exponents of time a step and memory over D_y, from the records of the experiment `scale`."""
    rows = []
    for line in SCALE.read_text().splitlines():
        record = json.loads(line)
        config = record["config"]
        if config["sweep"] == "parameters":
            continue
        largest = 10**7 if config["device"] == "cuda" else 10**6
        found = {
            point["unknowns"]: point["cg"] for point in record["metrics"]["cells"] if point["unknowns"] in (10**4, largest)
        }
        if len(found) < 2:
            continue
        first, last = found[10**4], found[largest]
        decades = math.log10(largest) - 4
        time = math.log10(last["seconds"] / last["steps"] / (first["seconds"] / first["steps"])) / decades
        memory = math.log10(last["peak"] / first["peak"]) / decades
        where = "H200" if config["device"] == "cuda" else "CPU, one thread"
        what = "10⁴ parameters" if config["sweep"] == "unknowns" else "ten parameters for each unknown"
        rows.append([where, what, f"10⁴ to 10{'⁷' if largest == 10**7 else '⁶'}", f"{time:.2f}", f"{memory:.2f}"])
    return rows


def _origin(results: dict[str, Any]) -> str:
    lines = []
    for name, found in results.items():
        versions: dict[str, str] = {}
        for one in found["cases"]:
            for system in one["systems"].values():
                versions |= system.get("versions", {})
        at = ", ".join(f"{package} {version}" for package, version in sorted(versions.items()))
        machine = found["machine"]
        where = f"{machine['cpu']}, 1 thread" if machine["device"] == "cpu" else "NVIDIA H200"
        lines.append(f"`benchmarks/results/{name}.json` ({where}, seed {machine['seed']}; {at})")
    return (
        'Written by `make bench ARGS="--only peers --torch-python ... --jax-python ..."` from ' + "; ".join(lines) + ". Add "
        "`--check` to compare with these results instead of replacing them."
    )


def _part(name: str, results: dict[str, Any]) -> str:
    on_gpu = results["machine"]["device"] == "cuda"
    there = [system for system in NAMES if any(system in one["ratios"] for one in results["cases"])]
    blocks = [f"## {WHERE[name]}", "Time of the backward pass over that of torchdil: above 1, torchdil is faster."]
    headings = [
        "problem, unknowns",
        *(NAMES[system] for system in there),
        "over the limit",
        "torch's part",
        *(["torchdil, ms"] if on_gpu else []),
    ]
    rows = []
    for one in results["cases"]:
        ours = one["systems"][OURS]["backward"]
        limit = "-" if _direct(one) else f"{_over(one):.2f} ({one['limit']['steps']} steps)"
        part = f"{100 * _floor(one) / ours['median']:.0f} %" if _floor(one) else "-"
        row = [one["label"], *(_cell(one, system, "backward") for system in there), limit, part]
        rows.append([*row, *([f"{ours['median']:.2f}"] if on_gpu else [])])
    blocks.append(tables.markdown(headings, rows))
    blocks.append(
        "*Over the limit*: the backward pass over the steps of its Krylov method times one product as traced, made alone; the "
        "direct solves of few unknowns have no steps; below 1 where late products are made in float32. *Torch's part*: the "
        "backward pass of a layer that has its answers at "
        "hand and does nothing, over that of torchdil. What cannot be timed: "
        + "; ".join(f"{NAMES[system]}: {reason}" for system, reason in _failures(results).items())
        + "."
    )
    # What has changed since, where it was not measured again.
    blocks += [f"{one['label']}: {one['note']}" for one in results["cases"] if "note" in one]
    blocks.append("Forward and backward, given the solution (`both`):")
    rows = [[one["label"], *(_cell(one, system, "both") for system in there)] for one in results["cases"]]
    blocks.append(tables.markdown(["problem, unknowns", *(NAMES[system] for system in there)], rows))
    compiled = []
    for system in (OURS, *JAX):
        times = [one["systems"].get(system, {}).get("compile_seconds") for one in results["cases"]]
        if known := [seconds for seconds in times if seconds is not None]:
            compiled.append(f"{NAMES.get(system, OURS)} {min(known):.2g} to {max(known):.2g}")
    blocks.append(f"Seconds to trace or to compile, once a layer, the first with its imports: {'; '.join(compiled)}.")
    return "\n\n".join(blocks)


def _cell(one: dict[str, Any], system: str, what: str) -> str:
    found = one["systems"].get(system, {})
    if "wrong gradient" in found.get("error", ""):
        return found["error"]
    if system not in one["ratios"]:
        return "-"
    # The spread of a ratio from the quartiles of both.
    (low, high), (our_low, our_high) = found[what]["quartiles"], one["systems"][OURS][what]["quartiles"]
    ratio = one["ratios"][system][what]
    spread = math.exp(0.5 * math.hypot(math.log(high / low), math.log(our_high / our_low)))
    return f"{tables.short(ratio)} ±{100 * (spread - 1):.0f}%"


def _direct(one: dict[str, Any]) -> bool:
    """Whether the system was solved without steps."""
    return bool(one["limit"]["method"].startswith("Dense"))


def _over(one: dict[str, Any]) -> float:
    """The backward pass over its products."""
    return float(one["systems"][OURS]["backward"]["median"] / one["limit"]["median"])


def _floor(one: dict[str, Any]) -> float:
    """Torch's own part of a backward pass; 0: not measured."""
    return float(one.get("floor", {}).get("median", 0.0))


def _at_best(one: dict[str, Any]) -> float:
    """The backward pass over the least that it can take in torch, 1 where that is more; 0: not known."""
    least = _floor(one) + (0.0 if _direct(one) else one["limit"]["median"])
    return max(1.0, one["systems"][OURS]["backward"]["median"] / least) if least else 0.0


def _failures(results: dict[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in results["cases"]:
        for system, answer in one["systems"].items():
            if "error" in answer and "wrong gradient" not in answer["error"]:
                found[system] = answer["error"].split(": ", 1)[-1]
    return found


def _gain(results: dict[str, Any]) -> str:
    spans = []
    for name, found in results.items():
        ratios = [one["ratios"]["untraced"]["backward"] for one in found["cases"] if "untraced" in one["ratios"]]
        if ratios:
            spans.append(f"{min(ratios):.1f} to {max(ratios):.1f} ({WHERE[name]})")
    return ", ".join(spans)


# The goals: of the backward pass, at least so many times as fast as a peer.
GOALS = {
    "peers": {"torch": 3.0, "jax": 1.0, "small": 0.5, "experts": 1.0},
    "peers_gpu": {"torch": 5.0, "jax": 1.0, "small": 1.0, "experts": 4.0},
}


def goal(name: str, one: dict[str, Any], system: str) -> float:
    """What a ratio is to be at least."""
    if system in TORCH:
        return GOALS[name]["torch"]
    small = one["problem"]["name"] == "energy" and one["problem"]["unknowns"] < 10**4 and not one["problem"]["samples"]
    return GOALS[name]["small" if small else "experts" if one["problem"]["name"] == "experts" else "jax"]


def _short(results: dict[str, Any]) -> str:
    blocks = []
    for name, found in results.items():
        missed, met = [], 0
        for one in found["cases"]:
            for system in (*TORCH, *JAX):
                ratio = one["ratios"].get(system)
                if ratio is None or (one["problem"]["name"] == "tiny" and system in JAX):
                    continue
                wanted, reached = goal(name, one, system), ratio["backward"]
                if reached >= wanted:
                    met += 1
                    continue
                most = f", {tables.short(reached * _at_best(one))} at best" if _at_best(one) else ""
                missed.append(f"- {one['label']} against {NAMES[system]}: {tables.short(reached)} (goal {wanted:g}{most})")
        listed = "\n".join(missed or ["- none"])
        blocks.append(f"{WHERE[name]}: {met} of {met + len(missed)} goals are met. Missed:\n\n{listed}")
        blocks += _of_products(found)
    blocks.append(
        "*At best*: what the ratio would be if the backward pass took no longer than its products and torch's own part of it."
        " A goal beyond that is out of reach for any layer of torch on that machine. On the CPU a call of Python costs more "
        "than a compiled solve for few unknowns; a matrix that the caches hold times a vector takes the BLAS of torch longer "
        "than that of JAX; and a gradient as large as a matrix of weights costs fresh memory, as much as several products. On"
        " the GPU a solve is one launch, but of some twenty kernels a step, where XLA makes a few."
    )
    return "\n\n".join(blocks)


def _of_products(results: dict[str, Any]) -> list[str]:
    """How much faster JAX multiplies, if it does."""
    measured = results.get("products", {})
    if not {"torch", "jax"} <= measured.keys():
        return []
    ratio, size = measured["torch"]["median"] / measured["jax"]["median"], measured["size"]
    if ratio < 1 + FELT:
        return []
    return [
        f"A product of two matrices of {size} x {size} in float64 takes torch {ratio:.2g} times as long here as it takes JAX, "
        "and no layer can make up for that where products of matrices are what there is to do: batches, equilibria."
    ]


def _others(results: dict[str, Any], others: dict[str, Any]) -> str:
    """The goals that are no ratio to a peer."""
    rows = []
    for name, found in results.items():
        for ratios in (one["ratios"] for one in found["cases"] if "handwritten" in one["ratios"]):
            what = "forward and backward, given the solution, over code written by hand for the tiny problem"
            reached = tables.short(1 / ratios["handwritten"]["both"])
            if "compiled" in ratios:
                reached += f"; compiled {tables.short(ratios['compiled']['both'] / ratios['handwritten']['both'])}"
            rows.append([WHERE[name], what, "<= 3", reached])
        for one in found["cases"]:
            if one["problem"]["unknowns"] * max(1, one["problem"]["samples"]) >= 10**5:
                what = f"backward pass over the products of CG, {one['label']}, with gᵀ ∂F/∂θ and torch's part"
                rows.append([WHERE[name], what, "<= 1.05" if name == "peers_gpu" else "<= 1.10", f"{_over(one):.2f}"])
    for energy in others["core"]["scale"]:
        what = f"CG over its products, {energy['energy']}, {energy['unknowns']:,} unknowns"
        rows.append(["CPU, one thread", what, "<= 1.10", f"{energy['loop_over_products']:.2f}"])
    for where, layer, unknowns, *exponents in _growth_rows():
        rows.append([where, f"growth of time and memory with D_y, {unknowns}, {layer}", "<= 1.05", ", ".join(exponents)])
    table = tables.markdown(["where", "what", "goal", "reached"], rows)
    return f"""Goals that are no ratio to a peer:

{table}

Besides its product a step of CG reads or writes twelve vectors in any implementation, and fourteen here, where pᵀF is noted for
the estimated error of y. Total variation has the cheapest product of the three, so this shows most there."""


def figure(results: dict[str, Any]) -> Any:
    """For each device: ratios of all problems, and the time of the energy against its unknowns."""
    from matplotlib.figure import Figure

    drawing = Figure(figsize=(12, 4.4 * len(results)), layout="constrained")
    axes = drawing.subplots(len(results), 2, squeeze=False, width_ratios=(3, 2))
    for (left, right), (name, found) in zip(axes, results.items(), strict=True):
        labels = [one["label"] for one in found["cases"]]
        for system, colour in COLOURS.items():
            points = [(i, one["ratios"][system]["backward"]) for i, one in enumerate(found["cases"]) if system in one["ratios"]]
            if points:
                left.plot(*zip(*points, strict=True), "o", color=colour, label=NAMES[system], markersize=7)
        left.axhline(1, color="#555555", linewidth=1)
        left.set_yscale("log")
        left.set_xticks(range(len(labels)), labels, rotation=25, ha="right")
        left.set_ylabel("time over torchdil's")
        left.set_title(f"Backward pass, {WHERE[name]}: above the line torchdil is faster", fontsize=11)
        left.grid(axis="y", alpha=0.3)
        low, high = left.get_ylim()
        left.set_ylim(low, high * (high / low) ** 0.2)  # room for the legend
        left.legend(ncols=4, fontsize=8, loc="upper left")
        single = [one for one in found["cases"] if one["problem"]["name"] == "energy" and not one["problem"]["samples"]]
        if single:
            _against_unknowns(right, single)
    return drawing


def _against_unknowns(ax: Any, cases: list[dict[str, Any]]) -> None:
    """Times of the backward pass, and of its products alone, over that of torchdil with the fewest unknowns."""
    unit = cases[0]["systems"][OURS]["backward"]["median"]
    for system, colour in (COLOURS | {OURS: "#000000"}).items():
        there = [one for one in cases if "backward" in one["systems"].get(system, {})]
        times = [one["systems"][system]["backward"]["median"] / unit for one in there]
        if there:
            ax.plot([one["problem"]["unknowns"] for one in there], times, "o-", color=colour, markersize=4, linewidth=1.2)
    krylov = [one for one in cases if not _direct(one)]
    limits = [one["limit"]["median"] / unit for one in krylov]
    ax.plot([one["problem"]["unknowns"] for one in krylov], limits, "k:", label="limit: steps x product")
    ax.plot([], [], "ko-", markersize=4, linewidth=1.2, label="torchdil")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("unknowns of the energy")
    ax.set_ylabel(f"time over torchdil's at {cases[0]['problem']['unknowns']}")
    ax.set_title("Time against the number of unknowns", fontsize=11)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=8)
