"""A problem as solvers see it: F(y) = 0 for a batch of unknowns y (B, n), F being the gradient of an objective or not."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchdil import batch
from torchdil.batch import Layout
from torchdil.graph import age, has_custom_function
from torchdil.linear.base import LinearSolver
from torchdil.modes import transforms_active
from torchdil.operator import Operator
from torchdil.solution import Report

Call = Callable[..., Any]
Box = tuple[Tensor, Tensor]

# How many roundings of a bound y may be off it and still be at it.
_ROUNDINGS = 4


def natural_change(y: Tensor, start: Tensor | None, length: Callable[[Tensor], Tensor] = batch.length) -> Tensor:
    """The change of y whose effect F is to be small against, (B, n): y or its way from the start; 1 if both are 0."""
    change = y
    if start is not None:
        way = y - start
        change = batch.select(length(way) > length(y), way, y)
    return batch.select((change != 0).any(dim=1), change, torch.ones_like(change))


class Statement(ABC):
    """The mathematics of a problem class: what must vanish at the answer.

    `call(y, *args)` is the user's function; y and the result are in the user's structure, everything else is (B, n).
    """

    name: ClassVar[str]
    argument: ClassVar[str]  # what the user's function is called in the signature
    functions: ClassVar[str] = ""  # all of them, where there are several
    symmetric: ClassVar[bool]
    has_objective: ClassVar[bool] = False
    rowwise: ClassVar[bool] = False  # whether all args are (B, ·) matrices, a row for each sample
    advice: ClassVar[str] = ""  # what to change where a solve gets stuck, if that is special

    def __init__(self, layout: Layout):
        self.layout = layout

    @abstractmethod
    def residual(self, call: Call, y: Tensor, args: tuple[Any, ...]) -> Tensor:
        """F(y), (B, n); differentiable when grad is enabled."""

    def objective(self, call: Call, y: Tensor, args: tuple[Any, ...]) -> Tensor:
        """What y minimises, (B,)."""
        raise TypeError(f"{self.name} has no objective.")

    def direct(self) -> LinearSolver | None:
        """A direct solver for J that knows its structure, if there is one and it fits into memory."""
        return None

    def newton(self) -> Any:
        """A forward solver of Newton's that knows the structure of F, if there is one; else None."""
        return None

    def box(self, y: Tensor) -> Box | None:
        """Bounds that y keeps, (B, n) each, if there are any."""
        return None

    def size(self, operator: Operator, y: Tensor, start: Tensor | None) -> Tensor:
        """The natural size of F at y, (B,): how much F changes when y does by its own size, or by its way from the start.

        By 1 if both are 0.
        """
        with torch.no_grad():
            return batch.length(operator.rmv(natural_change(y, start), "auto"))

    def counted(self, F: Tensor, y: Tensor, start: Tensor | None, operator: Operator | None = None) -> Tensor:
        """How large F counts as, (B,), when it is compared with its natural size: as its norm.

        Where parts of y differ much in size, the natural size is that of the largest part, and an F that is small against it
        may still be wrong in the others. Then a statement makes the parts of F count in units of their own.

        Args:
            F: at y, (B, n).
            start: where the solver began, (B, n), if it is known.
            operator: J at y; None: the answer is wanted without any product.
        """
        return batch.length(F)

    def quick_size(self, y: Tensor, start: Tensor | None) -> Tensor | None:
        """A lower bound of the natural `size` that costs no product with J, (B,); None where there is none.

        An F that is small against this bound is small against the size, which need not be worked out then.

        Without one (None), `counted` must be the norm of F, and `size` at least ‖J c‖, c being the `natural_change`: an answer
        may be accepted by these two alone, see `torchdil.glance`.
        """
        return None

    def first_size(self, problem: Problem, start: Tensor) -> Tensor:
        """The natural size of F where a solve begins, (B,); 0 where it is not finite."""
        operator = problem.operator(start)
        size = torch.maximum(batch.length(operator.graph()[1].detach()), self.size(operator, start, None))
        return torch.where(size.isfinite(), size, 0.0)  # a solver that samples may go on from there

    def look_back(self, operator: Operator, rhs: Tensor, g: Tensor, report: Report, on_failure: str) -> None:
        """Note, and under the policy tell, what the solution g of Jᵀ g = rhs shows of the gradient, if anything."""
        return None


@dataclass
class Problem:
    """A `Statement` with its function and arguments filled in.

    Attributes:
        name: "argmin", "root" or "fixed_point".
        symmetric: whether J = Jᵀ.
        residual: F, (B, n) -> (B, n).
        objective: f, (B, n) -> (B,); None unless the problem is an argmin.
        layout: the structure of the user's unknown; under `vmap` there are more rows than it has samples.
        key: identifies the user's function, see `Operator`.
        keep: how many secant pairs to keep.
        pairs: the last secant pairs (Δy, ΔF) of the solver, (B, n) each.
        statement: what the problem states.
        bound: the user's function and its arguments, for solvers that know the structure of F and evaluate parts of it; None
            under a `vmap` that these do not take part in row by row.
        box: bounds (low, high) that y keeps, (B, n) each, or None. F is then that of `held`.
        unrolled: evaluations keep their graph, so that a solver's answer can be differentiated through its steps.
    """

    name: str
    symmetric: bool
    residual: Callable[[Tensor], Tensor]
    objective: Callable[[Tensor], Tensor] | None = None
    layout: Layout | None = None
    key: Hashable = None
    keep: int = 0
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    statement: Statement | None = None
    bound: tuple[Call, tuple[Any, ...]] | None = None
    box: Box | None = None
    unrolled: bool = False

    def evaluate(self, y: Tensor) -> Tensor:
        """F(y), without a graph."""
        with torch.set_grad_enabled(self.unrolled):
            F = self.residual(y)
        return F if self.unrolled else F.detach()

    def measure(self, y: Tensor) -> tuple[Tensor, Tensor]:
        """F(y) and what must fall on the way to a solution, (B,): the objective of an argmin, else ‖F‖."""
        if self.objective is None:
            F = self.evaluate(y)
            return F, batch.norm(F)
        with torch.set_grad_enabled(self.unrolled):
            F, value = gradient(self.objective, y, "score")
            if self.box is not None:
                F = held(y, F, self.box)
        return F if self.unrolled else F.detach(), value.detach()

    def clip(self, y: Tensor) -> Tensor:
        """The nearest point inside the box; `y` itself without one."""
        return y if self.box is None else torch.clamp(y, *self.box)

    def argmin_only(self, solver: str) -> Callable[[Tensor], Tensor]:
        """The objective, or one sentence where there is none."""
        if self.objective is None:
            raise ValueError(f"solver={solver}() needs an argmin, got a {self.name}: use Newton(), Broyden() or Anderson().")
        return self.objective

    def operator(self, y: Tensor) -> Operator:
        """J at y."""
        operator = Operator(self.residual, y, self.symmetric, key=self.key)
        operator.bound = self.bound
        return operator

    def remember(self, dy: Tensor, dF: Tensor) -> None:
        """A step of the solver, for preconditioners that learn from it. Samples that did not move keep the pairs they have."""
        if len(self.pairs) < self.keep:
            self.pairs = [*self.pairs, (torch.zeros_like(dy), torch.zeros_like(dF))]
        if self.keep:
            moved = batch.norm(dy) > 0
            later = [*self.pairs[1:], (dy, dF)]
            self.pairs = [
                (batch.select(moved, s, old_s), batch.select(moved, q, old_q))
                for (s, q), (old_s, old_q) in zip(later, self.pairs, strict=True)
            ]


def gradient(f: Callable[[Tensor], Tensor], y: Tensor, argument: str, unknown: str = "y") -> tuple[Tensor, Tensor]:
    """∇f(y), (B, n), differentiable when grad is enabled, and f(y), (B,), of B functions of a row each.

    `argument` and `unknown` are what the user calls f and y.
    """
    if transforms_active():

        def total(y: Tensor) -> tuple[Tensor, Tensor]:
            value = f(y)
            return value.sum(), value

        return torch.func.grad(total, has_aux=True)(y)
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        if not (create_graph and y.requires_grad):
            y = y.detach().requires_grad_()
        first = age(y)
        value = without_backward(f, y, argument)
        if not value.requires_grad:
            raise ValueError(
                f"{argument} must depend on {unknown} differentiably, but its value has no gradient with respect to {unknown}: "
                "use operations of torch, and no detach(), item() or numpy."
            )
        one = torch.ones_like(value)
        if create_graph and has_custom_function(value, first):
            # A Function whose backward has no derivative says so only if its cotangent has one; else its curvature is lost.
            one = one + 0 * y.sum()
        (grad,) = torch.autograd.grad(value, y, one, create_graph=create_graph, allow_unused=True)
    if grad is None:
        raise ValueError(f"{argument} must depend on {unknown}, but its value does not change with {unknown}.")
    return grad, value


def without_backward(f: Callable[[Tensor], Tensor], y: Tensor, argument: str) -> Tensor:
    """f(y); raises one sentence if that leaves a gradient in y, a leaf, and so in the parameters of f, too."""
    clean = y.is_leaf and y.grad is None
    value = f(y)
    if clean and y.grad is not None:
        raise RuntimeError(f"{argument} must not call .backward(), which fills .grad at every step: use torch.autograd.grad.")
    return value


def held(y: Tensor, grad: Tensor, box: Box) -> Tensor:
    """What must vanish at a minimum in a box, (B, n): ∇f, but y - bound where a bound holds y back."""
    on_low, on_high = active(y, grad, box)
    return torch.where(on_low, y - box[0], torch.where(on_high, y - box[1], grad))


def active(y: Tensor, grad: Tensor, box: Box) -> tuple[Tensor, Tensor]:
    """Where y is at its low and at its high bound and ∇f drives it out, or y is outside anyway, (B, n) each."""
    low, high = (bound.detach() for bound in box)
    y, grad = y.detach(), grad.detach()
    # Whoever keeps a box puts y exactly there. A wider margin would hold free unknowns that are close to a bound.
    near_low, near_high = (_ROUNDINGS * torch.finfo(y.dtype).eps * bound.abs().nan_to_num(posinf=0.0) for bound in (low, high))
    on_low = (y < low - near_low) | ((y <= low + near_low) & (grad > 0))
    on_high = (y > high + near_high) | ((y >= high - near_high) & (grad < 0))
    return on_low, on_high


# A module's parameters may be swapped while it is called (torch.func.functional_call): later evaluations use those of the call.


def as_called(function: Any) -> Call:
    """The function with the parameters that it has now."""
    return call_with(function, parameters_of(function)) if isinstance(function, nn.Module) else function


def call_with(function: Any, parameters: dict[str, Tensor]) -> Call:
    """The function with these parameters, where it is a module."""

    def call(y: Any, *args: Any) -> Any:
        now = parameters_of(function)
        if all(parameters[name] is now[name] for name in parameters):
            return function(y, *args)
        return torch.func.functional_call(function, parameters, (y, *args))

    return call


def parameters_of(function: Any) -> dict[str, Tensor]:
    """Parameters and buffers by their names, where it is a module."""
    return {**dict(function.named_parameters()), **dict(function.named_buffers())} if isinstance(function, nn.Module) else {}
