"""Examples have a page and a test at toy size, benchmarks a section, images a place; results are drawn as they are."""

import ast
import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import matplotlib.pyplot as plt
import pytest
import yaml

ROOT = Path(__file__).parents[2]
FASTER = {
    "case": "Naive, map 2x3",
    "metric": "ms",
    "ours": 1.5,
    "peer": "by hand",
    "theirs": 2.0,
    "ratio": 0.75,
    "runs": 5,
    "spread": [0.7, 0.8],
    "goal": "ratio <= 0.9",
    "holds": True,
    "machine": "an abacus",
}
SLOWER = FASTER | {"case": "Broyden, map 2x3", "ratio": 1.25, "spread": [1.2, 1.3], "holds": False}
COUNT = FASTER | {"metric": "rounds", "ours": 12, "peer": "", "theirs": None, "ratio": None, "runs": 1}
COUNT |= {"spread": None, "goal": None, "holds": None}


@pytest.fixture(scope="module")
def results() -> Iterator[ModuleType]:
    """``docs/_tools/results.py``, imported as pages import it; how figures look elsewhere is left as it was."""
    looks, tools = dict(plt.rcParams), str(ROOT / "docs" / "_tools")
    sys.path.insert(0, tools)
    yield importlib.import_module("results")
    sys.path.remove(tools)
    plt.close("all")
    plt.rcParams.update(looks)


# pages


def nav_of(root: Path) -> set[str]:
    """The pages that the site's navigation names."""
    return set(leaves(yaml.safe_load((root / "mkdocs.yml").read_text())["nav"]))


def leaves(node: object) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    else:
        assert isinstance(node, list | dict)
        for part in node if isinstance(node, list) else node.values():
            yield from leaves(part)


def scripts_of(folder: Path) -> list[str]:
    """Scripts by name; what others only import is none."""
    return [path.stem for path in sorted(folder.glob("*.py")) if "__main__" in path.read_text()]


def lacks(root: Path, name: str) -> list[str]:
    """What an example still needs."""
    docs, script = root / "docs", f"examples/{name}.py"
    tests = [path.read_text() for path in (root / "tests").rglob(f"test_{name}*.py")]
    needs = {
        "its command on a page": any(f"python {script}" in (docs / page).read_text() for page in nav_of(root)),
        "an entry": bool(re.search(rf"{script}|\({name}\.md\)", (docs / "examples" / "index.md").read_text())),
        "a test that runs it": any(re.search(r"subprocess\.run\(|\.main\(", text) for text in tests),
    }
    return [need for need, met in needs.items() if not met]


@pytest.mark.parametrize("name", scripts_of(ROOT / "examples"))
def test_an_example_has_a_page_an_entry_and_a_test_that_runs_it(name):
    assert lacks(ROOT, name) == []


def test_a_new_example_without_anything_is_noticed(tmp_path):
    for folder in ("examples", "docs/examples", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "examples" / "new.py").write_text('if __name__ == "__main__":\n    print(1)\n')
    (tmp_path / "examples" / "part.py").write_text("x = 1\n")
    (tmp_path / "mkdocs.yml").write_text("nav:\n  - Examples: examples/index.md\n")
    (tmp_path / "docs" / "examples" / "index.md").write_text("# Examples\n")
    test = tmp_path / "tests" / "test_new_example.py"
    test.write_text("def test_it_exists():\n    assert SCRIPT.exists()\n")
    assert scripts_of(tmp_path / "examples") == ["new"]
    assert lacks(tmp_path, "new") == ["its command on a page", "an entry", "a test that runs it"]
    test.write_text("def test_it_runs():\n    subprocess.run([SCRIPT], check=True)\n")
    assert lacks(tmp_path, "new") == ["its command on a page", "an entry"]
    (tmp_path / "docs" / "examples" / "index.md").write_text("`python examples/new.py`\n")
    assert lacks(tmp_path, "new") == []


def test_no_page_is_about_an_example_that_is_gone():
    pages = {Path(page).stem for page in nav_of(ROOT) if page.startswith("examples/")}
    assert pages - {"index"} <= set(scripts_of(ROOT / "examples"))


def test_a_benchmark_without_a_section_is_linked():
    page = (ROOT / "docs" / "guides" / "benchmarks.md").read_text()
    left_out = ast.literal_eval(re.search(r"if name not in (\(.*?\)):", page)[1])
    assert set(left_out) < set(scripts_of(ROOT / "benchmarks"))
    assert all(re.search(rf"`{name}\.py`\s+(are\s+)?in\s+\[", page) for name in left_out)


@pytest.mark.parametrize("image", sorted((ROOT / "docs" / "images").iterdir()), ids=lambda image: image.name)
def test_an_image_is_used_by_a_page(image):
    shown = re.compile(rf"!\[[^\]]+\]\((\S*images/{re.escape(image.name)})(?:#only-\w+)?\)")
    uses = [(page, link) for page in (ROOT / "docs").rglob("*.md") for link in shown.findall(page.read_text())]
    assert uses
    assert all((page.parent / link).resolve() == image for page, link in uses), uses


# results


def test_results_of_benchmarks_are_told_from_others(results, tmp_path):
    (tmp_path / "faster.json").write_text(json.dumps([FASTER, COUNT]))
    (tmp_path / "accuracies.json").write_text(json.dumps([{"model": "implicit", "accuracy": 1.0}]))
    (tmp_path / "empty.json").write_text("[]")
    (tmp_path / "settings.json").write_text('{"case": 1}')
    assert results.benchmarks(tmp_path) == {"faster": [FASTER, COUNT]}
    assert {"decode", "solver_overhead", "ssd", "sweeps", "training_sweeps"} <= results.benchmarks().keys()


def test_a_new_benchmark_has_a_section_without_new_code(results, tmp_path):
    (tmp_path / "weather.py").write_text('"""Rain, ``dry`` or wet.\n\nIn turns.\n"""\nif "__main__": ...\n')
    (tmp_path / "clouds.py").write_text('"""What the weather needs."""\n')
    assert results.scripts(tmp_path) == {"weather": "Rain, `dry` or wet.\n\nIn turns."}
    text = results.section("weather", {"weather": [FASTER, SLOWER, COUNT]}, tmp_path)
    assert text.startswith("## weather\n\nRain, `dry` or wet.\n")
    assert "python benchmarks/weather.py \\\n    --json benchmarks/results/weather.json" in text
    assert "1 of 2 goals hold. Measured on: an abacus." in text
    assert "| Broyden, map 2x3 | ms | 1.5 | by hand | 2 | 1.25 [1.20,\xa01.30] | 5 | ratio ≤ 0.9 **missed** |" in text
    assert "| Naive, map 2x3 | rounds | 12 |  |  |  | 1 |  |" in text
    assert text.count("<svg") == 1 and "Naive, map 2x3; by hand" in text
    assert '??? note "All 3 rows of benchmarks/results/weather.json"\n\n    | case' in text


def test_a_benchmark_that_was_not_run_says_so(results):
    assert "No full run is committed yet." in results.about("weather", {})
    assert results.section("weather", {}).endswith("No full run is committed yet.\n")


def test_results_that_are_older_than_the_code_are_not_shown(results, monkeypatch):
    monkeypatch.setattr(results, "STALE", {"sweeps": "the present scan"})
    assert results.benchmarks().keys() - results.current().keys() == {"sweeps"}
    assert "the committed run is older than the present scan" in results.section("sweeps", results.current())
    with_rows = {name for name in results.benchmarks() if "All" in results.section(name, results.current())}
    assert with_rows == results.current().keys()


def test_stale_results_exist(results):
    assert results.STALE.keys() <= results.benchmarks().keys()


def test_counts_alone_make_a_section_without_a_figure(results):
    text = results.section("weather", {"weather": [COUNT]})
    assert "There are no goals." in text and "<svg" not in text and "missed" not in text


def test_goals_say_how_many_cases_meet_them(results):
    assert "| weather | ms | by hand | ratio ≤ 0.9 | **1 of 2** | 0.75 to 1.25 |" in results.goals(
        {"weather": [FASTER, SLOWER]}
    )
    assert "| 1 of 1 | 0.75 |" in results.goals({"weather": [FASTER, COUNT]})


def test_missed_goals_are_all_listed(results):
    committed = results.benchmarks()
    text = results.goals(committed)
    counts = re.findall(r"\| \*\*(\d+) of (\d+)\*\* \|", text)
    missed = [row for rows in committed.values() for row in rows if row["holds"] is False]
    assert sum(int(count) - int(met) for met, count in counts) == len(missed) > 0


def test_every_missed_goal_has_a_reason(results):
    found = {"weather": [FASTER, SLOWER], "climate": [FASTER, COUNT]}
    text = results.reasons(found, {("weather", "ms", "by hand"): "It rained."})
    assert text.splitlines()[2:] == ["| weather | ms, by hand | It rained. |"]
    with pytest.raises(KeyError, match="by hand"):
        results.reasons(found, {})
    assert results.value([FASTER, SLOWER], SLOWER["case"], "ms", "by") == SLOWER["ours"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((None, ""), (0.0, "0"), (1.0, "1"), (0.12345, "0.123"), (726.3, "726"), (6848, "6,848"), (4e-15, "4.0e-15")),
        *((float("nan"), "nan"), (float("inf"), "inf"), (-0.5, "-0.5")),
    ],
)
def test_numbers_are_short(results, value, text):
    assert results.number(value) == text


def test_a_cell_shows_ratio_spread_and_verdict(results):
    assert results.compared([SLOWER]) == "1.25 [1.20,\xa01.30]<br>**≤\xa00.9 missed**"
    assert results.compared([FASTER]) == "0.75 [0.70,\xa00.80]<br>≤\xa00.9 holds"
    once = FASTER | {"ratio": 0.0247, "runs": 1, "goal": None, "holds": None}
    assert results.compared([once]) == "0.025"
    assert results.both([COUNT | {"theirs": 24}]) == "12 / 24"
    calls = "Sliding(window=8) | Chunked(size=4), Sequential()"
    assert results.displayed(calls) == r"Sliding(8) \| Chunked(4), Sequential"


def test_a_pivot_leaves_gaps_where_nothing_was_measured(results):
    rows = [{"a": 1, "b": "x", "v": 5}, {"a": 2, "b": "y", "v": 6}, {"a": 1, "b": "x", "v": 7}]
    text = results.pivot(rows, lambda r: [r["a"]], lambda r: r["b"], lambda r: "/".join(str(q["v"]) for q in r), ["a"])
    assert text.splitlines() == ["| a | x | y |", "| --- | --- | --- |", "| 1 | 5/7 |  |", "| 2 |  | 6 |"]


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.97, 1.34, [1.0, 1.1, 1.2, 1.3]),
        (0.2, 1.3, [0.2, 0.3, 0.5, 0.7, 1.0, 1.2]),
        (4, 30, [5, 7, 10, 12, 15, 20, 30]),
    ],
)
def test_ticks_are_round_numbers_on_the_axis(results, low, high, ticks):
    assert results.ticks_of(low, high) == ticks


def test_figures_show_every_ratio_and_every_curve(results):
    unjudged = FASTER | {"goal": None, "holds": None, "ratio": 3.0, "spread": None}
    axis = results.ratios([FASTER, SLOWER, unjudged]).axes[0]
    points = sorted(float(x) for box in axis.containers for x in box.lines[0].get_xdata())
    assert points == [0.75, 1.25, 3.0]
    assert results.ratios([unjudged]).legends == []
    timed = {"A5, 128, Sliding(window=8)": 0.4, "A5, 64, Sliding(window=8)": 0.2, "A5, 64, Sequential()": 0.5}
    rows = [COUNT | {"case": case, "ours": seconds} for case, seconds in timed.items()]
    curves = results.curves(rows, r"(?P<panel>\w+), (?P<x>\d+), (?P<label>.+)")
    assert curves == {"A5": {"Sliding(8)": [(64, 0.2), (128, 0.4)], "Sequential": [(64, 0.5)]}}
    assert results.curves(rows, r"(?P<panel>\w+), (?P<x>\d+), (?P<label>.+)", ["Chunked"]) == {}
    figure = results.lines(curves, "length", "seconds", yscale="log")
    assert [line.get_label() for line in figure.axes[0].lines] == ["Sliding(8)", "Sequential"]
    assert figure.axes[0].get_yscale() == "log"


@pytest.mark.usefixtures("results")
def test_drawn_and_fixed_depth_are_compared_over_seeds():
    page = importlib.import_module("recurrent_depth")
    runs = {"8 iterations": "bits per byte", "64 iterations": "bits per byte", "solved to 0.001": "bits per byte"}
    cases = [*runs.items(), ("solved to 0.001", "converged"), ("solved to 0.001", "iterations")]
    rows = [
        COUNT | {"case": f"{kind}, seed {seed}, {run}", "metric": metric, "ours": 1 + seed / 4, "theirs": 0.5}
        for kind in page.KINDS
        for seed in (0, 1)
        for run, metric in cases
    ]
    found = page.values(rows)
    assert page.budgets(found) == [8, 64]
    assert "| 8 | 1.125 ± 0.125 | 0.500 ± 0.000 | 1.125 ± 0.125 | 0.500 ± 0.000 |" in page.scores(found)
    assert "| rows that converged | 112.5\xa0% | 50\xa0% |" in page.scores(found)
    found["retrofitted", "fixed", "64 iterations", "bits per byte"]["1"] = 0.7
    assert page.change(found, "retrofitted", "fixed") == pytest.approx({"0": 0, "1": 0.2})
    assert page.change(found, "retrofitted", "drawn") == {"0": 0, "1": 0}
    panels = page.figure(found).axes
    assert [line.get_label() for line in panels[0].lines if line.get_marker() != "None"] == [
        "drawn depth",
        "fixed depth",
    ]
    assert list(panels[1].lines[-1].get_ydata()) == pytest.approx([0.5, 0.6])
    with pytest.raises(ValueError, match="a kind, a seed and a run"):
        page.values([COUNT])
