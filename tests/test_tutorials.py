"""Tutorials: every script runs, claims included, and its page and notebook in docs are those of the script as it is now."""

import ast
import json
import os
import re
import subprocess
import sys

import pytest

from tutorials import render
from tutorials.render import FOLDER, ROOT, SCRIPTS

NUMBER = re.compile(r"(?<![A-Za-z_])-?\d[\d.,]*(e[+-]?\d+)?|\b(nan|inf)\b")


def masked(printed):
    """Text but for its numbers, which rounding may change, and the widths of columns, which go with them."""
    return re.sub(r"-{2,}", "-", re.sub(r"\s+", " ", NUMBER.sub("#", printed)))


def committed(name):
    return render.read(json.loads((FOLDER / f"{name}.ipynb").read_text()))


@pytest.mark.parametrize("name", SCRIPTS)
def test_runs_and_prints_what_is_shown(name):
    fresh, shown = render.run(name), committed(name)
    assert [(cell.code, cell.source) for cell in shown] == [(cell.code, cell.source) for cell in fresh], "run make tutorials"
    for now, then in zip(fresh, shown, strict=True):
        assert masked(now.printed) == masked(then.printed)
        assert [title for title, _ in now.figures] == [title for title, _ in then.figures]
    last = [cell.printed for cell in fresh if cell.printed][-1]
    assert "The gradient is right" in last, "a tutorial ends with its gradient report"


@pytest.mark.parametrize("name", SCRIPTS)
def test_page_figures_and_notebook_are_one(name, tmp_path):
    """What is in docs is what the committed notebook gives: nothing edited by hand, no figure missing, none left over."""
    render.write(name, committed(name), tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    there = {path.name: path.read_bytes() for path in FOLDER.iterdir() if re.fullmatch(rf"{name}(-\d+)?\..*", path.name)}
    assert written == there
    assert f"{name}-1.png" in there


def test_all_scripts_have_a_page_and_are_listed():
    scripts = {path.stem for path in (ROOT / "tutorials").glob("*.py")} - {"__init__", "__main__", "render"}
    pages = {path.stem for path in FOLDER.glob("*.md")} - {"index"}
    assert scripts == pages == set(SCRIPTS)
    index, site = (FOLDER / "index.md").read_text(), (ROOT / "mkdocs.yml").read_text()
    assert re.findall(r"\]\((\w+)\.md\)", index) == re.findall(r": tutorials/(\w+)\.md", site) == list(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_needs_only_what_a_user_has(name):
    """The package, what it depends on, matplotlib and scikit-learn."""
    tree = ast.parse((ROOT / "tutorials" / f"{name}.py").read_text())
    used = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    used |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {module.split(".")[0] for module in used} <= {"math", "torch", "torchdil", "scipy", "matplotlib", "sklearn"}


def test_runs_alone():
    command = [sys.executable, "-W", "error", str(ROOT / "tutorials" / "lqr.py")]
    answer = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "MPLBACKEND": "agg"})
    assert answer.returncode == 0, answer.stderr
    assert masked(answer.stdout) == masked("".join(cell.printed for cell in committed("lqr")))


def test_cells_are_told_apart():
    text, code = render.cells("# %% [markdown]\n# # Title\n#\n#     indented\n\n# %%\n\nx = 1\n\n\ndef f():\n    pass\n")
    assert (text.code, text.source) == (False, "# Title\n\n    indented")
    assert (code.code, code.source, code.line) == (True, "x = 1\n\n\ndef f():\n    pass", 7)
    with pytest.raises(ValueError, match="must begin with"):
        render.cells("x = 1\n")
