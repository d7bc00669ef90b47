"""Configurations of pretrained Llama and Mamba2 models as specifications."""

import math
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any, Literal

from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.check import check_type
from deqseq.integrations.reference_fields import Fields
from deqseq.layers import RotaryScaling
from deqseq.models.specification import LanguageModelSpec

Source = Literal["transformers Llama", "transformers Mamba2", "mamba_ssm Mamba2"]
"""The library that made the configuration and the weights."""

_EXPLICIT: dict[str, Any] = {"weight_norm": False, "injection": False}
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

LLAMA_SIZES: Mapping[str, tuple[str, Any]] = {
    "d_model": ("hidden_size", 4096),
    "n_layers": ("num_hidden_layers", 32),
    "n_heads": ("num_attention_heads", 32),
    "n_kv_heads": ("num_key_value_heads", None),
    "headdim": ("head_dim", None),
    "mlp_width": ("intermediate_size", 11008),
    "norm_eps": ("rms_norm_eps", 1e-6),
}
"""Our names of a Llama's sizes; transformers' names and defaults."""

MAMBA2_SIZES: Mapping[str, tuple[str, Any]] = {
    "d_model": ("hidden_size", 4096),
    "n_layers": ("num_hidden_layers", 64),
    "d_state": ("state_size", 128),
    "headdim": ("head_dim", 64),
    "expand": ("expand", 2),
    "n_groups": ("n_groups", 8),
    "d_conv": ("conv_kernel", 4),
    "norm_eps": ("layer_norm_epsilon", 1e-5),
    "dt_limit": ("time_step_limit", (0.0, math.inf)),
}
"""Our names of a Mamba2's sizes; transformers' names and defaults."""

ROTARY_SCALING = {name: name for name in ("factor", "low_freq_factor", "high_freq_factor")}
ROTARY_SCALING["original_length"] = "original_max_position_embeddings"
"""Our names of the numbers of the rotary scaling, and those of transformers."""

MAMBA_SSM_NO_EFFECT: tuple[str, ...] = (
    *("_name_or_path", "architectures", "dtype", "model_type", "torch_dtype", "transformers_version"),
    "attn_cfg",  # of attention layers, which are refused
    *("fused_add_norm", "residual_in_fp32"),  # the same numbers in float32
)
"""Fields of mamba_ssm's configuration that change nothing of what the model computes."""


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
        TypeError: no configuration.
        ValueError: another kind of model, or something that deqseq's layers do not compute; names the field, the value
            and the reason.

    Example:
        >>> spec = pretrained_spec({"d_model": 64, "n_layer": 2, "vocab_size": 50, "ssm_cfg": {"layer": "Mamba2"}})
        >>> spec.vocab_size, spec.backbone.d_state, spec.solve     # padded to a multiple of 8, mamba_ssm's default
        (56, 128, None)
    """
    source = source_of(config)
    read = {"transformers Llama": _llama, "transformers Mamba2": _mamba2, "mamba_ssm Mamba2": _mamba_ssm}[source]
    return read(Fields(_mapping(config), f"{source} configuration: "))


def source_of(config: object) -> Source:
    """The kind of a configuration; ValueError for an unknown one."""
    content = _mapping(config)
    if "ssm_cfg" in content:
        return "mamba_ssm Mamba2"
    sources: dict[object, Source] = {"llama": "transformers Llama", "mamba2": "transformers Mamba2"}
    kind = content.get("model_type")
    if isinstance(kind, str) and kind in sources:
        return sources[kind]
    known = "'llama' or 'mamba2', or an 'ssm_cfg' as mamba_ssm's have it"
    raise ValueError(f"pretrained configuration: 'model_type' cannot be {kind!r} here: it must be {known}")


def _mapping(config: object) -> Mapping[str, Any]:
    """The fields of a configuration; objects of transformers keep some, such as the kind, in their class."""
    if (to_dict := getattr(config, "to_dict", None)) is not None:
        return to_dict()
    content: Any = vars(config) if is_dataclass(config) else config  # of mamba_ssm
    check_type("config", content, Mapping, "json.loads(Path('config.json').read_text())")
    return content


def _llama(fields: Fields) -> LanguageModelSpec:
    _check_transformers(fields)
    for name in ("attention_bias", "mlp_bias"):
        fields.only(name, (False,), "deqseq's projections have no bias")
    fields.only("attention_dropout", (0, None), "deqseq does not drop attention weights: set it to 0")
    theta, scaling = rotary(fields, 10000.0)
    backbone = LlamaConfig(**_sizes(fields, LLAMA_SIZES), rope_theta=theta, rope_scaling=scaling, **_EXPLICIT)
    tied = fields.flag("tie_word_embeddings", False)
    return LanguageModelSpec(fields.integer("vocab_size", 32000), backbone, solve=None, tied=tied)


def _sizes(fields: Fields, table: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Sizes under our names; each is of the type of its default, and one without a default may be None."""
    readers = {int: fields.integer, float: fields.number, tuple: fields.pair}
    sizes: dict[str, Any] = {}
    for ours, (theirs, default) in table.items():
        missing = default is None and fields.get(theirs, None) is None
        sizes[ours] = None if missing else readers.get(type(default), fields.integer)(theirs, default)
    return sizes


def rotary(fields: Fields, theta: float) -> tuple[float, RotaryScaling | None]:
    """Base, by default ``theta``, and scaling: in ``rope_parameters`` since transformers 5, in two fields before."""
    theta = fields.number("rope_theta", theta)
    name = "rope_parameters" if fields.get("rope_parameters", None) is not None else "rope_scaling"
    if fields.get(name, None) is None:
        return theta, None
    rope = fields.inner(name)
    theta = rope.number("rope_theta", theta)
    rope.only("partial_rotary_factor", (1, None), "deqseq rotates all channels of a head")
    key = "type" if rope.given("type") and not rope.given("rope_type") else "rope_type"
    rope.unused("type", "attention_factor", "original_max_position_embeddings")
    kind = rope.get(key, "default")
    if kind not in ("default", "llama3"):
        rope.refuse(key, kind, "deqseq has plain rotary frequencies ('default') and those of Llama 3.x ('llama3')")
    numbers: dict[str, Any] = {}
    for ours, theirs in ROTARY_SCALING.items() if kind == "llama3" else ():
        numbers[ours] = rope.integer(theirs) if ours == "original_length" else rope.number(theirs)
    rope.close()
    return theta, RotaryScaling(**numbers) if numbers else None


def _mamba2(fields: Fields) -> LanguageModelSpec:
    _check_transformers(fields)
    fields.only("use_bias", (False,), "deqseq's projections have no bias")
    fields.only("use_conv_bias", (True,), "deqseq's convolution has a bias")
    sizes, heads = _sizes(fields, MAMBA2_SIZES), fields.integer("num_heads", 128)
    headdim, inner = sizes["headdim"], sizes["expand"] * sizes["d_model"]
    if heads * headdim != inner:
        fields.refuse("num_heads", heads, f"times head_dim {headdim} it must be expand * hidden_size {inner}")
    tied = fields.flag("tie_word_embeddings", False)
    backbone = Mamba2Config(**sizes, **_EXPLICIT)
    return LanguageModelSpec(fields.integer("vocab_size", 32768), backbone, solve=None, tied=tied)


def _check_transformers(fields: Fields) -> None:
    """Refuse what deqseq does not compute, in fields that many models of transformers share."""
    fields.only("hidden_act", ("silu", "swish"), "deqseq's layers use SiLU")
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
    backbone = Mamba2Config(d_model=width, n_layers=fields.integer("n_layer", 64), **sizes, **_EXPLICIT)
    tokens, multiple = fields.integer("vocab_size", 50277), fields.integer("pad_vocab_size_multiple", 8)
    tied = fields.flag("tie_embeddings", True)
    layer.close()
    fields.close()
    return LanguageModelSpec(-(-tokens // multiple) * multiple, backbone, solve=None, tied=tied)


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
