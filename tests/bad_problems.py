"""Random bad problems: a number names one, `outcome` runs it and says how it ended.

A problem is drawn well posed and then spoilt: by numbers that are none, sizes near the ends of the dtype, matrices that are
singular or indefinite, functions without an answer or with a wrong result, arguments of the wrong shape, dtype or type. However
bad it is, it may end in three ways only:

- "sentence": an error of one sentence, raised by the library and not by accident in torch (errors of the user's own function
  pass through);
- "reported": a status other than `converged` for the samples that failed, and the warning, error or gradient that the failure
  policy asks for; the other samples are right;
- "right": all samples are converged, and values and gradients are right by a dense computation in float64.

Everything else raises `Wrong`. `python tests/bad_problems.py --count 5000` tries many.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import random
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import torchdil as dil

PACKAGE = str(Path(dil.__file__).parent)
FUNCTIONS = tuple(str(Path(__file__).with_name(name)) for name in ("bad_equations.py", "bad_trajectories.py", "bad_control.py"))
POLICIES = ("raise", "warn", "ignore", "zero", "nan")
# Of a value or a gradient against the dense oracle, relative, for each unit of the condition number of J, and at most.
ROUNDING = {torch.float64: 1e-8, torch.float32: 1e-3}
MOST = {torch.float64: 1e-4, torch.float32: 0.1}
# A J that is worse than this has no gradient to compare with.
SINGULAR = {torch.float64: 1e11, torch.float32: 1e4}
NUMBERS = [float("nan"), float("inf"), -float("inf")]


class Wrong(AssertionError):  # noqa: N818 (a verdict)
    """A bad problem that ended as none may."""


class Own(Exception):  # noqa: N818 (the user's)
    """What the user's function raises, and must come out as it is."""


class Hang(BaseException):
    """The time was up."""


@contextlib.contextmanager
def limit(seconds: float) -> Iterator[None]:
    """A block that raises `Hang` after so many seconds; in the main thread only."""

    def stop(*_: Any) -> None:
        raise Hang(f"no end after {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Draw(random.Random):
    """Choices and tensors from a seed."""

    def __init__(self, seed: int, device: str):
        super().__init__(seed)
        self.device = device
        self._generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(self.device)

    def matrices(self, batch: tuple[int, ...], eigenvalues: list[float]) -> Tensor:
        """Symmetric, with these eigenvalues."""
        n = len(eigenvalues)
        Q = torch.linalg.qr(self.normal(*batch, n, n))[0]
        return Q @ torch.diag(torch.tensor(eigenvalues, dtype=torch.float64, device=self.device)) @ Q.mT


@dataclass
class Case:
    """What one problem is, for the message, and how to run and judge it."""

    name: str
    run: Callable[[], str]
    faults: list[str] = field(default_factory=list)
    own: bool = False  # the user's function itself cannot work: torch's errors in it are its own


@functools.cache
def wake(device: str) -> None:
    """The thread that goes backwards on a GPU complains when a product of matrices is the first that it does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        A = torch.ones(2, 2, device=device, requires_grad=True)
        (A @ A).sum().backward()


def outcome(number: int, device: str = "cpu", seconds: float = 30.0) -> tuple[str, str]:
    """How problem `number` ended, and its name; `Wrong` or `Hang` if not in one of the three ways."""
    wake(device)
    draw = Draw(number, device)
    case = draw.choice(families())(draw)
    name = f"{number}: {case.name}: {', '.join(case.faults)}"
    try:
        with limit(seconds), warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", DeprecationWarning)  # torch, of its forward-mode rules
            return case.run(), name
    except (Wrong, Hang) as error:
        raise Wrong(f"{name}: {error}") from error
    except Own:
        return "sentence", name
    except Exception as error:
        problem = not_a_sentence(error, case.own)
        if problem:
            raise Wrong(f"{name}: {problem}: {type(error).__name__}: {error}") from error
        return "sentence", name


def not_a_sentence(error: Exception, own: bool) -> str:
    """Why an error is none that may come out; empty if it may."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    known = [file for file in files if file.startswith(PACKAGE) or file in FUNCTIONS]
    if own and known and known[-1] in FUNCTIONS and any(file.startswith(PACKAGE) for file in known):
        return ""
    if not files[-1].startswith(PACKAGE):
        return f"raised in {files[-1]}"
    text = str(error)
    if not isinstance(error, (TypeError, ValueError, RuntimeError)):
        return "not a TypeError, ValueError or RuntimeError"
    # A report of a solve has two sentences, what happened and what to do.
    return "" if text.endswith(".") and "\n" not in text and len(text) > 20 else "no sentence"


def families() -> list[Callable[[Draw], Case]]:
    """What draws a problem, the common ones more often."""
    from bad_control import linear_quadratic, plan, riccati
    from bad_equations import equation
    from bad_trajectories import trajectory

    return [equation] * 5 + [trajectory] * 2 + [riccati, linear_quadratic, plan]


def main() -> None:
    """Try many, and print those that ended badly."""
    parser = argparse.ArgumentParser(description="Random bad problems.")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=30.0, help="the most that one may take")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    ends: collections.Counter[str] = collections.Counter()
    slowest = (0.0, "")
    began = time.perf_counter()
    for number in range(chosen.first, chosen.first + chosen.count):
        start = time.perf_counter()
        try:
            end, name = outcome(number, chosen.device, chosen.seconds)
        except Wrong as error:
            end, name = "WRONG", str(error)
            print(error, flush=True)
        ends[end] += 1
        slowest = max(slowest, (time.perf_counter() - start, name))
    seconds = time.perf_counter() - began
    print(f"{chosen.count} problems in {seconds:.0f} s: {dict(ends)}; slowest {slowest[0]:.1f} s: {slowest[1]}")


if __name__ == "__main__":
    from bad_problems import main as run  # and not this one: the classes of __main__ are others

    run()
