"""Hooks of the site's build: equations as MathML, folded code of figures, an import path for the
code.
"""

import html
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert

EQUATION = re.compile(
    r'<(span|div) class="arithmatex">\s*\\([(\[])(.*?)\\[)\]]\s*</\1>', flags=re.DOTALL
)
PLOT = re.compile(
    (
        r'(<div class="language-python highlight"><pre>(?:(?!</pre>).)*</pre></div>)'
        r'\s*(<figure class="plot".*?</figure>)'
    ),
    flags=re.DOTALL,
)
FOLDED = r'\2\n<details class="plotting"><summary>Code of this figure</summary>\1</details>'


def on_config(config: Any) -> None:
    """Let the pages' code import the files of this folder (mkdocs undoes changes of sys.path made
    on import).
    """
    sys.path.insert(0, str(Path(__file__).parent))
    import results  # noqa: F401  # the style of all figures, before the first page draws one

    config.copyright = f"deqseq {version('deqseq')}, MIT licence, © the deqseq authors"


def on_page_content(content: str, **more: Any) -> str:
    """Write equations as MathML, which needs no scripts or fonts; fold code."""
    source = '<details class="mkdocstrings-source"'  # not for the search
    content = EQUATION.sub(set_equation, content).replace(source, f"{source} data-search-exclude")
    return PLOT.sub(FOLDED, content)


def set_equation(found: re.Match[str]) -> str:
    """One equation, in the line or on a line of its own."""
    tag, opening, latex = found.groups()
    display = "block" if opening == "[" else "inline"
    return f'<{tag} class="equation">{convert(html.unescape(latex), display=display)}</{tag}>'
