"""State tracking runs as it is, goes on after an interruption, and refuses to mix runs."""

import json
import re

import comparison
import pytest
import state_tracking
import torch
import training_loop
from safetensors.torch import load_file

TINY = (
    "--d-model 16 --batch 8 --lengths 2 3 --free-lengths 3 5 --eval-lengths 4 8 "
    "--baselines 1 --learned 0"
)
MAMBA2 = "--d-state 4 --headdim 8"
WHOLE = f"{MAMBA2} --steps 40 --group S3 --generators 2"
SWEEPS = ("simultaneous", "sequential", "sliding")
COUNTS = {"self_iterations", "converged", "token_updates"}
NUMBERS = (
    "model backbone group length sweep accuracy last_ten whole by_hard seed sequences "
    "seconds first_errors steps trained_to cpu_minutes identity_probability parameters lr "
    "evaluations evaluations_a_step tokens"
)
pytestmark = pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")


def results(folder):
    return json.loads((folder / "results.json").read_text())


def run(output, options):
    """The rows of a small run."""
    state_tracking.main(f"{TINY} {options} --output {output}".split())
    return results(output)


def weights(folder, step, model="implicit"):
    return load_file(folder / model / "checkpoints" / f"checkpoint_{step}" / "model.safetensors")


def solves(rows):
    """The model, sweep and length of each row."""
    return [(row["model"], row["sweep"], row["length"]) for row in rows]


def expected_solves(*lengths):
    kinds = [("implicit", sweep) for sweep in SWEEPS] + [("explicit 1 block", "single pass")]
    return [(*kind, length) for kind in kinds for length in lengths]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A finished run of 40 steps."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, WHOLE)
    return folder


def test_it_writes_numbers_and_a_figure_and_prints_a_table(whole, capsys):
    rows = results(whole)
    assert solves(rows) == expected_solves(4, 8)
    for row in rows:
        assert row.keys() == COUNTS | set(NUMBERS.split())
        assert 0 <= row["whole"] <= row["accuracy"] <= 1
        assert row["steps"] == 40
        assert row["trained_to"] == 3
    for row in rows[:6]:
        assert row["evaluations"] >= row["token_updates"] >= 1 <= row["self_iterations"]
    for row in rows[6:]:
        assert {row[count] for count in COUNTS} == {None}
        assert row["evaluations"] == row["evaluations_a_step"] == 1
    assert (whole / "state_tracking.png").stat().st_size > 10_000
    assert comparison.table(rows).splitlines()[0] == "| model | sweep | 4 | 8 |"


def test_a_finished_run_is_evaluated_in_another_way_without_being_trained(whole, capsys):
    def written():
        return {path: path.stat().st_mtime_ns for path in whole.rglob("*.safetensors")}

    before = written()
    rows = run(whole, f"{WHOLE} --eval-lengths 6 --eval-identity-probability 0.5")
    assert solves(rows) == expected_solves(6)
    assert {row["identity_probability"] for row in rows} == {0.5}
    assert written() == before
    assert "| implicit | sliding |" in capsys.readouterr().out


def test_the_last_ten_products_whole_sequences_and_hard_tokens_are_counted():
    right = torch.ones(3, 12, dtype=torch.bool)
    right[0, 1] = right[1, 9:] = False
    hard = torch.zeros(3, 12, dtype=torch.bool)
    hard[1, 2] = hard[1, 9] = hard[2, 0] = True
    numbers = state_tracking.prefix_numbers(right, hard)
    assert numbers == {
        "last_ten": pytest.approx(1 - 3 / 30),
        "whole": pytest.approx(1 / 3),
        "by_hard": {"0": [13, 14], "1": [19, 19], "2": [0, 3]},
        "first_errors": [1, 2],
    }


def test_a_llama_has_a_start_token(tmp_path):
    rows = run(tmp_path, "--backbone llama --steps 12")
    assert solves(rows) == expected_solves(4, 8)
    for model in ("implicit", "explicit-1-block"):
        assert len(weights(tmp_path, 12, model)["embedding.weight"]) == 2 + 1


def test_what_is_trained_and_how_far_it_is_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training_loop, "SHOWN_EVERY", 4)
    run(tmp_path, f"{MAMBA2} --steps 12")
    told = capsys.readouterr().out
    models = "implicit", "explicit 1 block"
    assert told.startswith(f"models: {', then '.join(models)}, each in at most 12 steps; results: ")
    assert f"results: {tmp_path}/\n" in told
    for model in models:
        steps = re.findall(rf"^{model}, step (\d+) of at most \d+, ", told, re.MULTILINE)
        assert steps == ["4", "8", "12"]


def test_a_run_goes_on_from_its_last_whole_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training_loop, "SAVED_EVERY", 5)
    options = f"{MAMBA2} --steps 12 --baselines --group Z2xM --identity-probability 0 0.5"
    rows = run(tmp_path, options)
    first = weights(tmp_path, 12)
    checkpoints = tmp_path / "implicit" / "checkpoints"
    assert sorted(path.name for path in checkpoints.iterdir()) == ["checkpoint_10", "checkpoint_12"]
    last = checkpoints / "checkpoint_12"
    for name in ("model.safetensors", "optimizer.bin", "custom_checkpoint_0.pkl"):
        content = (last / name).read_bytes()
        (last / name).unlink()  # the weights that were read are this file, mapped
        (last / name).write_bytes(content[: -1 if name == "optimizer.bin" else len(content) // 2])
        resumed = run(tmp_path, options)
        said = capsys.readouterr().out
        assert f"{last} was cut while it was written, and is removed" in said
        assert "implicit: going on from step 10" in said
        torch.testing.assert_close(weights(tmp_path, 12), first, rtol=0, atol=0)
        for ours, theirs in zip(resumed, rows, strict=True):
            times = {name: ours[name] for name in ("seconds", "cpu_minutes")}
            assert ours == theirs | times


def test_a_full_disk_is_named_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(training_loop, "SAVED_EVERY", 5)
    options = f"{MAMBA2} --steps 12 --baselines"
    save = training_loop.Accelerator.save_state

    def full(accelerator):
        if accelerator.project_configuration.iteration == 10:
            raise RuntimeError("unexpected pos 192 vs 86")
        save(accelerator)

    monkeypatch.setattr(training_loop.Accelerator, "save_state", full)
    with pytest.raises(SystemExit, match=r"step 10 could not be .* is the disk full\?"):
        run(tmp_path, options)
    monkeypatch.setattr(training_loop.Accelerator, "save_state", save)
    run(tmp_path, options)
    assert "implicit: going on from step 5" in capsys.readouterr().out


def test_other_options_are_refused_and_leave_the_folder_alone(whole):
    record = whole / "options.json"
    before = record.read_text()
    with pytest.raises(SystemExit, match=r"other options \(steps: 40 -> 4\): give another folder"):
        run(whole, f"{WHOLE} --steps 4")
    assert record.read_text() == before


def test_identity_probabilities_of_training_and_evaluation():
    def probabilities(flags):
        options = state_tracking.read_options(f"{TINY} {flags}".split())
        training, evaluation = state_tracking.make_tasks(options)
        return [task.identity_probability for task in (*training, evaluation)]

    both = "--identity-probability 0 0.5"
    assert probabilities("") == [0.0, 0.0]
    assert probabilities(both) == [0.0, 0.5, 0.5]
    assert probabilities(f"{both} --eval-identity-probability 0.9") == [0.0, 0.5, 0.9]


@pytest.mark.slow
def test_parity_is_learned_and_extrapolates(tmp_path):
    shorter = "--steps 900 --free-lengths 10 12 --d-model 32 --headdim 16 --batch 64"
    state_tracking.main(f"--quick {shorter} --output {tmp_path}".split())
    for row in results(tmp_path):
        assert row["accuracy"] >= 0.99, row
        assert row["converged"] == 1.0, row
