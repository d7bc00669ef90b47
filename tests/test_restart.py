"""Runs that are killed, at any moment, go on from their last checkpoint as if they had not been."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "scripts" / "killed_runs.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    command = [sys.executable, "-W", "error", str(SCRIPT), str(folder), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


def report(path: Path) -> list[list[str]]:
    return [line.split() for line in path.read_text().splitlines()]


def losses(path: Path) -> set[tuple[str, ...]]:
    """Step, phase and loss of all that was computed; a step that was repeated is there twice if the losses differ."""
    return {tuple(words[1:]) for words in report(path) if words[0] == "loss"}


def test_the_uninterrupted_run(folder):
    whole = report(folder / "whole.txt")
    assert whole[0] == ["from", "0"]
    assert whole[-1] == ["end"]
    assert [(words[1], words[2]) for words in whole if words[0] == "loss"] == [
        (str(step), "bounded" if step <= 12 else "free") for step in range(1, 25)
    ]


@pytest.mark.parametrize("kind", ["anywhere", "writing"])
def test_a_killed_run_has_the_losses_of_the_uninterrupted_one(folder, kind):
    assert losses(folder / f"{kind}.txt") == losses(folder / "whole.txt")
    assert report(folder / f"{kind}.txt")[-1] == ["end"]


@pytest.mark.parametrize(("kind", "least"), [("anywhere", 3), ("writing", 20)])
def test_it_was_killed_often_and_lost_no_checkpoint(folder, kind, least):
    words, saved = report(folder / f"{kind}.txt"), 0
    starts = [int(number) for word, *rest in words if word == "from" for number in rest[:1]]
    assert len(starts) > least
    assert len(set(starts)) > 2
    for word, *rest in words:
        if word == "saved":
            saved = int(rest[0])
        if word == "from":
            assert int(rest[0]) in (saved, saved + 3), (
                "between them it was killed before it could say that it had saved"
            )
            saved = int(rest[0])


def test_no_kill_leaves_files_behind(folder):
    for kind in ("whole", "anywhere", "writing"):
        names = sorted(path.name for path in (folder / kind).iterdir())
        assert names == ["checkpoint-00000021", "checkpoint-00000024"]


def test_a_checkpoint_that_replaces_another_is_the_one_or_the_other_at_every_moment(folder):
    found = [words[0] for words in report(folder / "again.txt")]
    assert found == sorted(found)
    assert set(found) == {"1.0", "2.0"}
    assert len(found) > 12
    assert [path.name for path in (folder / "again").iterdir()] == ["checkpoint-00000001"]
