"""The configuration and the tensors in a folder of JSON and safetensors; nothing else is read."""

import json
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor


def folder_of(folder_or_name: str | PathLike[str], revision: str | None) -> Path:
    """A folder as it is, or that of the model which is downloaded under a name.

    Raises:
        FileNotFoundError: there is no such folder, and it cannot be a name on the hub.
        ImportError: huggingface_hub is missing.
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
    """The content of ``config.json``.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no JSON, or no mapping.
    """
    path = folder / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{folder} has no config.json")
    content = _json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} must be a mapping, got {type(content).__name__}")
    return content


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder: of ``model.safetensors``, else of the files that an index names, else of every file.

    Raises:
        FileNotFoundError: a file that the index names.
        ValueError: a file that is cut short, two files with tensors of one name, or an index that does not map tensors
            to files.
    """
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.is_file():
        files = [whole]
    elif index.is_file():
        files = [folder / name for name in sorted(_named(index))]
    else:
        files = sorted(folder.glob("*.safetensors"))
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            add_tensors(tensors, load_file(file), file)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}. Copy it again") from error
    return tensors


def add_tensors(tensors: dict[str, Tensor], more: Mapping[str, Tensor], file: Path) -> None:
    """Add those of a file; ValueError if one of them has been read from another file."""
    if twice := sorted(tensors.keys() & more.keys()):
        raise ValueError(f"{file} has {twice[0]}, and so has another file: leave the files of one model in the folder")
    tensors.update(more)


def _named(index: Path) -> set[str]:
    """The files that an index names."""
    content = _json(index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(
            f"{index} must have a weight_map from tensors to files, such as {{'embedding': 'a.safetensors'}}"
        )
    return set(names.values())


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}. Copy it again") from error
