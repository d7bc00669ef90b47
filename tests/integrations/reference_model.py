"""The two small implicit models whose numbers tests/data holds, rebuilt from their own configurations and weights.

The files come from the paper's public reference code (float64, solved to 1e-14): logits at the fixed point, and the
gradients of the loss through four phantom steps.
"""

import json
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

import deqseq as dq
from deqseq.integrations.reference_config import from_reference_config
from deqseq.integrations.reference_weights import from_reference, from_reference_state

DATA = Path(__file__).parent / "data"
NAMES = ("mamba2", "llama")


def config(name: str) -> dict[str, Any]:
    """One model's configuration, in the reference's own format."""
    return json.loads((DATA / f"{name}.json").read_text())


def load(name: str) -> dict[str, Tensor]:
    """Every tensor of one model's file."""
    return load_file(DATA / f"{name}.safetensors")


def build(name: str, tensors: dict[str, Tensor]) -> dq.CausalLM:
    """Our model with the reference's weights."""
    return from_reference(config(name), under(tensors, "weight/"))


def gradients(name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The reference's gradients, by our names."""
    return from_reference_state(under(tensors, "grad/"), from_reference_config(config(name)))


def under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
