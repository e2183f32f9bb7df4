"""The experiment of preconditioners: its layers and ways against dense algebra, its counts, and its page."""

import io
import time
from pathlib import Path

import pytest
import torch

import torchdil as dil
from experiments import page, preconditioning, preconditioning_page, runner
from experiments.preconditioning_problems import PROBLEMS
from torchdil.operator import Operator

# Seconds of the processor.
SECONDS = 20
SMALLEST_LETTERS = 9
SMOKE = preconditioning.Config.preset("smoke")


@pytest.fixture(scope="module")
def records():
    began = time.process_time()
    found = []
    for config in preconditioning.variants(SMOKE):
        metrics = runner._json(preconditioning.run(config, 0))
        found.append(runner._record(runner.Task("preconditioning", config, (0,)), 0, 1.0) | {"metrics": metrics})
    assert time.process_time() - began < SECONDS
    return found


def hessian(problem, y):
    def energy(row):
        return problem.energy(row.unsqueeze(0), problem.parameters, tuple(d[:1] if _by_sample(d) else d for d in problem.data))

    def _by_sample(tensor):
        return len(problem.start) > 1 and len(tensor) == len(problem.start)

    return torch.autograd.functional.hessian(lambda row: energy(row).sum(), y[0])


@pytest.mark.parametrize("name", PROBLEMS)
def test_layers_have_a_positive_definite_hessian_at_their_solution(name):
    problem = PROBLEMS[name](0, SMOKE.size)
    solver = dil.LBFGS(rtol=1e-6, max_steps=5000, history=30)
    solution = dil.argmin(problem.energy, problem.start, (problem.parameters, problem.data), solver=solver, on_failure="raise")
    assert torch.linalg.eigvalsh(hessian(problem, solution.value.detach())).min() > 0


def dense_system(n=40):
    """A positive definite matrix, its operator, a right-hand side."""
    generator = torch.Generator().manual_seed(0)
    A = torch.randn(2, n, n, generator=generator, dtype=torch.float64)
    A = A @ A.mT / n + torch.diag(torch.logspace(-1, 1, n, dtype=torch.float64))
    operator = Operator(lambda y: (A @ y.unsqueeze(2)).squeeze(2), torch.zeros(2, n, dtype=torch.float64), symmetric=True)
    return A, operator, torch.randn(2, n, generator=generator, dtype=torch.float64)


def test_factor_and_diagonal_are_those_of_the_matrix():
    A, operator, r = dense_system()
    exact = torch.linalg.solve(A, r)
    torch.testing.assert_close(preconditioning.Factor().build(operator, True, 0.0)(r), exact, rtol=1e-9, atol=1e-10)
    diagonal = torch.diagonal(A, dim1=1, dim2=2)
    torch.testing.assert_close(preconditioning.Diagonal().build(operator, True, 0.0)(r), r / diagonal)


def test_kept_preconditioner_is_made_once():
    operator = dense_system()[1]
    kept = preconditioning.Kept(dil.Nystrom(rank=5))
    first = kept.build(operator, True, 0.0)
    before = operator.products
    assert kept.build(operator, True, 0.0) is first and operator.products == before > 0


def test_inner_cg_makes_as_many_products_as_it_has_steps():
    _, operator, r = dense_system()
    apply = preconditioning.InnerCG(4).build(operator, True, 0.0)
    apply(r)
    assert operator.products == 4


def test_cg_in_float32_solves_to_its_tolerance():
    problem = PROBLEMS["scales"](0, SMOKE.size)
    y = problem.start

    def gradient(u):
        return torch.autograd.grad(problem.energy(u, problem.parameters, problem.data).sum(), u, create_graph=True)[0]

    operator = Operator(gradient, y, symmetric=True)
    inner = preconditioning.InnerFloat32(problem, problem.parameters, 1e-4)
    r = 1e-30 * torch.randn(y.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)  # below float32's range
    z = inner.build(operator, True, 0.0)(r)
    left = (r - operator.rmv(z)).norm(dim=1) / r.norm(dim=1)
    assert z.dtype == torch.float64 and (left < 2e-4).all()
    assert inner.products > 0 and operator.products == 1


def test_all_ways_give_the_solution_of_a_direct_solve(records):
    for record in records:
        for way, found in record["metrics"]["ways"].items():
            assert found["run"]["failed"] == 0, (record["config"]["problem"], way)
            assert found["error"] < 100 * SMOKE.rtol


def test_products_are_counted(records):
    steps, inner = SMOKE.steps, SMOKE.inner_steps
    for record in records:
        ways, n = record["metrics"]["ways"], record["metrics"]["unknowns"]
        for part in ("first", "run"):
            assert ways["none"][part]["products"] == ways["none"][part]["steps"]
            assert ways["inner CG"][part]["products"] == (inner + 1) * ways["inner CG"][part]["steps"]
        assert ways["factor, kept"]["first"]["products"] == n + 1 and ways["factor, kept"]["first"]["steps"] == 1
        assert ways["factor, kept"]["run"]["products"] == n + ways["factor, kept"]["run"]["steps"]
        assert ways["direct"]["first"]["products"] == n and ways["direct"]["run"]["products"] == steps * n
        made = min(SMOKE.rank, n)
        assert ways["Nyström"]["run"]["products"] == steps * made + ways["Nyström"]["run"]["steps"]
        assert ways["Nyström, kept"]["run"]["products"] == made + ways["Nyström, kept"]["run"]["steps"]
        assert ways["float32, flexible"]["run"]["cheap"] > ways["float32, flexible"]["run"]["products"]
        assert ways["secants"]["run"]["products"] == ways["secants"]["run"]["steps"]


def test_forward_steps_reach_the_secant_memory(records):
    """The residuals would be those of plain CG without them."""
    for record in records:
        assert record["metrics"]["ways"]["secants"]["history"] != record["metrics"]["ways"]["none"]["history"]


def test_histories_end_at_the_tolerance(records):
    for record in records:
        for way, found in record["metrics"]["ways"].items():
            if way == "direct":
                assert not found["history"] and found["first"]["steps"] == 1
                continue
            assert found["history"][0] == [0, 0.0] and 10 ** found["history"][-1][1] <= 1.01 * SMOKE.rtol
            assert found["history"][-1][0] == found["first"]["steps"]


def test_page_of_the_runs(records, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    for fig in preconditioning_page.figures(records).values():
        fig.savefig(io.StringIO(), format="svg")
        sizes = [text.get_fontsize() for text in fig.findobj(matplotlib.text.Text) if text.get_text()]
        assert fig.get_figwidth() == page.WIDTH and min(sizes) >= SMALLEST_LETTERS
    section = preconditioning_page.section(records)
    assert section.body.count("<figure>") == 2 and "<script" not in section.body
    assert {verdict.verdict for verdict in preconditioning_page.verdicts(records)} == {"new"}
    preconditioning_page.write(records, tmp_path)
    assert (tmp_path / "preconditioning.md").read_text() == preconditioning_page.text(records)
    assert len(list(tmp_path.glob("preconditioning-*.svg"))) == 2


def timed(seconds, seed):
    """A record of one layer with these times of the run; every way has made as many products as plain CG."""
    solves = {"steps": 10, "products": 10, "cheap": 0, "failed": 0}
    ways = {
        way: {part: solves | {"seconds": seconds.get(way, 1.0)} for part in ("first", "run")}
        for way in preconditioning_page.LOOKS
    }
    return {"config": {"problem": "network", "steps": 10, "inner_steps": 5}, "seed": seed, "metrics": {"ways": ways}}


def test_a_way_pays_only_with_every_seed():
    seconds = {"Jacobi": 0.5, "Nyström": 0.5, "secants": 2.0}, {"Jacobi": 0.8, "Nyström": 1.2, "secants": 1.0}
    both = [timed(some, seed) for seed, some in enumerate(seconds)]
    for some, expected in ((both, [(1, 0), (0, 0), (0, 0)]), (both[:1], [(1, 0), (1, 0), (0, 1)])):
        assert [preconditioning_page._paying(some, way) for way in ("Jacobi", "Nyström", "secants")] == expected
    cells = {row["preconditioner"]: row["network"] for row in preconditioning_page.summary(both)}
    assert cells["Nyström"] == "0.77, 0.5 to 1.2 (1)"
    assert {row["preconditioner"]: row["network"] for row in preconditioning_page.summary(both[:1])}["Nyström"] == "0.5 (1)"


@pytest.mark.parametrize("way", preconditioning_page.FLEXIBLE)
def test_verdict_looks_at_both_flexible_preconditioners(way):
    (verdict,) = preconditioning_page.verdicts([timed({}, 0)])
    assert "neither paid" in verdict.why
    (verdict,) = preconditioning_page.verdicts([timed({way: 0.5}, 0)])
    assert f"paid: {preconditioning_page.LOOKS[way][0]} on 1" in verdict.why


def test_every_way_and_every_layer_has_a_look():
    problem = PROBLEMS["scales"](0, SMOKE.size)
    assert list(preconditioning.ways(SMOKE, problem, problem.parameters)) == list(preconditioning_page.LOOKS)
    assert list(PROBLEMS) == list(preconditioning_page.MARKERS)


def test_committed_page_is_that_of_the_results():
    records = runner.finished(runner.selected("preconditioning", runner.Options("paper", runner.COMMITTED)))
    assert len(records) == len(PROBLEMS) * preconditioning.Config.preset("paper").runs
    text = (Path(__file__).parent.parent / "docs" / "preconditioning.md").read_text()
    assert preconditioning_page.text(records) == text
