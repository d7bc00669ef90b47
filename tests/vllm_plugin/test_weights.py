"""Which saved weights the plugin for vLLM takes, beside the models of deqseq; needs no vLLM."""

import pytest
import torch
from deqseq_vllm.plan import plan
from deqseq_vllm.weights import checked, shapes
from safetensors import safe_open
from safetensors.torch import load_file
from test_plan import SOLVE, layers
from transformers import AutoConfig, AutoModelForCausalLM

import deqseq as dq
from deqseq.integrations.huggingface import from_causal_lm, retrofit

BARE = {"injection": False, "weight_norm": False}
OUTER = layers(**BARE, norms="closed", qk_bias=True)
SPECS = {
    "implicit": {"backbone": layers(2)},
    "weight norm": {"backbone": layers(), "tied": False},
    "qk_norm": {"backbone": layers(**BARE, qk_norm=True, norms="sandwich"), "injection": "add"},
    "huginn": {
        "backbone": layers(2, **BARE, norms="outer", final_norm=False),
        "prelude": layers(**BARE, norms="closed", qk_bias=True, final_norm=False),
        "coda": OUTER,
        "norm": "coda",
        "injection": "concat",
    },
    "looped": {"backbone": layers(**BARE), "solve": None, "steps": 3, "injection": "decay"},
}


def of_spec(**parts):
    return dq.LanguageModelSpec(**{"vocab_size": 50, "solve": SOLVE} | parts).build()


def of_decoder(family, injection="concat", **options):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 1)
    config = AutoConfig.for_model(family, vocab_size=50, **sizes, **heads, **tokens, **options)
    theirs = AutoModelForCausalLM.from_config(config)
    return retrofit(theirs, prelude=1, core=2, coda=1, injection=injection, eval_solve=SOLVE)


MODELS = {name: lambda parts=parts: of_spec(**parts) for name, parts in SPECS.items()}
MODELS |= {
    "llama": lambda: of_decoder("llama", attention_bias=True),
    "qwen2": lambda: of_decoder("qwen2"),
    "qwen3": lambda: of_decoder("qwen3", "decay", head_dim=8),
    "olmo2": lambda: of_decoder("olmo2"),
}


def saved(make, folder):
    """The plan of a model, and the weights as they are in its folder."""
    from_causal_lm(make(), eos_token_id=1).save_pretrained(folder)
    content = AutoConfig.from_pretrained(folder).to_dict()
    return plan(content), load_file(folder / "model.safetensors")


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_the_weights_of_a_model_are_those_that_are_wanted(make, tmp_path):
    found, weights = saved(make, tmp_path)
    loaded = dict(checked(weights.items(), found))
    assert {name: tuple(weight.shape) for name, weight in loaded.items()} == shapes(found)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_a_weight_that_is_missing_doubled_or_of_another_shape_is_named(make, tmp_path):
    found, weights = saved(make, tmp_path)
    for name, weight in weights.items():
        short = name.rpartition(".layers.")[2].rsplit(".", 1)[0].split(".parametrizations")[0]
        short = short.removeprefix("model.").rpartition("backbone.")[2]
        if short.endswith(("layernorm", "norm")):  # the norms of OLMo 2 have other names here
            short = "norm"
        rest = {key: value for key, value in weights.items() if key != name}
        with pytest.raises(ValueError, match=rf"the saved weights lack .*{short}"):
            dict(checked(rest.items(), found))
        with pytest.raises(ValueError, match=rf"have {name} twice"):
            list(checked([*weights.items(), (name, weight)], found))
        with pytest.raises(ValueError, match=rf"{name.partition('.param')[0]}.* must"):
            dict(checked((rest | {name: torch.cat([weight, weight])}).items(), found))


@pytest.mark.parametrize("make", [MODELS["weight norm"], MODELS["llama"]], ids=["llama", "decoder"])
def test_a_weight_that_is_not_finite_or_no_number_is_named(make, tmp_path):
    found, weights = saved(make, tmp_path)
    for name, weight in weights.items():
        for number in (float("nan"), float("inf")):
            bad = weight.clone()
            bad.view(-1)[-1] = number
            with pytest.raises(ValueError, match=rf"{name} must be finite, got NaN or infinity"):
                dict(checked((weights | {name: bad}).items(), found))
        for dtype in (torch.int8, torch.bool, torch.complex64):
            with pytest.raises(ValueError, match=rf"{name} must have floating-point .* {dtype}"):
                dict(checked((weights | {name: weight.to(dtype)}).items(), found))
        dict(checked((weights | {name: weight.bfloat16()}).items(), found))


@pytest.mark.parametrize("share", [0, 0.5, 0.999])
def test_a_cut_file_is_told(share, tmp_path):
    found, _ = saved(MODELS["implicit"], tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[: int(share * file.stat().st_size)])

    def in_file():
        with safe_open(file, framework="pt") as weights:
            names = weights.keys()
            yield from ((name, weights.get_tensor(name)) for name in names)

    with pytest.raises(ValueError, match=r"the saved weights cannot be read .*: copy all"):
        dict(checked(in_file(), found))


def test_a_half_of_another_name_is_named(tmp_path):
    found, weights = saved(MODELS["weight norm"], tmp_path)
    name = next(name for name in weights if name.endswith("original0"))
    weights[name.replace("original0", "original2")] = weights.pop(name)
    with pytest.raises(ValueError, match=r"original2 has no place in this model"):
        dict(checked(weights.items(), found))


def test_a_direction_that_is_a_number_is_named(tmp_path):
    found, weights = saved(MODELS["weight norm"], tmp_path)
    name = next(name for name in weights if name.endswith("original1"))
    with pytest.raises(ValueError, match=rf"{name} must be a matrix, got the shape \(\)"):
        dict(checked((weights | {name: weights[name][0, 0]}).items(), found))


def test_a_weight_of_another_model_is_named(tmp_path):
    found, weights = saved(MODELS["implicit"], tmp_path)
    name = "model.core.backbone.layers.7.mlp.up_proj.weight"
    with pytest.raises(ValueError, match=rf"{name} has no place in this model"):
        dict(checked((weights | {name: torch.ones(2, 2)}).items(), found))


def test_a_tied_head_may_be_saved_too(tmp_path):
    found, weights = saved(MODELS["implicit"], tmp_path)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    assert "lm_head.weight" not in dict(checked(weights.items(), found))
