"""`nn.Module` faces of `argmin`, `root` and `fixed_point`: y = layer(x)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchdil.argmin import argmin
from torchdil.arguments import check_callable, check_linear_solver
from torchdil.batch import map_tensors
from torchdil.fixed_point import fixed_point
from torchdil.linear.base import LinearSolver
from torchdil.modes import eager, transforms_active
from torchdil.root import root
from torchdil.solution import FailurePolicy, Report, Solution, Status, check_policy
from torchdil.solvers.base import Solver, check_solver


@dataclass(frozen=True)
class LastSolution:
    """`init` of a layer: start from the layer's last solution where that has the right shape, else from `first`.

    Attributes:
        first: the `init` to use otherwise: a shape or a callable of x.

    Example:
        >>> dil.ArgminLayer(score, init=dil.LastSolution((10,)))
    """

    first: Any


class Reporting(nn.Module):
    """A module that keeps the report of its last call.

    Attributes:
        report: it.
    """

    # What copies do not take along, and no trace depends on.
    _left_by_calls: ClassVar = frozenset({"report", "_last"})
    report: Report | None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(self._left_by_calls & self.__dict__.keys())}


class _Layer(Reporting):
    """What the three layers share.

    `layer(x, y0=None)` calls the function as fn(y, x), or as fn(y) where x is None, and returns y. The start is `y0` if
    given, else what `init` says:

    - a shape, e.g. `(10,)`, or a nested tuple/dict of shapes: zeros of that shape for each sample, the samples being the first
      axis of x;
    - a callable of x, e.g. a module that learns a warm start (it gets no gradient from here: y does not depend on y0);
    - `LastSolution(init)`: the last solution.

    Attributes:
        report: the `Report` of the last call.
    """

    _find: ClassVar[Callable[..., Solution[Any]]]

    def __init__(
        self,
        function: Callable[..., Any],
        solver: Solver | Callable[..., Any] | None,
        linear_solver: LinearSolver | None,
        init: Any,
        on_failure: FailurePolicy,
    ):
        super().__init__()
        check_callable(function, "The function of a layer", "fn(y, x)")
        check_solver(solver)
        check_linear_solver(linear_solver)
        check_policy(on_failure)
        _check_init(init)
        self.function = function
        self.solver = solver
        self.linear_solver = linear_solver
        self.init = init
        self.on_failure: FailurePolicy = on_failure
        self.report = None
        self._last: Any = None

    @eager
    def forward(self, x: Any = None, y0: Any = None) -> Any:
        """y for the input x, attached to the graph.

        Args:
            x: the second argument of the function: a tensor, or nested; None: the function is called with y alone.
            y0: where the solver starts, in the structure of y; None: what `init` says. It gets no gradient.

        Returns:
            y, in the structure of the start.
        """
        solution = self._solve(self._start(x) if y0 is None else y0, () if x is None else (x,))
        self.report = solution.report
        if isinstance(self.init, LastSolution) and not transforms_active():  # a transform's tensors end with it
            lost = bool((solution.status == Status.non_finite).any())  # no start for what follows
            with torch.inference_mode(False):  # a copy made inside could not take part in training
                self._last = None if lost else map_tensors(lambda t: t.detach().clone(), solution.value)
        return solution.value

    def _solve(self, y0: Any, args: tuple[Any, ...]) -> Solution[Any]:
        return self._find(
            self.function,
            y0,
            args,
            solver=self.solver,
            linear_solver=self.linear_solver,
            on_failure=self.on_failure,
            **self._options(),
        )

    def _options(self) -> dict[str, Any]:
        return {}

    def _start(self, x: Any) -> Any:
        init = self.init
        if isinstance(init, LastSolution):
            fresh = _initial(init.first, x)
            return self._last if _alike(self._last, fresh) else fresh
        if init is None:
            raise ValueError("A start is missing: give the layer init=(a shape or a callable of x), or pass y0 in the call.")
        return _initial(init, x)

    def extra_repr(self) -> str:
        """The settings, for print(layer)."""
        shown = ("solver", "linear_solver", "init")
        return ", ".join(
            f"{name}={getattr(self, name)!r}" for name in shown if getattr(self, name) is not None and name not in self._modules
        )


class ArgminLayer(_Layer):
    """y = argmin_u score(u, x) as a layer.

    Called as `layer(x=None, y0=None)`, it gives y, attached to the graph. x, a tensor or nested, is passed on to `score`;
    without it `score` is called with y alone. y0 is where the solver starts in this call, in place of `init`; it gets no
    gradient.

    Args:
        score: f(y, x) -> (B,) for B independent problems, or () for one; an `nn.Module` or any callable.
        solver: finds y, as in `argmin`.
        linear_solver: for the backward pass, as in `argmin`.
        on_failure: what to do when a solve fails, as in `argmin`.
        init: where to start: a shape per sample (zeros), a callable of x, or `LastSolution(...)`. The samples are the
            first axis of x, whatever its shape: one sample alone is `x[None]`.

    Attributes:
        function: the score. It and the settings below may be replaced between calls.
        solver: the solver that was given, or None for the default.
        linear_solver: the linear solver that was given, or None for the default.
        init: where to start.
        on_failure: what to do when a solve fails.
        report: the `Report` of the last call; None before it.

    Example:
        >>> layer = dil.ArgminLayer(lambda y, x: ((y - x) ** 2 + y**4).sum(-1), init=(3,))
        >>> model = nn.Sequential(nn.Linear(5, 3), layer, nn.Linear(3, 1))
    """

    _find = staticmethod(argmin)

    def __init__(
        self,
        score: Callable[..., Tensor],
        *,
        solver: Solver | Callable[..., Any] | None = None,
        linear_solver: LinearSolver | None = None,
        init: Any = None,
        on_failure: FailurePolicy = "warn",
    ):
        super().__init__(score, solver, linear_solver, init, on_failure)


class RootLayer(_Layer):
    """y with residual(y, x) = 0 as a layer.

    Called as `layer(x=None, y0=None)`, it gives y, attached to the graph. x, a tensor or nested, is passed on to `residual`;
    without it `residual` is called with y alone. y0 is where the solver starts in this call, in place of `init`; it gets no
    gradient.

    Args:
        residual: F(y, x), of the shapes of y; an `nn.Module` or any callable.
        solver: finds y, as in `root`.
        linear_solver: for the backward pass, as in `root`.
        on_failure: what to do when a solve fails, as in `root`.
        init: where to start: a shape per sample (zeros), a callable of x, or `LastSolution(...)`. The samples are the
            first axis of x, whatever its shape: one sample alone is `x[None]`.
        batch_dims: how many first axes of y number independent problems. 1 as in every layer of torch; 0 where `residual` mixes
            samples.

    Attributes:
        function: the residual. It and the settings below may be replaced between calls.
        solver: the solver that was given, or None for the default.
        linear_solver: the linear solver that was given, or None for the default.
        init: where to start.
        batch_dims: how many first axes of y number independent problems.
        on_failure: what to do when a solve fails.
        report: the `Report` of the last call; None before it.

    Example:
        >>> layer = dil.RootLayer(lambda y, x: y**3 + y - x, init=(3,))
    """

    _find = staticmethod(root)

    def __init__(
        self,
        residual: Callable[..., Any],
        *,
        solver: Solver | Callable[..., Any] | None = None,
        linear_solver: LinearSolver | None = None,
        init: Any = None,
        batch_dims: int = 1,
        on_failure: FailurePolicy = "warn",
    ):
        super().__init__(residual, solver, linear_solver, init, on_failure)
        self.batch_dims = batch_dims

    def _options(self) -> dict[str, Any]:
        return {"batch_dims": self.batch_dims}


class FixedPointLayer(_Layer):
    """y = g(y, x) as a layer: a deep equilibrium model.

    Called as `layer(x=None, y0=None)`, it gives y, attached to the graph. x, a tensor or nested, is passed on to `g`;
    without it `g` is called with y alone. y0 is where the solver starts in this call, in place of `init`; it gets no
    gradient.

    Args:
        g: the map, of the shapes of y; an `nn.Module` or any callable.
        solver: finds y, as in `fixed_point`.
        linear_solver: for the backward pass, as in `fixed_point`.
        on_failure: what to do when a solve fails, as in `fixed_point`.
        init: where to start: a shape per sample (zeros), a callable of x, or `LastSolution(...)`. The samples are the
            first axis of x, whatever its shape: one sample alone is `x[None]`.
        batch_dims: how many first axes of y number independent problems. 1 as in every layer of torch; 0 where `g` mixes
            samples.

    Attributes:
        function: the map g. It and the settings below may be replaced between calls.
        solver: the solver that was given, or None for the default.
        linear_solver: the linear solver that was given, or None for the default.
        init: where to start.
        batch_dims: how many first axes of y number independent problems.
        on_failure: what to do when a solve fails.
        report: the `Report` of the last call; None before it.

    Example:
        >>> layer = dil.FixedPointLayer(lambda y, x: torch.tanh(0.5 * y + x), init=(3,))
    """

    _find = staticmethod(fixed_point)

    def __init__(
        self,
        g: Callable[..., Any],
        *,
        solver: Solver | Callable[..., Any] | None = None,
        linear_solver: LinearSolver | None = None,
        init: Any = None,
        batch_dims: int = 1,
        on_failure: FailurePolicy = "warn",
    ):
        super().__init__(g, solver, linear_solver, init, on_failure)
        self.batch_dims = batch_dims

    def _options(self) -> dict[str, Any]:
        return {"batch_dims": self.batch_dims}


def _check_init(init: Any) -> None:
    first = init.first if isinstance(init, LastSolution) else init
    if first is None or callable(first):
        return
    for part in pytree.tree_leaves(first, is_leaf=_is_shape):
        if not _is_shape(part):
            raise TypeError(
                "init must be the shape of y for one sample such as (3,), a nested tuple/dict of shapes, a callable of x, or "
                f"LastSolution, got {_short(part)}."
            )


def _short(part: Any) -> str:
    return f"a tensor of shape {tuple(part.shape)}" if isinstance(part, Tensor) else repr(part)


def _initial(init: Any, x: Any) -> Any:
    """The start that a shape or a callable gives for x."""
    if callable(init):
        return init(x)
    tensors = [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]
    first = tensors[0] if tensors else torch.empty((), device=torch.get_default_device())
    dtype = first.dtype if first.is_floating_point() else torch.get_default_dtype()
    if torch.is_autocast_enabled(first.device.type) and dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32  # solved in full precision, see torchdil.solve
    samples = tuple(first.shape[:1])

    def zeros(shape: Any) -> Tensor:
        return torch.zeros(samples + tuple(shape), dtype=dtype, device=first.device)

    return pytree.tree_map(zeros, init, is_leaf=_is_shape)


def _is_shape(init: Any) -> bool:
    return isinstance(init, (tuple, list, torch.Size)) and all(isinstance(size, int) for size in init)


def _alike(last: Any, fresh: Any) -> bool:
    if last is None:
        return False
    leaves, spec = pytree.tree_flatten(last)
    others, other_spec = pytree.tree_flatten(fresh)
    return spec == other_spec and all(
        a.shape == b.shape and a.dtype == b.dtype and a.device == b.device for a, b in zip(leaves, others, strict=True)
    )
