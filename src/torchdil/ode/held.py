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

from torchdil import batch
from torchdil.linear import Auto
from torchdil.modes import no_tangents, observed_by, plain_saving
from torchdil.ode.interpolant import Interpolant
from torchdil.ode.methods import Method
from torchdil.ode.outputs import Estimated
from torchdil.ode.walk import Tolerances
from torchdil.operator import Operator
from torchdil.problem import Call
from torchdil.solution import GRID_ERROR, ConvergenceError, ConvergenceWarning, Report, user_frame, which
from torchdil.solve import Setting
from torchdil.solvers.newton import Newton

# A gradient counts where it changes the loss by more than so many times what the error of the solution may; below, it is noise.
_ERRORS = 10
# Of Newton's method on a finer grid, which begins near its solution if that does not jump.
_STEPS = 10


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
            with torch.enable_grad(), no_tangents(), plain_saving(), observed_by(None):
                error = self._off(operator, rhs, g)
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

    def _off(self, operator: Operator, rhs: Tensor, g: Tensor) -> Tensor:
        """How far the gradient may be off, relative, (B,): of the effect of a shift in time the part that the grid spoils.

        Such shifts may have no part in the gradient, so where this is much, a grid twice as fine has the last word.
        """
        assert operator.bound is not None
        call: Call
        call, (y0, given) = operator.bound
        times = given.detach().requires_grad_()
        F = self.residual(call, operator.y, (y0, times))
        (moved,) = torch.autograd.grad(F, times, -g, retain_graph=True)
        with torch.no_grad():
            y, v = self.view(operator.y), self.view(rhs)[:, :, -1]
            slopes = self.field(call, times[..., 1:].to(y.dtype), y[:, :, -1])
            seen = (v * slopes).sum(dim=-1)
            # What the loss may be off by as the solution is, (B,).
            least = _ERRORS * (v.abs() * self.tolerances.scale(y[:, :, -1].abs())).sum(dim=(1, 2))
            every = least
            if times.dim() == 1:  # one grid for all, whose samples are one system
                seen, moved, every = seen.sum(dim=0, keepdim=True), moved.unsqueeze(0), least.sum(dim=0, keepdim=True)
            seen, had = _from_the_end(seen), _from_the_end(moved[:, 1:])
            span = (times[..., -1] - times[..., 0]).abs().to(y.dtype)
            size = torch.maximum(torch.maximum(seen.abs(), had.abs()).amax(dim=1), every / span)
            error = _share((had - seen).abs().amax(dim=1), size).expand(len(g))
            suspect = error > GRID_ERROR
            if not bool(suspect.any()):
                return error
        tensors = [t for t in operator.boundary if t is not given]
        v = torch.where(suspect[:, None, None], v, 0.0)
        own = torch.autograd.grad(F, tensors, -torch.where(suspect.unsqueeze(1), g, 0.0), allow_unused=True)
        try:
            ends = self._finer(call, y, y0, given.detach())
        except ConvergenceError:  # a solution that is not even near it
            return error
        finer = torch.autograd.grad((v * ends).sum(), tensors, allow_unused=True)
        least = torch.where(suspect, least, 0.0).sum()
        changes = []
        for tensor, a, b in zip(tensors, own, finer, strict=True):
            if a is None or b is None or not a.numel():
                continue
            # In units of the loss: what a change of the tensor by its own size does, or by 1 if it is zero, as a bias may be.
            unit = _size(tensor)
            unit = torch.where(unit > 0, unit, 1.0)
            if any(tensor is part for part in batch.leaves(y0)):  # a state, which may be about to grow
                unit = _size(y)
            size = unit * torch.maximum(a.norm(), b.norm())
            changes.append(_share(unit * (a - b).norm(), torch.maximum(size, least)).to(y.dtype))
        return torch.where(suspect, torch.minimum(error, torch.stack(changes).amax()), error)

    def _finer(self, call: Call, y: Tensor, y0: Any, times: Tensor) -> Tensor:
        """The states at the ends of the steps, (B, T, D), attached, by steps half as long."""
        statement = Estimated(self.method, self.state, self.field, 2 * self.steps)
        middle = (times[..., 1:] + times[..., :-1]) / 2
        grid = torch.cat((times[..., :1], torch.stack((middle, times[..., 1:]), dim=-1).flatten(-2)), dim=-1)
        with torch.no_grad():
            c = torch.tensor(self.method.places, dtype=y.dtype, device=y.device)
            at = torch.cat((c / 2, (1 + c) / 2)).expand(*y.shape[:2], -1)
            start = Interpolant(self.method).at(at, self.previous(y, self.state.ravel(y0)), y)
        linear = statement.direct() or Auto()
        setting = Setting(statement, call, Newton(max_steps=_STEPS, linear_solver=linear), linear, "raise", Report())
        return statement.view(setting.attached(statement.layout.unravel(start.flatten(1)), (y0, grid)))[:, 1::2, -1]


def _from_the_end(a: Tensor) -> Tensor:
    """The sums of (B, N) from each place to the end."""
    return a.flip(1).cumsum(dim=1).flip(1)


def _size(a: Tensor) -> Tensor:
    """Root mean square."""
    return a.detach().norm() / a.numel() ** 0.5


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return torch.where(whole > 0, part / whole, 0.0)
