"""Pretrained Llama and Mamba2: explicit models of our layers compute the same."""

import json
import os
import re

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers

import deqseq as dq
from deqseq.integrations.foreign import from_state
from deqseq.integrations.foreign.engine import described
from deqseq.integrations.foreign.pretrained import PRETRAINED
from deqseq.layers import RotaryScaling

IDS = torch.randint(0, 50, (3, 21), generator=torch.Generator().manual_seed(0))
REAL = torch.arange(21) < torch.tensor([21, 15, 18])[:, None]
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
SHARED = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}


def llama(**changes):
    """In eval mode, with grouped heads and a head of its own unless told."""
    sizes = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**{**SHARED, **sizes, "head_dim": 12, **changes})
    model = transformers.LlamaForCausalLM(config).eval()
    # weight normalisation gives a direction to a row of zeros
    model.model.layers[0].mlp.gate_proj.weight.data[3] = 0
    return model


def mamba2(**changes):
    """In eval mode, with two groups and a head of its own unless told."""
    sizes = {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8, "chunk_size": 8}
    torch.manual_seed(0)
    config = transformers.Mamba2Config(**{**SHARED, **sizes, **changes})
    model = transformers.Mamba2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        # at their initial values these would hide where they belong
        if name.endswith(("norm.weight", "mixer.D", "conv1d.bias")):
            parameter.data.uniform_(0.5, 1.5)
    return model


def converted(theirs):
    return from_state(theirs.config.to_dict(), theirs.state_dict())


BOTH = pytest.mark.parametrize("make", [llama, mamba2])
MODELS = pytest.mark.parametrize(
    "make",
    [
        llama,
        lambda: llama(rope_parameters=ROPE, tie_word_embeddings=True),
        lambda: llama(num_key_value_heads=4, head_dim=8),
        mamba2,
        lambda: mamba2(
            tie_word_embeddings=True, n_groups=1, conv_kernel=3, time_step_limit=(0.01, 0.5)
        ),
    ],
    ids=["Llama", "Llama 3.x, tied", "Llama, ungrouped", "Mamba2", "Mamba2, tied"],
)


def close(ours, theirs, tolerance=1e-5):
    """Equal up to a fraction of the largest value, which is not small."""
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < tolerance * theirs.abs().max()


class TestExplicit:
    @MODELS
    @pytest.mark.parametrize("side", ["left", "right"])
    @torch.no_grad()
    def test_logits_whole_and_padded(self, make, side):
        theirs = make()
        ours = converted(theirs)
        assert isinstance(ours.model, dq.ExplicitModel)
        assert (ours.head is None) == theirs.config.tie_word_embeddings
        close(ours(IDS).logits, theirs(IDS).logits)
        mask = REAL.flip(1) if side == "left" else REAL
        got = ours(IDS, mask=mask).logits
        expected = theirs(IDS, **given(theirs, mask, 0, 21)).logits
        close(got[mask], expected[mask])
        assert got[~mask].abs().max() == 0

    @BOTH
    @torch.no_grad()
    def test_cached_decoding_of_a_padded_batch(self, make):
        theirs = make()
        mask = REAL.flip(1)
        ours = converted(theirs)
        mine = ours(IDS[:, :15], mask=mask[:, :15], return_cache=True)
        other = theirs(IDS[:, :15], use_cache=True, **given(theirs, mask, 0, 15))
        for t in range(15, 21):
            ids = IDS[:, t : t + 1]
            mine = ours(ids, cache=mine.cache, return_cache=True)
            other = theirs(ids, use_cache=True, cache=other.cache, **given(theirs, mask, t, t + 1))
            close(mine.logits[:, -1], other.logits[:, -1])

    @MODELS
    def test_gradients(self, make):
        theirs = make()
        explicit = converted(theirs)
        for model in (theirs, explicit):
            model(IDS, labels=IDS).loss.backward()
        theirs_grad = {name.partition(".")[2]: p.grad for name, p in theirs.named_parameters()}
        checked = 0
        for name, parameter in explicit.named_parameters():
            other = theirs_grad.get(name.removeprefix("model.backbone."))
            if other is not None:
                near(parameter.grad, other)
                checked += 1
        assert checked >= 19


def near(gradient, expected, tolerance=1e-4):
    """Equal up to a fraction of the norm."""
    assert (gradient - expected).norm() < tolerance * expected.norm()


def given(model, mask, start, stop):
    """The mask as each of them takes it, and a transformer's positions, as in generate()."""
    if model.config.model_type == "mamba2":
        return {"attention_mask": mask[:, start:stop].long()}
    positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, start:stop]
    return {"attention_mask": mask[:, :stop].long(), "position_ids": positions}


def addresses(model):
    return {tensor.data_ptr() for tensor in model.state_dict().values()}


class TestWeights:
    def test_they_are_copies_and_keep_their_dtype(self):
        theirs = mamba2().to(torch.bfloat16)
        lm = converted(theirs)
        assert {p.dtype for p in lm.parameters()} == {torch.bfloat16}
        assert all(parameter.requires_grad for parameter in lm.parameters())
        assert addresses(theirs).isdisjoint(addresses(lm))

    @pytest.mark.parametrize("tied", [True, False])
    @torch.no_grad()
    def test_the_original_mamba2(self, tied):
        """Weights by mamba_ssm's names, and a padded vocabulary of 64."""
        theirs = mamba2(vocab_size=64, tie_word_embeddings=tied)
        state = theirs.state_dict().items()
        weights = {name.replace("embeddings.", "embedding."): x for name, x in state}
        ssm = {"layer": "Mamba2", "d_state": 8, "headdim": 16, "ngroups": 2, "chunk_size": 8}
        config = {"d_model": 32, "d_intermediate": 0, "n_layer": 2, "vocab_size": 50}
        config |= {"ssm_cfg": ssm, "attn_layer_idx": [], "attn_cfg": {}, "rms_norm": True}
        config |= {"pad_vocab_size_multiple": 16, "tie_embeddings": tied, "fused_add_norm": True}
        expected = theirs(IDS).logits
        assert expected.shape == (3, 21, 64)
        close(from_state(config, weights)(IDS).logits, expected)


def pretrained_spec(config):
    return described(config, {}, PRETRAINED)[0]


class TestConfigurations:
    @MODELS
    def test_they_may_leave_default_values_out(self, make, tmp_path):
        config = make().config
        config.save_pretrained(tmp_path)
        content = json.loads((tmp_path / "config.json").read_text())
        assert pretrained_spec(content) == pretrained_spec(config.to_dict())

    def test_a_llama_file_of_older_transformers(self):
        new = llama(rope_parameters=ROPE).config.to_dict()
        rope = new.pop("rope_parameters")
        old = {**new, "rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
        assert pretrained_spec(old) == pretrained_spec(new | {"rope_parameters": ROPE})
        assert pretrained_spec(old).backbone.rope_scaling == RotaryScaling(8.0, 1.0, 4.0, 16)
        oldest = pretrained_spec({**old, "rope_scaling": None}).backbone
        assert oldest.rope_theta == 5000.0
        assert oldest.rope_scaling is None
        theirs = llama()
        frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
        from_state(old | {"rope_scaling": None}, theirs.state_dict() | frequencies)

    def test_the_original_mamba2s_defaults(self):
        config = {"d_model": 768, "n_layer": 24, "vocab_size": 50277}
        spec = pretrained_spec(config | {"ssm_cfg": {"layer": "Mamba2"}})
        sizes = {"d_model": 768, "n_layers": 24, "d_state": 128, "headdim": 64, "n_groups": 1}
        explicit = dq.Mamba2Config(**sizes, norm_eps=1e-5, weight_norm=False, injection=False)
        assert spec == dq.LanguageModelSpec(50280, explicit, solve=None, tied=True)


MODEL = llama()
STATE = MODEL.state_dict()
CONFIG = MODEL.config
HEAD = STATE["lm_head.weight"]
BAD_STATES = [
    ({"lm_head.weight": HEAD * torch.nan}, r"NaN or infinity in head\.weight$"),
    ({"lm_head.weight": HEAD.to("meta")}, r"^state\['lm_head\.weight'\] .*meta device"),
    ({"lm_head.weight": 1.0}, r"^state\['lm_head\.weight'\] must be a Tensor, got 1"),
    ({1: torch.ones(2)}, "^a name in state must be a str"),
]


@pytest.mark.parametrize(("state", "message"), BAD_STATES)
def test_a_state_that_does_not_fit_is_refused(state, message):
    with pytest.raises((TypeError, ValueError), match=message):
        from_state(CONFIG.to_dict(), STATE | state)


def test_a_backbone_of_transformers_is_refused():
    for model in (dq.ImplicitModel, dq.ExplicitModel):
        with pytest.raises(TypeError, match=r"backbone must be a Backbone, got LlamaForCausalLM"):
            model(MODEL)


LLAMA = {"model_type": "llama"}
MAMBA2 = {"model_type": "mamba2"}
SSM = {"layer": "Mamba2"}
UNSCALED = {"rope_type": "llama3", "factor": 8.0}
REFUSED = [
    (LLAMA | {"attention_bias": True}, "'attention_bias' must be False, got True: deqseq computes"),
    (LLAMA | {"hidden_act": "gelu"}, "'hidden_act' must be 'silu' or 'swish', got 'gelu'"),
    (LLAMA | {"hidden_size": "wide"}, "llama configuration: 'hidden_size' must be an integer >= 1"),
    (LLAMA | {"rope_scaling": {"type": "linear"}}, "'type' must be 'default' or 'llama3'"),
    (LLAMA | {"rope_parameters": UNSCALED}, "'low_freq_factor' is missing"),
    (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "parameters: 'partial_rotary_"),
    (MAMBA2 | {"num_heads": 64}, "'num_heads' must be 128, got 64"),
    ({"ssm_cfg": {}}, "'layer' must be 'Mamba2', got 'Mamba1' (the default)"),
    ({"ssm_cfg": SSM | {"d_ssm": 64}}, "'d_ssm' must be None or 5120, got 64"),
    ({"ssm_cfg": SSM | {"ngroup": 2}}, "ssm_cfg: 'ngroup' is unknown; did you mean 'ngroups'"),
    ({"ssm_cfg": SSM, "attn_layer_idx": [3]}, "'attn_layer_idx' must be [] or (), got [3]"),
    ({"ssm_cfg": SSM, "n_layers": 4}, "'n_layers' is unknown; did you mean 'n_layer'"),
    ({"model_type": "mistral"}, "'model_type' must be 'llama' or 'mamba2' or"),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_the_layers_do_not_compute_is_refused(config, message):
    with pytest.raises((ValueError, TypeError), match=re.escape(message)):
        from_state(config, {})
