"""The output folder of a run, and its log."""

import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout
from tqdm import tqdm

from common.options import check_output

T = TypeVar("T")
OPTIONS, LOCK = "options.json", ".lock"

_locks: dict[Path, FileLock] = {}  # held until the process ends


class FolderError(SystemExit):
    """The output folder cannot be used; the message says why and what to do. Uncaught, it ends the script."""


def claim_folder(
    path: str | os.PathLike[str],
    script: str,
    options: Mapping[str, Any],
    *,
    fresh: bool = False,
    free: Collection[str] = (),
    writes: Collection[str] = (),
) -> Path:
    """Make or enter the output folder of a run; it belongs to a script, its options, and one running process.

    Everything is checked before anything is written. The folder stays locked until the process ends. With several
    processes, call this in the main one alone.

    Args:
        path: of the folder; made if missing.
        script: the name of the script.
        options: everything that decides the run, as JSON; kept in ``options.json``.
        fresh: remove what an earlier run wrote (``writes``), whatever its options; everything else stays.
        free: the names of options that may change when a run is continued, as ``"device"``.
        writes: the files that the script writes, as globs relative to the folder: ``"results.json"``,
            ``"implicit/checkpoint-*/*"``.

    Raises:
        FolderError: the path is empty, a file, a symbolic link or closed; the folder holds files but no run, or the
            run of another script, or one with other options (names them); another process is using it.
    """
    folder, mine = Path(path), json.loads(json.dumps(dict(options)))
    try:
        check_output("--output", os.fspath(path))
        check_owner(folder, script, mine, free=free, fresh=fresh)
        folder.mkdir(parents=True, exist_ok=True)
        _take_lock(folder)
    except ValueError as error:
        raise FolderError(str(error)) from error
    except OSError as error:
        raise FolderError(f"--output {folder} cannot be used ({error}): give another folder") from error
    check_owner(folder, script, mine, free=free, fresh=fresh)  # another process may have written in between
    if fresh:
        _remove_written(folder, {*writes, OPTIONS})
    write_json(folder / OPTIONS, {"script": script, "options": mine})
    return folder


def check_owner(
    folder: Path, script: str, options: Mapping[str, Any], *, free: Collection[str] = (), fresh: bool = False
) -> None:
    """Refuse a folder that holds something else than a run of this script with these options; see claim_folder."""
    mine = json.loads(json.dumps(dict(options)))
    if not folder.exists() or not {part.name for part in folder.iterdir()} - {LOCK, f"{OPTIONS}.unfinished"}:
        return
    try:
        record = json.loads((folder / OPTIONS).read_text())
        owner, theirs = str(record["script"]), dict(record["options"])
    except (OSError, ValueError, KeyError, TypeError):
        raise FolderError(
            f"--output {folder} holds files but no run (no {OPTIONS} of one): give another folder"
        ) from None
    if owner != script:
        raise FolderError(f"--output {folder} holds a run of {owner}, not of {script}: give another folder")
    changed = [name for name in {**mine, **theirs} if name not in free and theirs.get(name) != mine.get(name)]
    if changed and not fresh:
        changes = ", ".join(f"{name}: {theirs.get(name)!r} -> {mine.get(name)!r}" for name in changed)
        raise FolderError(
            f"--output {folder} holds a run with other options ({changes}): give another folder, or add --fresh to "
            "remove that run's files"
        )


def _take_lock(folder: Path) -> None:
    place = folder.resolve()
    if place in _locks:
        return
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise FolderError(f"another process is running in --output {folder}: wait for it, or give another") from None
    _locks[place] = lock


def release_folder(folder: Path) -> None:
    """Unlock a folder before the process ends."""
    _locks.pop(folder.resolve()).release()


def _remove_written(folder: Path, writes: Collection[str]) -> None:
    """Remove files that match, and folders that become empty; symbolic links are neither followed nor removed."""
    for pattern in [*writes, *(f"{name}.unfinished" for name in writes)]:
        for path in list(folder.glob(pattern)):
            above = [parent for parent in path.parents if parent.is_relative_to(folder) and parent != folder]
            if path.is_dir() or any(part.is_symlink() for part in (path, *above)):
                continue
            path.unlink()
            for parent in above:
                if not any(parent.iterdir()):
                    parent.rmdir()


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    try:
        unfinished.write_text(text)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
    unfinished.replace(path)


def save_whole(folder: Path, *parts: Any) -> None:
    """Save models and tokenizers, by ``save_pretrained``, in one folder; nothing is replaced before all is written."""
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for part in parts:
        part.save_pretrained(unfinished)
    if not folder.exists():
        unfinished.replace(folder)
        return
    for path in unfinished.iterdir():
        path.replace(folder / path.name)
    unfinished.rmdir()


def write_json(path: Path, value: Any) -> None:
    """Write JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=1))


def log_to(path: Path) -> None:
    """Send the messages of :mod:`logging` to a file."""
    logging.basicConfig(filename=path, level=logging.INFO, format="%(asctime)s %(message)s", force=True)
    for noisy in ("accelerate", "matplotlib", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


class Progress:
    """Progress of a long task: a bar on a terminal, and a line every few seconds elsewhere.

    Args:
        name: of the task.
        total: where ``done`` ends; None: unknown, what is done is counted.
        seconds: between the lines.
        shown: False prints nothing, for all processes but the main one.
    """

    def __init__(self, name: str, total: float | None, *, seconds: float = 5.0, shown: bool = True) -> None:
        self.name, self.total, self.seconds, self.shown = name, total, seconds, shown
        self.done, self.begun = 0.0, time.monotonic()
        self.printed = self.begun
        shape = "{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}"
        self.bar = tqdm(total=total, desc=name, bar_format=shape) if shown and sys.stderr.isatty() else None

    def to(self, done: float, **numbers: Any) -> None:
        """Show how much is done, and some numbers."""
        now, self.done = time.monotonic(), done
        texts = {name: f"{value:.3g}" if isinstance(value, float) else str(value) for name, value in numbers.items()}
        if self.bar is not None:
            self.bar.update(done - self.bar.n)
            self.bar.set_postfix(texts)
        elif self.shown and (now - self.printed >= self.seconds or done == self.total):
            self.printed = now
            much = f"{done:g} done" if self.total is None else f"{done / self.total:.0%}"
            text = "".join(f", {name} {value}" for name, value in texts.items())
            print(f"{self.name}: {much} after {now - self.begun:.0f} s{text}", flush=True)

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """The items, each of which is done when the next one is asked for."""
        for item in items:
            yield item
            self.to(self.done + 1)

    def close(self) -> None:
        """End the bar."""
        if self.bar is not None:
            self.bar.close()


def curve_rows(path: Path) -> list[dict[str, Any]]:
    """All numbers that a :class:`Log` has written; a line that was cut off by a crash is left out."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


class Log:
    """The numbers of a run as it goes: ``curve.jsonl``, one line a logged step, and its progress.

    A run that goes on from a checkpoint repeats some steps: the lines from the first repeated step on are removed.

    Args:
        path: of the file; made when something is written.
        name: of the run, for the progress.
        total: of the progress, in steps unless :meth:`add` is told ``done``.
        shown: names of the numbers to show beside the progress.
        main: whether this is the main process; the others write and print nothing.
    """

    def __init__(
        self, path: Path, name: str, total: float, *, shown: Collection[str] = ("loss",), main: bool = True
    ) -> None:
        self.path, self.shown, self.main, self.begun = path, tuple(shown), main, False
        self.progress = Progress(name, total, shown=main)

    def add(self, numbers: Mapping[str, Any], done: float | None = None) -> None:
        """Append the numbers of a step, which ``numbers["step"]`` counts; None is left out."""
        if not self.main:
            return
        row = {name: value for name, value in numbers.items() if value is not None}
        if not self.begun and self.path.exists():
            kept = [old for old in curve_rows(self.path) if old["step"] < row["step"]]
            write_text(self.path, "".join(json.dumps(old) + "\n" for old in kept))
        self.begun = True
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        self.progress.to(row["step"] if done is None else done, **{n: row[n] for n in self.shown if n in row})

    def close(self) -> None:
        """End the progress bar."""
        self.progress.close()
