"""The estimated errors: what they are made of, how often they are true, and the page against its results."""

import io
import time
from pathlib import Path

import pytest
import torch

import torchdil as dil
from benchmarks.scale import energies
from experiments import coverage, coverage_page, page, runner
from torchdil.operator import Operator

# Of the committed results: the aim. Of the smoke run, which is a sixth of their size and has smaller problems, a little less.
WITHIN, BOUNDS = 0.95, 0.90
SMOKE_WITHIN, SMOKE_BOUNDS = 0.90, 0.85
SECONDS = 20
FACTOR = 10.0  # how far an estimate may be off
# Relative, of what a method has seen after as many steps as there are unknowns; of NormalCG, which rounding takes further.
EXACT, ROUNDED = 1e-6, 0.1
ROUNDING = 1e-9  # relative
SMALLEST_LETTERS = 9  # points
DOCS = Path(__file__).parent.parent / "docs"
RECORDS = runner.selected("coverage", runner.Options("paper", runner.COMMITTED))
COMMITTED = page.only_run(RECORDS)
KRYLOV = [dil.CG(), dil.MINRES(), dil.GMRES(restart=60), dil.NormalCG()]
LOWER_BOUNDS = [dil.MINRES, dil.GMRES, dil.NormalCG]


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def definite(seed, samples, n, condition=100.0):
    """Symmetric matrices (B, n, n) with eigenvalues from 1 to `condition`."""
    Q = torch.linalg.qr(draw(seed, samples, n, n))[0]
    A = (Q * torch.logspace(0, torch.log10(torch.tensor(condition)).item(), n, dtype=torch.float64)) @ Q.mT
    return (A + A.mT) / 2


def linear(A, linear_solver, *, dtype=torch.float64, scale=1.0):
    """½ yᵀA y - xᵀy, minimised by a few steps of gradient descent: the solution, the cotangent, and x with its gradient."""
    A = (scale * A).to(dtype)
    x = (scale * draw(1, *A.shape[:2])).to(dtype).requires_grad_()
    solution = dil.argmin(
        lambda y, x: 0.5 * (y * coverage.times(A, y)).sum(1) - (x * y).sum(1),
        torch.zeros_like(x).detach(),
        (x,),
        solver=dil.GradientDescent(max_steps=3),
        linear_solver=linear_solver,
        on_failure="ignore",
    )
    v = draw(2, *A.shape[:2]).to(dtype)
    solution.value.backward(v)
    return solution, v, x


def summary(result, error, by="all", name="all", number="estimate"):
    wanted = {"error": error, "by": by, "name": name, "number": number}
    (entry,) = [entry for entry in result["summary"] if wanted.items() <= entry.items()]
    return entry


@pytest.fixture(scope="module")
def records():
    began = time.process_time()
    with torch.device("cpu"):
        found = runner.execute(runner.Task("coverage", coverage.Config.preset("smoke"), (0,)))
    if torch.get_default_device().type == "cpu":
        assert time.process_time() - began < SECONDS
    return found


@pytest.fixture(scope="module")
def smoke(records):
    return page.only_run(records)


# --- how often they are true -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", ["value", "adjoint"])
def test_estimates_cover_the_true_errors(smoke, error):
    found, textbook = summary(smoke, error), summary(smoke, error, number="classic")
    assert found["samples"] > 100
    assert found["within"] >= SMOKE_WITHIN and found["bounds"] >= SMOKE_BOUNDS
    assert textbook["within"] < SMOKE_WITHIN  # the test can fail


@pytest.mark.parametrize("error", ["value", "adjoint"])
def test_committed_results_meet_the_aim(error):
    found, textbook = summary(COMMITTED, error), summary(COMMITTED, error, number="classic")
    assert found["within"] >= WITHIN and found["bounds"] >= BOUNDS
    assert textbook["within"] < 0.85
    for solver in coverage.LINEAR["argmin"]:
        assert summary(COMMITTED, error, "linear", solver.__name__)["within"] >= SMOKE_WITHIN


def test_summary_counts_what_it_says():
    names = ["argmin", "Newton", "CG", "squared", 3, 10.0]
    numbers = [(1.0, 2.0), (1.0, 0.5), (1.0, 20.0), (1.0, 0.01), (None, None), (1.0, None)]
    rows = [[*names, true, estimate, None, *[None] * 6] for true, estimate in numbers]
    found = summary({"summary": coverage.summary(rows)}, "value")
    assert (found["samples"], found["left_out"]) == (4, 1)
    assert (found["bounds"], found["within"], found["both"]) == (0.5, 0.5, 0.25)


@pytest.mark.parametrize("kind", list(coverage.LINEAR))
def test_problems_are_solved_by_their_exact_solutions(kind):
    """y*, J and the gradient against torch's own derivatives of F and of the score."""
    config = coverage.Config.preset("smoke")
    problems = coverage.Problems(coverage.Draw(3), kind, config)
    x, w = problems.parameters
    F = problems.residual(problems.y, x, w).norm(dim=1)
    size = problems.scale * problems.y.norm(dim=1)
    assert (F / size).max() < 1e-13
    y = problems.y.clone().requires_grad_()
    value = problems.residual(y, x, w)
    rows = [torch.autograd.grad(value[:, i].sum(), y, retain_graph=True)[0] for i in range(y.shape[1])]
    tolerance = {"rtol": ROUNDING, "atol": ROUNDING * problems.scale}
    torch.testing.assert_close(problems.jacobian(problems.y), torch.stack(rows, dim=1), **tolerance)
    if kind == "argmin":
        score = torch.func.grad(lambda y: problems.score(y, x, w).sum())(2 * problems.y)
        torch.testing.assert_close(score, problems.residual(2 * problems.y, x, w), **tolerance)
    g = draw(4, *x.shape)
    pulled = torch.func.vjp(lambda x, w: problems.residual(problems.y, x, w), x, w)[1](-g)
    torch.testing.assert_close(problems.gradient(problems.y, g), torch.cat(pulled, dim=1), **tolerance)


@pytest.mark.parametrize("name", ["network, 2 x 30 hidden", "total variation", "field of experts"])
def test_estimates_hold_for_energies_of_images(name):
    """Not the family of problems which the estimates were tuned on."""
    n = 24**2
    energy, (x, *rest) = energies(n)[name]
    exact = dil.argmin(energy, x, (x, *rest), solver=dil.Newton(rtol=1e-13), on_failure="ignore").value.detach()
    for solver in (dil.GradientDescent(rtol=1e-2), dil.LBFGS(rtol=1e-3), dil.Newton(rtol=1e-2)):
        for linear_solver in (dil.CG, dil.MINRES, dil.GMRES, dil.NormalCG, dil.BiCGStab):
            leaf = x.clone().requires_grad_()
            solution = dil.argmin(
                energy,
                torch.zeros_like(x),
                (leaf, *rest),
                solver=solver,
                linear_solver=linear_solver(rtol=1e-3),
                on_failure="ignore",
            )
            y = solution.value.detach()
            solution.value.backward(exact)
            (g,) = torch.autograd.grad(
                dil.argmin(
                    energy, y, (leaf, *rest), solver=lambda f, y: y, linear_solver=dil.Dense(), on_failure="ignore"
                ).value,
                leaf,
                exact,
            )
            true = (y - exact).norm(), (leaf.grad - g).norm() / g.norm()
            report = solution.report
            for estimate, error in zip((report.value_error, report.adjoint_error), true, strict=True):
                assert error / FACTOR <= estimate <= error * FACTOR


# --- what they are made of ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("linear_solver", KRYLOV, ids=lambda s: type(s).__name__)
def test_a_whole_krylov_space_tells_the_error_of_y(linear_solver):
    A = definite(0, 3, 12, condition=10.0)
    solution, _, x = linear(A, linear_solver)
    error = (solution.value.detach() - coverage.solve(A, x.detach())).norm(dim=1)
    seen = solution.report.backward.stats.evidence.seen
    torch.testing.assert_close(seen, error, rtol=ROUNDED if isinstance(linear_solver, dil.NormalCG) else EXACT, atol=0)
    assert ((solution.report.value_error >= error) & (solution.report.value_error <= FACTOR * error)).all()


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("solver", LOWER_BOUNDS, ids=lambda s: s.__name__)
def test_a_part_of_the_krylov_space_tells_a_lower_bound(solver, steps):
    A = definite(0, 5, 30, condition=1e4)
    solution, _, x = linear(A, solver(max_steps=steps))
    error = (solution.value.detach() - coverage.solve(A, x.detach())).norm(dim=1)
    seen = solution.report.backward.stats.evidence.seen
    assert (seen <= (1 + ROUNDING) * error).all() and (seen > 0).all()


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_a_direct_solve_tells_both_errors(damping):
    A = definite(0, 4, 8)
    solution, v, x = linear(A, dil.Dense(damping=damping))
    error = (solution.value.detach() - coverage.solve(A, x.detach())).norm(dim=1)
    torch.testing.assert_close(solution.report.value_error, 1.1 * error, rtol=ROUNDING, atol=0)
    if damping:
        g = x.grad
        wrong = (g - coverage.solve(A, v)).norm(dim=1) / g.norm(dim=1)
        torch.testing.assert_close(solution.report.adjoint_error, 1.1 * wrong, rtol=ROUNDING, atol=0)
    else:
        assert (solution.report.adjoint_error < 1e-12).all()


@pytest.mark.parametrize("linear_solver", [*KRYLOV, dil.BiCGStab(), dil.Dense()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("scale", [2.0**100, 2.0**-100])
def test_estimates_do_not_depend_on_the_scale_of_the_score(linear_solver, scale):
    """A power of two changes no digit, but would show a constant that has a unit."""
    A = definite(0, 3, 10)
    one, other = (linear(A, linear_solver, scale=c)[0].report for c in (1.0, scale))
    for name in ("value_error", "adjoint_error"):
        torch.testing.assert_close(getattr(other, name), getattr(one, name), rtol=ROUNDING, atol=0)
        assert (getattr(one, name) > 0).all()


@pytest.mark.parametrize("linear_solver", [*KRYLOV, dil.BiCGStab(), dil.Dense()], ids=lambda s: type(s).__name__)
def test_estimates_in_float32_are_close_to_those_in_float64(linear_solver):
    A = definite(0, 3, 10)
    double, single = (linear(A, linear_solver, dtype=dtype)[0].report for dtype in (torch.float64, torch.float32))
    assert single.value_error.dtype == single.adjoint_error.dtype == torch.float32
    torch.testing.assert_close(single.value_error.double(), double.value_error, rtol=0.3, atol=0)
    assert ((single.adjoint_error > 0) & (single.adjoint_error < 1e-2)).all()


@pytest.mark.parametrize("linear_solver", [*KRYLOV, dil.BiCGStab(), dil.Dense()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("hard", [torch.nan, torch.inf, 1e12], ids=["NaN", "infinity", "ill-conditioned"])
def test_a_hard_sample_changes_no_other_estimate(linear_solver, hard):
    A = definite(0, 4, 10)
    alone = linear(A, linear_solver)[0].report
    A[2] = A[2] * torch.linspace(1, hard, 10, dtype=torch.float64) if hard == 1e12 else hard
    batch = linear(A, linear_solver)[0].report
    others = torch.tensor([0, 1, 3])
    for mine, theirs in zip((batch.value_error, batch.adjoint_error), (alone.value_error, alone.adjoint_error), strict=True):
        torch.testing.assert_close(mine[others], theirs[others], rtol=ROUNDING, atol=0)


@pytest.mark.parametrize("solver", [dil.CG, dil.MINRES, dil.GMRES, dil.NormalCG, dil.BiCGStab])
def test_estimates_cost_no_product_and_keep_no_vector(solver):
    A, v = definite(0, 2, 20), draw(1, 2, 20)
    products = []
    for watched in (None, draw(2, 2, 20)):
        operator = Operator(lambda y: coverage.times(A, y), v, symmetric=True)
        operator.watched = watched
        stats = solver(rtol=1e-4).solve(operator, v, transpose=True).stats
        products.append(operator.products)
        kept = list(vars(stats.evidence).values())
        for value in kept:  # lists grow as they are walked through
            if callable(value) and not isinstance(value, type):  # what works a number out, and what it does so from
                kept += vars(value.__self__).values()
            elif isinstance(value, (list, tuple)):
                kept += value
            assert not isinstance(value, torch.Tensor) or value.shape == (2,) or value.numel() == 0
    assert products[0] == products[1]


def test_estimates_in_the_shape_of_the_batch():
    A = definite(0, 6, 5)
    x = draw(1, 2, 3, 5).requires_grad_()
    solution = dil.root(
        lambda y, x: coverage.times(A, y.reshape(6, 5)).reshape(2, 3, 5) - x,
        torch.zeros(2, 3, 5, dtype=torch.float64),
        (x,),
        linear_solver=dil.GMRES(rtol=1e-3),
        batch_dims=2,
    )
    solution.value.sum().backward()
    assert solution.report.value_error.shape == solution.report.adjoint_error.shape == (2, 3)


@pytest.mark.parametrize(
    "linear_solver",
    [dil.CG(preconditioner=dil.Jacobi()), dil.GMRES(preconditioner=lambda r: r), dil.JacobianFree(), dil.Neumann()],
    ids=["CG", "GMRES", "JacobianFree", "Neumann"],
)
def test_what_is_not_known_is_none(linear_solver):
    report = linear(definite(0, 2, 4, condition=1.5), linear_solver)[0].report
    assert report.value_error is None and report.adjoint_error is None


def test_of_samples_with_nothing_to_solve_the_adjoint_has_no_error():
    A = definite(0, 2, 6)
    x = draw(1, 2, 6).requires_grad_()
    solution = dil.argmin(
        lambda y: 0.5 * (y * coverage.times(A, y)).sum(1) - (x * y).sum(1),
        torch.zeros_like(x).detach(),
        linear_solver=dil.CG(),
    )
    solution.value[0].sum().backward()
    value, adjoint = solution.report.value_error, solution.report.adjoint_error
    assert value[0].isfinite() and value[1].isnan()  # nothing was seen of J
    assert 0 < adjoint[0] < 1e-8 and adjoint[1] == 0


def test_auto_knows_of_the_method_that_solved_a_sample():
    """The second sample is indefinite: CG gives up, MINRES goes on."""
    A = definite(0, 2, 40)
    A[1] = A[1] - 5 * torch.eye(40, dtype=torch.float64)
    x = draw(1, 2, 40).requires_grad_()
    y_star = coverage.solve(A, x.detach())
    nearby = y_star + 1e-3 * draw(2, 2, 40)
    reports = []
    for linear_solver in (dil.Auto(rtol=1e-3, dense_below=0), dil.Dense()):
        # A callable solver keeps the report, which attach() does not hand out.
        solution = dil.argmin(
            lambda y, x: 0.5 * (y * coverage.times(A, y)).sum(1) - (x * y).sum(1),
            nearby,
            (x,),
            solver=lambda f, y: y,
            linear_solver=linear_solver,
            on_failure="ignore",
        )
        x.grad = None
        solution.value.backward(draw(3, 2, 40))
        reports.append((solution.report, x.grad))
    (report, gradient), (_, exact) = reports
    assert report.backward.stats.method == "CG, then MINRES"
    true = (gradient - exact).norm(dim=1) / exact.norm(dim=1)
    assert ((report.adjoint_error >= true / FACTOR) & (report.adjoint_error <= true * FACTOR)).all()
    error = (nearby - y_star).norm(dim=1)
    assert ((report.value_error >= error / FACTOR) & (report.value_error <= error * FACTOR)).all()


def test_warm_starts_keep_their_estimates():
    A = definite(0, 3, 40, condition=1e3)
    solver = dil.WarmStart(dil.CG(rtol=1e-2))
    linear(A, solver)
    solution, v, x = linear(A * 1.1, solver)
    exact = coverage.solve(1.1 * A, v)
    true = (x.grad - exact).norm(dim=1) / exact.norm(dim=1)
    estimate = solution.report.adjoint_error
    assert ((estimate >= true / FACTOR) & (estimate <= true * FACTOR)).all()


def test_estimates_under_torch_func_are_those_of_autograd():
    A, v = definite(0, 1, 8)[0], draw(2, 8)
    reports = []

    def loss(x):
        solution = dil.root(
            lambda y, x: A @ y + 0.1 * y**3 - x,
            torch.zeros(8, dtype=torch.float64),
            (x,),
            solver=dil.Newton(max_steps=1),
            linear_solver=dil.GMRES(rtol=1e-3),
            on_failure="ignore",
        )
        reports.append(solution.report)
        return (solution.value * v).sum()

    x = draw(1, 8).requires_grad_()
    loss(x).backward()
    torch.func.grad(loss)(x.detach())
    (mine, theirs) = ([report.value_error, report.adjoint_error] for report in reports)
    torch.testing.assert_close(mine, theirs, rtol=ROUNDING, atol=0)


def test_a_tangent_tells_nothing_of_y_where_J_is_not_symmetric():
    """It is solved for with J itself, whose products are no parts of J⁻¹F."""
    import torch.autograd.forward_ad as fwd

    A = definite(0, 1, 8)[0] + draw(5, 8, 8)
    with fwd.dual_level():
        x = fwd.make_dual(draw(1, 8), draw(2, 8))
        for linear_solver in (dil.GMRES(), dil.Dense()):
            solution = dil.root(lambda y: A @ y - x, torch.zeros(8, dtype=torch.float64), linear_solver=linear_solver)
            assert solution.report.value_error is None and solution.report.adjoint_error is not None


# --- the page ----------------------------------------------------------------------------------------------------------------


def test_page_is_that_of_the_results():
    assert coverage_page.text(RECORDS) == (DOCS / "quality.md").read_text()
    assert COMMITTED["summary"] == coverage.summary(COMMITTED["rows"])


def test_sentences_of_the_page_are_true():
    """What the page says in words, beside its numbers."""
    short, blind = coverage_page.misses(COMMITTED)
    assert short > 0 and blind > 0.8 * short
    squared, plain = (summary(COMMITTED, "gradient", "loss", loss) for loss in ("squared", "linear"))
    assert squared["within"] > 0.9 > 0.8 > plain["within"] and plain["quantiles"][-1] > 100
    left = [dict(zip(coverage.COLUMNS, row, strict=True)) for row in COMMITTED["rows"]]
    assert sum(row["adjoint_true"] is None for row in left if row["linear"] == "Dense") > 0.4 * 288


def test_section_says_what_the_summary_does(records, smoke):
    pytest.importorskip("matplotlib")
    section = coverage_page.section(records)
    assert section.body.count("<figure>") == section.body.count("<table>") == 1 and "<script" not in section.body
    for verdict, error in zip(coverage_page.verdicts(records), ("value", "adjoint"), strict=True):
        assert verdict.verdict == "new" and verdict.runs == summary(smoke, error)["samples"]


def test_figure_has_letters_of_a_readable_size(records):
    matplotlib = pytest.importorskip("matplotlib")
    (fig,) = coverage_page.figures(records).values()
    fig.savefig(io.StringIO(), format="svg")
    sizes = [text.get_fontsize() for text in fig.findobj(matplotlib.text.Text) if text.get_text()]
    assert min(sizes) >= SMALLEST_LETTERS and fig.get_figwidth() <= 7.5
