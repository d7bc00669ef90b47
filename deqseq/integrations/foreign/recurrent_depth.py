"""Released recurrent-depth models: Huginn, the retrofitted Llama and OLMo models, and Ouro, from their own files."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import Annotated, Any, cast

import torch
from einops import rearrange
from jaxtyping import Float, Int64
from torch import Tensor, nn

from deqseq.annotations import AtLeast, Within, checked
from deqseq.backbones import LlamaConfig, Looped
from deqseq.check import returned_by
from deqseq.config import SolveConfig
from deqseq.gradients import Unrolled
from deqseq.integrations.fields import Fields, Only, Table, only
from deqseq.integrations.foreign.files import config_in, folder_of, tensors_in
from deqseq.integrations.foreign.pretrained import explicit_spec, rotary
from deqseq.integrations.foreign.weights import Rule, assembled, from_foreign, on_meta
from deqseq.models import CausalLM, LanguageModelSpec
from deqseq.solvers import Naive
from deqseq.start import RandomStart
from deqseq.stop import Stop


@checked
def from_pretrained(
    folder_or_name: str | PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    revision: str | None = None,
    steps: Annotated[int, AtLeast(1)] | None = None,
) -> CausalLM:
    r"""A released recurrent-depth model, from its ``config.json`` and weights; none of its own code runs.

    - Huginn-0125 and the retrofitted Llama and OLMo 2 models become a :class:`deqseq.RecurrentDepth`. By default its
      core is solved to a relative tolerance of 1e-3, within 4 times its mean depth, from zero. With ``steps`` it runs
      as its authors do: that many times, from random states, with a cache for each step.
    - Ouro becomes an :class:`deqseq.ExplicitModel` of a :class:`deqseq.Looped` stack, for it has no fixed point. Its
      gate, an :class:`OuroGate`, is ``lm.model.backbone.choose``.

    Args:
        folder_or_name: a folder, or a name on the hub, such as ``"tomg-group-umd/huginn-0125"``.
        dtype: of the weights. Default: as they are stored.
        revision: a branch, tag or commit on the hub.
        steps: how often the core runs, or how many loops Ouro makes, at least 1. Default: the core is solved, and Ouro
            makes the ``total_ut_steps`` of its configuration.

    Returns:
        The model in eval mode.

    Raises:
        FileNotFoundError: no such folder, or one without these files.
        ValueError: a configuration that is not computed here; a file that is cut short; tensors that are missing,
            unexpected or of another shape.

    References:
        Geiping et al., Scaling up Test-Time Compute with Latent Reasoning, 2025, arXiv 2502.05171; McLeish et al.,
        Teaching Pretrained Language Models to Think Deeper with Retrofitted Recurrence, 2025, arXiv 2511.07384; Zhu et
        al., Scaling Latent Reasoning via Looped Language Models, 2025, arXiv 2510.25741.

    Example:
        >>> from deqseq.integrations.foreign import from_pretrained
        >>> lm = from_pretrained("tomg-group-umd/huginn-0125", torch.bfloat16)      # doctest: +SKIP
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, got {dtype}")
    folder = folder_of(folder_or_name, revision)
    config = config_in(folder)
    _kind(config)  # before gigabytes are read
    lm = from_state(config, tensors_in(folder), steps)
    return lm if dtype is None else lm.to(dtype)


@checked
def from_state(
    config: Mapping[str, Any], state: Mapping[str, Tensor], steps: Annotated[int, AtLeast(1)] | None = None
) -> CausalLM:
    """The same from a parsed ``config.json`` and a state dict.

    Args:
        config: of a Huginn, a retrofitted model or an Ouro.
        state: its tensors, under its own names; they are copied.
        steps: as in :func:`from_pretrained`.

    Returns:
        The model in eval mode, its weights in their own dtypes.

    Example:
        >>> import deqseq as dq
        >>> sizes = {"d_model": 8, "n_heads": 2, "mlp_width": 12, "injection": False, "weight_norm": False}
        >>> stack = dq.Llama(dq.LlamaConfig(norms="sandwich", **sizes))
        >>> state = {f"model.{name}": tensor for name, tensor in stack.state_dict().items()}
        >>> state |= {"model.embed_tokens.weight": torch.randn(5, 8), "lm_head.weight": torch.randn(5, 8)}
        >>> config = {"model_type": "ouro", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
        >>> config |= {"intermediate_size": 12, "rms_norm_eps": 1e-5, "vocab_size": 5, "total_ut_steps": 4}
        >>> lm = from_state(config, state)
        >>> lm.model.backbone.steps, lm(torch.tensor([[1, 2, 3]])).logits.shape
        (4, torch.Size([1, 3, 5]))
    """
    kind = _kind(config)
    lm, rules = on_meta(_MODELS[kind], Fields(config, f"{kind} configuration: "), state, steps)
    return assembled(lm, from_foreign(state, lm, rules)).eval()


def _kind(config: Mapping[str, Any]) -> str:
    return Fields(config, "configuration: ").choice("model_type", tuple(_MODELS))


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
    "initial_state_mode": Only("random", instead="start='input' in the call is what 'embed-init' means"),
}


def _raven(fields: Fields, state: Mapping[str, Tensor], steps: int | None) -> tuple[CausalLM, tuple[Rule, ...]]:
    """Huginn and the retrofitted models: all say ``huginn_raven``, the names of their tensors tell them apart."""
    first = "transformer.prelude.0."
    huginn, olmo = f"{first}norm_3.weight" in state, f"{first}attn.q_norm.weight" in state
    layers: dict[str, Any] = fields.take(_RAVEN) | {"injection": False, "weight_norm": False, "float32_rotary": False}
    layers |= {"norms": "closed" if huginn else "post" if olmo else "pre", "qk_norm": olmo}
    # the retrofitted models have a ``rope_base`` too, which their code does not use
    layers |= {"rope_theta": fields.read("rope_base", float)} if huginn else rotary(fields)
    prelude, core, coda = (
        LlamaConfig(**layers, n_layers=fields.read(f"n_layers_in_{part}", int), final_norm=part == "coda")
        for part in ("prelude", "recurrent_block", "coda")
    )
    # Huginn's scale follows from its width, whatever its configuration says
    scale = math.sqrt(core.d_model) if huginn else fields.inner("init_values", {}).read("embed_scale", 1.0)
    spec = LanguageModelSpec(
        fields.read("padded_vocab_size", fields.read("vocab_size", int)),
        core,
        **_solved(fields, steps, RandomStart(math.sqrt(2 / (5 * core.d_model)) * scale)),
        tied=fields.read("tie_embeddings", huginn),
        embedding_scale=scale,
        prelude=prelude,
        coda=coda,
        injection="concat",
        norm="coda" if huginn else None,
    )
    return spec.build(), _raven_rules(coda, pairs=huginn)


def _solved(fields: Fields, steps: int | None, start: RandomStart) -> dict[str, Any]:
    """How a core is solved, or how often it runs."""
    mean = fields.read("mean_recurrence", int)
    gradient = Unrolled(last=fields.read("mean_backprop_depth", min(8, mean)))
    if steps is not None:
        return {"solve": None, "steps": steps, "loop_start": start}
    solve = SolveConfig(Naive(), Stop.exactly(mean), gradient, start=start)
    return {"solve": solve, "eval_solve": SolveConfig(stop=Stop(max_steps=4 * mean))}


def _raven_rules(config: LlamaConfig, pairs: bool) -> tuple[Rule, ...]:
    """Queries, keys and values are one matrix there, and so are gate and input of the feed-forward layer."""
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
    "closed": ("input_layernorm", "input_layernorm_2", "post_attention_layernorm", "post_attention_layernorm_2"),
}


def _halves(rows: Tensor, width: int) -> Tensor:
    """Channels (2i, 2i + 1) of a head, which Huginn turns together, as (i, i + width / 2)."""
    fits = len(rows) % width == 0  # others are named as of another shape
    return rearrange(rows, "(h i pair) ... -> (h pair i) ...", pair=2, i=width // 2) if fits else rows


class OuroGate(nn.Module):
    r"""Ouro's choice among the states of its loops, the ``choose`` of a :class:`deqseq.Looped`.

    .. math:: \lambda_s = \sigma(\mathrm{linear}(z_s)), \qquad
              1 - \prod_{j \le s} (1 - \lambda_j) \ge \mathrm{threshold}

    Each token takes the first loop at which the probability of having exited reaches the threshold, or else the last.
    All loops run in any case, as in the authors' code, because later tokens attend to every loop.

    Args:
        linear: maps states ``(..., d_model)`` to a number before the sigmoid, ``(..., 1)``. Its weights are frozen: no
            gradient reaches them through a choice, for which DDP would wait.
        threshold: an attribute that can be changed. At 1 every token takes the last loop.

    References:
        Zhu et al., Scaling Latent Reasoning via Looped Language Models, 2025, arXiv 2510.25741.

    Example:
        >>> gate = OuroGate(nn.Linear(8, 1), threshold=0.8)
        >>> states = torch.randn(4, 2, 5, 8)        # of four loops
        >>> gate(states).shape, gate.loops(states).shape
        (torch.Size([2, 5, 8]), torch.Size([2, 5]))
    """

    @checked
    def __init__(self, linear: nn.Module, threshold: Annotated[float, Within("[0, 1]")] = 1.0) -> None:
        super().__init__()
        self.linear, self.threshold = linear.requires_grad_(False), threshold

    def forward(self, states: Float[Tensor, "loops batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """The state that each token takes, of ``states``, ``(loops, batch, length, d_model)``."""
        place = self.loops(states)[None, ..., None] - 1
        return states.gather(0, place.expand(1, *states.shape[1:]))[0]

    def loops(self, states: Float[Tensor, "loops batch length d_model"]) -> Int64[Tensor, "batch length"]:
        """The loop whose state each token takes, from 1, by ``states``, ``(loops, batch, length, d_model)``."""
        if self.threshold == 1:  # a probability can underflow
            return torch.full(states.shape[1:3], len(states), device=states.device)
        earlier = states[:-1]
        name, what = "OuroGate.linear", "one number of each state"
        logits = returned_by(name, self.linear, earlier, like=earlier[..., :1], what=what)[..., 0]
        stays = torch.sigmoid(-logits.to(torch.promote_types(logits.dtype, torch.float32))).cumprod(dim=0)
        return 1 + (stays > 1 - self.threshold).long().cumprod(dim=0).sum(dim=0)


_OURO: Table = {
    "vocab_size": ("vocab_size", int),
    "tie_word_embeddings": ("tied", False),
    "total_ut_steps": ("steps", int),
    "hidden_size": ("d_model", int),
    "num_hidden_layers": ("n_layers", int),
    "num_attention_heads": ("n_heads", int),
    "num_key_value_heads": ("n_kv_heads", None),
    "head_dim": ("headdim", None),
    "intermediate_size": ("mlp_width", int),
    "rms_norm_eps": ("norm_eps", float),
    **only(hidden_act="silu"),
    "use_sliding_window": Only(False, None),
}
_OURO_RULES: tuple[Rule, ...] = (
    (r"^embedding\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^model\.backbone\.choose\.linear\.", "model.early_exit_gate."),
    (r"^model\.backbone\.backbone\.", "model."),
)


def _ouro(fields: Fields, state: Mapping[str, Tensor], steps: int | None) -> tuple[CausalLM, tuple[Rule, ...]]:
    """A stack and its norm, iterated from the embedding."""
    values = fields.take(_OURO) | rotary(fields) | {"norms": "sandwich", "float32_rotary": False}
    lm = explicit_spec(LlamaConfig, values | ({} if steps is None else {"steps": steps})).build()
    threshold, looped = fields.read("early_exit_threshold", 1.0, interval="[0, inf)"), cast(Looped, lm.model.backbone)
    if threshold < 1 or "model.early_exit_gate.weight" in state:
        looped.choose = OuroGate(nn.Linear(looped.d_model, 1), min(threshold, 1.0))
    return lm, _OURO_RULES


_MODELS: Mapping[str, Callable[..., tuple[CausalLM, tuple[Rule, ...]]]] = {"huginn_raven": _raven, "ouro": _ouro}
