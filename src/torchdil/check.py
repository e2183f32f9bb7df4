"""Is a gradient right, and if not, whose fault is it?

A gradient through implicit layers can be wrong for three reasons: the forward solve stopped early, the backward solve did, or
the function has no such derivative (a kink, a `detach`, a random number). `check_gradient` takes the layer apart: it refines
every forward solve to rounding and solves every backward system exactly, which gives the gradient that the theorem promises.
Putting the layer's own solves back, one at a time, shows what each of them costs; finite differences of the refined solution,
which know no theorem, show what the function costs; the way through the steps of the solver is a third opinion.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchdil.advice import mend, seen
from torchdil.captures import captured_names
from torchdil.modes import observed_by
from torchdil.settings import check_number
from torchdil.solution import GRID_ERROR, Solution, text_table
from torchdil.watch import Solve, Watch, newton_steps, own_steps

# What may be wrong with a function, and what to do about it.
_JUMP = "what must vanish jumps at the answer, so it vanishes nowhere near"
_KINK = "it has a kink at the solution: its slopes to the left and to the right differ"
_CUT = "its value changes with a tensor that its gradient does not see"
_OTHER = "its derivative, as autograd has it, is not its slope"
_NOT_FINITE = "its value or its derivative is not finite"
_ROUGH = "its slope does not settle as the step of the differences shrinks"
_BLIND = "it solves under torch.func, where solves cannot be taken apart: this may be theirs"
_RANDOM = "it gave two answers to the same inputs"
_ALONE = "it is not defined next to its inputs, so nothing can be compared"
_HELD = "they follow jumps of the solution, so that it changes with them, which no gradient sees"
_ADVICE = {
    _HELD: "tighten rtol and atol, take radauIIA5, or smooth what switches in func",
    _JUMP: "replace what is not smooth there (abs, max, round, a threshold) by a smooth function",
    _KINK: "replace what is not smooth there (relu, abs, max) by a smooth function, or take the gradient as one-sided",
    _CUT: "look for detach(), .data, .item(), numpy or no_grad on the way from that tensor to the result",
    _OTHER: "look for an autograd.Function with a wrong backward, a detach() on one of several ways, or a solution that is not "
    "unique",
    _NOT_FINITE: "look for a square root, logarithm or quotient out of its domain, torch.where with one in the branch not "
    "taken included",
    _ROUGH: "look for oscillations or noise in the function that are finer than a ten-millionth of the tensor",
    _BLIND: "call check_gradient on the layer without torch.func around it",
    _RANDOM: "draw random numbers outside, put modules into eval(), or seed inside the function",
    _ALONE: "let it take inputs that are a little off, or check it where it does",
}
# How often the step of the differences is shortened.
_SHORTER = 4
# The effect of a tensor on the loss, relative to that of the strongest, below which it counts as none.
_NEGLIGIBLE = 1e-6


@dataclass(frozen=True)
class GradientCheck:
    """What `check_gradient` found; `print` it.

    Attributes:
        blame: "nothing", "forward solve", "backward solve" (with a number where there are several), "function", or, of adaptive
            steps, "held steps".
        error: the relative error of the gradient.
        errors: what each suspect adds to it, e.g. {"function": 2e-9, "forward solve": 3e-2, "backward solve": 1e-11}.
        rtol: the error that counts as right.
        advice: what to change.
        tensors: a table, headings first: the derivative along a direction of each tensor as the layer has it, by finite
            differences of the exact solution, and through the steps of the solver.
        suspects: a table, headings first: what each adds to the error, and what was seen of it.
        unchecked: a sentence for each tensor that cannot be moved without the function refusing it, so that there is no slope.
    """

    blame: str
    error: float
    errors: dict[str, float]
    rtol: float
    advice: str
    tensors: list[tuple[str, ...]] = field(repr=False)
    suspects: list[tuple[str, ...]] = field(repr=False)
    unchecked: list[str] = field(default_factory=list, repr=False)

    @property
    def ok(self) -> bool:
        """Whether the gradient is right to `rtol`, by all tensors that could be checked."""
        return self.blame == "nothing"

    def __str__(self) -> str:
        verdict = "right" if self.ok else f"wrong, and the {self.blame} is to blame"
        heading = f"The gradient is {verdict}: relative error {self.error:.1e}, allowed {self.rtol:.0e}."
        mend = "Nothing to mend." if self.ok else f"To mend it: {self.advice}."
        return "\n\n".join([heading, text_table(self.tensors), *self.unchecked, text_table(self.suspects), mend])


def check_gradient(layer_or_fn: Callable[..., Any], *inputs: Any, rtol: float | None = None, seed: int = 0) -> GradientCheck:
    """Check the gradient of a layer, or of any function with implicit layers inside, and say what is wrong with it.

    The gradient of a random combination of the outputs, with respect to every floating-point input, module parameter and leaf
    tensor of the function's closure, is compared with finite differences of the exact solution and with unrolling. Costs five
    calls a tensor and two gradients for each solve inside. Wants float64: in float32 the differences have three digits.

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
    check_number("rtol", rtol, above=0, optional=True)
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=devices):
        check = _Check(layer_or_fn, inputs, rtol, seed)
        try:
            return check.run()
        finally:
            check.state.restore()


class _Check:
    """One check: the function, the tensors that it is differentiated by, and the solves that it makes."""

    def __init__(self, fn: Callable[..., Any], inputs: tuple[Any, ...], rtol: float | None, seed: int):
        self.fn = fn
        self.inputs = pytree.tree_map(_fresh, inputs)
        self.state = _State(fn)
        self.generator = torch.Generator("cpu").manual_seed(seed)
        self.grids: list[tuple[Tensor, Tensor]] = []  # of adaptive steps, those of the first call for all
        with observed_by(Watch(grids=self.grids)):
            outputs = self.outputs()
        self.weights = [self.draw(t) for t in outputs]
        self.tensors = self.leaves()
        self.finite = all(bool(torch.isfinite(t).all()) for t in outputs)
        dtype = outputs[0].dtype
        self.eps = torch.finfo(dtype).eps
        self.rtol = rtol if rtol is not None else 1e-3 if dtype == torch.float64 else 1e-2

    def run(self) -> GradientCheck:
        as_is = Watch(grids=self.grids)
        layer = self.gradient(as_is)
        solves = as_is.solves
        everyone = set(range(len(solves)))
        refined = Watch(refine={k: solve.y for k, solve in enumerate(solves)}, exact=everyone, grids=self.grids)
        exact = self.gradient(refined)
        answers = {k: solve.y for k, solve in enumerate(refined.solves)}
        suspects = {}
        for k in everyone:
            # The layer's own solve among exact ones: what it alone does to the gradient.
            forward = Watch(refine={j: y for j, y in answers.items() if j != k}, exact=everyone, grids=self.grids)
            backward = Watch(refine=answers, exact=everyone - {k}, grids=self.grids)
            for phase, watch in (("forward", forward), ("backward", backward)):
                suspects[k, phase] = self.worst(self.gradient(watch), exact)
        unrolled, steps = self.unrolled(solves)
        rows: list[tuple[str, ...]] = [("tensor", "shape", "layer", "differences", f"unrolled {steps}".rstrip(), "error")]
        error, function, why = 0.0, 0.0, ""
        unchecked: list[str] = []
        for (name, tensor), own, best, through in zip(self.tensors, layer, exact, unrolled, strict=True):
            slope, direction = self.difference(tensor, best, answers)
            by_layer, by_theorem = (float((g * direction).sum()) for g in (own, best))
            third = "-" if through is None else f"{float((through.detach() * direction).sum()):.6e}"
            if isinstance(slope, str) and math.isfinite(by_theorem):
                unchecked.append(f"{name} could not be checked, as the function refuses what is next to it: {slope}")
                rows.append((name, str(tuple(tensor.shape)), f"{by_layer:.6e}", "-", third, "-"))
                continue
            slope = _Slope(math.nan, 0.0, kink=False, rough=False) if isinstance(slope, str) else slope
            wrong, off = (slope.error(derivative, by_theorem) for derivative in (by_layer, by_theorem))
            error = max(error, wrong)
            if off > function:
                function, why = off, self.reason(slope, by_theorem)
            rows.append((name, str(tuple(tensor.shape)), f"{by_layer:.6e}", f"{slope.value:.6e}", third, f"{wrong:.1e}"))
        if not self.finite:
            why = _NOT_FINITE
        elif len(unchecked) == len(self.tensors):
            why = _ALONE
        elif any(solve.jumps for solve in refined.solves):
            why = _JUMP
        elif self.differs(answers):
            why = _RANDOM
        elif function <= self.rtol:
            why = ""
        elif refined.blind and why in (_KINK, _OTHER):
            why = _BLIND
        return self.verdict(solves, refined.solves, suspects, (function, why), error, rows, unchecked)

    def reason(self, slope: _Slope, derivative: float) -> str:
        """Why the theorem's derivative is not the slope."""
        if not (math.isfinite(derivative) and math.isfinite(slope.value)):
            return _NOT_FINITE
        return _KINK if slope.kink else _ROUGH if slope.rough else _CUT if derivative == 0 else _OTHER

    def verdict(
        self,
        solves: list[Solve],
        refined: list[Solve],
        suspects: dict[tuple[int, str], float],
        function: tuple[float, str],
        error: float,
        rows: list[tuple[str, ...]],
        unchecked: list[str],
    ) -> GradientCheck:
        """Name the culprit and what to change."""
        part, why = function
        errors, sights, advice = {"function": part}, {"function": why or "differentiable where it was looked at"}, {}
        certain = "function" if why in (_NOT_FINITE, _JUMP, _RANDOM, _ALONE) else ""  # then of the others nothing can be told
        for (k, phase), part in suspects.items():
            name = f"{phase} solve" + (f" {k + 1}" if len(solves) > 1 else "")
            outcome = solves[k].report.forward if phase == "forward" else solves[k].report.backward
            errors[name], sights[name] = part, "not needed" if outcome is None else seen(outcome)
            advice[name] = (phase, solves[k].setting, outcome, self.rtol / max(3 * part, self.rtol))
            if phase == "forward" and not refined[k].exact:
                certain = certain or name
                sights[name] += "; no exact solution was found near its answer"
        grids = [error for error in (solve.report.grid_error for solve in solves) if error is not None and error.numel()]
        if grids and (held := max(float(error.max()) for error in grids)) > GRID_ERROR:
            certain, errors["held steps"], sights["held steps"] = certain or "held steps", held, _HELD
        culprit = certain or max(errors, key=lambda name: errors[name])
        error = max(error, errors[culprit])
        right = not certain and error <= self.rtol
        table: list[tuple[str, ...]] = [("suspect", "adds", "what was seen")]
        table += [(name, f"{errors[name]:.1e}", sights[name]) for name in errors]
        if right:
            return GradientCheck("nothing", error, errors, self.rtol, "", rows, table, unchecked)
        reason = _HELD if culprit == "held steps" else why or _OTHER
        change = mend(*advice[culprit]) if culprit in advice else _ADVICE[reason]
        return GradientCheck(culprit, error, errors, self.rtol, change, rows, table, unchecked)

    def outputs(self) -> list[Tensor]:
        """The floating-point tensors that the function returns, called in the state in which it was found."""
        self.state.restore()
        value = self.fn(*self.inputs)
        leaves = pytree.tree_leaves(value.value if isinstance(value, Solution) else value)
        tensors = [t for t in leaves if isinstance(t, Tensor) and t.is_floating_point()]
        if not tensors:
            raise TypeError(f"layer_or_fn must return a floating-point tensor or a Solution, got {type(value).__name__}.")
        if any(t.dtype not in (torch.float32, torch.float64) for t in tensors):
            raise TypeError(
                f"layer_or_fn must return float64, or float32, to be checked, got {tensors[0].dtype}: use .double()."
            )
        if not any(t.numel() for t in tensors):
            raise ValueError("layer_or_fn must return at least one number, got empty tensors.")
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
            # Zeros that torch fills in may require grad.
            return [grad.detach() for grad in torch.autograd.grad(loss, tensors, materialize_grads=True)]

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
            watch = Watch(unroll=steps, grids=self.grids)
            try:
                grads = self.gradient(watch)
            except RuntimeError:  # a solver that writes into its memory cannot be differentiated
                continue
            if solves and watch.unroll is not None:
                return list(grads), name
        return [None] * len(self.tensors), ""

    def difference(self, tensor: Tensor, gradient: Tensor, answers: dict[int, Tensor]) -> tuple[_Slope | str, Tensor]:
        """The slope of the exact solution's loss along a direction of one tensor, or why there is none; and the direction."""
        kept, known, anywhere = tensor.detach().clone(), torch.where(torch.isfinite(gradient), gradient, 0.0), self.draw(tensor)
        outcome: _Slope | str = ""

        def at(step: float) -> float:
            with torch.no_grad(), observed_by(Watch(refine=answers, grids=self.grids)):
                tensor.copy_(kept + step * direction)
                return float(self.loss())

        # All elements by as much; where the function refuses that (times that ascend, a logarithm), each by a part of itself.
        sizes, relative = kept.abs(), False
        h = self.eps**0.25 * (float(kept.norm()) or 1.0)
        try:
            for _ in range(_SHORTER + 1):
                # Partly along the gradient, so that there is something to see, and partly anywhere.
                units = torch.where(sizes > 0, sizes, sizes[sizes > 0].min()) if relative else torch.ones_like(kept)
                steepest = known * units
                direction = steepest / (float(steepest.norm()) or 1.0) + anywhere / tensor.numel() ** 0.5
                direction = units * direction / direction.norm()
                try:
                    outcome = self.slope(at, h, at(0.0))
                    if not outcome.rough:
                        break
                except Exception as error:
                    outcome = str(error).partition("\n")[0] or type(error).__name__
                    if not relative and bool((sizes > 0).any()):
                        relative, h = True, self.eps**0.25
                        continue
                h = h / 30  # the function bends within a step, or is not defined at its end
        finally:
            with torch.no_grad():
                tensor.copy_(kept)
        return outcome, direction

    def slope(self, at: Callable[[float], float], h: float, here: float) -> _Slope:
        """By steps of h and h / 2 to either side."""
        ahead, behind, ahead_half, behind_half = at(h), at(-h), at(h / 2), at(-h / 2)
        if math.isfinite(here) and not all(map(math.isfinite, (ahead, behind, ahead_half, behind_half))):
            raise ArithmeticError("its value is not finite there.")
        full, half = (ahead - behind) / (2 * h), (ahead_half - behind_half) / h
        noise = 100 * self.eps * max(abs(here), abs(ahead), abs(behind)) / h
        # The one-sided slopes approach each other as the step shrinks, unless there is a kink.
        gap, gap_half = abs(ahead - 2 * here + behind) / h, abs(ahead_half - 2 * here + behind_half) / (h / 2)
        kink = gap_half > max(0.75 * gap, 10 * noise, 1e-3 * abs(half))
        rough = abs(full - half) > max(self.rtol * abs(half), 10 * noise)
        return _Slope((4 * half - full) / 3, noise, kink, rough and not kink)

    def differs(self, answers: dict[int, Tensor]) -> bool:
        """Whether two calls with the same inputs differ, by more than the rounding of exact solutions."""
        calls = []
        for _ in range(2):
            with torch.no_grad(), observed_by(Watch(refine=answers, grids=self.grids)):
                calls.append(torch.cat([t.flatten() for t in self.outputs()]))
        first, second = calls
        return not bool((first - second).norm() <= self.eps**0.5 * first.norm())

    def leaves(self) -> list[tuple[str, Tensor]]:
        """What to differentiate by: inputs, parameters, leaf tensors of the closure."""
        flat = [t for t in pytree.tree_leaves(self.inputs) if isinstance(t, Tensor) and t.requires_grad]
        named = [(f"input {i}", t) for i, t in enumerate(flat)]
        if isinstance(self.fn, nn.Module):
            named += [(name, p) for name, p in self.fn.named_parameters() if p.requires_grad]
        seen = {id(t) for _, t in named}
        captured = [(name, t) for name, t in captured_names(self.fn) if id(t) not in seen]
        named += [(name, t) for name, t in captured if t.is_floating_point() and t.is_leaf and t.requires_grad]
        if not named:
            raise ValueError("inputs must hold a floating-point tensor where layer_or_fn has no parameters, got none.")
        return named

    def draw(self, like: Tensor) -> Tensor:
        """Normal random numbers."""
        return torch.randn(like.shape, generator=self.generator, dtype=torch.float64, device="cpu").to(like)


@dataclass(frozen=True)
class _Slope:
    """A slope by differences, what rounding may have made of it, whether there is a kink, and whether it has not settled."""

    value: float
    noise: float
    kink: bool
    rough: bool

    def error(self, derivative: float, theorem: float) -> float:
        """How far a derivative is from the slope, relatively."""
        scale = max(abs(self.value), abs(theorem))
        if scale <= 10 * self.noise:  # nothing but rounding: nothing to compare
            return 0.0
        error = abs(derivative - self.value) / scale
        return error if math.isfinite(error) else math.inf


class _State:
    """What calls of a module leave behind in it: buffers, last solutions, reports. Each call begins with what was found."""

    def __init__(self, fn: Any):
        modules = list(fn.modules()) if isinstance(fn, nn.Module) else []
        self._buffers = [(b, b.detach().clone()) for m in modules for b in m.buffers(recurse=False)]
        self._kept = [(m, name, m.__dict__[name]) for m in modules for name in ("_last", "report") if name in m.__dict__]

    def restore(self) -> None:
        with torch.no_grad():
            for buffer, value in self._buffers:
                buffer.copy_(value)
        for module, name, value in self._kept:
            setattr(module, name, value)


def _fresh(t: Any) -> Any:
    """A copy of an input to differentiate by."""
    return t.detach().clone().requires_grad_() if isinstance(t, Tensor) and t.is_floating_point() else t
