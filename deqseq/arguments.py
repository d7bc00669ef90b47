"""What an argument may be, and the error for one that is something else.

:func:`checked` reads it from annotations; the functions ``check_...`` check one argument. An error
names the argument, what is expected and what was given.
"""

import difflib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from fractions import Fraction
from itertools import chain, repeat
from numbers import Integral, Real
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

from deqseq.types import is_dense

T = TypeVar("T")


class Wanted:
    """What a value may be; ``str()`` of it completes ``"NAME must be ..."``."""

    kind: Any = object
    excluded: tuple[type, ...] = ()

    def is_kind(self, value: object) -> bool:
        """Whether the type is right; if only the value is wrong, the error is a ValueError."""
        return isinstance(value, self.kind) and not isinstance(value, self.excluded)

    def in_range(self, value: Any) -> bool:
        """Whether a value of the right type is taken."""
        return True

    def remedy(self, value: object) -> str:
        """What to write instead of a value that is not taken."""
        return ""

    def __call__(self, name: str, value: object) -> None:
        """Raise the error for an argument that is something else."""
        require(name, value, (self,))


def require(name: str, value: object, wanted: Sequence[Wanted], example: str = "") -> None:
    """Raise the error for an argument that is none of what is ``wanted``."""
    right_type = [each for each in wanted if each.is_kind(value)]
    if any(each.in_range(value) for each in right_type):
        return
    expected = [str(each) for each in wanted if not right_type or each.kind is not type(None)]
    such = f", such as {example}" if example else ""
    remedy = "".join(each.remedy(value) for each in wanted)
    error = ValueError if right_type else TypeError
    raise error(f"{name} must be {' or '.join(expected)}{such}, got {shown(value)}{remedy}")


@dataclass(frozen=True)
class Instance(Wanted):
    """An object of a class."""

    kind: type

    def is_kind(self, value: object) -> bool:
        return super().is_kind(value) and (self.kind is not Tensor or is_dense(value))

    def __str__(self) -> str:
        name = self.kind.__name__
        plain = {"NoneType": "None", "bool": "True or False", "str": "a string"}
        return plain.get(name) or f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"

    def remedy(self, value: object) -> str:
        """Which class to call instead of a class, its name, or anything else."""
        if self.kind is Tensor and isinstance(value, tuple | list):
            tensors = all(isinstance(each, Tensor) for each in value)
            how = ": join them as one tensor (torch.cat along the last dimension), split in f"
            return how if tensors else ""
        if type(value).__module__.startswith("transformers.models"):
            return ": deqseq.integrations.huggingface.retrofit(model, ...) makes one of it"
        if is_dataclass(self.kind) and isinstance(value, float):
            first = [each for field in fields(self.kind)[:1] for each in _wanted(field.type)]
            fits = any(each.is_kind(value) and each.in_range(value) for each in first)
            return f": write {self.kind.__name__}({value!r})" * fits
        name = getattr(value, "__name__", value if isinstance(value, str) else "")
        if not self.kind.__module__.startswith("deqseq"):
            return ""
        ours, found = vars(sys.modules["deqseq"]), (each.__name__ for each in _classes(self.kind))
        names = {each.lower(): each for each in found if each in ours}
        near = difflib.get_close_matches(name.lower().replace("_", ""), names, n=1)
        if near:
            return f": write {names[near[0]]}(...)"
        names.pop(self.kind.__name__.lower(), None)
        return f" (there are {', '.join(names.values())})" if names else ""


def _classes(kind: type) -> list[type]:
    """A class, unless it is abstract, and all that inherit from it."""
    heirs = chain.from_iterable(map(_classes, kind.__subclasses__()))
    return [*heirs] if inspect.isabstract(kind) else [kind, *heirs]


@dataclass(frozen=True)
class Between(Wanted):
    """In ``Annotated[int, Between(0, 9)]``: an integer from ``low`` to ``high``; None: no bound.

    Python's integers and NumPy's are taken, booleans are not.
    """

    low: int | None = None
    high: int | None = None
    kind, excluded = Integral, (bool,)

    def __str__(self) -> str:
        if self.low is None:
            return "an integer"
        if self.high is None:
            return f"an integer >= {self.low}"
        return f"an integer in {self.low}..{self.high}"

    def in_range(self, value: Any) -> bool:
        enough = self.low is None or value >= self.low
        return enough and (self.high is None or value <= self.high)


@dataclass(frozen=True)
class Within(Wanted):
    """In ``Annotated[float, Within("[0, inf)")]``: a number in an interval; NaN is in none."""

    interval: str
    kind, excluded = Real, (bool, Fraction)  # torch takes no fractions

    def __str__(self) -> str:
        return f"a number in {self.interval}"

    def in_range(self, value: Any) -> bool:
        low, high = (float(end) for end in self.interval[1:-1].split(","))
        is_low = value == low and "[" in self.interval
        is_high = value == high and "]" in self.interval
        return low < value < high or is_low or is_high


@dataclass(frozen=True)
class Choice(Wanted):
    """One of some values; the type of each counts."""

    choices: tuple[object, ...]

    def __str__(self) -> str:
        return f"one of {self.choices}"

    def in_range(self, value: object) -> bool:
        return any(isinstance(value, type(each)) and value == each for each in self.choices)

    def remedy(self, value: object) -> str:
        return suggestion(value, self.choices)


@dataclass(frozen=True)
class Function(Wanted):
    """What can be called, with so many ``arguments`` by place if their number is given."""

    arguments: int | None

    def __str__(self) -> str:
        if self.arguments is None:
            return "a function"
        return f"a function of {self.arguments} argument(s)"

    def is_kind(self, value: object) -> bool:
        if not callable(value) or isinstance(value, type):
            return False
        try:
            if self.arguments is not None:
                inspect.signature(value).bind(*range(self.arguments))
        except ValueError:  # some built-in functions have no signature
            return True
        except TypeError:
            return False
        return True


PositiveInt = Annotated[int, Between(1)]
NonNegativeInt = Annotated[int, Between(0)]
PositiveFloat = Annotated[float, Within("(0, inf)")]
NonNegativeFloat = Annotated[float, Within("[0, inf)")]
Probability = Annotated[float, Within("[0, 1)")]


def check_type(name: str, value: object, wanted: Any, example: str = "") -> None:
    """Refuse an argument that is not an object of a class, or of one of a tuple of classes."""
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    require(name, value, [Instance(kind) for kind in kinds], example)


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Refuse anything but an integer from ``low`` on, up to ``high`` if that is given."""
    Between(low, high)(name, value)


def check_argument(function: Any, name: str, value: object) -> None:
    """Refuse what a :func:`checked` function would not take as this argument."""
    require(f"{_owner(function)}{name}", value, _arguments(function)[2][name])


def check_known(what: str, name: object, known: Collection[str]) -> None:
    """Refuse a name, such as that of an option, that is not known, with a ValueError."""
    if name not in list(known):
        raise ValueError(
            f"{what} {name!r} is unknown{suggestion(name, known)} (known: {', '.join(known)})"
        )


def check_like(name: str, value: object, like: Tensor, what: str) -> None:
    """Refuse what ``name`` returned unless it is a tensor as ``like`` is."""
    if not is_dense(value):
        raise TypeError(f"what {name} returns must be a Tensor like {what}, got {shown(value)}")
    if value.shape != like.shape or value.device != like.device:
        wanted, got = (f"{tuple(x.shape)} on {x.device}" for x in (like, value))
        raise ValueError(f"{name} must keep the shape and device of {what}, {wanted}, got {got}")
    if value.dtype != like.dtype and not torch.is_autocast_enabled(like.device.type):
        raise TypeError(f"{name} must keep the dtype of {what}, {like.dtype}, got {value.dtype}")


def versions(*tensors: Tensor) -> list[int]:
    """How often each was changed in place; in inference mode torch does not count."""
    return [x._version for x in tensors if not x.is_inference()]


def check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise an error unless ``ids`` are a batch of tokens of a vocabulary."""
    check_type(name, ids, Tensor)
    if ids.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {ids.dtype}: write {name}.long()")
    if ids.ndim != 2 or 0 in ids.shape or ids.is_meta:
        wanted = "shape (batch, length), neither of them 0, and values"
        raise ValueError(f"{name} must have {wanted}, got {tuple(ids.shape)} on {ids.device}")
    # an exported model does not check values; under vmap there are none, and the solve refuses it
    torch_c: Any = torch._C
    if torch.compiler.is_compiling() or torch_c._functorch.is_batchedtensor(ids):
        return
    low, high = torch.stack(torch.aminmax(ids)).tolist()  # one transfer
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} must lie in 0..{vocab_size - 1}, got {low}..{high}")


def suggestion(name: object, known: Iterable[object]) -> str:
    """``"; did you mean 'a' or 'b'?"``, or an empty string if no known name is close."""
    near = difflib.get_close_matches(str(name), list(map(str, known)))
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def shown(value: object) -> str:
    """A value in an error, without the numbers of a tensor or the layers of a model."""
    if isinstance(value, Tensor):
        layout = "" if is_dense(value) else f" in {value.layout}"
        return f"a tensor of {value.dtype} {tuple(value.shape)} on {value.device}{layout}"
    if inspect.isfunction(value):
        return f"{value.__name__}{inspect.signature(value)}"
    text = repr(value)
    if "\n" in text:
        return f"{type(value).__name__}(...)"
    return text if len(text) <= 120 else f"{text[:117]}..."


KEYWORDS = "**"
"""Stands for the keywords that a function takes by any name."""

ELSEWHERE = {
    "attention_mask": "mask",
    "use_cache": "return_cache",
    "past_key_values": "cache",
    "max_length": "max_new_tokens",
    "eos_token_id": "stop_tokens",
    "pad_token_id": "pad_token",
    "hidden_size": "d_model",
    "iterations": "exactly",
    "max_iter": "max_steps",
    "tol": "rtol",
    "tau": "damping",
}
"""Names of arguments in other libraries, and ours; ``exactly`` is that of a constructor."""


def checked(target: T) -> T:
    """Check the arguments of a function or a dataclass's constructor against their annotations.

    It reads checks in ``Annotated`` (:class:`Between`, :class:`Within`),
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
        >>> from deqseq.arguments import Between, checked
        >>> @checked
        ... def repeat(text: str, times: Annotated[int, Between(1)] = 2) -> str:
        ...     return text * times
        >>> repeat("ab", times=0)
        Traceback (most recent call last):
        ValueError: times must be an integer >= 1, got 0
    """
    if isinstance(target, type):
        target.__init__ = _checking(target.__init__)
        return target
    return _checking(target)


def _checking(function: Any) -> Any:
    prefix = _owner(function)

    @functools.wraps(function)
    def with_checks(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            places, further, wanted = _arguments(function)
            if len(args) > len(places) and not further:
                raise _too_many(function, args, places, wanted)
            by_place = zip(chain(places, repeat(further)), args, strict=False)
            for name, value in chain(by_place, kwargs.items()):
                alternatives = wanted.get(name, wanted.get(KEYWORDS))
                if alternatives is None:
                    raise _unknown(function, name, wanted)
                if alternatives:
                    require(prefix + name, value, alternatives)
        return function(*args, **kwargs)

    return with_checks


def _too_many(function: Any, args: Any, places: list[str], known: Collection[str]) -> TypeError:
    """The error for more positional arguments than are taken."""
    bound = len({"self", "cls"} & {*places})
    named = ", ".join(name for name in known if name not in (*places, "", KEYWORDS))
    wanted = f"{len(places) - bound} positional argument(s) ({', '.join(places[bound:])})"
    others = f": give the others by name ({named})" if named else ""
    called = function.__qualname__.removesuffix(".__init__")
    return TypeError(f"{called} takes {wanted}, got {len(args) - bound}{others}")


def _owner(function: Any) -> str:
    """The class of a constructor, with a dot."""
    return function.__qualname__.split(".")[-2] + "." if function.__name__ == "__init__" else ""


@functools.cache  # at the first call, when every class that an annotation names exists
def _arguments(function: Any) -> tuple[list[str], str, dict[str, list[Wanted]]]:
    """The names of arguments by place, that of all further ones, and what each may be."""
    places, further, wanted = [], "", {"": []}
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError:  # a string names a local class: strings are not checked
        hints = function.__annotations__
    for name, argument in inspect.signature(function).parameters.items():
        hint = hints.get(name, Any)
        if argument.kind in (argument.POSITIONAL_ONLY, argument.POSITIONAL_OR_KEYWORD):
            places.append(name)
        elif argument.kind is argument.VAR_POSITIONAL:
            further = name
        elif get_origin(hint) is Unpack:
            fields = get_type_hints(get_args(hint)[0], include_extras=True)
            wanted |= {field: _wanted(field_hint) for field, field_hint in fields.items()}
            continue
        elif argument.kind is argument.VAR_KEYWORD:
            name = KEYWORDS
        wanted[name] = _wanted(hint)
    return places, further, wanted


def _unknown(function: Any, name: str, wanted: dict[str, list[Wanted]]) -> TypeError:
    """The error for a keyword that a function does not take, with what may be meant."""
    ours = ELSEWHERE.get(name, name)
    taken = [each for each in wanted if each not in ("", "self", "cls")]
    hint = suggestion(name, taken)
    written = [
        f"{argument}={holder}"
        for argument, alternatives in wanted.items()
        for each in alternatives
        if (holder := _holder(each.kind, ours))
    ]
    if written:
        hint = f": write {min(written, key=len)}"
    if ours in taken:
        hint = f"; did you mean {ours!r}?"
    called = function.__qualname__.removesuffix(".__init__")
    text = f"unknown argument {name!r}{hint} ({called} takes: {', '.join(taken)})"
    if name in ("attention_mask", "num_items_in_batch") and "CausalLM" in called:  # the Trainer's
        text += "; the Trainer takes deqseq.integrations.huggingface.from_causal_lm(model)"
    return TypeError(text)


def _holder(kind: Any, name: str) -> str:
    """How a dataclass that takes ``name``, or one in a field of it, is written; "": none does."""
    if not isinstance(kind, type) or not is_dataclass(kind):
        return ""
    if isinstance(vars(kind).get(name), classmethod):
        return f"{kind.__name__}.{name}(...)"
    for field in fields(kind):
        if field.name == name:
            return f"{kind.__name__}({name}=...)"
        if inner := _holder(field.type, name):
            return f"{kind.__name__}({field.name}={inner})"
    return ""


def _wanted(annotation: Any) -> list[Wanted]:
    """What an annotation says that a value may be; an empty list: anything."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        notes = [note for note in parts[1:] if isinstance(note, Wanted)]
        return notes or _wanted(parts[0])
    if origin in (Union, types.UnionType):
        alternatives = [_wanted(part) for part in parts]
        return list(chain(*alternatives)) if all(alternatives) else []
    if origin is Literal:
        return [Choice(parts)]
    if origin is Callable:
        return [Function(len(parts[0]) if isinstance(parts[0], list) else None)]
    if annotation in (int, float):
        return [Between() if annotation is int else Within("(-inf, inf)")]
    kind = origin or annotation  # `Solver` of `Solver[Any]`
    try:
        if issubclass(kind, AbstractArray):
            return [Instance(Tensor)]
        isinstance(None, kind)
    except TypeError:  # Any, a TypedDict, a Protocol, the name of a local class
        return []
    return [Instance(kind)]
