"""The README's code runs, and its commands are the two that it promises."""

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def fences(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    return [text for kind, text in found if kind == language]


@pytest.mark.usefixtures("unchecked")
def test_the_code_runs_in_order(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    first, *others = fences("python")
    exec(compile(first, "README.md", "exec"), names)
    assert capsys.readouterr().out == fences("text")[0], "what stands below the first snippet"
    for block in others:
        exec(compile(block, "README.md", "exec"), names)
    assert all(p.grad is not None for p in names["fresh"].parameters())
    assert names["made"].shape == (8, 20) and bool(names["generated"].converged.all())
    assert bool(names["solution"].converged.all())
    assert names["W"].grad.abs().min() > 0
    assert "Phantom(steps=4, damping=0.8" in capsys.readouterr().out


def test_there_are_two_set_up_commands():
    commands = [line for block in fences("") for line in block.splitlines()]
    assert commands == [
        'pip install -c constraints.txt -e ".[examples]" && python examples/state_tracking.py',
        'pip install -c constraints.txt -e ".[test]" && pytest',
    ]


def test_it_is_finished_and_has_its_figure():
    assert not re.findall(r"^[A-Z]{4,}$", README, flags=re.MULTILINE)
    assert "](docs/images/state_tracking.png)" in README
