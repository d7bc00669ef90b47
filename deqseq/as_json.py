"""Specifications, solves, curricula and their parts as JSON and back: the only table from names to
classes.
"""

from collections.abc import Mapping
from dataclasses import fields, replace
from numbers import Real
from typing import Any

from deqseq.arguments import check_known, plain_number
from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.config import SolveConfig
from deqseq.gradients import Gradient, Implicit, OneStep, Phantom, Unrolled
from deqseq.layers import RotaryScaling
from deqseq.models.specification import DecoderLayers
from deqseq.solvers import Adaptive, Anderson, Broyden, Naive, Relaxed, Solver
from deqseq.start import RandomStart
from deqseq.stop import Stop
from deqseq.sweeps import Chunked, Sequential, Simultaneous, Sliding, Sweep
from deqseq.training import Curriculum, Phase, PoissonLogNormal

Json = dict[str, Any]

CLASSES: dict[str, tuple[type[Any], ...]] = {
    "solver": (Naive, Relaxed, Adaptive, Anderson, Broyden),
    "gradient": (Unrolled, OneStep, Phantom, Implicit),
    "stop": (Stop,),
    "sweep": (Simultaneous, Chunked, Sliding, Sequential),
    "start": (RandomStart,),
    "solve": (SolveConfig,),
    "backbone": (LlamaConfig, Mamba2Config, DecoderLayers),
    "rope_scaling": (RotaryScaling,),
    "depth": (PoissonLogNormal,),
    "phases": (Phase,),
    "curriculum": (Curriculum,),
}
"""What a configuration can name. A kind with one class needs no name; a field with the name of a
kind holds one.
"""

_BASES = CLASSES | {"solver": (Solver,), "gradient": (Gradient,), "sweep": (Sweep,)}
"""What each kind of object is an instance of: the user's own, too."""


def to_json(value: object) -> Any:
    """An object as a configuration file holds it: the name of its class, and all of its fields.

    Args:
        value: a solver, gradient, stopping rule, sweep, :class:`deqseq.SolveConfig`, curriculum,
            phase, or the sizes of a backbone; numbers, strings and None stay as they are.

    Returns:
        What :func:`from_json` turns into an equal object.

    Raises:
        TypeError: a class, or the value of a field, that a configuration cannot name.

    Example:
        >>> to_json(Relaxed(0.8))
        {'name': 'Relaxed', 'damping': 0.8}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Real):
        return plain_number(value)
    if isinstance(value, tuple):
        return [to_json(part) for part in value]
    classes = next((classes for classes in CLASSES.values() if type(value) in classes), None)
    if classes is None:
        kinds = [kind for kind, base in _BASES.items() if isinstance(value, base)] or CLASSES
        known = ", ".join(part.__name__ for kind in kinds for part in CLASSES[kind])
        remedy = "pass your own objects in the call, as solve={...}"
        raise TypeError(f"a configuration cannot name {value!r} (known: {known}): {remedy}")
    name = {} if len(classes) == 1 else {"name": type(value).__name__}
    return name | {field.name: to_json(getattr(value, field.name)) for field in fields(value)}  # pyright: ignore[reportArgumentType]


def from_json(kind: str, data: object, where: str, base: Any = None) -> Any:
    """The object that JSON describes.

    Args:
        kind: what it must be, such as "solver".
        data: a mapping as :func:`to_json` returns it, whose values may also be objects; a name
            alone; or such an object itself, which is returned.
        where: how errors begin.
        base: the object that has the fields that a mapping without a name leaves out. Default:
            their defaults.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: an unknown name or field, or a number out of its range.

    Example:
        >>> (
        ...     from_json("sweep", {"name": "Sliding", "window": 4}, "my sweep"),
        ...     from_json("solver", "Naive", "my solver"),
        ... )
        (Sliding(window=4), Naive())
        >>> from_json(
        ...     "solve", {"stop": {"max_steps": 8}}, "my solve", SolveConfig(stop=Stop(rtol=1e-4))
        ... ).stop.rtol
        0.0001
    """
    if isinstance(data, _BASES[kind]) or (kind == "start" and data in ("zero", "input")):
        return data
    classes: dict[Any, Any] = {one.__name__: one for one in CLASSES[kind]}
    given: Any = {"name": data} if isinstance(data, str) else data
    made: Any = type(base) if len(classes) > 1 else CLASSES[kind][0]
    if len(classes) > 1 and isinstance(given, Mapping) and "name" in given:
        check_known(f"{where}: name", given["name"], classes)
        made, base = classes[given["name"]], None
        given = {key: value for key, value in given.items() if key != "name"}
    if not isinstance(given, Mapping) or made not in CLASSES[kind]:
        example = "{...}" if len(classes) == 1 else f'{{"name": "{next(iter(classes))}", ...}}'
        raise TypeError(f"{where} must be a {kind} of deqseq or its JSON, {example}, got {data!r}")
    base = base if type(base) is made else None
    defaults = {
        field.name: field.default if base is None else getattr(base, field.name)
        for field in fields(made)
    }
    changes = {}
    for key, value in given.items():
        check_known(f"{where}: {made.__name__} field", key, defaults)
        changes[key] = _value(key, value, f"{where}: {made.__name__}.{key}", defaults[key])
    try:
        return made(**changes) if base is None else replace(base, **changes)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error


def _value(key: str, value: object, where: str, default: object) -> Any:
    """The value of a field."""
    kind = "solve" if key == "eval_solve" else key
    if isinstance(value, list | tuple):
        return tuple(
            from_json(kind, one, f"{where}[{i}]") if kind in CLASSES else one
            for i, one in enumerate(value)
        )
    return value if value is None or kind not in CLASSES else from_json(kind, value, where, default)
