"""torchdil with `product="compile"`: what it traces compiled by Inductor, once it was often run."""

from __future__ import annotations

from functools import partial

from benchmarks.peers.problems import Arrays, Problem
from benchmarks.peers.system_torchdil import Calls, make

PACKAGES = ("torchdil", "torch")
WARM_UP = 80  # calls until what is run in each of them is compiled


def calls(problem: Problem, arrays: Arrays, device: str) -> Calls:
    return Calls(partial(make, product="compile"), problem, arrays, device)
