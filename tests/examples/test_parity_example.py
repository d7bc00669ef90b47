"""The example to copy is short, whole, and does what it says."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "examples" / "parity.py"


def test_it_is_short_and_stands_alone():
    text = SCRIPT.read_text()
    assert len(text.splitlines()) < 100
    assert "common" not in text


def test_a_tiny_run(tmp_path):
    command = [sys.executable, str(SCRIPT), "--steps", "3", "--lengths", "4", "8", "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["length"] for row in rows] == [4, 8]
    assert all(row.keys() == {"length", "accuracy", "iterations", "converged"} for row in rows)
    assert (tmp_path / "out" / "parity.png").stat().st_size > 10_000
    assert "train: 100%" in done.stderr
    every = all(row["converged"] == 1 for row in rows)
    again = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "holds another run's results.json: name a new one" in again.stderr
    assert "Traceback" not in again.stderr
    assert json.loads((tmp_path / "out" / "results.json").read_text()) == rows
    assert done.stdout.splitlines()[-1].startswith("every row converged" if every else "not every row converged")


def test_numbers_out_of_range_are_named(tmp_path):
    for options in (["--steps", "0"], ["--seed", "-1"], ["--lengths", "4", "0"]):
        command = [sys.executable, str(SCRIPT), *options, "--output", str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 1
        assert done.stderr.startswith(f"{options[0]} must be in ")
    assert not (tmp_path / "out").exists()
