"""Hooks of the site's build: equations as MathML, and an import path for the pages' code."""

import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

EQUATION = re.compile(r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', flags=re.DOTALL)


def on_config(config: Any) -> None:
    """Let the pages' code import the files of this folder; mkdocs undoes changes of sys.path made on import."""
    sys.path.insert(0, str(Path(__file__).parent))


def on_page_content(content: str, **more: Any) -> str:
    """Write equations as MathML, which needs no scripts or fonts, and exclude source code from the search."""
    folded = '<details class="mkdocstrings-source"'
    return EQUATION.sub(set_equation, content).replace(folded, f"{folded} data-search-exclude")


def set_equation(found: re.Match[str]) -> str:
    """One equation, in the line or on a line of its own."""
    tag, opening, latex = found.groups()
    display = "block" if opening == "[" else "inline"
    return f'<{tag} class="equation">{convert(html.unescape(latex), display=display)}</{tag}>'
