"""`nn.Module` face of `odeint`: y(t) = node(y0, t) with dy/dt = field(t, y)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchdil.arguments import check_callable, check_linear_solver
from torchdil.batch import map_tensors
from torchdil.layers import Reporting
from torchdil.linear.base import LinearSolver
from torchdil.modes import eager
from torchdil.ode.equation import Options
from torchdil.ode.methods import Method, method_of
from torchdil.ode.newton import OdeSolver, SimplifiedNewton
from torchdil.ode.odeint import Gradient, check_kind, solve
from torchdil.solution import FailurePolicy, check_policy
from torchdil.solvers.base import check_solver

_HALF = (torch.float16, torch.bfloat16)


class NeuralODE(Reporting):
    """y = node(y0, t) at the times t, with dy/dt = field(t, y) and y(t[0]) = y0, as a layer: (T, *y0.shape).

    Args:
        field: field(t, y) -> dy/dt, of the shapes of y; an `nn.Module` or any callable.
        method: a method or its name, as in `odeint`.
        gradient: "ift", "adjoint" or "backprop", as in `odeint`.
        solver: for the implicit steps, as in `odeint`.
        linear_solver: for the backward pass, as in `odeint`.
        batch_dims: how many first axes of y0 number independent systems. 1 as in every layer of torch; 0 where `field` mixes
            samples.
        rtol: relative tolerance, as in `odeint`.
        atol: absolute tolerance, as in `odeint`.
        options: more settings, as in `odeint`.
        on_failure: what to do when a solve fails, as in `odeint`.
        verbose: show the steps while they are taken, as in `odeint`.

    Attributes:
        report: the `Report` of the last call.

    Example:
        >>> class Field(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = nn.Sequential(nn.Linear(2, 30), nn.Tanh(), nn.Linear(30, 2))
        ...
        ...     def forward(self, t, y):
        ...         return self.net(y)
        >>> node = dil.NeuralODE(Field())
        >>> y = node(torch.randn(64, 2), torch.linspace(0, 1, 11))  # (11, 64, 2)
    """

    def __init__(
        self,
        field: Callable[..., Any],
        method: Method | str = "backward_euler",
        *,
        gradient: Gradient = "ift",
        solver: OdeSolver | None = None,
        linear_solver: LinearSolver | None = None,
        batch_dims: int = 1,
        rtol: float | None = None,
        atol: float | None = None,
        options: dict[str, Any] | None = None,
        on_failure: FailurePolicy = "warn",
        verbose: bool = False,
    ):
        super().__init__()
        check_callable(field, "field", "field(t, y)")
        check_policy(on_failure)
        check_kind(gradient)
        check_solver(solver, SimplifiedNewton)
        check_linear_solver(linear_solver)
        Options.of(options)
        self.field = field
        self.method = method_of(method)
        self.gradient: Gradient = gradient
        self.solver = solver
        self.linear_solver = linear_solver
        self.batch_dims = batch_dims
        self.rtol, self.atol = rtol, atol
        self.options = options
        self.on_failure: FailurePolicy = on_failure
        self.verbose = verbose
        self.report = None

    @eager
    def forward(self, y0: Any, t: Tensor) -> Any:
        """y at the times t, (T, *y0.shape) in the structure of y0, attached to the graph."""
        solution = solve(
            self.field,
            _cast_up(y0),
            t,
            method=self.method,
            gradient=self.gradient,
            solver=self.solver,
            linear_solver=self.linear_solver,
            batch_dims=self.batch_dims,
            rtol=self.rtol,
            atol=self.atol,
            options=self.options,
            on_failure=self.on_failure,
            verbose=self.verbose,
        )
        self.report = solution.report
        return solution.value

    def extra_repr(self) -> str:
        """The settings, for print(node)."""
        usual = {"gradient": "ift", "batch_dims": 1, "on_failure": "warn"}
        shown = ("gradient", "solver", "linear_solver", "batch_dims", "rtol", "atol", "options", "on_failure")
        parts = [f"{name}={getattr(self, name)!r}" for name in shown if getattr(self, name) != usual.get(name)]
        return ", ".join([f"method={self.method!r}", *parts])


def _cast_up(y0: Any) -> Any:
    """Under autocast: what an earlier layer left in half precision, in float32; the solve is not cast."""
    devices = {leaf.device.type for leaf in pytree.tree_leaves(y0) if isinstance(leaf, Tensor)}
    if not any(torch.is_autocast_enabled(device) for device in devices):
        return y0
    return map_tensors(lambda leaf: leaf.float() if leaf.dtype in _HALF else leaf, y0)
