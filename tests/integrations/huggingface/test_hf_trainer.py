"""transformers' Trainer with our models: losses and metrics by hand, options, modes."""

import math

import pytest
import torch
from hf_models import close
from hf_runs import Witness, collate, losses, rows, small, trainer
from torch import nn
from torch.nn import functional as F

import deqseq as dq
from deqseq.integrations.huggingface import to_causal_lm

KINDS = pytest.mark.parametrize("kind", ["mamba2", "llama", "explicit"])


def one_block(kind, **fields):
    fields = {"solve": {"stop": dq.Stop(rtol=1e-5, max_steps=32)}} | fields
    return small(kind, backbone={"n_layers": 1}, **fields)


@torch.no_grad()
def cost(model, batch):
    """The mean over the tokens of rows alone."""
    costs = []
    for each in batch:
        ids = torch.tensor([each["input_ids"]])
        logits = model.eval()(ids).logits
        costs.append(F.cross_entropy(logits[0, :-1].double(), ids[0, 1:], reduction="none"))
    return torch.cat(costs).mean().item()


def falls(curve):
    return all(map(math.isfinite, curve)) and sum(curve[-3:]) < 0.7 * sum(curve[:3])


@KINDS
def test_the_loss_begins_where_it_should_and_falls_and_metrics_are_of_logits_and_labels(
    kind, tmp_path
):
    def accuracy(found):
        right = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
        return {"accuracy": float(right[found.label_ids[:, 1:] != -100].mean())}

    model = one_block(kind)
    witness = Witness(model)
    run = trainer(model, tmp_path, compute_metrics=accuracy)
    before = run.evaluate()["eval_accuracy"]
    run.train()
    assert sorted(witness.seen) == sorted(row["input_ids"] for row in rows(48))
    first = [{"input_ids": row} for row in witness.seen[:4]]
    close(losses(run)[0], cost(one_block(kind), first), 1e-4)
    assert len(losses(run)) == 12
    assert falls(losses(run))
    assert run.evaluate()["eval_accuracy"] > before + 0.2


@pytest.mark.parametrize(
    "options",
    [
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"activation_checkpointing": True},
    ],
)
def test_accumulated_gradients_and_recomputed_activations_change_nothing(options, tmp_path):
    """Rows are of unequal lengths, so means of halves would not do."""
    runs = [trainer(one_block("mamba2"), tmp_path, max_steps=3, **more) for more in ({}, options)]
    for run in runs:
        run.train()
    assert runs[1].model.is_activation_checkpointing == ("activation_checkpointing" in options)
    close(losses(runs[0]), losses(runs[1]), 2e-5)
    for pair in zip(*(run.model.parameters() for run in runs), strict=True):
        close(*pair, 1e-4)


@KINDS
def test_bfloat16(kind, tmp_path):
    model = one_block(kind, solve={"stop": dq.Stop(rtol=0.02, max_steps=12)})
    run = trainer(model, tmp_path, bf16=True)
    computed = []
    for part in run.model.model.core.backbone.layers.modules():
        if isinstance(part, nn.Linear):
            part.register_forward_hook(lambda *call: computed.append(call[2].dtype))
    run.train()
    assert set(computed) == {torch.bfloat16}
    assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
    assert falls(losses(run))
    assert math.isfinite(run.evaluate()["eval_loss"])


@pytest.mark.parametrize("renamed", [False, True])
def test_smoothed_labels_are_shifted(renamed, tmp_path):
    model = one_block("llama")
    batch = collate(rows(4))
    run = trainer(model, tmp_path, label_smoothing_factor=0.1)
    if renamed:  # as FSDP2 does
        model.__class__ = type("FSDPDeqseqForCausalLM", (type(model),), {})
    found = run.compute_loss(model, dict(batch))
    labels = batch.pop("labels")[:, 1:].flatten()
    logits = model(**batch).logits[:, :-1].flatten(0, 1)
    close(found, F.cross_entropy(logits, labels, label_smoothing=0.1), 1e-6)


def test_generation_after_training_is_in_eval_mode(tmp_path):
    model = one_block("llama", eval_solve={"stop": {"max_steps": 7, "rtol": 0.0}})
    trainer(model, tmp_path, max_steps=1).train()
    assert model.training
    options = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    output = model.generate(torch.tensor([[1, 2]]), **options)
    assert [solve.stats.iterations.tolist() for solve in output.cache.solves[1:]] == [[[7]], [[7]]]
    assert model.training


def test_the_log_has_the_iterations_and_the_share_of_rows_that_converged(tmp_path):
    model = one_block("mamba2", solve={"stop": dq.Stop(rtol=1e-2, max_steps=6)})
    witness = Witness(model)
    converged = []

    def watch(model, _, output):
        if model.training:
            converged.extend(output.converged.tolist())

    model.register_forward_hook(watch)
    options = {"max_steps": 4, "logging_steps": 2, "eval_strategy": "steps", "eval_steps": 1}
    run = trainer(model, tmp_path, **options)
    run.train()
    logged = [entry for entry in run.state.log_history if "iterations" in entry]
    assert logged == [entry for entry in run.state.log_history if "loss" in entry]
    for entry, first in zip(logged, (0, 8), strict=True):
        steps = [number for row in witness.steps[first : first + 8] for number in row if number]
        assert entry["iterations"] == pytest.approx(sum(steps) / len(steps))
        assert entry["converged"] == sum(converged[first : first + 8]) / 8
    assert 0 < sum(converged) < 16
    assert not model.model._forward_hooks


def test_the_log_of_an_explicit_model_has_neither(tmp_path):
    run = trainer(one_block("explicit"), tmp_path, max_steps=1)
    run.train()
    assert len(losses(run)) == 1
    assert not any("iterations" in entry for entry in run.state.log_history)


def test_a_model_of_another_class_is_told_how_to_become_one_of_transformers(tmp_path):
    with pytest.raises(TypeError, match=r"huggingface\.from_causal_lm\(model\)"):
        trainer(to_causal_lm(one_block("llama")), tmp_path).train()
