"""README and docs: their code runs, and their numbers are those of the committed results."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks import tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RESULTS = json.loads((ROOT / "benchmarks" / "results" / "core.json").read_text())


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_code_runs(page, capsys):
    dtype = torch.get_default_dtype()
    try:
        exec("\n".join(blocks(page)), {"__name__": "example"})
    finally:
        torch.set_default_dtype(dtype)


def test_readme_example_is_short():
    assert len([line for line in blocks(ROOT / "README.md")[0].splitlines() if line.strip()]) <= 15


def test_numbers_come_from_the_results():
    assert tables.readme(RESULTS) in (ROOT / "README.md").read_text()
    assert tables.numbers(RESULTS) == (ROOT / "docs" / "numbers.md").read_text()


def test_results_name_their_origin():
    assert {"seed", "torchdil", "torch", "cpu", "threads"} <= RESULTS["machine"].keys()


def test_local_links_exist():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
