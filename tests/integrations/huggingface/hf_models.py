"""Small models of transformers whose maps contract, in float64: one table for all suites."""

from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import nn
from torch.nn.utils import parametrize
from transformers import AutoConfig, PreTrainedTokenizerFast

import deqseq as dq
from deqseq.as_json import from_json
from deqseq.integrations.huggingface import DeqseqConfig, DeqseqForCausalLM
from deqseq.models.specification import DecoderLayers

PLAIN = dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-9, max_steps=200))
SHARED = {"vocab_size": 13, "initializer_range": 0.5, "solve": PLAIN}
STABLELM = {
    "vocab_size": 13,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 12,
    "initializer_range": 0.5,
    "num_hidden_layers": 4,
    "partial_rotary_factor": 1.0,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""A decoder whose norms are computed in the model's dtype."""
MAMBA2 = dq.Mamba2Config(8, 2, 4, 4, chunk_size=3, weight_norm=False)
LLAMA = dq.LlamaConfig(8, 2, 4, 2, mlp_width=12, weight_norm=False)
ATTENTION = dq.LlamaConfig(8, n_heads=2, weight_norm=False, injection=False)
LAYERS = {
    "prelude": DecoderLayers(8, 0, 1),
    "backbone": DecoderLayers(8, 1, 3),
    "coda": DecoderLayers(8, 3, 4, True),
}
PARTS = {"prelude": ATTENTION, "backbone": replace(MAMBA2, injection=False), "coda": ATTENTION}

FAMILIES = {
    "mamba2": {"backbone": MAMBA2},
    "llama": {"backbone": LLAMA},
    "explicit": {"backbone": LLAMA, "solve": None},
    "looped": {"backbone": LLAMA, "solve": None, "steps": 2, "loop_start": "zero"},
    "decoder": LAYERS | {"injection": "concat"},
    "parts": PARTS | {"injection": "concat", "norm": "coda"},
}
"""Models of one backbone, explicit baselines, recurrent depth of a decoder's layers and of ours."""
EVERY = pytest.mark.parametrize("kind", FAMILIES)
EXPLICIT = ("explicit", "looped")
IMPLICIT = pytest.mark.parametrize("kind", [kind for kind in FAMILIES if kind not in EXPLICIT])
BACKBONES = pytest.mark.parametrize("kind", ["mamba2", "llama"])

IDS = torch.randint(1, 13, (3, 7), generator=torch.Generator().manual_seed(0))
"""Three rows of seven tokens, none of them 0, which is kept for padding."""
COUNTS = (7, 2, 4)
LEFT = torch.arange(7).flip(0) < torch.tensor(COUNTS)[:, None]
"""Which tokens are real when rows are padded on the left."""


def configured(kind, **fields):
    """The configuration of a family; ``fields`` change it, and the fields of its sections."""
    defaults = SHARED | FAMILIES[kind]
    if kind == "decoder":
        defaults["decoder_config"] = AutoConfig.for_model("stablelm", **STABLELM)
    if defaults["solve"] is None:
        fields.pop("solve", None)
    for name in {"solve", "backbone"} & fields.keys():
        if fields[name] is not None:
            fields[name] = from_json(name, fields[name], name, defaults[name])
    return DeqseqConfig(**defaults | fields)


def made(kind, **fields):
    """In eval mode and float64; implicit ones converge in a few dozen iterations."""
    torch.manual_seed(0)
    model = contract(DeqseqForCausalLM(configured(kind, **fields)).double()).eval()
    if kind in ("decoder", "parts"):  # a state that matters
        nn.init.normal_(model.model.solved.backbone.injection.weight.data[:, :8], std=0.05)
    return model


def contract(model):
    """Scale weights so that the injection outweighs the state, and plain iteration converges."""
    factors = {"in_proj": 0.1, "out_proj": 4, "o_proj": 4}
    factors |= dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj"), 0.2)
    core = model.model.core
    if isinstance(core, dq.RecurrentDepth):
        return model
    for name, part in core.named_modules():
        factor = factors.get(name.rpartition(".")[2])
        if factor is None or not isinstance(part, nn.Linear):
            continue
        if parametrize.is_parametrized(part, "weight"):
            part.parametrizations.weight.original0.data *= factor
        else:
            part.weight.data *= factor
    return model


def words(first="w0", **settings):
    """A tokenizer of 13 words: the first one, for padding, and ``w1`` to ``w12``."""
    numbers = {first: 0} | {f"w{i}": i for i in range(1, 13)}
    table = Tokenizer(WordLevel(numbers, unk_token=first))
    table.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=table, pad_token=first, **settings)


def same_weights(one, other):
    """Whether two models have the same weights, bit for bit and by name."""
    mine = one.state_dict()
    theirs = other.state_dict()
    if mine.keys() != theirs.keys():
        return False
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def close(found, expected, tolerance=1e-12):
    """Two tensors, or lists of numbers, differ by less than the tolerance everywhere."""
    found = torch.as_tensor(found)
    expected = torch.as_tensor(expected)
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < tolerance
