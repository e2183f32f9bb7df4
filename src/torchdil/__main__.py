"""`python -m torchdil`: what a bug report needs. Versions, devices, and gradients of this machine against closed forms.

The exit status is 1 if a gradient is wrong or a check cannot run.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

import torch
from torch import Tensor

import torchdil as dil
from torchdil.solution import text_table

_PACKAGES = ("torch", "scipy", "numpy", "rich", "matplotlib")
# What an answer or a gradient may be off, relative to what is known.
_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}


class _Check(NamedTuple):
    """A problem whose answer is known: y solves it for x = x_of(y), and dy/dx = slope(y)."""

    solve: Callable[[Tensor], Tensor]
    x_of: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor], Tensor]


def _argmin(x: Tensor) -> Tensor:
    return dil.argmin(lambda y, x: (y**2 - x * y + y**4).sum(-1), torch.zeros_like(x), (x,), on_failure="raise").value


def _root(x: Tensor) -> Tensor:
    return dil.root(lambda y, x: y**3 + y - x, torch.zeros_like(x), (x,), batch_dims=1, on_failure="raise").value


def _fixed_point(x: Tensor) -> Tensor:
    return dil.fixed_point(lambda y, x: y.tanh() / 2 + x, torch.zeros_like(x), (x,), batch_dims=1, on_failure="raise").value


def _ode(x: Tensor) -> Tensor:
    """dy/dt = -50 y from x, in two steps of backward Euler: y = x / (1 + 50 h)²."""
    t = torch.linspace(0, 0.1, 3, dtype=x.dtype, device=x.device)
    return dil.odeint(lambda t, y: -50 * y, x, t, batch_dims=1, on_failure="raise")[-1]


_CHECKS = {
    "argmin": _Check(_argmin, lambda y: 2 * y + 4 * y**3, lambda y: 1 / (2 + 12 * y**2)),
    "root": _Check(_root, lambda y: y**3 + y, lambda y: 1 / (1 + 3 * y**2)),
    "fixed_point": _Check(_fixed_point, lambda y: y - y.tanh() / 2, lambda y: 2 / (1 + y.tanh() ** 2)),
    "odeint": _Check(_ode, lambda y: y * 3.5**2, lambda y: torch.full_like(y, 3.5**-2)),
}


def main() -> int:
    """Print it all; 0 if every gradient is right."""
    print(text_table([("", "version"), *_versions()]), end="\n\n")
    print(text_table([("device", ""), *_devices()]), end="\n\n")
    rows = [_check(name, device, dtype) for device in _usable() for dtype in _dtypes(device) for name in _CHECKS]
    print(text_table([("gradient of", "device", "dtype", "error", "seconds", ""), *rows]))
    wrong = [f"{row[0]} on {row[1]}" for row in rows if row[-1] != "right"]
    print(f"\n{len(wrong)} of {len(rows)} checks failed: {', '.join(wrong)}." if wrong else "\nAll gradients are right.")
    return 1 if wrong else 0


def _versions() -> list[tuple[str, str]]:
    found = [("torchdil", dil.__version__), ("Python", f"{platform.python_version()} ({platform.python_implementation()})")]
    found.append(("system", platform.platform()))
    for name in _PACKAGES:
        try:
            found.append((name, torch.__version__ if name == "torch" else version(name)))  # with its build
        except PackageNotFoundError:
            found.append((name, "not installed"))
    return found


def _devices() -> list[tuple[str, str]]:
    found = [("cpu", f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads")]
    for k in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about = torch.cuda.get_device_properties(k)
        found.append((f"cuda:{k}", f"{about.name}, {about.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"))
    if torch.backends.mps.is_available():
        found.append(("mps", "Metal"))
    return found


def _usable() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else []), *(["mps"] if torch.backends.mps.is_available() else [])]


def _dtypes(device: str) -> list[torch.dtype]:
    return [torch.float32] if device == "mps" else [torch.float64, torch.float32]  # Metal has no float64


def _check(name: str, device: str, dtype: torch.dtype) -> tuple[str, ...]:
    """One answer and its gradient against what is known of them, as a row of the table."""
    check, began, error, verdict = _CHECKS[name], time.perf_counter(), float("nan"), "wrong"
    try:
        exact = torch.linspace(0.5, 2.0, 6, dtype=dtype, device=device).view(3, 2)
        x = check.x_of(exact).requires_grad_()
        y = check.solve(x)
        (slope,) = torch.autograd.grad(y.sum(), x)
        pairs = ((y.detach(), exact), (slope, check.slope(exact)))
        error = max(float((found - known).norm() / known.norm()) for found, known in pairs)
        verdict = "right" if error <= _TOLERANCE[dtype] else verdict
    except Exception as failure:  # the report goes on: what else works is a part of it
        verdict = f"{type(failure).__name__}: {failure}".splitlines()[0]
    return name, device, str(dtype).removeprefix("torch."), f"{error:.1e}", f"{time.perf_counter() - began:.2f}", verdict


if __name__ == "__main__":
    sys.exit(main())
