"""Numbers that a user sets, checked: what cannot work gets one sentence that names the argument and what was expected."""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any


def check_count(name: str, value: Any, least: int = 1, *, optional: bool = False) -> None:
    """Raise one sentence unless the value is an integer of at least this size; `optional`: or None."""
    if not (_is(value, int, Integral) and value >= least) and not (optional and value is None):
        raise _refusal(name, value, f"an integer >= {least}", optional)


def check_number(
    name: str,
    value: Any,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    optional: bool = False,
) -> None:
    """Raise one sentence unless the value is a number within these limits, which NaN never is; `optional`: or None."""
    if (value is None and optional) or (
        _is(value, float, Real)
        and (least is None or value >= least)
        and (above is None or value > above)
        and (most is None or value <= most)
        and (below is None or value < below)
    ):
        return
    limits = {">=": least, ">": above, "<=": most, "<": below}
    shown = " and ".join(f"{sign} {limit:g}" for sign, limit in limits.items() if limit not in (None, math.inf))
    raise _refusal(name, value, f"{'a finite number' if below == math.inf else 'a number'} {shown}", optional)


def _is(value: Any, usual: type, kind: type) -> bool:
    # Solvers are made anew in each call, and to look at abstract types takes as long as a small solve's arithmetic. True is an
    # integer to Python, but no number of anything.
    return type(value) is usual or (isinstance(value, kind) and not isinstance(value, bool))


def _refusal(name: str, value: Any, expected: str, optional: bool) -> ValueError:
    return ValueError(f"{name} must be {expected}{' or None' if optional else ''}, got {value!r}.")
