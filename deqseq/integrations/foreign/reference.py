"""The paper's reference code: its configurations and weights as ours, and back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from deqseq.annotations import checked
from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.config import SolveConfig
from deqseq.integrations.fields import Fields, Only, Table, only, unused
from deqseq.integrations.foreign.pretrained import mamba_ssm_layer, padded
from deqseq.integrations.foreign.weights import Rule, assembled, from_foreign, on_meta, to_foreign
from deqseq.integrations.torchdeq import CONFIG_DEFAULTS, CONFIG_GROUPS, from_torchdeq_config
from deqseq.models.causal_lm import CausalLM
from deqseq.models.specification import LanguageModelSpec
from deqseq.solvers import Naive, Relaxed
from deqseq.stop import Stop

WHOLE: Table = {
    # files and libraries
    **unused("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version"),
    **unused("use_cache", "load_from_pretrained_shell", "save_output_ids"),
    # text and data
    **unused("bos_token_id", "eos_token_id", "pad_token_id", "data_info", "dataset_name", "tokenizer"),
    # training and evaluation around the model
    **unused("average_eval", "keep_sequence_dim", "masked_training", "weight_decay"),
    # stored by the reference, but it draws embeddings with a standard deviation of 0.02, which is ours too
    **unused("emb_init_std"),
    "tie_embeddings": ("tied", True),
    "dropout": ("embedding_dropout", 0.05),
    **only(head_bias=False),
}
"""Fields of the whole model."""

BLOCK: Table = {
    **unused("init_gain"),  # stored by the reference, and never read
    **unused("pretrain_iter"),  # read only where pretrain_steps is not 0, which is refused
    **unused("residual_in_fp32"),  # our residual path has the dtype of the weights; in float32 that is the same
    "d_model": ("d_model", int),
    "n_layer": ("n_layers", int),
    "pre_norm": Only(True, default=bool),
    **only(rms_norm=True),
    "initializer_cfg": Only(None, {}),
}
"""Fields of ``backbone_config``."""

_IMPLICIT: Table = {"pretrain_steps": Only(0), "ema_alpha": Only(None, 0), "init_z_mode": Only(None, "input")}
_ATTENTION: Table = {
    "n_head": ("n_heads", int),
    "rope_theta": ("rope_theta", 500000.0),
    **unused("max_seq_len"),  # a plain rotary embedding does not depend on it
    **only(bias=False, apply_rotary=True),
}
_DRAWN = "initial weights are drawn in another way here: initialise the model yourself"
_MIXER: Table = {
    "chunk_size": ("chunk_size", None),
    **unused("use_materializing_scan"),  # another way to the same numbers
    **only(allow_negative_A_EV=False),
    **only(instead=_DRAWN, conv_init=None, dt_min=0.001, dt_max=0.1, dt_init_floor=0.0001),
    "A_init_range": Only((1, 16), [1, 16], instead=_DRAWN),
}

_RULES: tuple[Rule, ...] = (
    (r"^embedding\.", "word_emb.emb."),
    (r"^head\.", "criterion.decoder."),
    (r"^model\.backbone\.norm\.", "backbone.norm_f."),
    (r"^model\.backbone\.", "backbone."),
    (r"parametrizations\.weight\.original0$", "weight_g"),
    (r"parametrizations\.weight\.original1$", "weight_v"),
    (r"\.self_attn\.([qkv])_proj\.", r".mixer.w\1."),
    (r"\.self_attn\.o_proj\.", ".mixer.out_proj."),
    (r"\.mlp\.gate_proj\.", ".mlp.w1."),
    (r"\.mlp\.up_proj\.", ".mlp.w3."),
    (r"\.mlp\.down_proj\.", ".mlp.fc2."),
    (r"\.input_layernorm\.", ".norm."),
    (r"\.(post_attention_layernorm|post_norm)\.", ".norm2."),
)


@checked
def from_reference_config(config: Mapping[str, Any]) -> LanguageModelSpec:
    """Turn a configuration of the paper's reference code into a specification.

    The model is solved as in the reference: training iterates without damping and tests each row by one norm, so it
    needs the simultaneous sweep; evaluation damps by ``tau`` and tests each token. One difference remains: our dropout
    mask differs between the tokens of a row, the reference's does not.

    Args:
        config: the parsed ``config.json``, with ``backbone_config`` and, for an implicit model, ``deq_params`` in it.

    Returns:
        The specification of the model; :func:`from_reference_state` translates its weights.

    Raises:
        TypeError, ValueError: an unknown or missing field, or a value that deqseq does not compute; names the field.

    Example:
        >>> block = {"block_type": "transformer", "block_cfg": {"n_head": 4}, "d_model": 64, "n_layer": 2}
        >>> block |= {"d_inner": 256, "mlp_type": "llama_mlp", "pre_norm": True}
        >>> config = {"model_type": "implicit_llama3", "backbone_type": "explicit", "backbone_config": block}
        >>> spec = from_reference_config(config | {"vocab_size": 100, "d_embed": 64, "dropout": 0.0})
        >>> spec.backbone.mlp_width, spec.solve
        (170, None)
    """
    fields = Fields(config, "reference configuration: ")
    whole = fields.take(WHOLE)
    implicit = fields.choice("backbone_type", ("implicit", "explicit"), "implicit") == "implicit"
    block = fields.inner("backbone_config")
    weight_norm, solves = _solves(fields, block) if implicit else (False, (None, None))
    if not implicit:
        fields.take(unused("deq_params"))
        block.take(unused("do_weight_norm", *_IMPLICIT))
    backbone = _backbone(block, {"weight_norm": weight_norm, "injection": implicit})
    spec = LanguageModelSpec(_vocabulary(fields), backbone, *solves, **whole)
    fields.take({"d_embed": Only(backbone.d_model, default=int)})  # no projection to the layers
    fields.close()
    return spec


def _vocabulary(fields: Fields) -> int:
    """Rows of the embedding; the Mamba2 class has a field of its own for them, and ignores ``vocab_size``."""
    mamba2 = fields.choice("model_type", ("implicit_llama3", "implicit_mamba2")) == "implicit_mamba2"
    tokens = fields.read("n_tokens" if mamba2 else "vocab_size", 50277)
    if mamba2:
        fields.take({"vocab_size": Only(tokens, instead="the reference goes by n_tokens")})
    multiple = fields.read("pad_vocab_size_multiple", 8)
    return padded(tokens, multiple) if fields.read("pad_vocab", False) else tokens


def _solves(fields: Fields, block: Fields) -> tuple[bool, tuple[SolveConfig, SolveConfig]]:
    """Whether weights are normalised, and how an implicit model is solved in training and in evaluation."""
    groups = fields.inner("deq_params")
    nested = {name: groups.inner(name).content for name in CONFIG_GROUPS}
    groups.close()
    solve, evaluation = from_torchdeq_config(nested)
    keys = CONFIG_DEFAULTS | {key: value for group in nested.values() for key, value in group.items()}
    block.take(_IMPLICIT)
    start = "zero" if block.get("init_z_mode", None) is None else "input"
    solver = Naive() if keys["tau"] == 1 else Relaxed(keys["tau"])
    stop = Stop(rtol=keys["f_tol"], max_steps=evaluation.stop.max_steps)
    solve = replace(solve, start=start)
    weight_norm = block.read("do_weight_norm", True) and keys["norm_type"] in (None, "weight_norm")
    return weight_norm, (solve, replace(solve, solver=solver, stop=stop))


def _backbone(block: Fields, switches: dict[str, Any]) -> LlamaConfig | Mamba2Config:
    llama = block.choice("block_type", ("mamba2", "transformer"), "mamba2") == "transformer"
    shared = switches | block.take(BLOCK)
    inner = block.read("d_inner", int, low=1 if llama else 0)
    block.take({"mlp_type": Only("llama_mlp", default="gated_mlp")} if inner else unused("mlp_type"))
    shared["mlp_width"] = int(2 * inner / 3)  # as the reference rounds it
    layer = block.inner("block_cfg", {})
    config = _llama(block, layer, shared) if llama else _mamba2(block, layer, shared)
    layer.close()
    block.close()
    return config


def _llama(block: Fields, layer: Fields, shared: dict[str, Any]) -> LlamaConfig:
    block.take({"dropout": Only(0)})  # of attention weights, drawn anew at each iteration
    eps = block.read("norm_epsilon", 1e-5)
    if shared["injection"]:  # whose norm keeps 1e-5 in the reference; here one epsilon serves all norms
        block.take({"norm_epsilon": Only(1e-5)})
    return LlamaConfig(norm_eps=eps, **layer.take(_ATTENTION), **shared)


def _mamba2(block: Fields, layer: Fields, shared: dict[str, Any]) -> Mamba2Config:
    block.take({"norm_epsilon": Only(1e-5)})  # the reference's gated norm keeps it; here one epsilon serves all norms
    sizes = mamba_ssm_layer(layer, shared["d_model"]) | layer.take(_MIXER)
    return Mamba2Config(dropout=block.read("dropout", 0.0), **sizes, **shared)


@checked
def from_reference_state(state: Mapping[str, Tensor], spec: LanguageModelSpec) -> dict[str, Tensor]:
    """A state dict of the reference code under our names.

    Args:
        state: of its Mamba2 or Llama, explicit or implicit.
        spec: the model that the weights are for; :func:`from_reference_config` makes it.

    Returns:
        What ``spec.build().load_state_dict`` takes; the tensors are the same ones.

    Raises:
        ValueError: tensors that are missing, unexpected or of another shape; or a tied head unlike the embedding.

    Example:
        >>> import deqseq as dq
        >>> spec = dq.LanguageModelSpec(10, dq.Mamba2Config(d_model=16, d_state=4, headdim=8))
        >>> theirs = to_reference_state(spec.build().state_dict(), spec)
        >>> spec.build().load_state_dict(from_reference_state(theirs, spec))
        <All keys matched successfully>
    """
    return from_foreign(state, on_meta(spec.build), _RULES)


@checked
def to_reference_state(state: Mapping[str, Tensor], spec: LanguageModelSpec) -> dict[str, Tensor]:
    """Our state dict under the names of the reference code.

    Args:
        state: of a model that ``spec`` builds.
        spec: the model.

    Returns:
        What the reference code saves. The tensors are the same ones, and a tied head is one tensor under two names:
        clone it to write safetensors.

    Raises:
        ValueError: tensors that are missing, unexpected or of another shape.

    Example:
        >>> import deqseq as dq
        >>> spec = dq.LanguageModelSpec(10, dq.LlamaConfig(d_model=16, n_heads=2))
        >>> sorted(name for name in to_reference_state(spec.build().state_dict(), spec) if "layers" not in name)[:3]
        ['backbone.injection.bias', 'backbone.injection.weight_g', 'backbone.injection.weight_v']
    """
    return to_foreign(state, on_meta(spec.build), _RULES)


def from_reference(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> CausalLM:
    """A model of the reference code, from its configuration and its weights.

    Args:
        config: the parsed ``config.json``.
        state: its state dict; it is copied.

    Returns:
        The model, its weights in their own dtypes.

    Raises:
        TypeError, ValueError: as :func:`from_reference_config` and :func:`from_reference_state`.

    Example:
        >>> block = {"block_type": "mamba2", "block_cfg": {"d_state": 4, "headdim": 8}, "d_model": 16, "n_layer": 1}
        >>> block |= {"pre_norm": True, "d_inner": 0}
        >>> config = {"model_type": "implicit_mamba2", "backbone_type": "explicit", "backbone_config": block}
        >>> config |= {"n_tokens": 10, "vocab_size": 10, "d_embed": 16}
        >>> spec = from_reference_config(config)
        >>> lm = from_reference(config, to_reference_state(spec.build().state_dict(), spec))
        >>> type(lm.model).__name__
        'ExplicitModel'
    """
    spec = from_reference_config(config)
    return assembled(on_meta(spec.build), from_reference_state(state, spec))
