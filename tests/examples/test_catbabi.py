"""examples/catbabi.py runs, continues after an interruption, reads official files, and has the paper's numbers."""

import dataclasses
import json
from pathlib import Path

import babi
import catbabi
import pytest
import torch
from babi_files import write_stories
from safetensors.torch import load_file

import deqseq as dq

TESTS = ("1x", "2x", "3x", "stream")
MODELS = ("explicit 1 block", "implicit 1 block")


def run(folder, *options):
    catbabi.main(["--quick", "--output", str(folder), *options])
    return json.loads((folder / "results.json").read_text())


def test_it_writes_table_figure_and_numbers(tmp_path, capsys):
    rows = run(tmp_path)
    printed = capsys.readouterr().out
    trained = [row for row in rows if row["model"] in MODELS]
    assert [(row["model"], row["test"], row["task"]) for row in trained] == [
        (model, name, task) for model in MODELS for name in TESTS for task in ("1", "15", "all")
    ]
    for row in trained:
        assert 0 <= row["accuracy"] <= 1
        assert row["questions"] == {"1": 10, "15": 8, "all": 18}[row["task"]] or row["test"] == "stream"
        assert (row["self_iterations"] is None) == (row["model"] == "explicit 1 block") == (row["converged"] is None)
        assert row["steps"] == (6 if "implicit" in row["model"] else 12)
    guesses = {(row["test"], row["task"]) for row in rows if row["model"] == "most frequent answer"}
    assert guesses == {(name, task) for name in TESTS[:3] for task in ("1", "15", "all")}
    assert (tmp_path / "catbabi.png").stat().st_size > 10_000
    table = (tmp_path / "table.md").read_text()
    assert table.count("\n|") == 4
    assert "A --quick run" in table
    assert table in printed
    assert "test implicit 1 block: 100%" in printed
    assert all(f"| {model} |" in printed for model in MODELS)
    for model, steps in zip(MODELS, (12, 6), strict=True):
        curve = [json.loads(line) for line in (tmp_path / model / "curve.jsonl").read_text().splitlines()]
        assert [point["step"] for point in curve] == list(range(1, steps + 1))
        assert all(0 <= point["accuracy"] <= 1 for point in curve)


def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path, monkeypatch):
    whole = run(tmp_path / "whole")
    calls, count_right = [], babi.count_right

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 16:  # in the fourth step of the implicit model
            raise KeyboardInterrupt
        return count_right(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(babi, "count_right", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "cut")
    with (tmp_path / "cut" / MODELS[1] / "curve.jsonl").open("a") as file:  # killed before step 4 had its checkpoint
        file.write('{"step": 4, "seconds": 1000000.0, "accuracy": 0.0}\n')
    cut = run(tmp_path / "cut")
    assert max(row.get("seconds", 0) for row in cut) < 1e6
    assert "implicit 1 block: going on from step 3" in (tmp_path / "cut" / "log.txt").read_text()
    ours, theirs = (weights(tmp_path / name) for name in ("cut", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert [untimed(row) for row in cut] == [untimed(row) for row in whole]
    curves = [(tmp_path / name / MODELS[1] / "curve.jsonl").read_text().splitlines() for name in ("cut", "whole")]
    ours, theirs = ([untimed(json.loads(line)) for line in curve] for curve in curves)
    assert ours == theirs


def weights(folder):
    return load_file(max((folder / "implicit 1 block").glob("checkpoint-*")) / "model.safetensors")


def untimed(row):
    return {name: value for name, value in row.items() if name != "seconds"}


def test_it_reads_official_files(tmp_path):
    for task in (1, 19):
        write_stories(tmp_path / "en", "train", babi.generate_stories(task, 40, seed=0))
        write_stories(tmp_path / "en", "test", babi.generate_stories(task, 6, seed=1))
    rows = run(tmp_path / "out", "--data", str(tmp_path / "en"), "--tasks", "1", "19", "--steps", "2")
    found = [(row["test"], row["task"], row["questions"]) for row in rows if row["model"] == "implicit 1 block"]
    assert found[:3] == [("1x", "1", 30), ("1x", "19", 6), ("1x", "all", 36)]
    assert {name for name, _, _ in found[3:]} == {"stream"}
    with pytest.raises(SystemExit, match="has no file qa2_two-supporting-facts_train"):
        run(tmp_path / "out2", "--data", str(tmp_path / "en"))
    assert not (tmp_path / "out2").exists()


def test_a_batch_without_an_answer_changes_no_count(tmp_path):
    rows = run(tmp_path, "--batch", "1", "--length", "2", "--steps", "2", "--explicit-steps", "8")
    curve = [json.loads(line) for line in (tmp_path / MODELS[0] / "curve.jsonl").read_text().splitlines()]
    assert [point["step"] for point in curve] == list(range(1, 9))
    assert {row["model"] for row in rows} >= set(MODELS)


@pytest.mark.parametrize("split", ["train", "test"])
def test_stories_without_a_question_are_refused(tmp_path, split):
    for part in ("train", "test"):
        stories = babi.generate_stories(1, 2, seed=0)
        if part == split:
            stories = [babi.Story(1, (babi.Line("Nobody is here."),))]
        write_stories(tmp_path / "en", part, stories)
    with pytest.raises(SystemExit, match=r"^--data .* must each have a question"):
        run(tmp_path / "out", "--data", str(tmp_path / "en"), "--tasks", "1")
    assert not (tmp_path / "out").exists()


def test_another_runs_folder_is_refused_and_fresh_replaces_the_run_alone(tmp_path):
    run(tmp_path, "--steps", "1", "--explicit-steps", "1")
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(SystemExit, match=r"other options \(steps: 1 -> 2\).*--fresh"):
        run(tmp_path, "--steps", "2", "--explicit-steps", "1")
    rows = run(tmp_path, "--steps", "2", "--explicit-steps", "1", "--fresh")
    assert rows[-1]["steps"] == 2
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "options",
    [
        ["--steps", "0"],
        ["--steps", "99999999999999"],
        ["--explicit-steps", "-1"],
        ["--blocks", "1", "0"],
        ["--blocks"],
        ["--tasks", "4"],
        ["--data", "nowhere"],
        ["--lr", "nan"],
        ["--lr", "-1"],
        ["--clip", "0"],
        ["--rtol", "-1"],
        ["--seed", "-1"],
        ["--free-from", "1"],
        ["--damping", "1.5"],
        ["--headdim", "7"],
        ["--device", "gpu7"],
        ["--paper"],
        ["--stepz", "5"],
        ["--batch", "many"],
    ],
    ids=" ".join,
)
def test_bad_options_are_refused_before_anything_is_written(tmp_path, options, capsys):
    with pytest.raises(SystemExit) as refused:
        run(tmp_path / "out", *options)
    assert refused.value.code == 2
    assert options[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_an_empty_output_is_refused():
    with pytest.raises(SystemExit):
        catbabi.main(["--quick", "--output", ""])


def test_the_papers_numbers():
    options = catbabi.read_options(["--paper", "--seed", "3"])
    assert (options.steps, options.unrolled_steps, options.rtol, options.max_steps) == (15_000, 32, 0.03, 50)
    assert (options.eval_max_steps, options.phantom_steps, options.damping, options.seed) == (200, 6, 0.5, 3)
    assert (options.tasks, options.device) == ((1, 2, 3, 15, 19), "cpu")
    assert Path(options.output) == Path("runs/catbabi_3_paper")
    curriculum = catbabi.make_curriculum(options)
    assert curriculum.at(4_999 / 15_000).solve.stop == dq.Stop.exactly(32)
    assert curriculum.at(4_999 / 15_000).solve.gradient == dq.Unrolled()
    assert curriculum.at(5_000 / 15_000).solve.stop == dq.Stop(rtol=0.03, max_steps=50)
    assert curriculum.at(5_000 / 15_000).solve.gradient == dq.Phantom(6, 0.5)
    small = dataclasses.replace(options, d_model=64, d_state=4, headdim=8)
    model = catbabi.make_model(small, 10, 2, True).model
    assert len(model.backbone.layers) == 2
    curriculum.at(1.0).apply(model)
    assert model.eval_solve.stop == dq.Stop(rtol=0.03, max_steps=200)
    assert isinstance(catbabi.make_model(small, 10, 1, False).model, dq.ExplicitModel)


def test_options_replace_those_of_the_setting(tmp_path):
    assert catbabi.read_options(["--paper", "--steps", "7"]).steps == 7
    assert catbabi.read_options(["--data", str(tmp_path)]).tasks == tuple(range(1, 21))
    assert catbabi.read_options(["--quick", "--blocks", "3", "--tasks", "2"]).blocks == (3,)
