"""The code of every page runs, fence after fence, in a folder of its own; links and named files lead somewhere."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))


def python_of(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("page", [page for page in PAGES if python_of(page)], ids=lambda page: page.name)
def test_the_code_runs_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    for block in python_of(page):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.parametrize("page", [*PAGES, *ROOT.glob("*.md")], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\((?!http)([^)#]+)", prose):
        assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:benchmarks|deqseq|examples|tests)/[\w./]+)`", prose):
        assert (ROOT / name).exists() or page.name == "CHANGELOG.md", name
