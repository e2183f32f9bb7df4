"""README and docs: their code runs, and their numbers are those of the committed results."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NUMBER = re.compile(r"-?\d\.\d+e[+-]\d\d")
RESULTS, SOLVERS = (json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()) for name in ("core", "solvers"))


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_code_runs(page, capsys):
    dtype = torch.get_default_dtype()
    try:
        exec("\n".join(blocks(page)), {"__name__": "example"})
    finally:
        torch.set_default_dtype(dtype)
    # What a page shows as printed was printed, but for the numbers, which rounding may change.
    printed = NUMBER.sub("#", capsys.readouterr().out)
    for shown in re.findall(r"```text\n(.*?)```", page.read_text(), flags=re.DOTALL):
        assert NUMBER.sub("#", shown) in printed


def test_readme_example_is_short():
    assert len([line for line in blocks(ROOT / "README.md")[0].splitlines() if line.strip()]) <= 15


def test_numbers_come_from_the_results():
    assert tables.readme(RESULTS) in (ROOT / "README.md").read_text()
    assert tables.numbers(RESULTS) == (ROOT / "docs" / "numbers.md").read_text()
    assert tables.solvers(SOLVERS) == (ROOT / "docs" / "solvers.md").read_text()


def test_results_name_their_origin():
    for results in (RESULTS, SOLVERS):
        assert {"seed", "torchdil", "torch", "cpu", "threads"} <= results["machine"].keys()


def test_tables_have_as_many_cells_in_every_row():
    for page in PAGES:
        width = 0
        for line in page.read_text().splitlines():
            cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
            assert not (cells and width) or cells == width, f"{page.name}: {line}"
            width = cells


def test_local_links_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
