"""The folder of a run, which knows the options that it was begun with."""

import json
import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

OPTIONS = "config.json"


def claim_folder(
    folder: str | os.PathLike[str], options: Mapping[str, Any], *, free: Collection[str] = (), fresh: bool = False
) -> Path:
    """Make or enter the folder of a run, and refuse one whose run was begun with other options.

    Args:
        folder: made if missing.
        options: everything that decides the run, as JSON; written to ``config.json``.
        free: the names of options that may change when a run goes on: where it is, on what device, how often it saves.
        fresh: whether to remove what an earlier run has left there.

    Returns:
        The folder.

    Raises:
        FileExistsError: the folder holds files that are no run's.
        ValueError: a run with other options is there; names them.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     first = claim_folder(folder, {"steps": 5, "device": "cpu"}, free=["device"])
        ...     again = claim_folder(folder, {"steps": 5, "device": "cuda"}, free=["device"])
        ...     claim_folder(folder, {"steps": 6, "device": "cpu"}, free=["device"])  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ValueError: ...folder, or remove it
    """
    path = Path(folder)
    config, mine = path / OPTIONS, json.loads(json.dumps(dict(options)))
    if path.exists() and any(path.iterdir()) and not config.exists():
        raise FileExistsError(f"{path} holds files that are not a run's (no {OPTIONS}): give another folder")
    if fresh:
        shutil.rmtree(path, ignore_errors=True)
    path.mkdir(parents=True, exist_ok=True)
    theirs = json.loads(config.read_text()) if config.exists() else mine
    names = [name for name in {**mine, **theirs} if name not in free]
    changed = [name for name in names if theirs.get(name) != mine.get(name)]
    if changed:
        changes = ", ".join(f"{name}: {theirs.get(name)!r} -> {mine.get(name)!r}" for name in changed)
        raise ValueError(f"{path} holds a run with other options ({changes}): give another folder, or remove it")
    unfinished = path / f"{OPTIONS}.unfinished"
    unfinished.write_text(json.dumps(mine, indent=1))
    unfinished.replace(config)
    return path
