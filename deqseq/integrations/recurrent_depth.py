"""Released recurrent-depth models: Huginn, the retrofitted Llama and OLMo models, and Ouro, from their own files."""

import math
from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from deqseq.backbones import ConcatInjection, Injected, Llama, LlamaConfig, Looped
from deqseq.check import check_integer, check_type
from deqseq.config import SolveConfig
from deqseq.gradients import Unrolled
from deqseq.integrations.ouro_gate import OuroGate
from deqseq.integrations.pretrained_config import rotary
from deqseq.integrations.reference_fields import Fields
from deqseq.integrations.reference_weights import renamed, without_tied_head
from deqseq.integrations.weight_files import config_in, folder_of, tensors_in
from deqseq.layers import RMSNorm
from deqseq.models import CausalLM, ExplicitModel, ImplicitModel, RecurrentDepth
from deqseq.solvers import Naive
from deqseq.start import RandomStart
from deqseq.stop import Stop


def from_pretrained(
    folder_or_name: str | PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    revision: str | None = None,
    steps: int | None = None,
) -> CausalLM:
    r"""A released recurrent-depth model, from its ``config.json`` and safetensors; none of its own code runs.

    - Huginn-0125 and the retrofitted Llama and OLMo 2 models become a :class:`deqseq.RecurrentDepth`. By default its
      core is solved to a relative tolerance of 1e-3, within 4 times its mean depth, from zero: it has a fixed point,
      which every sweep finds and of which the cache keeps one entry per token. With ``steps`` the core is run as its
      authors do: that many times, from random states, with a cache for each step.
    - Ouro becomes an :class:`deqseq.ExplicitModel` of a :class:`deqseq.Looped` stack. It has no fixed point: iterated
      on, it forgets its prompt. Its gate, an :class:`~deqseq.integrations.ouro_gate.OuroGate`, is
      ``lm.model.backbone.choose``, with the ``early_exit_threshold`` of the configuration.

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
        ValueError: a configuration that is not computed here; a file that is cut short; missing or unexpected tensors,
            or some of another shape.

    References:
        Geiping et al., Scaling up Test-Time Compute with Latent Reasoning, 2025, arXiv 2502.05171; McLeish et al.,
        Teaching Pretrained Language Models to Think Deeper with Retrofitted Recurrence, 2025, arXiv 2511.07384; Zhu et
        al., Scaling Latent Reasoning via Looped Language Models, 2025, arXiv 2510.25741.

    Example:
        >>> from deqseq.integrations.recurrent_depth import from_pretrained
        >>> lm = from_pretrained("tomg-group-umd/huginn-0125", torch.bfloat16)      # doctest: +SKIP
    """
    check_type("folder_or_name", folder_or_name, (str, PathLike))
    if dtype is not None:
        check_type("dtype", dtype, torch.dtype, "torch.bfloat16")
        if not dtype.is_floating_point:
            raise ValueError(f"dtype must be a floating-point type, got {dtype}")
    _check_steps(steps)
    folder = folder_of(folder_or_name, revision)
    _model_of(config := config_in(folder))  # before gigabytes are read
    if not (state := tensors_in(folder)):
        raise FileNotFoundError(f"{folder} has no *.safetensors: convert pickled weights to safetensors")
    lm = from_state(config, state, steps)
    return lm if dtype is None else lm.to(dtype)


def from_state(config: Mapping[str, Any], state: Mapping[str, Tensor], steps: int | None = None) -> CausalLM:
    """The same from a parsed ``config.json`` and a state dict.

    Args:
        config: of a Huginn, a retrofitted model or an Ouro.
        state: its tensors, under its own names; they are copied.
        steps: as in :func:`from_pretrained`.

    Returns:
        The model in eval mode, its weights in their own dtypes.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: as :func:`from_pretrained`.

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
    check_type("config", config, Mapping, "json.loads(Path('config.json').read_text())")
    check_type("state", state, Mapping, "safetensors.torch.load_file(path)")
    _check_steps(steps)
    build, translate = _model_of(config)
    fields = Fields(config, f"{config['model_type']} configuration: ")
    with torch.device("meta"):
        lm = build(fields, state, steps)
    weights = translate(dict(state), lm)
    weights = renamed(weights, {name: tensor.shape for name, tensor in lm.state_dict().items()}, lambda name: name)
    lm.load_state_dict({name: tensor.detach().clone() for name, tensor in weights.items()}, assign=True)
    if isinstance(lm.model, RecurrentDepth) and isinstance(lm.model.norm, RMSNorm):
        lm.model.norm = _layers_of(lm.model.coda).norm  # one module, which loading has given two parameters
    return lm.eval()


def _check_steps(steps: int | None) -> None:
    if steps is not None:
        check_integer("steps", steps, 1)


def _model_of(config: Mapping[str, Any]) -> tuple[Any, Any]:
    """What builds a model of this configuration, and what translates its weights."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _MODELS:
        known = "it must be 'huginn_raven' (Huginn and the retrofitted models) or 'ouro'"
        Fields(config, "configuration: ").refuse("model_type", kind, known)
    return _MODELS[kind]


def _sizes(fields: Fields, width: int, heads: int, epsilon: str) -> dict[str, Any]:
    """What all of them call by the same names, but for the norms' epsilon."""
    return {
        "d_model": width,
        "n_heads": heads,
        "n_kv_heads": fields.integer("num_key_value_heads", heads),
        "headdim": fields.integer("head_dim", width // heads),
        "mlp_width": fields.integer("intermediate_size"),
        "norm_eps": fields.number(epsilon, least=0.0),
    }


def _layers(sizes: Mapping[str, Any], n_layers: int, *, final_norm: bool) -> Llama:
    own: dict[str, Any] = {"injection": False, "weight_norm": False, "float32_rotary": False}
    return Llama(LlamaConfig(**sizes, **own, n_layers=n_layers, final_norm=final_norm))


def _layers_of(part: ExplicitModel) -> Llama:
    assert isinstance(part.backbone, Llama)
    return part.backbone


def _raven(fields: Fields, state: Mapping[str, Tensor], steps: int | None) -> CausalLM:
    """Huginn and the retrofitted models: all say ``huginn_raven``, the names of their tensors tell them apart."""
    first = "transformer.prelude.0."
    huginn, olmo = f"{first}norm_3.weight" in state, f"{first}attn.q_norm.weight" in state
    for name, allowed, reason in _RAVEN_ONLY:
        fields.only(name, allowed, reason)
    width, heads, mean = fields.integer("n_embd"), fields.integer("n_heads"), fields.integer("mean_recurrence")
    sizes = _sizes(fields, width, heads, "norm_eps") | {
        "norms": "closed" if huginn else "post" if olmo else "pre",
        "qk_norm": olmo,
        "qk_bias": fields.flag("qk_bias", False),
    }
    if huginn:
        sizes["rope_theta"] = fields.number("rope_base")
    else:  # the retrofitted models have a ``rope_base`` too, which their code does not use
        sizes["rope_theta"], sizes["rope_scaling"] = rotary(fields, 10000.0)
    prelude, core, coda = (
        _layers(sizes, fields.integer(f"n_layers_in_{part}"), final_norm=part == "coda")
        for part in ("prelude", "recurrent_block", "coda")
    )
    # Huginn's scale follows from its width, whatever its configuration says
    scale = math.sqrt(width) if huginn else fields.inner("init_values", {}).number("embed_scale", 1.0)
    start = RandomStart(math.sqrt(2 / (5 * width)) * scale)
    depth = fields.integer("mean_backprop_depth", min(8, mean))
    solve = SolveConfig(Naive(), Stop.exactly(mean), Unrolled(last=depth), start=start)
    injected = Injected(core, ConcatInjection(width))
    if steps is None:
        middle = ImplicitModel(injected, solve, SolveConfig(stop=Stop(max_steps=4 * mean)))
    else:
        middle = ExplicitModel(Looped(injected, steps, start=start))
    model = RecurrentDepth(ExplicitModel(prelude), middle, ExplicitModel(coda), coda.norm if huginn else None)
    tied = fields.flag("tie_embeddings", huginn)
    vocabulary = fields.integer("padded_vocab_size", fields.integer("vocab_size"))
    return CausalLM(vocabulary, model, tied=tied, embedding_scale=scale)


_RAVEN_ONLY: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("bias", (False,), "linear maps have no bias here"),
    ("injection_type", ("linear",), "state and input are concatenated and projected here"),
    ("nonlin_name", ("SiLU",), "the feed-forward layers have this activation here"),
    ("mlp_class_name", ("GatedMLP",), "the feed-forward layers are gated here"),
    ("test_time_noise", (0, None), "no noise is added here"),
    ("initial_state_mode", ("random",), "pass other starts in the call: start='input' is theirs of 'embed-init'"),
)


def _raven_weights(state: dict[str, Tensor], lm: CausalLM) -> dict[str, Tensor]:
    """Their tensors under our names: queries, keys and values apart, and pairs of channels as halves."""
    if lm.head is None:
        state = without_tied_head(state, "lm_head.weight", "transformer.wte.weight")
    state.pop("freqs_cis", None)  # follows from the configuration
    assert isinstance(lm.model, RecurrentDepth)
    config, huginn = _layers_of(lm.model.coda).config, isinstance(lm.model.norm, RMSNorm)
    parts = [config.n_heads * config.head_width, *[config.kv_heads * config.head_width] * 2]

    def halves(rows: Tensor) -> Tensor:
        """Channels (2i, 2i + 1) of a head, which Huginn turns together, as (i, i + headdim / 2)."""
        order = "(h i pair) ... -> (h pair i) ..."
        fits = huginn and len(rows) % config.head_width == 0  # others are named as of another shape
        return rearrange(rows, order, pair=2, i=config.head_width // 2) if fits else rows

    looped = "backbone." * isinstance(lm.model.core, ExplicitModel)
    ours: dict[str, Tensor] = {}
    for name, tensor in state.items():
        place = name
        for theirs, new in (*_RAVEN_PLACES, *_RAVEN_NORMS[config.norms]):
            place = place.replace(theirs, new.format(looped))
        if name.endswith("attn.Wqkv.weight"):
            q, k, v = tensor.split(parts) if tensor.ndim == 2 and len(tensor) == sum(parts) else (tensor,) * 3
            ours |= {f"{place}q_proj.weight": halves(q), f"{place}k_proj.weight": halves(k), f"{place}v_proj.weight": v}
        elif name.endswith("attn.qk_bias"):
            ours |= {f"{place}{one}_proj.bias": halves(bias.flatten()) for one, bias in zip("qk", tensor, strict=True)}
        elif name.endswith("mlp.fc.weight"):
            gate, up = tensor.chunk(2)
            ours |= {f"{place}gate_proj.weight": gate, f"{place}up_proj.weight": up}
        else:
            ours[place] = tensor
    if huginn and "model.coda.backbone.norm.weight" in ours:
        ours["model.norm.weight"] = ours["model.coda.backbone.norm.weight"]
    return ours


_RAVEN_PLACES = (
    ("transformer.wte.", "embedding."),
    ("lm_head.", "head."),
    ("transformer.ln_f.", "model.coda.backbone.norm."),
    ("transformer.adapter.", "model.core.backbone.{}injection."),
    ("transformer.prelude.", "model.prelude.backbone.layers."),
    ("transformer.core_block.", "model.core.backbone.{}backbone.layers."),
    ("transformer.coda.", "model.coda.backbone.layers."),
    (".attn.Wqkv.weight", ".self_attn."),
    (".attn.qk_bias", ".self_attn."),
    (".mlp.fc.weight", ".mlp."),
    (".attn.q_norm.", ".self_attn.q_norm."),
    (".attn.k_norm.", ".self_attn.k_norm."),
    (".attn.proj.", ".self_attn.o_proj."),
    (".mlp.proj.", ".mlp.down_proj."),
)
_RAVEN_NORMS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "pre": ((".norm_1.", ".input_layernorm."), (".norm_2.", ".post_attention_layernorm.")),
    "post": ((".norm_1.", ".input_layernorm_2."), (".norm_2.", ".post_attention_layernorm_2.")),
    "closed": (
        *((".norm_1.", ".input_layernorm."), (".norm_2.", ".input_layernorm_2.")),
        *((".norm_3.", ".post_attention_layernorm."), (".norm_4.", ".post_attention_layernorm_2.")),
    ),
}


def _ouro(fields: Fields, state: Mapping[str, Tensor], steps: int | None) -> CausalLM:
    """A stack and its norm, iterated from the embedding."""
    fields.only("hidden_act", ("silu",), "the feed-forward layers have this activation here")
    fields.only("use_sliding_window", (False, None), "attention sees all tokens before here")
    width, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    theta, scaling = rotary(fields, 10000.0)
    sizes = _sizes(fields, width, heads, "rms_norm_eps")
    sizes |= {"norms": "sandwich", "rope_theta": theta, "rope_scaling": scaling}
    stack = _layers(sizes, fields.integer("num_hidden_layers"), final_norm=True)
    loops, threshold = fields.integer("total_ut_steps"), min(fields.number("early_exit_threshold", 1.0, 0.0), 1.0)
    gated = threshold < 1 or "model.early_exit_gate.weight" in state
    gate = OuroGate(nn.Linear(width, 1), threshold) if gated else None
    model = ExplicitModel(Looped(stack, loops if steps is None else steps, gate))
    return CausalLM(fields.integer("vocab_size"), model, tied=fields.flag("tie_word_embeddings", False))


def _ouro_weights(state: dict[str, Tensor], lm: CausalLM) -> dict[str, Tensor]:
    """Their tensors under our names, which are theirs but for the prefixes."""
    if lm.head is None:
        state = without_tied_head(state, "lm_head.weight", "model.embed_tokens.weight")
    prefixes = (("lm_head.", "head."), ("model.embed_tokens.", "embedding."))
    prefixes += (("model.early_exit_gate.", "model.backbone.choose.linear."), ("model.", "model.backbone.backbone."))
    ours: dict[str, Tensor] = {}
    for name, tensor in state.items():
        theirs, new = next((pair for pair in prefixes if name.startswith(pair[0])), ("", ""))
        ours[new + name.removeprefix(theirs)] = tensor
    return ours


_MODELS: Mapping[str, tuple[Any, Any]] = {"huginn_raven": (_raven, _raven_weights), "ouro": (_ouro, _ouro_weights)}
