"""Runtime of neural ODEs: the experiment and the benchmark measure what they say, and their pages show their results."""

import io
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchdiffeq")

import torchdil as dil
from benchmarks import ode, tables
from experiments import page, runner, runtime, runtime_page

# Relative: two ways to the same number in float64.
ROUNDING = 1e-10
# Relative: what LSODA at 1e-9 leaves.
REFERENCE = 1e-6
# Points; 10 pixels where the figure is as wide as a phone.
SMALLEST_LETTERS = 9

DOCS = Path(__file__).parent.parent / "docs"
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"
CONFIG = runtime.Config.preset("smoke")


@pytest.fixture(scope="module")
def records():
    return runner.execute(runner.Task("runtime", CONFIG, (0,)))


@pytest.fixture(scope="module")
def smoke(records):
    return page.only_run(records)


def network(state=4, scale=1.0, dissipative=False):
    f = runtime.Dynamics(state, scale, dissipative)
    t = CONFIG.step_size * torch.arange(CONFIG.steps + 1, dtype=torch.float64)
    y0 = f.initialise(seed=1).requires_grad_()
    return f, y0, t, [y0, *f.parameters()]


# --- the experiment ----------------------------------------------------------------------------------------------------------


def test_jacobians_and_eigenvalues_are_those_of_f():
    for state in (3, 40):  # fewer and more than hidden units
        f = network(state)[0]
        y = torch.randn(5, state, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        J = torch.stack([torch.autograd.functional.jacobian(lambda y, f=f: f(None, y), row) for row in y])
        torch.testing.assert_close(f.jacobians(y), J, rtol=ROUNDING, atol=ROUNDING)
        assert f.largest_eigenvalue(y) == pytest.approx(float(torch.linalg.eigvals(J).abs().max()), rel=ROUNDING)


def test_dissipative_networks_contract_and_get_stiffer_with_the_square_of_the_scale():
    stiffness = []
    for scale in (1.0, 3.0):
        f = network(10, scale, dissipative=True)[0]
        at = torch.zeros(1, 10, dtype=torch.float64)
        values = torch.linalg.eigvals(f.jacobians(at)).real
        assert values.max() < 0
        stiffness.append(f.largest_eigenvalue(at))
    assert 4 < stiffness[1] / stiffness[0] < 12  # 9, but for the biases, which grow too


def test_reference_is_the_solution_of_the_ode():
    f, y0, t, _ = network()
    fine = dil.odeint(f, y0, t, method="gl6", options={"substeps": 4}, batch_dims=1)
    torch.testing.assert_close(runtime.reference(f, y0, t), fine.detach(), rtol=REFERENCE, atol=REFERENCE)


@pytest.mark.parametrize("name", ["default", "euler", "dopri5"])
def test_own_gradient_is_that_of_backpropagation(name):
    f, y0, t, inputs = network()
    h = CONFIG.step_size
    if name == "default":
        y = dil.odeint(f, y0, t, batch_dims=1).detach()
        # Newton's step from the answer, with a graph: the discrete gradient by autograd alone.
        states = [y0]
        eye = torch.eye(4, dtype=torch.float64)
        for n in range(1, len(t)):
            residual = y[n] - states[-1] - h * f(t, y[n])
            states.append(y[n] - torch.linalg.solve(eye - h * f.jacobians(y[n]), residual.unsqueeze(2)).squeeze(2))
        loss = torch.stack(states).square().sum()
    else:
        y = runtime.torchdiffeq.odeint(f, y0, t, rtol=CONFIG.tolerance, atol=CONFIG.tolerance, method=name)
        loss = y.square().sum()
    expected = torch.cat([g.flatten() for g in torch.autograd.grad(loss, inputs)])
    own = runtime.own_gradient(CONFIG, f, name, y.detach(), y0, t, inputs)
    torch.testing.assert_close(own, expected, rtol=1e-8, atol=1e-8)


def test_acceptance_is_the_test_of_the_error():
    f, y0, t, _ = network()
    y = dil.odeint(f, y0, t, batch_dims=1).detach()
    assert runtime.accepted(CONFIG, f, y)
    moved = y.clone()
    moved[2] += 3 * CONFIG.tolerance * (1 + y[2].abs())
    assert not runtime.accepted(CONFIG, f, moved)


def test_a_call_beyond_its_time_has_failed():
    f, y0, t, inputs = network()
    _, outcome = runtime.timed(replace(CONFIG, seconds=0.0), f, runtime.METHODS["dopri5"], y0, t, inputs)
    assert outcome == {"failed": "time"}
    _, outcome = runtime.timed(CONFIG, f, runtime.METHODS["dopri5"], y0, t, inputs)
    assert outcome.keys() == {"y", "gradient"}


def test_every_initialisation_is_timed_or_counted_as_failed(smoke):
    variants = [variant for family in runtime.families(CONFIG).values() for variant in family]
    assert len(smoke["groups"]) == len(variants)
    for group in smoke["groups"]:
        assert group["methods"].keys() == runtime.METHODS.keys()
        for found in group["methods"].values():
            assert len(found["forward"]) + sum(found["failed"].values()) == CONFIG.initialisations
            assert all(time > 0 for way in ("forward", "backward") for time in found[way])


def test_gradients_by_the_theorem_are_exact_and_those_of_adjoints_are_not(smoke):
    for group in smoke["groups"]:
        for name in ("default", "naive", "euler"):
            assert all(error < 1e-8 for error in group["methods"][name]["gradient_error"])
        assert all(error < 1e-4 for error in group["methods"]["cg"]["gradient_error"])
    errors = [error for group in smoke["groups"] for error in group["methods"]["dopri5"]["gradient_error"]]
    assert max(errors) > 1e-6


# --- its page ----------------------------------------------------------------------------------------------------------------


def synthetic(power, factor):
    """Results whose verdicts are known: times of `factor` and of stiffness^power."""
    times = {"cg": 1.0, "naive": 1.0, "default": 1.0, "adjoint": factor, "dopri5": factor, "euler": 1.0, "euler_ift": 1.0}
    groups = []
    for family, stiffness in (("size", (0.1, 0.1)), ("weights", (0.1, 0.2)), ("stiffness", (1.0, 10.0))):
        for number, s in enumerate(stiffness):
            methods = {
                name: {
                    "failed": {},
                    "stiffness": [s, s],
                    "forward": [time, time],
                    "backward": [time * s**power] * 2,
                    "error": [0.1, 0.1],
                    "gradient_error": [None, 1e-9],
                }
                for name, time in times.items()
            }
            groups.append({"family": family, "state": 20 + number, "scale": 1.0 + number, "stiffness": [s, s]})
            groups[-1]["methods"] = methods
    return {"config": runner.plain(CONFIG), "groups": groups}


def as_records(result):
    return [{"config": result["config"], "metrics": {"groups": result["groups"]}}]


def test_verdicts_follow_from_the_numbers():
    def holds(result):
        return [row["holds"] for row in runtime_page.claims(result)]

    assert holds(synthetic(0.0, 20.0)) == ["yes"] * 14
    assert holds(synthetic(0.5, 20.0)) == ["yes"] * 9 + ["no"] * 5
    assert holds(synthetic(0.0, 0.5)) == ["no"] * 9 + ["yes"] * 5
    mixed = synthetic(0.0, 20.0)
    mixed["groups"][-1]["methods"]["dopri5"]["forward"] = [0.1, 0.1]
    assert holds(mixed)[:3] == ["in 5 of 6 groups"] * 3
    assert runtime_page.slope(synthetic(0.5, 1.0), "backward", "cg") == pytest.approx(0.5)


@pytest.mark.parametrize(
    "power, factor, holds",
    [(0.0, 20.0, "yyyy"), (0.5, 20.0, "yyyn"), (0.0, 0.5, "nnny")],
)
def test_verdicts_on_the_paper_are_those_of_its_methods(power, factor, holds):
    found = [verdict.verdict for verdict in runtime_page.verdicts(as_records(synthetic(power, factor)))]
    expected = [{"y": "reproduced", "n": "not reproduced"}[letter] for letter in holds]
    assert found == [*expected, *expected, *["new"] * 4]  # IFT-CG, IFT-naive, and the default, which is not in the paper


def test_failures_are_shown():
    result = synthetic(0.0, 20.0)
    for group in result["groups"]:
        empty = {key: [] for key in ("stiffness", "forward", "backward", "error", "gradient_error")}
        group["methods"]["dopri5"] = empty | {"failed": {"time": 2}}
    assert "12 (DOPRI5, adjoint)" in runtime_page.answer(as_records(result))
    assert [row["holds"] for row in runtime_page.claims(result)].count("not measured") == 7
    assert "2 (time)" in {row["failed"] for row in runtime_page.rows(result, "size")}
    pytest.importorskip("matplotlib")
    texts = [text.get_text() for text in runtime_page.figure(result, "size").axes[0].texts]
    assert texts == ["2 failed"] * 2


def test_figures_have_letters_of_a_readable_size(records):
    matplotlib = pytest.importorskip("matplotlib")
    for fig in runtime_page.figures(records).values():
        fig.savefig(io.StringIO(), format="svg")
        sizes = [text.get_fontsize() for text in fig.findobj(matplotlib.text.Text) if text.get_text()]
        assert fig.get_figwidth() == page.WIDTH and min(sizes) >= SMALLEST_LETTERS


def test_section_is_self_contained(records):
    pytest.importorskip("matplotlib")
    text = runtime_page.section(records).body
    assert text.count("<figure>") == 3 and text.count("<table>") == 4
    assert "<script" not in text and 'src="http' not in text


def test_page_is_that_of_the_results():
    committed = runner.selected("runtime", runner.Options("paper", runner.COMMITTED))
    assert runtime_page.text(committed) == (DOCS / "runtime.md").read_text()


# --- the benchmark -----------------------------------------------------------------------------------------------------------


def test_benchmark_runs_and_its_numbers_fit_together():
    result = json.loads(json.dumps(ode.run(ode.Config.preset("smoke"))))
    (case,) = result["cases"]
    assert case["systems"].keys() == ode.SYSTEMS.keys()
    for name, system in case["systems"].items():
        assert system["both"]["calls"] == system["forward"]["calls"] > 0
        if name in ode.BACKWARD_EULER:
            assert system["residual"] < result["config"]["tolerance"] and system["gradient_error"] < ode.EXACT
        if name != "torchdil":
            both = system["both"]["median"] / case["systems"]["torchdil"]["both"]["median"]
            assert case["ratios"][name]["both"] == pytest.approx(both, rel=1e-2, abs=1e-3)
    assert all(name in tables.ode({"ode": result}) for name in ode.SYSTEMS)


def test_backward_time_is_the_difference_in_each_round():
    rounds = {"forward": [[(1.0,), (2.0,)], [(5.0,)]], "both": [[(3.0, 1.0)], [(9.0, 2.0), (11.0, 3.0)]]}
    summary = ode._summary(rounds)
    assert summary["backward"]["median"] == 1e3 * (1.5 + 5.0) / 2
    assert summary["forward"]["median"] == 2e3 and summary["both"]["calls"] == 3
    assert summary["backward_by_clock"]["median"] == 2e3


def test_benchmark_rejects_what_did_not_solve_its_steps(monkeypatch):
    monkeypatch.setitem(ode.SYSTEMS, "torchdil", lambda f, y0, t: dil.odeint(f, y0, t, method="euler", batch_dims=1))
    result = ode.run(ode.Config.preset("smoke"))
    (systems,) = [case["systems"] for case in result["cases"]]
    assert {name for name, system in systems.items() if "rejected" in system} == {"torchdil"}
    assert "torchdil (rejected)" in tables.ode({"ode": result})


def test_benchmark_judges_the_residual_of_the_steps():
    problem = ode.Problem(ode.Config.preset("smoke"), 2, 3, seed=0)
    states = torch.zeros(problem.config.steps, 3, 2)
    f = problem.f.network.double()
    y = torch.cat((problem.y0.detach().unsqueeze(0), states)).double()
    with torch.no_grad():
        expected = max(float((y[n + 1] - y[n] - 0.1 * f(y[n + 1])).abs().max()) for n in range(len(states)))
    assert math.isclose(problem.residual(states), expected, rel_tol=ROUNDING)


def test_page_of_the_benchmark_is_that_of_the_results():
    results = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("ode*.json")}
    assert tables.ode(results) == (DOCS / "ode-speed.md").read_text()
    for name, found in results.items():
        assert {"seed", "torchdil", "torch", "cpu", "threads"} <= found["machine"].keys()
        expected = ode.Config.preset("full", "cuda" if name == "ode_gpu" else "cpu")
        assert found["config"] == json.loads(json.dumps(asdict(expected)))
        assert not [system for case in found["cases"] for system in case["systems"].values() if "rejected" in system]
