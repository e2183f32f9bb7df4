"""The experiments run, in their smallest preset, and say something true."""

import pytest

from benchmarks import core
from experiments import page, trust


def test_estimates_follow_the_errors():
    rows = trust.run(trust.Config.preset("smoke"), seed=0)["rows"]
    for row in rows:
        if row["value_error"] > 1e-11:
            assert 0.3 < row["value_error_estimated"] / row["value_error"] < 30
        if row["gradient_error_from_cg"] > 1e-13:
            assert 0.3 < row["gradient_error_from_cg_estimated"] / row["gradient_error_from_cg"] < 30
    assert rows[-1]["value_error"] < 1e-10 < rows[0]["value_error"]


def test_a_hard_sample_harms_no_other():
    assert core.isolation(samples=16)["largest_change_of_the_other_gradients"] <= 1e-12


def test_warm_start_saves_products():
    result = core.warm_start(steps=10, unknowns=30)
    assert result["warm"] < result["cold"]


def test_page_is_self_contained():
    pytest.importorskip("matplotlib")
    figure = page.vector_graphic(trust.figure(trust.run(trust.Config.preset("smoke"), seed=0)))
    text = page.page("Title <1>", "lead", [("Heading", figure + page.table([{"a_b": 1, "c": 1.5e-7}]))])
    assert "Title &lt;1&gt;" in text and "<td>1.5e-07</td>" in text
    assert "<script" not in text and 'src="http' not in text
