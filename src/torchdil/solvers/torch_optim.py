"""Any optimiser of `torch.optim` as a solver: the unknown (B, n) is its parameter, the sum of the scores its loss."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from torchdil import batch
from torchdil.problem import Problem
from torchdil.solution import Result, Status
from torchdil.solvers.base import Solver
from torchdil.solvers.line_search import Iterate


@dataclass(frozen=True, init=False, repr=False, kw_only=True)
class TorchOptim(Solver):
    """An optimiser of `torch.optim` for an argmin.

    Optimisers that treat each number by itself (SGD, Adam, RMSprop, Rprop, Adagrad, ...) treat each sample by itself. LBFGS and
    others that look at the parameter as a whole take the batch for one joint problem: a hard sample slows the others down. The
    default `rtol` is 1e-5 in float64 and 3e-3 in float32: fixed learning rates seldom reach more.

    Attributes:
        cls: the class, such as `torch.optim.Adam`.
        kwargs: its arguments, such as the learning rate.

    Example:
        >>> dil.argmin(score, y0, solver=dil.TorchOptim(torch.optim.Adam, lr=0.1))
    """

    max_steps: int = 10_000
    cls: type[torch.optim.Optimizer]
    kwargs: dict[str, Any] = field(hash=False)

    def __init__(
        self,
        cls: type[torch.optim.Optimizer],
        *,
        rtol: float | None = None,
        atol: float = 0.0,
        max_steps: int = 10_000,
        verbose: bool = False,
        **kwargs: Any,
    ) -> None:
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise TypeError(f"cls must be an optimiser class such as torch.optim.Adam, got {cls!r}.")
        kwargs = {**kwargs.pop("kwargs", {}), **kwargs}  # `dataclasses.replace` hands them over by their field
        values = {"rtol": rtol, "atol": atol, "max_steps": max_steps, "verbose": verbose, "cls": cls, "kwargs": kwargs}
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self.__post_init__()
        try:
            cls([torch.zeros(1, 1, requires_grad=True, device="cpu")], **kwargs)
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{cls.__name__} does not take the arguments {kwargs!r}: {error}") from error

    def __repr__(self) -> str:
        ours = {f.name: getattr(self, f.name) for f in fields(Solver)}
        changed = {f.name: ours[f.name] for f in fields(self) if f.name in ours and ours[f.name] != f.default}
        arguments = [f"{name}={value!r}" for name, value in (self.kwargs | changed).items()]
        return f"TorchOptim({', '.join([self.cls.__name__, *arguments])})"

    def accuracy(self, dtype: torch.dtype) -> float:
        """rtol, or half the digits of the default for the dtype."""
        return batch.default_rtol(dtype) ** 0.5 if self.rtol is None else self.rtol

    def solve(self, problem: Problem, y0: Tensor, tolerance: Tensor) -> Result:
        problem.argmin_only("TorchOptim")
        y = y0.detach().clone().requires_grad_()
        optimiser = self.cls([y], **self.kwargs)
        now = _at(problem, y)
        progress = self.progress(problem, now.F, tolerance, 1000, now.merit)

        def closure() -> Tensor:
            # The first call is made where the last step ended, which is known.
            here = now if torch.equal(y, now.y) else _at(problem, y)
            # Samples that are done, or lost on the way, take no part.
            part = progress.running & batch.finite(here.F) & torch.isfinite(here.merit)
            y.grad = batch.select(part, here.F, torch.zeros_like(here.F))
            return torch.where(part, here.merit, 0.0).sum()

        while not progress.finished():
            optimiser.step(closure)  # type: ignore[arg-type]  # a tensor will do
            new = _at(problem, y)
            progress.stop(~(batch.finite(new.F) & torch.isfinite(new.merit)), Status.non_finite)
            new = new.where(progress.running, now)
            with torch.no_grad():
                y.copy_(new.y)  # weight decay and momentum move samples that are done, too
            problem.remember(new.y - now.y, new.F - now.F)
            now = new
            progress.advance(batch.norm(now.F), now.merit)
        result = self.result(now.y, progress)
        result.stats.method = f"TorchOptim {self.cls.__name__}"
        return result


def _at(problem: Problem, y: Tensor) -> Iterate:
    F, score = problem.measure(y.detach())
    return Iterate(y.detach().clone(), F.detach(), score)
