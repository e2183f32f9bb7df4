"""What it means for a gradient that the step sizes were held fixed.

Adaptive steps follow the solution: where a parameter moves a jump of it, the short steps move along. The gradient is that of
the numbers returned, on the grid as it is, and on a jump the two may have nothing in common, however small the error of the
solution.

The exact solution does not depend on the grid. So with v_n = ∂L/∂y_n, what comes in from the outputs between t_n and t_{n+1},
moving t_n alone changes the loss by nothing but what these outputs see of it,

    ∂L/∂t_n = v_nᵀ f(t_n, y_n),      n = 1..N,

and what the trajectory has instead tells what the grid is worth. Summed up from the end, both sides are the effect of a shift
in time, λᵀf where f does not depend on t.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from torchdil.modes import no_tangents, plain_saving
from torchdil.ode.methods import Method
from torchdil.ode.outputs import Estimated
from torchdil.ode.walk import Tolerances
from torchdil.operator import Operator
from torchdil.problem import Call
from torchdil.solution import GRID_ERROR, ConvergenceError, ConvergenceWarning, Report, user_frame, which

# How much of λ must be at stake: near an equilibrium shifts in time mean nothing.
_AT_STAKE = 1e-5


class Held(Estimated):
    """A trajectory on the grid that adaptive steps have left.

    Args:
        tolerances: of the integration; the others: see `Trajectory`.
    """

    def __init__(self, method: Method, state: Any, field: Any, steps: int, tolerances: Tolerances):
        super().__init__(method, state, field, steps)
        self.tolerances = tolerances

    def look_back(self, operator: Operator, rhs: Tensor, g: Tensor, report: Report, on_failure: str) -> None:
        if bool(self.view(rhs)[:, :, :-1].any()):  # a derivative of higher order, which depends on stages, too
            return
        try:
            with torch.enable_grad(), no_tangents(), plain_saving():
                error = self._moved(operator, rhs, g)
        except Exception:  # a function may refuse to be called in a backward pass
            return
        report.grid_error = error.reshape(self.layout.batch_shape)
        off = error > GRID_ERROR
        if on_failure in ("raise", "warn") and bool(off.any()):
            message = (
                f"The gradient through adaptive steps holds their sizes fixed, and may be off by {float(error[off].max()):.0%} "
                f"({which(off)}), though the solution is not: it has jumps, which they follow. To mend it: tighten rtol and "
                "atol (radauIIA5 needs that least), or smooth what switches in func."
            )
            if on_failure == "raise":
                raise ConvergenceError(message, report)
            warnings.warn(message, ConvergenceWarning, stacklevel=user_frame())

    def _moved(self, operator: Operator, rhs: Tensor, g: Tensor) -> Tensor:
        """Of the effect of a shift in time the part that the grid spoils, (B,); 0 where hardly a part of λ is so."""
        assert operator.bound is not None
        call: Call
        call, (y0, times) = operator.bound
        times = times.detach().requires_grad_()
        F = self.residual(call, operator.y, (y0, times))
        (moved,) = torch.autograd.grad(F, times, -g)
        with torch.no_grad():
            y = self.view(operator.y)[:, :, -1]
            slopes = self.field(call, times[..., 1:].to(y.dtype), y)
            parts = [y, slopes, self.view(rhs)[:, :, -1], self.view(g).sum(dim=2)]
            if times.dim() == 1:  # one grid for all, whose samples are one system
                parts = [part.transpose(0, 1).flatten(1).unsqueeze(0) for part in parts]
                times, moved = times.unsqueeze(0), moved.unsqueeze(0)
            y, slopes, v, before = parts
            seen, had = _from_the_end((v * slopes).sum(dim=-1)), _from_the_end(moved[:, 1:])
            wrong = (had - seen).abs()
            error = _share(wrong.amax(dim=1), torch.maximum(seen.abs(), had.abs()).amax(dim=1))
            # In units of the tolerances: the change of λ along f that would mend it, where a step leads anywhere.
            scale = self.tolerances.scale(y.abs())
            adjoint = v + torch.cat((before[:, 1:], torch.zeros_like(v[:, :1])), dim=1)
            lengths, slopes = (adjoint * scale).norm(dim=-1), (slopes / scale).norm(dim=-1)
            steps = times.diff(dim=-1).abs()
            spoilt = torch.where(steps * slopes > 1, steps * wrong / slopes, 0.0).sum(dim=1)
            at_stake = _share(spoilt, (steps * lengths).sum(dim=1)) > max(_AT_STAKE, 1e3 * torch.finfo(g.dtype).eps)
            return torch.where(at_stake, error, 0.0).expand(len(g))


def _from_the_end(a: Tensor) -> Tensor:
    """The sums of (B, N) from each place to the end."""
    return a.flip(1).cumsum(dim=1).flip(1)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole, 0.0)
