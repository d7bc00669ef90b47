"""State tracking runs as it is, goes on after an interruption, and refuses to mix runs."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import state_tracking
import torch
import training_loop
from safetensors.torch import load_file
from torch.nn import functional as F

from deqseq.tasks import WordBatch

TINY = (
    "--d-model 16 --batch 8 --lengths 2 3 --free-lengths 3 5 --eval-lengths 4 8 "
    "--baselines 1 --learned 0"
)
MAMBA2 = "--d-state 4 --headdim 8"
SWEEPS = ("simultaneous", "sequential", "sliding")
pytestmark = pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")


def run(output: Path, *options: str) -> list[dict]:
    """The rows of a small run."""
    state_tracking.main([*TINY.split(), *MAMBA2.split(), "--output", str(output), *options])
    return json.loads((output / "results.json").read_text())


def weights(folder: Path, step: int, model: str = "implicit") -> dict[str, torch.Tensor]:
    return load_file(folder / model / "checkpoints" / f"checkpoint_{step}" / "model.safetensors")


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def solved(*lengths: int) -> list[tuple[str, str, int]]:
    """The models, sweeps and lengths of a run's rows."""
    implicit = [("implicit", sweep, length) for sweep in SWEEPS for length in lengths]
    return implicit + [("explicit 1 block", "single pass", length) for length in lengths]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A finished run of 40 steps."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, "--steps", "40", "--group", "S3", "--generators", "2")
    return folder


def test_it_writes_numbers_and_a_figure_and_prints_a_table(whole, capsys):
    rows = json.loads((whole / "results.json").read_text())
    assert [(row["model"], row["sweep"], row["length"]) for row in rows] == solved(4, 8)
    keys = {
        "model",
        "backbone",
        "group",
        "length",
        "sweep",
        "accuracy",
        "seed",
        "sequences",
        "seconds",
    }
    counts = {"self_iterations", "converged", "token_updates", "evaluations"}
    keys |= counts | {"whole", "steps", "trained_to", "cpu_minutes", "identity_probability"}
    assert all(row.keys() == keys and 0 <= row["whole"] <= row["accuracy"] <= 1 for row in rows)
    assert all(
        row["evaluations"] >= row["token_updates"] >= 1 <= row["self_iterations"]
        for row in rows[:6]
    )
    assert all(row[count] is None for row in rows[6:] for count in counts)
    assert {(row["steps"], row["trained_to"]) for row in rows} == {(40, 3)}
    assert (whole / "state_tracking.png").stat().st_size > 10_000
    assert state_tracking.table(rows).splitlines()[0] == "| model | sweep | 4 | 8 |"


def test_a_finished_run_is_evaluated_in_another_way_without_being_trained(whole, capsys):
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")}
    again = ["--eval-lengths", "6", "--eval-identity-probability", "0.5"]
    rows = run(whole, "--steps", "40", "--group", "S3", "--generators", "2", *again)
    assert [(row["model"], row["sweep"], row["length"]) for row in rows] == solved(6)
    assert {row["identity_probability"] for row in rows} == {0.5}
    assert before == {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")}
    assert "| implicit | sliding |" in capsys.readouterr().out


def test_a_sequence_is_right_if_every_prefix_is():
    targets = torch.tensor(
        [[-100, 1, 0], [-100, 1, 1], [-100, 0, 1]]
    )  # a start token is not scored
    output = SimpleNamespace(
        logits=F.one_hot(torch.tensor([[0, 1, 0], [1, 1, 1], [0, 1, 1]])).float()
    )
    batch = WordBatch(targets.clamp(min=0), targets)
    assert state_tracking.whole_sequence_accuracy(output, batch) == pytest.approx(2 / 3)
    assert state_tracking.last_token_accuracy(output, batch) == 1


def test_a_llama_has_a_start_token(tmp_path):
    state_tracking.main(
        [*TINY.split(), "--backbone", "llama", "--steps", "12", "--output", str(tmp_path)]
    )
    rows = json.loads((tmp_path / "results.json").read_text())
    assert [(row["model"], row["sweep"], row["length"]) for row in rows] == solved(4, 8)
    for model in ("implicit", "explicit-1-block"):
        assert len(weights(tmp_path, 12, model)["embedding.weight"]) == 2 + 1


def test_a_run_goes_on_from_its_last_whole_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training_loop, "SAVED_EVERY", 5)
    options = [
        "--steps",
        "12",
        "--baselines",
        "--group",
        "Z2xM",
        "--identity-probability",
        "0",
        "0.5",
    ]
    rows, first, checkpoints = (
        run(tmp_path, *options),
        weights(tmp_path, 12),
        tmp_path / "implicit" / "checkpoints",
    )
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint_10", "checkpoint_12"]
    last = checkpoints / "checkpoint_12" / "custom_checkpoint_0.pkl"
    for content in (b"", last.read_bytes()[:-1]):  # killed while this was written
        last.write_bytes(content)
        again = run(tmp_path, *options)
        assert "implicit: going on from step 10" in capsys.readouterr().out
        assert same(weights(tmp_path, 12), first)
        assert [untimed(row) for row in again] == [untimed(row) for row in rows]


def untimed(row: dict) -> dict:
    return {name: value for name, value in row.items() if name not in ("seconds", "cpu_minutes")}


def test_other_options_are_refused_and_leave_the_folder_alone(whole):
    before = (whole / "options.json").read_text()
    with pytest.raises(
        SystemExit, match=r"holds a run with other options \(steps: 40 -> 4\): give another folder"
    ):
        run(whole, "--steps", "4", "--group", "S3", "--generators", "2")
    assert (whole / "options.json").read_text() == before


def test_identity_probabilities_of_training_and_evaluation():
    def probabilities(*flags: str) -> tuple[list[float], float]:
        training, evaluation = state_tracking.make_tasks(
            state_tracking.read_options([*TINY.split(), *flags])
        )
        return [task.identity_probability for task in training], evaluation.identity_probability

    assert probabilities() == ([0.0], 0.0)
    assert probabilities("--identity-probability", "0", "0.5") == ([0.0, 0.5], 0.5)
    assert probabilities(
        "--identity-probability", "0", "0.5", "--eval-identity-probability", "0.9"
    ) == (
        [0.0, 0.5],
        0.9,
    )


@pytest.mark.slow
def test_parity_is_learned_and_extrapolates(tmp_path):
    shorter = [
        "--steps",
        "900",
        "--free-lengths",
        "10",
        "12",
        "--d-model",
        "32",
        "--headdim",
        "16",
        "--batch",
        "64",
    ]
    state_tracking.main(["--quick", *shorter, "--output", str(tmp_path)])
    for row in json.loads((tmp_path / "results.json").read_text()):
        assert row["accuracy"] >= 0.99, row
        assert row["converged"] == 1.0, row
