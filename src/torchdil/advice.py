"""A finished solve in words: what was seen of it, and what to change."""

from __future__ import annotations

from torchdil import batch
from torchdil.linear import WarmStart
from torchdil.solution import Outcome, Stats, Status, worst_sample
from torchdil.solve import Setting
from torchdil.solvers.base import Solver


def seen(outcome: Outcome) -> str:
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


def _tolerance(stats: Stats) -> float:
    return float(stats.tolerance.reshape(-1)[worst_sample(stats)])


def mend(phase: str, setting: Setting, outcome: Outcome | None, factor: float) -> str:
    """What to change in a solve so that its part of the error falls by `factor`."""
    if outcome is None:
        return "look at its report"
    return (_forward_advice if phase == "forward" else _backward_advice)(setting, outcome, factor)


def _forward_advice(setting: Setting, outcome: Outcome, factor: float) -> str:
    """What to change so that ‖F‖, to which the error is proportional, falls by `factor`."""
    solver, stats, status = setting.solver, outcome.stats, _ended(outcome)
    fall = f"‖F‖ falls from {_residual(stats):.1e} to {factor * _residual(stats):.1e}"
    if not isinstance(solver, Solver):
        return f"refine y_star until {fall}" if solver is None else f"let the solver ({stats.method}) run on until {fall}"
    name = type(solver).__name__
    if getattr(solver, "polish", solver) is None:
        return f"give {name} a polish, such as polish=LBFGS(), so that {fall}"
    if status == Status.max_steps:
        return f"raise max_steps of {name}, now {solver.max_steps}, so that {fall}"
    tolerance = _tolerance(stats)
    if status == Status.converged and 0 < tolerance <= solver.atol:
        return f"lower atol of {name} from {solver.atol:.0e} to {factor * _residual(stats):.0e}, so that {fall}"
    if status == Status.converged and tolerance > 0:
        rtol = solver.accepted(stats.residual.dtype)
        relative = rtol * _residual(stats) / tolerance
        return f"tighten rtol of {name} from {rtol:.0e} to {factor * relative:.0e}, so that {fall}"
    return f"{name} ended as {status.name}: {status.advice}, so that {fall}"


def _backward_advice(setting: Setting, outcome: Outcome, factor: float) -> str:
    """What to change so that the error of the adjoint falls by `factor`."""
    solver, stats, status = setting.linear_solver, outcome.stats, _ended(outcome)
    name = type(solver.solver if isinstance(solver, WarmStart) else solver).__name__
    if not stats.exact:
        return f"{name} approximates on purpose: use Auto() or {'CG()' if setting.is_symmetric else 'GMRES()'}"
    if status == Status.converged and solver.damping:
        return f"lower damping of {name}, now {solver.damping:.0e}, to {factor * solver.damping:.0e} or to 0"
    if status == Status.converged and 0 < _tolerance(stats) <= solver.atol:
        return f"lower atol of {name} from {solver.atol:.0e} to {factor * _residual(stats):.0e}"
    if status == Status.converged:
        rtol = batch.default_rtol(stats.residual.dtype) if solver.rtol is None else solver.rtol
        return f"tighten rtol of {name} from {rtol:.0e} to {factor * rtol:.0e}"
    if status == Status.max_steps:
        return f"raise max_steps of {name}, now {solver.max_steps}, or add a preconditioner"
    return f"{name} ended as {status.name}: {status.advice}"
