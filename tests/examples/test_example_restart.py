"""Runs that are killed, at any moment, go on from their last checkpoint as if they had not been."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "killed_runs.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-W", "error", "-W", "ignore::DeprecationWarning", str(SCRIPT), str(folder), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return folder


def report(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()]


def losses(path: Path) -> set[tuple[str, ...]]:
    """Step, phase and loss of all that was computed; a step that was repeated is there twice if the losses differ."""
    return {tuple(words[1:]) for words in report(path) if words[0] == "loss"}


def test_the_uninterrupted_run(folder):
    whole = report(folder / "whole.txt")
    assert (whole[0], whole[-1]) == (["from"], ["end"])
    assert [(words[1], words[2]) for words in whole if words[0] == "loss"] == [
        (str(step), "bounded" if step <= 12 else "free") for step in range(1, 25)
    ]


@pytest.mark.parametrize(("kind", "least"), [("anywhere", 3), ("writing", 20)])
def test_a_killed_run_has_the_losses_of_the_uninterrupted_one(folder, kind, least):
    words = report(folder / f"{kind}.txt")
    assert losses(folder / f"{kind}.txt") == losses(folder / "whole.txt")
    assert words[-1] == ["end"]
    assert words.count(["from"]) > least


@pytest.mark.parametrize("kind", ["anywhere", "writing"])
def test_no_checkpoint_is_lost(folder, kind):
    saved, started = 0, False
    for word, *rest in report(folder / f"{kind}.txt"):
        if word == "loss" and started:  # killed between saving and the next step, it goes on from the new one
            assert int(rest[0]) - 1 in (saved, saved + 3)
        started = word == "from"
        if word == "loss" and int(rest[0]) % 3 == 1:
            saved = int(rest[0]) - 1


@pytest.mark.parametrize("kind", ["anywhere", "writing"])
def test_the_numbers_of_every_update_are_told(folder, kind):
    told = [int(rest[0]) for word, *rest in report(folder / f"{kind}.txt") if word == "update"]
    assert set(told) == set(range(1, 25))


def test_no_kill_leaves_files_behind(folder):
    for kind in ("whole", "anywhere", "writing"):
        names = sorted(path.name for path in (folder / kind).iterdir())
        assert names == ["checkpoint-00000021", "checkpoint-00000024"]
