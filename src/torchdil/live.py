"""A table that grows on the terminal while a solver runs."""

from __future__ import annotations

import time

from torch import Tensor

_HEADINGS = ("step", "running", "‖F‖, worst", "‖F‖, median", "score, mean", "seconds")
_WIDTHS = (7, 8, 11, 12, 13, 8)


class LiveTable:
    """One line a step: each of the first 20, then every 10th up to 200, every 100th up to 2000, and so on, and the last.

    Args:
        title: who solves what.
    """

    def __init__(self, title: str):
        self._began, self._shown = time.perf_counter(), -1
        print(title)
        print(_line(_HEADINGS), flush=True)

    def row(
        self, step: int, running: Tensor, residual: Tensor | None, score: Tensor | None = None, *, last: bool = False
    ) -> None:
        """What a step left: who still runs (B,), ‖F‖ (B,) where it is known, the objective (B,) of an argmin."""
        stride = 1
        while step > 20 * stride:
            stride *= 10
        if step <= self._shown or not (last or step % stride == 0):
            return
        self._shown = step
        worst, median = ("-", "-") if residual is None else (f"{residual.max():.3e}", f"{residual.median():.3e}")
        mean = "-" if score is None else f"{score.mean():.5e}"
        seconds = f"{time.perf_counter() - self._began:.2f}"
        print(_line((str(step), str(int(running.sum())), worst, median, mean, seconds)), flush=True)


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))
