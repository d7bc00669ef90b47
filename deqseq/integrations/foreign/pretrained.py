"""Pretrained Llama and Mamba2 weights in explicit models."""

import math
from typing import Any

from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.integrations.foreign.engine import (
    Fields,
    Foreign,
    Only,
    Table,
    Weights,
    only,
    unused,
)
from deqseq.layers import RotaryScaling
from deqseq.models import LanguageModelSpec

LIBRARY = unused("_name_or_path", "architectures", "dtype", "torch_dtype", "transformers_version")
"""What libraries write into each of their files."""
_SHARED: Table = {
    "hidden_act": Only("silu", "swish"),
    "hidden_size": ("d_model", 4096),
    "quantization_config": Only(None),
    "tie_word_embeddings": ("tied", False),
}
LLAMA: Table = {
    **_SHARED,
    "vocab_size": 32000,
    "num_hidden_layers": ("n_layers", 32),
    "num_attention_heads": ("n_heads", 32),
    "num_key_value_heads": ("n_kv_heads", None),
    "head_dim": ("headdim", None),
    "intermediate_size": ("mlp_width", 11008),
    "rms_norm_eps": ("norm_eps", 1e-6),
    **only(attention_bias=False, mlp_bias=False),
    "attention_dropout": Only(0, None),
    "partial_rotary_factor": Only(1, None),
}
_MAMBA2: Table = {
    **_SHARED,
    "vocab_size": 32768,
    "num_hidden_layers": ("n_layers", 64),
    "state_size": ("d_state", 128),
    "head_dim": ("headdim", 64),
    "expand": 2,
    "n_groups": 8,
    "conv_kernel": ("d_conv", 4),
    "layer_norm_epsilon": ("norm_eps", 1e-5),
    "time_step_limit": ("dt_limit", (0.0, math.inf)),
    **only(use_bias=False, use_conv_bias=True),
}
_MAMBA_SSM: Table = {
    **LIBRARY,
    **unused(
        "model_type",
        "attn_cfg",  # describes attention layers, which are refused
        # these give the same numbers in float32
        "fused_add_norm",
        "residual_in_fp32",
    ),
    "tie_embeddings": ("tied", True),
    "d_model": 2560,
    "n_layer": ("n_layers", 64),
    "attn_layer_idx": Only([], ()),
    **only(d_intermediate=0, rms_norm=True),
}
_MAMBA_SSM_LAYER: Table = {
    **unused("use_mem_eff_path", "sequence_parallel"),  # these give the same numbers
    "expand": 2,
    "d_state": 128,
    "headdim": 64,
    "ngroups": ("n_groups", 1),
    "d_conv": 4,
    "dt_limit": ("dt_limit", (0.0, math.inf)),
    **only(
        D_has_hdim=False,
        rmsnorm=True,
        norm_before_gate=False,
        bias=False,
        conv_bias=True,
        process_group=None,
    ),
}
_ROPE: Table = {
    **unused("type", "attention_factor", "original_max_position_embeddings"),
    "partial_rotary_factor": Only(1, None),
}
_ROPE_SCALING: Table = {
    "factor": float,
    "low_freq_factor": float,
    "high_freq_factor": float,
    "original_max_position_embeddings": ("original_length", int),
}


def explicit(
    sizes: type[LlamaConfig | Mamba2Config], fields: dict[str, Any], embedding: str, layers: str
) -> Foreign:
    """A model that solves nothing, whose layers have our names.

    ``fields`` are those of its sizes and of its specification; ``embedding`` and ``layers`` are the
    beginnings of the names of tensors.
    """
    whole = {name: fields.pop(name) for name in ("vocab_size", "tied", "steps") if name in fields}
    backbone = sizes(**fields, weight_norm=False, injection=False)
    rules = {
        r"^embedding\.": embedding,
        r"^model\.(backbone\.)+": layers,
        r"^head\.": "lm_head.",
    }
    return Foreign(LanguageModelSpec(backbone=backbone, solve=None, **whole), rules)


def _llama(fields: Fields, state: Weights) -> Foreign:
    sizes = fields.take(LLAMA) | rotary(fields)
    return explicit(LlamaConfig, sizes, "model.embed_tokens.", "model.")


def rotary(fields: Fields) -> dict[str, Any]:
    """Base and scaling: in ``rope_parameters`` since transformers 5, in two fields before."""
    theta = fields.read("rope_theta", 10000.0)
    name = "rope_scaling" if fields.content.get("rope_parameters") is None else "rope_parameters"
    if fields.content.get(name) is None:
        return {"rope_theta": theta}
    rope = fields.inner(name)
    rotation = {"rope_theta": rope.read("rope_theta", theta)}
    rope.take(_ROPE)
    key = "rope_type" if "rope_type" in rope.content else "type"  # its name in old files
    if rope.read(key, Only("default", "llama3")) == "llama3":
        rotation["rope_scaling"] = RotaryScaling(**rope.take(_ROPE_SCALING))
    rope.close()
    return rotation


def _mamba2(fields: Fields, state: Weights) -> Foreign:
    sizes = fields.take(_MAMBA2)
    heads = sizes["expand"] * sizes["d_model"] // sizes["headdim"]
    fields.read("num_heads", Only(heads, default=128))
    return explicit(Mamba2Config, sizes, "backbone.embeddings.", "backbone.")


def _mamba_ssm(fields: Fields, state: Weights) -> Foreign:
    sizes = fields.take(_MAMBA_SSM)
    layer = fields.inner("ssm_cfg")
    layer.take(
        {
            "layer": Only("Mamba2", default="Mamba1"),
            **unused(
                "conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor", "chunk_size"
            ),
        }
    )
    sizes |= mamba_ssm_layer(layer, sizes["d_model"])
    sizes["vocab_size"] = padded(fields.read("vocab_size", 50277), fields)
    layer.close()
    fields.close()
    return explicit(Mamba2Config, sizes, "backbone.embedding.", "backbone.")


def mamba_ssm_layer(layer: Fields, width: int) -> dict[str, Any]:
    """Sizes of mamba_ssm's Mamba2 layer, under the names of our configuration."""
    sizes = layer.take(_MAMBA_SSM_LAYER)
    layer.read("d_ssm", Only(None, sizes["expand"] * width))
    return sizes


def padded(tokens: int, fields: Fields) -> int:
    """The size of a vocabulary, rounded up to the multiple that the fields name."""
    multiple = fields.read("pad_vocab_size_multiple", 8)
    return -(-tokens // multiple) * multiple


PRETRAINED = {"llama": _llama, "mamba2": _mamba2, "mamba_ssm": _mamba_ssm}
