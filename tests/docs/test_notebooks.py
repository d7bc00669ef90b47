"""A tutorial becomes a notebook: its prose, the code that it shows, and the outputs that the build has seen."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPEC = importlib.util.spec_from_file_location("notebooks", ROOT / "docs" / "_tools" / "notebooks.py")
notebooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notebooks)

PAGE = """# A page

See [a guide](../guides/training.md), [deqseq.Stop][] and [a site](https://example.org).

```python exec="true" source="above" result="text"
print(1 < 2)
```

??? example "Code of the figure"

    ```python exec="true" source="above"
    draw()
    ```

```python exec="true" html="true"
hidden()
```

```python exec="true"
table()
```

The end.
"""
CONTENT = """<h1>A page</h1>
<div class="language-python highlight"><pre><span></span><code><span class="k">print</span>(1 &lt; 2)
</code></pre></div>
<div class="language-text highlight"><pre><span></span><code>True
</code></pre></div>
<details><div class="language-python highlight"><pre><code>draw()
</code></pre></div></details>
<figure class="plot" role="img"><svg></svg></figure>"""


def test_prose_code_and_outputs_become_cells():
    made = json.loads(notebooks.notebook(PAGE, CONTENT))
    cells = made["cells"]
    assert made["nbformat"] == 4
    assert [cell["cell_type"] for cell in cells] == ["markdown", "markdown", "code", "markdown", "code", "markdown"]
    assert cells[0]["source"].endswith("See a guide, `deqseq.Stop` and [a site](https://example.org).")
    assert cells[2]["source"] == "print(1 < 2)" and cells[2]["outputs"][0]["text"] == "True\n"
    assert cells[3]["source"] == "**Code of the figure**"
    assert cells[4]["source"] == "draw()" and cells[4]["outputs"][0]["data"]["image/svg+xml"] == "<svg></svg>"
    assert cells[5]["source"] == "*Here the page has a table.*\n\nThe end."


def test_a_fence_that_the_page_does_not_show_is_an_error():
    with pytest.raises(ValueError, match="2 fences, 1 shown"):
        notebooks.notebook(PAGE, CONTENT.partition("<details>")[0])
