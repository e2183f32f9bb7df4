"""Planning as an argmin over controls, the dynamics inserted:

    u = argmin_{u_0..u_{H-1}} Σ_{t<H} c(x_t, u_t) + c_f(x_H),    x_{t+1} = h(x_t, u_t),    low <= u <= high.

F is the gradient in u, and u - bound where a bound holds a control back: a held control moves with its bound only, and the free
ones solve a problem of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from torchdil.batch import Layout
from torchdil.linear.base import LinearSolver
from torchdil.problem import Box, Call, Statement, active, gradient, held
from torchdil.solvers.base import Solver
from torchdil.solvers.bounds import rows_of

Dynamics = Callable[[Tensor, Tensor], Tensor]
Cost = Callable[[Tensor, Tensor], Tensor]
Terminal = Callable[[Tensor], Tensor]


class Rollout(NamedTuple):
    """A closed loop.

    Attributes:
        states: x_0 .. x_T, (*batch, T + 1, n).
        controls: u_0 .. u_{T-1}, (*batch, T, m).
    """

    states: Tensor
    controls: Tensor


class Plan(nn.Module):
    """The cost of a sequence of controls: `plan(u (B, H, m), x0 (B, n)) -> (B,)`.

    Called with a function instead of u, as `plan(look, x0)`, it returns `look(plan, x0)`: whoever swaps its parameters for a
    call (`torch.func.functional_call`) swaps them for what looks at its parts, too.

    Attributes:
        dynamics, cost, terminal: h, c and c_f.
        shape: (H, m).
        bounds: (low, high), which broadcast to the controls, or None.
    """

    def __init__(
        self, dynamics: Dynamics, cost: Cost, terminal: Terminal | None, shape: tuple[int, int], bounds: tuple[Any, Any] | None
    ):
        super().__init__()
        self.dynamics, self.cost, self.terminal, self.shape, self.bounds = dynamics, cost, terminal, shape, bounds
        self._at_once = True

    def forward(self, u: Any, x0: Tensor) -> Any:
        """The total cost, (B,), or what a function of this plan sees."""
        if not isinstance(u, Tensor):
            return u(self, x0)
        x = self.states(u, x0)
        return self.stages(self.cost, x[:, :-1], u).sum(dim=1) + self.last(x[:, -1], u[:, -1])

    def states(self, u: Tensor, x0: Tensor) -> Tensor:
        """x_0 .. x_H, (B, H+1, n)."""
        x = [x0]
        for control in u.unbind(dim=1):
            x.append(self.dynamics(x[-1], control))
        return torch.stack(x, dim=1)

    def last(self, x: Tensor, like: Tensor) -> Tensor:
        """c_f(x_H), (B,): the cost without a control, unless another is given."""
        return self.cost(x, torch.zeros_like(like)) if self.terminal is None else self.terminal(x)

    def box(self, u: Tensor) -> Box | None:
        """The bounds as tensors like u, (B, H, m), if there are any."""
        if self.bounds is None:
            return None
        low, high = rows_of(self.bounds, Layout.of(u, 1), u.flatten(1))
        return low.view_as(u), high.view_as(u)

    def stages(self, function: Dynamics | Cost, x: Tensor, u: Tensor) -> Tensor:
        """`function` of all times at once, (B, T, n), (B, T, m) -> (B, T, ...).

        By `torch.vmap` over time, so that it sees (B, ·) as ever and may use tensors with a row for each sample; one time after
        another where it has an operation that vmap cannot take.
        """
        if self._at_once:
            try:
                return torch.vmap(function, in_dims=1, out_dims=1, randomness="different")(x, u)
            except Exception:  # of whatever kind: a fault of the function itself shows again without vmap
                self._at_once = False
        return torch.stack([function(*at) for at in zip(x.unbind(1), u.unbind(1), strict=True)], dim=1)


class Planning(Statement):
    """F(u) = ∇_u of the total cost; in a box that of the free controls, the others being at their bounds.

    Args:
        layout: of the controls.
        bounds: (low, high), or None.
        guarded: a sample whose F is not finite is looked at as if its state and controls were zero: zero times infinity would
            be NaN, in parameters shared with others.
        newton, direct: solvers that know the structure, for those who look for an exact answer.
    """

    name, argument, symmetric, has_objective = "plan", "cost", True, True
    functions = "cost or dynamics"

    def __init__(
        self,
        layout: Layout,
        bounds: tuple[Any, Any] | None,
        guarded: bool,
        newton: Solver | None = None,
        direct: LinearSolver | None = None,
    ):
        super().__init__(layout)
        self.bounds, self.guarded = bounds, guarded
        self._newton, self._direct = newton, direct

    def objective(self, call: Call, y: Tensor, args: tuple[Any, ...]) -> Tensor:
        return call(self.layout.unravel(y), *args)

    def residual(self, call: Call, y: Tensor, args: tuple[Any, ...]) -> Tensor:
        def total(u: Tensor) -> Tensor:
            return self.objective(call, u, args)

        if self.guarded:
            with torch.no_grad():
                lost = ~gradient(total, y.detach(), self.argument, "u")[0].isfinite().all(dim=1, keepdim=True)
            y, args = torch.where(lost, 0.0, y), (torch.where(lost, 0.0, args[0]),)
        box = self.box(y)
        if box is None:
            return gradient(total, y, self.argument, "u")[0]
        with torch.no_grad():
            grad = gradient(total, y.detach(), self.argument, "u")[0]
        if not torch.is_grad_enabled():
            return held(y, grad, box)
        on_low, on_high = active(y, grad, box)
        # A held control is replaced by its bound: J is symmetric, the identity on what is held, and bounds have derivatives.
        free = torch.where(on_low, box[0], torch.where(on_high, box[1], y))
        grad = gradient(total, free, self.argument, "u")[0]
        return torch.where(on_low, y - box[0], torch.where(on_high, y - box[1], grad))

    def box(self, y: Tensor) -> Box | None:
        return None if self.bounds is None else rows_of(self.bounds, self.layout, y)

    def direct(self) -> LinearSolver | None:
        return self._direct

    def newton(self) -> Solver | None:
        return self._newton
