"""Released recurrent-depth models: Huginn, the retrofitted Llama and OLMo models, and Ouro, from their own files."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from os import PathLike
from typing import Annotated, Any

import torch
from einops import rearrange
from torch import Tensor, nn

from deqseq.annotations import AtLeast, checked
from deqseq.backbones import ConcatInjection, Injected, Llama, LlamaConfig, Looped
from deqseq.config import SolveConfig
from deqseq.gradients import Unrolled
from deqseq.integrations.fields import Fields, Only
from deqseq.integrations.foreign.files import config_in, folder_of, tensors_in
from deqseq.integrations.foreign.ouro_gate import OuroGate
from deqseq.integrations.foreign.pretrained import rotary
from deqseq.integrations.foreign.weights import Rule, assembled, from_foreign, on_meta
from deqseq.models import CausalLM, ExplicitModel, ImplicitModel, RecurrentDepth
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
    r"""A released recurrent-depth model, from its ``config.json`` and safetensors; none of its own code runs.

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
    if not (state := tensors_in(folder)):
        raise FileNotFoundError(f"{folder} has no *.safetensors: convert pickled weights to safetensors")
    lm = from_state(config, state, steps)
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


def _sizes(fields: Fields, width: str, heads: str, eps: str) -> dict[str, Any]:
    """Sizes of the layers that both formats name alike, and width, heads and epsilon, which they do not."""
    table = {"d_model": (width, int), "n_heads": (heads, int), "n_kv_heads": ("num_key_value_heads", None)}
    table |= {"headdim": ("head_dim", None), "mlp_width": ("intermediate_size", int), "norm_eps": (eps, float)}
    return fields.sizes(table) | {"injection": False, "weight_norm": False, "float32_rotary": False}


_RAVEN: Only = {
    "bias": (False,),
    "injection_type": ("linear",),
    "nonlin_name": ("SiLU",),
    "mlp_class_name": ("GatedMLP",),
    "test_time_noise": (0, None),
}


def _raven(fields: Fields, state: Mapping[str, Tensor], steps: int | None) -> tuple[CausalLM, tuple[Rule, ...]]:
    """Huginn and the retrofitted models: all say ``huginn_raven``, the names of their tensors tell them apart."""
    first = "transformer.prelude.0."
    huginn, olmo = f"{first}norm_3.weight" in state, f"{first}attn.q_norm.weight" in state
    fields.only(_RAVEN)
    fields.only({"initial_state_mode": ("random",)}, "start='input' in the call is what 'embed-init' means")
    sizes = _sizes(fields, "n_embd", "n_heads", "norm_eps")
    sizes |= {"norms": "closed" if huginn else "post" if olmo else "pre", "qk_norm": olmo}
    sizes["qk_bias"], width = fields.read("qk_bias", False), sizes["d_model"]
    if huginn:
        sizes["rope_theta"] = fields.read("rope_base", float)
    else:  # the retrofitted models have a ``rope_base`` too, which their code does not use
        sizes["rope_theta"], sizes["rope_scaling"] = rotary(fields, 10000.0)
    prelude, core, coda = (
        Llama(LlamaConfig(**sizes, n_layers=fields.read(f"n_layers_in_{part}", int), final_norm=part == "coda"))
        for part in ("prelude", "recurrent_block", "coda")
    )
    # Huginn's scale follows from its width, whatever its configuration says
    scale = math.sqrt(width) if huginn else fields.inner("init_values", {}).read("embed_scale", 1.0)
    start = RandomStart(math.sqrt(2 / (5 * width)) * scale)
    mean = fields.read("mean_recurrence", int)
    gradient = Unrolled(last=fields.read("mean_backprop_depth", min(8, mean)))
    injected = Injected(core, ConcatInjection(width))
    if steps is None:
        solve = SolveConfig(Naive(), Stop.exactly(mean), gradient, start=start)
        middle = ImplicitModel(injected, solve, SolveConfig(stop=Stop(max_steps=4 * mean)))
    else:
        middle = ExplicitModel(Looped(injected, steps, start=start))
    model = RecurrentDepth(ExplicitModel(prelude), middle, ExplicitModel(coda), coda.norm if huginn else None)
    tied, vocabulary = fields.read("tie_embeddings", huginn), fields.read("vocab_size", int)
    lm = CausalLM(fields.read("padded_vocab_size", vocabulary), model, tied=tied, embedding_scale=scale)
    return lm, _raven_rules(coda.config, pairs=huginn)


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


_OURO: Only = {"hidden_act": ("silu",), "use_sliding_window": (False, None)}
_OURO_RULES: tuple[Rule, ...] = (
    (r"^embedding\.", "model.embed_tokens."),
    (r"^head\.", "lm_head."),
    (r"^model\.backbone\.choose\.linear\.", "model.early_exit_gate."),
    (r"^model\.backbone\.backbone\.", "model."),
)


def _ouro(fields: Fields, state: Mapping[str, Tensor], steps: int | None) -> tuple[CausalLM, tuple[Rule, ...]]:
    """A stack and its norm, iterated from the embedding."""
    fields.only(_OURO)
    sizes = _sizes(fields, "hidden_size", "num_attention_heads", "rms_norm_eps")
    sizes["n_layers"], (theta, scaling) = fields.read("num_hidden_layers", int), rotary(fields, 10000.0)
    stack = Llama(LlamaConfig(**sizes, norms="sandwich", rope_theta=theta, rope_scaling=scaling))
    loops, threshold = fields.read("total_ut_steps", int), fields.read("early_exit_threshold", 1.0, interval="[0, inf)")
    gated = threshold < 1 or "model.early_exit_gate.weight" in state
    gate = OuroGate(nn.Linear(stack.d_model, 1), min(threshold, 1.0)) if gated else None
    model = ExplicitModel(Looped(stack, steps or loops, gate))
    tied = fields.read("tie_word_embeddings", False)
    return CausalLM(fields.read("vocab_size", int), model, tied=tied), _OURO_RULES


_MODELS: Mapping[str, Callable[..., tuple[CausalLM, tuple[Rule, ...]]]] = {"huginn_raven": _raven, "ouro": _ouro}
