"""The tensors in a folder of safetensors."""

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from deqseq.integrations.reference_fields import Fields


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder; if it has an index, only those of the files that this names.

    Raises:
        FileNotFoundError: a file that the index names.
        ValueError: a file that is cut short, or an index without a ``weight_map``.
    """
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        names = Fields(json.loads(index.read_text()), f"{index}: ").get("weight_map").values()
        files = [folder / name for name in sorted(set(names))]
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except SafetensorError as error:
            raise ValueError(f"{file} cannot be read: {error}. Copy it again") from error
    return tensors
