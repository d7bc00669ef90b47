"""What the plugin for vLLM reads of a saved configuration, and what it refuses; needs no vLLM."""

import json
import re
from dataclasses import fields, replace

import pytest
from deqseq_vllm.plan import (
    OTHERS,
    SIZES,
    changed,
    check_name,
    decoder_changed,
    plan,
)
from transformers import AutoConfig

import deqseq as dq
from deqseq.as_json import FIELDS
from deqseq.integrations.huggingface import DeqseqConfig, configuration
from deqseq.models.specification import DecoderLayers

SOLVE = dq.SolveConfig(dq.Naive(), dq.Stop(rtol=1e-4, max_steps=30))


def saved(backbone, solve=SOLVE, decoder=None, **fields):
    """The content of a config.json."""
    spec = dq.LanguageModelSpec(50, backbone, solve, **fields)
    return DeqseqConfig.from_specification(spec, decoder_config=decoder).to_dict()


def layers(count=1, **options):
    return dq.LlamaConfig(16, count, n_heads=4, n_kv_heads=2, **options)


def in_decoder(family, **options):
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    decoder = AutoConfig.for_model(family, **sizes, **options)
    parts = {"prelude": DecoderLayers(16, 0, 1), "coda": DecoderLayers(16, 3, 4, final_norm=True)}
    return saved(DecoderLayers(16, 1, 3), decoder=decoder, injection="concat", **parts)


def test_an_implicit_llama():
    found = plan(saved(layers(2, rope_scaling=dq.layers.RotaryScaling())))
    assert found.prelude is None
    assert found.coda is None
    assert found.steps == 1
    assert found.start == "zero"
    core = found.core
    solve = found.solve
    assert core.injection
    assert core.n_layers == 2
    assert core.n_kv_heads == 2
    assert core.headdim == 4
    assert core.mlp_width == 42
    assert core.rope["rope_type"] == "llama3"
    assert solve is not None
    assert solve == SOLVE


@pytest.mark.parametrize(
    ("family", "norms", "qk_norm", "biases"),
    [
        ("llama", "pre", None, ""),
        ("qwen2", "pre", None, "qkv"),
        ("qwen3", "pre", "head", ""),
        ("olmo2", "post", "all", ""),
    ],
)
def test_the_layers_of_a_decoder(family, norms, qk_norm, biases):
    found = plan(in_decoder(family))
    assert found.prelude is not None
    assert found.coda is not None
    assert found.prelude.n_layers == 1
    assert found.core.n_layers == 2
    assert found.coda.n_layers == 1
    assert not found.core.final_norm
    assert found.coda.final_norm
    assert found.core.norms == norms
    assert found.core.qk_norm == qk_norm
    assert found.core.biases == biases
    assert not found.core.injection


def test_layers_that_are_not_causal_are_refused():
    config = saved(layers(), None)
    config["backbone"]["causal"] = False
    with pytest.raises(ValueError, match=r"backbone\.causal must be True to be served, got False"):
        plan(config)


def test_a_looped_model_has_a_slot_for_each_step():
    found = plan(saved(layers(injection=False), None, steps=4))
    assert found.solve is None
    assert found.steps == 4
    assert found.start == "input"
    assert plan(saved(layers(), None)).steps == 1


def overridden(config, **fields):
    """The configuration that the server has after --hf-overrides."""
    for name, value in fields.items():
        check_name(name, value)
        config = config | {name: changed(name, value, config)}
    return config


def test_an_override_changes_what_it_names():
    config = saved(layers(), eval_solve=replace(SOLVE, solver=dq.Relaxed(0.5)))
    config = overridden(config, eval_solve={"stop": {"max_steps": 8}})
    found = plan(config).solve
    assert found == replace(SOLVE, solver=dq.Relaxed(0.5), stop=dq.Stop(rtol=1e-4, max_steps=8))
    config = overridden(config, eval_solve={"solver": "Naive", "stop": {"rtol": 0}})
    assert plan(config).solve == replace(SOLVE, stop=dq.Stop(rtol=0, max_steps=8))


def test_an_override_begins_from_solve_where_there_is_no_eval_solve():
    config = overridden(saved(layers()), eval_solve={"stop": {"max_steps": 8}})
    assert plan(config).solve == replace(SOLVE, stop=dq.Stop(rtol=1e-4, max_steps=8))


@pytest.mark.parametrize(
    ("field", "change", "remedy"),
    [
        ("solver", {"solver": dq.Anderson()}, {"solver": "Naive"}),
        ("sweep", {"sweep": dq.Sliding(8)}, {"sweep": "Simultaneous"}),
        ("stop.norm", {"stop": dq.Stop(norm="row")}, {"stop": {"norm": "token"}}),
        ("start", {"start": dq.RandomStart()}, {"start": "zero"}),
    ],
)
def test_solves_that_are_not_served_are_by_the_override_that_the_error_names(field, change, remedy):
    config = saved(layers(), replace(SOLVE, **change))
    with pytest.raises(ValueError, match=rf"solve\.{field} must be .* to be served, got") as error:
        plan(config)
    (override,) = re.findall("--hf-overrides '(.*)'", str(error.value))
    assert json.loads(override) == {"eval_solve": remedy}
    assert plan(overridden(config, **json.loads(override))).solve is not None


SOLVES = [
    {"stop": {"max_step": 8}},
    {"stop": {"rtol": -1}},
    {"stop": {"rtol": "1e-2"}},
    {"stop": {"rtol": float("nan")}},
    {"stop": {"max_steps": 0}},
    {"stop": {"max_steps": None}},
    {"stop": {"check_every": 0}},
    {"stop": {"divergence": 1}},
    {"stop": {"norm": "rows"}},
    {"stop": None},
    {"stop": []},
    {"solver": {"name": "Relaxed", "damping": 7}},
    {"solver": {"name": "Relaxed", "dampin": 0.5}},
    {"solver": "Naiv"},
    {"solver": None},
    {"sweep": "Simultanous"},
    {"start": "zeros"},
    {"start": None},
    {"rtol": 1e-2},
    {"stp": {}},
    [],
    "exactly",
    8,
]


def library_error(**fields):
    """What deqseq says to these fields."""
    config = DeqseqConfig.from_specification(dq.LanguageModelSpec(50, layers(), SOLVE))
    with pytest.raises((TypeError, ValueError)) as error:
        for name, value in fields.items():
            setattr(config, name, value)
        config.specification()
    return error.value


@pytest.mark.parametrize("value", SOLVES, ids=repr)
@pytest.mark.parametrize("name", ["solve", "eval_solve"])
def test_settings_that_deqseq_refuses_are_refused_in_its_words(name, value):
    expected, config = library_error(**{name: value}), saved(layers())
    for refused in (
        lambda: overridden(config, **{name: value}),
        lambda: plan(config | {name: value}),
    ):
        with pytest.raises(type(expected), match=re.escape(str(expected))):
            refused()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("injection", "concatenate"),
        ("norm", "final"),
        ("steps", "3"),
        ("steps", 3),
        ("vocab_size", 0),
        ("tied", "yes"),
        ("embedding_scale", -1.0),
        ("logit_softcap", 0),
    ],
)
def test_fields_that_deqseq_refuses_are_refused_in_its_words(name, value):
    with pytest.raises((TypeError, ValueError)) as error:
        dq.LanguageModelSpec(**{"vocab_size": 50, "backbone": layers(), name: value})
    with pytest.raises(type(error.value), match=re.escape(str(error.value))):
        plan(saved(layers()) | {FIELDS[name]: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("loop_start", "middle"),
        ("backbone", {"name": "LlamaConfig", "d_modle": 16}),
        ("backbone", {"name": "LlamaConfig", "d_model": 16, "norms": "none"}),
        ("backbone", {"name": "Llama", "d_model": 16}),
        ("prelude", {"name": "LlamaConfig", "d_model": 16}),
    ],
)
def test_sections_that_deqseq_refuses_are_refused_in_its_words(name, value):
    expected = library_error(**{name: value})
    with pytest.raises(type(expected), match=re.escape(str(expected))):
        plan(saved(layers()) | {name: value})


@pytest.mark.parametrize("name", ["vocab_size", "backbone"])
@pytest.mark.parametrize("is_null", [False, True])
def test_fields_that_a_model_must_have(name, is_null):
    config = saved(layers())
    del config[name]
    if is_null:
        config[name] = None
    with pytest.raises(ValueError, match=rf"config\.json must have '{name}': save"):
        plan(config)


@pytest.mark.parametrize("name", ["model_type", "rope_parameters", "hidden_size"])
def test_fields_that_a_decoder_must_have(name):
    config = in_decoder("llama")
    del config["decoder_config"][name]
    with pytest.raises(ValueError, match=rf"decoder_config\.{name} must be given"):
        plan(config)
    with pytest.raises(TypeError, match=r"decoder_config must be a Mapping, got None"):
        plan(config | {"decoder_config": None})


ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "16"),
        ("hidden_size", -3),
        ("num_attention_heads", 0),
        ("num_hidden_layers", 2.5),
        ("num_key_value_heads", {"a": 1}),
        ("head_dim", False),
        ("intermediate_size", [32]),
        ("rms_norm_eps", -1),
        ("rms_norm_eps", float("nan")),
        ("attention_bias", "yes"),
        ("mlp_bias", 0),
        ("hidden_act", ""),
        ("rope_parameters", "default"),
        ("rope_parameters", ROPE | {"rope_theta": -1}),
        ("rope_parameters", {"rope_theta": 10000.0}),
        ("rope_parameters", ROPE | {"rope_type": "llama3", "factor": 8.0}),
    ],
)
def test_fields_of_a_decoder_are_checked(field, value):
    config = in_decoder("llama")
    config["decoder_config"][field] = value
    with pytest.raises((TypeError, ValueError), match=rf"decoder_config\.{field}.* must be .*got "):
        plan(config)


@pytest.mark.parametrize("field", ["hidden_act", "attention_bias", "num_key_value_heads"])
def test_a_misspelt_field_of_a_decoder_is_told(field):
    for typo in (field + "x", field.upper(), field.replace("_", "-")):
        config = in_decoder("llama")
        config["decoder_config"][typo] = config["decoder_config"].pop(field)
        with pytest.raises(ValueError, match=rf"'{typo}' is unknown; did you mean '{field}'"):
            plan(config)


def test_an_override_of_a_decoder_changes_what_it_names():
    config = in_decoder("llama")
    made = decoder_changed({"rms_norm_eps": 1e-3}, config)
    assert plan(config | {"decoder_config": made}).core.norm_eps == 1e-3
    with pytest.raises(ValueError, match=r"'rms_norm_ep' is unknown; did you mean 'rms_norm_eps'"):
        decoder_changed({"rms_norm_ep": 1e-3}, config)


def test_layers_that_a_decoder_does_not_have():
    config = in_decoder("llama")
    config["coda"]["end"] = 5
    with pytest.raises(ValueError, match=r"some of the 4 layers of width 16 of decoder_config.*=5"):
        plan(config)


@pytest.mark.parametrize("decoder", [{}, True, "llama", {"model_type": "llama"}])
def test_a_decoder_without_layers_of_it(decoder):
    with pytest.raises(ValueError, match="decoder_config must be given with DecoderLayers, and"):
        plan(saved(layers()) | {"decoder_config": decoder})


@pytest.mark.parametrize(
    ("name", "field"), [*SIZES.items(), ("num_hidden_layers", "n_layers")], ids=str
)
def test_sizes_that_vllm_reads_follow_from_the_layers(name, field):
    config = saved(layers(2))
    for value in (7, "2", -1, [4], float("nan")):
        words = rf"{name} must be \d+, which follows from {field} of backbone, .*, got "
        with pytest.raises(ValueError, match=words + re.escape(repr(value))):
            plan(config | {name: value})


def test_a_width_of_heads_that_is_left_out_is_as_vllm_takes_it():
    assert plan(saved(layers()) | {"head_dim": None}).core.headdim == 4
    with pytest.raises(ValueError, match=r"head_dim must be 8, .*, got 4"):
        plan(saved(layers(headdim=8)) | {"head_dim": None})


@pytest.mark.parametrize("version", ["99.0.0", "text", 3, [0, 1]])
def test_a_version_that_is_newer_or_no_version(version):
    with pytest.raises((TypeError, ValueError), match=r"deqseq_version must be .* got") as error:
        plan(saved(layers()) | {"deqseq_version": version})
    assert repr(version) in str(error.value)
    newer_patch = dq.__version__.rpartition(".")[0] + ".99"
    for readable in (None, "0.0.1", newer_patch):
        assert plan(saved(layers()) | {"deqseq_version": readable})


@pytest.mark.parametrize("solve", [{}, {"eval_solve": None}])
def test_what_is_missing_has_the_default_of_deqseq(solve):
    config = {key: value for key, value in saved(layers()).items() if "solve" not in key}
    with pytest.raises(ValueError, match=r"solve\.solver must be .* got Adaptive"):
        plan(config | solve)


def test_the_names_of_fields_are_those_of_deqseq():
    known = {field.name for field in fields(DeqseqConfig)} | set(configuration.FROM_TRANSFORMERS)
    assert known == {*FIELDS.values(), *OTHERS}


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("eval_sovle", {}, "did you mean 'eval_solve'"),
        ("step", 3, "did you mean 'steps'"),
        ("rtol", 1e-2, """eval_solve.stop, as in '{"eval_solve": {"stop": {"rtol": 0.01}}}'"""),
        ("stop", {}, """eval_solve, as in '{"eval_solve": {"stop": {}}}'"""),
        ("damping", 0.5, "it belongs in eval_solve.solver"),
    ],
)
def test_unknown_fields_and_misplaced_ones(name, value, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        check_name(name, value)


def test_every_field_of_a_llama_is_served_or_refused():
    """A new field must be read by the plugin, or change nothing there; then it belongs here."""
    read = {
        *("d_model", "n_layers", "n_heads", "n_kv_heads", "headdim", "mlp_width", "rope_theta"),
        *("rope_scaling", "norm_eps", "norms", "qk_norm", "qk_bias", "final_norm", "injection"),
        *("skip_scale", "causal"),
    }
    training, numerical = {"dropout"}, {"weight_norm", "float32_rotary"}
    not_causal = {"grid"}
    names = {field.name for field in fields(dq.LlamaConfig)}
    assert names == read | training | numerical | not_causal


def test_models_that_are_not_served():
    with pytest.raises(ValueError, match=r"backbone must be .* got Mamba2Config"):
        plan(saved(dq.Mamba2Config(16, headdim=8)))
    with pytest.raises(
        ValueError, match=r"decoder_config\.model_type must be .*qwen3.* got 'gemma"
    ):
        plan(in_decoder("gemma", head_dim=4))
    with pytest.raises(ValueError, match=r"decoder_config\.sliding_window must be None"):
        plan(in_decoder("mistral", sliding_window=8))
    later = saved(layers())
    later["backbone"]["sinks"] = True
    with pytest.raises(ValueError, match=r"backbone: LlamaConfig field 'sinks' is unknown"):
        plan(later)
    with pytest.raises(ValueError, match="n_kv_heads and headdim must be alike"):
        other = dq.LlamaConfig(16, n_heads=2, injection=False)
        plan(saved(layers(), prelude=other, coda=other))
