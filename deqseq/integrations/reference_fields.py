"""Reading another library's configuration so that no field is overlooked."""

import math
from collections.abc import Mapping
from typing import Any, NoReturn

from deqseq.check import check_known, check_type, suggestion

_REQUIRED = object()


class Fields:
    """The fields of a configuration: each is read, known to change nothing, or refused with a reason.

    Every method raises a ValueError that begins with ``where`` and names the field.

    Args:
        content: the configuration.
        where: how errors begin.

    Example:
        >>> fields = Fields({"width": 4, "hieght": 2}, "toy configuration: ")
        >>> fields.integer("width"), fields.integer("height", 1)
        (4, 1)
        >>> fields.close()
        Traceback (most recent call last):
        ...
        ValueError: toy configuration: 'hieght' is unknown; did you mean 'height'? (known: height, width)
    """

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        check_type(where.removesuffix(": "), content, Mapping)
        self._content, self._where = content, where
        self._known: set[str] = set()

    def given(self, name: str) -> bool:
        """Whether the configuration has this field."""
        return name in self._content

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """A field's value; without a default it must be there."""
        self._known.add(name)
        if name not in self._content and default is _REQUIRED:
            raise ValueError(f"{self._where}{name!r} is missing")
        return self._content.get(name, default)

    def integer(self, name: str, default: Any = _REQUIRED, least: int = 1) -> int:
        """An integer of at least ``least``."""
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(name, value, f"it must be an integer >= {least}")
        return value

    def number(self, name: str, default: Any = _REQUIRED, least: float = -math.inf) -> float:
        """A finite number of at least ``least``."""
        value = self.get(name, default)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not fits or value < least:
            self.refuse(name, value, "it must be a finite number" + f" >= {least:g}" * (least > -math.inf))
        return float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """True or False."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, value, "it must be True or False")
        return value

    def choice(self, name: str, choices: tuple[str, ...], default: Any = _REQUIRED) -> str:
        """One of a few names."""
        value = self.get(name, default)
        if value not in choices:
            near = suggestion(str(value), choices)
            self.refuse(name, value, f"it must be one of {', '.join(map(repr, choices))}{near}")
        return value

    def inner(self, name: str, default: Any = _REQUIRED) -> "Fields":
        """The fields of a field that is a mapping."""
        value = self.get(name, default)
        if not isinstance(value, Mapping):
            self.refuse(name, value, "it must be a mapping")
        return Fields(value, f"{self._where}{name}: ")

    def pair(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """Two numbers, possibly infinite; transformers writes infinity as ``{"__float__": "Infinity"}``."""
        value = self.get(name, default)
        try:
            low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in value)
        except (TypeError, ValueError, KeyError):
            self.refuse(name, value, "it must be two numbers")
        return low, high

    def only(self, name: str, allowed: tuple[Any, ...], reason: str, default: Any = _REQUIRED) -> None:
        """Refuse any value but these; a missing field without a default counts as the first of them."""
        value = self.get(name, allowed[0] if default is _REQUIRED else default)
        if value not in allowed:
            self.refuse(name, value, reason if name in self._content else f"{reason} (it is missing: the default)")

    def unused(self, *names: str) -> None:
        """Fields that may have any value: they do not change what the model computes."""
        self._known.update(names)

    def refuse(self, name: str, value: object, reason: str) -> NoReturn:
        """Refuse a value."""
        raise ValueError(f"{self._where}{name!r} cannot be {value!r} here: {reason}")

    def close(self) -> None:
        """Refuse fields that have not been read."""
        for name in self._content:
            check_known(self._where.rstrip(), name, sorted(self._known))
