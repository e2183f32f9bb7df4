"""Table 1: its data against the equations, runs side by side against runs alone, the methods against each other, the page."""

import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.integrate
import torch
from torch import nn

from experiments import forecast, motion, page, runner, table1, table1_figures, table1_page, table1_speed, table1_verdicts
from experiments.forecast import BACKWARD, CG, CONTROL, DOPRI5, FORWARD, METHODS, NAIVE, Training
from experiments.stack import Perceptrons, clip

# Of weights after a few iterations in float64, relative: rounding, and what DOPRI5's tolerance leaves.
SAME, DOPRI5_SAME = 1e-11, 1e-8
SMOKE_SECONDS = 20
DATA = Path(__file__).parent.parent.parent / "shared" / "data"
DOCS = Path(__file__).parent.parent / "docs"
FULL = runner.Options("paper", runner.COMMITTED)


def tiny(task: str, method: str, **changes) -> table1.Config:
    small = {"iterations": 6, "validate_every": 3, "warm_up": 0, "window": (2, 3), "hidden": (8,), "dtype": "float64"}
    small |= {"rtol": 1e-9, "atol": 1e-9} if method == DOPRI5 else {}
    return table1.settled(table1.Config(task=task, method=method, **(small | changes)))


def trained(config: table1.Config, seeds: list[int]) -> Training:
    training = Training(config, seeds)
    for iteration in range(config.iterations):
        training.step(iteration)
    training.validate(config.iterations)
    return training


def apart(one: Training, k: int, other: Training, m: int) -> float:
    """The relative distance between the weights of seed number k and of number m of another training."""
    pairs = zip(one.parameters, other.parameters, strict=True)
    return max(((p[k] - q[m]).norm() / q[m].norm()).item() for p, q in pairs)


def walking() -> motion.Split:
    """Random sequences in the shapes of CMU Walking."""
    generator = torch.Generator().manual_seed(0)
    return motion.Split(*(torch.randn(n, 12, 50, generator=generator, dtype=torch.float64) for n in (16, 3, 4)))


@pytest.fixture
def cmu(monkeypatch):
    split = walking()
    monkeypatch.setattr(motion, "walking", lambda folder: split)


@pytest.fixture(scope="module")
def smoke() -> tuple[list[runner.Record], float]:
    """The records of the smoke preset, and the seconds of CPU time that they took."""
    began = time.process_time()
    with pytest.MonkeyPatch.context() as patch:
        split = walking()
        patch.setattr(motion, "walking", lambda folder: split)
        configs = table1.variants(table1.Config.preset("smoke"))
        found = [one for c in configs for one in runner.execute(runner.Task("table1", c, tuple(range(c.runs))))]
    return found, time.process_time() - began


def test_van_der_pol_satisfies_its_equation():
    parts = motion.van_der_pol()
    assert [tuple(part.shape) for part in parts] == [(1, 107, 2), (1, 107, 2), (1, 107, 2)]
    points = torch.cat([parts.train[0], parts.validation[0, 1:], parts.test[0]]).numpy()
    assert len(points) == 320 and tuple(points[0]) == (2.0, 0.0)
    # Another method of SciPy from each point to the next.
    for before, after in zip(points[:-1:20], points[1::20], strict=True):
        end = scipy.integrate.solve_ivp(
            lambda t, y: (y[1], 3 * (1 - y[0] ** 2) * y[1] - y[0]), (0, 0.1), before, method="Radau", rtol=1e-10, atol=1e-12
        ).y[:, -1]
        assert np.allclose(end, after, atol=1e-7)
    # Its limit cycle for μ = 3 has the amplitude 2.0233 and the period 8.859.
    assert abs(np.abs(points[:, 0]).max() - 2.0233) < 0.01
    up = np.flatnonzero((points[:-1, 0] < 0) & (points[1:, 0] >= 0))
    assert np.allclose(np.diff(up) * 0.1, 8.859, atol=0.1)


@pytest.mark.parametrize("a11", [-0.1, -1.0])
def test_spiral_satisfies_its_equation(a11):
    parts = motion.spiral(a11)
    assert [part.shape[1] for part in parts] == [100, 51, 151]
    points = torch.cat([parts.train[0], parts.validation[0, 1:], parts.test[0, 1:]]).numpy()
    assert len(points) == 300
    # d(x⁴ + y⁴)/dt = 4 (a11 x⁶ + a22 y⁶), since the terms with ±2 cancel; integrated by Simpson's rule over pairs of steps.
    level, rate = (points**4).sum(axis=1), 4 * (points**6 @ np.array([a11, -0.1]))
    late = slice(60, 299, 2)  # where the motion is slow enough for the rule
    change = 0.1 / 3 * (rate[59:298:2] + 4 * rate[late] + rate[61:300:2])
    assert np.allclose(level[61:300:2] - level[59:298:2], change, atol=1e-3 * level[59])
    assert level[-1] < level[0]


def test_data_that_is_missing_skips_with_a_sentence(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TORCHDIL_DATA", raising=False)
    with pytest.raises(runner.Skip, match=r"needs mocap35\.mat: get it from .* and put it into .*\.$") as missing:
        table1.run(tiny("cmu", NAIVE), 0)
    assert "\n" not in str(missing.value)
    (tmp_path / motion.WALKING).write_bytes(b"not it")
    with pytest.raises(runner.Skip, match="another file"):
        motion.walking(str(tmp_path))
    monkeypatch.setenv("TORCHDIL_DATA", str(tmp_path))
    with pytest.raises(runner.Skip, match="another file"):
        motion.walking(None)


@pytest.mark.skipif(not (DATA / motion.WALKING).exists(), reason="CMU Walking is not there")
def test_walking_is_split_as_in_the_literature():
    parts = motion.walking(str(DATA))
    assert [tuple(part.shape) for part in parts] == [(16, 300, 50), (3, 300, 50), (4, 300, 50)]
    rows = torch.cat([part[:, 0] for part in parts])
    assert len(rows.unique(dim=0)) == 23  # no sequence is in two parts


def test_initial_weights_are_those_of_linear_layers():
    many = Perceptrons((40, 30, 20), [torch.Generator().manual_seed(k) for k in range(50)], torch.float64)
    for layer, weight, bias in zip((nn.Linear(40, 30), nn.Linear(30, 20)), many.weights, many.biases, strict=True):
        bound = 1 / math.sqrt(layer.in_features)
        for drawn in (weight, bias):
            assert 0.98 * bound < drawn.abs().max() <= bound
            assert abs(drawn.std().item() - bound / math.sqrt(3)) < 0.02 * bound
    single = Perceptrons((40, 30, 20), [torch.Generator().manual_seed(7)], torch.float64)
    assert all(torch.equal(p[7], q[0]) for p, q in zip(many.parameters(), single.parameters(), strict=True))


def test_gradients_are_clipped_per_seed():
    model = Perceptrons((3, 4, 2), [torch.Generator().manual_seed(k) for k in range(3)], torch.float64)
    size = torch.tensor([1e-3, 1.0, math.nan], dtype=torch.float64).view(-1, 1, 1)
    for parameter in model.parameters():
        parameter.grad = size.expand_as(parameter).clone()
    assert clip(model, 0.5).tolist() == [True, True, False]
    norms = torch.stack([p.grad.flatten(1).square().sum(dim=1) for p in model.parameters()]).sum(dim=0).sqrt()
    count = sum(p[0].numel() for p in model.parameters())
    assert torch.allclose(norms, torch.tensor([1e-3 * math.sqrt(count), 0.5, 0.0], dtype=torch.float64))


@pytest.mark.parametrize(("task", "method"), [("spiral", method) for method in METHODS] + [("vdp", NAIVE), ("cmu", NAIVE)])
def test_runs_side_by_side_are_those_alone(task, method, cmu):
    config = tiny(task, method, iterations=4)
    seeds = [0, 3]
    together = trained(config, seeds)
    assert together.alive.all() and apart(together, 0, together, 1) > 0.1
    for k, seed in enumerate(seeds):
        lonely = trained(config, [seed])
        assert apart(together, k, lonely, 0) < (DOPRI5_SAME if method == DOPRI5 else SAME)
        moved = max(
            (p[0] - first[0]).norm() / first[0].norm() for p, first in zip(lonely.parameters, lonely.first, strict=True)
        )
        assert moved > 1e-3  # else nothing is compared


def test_a_step_alone_uses_the_exact_gradient_and_adam():
    """One iteration on Van der Pol against plain autograd through x + dt f(x) with torch.optim.Adam."""
    config = tiny("vdp", forecast.CONTROL, window=(1, 1), iterations=1)
    training = Training(config, [4])
    points = motion.van_der_pol().train[0]
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    for layer, weight, bias in zip(network[::2], training.model.field.weights, training.model.field.biases, strict=True):
        layer.weight.data, layer.bias.data = weight[0].detach().T.clone(), bias[0, 0].detach().clone()
    optimizer = torch.optim.Adam(network.parameters(), lr=config.rate)
    (points[:-1] + 0.1 * network(points[:-1]) - points[1:]).square().mean().backward()
    optimizer.step()
    training.step(0)
    for layer, weight in zip(network[::2], training.model.field.weights, strict=True):
        assert torch.allclose(layer.weight, weight[0].T, rtol=1e-9)


@pytest.mark.parametrize("task", table1.TASKS)
def test_cg_and_the_naive_solve_give_the_same_runs(task, cmu):
    naive, cg = (trained(tiny(task, method), [0, 1]) for method in (NAIVE, CG))
    assert max(apart(naive, k, cg, k) for k in range(2)) < 10 * SAME
    assert not naive.failed.any() and not cg.failed.any()


@pytest.mark.parametrize("method", [DOPRI5, FORWARD, BACKWARD, NAIVE])
def test_a_seed_that_diverges_harms_no_other(method):
    config = tiny("spiral", method, iterations=4)
    healthy, broken = trained(config, [0]), Training(config, [0, 1])
    with torch.no_grad():
        for parameter in broken.parameters:
            parameter[1] = math.nan
    for iteration in range(config.iterations):
        broken.step(iteration)
    broken.validate(config.iterations)
    assert broken.alive.tolist() == [True, False]
    assert apart(broken, 0, healthy, 0) < (DOPRI5_SAME if method == DOPRI5 else SAME)
    mine, lost = broken.metrics(0), broken.metrics(1)
    assert lost["diverged"] and lost["test"] is None and not mine["diverged"]


def test_validation_and_test_are_roll_outs_by_hand():
    config = tiny("spiral", CONTROL)
    training = trained(config, [2])
    split = motion.spiral(config.a11)
    weights = [(w[0].detach(), b[0, 0].detach()) for w, b in zip(*training.model.field.children(), strict=True)]
    (w1, b1), (w2, b2) = weights
    errors = []
    for (sequence,) in (split.validation, split.test):
        y, squares = sequence[0], []
        for point in sequence[1:]:
            y = y + 0.1 * (torch.tanh(y @ w1 + b1) @ w2 + b2)
            squares.append((y - point).square().mean().item())
        errors.append(np.mean(squares))
    curve = training.metrics(0)["curve"]
    assert [curve["validation"][0], curve["test"][0]] == pytest.approx(errors, rel=1e-4)
    assert abs(errors[0] / errors[1] - 1) > 0.01  # else they could be swapped


def test_a_validation_roll_out_that_would_break_later_has_not_failed(monkeypatch):
    """Validation on the Spiral has 50 steps, its test 150."""
    whole = forecast.integrate

    def breaking(config, field, start, steps):
        states, solution = whole(config, field, start, steps)
        states[100:] = math.nan
        return states, solution

    training = Training(tiny("spiral", DOPRI5), [0])
    monkeypatch.setattr(forecast, "integrate", breaking)
    training.validate(3)
    (scores,) = training.scores
    assert scores.validation.isfinite().all() and scores.lost.all() and scores.test.isnan().all()


def test_failed_solves_of_seeds_that_have_ended_are_not_counted():
    training = Training(tiny("spiral", NAIVE), [0, 1])
    training.alive[1] = False
    none = SimpleNamespace(converged=torch.zeros(2, training.config.batch, dtype=torch.bool))

    def failing(given, steps):
        return training.model(given, steps).frames, SimpleNamespace(report=SimpleNamespace(forward=none, backward=none))

    training.descend(failing, training.windows(2), slice(None))
    assert training.failed.tolist() == [[training.config.batch, 0]] * 2


@pytest.mark.parametrize("method", [DOPRI5, NAIVE])
def test_only_dopri5_may_give_up(method, monkeypatch):
    def gives_up(*arguments):
        raise AssertionError("underflow in dt")

    training = Training(tiny("spiral", method), [0, 1])
    monkeypatch.setattr(forecast, "integrate", gives_up)
    if method == DOPRI5:
        assert training.gradient(training.windows(2)).isnan().all()
        training.validate(1)
        assert training.scores[0].lost.all() and training.scores[0].validation.isinf().all()
    else:
        with pytest.raises(AssertionError, match="underflow"):
            training.gradient(training.windows(2))
        with pytest.raises(AssertionError, match="underflow"):
            training.validate(1)


def scored(validation: list[list[float]], lost: list[bool], **changes) -> dict:
    """The metrics of a run with these validations, its tests being 1, 2, ..."""
    training = Training(tiny("spiral", FORWARD, **changes), [0])
    training.iterations = 1
    for k, (errors, gone) in enumerate(zip(validation, lost, strict=True)):
        value = torch.tensor([math.nan if gone else k + 1.0])
        path = torch.full((1, 2, 2), float(k))
        training.scores.append(forecast.Scores(k + 1, 0.0, torch.tensor([errors]), value, torch.tensor([gone]), path))
    return training.metrics(0)


def test_models_whose_roll_outs_failed_are_not_chosen():
    inf = math.inf
    # The third has the best median, but one of its roll-outs failed.
    found = scored([[5.0, 5.0, 5.0], [4.0, 6.0, 4.0], [1.0, 1.0, inf]], [False, False, True])
    assert (found["chosen"], found["test"], found["test_failed"], found["validation"]) == (
        2,
        2.0,
        False,
        pytest.approx(14 / 3, rel=1e-4),
    )
    assert (found["chosen_by_median"], found["test_by_median"], found["test_by_median_failed"]) == (2, 2.0, False)
    assert found["curve"]["test"] == [1.0, 2.0, None] and found["last"] is None and found["last_failed"]
    # Chosen, but its test is lost.
    found = scored([[1.0, 1.0, 7.0], [2.0, 2.0, 2.0]], [True, False])
    assert (found["test"], found["test_failed"], found["chosen"]) == (2.0, False, 2)
    assert (found["test_by_median"], found["test_by_median_failed"], found["chosen_by_median"]) == (None, True, 1)


@pytest.mark.parametrize("validation", [math.inf, math.nan])
def test_without_a_usable_validation_there_is_no_test(validation):
    found = scored([[1.0], [validation]], [False, False], warm_up=2)
    assert found["test"] is None and found["chosen"] is None and found["validation"] is None and not found["test_failed"]
    assert found["last"] == 2.0 and "forecast" not in found
    cell = table1_figures.Cell("spiral", FORWARD, "", {"warm_up": 2}, [{"seed": 0, "metrics": found}])
    for ours in (table1_figures.outcome(cell, "test"), table1_figures.within(cell, 2)):
        assert ours.values == {0: None}


def test_runs_that_all_diverge_before_a_validation_have_a_record():
    (found,) = table1.run_together(tiny("spiral", FORWARD, rate=1e300), [0])
    assert found["diverged"] and found["test"] is None and found["last"] is None
    assert found["curve"]["iteration"] == [2]


def test_the_best_validation_after_the_warm_up_is_chosen():
    config = tiny("spiral", NAIVE, iterations=12, validate_every=2, warm_up=6)
    found = table1.run(config, 0)
    curve = found["curve"]
    usable = [k for k, iteration in enumerate(curve["iteration"]) if iteration >= 6]
    best = min(usable, key=curve["validation"].__getitem__)
    assert curve["iteration"] == [2, 4, 6, 8, 10, 12]
    assert found["chosen"] == curve["iteration"][best] and found["test"] == curve["test"][best]
    assert found["last"] == curve["test"][-1]


def test_windows_grow_in_few_stages():
    config = table1.settled(table1.Config(task="cmu", method=NAIVE))
    lengths = [forecast.steps_of(config, iteration) for iteration in range(config.iterations)]
    assert lengths == sorted(lengths) and set(lengths) == set(range(30, 101, 10))
    assert lengths[0] == 30 and lengths[config.iterations // 2] == 100


def test_the_paper_preset_has_the_table_and_the_ablations():
    configs = table1.variants(table1.Config.preset("paper"))
    assert len(set(configs)) == len(configs) == 18 + 7
    assert {(c.task, c.runs) for c in configs[:18]} == {("vdp", 20), ("spiral", 20), ("cmu", 10)}
    assert {(c.task, c.runs) for c in configs[18:]} == {("vdp", table1.FEW_RUNS), ("spiral", 20)}
    assert sum(c.substeps == 4 for c in configs) == 3 and sum(c.a11 == -1 for c in configs) == 3
    assert [c.method for c in configs if c.adjoint == "stored"] == [BACKWARD]


def test_the_quick_preset_has_all_tasks():
    configs = table1.variants(table1.Config.preset("quick"))
    assert [sum(c.task == task for c in configs) for task in table1.TASKS] == [6, 6, 2]
    for config in configs:
        assert {forecast.steps_of(config, k) for k in range(config.iterations)} == {config.window[0]}


def test_smoke_preset_runs(smoke):
    records, seconds = smoke
    assert len(records) == 2 * 18
    for record in records:
        metrics = record["metrics"]
        assert math.isfinite(metrics["test"]) and ("forecast" in metrics) == (record["seed"] == 0)
        assert ("test_by_median" in metrics) == (record["config"]["task"] == "cmu")
    assert seconds < SMOKE_SECONDS


def test_speed_is_measured_on_equal_runs():
    found = table1_speed.compare(tiny("spiral", NAIVE, together=3), iterations=2)
    assert found["stack"] == 3 and found["apart"] < SAME and min(found["alone"], found["together"]) > 0
    lonely = table1_speed.compare(tiny("spiral", NAIVE, together=1), iterations=2)
    assert lonely["stack"] == 1 and lonely["alone"] == lonely["together"] and lonely["apart"] == 0
    speed = {"cells": [found, lonely], "machine": {"cpu": "a processor"}}
    (line,) = table1_page.speed_rows(speed)
    assert float(line["times as fast"]) == pytest.approx(found["alone"] / found["together"], rel=0.06)


def record(task: str, method: str, seed: int, test: float | None, **metrics) -> runner.Record:
    """A run at full length of which the page knows this."""
    changes = {key: metrics.pop(key) for key in ("substeps", "a11", "adjoint") if key in metrics}
    config = table1.settled(table1.Config(task=task, method=method, **changes))
    full = {"test": test, "validation": test, "chosen": 1000, "test_failed": False, "last": test, "last_failed": False}
    full |= {"diverged": False, "failed_forward": 0, "failed_backward": 2, "seconds_per_iteration": 0.01, "stack": 4}
    full["curve"] = {"iteration": [1000, 2000], "seconds": [1.0, 2.0], "validation": [1.0, test], "test": [9.0, test]}
    full |= {"forecast": [[0.0, 1.0], [None, None]]} if seed == 0 else {}
    place = {"versions": {"torchdil": "1", "torch": "2"}, "device": "cpu", "machine": {"cpu": "a processor"}, "seconds": 1.0}
    return {"experiment": "table1", "config": runner.plain(config), "seed": seed, "metrics": full | metrics} | place


def group(task: str, method: str, tests: list[float | None], **metrics) -> list[runner.Record]:
    return [record(task, method, seed, test, diverged=test is None, **metrics) for seed, test in enumerate(tests)]


def verdict(records: list[runner.Record], what: str):
    (found,) = [one for one in table1_page.verdicts(records) if one.what == f"Table 1, {what}"]
    return found


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([11.4, 11.4], "reproduced"),  # within 15 %
        ([8.6, 8.6], "reproduced"),
        ([11.6, 11.6], "not reproduced"),
        ([8.4, 8.4], "better"),
        ([10.6, 12.6], "not reproduced"),  # 1.6 away, although our standard error is 1
        ([7.0, 9.8], "better"),  # 1.6 below, the standard error is 1.4
        ([6.6, 10.2], "reproduced"),  # 1.6 below, the standard error is 1.8
        ([10.0] * 9 + [30.0], "not reproduced"),  # the mean is 12
        ([4.0, 4.0, 12.0, 12.0, 12.0], "not reproduced"),  # the mean is below, the median is not
        ([10.0, 10.0, None], "reproduced"),
        ([10.0, None], "not reproduced"),
        ([None, None], "not reproduced"),
    ],
)
def test_a_value_is_judged_by_its_distance_to_the_papers(values, expected):
    assert table1_verdicts.judged(table1_figures.summary(dict(enumerate(values))), 10.0, 0.1) == expected


def test_a_run_far_off_makes_no_value_agree():
    far = table1_figures.summary(dict(enumerate([0.4] * 19 + [1000.0])))
    assert table1_verdicts.judged(far, 0.40, 0.06) == "not reproduced"
    near = table1_figures.summary(dict(enumerate([0.4] * 19 + [0.9])))
    assert table1_verdicts.judged(near, 0.40, 0.06) == "reproduced"
    assert table1_verdicts.judged(table1_figures.summary({0: 0.51, 1: 0.51}), 0.40, 0.06) == "reproduced"  # 2 of its errors


def test_a_run_that_failed_is_the_worst_in_the_median_and_not_in_the_mean():
    runs = [*group("vdp", DOPRI5, [0.2, 0.4, None]), record("vdp", DOPRI5, 3, None, test_failed=True, last=5.0)]
    found = verdict(runs, "Van der Pol: DOPRI5 adj.")
    assert (found.ours, found.runs) == ("0.30 ± 0.10", 4)
    assert "2 of 4 runs failed" in found.why and "median failed" in found.why  # between 0.4 and the worst
    cell = table1_figures.collected(runs)[0]
    assert table1_figures.outcome(cell, "last").mean == pytest.approx((0.2 + 0.4 + 5.0) / 3)
    assert table1_figures.within(cell, 1000).values == dict.fromkeys(range(4), 9.0)
    assert table1_figures.within(cell, 2000).values == {0: 0.2, 1: 0.4, 2: 9.0, 3: 9.0}  # 2, 3: of the usable validation
    assert table1_figures.within(cell, 999).mean is None


def test_a_model_chosen_before_training_diverged_counts():
    (run,) = [record("vdp", DOPRI5, 0, 9.0, validation=1.0, diverged=True, last=None)]
    run["metrics"]["curve"] |= {"validation": [1.0, None], "test": [9.0, None]}
    cell = table1_figures.collected([run])[0]
    assert table1_figures.outcome(cell, "test").values == {0: 9.0} == table1_figures.within(cell, 2000).values
    assert table1_figures.outcome(cell, "last").values == {0: None}


def spread(middle: float, runs: int = 20) -> list[float]:
    """Numbers with this mean and median, a tenth of it apart at most."""
    return [middle * (1 + 0.1 * (2 * k / (runs - 1) - 1)) for k in range(runs)]


def test_one_method_is_below_another_in_mean_and_median_beyond_the_noise():
    def below(ours, theirs):
        found = verdict(
            group("vdp", CG, ours) + group("vdp", BACKWARD, theirs), "Van der Pol: IFT below the adjoint of Bwd. Euler"
        )
        return found.verdict, found.why

    assert below(spread(0.3), spread(0.5)) == ("reproduced", "in 20 of 20 runs; medians 0.300 and 0.500")
    assert below(spread(0.5), spread(0.3))[0] == "not reproduced"
    # 0.7 % apart, the standard error of the difference is 2 %.
    judged, why = below(spread(0.3), spread(0.302))
    assert judged == "not reproduced" and why.startswith("within the noise; in 20 of 20")
    # The mean is below because of a run far off, or without those that failed; the median is not.
    assert below(spread(0.5), [0.4] * 15 + [50.0] * 5)[0] == "not reproduced"
    judged, why = below([0.1] * 9 + [None] * 11, spread(0.5))
    assert judged == "not reproduced" and "failed: 11 and 0 runs" in why
    assert below([0.1] * 11 + [None] * 9, spread(0.5))[0] == "reproduced"
    assert below(spread(0.3), [None] * 20)[0] == "reproduced"
    judged, why = below(spread(0.3, 19), spread(0.5))
    assert judged == "unfinished" and "19 of 20 runs so far" in why


def test_the_method_of_the_paper_is_below_all_adjoints():
    what = "Van der Pol: IFT below all adjoints"
    runs = group("vdp", CG, spread(0.3)) + group("vdp", BACKWARD, spread(0.5)) + group("vdp", FORWARD, [None] * 20)
    assert not [one for one in table1_page.verdicts(runs) if "all adjoints" in one.what]  # one of them is missing
    best = verdict(runs + group("vdp", DOPRI5, spread(0.4)), what)
    assert (best.verdict, best.paper) == ("reproduced", "0.40 and 0.67") and best.why.startswith("beside DOPRI5 adj.:")
    # One that did better in few runs, the others failed, is not the best; one that did in most is.
    assert verdict(runs + group("vdp", DOPRI5, [0.2] * 9 + [None] * 11), what).why.startswith("beside DOPRI5 adj.:")
    best = verdict(runs + group("vdp", DOPRI5, [0.2] * 15 + [None] * 5), what)
    assert best.verdict == "not reproduced" and best.why.startswith("beside DOPRI5 adj.:")


@pytest.mark.parametrize(
    ("cg", "naive", "expected", "why"),
    [
        (spread(0.4), spread(0.4), "reproduced", "run by run equal to five digits"),
        ([x * 1.001 for x in spread(0.4)], spread(0.4), "reproduced", "apart by 0.001 in the median, 0.001 at most"),
        ([x * 1.05 for x in spread(0.4)], spread(0.4), "not reproduced", "more than 1 % worse in 20, better in 0 of 20"),
        # Apart either way, as chaos would have it.
        ([0.4, 0.5] * 10, [0.5, 0.4] * 10, "reproduced", "worse in 10, better in 10 of 20"),
        # A run far off, of both, of CG, of naive, hides no loss of the others, nor makes one.
        ([0.44] * 19 + [1e3], [0.40] * 19 + [1e3], "not reproduced", "worse in 19"),
        ([0.44] * 19 + [1e3], [0.40] * 20, "not reproduced", "2e+03 at most"),
        ([0.44] * 20, [0.40] * 19 + [1e3], "not reproduced", "worse in 19, better in 1 of 20"),
        ([0.40] * 20, [0.40] * 19 + [1e3], "reproduced", "worse in 0, better in 1 of 20"),
        ([0.40] * 19 + [None], [0.40] * 20, "not reproduced", "failed: 1 and 0 runs"),
        ([0.40] * 19 + [None], [None] + [0.40] * 19, "reproduced", "failed: 1 and 1 runs"),
        ([0.40] * 20, [0.40] * 19 + [None], "reproduced", "failed: 0 and 1 runs"),
        ([None] * 20, [None] * 20, "not reproduced", "nothing to compare"),
        ([0.40] * 19, [0.40] * 20, "unfinished", "19 of 20 runs so far"),
    ],
)
def test_what_cg_loses_is_judged_run_by_run(cg, naive, expected, why):
    found = verdict(group("vdp", CG, cg) + group("vdp", NAIVE, naive), "Van der Pol: CG loses nothing against naive")
    assert found.verdict == expected and why in found.why


def test_a_cell_without_all_of_its_runs_reproduces_nothing():
    for runs, expected in ((19, "unfinished"), (20, "reproduced")):
        some = group("vdp", DOPRI5, [0.9] * runs)
        found = verdict(some, "Van der Pol: DOPRI5 adj.")
        assert found.verdict == expected and ("19 of 20 runs so far" in found.why) == (runs == 19)
        assert f"{runs} of 380 planned runs" in table1_page.answer(some) and f"{runs} of 20 runs)" in table1_page.answer(some)
        assert f"{runs} of 380 planned runs" in table1_page.text(some) and f"| {runs} of 20 |" in table1_page.text(some)
    few = verdict(group("cmu", CG, [20.0, 20.0], last=7.0, test_by_median=8.0), "CMU Walking: Bwd. Euler IFT-CG")
    assert few.verdict == "unfinished" and few.why == "median 7.00; by best validation 20.0 ± 0; 2 of 10 runs so far"


def test_walking_is_judged_by_the_last_iterate_beside_the_best_validation():
    found = verdict(group("cmu", CG, [20.0] * 10, last=7.0, test_by_median=8.0), "CMU Walking: Bwd. Euler IFT-CG")
    assert found.verdict == "better" and found.ours == "7.00 ± 0"
    assert "by best validation 20.0 ± 0, not reproduced" in found.why


def test_times_are_compared_between_as_many_runs_side_by_side():
    slow, fast = group("cmu", NAIVE, [10.0], stack=1, seconds_per_iteration=0.3), group("cmu", CG, [10.0], stack=10)
    speed = {"cells": [{"task": "cmu", "method": m, "alone": s} for m, s in ((NAIVE, 0.1), (CG, 0.2))]}

    def ratio(records, speed=None):
        (line,) = table1_page.time_rows(table1_figures.collected(records), speed)
        return line["CG / naive"]

    assert ratio(slow + group("cmu", CG, [10.0], stack=1, seconds_per_iteration=0.15), speed) == "0.5"
    assert ratio(slow + fast, speed) == "2, measured again, each alone"
    assert ratio(slow + fast, {"cells": speed["cells"][:1]}) == ratio(slow + fast) == "- (not as many side by side)"
    pytest.importorskip("matplotlib")
    for runs, named in ((slow + fast, True), (slow, False)):
        cells = table1_figures.collected(runs)
        fig = table1_figures.curves("cmu", table1_figures.table(cells, "cmu"))
        labels = [text.get_text() for text in fig.legends[0].get_texts()]
        assert (f"{NAIVE} (1)" in labels) == named and ("side by side" in fig.axes[1].get_xlabel()) == named


def test_runs_that_end_early_add_no_points_to_the_curve():
    runs = group("spiral", CG, [0.1] * 19) + group("spiral", CG, [None])
    runs[-1]["metrics"]["curve"] = {
        "iteration": [1000, 1500],
        "seconds": [1, 2],
        "validation": [1.0, None],
        "test": [9.0, None],
    }
    found = table1_figures._curve(table1_figures.collected([*runs[:19], runs[19] | {"seed": 19}])[0])
    assert found["iteration"] == [1000, 2000] and found["middle"] == [9.0, 0.1]


def test_budgets_have_a_model_to_choose():
    cell = table1_figures.collected(group("spiral", CG, [0.1]))[0]
    assert table1_page._budgets(cell) == [500, 1000, 1500, 2000]
    longer = cell._replace(config=cell.config | {"warm_up": 600})
    assert table1_page._budgets(longer) == [1000, 1500, 2000]


def test_the_page_shows_the_smoke_runs(smoke, tmp_path):
    records, _ = smoke
    table1_page.write(records, tmp_path)
    text = (tmp_path / "table1.md").read_text()
    names = [
        f"{kind}-{task}" for task in table1.TASKS for kind in ("curves", "forecasts") if (kind, task) != ("forecasts", "cmu")
    ]
    assert {path.stem for path in tmp_path.glob("*.svg")} == {f"table1-{name}" for name in names}
    assert all(f"(table1-{name}.svg)" in text for name in names)
    section = table1_page.section(records)
    assert section.body.count("<svg") == 5 and "too short to judge: 4 of 2,000 iterations" in text
    assert len(table1_page.verdicts(records)) == 15 + 4 * 3
    judged = [one.verdict for one in table1_page.verdicts(records)]
    assert judged.count("new") == 3 and set(judged) == {"unfinished", "new"}  # as they are too short
    assert "too short to judge" in table1_page.answer(records)


@pytest.mark.parametrize("which", ["one run", "one ablation", "all failed", "without walking"])
def test_the_page_is_made_from_any_runs(which, smoke, tmp_path):
    runs = {
        "one run": group("spiral", CG, [0.1]),
        "one ablation": group("spiral", CG, [0.1, None], a11=-1.0),
        "all failed": group("vdp", BACKWARD, [None, None]) + group("vdp", BACKWARD, [None], substeps=4),
        "without walking": [one for one in smoke[0] if one["config"]["task"] == "spiral" and one["seed"] == 1],
    }[which]
    table1_page.write(runs, tmp_path)
    text = (tmp_path / "table1.md").read_text()
    assert table1_page.section(runs).title in text and "CMU Walking by all rules" not in text
    assert ("## Ablations" in text) == (which in ("one ablation", "all failed"))
    assert all(one.verdict in page.VERDICTS for one in table1_page.verdicts(runs))


def test_without_its_data_walking_is_left_out(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TORCHDIL_DATA", raising=False)
    config = tiny("cmu", CG)
    found = [*runner.execute(runner.Task("table1", config, (0, 1))), *group("spiral", CG, [0.1])]
    assert [one["skipped"][:11] for one in found if "skipped" in one] == ["CMU Walking"] * 2
    assert [one.what for one in table1_page.verdicts(runner.finished(found))] == ["Table 1, Spiral: Bwd. Euler IFT-CG"]


def test_committed_runs_are_of_the_paper_preset_and_on_the_page():
    records = runner.Store(runner.COMMITTED, "table1").records()
    found = runner.finished(runner.selected("table1", FULL))
    assert {runner.identity(one) for one in found} == {runner.identity(one) for one in records}
    assert table1_page.text(found) == (DOCS / "table1.md").read_text()
    for cell in table1_figures.collected(found):
        last = cell.config["iterations"]
        assert table1_figures.within(cell, last).values == table1_figures.outcome(cell, "test").values


def test_cells_have_the_identity_of_the_committed_runs():
    (cell,) = [c for c in table1.variants(table1.Config.preset("paper")) if (c.task, c.method, c.a11) == ("spiral", CG, -0.1)]
    expected = {"task": "spiral", "method": CG, "ablations": False, "iterations": 2000, "rate": 0.01, "last_rate": 1.0}
    expected |= {"clip": None, "batch": 20, "window": [5, 5], "stages": 8, "growth": 0.5, "validate_every": 50, "warm_up": 500}
    expected |= {"hidden": [50], "given": 1, "latent": None, "a11": -0.1, "substeps": 1, "adjoint": "reverse"}
    expected |= {"on_failure": "ignore", "rtol": 1e-05, "atol": 1e-06, "max_steps": 2000, "dtype": "float64", "device": "cpu"}
    assert json.loads(json.dumps(runner.plain(cell))) == expected
