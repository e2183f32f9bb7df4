"""torchdil as it is before anything is traced: products of autograd throughout."""

from __future__ import annotations

from benchmarks.peers.problems import Arrays, Problem
from benchmarks.peers.system_torchdil import Calls, make
from torchdil import traced

PACKAGES = ("torchdil", "torch")
traced._PATIENCE = 10**9


def calls(problem: Problem, arrays: Arrays, device: str) -> Calls:
    return Calls(make, problem, arrays, device)
