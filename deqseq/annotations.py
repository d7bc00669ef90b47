"""What an argument may be stands in its annotation: a decorator reads it there, and refuses anything else."""

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from jaxtyping import AbstractArray
from torch import Tensor

from deqseq.check import (
    check_bounds,
    check_callable,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_type,
    suggestion,
)

T = TypeVar("T")
Check = Callable[[str, Any], None]
"""Raises an error that names the argument, its first, unless the second is what it may be."""

ELSEWHERE = {
    "attention_mask": "mask",
    "use_cache": "return_cache",
    "past_key_values": "cache",
    "do_sample": "temperature",
    "max_length": "max_new_tokens",
    "eos_token_id": "stop_tokens",
    "pad_token_id": "pad_token",
    "streamer": "callback",
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "tie_weights": "tied",
    "max_iter": "max_steps",
    "f_max_iter": "max_steps",
    "tol": "rtol",
    "f_tol": "rtol",
    "tau": "damping",
}
"""Names of arguments in other libraries, and ours."""

RECORDS = {
    "stop": ("dq.Stop", ("rtol", "atol", "max_steps", "check_every", "divergence", "norm")),
    "solve": ("dq.SolveConfig", ("solver", "stop", "gradient", "sweep", "start")),
}
"""Arguments that are records of ours, and their fields, which are looked for beside them."""


@dataclass(frozen=True)
class AtLeast:
    """In ``Annotated[int, AtLeast(1)]``: an integer from ``low`` on."""

    low: int


@dataclass(frozen=True)
class Between:
    """In ``Annotated[int, Between(0, 9)]``: an integer from ``low`` to ``high``."""

    low: int
    high: int


@dataclass(frozen=True)
class Within:
    """In ``Annotated[float, Within("[0, inf)")]``: a number in an interval; NaN is in none."""

    interval: str


@dataclass(frozen=True)
class Bounds:
    """In ``Annotated[tuple[float, float], Bounds()]``: two ordered numbers, the first from 0 on."""


def checked(target: T) -> T:
    """Check the arguments of a function, or of a dataclass's constructor, against their annotations.

    Read are ranges (:class:`AtLeast`, :class:`Between`, :class:`Within`, :class:`Bounds`), ``bool``, ``Literal``,
    functions, classes, and unions of them; of a tensor or a container only its class. Defaults are not checked, and
    neither is anything inside ``torch.compile``.

    Args:
        target: a function, an ``__init__`` or a dataclass.

    Returns:
        The function with checks, or the same dataclass.

    Raises:
        TypeError, ValueError: later, at a call: names the argument, what it got and what it wants.

    Example:
        >>> from typing import Annotated
        >>> @checked
        ... def repeat(text: str, times: Annotated[int, AtLeast(1)] = 2) -> str:
        ...     return text * times
        >>> repeat("ab", times=0)
        Traceback (most recent call last):
        ValueError: times must be an integer >= 1, got 0
    """
    if isinstance(target, type):
        target.__init__ = _checking(target.__init__, f"{target.__name__}.")
        return target
    function: Any = target
    owner, _, name = function.__qualname__.rpartition(".")
    return _checking(function, f"{owner}." if name == "__init__" else "")


def _checking(function: Any, prefix: str) -> Any:
    @functools.cache  # at the first call, when every class that an annotation names is there
    def parameters() -> tuple[list[str], str, dict[str, Check | None], bool]:
        known = inspect.signature(function).parameters.values()
        ordered = [one.name for one in known if one.kind <= one.POSITIONAL_OR_KEYWORD]
        rest = "".join(one.name for one in known if one.kind is one.VAR_POSITIONAL)
        checks = {one.name: _evaluated(one.annotation, function) for one in known}
        fields = [checks.pop(one.name) for one in known if one.kind is one.VAR_KEYWORD]
        record = get_args(fields[0])[:1] if fields else ()  # of Unpack, a TypedDict
        for one in record:
            checks |= get_type_hints(one, include_extras=True)
        is_complete = len(record) == len(fields)
        return ordered, rest, {name: _check_of(annotation) for name, annotation in checks.items()}, is_complete

    @functools.wraps(function)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            ordered, rest, checks, is_complete = parameters()
            if is_complete and not kwargs.keys() <= checks.keys():
                raise _unknown(next(name for name in kwargs if name not in checks), [*checks])
            for name, value in chain(zip(chain(ordered, repeat(rest)), args, strict=False), kwargs.items()):
                check = checks.get(name)
                if check is not None:
                    check(prefix + name, value)
        return function(*args, **kwargs)

    return with_checks


def _unknown(name: str, known: list[str]) -> TypeError:
    """An error for an argument that is none, with what may be meant."""
    ours = ELSEWHERE.get(name, name)
    records = {argument: kind for argument, (kind, fields) in RECORDS.items() if argument in known and ours in fields}
    if ours in known:
        hint = f"; did you mean {ours!r}?"
    elif records:
        hint = "".join(f": write {argument}={kind}({ours}=...)" for argument, kind in records.items())
    else:
        hint = suggestion(name, known)
    return TypeError(f"unknown argument {name!r}{hint} (known: {', '.join(one for one in known if one != 'self')})")


def _evaluated(annotation: Any, function: Any) -> Any:
    return eval(annotation, inspect.unwrap(function).__globals__) if isinstance(annotation, str) else annotation


def _check_of(annotation: Any) -> Check | None:
    """What an annotation asks for; None where it does not say."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return next((found for found in map(_check_of_range, parts[1:]) if found), _check_of(parts[0]))
    if origin is Literal:
        return functools.partial(check_choice, choices=parts)
    if origin is Union or origin is types.UnionType:
        return _check_of_union(parts)
    if origin is Callable or annotation in PLAIN:
        return PLAIN.get(annotation, check_callable)
    kind = _class_of(annotation)
    return None if kind is None else functools.partial(check_type, wanted=kind)


def _check_of_range(note: object) -> Check | None:
    if isinstance(note, AtLeast):
        return functools.partial(check_integer, low=note.low)
    if isinstance(note, Between):
        return functools.partial(check_integer, low=note.low, high=note.high)
    if isinstance(note, Bounds):
        return check_bounds
    return functools.partial(check_number, interval=note.interval) if isinstance(note, Within) else None


def _check_of_union(parts: tuple[Any, ...]) -> Check | None:
    optional, others = type(None) in parts, [part for part in parts if part is not type(None)]
    literals = tuple(choice for part in others if get_origin(part) is Literal for choice in get_args(part))
    classes = [_class_of(part) for part in others if get_origin(part) is not Literal]
    kinds = tuple(kind for kind in classes if kind is not None)
    if len(others) == 1 and (literals or not kinds or kinds[0] in PLAIN):
        check = _check_of(others[0])
    elif len(kinds) < len(classes):  # for example a function or an object: nothing simple to say
        return None
    elif literals:
        check = functools.partial(check_choice, choices=literals, kinds=kinds)
    else:
        check = functools.partial(check_type, wanted=(*kinds, type(None)) if optional else kinds)
    if check is None or not optional:
        return check
    return lambda name, value: None if value is None else check(name, value)


def _class_of(annotation: Any) -> type | None:
    """The class of the objects that an annotation takes: ``Solver`` of ``Solver[Any]``, ``Tensor`` of shapes."""
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type) or kind in (Any, Annotated, Callable, object, inspect.Parameter.empty):
        return None
    return Tensor if issubclass(kind, AbstractArray) else kind


PLAIN: dict[Any, Check] = {
    bool: check_flag,
    int: functools.partial(check_integer, low=-(2**63), high=2**63 - 1),
    float: functools.partial(check_number, interval="(-inf, inf)"),
}
"""What annotations without a range ask for."""
