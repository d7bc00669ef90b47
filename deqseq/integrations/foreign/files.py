"""The configuration and the tensors in a folder."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor


def folder_of(folder_or_name: str | PathLike[str], revision: str | None) -> Path:
    """A folder as it is, or that of the model which is downloaded under a name.

    FileNotFoundError if it is neither; ImportError without huggingface_hub.
    """
    folder, name = Path(folder_or_name), str(folder_or_name)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or not isinstance(folder_or_name, str) or name[:1] in (".", "~") or name.count("/") > 1:
        raise FileNotFoundError(f"folder_or_name: there is no folder {folder}; a name on the hub is 'owner/model'")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError('loading from the hub needs huggingface_hub: pip install "deqseq[hf]"') from error
    files = ["config.json", "*.safetensors", "*.index.json"]
    return Path(snapshot_download(name, revision=revision, allow_patterns=files))


def config_in(folder: Path) -> dict[str, Any]:
    """The content of ``config.json``; FileNotFoundError without it, ValueError if it is not a mapping."""
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json")
    return _mapping(path)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder.

    They are those of ``model.safetensors``, else of the files that an index names, else of every ``*.safetensors``,
    else of ``pytorch_model*.bin``. FileNotFoundError if there are none, or for a file that the index names; ValueError
    for a file that cannot be read, or two files with tensors of one name.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file() and not (folder / "model.safetensors").is_file():
        return _joined(_files_of(index))
    patterns = ("model.safetensors", "*.safetensors", "pytorch_model.bin", "pytorch_model*.bin")
    files = next((found for one in patterns if (found := sorted(folder.glob(one)))), [])
    if not files:
        raise FileNotFoundError(f"there are no weights in {folder}: neither *.safetensors nor pytorch_model*.bin")
    return _joined(files)


def _files_of(index: Path) -> list[Path]:
    names = _mapping(index).get("weight_map")
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{index} must have a weight_map from tensors to files, such as {{'a': 'a.safetensors'}}")
    return [index.parent / name for name in sorted(set(names.values()))]


def _joined(files: list[Path]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            pickled = file.suffix == ".bin"
            more = torch.load(file, map_location="cpu", weights_only=True) if pickled else load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}. Copy it again") from error
        if twice := sorted(tensors.keys() & more.keys()):
            raise ValueError(
                f"{file} has {twice[0]}, and so has another file: leave the files of one model in the folder"
            )
        tensors.update(more)
    return tensors


def _mapping(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}. Copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a mapping, got {type(content).__name__}")
    return content
