"""Small models of transformers whose maps contract, in float64: one table, over which the suites run."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoConfig

import deqseq as dq
from deqseq.integrations.huggingface import (
    ImplicitLlamaConfig,
    ImplicitLlamaForCausalLM,
    ImplicitMamba2Config,
    ImplicitMamba2ForCausalLM,
    RecurrentDepthConfig,
    RecurrentDepthForCausalLM,
    from_json,
)

PLAIN = dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-9, max_steps=200))
SHARED = {"vocab_size": 13, "hidden_size": 8, "initializer_range": 0.5, "solve": PLAIN}
TWO = {"num_hidden_layers": 2}
MAMBA2 = {"state_size": 4, "head_dim": 4, "chunk_size": 3}
LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12}
SPLIT = {"prelude": 1, "core": 2, "coda": 1}
STABLELM = {
    **LLAMA,
    "vocab_size": 13,
    "hidden_size": 8,
    "initializer_range": 0.5,
    "num_hidden_layers": 4,
    "partial_rotary_factor": 1.0,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""A decoder whose norms are computed in the model's dtype."""
ATTENTION = dq.LlamaConfig(8, n_heads=2, weight_norm=False, injection=False)
MIXER = dq.Mamba2Config(8, 2, 4, 4, chunk_size=3, weight_norm=False, injection=False)
PARTS = {"layers": {"prelude": ATTENTION, "core": MIXER, "coda": ATTENTION}, "norm": "coda"}

FAMILIES = {
    "mamba2": (ImplicitMamba2Config, ImplicitMamba2ForCausalLM, MAMBA2 | TWO),
    "llama": (ImplicitLlamaConfig, ImplicitLlamaForCausalLM, LLAMA | TWO),
    "explicit": (ImplicitLlamaConfig, ImplicitLlamaForCausalLM, LLAMA | TWO | {"implicit": False}),
    "decoder": (RecurrentDepthConfig, RecurrentDepthForCausalLM, SPLIT),
    "parts": (RecurrentDepthConfig, RecurrentDepthForCausalLM, PARTS),
}
"""Models of one backbone, the explicit baseline, and recurrent depth of a decoder's layers and of our own."""
EVERY = pytest.mark.parametrize("kind", FAMILIES)
IMPLICIT = pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind != "explicit"])
BACKBONES = pytest.mark.parametrize("kind", ["mamba2", "llama"])

IDS = torch.randint(1, 13, (3, 7), generator=torch.Generator().manual_seed(0))
"""Three rows of seven tokens, none of them 0, which is kept for padding."""
COUNTS = (7, 2, 4)
LEFT = torch.arange(7).flip(0) < torch.tensor(COUNTS)[:, None]
"""Which tokens are real when rows are padded on the left."""


def configured(kind: str, **fields):
    """The configuration of a family, with some fields changed; ``solve`` changes the tight plain iteration."""
    config_class, _, own = FAMILIES[kind]
    if kind == "decoder":
        own = own | {"decoder_config": AutoConfig.for_model("stablelm", **STABLELM)}
    if "solve" in fields:
        fields["solve"] = from_json("solve", fields["solve"], "solve", PLAIN)
    return config_class(**{**SHARED, **own, **fields})


def made(kind: str, **fields):
    """In eval mode and float64; implicit ones converge in a few dozen iterations."""
    torch.manual_seed(0)
    model = contract(FAMILIES[kind][1](configured(kind, **fields)).double()).eval()
    if kind in ("decoder", "parts"):  # a state that matters
        nn.init.normal_(model.model.solved.backbone.injection.weight.data[:, :8], std=0.05)
    return model


def contract(model):
    """Scale what the state passes through, so that the injection outweighs it and plain iteration converges."""
    factors = {"in_proj": 0.1, "out_proj": 4, "o_proj": 4}
    factors |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj"), 0.2)
    core = model.model.core
    for name, part in core.named_modules() if isinstance(core, dq.ImplicitModel | dq.ExplicitModel) else ():
        factor = factors.get(name.rpartition(".")[2])
        if factor is not None and isinstance(part, nn.Linear):
            normed = parametrize.is_parametrized(part, "weight")
            (part.parametrizations.weight.original0 if normed else part.weight).data *= factor
    return model


def same_weights(one, other) -> bool:
    """Whether two models have the same weights, bit for bit and by name."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
