"""Retrofitted decoders as models of transformers: every family, and what the contracts do not ask for."""

import copy
import json

import pytest
import torch
from hf_models import IDS as SMALL_IDS
from hf_models import SPLIT, STABLELM, Retrofit, same_weights
from hf_runs import trainer
from huggingface_hub.errors import StrictDataclassError
from test_hf_decoder import IDS, LENGTHS, made, same
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

import deqseq as dq
from deqseq.integrations.huggingface import (
    CurriculumCallback,
    ImplicitLlamaConfig,
    RecurrentDepthConfig,
    RecurrentDepthForCausalLM,
    from_causal_lm,
    retrofit,
    to_causal_lm,
)
from deqseq.training import Curriculum, PoissonLogNormal, unrolled

FAMILIES = pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt_neox", "smollm3"]
)
PARTS = {"prelude": 1, "core": 2, "coda": 1}


def retrofitted(family="llama", **changes):
    """With a state that matters."""
    lm = retrofit(made(family), **PARTS | changes)
    if isinstance(lm.core.backbone.injection, dq.ConcatInjection):
        nn.init.normal_(lm.core.backbone.injection.weight.data[:, :32], std=0.02)
    return lm


class TestFiles:
    @FAMILIES
    @pytest.mark.parametrize("injection", ["concat", "decay"])
    @torch.no_grad()
    def test_a_saved_model_computes_the_same(self, family, injection, tmp_path):
        lm = retrofitted(family, injection=injection)
        model = from_causal_lm(lm)
        call = {"stop": dq.Stop.exactly(3)}
        expected = lm(IDS, **call).logits
        assert torch.equal(model(IDS, solve=call).logits, expected)
        model.save_pretrained(tmp_path)
        again = AutoModelForCausalLM.from_pretrained(tmp_path)
        assert type(again) is RecurrentDepthForCausalLM
        assert same_weights(again, model)
        assert again.config.to_json_string() == model.config.to_json_string()
        same(again(IDS, solve=call).logits, expected, 1e-5)  # Gemma's scale was rounded to float32 before
        same(to_causal_lm(again)(IDS, **call).logits, expected, 1e-5)
        half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert {p.dtype for p in half.parameters()} == {torch.bfloat16}
        assert half(IDS, solve=call).logits.isfinite().all()

    @torch.no_grad()
    def test_dropped_layers_stay_dropped(self, tmp_path):
        lm = retrofitted(core=1, dropped=1)
        model = from_causal_lm(lm)
        assert (model.config.dropped, model.config.num_hidden_layers) == (1, 3)
        model.save_pretrained(tmp_path)
        again = copy.deepcopy(AutoModelForCausalLM.from_pretrained(tmp_path))
        same(again(IDS).logits, lm(IDS).logits)

    def test_a_new_model_is_that_of_the_decoders_family(self):
        decoder = AutoConfig.for_model("stablelm", **STABLELM | {"vocab_size": 4000})
        config = RecurrentDepthConfig(decoder_config=decoder, **SPLIT, tie_word_embeddings=False)
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config)
        torch.manual_seed(3)
        theirs = AutoModelForCausalLM.from_config(decoder)
        same(model.model.embed_tokens.weight, theirs.model.embed_tokens.weight)
        for part, numbers in zip((model.model.core.prelude, model.model.core.coda), ([0], [3]), strict=True):
            for layer, number in zip(part.backbone.layers, numbers, strict=True):
                assert same_weights(layer, theirs.model.layers[number])
        assert torch.equal(model.model.solved.backbone.injection.weight, torch.eye(16)[8:])
        assert abs(model.lm_head.weight.std().item() / 0.5 - 1) < 0.05

    def test_layers_are_kept_on_one_device(self):
        assert "GPTNeoXLayer" in from_causal_lm(retrofitted("gpt_neox"))._no_split_modules

    def test_a_classifier(self, tmp_path):
        from_causal_lm(retrofitted(), pad_token_id=0).save_pretrained(tmp_path)
        classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
        assert classifier(IDS).logits.shape == (3, 3)

    def test_tokens_and_cap_are_those_of_the_decoder(self):
        config = RecurrentDepthConfig(decoder_config=made("gemma2").config, **PARTS)
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
        assert (config.logit_softcap, config.vocab_size, config.hidden_size) == (0.5, 37, 32)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"core": 3}, "must add up to the decoder's 4 layers, got 5"),
            ({"prelude": 0}, r"RecurrentDepthConfig\.prelude must be an integer >= 1, got 0"),
            ({"injection": "conat"}, r"RecurrentDepthConfig\.injection must be one of .*did you mean 'concat'"),
            ({"hidden_size": 16}, r"RecurrentDepthConfig\.hidden_size must be 32, as its parts have, got 16"),
            ({"embedding_dropout": 1.0}, r"RecurrentDepthConfig\.embedding_dropout must be a number in \[0, 1\)"),
            ({"logit_softcap": 0.0}, r"RecurrentDepthConfig\.logit_softcap must be a number in \(0, inf\), got 0.0"),
            ({"num_hidden_layers": 3}, r"num_hidden_layers must be 4, as its parts have, got 3"),
            ({"solve": {"swep": "Sliding"}}, "field 'swep' .*did you mean 'sweep'"),
            ({"codda": 1}, "field 'codda' .*did you mean 'coda'"),
        ],
    )
    def test_bad_configurations_are_named(self, fields, message):
        with pytest.raises((ValueError, StrictDataclassError), match=message):
            RecurrentDepthConfig(**{"decoder_config": made("llama").config, **PARTS, **fields})


class TestGeneration:
    @FAMILIES
    @torch.no_grad()
    def test_before_training_it_generates_as_the_decoder(self, family):
        theirs = made(family).float()
        model = from_causal_lm(retrofit(theirs, **PARTS), eos_token_id=None)
        mask = (torch.arange(11) < LENGTHS[:, None]).flip(1)
        prompt = IDS.masked_fill(~mask, 0)
        for options in ({"num_beams": 1}, {"num_beams": 3}):
            options |= {"do_sample": False, "max_new_tokens": 4, "attention_mask": mask.long(), "pad_token_id": 0}
            theirs.generation_config.eos_token_id = model.generation_config.eos_token_id = None
            assert torch.equal(model.generate(prompt, **options), theirs.generate(prompt, **options))


class TestTraining:
    def test_the_layers_of_the_core_are_recomputed_once(self):
        model = Retrofit().model().train()
        model(SMALL_IDS, labels=SMALL_IDS).loss.backward()
        plain = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        calls = {"prelude": 0, "core": 0}
        places = {"prelude": model.model.core.prelude.backbone, "core": model.model.solved.backbone.backbone}
        for name, backbone in places.items():
            count = lambda *_, name=name: calls.update({name: calls[name] + torch.is_grad_enabled()})  # noqa: E731
            backbone.layers[0].self_attn.q_proj.register_forward_hook(count)
        model.zero_grad()
        model.activation_checkpointing_enable({"use_reentrant": False})
        model(SMALL_IDS, labels=SMALL_IDS).loss.backward()
        assert calls == {"prelude": 2, "core": 9}  # the first evaluation, four phantom steps, and those again
        for name, parameter in model.named_parameters():
            assert (parameter.grad - plain[name]).abs().max() < 1e-10, name

    @pytest.mark.filterwarnings("ignore::UserWarning:torch")
    def test_a_curriculum_of_drawn_depth_in_the_trainer(self, tmp_path):
        model = Retrofit().model().float()
        before = copy.deepcopy(model.state_dict())
        phase = unrolled(PoissonLogNormal(3), last=2, until=None, base=dq.SolveConfig(dq.Naive()))
        run = trainer(model, tmp_path, max_steps=3)
        run.add_callback(CurriculumCallback(Curriculum((phase,))))
        run.train()
        changed = [name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])]
        assert "model.core.core.backbone.injection.weight" in changed
        assert len(changed) == len(before)
        run.save_model(tmp_path / "model")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        assert again.model.solved.solve == phase.solve
        assert same_weights(again, model)


class TestFromCausalLM:
    @pytest.mark.parametrize("scale", [1.0, 3.0])
    @torch.no_grad()
    def test_scale_and_cap_are_carried(self, scale, tmp_path):
        backbone = dq.Llama(dq.LlamaConfig(16, n_heads=2, n_layers=1))
        lm = dq.CausalLM(13, dq.ImplicitModel(backbone), 0.5, embedding_scale=scale, logit_softcap=0.7).eval()
        model = from_causal_lm(lm)
        assert (model.config.embedding_scale, model.config.logit_softcap) == (scale, 0.7)
        model.save_pretrained(tmp_path)
        again = copy.deepcopy(AutoModelForCausalLM.from_pretrained(tmp_path))
        for same_model in (model, again, to_causal_lm(again)):
            assert torch.equal(same_model(SMALL_IDS).logits, lm(SMALL_IDS).logits)
        built = again.config.specification().build()
        assert (built.embedding_scale, built.logit_softcap) == (scale, 0.7)
        with pytest.raises(StrictDataclassError, match="logit_softcap must be a number"):
            ImplicitLlamaConfig(hidden_size=16, num_attention_heads=2, logit_softcap=-1.0)

    def test_what_a_configuration_cannot_name_is_refused(self):
        class Half(dq.AddInjection):
            pass

        with pytest.raises(TypeError, match=r"cannot name Half \(known: concat, add, decay\)"):
            from_causal_lm(retrofitted(injection=Half()))
        lm = retrofitted()
        lm.model.core.backbone = lm.model.core.backbone.backbone
        with pytest.raises(TypeError, match="DecoderBackbone, DecoderBackbone, DecoderBackbone without an injection"):
            from_causal_lm(lm)
        lm = retrofitted()
        lm.model.norm = nn.LayerNorm(32)
        with pytest.raises(ValueError, match="without a norm between, as those of retrofit"):
            from_causal_lm(lm)
        lm = retrofitted()
        lm.model.prelude, lm.model.coda = lm.model.coda, lm.model.prelude
        with pytest.raises(ValueError, match=r"in order.*got layers 3 to 3, 1 to 2, 0 to 0"):
            from_causal_lm(lm)
        lm = retrofitted()
        lm.model.prelude = retrofitted().model.prelude
        with pytest.raises(ValueError, match="of one decoder"):
            from_causal_lm(lm)

    def test_a_description_holds_the_decoders_own(self):
        written = json.loads(from_causal_lm(retrofitted("qwen3")).config.to_json_string(use_diff=False))
        assert written["decoder_config"]["model_type"] == "qwen3"
        assert {name: written[name] for name in PARTS} == PARTS
        assert written["injection"] == "concat"


def test_a_cap_that_was_taken_away_is_refused():
    """In a configuration None stands for the decoder's own."""
    lm = retrofit(made("gemma2"), **PARTS)
    assert lm.logit_softcap is not None
    lm.logit_softcap = None
    with pytest.raises(ValueError, match=r"lm\.logit_softcap must be the decoder's"):
        from_causal_lm(lm)
