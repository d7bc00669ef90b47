"""A curriculum in the Trainer: which phase a step is trained in, and what its checkpoints say."""

import json
import logging
import re
from dataclasses import replace
from types import SimpleNamespace

import hf_runs
import pytest
from hf_models import made, same_weights
from hf_runs import losses, small
from transformers import AutoModelForCausalLM

import deqseq as dq
from deqseq.integrations.huggingface.callbacks import CurriculumCallback
from deqseq.training import Curriculum, Phase, PoissonLogNormal, bounded, free, unrolled

STEPS = 12
BATCH = 2
LENGTH = 5
FIRST = bounded(2, 1, until=0.5)
SECOND = free(6, 2)
PAPER = Curriculum((FIRST, SECOND))
RISING = unrolled(PoissonLogNormal(5, rise="linear"), last=2, until=0.5, name="rising")
DRAWN = Curriculum((RISING, unrolled(PoissonLogNormal(5, largest=8), last=2, until=None)))
ONE = dq.Phantom(1)
TWO = dq.Phantom(2)
ROWS = [
    {"input_ids": [1 + (i + (1 + i % 3) * t) % 12 for t in range(LENGTH)]}
    for i in range(2 * STEPS * BATCH)
]
OFTEN = {"eval_dataset": ROWS[:2], "eval_strategy": "steps"}


def model(kind="mamba2", **fields):
    return small(kind, backbone={"n_layers": 1, "dropout": 0.1, **fields})


def trainer(folder, curriculum, lm=None, **options):
    """A Trainer of twelve steps of two rows."""
    options |= {"train_dataset": ROWS, "per_device_train_batch_size": BATCH}
    run = hf_runs.trainer(lm or model(), folder, lr_scheduler_type="linear", **options)
    if curriculum is not None:
        run.add_callback(CurriculumCallback(curriculum))
    return run


def noted(run, what, training=True):
    """Something of the solve of each forward pass, noted from the model."""
    seen = []

    def note(part, inputs):
        if part.training == training:
            seen.append(what(part.solve_config))

    run.model.model.solved.register_forward_pre_hook(note)
    return seen


def phases(run):
    """How each forward pass in training is differentiated."""
    return noted(run, lambda solve: solve.gradient)


def budgets(run, training=True):
    """How many iterations each forward pass may take."""
    return noted(run, lambda solve: solve.stop.max_steps, training)


def logged(caplog):
    """What the callback has told."""
    return [record for record in caplog.records if "callback" in record.name]


STEPWISE = Curriculum((bounded(2, 1, until=5), SECOND), "steps")
ONE_STEP = replace(SECOND, solve=replace(SECOND.solve, gradient=dq.OneStep()))
BY_TOKENS = Curriculum((bounded(2, 1, until=7 * BATCH * LENGTH), SECOND), "tokens")


@pytest.mark.parametrize(
    ("curriculum", "options", "in_first"),
    [
        (PAPER, {}, 6),
        (STEPWISE, {}, 5),
        (BY_TOKENS, {"include_num_input_tokens_seen": "all"}, 7),
        (PAPER, {"gradient_accumulation_steps": 2, "max_steps": 6}, 6),
    ],
)
def test_the_phase_of_each_step(tmp_path, curriculum, options, in_first, caplog):
    run = trainer(tmp_path, curriculum, **OFTEN, eval_steps=3, eval_on_start=True, **options)
    seen = phases(run)
    evaluated = budgets(run, training=False)
    with caplog.at_level(logging.INFO, "deqseq"):
        run.train()
    assert seen == [ONE] * in_first + [TWO] * (12 - in_first)
    step = in_first // options.get("gradient_accumulation_steps", 1)
    told = [record.getMessage().partition(" (")[0] for record in logged(caplog)]
    assert told == ["phase 'bounded' from step 0", f"phase 'free' from step {step}"]
    # evaluated at the start and after every third step; a phase is entered at a step's begin
    early = [at for at in range(0, run.args.max_steps + 1, 3) if at <= step]
    assert evaluated == [8] * len(early) + [24] * (len(evaluated) - len(early))
    core = run.model.model.core
    last = curriculum.phases[1]
    assert core.solve == last.solve
    assert core.eval_solve == last.eval_solve


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run from beginning to end, with checkpoints at steps 4, 8 and 12."""
    run = trainer(tmp_path_factory.mktemp("whole"), PAPER, save_strategy="steps", save_steps=4)
    run.train()
    return run


def checkpoint(run, step):
    return f"{run.args.output_dir}/checkpoint-{step}"


class TestResuming:
    @pytest.mark.parametrize(("stopped", "restored"), [(4, False), (8, True), (STEPS, False)])
    def test_a_resumed_run_goes_on_as_the_uninterrupted_one(
        self, tmp_path, whole, stopped, restored
    ):
        """From the end the Trainer makes one more update, at a learning rate of zero, before it
        sees the end.
        """
        phase = PAPER.phases[stopped >= 6]
        core = AutoModelForCausalLM.from_pretrained(checkpoint(whole, stopped)).model.core
        assert core.solve == phase.solve
        assert core.eval_solve == phase.eval_solve
        run = trainer(tmp_path, PAPER, restore_callback_states_from_checkpoint=restored)
        seen = phases(run)
        run.train(resume_from_checkpoint=checkpoint(whole, stopped))
        assert seen[: STEPS - stopped] == [ONE] * (6 - stopped) + [TWO] * min(6, STEPS - stopped)
        assert losses(run)[:STEPS] == losses(whole)
        assert same_weights(run.model, whole.model)

    def test_another_curriculum_is_refused_or_replaced(self, tmp_path, whole):
        other = Curriculum((FIRST, free(9, 2)))
        message = r'(?s)not the one .*\n-.*"max_steps": 6,\n\+ *"max_steps": 9,'
        with pytest.raises(ValueError, match=message):
            trainer(tmp_path, other).train(resume_from_checkpoint=checkpoint(whole, 8))
        run = trainer(tmp_path, other, restore_callback_states_from_checkpoint=True)
        run.train(resume_from_checkpoint=checkpoint(whole, 8))
        assert run.model.model.core.solve.stop.max_steps == 6

    @pytest.mark.parametrize(
        ("other", "old", "new"),
        [
            (Curriculum((bounded(2, 1, until=0.4), SECOND)), '"until": 0.5', '"until": 0.4'),
            (Curriculum((SECOND,)), '"name": "bounded"', None),
            (STEPWISE, '"unit": "fraction"', '"unit": "steps"'),
            (Curriculum((FIRST, ONE_STEP)), '"steps": 2', None),
        ],
    )
    def test_what_differs_is_named(self, other, old, new):
        saved = json.loads(json.dumps(CurriculumCallback(PAPER).state(), sort_keys=True))
        state = SimpleNamespace(stateful_callbacks={"CurriculumCallback": saved})
        with pytest.raises(ValueError, match="not the one that the checkpoint") as caught:
            CurriculumCallback(other).on_train_begin(None, state, None)
        lines = [re.sub("[ ,]", "", line) for line in str(caught.value).splitlines()]
        for sign, wanted in (("-", old), ("+", new)):
            assert wanted is None or sign + wanted.replace(" ", "") in lines

    def test_a_run_that_began_without_a_curriculum_can_take_one_up(self, tmp_path):
        trainer(tmp_path, None, max_steps=4, save_strategy="steps", save_steps=4).train()
        run = trainer(tmp_path, PAPER)
        seen = phases(run)
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
        assert seen == [ONE] * 2 + [TWO] * 6


class TestDrawnDepth:
    def test_the_budget_of_each_step_is_drawn_and_a_resumed_run_draws_the_same(
        self, tmp_path, caplog
    ):
        options = OFTEN | {"eval_steps": 6, "save_strategy": "steps", "save_steps": 4}
        run = trainer(tmp_path / "whole", DRAWN, made("decoder").float(), **options)
        seen = budgets(run)
        evaluated = budgets(run, training=False)
        with caplog.at_level(logging.INFO, "deqseq"):
            run.train()
        wanted = [DRAWN.at(step / STEPS).solve.stop.max_steps for step in range(STEPS)]
        assert seen == wanted
        assert len(set(wanted)) > 4
        assert len(logged(caplog)) == 2
        assert set(evaluated) == {20}
        part = run.model.model.solved
        last = DRAWN.phases[1]
        assert part.solve == last.solve
        assert part.eval_solve == last.eval_solve
        saved = AutoModelForCausalLM.from_pretrained(checkpoint(run, 4)).model.solved
        assert saved.solve == RISING.solve
        assert saved.eval_solve == RISING.eval_solve
        options["restore_callback_states_from_checkpoint"] = True
        again = trainer(tmp_path / "again", DRAWN, made("decoder").float(), **options)
        seen = budgets(again)
        again.train(resume_from_checkpoint=checkpoint(run, 4))
        assert seen == wanted[4:]
        assert losses(again) == losses(run)
        assert same_weights(again.model, run.model)

    def test_accumulated_batches_share_a_draw_and_recompute_what_they_computed(self, tmp_path):
        options = {"gradient_accumulation_steps": 2, "max_steps": 6}
        kept = trainer(tmp_path, DRAWN, **options)
        kept.train()
        recomputed = trainer(tmp_path, DRAWN, activation_checkpointing=True, **options)
        drawn = budgets(recomputed)
        recomputed.train()
        assert recomputed.model.is_activation_checkpointing
        wanted = [DRAWN.at(step / 6).solve.stop.max_steps for step in range(6)]
        assert drawn == [budget for budget in wanted for _ in range(2)]
        assert losses(recomputed) == pytest.approx(losses(kept), rel=1e-5)


def test_an_explicit_model_is_left_as_it_is(tmp_path):
    curves = []
    for curriculum in (None, PAPER):
        run = trainer(tmp_path, curriculum, model("explicit", dropout=0.0))
        run.train()
        curves.append(losses(run))
    assert curves[0] == curves[1]


def test_tokens_must_be_counted(tmp_path):
    message = r'needs TrainingArguments\(include_num_input_tokens_seen="all"\)'
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, BY_TOKENS).train()


class Mine(dq.OneStep):
    pass


UNNAMED = Curriculum((Phase("mine", None, dq.SolveConfig(gradient=Mine())),))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (UNNAMED, TypeError, "cannot name .*Mine"),
        ({}, TypeError, "^curriculum: .*missing .*'phases'"),
        ({"phases": [{"depht": 3}]}, ValueError, "^curriculum: .*did you mean 'depth'"),
    ],
)
def test_what_is_no_curriculum_or_cannot_be_saved_is_named(data, error, message):
    with pytest.raises(error, match=message):
        CurriculumCallback(data)
