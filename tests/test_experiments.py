"""The experiments run, in their smallest preset, and say something true."""

from pathlib import Path

import pytest

from benchmarks import core
from experiments import faults, faults_page, page, runner

DOCS = Path(__file__).parent.parent / "docs"
FULL = runner.Options("paper", runner.COMMITTED)


@pytest.mark.parametrize("name", ["kepler", "runtime", "cartpole", "lqr", "coverage", "faults"])
def test_committed_runs_are_those_of_the_paper_preset(name):
    found = runner.selected(name, FULL)
    planned = runner.planned(name, FULL)
    # Of the cart-pole, runs of hours, some variants have fewer.
    assert 10 <= len(found) <= len(planned) if name == "cartpole" else len(found) == len(planned)
    assert len(found) == len(runner.Store(runner.COMMITTED, name).records()) == len(runner.finished(found))
    for record in found:
        assert record["experiment"] == name
        assert {"torchdil", "torch"} <= record["versions"].keys() and {"cpu", "cores"} <= record["machine"].keys()
    assert runner.Store(runner.COMMITTED, name).path.stat().st_size < 10**6


def test_faults_are_named_and_shown():
    (record,) = runner.execute(runner.Task("faults", faults.Config.preset("smoke"), (0,)))
    rows = record["metrics"]["rows"]
    assert {row["planted"] for row in rows} == faults.faults().keys()
    assert all(row["named"] == row["to blame"] for row in rows)
    section = faults_page.section([record])
    assert faults_page.verdicts([record])[0].ours == f"{len(rows)} of {len(rows)} planted faults"
    wrong = record | {"metrics": {"rows": [rows[0] | {"named": "function"}, *rows[1:]]}}
    assert f"{len(rows) - 1} of {len(rows)}" in faults_page.answer([wrong])
    assert all(row["planted"] in section.body for row in rows)
    assert faults_page.text(runner.selected("faults", FULL)) == (DOCS / "faults.md").read_text()


def test_a_hard_sample_harms_no_other():
    assert core.isolation(samples=16)["largest_change_of_the_other_gradients"] <= 1e-12


def test_warm_start_saves_products():
    result = core.warm_start(steps=10, unknowns=30)
    assert result["warm"] < result["cold"]


def test_origin_of_a_page_names_all_places():
    def record(seed, cpu, device="cpu"):
        return {"seed": seed, "device": device, "versions": {"torchdil": "1", "torch": "2"}, "machine": {"cpu": cpu}}

    assert page.origin("toy", [record(3, "A")]).endswith(
        "`experiments/results/toy.jsonl`: torchdil 1, torch 2, A, 1 thread, seed 3."
    )
    several = page.origin("toy", [record(0, "A"), record(1, "A"), record(2, "B", "GPU")])
    assert several.endswith(": torchdil 1, torch 2, A, 1 thread, 2 runs; torchdil 1, torch 2, GPU, 1 thread, seed 2.")


def test_page_is_self_contained():
    figure = page.vector_graphic(pytest.importorskip("matplotlib.figure").Figure(figsize=(1, 1)))
    text = page.page("Title <1>", "lead", [page.Section("Heading", figure + page.table([{"a_b": 1, "c": 1.5e-7}]))])
    assert "Title &lt;1&gt;" in text and "<td>1.5e-07</td>" in text
    assert "<script" not in text and 'src="http' not in text
