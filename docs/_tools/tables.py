"""The page of results with its numbers in it, for readers of the repository:
``python docs/_tools/tables.py`` writes ``benchmarks/results/README.md``.
"""

import io
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "benchmarks" / "results" / "README.md"
BLOCK = re.compile(
    r'^```python exec="true" session="results"\n(.*?)^```$', re.DOTALL | re.MULTILINE
)
LINK = re.compile(r"\]\((?!http|#)")
LIMITS = '--8<-- "README.md:limits"'
NOTE = "<!-- made by docs/_tools/tables.py from docs/results.md: change that page -->\n\n"


def page() -> str:
    """The page as Markdown."""
    names: dict[str, Any] = {}

    def printed(block: re.Match[str]) -> str:
        output = io.StringIO()
        with redirect_stdout(output):
            exec(block[1], names)
        return output.getvalue().strip()

    text = BLOCK.sub(printed, (ROOT / "docs" / "results.md").read_text())
    assert text.count(LIMITS) == 1 and "```" not in text
    text = text.replace(LIMITS, "[Limits](README.md#limits)").replace(
        "(#limits)", "(README.md#limits)"
    )
    text = LINK.sub("](../../docs/", text).replace("../../docs/README.md", "../../README.md")
    return NOTE + text


if __name__ == "__main__":
    TARGET.write_text(page())
