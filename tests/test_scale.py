"""The experiment of scale: its layer against dense algebra, its gradients against differences, its limits, and its page."""

import copy
import io
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import softplus

import torchdil as dil
from experiments import page, runner, scale, scale_page

# Seconds of the processor.
SECONDS = 15
SMALLEST_LETTERS = 9
SMOKE = scale.Config.preset("smoke")


def recorded(config):
    task = runner.Task("scale", config, (0,))
    return runner._record(task, 0, 1.0) | {"metrics": runner._json(scale.run(config, 0))}


@pytest.fixture(scope="module")
def records():
    began = time.process_time()
    found = [recorded(config) for config in scale.variants(SMOKE)]
    assert time.process_time() - began < SECONDS
    return found


@pytest.mark.parametrize("unknowns, parameters", [(10, 100), (10, 10_000), (100, 100), (300, 3000), (3000, 200)])
def test_sizes_are_what_was_asked_for(unknowns, parameters):
    problem = scale.layer(unknowns, parameters, 0, "cpu")
    assert problem.y.shape == problem.x.shape == (unknowns,)
    assert problem.first.numel() + problem.second.numel() == pytest.approx(parameters, rel=0.05)


def test_chosen_solution_is_the_minimum():
    y, x, first, second, _ = scale.layer(60, 600, 1, "cpu")
    found = dil.argmin(scale.energy, torch.zeros_like(y), (x, first, second)).value
    torch.testing.assert_close(found, y, rtol=1e-8, atol=1e-8)


def test_groups_are_coupled_and_the_energy_is_convex():
    y, *args, _ = scale.layer(60, 600, 0, "cpu")
    H = torch.autograd.functional.hessian(lambda u: scale.energy(u, *(a.detach() for a in args)), y)
    between = H.clone()
    for k in range(0, 60, scale.GROUP):
        between[k : k + scale.GROUP, k : k + scale.GROUP] = 0
    assert between.abs().max() > 1e-3
    assert torch.linalg.eigvalsh(H).min() >= 1 - 1e-10


def test_gradient_is_that_of_central_differences():
    problem = scale.layer(20, 200, 0, "cpu")
    gradients = scale.Pass(SMOKE, problem, dil.CG(rtol=1e-12)).gradients()
    direction = torch.randn(problem.first.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def loss(step):
        args = (problem.x.detach(), problem.first.detach() + step * direction, problem.second.detach())
        y = dil.argmin(scale.energy, problem.y, args, solver=dil.Newton(rtol=1e-13)).value
        return float((y * problem.v).sum())

    expected = (loss(1e-5) - loss(-1e-5)) / 2e-5
    assert float((gradients[1] * direction).sum()) == pytest.approx(expected, rel=1e-6)


def test_cg_and_naive_agree_and_cg_takes_less_memory(records):
    for record in records:
        cells = record["metrics"]["cells"]
        assert all(cell["cg"]["residual"] <= SMOKE.rtol for cell in cells)
        both = [cell for cell in cells if "seconds" in cell["naive"]]
        assert both and all(cell["agreement"] < 10 * SMOKE.rtol for cell in both)
        assert all(cell["cg"]["peak"] < cell["naive"]["peak"] for cell in both)


def test_memory_of_cg_is_a_few_vectors():
    """Also of the memory's measurement: the gradient alone is D_y + D_θ numbers."""
    for unknowns, parameters in ((10_000, 100), (1000, 100_000)):
        found = scale.Pass(SMOKE, scale.layer(unknowns, parameters, 0, "cpu"), dil.CG(rtol=1e-3))
        assert 1 <= found.peak / (scale.BYTES * (unknowns + parameters)) < 25


def test_product_with_very_many_groups_is_that_of_a_loop():
    """More matrices at once than 65535, what a grid of CUDA has room for."""
    groups, hidden = 70_000, scale.LEAST_HIDDEN
    y, x, first, second, v = scale.layer(scale.GROUP * groups, 100 * groups, 0, "cpu")
    first, second = first.detach(), second.detach()
    assert first.shape == (groups, scale.GROUP, hidden)

    def units(u, k):
        return softplus(u.view(groups, -1)[k] @ first[k])

    def slope(u, k):
        found = u.view(groups, -1)[k] - x.view(groups, -1)[k]
        for h in range(hidden):
            taker, at = divmod(h * groups + k, hidden)  # the group that the shuffle gives this unit to, and its place there
            places = [divmod(taker * hidden + other, groups) for other in range(hidden)]
            given = torch.stack([units(u, giver)[unit] for unit, giver in places])
            weight = (torch.sigmoid(given @ second[taker] ** 2) * second[taker, at] ** 2).sum()
            found = found + weight * torch.sigmoid(u.view(groups, -1)[k] @ first[k, :, h]) * first[k, :, h]
        return found

    leaf = y.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(scale.energy(leaf, x, first, second), leaf, create_graph=True)
    (product,) = torch.autograd.grad(gradient, leaf, v)
    for k in (0, 7, 65_535, 65_536, groups - 1):
        value, tangent = torch.func.jvp(lambda u, k=k: slope(u, k), (y,), (v,))
        torch.testing.assert_close(gradient.detach().view(groups, -1)[k], value.detach())
        torch.testing.assert_close(product.view(groups, -1)[k], tangent.detach())


@pytest.mark.parametrize("limit, status", [({"memory": 1e5}, "out of memory"), ({"seconds": 1.0}, "too long")])
def test_naive_is_refused_where_it_would_not_end(limit, status):
    config = replace(SMOKE, **limit)
    sizes = ((50, 0.2, 10**5), (100, 0.8, 10**6))  # time grows as D_y², memory tenfold from one to the next
    before = [{"unknowns": n, "parameters": 1000, "naive": {"seconds": t, "peak": peak}} for n, t, peak in sizes]
    before.append({"unknowns": 150, "parameters": 1000, "naive": {"status": "too long"}})
    found = scale._refused(config, 200, 1000, before)
    assert found == {"status": status, "needs": pytest.approx(10**7, abs=1), "expected_seconds": 3.2, "tried": False}
    assert scale._refused(SMOKE, 100, 1000, before[:1]) is None


def test_naive_is_tried_where_its_own_growth_allows():
    times = ((1000, 0.1), (3000, 0.9))
    before = [{"unknowns": n, "parameters": 10**4, "naive": {"seconds": t, "peak": 24 * n**2}} for n, t in times]
    assert scale._refused(replace(SMOKE, seconds=11, memory=1e10), 10**4, 10**4, before) is None  # 10 s, by the cube 33 s


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling")])
@pytest.mark.parametrize("solver", ["CG", "Dense"])
def test_running_out_of_memory_is_recorded(solver, error, monkeypatch):
    def full(self, *args, **kwargs):
        raise error

    monkeypatch.setattr(getattr(dil, solver), "solve", full)
    found = scale.cell(SMOKE, 100, 1000, 0)
    status = {"status": "out of memory", "needs": 80_000, "expected_seconds": 0.0, "tried": True}
    assert found["naive"] == status and found["agreement"] is None
    assert found["cg"] == status if solver == "CG" else found["cg"]["status"] == "converged"


def test_other_errors_are_raised(monkeypatch):
    def broken(self, *args, **kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr(dil.Dense, "solve", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        scale.cell(SMOKE, 100, 1000, 0)


def test_brief_calls_are_repeated_and_take_turns(monkeypatch):
    clock, order = [0.0], []
    monkeypatch.setattr(scale, "_clock", lambda config: clock[0])

    def one(name, seconds):
        made = scale.Pass(replace(SMOKE, repeats=3, timed=0.75), scale.layer(20, 200, 0, "cpu"), dil.CG())
        made.gradients = lambda: (order.append(name), clock.__setitem__(0, clock[0] + seconds))
        return made

    passes = [one("short", 0.125), one("long", 0.5), one("slow", 11.0)]
    scale.in_turns(passes)
    assert [len(each.times) for each in passes] == [6, 3, 1]
    assert order[:5] == ["short", "long", "slow", "short", "long"]


def test_a_size_in_two_sweeps_is_measured_once(records):
    unknowns, _, both = ({c["unknowns"]: c for c in r["metrics"]["cells"] if c["parameters"] == 10**4} for r in records)
    assert unknowns[1000] == both[1000]


def test_presets_and_devices():
    paper = scale.variants(scale.Config.preset("paper"))
    assert [(config.device, config.sweep) for config in paper] == [(d, s) for d in ("cpu", "cuda") for s in scale.SWEEPS]
    assert len({str(runner.plain(config)) for config in paper}) == len(paper)  # records of CPU and GPU are told apart
    largest = [max(scale.sizes(config)) for config in paper if config.device == "cuda"]
    assert max(n for n, _ in largest) == 10**7 and max(p for _, p in largest) == 10**8
    if not torch.cuda.is_available():
        with pytest.raises(runner.Skip, match="needs a GPU"):
            scale.run(paper[-1], 0)


def test_crossing_is_between_the_sizes():
    cells = [{"unknowns": n, "cg": {"seconds": 1.0}, "naive": {"seconds": t}} for n, t in ((10, 0.1), (1000, 10.0))]
    assert scale_page.crossing(cells) == pytest.approx(100)
    assert scale_page.crossing(cells[:1]) is None


def test_growth_is_that_of_the_last_decade():
    times = ((10, 1.0), (100, 1.0), (300, 9.0), (1000, 100.0))
    cells = [{"unknowns": n, "naive": {"seconds": t}} for n, t in times]
    assert scale_page.power(cells, "naive") == pytest.approx(2)


def test_page_of_a_sweep_in_which_cg_ran_out_of_memory(records):
    full = copy.deepcopy(records)
    full[2]["metrics"]["cells"][-1] |= {"cg": {"status": "out of memory"}, "agreement": None}
    assert "| 1,000 | 10,000 | out of memory | - |" in scale_page.text(full)
    assert scale_page.verdicts(full)[0].verdict == "not reproduced"


def test_page_of_the_runs(records, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    for fig in scale_page.figures(records).values():
        fig.savefig(io.StringIO(), format="svg")
        sizes = [text.get_fontsize() for text in fig.findobj(matplotlib.text.Text) if text.get_text()]
        assert fig.get_figwidth() == page.WIDTH and min(sizes) >= SMALLEST_LETTERS
    section = scale_page.section(records)
    assert section.body.count("<figure>") == 3 and "<script" not in section.body
    assert {verdict.verdict for verdict in scale_page.verdicts(records)} <= set(page.VERDICTS)
    scale_page.write(records, tmp_path)
    assert (tmp_path / "scale.md").read_text() == scale_page.text(records)
    assert len(list(tmp_path.glob("scale-*.svg"))) == 3


def test_committed_page_is_that_of_the_results():
    records = runner.finished(runner.selected("scale", runner.Options("paper", runner.COMMITTED)))
    assert scale_page.text(records) == (Path(__file__).parent.parent / "docs" / "scale.md").read_text()
