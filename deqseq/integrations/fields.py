"""Another library's configuration, read so that no field is overlooked."""

from collections.abc import Mapping
from functools import partial
from types import NoneType
from typing import Any

from deqseq.check import check_bounds, check_choice, check_flag, check_integer, check_known, check_number, check_type

Only = dict[str, tuple[Any, ...]]
"""Fields, and the values that deqseq computes; the first one is that of a missing field."""
Sizes = Mapping[str, tuple[str, Any]]
"""Our names of fields; their names, and their defaults or types as :meth:`Fields.read` takes them."""

_CHECKS = {
    bool: check_flag,
    int: partial(check_integer, low=1),
    NoneType: partial(check_integer, low=1),
    float: partial(check_number, interval="(-inf, inf)"),
    tuple: check_bounds,
}


class Fields:
    """The fields of a configuration: each is read, known to change nothing, or refused.

    A type in place of a default says that the field must be there. Errors begin with ``where`` and name the field.

    Args:
        content: the configuration.
        where: how errors begin.

    Example:
        >>> fields = Fields({"width": 4, "hieght": 2}, "toy configuration: ")
        >>> fields.read("width", int), fields.read("height", 1)
        (4, 1)
        >>> fields.close()
        Traceback (most recent call last):
        ...
        ValueError: toy configuration: 'hieght' is unknown; did you mean 'height'? (known: height, width)
    """

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        check_type(where.removesuffix(": "), content, Mapping)
        self.content, self._where = content, where
        self._known: set[str] = set()

    def get(self, name: str, default: Any = object) -> Any:
        """A field's value, unchecked."""
        self._known.add(name)
        if name not in self.content and isinstance(default, type):
            raise ValueError(f"{self._where}{name!r} is missing")
        return self.content.get(name, default)

    def read(self, name: str, default: Any, **limits: Any) -> Any:
        """A field of the type of its default, within ``limits`` as :mod:`deqseq.check` takes them; None: an integer."""
        if default is None and self.get(name, None) is None:
            return None
        kind = default if isinstance(default, type) else type(default)
        value = _decoded(self.get(name, default)) if kind is tuple else self.get(name, default)
        _CHECKS[kind](self._called(name), value, **limits)
        return float(value) if kind is float else value

    def sizes(self, table: Sizes) -> dict[str, Any]:
        """The fields of a table, under our names."""
        return {ours: self.read(theirs, default) for ours, (theirs, default) in table.items()}

    def choice(self, name: str, choices: tuple[str, ...], default: Any = str) -> str:
        """One of a few names."""
        value = self.get(name, default)
        check_choice(self._called(name), value, choices)
        return value

    def inner(self, name: str, default: Any = dict) -> "Fields":
        """The fields of a field that is a mapping."""
        return Fields(self.get(name, default), f"{self._where}{name}: ")

    def only(self, table: Only, instead: str = "deqseq computes nothing else", **defaults: Any) -> None:
        """Refuse other values than those of a table, with a reason or a remedy; ``defaults`` overrule its own."""
        for name, allowed in table.items():
            value = self.get(name, defaults.get(name, allowed[0]))
            if value not in allowed:
                note = "" if name in self.content else " (the default)"
                self.refuse(name, f"{' or '.join(map(repr, allowed))}, got {value!r}{note}: {instead}")

    def unused(self, *names: str) -> None:
        """Fields that may have any value: they do not change what the model computes."""
        self._known.update(names)

    def refuse(self, name: str, wanted: str) -> None:
        """Raise an error for a field's value."""
        raise ValueError(f"{self._called(name)} must be {wanted}")

    def close(self) -> None:
        """Refuse fields that have not been read."""
        for name in self.content:
            check_known(self._where.rstrip(), name, sorted(self._known))

    def _called(self, name: str) -> str:
        return f"{self._where}{name!r}"


def _decoded(value: Any) -> Any:
    """A list of numbers as a tuple; transformers writes infinity as ``{"__float__": "Infinity"}``."""
    if not isinstance(value, list):
        return value
    return tuple(float(x["__float__"]) if isinstance(x, Mapping) else x for x in value)
