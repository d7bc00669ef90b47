"""What scripts share: the command line, the folder of a run, whole files, tables."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import tyro
from filelock import FileLock, Timeout

from deqseq.arguments import Within, check_integer

T = TypeVar("T")
RECORD, LOCK = "options.json", ".lock"


def flag(name: str) -> str:
    """An option as the command line has it."""
    return f"--{name.replace('_', '-')}"


def check_numbers(options: Any) -> None:
    """Refuse numbers outside ``options.LEAST``, by default 1, and ``options.INTERVALS``."""
    for name, value in vars(options).items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and not isinstance(number, bool):
                check_integer(flag(name), number, options.LEAST.get(name, 1), 10**9)
            if isinstance(number, float):
                Within(options.INTERVALS.get(name, "(0, inf)"))(flag(name), number)


def read_options(
    kind: type[T],
    arguments: Sequence[str],
    quick: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> T:
    """Read a command line into a dataclass with other ``defaults``, which ``--quick`` changes."""
    changed = {**(defaults or {}), **(quick if "--quick" in arguments else {})}
    options: Any = tyro.cli(
        kind, args=arguments, default=kind(**changed), config=(tyro.conf.FlagCreatePairsOff,)
    )
    return options


@contextmanager
def naming(option: str, error: type[BaseException] = ValueError) -> Iterator[None]:
    """Raise another ``error``, which names the option, where something cannot be read."""
    try:
        yield
    except (OSError, ValueError) as refused:
        raise error(f"{option}: {refused}") from refused


def is_main() -> bool:
    """Whether this is the first or only process of a run."""
    return os.environ.get("RANK", "0") == "0"


def check_folder(script: str, options: Any, folder: Path) -> dict[str, Any]:
    """The record of a run, for a folder with only a run of these options; writes nothing.

    ``options.FREE`` names the options that may change when a run is continued.
    """
    record = json.loads(json.dumps({"script": script, "options": asdict(options)}))
    try:
        if (
            not is_main()
            or not folder.exists()
            or not {path.name for path in folder.iterdir()} - {LOCK}
        ):
            return record
        theirs = json.loads((folder / RECORD).read_text())
        owner, before = theirs["script"], dict(theirs["options"])
    except NotADirectoryError as error:
        raise SystemExit(
            f"--output {folder} cannot be used ({error}): give another folder"
        ) from error
    except (OSError, ValueError, KeyError, TypeError):
        owner, before = None, {}
    if owner != script:
        raise SystemExit(
            f"--output {folder} holds files, but no run of {script}: give another folder"
        )
    mine = record["options"]
    changed = [name for name in mine if name not in options.FREE and before.get(name) != mine[name]]
    if changed:
        changes = ", ".join(f"{name}: {before.get(name)!r} -> {mine[name]!r}" for name in changed)
        raise SystemExit(
            f"--output {folder} holds a run with other options ({changes}): give another folder"
        )
    return record


@contextmanager
def claimed_folder(script: str, options: Any, folder: Path) -> Iterator[None]:
    """Make or enter the folder of a run, in the main process; it is locked meanwhile."""
    if not is_main():
        yield
        return
    record = check_folder(script, options, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK)
        lock.acquire(blocking=False)
    except Timeout:
        raise SystemExit(
            f"another process is running in --output {folder}: wait for it, or give another"
        ) from None
    except OSError as error:
        raise SystemExit(
            f"--output {folder} cannot be used ({error}): give another folder"
        ) from error
    try:
        write_whole(folder / RECORD, json.dumps(record, indent=1))
        yield
    except KeyboardInterrupt:
        raise SystemExit(
            "\nstopped: run the same command again to go on from the last checkpoint"
        ) from None
    finally:
        lock.release()


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all."""
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def write_rows(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the numbers of a run, ``results.json``."""
    write_whole(folder / "results.json", json.dumps(rows, indent=1))


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|---" * len(header) + "|"]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])
