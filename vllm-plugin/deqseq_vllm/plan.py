"""What a saved configuration asks for, as plain data; what is not served is refused by name."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

Json = Mapping[str, Any]

LLAMA = {
    *("name", "d_model", "n_layers", "n_heads", "n_kv_heads", "headdim", "mlp_width", "rope_theta"),
    *("rope_scaling", "norm_eps", "norms", "qk_norm", "qk_bias", "final_norm", "float32_rotary"),
    *("dropout", "weight_norm", "injection", "skip_scale", "causal", "grid"),
}
"""Fields of a LlamaConfig that are read here or change nothing; others are of a later deqseq."""
FAMILIES = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
ROTATIONS = ("default", "llama3")
"""Rotary frequencies that do not depend on the length of the text."""


@dataclass(frozen=True)
class Layers:
    """Transformer layers of one shape, in the terms of deqseq's LlamaConfig.

    ``qk_norm`` normalises queries and keys each "head" by itself, or "all" together; ``injection``
    enters queries, keys and values; ``rope`` is as vLLM takes it.
    """

    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    headdim: int
    mlp_width: int
    norm_eps: float
    norms: str
    final_norm: bool
    qk_norm: str | None
    qkv_bias: bool
    o_bias: bool
    rope: Json
    injection: bool = False
    skip_scale: float = 1.0


@dataclass(frozen=True)
class Solve:
    """A relaxed iteration, its tolerances and its budget; plain iteration has a damping of 1."""

    damping: float
    rtol: float
    atol: float
    max_steps: int
    check_every: int

    @property
    def has_tolerance(self) -> bool:
        """Whether the number of iterations depends on the tokens."""
        return self.rtol > 0 or self.atol > 0


@dataclass(frozen=True)
class Plan:
    """A whole model between embedding and head.

    ``solve`` is None where the core runs a fixed number of ``steps``, each with key-value slots of
    its own. ``start`` is "zero" or "input"; ``injection``, "concat", "add" or "decay", enters the
    core before its first layer.
    """

    prelude: Layers | None
    core: Layers
    coda: Layers | None
    injection: str | None
    norm_before_coda: bool
    start: str
    steps: int
    solve: Solve | None


def plan(config: Json) -> Plan:
    """Read the configuration of a saved model.

    Args:
        config: the content of ``config.json``, with what overrides it.

    Returns:
        What has to be built and run.

    Raises:
        ValueError: something that is not served: names the field, what it is, and what is served.
    """
    prelude, core, coda = (_layers(name, config) for name in ("prelude", "backbone", "coda"))
    assert core is not None
    heads = {(part.n_kv_heads, part.headdim) for part in (prelude, core, coda) if part is not None}
    if len(heads) > 1:
        _refuse("backbone", "a core with the key-value heads of prelude and coda", sorted(heads))
    solve = None
    start_field, start = "loop_start", config["loop_start"]
    if config["solve"] is not None:
        solve = merged(config["solve"], config["eval_solve"] or {})
        start_field, start = "solve.start", solve["start"]
    if start not in ("zero", "input"):
        _refuse(start_field, '"zero" or "input"', start)
    return Plan(
        prelude,
        core,
        coda,
        injection=config["injection"],
        norm_before_coda=config["norm"] == "coda",
        start=start,
        steps=config["steps"] or 1,
        solve=None if solve is None else _solve(solve),
    )


def merged(base: Any, change: Any) -> Any:
    """``base`` with the fields that ``change`` names; an object with a name is replaced whole."""
    if not isinstance(base, Mapping) or not isinstance(change, Mapping) or "name" in change:
        return change
    return {**base, **{key: merged(base.get(key), value) for key, value in change.items()}}


def check_backbone(name: str, part: Json) -> None:
    """Refuse layers without keys and values, for which vLLM asks before it builds a model."""
    if part["name"] not in ("LlamaConfig", "DecoderLayers"):
        _refuse(name, "a LlamaConfig or DecoderLayers", part["name"])


def _solve(solve: Json) -> Solve:
    solver, stop = _named(solve["solver"]), solve["stop"]
    sweep = _named(solve["sweep"])["name"]
    if solver["name"] not in ("Naive", "Relaxed"):
        _refuse("solve.solver", "Naive or Relaxed", solver["name"])
    if sweep != "Simultaneous":
        _refuse("solve.sweep", "Simultaneous, of all tokens that the engine schedules", sweep)
    if stop["norm"] != "token":
        _refuse("solve.stop.norm", '"token"', stop["norm"])
    damping = 1.0 if solver["name"] == "Naive" else solver.get("damping", 0.8)
    return Solve(damping, stop["rtol"], stop["atol"], stop["max_steps"], stop["check_every"])


def _named(part: Any) -> Json:
    """An object in a configuration, which may be only its name."""
    return {"name": part} if isinstance(part, str) else part


def _layers(name: str, config: Json) -> Layers | None:
    part = config[name]
    if part is None:
        return None
    check_backbone(name, part)
    if part["name"] == "DecoderLayers":
        return _of_decoder(part, config["decoder_config"])
    if unknown := ", ".join(sorted(part.keys() - LLAMA)):
        known = "a LlamaConfig of a deqseq that this plugin knows"
        _refuse(name, known, f"the fields {unknown}")
    if not part.get("causal", True):
        _refuse(f"{name}.causal", True, False)
    iterated = name == "backbone" and (config["solve"] is not None or config["steps"] is not None)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": part["rope_theta"]}
    if scaling := part["rope_scaling"]:
        bounds = {key: scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor")}
        rope = {**rope, **bounds, "rope_type": "llama3"}
        rope["original_max_position_embeddings"] = scaling["original_length"]
    same = ("n_layers", "d_model", "n_heads", "norm_eps", "norms", "final_norm")
    return Layers(
        **{key: part[key] for key in same},
        n_kv_heads=part["n_kv_heads"] or part["n_heads"],
        headdim=part["headdim"] or part["d_model"] // part["n_heads"],
        mlp_width=part["mlp_width"] or int(8 * part["d_model"] / 3),
        qk_norm="all" if part["qk_norm"] else None,
        qkv_bias=part["qk_bias"],
        o_bias=False,
        rope=rope,
        injection=part["injection"] and iterated and config["injection"] is None,
        skip_scale=part.get("skip_scale", 1.0),
    )


def _of_decoder(part: Json, decoder: Json) -> Layers:
    family, rope = decoder["model_type"], decoder["rope_parameters"]
    served = {
        "model_type": FAMILIES,
        "sliding_window": (None,),
        "hidden_act": ("silu",),
        "mlp_bias": (False,),
    }
    for field, values in served.items():
        value = decoder.get(field, values[0])
        if value not in values:
            _refuse(f"decoder_config.{field}", " or ".join(map(str, values)), value)
    if rope["rope_type"] not in ROTATIONS:
        served_types = f"of the type {' or '.join(ROTATIONS)}"
        _refuse("decoder_config.rope_parameters", served_types, rope["rope_type"])
    heads, width = decoder["num_attention_heads"], decoder["hidden_size"]
    bias = decoder.get("attention_bias", False)
    return Layers(
        n_layers=part["end"] - part["first"],
        d_model=width,
        n_heads=heads,
        n_kv_heads=decoder["num_key_value_heads"] or heads,
        headdim=decoder.get("head_dim") or width // heads,
        mlp_width=decoder["intermediate_size"],
        norm_eps=decoder["rms_norm_eps"],
        norms="post" if family == "olmo2" else "pre",
        final_norm=part["final_norm"],
        qk_norm={"olmo2": "all", "qwen3": "head"}.get(family),
        qkv_bias=bias or family == "qwen2",
        o_bias=bias,
        rope=rope,
    )


def _refuse(field: str, served: object, got: object) -> NoReturn:
    remedy = "change it before save_pretrained"
    if field.startswith("solve."):
        override = '{"eval_solve": {"solver": "Naive"}}'
        remedy += f", or for the server, as in --hf-overrides '{override}'"
    raise ValueError(f"{field} must be {served} to be served, got {got}: {remedy}")
