"""What a person sees: the live table of a solver, and the figure of a report."""

import io
import sys

import pytest
import torch

import torchdil as dil

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")


def score(y, x):
    return ((y - x) ** 2 + torch.cosh(y)).sum(-1)


X = torch.linspace(-2, 2, 6, dtype=torch.float64).view(3, 2)
SOLVERS = [dil.Newton(verbose=True), dil.LBFGS(verbose=True), dil.GradientDescent(verbose=True)]


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_a_line_a_step(solver, capsys):
    solution = dil.argmin(score, torch.zeros_like(X), (X,), solver=solver)
    title, headings, *lines, ending = capsys.readouterr().out.splitlines()
    assert ending == "  ended: converged 3"
    assert title == f"{type(solver).__name__}: argmin, 3 samples"
    assert headings.split("  ")[0].strip() == "" and "‖F‖, worst" in headings and "score, mean" in headings
    rows = [line.split() for line in lines]
    assert [int(row[0]) for row in rows] == list(range(int(solution.stats.steps.max()) + 1))
    running = [int(row[1]) for row in rows]
    assert running[0] == 3 and running[-1] == 0 and running == sorted(running, reverse=True)
    for row, residual in zip(rows, solution.stats.history, strict=True):
        assert float(row[2]) == pytest.approx(float(residual.max()), rel=1e-3)
    assert float(rows[-1][4]) == pytest.approx(float(score(solution.value, X).mean()), rel=1e-4)


def test_long_runs_are_thinned_out_and_end_with_the_last_step(capsys):
    solver = dil.GradientDescent(step_size=1e-3, max_steps=2345, verbose=True)
    dil.argmin(score, torch.zeros_like(X), (X,), solver=solver, on_failure="ignore")
    steps = [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()[2:-1]]
    assert steps == [*range(20), *range(20, 200, 10), *range(200, 2000, 100), 2000, 2345]


def test_a_root_has_no_score(capsys):
    dil.root(lambda y: y**3 + y - 1, torch.zeros(2, dtype=torch.float64), solver=dil.Newton(verbose=True))
    title, _, *lines, _ = capsys.readouterr().out.splitlines()
    assert title == "Newton: root" and all(line.split()[4] == "-" for line in lines)


def test_samples_that_are_lost_do_not_hide_the_others(capsys):
    x = torch.tensor([[1.0], [-1.0], [2.0]], dtype=torch.float64)
    with pytest.warns(dil.ConvergenceWarning, match="non_finite"):
        dil.argmin(lambda y, x: (y - torch.sqrt(x)).square().sum(-1), 0 * x, (x,), solver=dil.LBFGS(verbose=True))
    *_, last, ending = capsys.readouterr().out.splitlines()
    assert "nan" not in last and ending == "  ended: converged 2, non_finite 1"


def test_no_samples(capsys):
    empty = torch.zeros(0, 2, dtype=torch.float64)
    solution = dil.argmin(score, empty, (empty,), solver=dil.LBFGS(verbose=True))
    assert solution.value.shape == (0, 2) and "LBFGS: argmin" in capsys.readouterr().out


def test_a_terminal_that_knows_ascii_only(monkeypatch):
    written = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", written)
    dil.argmin(score, torch.zeros_like(X), (X,), solver=dil.Newton(verbose=True))
    written.seek(0)
    assert "?F?, worst" in written.read()


def test_quiet_by_default(capsys):
    dil.argmin(score, torch.zeros_like(X), (X,))
    assert capsys.readouterr().out == ""


def titles(figure):
    return [axis.get_title() for axis in figure.axes]


@pytest.mark.parametrize("samples", [0, 3, 100])
@pytest.mark.parametrize("linear_solver", [dil.CG(), dil.Dense(), dil.MINRES(), dil.GMRES()], ids=lambda s: type(s).__name__)
def test_a_report_can_be_drawn(samples, linear_solver):
    x = torch.linspace(-2, 2, max(samples, 1) * 2, dtype=torch.float64).view(-1, 2).requires_grad_()
    given = x if samples else x[0]
    solution = dil.argmin(score, torch.zeros_like(given), (given,), solver=dil.LBFGS(), linear_solver=linear_solver)
    before = solution.report.plot()  # the backward solve has not run
    solution.value.sum().backward()
    after = solution.report.plot()
    assert titles(before) == titles(after) and len(after.axes) == 4
    forward, backward, spectrum, errors = after.axes
    assert forward.get_yscale() == "log" and len(forward.lines) >= 2
    assert not before.axes[1].lines and "not run" in before.axes[1].texts[0].get_text()
    if isinstance(linear_solver, dil.CG):
        assert backward.lines and spectrum.lines and len(errors.lines) == 2
        drawn = spectrum.lines[0].get_ydata()
        assert drawn == pytest.approx(solution.report.ritz[0].reshape(-1).numpy())
    for figure in (before, after):
        figure.canvas.draw()
        matplotlib.pyplot.close(figure)


@pytest.mark.parametrize("samples", [3, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_lost_samples_are_left_out_of_the_figure(samples, dtype):
    x = torch.linspace(1, 2, samples, dtype=dtype).unsqueeze(1)
    x[1] = -1
    solution = dil.argmin(lambda y, x: (y - torch.sqrt(x)).square().sum(-1), 0 * x, (x,), on_failure="ignore")
    figure = solution.report.plot()
    assert figure.axes[0].get_title() == "Forward solve, ‖F(y)‖ (1 not finite)"
    drawn = figure.axes[0].lines[0].get_ydata()
    assert len(drawn) > 1 and bool(torch.isfinite(torch.as_tensor(drawn)).all())
    figure.canvas.draw()
    matplotlib.pyplot.close(figure)


def test_negative_ritz_values_are_drawn():
    curvature = torch.tensor([3.0, 2.0, -1.0], dtype=torch.float64)
    b = torch.ones(3, dtype=torch.float64, requires_grad=True)
    saddle = lambda fn, y0: (b / curvature).detach()  # noqa: E731
    solution = dil.argmin(
        lambda y: 0.5 * (curvature * y**2).sum() - b @ y,
        torch.zeros_like(curvature),
        solver=saddle,
        linear_solver=dil.MINRES(),
        on_failure="ignore",
    )
    solution.value.sum().backward()
    figure = solution.report.plot()
    assert figure.axes[2].get_yscale() == "symlog"
    figure.canvas.draw()
    matplotlib.pyplot.close(figure)


def test_without_matplotlib_one_sentence(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    solution = dil.argmin(score, torch.zeros_like(X), (X,))
    with pytest.raises(ImportError, match=r"report.plot\(\) needs matplotlib"):
        solution.report.plot()
