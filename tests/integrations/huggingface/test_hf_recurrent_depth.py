"""Retrofitted decoders, and recurrent depth of this library's layers, as models of transformers."""

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from hf_models import ATTENTION, MAMBA2, PLAIN, same_weights
from integrations.golden import config, tensors
from safetensors.torch import load_file
from test_hf_decoder import IDS as LONGER
from test_hf_decoder import made, same
from torch import nn
from transformers import AutoModelForCausalLM

import deqseq as dq
from deqseq.integrations.foreign import from_state
from deqseq.integrations.huggingface import from_causal_lm, from_decoder, retrofit, to_causal_lm
from deqseq.integrations.huggingface.conversion import EVAL, TRAIN
from deqseq.models.specification import specification_of

PARTS = {"prelude": 1, "core": 2, "coda": 1}
NAMES = ("llama", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt_neox", "smollm3")
FAMILIES = pytest.mark.parametrize("family", NAMES)
FOUR = {"stop": dq.Stop.exactly(4)}
ONCE = {"stop": dq.Stop.exactly(1)}
AFFINE = dq.ExplicitModel(dq.Affine(8))
SWEEPS = (dq.Simultaneous(), dq.Chunked(4), dq.Sliding(3), dq.Sequential())


def retrofitted(family="llama", **changes):
    """With a state that matters."""
    lm = retrofit(made(family), **PARTS | changes)
    if isinstance(lm.core.backbone.injection, dq.ConcatInjection):
        nn.init.normal_(lm.core.backbone.injection.weight.data[:, :32], std=0.02)
    return lm


def biased():
    """A decoder with a bias in its head."""
    model = made("llama", tie_word_embeddings=False)
    model.lm_head.bias = nn.Parameter(torch.zeros(37))
    return model


def joined(mlp_width=0, injection="add", **fields):
    """A prelude, a core and a coda of our own layers; without ``injection`` the core has one."""
    parts = {"prelude": ATTENTION, "coda": ATTENTION, "injection": injection}
    core = replace(MAMBA2, mlp_width=mlp_width, injection=injection is None)
    torch.manual_seed(0)
    spec = dq.LanguageModelSpec(37, core, PLAIN, embedding_std=0.5, **parts, **fields)
    return spec.build().double().eval()


def ouro():
    return from_state(config("ouro"), tensors("ouro"))


def huginn():
    return from_state(config("huginn"), tensors("huginn"))


class TestRetrofit:
    @pytest.mark.filterwarnings("ignore::UserWarning:peft")
    def test_an_adapter_with_dropout_is_refused(self):
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
        adapted = peft.get_peft_model(retrofitted(), config)
        with pytest.raises(ValueError, match="must have no dropout"):
            adapted.train()(LONGER)

    @FAMILIES
    @torch.no_grad()
    def test_before_training_any_number_of_iterations_is_the_model(self, family):
        theirs = made(family)
        lm = retrofit(theirs, **PARTS)
        expected = theirs(LONGER).logits
        same(lm(LONGER, **ONCE).logits, expected)
        for sweep in SWEEPS:
            output = lm(LONGER, sweep=sweep)
            same(output.logits, expected, 1e-6)
            assert output.converged.all()
            assert output.stats.iterations.max() <= (4 if isinstance(sweep, dq.Sliding) else 2)
        nn.init.normal_(lm.core.backbone.injection.weight[:, :32], std=0.05)
        same(lm(LONGER, **ONCE).logits, expected)  # the state is zero
        assert (lm(LONGER, stop=dq.Stop.exactly(2)).logits - expected).abs().max() > 1e-3
        for injection in ("add", "decay"):
            lm = retrofit(theirs, **PARTS, injection=injection)
            same(lm(LONGER, **ONCE).logits, expected, 1e-6)

    @torch.no_grad()
    def test_layers_can_be_dropped_and_stay_dropped(self, tmp_path):
        theirs = made("llama")
        lm = retrofit(theirs, prelude=1, core=1, coda=1, dropped=1)
        model = from_causal_lm(lm)
        assert model.config.backbone["first"] == 2
        assert model.config.num_hidden_layers == 3
        model.save_pretrained(tmp_path)
        again = copy.deepcopy(AutoModelForCausalLM.from_pretrained(tmp_path))
        del theirs.model.layers[1]
        theirs.config.num_hidden_layers = 3
        expected = theirs(LONGER, use_cache=False).logits
        for one in (lm, again):
            same(one(LONGER).logits, expected)

    def test_a_name_is_loaded_and_weights_are_shared(self, tmp_path):
        theirs = made("qwen3", tie_word_embeddings=False).bfloat16()
        theirs.save_pretrained(tmp_path)
        lm = retrofit(tmp_path, **PARTS)
        assert torch.equal(lm(LONGER).logits, retrofit(str(tmp_path), **PARTS)(LONGER).logits)
        assert {parameter.dtype for parameter in lm.parameters()} == {torch.bfloat16}
        assert not lm.training
        assert lm.core.solve == TRAIN
        assert lm.core.eval_solve == EVAL
        injection = dq.AddInjection()
        lm = retrofit(theirs.train(), **PARTS, injection=injection, eval_solve=None)
        assert {id(p) for p in lm.parameters()} == {id(p) for p in theirs.parameters()}
        assert lm.training
        assert lm.core.backbone.injection == injection
        assert lm.core.eval_solve is None

    @pytest.mark.parametrize(
        ("changed", "error", "message"),
        [
            ({"coda": 2}, ValueError, r"add up to the model's 4 layers, got 1 \+ 2 \+ 2 \+ 0 = 5"),
            ({"prelude": 0}, ValueError, "prelude must be an integer >= 1, got 0"),
            ({"model": nn.Linear(2, 2)}, TypeError, "model must be a PreTrainedModel or a string"),
            ({"model": made("llama").base_model}, ValueError, "ForCausalLM, got LlamaModel"),
            ({"model": biased()}, ValueError, "head must have no bias"),
        ],
    )
    def test_bad_arguments_are_named(self, changed, error, message):
        with pytest.raises(error, match=message):
            retrofit(**{"model": made("llama"), **PARTS, **changed})


SAVED = {
    **{family: partial(retrofitted, family) for family in NAMES},
    **{injection: partial(retrofitted, injection=injection) for injection in ("decay", "add")},
    "decoder": lambda: from_decoder(made("gemma2")),
    "Ouro": ouro,
    "Huginn": huginn,
    "joined": lambda: joined(12, None, tied=False, embedding_scale=3.0, logit_softcap=2.0),
}


class TestFiles:
    @pytest.mark.parametrize("make", SAVED.values(), ids=SAVED)
    @torch.no_grad()
    def test_a_saved_model_computes_the_same(self, make, tmp_path):
        lm = make()
        ours = {} if lm.core is None else FOUR
        solve = ours or None
        model = from_causal_lm(lm)
        expected = lm(LONGER, **ours).logits
        assert torch.equal(model(LONGER, solve=solve).logits, expected)
        model.save_pretrained(tmp_path)
        again = copy.deepcopy(AutoModelForCausalLM.from_pretrained(tmp_path))
        assert same_weights(again, model)
        assert again.config.to_json_string() == model.config.to_json_string()
        # Gemma's scale was rounded to float32 before
        same(again(LONGER, solve=solve).logits, expected, 1e-5)
        same(to_causal_lm(again)(LONGER, **ours).logits, expected, 1e-5)
        assert specification_of(to_causal_lm(again)) == specification_of(lm)
        half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
        assert half(LONGER, solve=solve).logits.isfinite().all()

    @pytest.mark.parametrize("tied", [True, False])
    def test_the_norm_that_huginn_uses_twice_is_stored_once(self, tied, tmp_path):
        lm = huginn()
        if not tied:
            lm.head = nn.Linear(24, 61, bias=False, dtype=torch.float64)
        model = from_causal_lm(lm)
        model.save_pretrained(tmp_path)
        norm = "model.core.coda.backbone.norm.weight"
        stored = load_file(tmp_path / "model.safetensors")
        assert norm in stored
        assert "model.core.norm.weight" not in stored
        for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
            assert one.model.core.norm.weight is one.model.core.coda.backbone.norm.weight
            assert one.all_tied_weights_keys["model.core.norm.weight"] == norm  # for other tools
            assert one.config.norm == "coda"

    def test_parameters_that_are_tied_are_there(self):
        for model in (from_causal_lm(huginn()), from_causal_lm(retrofitted())):
            tied = {f"model.{name}" for name in model.model._tied_weights_keys or ()}
            assert tied <= dict(model.named_parameters(remove_duplicate=False)).keys()


@pytest.mark.parametrize(
    ("make", "part", "value", "message"),
    [
        (
            retrofitted,
            "norm",
            lambda lm: nn.LayerNorm(32),
            "the last norm of its coda, .*LayerNorm",
        ),
        (retrofitted, "prelude", lambda lm: retrofitted().model.prelude, "of one decoder"),
        (joined, "prelude", lambda lm: lm.model.coda, "weights of their own"),
        (joined, "prelude", lambda lm: AFFINE, r"cannot name a Affine .*state_dict\(\)"),
    ],
)
def test_a_part_that_a_configuration_cannot_name_is_refused(make, part, value, message):
    lm = make()
    setattr(lm.model, part, value(lm))
    with pytest.raises((TypeError, ValueError), match=message):
        from_causal_lm(lm)


def test_an_injection_that_a_configuration_cannot_name_is_refused():
    injection = type("Half", (dq.AddInjection,), {})()
    with pytest.raises(TypeError, match=r"cannot name Half \(known: concat, "):
        from_causal_lm(retrofitted(injection=injection))
