"""Another library's configuration, read by tables, so that no field is overlooked."""

from collections.abc import Mapping
from functools import partial
from types import NoneType
from typing import Any

from deqseq.check import check_bounds, check_flag, check_integer, check_known, check_number, check_type


class Only:
    """The values of a field that deqseq computes; others are refused.

    A missing field has the first value unless there is a ``default``; a type in its place: the field must be there.
    """

    def __init__(self, *values: Any, default: Any = ...) -> None:
        self.values, self.default = values, values[0] if default is ... else default


Table = Mapping[str, tuple[str, Any] | Only | None]
"""Their fields: our name and what :meth:`Fields.read` takes; or the values that deqseq computes; or None where a field
does not change what the model computes."""


def only(**values: Any) -> dict[str, Only]:
    """Fields of which deqseq computes one value, which is also that of a missing field."""
    return {name: Only(value) for name, value in values.items()}


def unused(*names: str) -> dict[str, None]:
    """Fields that do not change what the model computes."""
    return dict.fromkeys(names)


_CHECKS = {
    bool: check_flag,
    int: partial(check_integer, low=1),
    NoneType: partial(check_integer, low=1),
    float: partial(check_number, interval="(-inf, inf)"),
    tuple: check_bounds,
    dict: partial(check_type, wanted=Mapping),
}


class Fields:
    """The fields of a configuration: each is read, known to change nothing, or refused.

    Example:
        >>> fields = Fields({"width": 4, "hieght": 2}, "toy configuration: ")
        >>> fields.take({"width": ("d_model", int), "height": ("n_layers", 1), **only(bias=False), **unused("author")})
        {'d_model': 4, 'n_layers': 1}
        >>> fields.close()
        Traceback (most recent call last):
        ...
        ValueError: toy configuration: 'hieght' is unknown; did you mean 'height'? (known: width, height, bias, author)
    """

    def __init__(self, content: Mapping[str, Any], where: str) -> None:
        self.content, self.where = content, where
        self._known = dict[str, None]()

    def take(self, table: Table) -> dict[str, Any]:
        """The fields of a table that have a name of ours, under that name."""
        taken: dict[str, Any] = {}
        for name, entry in table.items():
            self._known[name] = None
            if isinstance(entry, tuple):
                taken[entry[0]] = self.read(name, entry[1])
            elif entry is not None:
                self.read(name, entry)
        return taken

    def read(self, name: str, wanted: Any) -> Any:
        """A field of the type of a default, or of a type if it must be there; None: an integer; or :class:`Only`.

        Integers other than the default begin at 1.
        """
        self._known[name] = None
        default, called = wanted.default if isinstance(wanted, Only) else wanted, f"{self.where}{name!r}"
        if isinstance(default, type) and name not in self.content:
            raise ValueError(f"{called} is missing")
        value: Any = self.content.get(name, default)
        if isinstance(wanted, Only):
            if value not in wanted.values:
                values, note = " or ".join(map(repr, wanted.values)), "" if name in self.content else " (the default)"
                raise ValueError(f"{called} must be {values}, got {value!r}{note}: deqseq computes nothing else")
            return value
        kind = wanted if isinstance(wanted, type) else type(wanted)
        if kind is tuple and isinstance(value, list):  # transformers writes infinity as {"__float__": "Infinity"}
            value = tuple(float(x["__float__"]) if isinstance(x, Mapping) else x for x in value)
        if type(value) is not type(wanted) or value != wanted:
            _CHECKS[kind](called, value)
        return float(value) if kind is float else value

    def inner(self, name: str, wanted: Any = dict) -> "Fields":
        """The fields of a field that is a mapping."""
        return Fields(self.read(name, wanted), f"{self.where}{name}: ")

    def close(self) -> None:
        """Refuse fields that have not been read."""
        for name in self.content:
            check_known(self.where.rstrip(), name, self._known)
