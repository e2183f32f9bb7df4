"""Imitating a regulator: the oracle against finite differences, the methods against it, batches of runs against single ones,
and the pages of the experiment and of the benchmark against their results."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import control, tables
from experiments import lqr, lqr_page, page, runner

# Relative: two ways to the same number in float64, after a few steps of Adam.
ROUNDING = 1e-12
# Relative, of central differences of order four with steps of 3e-4.
DIFFERENCES = 1e-8
# Relative: what is asked of the loss curves in full, of the derivatives at the same point, and of the equation's solution.
CURVES, DERIVATIVES, SOLVED = 1e-6, 1e-8, 1e-12
# Points; 10 pixels where the figure is as wide as a phone.
SMALLEST_LETTERS = 9
SECONDS = 5

ROOT = Path(__file__).parent.parent
CONFIG = lqr.Config.preset("smoke")
RECORDS = runner.selected("lqr", runner.Options("paper", runner.COMMITTED))
COMMITTED = page.only_run(RECORDS)


@pytest.fixture(scope="module")
def records():
    began = time.process_time()
    found = runner.execute(runner.Task("lqr", CONFIG, (0,)))
    assert time.process_time() - began < SECONDS
    return found


@pytest.fixture(scope="module")
def smoke(records):
    return page.only_run(records)


def systems(samples=3, n=3, m=2):
    generator = torch.Generator().manual_seed(0)
    A, B, G = (torch.randn(samples, n, k, generator=generator, dtype=torch.float64) for k in (n, m, n))
    return [A, B, torch.eye(n).double() + 0.1 * (A @ A.mT), 2 * torch.eye(m).double().expand(samples, m, m), G]


def test_oracle_solves_the_equation():
    A, B, Q, R, _ = systems()
    S = lqr.AnalyticDare.apply(A, B, Q, R)
    K = lqr.gain(S, A, B, R)
    torch.testing.assert_close(S, A.mT @ S @ (A - B @ K) + Q, rtol=SOLVED, atol=SOLVED * float(S.norm()))
    assert torch.linalg.eigvals(A - B @ K).abs().max() < 1


@pytest.mark.parametrize("which", range(4), ids="ABQR")
def test_oracle_has_the_gradient_of_finite_differences(which):
    *matrices, G = systems()
    leaves = [t.clone().requires_grad_() for t in matrices]
    (gradient,) = torch.autograd.grad((lqr.AnalyticDare.apply(*leaves) * G).sum(), leaves[which])
    generator = torch.Generator().manual_seed(1)
    direction = torch.randn(matrices[which].shape, generator=generator, dtype=torch.float64)
    if which > 1:  # SciPy takes symmetric costs only
        direction = direction + direction.mT

    def loss(step):
        moved = [t + step * direction if i == which else t for i, t in enumerate(matrices)]
        return (lqr.AnalyticDare.apply(*moved) * G).sum(dim=(1, 2))

    h = 3e-4
    slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
    expected = (gradient * direction).sum(dim=(1, 2))
    torch.testing.assert_close(expected, slope, rtol=0, atol=DIFFERENCES * float(expected.abs().max()))


def test_expert_obeys_its_system_and_comes_to_rest():
    target = lqr.expert(CONFIG)
    x, u = target.states, target.controls
    assert x[:, 0].tolist() == [[0.0, 3.0]] * 3 and x.shape[1] == u.shape[1] == CONFIG.length
    torch.testing.assert_close(x[:, 1:], x[:, :-1] @ target.A.mT + u[:, :-1] @ target.B.mT, rtol=0, atol=ROUNDING)
    assert float(x[:, -1].norm()) < 1e-6


@pytest.mark.parametrize("name", lqr.METHODS)
def test_runs_of_a_batch_are_those_made_alone(name):
    target, (offsets, starts) = lqr.expert(CONFIG), lqr.draws(CONFIG, 2, seed=0)
    together = lqr.learn(CONFIG, lqr.METHODS[name], target, target.A.unsqueeze(1) + offsets, starts)
    for c, run in ((0, 1), (2, 0)):
        one = target._replace(A=target.A[c : c + 1], states=target.states[c : c + 1], controls=target.controls[c : c + 1])
        first = target.A[c : c + 1, None] + offsets[run : run + 1]
        alone = lqr.learn(CONFIG, lqr.METHODS[name], one, first, starts[:, run : run + 1])
        for loss, curve in lqr.curves(CONFIG, one, alone).items():
            expected = lqr.curves(CONFIG, target, together)[loss][:, c, run]
            torch.testing.assert_close(curve[:, 0, 0], expected, rtol=ROUNDING, atol=0)


def test_curves_are_the_losses_that_the_paper_defines():
    target, (offsets, starts) = lqr.expert(CONFIG), lqr.draws(CONFIG, 4, seed=0)
    learning = lqr.learn(replace(CONFIG, iterations=1), lqr.analytic, target, target.A.unsqueeze(1) + offsets, starts[:1])
    found = lqr.curves(CONFIG, target, learning)
    c, run = 1, 0
    A, B, K = learning.A[0, c, run].numpy(), target.B.numpy(), learning.K[0, c, run].numpy()

    def imitation(first, steps):
        x, total = target.states[c, first].numpy(), 0.0
        for k in range(steps):
            u = -K @ x
            total += np.square(u - target.controls[c, first + k].numpy()).sum()
            x = A @ x + B @ u
        return total

    sampled = np.mean([imitation(start, CONFIG.ahead) for start in starts[0, run].tolist()])
    assert float(found["sampled"][0, c, run]) == pytest.approx(sampled, rel=ROUNDING)
    assert float(found["imitation"][0, c, run]) == pytest.approx(imitation(0, CONFIG.length), rel=ROUNDING)
    assert float(found["model"][0, c, run]) == pytest.approx(float(offsets[run].norm()), rel=ROUNDING)


def test_starts_leave_room_for_the_prediction_and_perturbations_keep_their_bound():
    offsets, starts = lqr.draws(replace(CONFIG, iterations=1000), 4, seed=0)
    assert starts.min() == 0 and starts.max() == CONFIG.length - CONFIG.ahead
    assert 0.3 < offsets.abs().max() <= CONFIG.perturbation


def test_methods_agree_and_learn(smoke):
    assert len(smoke["groups"]) == len(CONFIG.dampings) * len(CONFIG.settings)
    for group in smoke["groups"]:
        methods = group["methods"]
        assert set(methods) == {*lqr.METHODS, lqr.NUDGED}
        for name, method in methods.items():
            assert method["failed_systems"] == method["warned_iterations"] == 0
            if name != lqr.NUDGED:
                assert all(run[-1] < run[0] for loss in ("model", "imitation") for run in method["curves"][loss])
            if name != lqr.REFERENCE:
                worst = [apart for runs in method["furthest_apart"].values() for apart in runs]
                assert max(worst) < ROUNDING and len(worst) == 3 * CONFIG.initialisations
            if name in lqr_page.METHODS:
                assert max(method["same_point"].values()) < ROUNDING
        # The smallest change of the start is seen, so the comparison can see differences.
        assert max(methods[lqr.NUDGED]["furthest_apart"]["model"]) > 0


def test_curves_apart_are_counted_from_the_first_iteration_on():
    apart = torch.zeros(CONFIG.iterations + 1, 2)
    apart[7, 1] = 3.0
    worst = lqr._worst(CONFIG, apart)
    assert worst.tolist() == [0.0, 3.0, 3.0, 3.0]  # after 5, 10, 15 and 20 iterations


def test_riccati_solver_does_not_fail_on_random_systems(smoke):
    for row in smoke["systems"]:
        assert row["failed"] == 0 and row["largest_error"] < SOLVED and row["largest_radius"] < 1


def test_figures_have_readable_letters_and_the_section_is_self_contained(records):
    matplotlib = pytest.importorskip("matplotlib")
    figures, text = list(lqr_page.figures(records).values()), lqr_page.section(records).body
    assert text.count("<figure>") == 2 and len(figures) == 3 and text.count("<table>") == 1
    assert "<script" not in text and 'src="http' not in text
    for fig in figures:
        sizes = [text.get_fontsize() for text in fig.findobj(matplotlib.text.Text) if text.get_text()]
        assert fig.get_figwidth() == page.WIDTH and min(sizes) >= SMALLEST_LETTERS


def test_verdicts_follow_from_the_curves(records):
    # Twenty iterations: the gradients agree, and nothing is learned yet.
    found = [(verdict.verdict, verdict.runs) for verdict in lqr_page.verdicts(records)]
    runs = len(CONFIG.dampings) * CONFIG.initialisations
    expected = ["reproduced", "reproduced", "new", "not reproduced", "not reproduced"]
    assert found == [(verdict, runs) for verdict in expected]
    assert [verdict.verdict for verdict in lqr_page.verdicts(RECORDS)] == ["reproduced"] * 2 + ["new"] + ["reproduced"] * 2


def test_page_is_written_from_records(records, tmp_path):
    pytest.importorskip("matplotlib")
    lqr_page.write(records, tmp_path)
    written, text = {path.name for path in tmp_path.iterdir()}, (tmp_path / "lqr.md").read_text()
    assert written == {"lqr.md", "lqr-model.svg", "lqr-imitation.svg", "lqr-imitation-4-amsgrad.svg"}
    assert all(f"]({name})" in text for name in written if name.endswith("svg")) and lqr_page.answer(records) in text


def test_page_is_that_of_the_results():
    assert lqr_page.text(RECORDS) == (ROOT / "docs" / "lqr.md").read_text()


def test_committed_methods_agree_as_asked():
    for group in COMMITTED["groups"]:
        for name in lqr_page.METHODS:
            assert group["methods"][name]["same_point"]["derivative"] < DERIVATIVES
            if group["batch"] == 1:
                assert lqr_page._furthest(group, name) < CURVES
        for method in group["methods"].values():
            assert method["failed_systems"] == method["warned_iterations"] == 0
    assert sum(row["failed"] for row in COMMITTED["systems"]) == 0


def test_sentences_of_the_page_are_true():
    """What the page says in words of why the curves part, beside its numbers."""
    for group in COMMITTED["groups"]:
        apart = {name: lqr_page._furthest(group, name) for name in (*lqr_page.METHODS, lqr.NUDGED)}
        assert max(apart.values()) < 10 * apart[lqr.NUDGED]  # a rounding does as much
    forgets, keeps = (
        next(row for row in lqr_page.converged_rows(COMMITTED) if row["setting"] == f"16 starts a step, {optimiser}")
        for optimiser in ("Adam", "AMSGrad")
    )
    reached = "imitation loss below 1e-12 on the way"
    assert forgets["in the end"] < forgets[reached] == forgets["runs"] and keeps["in the end"] == keeps["runs"]


# --- the benchmark -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured():
    return json.loads(json.dumps(control.run(control.Config.preset("smoke"))))


def test_ways_of_the_benchmark_agree(measured):
    cases = [measured["riccati"], *measured["plans"], *measured["over_horizon"]["cases"]]
    for case in cases:
        for way in case["ways"].values():
            assert "rejected" not in way and min(way[what]["median"] for what in ("forward", "backward")) > 0
    assert set(measured["plans"][0]["ways"]) == {control.PLANNED, "Newton, Dense", "Newton, unrolled"}


def test_loop_of_the_benchmark_has_the_gradients_of_the_oracle():
    config = control.Config.preset("smoke")
    *matrices, weights = control.random_systems(config, seed=0)
    loop = control.by_scipy([*matrices, weights])
    found = loop.backward(loop.forward())
    leaves = [t.clone().requires_grad_() for t in matrices]
    expected = torch.autograd.grad(lqr.AnalyticDare.apply(*leaves), leaves, weights)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(a), b, rtol=SOLVED, atol=SOLVED)


def test_page_of_the_benchmark_shows_its_results(measured):
    text = tables.control({"control": measured, "control_gpu": measured | {"machine": measured["machine"] | {"gpu": "a GPU"}}})
    assert text.count("### Riccati equations") == 2 and "## a GPU" in text
    for name in (*measured["riccati"]["ways"], *measured["plans"][0]["ways"]):
        assert f"| {name} |" in text
    path = ROOT / "benchmarks" / "results" / "control.json"
    if path.exists():
        results = {p.stem: json.loads(p.read_text()) for p in path.parent.glob("control*.json")}
        assert tables.control(results) == (ROOT / "docs" / "control-speed.md").read_text()
