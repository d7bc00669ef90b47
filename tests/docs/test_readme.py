"""The README's code runs and prints what is below it; its commands, figures and numbers
are true.
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
IMAGES = ROOT / "docs" / "images"


def fences(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    return [text for kind, text in found if kind == language]


@pytest.mark.usefixtures("unchecked")
def test_the_code_runs_in_order(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    assert "8 of 8 rows converged" in fences("text")[0]
    for code, below in re.findall(
        r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", README, re.MULTILINE | re.DOTALL
    ):
        exec(compile(code, "README.md", "exec"), names)
        assert capsys.readouterr().out == below, code
    assert all(p.grad is not None for p in names["fresh"].parameters())
    assert bool(names["solution"].converged.all())
    assert names["W"].grad.abs().min() > 0
    ids = names["batch"].inputs
    assert all(p.grad is not None for p in names["looped"].model.parameters())
    one = names["dq"].Stop.exactly(1)
    theirs = names["pretrained"].eval()(ids).logits
    ours = names["looped"].eval()(ids, stop=one).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_there_are_two_set_up_commands():
    clone, *commands = [line for block in fences("") for line in block.splitlines()]
    assert clone == "git clone ADDRESS deqseq && cd deqseq"
    assert commands == [
        'pip install -c constraints.txt -e ".[examples]" && '
        "python examples/state_tracking.py --steps 800",
        'pip install -c constraints.txt -e ".[test]" && pytest',
    ]


def rows(name, **wanted):
    found = json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())
    return [row for row in found if wanted.items() <= row.items()]


def at(record, length):
    return record["lengths"].index(length)


def test_the_results_are_those_of_the_committed_rows():
    text = " ".join(README.split())
    a5 = rows("groups", part="all-elements", group="A5")
    implicit = [min(of[at(row, 128)] for of in row["accuracy"].values()) for row in a5]
    explicit = [row["explicit"]["explicit 4 blocks"][at(row, 128)] for row in a5]
    assert len({row["seed"] for row in a5}) == len(a5) == 3
    assert f"{math.floor(1000 * min(implicit)) / 10}% or more of the sequences" in text
    assert f"four that run once in {math.ceil(100 * max(explicit))}% or less" in text
    (lstm,) = rows("rnns", part="held out", task="A5, all elements", model="LSTM", length=128)
    assert lstm["accuracy"] >= min(implicit)
    assert min(row["cpu_minutes"] for row in a5) < lstm["cpu_minutes"]
    assert lstm["cpu_minutes"] < max(row["cpu_minutes"] for row in a5)
    right_too = "[right too](benchmarks/results/rnns.json)"
    assert f"An LSTM of its size is {right_too}, after as much time; with 240" in text
    worst = {
        (model, length): min(row["last_ten"] for row in found)
        for model in ("implicit", "LSTM")
        for length in (256, 1024)
        if (found := rows("a5xm", part="held out", model=model, length=length))
    }
    ahead = f"by {worst['implicit', 256]:.0%} to {worst['LSTM', 256]:.0%} of the last ten"
    assert f"with 240 elements the block leads, {ahead} answers of 256 (one seed each" in text
    assert f"240 elements at 1,024 tokens ({worst['implicit', 1024]:.0%}, one seed)" in text
    written = rows("reasoning", task="programs", model="implicit", length=48)
    assert [row["trained_to"] == 12 for row in written].count(False) == 2
    best = max(row["accuracy"] for row in written)
    assert len(written) == 4
    assert f"with two of four seeds, and of 48 ({best:.0%} at best)" in text
    sudokus = rows("puzzles", part="held out", model="deq", budget=64)
    solved, minutes = min(row["exact"] for row in sudokus), {row["minutes"] for row in sudokus}
    assert f"solves {solved:.1%} or more of 1,000 unseen 6 × 6 puzzles" in text
    assert len({row["seed"] for row in sudokus}) == 3
    once = rows("puzzles", part="held out", model="explicit", layers=8)
    assert minutes == {row["minutes"] for row in once}
    low, high = (end(row["exact"] for row in once) for end in (min, max))
    assert f"trained for as long, solve {low:.0%} to {high:.0%} (three seeds" in text
    answered = {
        model: [row["accuracy"]["16"] for row in rows("retrofit", model=model, budget=budget)]
        for model, budget in (("looped", 16), ("unlooped", None))
    }
    assert [len(scores) for scores in answered.values()] == [3, 3]
    looped, once = min(answered["looped"]), max(answered["unlooped"])
    assert f"{math.floor(100 * looped)}% or more of its last answers are right after 16" in text
    assert f"not looped, {math.ceil(100 * once)}% or less (three seeds" in text
    lstm = rows("rnns", part="held out", task="S5, two generators", model="LSTM", length=128)
    assert min(row["accuracy"] for row in lstm) > 0.96
    s5 = [row for row in rows("groups", group="S5") if row["part"] in ("tuning", "held-out")]
    assert min(of[at(row, 128)] for row in s5 for of in row["accuracy"].values()) > 0.99


def test_the_tables_of_the_repository_are_those_of_the_page(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "_tools")
    import tables

    assert tables.TARGET.read_text() == tables.page(), "run python docs/_tools/tables.py"


def uncoloured(drawing):
    return re.sub("#[0-9a-f]{6}", "", drawing)


@pytest.mark.parametrize("name", ["idea", "convergence"])
def test_a_drawing_differs_between_light_and_dark_pages_only_in_its_colours(name):
    light, dark = ((IMAGES / f"{name}{kind}.svg").read_text() for kind in ("", "-dark"))
    assert light != dark
    assert uncoloured(light) == uncoloured(dark)


def test_its_picture_is_drawn_from_the_shipped_models(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "_tools")
    import picture

    for name in picture.SCHEMES:
        assert f"docs/images/{name}" in README
    committed = (IMAGES / "convergence.svg").read_text()
    words, answer = picture.story()
    digits, found = picture.sudoku()
    assert f"In cup {answer}" in committed
    assert len(words) == 17
    shown = re.findall(r'class="(?:digit|given)"[^>]*>(\d)<', committed)
    assert [*map(int, shown)] == digits
    assert max(found) == 10
    assert f'alt="{picture.ALT}"' in README


def test_it_is_finished_short_and_narrow():
    assert not re.findall(r"^[A-Z]{4,}$", README, flags=re.MULTILINE)
    assert len(README.splitlines()) < 205
    assert len(README) <= 9000
    assert [
        line for block in fences("python") for line in block.splitlines() if len(line) > 92
    ] == []
