"""The README's code runs and prints what is below it; its commands, figures and numbers
are true.
"""

import json
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
IMAGES = ROOT / "docs" / "images"
MODELS = {
    "implicit, 1 block, all tokens together": ("implicit", "simultaneous"),
    "implicit, 1 block, token by token": ("implicit", "sequential"),
    "explicit, 4 blocks": ("explicit 4 blocks", "single pass"),
}


def fences(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    return [text for kind, text in found if kind == language]


@pytest.mark.usefixtures("unchecked")
def test_the_code_runs_in_order(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    assert fences("text")[0].endswith("8 of 8 rows converged\n")
    for code, below in re.findall(
        r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", README, re.MULTILINE | re.DOTALL
    ):
        exec(compile(code, "README.md", "exec"), names)
        assert capsys.readouterr().out == below, code
    assert all(p.grad is not None for p in names["fresh"].parameters())
    assert bool(names["made"].converged.all())
    assert bool(names["solution"].converged.all())
    assert names["W"].grad.abs().min() > 0
    ids = names["batch"].inputs
    assert all(p.grad is not None for p in names["looped"].model.parameters())
    one = names["dq"].Stop.exactly(1)
    theirs = names["pretrained"].eval()(ids).logits
    ours = names["looped"].eval()(ids, stop=one).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


def test_there_are_two_set_up_commands():
    commands = [line for block in fences("") for line in block.splitlines()]
    assert commands == [
        'pip install -c constraints.txt -e ".[examples]" && python examples/state_tracking.py',
        'pip install -c constraints.txt -e ".[test]" && pytest',
    ]


def test_the_main_result_is_that_of_the_committed_file():
    rows = json.loads((ROOT / "benchmarks" / "results" / "state_tracking.json").read_text())
    scores = {
        (row["model"], row["sweep"], row["length"]): row["accuracy"]
        for row in rows
        if row["group"] == "Z2"
    }
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in README.splitlines()]
    (lengths,) = (line[1:] for line in lines if line[:1] == ["tokens"])
    shown = {line[0]: line[1:] for line in lines if line and line[0] in MODELS}
    assert shown.keys() == MODELS.keys()
    for name, cells in shown.items():
        wanted = [f"{scores[*MODELS[name], int(length)]:.1%}" for length in lengths]
        assert cells == [cell.replace("100.0%", "100%") for cell in wanted]


@pytest.mark.parametrize("name", ["idea", "headline"])
def test_a_drawing_differs_between_light_and_dark_pages_only_in_its_colours(name):
    light, dark = ((IMAGES / f"{name}{kind}.svg").read_text() for kind in ("", "-dark"))
    assert light != dark
    assert re.sub("#[0-9a-f]{6}", "", light) == re.sub("#[0-9a-f]{6}", "", dark)
    assert f'srcset="docs/images/{name}-dark.svg"' in README
    assert f'src="docs/images/{name}.svg"' in README


def test_its_figure_is_drawn_from_the_committed_rows(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs" / "_tools")
    import headline

    for name, colours in headline.SCHEMES.items():
        assert (IMAGES / name).read_text() == headline.headline(*colours)


def test_it_is_finished_short_and_narrow():
    assert not re.findall(r"^[A-Z]{4,}$", README, flags=re.MULTILINE)
    assert len(README.splitlines()) < 205
    assert [
        line for block in fences("python") for line in block.splitlines() if len(line) > 92
    ] == []
