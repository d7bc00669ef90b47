"""The benchmark of drawn depth at toy size: equal pairs, the depths they are trained with, scores that are kept."""

import json
import sys
from pathlib import Path

import pytest
import torch

import deqseq as dq

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import depth


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> depth.Run:
    return depth.Run(0, depth.QUICK, depth.Text.of(depth.QUICK), tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("kind", depth.KINDS)
def test_a_pair_is_scored_at_every_budget(run, kind):
    found = {(row.case.removeprefix(f"{kind}, seed 0, "), row.metric): row for row in run.rows(kind)}
    budgets = {(f"{n} iterations", "bits per byte") for n in depth.BUDGETS}
    solved = {("solved to 0.001", metric) for metric in ("bits per byte", "converged", "iterations")}
    assert found.keys() == budgets | solved | {("training", "CPU minutes")}
    drawn, fixed = (run.scores(kind, way) for way in depth.DEPTHS)
    assert all((drawn[n][m], fixed[n][m]) == (row.ours, row.theirs) for (n, m), row in found.items())
    goals = {case: row.goal for (case, _), row in found.items() if row.goal}
    limit = f"ours <= {drawn['8 iterations']['bits per byte'] + depth.SLACK:.4f}"
    assert goals == dict.fromkeys(("16 iterations", "32 iterations", "64 iterations"), limit)


def test_a_finished_model_is_not_trained_again(run, monkeypatch, capsys):
    rows = [row for kind in depth.KINDS for row in run.rows(kind)]

    def again(*_: object) -> float:
        raise AssertionError("trained again")

    monkeypatch.setattr(depth.Run, "train", again)
    target = run.folder / "rows.json"
    monkeypatch.setattr(sys, "argv", ["depth.py", "--quick", "--folder", str(run.folder), "--json", str(target)])
    depth.main()
    written = json.loads(target.read_text())
    assert [(row["case"], row["ours"], row["theirs"]) for row in written] == [(r.case, r.ours, r.theirs) for r in rows]
    assert "A --quick run" in capsys.readouterr().out


@pytest.mark.parametrize("way", depth.DEPTHS)
def test_each_way_trains_with_its_depth(run, way):
    lm, seen = run.split("from scratch"), []
    lm.model.core.register_forward_hook(lambda _, inputs, output: seen.append(output.stats.evaluations))
    run.train("toy", lm, 12, 1e-3, way)
    assert lm.model.core.solve.gradient == dq.Unrolled(last=depth.LAST)
    assert (set(seen) == {depth.MEAN}) == (way == "fixed")
    assert len(seen) == 12 and 4 < sum(seen) / 12 < 14


@pytest.mark.parametrize("kind", depth.KINDS)
def test_the_models_of_a_pair_begin_equal(run, kind):
    first, second = (run.split(kind).state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    iterated = first["model.core.backbone.injection.weight"][:, : run.sizes.width]
    assert bool(iterated.any()) == (kind == "from scratch"), "a retrofit begins as the pretrained model"
