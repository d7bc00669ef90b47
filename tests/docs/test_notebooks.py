"""A tutorial becomes a notebook: its prose, the code that it shows, and the outputs that the build has seen."""

import importlib.util
import json
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "docs" / "_tools" / "notebooks.py"
SPEC = importlib.util.spec_from_file_location("notebooks", PATH)
assert SPEC is not None and SPEC.loader is not None
notebooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notebooks)

PAGE = """# A page

See [a guide](../guides/training.md), [deqseq.Stop][] and [a site](https://example.org).

```python exec="true" source="above" result="text"
print(1 < 2)
```

```python exec="true" html="true"
hidden()
```

The end.
"""
CONTENT = """<h1>A page</h1>
<div class="language-python highlight"><pre><span></span><code><span class="k">print</span>(1 &lt; 2)
</code></pre></div>
<div class="language-text highlight"><pre><span></span><code>True
</code></pre></div>"""


def test_prose_code_and_outputs_become_cells():
    cells = json.loads(notebooks.notebook(PAGE, CONTENT))["cells"]
    assert [cell["cell_type"] for cell in cells] == ["markdown", "markdown", "code", "markdown"]
    assert cells[0]["source"].endswith("See a guide, `deqseq.Stop` and [a site](https://example.org).")
    assert cells[2]["source"] == "print(1 < 2)" and cells[2]["outputs"][0]["text"] == "True\n"
    assert cells[3]["source"] == "The end."


def test_a_fence_that_the_page_does_not_show_is_an_error():
    with pytest.raises(ValueError, match="1 fences, 0 shown"):
        notebooks.notebook(PAGE, "")
