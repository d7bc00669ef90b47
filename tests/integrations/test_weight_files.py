"""Which files of a folder are read, and what is said of those that cannot be."""

import json

import pytest
import torch
from safetensors.torch import save_file

from deqseq.integrations.foreign import from_pretrained
from deqseq.integrations.foreign.files import tensors_in


@pytest.fixture
def folder(tmp_path):
    """Two shards, their index, and the same weights under other names, as some releases have."""
    for name in ("a", "b"):
        save_file({name: torch.ones(64)}, tmp_path / f"model-{name}.safetensors")
    save_file({"other": torch.zeros(64)}, tmp_path / "consolidated.safetensors")
    shards = {name: f"model-{name}.safetensors" for name in ("a", "b")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    return tmp_path


def test_an_index_says_what_is_read(folder):
    assert sorted(tensors_in(folder)) == ["a", "b"]
    (folder / "model.safetensors.index.json").unlink()
    assert sorted(tensors_in(folder)) == ["a", "b", "other"]


def test_a_whole_file_comes_first_and_no_tensor_is_read_twice(folder):
    """transformers leaves the index of shards behind that it has replaced by one file."""
    save_file({"a": torch.full((64,), 2.0)}, folder / "model.safetensors")
    assert {name: x.mean().item() for name, x in tensors_in(folder).items()} == {"a": 2.0}
    (folder / "model.safetensors").rename(folder / "model-old.safetensors")
    (folder / "model.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match=r"model-old\.safetensors has a, and so has another file"):
        tensors_in(folder)


def test_a_file_that_cannot_be_read_is_named(folder):
    shard = folder / "model-b.safetensors"
    shard.write_bytes(shard.read_bytes()[:-8])
    with pytest.raises(ValueError, match=r"model-b\.safetensors cannot be read"):
        tensors_in(folder)
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=r"model-b\.safetensors"):
        tensors_in(folder)


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ("{}", FileNotFoundError, "there are no weights in"),
        ("[]", ValueError, r"model\.safetensors\.index\.json must be a mapping"),
        (
            '{"weight_map": ["a"]}',
            TypeError,
            r"'weight_map' of .*index\.json must be a Mapping, got \['a'\]",
        ),
        ('{"weight_map": {"a": 3}}', FileNotFoundError, "3"),
        (
            '{"weight_map": {"a": "../x"}}',
            ValueError,
            r"must name files of its folder, got '\.\./x'",
        ),
        ('{"weight_map": {"a": "/x"}}', ValueError, "must name files of its folder, got '/x'"),
        ('{"weight_map": {"a"', ValueError, r"model\.safetensors\.index\.json cannot be read"),
    ],
)
def test_an_index_that_names_no_files_is_an_error(folder, index, error, message):
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(error, match=message):
        tensors_in(folder)


@pytest.mark.parametrize(
    "name",
    ["model.safetensors", "model.safetensors.index.json", "model-a.safetensors"],
)
def test_a_folder_in_place_of_a_file_is_named(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(ValueError, match=f"{name} must be a file, it is a folder"):
        tensors_in(folder)


def test_a_folder_in_place_of_the_configuration_is_named(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ValueError, match=r"config\.json must be a file, it is a folder"):
        from_pretrained(tmp_path)
