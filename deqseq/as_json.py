"""Specifications, solves, curricula and their parts as JSON and back."""

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import partial
from numbers import Integral, Real
from typing import Any

from deqseq.arguments import check_known
from deqseq.backbones import LlamaConfig, Mamba2Config
from deqseq.config import SolveConfig
from deqseq.gradients import Gradient, Implicit, OneStep, Phantom, Unrolled
from deqseq.layers import RotaryScaling
from deqseq.models.specification import DecoderLayers, LanguageModelSpec
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
"""The classes that a configuration can name, by kind: the only such table.

A kind with a single class needs no name. A field with the name of a kind has a value of that kind.
"""

PARTS = ("prelude", "backbone", "coda")
SECTIONS: dict[str, str] = dict.fromkeys(PARTS, "backbone")
SECTIONS |= {"solve": "solve", "eval_solve": "solve", "loop_start": "start"}
"""Fields of a saved model that hold an object as JSON, and its kind."""
FIELDS = {field.name: field.name for field in fields(LanguageModelSpec)}
FIELDS |= {"tied": "tie_word_embeddings", "embedding_std": "initializer_range"}
"""Fields of a specification, and their names in a saved model's configuration."""

_BASES = CLASSES | {"solver": (Solver,), "gradient": (Gradient,), "sweep": (Sweep,)}
"""The base classes of each kind: the user's own subclasses are accepted, too."""


def to_json(value: Any) -> Any:
    """An object as a configuration file holds it: the name of its class, and all of its fields.

    Args:
        value: a solver, gradient, stopping rule, sweep, :class:`deqseq.SolveConfig`, curriculum,
            phase, or the sizes of a backbone; numbers, strings and None stay as they are. Of a
            :class:`deqseq.LanguageModelSpec`, pass the fields, one at a time.

    Returns:
        What :func:`from_json` turns into an equal object.

    Raises:
        TypeError: a class, or the value of a field, that a configuration cannot name.

    Example:
        >>> from deqseq import Relaxed
        >>> from deqseq.as_json import to_json
        >>> to_json(Relaxed(0.8))
        {'name': 'Relaxed', 'damping': 0.8}
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Real):
        return int(value) if isinstance(value, Integral) else float(value)
    if isinstance(value, tuple):
        return [to_json(part) for part in value]
    classes = next((classes for classes in CLASSES.values() if type(value) in classes), None)
    if classes is None:
        kinds = [kind for kind, base in _BASES.items() if isinstance(value, base)] or CLASSES
        names = ", ".join(part.__name__ for kind in kinds for part in CLASSES[kind])
        raise TypeError(
            f"a configuration cannot name {value!r} (known: {names}): pass your own objects in the "
            "call, as solve={...}"
        )
    name = {} if len(classes) == 1 else {"name": type(value).__name__}
    return name | {field.name: to_json(getattr(value, field.name)) for field in fields(value)}


def from_json(kind: str, data: object, where: str, base: Any = None) -> Any:
    """The object that JSON describes.

    Args:
        kind: what it must be, such as "solver".
        data: a mapping as :func:`to_json` returns it, whose values may also be objects; only a
            name; or such an object itself, which is returned.
        where: the words with which error messages begin.
        base: an object that gives the fields missing in ``data``, if ``data`` does not name a
            class. Default: the defaults of the class.

    Raises:
        TypeError: a value of the wrong type.
        ValueError: an unknown name or field, or a number out of its range.

    Example:
        >>> from deqseq import SolveConfig, Stop
        >>> from deqseq.as_json import from_json
        >>> from_json("sweep", {"name": "Sliding", "window": 4}, "my sweep")
        Sliding(window=4)
        >>> base = SolveConfig(stop=Stop(rtol=1e-4))
        >>> from_json("solve", {"stop": {"max_steps": 8}}, "my solve", base).stop.rtol
        0.0001
    """
    if isinstance(data, _BASES[kind]) or (kind == "start" and data in ("zero", "input")):
        return data
    classes: dict[Any, Any] = {made.__name__: made for made in CLASSES[kind]}
    values: Any = {"name": data} if isinstance(data, str) else data
    made: Any = CLASSES[kind][0]
    example = "{...}"
    if len(classes) > 1:
        example = f'{{"name": "{made.__name__}", ...}}'
        made = type(base)
        if isinstance(values, Mapping) and "name" in values:
            values = dict(values)
            name = values.pop("name")
            check_known(f"{where}: name", name, classes)
            made, base = classes[name], None
    if not isinstance(values, Mapping) or made not in CLASSES[kind]:
        raise TypeError(f"{where} must be a {kind} of deqseq or its JSON, {example}, got {data!r}")
    make, defaults = made, {field.name: field.default for field in fields(made)}
    if type(base) is made:
        make = partial(replace, base)
        defaults = {name: getattr(base, name) for name in defaults}
    changes = {}
    for key, value in values.items():
        check_known(f"{where}: {made.__name__} field", key, defaults)
        changes[key] = _value(key, value, f"{where}: {made.__name__}.{key}", defaults[key])
    try:
        return make(**changes)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: {error}") from error


def _value(key: str, value: object, where: str, default: object) -> Any:
    """The value of a field."""
    kind = SECTIONS.get(key, key)
    if kind not in CLASSES or value is None:
        return tuple(value) if isinstance(value, list) else value
    if isinstance(value, list | tuple):
        return tuple(from_json(kind, part, f"{where}[{i}]") for i, part in enumerate(value))
    return from_json(kind, value, where, default)
