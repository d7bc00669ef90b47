"""Which parameters are decayed: by name, and by what an optimizer does to them."""

import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import deqseq as dq
from deqseq.training import parameter_groups

SIZES = {
    "mamba2": dq.Mamba2Config(8, 2, d_state=4, headdim=4),
    "llama": dq.LlamaConfig(8, 2, n_heads=2, mlp_width=12),
}
MAPS = r"(in_proj|out_proj|conv1d|[qkvo]_proj|(gate|up|down)_proj|injection|head|lm_head)"
DECAYED = re.compile(rf"(^|.*\.){MAPS}\.(weight|parametrizations\.weight\.original1)")


def names(model, weight_decay=0.1):
    """Names of the decayed parameters and of the others; of tied ones the first name."""
    names_of = {parameter: name for name, parameter in model.named_parameters()}
    first, second = parameter_groups(model, weight_decay)
    assert first["weight_decay"] == weight_decay
    assert second["weight_decay"] == 0.0
    return tuple([names_of[one] for one in group["params"]] for group in (first, second))


def check(model, tied):
    decayed, others = names(model)
    everything = [name for name, _ in model.named_parameters()]
    assert sorted(decayed + others) == sorted(everything)  # each once
    assert decayed == [name for name in everything if DECAYED.fullmatch(name)]
    assert len(decayed) > 4
    assert any("head" in name for name in decayed) != tied
    assert sum("embed" in name for name in others) == 1


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("weight_norm", [True, False])
@pytest.mark.parametrize("kind", [dq.ImplicitModel, dq.ExplicitModel])
@pytest.mark.parametrize("backbone", SIZES)
def test_language_models(backbone, kind, weight_norm, tied):
    sizes = replace(SIZES[backbone], weight_norm=weight_norm)
    spec = dq.LanguageModelSpec(5, sizes, tied=tied)
    lm = (spec if kind is dq.ImplicitModel else spec.explicit()).build()
    check(lm, tied)
    decayed, others = names(lm)
    assert any("original1" in name for name in decayed) == weight_norm
    assert any("original0" in name for name in others) == weight_norm


@pytest.mark.parametrize(("kind", "tied"), [("mamba2", True), ("llama", False)])
def test_models_of_transformers(kind, tied):
    ours = pytest.importorskip("deqseq.integrations.huggingface")
    config = ours.DeqseqConfig(vocab_size=5, backbone=SIZES[kind], tie_word_embeddings=tied)
    check(ours.DeqseqForCausalLM(config), tied)


def test_frozen_and_shared_parameters():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.LayerNorm((2, 3)))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    assert names(model) == (["0.weight"], ["1.bias", "2.weight", "2.bias"])


def test_a_map_that_is_tied_to_an_embedding_is_not_decayed():
    model = nn.Sequential(nn.Linear(2, 5, bias=False), nn.Embedding(5, 2))
    model[1].weight = model[0].weight
    assert names(model) == ([], ["0.weight"])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_magnitude_of_torchs_older_weight_norm_is_not_decayed():
    model = torch.nn.utils.weight_norm(nn.Linear(2, 3, bias=False))
    assert names(model) == (["weight_v"], ["weight_g"])


def test_nothing_to_train_is_an_error():
    with pytest.raises(ValueError, match=r"Linear has no parameter that wants a gradient"):
        parameter_groups(nn.Linear(1, 1).requires_grad_(False))
