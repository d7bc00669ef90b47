"""The paper's reference code: its configurations and weights as ours, and back."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from deqseq.arguments import checked
from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.config import SolveConfig
from deqseq.gradients import Phantom
from deqseq.integrations.foreign.engine import (
    Fields,
    Foreign,
    Only,
    Table,
    Weights,
    foreign_name,
    loaded,
    only,
    unused,
)
from deqseq.integrations.foreign.pretrained import LIBRARY, mamba_ssm_layer, padded
from deqseq.models import LanguageModelSpec
from deqseq.solvers import Anderson, Broyden, Naive, Relaxed
from deqseq.stop import Stop

_VOCABULARY = {"implicit_llama3": "vocab_size", "implicit_mamba2": "n_tokens"}
"""The field with the size of the vocabulary, for each ``model_type``."""

WHOLE: Table = {
    **LIBRARY,
    **unused(
        # files and libraries
        "auto_map",
        "use_cache",
        "load_from_pretrained_shell",
        "save_output_ids",
        # text and data
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "data_info",
        "dataset_name",
        "tokenizer",
        # training and evaluation around the model
        "average_eval",
        "keep_sequence_dim",
        "masked_training",
        "weight_decay",
        # the reference draws embeddings with a standard deviation of 0.02 anyway, as we do
        "emb_init_std",
    ),
    "tie_embeddings": ("tied", True),
    "dropout": ("embedding_dropout", 0.05),
    **only(head_bias=False),
}
"""Fields of the whole model."""

BLOCK: Table = {
    **unused(
        "init_gain",  # never read
        "pretrain_iter",  # read only where pretrain_steps is not 0, which is refused
        "residual_in_fp32",  # our residual path has the dtype of the weights
    ),
    "d_model": int,
    "n_layer": ("n_layers", int),
    "pre_norm": Only(True, default=bool),
    "norm_epsilon": Only(1e-5),  # some norms keep it whatever this says
    **only(rms_norm=True),
    "initializer_cfg": Only(None, {}),
}
"""Fields of ``backbone_config``."""

_IMPLICIT: Table = {
    "do_weight_norm": True,
    "init_z_mode": ("start", Only(None, "input")),
    "pretrain_steps": Only(0),
    "ema_alpha": Only(None, 0),
}
_DEQ: Table = {
    "f_solver": ("solver", Only("fixed_point_iter", "anderson", "broyden")),
    "f_stop_mode": ("mode", Only("abs", "rel")),
    "f_tol": 1e-3,
    "f_max_iter": 40,
    "eval_factor": 1.0,
    "eval_f_max_iter": 0,
    "grad": 1,
    "tau": 1.0,
    "norm_type": ("norm", Only(None, "none", "weight_norm")),
    "core": Only("sliced", "indexing"),
    "n_states": Only(1, 0),
    "sup_gap": Only(-1, 0),
    **dict.fromkeys(("indexing", "sup_loc"), Only((), [], None)),
    **only(
        ift=False,
        hook_ift=False,
        norm_no_scale=False,
        norm_clip=False,
        # regularisation is part of the loss here: deqseq.training.jacobian_regularisation
        jac_loss_weight=0,
        jac_incremental=0,
    ),
    **unused(
        "b_max_iter",
        "b_solver",
        "b_stop_mode",
        "b_tol",
        "no_stat",
        "gamma",
        "jac_loss_freq",
        "sradius_mode",
        "norm_clip_val",
        "norm_clip_value",
        "norm_target_norm",
        "sn_n_power_iters",
    ),
}
_ATTENTION: Table = {
    "n_head": ("n_heads", int),
    "rope_theta": 500000.0,
    **unused("max_seq_len"),  # a plain rotary embedding does not depend on it
    **only(bias=False, apply_rotary=True),
}
_MIXER: Table = {
    "chunk_size": ("chunk_size", None),
    **unused("use_materializing_scan"),  # gives the same numbers
    **only(
        allow_negative_A_EV=False,
        # how initial weights are drawn
        conv_init=None,
        dt_min=0.001,
        dt_max=0.1,
        dt_init_floor=0.0001,
    ),
    "A_init_range": Only((1, 16), [1, 16]),
}

_RULES = {
    r"^embedding\.": "word_emb.emb.",
    r"^head\.": "criterion.decoder.",
    r"^model\.(backbone\.)+norm\.": "backbone.norm_f.",
    r"^model\.(backbone\.)+": "backbone.",
    r"parametrizations\.weight\.original0$": "weight_g",
    r"parametrizations\.weight\.original1$": "weight_v",
    r"\.self_attn\.([qkv])_proj\.": r".mixer.w\1.",
    r"\.self_attn\.o_proj\.": ".mixer.out_proj.",
    r"\.mlp\.gate_proj\.": ".mlp.w1.",
    r"\.mlp\.up_proj\.": ".mlp.w3.",
    r"\.mlp\.down_proj\.": ".mlp.fc2.",
    r"\.input_layernorm\.": ".norm.",
    r"\.(post_attention_layernorm|post_norm)\.": ".norm2.",
}


@checked
def from_reference_config(config: Mapping[str, Any]) -> LanguageModelSpec:
    """Turn a configuration of the paper's reference code into a specification.

    The model is solved as in the reference: training iterates without damping and tests each row by
    one norm, so it needs the :class:`deqseq.Simultaneous` sweep; evaluation damps by ``tau`` and
    tests each token. Only dropout differs: deqseq draws a mask for each token, the reference one
    for all tokens of a row.

    Args:
        config: the parsed ``config.json``, with ``backbone_config`` and, for an implicit model,
            ``deq_params`` in it.

    Returns:
        The specification of the model; :func:`from_state` makes it with its weights.

    Raises:
        TypeError, ValueError: an unknown or missing field, or a value that deqseq does not compute;
            names the field.

    Example:
        >>> from deqseq.integrations.foreign import from_reference_config
        >>> block = {
        ...     "block_type": "transformer",
        ...     "block_cfg": {"n_head": 4},
        ...     "d_model": 64,
        ...     "n_layer": 2,
        ... }
        >>> block |= {"d_inner": 256, "mlp_type": "llama_mlp", "pre_norm": True}
        >>> config = {
        ...     "model_type": "implicit_llama3",
        ...     "backbone_type": "explicit",
        ...     "backbone_config": block,
        ... }
        >>> config |= {"vocab_size": 100, "d_embed": 64, "dropout": 0.0}
        >>> spec = from_reference_config(config)
        >>> spec.backbone.mlp_width, spec.solve
        (170, None)
    """
    fields = Fields(config, "reference configuration: ")
    block = fields.inner("backbone_config")
    whole: dict[str, Any] = fields.take(WHOLE) | {"vocab_size": _vocabulary(fields), "solve": None}
    injection = fields.read("backbone_type", Only("implicit", "explicit")) == "implicit"
    weight_norm = False
    if injection:
        keys = block.take(_IMPLICIT) | _keys_of(fields.inner("deq_params"))
        weight_norm = keys["do_weight_norm"] and keys["norm"] != "none"
        whole |= _solves(keys)
    else:
        fields.take(unused("deq_params"))
        block.take(unused(*_IMPLICIT))
    backbone = _backbone(block, weight_norm=weight_norm, injection=injection)
    fields.read("d_embed", Only(backbone.d_model, default=int))  # the layers have this width, too
    fields.close()
    return LanguageModelSpec(backbone=backbone, **whole)


def _vocabulary(fields: Fields) -> int:
    """The number of rows of the embedding; a Mamba2 model ignores ``vocab_size``."""
    kind = fields.read("model_type", Only(*_VOCABULARY, default=str))
    tokens = fields.read(_VOCABULARY[kind], 50277)
    fields.read("vocab_size", Only(tokens))
    rounded = padded(tokens, fields)
    return rounded if fields.read("pad_vocab", False) else tokens


def _keys_of(groups: Fields) -> dict[str, Any]:
    """The options of TorchDEQ, of all groups together."""
    content: dict[str, Any] = {}
    for group in ("solver", "training", "norm", "regularization"):
        content |= groups.inner(group).content
    options = Fields(content, groups.where)
    keys = options.take(_DEQ)
    options.close()
    groups.close()
    return keys


def _solves(keys: dict[str, Any]) -> dict[str, SolveConfig]:
    """How the reference solves: by TorchDEQ in training, by a loop of its own in evaluation."""
    budget = keys["f_max_iter"]
    tolerance = keys["f_tol"]
    damping = keys["tau"]
    rtol, atol = (tolerance, 0.0) if keys["mode"] == "rel" else (0.0, tolerance)
    solvers = {
        "fixed_point_iter": Naive(),
        "anderson": Anderson(memory=6),
        "broyden": Broyden(memory=budget),
    }
    solve = SolveConfig(
        solvers[keys["solver"]],
        Stop(rtol=rtol, atol=atol, max_steps=budget, norm="row"),
        Phantom(keys["grad"], damping),
        start=keys["start"] or "zero",
    )
    eval_budget = keys["eval_f_max_iter"] or int(budget * keys["eval_factor"])
    eval_solve = replace(
        solve,
        solver=Naive() if damping == 1 else Relaxed(damping),
        stop=Stop(rtol=tolerance, max_steps=eval_budget),
    )
    return {"solve": solve, "eval_solve": eval_solve}


def _backbone(block: Fields, **switches: bool) -> LlamaConfig | Mamba2Config:
    llama = block.read("block_type", Only("mamba2", "transformer")) == "transformer"
    sizes: dict[str, Any] = switches | block.take(BLOCK)
    inner = block.read("d_inner", int if llama else 0)
    sizes["mlp_width"] = int(2 * inner / 3)  # as the reference rounds it
    if inner:
        block.read("mlp_type", Only("llama_mlp", default="gated_mlp"))
    else:
        block.take(unused("mlp_type"))
    layer = block.inner("block_cfg", {})
    if llama:
        # this would drop attention weights, anew at each iteration
        block.read("dropout", Only(0))
        sizes |= layer.take(_ATTENTION)
    else:
        sizes["dropout"] = block.read("dropout", 0.0)
        sizes |= layer.take(_MIXER) | mamba_ssm_layer(layer, sizes["d_model"])
    layer.close()
    block.close()
    return LlamaConfig(**sizes) if llama else Mamba2Config(**sizes)


def _reference(fields: Fields, state: Weights) -> Foreign:
    return Foreign(from_reference_config(fields.content), _RULES)


REFERENCE = dict.fromkeys(_VOCABULARY, _reference)


@checked
def to_reference_state(state: Mapping[str, Tensor], spec: LanguageModelSpec) -> dict[str, Tensor]:
    """Our state dict under the names of the reference code.

    Args:
        state: of a model that ``spec`` builds.
        spec: the model.

    Returns:
        What the reference code saves. The tensors are the same ones, and a tied head is one tensor
        under two names: clone it to write safetensors.

    Raises:
        ValueError: tensors that are missing, unexpected or of another shape.

    Example:
        >>> from deqseq.integrations.foreign import to_reference_state
        >>> import deqseq as dq
        >>> spec = dq.LanguageModelSpec(10, dq.LlamaConfig(d_model=16, n_heads=2))
        >>> state = to_reference_state(spec.build().state_dict(), spec)
        >>> sorted(name for name in state if "injection." in name)
        ['backbone.injection.bias', 'backbone.injection.weight_g', 'backbone.injection.weight_v']
    """
    loaded(Foreign(spec), state)
    names = {"head.weight": state["embedding.weight"]} | dict(state)  # a tied head is saved twice
    return {foreign_name(name, _RULES): tensor for name, tensor in names.items()}
