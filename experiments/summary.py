"""What the full runs say of the paper, in docs/reproduction.md and in README.md."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.tables import markdown
from experiments.page import VERDICTS, Verdict

BEGIN, END = "<!-- reproduction -->", "<!-- end of reproduction -->"
# README.md has the values of the paper's tables; the claims and what is new are in docs/reproduction.md.
TABLES, NUMBER = ("Table 1", "Table 2"), re.compile(r"[\d.]+( ± [\d.]+)?")
# Its values beside those of other models on the same data: they reproduce nothing.
BEYOND = "Table 1, best"


def write(verdicts: dict[str, Sequence[Verdict]], missing: dict[str, str], root: Path) -> None:
    """The page and the block of README.md.

    Args:
        verdicts: by the names of the experiments.
        missing: such as "60 of 440 runs", of the experiments that have runs to come.
        root: of the repository.
    """
    (root / "docs" / "reproduction.md").write_text(text(verdicts, missing), "utf-8")
    path = root / "README.md"
    old = path.read_text("utf-8")
    path.write_text(old[: old.index(BEGIN)] + block(verdicts, missing) + old[old.index(END) + len(END) :], "utf-8")


def block(verdicts: dict[str, Sequence[Verdict]], missing: dict[str, str]) -> str:
    """The part of README.md."""
    found = [verdict for some in verdicts.values() for verdict in some]
    shown = [verdict for verdict in found if verdict.what.startswith(TABLES) and NUMBER.fullmatch(verdict.paper)]
    return f"{BEGIN}\n{_counts(found)}{_to_come(missing)}\n\n{_table(shown)}\n{END}"


def text(verdicts: dict[str, Sequence[Verdict]], missing: dict[str, str]) -> str:
    """docs/reproduction.md."""
    found = [verdict for some in verdicts.values() for verdict in some]
    parts = "\n\n".join(f"## {name}\n\n{_table(some)}" for name, some in verdicts.items() if some)
    return f"""# The paper, checked

Written by `python -m experiments --docs` from `experiments/results/*.jsonl`, one line a run with its configuration, seed,
versions, machine and time. {_counts(found)}{_to_come(missing)}

Mean ± standard error where there are runs.

{parts}

## Do it again

```console
make demo                                                # a short version of everything, results/index.html
make reproduce                                           # everything at full size: hours; it goes on where it was cut short
python -m experiments table1 --preset quick --seeds 0:5  # one experiment
python -m experiments table1 --only task=cmu --data DIR  # some of its cells; mocap35.mat is in DIR or $TORCHDIL_DATA
python -m experiments scale --preset paper --device cuda
python -m experiments cartpole --preset paper --backend dask --address tcp://scheduler:8786
python -m experiments --preset paper --show              # the page from what is there
```

An experiment is one file with a frozen `Config` and `run(config, seed) -> dict`. `experiments/runner.py` does the rest: seeds,
processes (joblib: this machine's cores, or a Dask or Ray cluster), progress, one JSON line a run in
`results/PRESET/NAME.jsonl`. Finished runs are not made again; a run that fails or is killed is reported, and made again by the
next command.
"""


def _counts(found: Sequence[Verdict]) -> str:
    beyond = [verdict for verdict in found if verdict.verdict == "new" or verdict.what.startswith(BEYOND)]
    checked = [verdict.verdict for verdict in found if verdict not in beyond]
    counts = {name: checked.count(name) for name in VERDICTS}
    return (
        f"Of {len(checked)} values and claims of the paper {counts['reproduced']} are reproduced, {counts['better']} come out "
        f"better, {counts['not reproduced']} are not reproduced and {counts['unfinished']} have runs to come; "
        f"{len(beyond)} results are beyond it."
    )


def _to_come(missing: dict[str, str]) -> str:
    """A sentence on the experiments that are not complete."""
    return f" Made so far: {', '.join(f'{runs} of {name}' for name, runs in missing.items())}." if missing else ""


def _table(verdicts: Sequence[Verdict]) -> str:
    rows = [[v.what, v.paper, v.ours, v.runs, v.verdict, v.why] for v in verdicts]
    return markdown(["", "paper", "torchdil", "runs", "verdict", "to know"], rows)
