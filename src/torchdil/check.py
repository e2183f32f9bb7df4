"""Is a gradient right, and if not, whose fault is it?

A gradient through implicit layers can be wrong for three reasons: the forward solve stopped early, the backward solve did, or
the function has no such derivative (a kink, a `detach`, a random number). `check_gradient` takes the layer apart: it refines
every forward solve to rounding and solves every backward system exactly, which gives the gradient that the theorem promises.
Putting the layer's own solves back, one at a time, shows what each of them costs; finite differences of the refined solution,
which know no theorem, show what the function costs; the way through the steps of the solver is a third opinion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchdil import batch
from torchdil.graph import captured_tensors
from torchdil.modes import observed_by
from torchdil.solution import Outcome, Solution, Stats, Status, text_table, worst_sample
from torchdil.solve import Setting
from torchdil.solvers.base import Solver
from torchdil.watch import Solve, Watch, newton_steps, own_steps

# What may be wrong with a function, and what to do about it.
_JUMP = "what must vanish jumps at the answer, so it vanishes nowhere near"
_KINK = "it has a kink at the solution: its slopes to the left and to the right differ"
_CUT = "its value changes with a tensor that its gradient does not see"
_OTHER = "its derivative, as autograd has it, is not its slope"
_RANDOM = "it gave two answers to the same inputs"
_ADVICE = {
    _JUMP: "replace what is not smooth there (abs, max, round, a threshold) by a smooth function",
    _KINK: "replace what is not smooth there (relu, abs, max) by a smooth function, or take the gradient as one-sided",
    _CUT: "look for detach(), .data, .item(), numpy or no_grad on the way from that tensor to the result",
    _OTHER: "look for an autograd.Function with a wrong backward, a detach() on one of several ways, or a solution that is not "
    "unique",
    _RANDOM: "draw random numbers outside, put modules into eval(), or seed inside the function",
}
# The effect of a tensor on the loss, relative to that of the strongest, below which it counts as none.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class GradientCheck:
    """What `check_gradient` found; `print` it.

    Attributes:
        blame: "nothing", "forward solve", "backward solve" or "function"; with a number where there are several solves.
        error: the relative error of the gradient.
        errors: what each suspect adds to it, e.g. {"function": 2e-9, "forward solve": 3e-2, "backward solve": 1e-11}.
        rtol: the error that counts as right.
        advice: what to change.
        tensors: a table, headings first: the derivative along a direction of each tensor as the layer has it, by finite
            differences of the exact solution, and through the steps of the solver.
        suspects: a table, headings first: what each adds to the error, and what was seen of it.
    """

    blame: str
    error: float
    errors: dict[str, float]
    rtol: float
    advice: str
    tensors: list[tuple[str, ...]] = field(repr=False)
    suspects: list[tuple[str, ...]] = field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether the gradient is right to `rtol`."""
        return self.blame == "nothing"

    def __str__(self) -> str:
        verdict = "right" if self.ok else f"wrong, and the {self.blame} is to blame"
        heading = f"The gradient is {verdict}: relative error {self.error:.1e}, allowed {self.rtol:.0e}."
        mend = "Nothing to mend." if self.ok else f"To mend it: {self.advice}."
        return "\n\n".join([heading, text_table(self.tensors), text_table(self.suspects), mend])


def check_gradient(layer_or_fn: Callable[..., Any], *inputs: Any, rtol: float | None = None, seed: int = 0) -> GradientCheck:
    """Check the gradient of a layer, or of any function with implicit layers inside, and say what is wrong with it.

    The gradient of a random combination of the outputs, with respect to every floating-point input, module parameter and leaf
    tensor of the function's closure, is compared with finite differences of the exact solution and with unrolling. Costs about
    five solves a tensor. Wants float64: in float32 the differences have three digits.

    Args:
        layer_or_fn: a module or a function of `inputs` that returns tensors or a `Solution`.
        inputs: what to call it with.
        rtol: the relative error that counts as right; None: 1e-3 in float64, 1e-2 in float32.
        seed: of the combination of outputs and of the directions.

    Returns:
        A `GradientCheck` to print; `.ok`, `.blame`, `.errors`, `.advice`.

    Example:
        >>> print(dil.check_gradient(layer, x))
    """
    if not callable(layer_or_fn):
        raise TypeError(f"layer_or_fn must be a module or a function, got {type(layer_or_fn).__name__}.")
    return _Check(layer_or_fn, inputs, rtol, seed).run()


class _Check:
    """One check: the function, the tensors that it is differentiated by, and the solves that it makes."""

    def __init__(self, fn: Callable[..., Any], inputs: tuple[Any, ...], rtol: float | None, seed: int):
        self.fn = fn
        self.inputs = pytree.tree_map(_fresh, inputs)
        self.generator = torch.Generator().manual_seed(seed)
        with observed_by(Watch()):
            outputs = self.outputs()
        self.weights = [self.draw(t) for t in outputs]
        self.tensors = self.leaves()
        dtype = outputs[0].dtype
        self.eps = torch.finfo(dtype).eps
        self.rtol = rtol if rtol is not None else 1e-3 if dtype == torch.float64 else 1e-2

    def run(self) -> GradientCheck:
        as_is = Watch()
        layer = self.gradient(as_is)
        solves = as_is.solves
        everyone = set(range(len(solves)))
        refined = Watch(refine={k: solve.y for k, solve in enumerate(solves)}, exact=everyone)
        exact = self.gradient(refined)
        answers = {k: solve.y for k, solve in enumerate(refined.solves)}
        suspects = {}
        for k in everyone:
            # The layer's own solve among exact ones: what it alone does to the gradient.
            forward = Watch(refine={j: y for j, y in answers.items() if j != k}, exact=everyone)
            backward = Watch(refine=answers, exact=everyone - {k})
            for phase, watch in (("forward", forward), ("backward", backward)):
                suspects[k, phase] = self.worst(self.gradient(watch), exact)
        unrolled, steps = self.unrolled(solves)
        rows: list[tuple[str, ...]] = [("tensor", "shape", "layer", "differences", f"unrolled {steps}".rstrip(), "error")]
        error, function = 0.0, (0.0, "")
        for (name, tensor), own, best, through in zip(self.tensors, layer, exact, unrolled, strict=True):
            # Partly along the gradient, so that there is something to see, and partly anywhere.
            direction = best / (float(best.norm()) or 1.0) + self.draw(tensor) / tensor.numel() ** 0.5
            direction = direction / direction.norm()
            slope = self.difference(tensor, direction, answers)
            by_layer, by_theorem = (float((g * direction).sum()) for g in (own, best))
            scale = max(abs(slope.value), abs(by_theorem))
            # Where there is nothing but rounding, there is nothing to compare.
            wrong, off = (abs(d - slope.value) / scale if scale > 10 * slope.noise else 0.0 for d in (by_layer, by_theorem))
            error = max(error, wrong)
            if off > function[0]:
                function = off, _KINK if slope.kink else _CUT if by_theorem == 0 else _OTHER
            third = "-" if through is None else f"{float((through * direction).sum()):.6e}"
            rows.append((name, str(tuple(tensor.shape)), f"{by_layer:.6e}", f"{slope.value:.6e}", third, f"{wrong:.1e}"))
        return self.verdict(solves, refined.solves, suspects, function, error, rows)

    def verdict(
        self,
        solves: list[Solve],
        refined: list[Solve],
        suspects: dict[tuple[int, str], float],
        function: tuple[float, str],
        error: float,
        rows: list[tuple[str, ...]],
    ) -> GradientCheck:
        """Name the culprit and what to change."""
        errors, seen, advice = {}, {}, {}
        for (k, phase), part in suspects.items():
            name = f"{phase} solve" + (f" {k + 1}" if len(solves) > 1 else "")
            outcome = solves[k].report.forward if phase == "forward" else solves[k].report.backward
            errors[name], seen[name] = part, "not needed" if outcome is None else _seen(outcome)
            if outcome is not None:
                advise = _forward_advice if phase == "forward" else _backward_advice
                advice[name] = advise(solves[k].setting, outcome, self.rtol / max(3 * part, self.rtol))
            if phase == "forward" and not refined[k].exact:
                errors[name] = max(part, 1.0)
                seen[name] += "; no exact solution was found near its answer"
        part, why = function
        random = self.differs()
        if random or any(solve.jumps for solve in refined):  # then of the others nothing can be told
            part, why = max(1.0, part, *errors.values()), _RANDOM if random else _JUMP
        errors = {"function": part, **errors}  # the first of equals is to blame
        seen["function"] = why if part > self.rtol else "differentiable where it was looked at"
        advice["function"] = _ADVICE.get(why, "")
        culprit = max(errors, key=lambda name: errors[name])
        error = max(error, errors[culprit])
        table: list[tuple[str, ...]] = [("suspect", "adds", "what was seen")]
        table += [(name, f"{errors[name]:.1e}", seen[name]) for name in errors]
        blame = culprit if error > self.rtol else "nothing"
        return GradientCheck(blame, error, errors, self.rtol, advice.get(culprit, ""), rows, table)

    def outputs(self) -> list[Tensor]:
        """The floating-point tensors that the function returns."""
        value = self.fn(*self.inputs)
        leaves = pytree.tree_leaves(value.value if isinstance(value, Solution) else value)
        tensors = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
        if not tensors:
            raise TypeError(f"layer_or_fn must return a floating-point tensor or a Solution, got {type(value).__name__}.")
        return tensors

    def loss(self) -> Tensor:
        """The random combination of the outputs."""
        return torch.stack([(w * t).sum() for w, t in zip(self.weights, self.outputs(), strict=True)]).sum()

    def gradient(self, watch: Watch) -> list[Tensor]:
        """The gradient by each tensor, under the settings of `watch`; zero where there is none."""
        tensors = [t for _, t in self.tensors]
        with observed_by(watch), torch.enable_grad():
            loss = self.loss()
            if not loss.requires_grad:
                return [torch.zeros_like(t) for t in tensors]
            return list(torch.autograd.grad(loss, tensors, materialize_grads=True))

    def worst(self, grads: list[Tensor], exact: list[Tensor]) -> float:
        """The largest relative difference of a tensor's gradient; what is not finite is as wrong as can be."""
        sizes = [float(t.detach().norm()) or 1.0 for _, t in self.tensors]
        # A tensor that hardly matters beside the others, its gradient being zero to rounding, is not held to its own size.
        least = _NEGLIGIBLE * max(float(e.norm()) * size for e, size in zip(exact, sizes, strict=True))
        errors = []
        for g, e, size in zip(grads, exact, sizes, strict=True):
            error = float((g - e).norm()) / max(float(e.norm()), least / size, torch.finfo(e.dtype).tiny)
            errors.append(error if error == error else float("inf"))
        return max(errors)

    def unrolled(self, solves: list[Solve]) -> tuple[list[Tensor | None], str]:
        """The gradient through the steps of the solvers, and whose steps: their own where possible, else Newton's."""
        names = dict.fromkeys(solve.report.forward.stats.method for solve in solves if solve.report.forward)
        for steps, name in ((own_steps, ", ".join(names)), (newton_steps, "Newton")):
            watch = Watch(unroll=steps)
            try:
                grads = self.gradient(watch)
            except RuntimeError:  # a solver that writes into its memory cannot be differentiated
                continue
            if solves and watch.unroll is not None:
                return list(grads), name
        return [None] * len(self.tensors), ""

    def difference(self, tensor: Tensor, direction: Tensor, answers: dict[int, Tensor]) -> _Slope:
        """The slope of the exact solution's loss along a direction of one tensor."""
        kept = tensor.detach().clone()
        h = self.eps**0.25 * (float(kept.norm()) or 1.0)

        def at(step: float) -> float:
            with torch.no_grad(), observed_by(Watch(refine=answers)):
                tensor.copy_(kept + step * direction)
                return float(self.loss())

        try:
            here, ahead, behind, ahead_half, behind_half = (at(c * h) for c in (0, 1, -1, 0.5, -0.5))
        finally:
            with torch.no_grad():
                tensor.copy_(kept)
        full, half = (ahead - behind) / (2 * h), (ahead_half - behind_half) / h
        noise = 100 * self.eps * max(abs(here), abs(ahead), abs(behind)) / h
        # The one-sided slopes approach each other as the step shrinks, unless there is a kink.
        gap, gap_half = abs(ahead - 2 * here + behind) / h, abs(ahead_half - 2 * here + behind_half) / (h / 2)
        kink = gap_half > max(0.75 * gap, 10 * noise, 1e-3 * abs(half))
        return _Slope((4 * half - full) / 3, noise, kink)

    def differs(self) -> bool:
        """Whether two calls with the same inputs differ by more than rounding."""
        with torch.no_grad(), observed_by(Watch()):
            first, second = (torch.cat([t.flatten() for t in self.outputs()]) for _ in range(2))
        return not bool((first - second).norm() <= 1e3 * self.eps * first.norm())

    def leaves(self) -> list[tuple[str, Tensor]]:
        """What to differentiate by: inputs, parameters, leaf tensors of the closure."""
        flat = [t for t in pytree.tree_leaves(self.inputs) if isinstance(t, Tensor) and t.requires_grad]
        named = [(f"input {i}", t) for i, t in enumerate(flat)]
        if isinstance(self.fn, nn.Module):
            named += [(name, p) for name, p in self.fn.named_parameters() if p.requires_grad]
        seen = {id(t) for _, t in named}
        hidden = [t for t in captured_tensors(self.fn) if t.is_floating_point() and t.is_leaf and t.requires_grad]
        hidden = [t for t in dict(zip(map(id, hidden), hidden, strict=True)).values() if id(t) not in seen]
        named += [(f"captured {i}", t) for i, t in enumerate(hidden)]
        if not named:
            raise ValueError("inputs must hold a floating-point tensor where layer_or_fn has no parameters, got none.")
        return named

    def draw(self, like: Tensor) -> Tensor:
        """Normal random numbers."""
        return torch.randn(like.shape, generator=self.generator, dtype=torch.float64).to(like)


@dataclass(frozen=True)
class _Slope:
    """A slope by differences, what rounding may have made of it, and whether there is a kink."""

    value: float
    noise: float
    kink: bool


def _seen(outcome: Outcome) -> str:
    """A finished solve in a line."""
    status, stats = outcome
    failed = int((status != Status.converged).sum())
    many = f" ({failed} of {status.numel()} failed)" if failed and status.numel() > 1 else ""
    ended = _ended(outcome).name + ("" if stats.exact else ", approximate")
    return f"{stats.method}: {ended} after {int(stats.steps.max())} steps{many}, residual {_residual(stats):.1e}"


def _ended(outcome: Outcome) -> Status:
    return Status(int(outcome.status.reshape(-1)[worst_sample(outcome.stats)]))


def _residual(stats: Stats) -> float:
    return float(stats.residual.reshape(-1)[worst_sample(stats)])


def _forward_advice(setting: Setting, outcome: Outcome, factor: float) -> str:
    """What to change so that ‖F‖, to which the error is proportional, falls by `factor`."""
    solver, stats, status = setting.solver, outcome.stats, _ended(outcome)
    fall = f"‖F‖ falls from {_residual(stats):.1e} to {factor * _residual(stats):.1e}"
    if not isinstance(solver, Solver):
        return f"refine y_star until {fall}" if solver is None else f"let the solver ({stats.method}) run on until {fall}"
    name = type(solver).__name__
    if status == Status.max_steps:
        return f"raise max_steps of {name}, now {solver.max_steps}, so that {fall}"
    if status == Status.converged:
        rtol = solver.accuracy(stats.residual.dtype)
        relative = rtol * _residual(stats) / float(stats.tolerance.reshape(-1)[worst_sample(stats)])
        return f"tighten rtol of {name} from {rtol:.0e} to {factor * relative:.0e}, so that {fall}"
    return f"{name} ended as {status.name}: {status.advice}, so that {fall}"


def _backward_advice(setting: Setting, outcome: Outcome, factor: float) -> str:
    """What to change so that the error of the adjoint falls by `factor`."""
    solver, stats, status = setting.linear_solver, outcome.stats, _ended(outcome)
    name = type(solver).__name__
    if not stats.exact:
        return f"{name} approximates on purpose: use Auto() or CG()"
    if status == Status.converged and solver.damping:
        return f"lower damping of {name}, now {solver.damping:.0e}, to {factor * solver.damping:.0e} or to 0"
    if status == Status.converged:
        rtol = batch.default_rtol(stats.residual.dtype) if solver.rtol is None else solver.rtol
        return f"tighten rtol of {name} from {rtol:.0e} to {factor * rtol:.0e}"
    if status == Status.max_steps:
        return f"raise max_steps of {name}, now {solver.max_steps}, or add a preconditioner"
    return f"{name} ended as {status.name}: {status.advice}"


def _fresh(t: Any) -> Any:
    """A copy of an input to differentiate by."""
    return t.detach().clone().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
