"""How the stages of a step are found: the settings of `torchdil.ode.step`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from torchdil import batch

JACOBIANS = ("full", "diagonal", "identity", "krylov")


@dataclass(frozen=True)
class SimplifiedNewton:
    """How the stages of a step are found.

    Attributes:
        rtol: what ‖F‖ of a step may be against the largest state so far; None: 1e-10 in float64, 1e-5 in float32.
        max_steps: the most iterations; None: 20, or 100 without the whole Jacobian.
        jacobian: "full": J as a matrix; "krylov": products with J in GMRES; "diagonal": the diagonal of J only; "identity":
            none of it, which is fixed-point iteration. None: "full" where it fits, else "krylov".

    Example:
        >>> dil.odeint(f, y0, t, solver=dil.ode.SimplifiedNewton(jacobian="krylov"))
    """

    rtol: float | None = None
    max_steps: int | None = None
    jacobian: str | None = None

    def __post_init__(self) -> None:
        if self.rtol is not None and not (isinstance(self.rtol, (int, float)) and self.rtol > 0):
            raise ValueError(f"rtol must be a number > 0, got {self.rtol!r}.")
        if self.max_steps is not None and not (isinstance(self.max_steps, int) and self.max_steps >= 1):
            raise ValueError(f"max_steps must be an integer >= 1, got {self.max_steps!r}.")
        if self.jacobian is not None and self.jacobian not in JACOBIANS:
            raise ValueError(f"jacobian must be one of {', '.join(map(repr, JACOBIANS))}, got {self.jacobian!r}.")

    def accuracy(self, dtype: torch.dtype) -> float:
        """rtol, or the default for the dtype."""
        return batch.default_rtol(dtype) if self.rtol is None else self.rtol
