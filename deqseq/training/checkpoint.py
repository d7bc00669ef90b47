"""Checkpoints of a run: safetensors and JSON, no pickle, written whole or not at all."""

import json
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from deqseq.training.checkpoint_folders import check_whole, finished, new_folder, prune
from deqseq.training.guard import check_weights
from deqseq.training.random_state import random_state, restore_random_state
from deqseq.training.tensor_files import read_tensors, safetensors, write_tensors
from deqseq.training.trees import joined, split, whole_tensor


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint is damaged, and the one before it is used."""


@dataclass(frozen=True)
class Checkpoint:
    """What was read back.

    Attributes:
        path: the folder it came from.
        step: training steps that were done.
        meta: whatever the writer added.
        model: the model's state dict.
        optimizer: the optimizer's state dict.
        scheduler: the learning-rate scheduler's state dict; None: there was none.
        position: where the data stood, in the writer's terms.
        phase: what :meth:`Curriculum.record` gave; None: there was no curriculum.
        random: what :func:`random_state` gave.
    """

    path: Path
    step: int
    meta: dict[str, Any]
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    scheduler: dict[str, Any] | None
    position: Any
    phase: dict[str, Any] | None
    random: dict[str, Any]

    def restore(self, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None = None) -> None:
        """Bring a run of one process back to where it was: weights, optimizer, scheduler, random numbers.

        Check the curriculum with ``curriculum.resumed(checkpoint.phase)``, and wind the data on to ``position``.

        Args:
            model: takes the weights.
            optimizer: made as the saved one was, of the model's parameters.
            scheduler: likewise; None if the run has none.

        Raises:
            ValueError: there is a scheduler and the checkpoint has none, or the other way round; or another
                optimizer's groups.
            RuntimeError: another model's weights.
        """
        if (scheduler is None) != (self.scheduler is None):
            holds, given = ("no" if state is None else "a" for state in (self.scheduler, scheduler))
            raise ValueError(f"{self.path} holds {holds} scheduler's state, and {given} scheduler was given")
        model.load_state_dict(self.model)
        optimizer.load_state_dict(self.optimizer)
        if scheduler is not None:
            scheduler.load_state_dict(self.scheduler or {})
        restore_random_state(self.random)


def save_checkpoint(
    directory: str | os.PathLike[str],
    step: int,
    model: nn.Module | Mapping[str, Tensor],
    optimizer: Optimizer | Mapping[str, Any],
    meta: Mapping[str, Any] | None = None,
    *,
    scheduler: LRScheduler | Mapping[str, Any] | None = None,
    position: Any = None,
    phase: Mapping[str, Any] | None = None,
    keep: int = 2,
) -> Path:
    """Write ``directory/checkpoint-STEP``, and remove all but the last few.

    The folder is written beside its place, seen onto the disk, and renamed when it is complete, so that an
    interruption at any moment leaves the checkpoint before whole. It holds ``model.safetensors``,
    ``training.safetensors``, ``checkpoint.json`` and their checksums in ``manifest.json``, besides the random state of
    this process. A folder that holds anything else is never touched.

    With several processes gather whole state dicts, for FSDP by ``torch.distributed.checkpoint.state_dict``, and call
    this on rank 0 alone; the random states of the other ranks can go into ``meta``.

    Args:
        directory: created if missing; for one run, and one writer at a time.
        step: training steps that are done, at least 0.
        model: a module, or its state dict.
        optimizer: an optimizer, or its state dict.
        meta: plain values to find again, a configuration for instance.
        scheduler: a learning-rate scheduler of torch, or its state dict; None: the run has none.
        position: where the data stand, so that a resumed run goes on with the next batch: plain values and tensors.
        phase: ``curriculum.record(progress)``; None: the run has no curriculum.
        keep: how many checkpoints stay, at least 1; with 2 there is one left when the newest is damaged.

    Returns:
        The new folder.

    Raises:
        ImportError: safetensors is missing; names the extra to install.
        FloatingPointError: weights that are not finite; nothing is written and the last good checkpoint is named.
        TypeError: something that no checkpoint can hold; says where.
        ValueError: a negative step, or nothing to keep.
        FileExistsError: a folder of that name holds something else.

    Example:
        >>> import tempfile
        >>> model = nn.Linear(2, 2)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = save_checkpoint(folder, 10, model, optimizer, {"seed": 0})
        ...     saved = load_latest(folder)
        >>> saved.step, saved.meta
        (10, {'seed': 0})
        >>> saved.restore(model, optimizer)
    """
    folder = Path(directory)
    for name, value, least in (("step", step, 0), ("keep", keep, 1)):
        if isinstance(value, bool) or value < least:
            raise ValueError(f"save_checkpoint: {name} must be an integer >= {least}, got {value!r}")
    safetensors()
    weights = {
        name: _weight(name, tensor)
        for name, tensor in (model.state_dict() if isinstance(model, nn.Module) else model).items()
    }
    check_weights(weights, step, folder)
    state = {
        "step": step,
        "meta": dict(meta or {}),
        "optimizer": optimizer.state_dict() if isinstance(optimizer, Optimizer) else optimizer,
        "scheduler": scheduler.state_dict() if isinstance(scheduler, LRScheduler) else scheduler,
        "position": position,
        "phase": phase,
        "random": random_state(),
    }
    record, tensors = split(state, "training")
    with new_folder(folder, step) as unfinished:
        write_tensors(unfinished / "model.safetensors", weights)
        write_tensors(unfinished / "training.safetensors", tensors)
        (unfinished / "checkpoint.json").write_text(json.dumps(record, indent=1))
    prune(folder, step, keep)
    return folder / f"checkpoint-{step:08d}"


def load_latest(directory: str | os.PathLike[str], device: torch.device | str = "cpu") -> Checkpoint | None:
    """The newest checkpoint that is whole; a damaged one is named in a warning and the one before is taken.

    Everything is read and compared with its checksum first.

    Args:
        directory: where :func:`save_checkpoint` wrote.
        device: where the tensors go.

    Returns:
        The checkpoint, or None if there is none.

    Raises:
        ImportError: safetensors is missing; names the extra to install.
        RuntimeError: there are checkpoints and none can be read, or the device does not exist.

    Warns:
        DamagedCheckpointWarning: names a damaged checkpoint.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     load_latest(folder) is None     # nothing has been saved: begin
        True
    """
    safetensors()
    torch.empty(0, device=device)  # a device that does not exist is no damage
    damaged = []
    for path in finished(Path(directory)):
        try:
            check_whole(path)
        except (OSError, ValueError) as error:
            message = f"{path} is damaged ({error}): trying the one before"
            warnings.warn(message, DamagedCheckpointWarning, stacklevel=2)
            damaged.append(path.name)
            continue
        return _read(path, device)
    if damaged:
        raise RuntimeError(
            f"no checkpoint in {directory} can be read ({', '.join(damaged)}): remove them to start again"
        )
    return None


def _weight(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise TypeError(f"a checkpoint cannot hold {name} of the model, a {type(value).__name__}")
    return whole_tensor(value, name)


def _read(path: Path, device: torch.device | str) -> Checkpoint:
    record = json.loads((path / "checkpoint.json").read_text())
    state = joined(record, read_tensors(path / "training.safetensors", device))
    return Checkpoint(path=path, model=read_tensors(path / "model.safetensors", device), **state)
