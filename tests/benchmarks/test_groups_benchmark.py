"""The benchmark of all groups: a run is a process of the script, what has ended is kept, bad options are refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import groups


def row(model: str, sweep: str, length: int, accuracy: float, converged: float | None = None) -> dict:
    counts = {"steps": 7, "trained_to": 32, "cpu_minutes": 1.5, "token_updates": converged and 2.0}
    return {"model": model, "sweep": sweep, "length": length, "accuracy": accuracy, "converged": converged} | counts


ROWS = [row("implicit", sweep, length, 1.0, 1.0) for sweep in ("simultaneous", "sliding") for length in (64, 128)]
ROWS += [row("explicit 4 blocks", "single pass", length, 0.25) for length in (64, 128)]


def test_a_record_has_the_numbers_of_all_lengths_by_sweep():
    found = groups.summary(ROWS)
    assert found["accuracy"] == {"simultaneous": [1.0, 1.0], "sliding": [1.0, 1.0]}
    assert found["explicit"] == {"explicit 4 blocks": [0.25, 0.25]}
    assert (found["lengths"], found["steps"], found["cpu_minutes"]) == ([64, 128], 7, 1.5)


@pytest.mark.parametrize("name", ["accuracy", "converged", "cpu_minutes"])
def test_the_goals_are_of_128_tokens_and_every_sweep(name):
    record = {"group": "S3", "seed": 0} | groups.summary(ROWS)
    assert groups.line(record).endswith("holds")
    worse = 46.0 if name == "cpu_minutes" else record[name] | {"sliding": [1.0, 0.98]}
    assert groups.line(record | {name: worse}).endswith("MISSED")


def test_parts_have_the_groups_and_seeds_that_they_say():
    assert groups.Run("S5", 2).part == "tuning"
    assert groups.Run("S5", 3).part == groups.Run("D7", 0).part == "held-out"


def test_a_run_that_has_ended_is_not_repeated(tmp_path, monkeypatch, capsys):
    small = ("--d-model", "16", "--d-state", "4", "--headdim", "8", "--batch", "4", "--steps", "4", "--lengths", "2")
    monkeypatch.setattr(groups, "QUICK", (*small, "--free-lengths", "3", "--eval-lengths", "4", "8"))
    monkeypatch.setattr(groups, "JUDGED", 8)
    target = tmp_path / "groups.json"
    command = ["groups.py", "--quick", "--only", "Z2:0", "--folder", str(tmp_path), "--json", str(target)]
    monkeypatch.setattr(sys, "argv", command)
    groups.main()
    (record,) = json.loads(target.read_text())
    assert (record["group"], record["seed"], record["part"], record["steps"]) == ("Z2", 0, "tuning", 4)
    assert "Z2, seed 0: simultaneous" in capsys.readouterr().out
    monkeypatch.setattr(subprocess, "run", None)  # would fail
    groups.main()
    assert json.loads(target.read_text())[0]["accuracy"] == record["accuracy"]
    monkeypatch.setattr(groups, "QUICK", (*groups.QUICK, "--lr", "0.1"))
    with pytest.raises(SystemExit, match=r"Z2_0 holds a run with other options \(lr: 0.003 -> 0.1\)"):
        groups.main()


def test_the_rows_of_other_runs_stay_in_the_file(tmp_path):
    rows = [{"part": "tuning", "group": group, "seed": seed, "steps": 1} for seed in (0, 1) for group in ("A5", "S5")]
    rows.append({"part": "changes", "group": "S5", "seed": 0, "change": "sooner", "steps": 1})
    target, again = tmp_path / "groups.json", rows[1] | {"steps": 2}
    target.write_text(json.dumps(rows))
    assert groups.merged(groups.written(target), again) == [rows[-1], rows[0], again, *rows[2:4]]
    for text in ("{", "7", '[{"case": "of another script"}]'):
        target.write_text(text)
        with pytest.raises(SystemExit, match=r"--json must be a new file or one of this script, got .*groups\.json"):
            groups.written(target)


def test_a_run_that_fails_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(groups, "QUICK", ("--clip", "-1"))
    with pytest.raises(RuntimeError, match=r"(?s)Z2, seed 0: .*--clip must be a number in \(0, inf\), got -1"):
        groups.Run("Z2", 0).record(tmp_path, quick=True)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["--only", "S9:0"], "must be GROUP:SEED"),
        (["--only", "S5"], "must be GROUP:SEED"),
        (["--only", "S5:6"], "seeds 0 to 5"),
        (["--only", "Z7:3"], "0 to 2"),
        (["--jobs", "0"], "must be a positive integer, got '0'"),
        (["--part", "all"], "tuning"),
    ],
    ids=str,
)
def test_bad_options_are_refused(flags, wanted, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["groups.py", *flags])
    with pytest.raises(SystemExit):
        groups.main()
    assert wanted in capsys.readouterr().err
