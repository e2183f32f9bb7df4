"""One self-contained HTML page from titled sections; no script, no network, light and dark."""

from __future__ import annotations

import base64
import html
import io
from pathlib import Path
from typing import Any

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
.gallery figure { margin: 0; } pre { overflow-x: auto; font-size: .85rem; line-height: 1.4; }
"""


def page(title: str, lead: str, sections: list[tuple[str, str]]) -> str:
    """The document; a section is a heading and HTML."""
    body = "\n".join(f"<section><h2>{html.escape(heading)}</h2>\n{content}</section>" for heading, content in sections)
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


def _format(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.1e}" if value != 0 and (abs(value) < 1e-2 or abs(value) >= 1e4) else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
