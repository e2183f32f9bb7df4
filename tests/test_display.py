"""What a person sees: the live table of a solver, and the figure of a report."""

import contextlib
import importlib.util
import io
import os
import re
import sys
import threading
from unittest import mock

import pytest
import torch

import torchdil as dil
from torchdil import live

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
    for row, residual in zip(rows, solution.stats.history, strict=X.device.type == "cpu"):  # a GPU is asked now and then
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


class Terminal(io.TextIOWrapper):
    """A stream that says it is a terminal."""

    def __init__(self):
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def isatty(self):
        return True

    @property
    def text(self):
        return self.buffer.getvalue().decode()

    @property
    def lines(self):
        """What stays on the screen: a line that is drawn again replaces what was there."""
        screen, row = [""], 0
        for piece in re.split(r"(\x1b\[[0-9;?]*[A-Za-z]|\r?\n|\r)", self.text):
            if piece.endswith("\n"):
                row += 1
                screen += [""] * (row + 1 - len(screen))
            elif piece.startswith("\x1b["):
                if piece.endswith("A"):
                    row -= int(piece[2:-1] or 1)
                elif piece == "\x1b[2K":
                    screen[row] = ""
            elif piece != "\r":
                screen[row] += piece
        return [line.rstrip() for line in screen if line.strip()]


@contextlib.contextmanager
def on_a_terminal(**environment):
    pytest.importorskip("rich")
    stream = Terminal()
    environment = {"TERM": "xterm", "COLUMNS": "100", "LINES": "30", "NO_COLOR": "1"} | environment
    with mock.patch.dict(os.environ, environment), contextlib.redirect_stdout(stream):
        yield stream
        assert live._open == [] and sys.stdout is stream, "what was drawn on is given back"


def rows_of(lines):
    return [line.split() for line in lines if line.split()[0].isdigit()]


def test_a_terminal_shows_one_table_that_is_redrawn():
    with on_a_terminal() as terminal:
        solution = dil.argmin(score, torch.zeros_like(X), (X,), solver=dil.Newton(verbose=True))
    title, headings, rule, *rows, ending = terminal.lines
    assert title.strip() == "Newton: argmin, 3 samples" and headings.split()[:2] == ["step", "running"] and set(rule) == {"─"}
    assert ending == "  ended: converged 3"
    assert [row.split()[0] for row in rows] == [str(k) for k in range(int(solution.stats.steps.max()) + 1)]
    assert "\x1b[1A" in terminal.text  # drawn over what was there
    assert terminal.text.rindex("\x1b[?25h") > terminal.text.rindex("\x1b[?25l")  # the cursor is back


def test_a_long_table_is_cut_to_the_window_while_it_grows_and_whole_in_the_end(monkeypatch):
    monkeypatch.setattr(live, "_RATE", 1e9)  # redrawn at every step
    solver = dil.GradientDescent(step_size=1e-3, max_steps=205, verbose=True)
    with on_a_terminal(LINES="12") as terminal:
        dil.argmin(score, torch.zeros_like(X), (X,), solver=solver, on_failure="ignore")
    drawn = [len(re.findall(r"\n", frame)) for frame in terminal.text.split("\x1b[?25h")[0].split("\x1b[1A")]
    assert max(drawn[:-1]) <= 12
    steps = [int(row[0]) for row in rows_of(terminal.lines)]
    assert steps == [*range(20), *range(20, 200, 10), 200, 205]
    assert " 203 " in terminal.text  # a step without a line of its own was seen in passing


def test_tables_after_and_inside_each_other():
    inner = dil.Newton(verbose=True)

    def outer(y):
        z = dil.argmin(lambda z, y: ((z - y) ** 2 + z**4).sum(-1), torch.zeros_like(y), (y,), solver=inner).value
        return (z - 1).square().sum(-1)

    start = torch.full((2, 1), 2.0, dtype=torch.float64)
    search = dil.CEM(max_steps=3, polish=dil.LBFGS(verbose=True), verbose=True)
    with on_a_terminal() as terminal:
        dil.argmin(outer, start, solver=dil.LBFGS(verbose=True, max_steps=2), on_failure="ignore")
        dil.argmin(score, torch.zeros_like(X), (X,), solver=search)
    text = "\n".join(terminal.lines)
    assert text.count("Newton: argmin, 2 samples") > 3 and text.count("LBFGS: argmin, 2 samples") > 1
    assert "CEM: argmin, 3 samples" in text and text.index("CEM") < text.index("LBFGS: argmin, 3 samples")


def test_an_error_on_the_way_leaves_the_table_and_the_terminal():
    calls = []

    def breaks(y, x):
        calls.append(1)
        if len(calls) > 30:
            raise ValueError("mine")
        print("from the score")
        return score(y, x)

    with on_a_terminal() as terminal, pytest.raises(ValueError, match="mine"):
        dil.argmin(breaks, torch.zeros_like(X), (X,), solver=dil.GradientDescent(step_size=1e-3, verbose=True))
    assert len(rows_of(terminal.lines)) > 10 and "from the score" in terminal.text


@pytest.mark.parametrize("without", ["rich", "a terminal that moves its cursor", "the main thread"])
def test_else_lines(monkeypatch, without):
    if without == "rich":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with on_a_terminal(TERM="dumb" if without.startswith("a terminal") else "xterm") as terminal:
        thread = threading.Thread(target=lambda: dil.argmin(score, torch.zeros_like(X), (X,), solver=dil.Newton(verbose=True)))
        thread.run() if without != "the main thread" else thread.start()
        if without == "the main thread":
            thread.join()
    assert "\x1b" not in terminal.text and terminal.text.startswith("Newton: argmin, 3 samples\n")


def swing(t, y):
    return torch.stack((y[..., 1], -torch.sin(y[..., 0])), dim=-1)


ODE = {
    "all steps at once": ({}, "WholeTrajectory: ode, 3 samples", "running"),
    "step by step": ({"solver": dil.ode.SimplifiedNewton()}, "Marching: ode, 3 samples", "t"),
    "step by step by a solver of the core": ({"solver": dil.Newton()}, "Marching: ode, 3 samples", "t"),
    "explicit": ({"method": "rk4"}, "Marching: ode, 3 samples", "t"),
    "adaptive": ({"method": "kvaerno5", "rtol": 1e-6}, "adaptive Kvaerno5: ode, 3 samples", "t"),
    "backprop": ({"gradient": "backprop"}, "backprop: ode", "t"),
    "adjoint": ({"gradient": "adjoint"}, "WholeTrajectory: ode, 3 samples", "running"),
}


@pytest.mark.parametrize("name", ODE)
def test_odeint_shows_its_steps(name, capsys):
    settings, title, second = ODE[name]
    y0, t = X.clone().requires_grad_(), torch.linspace(0, 1, 6, dtype=torch.float64)
    quiet = dil.odeint(swing, y0, t, batch_dims=1, **settings)
    assert capsys.readouterr().out == ""
    shown = dil.odeint(swing, y0, t, batch_dims=1, verbose=True, **settings)
    lines = capsys.readouterr().out.splitlines()
    assert torch.equal(shown, quiet)
    assert lines[0] == title and lines[1].split()[:2] == ["step", second] and "converged 3" in lines[-1]
    rows = rows_of(lines)
    assert [int(row[0]) for row in rows] == [*range(1, len(rows) + 1)]
    if second == "t":
        reached = [float(row[1]) for row in rows]
        assert reached == sorted(reached) and reached[-1] == 1.0
    shown.sum().backward()
    assert capsys.readouterr().out == "", "the backward pass is quiet"


def test_a_neural_ode_shows_its_steps(capsys):
    node = dil.NeuralODE(swing, verbose=True)
    node(X, torch.linspace(0, 1, 6, dtype=torch.float64))
    assert capsys.readouterr().out.startswith("WholeTrajectory: ode, 3 samples")


def test_a_long_way_back_in_time_in_a_terminal():
    t = torch.tensor([1.0, 0.0], dtype=torch.float64)
    with on_a_terminal() as terminal:
        dil.odeint(swing, X, t, batch_dims=1, method="radauIIA5", rtol=1e-6, verbose=True)
    rows = rows_of(terminal.lines)
    assert float(rows[-1][1]) == 0.0 and all(float(row[2]) < 0 for row in rows)


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
