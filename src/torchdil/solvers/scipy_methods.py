"""What each method of SciPy's is given, and how it is told to stop at ‖F‖ <= tolerance.

Most methods have a test of their own for ‖F‖, in the Euclidean norm or for the largest entry. The others test changes of the
score or of y, which say little of ‖F‖: those tests are turned down to rounding, and the run is stopped from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np


class Goal(NamedTuple):
    """What one sample asks for.

    Attributes:
        tolerance: ‖F‖ to reach.
        n: how many unknowns.
        rtol: the relative accuracy.
        scale: the largest entry of the start, or 1 if that is 0.
        eps: the rounding of the dtype.
        max_steps: the most iterations.
    """

    tolerance: float
    n: int
    rtol: float
    scale: float
    eps: float
    max_steps: int

    @property
    def entry(self) -> float:
        """What no entry of F may exceed, so that ‖F‖ does not exceed the tolerance."""
        return self.tolerance / self.n**0.5

    @property
    def rounding(self) -> float:
        """The smallest change of y that is one."""
        return self.eps * self.scale

    @property
    def radius(self) -> float:
        """What a derivative-free method shrinks its region to; these start with a radius of 1."""
        return min(0.01 * self.rtol * self.scale, 0.01)


class Method(NamedTuple):
    """A method of SciPy's.

    Attributes:
        uses: what it is given beside the score (argmin) or F (root): "", "gradient", "products" with the Hessian, too, or
            "dense", the Hessian or Jacobian as a matrix.
        limit: the statuses by which it says that it ran out of steps; None where there is but one way to fail.
        options: the options that make it stop at the goal, or not before if it is watched.
        watched: stop it from outside.
        mixes: it begins with steps along F: a fixed point is to be stated as F = g(y) - y, and its natural step is F.
    """

    uses: str
    limit: tuple[int | None, ...]
    options: Callable[[Goal], dict[str, Any]]
    watched: bool = False
    mixes: bool = False


_BFGS = Method("gradient", (1,), lambda to: {"gtol": to.tolerance, "norm": 2, "maxiter": to.max_steps})
_KRYLOV = Method("", (2,), lambda to: {"fatol": to.tolerance, "tol_norm": np.linalg.norm, "maxiter": to.max_steps})
_MIXING = _KRYLOV._replace(mixes=True)


def _trust(uses: str) -> Method:
    return Method(uses, (1,), lambda to: {"gtol": to.tolerance, "maxiter": to.max_steps})


def _watched(uses: str, limit: tuple[int, ...], options: Callable[[Goal], dict[str, Any]]) -> Method:
    return Method(uses, limit, options, watched=True)


# The first is the default. Where SciPy counts evaluations only, they are limited to max_steps instead.
MINIMISERS = {
    "L-BFGS-B": Method(
        "gradient",
        (1,),
        lambda to: {"gtol": to.entry, "ftol": 0.0, "maxiter": to.max_steps, "maxfun": 100 * to.max_steps},
    ),
    "BFGS": _BFGS,
    "CG": _BFGS,
    "Newton-CG": _watched("products", (1,), lambda to: {"xtol": 0.0, "maxiter": to.max_steps}),
    "TNC": _watched("gradient", (3,), lambda to: {"gtol": 0.0, "ftol": 0.0, "xtol": 0.0, "maxfun": to.max_steps}),
    "SLSQP": _watched("gradient", (9,), lambda to: {"ftol": 0.0, "maxiter": to.max_steps}),
    "trust-constr": Method("products", (0,), lambda to: {"gtol": to.entry, "xtol": to.rounding, "maxiter": to.max_steps}),
    "trust-ncg": _trust("products"),
    "trust-krylov": _trust("products"),
    "trust-exact": _trust("dense"),
    "dogleg": _trust("dense"),
    "Nelder-Mead": _watched("", (1, 2), lambda to: {"xatol": to.rounding, "fatol": 0.0, "maxiter": to.max_steps}),
    "Powell": _watched("", (1, 2), lambda to: {"xtol": to.rtol, "ftol": 0.0, "maxiter": to.max_steps}),
    "COBYLA": _watched("", (3, 20), lambda to: {"tol": to.radius, "maxiter": to.max_steps}),
    "COBYQA": _watched(
        "",
        (5, 6),
        lambda to: {"final_tr_radius": to.radius, "maxiter": to.max_steps, "maxfev": 10 * to.max_steps},
    ),
}
ROOT_FINDERS = {
    "hybr": _watched("dense", (2,), lambda to: {"xtol": 0.0, "maxfev": to.max_steps}),
    "lm": _watched("dense", (5,), lambda to: {"xtol": 0.0, "ftol": 0.0, "gtol": 0.0, "maxiter": to.max_steps}),
    "broyden1": _MIXING,
    "broyden2": _MIXING,
    "anderson": _MIXING,
    "linearmixing": _MIXING,
    "diagbroyden": _MIXING,
    "excitingmixing": _MIXING,
    "krylov": _KRYLOV,
    "df-sane": Method("", (None,), lambda to: {"fatol": to.tolerance, "ftol": 0.0, "maxfev": to.max_steps}),
}
METHODS = {**MINIMISERS, **ROOT_FINDERS}


def canonical(method: str) -> str:
    """The name as SciPy writes it; case does not matter."""
    return next((name for name in METHODS if name.lower() == str(method).lower()), method)


def one_at_a_time(method: str) -> bool:
    """Whether SciPy runs it under a lock: a run that waits for its answer would keep the others from asking."""
    import scipy

    old = tuple(int(part) for part in scipy.__version__.split(".")[:2]) < (1, 16)
    return method == "COBYQA" or (method == "COBYLA" and old)


def listed(names: Iterable[str]) -> str:
    """Names for a sentence."""
    return ", ".join(map(repr, names))
