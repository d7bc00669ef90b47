"""State tracking runs as it is, goes on after an interruption, and refuses to mix runs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import state_tracking
import torch
from safetensors.torch import load_file
from state_tracking_parts import make_solver, make_sweep, make_task, read_options, training_tasks

import deqseq as dq

SCRIPT = Path(__file__).parents[2] / "examples" / "state_tracking.py"
TINY = ["--d-model", "16", "--batch", "8", "--lengths", "2", "3"]
TINY += ["--free-lengths", "3", "5", "--eval-lengths", "4", "8", "--baselines", "1", "--checkpoint-every", "2"]
TINY += ["--learned", "0"]  # a lesson ends after a few batches
MAMBA2 = ["--d-state", "4", "--headdim", "8"]
LLAMA = ["--backbone", "llama", "--heads", "2", "--mlp-width", "16", "--window", "2"]
MONOID = ["--group", "Z2xM", "--eval-identity-probability", "0.9", "--identity-probability", "0", "0.5"]
SHORTER = ["--steps", "900", "--free-lengths", "10", "12"]  # 424 steps instead of 880
SHORTER += ["--d-model", "32", "--headdim", "16", "--batch", "64"]
BOTH_PHASES = ["--steps", "44", "--baselines"]  # through unrolled iterations, then at the fixed point
SWEEPS = ("simultaneous", "sequential", "sliding")


def run(output: Path, *options: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(SCRIPT), *TINY, *MAMBA2, "--output", str(output), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"COLUMNS": "300"})


def here(output: Path, *options: str) -> None:
    """The same in this process."""
    widths = [] if "llama" in options else MAMBA2
    state_tracking.main([*TINY, *widths, "--output", str(output), *options])


def test_state_tracking_writes_table_figure_and_numbers(tmp_path, capsys):
    here(tmp_path, "--steps", "20", "--group", "S3", "--generators", "2")
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [(row["model"], row["sweep"], row["length"]) for row in rows] == solved_and_explicit(4, 8)
    keys = {"model", "backbone", "group", "length", "sweep", "accuracy", "seed", "sequences", "seconds"}
    keys |= {"steps", "trained_to", "cpu_minutes", "solver", "rtol", "identity_probability"}
    counts = {"self_iterations", "converged", "token_updates", "evaluations"}
    assert all(row.keys() == keys | counts for row in rows)
    assert all(0 <= row["accuracy"] <= 1 for row in rows)
    assert all(row["evaluations"] >= row["token_updates"] >= 1 <= row["self_iterations"] for row in rows[:6])
    assert all(row[count] is None for row in rows[6:] for count in counts)
    assert (tmp_path / "state_tracking.png").stat().st_size > 10_000
    assert (tmp_path / "table.md").read_text().count("\n") == 6
    lines = [json.loads(line) for line in (tmp_path / "implicit" / "curve.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [20]
    assert {"phase", "loss", "gradient_norm", "lr", "iterations", "accuracy", "token_updates"} <= lines[0].keys()
    assert "implicit step 20: {" in (tmp_path / "log.txt").read_text()
    assert all(f"| implicit | {sweep} |" in printed for sweep in SWEEPS)

    # a finished run is evaluated in another way without being trained again
    weights = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.safetensors")}
    otherwise = ["--eval-lengths", "6", "--eval-identity-probability", "0.5", "--solver", "anderson"]
    here(tmp_path, "--steps", "20", "--group", "S3", "--generators", "2", *otherwise)
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [(row["model"], row["sweep"], row["length"]) for row in rows] == solved_and_explicit(6)
    assert {(row["solver"], row["identity_probability"]) for row in rows} == {("anderson", 0.5)}
    assert weights
    assert all(path.stat().st_mtime_ns == time for path, time in weights.items())


def solved_and_explicit(*lengths: int) -> list[tuple[str, str, int]]:
    solved = [("implicit", sweep, length) for sweep in SWEEPS for length in lengths]
    return solved + [("explicit 1 block", "single pass", length) for length in lengths]


def test_llama_starts_with_a_token_of_its_own_and_is_solved_by_every_sweep(tmp_path):
    here(tmp_path, "--steps", "12", "--lengths", "1", "--free-lengths", "1", *LLAMA)  # the least there is
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [(row["model"], row["sweep"], row["length"]) for row in rows] == solved_and_explicit(4, 8)
    assert {row["backbone"] for row in rows} == {"llama"}
    for model in ("implicit", "explicit-1-block"):
        assert len(weights(tmp_path, model)["embedding.weight"]) == 2 + 1


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A run without options."""
    folder = tmp_path_factory.mktemp("plain")
    here(folder, *BOTH_PHASES)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("flag", [["--solver", "anderson"], ["--gradient", "implicit"]], ids=str)
def test_parts_are_swapped_by_one_option(plain, tmp_path, flag):
    here(tmp_path, *BOTH_PHASES, *flag)
    plainly, otherwise = ((numbers(output), weights(output)) for output in (plain, tmp_path))
    same_weights = all(torch.equal(tensor, otherwise[1][name]) for name, tensor in plainly[1].items())
    assert plainly[0] != otherwise[0] or not same_weights, "the option changes nothing"


def numbers(folder: Path) -> list[float]:
    return [row["self_iterations"] for row in json.loads((folder / "results.json").read_text())]


def weights(folder: Path, model: str = "implicit") -> dict:
    newest = max((folder / model).glob("checkpoint-*"))
    return load_file(newest / "model.safetensors")


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_as_if_it_had_not_been(tmp_path):
    options = [*BOTH_PHASES, *MONOID]
    assert run(tmp_path / "whole", *options).returncode == 0
    command = [sys.executable, str(SCRIPT), *TINY, *MAMBA2, "--output", str(tmp_path / "killed"), *options]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not list((tmp_path / "killed" / "implicit").glob("checkpoint-*")) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert process.returncode == -signal.SIGKILL, "the run ended before it could be killed"
    assert run(tmp_path / "killed", *options).returncode == 0
    assert "implicit: going on from step" in (tmp_path / "killed" / "log.txt").read_text()
    ours, theirs = weights(tmp_path / "killed"), weights(tmp_path / "whole")
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.parametrize(
    ("flags", "name", "remedy"),
    [
        (["--steps", "-5"], "--steps", "an integer in 1.."),
        (["--steps", "99999999999999"], "--steps", "an integer in 1.."),
        (["--lr", "-1"], "--lr", "a number in (0, inf)"),
        (["--lr", "nan"], "--lr", "a number in (0, inf)"),
        (["--clip", "0"], "--clip", "a number in (0, inf)"),
        (["--eval-rtol", "-1"], "--eval-rtol", "a number in (0, inf)"),
        (["--seed", "-1"], "--seed", "an integer in 0.."),
        (["--device", "gpu7"], "--device", "one of ('cpu'"),
        (["--output", ""], "--output", "must not be empty"),
        (["--eval-lengths"], "--eval-lengths", "at least one"),
        (["--baselines", "0"], "--baselines", "an integer in 1.."),
        (["--group", "Q9"], "--group", "'Q8'"),
        (["--group", "M", "--generators", "1"], "--generators", "generate M"),
        (["--group", "M", "--identity-probability", "0.5"], "Options: --identity-probability", "must be 0 for M"),
        (["--group", "M", "--eval-identity-probability", "0.5"], "--eval-identity-probability", "must be 0 for M"),
        (["--identity-probability"], "--identity-probability", "at least one"),
        (["--backbone", "llama", "--heads", "3"], "--heads", "--d-model 16"),
        (["--lengths", "2", "2"], "--lengths", "every value once"),
        (["--free-lengths", "32", "8"], "--free-lengths", "must ascend, got 32 8"),
        (["--free-lengths"], "--free-lengths", "at least one"),
        (["--learned", "1.5"], "--learned", "a number in [0, 1]"),
        (["--gradient", "unrolled"], "--gradient", "phantom"),
        ([*MONOID, "2"], "--identity-probability", "a number in [0, 1]"),
        (["--stepz", "5"], "--stepz", "--steps"),
    ],
    ids=str,
)
def test_bad_options_name_the_option_and_the_remedy(flags, name, remedy, capsys):
    with pytest.raises(SystemExit) as caught:
        read_options([*TINY, *flags])
    printed = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert caught.value.code == 2
    assert name in printed
    assert remedy in printed


def test_nothing_is_written_if_an_option_is_bad(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        here(tmp_path / "out", "--clip", "-1")
    assert caught.value.code == 2
    assert "--clip must be a number in (0, inf), got -1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_options_reach_training_and_evaluation():
    flags = ["--window", "2", "--start", "2", "--gradient", "implicit", "--solver", "anderson"]
    options = read_options([*TINY, *flags])
    solve = options.curriculum.phases[1].solve
    assert (solve.sweep, solve.start, solve.gradient) == (dq.Sliding(2), dq.RandomStart(2.0), dq.Implicit())
    assert (make_sweep("sliding", options), make_solver(options.solver)) == (dq.Sliding(2), dq.Anderson())


def test_identity_probabilities_of_training_and_evaluation():
    def probabilities(*flags: str) -> tuple[list[float], float]:
        options = read_options([*TINY, *flags])
        return [task.identity_probability for task in training_tasks(options)], make_task(options).identity_probability

    assert probabilities() == ([0.0], 0.0)
    assert probabilities("--identity-probability", "0", "0.5") == ([0.0, 0.5], 0.5)
    assert probabilities(*MONOID) == ([0.0, 0.5], 0.9)


def test_quick_is_the_implicit_model_alone():
    options = read_options(["--quick"])
    assert (options.baselines, options.eval_lengths) == ((), (16, 32, 64))
    assert options.folder == "runs/state_tracking_Z2_0_quick"
    assert read_options(["--quick", "--eval-lengths", "8"]).eval_lengths == (8,)


def test_other_options_are_refused_until_fresh_removes_the_run(tmp_path):
    group = ["--group", "Q8", "--baselines", "--eval-lengths", "4"]
    here(tmp_path, "--steps", "3", *group)
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit, match=r"\(steps: 3 -> 4\).* --fresh"):
        here(tmp_path, "--steps", "4", *group)
    here(tmp_path, "--steps", "4", *group, "--fresh")
    assert sorted(path.name for path in (tmp_path / "implicit").iterdir()) == [
        "checkpoint-00000002",
        "checkpoint-00000004",
    ]
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.slow
def test_parity_is_learned_and_extrapolates(tmp_path):
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", *SHORTER, "--output", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr
    for row in json.loads((tmp_path / "results.json").read_text()):
        assert row["accuracy"] >= 0.99, row
        assert row["converged"] == 1.0, row
