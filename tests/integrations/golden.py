"""The small models of other libraries in ``data``, and the numbers of their own code."""

import json
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

DATA = Path(__file__).parent / "data"


def config(name) -> dict[str, Any]:
    """One model's configuration, in its own format."""
    return json.loads((DATA / f"{name}.json").read_text())


@cache
def numbers(name):
    """Every tensor of one model's file."""
    return load_file(DATA / f"{name}.safetensors")


def tensors(name, part="weight"):
    """Its weights, or their gradients (``"grad"``), by their own names."""
    return {
        key.removeprefix(f"{part}/"): x
        for key, x in numbers(name).items()
        if key.startswith(f"{part}/")
    }
