"""In how many steps a Krylov method is to solve as a whole, and whether late ones may take products in float32.

A solve in a given number of steps can be one function of tensors (`AtOnce`). To make it takes as long as a hundred such solves
on a CPU, and the numbers of steps may change as a model learns. So it is made for numbers that were expected again and again,
for a few of them, and none of them large. A solve that takes another number goes step by step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable

# The most steps of so many last solves are expected of the next.
_RECENT = 10
# A number must have been expected so often; a function costs a GPU no more than a few solves.
_ASKED, _ASKED_ON_GPU = 10, 2
# So many numbers, and none larger.
_COUNTS, _LONG = 4, 128
# After so many solves in a row whose late products, in float32, were not exact enough, all are made in float64.
_MISSED = 3


class StepCounts:
    """Of the solves with one Jacobian, by the settings of the solver."""

    def __init__(self) -> None:
        self._missed = 0
        self._recent: dict[Hashable, deque[int]] = {}
        self._asked: Counter[tuple[Hashable, int]] = Counter()
        self._made: dict[Hashable, list[int]] = {}

    @property
    def single(self) -> bool:
        """Whether late products may be made in float32."""
        return self._missed < _MISSED

    def took_single(self, good: bool) -> None:
        """Those of a solve were exact enough, or not."""
        self._missed = 0 if good else self._missed + 1

    def took(self, settings: Hashable, steps: int) -> None:
        """A solve took so many steps."""
        self._recent.setdefault(settings, deque(maxlen=_RECENT)).append(steps)

    def expected(self, settings: Hashable, on_gpu: bool) -> int:
        """In how many steps the next solve is to be made as a whole; 0: step by step."""
        steps, made = max(self._recent.get(settings, ()), default=0), self._made.setdefault(settings, [])
        if not 0 < steps <= _LONG:
            return 0
        if fitting := [count for count in made if steps <= count <= 1.25 * steps + 1]:
            return min(fitting)
        if made:  # the numbers change: one function for several of them
            coarse = max(0, steps.bit_length() - 4)
            steps = -(-steps >> coarse) << coarse
        self._asked[settings, steps] += 1
        if self._asked[settings, steps] < (_ASKED_ON_GPU if on_gpu else _ASKED) or len(made) == _COUNTS:
            return 0
        made.append(steps)
        return steps
