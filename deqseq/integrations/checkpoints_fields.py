"""Reading another library's configuration so that no field is overlooked."""

import difflib
import math
from collections.abc import Mapping
from typing import Any, NoReturn

_REQUIRED = object()


class Fields:
    """The fields of a configuration, each of them honoured, known to change nothing, or refused with a reason.

    Args:
        content: the configuration.
        where: how messages begin, up to the name of a field.

    Example:
        >>> fields = Fields({"width": 4, "hieght": 2}, "toy configuration: ")
        >>> fields.integer("width"), fields.integer("height", 1)
        (4, 1)
        >>> fields.close()
        Traceback (most recent call last):
        ...
        ValueError: toy configuration: 'hieght' is unknown; did you mean 'height'?
    """

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self._content, self._where = content, where
        self._known: set[str] = set()

    def given(self, name: str) -> bool:
        """Whether the configuration has this field."""
        return name in self._content

    def get(self, name: str, default: Any = _REQUIRED) -> Any:
        """A field's value, whatever it is.

        Raises:
            ValueError: it is missing and has no default.
        """
        self._known.add(name)
        if name not in self._content and default is _REQUIRED:
            raise ValueError(f"{self._where}{name!r} is missing")
        return self._content.get(name, default)

    def integer(self, name: str, default: Any = _REQUIRED, least: int = 1) -> int:
        """An integer field.

        Raises:
            ValueError: it is missing, not an integer, or below ``least``.
        """
        value = self.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.refuse(name, value, f"it must be an integer >= {least}")
        return value

    def number(self, name: str, default: Any = _REQUIRED) -> float:
        """A finite number.

        Raises:
            ValueError: it is missing, not a number, or not finite.
        """
        value = self.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self.refuse(name, value, "it must be a finite number")
        return float(value)

    def flag(self, name: str, default: Any = _REQUIRED) -> bool:
        """A truth value.

        Raises:
            ValueError: it is missing, or not a truth value.
        """
        value = self.get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, value, "it must be True or False")
        return value

    def choice(self, name: str, choices: tuple[str, ...], default: Any = _REQUIRED) -> str:
        """One of a few words.

        Raises:
            ValueError: it is missing, or none of them.
        """
        value = self.get(name, default)
        if value not in choices:
            near = difflib.get_close_matches(str(value), choices, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            self.refuse(name, value, f"it must be one of {', '.join(map(repr, choices))}{hint}")
        return value

    def inner(self, name: str, default: Any = _REQUIRED) -> "Fields":
        """The fields of a field that is a mapping.

        Raises:
            ValueError: it is missing, or no mapping.
        """
        value = self.get(name, default)
        if not isinstance(value, Mapping):
            self.refuse(name, value, "it must be a mapping")
        return Fields(value, f"{self._where}{name}: ")

    def pair(self, name: str, default: tuple[float, float]) -> tuple[float, float]:
        """Two numbers, infinity among them; as an object ``{"__float__": "Infinity"}`` too, as transformers writes it.

        Raises:
            ValueError: anything else.
        """
        value = self.get(name, default)
        try:
            low, high = (float(x["__float__"] if isinstance(x, Mapping) else x) for x in value)
        except (TypeError, ValueError, KeyError):
            self.refuse(name, value, "it must be two numbers")
        return low, high

    def only(self, name: str, allowed: tuple[Any, ...], reason: str, default: Any = _REQUIRED) -> None:
        """Refuse all values but these; a missing field without a default is taken as the first of them.

        Raises:
            ValueError: another value, with the reason.
        """
        value = self.get(name, allowed[0] if default is _REQUIRED else default)
        if value not in allowed:
            self.refuse(name, value, reason if name in self._content else f"{reason} (missing, it has this value)")

    def unused(self, *names: str) -> None:
        """Fields that may have any value: they change nothing of what the model computes."""
        self._known.update(names)

    def refuse(self, name: str, value: object, reason: str) -> NoReturn:
        """Refuse a value.

        Raises:
            ValueError: always.
        """
        raise ValueError(f"{self._where}{name!r} cannot be {value!r} here: {reason}")

    def close(self) -> None:
        """Refuse fields that nobody has asked for.

        Raises:
            ValueError: there is one; its nearest relative is in the message.
        """
        for name in self._content:
            if name not in self._known:
                near = difflib.get_close_matches(name, sorted(self._known), n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(sorted(self._known))})"
                raise ValueError(f"{self._where}{name!r} is unknown{hint}")
