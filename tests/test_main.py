"""`python -m torchdil`: the report says what runs here, and its exit status whether gradients are right."""

import subprocess
import sys

import pytest
import torch

import torchdil as dil
import torchdil.__main__ as report


def test_the_command():
    done = subprocess.run([sys.executable, "-W", "error", "-m", "torchdil"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for word in (dil.__version__, torch.__version__, sys.version.split()[0], "scipy", "numpy", "threads"):
        assert word in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if line.endswith("right")]
    kinds = ["argmin", "root", "fixed_point", "odeint"]
    assert [row[:3] for row in rows if row[1] == "cpu"] == [[k, "cpu", d] for d in ("float64", "float32") for k in kinds]
    assert all(float(row[3]) < 1e-9 for row in rows if row[2] == "float64")
    assert done.stdout.endswith("All gradients are right.\n")


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_it_can_be_imported_in_any_mode(mode):
    program = f"import torch\nwith torch.{mode}():\n    import torchdil as dil\nprint(dil.__version__)"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{dil.__version__}\n", "")


@pytest.mark.parametrize("name", report._CHECKS)
def test_what_is_known_is_true(name):
    """The slope is that of the inverse function: dy/dx dx/dy = 1."""
    check, y = report._CHECKS[name], torch.linspace(0.5, 2, 6, dtype=torch.float64, requires_grad=True)
    (inverse,) = torch.autograd.grad(check.x_of(y).sum(), y)
    assert torch.allclose(check.slope(y) * inverse, torch.ones_like(y), rtol=1e-14)


def half_a_gradient(x):
    return report._root(x) / 2 + report._root(x).detach() / 2


def breaks(x):
    raise RuntimeError("no\nluck")


@pytest.mark.parametrize(("solve", "verdict"), [(half_a_gradient, "wrong"), (breaks, "RuntimeError: no")])
def test_a_wrong_gradient_is_seen(monkeypatch, capsys, solve, verdict):
    monkeypatch.setitem(report._CHECKS, "root", report._CHECKS["root"]._replace(solve=solve))
    assert report.main() == 1
    shown = capsys.readouterr().out.splitlines()
    assert [line for line in shown if line.startswith("root") and "cpu" in line and line.endswith(verdict)]
    assert "checks failed: root on cpu" in shown[-1]


def test_a_package_that_is_missing_is_said_to_be(monkeypatch):
    monkeypatch.setattr(report, "_PACKAGES", ("torch", "no-such-package"))
    assert ("no-such-package", "not installed") in report._versions()
