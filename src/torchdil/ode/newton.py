"""How the stages of a step are found: the settings of `torchdil.ode.step`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from torchdil import batch
from torchdil.ode.methods import Method
from torchdil.settings import check_count, check_number
from torchdil.solvers.base import Solver

JACOBIANS = ("full", "diagonal", "identity", "krylov")
# The largest batch of matrices I - hγJ to form, in numbers, and the largest of them.
_NUMBERS, _SIZE = 2**24, 600
# Factorisations of so many multiplications (only those of batches: one matrix that fits takes less) cost more than a Krylov
# method does that needs a step for so many unknowns at most.
_DEAR, _UNKNOWNS = 2.5e8, 30


def stages_in_turn(method: Method) -> bool:
    """Whether the stages are solved one after another with the same diagonal element: one matrix, of the size of y, does."""
    return method.diagonal and len({method.A[i][i] for i in range(method.stages)} - {0.0}) <= 1


def unknowns(method: Method, size: int) -> int:
    """The size of the matrix for a state of this size."""
    return size if stages_in_turn(method) else method.stages * size


def fits(samples: int, q: int) -> bool:
    """Whether matrices of size q can be formed."""
    return q <= _SIZE and samples * q * q <= _NUMBERS


def worth_a_try(samples: int, q: int) -> int:
    """In how many steps a Krylov method must solve with matrices that could be formed, lest they are; 0: formed at once."""
    return q // _UNKNOWNS if fits(samples, q) and samples * q**3 >= _DEAR else 0


@dataclass(frozen=True)
class SimplifiedNewton:
    """How the stages of a step are found.

    Attributes:
        rtol: what ‖F‖ of a step may be against the largest state so far; None: 1e-10 in float64, 1e-5 in float32.
        max_steps: the most iterations; None: 20, or 100 without the whole Jacobian.
        jacobian: "full": J as a matrix; "krylov": products with J in GMRES; "diagonal": the diagonal of J only; "identity":
            none of it, which is fixed-point iteration. None: "full" where it fits, else "krylov"; for large batches on a CPU
            "krylov" until it needs many products.

    Example:
        >>> dil.odeint(f, y0, t, solver=dil.ode.SimplifiedNewton(jacobian="krylov"))
    """

    rtol: float | None = None
    max_steps: int | None = None
    jacobian: str | None = None

    def __post_init__(self) -> None:
        check_number("rtol", self.rtol, above=0, optional=True)
        check_count("max_steps", self.max_steps, optional=True)
        if self.jacobian is not None and self.jacobian not in JACOBIANS:
            raise ValueError(f"jacobian must be one of {', '.join(map(repr, JACOBIANS))}, got {self.jacobian!r}.")

    def accuracy(self, dtype: torch.dtype) -> float:
        """rtol, or the default for the dtype."""
        return batch.default_rtol(dtype) if self.rtol is None else self.rtol


# What may find the stages: a solver of the core or a callable (fn, y) -> y, too.
OdeSolver = Solver | SimplifiedNewton | Callable[..., Any]
