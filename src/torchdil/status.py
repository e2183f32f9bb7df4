"""How a solve ended, in words, and what to change."""

from __future__ import annotations

from enum import IntEnum


class Status(IntEnum):
    """How the solve of one sample ended; anything but `converged` is a failure."""

    converged = 0
    max_steps = 1
    stagnated = 2
    negative_curvature = 3
    breakdown = 4
    non_finite = 5
    not_stationary = 6

    @property
    def message(self) -> str:
        """What happened, in words."""
        return _MESSAGES[self][0]

    @property
    def advice(self) -> str:
        """What to change."""
        return _MESSAGES[self][1]

    @property
    def forward_advice(self) -> str:
        """The same where a forward solver, which has no damping, ended so."""
        return _FORWARD.get(self, self.advice)


_MESSAGES = {
    Status.converged: ("the tolerance was reached", "nothing to do"),
    Status.max_steps: ("max_steps was reached before the tolerance", "raise max_steps or loosen rtol"),
    Status.stagnated: (
        "the residual stopped falling above the tolerance",
        "loosen rtol, use float64 or add damping; a function that is not smooth, has no solution or mixes samples "
        "(batch normalisation) does this too",
    ),
    Status.negative_curvature: (
        "negative curvature was met, so the point is no minimum",
        "solve the inner problem further, use MINRES or Auto, or add damping",
    ),
    Status.breakdown: ("the linear system is singular", "add damping or regularise the problem"),
    Status.non_finite: ("a value was not finite", "check the function at the point reached, or start closer to the solution"),
    Status.not_stationary: ("the point returned does not solve the problem", "let the solver run further or start closer"),
}
_FORWARD = {
    Status.stagnated: (
        "loosen rtol, use float64 or another solver; a function that is not smooth, has no solution or mixes samples (batch "
        "normalisation) does this too"
    ),
    Status.breakdown: "use another solver or regularise the problem",
}
