"""Checkpoints that are there whole or not at all: accelerate's ``save_state`` inside an atomic rename.

``FOLDER/checkpoint-STEP`` holds accelerate's files (weights as safetensors, optimizer, random states), the loop's own
state in ``progress.json``, and the sizes and checksums of all of them in ``manifest.json``. Nothing is unpickled
without ``weights_only=True``: accelerate loads all of these so (but not what ``register_for_checkpointing`` adds, which
is therefore not used).
"""

import hashlib
import json
import os
import re
import warnings
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

PROGRESS, MANIFEST = "progress.json", "manifest.json"
WRITTEN = ("model.safetensors", "pytorch_model_fsdp.bin", "optimizer.bin", "scaler.pt", "random_states_[0-9]*.pkl")
WRITTEN += (PROGRESS, MANIFEST, ".tmp" + "[0-9A-Za-z]" * 6)  # the last is safetensors', until it has written all
FILES = tuple(f"{name}-{'[0-9]' * 8}*/{file}" for name in ("checkpoint", "unfinished") for file in WRITTEN)
"""The files of checkpoints in a folder, as ``writes`` of :func:`common.run.claim_folder` names them."""
KEPT = 2  # one is left when the newest is damaged
DONE = re.compile(r"checkpoint-(\d{8,})")
LEFT_OVER = re.compile(r"unfinished-\d{8,}")


class DamagedCheckpointWarning(UserWarning):
    """A checkpoint is damaged, and the one before it is used."""


def save(accelerator: Accelerator, folder: Path, step: int, extra: dict[str, Any]) -> None:
    """Write ``folder/checkpoint-STEP`` and remove all but the last two; every process must call this.

    The files are written into another folder, flushed to the disk, and the folder is renamed: a run that is killed at
    any moment leaves the checkpoint before whole. Folders that hold other files are never removed.

    Args:
        accelerator: has prepared the model and the optimizer.
        folder: of the run's checkpoints; made if missing.
        step: updates that are done.
        extra: more to find again, as JSON.

    Raises:
        FileExistsError: a folder of that name holds other files.
    """
    unfinished, target = folder / f"unfinished-{step:08d}", folder / f"checkpoint-{step:08d}"
    if accelerator.is_main_process:
        _make_room(folder, unfinished, target)
    accelerator.wait_for_everyone()
    try:
        accelerator.save_state(str(unfinished))
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            (unfinished / PROGRESS).write_text(json.dumps({"step": step, **extra}, indent=1))
            _seal(unfinished)
    except BaseException:
        if accelerator.is_main_process:
            _remove(unfinished)  # the disk is full, for instance
        raise
    if accelerator.is_main_process:
        if target.exists():
            _remove(target)  # a damaged one, whose steps the run has repeated
        os.replace(unfinished, target)
        _flush(folder)
        prune(folder, step)
    accelerator.wait_for_everyone()


def resume(accelerator: Accelerator, folder: Path) -> dict[str, Any] | None:
    """Load the newest whole checkpoint into what the accelerator has prepared; every process must call this.

    Args:
        accelerator: has prepared a model and an optimizer like those that were saved.
        folder: of the run's checkpoints.

    Returns:
        What :func:`save` got as ``extra``, and ``"step"``; None: there is no checkpoint.

    Raises:
        RuntimeError: there are checkpoints, and all are damaged.

    Warns:
        DamagedCheckpointWarning: names a checkpoint that is skipped, and what is wrong with it.
    """
    found = [str(newest(folder) or "") if accelerator.is_main_process else ""]
    path = Path(broadcast_object_list(found)[0])
    if not path.name:
        return None
    accelerator.load_state(str(path))
    return json.loads((path / PROGRESS).read_text())


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a folder; reads all of it, and warns of damaged ones like :func:`resume`."""
    damaged = []
    for path in _finished(folder):
        problem = _damage(path)
        if problem is None:
            return path
        message = f"{path} is damaged ({problem}): trying the one before"
        warnings.warn(message, DamagedCheckpointWarning, stacklevel=3)
        damaged.append(path.name)
    if damaged:
        raise RuntimeError(f"no checkpoint in {folder} is whole ({', '.join(damaged)}): remove them to start again")
    return None


def _finished(folder: Path) -> list[Path]:
    """The checkpoints of a folder, whole or damaged, that of the most steps first."""
    paths = [path for path in folder.iterdir() if DONE.fullmatch(path.name)] if folder.is_dir() else []
    return sorted((path for path in paths if path.is_dir()), key=lambda path: int(path.name[11:]), reverse=True)


def _make_room(folder: Path, unfinished: Path, target: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if LEFT_OVER.fullmatch(path.name) and _is_ours(path):
            _remove(path)
    for path in (unfinished, target):
        if os.path.lexists(path) and not _is_ours(path):
            raise FileExistsError(f"{path} is in the way of a checkpoint and holds other files: move it")
    unfinished.mkdir()


def prune(folder: Path, step: int) -> None:
    """Remove all but the last two checkpoints up to ``step``; those with missing or cut files are not counted."""
    past = [path for path in _finished(folder) if int(path.name[11:]) <= step and _is_ours(path)]
    kept = [path for path in past if _damage(path, contents=False) is None][:KEPT]
    for path in past:
        if path not in kept:
            _remove(path)


def _is_ours(path: Path) -> bool:
    """Whether a path is a folder with files of a checkpoint and nothing else."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(_is_written(part) and part.is_file() and not part.is_symlink() for part in path.iterdir())


def _is_written(path: Path) -> bool:
    return any(fnmatchcase(path.name, name) for name in WRITTEN)


def _remove(path: Path) -> None:
    """Remove a checkpoint, its manifest first, so that a kill in between leaves nothing that looks whole."""
    for part in sorted(path.iterdir(), key=lambda part: part.name != MANIFEST):
        part.unlink()
    path.rmdir()


def _seal(path: Path) -> None:
    """Write sizes and checksums, and flush everything to the disk."""
    manifest = {part.name: [part.stat().st_size, _checksum(part)] for part in sorted(path.iterdir())}
    (path / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for part in path.iterdir():
        _flush(part)
    _flush(path)


def _damage(path: Path, contents: bool = True) -> str | None:
    """What is wrong with a checkpoint; None: it is whole."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = {str(name): (int(size), str(checksum)) for name, (size, checksum) in manifest.items()}
    except OSError:
        return f"{MANIFEST} is missing"
    except (ValueError, TypeError, AttributeError):
        return f"{MANIFEST} is no list of sizes and checksums"
    for name in {PROGRESS, *files}:
        part = path / name
        if name not in files or not part.is_file():
            return f"{name} is missing"
        if part.stat().st_size != files[name][0]:
            return f"{name} has {part.stat().st_size} bytes instead of {files[name][0]}"
        if contents and _checksum(part) != files[name][1]:
            return f"{name} has other bytes than were written"
    return None


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
