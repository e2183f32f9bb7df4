"""`python -m experiments`: all experiments, in their smallest preset and without the data, end in one page."""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from experiments import __main__ as command_line
from experiments import page, runner, summary

ROOT = Path(__file__).parent.parent
CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
VOID = {"meta", "link", "img", "br", "path", "use", "rect"}


def command(folder, *arguments):
    environment = os.environ | {"HOME": str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("TORCHDIL_DATA", None)
    line = [sys.executable, "-m", "experiments", *arguments]
    return subprocess.run(line, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    done = command(folder, "--preset", "smoke", "--jobs", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_experiment_is_on_the_page(made):
    text = (made / "results" / "index.html").read_text()
    assert {path.stem for path in (made / "results" / "smoke").glob("*.jsonl")} == set(runner.EXPERIMENTS)
    assert text.count("<section>") == len(runner.EXPERIMENTS) + 2  # and the verdicts, and the report of a layer
    assert "<script" not in text and 'src="http' not in text and "url(http" not in text


def test_one_process_makes_the_page_for_all(made, request):
    """pytest-xdist says so in the name of a test; there are versions of pytest with which it does not."""
    if not request.config.getoption("loadgroup", False):
        pytest.skip("needs pytest-xdist with --dist loadgroup")
    assert request.node.nodeid.endswith("@test_page")


def test_what_lacks_its_data_has_a_sentence_in_its_place(made):
    assert "CMU Walking needs mocap35.mat" in (made / "results" / "index.html").read_text()


def test_nothing_is_computed_twice(made):
    before = {path.name: path.read_text() for path in (made / "results" / "smoke").glob("*.jsonl")}
    done = command(made, "kepler", "table1", "--preset", "smoke", "--jobs", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path.name: path.read_text() for path in (made / "results" / "smoke").glob("*.jsonl")} == before
    assert "With a cold start, learning ends" in done.stderr.replace("\n", " ")


def test_the_page_is_well_formed(made):
    class Nested(HTMLParser):
        def __init__(self):
            super().__init__()
            self.open = []

        def handle_starttag(self, tag, attrs):
            if tag not in VOID:
                self.open.append(tag)

        def handle_endtag(self, tag):
            if tag not in VOID:
                assert self.open.pop() == tag

    parser = Nested()
    parser.feed((made / "results" / "index.html").read_text())
    assert parser.open == []


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1200])
def test_a_browser_shows_the_page_without_errors(made, scheme, width):
    line = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", f"--window-size={width},900"]
    line += [f"--user-data-dir={made / 'browser'}", f"--blink-settings=preferredColorScheme={int(scheme == 'light')}"]
    shown = made / f"{scheme}-{width}.png"
    done = subprocess.run(
        [*line, f"--screenshot={shown}", (made / "results" / "index.html").as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0 and "CONSOLE" not in done.stderr
    image = pytest.importorskip("PIL.Image").open(shown).convert("L")
    brightness = image.resize((1, 1)).getpixel((0, 0))
    assert brightness > 150 if scheme == "light" else brightness < 110


def test_verdicts_are_grouped_and_compared():
    full = [page.Verdict("Table 9, Pendulum: loss <1>", "1 ± 0", "0.9 ± 0.1", 20, "reproduced")]
    fresh = [page.Verdict("Table 9, Pendulum: loss <1>", "1 ± 0", "3", 1, "not reproduced", "one run")]
    text = page.verdicts(full, [*fresh, page.Verdict("Beyond: more", "-", "7", 2, "new")])
    cells = re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", text)
    assert cells[5:7] == ["Table 9, Pendulum", "loss &lt;1&gt;"]
    assert cells[7:10] == ["1 ± 0", '0.9 ± 0.1<div class="soft">20 runs</div>', '3<div class="soft">1 run</div>']
    assert "reproduced" in cells[10] and "not" not in cells[10]  # the full runs decide
    assert cells[11:] == ["Beyond", "more", "-", "-", '7<div class="soft">2 runs</div>', '<span class="verdict new">new</span>']


def test_readme_and_reproduction_page_are_those_of_the_committed_results():
    full = {name: runner.finished(runner.selected(name, command_line.FULL)) for name in runner.EXPERIMENTS}
    verdicts = {name: command_line.pages(name).verdicts(some) for name, some in full.items() if some}
    missing = command_line.missing(full)
    assert (ROOT / "docs" / "reproduction.md").read_text() == summary.text(verdicts, missing)
    assert summary.block(verdicts, missing) in (ROOT / "README.md").read_text()
