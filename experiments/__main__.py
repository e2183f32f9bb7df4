"""`python -m experiments --preset quick`: run every experiment and write `results/index.html`."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

import torchdil as dil
from benchmarks import core, scale
from benchmarks.machine import machine
from benchmarks.tables import machine as in_words
from experiments import (
    cartpole,
    cartpole_page,
    coverage,
    coverage_page,
    faults,
    kepler,
    kepler_page,
    lqr,
    lqr_page,
    page,
    runtime,
    runtime_page,
    trust,
)

RESULTS = Path("results")
# Unknowns of the large problems, and how often they are timed.
SIZES = {"smoke": (32**2, 1), "quick": (256**2, 3), "paper": (1024**2, 5)}


def example() -> str:
    """The report of one small layer."""
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3)
    layer = dil.ArgminLayer(lambda y, x: ((y - net(x)) ** 2 + torch.cosh(y)).sum(-1), linear_solver=dil.CG(), init=(3,))
    layer(torch.randn(8, 5)).square().sum().backward()
    return str(layer.report)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments", description=__doc__)
    parser.add_argument("--preset", choices=sorted(SIZES), default="quick")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    print("gradient quality ...", flush=True)
    quality = trust.run(trust.Config.preset(options.preset), options.seed)
    print("error estimates ...", flush=True)
    estimates = coverage.run(coverage.Config.preset(options.preset), options.seed)
    print("planted faults ...", flush=True)
    planted = faults.run()
    print("Kepler's equation ...", flush=True)
    inexact = kepler.run(kepler.Config.preset(options.preset), options.seed)
    print("runtime of neural ODEs ...", flush=True)
    times = runtime.run(runtime.Config.preset(options.preset), options.seed)
    print("imitating a regulator ...", flush=True)
    regulators = json.loads(json.dumps(lqr.run(lqr.Config.preset(options.preset), options.seed)))
    print("cart-pole swing-up ...", flush=True)
    carts = json.loads(json.dumps(cartpole.run(cartpole.Config.preset(options.preset), options.seed)))
    unknowns, repeats = SIZES[options.preset]
    large = []
    for name in scale.energies(16):
        print(f"{name}, {unknowns:,} unknowns ...", flush=True)
        large.append(scale.measure(name, unknowns, repeats))
    print("batches, warm starts, preconditioners, products ...", flush=True)
    isolation, warm = core.isolation(), core.warm_start()
    rows = {"preconditioners": core.preconditioners(), "strategies": core.strategies()}
    about = machine() | {"seed": options.seed}
    results = {"machine": about, "preset": options.preset, "trust": quality, "scale": large, "isolation": isolation}
    results["faults"] = planted
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "core.json").write_text(json.dumps(results | {"warm_start": warm} | rows, indent=2) + "\n")
    (RESULTS / "kepler.json").write_text(json.dumps(inexact | {"machine": about}) + "\n")
    (RESULTS / "runtime.json").write_text(json.dumps(times | {"machine": about}) + "\n")
    (RESULTS / "lqr.json").write_text(json.dumps(regulators | {"machine": about}) + "\n")
    (RESULTS / "cartpole.json").write_text(json.dumps(carts | {"machine": about}) + "\n")
    cartpole_page.animation(carts, RESULTS / "cartpole.gif")
    sections = [
        (
            "What a layer says of its gradient",
            page.paragraph("print(layer.report) after a backward pass through eight small problems.")
            + page.preformatted(example()),
        ),
        (
            "Does the report know how wrong the gradient is?",
            page.paragraph(
                f"Medians over {quality['samples']} problems of {quality['unknowns']} unknowns, the forward solve (left) or "
                "the backward solve (right) stopped at the tolerance on the axis. The estimates come from the solvers' own "
                "numbers, without a further product."
            )
            + page.vector_graphic(trust.figure(quality))
            + page.table(quality["rows"]),
        ),
        (
            "How often is an estimated error right?",
            page.paragraph(coverage_page.answer(estimates).replace("*", ""))
            + page.vector_graphic(coverage_page.figure(estimates))
            + page.table(coverage_page.rows(estimates)),
        ),
        (
            "Whose fault is a wrong gradient?",
            page.paragraph("What check_gradient says of layers with a fault each: named is what it blames.")
            + page.table(planted),
        ),
        (
            "Kepler's equation: how exact must the inner solution be?",
            page.paragraph(
                "E(e) = argmin_u (u - e sin u - M)², and e is learned so that E(e) meets a target (the paper's Figure 1). An "
                "arrow is one step of learning at a point (e, u) that need not solve the inner problem: minus the gradient in "
                "e, a step of gradient descent on the score in u."
            )
            + page.paragraph(kepler_page.answer(inexact))
            + page.gallery(list(kepler_page.figures(inexact).values()))
            + page.table(kepler_page.field_rows(inexact))
            + page.paragraph(
                f"Inexact inner solutions in {inexact['config']['runs']} random problems: errors at the first e, and how "
                "learning fared from cold and warm starts, judged by the exact E; medians."
            )
            + page.table(kepler_page.inexact_rows(inexact)),
        ),
        (
            "How long does a neural ODE take?",
            page.paragraph(
                "The paper's Figure 2: forward and backward times of backward Euler beside DOPRI5 and forward Euler, mean ± "
                f"standard deviation over {times['config']['initialisations']} random networks with two hidden layers of "
                f"{runtime.HIDDEN}; h max|λ| says how stiff they are."
            )
            + page.paragraph(runtime_page.answer(times))
            + page.gallery(list(runtime_page.figures(times).values()))
            + page.table(runtime_page.claims(times))
            + "".join(page.table(runtime_page.rows(times, family)) for family in runtime_page.FAMILIES),
        ),
        (
            "Imitating a regulator",
            page.paragraph(
                "The paper's appendix: the dynamics of a mass-spring-damper are learned from an expert's controls alone, "
                "through the Riccati equation of the optimal regulator."
            )
            + page.paragraph(lqr_page.answer(regulators))
            + page.gallery(list(lqr_page.figures(regulators).values())[:2])
            + page.table(lqr_page.rows(regulators)),
        ),
        (
            "Cart-pole swing-up from observations",
            page.paragraph(
                "The paper's Table 2 and Figure 3: dynamics and target are learned from the states of a noisy expert, through "
                "the planning step of model predictive control (MPC_IFT), beside behavioural cloning (BC)."
            )
            + page.paragraph(cartpole_page.answer(carts))
            + page.picture(RESULTS / "cartpole.gif", "The swing-up by the expert, BC and MPC_IFT")
            + page.gallery(list(cartpole_page.figures(carts).values()))
            + "".join(page.table(cartpole_page.rows(carts, setting)) for setting in carts["settings"]),
        ),
        (
            f"A backward pass at {unknowns:,} unknowns",
            page.paragraph(
                "Peak memory beyond the forward's in vectors of the size of the unknown, and the time of the CG loop over that "
                "of its products with the Hessian alone (one thread, medians)."
            )
            + page.table(large),
        ),
        (
            "A hard sample harms no other",
            page.paragraph("One sample of the batch made ill-conditioned (10¹⁰): how much the other gradients change.")
            + page.table([isolation]),
        ),
        (
            "Warm start of the backward solve",
            page.paragraph("Products with the Hessian in a training run, from zero and from the last solution.")
            + page.table([warm]),
        ),
        ("Preconditioners", page.paragraph("Products of one backward solve by CG.") + page.table(rows["preconditioners"])),
        ("Ways to make a product", page.paragraph("Time relative to double backward.") + page.table(rows["strategies"])),
    ]
    seconds = time.perf_counter() - began
    lead = f"{in_words({'machine': about})}; preset {options.preset}, {seconds:.0f} s."
    target = RESULTS / "index.html"
    target.write_text(page.page("torchdil: differentiable implicit layers", lead, sections))
    print(f"wrote {target} in {seconds:.0f} s")


if __name__ == "__main__":
    main()
