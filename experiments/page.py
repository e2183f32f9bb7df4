"""One self-contained HTML page from titled sections; no script, no network, light and dark. And the look of the figures."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.tables import markdown

# Of figures. Okabe and Ito's colours, which the colour-blind tell apart.
BLUE, RED, GREEN, PURPLE, ORANGE, SKY, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A8A8A"
YELLOW, PALE, DARK = "#F0E442", "#B0B0B0", "#555555"
STYLE = {"font.size": 11, "axes.titlesize": 12, "legend.fontsize": 9.5, "legend.frameon": False, "svg.hashsalt": "torchdil"}
WIDTH = 4.6  # inches: narrow enough that the letters stay readable on a phone

VERDICTS = ("reproduced", "better", "not reproduced", "unfinished", "new")


class Verdict(NamedTuple):
    """A value of the paper beside ours.

    Attributes:
        what: the cell or claim, such as "Table 1, Spiral, Bwd. Euler IFT-CG: test MSE".
        paper, ours: as text, mean ± standard error where there are runs; "-" if there is none.
        runs: how many.
        verdict: one of `VERDICTS`; "unfinished": too few runs, or too short ones; "new": the paper has no value.
        why: a few words where it is not reproduced, or what to know.
    """

    what: str
    paper: str
    ours: str
    runs: int
    verdict: str
    why: str = ""


class Section(NamedTuple):
    """A part of the page: a heading and HTML."""

    title: str
    body: str


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --paper: #fff; --line: #d5dae1; --soft: #5b6570; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --paper: #15181c; --line: #353b44; --soft: #9aa4af; } }
body { margin: 0 auto; max-width: 60rem; padding: 1.5rem 1rem 4rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, sans-serif; }
h1 { font-size: 1.7rem; margin: 0 0 .3rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .4rem; }
p { margin: .4rem 0 .8rem; max-width: 46rem; } .soft { color: var(--soft); font-size: .92rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { text-align: left; padding: .35rem .9rem .35rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; } td:first-child { white-space: normal; min-width: 6rem; }
figure { margin: .6rem 0; background: #fff; border-radius: 6px; padding: .4rem; }
figure svg { width: 100%; height: auto; display: block; } figure img { max-width: 100%; display: block; margin: 0 auto; }
.gallery { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); gap: .8rem;
  align-items: start; margin: .6rem 0 1rem; }
.verdicts { width: 100%; } .verdicts td { vertical-align: top; white-space: normal; } .verdicts td:first-child { width: 36%; }
.verdicts .group th { padding-top: 1.3rem; } .verdicts .soft { line-height: 1.35; } .verdict { white-space: nowrap; }
@media (max-width: 44rem) {
  .verdicts tr:first-child { display: none !important; } .verdicts tr:not(.group), .verdicts td { display: block; }
  .verdicts tr:not(.group) { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  .verdicts td { border: 0; padding: .05rem 0; width: auto !important; }
  .verdicts td div.soft { display: inline; margin-left: .5rem; }
  .verdicts td:first-child div.soft { display: block; margin: 0; }
  .verdicts td[data-of]:not([data-of=""])::before { content: attr(data-of) ": "; color: var(--soft); }
}
.verdict { border-radius: 4px; padding: .1rem .45rem; border: 1px solid; font-size: .85rem; }
.reproduced { color: #0072B2; } .better { color: #00805c; } .not { color: #c04a00; } .new, .unfinished { color: var(--soft); }
@media (prefers-color-scheme: dark) { .reproduced { color: #6db7e8; } .better { color: #3fcf9f; } .not { color: #ff8f4a; } }
.gallery figure { margin: 0; } pre { overflow-x: auto; font-size: .85rem; line-height: 1.4; }
"""


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """The document."""
    body = "\n".join(f"<section><h2>{html.escape(title)}</h2>\n{content}</section>" for title, content in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">\n'
        f"<style>{_STYLE}</style></head>\n<body><h1>{html.escape(title)}</h1>\n"
        f"{paragraph(lead, 'soft')}\n{body}\n</body></html>\n"
    )


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of plain text."""
    return f'<p class="{kind}">{html.escape(text)}</p>'


def table(rows: list[dict[str, Any]]) -> str:
    """A table from rows with equal keys."""
    head = "".join(f"<th>{html.escape(key.replace('_', ' '))}</th>" for key in rows[0])
    lines = ("".join(f"<td>{html.escape(_format(value))}</td>" for value in row.values()) for row in rows)
    return f'<div class="wide"><table><tr>{head}</tr>' + "".join(f"<tr>{line}</tr>" for line in lines) + "</table></div>"


def verdicts(full: Sequence[Verdict], fresh: Sequence[Verdict]) -> str:
    """The values of the paper beside those of the full runs and of this run; a row for all that either knows.

    What stands before the colon of a name heads a group of rows.
    """
    ours, now = ({verdict.what: verdict for verdict in some} for some in (full, fresh))
    head = ("", "paper", "full runs", "this run", "")
    lines, last = ["<tr>" + "".join(f"<th>{name}</th>" for name in head) + "</tr>"], None
    for what in dict.fromkeys([*ours, *now]):
        judged = ours.get(what) or now[what]
        group, _, name = what.rpartition(": ")
        if group != last:
            lines.append(f'<tr class="group"><th colspan="{len(head)}">{html.escape(group)}</th></tr>')
            last = group
        why = f'<div class="soft">{html.escape(judged.why)}</div>' if judged.why else ""
        mark = f'<span class="verdict {judged.verdict.split()[0]}">{html.escape(judged.verdict)}</span>'
        cells = (html.escape(name) + why, html.escape(judged.paper), _value(ours.get(what)), _value(now.get(what)), mark)
        # A narrow screen shows one cell below the other, each with the heading of its column.
        labelled = (f'<td data-of="{of}">{cell}</td>' for of, cell in zip(head, cells, strict=True))
        lines.append(f"<tr>{''.join(labelled)}</tr>")
    return f'<table class="verdicts">{"".join(lines)}</table>'


def _value(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    count = f'<div class="soft">{verdict.runs} run{"s" if verdict.runs != 1 else ""}</div>'
    return f"{html.escape(verdict.ours)}{count}"


def preformatted(text: str) -> str:
    """Text as it is."""
    return f"<pre>{html.escape(text)}</pre>"


def vector_graphic(fig: Any) -> str:
    """A matplotlib figure as inline SVG."""
    buffer = io.StringIO()
    fig.savefig(buffer, format="svg")
    text = buffer.getvalue()
    return f"<figure>{text[text.index('<svg') :]}</figure>"


def picture(path: Path, alt: str) -> str:
    """An image file, inside the page."""
    kind = path.suffix.removeprefix(".")
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<figure><img src="data:image/{kind};base64,{data}" alt="{html.escape(alt)}"></figure>'


def gallery(figures: list[Any]) -> str:
    """Narrow figures, side by side where there is room, one below the other on a phone."""
    return f'<div class="gallery">{"".join(map(vector_graphic, figures))}</div>'


def only_run(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The metrics and the configuration of an experiment that is one run; of several seeds, the first is shown."""
    return records[0]["metrics"] | {"config": records[0]["config"]}


def origin(name: str, records: Sequence[dict[str, Any]]) -> str:
    """The first line of a page in docs: what writes it, and where and with what the runs were made."""
    return f"Written by `python -m experiments {name} --docs` from `experiments/results/{name}.jsonl`: {places(records)}."


def places(records: Sequence[dict[str, Any]]) -> str:
    """Where and with what runs were made."""
    found: dict[str, list[int]] = {}
    for record in records:
        versions, place = record["versions"], record["machine"]["cpu"] if record["device"] == "cpu" else record["device"]
        text = f"torchdil {versions['torchdil']}, torch {versions['torch']}, {place}, 1 thread"
        found.setdefault(text, []).append(record["seed"])
    return "; ".join(f"{text}, {f'seed {some[0]}' if len(some) == 1 else f'{len(some)} runs'}" for text, some in found.items())


def save(figures: dict[str, Any], docs: Path, name: str) -> None:
    """Figures as NAME-FIGURE.svg, the same files for the same numbers."""
    from matplotlib import rc_context

    with rc_context(STYLE):
        for key, fig in figures.items():
            fig.savefig(docs / f"{name}-{key}.svg", metadata={"Date": None})


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if value != 0 and (abs(value) < 1e-2 or abs(value) >= 1e4) else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def markdown_table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table from rows with equal keys; headings that differ in spaces at their ends only look the same."""
    return markdown([heading.strip() for heading in rows[0]], [list(row.values()) for row in rows])


def percent(share: float | None, digits: int = 0) -> str:
    """A share with so many digits behind the point, none if it is 0 or 1; "-" if there is none."""
    return "-" if share is None else f"{100 * share:.{0 if share in (0, 1) else digits}f}\N{NO-BREAK SPACE}%"
