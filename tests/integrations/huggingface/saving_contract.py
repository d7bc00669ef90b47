"""What every model of ours must do when it is saved, loaded and initialised: inherited by one class a family."""

import copy
import json
from dataclasses import replace

import pytest
import torch
from hf_models import IDS, same_weights
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, GenerationConfig

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm, to_causal_lm
from deqseq.layers import apply_weight_norm, fold_weight_norm
from deqseq.training import free


def stored(folder) -> dict:
    """All weights in a folder's safetensors."""
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def loaded(folder):
    """A saved model in memory of its own: how a mapped file is aligned changes the last bit of a product."""
    return copy.deepcopy(AutoModelForCausalLM.from_pretrained(folder))


class SavingContract:
    def test_reload(self, tmp_path, monkeypatch):
        def refuse(*args, **kwargs):
            raise AssertionError("torch.save and torch.load are not to be used")

        monkeypatch.setattr(torch, "save", refuse)
        monkeypatch.setattr(torch, "load", refuse)
        model = self.model()
        model.save_pretrained(tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == [
            "config.json",
            "deqseq_models.py",
            "generation_config.json",
            "model.safetensors",
        ]
        again = loaded(tmp_path)
        assert type(again) is self.model_class
        assert not again.training
        assert again.dtype == torch.float64
        assert same_weights(model, again)
        assert torch.equal(model(IDS).logits, again(IDS).logits)
        assert again.config.to_json_string() == model.config.to_json_string()

    def test_shards(self, tmp_path):
        model = self.model()
        model.save_pretrained(tmp_path, max_shard_size="4KB")
        assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
        assert same_weights(model, AutoModelForCausalLM.from_pretrained(tmp_path))

    @pytest.mark.parametrize("tied", [True, False])
    def test_tied_weights_are_stored_once(self, tmp_path, tied):
        model = self.model(tie_word_embeddings=tied)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        model.save_pretrained(tmp_path)
        kept = {"lm_head.weight", "model.embed_tokens.weight"} & stored(tmp_path).keys()
        assert kept == ({"model.embed_tokens.weight"} if tied else {"lm_head.weight", "model.embed_tokens.weight"})
        again = self.model_class.from_pretrained(tmp_path)
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
        assert same_weights(model, again)

    def test_dtype_and_device_map(self, tmp_path):
        model = self.model()
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, device_map="cpu")
        assert {(p.dtype, p.device.type) for p in again.parameters()} == {(torch.bfloat16, "cpu")}
        assert same_weights(model.to(torch.bfloat16), again)
        assert again(IDS).logits.dtype == torch.bfloat16

    @pytest.mark.parametrize("weight_norm", [True, False])
    def test_weight_norm(self, tmp_path, weight_norm):
        model = self.model(weight_norm=weight_norm)
        model.save_pretrained(tmp_path)
        parts = {name.rpartition(".")[2] for name in stored(tmp_path) if ".parametrizations." in name}
        assert parts == ({"original0", "original1"} if weight_norm else set())
        assert torch.equal(model(IDS).logits, loaded(tmp_path)(IDS).logits)

    def test_there_is_nothing_that_a_checkpoint_misses(self):
        model = self.model()
        assert {name.rpartition(".")[2] for name, _ in model.named_buffers()} <= {"inv_freq", "original_inv_freq"}
        assert model.state_dict().keys() - dict(model.named_parameters()).keys() == {"lm_head.weight"}

    def test_base_model_of_a_checkpoint(self, tmp_path):
        model = self.model(tie_word_embeddings=False)
        model.save_pretrained(tmp_path)
        base = copy.deepcopy(AutoModel.from_pretrained(tmp_path))
        assert type(base) is type(model.model)
        assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)

    # initial weights

    @pytest.mark.parametrize("weight_norm", [True, False])
    def test_a_new_model_is_that_of_the_core(self, weight_norm):
        sizes = {"vocab_size": 4000, "hidden_size": 16, "weight_norm": weight_norm}
        config = self.config(initializer_range=0.02, tie_word_embeddings=False, **sizes)
        torch.manual_seed(3)
        core = config.specification().build_model()
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        assert same_weights(core, model.model.core)
        for weight in (model.lm_head.weight, model.model.embed_tokens.weight):
            assert abs(weight.std().item() / 0.02 - 1) < 0.02
            assert abs(weight.mean().item()) < 5e-4

    # checkpoints that do not fit

    def test_a_missing_weight_is_an_error(self, tmp_path):
        weights = self.without(tmp_path, self.second_layer)
        with pytest.raises(ValueError, match=r"^the weights in .* do not fit: missing ") as error:
            AutoModelForCausalLM.from_pretrained(tmp_path)
        assert all(name in str(error.value) for name in sorted(weights)[:8])
        with pytest.raises(ValueError, match="do not fit: missing "):  # nothing would draw them
            AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)

    def test_a_missing_embedding_is_an_error(self, tmp_path):
        self.without(tmp_path, "model.embed_tokens.weight")
        with pytest.raises(ValueError, match=r"do not fit: missing lm_head\.weight, model\.embed_tokens\.weight"):
            AutoModelForCausalLM.from_pretrained(tmp_path)

    def test_a_checkpoint_without_a_head_is_loaded_if_its_report_is_asked_for(self, tmp_path):
        base = self.model(tie_word_embeddings=False).model
        base.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"do not fit: missing lm_head\.weight\. .*output_loading_info=True"):
            AutoModelForCausalLM.from_pretrained(tmp_path)
        model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
        assert set(report["missing_keys"]) == {"lm_head.weight"}
        assert same_weights(model.model, base)

    def test_a_classifier_begins_with_a_language_model(self, tmp_path):
        model = self.model(tie_word_embeddings=False, pad_token_id=0)
        model.save_pretrained(tmp_path / "lm")
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path / "lm", num_labels=3)
        assert same_weights(classifier.model, model.model)
        classifier.save_pretrained(tmp_path / "classifier")
        again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "classifier")
        assert same_weights(again, classifier)
        base = AutoModel.from_pretrained(tmp_path / "classifier")
        assert same_weights(base, model.model)

    def test_another_number_of_labels_may_be_drawn_anew(self, tmp_path):
        self.model(tie_word_embeddings=False, pad_token_id=0).save_pretrained(tmp_path / "lm")
        load = AutoModelForSequenceClassification.from_pretrained
        classifier = load(tmp_path / "lm", num_labels=3)
        classifier.save_pretrained(tmp_path / "classifier")
        again = load(tmp_path / "classifier", num_labels=500, ignore_mismatched_sizes=True)
        assert same_weights(again.model, classifier.model)
        assert abs(again.score.weight.std().item() / 0.5 - 1) < 0.05

    @torch.no_grad()
    def test_folded_weights_are_the_same_to_the_last_bit(self, tmp_path):
        model = self.model(weight_norm=True)
        before = model(IDS).logits
        model.fold_weight_norm()
        assert torch.equal(model(IDS).logits, before)
        assert not any(".parametrizations." in name for name in model.state_dict())
        assert not model.config.weight_norm
        model.save_pretrained(tmp_path)
        assert torch.equal(loaded(tmp_path)(IDS).logits, before)
        assert from_causal_lm(to_causal_lm(model)).config.weight_norm is False

    @pytest.mark.parametrize("folded", [True, False])
    @torch.no_grad()
    def test_weight_norm_is_saved_as_it_is_now(self, tmp_path, folded):
        model = self.model(weight_norm=folded)
        (fold_weight_norm if folded else apply_weight_norm)(model.model.core)
        model.save_pretrained(tmp_path)
        assert torch.equal(loaded(tmp_path)(IDS).logits, model(IDS).logits)

    def test_weight_norm_of_some_layers_alone_is_refused_before_anything_is_written(self, tmp_path):
        model = self.model(weight_norm=True)
        layer = next(layer for layer in model.model.core.modules() if isinstance(layer, nn.Linear))
        fold_weight_norm(layer)
        for save in (lambda: model.save_pretrained(tmp_path), lambda: from_causal_lm(to_causal_lm(model))):
            with pytest.raises(ValueError, match=r"weight normalisation must be on all layers .* or on none"):
                save()
        assert not list(tmp_path.iterdir())

    @torch.no_grad()
    def test_a_head_that_was_tied_by_hand_is_saved_as_tied(self, tmp_path):
        lm = to_causal_lm(self.model(tie_word_embeddings=False))
        lm.head.weight = lm.embedding.weight
        model = from_causal_lm(lm)
        model.save_pretrained(tmp_path)
        assert torch.equal(loaded(tmp_path)(IDS).logits, model(IDS).logits)

    def test_what_a_phase_has_set_is_saved(self, tmp_path):
        model = self.model()
        if not self.implicit:
            pytest.skip("there is nothing to solve")
        phase = free(7, rtol=0.125)
        model.config.solve = {"stop": {"max_steps": 3}}  # a built model does not read it any more
        phase.apply(model)
        model.base_model.gradient_checkpointing = True  # of this run alone
        model.save_pretrained(tmp_path)
        core = loaded(tmp_path).base_model.solved
        assert (core.solve, core.eval_solve) == (phase.solve, phase.eval_solve)

    def test_more_weights_than_the_model_has_are_an_error_or_reported(self, tmp_path):
        self.model().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"do not fit: unexpected model\.core\.backbone\.layers\.1\."):
            AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=1)
        model, report = self.model_class.from_pretrained(tmp_path, num_hidden_layers=1, output_loading_info=True)
        assert len(model.model.core.backbone.layers) == 1
        assert {name.split(".")[4] for name in report["unexpected_keys"]} == {"1"}

    def test_weights_of_another_shape_are_an_error(self, tmp_path):
        self.model().save_pretrained(tmp_path)
        with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
            AutoModelForCausalLM.from_pretrained(tmp_path, hidden_size=16, head_dim=4)
        with pytest.raises(ValueError, match=r"do not fit: of another shape model\.core\.backbone"):
            AutoModelForCausalLM.from_pretrained(tmp_path, hidden_size=16, head_dim=4, ignore_mismatched_sizes=True)

    def test_another_vocabulary_may_be_drawn_anew(self, tmp_path):
        self.model().save_pretrained(tmp_path)
        options = {"vocab_size": 500, "ignore_mismatched_sizes": True}
        model = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert abs(model.lm_head.weight.std().item() / 0.5 - 1) < 0.05

    def test_a_misspelt_keyword_is_an_error(self, tmp_path):
        self.model().save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=r"keyword 'hiden_size' .*did you mean 'hidden_size'"):
            AutoModelForCausalLM.from_pretrained(tmp_path, hiden_size=8)
        with pytest.raises(ValueError, match=r"Classification keyword 'hiden_size' .*did you mean 'hidden_size'"):
            AutoModelForSequenceClassification.from_pretrained(tmp_path, hiden_size=8)
        with pytest.raises(TypeError, match="hidden_size belongs to the configuration"):
            AutoModelForCausalLM.from_pretrained(tmp_path, config=self.config(), hidden_size=8)

    # what generates is kept too

    def test_the_generation_configuration_keeps_solve(self, tmp_path):
        model = self.model()
        solve = {"sweep": {"name": "Chunked", "size": 3}, "stop": {"max_steps": 5}}
        model.generation_config.solve = solve
        model.save_pretrained(tmp_path)
        assert json.loads((tmp_path / "generation_config.json").read_text())["solve"] == solve
        assert AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.solve == solve

    def test_an_object_in_the_generation_configuration_is_saved_as_json(self, tmp_path):
        model = self.model()
        model.generation_config = GenerationConfig(solve={"sweep": dq.Sliding(4)})
        model.save_pretrained(tmp_path)
        saved = json.loads((tmp_path / "generation_config.json").read_text())["solve"]
        assert saved == {"sweep": {"name": "Sliding", "window": 4}}
        model.generation_config.solve = {"gradient": dq.Implicit(report=print)}
        with pytest.raises(TypeError, match=r"cannot name <built-in function print>"):
            model.save_pretrained(tmp_path)

    def test_solve_given_at_loading_governs_both_modes(self, tmp_path):
        model = self.model()
        if not self.implicit:
            pytest.skip("there is nothing to solve")
        model.base_model.solved.eval_solve = dq.SolveConfig(stop=dq.Stop(1e-5, max_steps=90))
        model.save_pretrained(tmp_path)
        own = model.base_model.solved
        load = AutoModelForCausalLM.from_pretrained
        core = load(tmp_path, solve={"stop": {"max_steps": 7}}).base_model.solved
        assert core.solve == replace(own.solve, stop=replace(own.solve.stop, max_steps=7))
        assert core.eval_solve == replace(own.eval_solve, stop=dq.Stop(1e-5, max_steps=7))
        core = load(tmp_path, solve={"stop": {"max_steps": 7}}, eval_solve={"stop": {"max_steps": 8}}).base_model.solved
        assert (core.solve.stop.max_steps, core.eval_solve.stop.max_steps) == (7, 8)
        core = load(tmp_path, solve={"stop": {"max_steps": 7}}, eval_solve=None).base_model.solved
        assert (core.solve.stop.max_steps, core.eval_solve) == (7, None)

    def without(self, folder, prefix: str) -> set[str]:
        """A saved model without the weights whose names begin like this; those names."""
        self.model().save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        dropped = {name for name in weights if name.startswith(prefix)}
        assert dropped
        with safe_open(folder / "model.safetensors", framework="pt") as file:
            metadata = file.metadata()
        kept = {name: tensor for name, tensor in weights.items() if name not in dropped}
        save_file(kept, folder / "model.safetensors", metadata)
        return dropped
