"""What the plugin for vLLM reads of a saved configuration, and what it refuses; needs no vLLM."""

from dataclasses import replace

import pytest
from deqseq_vllm.plan import merged, plan
from transformers import AutoConfig

import deqseq as dq
from deqseq.integrations.huggingface import DeqseqConfig
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
    assert solve.damping == 1.0
    assert solve.rtol == 1e-4
    assert solve.max_steps == 30


@pytest.mark.parametrize(
    ("family", "norms", "qk_norm", "biases"),
    [
        ("llama", "pre", None, (False, False)),
        ("qwen2", "pre", None, (True, False)),
        ("qwen3", "pre", "head", (False, False)),
        ("olmo2", "post", "all", (False, False)),
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
    assert (found.core.qkv_bias, found.core.o_bias) == biases
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


def test_an_override_changes_what_it_names():
    config = saved(layers(), eval_solve=replace(SOLVE, solver=dq.Relaxed(0.5)))
    config["eval_solve"] = merged(config["eval_solve"], {"stop": {"max_steps": 8}})
    found = plan(config).solve
    assert found is not None
    assert found.damping == 0.5
    assert found.rtol == 1e-4
    assert found.max_steps == 8
    config["eval_solve"] = merged(config["eval_solve"], {"solver": "Naive", "stop": {"rtol": 0}})
    found = plan(config).solve
    assert found is not None
    assert found.damping == 1
    assert not found.has_tolerance


@pytest.mark.parametrize(
    ("named", "changes"),
    [
        ("solver", {"solver": dq.Anderson()}),
        ("sweep", {"sweep": dq.Sliding(8)}),
        ("norm", {"stop": dq.Stop(norm="row")}),
        ("start", {"start": dq.RandomStart()}),
    ],
)
def test_solves_that_are_not_served(named, changes):
    with pytest.raises(ValueError, match=rf"solve\.(stop\.)?{named} must be .*--hf-overrides"):
        plan(saved(layers(), replace(SOLVE, **changes)))


def test_models_that_are_not_served():
    with pytest.raises(ValueError, match=r"backbone must be .* got Mamba2Config"):
        plan(saved(dq.Mamba2Config(16, headdim=8)))
    with pytest.raises(ValueError, match=r"decoder_config\.model_type must be .*qwen3.* got gemma"):
        plan(in_decoder("gemma", head_dim=4))
    with pytest.raises(ValueError, match=r"decoder_config\.sliding_window must be None"):
        plan(in_decoder("mistral", sliding_window=8))
    later = saved(layers())
    later["backbone"]["sinks"] = True
    with pytest.raises(ValueError, match=r"backbone must be .* got the fields sinks"):
        plan(later)
    with pytest.raises(ValueError, match="key-value heads"):
        other = dq.LlamaConfig(16, n_heads=2, injection=False)
        plan(saved(layers(), prelude=other, coda=other))
