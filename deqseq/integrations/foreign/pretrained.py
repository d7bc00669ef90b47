"""Pretrained Llama and Mamba2 weights in explicit models, and as the initial weights of implicit ones."""

import math
from collections.abc import Mapping
from dataclasses import is_dataclass, replace
from typing import Any

from torch import Tensor, nn

from deqseq.annotations import checked
from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.check import check_type
from deqseq.config import SolveConfig
from deqseq.gradients import Phantom
from deqseq.integrations.fields import Fields, Only, Sizes
from deqseq.integrations.foreign.weights import Rule, assembled, from_foreign, on_meta
from deqseq.layers import RotaryScaling, apply_weight_norm
from deqseq.models.causal_lm import CausalLM
from deqseq.models.specification import LanguageModelSpec
from deqseq.stop import Stop

FROM_INPUT = SolveConfig(stop=Stop(rtol=0.05, max_steps=4), gradient=Phantom(steps=1), start="input")
"""At most 4 iterations, from the embedded tokens, then 1 phantom step: for the beginning of fine-tuning."""

LLAMA_SIZES: Sizes = {
    "d_model": ("hidden_size", 4096),
    "n_layers": ("num_hidden_layers", 32),
    "n_heads": ("num_attention_heads", 32),
    "n_kv_heads": ("num_key_value_heads", None),
    "headdim": ("head_dim", None),
    "mlp_width": ("intermediate_size", 11008),
    "norm_eps": ("rms_norm_eps", 1e-6),
}
MAMBA2_SIZES: Sizes = {
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
_MAMBA_SSM_SIZES: Sizes = {
    "expand": ("expand", 2),
    "d_state": ("d_state", 128),
    "headdim": ("headdim", 64),
    "n_groups": ("ngroups", 1),
    "d_conv": ("d_conv", 4),
    "dt_limit": ("dt_limit", (0.0, math.inf)),
}
ROTARY_SCALING: Sizes = {
    "factor": ("factor", float),
    "low_freq_factor": ("low_freq_factor", float),
    "high_freq_factor": ("high_freq_factor", float),
    "original_length": ("original_max_position_embeddings", int),
}

_SHARED: Only = {"hidden_act": ("silu", "swish"), "quantization_config": (None,)}
_LLAMA: Only = {
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, None),
    "partial_rotary_factor": (1, None),
}
_MAMBA2: Only = {"use_bias": (False,), "use_conv_bias": (True,)}
_MAMBA_SSM: Only = {"attn_layer_idx": ([], ()), "d_intermediate": (0,), "rms_norm": (True,)}
_MAMBA_SSM_LAYER: Only = {
    "D_has_hdim": (False,),
    "rmsnorm": (True,),
    "norm_before_gate": (False,),
    "bias": (False,),
    "conv_bias": (True,),
    "process_group": (None,),
}
_MAMBA_SSM_NO_EFFECT = (
    *("_name_or_path", "architectures", "dtype", "model_type", "torch_dtype", "transformers_version"),
    "attn_cfg",  # of attention layers, which are refused
    *("fused_add_norm", "residual_in_fp32"),  # the same numbers in float32
)


@checked
def from_pretrained_model(
    model: object,
    state: Mapping[str, Tensor] | None = None,
    *,
    implicit: bool,
    solve: SolveConfig | None = None,
    eval_solve: SolveConfig | None = None,
    weight_norm: bool | None = None,
) -> CausalLM:
    r"""A language model with the weights of a pretrained one.

    An explicit one computes what the pretrained one does. An implicit one has the same layers, and an injection whose
    weights are zero; its iteration starts at the embedded tokens :math:`e`, so that the first iteration is the
    pretrained model,

    .. math:: z^{(1)} = f(e, u) = f(e, 0), \qquad u = W\, \mathrm{RMSNorm}(e) + b, \quad W = 0,\ b = 0.

    Further iterations feed the layers with their own output, for which they were never trained, and as long as the
    injection is zero the tokens enter only by the start. So train the model before you use it.

    Args:
        model: a ``LlamaForCausalLM``, ``Mamba2ForCausalLM`` or ``MambaLMHeadModel``; or the configuration of one, as
            :func:`pretrained_spec` takes it.
        state: the state dict that belongs to a configuration, with the head unless the configuration ties it. Default:
            that of the model.
        implicit: whether to make an implicit model; the arguments that follow are for this one alone.
        solve: how it is solved; its ``start`` must be ``"input"``. Default: :data:`FROM_INPUT`.
        eval_solve: the same in eval mode. Default: ``solve``.
        weight_norm: whether its weights are normalised, with the same values. Default: they are, as in the paper.

    Returns:
        The model, with copies of the weights in their own dtypes; a new injection has the dtype of the embedding.

    Raises:
        TypeError: neither a model with a configuration, nor a configuration with its ``state``.
        ValueError: a configuration that deqseq does not compute; missing or unexpected tensors, or some of another
            shape, all of them named; a start at zero; or how to solve an explicit model.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
        >>> theirs = LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes))
        >>> ours, ids = from_pretrained_model(theirs, implicit=True).eval(), torch.tensor([[1, 2, 3]])
        >>> with torch.no_grad():
        ...     torch.allclose(ours(ids, stop=Stop.exactly(1)).logits, theirs(ids).logits, atol=1e-5)
        True
    """
    solves = {"solve": solve, "eval_solve": eval_solve}
    given = [name for name, value in {**solves, "weight_norm": weight_norm}.items() if value]
    if given and not implicit:
        raise ValueError(f"leave out {', '.join(given)}, or give implicit=True: an explicit model runs as it is")
    for name, one in solves.items():
        if one is not None and one.start != "input":
            raise ValueError(
                f"{name}.start must be 'input', got {one.start!r}: the new injection is zero, and from zero the "
                "output would not depend on the tokens"
            )
    config = model
    if state is None:
        config = getattr(model, "config", None)
        if config is None or not isinstance(model, nn.Module):
            raise TypeError(
                f"model must be a transformers model, or a configuration with its state dict, got {model!r:.60}: "
                "load it first, as AutoModelForCausalLM.from_pretrained(name)"
            )
        state = model.state_dict()
    spec, rules = _read(config)
    lm = on_meta(spec.build)
    weights = from_foreign(state, lm, rules)
    if not implicit:
        return assembled(lm, weights)
    backbone = replace(spec.backbone, injection=True)
    lm = on_meta(replace(spec, backbone=backbone, solve=solve or FROM_INPUT, eval_solve=eval_solve).build)
    like = weights["embedding.weight"]
    for name, tensor in lm.state_dict().items():
        if name not in weights:  # an injection that adds nothing: its norm is the identity, weights and bias are zero
            weights[name] = (like.new_ones if "norm" in name else like.new_zeros)(tensor.shape)
    layers: Any = assembled(lm, weights).model.backbone
    if weight_norm is not False:
        apply_weight_norm(layers)
        layers.config = replace(backbone, weight_norm=True)
    return lm


def pretrained_spec(config: object) -> LanguageModelSpec:
    """The specification of the explicit model that a pretrained one is.

    It reads configurations of transformers' Llama (grouped heads, Llama 3.x frequencies, tied head or not) and Mamba2,
    and of mamba_ssm's Mamba2. Fields that transformers' own classes would ignore are ignored.

    Args:
        config: a parsed ``config.json``, or the configuration object of a model.

    Returns:
        The specification.

    Raises:
        TypeError, ValueError: another kind of model, or a value that deqseq does not compute; names the field.

    Example:
        >>> spec = pretrained_spec({"d_model": 64, "n_layer": 2, "vocab_size": 50, "ssm_cfg": {"layer": "Mamba2"}})
        >>> spec.vocab_size, spec.backbone.d_state, spec.solve     # padded to a multiple of 8, mamba_ssm's default
        (56, 128, None)
    """
    return _read(config)[0]


def _read(config: object) -> tuple[LanguageModelSpec, tuple[Rule, ...]]:
    """What a configuration describes, and the rules of its weights."""
    if (to_dict := getattr(config, "to_dict", None)) is not None:  # an object of transformers
        config = to_dict()
    content: Any = vars(config) if is_dataclass(config) else config  # of mamba_ssm
    check_type("config", content, Mapping, "json.loads(Path('config.json').read_text())")
    if "ssm_cfg" in content:
        kind, where = "mamba_ssm", "mamba_ssm configuration: "
    else:
        where = "transformers configuration: "
        kind = Fields(content, where).choice("model_type", ("llama", "mamba2"), None)
    reader, embedding, prefix = _KINDS[kind]
    rules: tuple[Rule, ...] = ((r"^embedding\.", embedding), (r"^model\.backbone\.", prefix), (r"^head\.", "lm_head."))
    tokens, tied, backbone = reader(Fields(content, where))
    return LanguageModelSpec(tokens, replace(backbone, injection=False), solve=None, tied=tied), rules


def _llama(fields: Fields) -> tuple[int, bool, LlamaConfig]:
    fields.only(_SHARED | _LLAMA)
    theta, scaling = rotary(fields, 10000.0)
    config = LlamaConfig(**fields.sizes(LLAMA_SIZES), rope_theta=theta, rope_scaling=scaling, weight_norm=False)
    return fields.read("vocab_size", 32000), fields.read("tie_word_embeddings", False), config


def rotary(fields: Fields, theta: float) -> tuple[float, RotaryScaling | None]:
    """Base, by default ``theta``, and scaling: in ``rope_parameters`` since transformers 5, in two fields before."""
    theta = fields.read("rope_theta", theta)
    name = "rope_parameters" if fields.get("rope_parameters", None) is not None else "rope_scaling"
    if fields.get(name, None) is None:
        return theta, None
    rope = fields.inner(name)
    theta = rope.read("rope_theta", theta)
    rope.only({"partial_rotary_factor": (1, None)})
    rope.unused("type", "attention_factor", "original_max_position_embeddings")
    key = "type" if "rope_type" not in rope.content else "rope_type"  # its name in old files
    scaled = rope.choice(key, ("default", "llama3"), "default") == "llama3"
    scaling = RotaryScaling(**rope.sizes(ROTARY_SCALING)) if scaled else None
    rope.close()
    return theta, scaling


def _mamba2(fields: Fields) -> tuple[int, bool, Mamba2Config]:
    fields.only(_SHARED | _MAMBA2)
    config = Mamba2Config(**fields.sizes(MAMBA2_SIZES), weight_norm=False)
    heads = config.expand * config.d_model // config.headdim
    fields.only({"num_heads": (heads,)}, "it is expand * hidden_size / head_dim", num_heads=128)
    return fields.read("vocab_size", 32768), fields.read("tie_word_embeddings", False), config


def _mamba_ssm(fields: Fields) -> tuple[int, bool, Mamba2Config]:
    fields.unused(*_MAMBA_SSM_NO_EFFECT)
    fields.only(_MAMBA_SSM)
    layer, sizes = fields.inner("ssm_cfg"), fields.sizes({"d_model": ("d_model", 2560), "n_layers": ("n_layer", 64)})
    layer.only({"layer": ("Mamba2",)}, layer="Mamba1")
    layer.unused("conv_init", "A_init_range", "dt_min", "dt_max", "dt_init_floor", "chunk_size")  # weights are given
    config = Mamba2Config(**sizes, **mamba_ssm_layer(layer, sizes["d_model"]), weight_norm=False)
    tokens = padded(fields.read("vocab_size", 50277), fields.read("pad_vocab_size_multiple", 8))
    tied = fields.read("tie_embeddings", True)
    layer.close()
    fields.close()
    return tokens, tied, config


def mamba_ssm_layer(layer: Fields, width: int) -> dict[str, Any]:
    """Sizes of mamba_ssm's Mamba2 layer, under the names of our configuration."""
    sizes = layer.sizes(_MAMBA_SSM_SIZES)
    layer.only({**_MAMBA_SSM_LAYER, "d_ssm": (None, sizes["expand"] * width)})
    layer.unused("use_mem_eff_path", "sequence_parallel")  # other ways to the same numbers
    return sizes


def padded(tokens: int, multiple: int) -> int:
    """A vocabulary, rounded up."""
    return -(-tokens // multiple) * multiple


_KINDS: Mapping[str, tuple[Any, str, str]] = {  # the reader, and where embedding and layers stand
    "llama": (_llama, "model.embed_tokens.", "model."),
    "mamba2": (_mamba2, "backbone.embeddings.", "backbone."),
    "mamba_ssm": (_mamba_ssm, "backbone.embedding.", "backbone."),
}
