"""The tensors in a folder of safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor


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
    try:
        content = json.loads(index.read_text())
    except ValueError as error:
        raise ValueError(f"{index} is no JSON: {error}. Copy it again") from error
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(
            f"{index} must have a weight_map from tensors to files, such as {{'embedding': 'a.safetensors'}}"
        )
    return set(names.values())
