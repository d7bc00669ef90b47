"""Solvers, gradients, stopping rules and sweeps as JSON and back: the only table from names to classes."""

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, Literal

from deqseq.gradients import Gradient, Implicit, OneStep, Phantom, Unrolled
from deqseq.integrations.huggingface.names import check_known
from deqseq.solvers import Anderson, Broyden, Naive, Relaxed, Solver
from deqseq.stop import Stop
from deqseq.sweeps import Chunked, Sequential, Simultaneous, Sliding, Sweep

Kind = Literal["solver", "gradient", "stop", "sweep"]
Nameable = Solver | Gradient | Stop | Sweep
Json = dict[str, Any]

CLASSES: dict[Kind, tuple[type[Any], ...]] = {
    "solver": (Naive, Relaxed, Anderson, Broyden),
    "gradient": (Unrolled, OneStep, Phantom, Implicit),
    "stop": (Stop,),
    "sweep": (Simultaneous, Chunked, Sliding, Sequential),
}
"""What a configuration can name. A kind with one class needs no name."""

_SCALARS = {bool: (bool, "true or false"), int: (int, "an integer"), float: ((int, float), "a number")}


def to_json(value: Nameable) -> Json:
    """An object as a configuration file holds it: its class by name, and all of its fields.

    Args:
        value: a solver, gradient, stopping rule or sweep of this library.

    Returns:
        What :func:`from_json` turns into an equal object.

    Raises:
        TypeError: a class, or a field's value, that a configuration cannot name.

    Example:
        >>> to_json(Relaxed(0.8))
        {'name': 'Relaxed', 'damping': 0.8}
    """
    classes = next((classes for classes in CLASSES.values() if type(value) in classes), None)
    if classes is None:
        known = ", ".join(part.__name__ for classes in CLASSES.values() for part in classes)
        raise TypeError(
            f"a configuration cannot name {type(value).__name__} (known: {known}): give your own objects in the "
            "model's call"
        )
    named = {} if len(classes) == 1 else {"name": type(value).__name__}
    return named | {field.name: _plain(value, field) for field in fields(value)}  # pyright: ignore[reportArgumentType]


def from_json(kind: Kind, data: object, where: str) -> Any:
    """The object that a configuration describes.

    Args:
        kind: what it must be.
        data: what :func:`to_json` gives, of which fields with a default may be missing; a name alone; or such an
            object itself.
        where: what the errors are to call the place.

    Returns:
        The object.

    Raises:
        TypeError: another kind of value.
        ValueError: an unknown name or field, with the nearest known one, or a number out of its range.

    Example:
        >>> from_json("sweep", {"name": "Sliding", "window": 4}, "my sweep"), from_json("solver", "Naive", "my solver")
        (Sliding(window=4), Naive())
        >>> from_json("solver", "Relaxd", "mine")
        Traceback (most recent call last):
        ValueError: mine: name 'Relaxd' is unknown; did you mean 'Relaxed'? (known: Naive, Relaxed, Anderson, Broyden)
    """
    classes = {part.__name__: part for part in CLASSES[kind]}
    if type(data) in CLASSES[kind]:
        return data
    first, alone = next(iter(classes)), len(classes) == 1
    given: Any = {"name": data} if isinstance(data, str) else data
    if not isinstance(given, Mapping) or not ("name" in given or alone):
        example = "{...}" if alone else f'{{"name": "{first}", ...}}'
        raise TypeError(f"{where} must be a {kind} of deqseq or its JSON, {example}, got {data!r}")
    name: str = given.get("name", first)
    check_known(f"{where}: name", name, classes)
    known = {field.name: field for field in fields(classes[name])}
    arguments = {}
    for key, value in given.items():
        if key == "name":
            continue
        check_known(f"{where}: {name} field", key, known)
        arguments[key] = _parsed(key, value, known[key], f"{where}: {name}.{key}")
    try:
        return classes[name](**arguments)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error


def _parsed(key: str, value: object, field: Field[Any], where: str) -> object:
    """The value of a field; a field that is called like a kind holds one."""
    if key == "solver" or key == "stop":
        return from_json(key, value, where)
    kinds, wanted = _SCALARS.get(type(field.default), (object, ""))
    if not isinstance(value, kinds) or (isinstance(value, bool) and kinds not in (bool, object)):
        raise TypeError(f"{where} must be {wanted}, got {value!r}")
    return value


def _plain(owner: object, field: Field[Any]) -> object:
    value = getattr(owner, field.name)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Solver | Gradient | Stop | Sweep):
        return to_json(value)
    raise TypeError(f"a configuration cannot hold {type(owner).__name__}.{field.name} = {value!r}")
