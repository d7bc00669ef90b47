"""Folders that are there whole or not at all, that notice damage, and that remove nothing which is not theirs."""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILES = ("model.safetensors", "training.safetensors", "checkpoint.json")
MANIFEST = "manifest.json"
DONE = re.compile(r"(checkpoint|replaced)-(\d{8,})")
LEFT_OVER = re.compile(r"unfinished-\d{8,}")


class DamagedCheckpoint(ValueError):
    """A checkpoint does not hold what was written."""


@contextmanager
def new_folder(directory: Path, step: int) -> Iterator[Path]:
    """A folder that becomes ``directory/checkpoint-STEP`` when its files are safely on the disk.

    It is filled under another name and renamed when it is complete, so that an interruption at any moment leaves what
    was there before. A checkpoint of the same step is set aside until then, under a name that is found too.

    Args:
        directory: created if missing. One process at a time may write there.
        step: steps that are done.

    Yields:
        The folder to fill with :data:`FILES`.

    Raises:
        FileExistsError: a folder of that name holds something else.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for path in directory.iterdir():
        if LEFT_OVER.fullmatch(path.name) and is_ours(path):
            remove(path)
    unfinished, target, replaced = (
        directory / f"{kind}-{step:08d}" for kind in ("unfinished", "checkpoint", "replaced")
    )
    for path in (unfinished, target, replaced):
        if os.path.lexists(path) and not is_ours(path):
            raise FileExistsError(f"{path} is in the way of a checkpoint, and holds something else: move it")
    unfinished.mkdir()
    try:
        yield unfinished
        _seal(unfinished)
    except BaseException:
        remove(unfinished)  # of a full disk, for instance
        raise
    if target.exists():
        if replaced.exists():  # an interruption left both
            remove(replaced)
        os.replace(target, replaced)
    os.replace(unfinished, target)
    _sync(directory)
    if replaced.exists():
        remove(replaced)


def finished(directory: Path) -> list[Path]:
    """The checkpoints of a directory, whole or damaged, the one of the most steps first."""
    paths = [path for path in directory.iterdir() if path.is_dir()] if directory.is_dir() else []
    matches = [(match, path) for path in paths if (match := DONE.fullmatch(path.name))]
    order = [(int(match[2]), match[1] == "checkpoint", path) for match, path in matches]
    return [path for *_, path in sorted(order, reverse=True)]


def prune(directory: Path, step: int, keep: int) -> None:
    """Remove all but so many of the checkpoints up to ``step``.

    Later ones stay: they belong to a run that was taken up again from before them. What lost a file, or its length, is
    not counted among those that are kept.
    """
    past = [path for path in finished(directory) if int(path.name.rpartition("-")[2]) <= step and is_ours(path)]
    kept = [path for path in past if _has_its_size(path)][:keep]
    for path in past:
        if path not in kept:
            remove(path)


def check_whole(folder: Path) -> None:
    """Read all of a checkpoint and compare it with what was written.

    Raises:
        DamagedCheckpoint: names the file that is missing or changed.
        OSError: it cannot be read.
    """
    manifest = _read_manifest(folder)
    for name in FILES:
        path, (size, checksum) = folder / name, manifest[name]
        if not path.exists():
            raise DamagedCheckpoint(f"{name} is missing")
        if path.stat().st_size != size:
            raise DamagedCheckpoint(f"{name} has {path.stat().st_size} bytes instead of {size}")
        if _checksum(path) != checksum:
            raise DamagedCheckpoint(f"{name} has other bytes than were written")


def is_ours(path: Path) -> bool:
    """Whether a path is a folder with files of a checkpoint and nothing else."""
    if path.is_symlink() or not path.is_dir():
        return False
    return all(part.name in (*FILES, MANIFEST) and part.is_file() and not part.is_symlink() for part in path.iterdir())


def remove(folder: Path) -> None:
    """Remove a checkpoint, its manifest first: an interruption leaves no half of it that looks whole."""
    for name in (MANIFEST, *FILES):
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def _seal(folder: Path) -> None:
    """Write down sizes and checksums, and see everything onto the disk."""
    manifest = {name: [(folder / name).stat().st_size, _checksum(folder / name)] for name in FILES}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for name in (*FILES, MANIFEST):
        _sync(folder / name)
    _sync(folder)


def _read_manifest(folder: Path) -> dict[str, tuple[int, str]]:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return {name: (int(manifest[name][0]), str(manifest[name][1])) for name in FILES}
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{MANIFEST} is missing") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DamagedCheckpoint(f"{MANIFEST} is no list of sizes and checksums") from error


def _has_its_size(folder: Path) -> bool:
    try:
        return all((folder / name).stat().st_size == size for name, (size, _) in _read_manifest(folder).items())
    except (DamagedCheckpoint, OSError):
        return False


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """See a file, or the names in a folder, onto the disk."""
    if os.name == "nt" and path.is_dir():  # Windows opens no folders
        return
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
