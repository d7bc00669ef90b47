"""What the site's build adds to mkdocs: equations as MathML, and tools that the pages' code may import."""

import html
import re
import sys
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

EQUATION = re.compile(r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', flags=re.DOTALL)


def on_config(config: Any) -> None:
    """Let the pages' code import what is beside this file; mkdocs takes back what is done on import."""
    sys.path.insert(0, str(Path(__file__).parent))


def on_page_content(content: str, **more: Any) -> str:
    """Set equations, which browsers read as MathML without scripts or fonts; keep source code out of the search."""
    folded = '<details class="mkdocstrings-source"'
    return EQUATION.sub(set_equation, content).replace(folded, f"{folded} data-search-exclude")


def set_equation(found: re.Match[str]) -> str:
    """One equation, in the line or on a line of its own."""
    tag, opening, latex = found.groups()
    display = "block" if opening == "[" else "inline"
    return f'<{tag} class="equation">{convert(html.unescape(latex), display=display)}</{tag}>'
