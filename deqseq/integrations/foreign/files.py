"""Models of other libraries from their files, or from a configuration and a state dict."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from deqseq.arguments import PositiveInt, check_type, checked
from deqseq.integrations.foreign.engine import described, loaded
from deqseq.integrations.foreign.pretrained import PRETRAINED
from deqseq.integrations.foreign.recurrent_depth import RECURRENT
from deqseq.integrations.foreign.reference import REFERENCE
from deqseq.models import CausalLM

SAFETENSORS = "*.safetensors"
PICKLES = "pytorch_model*.bin"
"""Names of files of weights."""


@checked
def from_pretrained(
    folder_or_name: str | PathLike[str],
    dtype: torch.dtype | None = None,
    *,
    revision: str | None = None,
    steps: PositiveInt | None = None,
) -> CausalLM:
    """A model of another library, from its ``config.json`` and weights, without its code.

    - Huginn-0125 and the retrofitted Llama and OLMo 2 models become a
      :class:`deqseq.RecurrentDepth`. By default its core is solved to a relative tolerance of 1e-3,
      within 4 times its mean depth, from zero. With ``steps`` it runs as its authors do: that many
      times, from random states, with a cache for each step.
    - Ouro becomes an :class:`deqseq.ExplicitModel` of a :class:`deqseq.Looped` stack, because it
      has no fixed point. Its exit gate is left out: at the threshold of the released files, 1,
      every token takes all loops.
    - Models of the paper's reference code are solved as there, see :func:`from_reference_config`;
      Llama and Mamba2, transformers' or mamba_ssm's, are explicit and compute what those do.

    Args:
        folder_or_name: a folder, or a name on the hub, such as ``"tomg-group-umd/huginn-0125"``.
        dtype: of the weights. Default: as they are stored.
        revision: a branch, tag or commit on the hub.
        steps: how often the core or the layers run, at least 1. Default: a core is solved, Ouro
            runs ``total_ut_steps`` times, other models once.

    Returns:
        The model in eval mode.

    Raises:
        FileNotFoundError: no such folder, or no ``config.json`` or weights in it.
        ImportError: a name on the hub, without the extra ``hf``.
        ValueError: a ``dtype`` of integers; a configuration that deqseq cannot compute; a truncated
            file; tensors that are missing, unexpected or of another shape.

    References:
        Geiping et al., 2025, arXiv 2502.05171 (Huginn); McLeish et al., 2025, arXiv 2511.07384
        (retrofitted models); Zhu et al., 2025, arXiv 2510.25741 (Ouro); Schöne et al., 2025, arXiv
        2502.07827 (the paper).

    Example:
        >>> import torch
        >>> from deqseq.integrations.foreign import from_pretrained
        >>> lm = from_pretrained("tomg-group-umd/huginn-0125", torch.bfloat16)  # doctest: +SKIP
    """
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be a floating-point type, got {dtype}")
    folder = folder_of(folder_or_name, revision)
    lm = from_state(content_of(folder / "config.json"), tensors_in(folder), steps)
    return lm if dtype is None else lm.to(dtype)


@checked
def from_state(
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    steps: PositiveInt | None = None,
) -> CausalLM:
    """A model of another library from a parsed ``config.json`` and a state dict, such as those of a
    loaded model; :func:`from_pretrained` says what it becomes.

    Args:
        config: the configuration, as its own library writes it: ``model.config.to_dict()`` of
            transformers, ``vars(model.config)`` of mamba_ssm.
        state: the tensors, under the names of that library; they are copied.
        steps: as in :func:`from_pretrained`.

    Returns:
        The model in eval mode, its weights in their own dtypes.

    Raises:
        TypeError, ValueError: a configuration that deqseq cannot compute; tensors that are missing,
            unexpected, not finite or of another shape.

    Example:
        >>> import torch
        >>> from deqseq.integrations.foreign import from_state
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> sizes = {
        ...     "hidden_size": 16,
        ...     "intermediate_size": 32,
        ...     "num_attention_heads": 2,
        ...     "num_hidden_layers": 1,
        ... }
        >>> theirs = LlamaForCausalLM(LlamaConfig(vocab_size=10, **sizes))
        >>> lm = from_state(theirs.config.to_dict(), theirs.state_dict())
        >>> lm(torch.tensor([[1, 2, 3]])).logits.shape
        torch.Size([1, 3, 10])
    """
    foreign = described(config, state, PRETRAINED | RECURRENT | REFERENCE)
    if steps is not None:
        spec = foreign.spec
        start = spec.loop_start if spec.solve is None else spec.solve.start
        spec = replace(spec, solve=None, eval_solve=None, steps=steps, loop_start=start)
        foreign = foreign._replace(spec=spec)
    return loaded(foreign, state).eval()


def folder_of(folder_or_name: str | PathLike[str], revision: str | None) -> Path:
    """The folder itself, or the one into which the model of this name is downloaded."""
    folder = Path(folder_or_name)
    name = str(folder_or_name)
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"\w[\w.-]*/[\w.-]+", name):
        raise FileNotFoundError(
            f"folder_or_name: there is no folder {folder}; a name on the hub is 'owner/model'"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ImportError(
            'loading from the hub needs huggingface_hub: pip install "deqseq[hf]"'
        ) from error
    files = ["config.json", "*.index.json", SAFETENSORS, PICKLES]
    return Path(snapshot_download(name, revision=revision, allow_patterns=files))


def content_of(file: Path) -> dict[str, Any]:
    """The mapping in a file of JSON or tensors; ValueError if it cannot be read."""
    if file.is_dir():
        raise ValueError(f"{file} must be a file, it is a folder")
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        if file.suffix == ".bin":
            return torch.load(file, map_location="cpu", weights_only=True)
        content = json.loads(file.read_text())
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}. Copy it again") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must be a mapping, got {type(content).__name__}")
    return content


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder.

    They are those of ``model.safetensors``, else of the files in an index, else of all other files
    of weights.
    """
    whole = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if whole.exists():
        files = [whole]
    elif index.exists():
        shards = content_of(index).get("weight_map") or {}
        check_type(f"'weight_map' of {index}", shards, Mapping)
        names = sorted({str(name) for name in shards.values()})
        for name in names:
            if Path(name).is_absolute() or ".." in Path(name).parts:
                raise ValueError(f"{index} must name files of its folder, got {name!r}")
        files = [folder / name for name in names]
    else:
        files = sorted(folder.glob(SAFETENSORS)) or sorted(folder.glob(PICKLES))
    if not files:
        raise FileNotFoundError(
            f"there are no weights in {folder}: neither {SAFETENSORS} nor {PICKLES}"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in content_of(file).items():
            if name in tensors:
                raise ValueError(
                    f"{file} has {name}, and so has another file: leave only those of one model "
                    "there"
                )
            tensors[name] = tensor
    return tensors
