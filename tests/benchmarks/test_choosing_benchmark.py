"""The benchmark of choices at toy size: rows, counted evaluations, exact gradients. Nothing is timed."""

import json
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch
from small_models import affine, contractive_mamba2

import deqseq as dq
from deqseq.tasks import WordProblem, cyclic

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import choosing
import harness
from sweeps import Trained

LENGTH, SEQUENCES = 6, 5
QUESTIONS = {
    "solver": choosing.by_solver,
    "damping": choosing.by_damping,
    "tolerance": choosing.by_tolerance,
    "sweep": choosing.by_sweep,
    "budget": choosing.by_budget,
}


def toy(make=contractive_mamba2, length=LENGTH) -> choosing.Case:
    torch.manual_seed(0)
    lm = dq.CausalLM(2, dq.ImplicitModel(make()), embedding_std=1.0).double()
    return choosing.Case.of(Trained("toy", lm, WordProblem(cyclic(2))), SEQUENCES, length)


class Counted:
    """Tokens that a backbone evaluates."""

    def __init__(self, case: choosing.Case) -> None:
        self.calls = self.tokens = 0
        case.model.lm.model.backbone.register_forward_hook(self.note)

    def note(self, module, inputs, output) -> None:
        self.calls += 1
        self.tokens += output[0].shape[:2].numel()


@pytest.mark.parametrize("sweep", [dq.Simultaneous(), dq.Sequential(), dq.Sliding(2)], ids=str)
def test_numbers_of_a_solve_are_those_of_the_map(sweep):
    case = toy()
    counted = Counted(case)
    numbers = choosing.solved(case, sweep=sweep)
    assert numbers["converged"] == 1
    assert numbers["forced"] == 0
    assert numbers["evaluations"] == counted.calls
    assert numbers["updates per token"] == pytest.approx(counted.tokens / (SEQUENCES * LENGTH))
    assert not case.model.lm.training


def test_accuracy_is_that_of_the_targets():
    case = toy()
    said = case.model.lm.eval()(case.batch.inputs, stop=case.stop()).logits.argmax(-1)
    exact = replace(case, batch=case.batch._replace(targets=said))
    assert choosing.solved(exact)["accuracy, all tokens"] == 1
    wrong = said.clone()
    wrong[0, -1] = 1 - wrong[0, -1]
    numbers = choosing.solved(replace(case, batch=case.batch._replace(targets=wrong)))
    assert numbers["accuracy, last token"] == pytest.approx(1 - 1 / SEQUENCES)
    assert numbers["accuracy, all tokens"] == pytest.approx(1 - 1 / (SEQUENCES * LENGTH))


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_question_has_rows_of_every_setting(question):
    rows = list(QUESTIONS[question](toy()))
    names = {field.name for field in fields(harness.Row)}
    assert all(json.loads(json.dumps(asdict(row))).keys() == names for row in rows)
    parts = [row.case.split(", ", 3) for row in rows]
    assert {(part[0], part[1], part[2]) for part in parts} == {(question, "toy", str(LENGTH))}
    settings = {part[3] for part in parts}
    metrics = {row.metric for row in rows}
    assert len(rows) == len(settings) * len(metrics) == len({(row.case, row.metric) for row in rows})
    assert {row.peer for row in rows} <= settings
    for row in rows:
        (peer,) = (other for other in rows if other.case.endswith(f", {row.peer}") and other.metric == row.metric)
        assert row.theirs == peer.ours


def test_what_is_asked_for_is_what_is_solved():
    rows = {(row.case.split(", ", 3)[3], row.metric): row.ours for row in choosing.by_budget(toy())}
    assert rows["4", "evaluations"] == 4
    assert rows["4", "converged"] < 1
    assert rows["512", "converged"] == 1
    assert rows["512", "evaluations"] < 100
    rows = {(row.case.split(", ", 3)[3], row.metric): row.ours for row in choosing.by_tolerance(toy())}
    evaluations = [rows[f"{rtol:g}, token", "evaluations"] for rtol in choosing.TOLERANCES]
    assert evaluations == sorted(evaluations)
    assert evaluations[0] < evaluations[-1]
    assert rows["0.0001, row", "evaluations"] <= rows["0.0001, token", "evaluations"]


def test_targets_are_drawn_anew_and_the_original_stays():
    case = toy(length=40)
    case.model.lm.float()
    before = case.batch.targets.clone()
    other = choosing.surprised(case)
    assert torch.equal(case.batch.targets, before)
    assert 0.3 < (other.batch.targets == before).double().mean() < 0.7
    assert other.batch.targets.unique().tolist() == [0, 1]
    assert torch.equal(other.batch.inputs, case.batch.inputs)
    assert {weight.dtype for weight in other.model.lm.parameters()} == {torch.float64}
    assert {weight.dtype for weight in case.model.lm.parameters()} == {torch.float32}


def test_the_exact_gradient_is_that_of_the_closed_form():
    """Of the affine map the fixed point is a formula, which autograd differentiates."""
    case = toy(affine)
    step = choosing.Step(case, choosing.EXACT, choosing.TIGHT)
    lm = case.model.lm
    x = lm.embedding(case.batch.inputs)
    logits = lm.logits(lm.model.backbone.solution(x))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), case.batch.targets.flatten()).backward()
    expected = torch.cat([weight.grad.flatten() for weight in lm.parameters()])
    torch.testing.assert_close(step.flat, expected, rtol=1e-7, atol=1e-9)
    assert expected.norm() > 1e-3


@pytest.mark.parametrize(
    ("gradient", "with_graph", "again", "backward"),
    [
        (dq.Phantom(3), 3, 0, 3),
        (dq.Phantom(3, checkpoint=True), 3, 3, 3),
        (dq.OneStep(), 1, 0, 1),
        (dq.Unrolled(), 32, 0, 32),
    ],
    ids=str,
)
def test_evaluations_of_a_step_are_counted(gradient, with_graph, again, backward):
    case = toy()
    never = dq.Stop(rtol=0.0, max_steps=32)
    step = choosing.Step(case, gradient, never)
    assert step.without_graph == (32 if isinstance(gradient, dq.AttachedGradient) else 0)
    assert (step.with_graph, step.again, step.backward) == (with_graph, again, backward)
    assert step.flat.norm() > 0
    assert all(weight.grad is None for weight in case.model.lm.parameters())
    backbone = case.model.lm.model.backbone
    assert not backbone._forward_hooks
    assert not backbone._forward_pre_hooks


def test_rows_of_the_estimators():
    rows = list(choosing.by_gradient(toy(affine, length=3)))
    found = {(row.case.split(", ", 3)[3], row.metric): row for row in rows}
    assert len(found) == len(rows) == 9 * len(choosing.ESTIMATORS)
    assert found["Implicit()", "cosine, fixed point"].ours == pytest.approx(1, abs=1e-6)
    assert found["Implicit()", "norm, fixed point"].ratio == pytest.approx(1, abs=1e-4)
    bias = [1 - found[f"Phantom({k}, 0.8)", "cosine, fixed point"].ours for k in (1, 4, 16)]
    assert bias == sorted(bias, reverse=True)
    assert bias[0] > 10 * bias[-1]
    kept = [found[f"Phantom({k}, 0.8)", "peak MiB"].ours for k in (1, 4, 16)]
    assert kept == sorted(kept)
    plain, again = (f"Phantom(4, 0.8{more})" for more in ("", ", checkpoint=True"))
    assert found[again, "cosine, fixed point"].ours == pytest.approx(found[plain, "cosine, fixed point"].ours)
    assert found[again, "evaluations again in the backward pass"].ours == 4
    assert found[plain, "evaluations again in the backward pass"].ours == 0
