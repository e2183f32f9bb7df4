"""Numbers that a user sets, checked: what cannot work gets one sentence that names the argument and what was expected."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any

_HOLDS: dict[str, Callable[[Any, Any], bool]] = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt}


def check_count(name: str, value: Any, least: int = 1, *, optional: bool = False) -> None:
    """Raise one sentence unless the value is an integer of at least this size; `optional`: or None."""
    _check(name, value, Integral, f"an integer >= {least}", {">=": least}, optional)


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
    limits = {">=": least, ">": above, "<=": most, "<": below}
    given = {sign: limit for sign, limit in limits.items() if limit is not None}
    shown = " and ".join(f"{sign} {limit:g}" for sign, limit in given.items() if limit != math.inf)
    _check(name, value, Real, f"{'a finite number' if below == math.inf else 'a number'} {shown}", given, optional)


def _check(name: str, value: Any, kind: type, expected: str, limits: dict[str, float], optional: bool) -> None:
    if value is None and optional:
        return
    # True is an integer to Python, but no number of anything.
    if isinstance(value, kind) and not isinstance(value, bool) and all(_HOLDS[s](value, limit) for s, limit in limits.items()):
        return
    raise ValueError(f"{name} must be {expected}{' or None' if optional else ''}, got {value!r}.")
