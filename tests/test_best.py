"""The best Table 1: its fields against closed forms, windows and forecasts against what they stand for, the page."""

import io
import math
from dataclasses import replace

import pytest
import torch

import torchdil as dil
from experiments import best, best_page, best_walking, motion, runner

SMOKE = best.Config.preset("smoke")
GENERATORS = 2


def record(task, seed=0, change=None, **metrics):
    config = runner.plain(replace(SMOKE, task=task, **(change or {})))
    about = {"versions": {"torchdil": "0", "torch": "2", "python": "3"}, "machine": {"cpu": "a", "cores": 2}, "device": "cpu"}
    return {"experiment": "best", "config": config, "seed": seed, "seconds": 2.0, "metrics": metrics} | about


@pytest.fixture
def sequences():
    """Made-up motions of four channels, (2, 5, 300, 4): one member sees the first three of five twice, the other the rest."""
    generator = torch.Generator().manual_seed(0)
    phase = 6 * torch.rand(5, 1, 1, generator=generator) + 0.05 * torch.arange(300)[None, :, None]
    motions = torch.cat((phase.sin(), phase.cos(), (2 * phase).sin(), 0.5 * phase.cos().square()), dim=-1)
    return motions[torch.tensor([[0, 1, 2, 0, 1], [3, 4, 3, 4, 3]])]


@pytest.fixture
def small():
    return replace(SMOKE, states=3, components=4, context=2, hidden=8, batch=6)


def generators(count=GENERATORS):
    return [torch.Generator().manual_seed(k) for k in range(count)]


def field_of(degree, coefficients, scale):
    """A field whose network is zero: A φ(x)."""
    field = best.PlaneField(degree, 4, scale, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in field.net.parameters():
            parameter.zero_()
        for (feature, output), value in coefficients.items():
            field.linear[feature, output] = value
    return field


def test_cubic_features_hold_the_spiral():
    # Features: x, y, x², xy, y², x³, x²y, xy², y³.
    scale = torch.tensor([0.5, 2.0], dtype=torch.float64)
    true = {(5, 0): -0.1, (8, 0): 2.0, (5, 1): -2.0, (8, 1): -0.1}
    own = {(f, o): value * scale[0 if f == 5 else 1] ** 3 / scale[o] for (f, o), value in true.items()}
    field = field_of(3, own, scale)
    x = torch.randn(1, 7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    matrix = torch.tensor([[-0.1, 2.0], [-2.0, -0.1]], dtype=torch.float64)
    torch.testing.assert_close(field(torch.tensor(0.0), x), x**3 @ matrix.T, rtol=1e-12, atol=1e-12)
    # The true field, rolled out by steps of order 6, follows SciPy's solution.
    assert best.roll_out_error(field, motion.spiral(-0.1).test[0]) < 1e-12


def test_error_of_a_field_that_stands_still_is_that_of_the_first_point():
    piece = motion.van_der_pol().validation[0]
    field = field_of(1, {}, torch.ones(2, dtype=torch.float64))
    assert best.roll_out_error(field, piece) == pytest.approx((piece[1:] - piece[0]).square().mean().item())


def test_roll_out_that_fails_is_never_chosen():
    field = field_of(2, {(2, 0): 50.0, (4, 1): 50.0}, torch.ones(2, dtype=torch.float64))  # dx/dt = 50 x² blows up
    assert best.roll_out_error(field, motion.van_der_pol().test[0, :4]) == math.inf


def test_chosen_field_is_that_of_the_smallest_validation_error():
    split = motion.van_der_pol()
    config = replace(SMOKE, stages=((1, 40), (2, 10)), check=10)
    choice, curve = best.fit(config, 1, 0.0, split, seed=0)
    assert len(curve) == 5 and choice.validation == min(curve)
    assert best.roll_out_error(choice.field, split.validation[0]) == pytest.approx(choice.validation, rel=1e-9)


def test_test_points_have_no_influence_on_what_is_chosen():
    split = motion.spiral(-0.1)
    first, _ = best.fit(SMOKE, 1, 0.0, split, seed=0)
    second, _ = best.fit(SMOKE, 1, 0.0, split._replace(test=torch.full_like(split.test, math.nan)), seed=0)
    assert first[:4] == second[:4]


def test_windows_are_pieces_of_own_sequences_at_their_pace(small):
    # Channels: the sequence's number and the frame's; linear interpolation keeps both.
    frames = torch.stack(torch.broadcast_tensors(torch.arange(6.0)[:, None], torch.arange(300.0)), dim=-1)
    own = torch.stack((frames[:3], frames[3:]))
    config = replace(small, batch=200, every=9)
    for steps in (11, 33):
        given, target = best_walking.draw(config, own, steps, [(0.9, 1.1), (0.7, 0.8)], generators())
        assert given.shape == (2, 200, 3, 2) and target.shape == (2, 200, steps, 2)
        assert set(given[0, ..., 0].unique().tolist()) == {0, 1, 2} and set(target[1, ..., 0].unique().tolist()) == {3, 4, 5}
        times = torch.cat((given, target), dim=2)[..., 1]
        assert times.min() >= 0 and times.max() <= 299 + 1e-3
        pace = times[..., 1] - times[..., 0]
        longest = 299 / (2 + 9 * steps)
        assert 0.9 - 1e-3 < pace[0].min() < 0.92 and pace[0].max() <= min(1.1, longest) + 1e-3
        assert 0.7 - 1e-3 < pace[1].min() < 0.72 and 0.78 < pace[1].max() < 0.8 + 1e-3
        offsets = torch.cat((torch.arange(2), 2 + 9 * torch.arange(steps + 1)))
        torch.testing.assert_close(times - times[..., :1], pace[..., None] * offsets, rtol=1e-3, atol=0.02)


def test_context_is_a_state_that_stays_constant(small, sequences):
    model = best_walking.Gait(small, sequences, generators()).double()
    z = torch.randn(2, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    times = torch.linspace(0, 2, 6, dtype=torch.float64)
    model.dynamics.context = z[..., 3:]
    path = dil.odeint(model.dynamics, z[..., :3], times, method="gl4", batch_dims=2)

    def both(t, y):
        return torch.cat((best_walking.Net.forward(model.dynamics, y), torch.zeros_like(y[..., 3:])), dim=-1)

    torch.testing.assert_close(path, dil.odeint(both, z, times, method="gl4", batch_dims=2)[..., :3], rtol=1e-8, atol=1e-8)


def test_long_steps_follow_the_flow_of_short_ones(small, sequences):
    model = best_walking.Gait(small, sequences, generators())
    features = model.features(sequences[:, :, :3])
    with torch.no_grad():
        frames, coarse = model(features, 99, 1), model(features, 11, 9)
    assert (frames[:, :, ::9] - coarse).abs().max() < 1e-3 < (frames[:, :, 0] - frames[:, :, -1]).abs().max()


def test_members_share_nothing(small, sequences):
    config = replace(small, iterations=5, lengths=(4,))
    paces = [(0.9, 1.1), (0.8, 1.0)]
    pair = best_walking.train(config, sequences, paces, generators())
    for k in range(2):
        alone = best_walking.train(config, sequences[k : k + 1], paces[k : k + 1], generators()[k : k + 1])
        expected = best_walking.forecast(alone, sequences[0])
        torch.testing.assert_close(best_walking.forecast(pair, sequences[0])[k : k + 1], expected, rtol=1e-3, atol=1e-3)


def test_training_lowers_the_error(small, sequences):
    config = replace(small, iterations=50, lengths=(8,), rate=1e-2, average=0.0)
    held = sequences[1, :2, :75]  # as long as the windows

    def error(model):
        return (best_walking.forecast(model, held)[1] - held[:, 3:]).square().mean().item()

    first = best_walking.Gait(config, sequences, generators())
    last = best_walking.train(config, sequences, 2 * [(0.95, 1.05)], generators())
    assert error(last) < 0.5 * error(first)


def test_walking_without_its_file_is_skipped(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHDIL_DATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(runner.Skip, match=motion.WALKING):
        best.run(replace(SMOKE, task="cmu"), 0)


def test_variants_are_the_table_and_the_ablations():
    found = best.variants(best.Config.preset("paper"))
    assert [(c.task, c.runs) for c in found[:3]] == [("vdp", 20), ("spiral", 20), ("cmu", 10)]
    assert len({str(runner.plain(c)) for c in found}) == len(found) == 3 + len(best.ABLATIONS)
    assert {c.task for c in found[3:]} == {"cmu"}
    names = [best_page._change(runner.plain(c)) for c in found]
    assert names == [None, None, None, *best.ABLATIONS]


def test_speeds_are_chosen_by_the_median_over_the_validation_sequences():
    """Forecasts that are off by a constant: the mean and the median of the squares choose differently."""
    config = replace(SMOKE, paces=((0.9, 1.0), (0.8, 1.0), (1.0, 1.0)))
    validation, test = torch.zeros(3, 9, 2), torch.zeros(4, 9, 2)
    off = torch.tensor([[2.0, 2.0, 2.0], [1.0, 5.0, 1.0], [3.0, 3.0, 3.0]])
    tested = torch.tensor([1.0, 2.0, 4.0])[:, None].expand(3, 4)
    ahead = torch.cat((off, tested), dim=1)[:, :, None, None].expand(3, 7, 6, 2)
    found = best_walking._metrics(config, ahead, validation, test, channel=1)
    assert found["pace"] == (0.8, 1.0) and found["validation"] == 1 and found["validation_each"] == [1, 25, 1]
    assert found["test"] == 4 and found["test_each"] == [4, 4, 4, 4] and found["test_by_mean"] == 1
    assert [one["test"] for one in found["by_pace"]] == [1, 4, 16]
    assert found["drawn"]["chosen"] == [2, 2] and found["drawn"]["others"] == [[1, 1], [4, 4]]
    unseen = best_walking._metrics(config, ahead, validation, torch.full_like(test, math.nan), channel=None)
    assert unseen["pace"] == found["pace"] and "drawn" not in unseen


@pytest.mark.parametrize("task", ["vdp", "spiral"])
def test_run_tells_what_was_chosen(task):
    found = best.run(replace(SMOKE, task=task), seed=0)
    assert found["validation"] == min(found["validation_by_degree"].values()) and found["test"] > 0
    assert found["degree"] == 1 and (found["window"], found["iteration"]) in ((1, 4), (2, 4))


def test_page_has_mean_standard_error_and_median():
    records = [record("vdp", seed, test=t, validation=0.1, degree=1, validation_by_degree={"1": 0.1}) for seed, t in
               enumerate((0.1, 0.2, 0.6))]  # fmt: skip
    (row,) = best_page.rows(records)
    assert row["test MSE"] == "0.3 ± 0.15" and row["median"] == "0.2" and row["largest"] == "0.6" and row["runs"] == 3
    (verdict,) = best_page.verdicts(records)
    assert verdict.verdict == "unfinished" and verdict.ours == row["test MSE"] and verdict.runs == 3
    all_runs = [records[k % 3] | {"seed": k} for k in range(best.RUNS["vdp"])]
    assert best_page.verdicts(all_runs)[0].verdict == "better"
    records[0]["metrics"]["test"] = None
    assert best_page.rows(records)[0]["test MSE"] == "1 of 3 failed" and best_page.verdicts(records)[0].verdict != "better"


def test_page_draws_all_tasks():
    matplotlib = pytest.importorskip("matplotlib")
    drawn = {"channel": 1, "true": [0.0, 1.0], "chosen": [0.1, 0.9], "others": [[0.2, 0.8], [0.0, 1.0]]}
    by_pace = [{"pace": [0.9, 1.0], "validation_each": [1.0, 2.0, 3.0], "test": 3.7}]
    walked = {"validation": 20.0, "test_by_mean": 3.9, "pace": [0.9, 1.0], "by_pace": by_pace}
    plane = {"test": 0.001, "validation": 0.002, "degree": 3, "validation_by_degree": {"1": 0.01, "3": 0.002}}
    records = [record("vdp", **plane), record("spiral", **plane), record("cmu", test=3.5, drawn=drawn, **walked)]
    records.append(record("cmu", change=best.ABLATIONS["no noise"], test=5.5, **walked))
    figures = best_page.figures(records)
    assert set(figures) == {"runs", "walking"}
    for fig in figures.values():
        fig.savefig(io.StringIO(), format="svg")
        sizes = [text.get_fontsize() for text in fig.findobj(matplotlib.text.Text) if text.get_text()]
        assert fig.get_figwidth() == best_page.WIDTH and min(sizes) >= 9
    body = best_page.section(records).body
    assert body.count("<figure>") == 2 and "3.70" in body and "<script" not in body
    assert [(row["model"], row["test MSE"]) for row in best_page.ablation_rows(records)] == [
        ("as used", "3.50"),
        ("no noise", "5.50"),
    ]
    (row,) = best_page.pace_rows(records)
    assert row["speeds"] == "0.9 to 1" and row["validation 2"] == "2.00" and row["chosen in"] == "1 of 1 runs"
    assert "3.90" in best_page.text(records)
