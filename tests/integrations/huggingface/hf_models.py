"""Small models of transformers whose maps contract, in float64, and what the suites share."""

from typing import ClassVar

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

TIGHT = dq.Stop(rtol=1e-9, max_steps=200)
PLAIN = dq.SolveConfig(dq.Naive(), TIGHT)
SHARED = {"vocab_size": 13, "hidden_size": 8, "initializer_range": 0.5, "solve": PLAIN}
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

IDS = torch.randint(1, 13, (3, 7), generator=torch.Generator().manual_seed(0))
"""Three rows of seven tokens, none of them 0, which is kept for padding."""
COUNTS = (7, 2, 4)
LEFT = torch.arange(7).flip(0) < torch.tensor(COUNTS)[:, None]
"""Which tokens are real when rows are padded on the left."""


class Family:
    """A model type, implicit or explicit; the suites are inherited together with one of these."""

    config_class: ClassVar[type]
    model_class: ClassVar[type]
    sizes: ClassVar[dict]
    implicit: ClassVar[bool] = True
    layers: ClassVar[int] = 2
    second_layer: ClassVar[str] = "model.core.backbone.layers.1."

    def config(self, **fields):
        kind = {"implicit": self.implicit, "num_hidden_layers": self.layers}
        if "solve" in fields:
            fields["solve"] = from_json("solve", fields["solve"], "solve", PLAIN)
        return self.config_class(**{**SHARED, **self.sizes, **kind, **fields})

    def model(self, **fields):
        """In eval mode and float64; implicit ones converge in a few dozen iterations."""
        torch.manual_seed(0)
        return contract(self.model_class(self.config(**fields)).double()).eval()


class Mamba2(Family):
    config_class, model_class, sizes = ImplicitMamba2Config, ImplicitMamba2ForCausalLM, MAMBA2


class Llama(Family):
    config_class, model_class, sizes = ImplicitLlamaConfig, ImplicitLlamaForCausalLM, LLAMA


class Retrofit(Family):
    """The layers of a decoder whose norms are computed in the model's dtype, 1 + 2 + 1."""

    config_class, model_class = RecurrentDepthConfig, RecurrentDepthForCausalLM
    second_layer = "model.core.core.backbone.backbone.layers.1."

    def config(self, **fields):
        if "solve" in fields:
            fields["solve"] = from_json("solve", fields["solve"], "solve", PLAIN)
        fields.pop("num_hidden_layers", None)
        decoder = AutoConfig.for_model("stablelm", **STABLELM)
        return RecurrentDepthConfig(**{"decoder_config": decoder, "solve": PLAIN, **SPLIT, **fields})

    def model(self, **fields):
        torch.manual_seed(3)
        model = RecurrentDepthForCausalLM(self.config(**fields)).double()
        nn.init.normal_(model.model.solved.backbone.injection.weight.data[:, :8], std=0.05)
        return model.eval()


def contract(model):
    """Scale what the state passes through, so that the injection outweighs it and plain iteration converges."""
    factors = {
        "in_proj": 0.1,
        "out_proj": 4,
        "q_proj": 0.2,
        "k_proj": 0.2,
        "v_proj": 0.2,
        "o_proj": 4,
        "gate_proj": 0.2,
    }
    for name, part in model.model.core.backbone.named_modules():
        factor = factors.get(name.rpartition(".")[2])
        if factor is not None and isinstance(part, nn.Linear):
            normed = parametrize.is_parametrized(part, "weight")
            (part.parametrizations.weight.original0 if normed else part.weight).data *= factor
    return model


def same_weights(one, other) -> bool:
    """Whether two models have the same weights, bit for bit and by name."""
    mine, theirs = one.state_dict(), other.state_dict()
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
