"""The tutorials as notebooks: prose of a page's Markdown, code and outputs of its HTML, which the build has run."""

import html
import json
import re
from typing import Any

FENCE = re.compile(r"^( *)```python(?P<options>[^\n]*)\n.*?^\1```$", flags=re.MULTILINE | re.DOTALL)
OUTPUT = r'<div class="language-text highlight"><pre>(?P<text>.*?)</pre></div>'
FIGURE = r'(?:</details>\s*)?<figure class="plot"[^>]*>(?P<svg>.*?)</figure>'
RUN = re.compile(
    rf'<div class="language-python highlight"><pre>(?P<code>.*?)</pre></div>\s*(?:{OUTPUT}|{FIGURE})?', flags=re.DOTALL
)
RULE = "\n\0\n"  # stands for a fence
INTRODUCTION = "*A page of deqseq's documentation. It needs deqseq with the extras `examples` and `hf`.*"


def notebook(markdown: str, content: str) -> str:
    """The JSON of a notebook, from the source of a page and its HTML with source and output of each fence.

    Raises:
        ValueError: a fence of Python is not shown on the page, or is not at the left margin.
    """
    runs = [found.groupdict() for found in RUN.finditer(content)]
    title, *prose = FENCE.sub(placeholder, markdown).split(RULE)
    if len(prose) != len(runs):
        raise ValueError(f"a notebook needs every Python fence on the page: {len(prose)} fences, {len(runs)} shown")
    cells = [written(title), written(INTRODUCTION)]
    for run, text in zip(runs, prose, strict=True):
        cells += [executed(**run), written(text)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    known = {"nbformat": 4, "nbformat_minor": 4, "metadata": {"kernelspec": kernel}}
    return json.dumps({"cells": [cell for cell in cells if cell["source"]], **known}, indent=1, ensure_ascii=False)


def placeholder(fence: re.Match[str]) -> str:
    """What stands for a fence: a rule if it is shown; nothing for a figure, which the cell before has drawn."""
    options = fence["options"]
    if "exec=" not in options or "source=" in options:
        return RULE
    return "" if 'html="true"' in options else "*Here the page has a table.*"


def written(markdown: str) -> dict[str, Any]:
    """A cell of prose; links to other pages become their text."""
    text = re.sub(r"\[([^\]]+)\]\[[^\]]*\]", lambda found: f"`{found[1].strip('`')}`", markdown)
    text = re.sub(r"(?<!!)\[([^\]]+)\]\((?!http)[^)]*\)", r"\1", text)
    text = re.sub(r'^(?:\?\?\?\+?|!!!) \w+ "(.*)"$', r"**\1**", text, flags=re.MULTILINE)
    return {"cell_type": "markdown", "metadata": {}, "source": text.strip()}


def executed(code: str, text: str | None, svg: str | None) -> dict[str, Any]:
    """A cell of code with what it printed or drew."""
    outputs: list[dict[str, Any]] = []
    if text is not None:
        outputs.append({"output_type": "stream", "name": "stdout", "text": plain(text)})
    if svg is not None:
        data = {"image/svg+xml": svg, "text/plain": "a figure"}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    source = plain(code).rstrip("\n")
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": outputs, "source": source}


def plain(marked: str) -> str:
    """Text without its tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", marked))
