"""What a saved configuration asks for, as deqseq reads it; refused by name if it is not served."""

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, NoReturn

from packaging.version import InvalidVersion, Version

from deqseq import Naive, Relaxed, Simultaneous, SolveConfig, Stop, __version__
from deqseq.arguments import Within, check_integer, check_known, check_type, shown
from deqseq.as_json import FIELDS, PARTS, SECTIONS, from_json, to_json
from deqseq.backbones import LlamaConfig
from deqseq.models import LanguageModelSpec
from deqseq.models.specification import DecoderLayers

Json = Mapping[str, Any]

OTHERS = (
    *(
        "architectures",
        "attn_implementation",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
    ),
    *("decoder_config", "deqseq_version", "distributed_config", "dtype", "eos_token_id"),
    *("experts_implementation", "fusion_config", "gradient_checkpointing", "head_dim"),
    *("hidden_size", "id2label", "is_encoder_decoder", "label2id", "max_position_embeddings"),
    *("model_type", "name_or_path", "num_attention_heads", "num_hidden_layers"),
    *("num_key_value_heads", "num_labels", "output_attentions", "output_hidden_states"),
    *("pad_token_id", "problem_type", "quantization_config", "return_dict", "tokenizer_class"),
    *("torch_dtype", "transformers_version", "transformers_weights", "use_cache"),
)
"""What else a saved configuration has: fields that tools read, and those of transformers."""
NESTED = {
    ("eval_solve",): SolveConfig,
    ("eval_solve", "stop"): Stop,
    ("eval_solve", "solver"): Relaxed,
}
"""Where the settings of a solve belong."""
SIZES = {
    "hidden_size": "d_model",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "headdim",
}
"""Sizes that vLLM reads from a configuration, and their names in :class:`Layers`."""
INTEGERS = (*SIZES, "num_hidden_layers", "vocab_size", "max_position_embeddings")
FAMILIES = ("llama", "mistral", "olmo2", "qwen2", "qwen3")
NORMS = {
    "pre": (True, False),
    "post": (False, True),
    "sandwich": (True, True),
    "closed": (True, True),
    "outer": (False, True),
}
"""Whether norms stand before and after attention, and alike around the feed-forward layer."""
ROTATIONS = ("default", "llama3")
"""Rotary frequencies that do not depend on the length of the text."""
BOUNDS = ("factor", "low_freq_factor", "high_freq_factor")


@dataclass(frozen=True)
class Layers:
    """Transformer layers of one shape, in the terms of deqseq's LlamaConfig.

    ``qk_norm`` normalises queries and keys each "head" by itself, or "all" together; ``biases``
    names the projections that have one; ``injection`` enters queries, keys and values; ``rope`` is
    as vLLM takes it.
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
    biases: str
    rope: Json
    injection: bool = False
    skip_scale: float = 1.0


@dataclass(frozen=True)
class Plan:
    """A whole model: its specification, and the layers of its parts as vLLM builds them.

    ``solve`` is None where the core runs a fixed number of ``steps``, each with key-value slots of
    its own. ``start`` is "zero" or "input".
    """

    spec: LanguageModelSpec
    prelude: Layers | None
    core: Layers
    coda: Layers | None
    start: Any
    solve: SolveConfig | None

    @property
    def steps(self) -> int:
        """Key-value slots of a token in each layer of the core."""
        return self.spec.steps or 1


def plan(config: Json) -> Plan:
    """Read the configuration of a saved model.

    Args:
        config: the content of ``config.json``, with what overrides it.

    Returns:
        What has to be built and run.

    Raises:
        TypeError, ValueError: deqseq refuses the configuration, or something in it is not served:
            names the field, what it is, and what is served.
    """
    _check_version(config.get("deqseq_version"))
    spec = specification(config)
    in_decoder = any(isinstance(part, DecoderLayers) for part in spec.parts.values())
    if config.get("decoder_config") is not None and not in_decoder:
        raise ValueError(
            "decoder_config must be given with DecoderLayers, and only with them, got "
            f"{shown(config['decoder_config'])}: leave it out"
        )
    parts = {name: _layers(name, config, spec) for name in PARTS}
    core = parts["backbone"]
    assert core is not None
    every = [part for part in parts.values() if part is not None]
    heads = {(part.n_kv_heads, part.headdim) for part in every}
    if len(heads) > 1:
        _refuse(
            "n_kv_heads and headdim", "alike in backbone, prelude and coda", shown(sorted(heads))
        )
    _check_sizes(config, core, sum(part.n_layers for part in every))
    solve = spec.eval_solve or spec.solve
    start = spec.loop_start
    if solve is not None:
        start = _check_solve("eval_solve" if spec.eval_solve else "solve", solve).start
    if start not in ("zero", "input"):
        _refuse("loop_start", '"zero" or "input"', start)
    return Plan(spec, parts["prelude"], core, parts["coda"], start, solve)


def specification(config: Json) -> LanguageModelSpec:
    """The model in deqseq's terms; its errors name the field as the configuration does."""
    for name in ("vocab_size", "backbone"):
        if config.get(name) is None:
            raise ValueError(
                f"config.json must have {name!r}: save the model again by save_pretrained"
            )
    named = {field: name for field, name in FIELDS.items() if name in config}
    return LanguageModelSpec(**{field: section(name, config) for field, name in named.items()})


def section(name: str, config: Json) -> Any:
    """The value of a field, of a section as an object; ``eval_solve`` begins from ``solve``."""
    value = config.get(name)
    if name not in SECTIONS or value is None:
        return value
    base = section("solve", config) if name == "eval_solve" else None
    return from_json(SECTIONS[name], value, f"DeqseqConfig.{name}", base)


def changed(name: str, value: object, config: Json) -> Any:
    """A section as JSON, with the fields that ``value`` leaves out as they are in ``config``."""
    if value is None:
        return None
    base = section(name, config)
    if base is None and name == "eval_solve":
        base = section("solve", config)
    made = from_json(SECTIONS[name], value, f"DeqseqConfig.{name}", base)
    if name in PARTS:
        check_backbone(name, made)
    return to_json(made)


def decoder_changed(value: object, config: Json) -> object:
    """A decoder's configuration, with the fields that ``value`` leaves out as they are."""
    before = config.get("decoder_config")
    if not isinstance(value, Mapping) or not isinstance(before, Mapping):
        return value
    for name in value:
        check_known("decoder_config field", name, before)
    return {**before, **value}


def check_name(name: str, value: object) -> None:
    """Refuse a field that no configuration has; of a solve's own field, say where it belongs."""
    if name.startswith("_"):  # of transformers
        return
    for place, owner in NESTED.items():
        if name in (field.name for field in fields_of(owner)) and name not in FIELDS:
            *outer, inner = place
            belongs = {inner: {name: value}}
            for key in reversed(outer):
                belongs = {key: belongs}
            raise ValueError(
                f"DeqseqConfig field {name!r} is unknown: it belongs in {'.'.join(place)}, as in "
                f"'{json.dumps(belongs)}'"
            )
    check_known("DeqseqConfig field", name, (*FIELDS.values(), *OTHERS))


def check_backbone(name: str, part: object) -> None:
    """Refuse layers without keys and values, for which vLLM asks before it builds a model."""
    if not isinstance(part, LlamaConfig | DecoderLayers):
        _refuse(name, "a LlamaConfig or DecoderLayers", type(part).__name__)


def _check_version(written_by: object) -> None:
    """As deqseq: a newer patch release can be read, a newer minor one may have other fields."""
    check_type("deqseq_version", written_by, (str, type(None)))
    try:
        release = Version(str(written_by or __version__)).release
    except InvalidVersion:
        raise ValueError(
            f"deqseq_version must be a version such as {__version__!r}, got {written_by!r}"
        ) from None
    if release[:2] > Version(__version__).release[:2]:
        raise ValueError(
            f"deqseq_version must be {__version__} or older, got {written_by!r}: upgrade deqseq "
            "and the plugin"
        )


def _check_sizes(config: Json, core: Layers, n_layers: int) -> None:
    """Refuse sizes by which vLLM would plan its cache for other layers."""
    sizes = {name: (field, getattr(core, field)) for name, field in SIZES.items()}
    sizes["num_hidden_layers"] = ("n_layers", n_layers)
    for name, (field, size) in sizes.items():
        given = config.get(name)
        if given is None and name == "head_dim":  # as vLLM does
            given = core.d_model // core.n_heads
        if given != size:
            raise ValueError(
                f"{name} must be {size}, which follows from {field} of backbone, prelude and coda, "
                f"got {shown(given)}: save the model again by save_pretrained"
            )


def _check_solve(section: str, solve: SolveConfig) -> SolveConfig:
    if not isinstance(solve.solver, Naive | Relaxed):
        _override(section, "solver", "Naive or Relaxed", solve.solver, '"Naive"')
    if not isinstance(solve.sweep, Simultaneous):
        served = "Simultaneous, of all tokens that the engine schedules"
        _override(section, "sweep", served, solve.sweep, '"Simultaneous"')
    if solve.stop.norm != "token":
        _override(section, "stop.norm", '"token"', solve.stop.norm, '{"norm": "token"}')
    if solve.start not in ("zero", "input"):
        _override(section, "start", '"zero" or "input"', solve.start, '"zero"')
    return solve


def _layers(name: str, config: Json, spec: LanguageModelSpec) -> Layers | None:
    part: Any = getattr(spec, name)
    if part is None:
        return None
    check_backbone(name, part)
    if isinstance(part, DecoderLayers):
        return _of_decoder(part, config.get("decoder_config"))
    if not part.causal:
        _refuse(f"{name}.causal", True, False)
    iterated = name == "backbone" and (spec.solve is not None or spec.steps is not None)
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": part.rope_theta}
    if scaling := part.rope_scaling:
        rope |= {"rope_type": "llama3"} | {key: getattr(scaling, key) for key in BOUNDS}
        rope["original_max_position_embeddings"] = scaling.original_length
    same = ("n_layers", "d_model", "n_heads", "norm_eps", "norms", "final_norm", "skip_scale")
    return Layers(
        **{key: getattr(part, key) for key in same},
        n_kv_heads=part.kv_heads,
        headdim=part.head_width,
        mlp_width=part.mlp_width or int(8 * part.d_model / 3),
        qk_norm="all" if part.qk_norm else None,
        biases="qk" if part.qk_bias else "",
        rope=rope,
        injection=part.injection and iterated and spec.injection is None,
    )


def _of_decoder(part: DecoderLayers, decoder: Any) -> Layers:
    check_type("decoder_config", decoder, Mapping)
    _check_decoder(decoder)
    if part.d_model != decoder["hidden_size"] or part.end > decoder["num_hidden_layers"]:
        raise ValueError(
            f"DecoderLayers must be some of the {decoder['num_hidden_layers']} layers of width "
            f"{decoder['hidden_size']} of decoder_config, got {part}"
        )
    family, rope = decoder["model_type"], decoder["rope_parameters"]
    heads, width = decoder["num_attention_heads"], decoder["hidden_size"]
    biases = "qkv" if family == "qwen2" else ""
    return Layers(
        n_layers=part.n_layers,
        d_model=width,
        n_heads=heads,
        n_kv_heads=decoder.get("num_key_value_heads") or heads,
        headdim=decoder.get("head_dim") or width // heads,
        mlp_width=decoder["intermediate_size"],
        norm_eps=decoder["rms_norm_eps"],
        norms="post" if family == "olmo2" else "pre",
        final_norm=part.final_norm,
        qk_norm={"olmo2": "all", "qwen3": "head"}.get(family),
        biases="qkvo" if decoder.get("attention_bias") else biases,
        rope=rope,
    )


def _check_decoder(decoder: Json) -> None:
    """Refuse fields of a decoder that are missing, misspelt, of another type or not served."""
    sizes = ("hidden_size", "num_attention_heads", "num_hidden_layers", "intermediate_size")
    needed = ("model_type", "rope_parameters", "rms_norm_eps", *sizes)
    served = {
        "model_type": FAMILIES,
        "sliding_window": (None,),
        "hidden_act": ("silu",),
        "mlp_bias": (False,),
        "attention_bias": (False, True, None),
    }
    heads = ("num_key_value_heads", "head_dim")
    plain = {name.lower().replace("-", "_"): name for name in decoder}
    for field in (*needed, *heads, *served):
        near = [] if field in decoder else difflib.get_close_matches(field, plain, 1, 0.9)
        if near:
            raise ValueError(
                f"decoder_config field {plain[near[0]]!r} is unknown; did you mean {field!r}?"
            )
        if field in needed and decoder.get(field) is None:
            raise ValueError(
                f"decoder_config.{field} must be given: save the model again by save_pretrained"
            )
        if field in (*sizes, *heads) and decoder.get(field) is not None:
            check_integer(f"decoder_config.{field}", decoder[field], 1)
    for field, values in served.items():
        value = decoder.get(field, values[0])
        if not any(value is each or (value == each and isinstance(value, str)) for each in values):
            _refuse(f"decoder_config.{field}", " or ".join(map(str, values)), shown(value))
    Within("[0, inf)")("decoder_config.rms_norm_eps", decoder["rms_norm_eps"])
    rope, where = decoder["rope_parameters"], "decoder_config.rope_parameters"
    check_type(where, rope, Mapping)
    if rope.get("rope_type") not in ROTATIONS:
        _refuse(f"{where}.rope_type", " or ".join(ROTATIONS), shown(rope.get("rope_type")))
    numbers = ["rope_theta"]
    if rope["rope_type"] == "llama3":
        numbers += [*BOUNDS, "original_max_position_embeddings"]
    for number in numbers:
        Within("(0, inf)")(f"{where}.{number}", rope.get(number))


def _override(section: str, field: str, served: str, got: object, value: str) -> NoReturn:
    """Refuse a setting of the solve, which can be changed for one server."""
    override = f'{{"eval_solve": {{"{field.partition(".")[0]}": {value}}}}}'
    _refuse(
        f"{section}.{field}", served, got, f", or for the server, by --hf-overrides '{override}'"
    )


def _refuse(field: str, served: object, got: object, remedy: str = "") -> NoReturn:
    raise ValueError(
        f"{field} must be {served} to be served, got {got}: "
        f"change it before save_pretrained{remedy}"
    )
