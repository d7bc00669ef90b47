"""Command lines: a dataclass of options, read by tyro, whose annotations say what each value must be.

``lr: Positive = 1e-3`` is a finite number above 0, once ``__post_init__`` calls :func:`check_options`. A value that
breaks its rule ends the script before anything is computed or written.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
import tyro
from safetensors import SafetensorError

from deqseq.check import check_choice, check_flag, check_integer, check_number, check_type

T = TypeVar("T")


def parse(
    kind: type[T],
    arguments: Sequence[str],
    idle: Callable[[T], Mapping[str, Sequence[str]]] = lambda options: {},
    **settings: Mapping[str, Any],
) -> T:
    """Read a command line into a dataclass of options; a ValueError of its ``__post_init__`` ends the script.

    Args:
        kind: the dataclass; its docstring is the description, a string below a field the help of that option.
        arguments: what follows the script's name.
        idle: options that have no effect, by what makes them so; one that the command line has ends the script.
        **settings: other defaults, by the name of the flag that chooses them.
    """
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
    default = next((kind(**values) for name, values in settings.items() if f"--{name}" in arguments), None)
    options: Any = tyro.cli(kind, args=arguments, default=default, config=config)
    given = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    for why, names in idle(options).items():
        for name in (f"--{name.replace('_', '-')}" for name in names):
            if name in given:
                raise SystemExit(f"{name} has no effect {why}: leave it out")
    return options


@contextmanager
def naming(option: str) -> Iterator[None]:
    """End the script where something cannot be read, with the option that named it."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        raise SystemExit(f"{option}: {error}") from error


@dataclass(frozen=True)
class Rule:
    """What a value must be, in the annotation of an option.

    Args:
        check: ``check(name, value)`` raises a ValueError that names the option.
    """

    check: Callable[[str, Any], None]


def check_options(options: object) -> None:
    """Check all fields of a dataclass of options by their annotations, those with a :class:`Rule` by it.

    Raises:
        TypeError: a value of another type than the field's.
        ValueError: names the option, what it got and what it wants.
    """
    for name, hint in get_type_hints(type(options), include_extras=True).items():
        _check(f"--{name.replace('_', '-')}", getattr(options, name), hint)


def _check(name: str, value: Any, hint: Any) -> None:
    kind, parts = get_origin(hint), get_args(hint)
    if kind is Annotated:
        name = name[2:].upper() if tyro.conf.Positional in parts else name
        _check(name, value, parts[0])
        for rule in parts[1:]:
            if isinstance(rule, Rule):
                rule.check(name, value)
    elif kind in (Union, UnionType):  # with None
        if value is not None:
            _check(name, value, parts[0])
    elif kind is tuple:
        check_type(name, value, tuple)
        for part in value:
            _check(name, part, parts[0])
    elif kind is Literal:
        check_choice(name, value, parts)
    elif hint is bool:
        check_flag(name, value)
    elif hint is str:
        check_type(name, value, str)


# Rules


def integer(low: int, high: int) -> Rule:
    """An integer in ``low..high``."""
    return Rule(partial(check_integer, low=low, high=high))


def number(interval: str) -> Rule:
    """A number in an interval, as in ``"[0, 1)"``."""
    return Rule(partial(check_number, interval=interval))


def check_text(name: str, value: str) -> None:
    """Refuse an empty text."""
    if not value:
        raise ValueError(f"{name} must not be empty")


def check_some(name: str, value: tuple[object, ...]) -> None:
    """Refuse no values, and one that is given twice."""
    if not value:
        raise ValueError(f"{name} must have at least one value, got none")
    check_distinct(name, value)


def check_distinct(name: str, value: tuple[object, ...]) -> None:
    """Refuse a value that is given twice."""
    if twice := [part for part in dict.fromkeys(value) if value.count(part) > 1]:
        raise ValueError(f"{name} must have every value once, got {twice[0]!r} {value.count(twice[0])} times")


def check_ascending(name: str, value: tuple[int, ...]) -> None:
    """Refuse no values, and one that is not larger than the one before."""
    check_some(name, value)
    if list(value) != sorted(set(value)):
        raise ValueError(f"{name} must ascend, got {' '.join(map(str, value))}")


def check_device(name: str, value: str) -> None:
    """Refuse what is no device of this machine."""
    kinds = [kind for kind in ("cuda", "xpu", "mps") if getattr(torch, kind).is_available()]
    check_choice(name, value, ["cpu", *kinds])


def check_path(name: str, value: str) -> None:
    """Refuse what is neither a file nor a folder."""
    if not value or not Path(value).exists():
        raise ValueError(f"{name} must be a file or folder, there is no {value!r}")


def check_folder(name: str, value: str) -> None:
    """Refuse what is no folder."""
    check_path(name, value)
    if not Path(value).is_dir():
        raise ValueError(f"{name} must be a folder, got the file {value!r}")


def check_pretrained(name: str, value: str) -> None:
    """Refuse what is neither a folder nor a name as the hub has them; whether the hub has it is not asked."""
    check_text(name, value)
    if Path(value).is_file():
        raise ValueError(f"{name} must be a folder or a name on the hub, got the file {value!r}")
    if not Path(value).is_dir() and not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", value):
        raise ValueError(f"{name} must be a folder or a name on the hub, there is no folder {value!r}")


def check_output(name: str, value: str) -> None:
    """Refuse what cannot be a folder to write into: an empty path, a symbolic link, a file, a closed folder."""
    check_text(name, value)
    folder = Path(value)
    try:
        if folder.is_symlink():
            raise ValueError(f"{name} {value} is a symbolic link: give the folder that it points to")
        nearest = next(path for path in (folder, *folder.parents) if path.exists())
        if not nearest.is_dir():
            raise ValueError(f"{name} {value} cannot be a folder, {nearest} is a file: give another path")
        if not os.access(nearest, os.W_OK | os.X_OK):
            raise ValueError(f"{name} {value} cannot be written, {nearest} is closed to you: give another folder")
    except OSError as error:
        raise ValueError(f"{name} {value} cannot be a folder ({error.strerror}): give another path") from error


Count = Annotated[int, integer(1, 10**9)]
Natural = Annotated[int, integer(0, 10**9)]
Size = Annotated[int, integer(1, 2**20)]  # of a dimension of tensors
Blocks = Annotated[int, integer(1, 1000)]
Positive = Annotated[float, number("(0, inf)")]
NotNegative = Annotated[float, number("[0, inf)")]
Probability = Annotated[float, number("[0, 1]")]
Damping = Annotated[float, number("(0, 1]")]
Share = Annotated[float, number("(0, 1)")]
Text = Annotated[str, Rule(check_text)]
Device = Annotated[str, Rule(check_device)]
Existing = Annotated[str, Rule(check_path)]
Folder = Annotated[str, Rule(check_folder)]
Pretrained = Annotated[str, Rule(check_pretrained)]
Output = Annotated[str, Rule(check_output)]
Some, Distinct, Ascending = Rule(check_some), Rule(check_distinct), Rule(check_ascending)
