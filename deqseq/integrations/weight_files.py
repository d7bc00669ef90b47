"""The tensors in a folder of safetensors."""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder; if it has an index, only those of the files that this names.

    Raises:
        FileNotFoundError: a file that the index names.
        ValueError: a file that is cut short, or an index that does not map tensors to files.
    """
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        files = [folder / name for name in sorted(_named(index))]
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}. Copy it again") from error
    return tensors


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
