"""Runs of experiments: seeds, processes, progress, result files, resuming, and the command line, in one place.

An experiment is a module with a frozen `Config` (`Config.preset(name)`, a field `runs`) and `run(config, seed) -> dict`; it may
have `variants(config)`, one configuration for each cell of its table, and `run_together(config, seeds)`, the runs of many seeds
as one batch of models, at most `config.together` of them; `JOBS` is how many of its runs may share a machine, if they measure
it. A run is one line of `NAME.jsonl`:

    {"experiment", "config", "seed", "versions", "device", "machine", "seconds", "metrics"}

with "error" in place of "metrics" if it failed. Runs are independent: joblib spreads them over processes or a cluster. What is
in the file is not computed again, so the same command goes on where it was cut short.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import os
import random
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import joblib
import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.machine import machine
from torchdil.traced import forget_all

Record = dict[str, Any]

# In the order of the page.
EXPERIMENTS = (
    "kepler",
    "table1",
    "runtime",
    "cartpole",
    "lqr",
    "best",
    "inexact",
    "preconditioning",
    "scale",
    "coverage",
    "faults",
)
PRESETS = ("smoke", "quick", "paper")
COMMITTED = Path(__file__).parent / "results"
# Fields of a Config that change no run.
NEUTRAL = ("runs", "data", "together")
# Seconds between two lines of progress where nobody watches a bar.
SPEAK_EVERY = 60.0
# How many lines a sentence names.
_NAMED = 5
# Runs seed the random numbers of their process, and a worker of a cluster may have several threads.
ALONE = threading.Lock()


class Skip(Exception):  # noqa: N818 (it is no error)
    """What an experiment raises that cannot run here: one sentence, which the page shows in its place."""


class Task(NamedTuple):
    """Runs that go to one process together."""

    name: str
    config: Any
    seeds: tuple[int, ...]


class Options(NamedTuple):
    """What to run, where, and where the results go.

    Attributes:
        preset: one of `PRESETS`.
        results: the folder of the result files.
        seeds: in place of 0 .. runs - 1.
        device, data: replace these fields of the configurations that have them.
        only: of the variants, those whose fields have these values, written as strings.
        jobs: processes, one thread each.
        backend, address: joblib's, such as "dask", and where its scheduler listens.
        again: compute finished runs anew.
    """

    preset: str
    results: Path
    seeds: tuple[int, ...] | None = None
    device: str | None = None
    data: str | None = None
    only: tuple[tuple[str, str], ...] = ()
    jobs: int = 2
    backend: str = "loky"
    address: str | None = None
    again: bool = False


class Store:
    """The runs of one experiment, a JSON line each; every change of the file is atomic.

    Lines that are no such runs, because the file was cut short or is another's, are named, and set aside in `NAME.jsonl.aside`
    before the file is changed.
    """

    def __init__(self, results: Path, name: str):
        self.name, self.path = name, results / f"{name}.jsonl"
        self.aside = self.path.with_suffix(".jsonl.aside")

    def records(self) -> list[Record]:
        """All that is there."""
        found, others = self._read()
        if others:
            warnings.warn(f"{self._named(others)}: they are left out.", stacklevel=2)
        return found

    def set_aside(self) -> str:
        """Take lines that are no runs out of the file; the sentence that names them, empty if there are none."""
        if not self._read()[1]:
            return ""
        with self._alone():
            found, others = self._read()
            self._write(found, others)
        return f"{self._named(others)}: they are in {self.aside} now, and what is missing is run again."

    def _read(self) -> tuple[list[Record], dict[int, bytes]]:
        """The runs, and by their numbers the lines that are none."""
        found, others = list[Record](), dict[int, bytes]()
        lines = self.path.read_bytes().split(b"\n") if self.path.exists() else []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))
                own = isinstance(record, dict) and record.get("experiment", self.name) == self.name
                own = own and isinstance(record["config"], dict) and isinstance(record["seed"], int)
            except (ValueError, KeyError, RecursionError):
                own = False
            if own:
                found.append(record)
            else:
                others[number] = line
        return found, others

    def _named(self, others: dict[int, bytes]) -> str:
        numbers = ", ".join(map(str, [*others][:_NAMED])) + (", ..." if len(others) > _NAMED else "")
        count = "a line that is no run" if len(others) == 1 else f"{len(others)} lines that are no runs"
        return f"{self.path} has {count} of {self.name} ({numbers})"

    def _write(self, records: Sequence[Record], others: dict[int, bytes]) -> None:
        """Replace the file; lines that are no runs are kept aside."""
        if others:
            with open(self.aside, "ab") as file:
                file.write(b"".join(line + b"\n" for line in others.values()))
                file.flush()
                os.fsync(file.fileno())
        lines = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        with tempfile.NamedTemporaryFile("w", dir=self.path.parent, suffix=".tmp", delete=False, encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(file.name, 0o644)
        os.replace(file.name, self.path)

    def add(self, new: Sequence[Record]) -> None:
        """Add these; a run that is there already is replaced, but not a finished one by one that failed."""
        if not new:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._alone():
            found, others = self._read()
            merged = {identity(record): record for record in found}
            for record in new:
                if "metrics" in record or "metrics" not in merged.get(identity(record), {}):
                    merged[identity(record)] = record
            self._write(list(merged.values()), others)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Two commands may add to one file at a time; where there are no locks, one should not."""
        try:
            import fcntl
        except ImportError:
            yield
            return
        with open(self.path.with_suffix(".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def module(name: str) -> ModuleType:
    """The experiment of this name; a module from elsewhere is named by its path."""
    return importlib.import_module(f"experiments.{name}" if name in EXPERIMENTS else name)


def plain(config: Any) -> dict[str, Any]:
    """A configuration as it is in a record: without the fields that change no run."""
    return {key: value for key, value in _json(asdict(config)).items() if key not in NEUTRAL}


def identity(record: Record) -> str:
    """What tells runs apart."""
    return json.dumps([record["config"], record["seed"]], sort_keys=True)


def finished(records: Sequence[Record]) -> list[Record]:
    """Those that did not fail."""
    return [record for record in records if "metrics" in record]


def planned(name: str, options: Options) -> list[tuple[Any, int]]:
    """The configurations and seeds of all runs."""
    experiment = module(name)
    config = experiment.Config.preset(options.preset)
    names = {field.name for field in fields(config)}
    for field in ("device", "data"):
        if getattr(options, field) is not None and field in names:
            config = replace(config, **{field: getattr(options, field)})
    configs = experiment.variants(config) if hasattr(experiment, "variants") else [config]
    chosen = [one for one in configs if all(key in names and str(getattr(one, key)) == value for key, value in options.only)]
    return [(one, seed) for one in chosen for seed in (options.seeds or range(one.runs))]


def selected(name: str, options: Options) -> list[Record]:
    """The records of the planned runs that are in the result file, in the order of the plan."""
    there = {identity(record): record for record in Store(options.results, name).records()}
    keys = (identity({"config": plain(config), "seed": seed}) for config, seed in planned(name, options))
    return [there[key] for key in keys if key in there]


def run(name: str, options: Options, console: Console | None = None) -> list[Record]:
    """Compute the runs that are not there yet; the records of all planned runs, also of those that failed or cannot run."""
    console = console or Console(stderr=True)
    store = Store(options.results, name)
    damage = store.set_aside()
    if damage:
        console.print(damage, style="red", markup=False, highlight=False, soft_wrap=True)
    there = {} if options.again else {identity(record): record for record in finished(store.records())}
    plan = planned(name, options)
    missing = [(c, s) for c, s in plan if identity({"config": plain(c), "seed": s}) not in there]
    skipped: list[Record] = []
    columns = TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    done, began, spoken = 0, time.monotonic(), time.monotonic()
    with Progress(*columns, TextColumn("{task.fields[left]}  {task.fields[last]}"), console=console) as progress:

        def say(text: str) -> None:
            progress.console.print(text, style="red", markup=False, highlight=False)

        bar = progress.add_task(name, total=len(plan), completed=len(plan) - len(missing), left="", last="")
        for new in _results(tasks(name, missing), options, say):
            store.add([record for record in new if "skipped" not in record])
            for record in new:
                if "error" in record:
                    say(f"{name}, {label(record)}: {record['error'].splitlines()[-1]}")
                elif "skipped" in record:
                    if record["skipped"] not in [one["skipped"] for one in skipped]:
                        say(f"{name}: {record['skipped']}")
                    skipped.append(record)
            done, now = done + len(new), time.monotonic()
            left = time_left(done, len(missing), now - began)
            progress.update(bar, advance=len(new), left=left, last=label(new[-1]))
            if not console.is_terminal and now - spoken > SPEAK_EVERY:  # where a bar cannot be redrawn
                spoken = now
                console.print(f"{name}: {len(plan) - len(missing) + done} of {len(plan)}, {left}, {label(new[-1])}")
    return selected(name, options) + skipped


def time_left(done: int, of: int, seconds: float) -> str:
    """How long the rest will take if it goes on as it did, in words."""
    rest = round(seconds / done * (of - done))
    hours, minutes = rest // 3600, rest % 3600 // 60
    return f"about {hours} h {minutes:02} min left" if hours else f"about {minutes} min {rest % 60:02} s left" if rest else ""


def tasks(name: str, missing: Sequence[tuple[Any, int]]) -> list[Task]:
    """Runs in the portions in which they are computed."""
    together = hasattr(module(name), "run_together")
    found = []
    for config in dict.fromkeys(config for config, _ in missing):
        seeds = [seed for one, seed in missing if one == config]
        most = getattr(config, "together", len(seeds)) if together else 1
        found += [Task(name, config, tuple(seeds[k : k + most])) for k in range(0, len(seeds), most)]
    return found


def _results(todo: list[Task], options: Options, say: Callable[[str], None]) -> Iterator[list[Record]]:
    """The records of the tasks as they come.

    A process that is killed ends its pool, and the tasks under way with it: each of these is tried once more, alone, so that it
    is known which one it was; the others go on in a new pool.
    """
    # What measures time or memory says by JOBS how many of its runs may share a machine.
    jobs = min([options.jobs, *(getattr(module(task.name), "JOBS", options.jobs) for task in todo)])
    if jobs == 1 and options.backend == "loky":
        for task in todo:
            yield execute(task)
        return
    while todo:
        left, started = dict(enumerate(todo)), set[int]()
        error = yield from _pool(left, started, options)
        if error is None:
            return
        if not started:  # the pool itself does not work
            raise error
        under_way = sorted(started & left.keys())
        say(f"{len(under_way)} tasks under way were lost and are tried again: {type(error).__name__}: {error}")
        for k in under_way:
            error = yield from _pool({k: left[k]}, set(), options)
            if error is not None:
                why = f"the process that ran it was lost: {type(error).__name__}: {error}"
                yield [_record(left[k], seed, 0.0) | {"error": why} for seed in left[k].seeds]
        todo = [task for k, task in left.items() if k not in started]


def _pool(left: dict[int, Task], started: set[int], options: Options) -> Generator[list[Record], None, Exception | None]:
    """The records of the tasks, each task taken from `left` when it has ended; what broke the pool, if anything did."""

    def calls() -> Iterator[Any]:
        for k, task in list(left.items()):
            started.add(k)
            yield joblib.delayed(_numbered)(k, task)

    # One job would run in this process; a cluster has as many as it has. Ray's backend has no generators.
    jobs = max(2, options.jobs) if options.backend == "loky" else -1
    results = "list" if options.backend == "ray" else "generator_unordered"
    with _backend(options):
        pool = joblib.Parallel(n_jobs=jobs, batch_size=1, pre_dispatch="n_jobs", return_as=results)
        try:
            for number, records in pool(calls()):
                del left[number]
                yield records
        except Exception as error:  # of the pool or the cluster: a run's own are in its record
            return error
    return None


@contextlib.contextmanager
def _backend(options: Options) -> Iterator[None]:
    """joblib's backend: processes of this machine, or a cluster."""
    if options.backend == "dask":
        from distributed import Client

        cluster = {"address": options.address} if options.address else {"n_workers": options.jobs, "threads_per_worker": 1}
        try:
            client = Client(**cluster)
        except OSError as error:
            raise SystemExit(f"--address must be that of a scheduler, and none answers at {options.address}.") from error
        with client, joblib.parallel_config("dask"):
            yield
        return
    if options.backend == "ray":
        import ray
        from ray.util.joblib import register_ray

        ray.init(address=options.address, ignore_reinit_error=True)
        register_ray()
    with joblib.parallel_config(options.backend, inner_max_num_threads=1 if options.backend == "loky" else None):
        yield


def _numbered(number: int, task: Task) -> tuple[int, list[Record]]:
    return number, execute(task)


def execute(task: Task) -> list[Record]:
    """The records of a task's runs; a run that raises has "error", one that cannot run here "skipped"."""
    experiment, found = module(task.name), list[dict[str, Any]]()
    with ALONE:
        torch.set_num_threads(1)
        random.seed(task.seeds[0])
        np.random.seed(task.seeds[0])
        torch.manual_seed(task.seeds[0])
        forget_all()  # rounding must not depend on the runs before
        began = time.perf_counter()
        try:
            if hasattr(experiment, "run_together"):
                metrics = experiment.run_together(task.config, task.seeds)
            else:
                metrics = [experiment.run(task.config, *task.seeds)]
            found = [{"metrics": _json(one)} for one in metrics]
        except Skip as reason:
            found = [{"skipped": str(reason)} for _ in task.seeds]
        except Exception:
            found = [{"error": traceback.format_exc()} for _ in task.seeds]
        seconds = (time.perf_counter() - began) / len(task.seeds)
    return [_record(task, seed, seconds) | one for seed, one in zip(task.seeds, found, strict=True)]


def _record(task: Task, seed: int, seconds: float) -> Record:
    about = machine()
    device = getattr(task.config, "device", "cpu")
    return {
        "experiment": task.name,
        "config": plain(task.config),
        "seed": seed,
        "versions": {key: about[key] for key in ("torchdil", "torch", "python")},
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") and torch.cuda.is_available() else device,
        "machine": {key: about[key] for key in ("cpu", "cores")},
        "seconds": round(seconds, 2),
    }


def label(record: Record) -> str:
    """A run in a few words."""
    config = record["config"]
    parts = [str(config[key]) for key in ("task", "problem", "integrator", "reading", "method") if key in config]
    return ", ".join([*parts, f"seed {record['seed']}"])


def _json(value: Any) -> Any:
    """What JSON can hold; a number that is not finite becomes None."""
    if isinstance(value, dict):
        return {str(key): _json(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_json(part) for part in value]
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return _json(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def seeds(text: str) -> tuple[int, ...]:
    """ "0:5" and "0,3,7" as numbers."""
    try:
        if ":" in text:
            first, last = text.split(":")
            found = tuple(range(int(first or 0), int(last)))
        else:
            found = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        found = ()
    if not found or min(found) < 0:
        raise argparse.ArgumentTypeError(f'expected seeds such as "0:5" or "0,3,7", got {text!r}.')
    return found


def choice(text: str) -> tuple[str, str]:
    """ "task=cmu" as a pair."""
    key, separator, value = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f'expected FIELD=VALUE such as "task=cmu", got {text!r}.')
    return key, value


def arguments(line: Sequence[str] | None = None) -> tuple[argparse.Namespace, Options]:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments",
        description="Run experiments, all of them by default, and write results/index.html.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXPERIMENTS)}")
    parser.add_argument("--preset", choices=PRESETS, default="quick")
    parser.add_argument("--seeds", type=seeds, help='such as "0:5" or "0,3,7", in place of those of the preset')
    parser.add_argument("--device", help="such as cuda, for the experiments that can")
    parser.add_argument("--data", help="the folder with mocap35.mat")
    parser.add_argument("--only", type=choice, action="append", default=[], metavar="FIELD=VALUE", help="of the variants")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, one thread each")
    parser.add_argument("--backend", default="loky", choices=("loky", "dask", "ray"), help="of joblib")
    parser.add_argument("--address", help="of the cluster's scheduler")
    parser.add_argument("--results", type=Path, help="the folder of the result files; results/PRESET by default")
    parser.add_argument("--again", action="store_true", help="compute finished runs anew")
    parser.add_argument("--show", action="store_true", help="compute nothing, show what is there")
    parser.add_argument("--docs", action="store_true", help="write the pages in docs from the committed results, and no more")
    found = parser.parse_args(line)
    unknown = [name for name in found.names if name not in EXPERIMENTS]
    if unknown:
        parser.error(f"NAME must be one of {', '.join(EXPERIMENTS)}, got {', '.join(unknown)}.")
    if found.jobs < 1:
        parser.error(f"--jobs must be at least 1, got {found.jobs}.")
    here = found.backend == "loky" and not found.show  # a cluster may have what this machine has not
    if here and (found.device or "").startswith("cuda") and not torch.cuda.is_available():
        parser.error(f"--device must be one of this machine, which has no GPU that torch can use, got {found.device}.")
    results = found.results or Path("results") / found.preset
    keys = ("preset", "seeds", "device", "data", "jobs", "backend", "address", "again")
    chosen = {key: getattr(found, key) for key in keys}
    options = Options(results=results, only=tuple(found.only), **chosen)
    if options.only and not any(planned(name, options) for name in found.names or EXPERIMENTS):
        wanted = ", ".join(f"{key}={value}" for key, value in options.only)
        parser.error(f"--only must name fields and values of the variants, and none has {wanted}.")
    return found, options
