"""Configurations of pretrained Llama and Mamba2 models as specifications."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, runtime_checkable

from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.integrations.reference_fields import Fields
from deqseq.layers import RotaryScaling
from deqseq.models.specification import LanguageModelSpec

Source = Literal["transformers Llama", "transformers Mamba2", "mamba_ssm Mamba2"]
"""The library that made the configuration and the weights."""

_SILU = ("silu", "swish")
_NEUTRAL: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("sliding_window", (None, False), "deqseq's attention sees all tokens before"),
    ("use_sliding_window", (False, None), "deqseq's attention sees all tokens before"),
    ("residual_multiplier", (1, None), "deqseq does not scale its residual paths"),
    ("embedding_multiplier", (1, None), "deqseq does not scale embeddings"),
    ("attention_multiplier", (None,), "deqseq divides scores by the square root of headdim"),
    ("logits_scaling", (1, None), "deqseq does not scale logits"),
    ("logit_scale", (1, None), "deqseq does not scale logits"),
    ("partial_rotary_factor", (1, None), "deqseq rotates all channels of a head"),
    ("quantization_config", (None,), "deqseq has no quantised layers: dequantise the weights first"),
)
"""Fields of related models in transformers, and their values that change nothing."""

MAMBA_SSM_NO_EFFECT: tuple[str, ...] = (
    *("_name_or_path", "architectures", "dtype", "model_type", "torch_dtype", "transformers_version"),
    "attn_cfg",  # of attention layers, which are refused
    *("fused_add_norm", "residual_in_fp32"),  # the same numbers in float32
)
"""Fields of mamba_ssm's configuration that change nothing of what the model computes."""


@runtime_checkable
class _AsDict(Protocol):
    """A configuration object of transformers."""

    def to_dict(self) -> dict[str, Any]: ...


def pretrained_spec(config: object) -> LanguageModelSpec:
    """The specification of the explicit model that a pretrained one is.

    It reads configurations of transformers' Llama (grouped heads, Llama 3.x frequencies, tied head or not) and Mamba2,
    and of mamba_ssm's Mamba2. Whatever changes the function is translated or refused; fields that transformers' own
    classes would ignore are ignored.

    Args:
        config: a parsed ``config.json``, or the configuration object of a model.

    Returns:
        The specification.

    Raises:
        ValueError: another kind of model, or something that deqseq's layers do not compute; names the field, the value
            and the reason.

    Example:
        >>> spec = pretrained_spec({"d_model": 64, "n_layer": 2, "vocab_size": 50, "ssm_cfg": {"layer": "Mamba2"}})
        >>> spec.vocab_size, spec.backbone.d_state, spec.solve     # padded to a multiple of 8, mamba_ssm's default
        (56, 128, None)
    """
    readers: dict[Source, Callable[[Fields], LanguageModelSpec]] = {
        "transformers Llama": _llama,
        "transformers Mamba2": _mamba2,
        "mamba_ssm Mamba2": _mamba_ssm,
    }
    source = source_of(config)
    return readers[source](Fields(_mapping(config), f"{source} configuration: "))


def source_of(config: object) -> Source:
    """The kind of a configuration; ValueError for an unknown one."""
    content = _mapping(config)
    if "ssm_cfg" in content:
        return "mamba_ssm Mamba2"
    kind = content.get("model_type")
    if kind == "llama":
        return "transformers Llama"
    if kind == "mamba2":
        return "transformers Mamba2"
    known = "'llama' or 'mamba2', or an 'ssm_cfg' as mamba_ssm's have it"
    raise ValueError(f"pretrained configuration: 'model_type' cannot be {kind!r} here: it must be {known}")


def _mapping(config: object) -> Mapping[str, Any]:
    """The fields of a configuration; objects of transformers keep some, such as the kind, in their class."""
    if isinstance(config, Mapping):
        return config
    return config.to_dict() if isinstance(config, _AsDict) else vars(config)


def _llama(fields: Fields) -> LanguageModelSpec:
    _check_transformers(fields)
    for name in ("attention_bias", "mlp_bias"):
        fields.only(name, (False,), "deqseq's projections have no bias")
    fields.only("attention_dropout", (0, None), "deqseq does not drop attention weights: set it to 0")
    width, heads = fields.integer("hidden_size", 4096), fields.integer("num_attention_heads", 32)
    grouped = fields.get("num_key_value_heads", None) is not None
    wide = fields.get("head_dim", None) is not None
    theta, scaling = _rotary(fields)
    backbone = LlamaConfig(
        d_model=width,
        n_layers=fields.integer("num_hidden_layers", 32),
        n_heads=heads,
        n_kv_heads=fields.integer("num_key_value_heads") if grouped else None,
        headdim=fields.integer("head_dim") if wide else None,
        mlp_width=fields.integer("intermediate_size", 11008),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=fields.number("rms_norm_eps", 1e-6),
        weight_norm=False,
        injection=False,
    )
    return _explicit(fields.integer("vocab_size", 32000), backbone, fields.flag("tie_word_embeddings", False))


def _rotary(fields: Fields) -> tuple[float, RotaryScaling | None]:
    """Base and scaling: both in ``rope_parameters`` since transformers 5, two fields before."""
    outer = fields.number("rope_theta", 10000.0)
    name = "rope_parameters" if fields.get("rope_parameters", None) is not None else "rope_scaling"
    if fields.get(name, None) is None:
        return outer, None
    rope = fields.inner(name)
    theta = rope.number("rope_theta", outer)
    rope.only("partial_rotary_factor", (1, None), "deqseq rotates all channels of a head")
    key = "type" if rope.given("type") and not rope.given("rope_type") else "rope_type"
    rope.unused("type", "attention_factor")
    kind = rope.get(key, "default")
    if kind not in ("default", "llama3"):
        rope.refuse(key, kind, "deqseq has plain rotary frequencies ('default') and those of Llama 3.x ('llama3')")
    scaling = None
    if kind == "llama3":
        scaling = RotaryScaling(
            factor=rope.number("factor"),
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
            original_length=rope.integer("original_max_position_embeddings"),
        )
    rope.close()
    return theta, scaling


def _mamba2(fields: Fields) -> LanguageModelSpec:
    _check_transformers(fields)
    fields.only("use_bias", (False,), "deqseq's projections have no bias")
    fields.only("use_conv_bias", (True,), "deqseq's convolution has a bias")
    width, headdim = fields.integer("hidden_size", 4096), fields.integer("head_dim", 64)
    expand, heads = fields.integer("expand", 2), fields.integer("num_heads", 128)
    if heads * headdim != expand * width:
        fields.refuse("num_heads", heads, f"times head_dim {headdim} it must be expand * hidden_size {expand * width}")
    backbone = Mamba2Config(
        d_model=width,
        n_layers=fields.integer("num_hidden_layers", 64),
        d_state=fields.integer("state_size", 128),
        headdim=headdim,
        expand=expand,
        n_groups=fields.integer("n_groups", 8),
        d_conv=fields.integer("conv_kernel", 4),
        norm_eps=fields.number("layer_norm_epsilon", 1e-5),
        dt_limit=fields.pair("time_step_limit", (0.0, math.inf)),
        weight_norm=False,
        injection=False,
    )
    return _explicit(fields.integer("vocab_size", 32768), backbone, fields.flag("tie_word_embeddings", False))


def _check_transformers(fields: Fields) -> None:
    """Refuse what deqseq does not compute, in fields that many models of transformers share."""
    fields.only("hidden_act", _SILU, "deqseq's layers use SiLU")
    for name, allowed, reason in _NEUTRAL:
        fields.only(name, allowed, reason)


def _mamba_ssm(fields: Fields) -> LanguageModelSpec:
    fields.unused(*MAMBA_SSM_NO_EFFECT)
    fields.only("attn_layer_idx", ([], ()), "deqseq's Mamba2 has no attention layers")
    fields.only("d_intermediate", (0,), "deqseq has no feed-forward layer that packs gate and input in one matrix")
    fields.only("rms_norm", (True,), "deqseq's norms are RMSNorm")
    width, layer = fields.integer("d_model", 2560), fields.inner("ssm_cfg", {})
    layer.only("layer", ("Mamba2",), "deqseq's layers are Mamba2", default="Mamba1")
    sizes = mamba2_layer(layer, width)
    layer.unused("conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor")  # the weights are given
    layer.unused("chunk_size")
    layers = fields.integer("n_layer", 64)
    backbone = Mamba2Config(d_model=width, n_layers=layers, weight_norm=False, injection=False, **sizes)
    tokens, multiple = fields.integer("vocab_size", 50277), fields.integer("pad_vocab_size_multiple", 8)
    tied = fields.flag("tie_embeddings", True)
    layer.close()
    fields.close()
    return _explicit(-(-tokens // multiple) * multiple, backbone, tied)


def mamba2_layer(layer: Fields, width: int) -> dict[str, Any]:
    """Sizes of mamba_ssm's Mamba2 layer, under the names of our configuration."""
    expand = layer.integer("expand", 2)
    layer.only("d_ssm", (None, expand * width), "deqseq scans all of the inner channels")
    layer.only("D_has_hdim", (False,), "deqseq's D is one number per head")
    layer.only("rmsnorm", (True,), "deqseq's mixer normalises its output")
    layer.only("norm_before_gate", (False,), "deqseq gates before it normalises")
    layer.only("bias", (False,), "deqseq's projections have no bias")
    layer.only("conv_bias", (True,), "deqseq's convolution has a bias")
    layer.only("process_group", (None,), "deqseq does not split a layer over processes")
    layer.unused("use_mem_eff_path", "sequence_parallel")  # other ways to the same numbers
    return {
        "d_state": layer.integer("d_state", 128),
        "headdim": layer.integer("headdim", 64),
        "expand": expand,
        "n_groups": layer.integer("ngroups", 1),
        "d_conv": layer.integer("d_conv", 4),
        "dt_limit": layer.pair("dt_limit", (0.0, math.inf)),
    }


def _explicit(vocab_size: int, backbone: LlamaConfig | Mamba2Config, tied: bool) -> LanguageModelSpec:
    return LanguageModelSpec(vocab_size, backbone, solve=None, tied=tied)
