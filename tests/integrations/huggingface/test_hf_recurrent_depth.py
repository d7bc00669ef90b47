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
from transformers import AutoModel, AutoModelForCausalLM

import deqseq as dq
from deqseq.integrations.foreign import from_state
from deqseq.integrations.huggingface import from_causal_lm, from_decoder, retrofit, to_causal_lm
from deqseq.integrations.huggingface.conversion import EVAL, TRAIN
from deqseq.models.specification import specification_of

PARTS = {"prelude": 1, "core": 2, "coda": 1}
NAMES = ("llama", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt_neox", "smollm3")
FAMILIES = pytest.mark.parametrize("family", NAMES)
FOUR, ONCE = {"stop": dq.Stop.exactly(4)}, {"stop": dq.Stop.exactly(1)}
SWEEPS = (dq.Simultaneous(), dq.Chunked(4), dq.Sliding(3), dq.Sequential())


def retrofitted(family="llama", **changes):
    """With a state that matters."""
    lm = retrofit(made(family), **PARTS | changes)
    if isinstance(lm.core.backbone.injection, dq.ConcatInjection):
        nn.init.normal_(lm.core.backbone.injection.weight.data[:, :32], std=0.02)
    return lm


def biased(model):
    """With a bias in its head."""
    head = model.get_output_embeddings()
    head.bias = nn.Parameter(torch.zeros(len(head.weight)))
    return model


def joined(mlp_width=0, injection="add", **fields):
    """A prelude, a core and a coda of our own layers; without ``injection`` the core
    has its own.
    """
    parts = {"prelude": ATTENTION, "coda": ATTENTION, "injection": injection}
    core = replace(MAMBA2, mlp_width=mlp_width, injection=injection is None)
    torch.manual_seed(0)
    return (
        dq.LanguageModelSpec(37, core, PLAIN, embedding_std=0.5, **parts, **fields)
        .build()
        .double()
        .eval()
    )


def ouro():
    """Three steps of the layers, without a gate."""
    stack = dq.Llama(dq.LlamaConfig(8, 2, 2, norms="sandwich", weight_norm=False, injection=False))
    return dq.CausalLM(37, dq.ExplicitModel(dq.Looped(stack, 3)), 0.5).double().eval()


def huginn():
    return from_state(config("huginn"), tensors("huginn"))


class TestRetrofit:
    @pytest.mark.filterwarnings("ignore::UserWarning:peft")
    def test_offloaded_layers_and_adapters_with_dropout_are_refused(self):
        accelerate, peft = pytest.importorskip("accelerate"), pytest.importorskip("peft")
        adapted = peft.get_peft_model(
            retrofitted(), peft.LoraConfig(target_modules=["q_proj"], lora_dropout=0.1)
        )
        with pytest.raises(ValueError, match="must have no dropout"):
            adapted.train()(LONGER)
        with pytest.raises(ValueError, match="offloaded"):
            accelerate.cpu_offload(retrofitted(), execution_device="cpu")(LONGER)

    @FAMILIES
    @torch.no_grad()
    def test_before_training_any_number_of_iterations_is_the_model(self, family):
        theirs = made(family)
        lm, expected = retrofit(theirs, **PARTS), theirs(LONGER).logits
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
            same(
                retrofit(theirs, **PARTS, injection=injection)(LONGER, **ONCE).logits,
                expected,
                1e-6,
            )

    @torch.no_grad()
    def test_layers_can_be_dropped_and_stay_dropped(self, tmp_path):
        theirs = made("llama")
        lm = retrofit(theirs, prelude=1, core=1, coda=1, dropped=1)
        model = from_causal_lm(lm)
        assert (model.config.backbone["first"], model.config.num_hidden_layers) == (2, 3)
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
        assert (lm.core.solve, lm.core.eval_solve) == (TRAIN, EVAL)
        injection = dq.AddInjection()
        lm = retrofit(theirs.train(), **PARTS, injection=injection, eval_solve=None)
        assert {id(p) for p in lm.parameters()} == {id(p) for p in theirs.parameters()}
        assert (lm.training, lm.core.backbone.injection, lm.core.eval_solve) == (
            True,
            injection,
            None,
        )

    @pytest.mark.parametrize(
        ("changed", "error", "message"),
        [
            ({"coda": 2}, ValueError, r"add up to the model's 4 layers, got 1 \+ 2 \+ 2 \+ 0 = 5"),
            ({"prelude": 0}, ValueError, "prelude must be an integer >= 1, got 0"),
            (
                {"model": nn.Linear(2, 2)},
                TypeError,
                "model must be a PreTrainedModel or a string or a PathLike, got ",
            ),
            (
                {"model": AutoModel.from_config(made("llama").config)},
                ValueError,
                "ForCausalLM, got LlamaModel",
            ),
            (
                {"model": biased(made("llama", tie_word_embeddings=False))},
                ValueError,
                "head must have no bias",
            ),
            ({"model": made("gpt_neox", attention_dropout=0.1)}, ValueError, "no dropout"),
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
    "the core's own injection": partial(
        joined, 12, None, tied=False, embedding_scale=3.0, logit_softcap=2.0
    ),
}


class TestFiles:
    @pytest.mark.parametrize("make", SAVED.values(), ids=SAVED)
    @torch.no_grad()
    def test_a_saved_model_computes_the_same(self, make, tmp_path):
        lm = make()
        solve = None if lm.core is None else FOUR
        model, expected = from_causal_lm(lm), lm(LONGER, **solve or {}).logits
        assert torch.equal(model(LONGER, solve=solve).logits, expected)
        model.save_pretrained(tmp_path)
        again = copy.deepcopy(AutoModelForCausalLM.from_pretrained(tmp_path))
        assert same_weights(again, model)
        assert again.config.to_json_string() == model.config.to_json_string()
        same(
            again(LONGER, solve=solve).logits, expected, 1e-5
        )  # Gemma's scale was rounded to float32 before
        same(to_causal_lm(again)(LONGER, **solve or {}).logits, expected, 1e-5)
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
        assert {norm, "model.core.norm.weight"} & load_file(
            tmp_path / "model.safetensors"
        ).keys() == {norm}
        for one in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
            assert one.model.core.norm.weight is one.model.core.coda.backbone.norm.weight
            assert (
                one.all_tied_weights_keys["model.core.norm.weight"] == norm
            )  # what other tools ask
            assert one.config.norm == "coda"


def changed(lm, **parts):
    """With other parts, as a user may have set them."""
    for name, part in parts.items():
        setattr(
            lm.model,
            name,
            part(lm.model) if callable(part) and not isinstance(part, nn.Module) else part,
        )
    return lm


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: retrofitted(injection=type("Half", (dq.AddInjection,), {})()),
            r"cannot name Half \(known: concat, ",
        ),
        (
            lambda: changed(retrofitted(), norm=nn.LayerNorm(32)),
            "the last norm of its coda, .*got LayerNorm",
        ),
        (lambda: changed(retrofitted(), prelude=retrofitted().model.prelude), "of one decoder"),
        (lambda: changed(joined(), prelude=lambda model: model.coda), "weights of their own"),
        (
            lambda: changed(joined(), prelude=dq.ExplicitModel(dq.Affine(8))),
            r"cannot name a Affine .*state_dict\(\)",
        ),
        (
            lambda: dq.CausalLM(13, dq.ExplicitModel(dq.Looped(dq.Affine(8), 2, nn.Identity()))),
            "Looped.choose",
        ),
    ],
)
def test_what_a_configuration_cannot_name_is_refused(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        from_causal_lm(make())
