"""The example in words runs as it is: each question is scored, by length and by hops."""

import json

import comparison
import pytest
import reasoning
import recipe
import torch

TINY = (
    "--d-model 16 --d-state 4 --headdim 8 --batch 8 --lengths 1 --free-lengths 2 "
    "--steps 12 --baselines 1 lstm --baseline-lrs 1e-3 1e-2 --eval-lengths 2 4"
)
pytestmark = pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")


@pytest.mark.parametrize("options", ["--task balls", "--task programs --backbone llama"])
def test_it_writes_numbers_and_a_figure_and_prints_tables(options, tmp_path, capsys):
    reasoning.main(f"{TINY} {options} --output {tmp_path}".split())
    rows = json.loads((tmp_path / "results.json").read_text())
    models = ("implicit", "explicit 1 block", "LSTM")
    assert [(row["model"], row["length"]) for row in rows] == [
        (model, length) for model in models for length in (2, 4)
    ]
    for row in rows:
        right, asked = map(sum, zip(*row["by_hops"].values(), strict=True))
        questions = row["length"] // (2 if row["task"] == "balls" else 1)
        assert asked == 256 * questions
        assert right / asked == pytest.approx(row["answers"])
        assert 0 <= row["accuracy"] <= 1
        assert row["lr"] in ((0.003,) if row["model"] == "implicit" else (0.001, 0.01))
    evaluations = [row["evaluations"] for row in rows]
    assert evaluations[2:4] == [1, 1]
    assert evaluations[4:] == [row["tokens"] for row in rows[4:]]  # one token after another
    assert rows[0]["evaluations_a_step"] > rows[2]["evaluations_a_step"] == 1
    assert rows[4]["parameters"] <= rows[0]["parameters"] < 1.5 * rows[4]["parameters"]
    printed = capsys.readouterr().out
    assert "| hops, from | " in printed
    assert (tmp_path / "LSTM-lr-0.01" / "checkpoints").is_dir()
    assert (tmp_path / "reasoning.png").stat().st_size > 10_000


def test_baselines_alone(tmp_path):
    reasoning.main(f"{TINY} --no-implicit --mlp-width 8 --output {tmp_path}".split())
    rows = json.loads((tmp_path / "results.json").read_text())
    assert {row["model"] for row in rows} == {"explicit 1 block", "LSTM"}
    assert not (tmp_path / "implicit").exists()
    options = reasoning.read_options(TINY.split())
    wide = reasoning.read_options(f"{TINY} --mlp-width 8".split())
    sizes = [recipe.size(recipe.make_model(each, 9, "1")) for each in (options, wide)]
    maps, lengths, norm = 3 * 16 * 8, 8 + 8 + 16, 16  # two maps up, one down, and weight norm
    assert sizes[1] - sizes[0] == maps + lengths + norm


@pytest.mark.parametrize("task", [["--task", "programs"], ["--task=programs"]])
def test_programs_have_options_of_their_own(task):
    changed = reasoning.PROGRAMS | {"task": "programs"}
    assert reasoning.read_options(task) == reasoning.Options(**changed)
    given = reasoning.read_options(["--steps", "20", *task, "--learned", ".9"])
    assert given == reasoning.Options(**changed | {"steps": 20, "learned": 0.9})
    quick = reasoning.read_options(["--quick", *task])
    assert quick == reasoning.Options(**changed | reasoning.QUICK | {"quick": True})
    assert reasoning.read_options(["--output", "programs"]).steps == reasoning.Options.steps


def test_answers_are_counted_by_hops():
    right = torch.tensor([[True, False, True, True]])
    hops = torch.tensor([[0, 2, 3, -1]])
    assert comparison.right_by(hops, right) == {"0": [1, 1], "2": [1, 2]}
    rows = [{"model": "a", "by_hops": {"0": [1, 1], "2": [1, 2]}}]
    rows.append({"model": "a", "by_hops": {"2": [3, 6], "16": [0, 4]}})
    assert reasoning.hops_table(rows).splitlines()[-1] == "| a | 1.000 | 0.500 | 0.000 |"
