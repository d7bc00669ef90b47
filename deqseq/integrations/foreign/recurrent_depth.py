"""Released recurrent-depth models: Huginn, the retrofitted Llama and OLMo models, and Ouro."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any

import torch
from einops import rearrange
from jaxtyping import Float, Int64
from torch import Tensor, nn

from deqseq.arguments import Within, checked, returned_by
from deqseq.backbones import LlamaConfig
from deqseq.config import SolveConfig
from deqseq.gradients import Unrolled
from deqseq.integrations.foreign.engine import Fields, Foreign, Only, Rule, Table, only
from deqseq.integrations.foreign.pretrained import LLAMA, explicit_spec, renamed, rotary
from deqseq.models import LanguageModelSpec
from deqseq.solvers import Naive
from deqseq.start import RandomStart
from deqseq.stop import Stop

_RAVEN: Table = {
    "n_embd": ("d_model", int),
    "n_heads": ("n_heads", int),
    "num_key_value_heads": ("n_kv_heads", None),
    "head_dim": ("headdim", None),
    "intermediate_size": ("mlp_width", int),
    "norm_eps": ("norm_eps", float),
    "qk_bias": ("qk_bias", False),
    **only(bias=False, injection_type="linear", nonlin_name="SiLU", mlp_class_name="GatedMLP"),
    "test_time_noise": Only(0, None),
    "initial_state_mode": Only("random"),  # pass start="input" in the call for "embed-init",
}


def _raven(fields: Fields, state: Mapping[str, Tensor]) -> Foreign:
    """Huginn and the retrofitted models: all say ``huginn_raven``, the names of their tensors tell
    them apart.
    """
    first = "transformer.prelude.0."
    huginn, olmo = f"{first}norm_3.weight" in state, f"{first}attn.q_norm.weight" in state
    layers: dict[str, Any] = fields.take(_RAVEN) | {
        "injection": False,
        "weight_norm": False,
        "float32_rotary": False,
    }
    layers |= {"norms": "closed" if huginn else "post" if olmo else "pre", "qk_norm": olmo}
    # the retrofitted models have a ``rope_base`` too, which their code does not use
    layers |= {"rope_theta": fields.read("rope_base", float)} if huginn else rotary(fields)
    prelude, core, coda = (
        LlamaConfig(
            **layers, n_layers=fields.read(f"n_layers_in_{part}", int), final_norm=part == "coda"
        )
        for part in ("prelude", "recurrent_block", "coda")
    )
    # Huginn's scale follows from its width, whatever its configuration says
    scale = (
        math.sqrt(core.d_model)
        if huginn
        else fields.inner("init_values", {}).read("embed_scale", 1.0)
    )
    mean, start = (
        fields.read("mean_recurrence", int),
        RandomStart(math.sqrt(2 / (5 * core.d_model)) * scale),
    )
    gradient = Unrolled(last=fields.read("mean_backprop_depth", min(8, mean)))
    spec = LanguageModelSpec(
        fields.read("padded_vocab_size", fields.read("vocab_size", int)),
        core,
        SolveConfig(Naive(), Stop.exactly(mean), gradient, start=start),
        SolveConfig(stop=Stop(max_steps=4 * mean)),
        tied=fields.read("tie_embeddings", huginn),
        embedding_scale=scale,
        prelude=prelude,
        coda=coda,
        injection="concat",
        norm="coda" if huginn else None,
    )
    return spec, _raven_rules(coda, pairs=huginn), None


def _raven_rules(config: LlamaConfig, pairs: bool) -> tuple[Rule, ...]:
    """Queries, keys and values are one matrix there, and so are gate and input of the feed-forward
    layer.
    """
    q, k = config.n_heads * config.head_width, config.kv_heads * config.head_width
    halves = partial(_halves, width=config.head_width) if pairs else lambda rows: rows
    return (
        (r"^embedding\.", "transformer.wte."),
        (r"^head\.", "lm_head."),
        (r"^model\.(coda\.backbone\.)?norm\.", "transformer.ln_f."),
        (r"^model\.core\.(backbone\.)+injection\.", "transformer.adapter."),
        (r"^model\.core\.(backbone\.)+layers\.", "transformer.core_block."),
        (r"^model\.(prelude|coda)\.backbone\.layers\.", r"transformer.\1."),
        (r"\.self_attn\.q_proj\.weight", ".attn.Wqkv.weight", lambda rows: halves(rows[:q])),
        (r"\.self_attn\.k_proj\.weight", ".attn.Wqkv.weight", lambda rows: halves(rows[q : q + k])),
        (r"\.self_attn\.v_proj\.weight", ".attn.Wqkv.weight", lambda rows: rows[q + k :]),
        (r"\.self_attn\.q_proj\.bias", ".attn.qk_bias", lambda two: halves(two[:1].flatten())),
        (r"\.self_attn\.k_proj\.bias", ".attn.qk_bias", lambda two: halves(two[1:].flatten())),
        (r"\.self_attn\.([qk])_norm\.", r".attn.\1_norm."),
        (r"\.self_attn\.o_proj\.", ".attn.proj."),
        (r"\.mlp\.gate_proj\.", ".mlp.fc.", lambda rows: rows[: len(rows) // 2]),
        (r"\.mlp\.up_proj\.", ".mlp.fc.", lambda rows: rows[len(rows) // 2 :]),
        (r"\.mlp\.down_proj\.", ".mlp.proj."),
        *((rf"\.{name}\.", f".norm_{i}.") for i, name in enumerate(_RAVEN_NORMS[config.norms], 1)),
    )


_RAVEN_NORMS = {  # norm_1, norm_2 and so on
    "pre": ("input_layernorm", "post_attention_layernorm"),
    "post": ("input_layernorm_2", "post_attention_layernorm_2"),
    "closed": (
        "input_layernorm",
        "input_layernorm_2",
        "post_attention_layernorm",
        "post_attention_layernorm_2",
    ),
}


def _halves(rows: Tensor, width: int) -> Tensor:
    """Channels (2i, 2i + 1) of a head, which Huginn turns together, as (i, i + width / 2)."""
    fits = len(rows) % width == 0  # others are named as of another shape
    return (
        rearrange(rows, "(h i pair) ... -> (h pair i) ...", pair=2, i=width // 2) if fits else rows
    )


class OuroGate(nn.Module):
    r"""Ouro's choice among the states of its loops, the ``choose`` of a :class:`deqseq.Looped`.

    .. math:: \lambda_s = \sigma(\mathrm{linear}(z_s)), \qquad
              1 - \prod_{j \le s} (1 - \lambda_j) \ge \mathrm{threshold}

    Each token takes the first loop at which the probability of having exited reaches the threshold,
    or else the last. All loops run in any case, as in the authors' code, because later tokens
    attend to every loop.

    Args:
        linear: maps states ``(..., d_model)`` to a number before the sigmoid, ``(..., 1)``. Its
            weights are frozen: no gradient reaches them through a choice, for which DDP would wait.
        threshold: an attribute that can be changed. At 1 every token takes the last loop.

    References:
        Zhu et al., Scaling Latent Reasoning via Looped Language Models, 2025, arXiv 2510.25741.

    Example:
        >>> gate = OuroGate(nn.Linear(8, 1), threshold=0.8)
        >>> states = torch.randn(4, 2, 5, 8)  # of four loops
        >>> gate(states).shape, gate.loops(states).shape
        (torch.Size([2, 5, 8]), torch.Size([2, 5]))
    """

    @checked
    def __init__(
        self, linear: nn.Module, threshold: Annotated[float, Within("[0, 1]")] = 1.0
    ) -> None:
        super().__init__()
        self.linear, self.threshold = linear.requires_grad_(False), threshold

    def forward(
        self, states: Float[Tensor, "loops batch length d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """The state that each token takes, of ``states``, ``(loops, batch, length, d_model)``."""
        place = self.loops(states)[None, ..., None] - 1
        return states.gather(0, place.expand(1, *states.shape[1:]))[0]

    def loops(
        self, states: Float[Tensor, "loops batch length d_model"]
    ) -> Int64[Tensor, "batch length"]:
        """The loop whose state each token takes, from 1, by ``states``, ``(loops, batch, length,
        d_model)``.
        """
        if self.threshold == 1:  # a probability can underflow
            return torch.full(states.shape[1:3], len(states), device=states.device)
        earlier = states[:-1]
        name, what = "OuroGate.linear", "one number of each state"
        logits = returned_by(name, self.linear, earlier, like=earlier[..., :1], what=what)[..., 0]
        stays = torch.sigmoid(-logits.to(torch.promote_types(logits.dtype, torch.float32))).cumprod(
            dim=0
        )
        return 1 + (stays > 1 - self.threshold).long().cumprod(dim=0).sum(dim=0)


_OURO: Table = {
    **LLAMA,
    "total_ut_steps": ("steps", int),
    "num_attention_heads": ("n_heads", int),
    "rms_norm_eps": ("norm_eps", float),
    "use_sliding_window": Only(False, None),
}


def _ouro(fields: Fields, state: Mapping[str, Tensor]) -> Foreign:
    """A stack and its norm, iterated from the embedding."""
    values = fields.take(_OURO) | rotary(fields) | {"norms": "sandwich", "float32_rotary": False}
    threshold, gate = fields.read("early_exit_threshold", 1.0), None
    if threshold < 1 or "model.early_exit_gate.weight" in state:
        gate = OuroGate(nn.Linear(values["d_model"], 1, device="meta"), min(threshold, 1.0))
    rules = renamed("model.embed_tokens.", "model.")
    return (
        explicit_spec(LlamaConfig, values),
        (*rules, (r"^model\.choose\.linear\.", "model.early_exit_gate.")),
        gate,
    )


RECURRENT = {"huginn_raven": _raven, "ouro": _ouro}
