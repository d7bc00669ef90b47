"""Another library's configuration, read by tables, so that no field is overlooked."""

from collections.abc import Mapping
from functools import partial
from types import NoneType
from typing import Any

from deqseq.check import check_bounds, check_choice, check_flag, check_integer, check_known, check_number, check_type

NOTHING_ELSE = "deqseq computes nothing else"


class Only:
    """The values of a field that deqseq computes; others are refused, and the error tells what to do ``instead``.

    A missing field has the first value unless there is a ``default``; a type in its place: the field must be there.
    """

    def __init__(self, *values: Any, default: Any = ..., instead: str = NOTHING_ELSE) -> None:
        self.values, self.instead = values, instead
        self.default = values[0] if default is ... else default


Table = Mapping[str, tuple[str, Any] | Only | None]
"""Their fields: our name, and their default or a type as :meth:`Fields.read` takes it; or the values that deqseq
computes; or None for a field that does not change what the model computes."""


def only(instead: str = NOTHING_ELSE, **values: Any) -> dict[str, Only]:
    """Fields of which deqseq computes one value, which is also that of a missing field."""
    return {name: Only(value, instead=instead) for name, value in values.items()}


def unused(*names: str) -> dict[str, None]:
    """Fields that do not change what the model computes."""
    return dict.fromkeys(names)


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
        >>> fields.take({"width": ("d_model", int), "height": ("n_layers", 1), **only(bias=False), **unused("author")})
        {'d_model': 4, 'n_layers': 1}
        >>> fields.close()
        Traceback (most recent call last):
        ...
        ValueError: toy configuration: 'hieght' is unknown; did you mean 'height'? (known: author, bias, height, width)
    """

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        check_type(where.removesuffix(": "), content, Mapping)
        self.content, self._where = content, where
        self._known: set[str] = set()

    def take(self, table: Table) -> dict[str, Any]:
        """The fields of a table that have a name of ours, under that name."""
        taken: dict[str, Any] = {}
        for name, entry in table.items():
            self._known.add(name)
            if isinstance(entry, Only):
                self._check_value(name, entry)
            elif entry is not None:
                taken[entry[0]] = self.read(name, entry[1])
        return taken

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

    def choice(self, name: str, choices: tuple[str, ...], default: Any = str) -> str:
        """One of a few names."""
        value = self.get(name, default)
        check_choice(self._called(name), value, choices)
        return value

    def inner(self, name: str, default: Any = dict) -> "Fields":
        """The fields of a field that is a mapping."""
        return Fields(self.get(name, default), f"{self._where}{name}: ")

    def refuse(self, name: str, wanted: str) -> None:
        """Raise an error for a field's value."""
        raise ValueError(f"{self._called(name)} must be {wanted}")

    def close(self) -> None:
        """Refuse fields that have not been read."""
        for name in self.content:
            check_known(self._where.rstrip(), name, sorted(self._known))

    def _check_value(self, name: str, only: Only) -> None:
        value = self.get(name, only.default)
        if value not in only.values:
            note = "" if name in self.content else " (the default)"
            self.refuse(name, f"{' or '.join(map(repr, only.values))}, got {value!r}{note}: {only.instead}")

    def _called(self, name: str) -> str:
        return f"{self._where}{name!r}"


def _decoded(value: Any) -> Any:
    """A list of numbers as a tuple; transformers writes infinity as ``{"__float__": "Infinity"}``."""
    if not isinstance(value, list):
        return value
    return tuple(float(x["__float__"]) if isinstance(x, Mapping) else x for x in value)
