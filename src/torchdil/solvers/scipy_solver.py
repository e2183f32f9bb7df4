"""SciPy's minimisers and root finders: B runs of SciPy, one a sample, with exact derivatives.

The runs go in lock-step: what they ask for at points of their own, values, gradients, products with J, is computed for all of
them by one evaluation of the batch. The answer is judged by ‖F‖, not by what SciPy says of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchdil import batch
from torchdil.problem import Problem
from torchdil.solution import Result, Stats, Status
from torchdil.solvers.base import Solver
from torchdil.solvers.lockstep import Stopped, run_in_turn, run_together
from torchdil.solvers.scipy_methods import METHODS, MINIMISERS, ROOT_FINDERS, Goal, canonical, listed, one_at_a_time

Array = NDArray[np.float64]

_THREADS = 256


@dataclass(frozen=True)
class SciPy(Solver):
    """SciPy's `minimize` for an argmin, its `root` for a root or a fixed point.

    SciPy itself works in float64 on the CPU; the function is evaluated in the dtype and on the device of y0. Searches along a
    line that look at values see half the digits: without an `rtol`, methods with derivatives are asked for the accuracy of any
    solver, derivative-free ones for half its digits, and half the digits (1e-5 in float64) are accepted from either.

    Attributes:
        method: a method of SciPy's; None: "L-BFGS-B" for an argmin, "hybr" for the others. "Newton-CG", "trust-ncg",
            "trust-krylov" and "trust-constr" are given products with the Hessian; "dogleg", "trust-exact", "hybr" and "lm" are
            given J as a matrix.
        options: options of that method; they win over those that follow from `rtol`, `atol` and `max_steps`.

    Example:
        >>> dil.argmin(score, y0, solver=dil.SciPy("trust-ncg", rtol=1e-8))
    """

    method: str | None = None
    options: dict[str, Any] | None = field(default=None, hash=False)
    _: KW_ONLY  # so that the method comes first
    rtol: float | None = None
    atol: float = 0.0
    max_steps: int = 1000
    verbose: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.method is not None and canonical(self.method) not in METHODS:
            raise ValueError(f"method must be one of {listed(METHODS)}, got {self.method!r}.")
        if self.options is not None and not isinstance(self.options, dict):
            raise TypeError(f"options must be a dict of options of the method or None, got {self.options!r}.")

    def accuracy(self, dtype: torch.dtype) -> float:
        guided = self.method is None or METHODS[canonical(self.method)].uses != ""
        return super().accuracy(dtype) if guided else self.accepted(dtype)

    def accepted(self, dtype: torch.dtype) -> float:
        return batch.default_rtol(dtype) ** 0.5 if self.rtol is None else self.rtol

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        name = self._name(problem)
        turned = METHODS[name].mixes and problem.name == "fixed_point"
        F, score = problem.measure(y0)
        runs = self._runs(name, turned, y0, -F if turned else F, score, tolerance)
        started = [run for run in runs if not run.ended]
        table, evaluate = self.table(problem, len(runs)), _Evaluator(problem, y0, turned)

        def vector(of: Callable[[_Run], float], dtype: torch.dtype = y0.dtype) -> Tensor:
            return torch.tensor([of(run) for run in runs], dtype=dtype, device=y0.device)

        def show(last: bool = False) -> None:
            if table is not None and runs:
                step = min((run.steps for run in runs if run.active), default=max(run.steps for run in runs))
                running = vector(lambda run: not run.ended, torch.bool)
                table.row(step, running, vector(lambda run: run.norms[-1]), vector(lambda run: run.score), last=last)

        def answer(requests: dict[int, _Request]) -> dict[int, Any]:
            show()
            return evaluate(requests)

        with warnings.catch_warnings():  # it holds for all threads, and none of them changes it
            warnings.filterwarnings("ignore", module=r"scipy\.")
            warnings.filterwarnings("error", message="Unknown solver options")
            if len(started) == 1 or one_at_a_time(name):
                run_in_turn(started, answer)
            else:
                run_together(started, answer, _THREADS)

        y = _tensor([run.x for run in runs], y0) if started else y0
        F, score = problem.measure(y) if started else (F, score)
        for run, norm, value in zip(runs, _numpy(batch.norm(F)), _numpy(score), strict=True):
            run.conclude(float(norm), float(value))
        show(last=True)
        longest = max((len(run.norms) for run in runs), default=1)
        history = [vector(lambda run: run.norms[: k + 1][-1]) for k in range(longest)]  # noqa: B023
        steps = vector(lambda run: run.steps, torch.long)
        stats = Stats(f"SciPy {name}", steps, history[-1], tolerance, history=history)
        return Result(y, vector(lambda run: run.status, torch.long), stats)

    def _runs(self, name: str, turned: bool, y0: Tensor, F: Tensor, score: Tensor, tolerance: Tensor) -> list[_Run]:
        options = {**({"jac_options": {"alpha": 1.0}} if turned else {}), **(self.options or {})}
        rtol, eps, runs = self.accuracy(y0.dtype), torch.finfo(y0.dtype).eps, []
        starts = zip(_numpy(y0), _numpy(F), _numpy(score), tolerance.tolist(), strict=True)
        for row, (x, F_row, value, limit) in enumerate(starts):
            goal = Goal(limit, x.size, rtol, float(abs(x).max()) or 1.0, eps, self.max_steps)
            runs.append(_Run(row, name, options, goal, x, F_row, float(value)))
        return runs

    def _name(self, problem: Problem) -> str:
        """The method, if it fits."""
        fitting = ROOT_FINDERS if problem.objective is None else MINIMISERS
        name = next(iter(fitting)) if self.method is None else canonical(self.method)
        if name not in fitting:
            article = "an" if problem.name == "argmin" else "a"
            raise ValueError(f"method={name!r} does not solve {article} {problem.name}: use one of {listed(fitting)}.")
        return name


class _Request(NamedTuple):
    """`kind` at x, (n,): "value", "measure" (value and gradient), "residual", "product" (J p) or "dense" (J)."""

    kind: str
    x: Array
    p: Array | None = None


class _Run:
    """SciPy on one sample. It is over before it begins if there is nothing to do.

    Attributes:
        x: the last iterate, and in the end the answer, (n,).
        norms: ‖F‖ at the start, at each iterate and, in the end, at the answer; the last one known where it is not.
        score: the last one seen.
        steps: iterations, or evaluations where SciPy counts no iterations.
    """

    def __init__(self, row: int, name: str, options: dict[str, Any], goal: Goal, x0: Array, F: Array, score: float):
        self.row, self.x, self.score = row, x0, score
        self.norms = [_norm(F)]
        self.steps, self.status = 0, Status.stagnated
        self.ended = not np.isfinite(self.norms[0]) or self.norms[0] <= goal.tolerance
        self._name, self._method, self._goal = name, METHODS[name], goal
        self._options = {**self._method.options(goal), **options}
        self._ask: Callable[[_Request], Any]
        # The last answer of each kind; ‖F‖ where it was met since the last iterate; how many values were.
        key = x0.tobytes()
        self._known: dict[str, tuple[bytes, Any]] = {"value": (key, score), "measure": (key, (score, F)), "residual": (key, F)}
        self._met, self._values = {key: self.norms[0]}, 0
        self._asked, self._finite = False, True

    def __call__(self, ask: Callable[[_Request], Any]) -> None:
        self._ask = ask
        try:
            with np.errstate(all="ignore"):
                found = self._minimise() if self._name in MINIMISERS else self._find_root()
        except Exception as error:  # numbers that SciPy cannot digest, or options
            if not self._asked or isinstance(error, TypeError) or "Unknown solver options" in str(error):
                raise ValueError(f"options do not suit method={self._name!r}: {error}") from error
            found = {"x": self.x, "nit": self.steps, "success": False, "status": "error"}
        finally:
            self.ended = True
        self.steps = int(found["nit"] if "nit" in found else found["nfev"])
        finite = bool(np.isfinite(found["x"]).all())
        self.x = np.array(found["x"], dtype=np.float64) if finite else self.x
        if not found["success"] and found.get("status") in self._method.limit:
            self.status = Status.max_steps
        elif not (finite and self._finite):
            self.status = Status.non_finite

    @property
    def active(self) -> bool:
        """Whether it is under way."""
        return self._asked and not self.ended

    def conclude(self, norm: float, score: float) -> None:
        """Take note of ‖F‖ at the answer, which decides."""
        self.score = score
        if self.steps:
            self.norms[1:] = [*self.norms[1:-1], norm]
        if norm <= self._goal.tolerance:
            self.status = Status.converged
        elif not np.isfinite(norm):
            self.status = Status.non_finite

    def _minimise(self) -> Any:
        from scipy.optimize import minimize

        uses, more = self._method.uses, dict[str, Any]()
        if uses == "products":
            more["hessp"] = lambda x, p: self._answer("product", x, p)
        elif uses == "dense":
            more["hess"] = lambda x: self._answer("dense", x)
        return minimize(
            self._measure if uses else self._value,
            self.x,
            method=self._name,
            jac=True if uses else None,
            callback=self._iterate,
            options=self._options,
            **more,
        )

    def _find_root(self) -> Any:
        from scipy.optimize import root

        # The two methods that use J have no callback.
        given = {"jac": lambda x: self._answer("dense", x)} if self._method.uses else {"callback": self._iterate}
        return root(self._residual, self.x, method=self._name, options=self._options, **given)

    def _value(self, x: Array) -> float:
        self._values += 1
        self.score = self._answer("value", x)
        return self.score

    def _measure(self, x: Array) -> tuple[float, Array]:
        self.score, F = self._answer("measure", x)
        self._met[x.tobytes()] = _norm(F)
        return self.score, F

    def _residual(self, x: Array) -> Array:
        new = self._known["residual"][0] != x.tobytes()
        F: Array = self._answer("residual", x)
        self._met[x.tobytes()] = _norm(F)
        if new and self._method.uses:
            self._iterate(x)
        return F

    def _iterate(self, x: Array, _: Any = None) -> None:
        """SciPy has come to x. Take note of ‖F‖, if it is known or needed, and end a watched run where it is small."""
        x = np.array(x, dtype=np.float64)
        norm, watched = self._met.get(x.tobytes()), self._method.watched
        # A method that uses no gradients has one looked at for every n + 1 of its values.
        if norm is None and watched and (self._method.uses or self._values > self._goal.n):
            norm, self._values = _norm(self._answer("residual", x)), 0
        self._met = {} if norm is None else {x.tobytes(): norm}
        self.x, self.steps = x if np.isfinite(x).all() else self.x, self.steps + 1
        self.norms.append(self.norms[-1] if norm is None else norm)
        if watched and norm is not None and norm <= self._goal.tolerance:
            raise Stopped

    def _answer(self, kind: str, x: Array, p: Array | None = None) -> Any:
        """What was asked for, from memory if it was asked for last."""
        if kind not in self._known or self._known[kind][0] != x.tobytes() or p is not None:
            self._known[kind] = x.tobytes(), self._ask(_Request(kind, x, p))
            self._asked = True
        answer = self._known[kind][1]
        parts = answer if isinstance(answer, tuple) else (answer,)
        self._finite = all(bool(np.isfinite(part).all()) for part in parts)
        return answer


class _Evaluator:
    """Answers requests of some samples by one evaluation of all; the others stay where they were last. `turned`: F is -F."""

    def __init__(self, problem: Problem, y0: Tensor, turned: bool):
        self._problem, self._turned, self._points, self._at = problem, turned, y0, y0
        self._operator, self._operands = problem.operator(y0), dict[int, bytes]()

    def __call__(self, requests: dict[int, _Request]) -> dict[int, Any]:
        """The graph of J costs an evaluation: its products come first, then what needs no J, and then all need a new J."""
        at_hand = {row: r for row, r in requests.items() if r.kind == "product" and self._operands.get(row) == r.x.tobytes()}
        without = {row: r for row, r in requests.items() if r.kind not in ("product", "dense")}
        chosen = at_hand or without or requests
        rows = torch.tensor(list(chosen), device=self._at.device)
        x = _tensor([request.x for request in chosen.values()], self._at)
        answers = self._at_points(rows, x, chosen) if chosen is without else self._of_operator(rows, x, chosen)
        return dict(zip(chosen, answers, strict=True))

    def _at_points(self, rows: Tensor, x: Tensor, requests: dict[int, _Request]) -> Iterable[Any]:
        self._points = self._points.index_copy(0, rows, x)
        objective = self._problem.objective
        if objective is not None and all(request.kind == "value" for request in requests.values()):
            with torch.no_grad():
                return objective(self._points)[rows].tolist()
        F, value = self._problem.measure(self._points)
        found = zip(value[rows].tolist(), _numpy(-F[rows] if self._turned else F[rows]), strict=True)
        kinds = (request.kind for request in requests.values())
        return [{"value": f, "measure": (f, g), "residual": g}[kind] for kind, (f, g) in zip(kinds, found, strict=True)]

    def _of_operator(self, rows: Tensor, x: Tensor, requests: dict[int, _Request]) -> Iterable[Any]:
        points = {row: request.x.tobytes() for row, request in requests.items()}
        if not points.items() <= self._operands.items():
            self._at, self._operands = self._at.index_copy(0, rows, x), self._operands | points
            self._operator = self._problem.operator(self._at)
        vectors = [request.p for request in requests.values() if request.p is not None]
        if not vectors:  # a method asks for products or for matrices, never for both
            return _numpy(self._operator.dense()[rows])
        return _numpy(self._operator.mv(torch.zeros_like(self._at).index_copy(0, rows, _tensor(vectors, x)))[rows])


def _norm(F: Array) -> float:
    with np.errstate(all="ignore"):  # a square may be too large, also before SciPy runs
        return float(np.linalg.norm(F))


def _numpy(a: Tensor) -> Array:
    """A copy, for SciPy may write into what it is given."""
    return a.detach().to("cpu", torch.float64).numpy().copy()


def _tensor(rows: list[Array], like: Tensor) -> Tensor:
    return torch.from_numpy(np.stack(rows)).to(like)
