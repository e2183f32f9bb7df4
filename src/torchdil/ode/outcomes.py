"""Several solves of the same samples, pieces of one trajectory, reported as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchdil.solution import Outcome, Stats, Status, excess


def together(outcomes: Sequence[Outcome]) -> Outcome:
    """The status and numbers of each sample's first failed solve, else of its worst; steps and evaluations are summed."""
    stats = [outcome.stats for outcome in outcomes]
    stacked = Stats(
        method=", ".join(dict.fromkeys(s.method for s in stats)),
        steps=torch.stack([s.steps for s in stats]),
        residual=torch.stack([s.residual for s in stats]),
        tolerance=torch.stack([s.tolerance for s in stats]),
        products=sum(s.products for s in stats),
        exact=all(s.exact for s in stats),
    )
    return first_failed(Outcome(torch.stack([outcome.status for outcome in outcomes]), stacked))


def first_failed(outcome: Outcome) -> Outcome:
    """The same for solves that are numbered by the first axis of one outcome."""
    status, stats = outcome
    failed = status != Status.converged
    which = torch.where(failed.any(dim=0), failed.int().argmax(dim=0), excess(stats).argmax(dim=0)).unsqueeze(0)
    residual, tolerance = (numbers.gather(0, which).squeeze(0) for numbers in (stats.residual, stats.tolerance))
    numbers = Stats(stats.method, stats.steps.sum(dim=0), residual, tolerance, stats.products, exact=stats.exact)
    return Outcome(status.gather(0, which).squeeze(0), numbers)


def improved(first: Outcome, second: Outcome) -> Outcome:
    """A solve and another try for the samples that failed in it."""
    done = first.converged
    both = ((getattr(first.stats, name), getattr(second.stats, name)) for name in ("residual", "tolerance"))
    residual, tolerance = (torch.where(done, a, b) for a, b in both)
    steps = first.stats.steps + torch.where(done, 0, second.stats.steps)
    method, products = f"{first.stats.method}, then {second.stats.method}", first.stats.products + second.stats.products
    return Outcome(torch.where(done, first.status, second.status), Stats(method, steps, residual, tolerance, products))
