"""The paper's Table 1: neural ODEs dy/dt = f(y; θ) that forecast a motion, trained by five methods and a control.

The network f is trained on short pieces of a sequence and judged by a free roll-out over the pieces behind it (Van der Pol,
Spiral) or over new sequences (CMU Walking, where an encoder makes the state y of three frames and a decoder frames of states).
The methods differ in the solver (DOPRI5, forward or backward Euler, one step a frame) and in the gradient: the continuous
adjoint, or the exact one of the discrete solution by the implicit function theorem, solved densely ("naive") or by CG. The
control, forward Euler with its exact gradient, tells exactness from implicitness. Runs of a cell are trained side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from experiments.forecast import BACKWARD, CG, DOPRI5, FORWARD, METHODS, NAIVE, Training

TASKS = ("vdp", "spiral", "cmu")
# What the paper leaves open or says of a task; a field of `Config` that is None takes its value from here.
PROTOCOL: dict[str, dict[str, Any]] = {
    "vdp": {
        "runs": 20,
        "iterations": 2000,
        "rate": 3e-3,
        "validate_every": 25,
        "warm_up": 200,
        "hidden": (500,),
        "together": 4,
    },
    "spiral": {
        "runs": 20,
        "iterations": 2000,
        "rate": 1e-2,
        "batch": 20,
        "window": (5, 5),
        "validate_every": 50,
        "warm_up": 500,
        "hidden": (50,),
        "together": 20,
    },
    "cmu": {
        "runs": 10,
        "iterations": 2500,
        "rate": 3e-3,
        "last_rate": 0.02,
        "clip": 10.0,
        "batch": 16,
        "window": (30, 100),
        "validate_every": 50,
        "warm_up": 0,
        "hidden": (30, 30),
        "given": 3,
        "latent": 6,
        "together": 1,
    },
}
COMMON: dict[str, Any] = {"last_rate": 1.0, "clip": None, "batch": None, "window": (1, 1), "given": 1, "latent": None}
# Where side by side is faster on CMU Walking, as `experiments.table1_speed` measures it.
SIDE_BY_SIDE = {("cmu", DOPRI5): 10, ("cmu", CG): 10}
# Of `Config.ablations`: CMU Walking, whose iterations take longest, with these methods only, for a short look.
FEWER, FEW = "fewer", (BACKWARD, NAIVE)
# Of an ablation whose runs take minutes.
FEW_RUNS = 5


@dataclass(frozen=True)
class Config:
    """One cell of the table; the fields that are None are those of the task in `PROTOCOL`, and `variants` fills them in.

    Attributes:
        task: one of `TASKS`.
        method: one of `METHODS`.
        ablations: which cells `variants` makes; True: the table and the ablations, False: the table, `FEWER`: `FEW` methods of
            CMU Walking and the rest of the table. A cell itself has False.
        runs: seeds 0 .. runs - 1.
        together: how many seeds are trained side by side at most.
        iterations: of Adam.
        rate, last_rate: the learning rate, and the share of it that a cosine ends at (1: constant).
        clip: the largest norm of a gradient.
        batch: windows an iteration, drawn at random; None: all there are.
        window: steps predicted in a window of training, at first and in the end.
        stages, growth: how many lengths windows take on the way, and the share of the iterations that it takes.
        validate_every, warm_up: iterations between validations, and before the first model that may be chosen.
        hidden: units of the hidden layers of every network.
        given: frames that are given, to make the first state of.
        latent: size of the state behind an encoder; None: the state is the frame.
        a11: of the Spiral. The paper prints -1; in trial runs forward Euler was the best with it, the reverse of its table.
        substeps: solver steps a frame.
        adjoint: how the adjoint knows y on its way back: "reverse" (integrated) or "stored".
        on_failure: what becomes of the gradient of a sample whose solve failed, as in `dil.odeint`.
        rtol, atol, max_steps: of DOPRI5; steps a frame.
        dtype: "float32" or "float64".
        device: where to train.
        data: folder of the CMU data; None: the usual places.
    """

    task: str | None = None
    method: str | None = None
    ablations: bool | str = False
    runs: int | None = None
    together: int | None = None
    iterations: int | None = None
    rate: float | None = None
    last_rate: float | None = None
    clip: float | None = None
    batch: int | None = None
    window: tuple[int, int] | None = None
    stages: int = 8
    growth: float = 0.5
    validate_every: int | None = None
    warm_up: int | None = None
    hidden: tuple[int, ...] | None = None
    given: int | None = None
    latent: int | None = None
    a11: float = -0.1
    substeps: int = 1
    adjoint: str = "reverse"
    on_failure: str = "ignore"
    rtol: float = 1e-5
    atol: float = 1e-6
    max_steps: int = 2000
    dtype: str = "float64"
    device: str = "cpu"
    data: str | None = None

    @staticmethod
    def preset(name: str) -> Config:
        smoke = Config(runs=2, iterations=4, validate_every=2, warm_up=0, window=(2, 3), hidden=(8,))
        # Windows keep their first length: the library prepares for each.
        quick = Config(runs=2, iterations=40, validate_every=20, warm_up=20, growth=1e6, ablations=FEWER)
        return {"smoke": smoke, "quick": quick, "paper": Config(ablations=True)}[name]


def settled(config: Config, **changes: Any) -> Config:
    """The same with the values of its task's protocol in place of None."""
    config = replace(config, **changes)
    if config.task not in TASKS or config.method not in METHODS:
        raise ValueError(f"task must be one of {TASKS} and method one of {METHODS}, got {config.task!r}, {config.method!r}.")
    protocol = COMMON | PROTOCOL[config.task]
    if (config.task, config.method) in SIDE_BY_SIDE:
        protocol = protocol | {"together": SIDE_BY_SIDE[config.task, config.method]}
    return replace(config, **{name: value for name, value in protocol.items() if getattr(config, name) is None})


def variants(config: Config) -> list[Config]:
    """The cells of the table, and the ablations: shorter steps, a stored trajectory for the adjoint, the Spiral as printed."""
    cells = [(task, method, {}) for task in TASKS for method in METHODS]
    if config.ablations == FEWER:
        cells = [cell for cell in cells if cell[0] != "cmu" or cell[1] in FEW]
    elif config.ablations:
        cells += [("vdp", method, {"substeps": 4, "runs": FEW_RUNS}) for method in (FORWARD, BACKWARD, NAIVE)]
        cells += [("vdp", BACKWARD, {"adjoint": "stored", "runs": FEW_RUNS})]
        cells += [("spiral", method, {"a11": -1.0}) for method in (FORWARD, BACKWARD, CG)]
    return [settled(config, task=task, method=method, ablations=False, **changes) for task, method, changes in cells]


def run(config: Config, seed: int) -> dict[str, Any]:
    """One run."""
    return run_together(config, [seed])[0]


def run_together(config: Config, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """The runs of these seeds, side by side.

    A run has the mean squared errors of the roll-outs: "test" of the model with the best validation, "validation" its own,
    "last" the test of the last model; with several validation sequences "test_by_median", where the median over them chooses.
    None: there is no such model, or its roll-out failed. "curve" has them at every validation, with the seconds of training a
    run until then; "failed_forward" and "failed_backward" count the samples whose solve failed in training.
    """
    training = Training(settled(config), seeds)
    for iteration in range(training.config.iterations):
        training.step(iteration)
        done = iteration + 1
        over = done == training.config.iterations or not training.alive.any()
        if over or done % training.config.validate_every == 0:
            training.validate(done)
        if over:
            break
    return [training.metrics(k) for k in range(len(seeds))]
