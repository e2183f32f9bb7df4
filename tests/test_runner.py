"""The runner of experiments: no finished run is lost or made twice, whatever happens to the others."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from rich.console import Console

from experiments import runner
from experiments.runner import Options, Store

TOY = "toy_experiment"
TESTS = Path(__file__).parent


class Stacked(NamedTuple):
    """A configuration of which so many seeds are trained together."""

    together: int


@pytest.fixture
def counts(tmp_path, monkeypatch):
    folder = tmp_path / "counts"
    folder.mkdir()
    monkeypatch.setenv("TOY_COUNTS", str(folder))
    # Also for the processes of a pool or a cluster.
    monkeypatch.syspath_prepend(str(TESTS))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH", "")]))
    return folder


def made(counts):
    return {path.name: len(path.read_text()) for path in counts.iterdir()}


def run(options, **changes):
    said = StringIO()
    records = runner.run(TOY, options._replace(**changes), Console(file=said, width=200))
    return records, said.getvalue()


@pytest.mark.parametrize(
    ("done", "of", "seconds", "words"),
    [
        (1, 4, 30.0, "about 1 min 30 s left"),
        (2, 4, 7.0, "about 0 min 07 s left"),
        (10, 110, 1200.0, "about 3 h 20 min left"),
        (4, 4, 30.0, ""),
    ],
)
def test_the_time_left_is_told_from_the_runs_so_far(done, of, seconds, words):
    assert runner.time_left(done, of, seconds) == words


def test_progress_and_the_time_left_are_shown(tmp_path, counts, monkeypatch):
    monkeypatch.setattr(runner, "SPEAK_EVERY", 0.0)
    options = Options("quick", tmp_path / "results", jobs=1)
    _, log = run(options)  # a file: a line now and then, and the bar at the end
    assert re.search(r"toy_experiment: 2 of 4, about \d+ min \d\d s left, good, seed 1", log) and "4/4" in log
    watched = StringIO()
    console = Console(file=watched, width=200, force_terminal=True)
    runner.run(TOY, options._replace(again=True), console)
    assert re.search(r"2/4.*about \d+ min \d\d s left", watched.getvalue()) and "2 of 4" not in watched.getvalue()


def test_a_run_is_one_line_with_all_that_is_known_of_it(tmp_path, counts):
    records, _ = run(Options("smoke", tmp_path / "results", jobs=1))
    lines = (tmp_path / "results" / f"{TOY}.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == records
    assert [record["seed"] for record in records] == [0, 1, 2, 3]
    first = records[0]
    assert set(first) == {"experiment", "config", "seed", "versions", "device", "machine", "seconds", "metrics"}
    assert first["config"] == {"method": "good", "pause": 0.0, "device": "cpu"}
    assert first["versions"]["torch"] == torch.__version__
    assert first["metrics"]["infinite"] is None  # JSON has no infinity


def test_runs_are_seeded_the_same_alone_and_in_processes(tmp_path, counts):
    alone, _ = run(Options("smoke", tmp_path / "a", jobs=1))
    spread, _ = run(Options("smoke", tmp_path / "b", jobs=2))
    drawn = [[record["metrics"]["drawn"] for record in records] for records in (alone, spread)]
    assert drawn[0] == drawn[1]
    assert len({str(numbers) for numbers in drawn[0]}) == 4
    assert all(record["metrics"]["threads"] == 1 for record in spread)
    assert all(record["metrics"]["pid"] != os.getpid() for record in spread)


def test_finished_runs_are_not_made_again(tmp_path, counts):
    options = Options("smoke", tmp_path, jobs=1)
    run(options, seeds=(0, 2))
    records, _ = run(options)
    assert made(counts) == {f"good-{seed}": 1 for seed in range(4)}
    assert [record["seed"] for record in records] == [0, 1, 2, 3]
    run(options, again=True, seeds=(0,))
    assert made(counts)["good-0"] == 2


def test_more_runs_do_not_make_finished_ones_anew(counts):
    config = runner.module(TOY).Config()
    assert runner.plain(config) == runner.plain(replace(config, runs=9))
    assert runner.plain(config) != runner.plain(replace(config, device="cuda"))


def test_a_run_that_raises_is_reported_and_resumed(tmp_path, counts, monkeypatch):
    monkeypatch.setenv("TOY_METHOD", "good")
    options = Options("paper", tmp_path, jobs=1, only=(("method", "raises"),))
    records, said = run(options)
    assert [record["seed"] for record in records if "error" in record] == [1]
    assert [record["seed"] for record in runner.finished(records)] == [0, 2, 3]
    assert "raises, seed 1: ValueError: no luck today" in said
    assert "Traceback" in records[1]["error"]
    run(options)
    assert made(counts) == {"raises-0": 1, "raises-1": 2, "raises-2": 1, "raises-3": 1}


def test_a_run_that_fails_does_not_replace_one_that_finished(tmp_path):
    store = Store(tmp_path, "x")
    good, bad = ({"config": {}, "seed": 0} | part for part in ({"metrics": {"a": 1}}, {"error": "a line\u2028and another"}))
    store.add([bad])
    assert store.records() == [bad]
    store.add([good])
    store.add([bad])
    assert store.records() == [good]
    store.add([good | {"metrics": {"a": 2}}])
    assert store.records()[0]["metrics"] == {"a": 2}


def test_seeds_are_stacked_as_many_as_the_configuration_says(monkeypatch, counts):
    toy = runner.module(TOY)
    seen = []

    def run_together(config, seeds):
        seen.append(tuple(seeds))
        return [{"seed": seed} for seed in seeds]

    monkeypatch.setattr(toy, "run_together", run_together, raising=False)
    missing = [(Stacked(3), seed) for seed in (0, 1, 4, 6)] + [(Stacked(1), 0), (Stacked(1), 1)]
    assert [task.seeds for task in runner.tasks(TOY, missing)] == [(0, 1, 4), (6,), (0,), (1,)]
    records = runner.execute(runner.Task(TOY, toy.Config(), (2, 5)))
    assert seen == [(2, 5)] and [record["metrics"]["seed"] for record in records] == [2, 5]


def test_a_killed_process_costs_its_own_run_alone(tmp_path, counts, monkeypatch):
    monkeypatch.setenv("TOY_METHOD", "dies")
    records, said = run(Options("paper", tmp_path, jobs=2, only=(("method", "dies"),)))
    assert [record["seed"] for record in runner.finished(records)] == [0, 2, 3]
    (failed,) = [record for record in records if "error" in record]
    assert failed["seed"] == 1 and "was lost: TerminatedWorkerError" in failed["error"]
    assert "were lost and are tried again: TerminatedWorkerError" in said


def test_what_cannot_run_here_is_skipped_with_its_sentence(tmp_path, counts, monkeypatch):
    monkeypatch.setenv("TOY_METHOD", "skips")
    records, said = run(Options("paper", tmp_path, jobs=1, only=(("method", "skips"),)))
    assert [record["skipped"] for record in records if "skipped" in record] == ["the toy has no data."]
    assert "the toy has no data." in said
    assert len(runner.finished(records)) == 3
    assert all("skipped" not in record for record in Store(tmp_path, TOY).records())


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_command_that_is_killed_goes_on_where_it_was(jobs, tmp_path, counts):
    code = f"""
from pathlib import Path
from experiments import runner
runner.run({TOY!r}, runner.Options("quick", Path({str(tmp_path)!r}), jobs={jobs}))
"""
    command = [sys.executable, "-c", code]
    process = subprocess.Popen(command, cwd=TESTS.parent, stderr=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60
    while len(Store(tmp_path, TOY).records()) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # its workers, who would wait for it for five minutes
    there = [record["seed"] for record in Store(tmp_path, TOY).records()]
    assert len(there) in (2, 3, 4)[: 1 + jobs]  # more may come at once
    records, _ = run(Options("quick", tmp_path, jobs=1))
    assert len(runner.finished(records)) == 4
    assert [record["seed"] for record in records] == [0, 1, 2, 3]
    assert sorted(record["seed"] for record in Store(tmp_path, TOY).records()) == [0, 1, 2, 3], "nothing lost, nothing twice"
    assert all(made(counts)[f"good-{seed}"] == 1 for seed in there)


def test_a_file_that_was_cut_short_is_mended(tmp_path, counts):
    options = Options("smoke", tmp_path, jobs=1)
    run(options)
    path = tmp_path / f"{TOY}.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    with pytest.warns(UserWarning, match=rf"{TOY}\.jsonl has a line that is no run of {TOY} \(4\): they are left out"):
        assert len(Store(tmp_path, TOY).records()) == 3
    records, said = run(options)
    assert f"{path} has a line that is no run of {TOY} (4): they are in {path}.aside now" in said
    assert len(runner.finished(records)) == 4
    assert made(counts) == {"good-0": 1, "good-1": 1, "good-2": 1, "good-3": 2}
    assert (tmp_path / f"{TOY}.jsonl.aside").read_bytes() == whole[:-40].split(b"\n")[-1] + b"\n"
    _, said = run(options)
    assert "aside" not in said


FOREIGN = [
    b"\x89PNG\r\n\x1a\n\x00\xff",
    b'{"experiment": "another", "config": {}, "seed": 0, "metrics": {}}',
    b'[1, 2, 3]',
    b'{"config": "good", "seed": 0}',
    b'{"config": {}, "seed": "0"}',
    b'{"seed": 0}',
    b"null",
    b"seed,value",
    b"[" * 100_000,
]  # fmt: skip


def test_lines_of_others_are_set_aside_and_kept(tmp_path, counts):
    options, path = Options("smoke", tmp_path, jobs=1), tmp_path / f"{TOY}.jsonl"
    run(options)
    mine = path.read_bytes().splitlines()
    path.write_bytes(b"\n".join([mine[0], *FOREIGN, *mine[1:]]) + b"\n")
    records, said = run(options)
    count = sum(len(line.split(b"\n")) for line in FOREIGN)
    assert f"has {count} lines that are no runs of {TOY} (2, 3, 4, 5, 6, ...)" in said
    assert len(runner.finished(records)) == 4 and all(number == 1 for number in made(counts).values())
    assert path.read_bytes().splitlines() == mine
    assert path.with_suffix(".jsonl.aside").read_bytes() == b"\n".join(FOREIGN) + b"\n"


def test_what_is_damaged_while_runs_are_added_is_kept(tmp_path):
    store = Store(tmp_path, "x")
    store.add([{"config": {}, "seed": 0, "metrics": {}}])
    with open(store.path, "a") as file:
        file.write('{"config": {}, "se')
    store.add([{"config": {}, "seed": 1, "metrics": {}}])
    assert [record["seed"] for record in store.records()] == [0, 1]
    assert store.aside.read_text() == '{"config": {}, "se\n'


def test_two_writers_lose_nothing(tmp_path):
    code = (
        "import sys; from pathlib import Path; from experiments.runner import Store\n"
        "for k in range(40): Store(Path(sys.argv[1]), 'x').add([{'config': {'w': sys.argv[2]}, 'seed': k}])"
    )
    writers = [subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(w)], cwd=TESTS.parent) for w in range(2)]
    assert [writer.wait() for writer in writers] == [0, 0]
    assert len(Store(tmp_path, "x").records()) == 80
    assert not list(tmp_path.glob("*.tmp"))


def test_runs_go_to_a_dask_cluster(tmp_path, counts):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        options = Options("smoke", tmp_path, backend="dask", address=cluster.scheduler_address)
        records, _ = run(options)
    alone, _ = run(Options("smoke", tmp_path / "alone", jobs=1))
    # Python's own generator is also that of Dask's threads in a worker, which may draw in between.
    assert [r["metrics"]["drawn"][1:] for r in records] == [r["metrics"]["drawn"][1:] for r in alone]
    assert 1 <= len({record["metrics"]["pid"] for record in records} - {os.getpid()}) <= 2


@pytest.mark.parametrize(("text", "expected"), [("0:3", (0, 1, 2)), (":2", (0, 1)), ("4", (4,)), ("3,0,7,3", (0, 3, 7))])
def test_seeds_on_the_command_line(text, expected):
    assert runner.seeds(text) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (["--seeds", "5:5"], 'expected seeds such as "0:5" or "0,3,7", got \'5:5\''),
        (["--seeds", "a"], 'expected seeds such as "0:5"'),
        (["--only", "task"], "expected FIELD=VALUE"),
        (["keppler"], "NAME must be one of kepler, table1"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0."),
        pytest.param(
            ["scale", "--device", "cuda"],
            "--device must be one of this machine",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
        (["table1", "--only", "taks=cmu"], "none has taks=cmu."),
        (["kepler", "--only", "nonsense=None"], "none has nonsense=None."),
    ],
)
def test_a_wrong_command_line_gets_a_sentence(line, expected, capsys):
    with pytest.raises(SystemExit):
        runner.arguments(line)
    assert expected in capsys.readouterr().err
