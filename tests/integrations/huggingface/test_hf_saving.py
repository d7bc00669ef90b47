"""Saving, loading and initial weights of every family; checkpoints that do not fit."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from hf_models import EVERY, IDS, STABLELM, configured, made, same_weights
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm, to_causal_lm
from deqseq.layers import apply_weight_norm, fold_weight_norm

LOAD = AutoModelForCausalLM.from_pretrained
CLASSIFIER = AutoModelForSequenceClassification.from_pretrained
OURS = pytest.mark.parametrize("kind", ["mamba2", "llama", "parts"])
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"


def stored(folder):
    """The weights in a folder."""
    return load_file(folder / "model.safetensors")


def assert_drawn(weight):
    """The standard deviation is that of the configuration."""
    assert abs(weight.std().item() / 0.5 - 1) < 0.05


def loaded(folder):
    """A saved model in memory of its own: a mapped file's alignment changes the last bit."""
    return copy.deepcopy(LOAD(folder))


class TestRoundTrip:
    @EVERY
    @pytest.mark.parametrize("tied", [True, False])
    @torch.no_grad()
    def test_reload(self, kind, tied, tmp_path, monkeypatch):
        monkeypatch.setattr(torch, "save", None)
        monkeypatch.setattr(torch, "load", None)
        model = made(kind, tie_word_embeddings=tied, pad_token_id=0)
        model.save_pretrained(tmp_path)
        assert EMBEDDING in stored(tmp_path)
        assert (HEAD in stored(tmp_path)) == (not tied)
        again = loaded(tmp_path)
        assert type(again) is type(model)
        assert not again.training
        assert again.dtype == torch.float64
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
        assert same_weights(model, again)
        assert torch.equal(model(IDS).logits, again(IDS).logits)
        assert torch.equal(to_causal_lm(again)(IDS).logits, model(IDS).logits)
        assert again.config.to_json_string() == model.config.to_json_string()
        base = copy.deepcopy(AutoModel.from_pretrained(tmp_path))
        assert type(base) is type(model.model)
        assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)

    @EVERY
    def test_shards_and_dtype(self, kind, tmp_path):
        model = made(kind)
        model.save_pretrained(tmp_path, max_shard_size="4KB")
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
        assert same_weights(model, LOAD(tmp_path))
        half = LOAD(tmp_path, dtype=torch.bfloat16, device_map="cpu")
        assert {(p.dtype, p.device.type) for p in half.parameters()} == {(torch.bfloat16, "cpu")}
        assert half(IDS).logits.isfinite().all()

    @EVERY
    def test_a_classifier_begins_with_a_language_model(self, kind, tmp_path):
        model = made(kind, tie_word_embeddings=False, pad_token_id=0)
        model.save_pretrained(tmp_path / "lm")
        classifier = CLASSIFIER(tmp_path / "lm", num_labels=3)
        assert same_weights(classifier.model, model.model)
        assert classifier(IDS).logits.shape == (3, 3)
        classifier.save_pretrained(tmp_path / "classifier")
        assert same_weights(CLASSIFIER(tmp_path / "classifier"), classifier)
        assert same_weights(AutoModel.from_pretrained(tmp_path / "classifier"), model.model)
        again = CLASSIFIER(tmp_path / "classifier", num_labels=500, ignore_mismatched_sizes=True)
        assert same_weights(again.model, classifier.model)
        assert_drawn(again.score.weight)

    @torch.no_grad()
    def test_a_head_that_was_tied_by_hand_is_saved_as_tied(self, tmp_path):
        lm = to_causal_lm(made("mamba2", tie_word_embeddings=False))
        lm.head.weight = lm.embedding.weight
        model = from_causal_lm(lm)
        model.save_pretrained(tmp_path)
        assert torch.equal(loaded(tmp_path)(IDS).logits, model(IDS).logits)

    def test_solve_given_at_loading_governs_both_modes(self, tmp_path):
        model = made("llama", eval_solve={"stop": dq.Stop(1e-5, max_steps=90)})
        model.save_pretrained(tmp_path)
        own = model.base_model.solved
        seven = {"stop": {"max_steps": 7}}
        core = LOAD(tmp_path, solve=seven).base_model.solved
        assert core.solve == replace(own.solve, stop=replace(own.solve.stop, max_steps=7))
        assert core.eval_solve == replace(own.eval_solve, stop=dq.Stop(1e-5, max_steps=7))
        core = LOAD(tmp_path, solve=seven, eval_solve={"stop": {"max_steps": 8}}).base_model.solved
        assert core.solve.stop.max_steps == 7
        assert core.eval_solve.stop.max_steps == 8
        assert LOAD(tmp_path, solve=seven, eval_solve=None).base_model.solved.eval_solve is None

    def test_the_generation_configuration_keeps_solve(self, tmp_path):
        model = made("mamba2")
        solve = {"sweep": dq.Sliding(4), "stop": {"max_steps": 5}}
        model.generation_config = GenerationConfig(solve=solve)
        model.save_pretrained(tmp_path)
        saved = solve | {"sweep": {"name": "Sliding", "window": 4}}
        assert json.loads((tmp_path / "generation_config.json").read_text())["solve"] == saved
        assert LOAD(tmp_path).generation_config.solve == saved
        model.generation_config.solve = {"gradient": dq.Implicit(report=print)}
        with pytest.raises(TypeError, match=r"cannot name <built-in function print>"):
            model.save_pretrained(tmp_path)


class TestWeightNorm:
    @OURS
    @torch.no_grad()
    def test_it_is_saved_as_it_is_now_and_folded_weights_are_the_same_to_the_last_bit(
        self, kind, tmp_path
    ):
        model = made(kind)
        apply_weight_norm(model.model.core)
        before = model(IDS).logits
        tensors = {"original0", "original1"}
        for folder, expected in (("normalised", tensors), ("folded", set())):
            model.save_pretrained(tmp_path / folder)
            names = [name for name in stored(tmp_path / folder) if ".parametri" in name]
            assert {name.split(".")[-1] for name in names} == expected
            again = loaded(tmp_path / folder)
            assert same_weights(again, model)
            for one in (model, again):
                assert torch.equal(one(IDS).logits, before)
            model.fold_weight_norm()
            assert model.config.backbone["weight_norm"] is False

    def test_that_of_some_layers_alone_is_refused_before_anything_is_written(self, tmp_path):
        model = made("llama", backbone={"weight_norm": True})
        fold_weight_norm(model.model.core.backbone.layers[0])
        message = "weight normalisation must be on all layers .* or on none"
        with pytest.raises(ValueError, match=message):
            model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=message):
            from_causal_lm(to_causal_lm(model))
        assert not list(tmp_path.iterdir())


class TestInitialWeights:
    @OURS
    def test_those_of_our_layers_are_the_cores(self, kind):
        config = configured(kind, vocab_size=4000, tie_word_embeddings=False)
        torch.manual_seed(3)
        core = config.build()[0]
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        assert same_weights(core, model.model.core)
        for weight in (model.lm_head.weight, model.model.embed_tokens.weight):
            assert_drawn(weight)

    def test_those_of_a_decoders_layers_are_its_familys(self):
        decoder = AutoConfig.for_model("stablelm", **STABLELM | {"vocab_size": 4000})
        fields = {"decoder_config": decoder, "vocab_size": 4000, "tie_word_embeddings": False}
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(configured("decoder", **fields))
        torch.manual_seed(3)
        theirs = AutoModelForCausalLM.from_config(decoder).model
        core = model.model.core
        assert same_weights(model.model.embed_tokens, theirs.embed_tokens)
        assert same_weights(core.prelude.backbone.layers[0], theirs.layers[0])
        assert same_weights(core.coda.backbone.layers[0], theirs.layers[3])
        assert torch.equal(core.core.backbone.injection.weight, torch.eye(16)[8:])
        assert_drawn(model.lm_head.weight)


class TestMisfits:
    @EVERY
    @pytest.mark.parametrize("part", [".layers.0.", "model.embed_tokens.weight"])
    def test_a_missing_weight_is_an_error(self, kind, part, tmp_path):
        made(kind).save_pretrained(tmp_path)
        path = tmp_path / "model.safetensors"
        weights = load_file(path)
        dropped = sorted(name for name in weights if part in name)
        for name in dropped:
            del weights[name]
        save_file(weights, path, {"format": "pt"})
        with pytest.raises(ValueError, match=r"^the weights in .* do not fit: missing ") as error:
            LOAD(tmp_path)
        assert ", ".join(dropped[:8]) in str(error.value)
        if part != EMBEDDING:  # nothing would draw a layer
            with pytest.raises(ValueError, match="do not fit: missing "):
                LOAD(tmp_path, output_loading_info=True)

    def test_a_checkpoint_without_a_head_is_loaded_if_its_report_is_asked_for(self, tmp_path):
        base = made("llama", tie_word_embeddings=False).model
        base.save_pretrained(tmp_path)
        message = r"do not fit: missing lm_head\.weight\. .*output_loading_info=True"
        with pytest.raises(ValueError, match=message):
            LOAD(tmp_path)
        model, report = LOAD(tmp_path, output_loading_info=True)
        assert set(report["missing_keys"]) == {HEAD}
        assert same_weights(model.model, base)

    @pytest.mark.parametrize("given", [{"tp_plan": "auto"}, {"tp_size": 2}])
    def test_a_plan_to_split_layers_is_refused(self, given, tmp_path):
        made("llama").save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=rf"leave out {next(iter(given))}: .* FSDP"):
            LOAD(tmp_path, **given)

    def test_weights_that_the_configuration_does_not_describe(self, tmp_path):
        made("llama").save_pretrained(tmp_path)
        one = {"backbone": {"n_layers": 1}}
        wider = {"backbone": {"d_model": 16}, "ignore_mismatched_sizes": True}
        for fields, error, message in (
            (one, ValueError, r"do not fit: unexpected model\.core\.backbone\.layers\.1\."),
            (wider, ValueError, r"do not fit: of another shape model\.core\."),
            ({"hiden_size": 8}, TypeError, "unexpected keyword argument 'hiden_size'"),
            ({"config": configured("llama"), "vocab_size": 8}, TypeError, "argument 'vocab_size'"),
        ):
            with pytest.raises(error, match=message):
                LOAD(tmp_path, **fields)
        model, report = LOAD(tmp_path, **one, output_loading_info=True)
        assert len(model.model.core.backbone.layers) == 1
        assert {name.split(".")[4] for name in report["unexpected_keys"]} == {"1"}
        # another vocabulary is drawn anew where that is asked for
        with pytest.raises(ValueError, match=r"of another shape .*embed_tokens\.weight"):
            LOAD(tmp_path, vocab_size=500)
        other = LOAD(tmp_path, vocab_size=500, ignore_mismatched_sizes=True)
        assert_drawn(other.lm_head.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weight: weight * torch.nan, r"not finite lm_head\.weight"),
        (lambda weight: weight[:2], r"of another shape lm_head\.weight"),
    ],
)
def test_a_file_with_other_weights_names_them(change, message, tmp_path):
    made("llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    weights = stored(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(weights | {HEAD: change(weights[HEAD])}, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        LOAD(tmp_path)
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"the weights in .* cannot be read"):
        LOAD(tmp_path)


@EVERY
@torch.no_grad()
def test_offloaded_layers_are_refused_and_an_offloaded_head_is_exact(kind):
    accelerate = pytest.importorskip("accelerate")
    model = made(kind, tie_word_embeddings=False)
    wanted = model(IDS).logits
    with pytest.raises(ValueError, match=r"offloaded .*load the whole model onto one device"):
        accelerate.cpu_offload(copy.deepcopy(model), execution_device="cpu")(IDS)
    accelerate.cpu_offload(model.lm_head, execution_device="cpu")
    assert model.lm_head.weight.is_meta
    assert torch.equal(model(IDS).logits, wanted)
