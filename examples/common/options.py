"""Command lines: a dataclass of options, read by tyro, that checks itself."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import tyro

T = TypeVar("T")


def parse(kind: type[T], arguments: Sequence[str], default: T | None = None) -> T:
    """Read a command line into a dataclass of options; a ValueError of its ``__post_init__`` ends the script.

    Args:
        kind: the dataclass; its docstring is the description, a string below a field the help of that option.
        arguments: what follows the script's name.
        default: options to use where the command line has none.
    """
    config = (tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes)
    return tyro.cli(kind, args=arguments, default=default, config=config)  # type: ignore[return-value]


def check(options: object, wanted: str, is_good: Callable[[Any], bool], *names: str) -> None:
    """Check options, or each value of options that are tuples.

    Args:
        options: the dataclass.
        wanted: what the value must be, for the message.
        is_good: whether a value is.
        names: of the fields.

    Raises:
        ValueError: names the option, what it got and what it wants.
    """
    for name in names:
        value = getattr(options, name)
        for part in value if isinstance(value, tuple) else (value,):
            if not is_good(part):
                raise ValueError(f"--{name.replace('_', '-')} must be {wanted}, got {part!r}")


def check_counts(options: object, *names: str, least: int = 1, most: int = 10**9) -> None:
    """Check options that count something."""
    check(options, f"from {least} to {most:,}", lambda value: least <= value <= most, *names)


def check_positive(options: object, *names: str) -> None:
    """Check options that are finite numbers above 0."""
    check(options, "a finite number above 0", lambda value: 0 < value < math.inf, *names)


def check_device(options: object, name: str = "device") -> None:
    """Check that an option names a device of this machine."""
    kinds = ["cpu"] + [kind for kind in ("cuda", "xpu", "mps") if getattr(torch, kind).is_available()]
    check(options, f"one of {', '.join(kinds)}", lambda value: value in kinds, name)
