"""Pretrained Llama and Mamba2 models as explicit ones of ours; what is kept, and what is refused."""

import json
import re
from dataclasses import replace

import pytest
import torch
from pretrained_models import IDS, MODELS, ROPE, close, llama, mamba2

import deqseq as dq
from deqseq.integrations.pretrained import FROM_INPUT, from_pretrained_model
from deqseq.integrations.pretrained_config import pretrained_spec
from deqseq.layers import RotaryScaling, with_weights

ONCE = dq.Stop.exactly(1)


@MODELS
@torch.no_grad()
def test_an_explicit_model_computes_what_the_pretrained_one_does(make):
    theirs = make()
    ours = from_pretrained_model(theirs, implicit=False).eval()
    assert isinstance(ours.model, dq.ExplicitModel)
    assert (ours.head is None) == theirs.config.tie_word_embeddings
    close(ours(IDS).logits, theirs(IDS).logits)


@MODELS
def test_a_configuration_is_an_object_a_mapping_or_a_file(make, tmp_path):
    config = make().config
    spec = pretrained_spec(config)
    assert pretrained_spec(config.to_dict()) == spec
    config.save_pretrained(tmp_path)  # which leaves default values out
    assert pretrained_spec(json.loads((tmp_path / "config.json").read_text())) == spec


def test_a_llama_file_of_older_transformers():
    new = llama(rope_parameters=ROPE).config.to_dict()
    rope = new.pop("rope_parameters")
    old = {**new, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert pretrained_spec(old) == pretrained_spec(new | {"rope_parameters": ROPE})
    assert pretrained_spec(old).backbone.rope_scaling == RotaryScaling(8.0, 1.0, 4.0, 16)
    oldest = {**old, "rope_scaling": None}
    assert (pretrained_spec(oldest).backbone.rope_theta, pretrained_spec(oldest).backbone.rope_scaling) == (
        5000.0,
        None,
    )
    theirs = llama()
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    from_pretrained_model(theirs.config, theirs.state_dict() | frequencies, implicit=False)


MAMBA_SSM = {
    "d_model": 32,
    "d_intermediate": 0,
    "n_layer": 2,
    "vocab_size": 50,
    "ssm_cfg": {"layer": "Mamba2", "d_state": 8, "headdim": 16, "ngroups": 2, "chunk_size": 8},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}


def mamba_ssm(tied: bool = True) -> tuple[dict[str, torch.Tensor], torch.nn.Module]:
    """Weights by mamba_ssm's names, and transformers' model of the same function with the padded vocabulary of 64."""
    theirs = mamba2(vocab_size=64, tie_word_embeddings=tied)
    weights = {name.replace("embeddings.", "embedding."): tensor for name, tensor in theirs.state_dict().items()}
    assert "backbone.embedding.weight" in weights
    assert "backbone.layers.1.mixer.dt_bias" in weights
    return weights, theirs


@pytest.mark.parametrize("tied", [True, False])
@torch.no_grad()
def test_the_original_mamba2(tied):
    weights, theirs = mamba_ssm(tied)
    config = MAMBA_SSM | {"tie_embeddings": tied}
    expected = theirs(IDS).logits
    close(from_pretrained_model(config, weights, implicit=False).eval()(IDS).logits, expected)
    implicit = from_pretrained_model(config, weights, implicit=True).eval()
    close(implicit(IDS, stop=ONCE).logits, expected)
    assert expected.shape == (3, 13, 64)


def test_the_original_mamba2s_defaults():
    spec = pretrained_spec({"d_model": 768, "n_layer": 24, "vocab_size": 50277, "ssm_cfg": {"layer": "Mamba2"}})
    backbone = dq.Mamba2Config(
        d_model=768, n_layers=24, d_state=128, headdim=64, expand=2, n_groups=1, d_conv=4, norm_eps=1e-5
    )
    explicit = replace(backbone, weight_norm=False, injection=False)
    assert spec == dq.LanguageModelSpec(50280, explicit, solve=None, tied=True)


def test_weights_are_copies_and_keep_their_dtype():
    theirs = mamba2().to(torch.bfloat16)
    lm = from_pretrained_model(theirs, implicit=True)
    assert {p.dtype for p in lm.parameters()} == {torch.bfloat16}
    before = theirs.state_dict()["backbone.norm_f.weight"].clone()
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.zero_()
    assert torch.equal(theirs.state_dict()["backbone.norm_f.weight"], before)
    assert before.abs().max() > 0
    assert all(p.requires_grad and not p.is_meta for p in lm.parameters())


def test_a_row_of_zeros_among_the_weights_stays_one():
    theirs = llama()
    with torch.no_grad():
        theirs.model.layers[0].mlp.gate_proj.weight[3] = 0
        lm = from_pretrained_model(theirs, implicit=True).eval()
        assert with_weights(lm).model.backbone.layers[0].mlp.gate_proj.weight[3].abs().max() == 0
        close(lm(IDS, stop=ONCE).logits, theirs(IDS).logits)


def test_missing_and_extra_pretrained_tensors_are_listed():
    theirs = llama()
    state = theirs.state_dict() | {"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}
    del state["lm_head.weight"]
    listed = r"1 missing: lm_head\.weight; 1 unexpected: model\.layers\.0\.self_attn\.q_proj\.bias"
    with pytest.raises(ValueError, match=listed):
        from_pretrained_model(theirs.config, state, implicit=True, solve=FROM_INPUT)
    with pytest.raises(TypeError, match="must be a transformers model, or a configuration with its state dict"):
        from_pretrained_model(torch.nn.Linear(1, 1), implicit=False)
    with pytest.raises(TypeError, match="model must be a transformers model"):
        from_pretrained_model(theirs.config, implicit=False)
    with pytest.raises(TypeError, match=r"^state must be a Mapping .*model\.state_dict\(\), got 'file'$"):
        from_pretrained_model(theirs.config, "file", implicit=False)
    with pytest.raises(TypeError, match=r"^config must be a Mapping, such as json\.loads.*got 'config.json'$"):
        pretrained_spec("config.json")


LLAMA, MAMBA2 = {"model_type": "llama"}, {"model_type": "mamba2"}
SSM = {"layer": "Mamba2"}
REFUSED = [
    (LLAMA | {"attention_bias": True}, "'attention_bias' cannot be True here: deqseq's projections have no bias"),
    (LLAMA | {"mlp_bias": True}, "'mlp_bias' cannot be True here: deqseq's projections have no bias"),
    (LLAMA | {"hidden_act": "gelu"}, "'hidden_act' cannot be 'gelu' here: deqseq's layers use SiLU"),
    (
        LLAMA | {"attention_dropout": 0.1},
        "'attention_dropout' cannot be 0.1 here: deqseq does not drop attention weights: set it to 0",
    ),
    (
        LLAMA | {"sliding_window": 4096},
        "'sliding_window' cannot be 4096 here: deqseq's attention sees all tokens before",
    ),
    (
        LLAMA | {"residual_multiplier": 0.2},
        "'residual_multiplier' cannot be 0.2 here: deqseq does not scale its residual paths",
    ),
    (
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
        "rope_scaling: 'type' cannot be 'linear' here: deqseq has plain rotary frequencies ('default') and those of "
        "Llama 3.x ('llama3')",
    ),
    (
        LLAMA | {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        "rope_parameters: 'low_freq_factor' is missing",
    ),
    (
        LLAMA | {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        "rope_parameters: 'partial_rotary_factor' cannot be 0.5 here: deqseq rotates all channels of a head",
    ),
    (
        LLAMA | {"quantization_config": {"bits": 4}},
        "'quantization_config' cannot be {'bits': 4} here: deqseq has no quantised layers: dequantise the weights",
    ),
    (LLAMA | {"hidden_size": "wide"}, "'hidden_size' cannot be 'wide' here: it must be an integer >= 1"),
    (MAMBA2 | {"use_bias": True}, "'use_bias' cannot be True here: deqseq's projections have no bias"),
    (MAMBA2 | {"use_conv_bias": False}, "'use_conv_bias' cannot be False here: deqseq's convolution has a bias"),
    (MAMBA2 | {"hidden_act": "relu"}, "'hidden_act' cannot be 'relu' here: deqseq's layers use SiLU"),
    (
        MAMBA2 | {"num_heads": 64},
        "'num_heads' cannot be 64 here: times head_dim 64 it must be expand * hidden_size 8192",
    ),
    (
        {"ssm_cfg": {}},
        "ssm_cfg: 'layer' cannot be 'Mamba1' here: deqseq's layers are Mamba2 (it is missing: the default)",
    ),
    ({"ssm_cfg": SSM | {"rmsnorm": False}}, "'rmsnorm' cannot be False here: deqseq's mixer normalises its output"),
    ({"ssm_cfg": SSM | {"D_has_hdim": True}}, "'D_has_hdim' cannot be True here: deqseq's D is one number per head"),
    ({"ssm_cfg": SSM | {"norm_before_gate": True}}, "cannot be True here: deqseq gates before it normalises"),
    ({"ssm_cfg": SSM | {"d_ssm": 64}}, "'d_ssm' cannot be 64 here: deqseq scans all of the inner channels"),
    ({"ssm_cfg": SSM | {"ngroup": 2}}, "ssm_cfg: 'ngroup' is unknown; did you mean 'ngroups'"),
    (
        {"ssm_cfg": SSM, "attn_layer_idx": [3]},
        "'attn_layer_idx' cannot be [3] here: deqseq's Mamba2 has no attention layers",
    ),
    ({"ssm_cfg": SSM, "d_intermediate": 8}, "'d_intermediate' cannot be 8 here: deqseq has no feed-forward layer"),
    ({"ssm_cfg": SSM, "rms_norm": False}, "'rms_norm' cannot be False here: deqseq's norms are RMSNorm"),
    ({"ssm_cfg": SSM, "n_layers": 4}, "'n_layers' is unknown; did you mean 'n_layer'"),
    (
        {"model_type": "mistral"},
        "'model_type' cannot be 'mistral' here: it must be 'llama' or 'mamba2', or an 'ssm_cfg' as mamba_ssm's have it",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED, ids=lambda part: str(part)[:50])
def test_what_the_layers_do_not_compute_is_refused(config, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        pretrained_spec(config)
