"""Checkpoints of the paper's reference code as models of transformers."""

import json
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from deqseq.integrations.checkpoints import from_reference
from deqseq.integrations.huggingface.conversion import from_causal_lm
from deqseq.integrations.huggingface.models import ImplicitLlamaForCausalLM, ImplicitMamba2ForCausalLM


def from_reference_folder(
    folder: str | PathLike[str], **fields: Any
) -> ImplicitMamba2ForCausalLM | ImplicitLlamaForCausalLM:
    """A model that the paper's reference code has saved.

    ``AutoConfig`` reads the reference's ``config.json`` as it is; its weights have other names, which this translates.
    ``save_pretrained`` of the result writes a checkpoint that ``AutoModelForCausalLM`` loads.

    Args:
        folder: with ``config.json`` and weights: ``*.safetensors``, or else ``pytorch_model*.bin``, of which tensors
            alone are read.
        **fields: of our configuration, of which the reference says nothing.

    Returns:
        The model in eval mode, its weights in the dtypes that they have.

    Raises:
        FileNotFoundError: no configuration, or no weights.
        ValueError: fields without an equivalent here, or weights that do not fit: all of them are named.

    References:
        Schöne et al., Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827, and its public code.

    Example:
        >>> from_reference_folder("nowhere")
        Traceback (most recent call last):
        FileNotFoundError: there is no config.json in nowhere
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"there is no config.json in {path}")
    config = json.loads((path / "config.json").read_text())
    tokens = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in config}
    return from_causal_lm(from_reference(config, _weights(path)), **tokens | fields).eval()


def _weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder, by the names in its files."""
    if files := sorted(path.glob("*.safetensors")):
        parts = [load_file(file) for file in files]
    elif files := sorted(path.glob("pytorch_model*.bin")):
        parts = [torch.load(file, map_location="cpu", weights_only=True) for file in files]
    else:
        raise FileNotFoundError(f"there are no weights in {path}: neither *.safetensors nor pytorch_model*.bin")
    return {name: tensor for part in parts for name, tensor in part.items()}
