"""`python -m experiments [NAME ...] --preset quick`: run experiments, say what came out, and write `results/index.html`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import torch
from rich.console import Console
from rich.table import Table

import torchdil as dil
from experiments import page, runner, summary

PAGE = Path("results") / "index.html"
ROOT = Path(__file__).parent.parent
FULL = runner.Options("paper", runner.COMMITTED)


def main() -> int:
    found, options = runner.arguments()
    console = Console(stderr=True, highlight=False)
    names = found.names or runner.EXPERIMENTS
    if found.docs:
        write_docs(names, console)
        return 0
    records = {name: runner.selected(name, options) if found.show else runner.run(name, options, console) for name in names}
    for name in found.names:
        if done := runner.finished(records[name]):
            console.print(pages(name).answer(done), markup=False)
            console.print(_table(pages(name).verdicts(done)))
    # All that is there, also what other commands have left.
    whole = runner.Options(options.preset, options.results)
    shown = {name: runner.selected(name, whole) for name in runner.EXPERIMENTS}
    for name, some in records.items():
        shown[name] += [record for record in some if "skipped" in record]
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(document(shown, options.preset), "utf-8")
    console.print(f"wrote {PAGE}")
    failed = [f"{name}, {runner.label(one)}" for name, some in records.items() for one in some if "error" in one]
    for one in failed:
        console.print(f"failed: {one}", style="red", markup=False)
    return 1 if failed else 0


def write_docs(names: Sequence[str], console: Console) -> None:
    """The pages of docs and the block of README.md, from the committed results."""
    full = {name: runner.finished(runner.selected(name, FULL)) for name in runner.EXPERIMENTS}
    for name in names:
        others = len(runner.Store(runner.COMMITTED, name).records()) - len(full[name])
        if others:
            console.print(f"{name}: {others} records are of no finished run of the paper preset.", style="yellow")
        if full[name]:
            pages(name).write(full[name], ROOT / "docs")
        else:
            console.print(f"{name}: no committed results.", style="yellow")
    verdicts = {name: pages(name).verdicts(some) for name, some in full.items() if some}
    summary.write(verdicts, missing(full), ROOT)


def missing(full: dict[str, list[runner.Record]]) -> dict[str, str]:
    """Of the experiments whose full runs are not all there: how many are."""
    counts = {name: (len(some), len(runner.planned(name, FULL))) for name, some in full.items()}
    return {name: f"{done} of {planned} runs" for name, (done, planned) in counts.items() if done < planned}


def pages(name: str) -> ModuleType:
    """What shows the experiment of this name."""
    return importlib.import_module(f"experiments.{name}_page")


def document(records: dict[str, list[runner.Record]], preset: str) -> str:
    """The page: verdicts first, then a section for each experiment."""
    full = {name: runner.finished(runner.selected(name, FULL)) for name in records}
    done = {name: runner.finished(some) for name, some in records.items()}
    known, fresh = ([v for name, some in group.items() if some for v in pages(name).verdicts(some)] for group in (full, done))
    sections = [section(name, some, full[name], preset) for name, some in records.items() if some or full[name]]
    here = [record for some in done.values() for record in some]
    lead = f"This run: preset {preset}, {_cost(here)}, {page.places(here)}. " if here else ""
    lead += "Full runs: those of the paper preset, whose results come with the code (experiments/results)."
    about = page.paragraph("Each value and claim of the paper, mean ± standard error where there are runs, and what is new.")
    first = page.Section("The paper, checked", about + page.verdicts(known, fresh))
    last = page.Section(
        "What a layer says of its gradient",
        page.paragraph("print(layer.report) after a backward pass through eight small problems.")
        + page.preformatted(example()),
    )
    return page.page("torchdil: differentiable implicit layers", lead, [first, *sections, last])


def section(name: str, some: list[runner.Record], full: list[runner.Record], preset: str) -> page.Section:
    """The section of one experiment: from the runs of this machine if there are any, else from the full ones."""
    done = runner.finished(some)
    made = pages(name).section(done or full) if done or full else page.Section(name, "")
    notes = [page.paragraph(sentence, "soft") for sentence in dict.fromkeys(r["skipped"] for r in some if "skipped" in r)]
    failed = [record for record in some if "error" in record]
    if failed:
        last = failed[-1]["error"].splitlines()[-1]
        notes.append(page.paragraph(f"Not below: {_counted(len(failed), 'run')} that failed, the last one with {last}"))
    if done:
        notes.append(page.paragraph(f"Below: preset {preset}, {_cost(done)}.", "soft"))
        if full and done != full:
            notes.append(page.paragraph(f"Full runs ({_cost(full)}): {pages(name).answer(full)}"))
    elif full:
        notes.append(page.paragraph(f"Below: full runs ({_cost(full)}).", "soft"))
    return made._replace(body="".join(notes) + made.body)


def example() -> str:
    """The report of one small layer."""
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3)
    layer = dil.ArgminLayer(lambda y, x: ((y - net(x)) ** 2 + torch.cosh(y)).sum(-1), linear_solver=dil.CG(), init=(3,))
    layer(torch.randn(8, 5)).square().sum().backward()
    return str(layer.report)


def _cost(records: list[runner.Record]) -> str:
    """How many runs, and how long they took, in words."""
    times = [record["seconds"] for record in records if record["seconds"] is not None]
    runs = _counted(len(records), "run")
    if len(times) < len(records):
        return runs
    total = sum(times)
    return f"{runs}, {total:.0f} s of computing" if total < 600 else f"{runs}, {total / 3600:.1f} h of computing"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _table(verdicts: tuple[page.Verdict, ...]) -> Table:
    table = Table("", "paper", "ours", "runs", "verdict")
    for what, paper, ours, runs, verdict, _ in verdicts:
        table.add_row(what, paper, ours, str(runs), verdict)
    return table


if __name__ == "__main__":
    sys.exit(main())
