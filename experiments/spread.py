"""Independent tasks over processes, what is done kept in a folder: runs of hours may be cut short."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def spread(function: Callable[..., Any], tasks: list[tuple[Any, ...]], jobs: int, store: Path | None) -> list[Any]:
    """The function of all tasks, in as many processes."""
    if jobs == 1:
        return [stored(function, task, store) for task in tasks]
    import joblib

    return joblib.Parallel(n_jobs=jobs)(joblib.delayed(stored)(function, task, store) for task in tasks)


def stored(function: Callable[..., Any], task: tuple[Any, ...], store: Path | None) -> Any:
    """The function of one task, or what it gave before: runs of hours may be cut short."""
    if store is None:
        return function(*task)
    # How many runs there are changes none of them, and the expert's trajectories follow from the rest.
    config = replace(task[0], settings=(), runs=0, other_runs=0)
    key = repr((function.__name__, config, *(part for part in task[1:] if not isinstance(part, Tensor))))
    path = store / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.pt"
    if not path.exists():
        store.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        torch.save(function(*task), unfinished)
        unfinished.rename(path)
    return torch.load(path)
