"""A curriculum in the Trainer: which phase a step is trained in, and what its checkpoints say."""

import json
import logging
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from hf_models import LLAMA, MAMBA2
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, get_wsd_schedule

import deqseq as dq
from deqseq.integrations.huggingface import ImplicitLlamaConfig, ImplicitMamba2Config
from deqseq.integrations.huggingface.curriculum_callback import CurriculumCallback
from deqseq.training import Curriculum, Phase, PoissonLogNormal, bounded, free, parameter_groups, unrolled

STEPS, BATCH, LENGTH = 12, 2, 5
PAPER = Curriculum((bounded(2, 1, until=0.5), free(6, 2)))
RISING = unrolled(PoissonLogNormal(5, rise="linear"), last=2, until=0.5, name="rising")
DRAWN = Curriculum((RISING, unrolled(PoissonLogNormal(5, largest=8), last=2, until=None)))
SIZES = {"vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 1}


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS * BATCH * 2

    def __getitem__(self, index):
        ids = torch.randint(1, 13, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def model(implicit: bool = True, kind: type = ImplicitMamba2Config):
    torch.manual_seed(0)
    more = MAMBA2 if kind is ImplicitMamba2Config else LLAMA
    return AutoModelForCausalLM.from_config(kind(**SIZES, **more, implicit=implicit, dropout=0.1 * implicit))


def trainer(
    folder, curriculum, lm=None, optimizers=(None, None), callbacks=None, eval_dataset=None, **options
) -> Trainer:
    arguments = {"per_device_train_batch_size": BATCH, "max_steps": STEPS, "learning_rate": 1e-2, "logging_steps": 1}
    arguments |= {"save_steps": 4, "save_strategy": "steps", "report_to": [], "use_cpu": True, "disable_tqdm": True}
    callbacks = [CurriculumCallback(curriculum)] if callbacks is None else callbacks
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*pin_memory.*")
        return Trainer(
            lm or model(),
            TrainingArguments(output_dir=str(folder), dataloader_pin_memory=False, **{**arguments, **options}),
            train_dataset=Rows(),
            eval_dataset=eval_dataset,
            callbacks=callbacks,
            optimizers=optimizers,
        )


def phases(run: Trainer) -> list[dq.Gradient]:
    """How each forward pass in training is differentiated, noted from the model."""
    return noted(run, lambda solve: solve.gradient)


def budgets(run: Trainer) -> list[int]:
    """How many iterations each forward pass in training may take."""
    return noted(run, lambda solve: solve.stop.max_steps)


def noted(run: Trainer, what) -> list:
    seen = []
    core = run.model.model.core
    core.register_forward_pre_hook(lambda part, inputs: seen.append(what(part.solve)) if part.training else None)
    return seen


def losses(run: Trainer) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


@pytest.mark.parametrize(
    ("curriculum", "options", "bounded_steps"),
    [
        (PAPER, {}, 6),
        (Curriculum((bounded(2, 1, until=5), free(6, 2)), "steps"), {}, 5),
        (
            Curriculum((bounded(2, 1, until=7 * BATCH * LENGTH), free(6, 2)), "tokens"),
            {"include_num_input_tokens_seen": "all"},
            7,
        ),
        (PAPER, {"gradient_accumulation_steps": 2, "max_steps": 6}, 6),
    ],
    ids=["fraction", "steps", "tokens", "accumulated"],
)
def test_the_phase_of_each_step(tmp_path, curriculum, options, bounded_steps, caplog):
    run = trainer(tmp_path, curriculum, save_strategy="no", **options)
    seen = phases(run)
    with caplog.at_level(logging.INFO, "deqseq"):
        run.train()
    assert seen == [dq.Phantom(1)] * bounded_steps + [dq.Phantom(2)] * (12 - bounded_steps)
    first = "phase 'bounded' from step 0"
    second = f"phase 'free' from step {bounded_steps // options.get('gradient_accumulation_steps', 1)}"
    told = [record.getMessage().partition(" (")[0] for record in caplog.records if "callback" in record.name]
    assert told == [first, second]
    core = run.model.model.core
    assert (core.solve, core.eval_solve) == (curriculum.phases[1].solve, curriculum.phases[1].eval_solve)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Trainer:
    """A run from beginning to end, with checkpoints at steps 4, 8 and 12."""
    run = trainer(tmp_path_factory.mktemp("whole"), PAPER)
    run.train()
    return run


def checkpoint(run: Trainer, step: int) -> str:
    return f"{run.args.output_dir}/checkpoint-{step}"


@pytest.mark.parametrize(("stopped", "restored"), [(4, False), (8, True)])
def test_a_resumed_run_goes_on_as_the_uninterrupted_one(tmp_path, whole, stopped, restored):
    with open(f"{checkpoint(whole, stopped)}/trainer_state.json") as file:
        state = json.load(file)
    saved = state["stateful_callbacks"]["CurriculumCallback"]["attributes"]["saved"]
    assert (saved["phase"], saved["progress"]) == ("bounded" if stopped == 4 else "free", stopped / STEPS)
    run = trainer(tmp_path, PAPER, restore_callback_states_from_checkpoint=restored)
    seen = phases(run)
    run.train(resume_from_checkpoint=checkpoint(whole, stopped))
    assert seen == [dq.Phantom(1)] * (6 - stopped) + [dq.Phantom(2)] * min(6, STEPS - stopped)
    assert losses(run) == losses(whole)
    ours, theirs = run.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_finished_run_can_be_started_again(tmp_path, whole):
    """The Trainer makes one more update, at a learning rate of zero, before it sees the end."""
    run = trainer(tmp_path, PAPER)
    run.train(resume_from_checkpoint=checkpoint(whole, STEPS))
    ours, theirs = run.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_curriculum_is_refused(tmp_path, whole):
    other = Curriculum((bounded(2, 1, until=0.5), free(9, 2)))
    with pytest.raises(ValueError, match=r"not the one .* \(phase 2 solve.stop.max_steps: 6 -> 9; "):
        trainer(tmp_path, other).train(resume_from_checkpoint=checkpoint(whole, 8))
    run = trainer(tmp_path, other, restore_callback_states_from_checkpoint=True)  # the checkpoint's is taken instead
    run.train(resume_from_checkpoint=checkpoint(whole, 8))
    assert run.model.model.core.solve.stop.max_steps == 6


def test_a_run_that_began_without_a_curriculum_can_take_one_up(tmp_path):
    trainer(tmp_path, PAPER, callbacks=[]).train()
    run = trainer(tmp_path, PAPER)
    seen = phases(run)
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert seen == [dq.Phantom(1)] * 2 + [dq.Phantom(2)] * 6


def test_a_checkpoint_is_loaded_as_the_model_that_was_trained(whole):
    for step, phase in ((4, PAPER.phases[0]), (12, PAPER.phases[1])):
        core = AutoModelForCausalLM.from_pretrained(checkpoint(whole, step)).model.core
        assert (core.solve, core.eval_solve) == (phase.solve, phase.eval_solve)


def test_the_budget_of_each_step_is_drawn_and_a_resumed_run_draws_the_same(tmp_path, caplog):
    often = {"eval_dataset": torch.utils.data.Subset(Rows(), range(2)), "eval_strategy": "steps"}
    run = trainer(tmp_path / "whole", DRAWN, **often)
    seen, evaluated = budgets(run), []
    core = run.model.model.core
    core.register_forward_pre_hook(
        lambda part, inputs: None if part.training else evaluated.append(part.solve_config.stop)
    )
    with caplog.at_level(logging.INFO, "deqseq"):
        run.train()
    wanted = [DRAWN.at(step / STEPS).solve.stop.max_steps for step in range(STEPS)]
    assert seen == wanted
    assert len(set(wanted)) > 4
    assert len([record for record in caplog.records if "callback" in record.name]) == 2
    assert set(evaluated) == {dq.Stop(rtol=0.05, max_steps=20)}
    assert (core.solve, core.eval_solve) == (DRAWN.phases[1].solve, DRAWN.phases[1].eval_solve)
    saved = AutoModelForCausalLM.from_pretrained(checkpoint(run, 4)).model.core
    assert (saved.solve, saved.eval_solve) == (RISING.solve, RISING.eval_solve)
    again = trainer(tmp_path / "again", DRAWN, restore_callback_states_from_checkpoint=True, **often)
    seen = budgets(again)
    again.train(resume_from_checkpoint=checkpoint(run, 4))
    assert seen == wanted[4:]
    assert losses(again) == losses(run)
    ours, theirs = again.model.state_dict(), run.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_accumulated_batches_share_a_draw_and_recompute_what_they_computed(tmp_path):
    options = {"gradient_accumulation_steps": 2, "max_steps": 6, "save_strategy": "no"}
    kept = trainer(tmp_path, DRAWN, **options)
    kept.train()
    recomputed = trainer(tmp_path, DRAWN, activation_checkpointing=True, **options)
    drawn, gradients = budgets(recomputed), phases(recomputed)
    recomputed.train()
    wanted = [DRAWN.at(step / 6).solve.stop.max_steps for step in range(6)]
    assert drawn == [budget for budget in wanted for _ in range(2)]
    assert set(gradients) == {dq.Unrolled(checkpoint=True, last=2)}
    assert losses(recomputed) == pytest.approx(losses(kept), rel=1e-5)


def test_activation_checkpointing_stays_on(tmp_path):
    mixed = Curriculum(
        (
            unrolled(2, until=3),
            bounded(2, 1, until=6),
            Phase("one", None, dq.SolveConfig(gradient=dq.OneStep())),
        ),
        "steps",
    )
    run = trainer(tmp_path, mixed, save_strategy="no", activation_checkpointing=True)
    seen = phases(run)
    run.train()
    assert seen == [dq.Unrolled(checkpoint=True)] * 3 + [dq.Phantom(1, checkpoint=True)] * 3 + [dq.OneStep()] * 6


@pytest.mark.filterwarnings("ignore:gradient checkpointing has no effect")
def test_activation_checkpointing_is_on_whatever_the_model_began_with(tmp_path):
    for gradient, on in ((dq.Implicit(), True), (dq.OneStep(), False)):
        lm = model()
        lm.base_model.solved.solve = dq.SolveConfig(gradient=gradient)
        run = trainer(tmp_path, PAPER, lm, save_strategy="no", max_steps=2, activation_checkpointing=on)
        seen = phases(run)
        run.train()
        assert seen == [dq.Phantom(1, checkpoint=on), dq.Phantom(2, checkpoint=on)]


def test_an_explicit_model_is_left_as_it_is(tmp_path):
    lone, beside = (
        trainer(tmp_path, PAPER, model(implicit=False), callbacks=callbacks, save_strategy="no")
        for callbacks in ([], [CurriculumCallback(PAPER)])
    )
    lone.train()
    beside.train()
    assert losses(lone) == losses(beside)
    assert len(losses(lone)) == STEPS


def test_evaluation_takes_the_phases_budget(tmp_path):
    few, often = torch.utils.data.Subset(Rows(), range(2)), {"eval_strategy": "steps", "eval_steps": 3}
    run = trainer(tmp_path, PAPER, save_strategy="no", eval_dataset=few, eval_on_start=True, **often)
    seen = []
    core = run.model.model.core
    core.register_forward_hook(
        lambda part, inputs, output: None if part.training else seen.append(part.eval_solve.stop)
    )
    run.train()
    assert [stop.max_steps for stop in seen] == [
        8,
        8,
        8,
        24,
        24,
    ]  # after steps 0, 3, 6, 9, 12; entered at a step's begin


def test_with_the_papers_schedule_and_groups(tmp_path):
    lm = model(kind=ImplicitLlamaConfig)
    optimizer = torch.optim.AdamW(parameter_groups(lm), lr=1e-3, betas=(0.9, 0.95))
    schedule = get_wsd_schedule(optimizer, 2, 4, num_training_steps=STEPS, decay_type="1-sqrt", min_lr_ratio=1e-2)
    run = trainer(tmp_path, PAPER, lm, optimizers=(optimizer, schedule), save_strategy="no")
    run.train()
    rates = [entry["learning_rate"] for entry in run.state.log_history if "learning_rate" in entry]
    assert rates[:3] == pytest.approx([1e-5, 5.05e-4, 1e-3])
    assert rates[10] == pytest.approx(1e-5 + (1e-3 - 1e-5) * (1 - 0.5**0.5))


def test_tokens_must_be_counted(tmp_path):
    tokens = Curriculum((bounded(until=10), free()), "tokens")
    with pytest.raises(ValueError, match=r'needs TrainingArguments\(include_num_input_tokens_seen="all"\)'):
        trainer(tmp_path, tokens).train()


def test_what_a_checkpoint_cannot_name_is_refused_at_once():
    class Mine(dq.OneStep):
        pass

    with pytest.raises(TypeError, match=r"a configuration cannot name .*Mine"):
        CurriculumCallback(Curriculum((Phase("mine", None, dq.SolveConfig(gradient=Mine())),)))


def test_the_json_of_a_curriculum_comes_back():
    curriculum = Curriculum(
        (
            Phase("a", 3, dq.SolveConfig(dq.Anderson(memory=3), dq.Stop(norm="row"), dq.Implicit())),
            Phase("b", 9, dq.SolveConfig(gradient=dq.Unrolled(), sweep=dq.Chunked(4)), dq.SolveConfig(dq.Naive())),
            unrolled(PoissonLogNormal(5, 0.2, "1-sqrt", 8, 3), last=2, until=12),
        ),
        "steps",
    )
    data = json.loads(json.dumps(CurriculumCallback(curriculum).state()))
    assert CurriculumCallback(**data["args"]).curriculum == curriculum
    data["args"]["curriculum"]["phases"][0]["solve"]["solver"]["name"] = "Andersen"
    with pytest.raises(ValueError, match=r"phase 1: solve: .*'Andersen' .*did you mean 'Anderson'"):
        CurriculumCallback(**data["args"])


PHASE = {"name": "a", "until": None, "solve": {}, "eval_solve": None, "depth": None}


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ({}, ValueError, "^curriculum: 'phases' is missing"),
        ({"phases": []}, ValueError, "^curriculum: 'unit' is missing"),
        ({"phases": 3, "unit": "steps"}, TypeError, "^curriculum: phases must be a list"),
        ({"phases": ["a"], "unit": "steps"}, TypeError, "^curriculum: phase 1 must be a Mapping"),
        ({"phases": [PHASE, {"name": "b"}], "unit": "steps"}, ValueError, "^curriculum: phase 2: 'until' is missing"),
        ({"phases": [PHASE | {"depht": 3}], "unit": "steps"}, ValueError, "phase 1: 'depht' .*did you mean 'depth'"),
        ({"phases": [PHASE | {"depth": {"mean": 3}}], "unit": "steps"}, ValueError, "depth: 'sigma' is missing"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_curriculum_is_named(data, error, message):
    with pytest.raises(error, match=message):
        CurriculumCallback(data)


def test_numbers_of_numpy_are_saved_and_read_again():
    depth = PoissonLogNormal(np.int64(8))
    curriculum = Curriculum((bounded(np.int64(4), until=np.int64(10)), replace(free(), depth=depth)), unit="steps")
    state = json.loads(json.dumps(CurriculumCallback(curriculum).state()))
    assert CurriculumCallback(**state["args"]).curriculum == curriculum
