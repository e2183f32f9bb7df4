"""Model predictive control as a layer: plan over a horizon, apply the first control, look again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchdil.arguments import check_callable, check_linear_solver, check_signature, check_unknown
from torchdil.batch import Layout
from torchdil.control.ddp import DDP
from torchdil.control.plan import Cost, Dynamics, Plan, Planning, Rollout, Terminal
from torchdil.control.riccati import Riccati
from torchdil.layers import Reporting
from torchdil.linear.base import LinearSolver
from torchdil.modes import eager, observed_by, transforms_active, uncompiled
from torchdil.settings import check_count
from torchdil.solution import FailurePolicy, Report, check_policy
from torchdil.solve import Setting
from torchdil.solvers.base import Solver, check_solver
from torchdil.solvers.bounds import check_bounds, rows_of

# What the functions of users call the two, where they could be swapped.
_STATES = {"x", "xs", "x_t", "state", "states"}
_CONTROLS = {"u", "us", "u_t", "control", "controls", "action", "actions"}


class MPC(Reporting):
    """u = argmin Σ_{t<H} c(x_t, u_t) + c_f(x_H) with x_{t+1} = h(x_t, u_t), x_0 = x_obs, as a layer.

    Gradients reach x_obs, the parameters of dynamics and cost and whatever else these use; a control that presses against a
    bound stays there. `mpc(x_obs)` gives the plan, `mpc.act(x_obs)` its first control, `mpc.rollout(...)` a closed loop.
    `mpc.report` tells how the last plan was found, and how far it is from stationary if the solver does not polish.

    Args:
        dynamics: h(x, u) -> the next x, (B, n), (B, m) -> (B, n); an `nn.Module` or any callable.
        cost: c(x, u) -> (B,).
        horizon: H, how many controls to plan; `mpc.horizon` may be changed between calls.
        control_dim: m.
        terminal: c_f(x) -> (B,), the cost of the last state. Default: c(x, 0).
        bounds: (low, high) of the controls: numbers, or tensors that broadcast to (B, H, m), which become buffers or stay
            parameters `mpc.low` and `mpc.high`; infinite where there is none.
        solver: finds the plan: `DDP()` (default), `Newton()`, `GradientDescent()`, a sampling planner such as
            `RandomShooting(polish=DDP())`, or without bounds any other solver of an argmin.
        linear_solver: for the backward pass. Default: `Riccati()`.
        on_failure: "raise", "warn" or "ignore", or "zero" / "nan" for the gradient of the samples that failed.

    Attributes:
        report: the `Report` of the last call.

    Example:
        >>> mpc = dil.control.MPC(dynamics, cost, horizon=10, control_dim=1, bounds=(-1.0, 1.0))
        >>> u = mpc(x_obs)  # (B, 10, 1)
        >>> states, controls = mpc.rollout(true_dynamics, x_obs, steps=40)
    """

    def __init__(
        self,
        dynamics: Dynamics,
        cost: Cost,
        horizon: int,
        control_dim: int,
        *,
        terminal: Terminal | None = None,
        bounds: tuple[Any, Any] | None = None,
        solver: Solver | Callable[..., Any] | None = None,
        linear_solver: LinearSolver | None = None,
        on_failure: FailurePolicy = "warn",
    ):
        super().__init__()
        for name, function in (("dynamics", dynamics), ("cost", cost), ("terminal", terminal)):
            if not (name == "terminal" and function is None):
                check_callable(function, name, f"{name}(x)" if name == "terminal" else f"{name}(x, u)")
        check_count("control_dim", control_dim)
        check_solver(solver)
        check_linear_solver(linear_solver)
        if bounds is not None:
            check_bounds(bounds, finite=False)
        check_policy(on_failure)
        self.dynamics, self.cost, self.terminal = dynamics, cost, terminal
        self.horizon, self.control_dim = horizon, control_dim
        for name, bound in zip(("low", "high"), (None, None) if bounds is None else bounds, strict=True):
            if isinstance(bound, Tensor) and not isinstance(bound, nn.Parameter):
                self.register_buffer(name, bound)  # goes where the module goes
            else:
                setattr(self, name, bound)
        self.solver, self.linear_solver = solver, linear_solver
        self.on_failure: FailurePolicy = on_failure
        self.report = None
        self._last: Tensor | None = None

    @property
    def bounds(self) -> tuple[Any, Any] | None:
        """(low, high), or None."""
        return None if self.low is None else (self.low, self.high)

    @property
    def horizon(self) -> int:
        """H, how many controls to plan."""
        return self._horizon

    @horizon.setter
    def horizon(self, number: int) -> None:
        check_count("horizon", number)
        self._horizon = number

    @eager
    def forward(self, x_obs: Tensor, u0: Tensor | None = None) -> Tensor:
        """The plan.

        Args:
            x_obs: where the system is, (B, n), or (n,) for one system.
            u0: where the solver starts, (B, H, m), or (H, m); default: zero, or the bound next to it.

        Returns:
            The controls, (B, H, m), or (H, m), attached to the graph.
        """
        _check_state(x_obs)
        single = x_obs.dim() == 1
        x = x_obs.unsqueeze(0) if single else x_obs
        start = self._cold(x) if u0 is None else self._checked(u0, x, single)
        terminal = None if self.terminal is None else uncompiled(self.terminal)
        shape = self.horizon, self.control_dim
        plan = Plan(uncompiled(self.dynamics), uncompiled(self.cost), terminal, shape, self.bounds)
        _check_functions(plan, x, start)
        layout = Layout.of(start, 1)
        report = Report(torch.Size(()) if single else layout.batch_shape)
        solver = DDP() if self.solver is None else self.solver
        linear_solver = Riccati() if self.linear_solver is None else self.linear_solver
        statement = Planning(layout, self.bounds, self.on_failure == "zero", newton=DDP(), direct=Riccati())
        setting = Setting(statement, plan, solver, linear_solver, self.on_failure, report)
        u = layout.unravel(setting.attached(start, (x,)))
        self.report = setting.report
        return u[0] if single else u

    def act(self, x_obs: Tensor) -> Tensor:
        """The first control of a plan that starts from the last one, shifted by a step: (B, m), or (m,), attached.

        `reset()` forgets the last plan; one of another shape is not used.
        """
        _check_state(x_obs)
        start, single = self._shifted(x_obs), x_obs.dim() == 1
        u = self(x_obs, start)
        if not transforms_active():  # a transform's tensors end with it
            last = u.detach().unsqueeze(0) if single else u.detach()
            self._last = torch.where(last.isfinite().all(dim=2, keepdim=True), last, self._cold(last))
        return u[0] if single else u[:, 0]

    def reset(self) -> None:
        """Forget the last plan."""
        self._last = None

    def rollout(self, true_dynamics: Dynamics, x0: Tensor, steps: int, *, warm_start: bool = True) -> Rollout:
        """A closed loop: observe, plan, apply the first control to the true system.

        Args:
            true_dynamics: (x, u) -> the next x, (B, n), (B, m) -> (B, n).
            x0: where the system starts, (B, n), or (n,).
            steps: how many controls to apply.
            warm_start: start each plan from the last one, shifted; else all of them anew.

        Returns:
            A `Rollout`, attached to the graph of every plan.
        """
        if not callable(true_dynamics):
            raise TypeError(f"true_dynamics must be callable, got {type(true_dynamics).__name__}.")
        _check_order("true_dynamics", true_dynamics)
        check_count("steps", steps)
        _check_state(x0, "x0")
        self.reset()
        single = x0.dim() == 1
        states, controls = [x0.unsqueeze(0) if single else x0], []
        for _ in range(steps):
            controls.append(self.act(states[-1]) if warm_start else self(states[-1])[:, 0])
            ahead = true_dynamics(states[-1], controls[-1])
            if not isinstance(ahead, Tensor) or ahead.shape != states[-1].shape:
                got = f"shape {tuple(ahead.shape)}" if isinstance(ahead, Tensor) else type(ahead).__name__
                raise ValueError(f"true_dynamics must return a tensor of shape {tuple(states[-1].shape)}, got {got}.")
            states.append(ahead)
        trajectory = Rollout(torch.stack(states, dim=1), torch.stack(controls, dim=1))
        return Rollout(trajectory.states[0], trajectory.controls[0]) if single else trajectory

    def _cold(self, x: Tensor) -> Tensor:
        """Zero controls, (B, H, m), or the point of the box that is nearest to zero."""
        start = torch.zeros(x.shape[0], self.horizon, self.control_dim, dtype=x.dtype, device=x.device)
        if self.bounds is None:
            return start
        low, high = rows_of(self.bounds, Layout.of(start, 1), start.flatten(1))
        return start.clamp(low.detach().view_as(start), high.detach().view_as(start))

    def _shifted(self, x_obs: Tensor) -> Tensor | None:
        """The last plan a step later, its last control twice; None: there is none that fits."""
        last, samples = self._last, 1 if x_obs.dim() == 1 else x_obs.shape[0]
        if last is None or last.shape != (samples, self.horizon, self.control_dim):
            return None
        if last.dtype != x_obs.dtype or last.device != x_obs.device:
            return None
        shifted = torch.cat((last[:, 1:], last[:, -1:]), dim=1)
        return shifted[0] if x_obs.dim() == 1 else shifted

    def _checked(self, u0: Any, x: Tensor, single: bool) -> Tensor:
        if not isinstance(u0, Tensor):
            raise TypeError(f"u0 must be a tensor, got {type(u0).__name__}.")
        check_unknown(u0, "u0")
        shape, name = torch.Size((*x.shape[:-1], self.horizon, self.control_dim)), "horizon, control_dim"
        if single:
            shape = shape[1:]
        if u0.shape != shape:
            name = name if single else f"B, {name}"
            raise ValueError(f"u0 must be of shape ({name}) = {tuple(shape)}, got {tuple(u0.shape)}.")
        if u0.dtype != x.dtype or u0.device != x.device:
            raise TypeError(f"u0 must be like x_obs ({x.dtype}, {x.device}), got {u0.dtype}, {u0.device}.")
        return u0.unsqueeze(0) if single else u0

    def extra_repr(self) -> str:
        """The settings, for print(mpc)."""
        shown = ("horizon", "control_dim", "bounds", "solver", "linear_solver")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in shown if getattr(self, name) is not None)


def _check_state(x: Any, name: str = "x_obs") -> None:
    if not isinstance(x, Tensor) or x.dim() not in (1, 2):
        got = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"{name} must be a tensor of shape (B, n), or (n,) for one system, got {got}.")
    check_unknown(x, name)
    if x.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} must be float32 or float64 to plan with, got {x.dtype}: use {name}.float().")
    if x.is_meta:
        raise ValueError(f"{name} must hold numbers, got a tensor on the device meta.")


def _check_order(name: str, function: Any) -> None:
    """Raise one sentence if the function's own names say that it takes the control first."""
    names = check_signature(function, name, ("x", "u"), (None, None))
    if len(names) > 1 and names[0] in _CONTROLS and names[1] in _STATES:
        raise TypeError(f"{name} is called as {name}(x, u), but its parameters are ({', '.join(names)}): change their order.")


def _check_functions(plan: Plan, x: Tensor, u: Tensor) -> None:
    """Raise one sentence if dynamics or cost return something else than expected."""
    _check_order("dynamics", plan.dynamics)
    _check_order("cost", plan.cost)
    try:
        with observed_by(None):
            ahead, costs = plan.dynamics(x, u[:, 0]), plan.cost(x, u[:, 0])
            final = costs if plan.terminal is None else plan.terminal(x)
    except TypeError:
        if plan.terminal is not None:
            check_signature(plan.terminal, "terminal", ("x",), (x,))
        raise
    for name, value, shape in (("dynamics", ahead, x.shape), ("cost", costs, x.shape[:1]), ("terminal", final, x.shape[:1])):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must return a tensor, got {type(value).__name__}.")
        if value.layout != torch.strided:
            raise TypeError(f"{name} must return a dense tensor, got {value.layout}.")
        if value.shape != shape:
            raise ValueError(
                f"{name} must return shape {tuple(shape)} for x of shape {tuple(x.shape)}, got {tuple(value.shape)}."
            )
        if value.device != x.device:
            raise ValueError(f"{name} must return tensors on the device of x_obs, {x.device}, got {value.device}.")
        # Under autocast the check may see half precision; the solve does not.
        if value.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"{name} must return the dtype of x_obs, {x.dtype}, got {value.dtype}.")
