"""Checkpoints of a model and its optimizer: safetensors and JSON, written whole or not at all."""

import json
import os
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

KEPT = 2


@dataclass(frozen=True)
class Checkpoint:
    """What was read back.

    Attributes:
        path: the folder it came from.
        step: training steps that were done.
        meta: whatever the writer added.
        model: the model's state dict.
        optimizer: the optimizer's state dict.
    """

    path: Path
    step: int
    meta: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Any]


def save_checkpoint(
    directory: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, meta: dict[str, Any]
) -> Path:
    """Write ``directory/checkpoint-STEP`` and keep the one before it.

    The folder is written beside its place and renamed when it is complete, so that an interruption at any moment
    leaves the previous checkpoint whole.

    Args:
        directory: created if missing.
        step: training steps that are done.
        model: its state dict is written.
        optimizer: likewise.
        meta: JSON-serialisable values to find again, a configuration for instance.

    Returns:
        The new folder.

    Raises:
        ImportError: safetensors is missing; names the extra to install.
        TypeError: something in ``meta`` or the optimizer's settings is not JSON.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save_checkpoint(Path(folder), 10, model, optimizer, {"seed": 0})
        ...     load_latest(Path(folder)).step
        10
    """
    save_file = _safetensors("save_file")
    directory.mkdir(parents=True, exist_ok=True)
    target, unfinished = directory / f"checkpoint-{step:08d}", directory / "unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir()
    save_file(
        {name: t.detach().contiguous() for name, t in model.state_dict().items()},
        unfinished / "model.safetensors",
    )
    state = optimizer.state_dict()
    moments = {f"{i}.{name}": t for i, entry in state["state"].items() for name, t in entry.items()}
    save_file({name: t.detach().contiguous() for name, t in moments.items()}, unfinished / "optimizer.safetensors")
    record = {"step": step, "param_groups": state["param_groups"], "meta": meta}
    (unfinished / "checkpoint.json").write_text(json.dumps(record, indent=1))
    shutil.rmtree(target, ignore_errors=True)
    os.replace(unfinished, target)
    for old in [path for path in sorted(directory.glob("checkpoint-*")) if path < target][: 1 - KEPT]:
        shutil.rmtree(old)
    return target


def load_latest(directory: Path, device: torch.device | str = "cpu") -> Checkpoint | None:
    """The newest checkpoint that can be read; a damaged one is named in a warning and the one before is taken.

    Args:
        directory: where :func:`save_checkpoint` wrote.
        device: where the tensors go.

    Returns:
        The checkpoint, or None if there is none.

    Raises:
        ImportError: safetensors is missing; names the extra to install.
        RuntimeError: there are checkpoints and none can be read, or the device does not exist.
    """
    torch.empty(0, device=device)  # a device that does not exist is no damage
    damaged = []
    for path in sorted(directory.glob("checkpoint-*"), reverse=True):
        try:
            return _read(path, device)
        except (OSError, ValueError, KeyError, _safetensors("SafetensorError")) as error:
            warnings.warn(f"{path} is damaged ({type(error).__name__}: {error}): trying the one before", stacklevel=2)
            damaged.append(path.name)
    if damaged:
        raise RuntimeError(
            f"no checkpoint in {directory} can be read ({', '.join(damaged)}): remove them to start again"
        )
    return None


def _read(path: Path, device: torch.device | str) -> Checkpoint:
    load_file = _safetensors("load_file")
    record = json.loads((path / "checkpoint.json").read_text())
    state: dict[int, dict[str, Tensor]] = {}
    for name, tensor in load_file(path / "optimizer.safetensors", device=str(device)).items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = tensor
    optimizer = {"state": state, "param_groups": record["param_groups"]}
    model = load_file(path / "model.safetensors", device=str(device))
    return Checkpoint(path, record["step"], record["meta"], model, optimizer)


def _safetensors(name: str) -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError('checkpoints need safetensors: pip install "deqseq[examples]"') from error
    return safetensors.SafetensorError if name == "SafetensorError" else getattr(safetensors.torch, name)
