"""A table that grows on the terminal while a solver runs."""

from __future__ import annotations

import sys
import time

import torch
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
        _say(title)
        _say(_line(_HEADINGS))

    def row(
        self, step: int, running: Tensor, residual: Tensor | None, score: Tensor | None = None, *, last: bool = False
    ) -> None:
        """What a step left: who still runs (B,), ‖F‖ (B,) where it is known, the objective (B,) of an argmin.

        Samples whose numbers are not finite are left out of them.
        """
        stride = 1
        while step > 20 * stride:
            stride *= 10
        if step <= self._shown or not (last or step % stride == 0):
            return
        self._shown = step
        known, scores = (None if a is None else a[torch.isfinite(a)] for a in (residual, score))
        worst, median = ("-", "-") if known is None or not len(known) else (f"{known.max():.3e}", f"{known.median():.3e}")
        mean = "-" if scores is None or not len(scores) else f"{scores.mean():.5e}"
        seconds = f"{time.perf_counter() - self._began:.2f}"
        _say(_line((str(step), str(int(running.sum())), worst, median, mean, seconds)))

    def close(self, ending: str) -> None:
        """How the samples ended."""
        _say(f"  ended: {ending}")


def _line(cells: tuple[str, ...]) -> str:
    return "  ".join(cell.rjust(width) for cell, width in zip(cells, _WIDTHS, strict=True))


def _say(text: str) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a terminal that knows no ‖ must not end the program
    print(text.encode(encoding, errors="replace").decode(encoding), flush=True)
