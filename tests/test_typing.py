"""The types that a user sees: a sound program passes a strict checker, and typical mistakes do not."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typed_program

import torchdil as dil

TESTS = Path(__file__).parent

# Each line is a mistake; behind it what the checker calls it.
MISTAKES = """
import torch
import torchdil as dil
solution = dil.argmin(lambda y: (y**2).sum(), torch.ones(2))
solution.sum()  # attr-defined
solution + 1  # operator
solution[0]  # index
torch.relu(solution)  # arg-type
solution.value.no_such_method()  # attr-defined
dil.argmin(lambda y: (y**2).sum(), torch.ones(2), on_failure="warning")  # arg-type
dil.argmin(lambda y: (y**2).sum(), torch.ones(2), args=torch.ones(2))  # arg-type
dil.argmin(lambda y: (y**2).sum(), torch.ones(2), verbose=True)  # call-arg
dil.root(lambda y: y, torch.ones(2), solver="newton")  # arg-type
dil.root(lambda y: y, torch.ones(2), linear_solver=dil.CG)  # arg-type
dil.odeint(lambda t, y: -y, torch.ones(2), [0.0, 1.0])  # arg-type
dil.odeint(lambda t, y: -y, torch.ones(2), torch.ones(2), gradient="autograd")  # arg-type
dil.odeint(lambda t, y: -y, torch.ones(2), torch.ones(2), solver="newton")  # arg-type
dil.NeuralODE(lambda t, y: -y, gradient="autograd")  # arg-type
dil.NeuralODE(lambda t, y: -y, solver=dil.CG())  # arg-type
dil.control.MPC(lambda x, u: x + u, lambda x, u: x.sum(-1), 3, 2, solver="newton")  # arg-type
dil.Newton(tol=1e-6)  # call-arg
"""


def test_the_marker_is_in_the_package():
    assert (Path(dil.__file__).parent / "py.typed").is_file()


def test_the_program_runs(capsys):
    typed_program.main()
    assert capsys.readouterr().out.endswith("True\n")


def test_a_strict_checker(tmp_path):
    pytest.importorskip("mypy")
    wrong = tmp_path / "wrong.py"
    wrong.write_text(MISTAKES)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--config-file=",
        "--follow-imports=silent",
        f"--cache-dir={os.devnull}",
    ]
    package = os.pathsep.join((str(Path(dil.__file__).parents[1]), str(TESTS)))
    environment = {**os.environ, "MYPYPATH": package}
    done = subprocess.run([*command, TESTS / "typed_program.py", wrong], capture_output=True, text=True, env=environment)
    assert "typed_program.py" not in done.stdout, done.stdout
    found = dict(re.findall(r"wrong\.py:(\d+): error: .*\[([a-z-]+)\]", done.stdout))
    marked = {str(k): line.split("# ")[1] for k, line in enumerate(MISTAKES.split("\n"), 1) if "# " in line}
    assert found == marked, done.stdout + done.stderr
