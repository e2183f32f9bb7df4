"""README and docs: their code runs, their links lead somewhere, their numbers are those of the committed results, and the site
needs no network.

The code of other libraries on `coming-from.md` stands in blocks of its own, "```py title=...". That of torchdiffeq is run here;
the rest by a Python that has them, if one is named: `TORCHDIL_TORCH_PEERS` (torchopt, torchdeq), `TORCHDIL_JAX_PEERS` (jaxopt,
optimistix).
"""

import functools
import inspect
import json
import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch

import torchdil as dil
from benchmarks import tables

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
LINKED = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PEERS = {
    "TorchOpt": "TORCHDIL_TORCH_PEERS",
    "TorchDEQ": "TORCHDIL_TORCH_PEERS",
    "JAXopt": "TORCHDIL_JAX_PEERS",
    "Optimistix": "TORCHDIL_JAX_PEERS",
}
NUMBER = re.compile(r"-?\d\.\d+e[+-]\d\d")
RESULTS, SOLVERS = (json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text()) for name in ("core", "solvers"))


def blocks(page):
    return re.findall(r"```python(?: title=[^\n]*)?\n(.*?)```", page.read_text(), flags=re.DOTALL)


@pytest.fixture
def default_dtype():
    """What a block may change."""
    dtype = torch.get_default_dtype()
    yield
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_code_runs(page, capsys, default_dtype):
    exec("\n".join(blocks(page)), {"__name__": "example"})
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


def test_links_of_the_sources_exist():
    """For readers of the repository; the site's links are those of its pages, below."""
    for page in LINKED:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            path, _, anchor = target.partition("#")
            if urlsplit(target).scheme:
                assert well_formed(target), f"{page.name}: {target}"
                continue
            there = page.parent / path if path else page
            assert there.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in headings(there), f"{page.name}: {target}"


def headings(page):
    """The anchors that a page's headings have, here and on the site alike."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = (re.sub(r"[^\w\s-]", "", title).strip().lower() for title in re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE))
    return {re.sub(r"\s", "-", title) for title in titles}


def well_formed(address):
    parts = urlsplit(address)
    return parts.scheme == "https" and re.fullmatch(r"[a-z0-9-]+(\.[a-z0-9-]+)+", parts.netloc) is not None


def blocks_of(peer):
    found = re.findall(rf'```py title="{peer}"\n(.*?)```', (ROOT / "docs" / "coming-from.md").read_text(), flags=re.DOTALL)
    assert found and all("assert" in block for block in found)
    return found


def test_code_of_torchdiffeq_runs(default_dtype):
    pytest.importorskip("torchdiffeq")
    for block in blocks_of("torchdiffeq"):
        exec(block, {"__name__": "example"})


@pytest.mark.parametrize(("peer", "variable"), PEERS.items())
def test_code_of_other_libraries_runs(peer, variable):
    found = blocks_of(peer)
    if variable not in os.environ:
        pytest.skip(f"{variable} names no Python that has {peer}")
    for block in found:
        run = subprocess.run([os.environ[variable], "-W", "ignore", "-c", block], capture_output=True, text=True)
        assert run.returncode == 0, run.stderr


def test_no_block_of_code_is_left_out():
    """Python that is neither run nor another library's is a mistake in the fence."""
    theirs = {f'py title="{peer}"' for peer in ("torchdiffeq", *PEERS)}
    for page in PAGES:
        for fence in re.findall(r"^```(\S.*)$", page.read_text(), flags=re.MULTILINE):
            known = {"python", 'python title="torchdil"', "text", "console", "diff"} | theirs
            assert fence in known, f"{page.name}: {fence}"


def test_every_public_name_is_in_the_reference():
    named = set(re.findall(r"^::: torchdil\.(?:\w+\.)*(\w+)$", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE))
    for module in (dil, dil.ode, dil.control):
        public = {name for name, value in vars(module).items() if name[0] != "_" and not inspect.ismodule(value)}
        assert public <= named, public - named


class Elements(HTMLParser):
    """What a page refers to, what can be referred to, and its formulas."""

    def __init__(self, page):
        super().__init__()
        self.links, self.loads, self.ids, self.formulas, self.text = [], [], set(), 0, []
        self.feed(page.read_text())

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given[name] for name in ("id", "name") if given.get(name)}
        self.formulas += tag == "math"
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        elif tag in ("link", "script", "img", "source", "iframe"):
            self.loads += [given[name] for name in ("href", "src") if given.get(name)]

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    for package in ("mkdocs", "material", "mkdocstrings_handlers.python", "latex2mathml"):
        pytest.importorskip(package, reason="the site needs the extra `docs`")
    folder = tmp_path_factory.mktemp("site")
    # A proxy that nobody answers: whatever looks for the network fails.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    run = subprocess.run(build, cwd=ROOT, env={**os.environ, **nowhere}, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder


def test_links_of_the_site_exist(site):
    elements = functools.cache(Elements)
    for page in site.rglob("*.html"):
        if page.name == "404.html":  # which may be shown at any address, and so has absolute ones
            continue
        for target in [*elements(page).links, *elements(page).loads]:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                assert well_formed(target), f"{page.name}: {target}"
                continue
            there = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert there.is_file(), f"{page.name}: {target}"
            if parts.fragment and there.suffix == ".html":
                assert unquote(parts.fragment) in elements(there).ids, f"{page.name}: {target}"


def test_the_site_loads_nothing_from_elsewhere(site):
    for page in site.rglob("*.html"):
        assert not [target for target in Elements(page).loads if urlsplit(target).netloc], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"@import|url\(\s*[\"']?(https?:)?//", style.read_text()), style.name


def test_examples_of_the_reference_are_code(site):
    page = (site / "api.html").read_text()
    assert page.count(">&gt;&gt;&gt; <") > 40 and "<blockquote>" not in page  # what `>>>` is in Markdown


def test_formulas_are_drawn(site):
    source = (ROOT / "docs" / "mathematics.md").read_text()
    written = len(
        re.findall(r"\$\$.*?\$\$|(?<!\$)\$[^$]+\$", re.sub(r"```.*?```", "", source, flags=re.DOTALL), flags=re.DOTALL)
    )
    page = Elements(site / "mathematics.html")
    assert written > 100 and page.formulas == written
    for page in (Elements(page) for page in site.glob("*.html")):
        # Neither a formula that was not found nor a command that was not understood.
        assert not re.search(r"\$\$|\\[(\[]|\\[a-zA-Z]{2,}", "".join(page.text)), page.text
