"""Released recurrent-depth models: Huginn, the retrofitted Llama and OLMo models, and Ouro."""

import math
from collections.abc import Callable
from dataclasses import replace

from einops import rearrange
from torch import Tensor

from deqseq.backbones import LlamaConfig
from deqseq.config import SolveConfig
from deqseq.gradients import Unrolled
from deqseq.integrations.foreign.engine import Fields, Foreign, Only, Table, Weights, only
from deqseq.integrations.foreign.pretrained import LLAMA, explicit, rotary
from deqseq.models import LanguageModelSpec
from deqseq.solvers import Naive
from deqseq.start import RandomStart
from deqseq.stop import Stop

_RAVEN: Table = {
    "n_embd": ("d_model", int),
    "n_heads": int,
    "num_key_value_heads": ("n_kv_heads", None),
    "head_dim": ("headdim", None),
    "intermediate_size": ("mlp_width", int),
    "norm_eps": float,
    "qk_bias": False,
    "n_layers_in_recurrent_block": ("n_layers", int),
    **only(bias=False, injection_type="linear", nonlin_name="SiLU", mlp_class_name="GatedMLP"),
    "test_time_noise": Only(0, None),
    "initial_state_mode": Only("random"),  # pass start="input" in the call for "embed-init",
}


def _raven(fields: Fields, state: Weights) -> Foreign:
    """Huginn and the retrofitted models, which only the names of their tensors tell apart."""
    huginn = "transformer.prelude.0.norm_3.weight" in state
    olmo = "transformer.prelude.0.attn.q_norm.weight" in state
    sizes = fields.take(_RAVEN)
    if huginn:
        sizes |= {"norms": "closed", "rope_theta": fields.read("rope_base", float)}
        scale = math.sqrt(sizes["d_model"])  # whatever its configuration says
    else:  # their code does not use ``rope_base``
        sizes |= {"norms": "post" if olmo else "pre"} | rotary(fields)
        scale = fields.inner("init_values", {}).read("embed_scale", 1.0)
    core = LlamaConfig(
        **sizes,
        qk_norm=olmo,
        final_norm=False,
        float32_rotary=False,
        injection=False,
        weight_norm=False,
    )
    coda_layers = fields.read("n_layers_in_coda", int)
    mean = fields.read("mean_recurrence", int)
    spec = LanguageModelSpec(
        fields.read("padded_vocab_size", fields.read("vocab_size", int)),
        core,
        SolveConfig(
            Naive(),
            Stop.exactly(mean),
            Unrolled(last=fields.read("mean_backprop_depth", min(8, mean))),
            start=RandomStart(math.sqrt(2 / (5 * core.d_model)) * scale),
        ),
        SolveConfig(stop=Stop(max_steps=4 * mean)),
        tied=fields.read("tie_embeddings", huginn),
        embedding_scale=scale,
        prelude=replace(core, n_layers=fields.read("n_layers_in_prelude", int)),
        coda=replace(core, n_layers=coda_layers, final_norm=True),
        injection="concat",
        norm="coda" if huginn else None,
    )
    numbered = enumerate(_RAVEN_NORMS[core.norms], 1)
    norms = {rf"\.{name}\.": f".norm_{number}." for number, name in numbered}
    return Foreign(spec, _RAVEN_RULES | norms, _raven_slices(core, paired=huginn))


_RAVEN_RULES = {
    r"^embedding\.": "transformer.wte.",
    r"^head\.": "lm_head.",
    r"^model\.(coda\.backbone\.)?norm\.": "transformer.ln_f.",
    r"^model\.core\.(backbone\.)+injection\.": "transformer.adapter.",
    r"^model\.core\.(backbone\.)+layers\.": "transformer.core_block.",
    r"^model\.(prelude|coda)\.backbone\.layers\.": r"transformer.\1.",
    r"\.self_attn\.[qkv]_proj\.weight": ".attn.Wqkv.weight",
    r"\.self_attn\.[qk]_proj\.bias": ".attn.qk_bias",
    r"\.self_attn\.([qk])_norm\.": r".attn.\1_norm.",
    r"\.self_attn\.o_proj\.": ".attn.proj.",
    r"\.mlp\.(gate|up)_proj\.": ".mlp.fc.",
    r"\.mlp\.down_proj\.": ".mlp.proj.",
}
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


def _raven_slices(config: LlamaConfig, paired: bool) -> dict[str, Callable[[Tensor], Tensor]]:
    """Their queries, keys and values are one matrix, and so are gate and input of the MLP.

    Where channels are ``paired``, a head rotates 2i and 2i + 1 together; ours rotates i and
    i + headdim / 2.
    """
    width = config.head_width
    q = config.n_heads * width
    k = config.kv_heads * width

    def halves(rows: Tensor) -> Tensor:
        if not paired or len(rows) % width:  # a wrong shape is reported when it is loaded
            return rows
        return rearrange(rows, "(h i pair) ... -> (h pair i) ...", pair=2, i=width // 2)

    return {
        "q_proj.weight": lambda rows: halves(rows[:q]),
        "k_proj.weight": lambda rows: halves(rows[q : q + k]),
        "v_proj.weight": lambda rows: rows[q + k :],
        "q_proj.bias": lambda both: halves(both[:1].flatten()),
        "k_proj.bias": lambda both: halves(both[1:].flatten()),
        "gate_proj.weight": lambda rows: rows[: len(rows) // 2],
        "up_proj.weight": lambda rows: rows[len(rows) // 2 :],
    }


_OURO: Table = {
    **LLAMA,
    "total_ut_steps": ("steps", int),
    "num_attention_heads": ("n_heads", int),
    "rms_norm_eps": ("norm_eps", float),
    "use_sliding_window": Only(False, None),
    "early_exit_threshold": Only(1.0),  # every token takes the last loop
}


def _ouro(fields: Fields, state: Weights) -> Foreign:
    """A stack and its norm, iterated from the embedding."""
    sizes = fields.take(_OURO) | rotary(fields) | {"norms": "sandwich", "float32_rotary": False}
    return explicit(LlamaConfig, sizes, "model.embed_tokens.", "model.")


RECURRENT = {"huginn_raven": _raven, "ouro": _ouro}
