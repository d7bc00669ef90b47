"""transformers' Trainer with our models: losses and metrics by hand, interruptions, options, collators."""

import json
import math
import warnings

import pytest
import torch
from hf_models import same_weights
from hf_runs import CLASSES, PAD, VOCABULARY, Witness, collate, losses, rows, small, trainer
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling, PreTrainedTokenizerFast

import deqseq as dq

NAMES = pytest.mark.parametrize("name", CLASSES)
KINDS = pytest.mark.parametrize("kind", [{}, {"implicit": False}], ids=["implicit", "explicit"])
EVAL = rows(10, first=100)
"""Three batches of unequal lengths, of which the last is smaller."""


def one_block(name: str, **fields):
    return small(name, **{"num_hidden_layers": 1, "solve": {"stop": dq.Stop(rtol=1e-5, max_steps=32)}, **fields})


@torch.no_grad()
def surprises(model, each: dict) -> torch.Tensor:
    """What a row alone, without padding, costs at each of its tokens but the first, in nats."""
    ids = torch.tensor([each["input_ids"]])
    logits = model.eval()(ids).logits
    return F.cross_entropy(logits[0, :-1].double(), ids[0, 1:], reduction="none")


def cost(model, batch: list[dict], untold: int = 0) -> float:
    """The mean over all tokens of a batch, and over ``untold`` more, of which all tokens are equally likely."""
    each = torch.cat([surprises(model, row) for row in batch])
    return ((each.sum() + untold * math.log(VOCABULARY)) / (len(each) + untold)).item()


def falls(curve: list[float]) -> bool:
    return all(map(math.isfinite, curve)) and sum(curve[-3:]) < 0.7 * sum(curve[:3])


class TestTrainAndEvaluate:
    @NAMES
    @KINDS
    def test_the_loss_begins_where_it_should_and_falls(self, name, kind, tmp_path):
        model = one_block(name, **kind)
        witness, run = Witness(model), trainer(model, tmp_path)
        run.train()
        assert sorted(witness.seen) == sorted(row["input_ids"] for row in rows(48))
        first = [{"input_ids": row} for row in witness.seen[:4]]
        assert abs(losses(run)[0] - cost(one_block(name, **kind), first)) < 1e-4
        assert len(losses(run)) == 12
        assert falls(losses(run))

    @NAMES
    @KINDS
    @pytest.mark.parametrize("side", ["right", "left"])
    def test_evaluate_is_what_each_row_costs_alone(self, name, kind, side, tmp_path):
        """The Trainer weighs batches by their rows. Behind padding on the left the first label counts, too, as in
        transformers; the logits of padding are 0."""
        model = one_block(name, **kind)
        found = trainer(model, tmp_path, data_collator=lambda batch: collate(batch, side)).evaluate()["eval_loss"]
        total = 0.0
        for batch in (EVAL[:4], EVAL[4:8], EVAL[8:]):
            longest = max(len(row["input_ids"]) for row in batch)
            padded = sum(len(row["input_ids"]) < longest for row in batch)
            assert padded
            total += len(batch) * cost(model, batch, padded if side == "left" else 0)
        assert abs(found - total / 10) < 1e-4

    @NAMES
    def test_predict(self, name, tmp_path):
        model = one_block(name)
        found = trainer(model, tmp_path).predict(EVAL)
        assert (found.predictions.shape, found.label_ids.shape) == ((10, 9, VOCABULARY), (10, 9))
        for row, logits, labels in zip(EVAL, found.predictions, found.label_ids, strict=True):
            count = len(row["input_ids"])
            assert labels.tolist() == row["input_ids"] + [-100] * (9 - count)
            with torch.no_grad():
                alone = model.eval()(torch.tensor([row["input_ids"]])).logits[0]
            assert (torch.from_numpy(logits[:count]) - alone).abs().max() < 1e-4

    @NAMES
    def test_metrics_are_computed_from_logits_and_labels(self, name, tmp_path):
        def accuracy(found) -> dict:
            assert found.predictions.shape == (*found.label_ids.shape, VOCABULARY)
            right = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
            return {"accuracy": float(right[found.label_ids[:, 1:] != -100].mean())}

        run = trainer(one_block(name), tmp_path, compute_metrics=accuracy)
        before = run.evaluate()["eval_accuracy"]
        run.train()
        assert run.evaluate()["eval_accuracy"] > before + 0.3

    @NAMES
    def test_accumulated_gradients_are_those_of_the_whole_batch(self, name, tmp_path):
        """Rows are of unequal lengths, so means of halves would not do."""
        whole = trainer(one_block(name), tmp_path, max_steps=4)
        halves = trainer(
            one_block(name), tmp_path, max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=2
        )
        for run in (whole, halves):
            run.train()
        assert max(abs(a - b) for a, b in zip(losses(whole), losses(halves), strict=True)) < 2e-5
        for mine, theirs in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
            assert (mine - theirs).abs().max() < 1e-4


class TestCheckpoints:
    @NAMES
    @KINDS
    def test_resuming_is_bitwise_going_on(self, name, kind, tmp_path):
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
        whole = trainer(one_block(name, dropout=0.1, **kind), tmp_path, **options)
        whole.train()
        resumed = trainer(one_block(name, dropout=0.1, **kind), tmp_path, **options)
        witness = Witness(resumed.model)
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
        assert len(witness.seen) == 8  # two steps, not four
        assert same_weights(whole.model, resumed.model)
        assert losses(resumed) == losses(whole)

    @NAMES
    def test_what_a_checkpoint_holds(self, name, tmp_path):
        run = trainer(one_block(name), tmp_path, max_steps=2, save_strategy="steps", save_steps=2)
        run.train()
        files = {path.name for path in (tmp_path / "checkpoint-2").iterdir()}
        assert {"config.json", "model.safetensors", "optimizer.pt", "trainer_state.json"} <= files
        assert not any(name.startswith("pytorch_model") for name in files)
        stored = load_file(tmp_path / "checkpoint-2" / "model.safetensors")
        assert stored.keys() == run.model.state_dict().keys() - {"lm_head.weight"}  # which is the embedding
        assert all(torch.equal(tensor, run.model.state_dict()[key]) for key, tensor in stored.items())

    def test_what_was_saved_is_read_without_torch_load(self, tmp_path, monkeypatch):
        run = trainer(one_block("mamba2"), tmp_path / "run", max_steps=2)
        run.train()
        run.save_model(str(tmp_path / "kept"))
        monkeypatch.setattr(torch, "load", None)
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "kept")
        assert type(again) is type(run.model)
        batch = collate(EVAL[:4])
        with torch.no_grad():
            wanted, found = (model.eval()(**batch) for model in (run.model, again))
        assert torch.equal(found.logits, wanted.logits)
        assert found.loss == wanted.loss
        tokens = [model.generate(batch["input_ids"][:, :3], max_new_tokens=4) for model in (run.model, again)]
        assert torch.equal(*tokens)

    @NAMES
    def test_the_best_model_is_taken_up_again(self, name, tmp_path):
        """The best is here the worst, so that it is not the last."""
        schedule = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
        best = {"load_best_model_at_end": True, "metric_for_best_model": "eval_loss", "greater_is_better": True}
        run = trainer(one_block(name), tmp_path, max_steps=6, **schedule, **best)
        run.train()
        evaluated = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
        at = 2 * (1 + evaluated.index(max(evaluated)))
        assert at < 6
        assert run.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{at}")
        assert run.evaluate()["eval_loss"] == max(evaluated)
        assert run.model.lm_head.weight is run.model.model.embed_tokens.weight
        assert json.loads((tmp_path / f"checkpoint-{at}" / "trainer_state.json").read_text())["global_step"] == at


class TestOptions:
    @pytest.mark.parametrize(
        ("name", "option"), [("mamba2", "gradient_checkpointing"), ("llama", "activation_checkpointing")]
    )
    def test_recomputed_activations_change_nothing(self, name, option, tmp_path):
        plain = trainer(one_block(name), tmp_path, max_steps=3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the first is the older name of the second
            again = trainer(one_block(name), tmp_path, max_steps=3, **{option: True})
        for run in (plain, again):
            run.train()
        assert len(losses(plain)) == 3
        assert plain.model.model.core.solve.gradient == dq.Phantom(2)
        assert again.model.model.core.solve.gradient == dq.Phantom(2, checkpoint=True)
        assert max(abs(a - b) for a, b in zip(losses(plain), losses(again), strict=True)) < 5e-6

    def test_recomputed_activations_of_an_explicit_model(self, tmp_path):
        plain = trainer(one_block("llama", implicit=False), tmp_path, max_steps=3)
        again = trainer(one_block("llama", implicit=False), tmp_path, max_steps=3, activation_checkpointing=True)
        for run in (plain, again):
            run.train()
        assert again.model.model.gradient_checkpointing
        assert losses(plain) == losses(again)

    @NAMES
    @KINDS
    def test_bfloat16(self, name, kind, tmp_path):
        run = trainer(one_block(name, solve={"stop": dq.Stop(rtol=0.02, max_steps=12)}, **kind), tmp_path, bf16=True)
        computed = []
        for part in run.model.model.core.backbone.layers.modules():
            if isinstance(part, nn.Linear):
                part.register_forward_hook(lambda *call: computed.append(call[2].dtype))
        run.train()
        assert set(computed) == {torch.bfloat16}
        assert {parameter.dtype for parameter in run.model.parameters()} == {torch.float32}
        assert falls(losses(run))
        assert math.isfinite(run.evaluate()["eval_loss"])

    def test_a_row_of_padding_alone_is_named(self, tmp_path):
        run = trainer(one_block("mamba2"), tmp_path, train_dataset=[{"input_ids": [1, 2, 3]}, {"input_ids": []}] * 4)
        with pytest.raises(ValueError, match="mask must mark one run of real tokens per row"):
            run.train()


class TestLanguageModelingCollator:
    def tokenizer(self, side: str) -> PreTrainedTokenizerFast:
        words = {"<pad>": PAD} | {f"n{i}": i for i in range(1, VOCABULARY)}
        tokens = Tokenizer(WordLevel(words, unk_token="<pad>"))
        tokens.pre_tokenizer = Whitespace()
        return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", padding_side=side)

    @pytest.mark.parametrize(("side", "name"), [("right", "llama"), ("left", "mamba2")])
    def test_train_and_evaluate(self, name, side, tmp_path):
        tokenizer = self.tokenizer(side)
        texts = [" ".join(f"n{i}" for i in row["input_ids"]) for row in rows(48)]
        options = {
            "train_dataset": [{"input_ids": tokenizer(text)["input_ids"]} for text in texts],
            "data_collator": DataCollatorForLanguageModeling(tokenizer, mlm=False),
            "processing_class": tokenizer,
        }
        assert [row["input_ids"] for row in options["train_dataset"]] == [row["input_ids"] for row in rows(48)]
        run = trainer(one_block(name), tmp_path, max_steps=2, **options)
        ours = trainer(one_block(name), tmp_path, max_steps=2, data_collator=lambda batch: collate(batch, side))
        assert run.evaluate()["eval_loss"] == ours.evaluate()["eval_loss"]
        for each in (run, ours):
            each.train()
        assert losses(run) == losses(ours)
        assert losses(run)[-1] < losses(run)[0]
