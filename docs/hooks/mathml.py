"""Formulas as MathML, made when the site is built: browsers draw it themselves, so that no page loads a script from elsewhere.

`pymdownx.arithmatex` finds `$...$` and `$$...$$` and leaves them in elements of its own; what is in these is converted here.
A formula that cannot be read ends the build.
"""

import html
import re

from latex2mathml.converter import convert

_FOUND = re.compile(r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>([,.;:)]*)', re.DOTALL)


def on_page_content(content: str, **_: object) -> str:
    """The page with its formulas converted; called by mkdocs."""
    return _FOUND.sub(lambda found: mathml(html.unescape(found[3]), found[2] == "[", found[4]), content)


def mathml(formula: str, display: bool, after: str = "") -> str:
    """LaTeX as a MathML element, on a line of its own or inside of one, where it keeps the punctuation `after` it."""
    element = convert(formula.strip(), display="block" if display else "inline")
    if display:
        return f'<div class="formula">{element}</div>{after}'
    return f'<span class="formula-inline">{element}{after}</span>' if after else element
