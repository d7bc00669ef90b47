"""Annotations say which values an argument takes, and a decorator refuses all others
with an error.
"""

import functools
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from itertools import chain, repeat
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

import torch
from jaxtyping import AbstractArray
from torch import Tensor

from deqseq.check import (
    EXAMPLES,
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

OTHERS = "**"
"""Stands for the keywords that a function takes by any name."""
PLACES = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

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

    def __call__(self, name: str, value: Any) -> None:
        check_integer(name, value, self.low)


@dataclass(frozen=True)
class Between:
    """In ``Annotated[int, Between(0, 9)]``: an integer from ``low`` to ``high``."""

    low: int
    high: int

    def __call__(self, name: str, value: Any) -> None:
        check_integer(name, value, self.low, self.high)


@dataclass(frozen=True)
class Within:
    """In ``Annotated[float, Within("[0, inf)")]``: a number in an interval; NaN is in none."""

    interval: str

    def __call__(self, name: str, value: Any) -> None:
        check_number(name, value, self.interval)


def checked(target: T) -> T:
    """Check the arguments of a function, or of a dataclass's constructor, against their
    annotations.

    It reads checks in ``Annotated`` (:class:`AtLeast`, :class:`Between`, :class:`Within`),
    ``bool``, ``Literal``, functions, classes, and unions of them; of a tensor or a container only
    the class. Defaults are not checked, and neither is anything inside ``torch.compile``. A
    dataclass that inherits from a checked one is decorated too.

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


def _checking(function: Any, prefix: str) -> Any:
    @functools.cache  # at the first call, when every class that an annotation names is there
    def parameters() -> tuple[list[str], dict[str, Check | None], Check | None]:
        """The names of arguments by place, the last one of all further ones; checks; that of other
        keywords.
        """
        named = _annotations(function)
        kinds = {one.name: one.kind for one in inspect.signature(function).parameters.values()}
        places = [name for name, kind in kinds.items() if kind in PLACES]
        further = [name for name, kind in kinds.items() if kind is inspect.Parameter.VAR_POSITIONAL]
        others = (
            _check_of(named[OTHERS]) if OTHERS in named else functools.partial(_refuse, function)
        )
        return (
            [*places, *(further or [""])],
            {"": None} | {name: _check_of(a) for name, a in named.items()},
            others,
        )

    @functools.wraps(function)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            places, checks, others = parameters()
            by_place = zip(chain(places, repeat(places[-1])), args, strict=False)
            for name, value in chain(by_place, kwargs.items()):
                check = checks.get(name, others)
                if check is not None:
                    check(prefix + name, value)
        return function(*args, **kwargs)

    return with_checks


def _annotations(function: Any) -> dict[str, Any]:
    """Of the arguments; of a TypedDict's fields, which are arguments; of all other keywords, if
    they are taken.
    """
    named = {}
    for one in inspect.signature(function).parameters.values():
        annotation = _evaluated(one.annotation, function)
        if one.kind is one.VAR_KEYWORD and get_origin(annotation) is Unpack:
            named |= get_type_hints(get_args(annotation)[0], include_extras=True)
        else:
            named[OTHERS if one.kind is one.VAR_KEYWORD else one.name] = annotation
    return named


def _refuse(function: Any, name: str, value: object) -> None:
    """Raise an error for a keyword that a function does not take, with what may be meant."""
    name = name.rpartition(".")[2]
    ours = ELSEWHERE.get(name, name)
    taken = {
        one: annotation
        for one, annotation in _annotations(function).items()
        if one not in ("self", "cls")
    }
    records = {
        one: kind
        for one, annotation in taken.items()
        for kind in _classes_in(annotation)
        if is_dataclass(kind)
    }
    inside = [
        one for one, kind in records.items() if ours in [field.name for field in fields(kind)]
    ]
    if ours in taken:
        hint = f"; did you mean {ours!r}?"
    elif inside:
        kind: str = records[inside[0]].__name__
        hint = f": write {inside[0]}={EXAMPLES.get(kind, kind).partition('(')[0]}({ours}=...)"
    else:
        hint = suggestion(name, taken)
    trainer = name in ("attention_mask", "num_items_in_batch")  # what it passes first to a CausalLM
    note = (
        "; transformers' Trainer takes deqseq.integrations.huggingface.from_causal_lm(model)"
        if trainer
        else ""
    )
    called = function.__qualname__.removesuffix(".__init__")
    raise TypeError(f"unknown argument {name!r}{hint} ({called} takes: {', '.join(taken)}){note}")


def _evaluated(annotation: Any, function: Any) -> Any:
    """An annotation that may be written as a string; one that names a local class is
    not checked.
    """
    try:
        return (
            eval(annotation, inspect.unwrap(function).__globals__)
            if isinstance(annotation, str)
            else annotation
        )
    except NameError:
        return Any


def _check_of(annotation: Any) -> Check | None:
    """What an annotation asks for; None where it does not say."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        found: list[Any] = [note for note in parts[1:] if callable(note)]
        return found[0] if found else _check_of(parts[0])
    if origin is Literal:
        return functools.partial(check_choice, choices=parts)
    if origin is Union or origin is types.UnionType:
        return _check_of_union(annotation)
    if origin is Callable:
        return functools.partial(
            check_callable, arguments=len(parts[0]) if isinstance(parts[0], list) else None
        )
    if annotation in PLAIN:
        return PLAIN[annotation]
    kind = _class_of(annotation)
    return None if kind is None else functools.partial(check_type, wanted=kind)


def _check_of_union(annotation: Any) -> Check | None:
    """Take what one of the parts takes."""
    parts = [part for part in get_args(annotation) if part is not type(None)]
    checks = [check for check in map(_check_of, parts) if check is not None]
    if len(checks) < len(parts):  # one of them takes anything
        return None
    choices = tuple(
        choice for part in parts if get_origin(part) is Literal for choice in get_args(part)
    )
    kinds = tuple(_classes_in(annotation))
    classes = tuple(kind for kind in kinds if kind not in PLAIN)  # of these, an object is enough

    def check(name: str, value: Any) -> None:
        if isinstance(value, classes):
            return None
        if len(checks) == 1 and (choices or classes == (type(None),)):
            return checks[0](name, value)
        for one in checks:
            try:
                return one(name, value)
            except TypeError:  # of another kind
                continue
            except ValueError:  # of this kind, and out of range; or none of the choices
                if not choices:
                    raise
        if choices:
            check_choice(
                name, value, choices, tuple(kind for kind in kinds if kind is not type(None))
            )
        raise wrong_type(name, value, kinds)

    return check


def _classes_in(annotation: Any) -> list[type]:
    """The classes that an annotation names: alone, in a union, or with a range."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Union or origin is types.UnionType:
        return [kind for part in parts for kind in _classes_in(part)]
    kind = _class_of(parts[0] if origin is Annotated else annotation)
    return [] if kind is None else [kind]


def _class_of(annotation: Any) -> type | None:
    """The class of the objects that an annotation takes: ``Solver`` of ``Solver[Any]``, ``Tensor``
    of shapes.
    """
    kind = get_origin(annotation) or annotation
    if not isinstance(kind, type) or kind in (
        Any,
        Annotated,
        Callable,
        object,
        inspect.Parameter.empty,
    ):
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
