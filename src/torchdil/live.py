"""Tables that grow on the terminal while a solver runs: redrawn in place where `rich` is installed, else lines of text."""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor

# Redraws in a second, at most: each takes milliseconds.
_RATE = 10
# Lines that a table needs besides its rows, and rows that it shows in the smallest window.
_FRAME, _LEAST = 6, 3

Cells = tuple[str, ...]

# Whether a caller of solvers wants them to show their steps, as `odeint(..., verbose=True)` does.
_asked: ContextVar[bool] = ContextVar("asked", default=False)
_open: list[_Redrawn] = []


@contextmanager
def showing(asked: bool | None = None) -> Iterator[None]:
    """A block whose tables end with it, however it ends; `asked`: whether solvers inside show their steps."""
    before = list(_open)
    token = None if asked is None else _asked.set(asked)
    try:
        yield
    finally:
        for view in [view for view in _open if view not in before]:
            view.stop()
        if token is not None:
            _asked.reset(token)


def asked() -> bool:
    """Whether the steps are to be shown, though no solver was told so."""
    return _asked.get()


class Table:
    """One line a step: each of the first 20, then every 10th up to 200, every 100th up to 2000, and so on, and the last.

    Args:
        title: who solves what.
        columns: the headings and the widths of what follows the step and comes before the seconds.
    """

    def __init__(self, title: str, columns: dict[str, int]):
        self._began, self._shown, self._drawn = time.perf_counter(), -1, 0.0
        columns = {"step": 7, **columns, "seconds": 8}
        self._view: _View = _Redrawn(title, columns) if _can_redraw() else _Lines(title, columns)

    def show(self, step: int, cells: Callable[[], Cells], last: bool = False) -> None:
        """What a step left; `cells` is called only if it is shown."""
        now, stride = time.perf_counter(), 1
        while step > 20 * stride:
            stride *= 10
        kept, due = last or step % stride == 0, now - self._drawn > 1 / _RATE
        if step <= self._shown or not (kept or (self._view.in_place and due)):
            return
        self._shown, self._drawn = step if kept else self._shown, now if due else self._drawn
        self._view.add((str(step), *cells(), f"{now - self._began:.2f}"), kept, due)

    def close(self, ending: str) -> None:
        """How the samples ended."""
        self._view.end(ending)


class LiveTable(Table):
    """The steps of an iteration."""

    def __init__(self, title: str):
        super().__init__(title, {"running": 8, "‖F‖, worst": 11, "‖F‖, median": 12, "score, mean": 13})

    def row(
        self, step: int, running: Tensor, residual: Tensor | None, score: Tensor | None = None, *, last: bool = False
    ) -> None:
        """What a step left: who still runs (B,), ‖F‖ (B,) where it is known, the objective (B,) of an argmin.

        Samples whose numbers are not finite are left out of them.
        """

        def cells() -> Cells:
            known, scores = _finite(residual), _finite(score)
            worst, median = ("-", "-") if known is None else (f"{known.max():.3e}", f"{known.median():.3e}")
            return str(int(running.sum())), worst, median, "-" if scores is None else f"{scores.mean():.5e}"

        self.show(step, cells, last)


class TimeTable(Table):
    """The steps of an integration.

    Args:
        title: who integrates what.
        quantity: what is shown of each step, the worst of all samples.
    """

    def __init__(self, title: str, quantity: str):
        super().__init__(title, {"t": 11, "step size": 11, "running": 8, quantity: 12})

    def row(self, step: int, t: Tensor, size: Tensor, running: Tensor, quantity: Tensor, *, last: bool = False) -> None:
        """A step taken: where it led to, how long it was, who still runs (B,), what it left (B,)."""

        def cells() -> Cells:
            known = _finite(quantity)
            worst = "-" if known is None else f"{known.max():.3e}"
            return f"{float(t):.4e}", f"{float(size):.3e}", str(int(running.sum())), worst

        self.show(step, cells, last)


def _finite(a: Tensor | None) -> Tensor | None:
    known = None if a is None else a[torch.isfinite(a)]
    return None if known is None or not len(known) else known


class _View(Protocol):
    """Where a table is shown. `in_place`: a row that is not kept is replaced by the next."""

    in_place: bool

    def add(self, cells: Cells, kept: bool, due: bool) -> None: ...

    def end(self, ending: str) -> None: ...


class _Lines:
    """Lines of text, for files, pipes, notebooks, and terminals without `rich`."""

    in_place = False

    def __init__(self, title: str, columns: dict[str, int]):
        self._widths = tuple(columns.values())
        _say(title)
        self.add(tuple(columns))

    def add(self, cells: Cells, kept: bool = True, due: bool = True) -> None:
        _say("  ".join(cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True)))

    def end(self, ending: str) -> None:
        _say(f"  ended: {ending}")


class _Redrawn:
    """A table of `rich`. One is drawn at a time: when another begins, this one stays as it is and begins anew below."""

    in_place = True

    def __init__(self, title: str, columns: dict[str, int]):
        from rich.console import Console

        self._console = Console()
        self._title, self._columns = title, columns
        self._rows: list[Cells] = []
        self._now: list[Cells] = []
        self._live: Any = None
        self._start()

    def add(self, cells: Cells, kept: bool, due: bool) -> None:
        if self._live is None:
            self._start()
        self._now = [cells]
        if kept:
            self._rows, self._now = [*self._rows, cells], []
        if due:
            room = max(_LEAST, self._console.height - _FRAME)
            self._live.update(self._table((self._rows + self._now)[-room:]), refresh=True)

    def end(self, ending: str) -> None:
        self.stop()
        self._console.print(f"  ended: {ending}", highlight=False)

    def stop(self) -> None:
        """Leave what was drawn, in full."""
        if self._live is not None:
            self._live.update(self._table(self._rows + self._now))
            self._live.stop()
            self._live, self._rows, self._now = None, [], []
            _open.remove(self)

    def _start(self) -> None:
        from rich.live import Live

        for view in list(_open):
            view.stop()
        _open.append(self)
        self._live = Live(self._table([]), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)

    def _table(self, rows: list[Cells]) -> Any:
        from rich import box
        from rich.table import Table

        table = Table(title=self._title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False)
        for heading, width in self._columns.items():
            table.add_column(heading, justify="right", min_width=width, no_wrap=True)
        for row in rows:
            table.add_row(*row)
        return table


def _can_redraw() -> bool:
    """Whether this is a terminal that can be drawn on, and `rich` is there to do so; it draws for one thread."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if _open:  # whose view has taken the place of the terminal
        return True
    stream = sys.stdout
    terminal = stream is not None and stream.isatty() and (stream.encoding or "").lower().replace("-", "") == "utf8"
    dumb = os.environ.get("TERM", "") in ("", "dumb") and os.name != "nt"
    return terminal and not dumb and importlib.util.find_spec("rich") is not None


def _say(text: str) -> None:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # a terminal that knows no ‖ must not end the program
    print(text.encode(encoding, errors="replace").decode(encoding), flush=True)
