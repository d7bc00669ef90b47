"""Annotations say which values an argument takes, and a decorator refuses all others with an error."""

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain, repeat
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

import torch
from jaxtyping import AbstractArray
from torch import Tensor

from deqseq.check import (
    EXAMPLES,
    check_bounds,
    check_callable,
    check_choice,
    check_flag,
    check_integer,
    check_number,
    check_type,
    suggestion,
    wrong_type,
)

T = TypeVar("T")
Check = Callable[[str, Any], None]
"""``check(name, value)`` raises an error that names the argument if it does not take the value."""

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
    "tolerance": "rtol",
    "tau": "damping",
}
"""Names of arguments in other libraries, and ours."""


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

    It reads ranges (:class:`AtLeast`, :class:`Between`, :class:`Within`, :class:`Bounds`), ``bool``, ``Literal``,
    functions, classes, and unions of them; of a tensor or a container only the class. Defaults are not checked, and
    neither is anything inside ``torch.compile``. A dataclass that inherits from a checked one is decorated too.

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
    if isinstance(target, classmethod | staticmethod | property):
        raise TypeError(f"write @checked below @{type(target).__name__}")
    if isinstance(target, type):
        target.__init__ = _checking(target.__init__, f"{target.__name__}.")
        return target
    function: Any = target
    owner, _, name = function.__qualname__.rpartition(".")
    return _checking(function, f"{owner}." if name == "__init__" else "")


class _Parameters(NamedTuple):
    """The arguments of a function, each with its check."""

    by_place: list[tuple[str, Check | None]]
    further: tuple[str, Check | None]
    by_name: dict[str, Check | None]
    other_names: Check | None
    takes_other_names: bool
    records: dict[str, Any]
    """Dataclasses that an argument takes: their fields are looked for beside them."""


def _parameters(function: Any) -> _Parameters:
    named, by_place, further, others = {}, [], ("", None), None
    every = inspect.signature(function).parameters.values()
    for one in every:
        annotation = _evaluated(one.annotation, function)
        if one.kind is one.VAR_KEYWORD and get_origin(annotation) is Unpack:
            named |= get_type_hints(get_args(annotation)[0], include_extras=True)
        elif one.kind is one.VAR_KEYWORD:
            others = annotation
        elif one.kind is one.VAR_POSITIONAL:
            further = one.name, _check_of(annotation)
        else:
            if one.kind is not one.KEYWORD_ONLY:
                by_place.append((one.name, _check_of(annotation)))
            if one.kind is not one.POSITIONAL_ONLY and one.name not in ("self", "cls"):
                named[one.name] = annotation
    records = {name: kind for name, given in named.items() for kind in _classes_in(given) if is_dataclass(kind)}
    checks = {name: _check_of(annotation) for name, annotation in named.items()}
    return _Parameters(by_place, further, checks, _check_of(others), others is not None, records)


def _checking(function: Any, prefix: str) -> Any:
    @functools.cache  # at the first call, when every class that an annotation names is there
    def parameters() -> _Parameters:
        return _parameters(function)

    @functools.wraps(function)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            known = parameters()
            for (name, check), value in zip(chain(known.by_place, repeat(known.further)), args, strict=False):
                if check is not None:
                    check(prefix + name, value)
            for name, value in kwargs.items():
                if name not in known.by_name and not known.takes_other_names:
                    raise _unknown(name, known, function.__qualname__.removesuffix(".__init__"))
                check = known.by_name.get(name, known.other_names)
                if check is not None:
                    check(prefix + name, value)
        return function(*args, **kwargs)

    return with_checks


def _unknown(name: str, known: _Parameters, function: str) -> TypeError:
    """An error for a keyword that a function does not take, with what may be meant."""
    ours = ELSEWHERE.get(name, name)
    inside = [argument for argument, kind in known.records.items() if ours in [field.name for field in fields(kind)]]
    if ours in known.by_name:
        hint = f"; did you mean {ours!r}?"
    elif inside:
        kind: str = known.records[inside[0]].__name__
        hint = f": write {inside[0]}={EXAMPLES.get(kind, kind).partition('(')[0]}({ours}=...)"
    else:
        hint = suggestion(name, known.by_name)
    trainer = name in ("attention_mask", "num_items_in_batch")  # what it passes first to a CausalLM
    note = "; transformers' Trainer takes deqseq.integrations.huggingface.from_causal_lm(model)" if trainer else ""
    return TypeError(f"unknown argument {name!r}{hint} ({function} takes: {', '.join(known.by_name)}){note}")


def _evaluated(annotation: Any, function: Any) -> Any:
    """An annotation that may be written as a string; one that names a local class is not checked."""
    try:
        return eval(annotation, inspect.unwrap(function).__globals__) if isinstance(annotation, str) else annotation
    except NameError:
        return Any


def _check_of(annotation: Any) -> Check | None:
    """What an annotation asks for; None where it does not say."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return next((found for found in map(_check_of_range, parts[1:]) if found), _check_of(parts[0]))
    if origin is Literal:
        return functools.partial(check_choice, choices=parts)
    if origin is Union or origin is types.UnionType:
        return _check_of_union(parts)
    if origin is Callable:
        return functools.partial(check_callable, arguments=len(parts[0]) if isinstance(parts[0], list) else None)
    if annotation in PLAIN:
        return PLAIN[annotation]
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
    """Take what one of the parts takes."""
    others = [part for part in parts if part is not type(None)]
    found = [_check_of(part) for part in others]
    checks = [check for check in found if check is not None]
    if len(checks) < len(others):  # one of them takes anything
        return None
    choices = tuple(choice for part in others if get_origin(part) is Literal for choice in get_args(part))
    named = tuple(kind for kind in map(_plain_class, others) if kind is not None)
    kinds = (*named, type(None)) if len(others) < len(parts) else named
    classes = tuple(kind for kind in kinds if kind not in PLAIN)  # of these, an object is enough

    def check(name: str, value: Any) -> None:
        if isinstance(value, classes):
            return None
        if len(checks) == 1 and (choices or classes == (type(None),)):
            checks[0](name, value)
            return None
        for one in checks:
            try:
                return one(name, value)
            except TypeError:  # of another kind
                continue
            except ValueError:  # of this kind, and out of range; or none of the choices
                if not choices:
                    raise
        if choices:
            check_choice(name, value, choices, named)
        raise wrong_type(name, value, kinds)

    return check


def _plain_class(annotation: Any) -> type | None:
    """The class of the objects that an annotation takes, also of numbers with a range."""
    return _class_of(get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation)


def _classes_in(annotation: Any) -> list[Any]:
    """The classes that an annotation names, alone or in a union."""
    is_union = get_origin(annotation) in (Union, types.UnionType)
    return [_class_of(part) for part in (get_args(annotation) if is_union else (annotation,))]


def _class_of(annotation: Any) -> type | None:
    """The class of the objects that an annotation takes: ``Solver`` of ``Solver[Any]``, ``Tensor`` of shapes."""
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type) or kind in (Any, Annotated, Callable, object, inspect.Parameter.empty):
        return None
    if issubclass(kind, AbstractArray):
        return Tensor
    try:
        isinstance(None, kind)
    except TypeError:  # a TypedDict or a Protocol
        return None
    return kind


PLAIN: dict[Any, Check] = {
    bool: check_flag,
    int: functools.partial(check_integer, low=-(2**63), high=2**63 - 1),
    float: functools.partial(check_number, interval="(-inf, inf)"),
}
"""What annotations without a range ask for."""
