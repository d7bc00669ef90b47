"""Configurations of the paper's reference code as our specifications."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.config import SolveConfig
from deqseq.integrations.pretrained_config import mamba2_layer
from deqseq.integrations.reference_fields import Fields
from deqseq.integrations.torchdeq import CONFIG_DEFAULTS, CONFIG_GROUPS, from_torchdeq_config
from deqseq.models.specification import LanguageModelSpec
from deqseq.solvers import Naive, Relaxed
from deqseq.stop import Stop

NO_EFFECT: tuple[str, ...] = (
    # files and libraries
    *("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache"),
    # text and data
    *("bos_token_id", "eos_token_id", "pad_token_id", "data_info", "dataset_name", "tokenizer"),
    # training and evaluation around the model
    *("average_eval", "keep_sequence_dim", "load_from_pretrained_shell", "masked_training", "save_output_ids"),
    "weight_decay",
    # stored by the reference, but it draws embeddings with a standard deviation of 0.02, which is ours too
    "emb_init_std",
)
"""Fields of the whole model that change nothing of what it computes."""

BACKBONE_NO_EFFECT: tuple[str, ...] = (
    "init_gain",  # stored by the reference, and never read
    "pretrain_iter",  # read only where pretrain_steps is not 0, which is refused
    "residual_in_fp32",  # our residual path has the dtype of the weights; in float32 that is the same
)
"""Fields of ``backbone_config`` that change nothing of what it computes."""

_INITIAL = "deqseq draws initial weights in its own way: leave it out, and initialise the model yourself"
_FEED_FORWARD = "deqseq's feed-forward layer is the reference's 'llama_mlp'"


def from_reference_config(config: Mapping[str, Any]) -> LanguageModelSpec:
    """Turn a configuration of the paper's reference code into a specification.

    Every field is read, known to have no effect on the model (:data:`NO_EFFECT`, :data:`BACKBONE_NO_EFFECT`), or
    refused. A missing one has the reference's default. The model is solved as in the reference: training iterates
    without damping and tests each row by one norm, so it needs the simultaneous sweep; evaluation damps by ``tau`` and
    tests each token. One difference remains: our dropout mask differs between the tokens of a row, the reference's
    does not.

    Args:
        config: the parsed ``config.json``: fields of the model, with ``backbone_config`` and, for an implicit one,
            ``deq_params`` in it.

    Returns:
        The specification of the model; :mod:`deqseq.integrations.reference_weights` translates its weights.

    Raises:
        ValueError: an unknown or missing field, or a value without an equivalent here; names the field, the value and
            the reason.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827.

    Example:
        >>> block = {"block_type": "transformer", "block_cfg": {"n_head": 4}, "d_model": 64, "n_layer": 2}
        >>> block |= {"d_inner": 256, "mlp_type": "llama_mlp", "pre_norm": True}
        >>> config = {"model_type": "implicit_llama3", "backbone_type": "explicit", "backbone_config": block}
        >>> spec = from_reference_config(config | {"vocab_size": 100, "d_embed": 64, "dropout": 0.0})
        >>> spec.backbone.mlp_width, spec.solve
        (170, None)
    """
    fields = Fields(config, "reference configuration: ")
    fields.unused(*NO_EFFECT)
    implicit = fields.choice("backbone_type", ("implicit", "explicit"), "implicit") == "implicit"
    block = fields.inner("backbone_config")
    weight_norm, solves = _solves(fields, block) if implicit else (False, (None, None))
    if not implicit:
        fields.unused("deq_params")
        block.unused("do_weight_norm", "init_z_mode", "pretrain_steps", "ema_alpha")
    backbone = _backbone(block, implicit, weight_norm)
    spec = LanguageModelSpec(
        _vocabulary(fields),
        backbone,
        *solves,
        tied=fields.flag("tie_embeddings", True),
        embedding_dropout=fields.number("dropout", 0.05),
    )
    wide = "deqseq does not project embeddings: it must be the backbone's d_model"
    fields.only("d_embed", (backbone.d_model,), wide, default=None)
    fields.only("head_bias", (False,), "deqseq's head has no bias")
    fields.close()
    return spec


def _vocabulary(fields: Fields) -> int:
    """Rows of the embedding; the Mamba2 class has a field of its own for them."""
    mamba2 = fields.choice("model_type", ("implicit_llama3", "implicit_mamba2")) == "implicit_mamba2"
    tokens = fields.integer("n_tokens" if mamba2 else "vocab_size", 50277)
    if mamba2:
        disagrees = f"the reference goes by n_tokens, which is {tokens}: make both the same"
        fields.only("vocab_size", (tokens,), disagrees)
    multiple = fields.integer("pad_vocab_size_multiple", 8)
    return -(-tokens // multiple) * multiple if fields.flag("pad_vocab", False) else tokens


def _solves(fields: Fields, block: Fields) -> tuple[bool, tuple[SolveConfig, SolveConfig]]:
    """Whether weights are normalised, and how an implicit model is solved in training and in evaluation."""
    groups = fields.inner("deq_params")
    nested = {name: groups.get(name) for name in CONFIG_GROUPS}
    for name in CONFIG_GROUPS:
        groups.inner(name)
    groups.close()
    solve, evaluation = from_torchdeq_config(nested)
    keys = CONFIG_DEFAULTS | {key: value for group in nested.values() for key, value in group.items()}
    unrolled = "the first steps of training unroll the iteration: that is a phase of deqseq.training's Curriculum"
    block.only("pretrain_steps", (0,), unrolled)
    block.only("ema_alpha", (None, 0), "it averages iterates under noise, which deqseq does not have")
    block.only("init_z_mode", (None, "input"), "deqseq starts at zero (None) or at the embedded tokens ('input')")
    start = "zero" if block.get("init_z_mode", None) is None else "input"
    solver = Naive() if keys["tau"] == 1 else Relaxed(keys["tau"])
    stop = Stop(rtol=keys["f_tol"], max_steps=evaluation.stop.max_steps)
    solve = replace(solve, start=start)
    weight_norm = block.flag("do_weight_norm", True) and keys["norm_type"] in (None, "weight_norm")
    return weight_norm, (solve, replace(solve, solver=solver, stop=stop))


def _backbone(block: Fields, implicit: bool, weight_norm: bool) -> LlamaConfig | Mamba2Config:
    block.unused(*BACKBONE_NO_EFFECT)
    llama = block.choice("block_type", ("mamba2", "transformer"), "mamba2") == "transformer"
    if not block.flag("pre_norm"):
        block.refuse("pre_norm", False, "deqseq's blocks normalise their input")
    block.only("rms_norm", (True,), "deqseq's norms are RMSNorm")
    block.only("initializer_cfg", (None, {}), _INITIAL)
    inner = block.integer("d_inner", least=0)
    if llama and not inner:
        block.refuse("d_inner", inner, "deqseq's transformer block has a feed-forward layer")
    if inner:
        block.only("mlp_type", ("llama_mlp",), _FEED_FORWARD, default="gated_mlp")
    else:
        block.unused("mlp_type")
    shared = {
        "d_model": block.integer("d_model"),
        "n_layers": block.integer("n_layer"),
        "mlp_width": int(2 * inner / 3),  # as the reference rounds it
        "weight_norm": weight_norm,
        "injection": implicit,
    }
    layer = block.inner("block_cfg", {})
    config = _llama(block, layer, implicit, shared) if llama else _mamba2(block, layer, shared)
    layer.close()
    block.close()
    return config


def _llama(block: Fields, layer: Fields, implicit: bool, shared: dict[str, Any]) -> LlamaConfig:
    block.only("dropout", (0,), "it drops attention weights, anew at each iteration, which deqseq does not")
    eps = block.number("norm_epsilon", 1e-5)
    if implicit:
        block.only(
            "norm_epsilon",
            (1e-5,),
            "the reference's injection norm keeps 1e-5, and deqseq has one epsilon for all norms",
        )
    layer.only("bias", (False,), "deqseq's attention has no bias")
    layer.only("apply_rotary", (True,), "deqseq's attention always has rotary positions")
    layer.unused("max_seq_len")  # a plain rotary embedding does not depend on it
    theta = layer.number("rope_theta", 500000.0)
    return LlamaConfig(n_heads=layer.integer("n_head"), rope_theta=theta, norm_eps=eps, **shared)


def _mamba2(block: Fields, layer: Fields, shared: dict[str, Any]) -> Mamba2Config:
    block.only(
        "norm_epsilon", (1e-5,), "the reference's gated norm keeps 1e-5, and deqseq has one epsilon for all norms"
    )
    sizes = mamba2_layer(layer, shared["d_model"])
    layer.only("allow_negative_A_EV", (False,), "deqseq's eigenvalues are positive")
    drawn = {"A_init_range": ((1, 16), [1, 16]), "dt_min": (0.001,), "dt_max": (0.1,), "dt_init_floor": (0.0001,)}
    for name, allowed in {"conv_init": (None,), **drawn}.items():
        layer.only(name, allowed, _INITIAL)
    layer.unused("use_materializing_scan")  # another way to the same numbers
    chunk = {"chunk_size": layer.integer("chunk_size")} if layer.given("chunk_size") else {}
    layer.unused("chunk_size")
    return Mamba2Config(dropout=block.number("dropout", 0.0), **sizes, **chunk, **shared)
