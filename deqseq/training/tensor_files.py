"""Tensors by name in one safetensors file, tied ones once."""

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors so that they come back bit for bit.

    Args:
        path: of the file.
        tensors: by name, each of which :func:`~deqseq.training.trees.whole_tensor` has passed; of several that are
            the same memory, as tied weights, the file holds one, and the other names in its metadata.

    Raises:
        ImportError: safetensors is missing; names the extra to install.
    """
    kept: dict[str, Tensor] = {}
    first: dict[tuple[object, ...], str] = {}
    tied: dict[str, str] = {}
    for name, tensor in tensors.items():
        same = first.setdefault(_memory(tensor, name), name)
        if same == name:
            kept[name] = tensor.resolve_conj().resolve_neg().contiguous()
        else:
            tied[name] = same
    safetensors().torch.save_file(_apart(kept), path, metadata=tied)


def read_tensors(path: Path, device: torch.device | str) -> dict[str, Tensor]:
    """What :func:`write_tensors` wrote; tied names share one tensor.

    Args:
        path: of the file.
        device: where the tensors go.

    Returns:
        The tensors by name.

    Raises:
        ImportError: safetensors is missing; names the extra to install.
    """
    with safetensors().safe_open(path, framework="pt", device=str(device)) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return tensors | {name: tensors[same] for name, same in (file.metadata() or {}).items()}


def safetensors() -> ModuleType:
    """The library, which is an extra.

    Raises:
        ImportError: it is missing; names the extra to install.
    """
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError('checkpoints need safetensors: pip install "deqseq[examples]"') from error
    return safetensors


def _memory(tensor: Tensor, name: str) -> tuple[object, ...]:
    """What is equal for two tensors that are the same numbers at the same place."""
    if tensor.numel() == 0:
        return (name,)
    flags = (tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), flags)


def _apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of those that overlap in memory: safetensors refuses them."""
    seen: set[tuple[torch.device, int]] = set()
    result = {}
    for name, tensor in tensors.items():
        place = (tensor.device, tensor.untyped_storage().data_ptr())
        result[name] = tensor.clone() if place in seen and tensor.numel() else tensor
        seen.add(place)
    return result
