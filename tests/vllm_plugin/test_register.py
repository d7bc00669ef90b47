"""The configuration as vLLM's processes read it; without vLLM, of which it needs one name."""

import json
import sys
from types import ModuleType

import pytest
from deqseq_vllm.plan import plan
from test_plan import in_decoder, layers, saved


@pytest.fixture
def made(monkeypatch, tmp_path):
    """What makes a configuration from the content of a file."""
    vllm = ModuleType("vllm")
    vllm.ModelRegistry = None
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    from deqseq_vllm.register import DeqseqConfig

    def read(content):
        (tmp_path / "config.json").write_text(json.dumps(content))
        return DeqseqConfig.from_pretrained(tmp_path)

    return read


def test_a_saved_configuration_is_read_as_it_is(made):
    for content in (saved(layers()), in_decoder("llama")):
        assert plan(made(content).to_dict()) == plan(content)


@pytest.mark.parametrize(
    "name",
    ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"],
)
def test_sizes_that_a_configuration_must_have(made, name):
    content = saved(layers())
    del content[name]
    with pytest.raises(ValueError, match=rf"config\.json must have '{name}': save"):
        made(content)


@pytest.mark.parametrize("value", ["64", 0, 2.5, True, float("nan"), [64]], ids=repr)
@pytest.mark.parametrize("name", ["vocab_size", "head_dim", "max_position_embeddings"])
def test_sizes_are_integers_in_files_and_overrides(made, name, value):
    words = rf"DeqseqConfig\.{name} must be an integer >= 1, got "
    with pytest.raises((TypeError, ValueError), match=words):
        made(saved(layers()) | {name: value})
    config = made(saved(layers()))
    with pytest.raises((TypeError, ValueError), match=words):
        config.update({name: value})


def test_an_override_of_the_decoder_keeps_its_other_fields(made):
    config = made(in_decoder("llama"))
    config.decoder_config = {"rms_norm_eps": 1e-3}
    assert plan(config.to_dict()).core.norm_eps == 1e-3
