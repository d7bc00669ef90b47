"""The example on formal languages runs as it is, goes on after an interruption, and refuses bad options."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from formal_languages import most_frequent, read_options
from safetensors.torch import load_file

from deqseq.tasks import formal

SCRIPT = Path(__file__).parents[2] / "examples" / "formal_languages.py"
TINY = [
    "--d-model",
    "16",
    "--d-state",
    "4",
    "--headdim",
    "8",
    "--batch",
    "8",
    "--lengths",
    "3",
    "--free-lengths",
    "6",
    "--steps",
    "20",
]
TINY += ["--eval-lengths", "6", "9", "--strings", "16", "--baselines", "1", "--checkpoint-every", "15"]


def run(output: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *TINY, "--output", str(output), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"COLUMNS": "300"})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run, and what it printed."""
    folder = tmp_path_factory.mktemp("whole")
    done = run(folder, "--task", "binary_addition")
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_it_writes_table_figure_and_numbers(whole):
    folder, printed = whole
    rows = json.loads((folder / "results.json").read_text())
    assert [(row["model"], row["length"]) for row in rows] == [
        (model, length) for model in ("implicit", "explicit 1 block", "most frequent answer") for length in (6, 9)
    ]
    chance = formal.binary_addition().chance
    assert all(-chance / (1 - chance) <= row["accuracy"] <= 1 for row in rows)
    assert all(row["self_iterations"] >= 1 and 0 <= row["converged"] <= 1 for row in rows[:2])
    assert all(row["self_iterations"] is None for row in rows[2:])
    assert all(row["steps"] == 20 and row["trained_to"] in (3, 6) and row["cpu_minutes"] >= 0 for row in rows[:4])
    lines = (folder / "table.md").read_text().splitlines()
    assert lines[0] == "| model | 6 | 9 | mean |"
    assert lines[3].endswith(f"| {(rows[2]['accuracy'] + rows[3]['accuracy']) / 2:.3f} |")
    assert lines[3] in printed
    assert (folder / "formal_languages.png").stat().st_size > 10_000
    curve = [json.loads(line) for line in (folder / "implicit" / "curve.jsonl").read_text().splitlines()]
    assert [line["step"] for line in curve] == [20]
    assert {"phase", "loss", "accuracy", "iterations"} <= curve[0].keys()


def test_a_run_that_lost_its_end_repeats_it(whole, tmp_path):
    first, _ = whole
    again = tmp_path / "again"
    shutil.copytree(first, again)
    (again / ".lock").unlink(missing_ok=True)
    shutil.rmtree(again / "implicit" / "checkpoint-00000020")
    done = run(again, "--task", "binary_addition")
    assert done.returncode == 0, done.stderr
    assert "implicit: going on from step 15" in (again / "log.txt").read_text()
    ours, theirs = (load_file(folder / "implicit/checkpoint-00000020/model.safetensors") for folder in (again, first))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    before, after = (json.loads((folder / "results.json").read_text()) for folder in (first, again))
    assert [row["accuracy"] for row in before] == [row["accuracy"] for row in after]


def test_the_most_frequent_answer_is_a_baseline():
    options = read_options(["--task", "modular_arithmetic_brackets", "--eval-lengths", "12", "40", "--strings", "4096"])
    rows = most_frequent(options)
    assert [row["length"] for row in rows] == [12, 40]
    for row in rows:
        targets = formal.TASKS[row["task"]].fixed(4096, row["length"], seed=1000 + row["length"]).targets[:, -1]
        share = max(targets.tolist().count(answer) for answer in range(5)) / 4096  # 0 is a frequent product
        assert row["accuracy"] == pytest.approx((share - 0.2) / 0.8)
        assert row["accuracy"] > 0.05


@pytest.mark.parametrize(
    ("flags", "name", "remedy"),
    [
        (["--task", "parity"], "--task", "did you mean 'parity_check'"),
        (["--task", "solve_equation", "--free-lengths", "2"], "--free-lengths", "at least 3"),
        (["--task", "binary_addition", "--eval-lengths", "2", "40"], "--eval-lengths", "at least 3"),
        (["--learned", "2"], "--learned", "a number in [0, 1]"),
        (["--eval-lengths", "64", "40"], "--eval-lengths", "must ascend"),
        (["--baselines", "2", "2"], "--baselines", "every value once"),
        (["--d-model", "24"], "headdim", "32"),
    ],
    ids=str,
)
def test_bad_options_name_the_option_and_the_remedy(flags, name, remedy, capsys):
    with pytest.raises(SystemExit) as caught:
        read_options(flags)
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert caught.value.code == 2
    assert name in printed
    assert remedy in printed


def test_quick_is_small_and_options_go_before_it():
    options = read_options(["--quick", "--free-lengths", "12"])
    assert (options.free_lengths, options.steps, options.baselines) == ((12,), 40, (1,))
    assert options.folder == "runs/formal_languages_parity_check_0_quick"
