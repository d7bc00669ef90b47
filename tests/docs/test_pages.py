"""What a page shows runs when a reader copies it; links, named files, images and examples lead
somewhere.
"""

import os
import re
from collections import Counter
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from processes import output_of

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("*.md"))]
EACH_PAGE = pytest.mark.parametrize("page", PAGES)
FENCE = re.compile(
    r"^(?P<indent> *)```python(?P<options>.*)\n(?P<code>(?:.*\n)*?)(?P=indent)```$", re.MULTILINE
)
HIDE = "# markdown-exec: hide"  # at the end of a line that the site runs and does not show
FRAGMENT = 'title="needs a download"'  # in the options of a fence that does not run here
FRAGMENTS = {"released_models.md": 2}  # by page; on all others there are none


def fences(text):
    """The Python fences of a page: options and lines, without their indentation."""
    return [(options, dedent(code).splitlines()) for _, options, code in FENCE.findall(text)]


def is_hidden(options):
    """Whether the site runs a fence and shows only its output."""
    return "exec=" in options and "source=" not in options


def copied(page):
    """What a reader copies from a page: the code of all fences that are shown, except fragments."""
    shown = [
        lines
        for options, lines in fences(page.read_text())
        if not is_hidden(options) and FRAGMENT not in options
    ]
    return "\n".join(line for lines in shown for line in [*lines, ""] if not line.endswith(HIDE))


def only_shown(page):
    """Whether a page has code that nobody runs: the site runs its own, and another test that of the
    README.
    """
    shown = [
        options
        for options, _ in fences(page.read_text())
        if "exec=" not in options and FRAGMENT not in options
    ]
    return (
        bool(shown) and page.parent != ROOT and page.stem != "several_gpus"
    )  # it has a test of its own


def run(code, folder, *launcher):
    """What the copied code prints, run in an empty folder."""
    (folder / "copied.py").write_text(code)
    variables = os.environ | {"MPLBACKEND": "agg"}
    variables.pop("PYTHONPATH", None)
    return output_of(*launcher, "copied.py", cwd=folder, env=variables)


@pytest.mark.parametrize("page", [page for page in PAGES if only_shown(page)])
def test_what_a_reader_copies_runs(page, tmp_path):
    run(copied(page), tmp_path)


@pytest.mark.slow
def test_the_scripts_for_several_gpus_run_in_two_processes(tmp_path):
    page = (DOCS / "guides" / "several_gpus.md").read_text()
    accelerated, by_hand = ("\n".join(lines) for _, lines in fences(page))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    printed = run(accelerated, tmp_path, *launcher)
    assert printed.count("step 120: loss 0.0") == 1  # only by the first process, of the mean
    losses = re.findall(r"rank \d: loss (\d\.\d\d)", run(by_hand, tmp_path, *launcher))
    assert len(losses) == 2
    assert max(map(float, losses)) < 1.5  # from the logarithm of 9


@pytest.mark.parametrize("page", [page for page in PAGES if copied(page)])
def test_what_a_reader_copies_defines_its_names(page):
    check = "-m ruff check --isolated --no-cache --select=E9,F821,F401 --exit-zero --quiet -"
    assert output_of(*check.split(), input=copied(page)) == ""


def test_fragments_are_few():
    names = [
        page.name
        for page in PAGES
        for options, _ in fences(page.read_text())
        if FRAGMENT in options
    ]
    assert Counter(names) == FRAGMENTS


@EACH_PAGE
def test_nothing_is_trained_in_hiding(page):
    hidden = [
        line
        for options, lines in fences(page.read_text())
        for line in lines
        if is_hidden(options) or HIDE in line
    ]
    assert not re.search(r"backward\(|optim", "\n".join(hidden))


@EACH_PAGE
def test_links_lead_somewhere(page):
    prose = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\((?!http)([^)#]+)", prose):
        assert (page.parent / link).exists(), link
    for name in re.findall(r"`((?:benchmarks|deqseq|examples|tests)/[\w./]+)`", prose):
        assert (ROOT / name).exists() or page.name == "CHANGELOG.md", name


def test_the_tests_that_a_page_names_exist():
    named = {name for page in PAGES for name in re.findall(r"`(test_\w+)`", page.read_text())}
    files = {file.stem for file in (ROOT / "tests").rglob("*.py")}
    assert named
    assert named - files == set()


def pages_of(node):
    """The pages that a part of the navigation names."""
    if isinstance(node, str):
        yield node
    else:
        for part in node.values() if isinstance(node, dict) else node:
            yield from pages_of(part)


NAVIGATION = {*pages_of(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])}
SCRIPTS = [
    path.stem for path in sorted((ROOT / "examples").glob("*.py")) if "__main__" in path.read_text()
]


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_has_a_page_and_an_entry(name):
    assert any(f"python examples/{name}.py" in (DOCS / page).read_text() for page in NAVIGATION)
    assert re.search(
        rf"examples/{name}\.py|\({name}\.md\)", (DOCS / "examples" / "index.md").read_text()
    )


def test_no_page_is_about_an_example_that_is_gone():
    pages = {Path(page).stem for page in NAVIGATION if page.startswith("examples/")}
    assert pages - {"index"} <= set(SCRIPTS)


def test_pages_are_in_the_navigation_under_their_own_titles():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    assert re.findall(r"(\S.*): \S+\.md$", navigation, flags=re.MULTILINE) == ["- Home"]


@pytest.mark.parametrize("image", sorted((DOCS / "images").iterdir()))
def test_an_image_is_used_by_a_page(image):
    shown = re.compile(rf"!\[[^\]]+\]\((\S*images/{image.name})(?:#only-\w+)?\)")
    uses = [(page, link) for page in DOCS.rglob("*.md") for link in shown.findall(page.read_text())]
    assert uses
    assert all((page.parent / link).resolve() == image for page, link in uses), uses
