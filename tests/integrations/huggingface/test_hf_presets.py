"""The paper's models by name, and its reference code's files, through the Auto classes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import deqseq as dq
from deqseq.integrations.huggingface import (
    ImplicitLlamaConfig,
    ImplicitMamba2Config,
    from_reference_folder,
    preset_config,
)
from deqseq.integrations.reference_config import from_reference_config

DATA = Path(__file__).parents[1] / "data"
KINDS = {"llama": ImplicitLlamaConfig, "mamba2": ImplicitMamba2Config}


def settled(spec: dq.LanguageModelSpec) -> dq.LanguageModelSpec:
    """With the sizes that a Llama derives from others."""
    sizes = spec.backbone
    if isinstance(sizes, dq.LlamaConfig):
        sizes = replace(sizes, n_kv_heads=sizes.n_heads, headdim=sizes.d_model // sizes.n_heads)
    return replace(spec, backbone=sizes)


@pytest.mark.parametrize("name", dq.PRESETS)
def test_presets_are_configurations_that_the_auto_class_reads(name, tmp_path):
    config = preset_config(name)
    assert config.specification() == settled(dq.preset(name))
    assert config.model_type == {"llama3": "implicit_llama3", "mamba2": "implicit_mamba2"}[name.split("-")[0]]
    assert config.eos_token_id == (None if name == "mamba2-state-tracking" else 0)
    config.save_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).to_dict() == config.to_dict() | {"_name_or_path": str(tmp_path)}


def test_a_preset_builds_the_model_that_it_counts():
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(preset_config("llama3-1.3b-implicit"))
    assert model.num_parameters() == dq.parameter_count(dq.preset("llama3-1.3b-implicit"))


def test_a_preset_is_changed_by_keywords():
    config = preset_config("mamba2-130m-pretrain", num_hidden_layers=2, vocab_size=300, solve={"stop": {"rtol": 0.5}})
    assert (config.num_hidden_layers, config.vocab_size) == (2, 300)
    assert (config.solve["stop"]["max_steps"], config.solve["stop"]["rtol"]) == (4, 0.5)
    with pytest.raises(ValueError, match=r"'num_layers' .*did you mean .*'num_hidden_layers'"):
        preset_config("mamba2-130m-pretrain", num_layers=2)


def test_sizes_that_follow_from_others_follow_from_those_given():
    config = preset_config("llama3-1.3b-implicit", num_attention_heads=4, hidden_size=64)
    assert (config.num_key_value_heads, config.head_dim) == (4, 16)
    assert preset_config("llama3-1.3b-implicit", num_attention_heads=4, hidden_size=64, head_dim=8).head_dim == 8


def test_an_unknown_preset_names_its_neighbours():
    with pytest.raises(ValueError, match=r"preset .*'llama3-1\.3b-implict'.*did you mean 'llama3-1\.3b-implicit'"):
        preset_config("llama3-1.3b-implict")
    with pytest.raises(TypeError, match="name must be a str"):
        preset_config(5)


# the reference code's files


def folder_of(kind: str, folder: Path) -> dict[str, torch.Tensor]:
    """A folder as the reference code saves it; what the file knows about the model."""
    known = load_file(DATA / f"{kind}.safetensors")
    shutil.copy(DATA / f"{kind}.json", folder / "config.json")
    weights = {name.removeprefix("weight/"): t for name, t in known.items() if name.startswith("weight/")}
    save_file(weights, folder / "model.safetensors")
    return known


@pytest.mark.parametrize("kind", KINDS)
def test_the_references_configuration_through_the_auto_class(kind, tmp_path):
    folder_of(kind, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert type(config) is KINDS[kind]
    theirs = json.loads((tmp_path / "config.json").read_text())
    assert config.specification() == settled(from_reference_config(theirs))
    assert config.dtype == torch.float64
    config.save_pretrained(tmp_path / "ours")
    again = AutoConfig.from_pretrained(tmp_path / "ours")
    assert (again.specification(), again.dtype) == (config.specification(), config.dtype)
    assert AutoConfig.from_pretrained(tmp_path, use_cache=False).use_cache is False


@pytest.mark.parametrize("kind", KINDS)
def test_the_references_checkpoint_reproduces_its_numbers(kind, tmp_path):
    known = folder_of(kind, tmp_path)
    model = from_reference_folder(tmp_path, eos_token_id=5)
    assert type(model).__name__ == {"llama": "ImplicitLlamaForCausalLM", "mamba2": "ImplicitMamba2ForCausalLM"}[kind]
    ids = known["input_ids"].long()
    output = model(ids)
    assert (output.status == dq.Status.CONVERGED).all()
    assert (output.logits - known["eval_logits"]).abs().max() < 1e-5
    model.save_pretrained(tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert torch.equal(again(ids).logits, output.logits)
    assert again.config.eos_token_id == 5


@pytest.mark.parametrize("kind", KINDS)
def test_the_auto_class_says_who_loads_the_references_weights(kind, tmp_path):
    folder_of(kind, tmp_path)
    with pytest.raises(ValueError, match=r"load them with deqseq.integrations.huggingface.from_reference_folder$"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_pickled_weights_of_the_reference(tmp_path):
    known = folder_of("mamba2", tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    ids = known["input_ids"].long()
    assert (from_reference_folder(tmp_path)(ids).logits - known["eval_logits"]).abs().max() < 1e-5
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(FileNotFoundError, match="there are no weights in"):
        from_reference_folder(tmp_path)


def test_what_the_reference_has_and_we_have_not_is_named(tmp_path):
    folder_of("llama", tmp_path)
    theirs = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(theirs | {"head_bias": True}))
    with pytest.raises(ValueError, match=r"'head_bias' cannot be True here: deqseq's head has no bias"):
        AutoConfig.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(theirs | {"hed_bias": True}))
    with pytest.raises(ValueError, match="hed_bias"):
        AutoConfig.from_pretrained(tmp_path)
