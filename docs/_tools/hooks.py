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
CODE = re.compile(r"<code\b[^>]*>.*?</code>", flags=re.DOTALL)
OPTION = re.compile(r"(?<![\w\"'-])--[a-z][\w-]*(?![^<]*>)")
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
    content = re.sub(r'href="#exec-\d+--', 'href="#', content)  # the headings have no such prefix
    return PLOT.sub(FOLDED, CODE.sub(keep_options, content))


def keep_options(found: re.Match[str]) -> str:
    """Code whose options, such as ``--seed``, are not broken at their hyphens."""
    return OPTION.sub(r'<span class="option">\g<0></span>', found[0])


def set_equation(found: re.Match[str]) -> str:
    """One equation, in the line or on lines of its own, which can break between its parts."""
    tag, opening, latex = found.groups()
    latex, display = html.unescape(latex), "block" if opening == "[" else "inline"
    if "&" in latex and r"\begin" not in latex:
        latex = rf"\begin{{split}}{latex}\end{{split}}"
    parts = [latex] if opening == "(" or r"\begin" in latex else latex.split(r"\qquad")
    return f'<{tag} class="equation">{"".join(convert(x, display=display) for x in parts)}</{tag}>'
