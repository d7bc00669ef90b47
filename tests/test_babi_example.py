"""examples/catbabi.py runs, goes on after an interruption, reads official files, and carries the paper's numbers."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import deqseq as dq
from deqseq.tasks import babi

SCRIPT = Path(__file__).parent.parent / "examples" / "catbabi.py"
TESTS = ("1x", "2x", "3x", "stream")
MODELS = ("explicit 1 block", "implicit 1 block")


@pytest.fixture(scope="module")
def catbabi():
    spec = importlib.util.spec_from_file_location("catbabi", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["catbabi"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["catbabi"]


def run(catbabi, folder, *options):
    catbabi.main(["--quick", "--output", str(folder), *options])
    return json.loads((folder / "results.json").read_text())


def test_it_writes_table_figure_and_numbers(catbabi, tmp_path, capsys):
    rows = run(catbabi, tmp_path)
    said = capsys.readouterr().out
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
    assert (tmp_path / "table.md").read_text().count("\n") == 5
    assert all(f"| {model} |" in said for model in MODELS)
    curve = json.loads((tmp_path / "curve.json").read_text())
    assert [point["step"] for point in curve] == [*range(1, 13), *range(1, 7)]


def test_an_interrupted_run_goes_on_and_ends_as_if_it_had_not_been(catbabi, tmp_path, monkeypatch):
    run(catbabi, tmp_path / "whole")
    steps, real = [], catbabi.train_step

    def interrupted(*arguments):
        steps.append(1)
        if len(steps) == 16:  # in the fourth step of the implicit model
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(catbabi, "train_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(catbabi, tmp_path / "cut")
    monkeypatch.setattr(catbabi, "train_step", real)
    run(catbabi, tmp_path / "cut")
    assert "implicit 1 block: going on from step 3" in (tmp_path / "cut" / "log.txt").read_text()
    ours, theirs = (weights(tmp_path / name) for name in ("cut", "whole"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def weights(folder):
    return load_file(max((folder / "implicit 1 block").glob("checkpoint-*")) / "model.safetensors")


def test_it_reads_official_files(catbabi, tmp_path):
    for task in (1, 19):
        babi.write_stories(tmp_path / "en", "train", babi.generate_stories(task, 40, seed=0))
        babi.write_stories(tmp_path / "en", "test", babi.generate_stories(task, 6, seed=1))
    rows = run(catbabi, tmp_path / "out", "--data", str(tmp_path / "en"), "--tasks", "1", "19", "--steps", "2")
    found = [(row["test"], row["task"], row["questions"]) for row in rows if row["model"] == "implicit 1 block"]
    assert found[:3] == [("1x", "1", 30), ("1x", "19", 6), ("1x", "all", 36)]
    assert {name for name, _, _ in found[3:]} == {"stream"}
    with pytest.raises(FileNotFoundError, match="has no file qa2_two-supporting-facts_train"):
        run(catbabi, tmp_path / "out2", "--data", str(tmp_path / "en"))
    assert not (tmp_path / "out2").exists()


def test_other_options_do_not_mix_with_an_earlier_run(catbabi, tmp_path):
    run(catbabi, tmp_path, "--steps", "1", "--explicit-steps", "1")
    with pytest.raises(SystemExit, match=r"holds a run with other options \(steps: "):
        run(catbabi, tmp_path, "--steps", "2", "--explicit-steps", "1")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--blocks", "1", "0"], "--blocks must be at least 1, got 0"),
        (["--tasks", "4"], "--tasks must be among 1, 2, 3, 15, 19, got [4]"),
        (["--paper"], "argument --paper: not allowed with argument --quick"),
    ],
)
def test_bad_options_are_refused_before_anything_is_written(catbabi, tmp_path, options, message, capsys):
    with pytest.raises(SystemExit) as caught:
        run(catbabi, tmp_path / "out", *options)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_paper_s_numbers(catbabi):
    recipe, device, folder = catbabi.parse(["--paper", "--seed", "3"])
    assert (recipe.steps, recipe.unrolled_steps, recipe.rtol, recipe.max_steps) == (15_000, 32, 0.03, 50)
    assert (recipe.eval_max_steps, recipe.phantom_steps, recipe.damping, recipe.seed) == (200, 6, 0.5, 3)
    assert (device, folder) == ("cpu", Path("runs/catbabi_3_paper"))
    curriculum = catbabi.make_curriculum(recipe)
    assert curriculum.at(4_999 / 15_000).stop == dq.Stop.exactly(32)
    assert curriculum.at(4_999 / 15_000).gradient == dq.Unrolled()
    assert curriculum.at(5_000 / 15_000).stop == dq.Stop(rtol=0.03, max_steps=50)
    assert curriculum.at(5_000 / 15_000).gradient == dq.Phantom(6, 0.5)
    small = dataclasses.replace(recipe, d_model=64, d_state=4, headdim=8)
    model = catbabi.make_model(small, 10, 2, True).model
    assert (len(model.backbone.layers), model.eval_stop) == (2, dq.Stop(rtol=0.03, max_steps=200))
    assert isinstance(catbabi.make_model(small, 10, 1, False).model, dq.ExplicitModel)
