"""Arguments are checked where they are given: an error names the argument, what it got and what it wants.

What an argument may be stands in its annotation, and :func:`checked` reads it there.
"""

import difflib
import functools
import inspect
import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain, repeat
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from jaxtyping import AbstractArray
from torch import Tensor, nn

Kind = type | tuple[type, ...]
T = TypeVar("T")
Check = Callable[[str, Any], None]
"""Raises an error that names the argument, its first, unless the second is what it may be."""

EXAMPLES = {
    "Solver": "dq.Anderson()",
    "Stop": "dq.Stop(rtol=1e-3)",
    "Gradient": "dq.Phantom(4)",
    "Sweep": "dq.Sliding(8)",
    "SolveConfig": "dq.SolveConfig(solver=dq.Anderson())",
    "Backbone": "dq.Mamba2(dq.Mamba2Config(d_model=64))",
    "Mamba2Config": "dq.Mamba2Config(d_model=64)",
    "LlamaConfig": "dq.LlamaConfig(d_model=64)",
    "RotaryScaling": "RotaryScaling(8.0)",
    "Injection": "dq.ConcatInjection(64)",
    "Model": "dq.ImplicitModel(backbone)",
    "ImplicitModel": "dq.ImplicitModel(backbone)",
    "ExplicitModel": "dq.ExplicitModel(backbone)",
    "CausalLM": "dq.CausalLM(vocab_size, dq.ImplicitModel(backbone))",
    "Evaluation": "model.evaluate(x)",
    "LanguageModelSpec": 'dq.preset("mamba2-130m-implicit")',
    "PreTrainedModel": "AutoModelForCausalLM.from_pretrained(name)",
    "Curriculum": "training.Curriculum((training.bounded(), training.free()))",
    "Phase": "training.free()",
    "PoissonLogNormal": "training.PoissonLogNormal(32)",
    "FiniteMonoid": "tasks.alternating(5)",
    "slice": "slice(4, 12)",
    "Generator": "torch.Generator().manual_seed(0)",
    "dtype": "torch.bfloat16",
}
"""What to write where an object of a class is wanted."""

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


def check_type(name: str, value: object, wanted: Kind, example: str = "") -> None:
    """Refuse an argument that is no object of a class."""
    if isinstance(value, wanted):
        return
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    names = " or ".join(_called(kind) for kind in kinds)
    example = example or EXAMPLES.get(kinds[0].__name__, "")
    such = f", such as {example}" if example else ""
    raise TypeError(f"{name} must be {names}{such}, got {_shown(value)}{_remedy(value, kinds)}")


def check_integer(name: str, value: object, low: int, high: int | float = math.inf) -> None:
    """Refuse anything but an integer in ``low..high``; Python's and NumPy's are taken, booleans are not."""
    wanted = f"an integer >= {low}" if high == math.inf else f"an integer in {low}..{high}"
    _check_number(name, value, Integral, wanted, lambda x: low <= x <= high)


def check_number(name: str, value: object, interval: str) -> None:
    """Refuse anything but a number in an interval, written as in ``"[0, inf)"``; NaN is in none."""
    low, high = (float(end) for end in interval[1:-1].split(","))

    above = (lambda x: low <= x) if interval[0] == "[" else (lambda x: low < x)
    below = (lambda x: x <= high) if interval[-1] == "]" else (lambda x: x < high)
    _check_number(name, value, Real, f"a number in {interval}", lambda x: above(x) and below(x))


def check_bounds(name: str, value: Any) -> None:
    """Refuse anything but two ordered bounds, the lower from 0 on, with a TypeError or a ValueError."""
    check_type(name, value, (tuple, list), "(0.0, 0.1)")
    if len(value) != 2:
        raise ValueError(f"{name} must be two bounds, got {value!r}")
    check_number(f"{name}[0]", value[0], "[0, inf)")
    check_number(f"{name}[1]", value[1], f"[{value[0]}, inf]")


def check_flag(name: str, value: object) -> None:
    """Refuse anything but True and False with a TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_shown(value)}")


def check_choice(name: str, value: object, choices: Iterable[object], kinds: tuple[type, ...] = ()) -> None:
    """Refuse anything but one of the ``choices``, or an object of one of the ``kinds``, with a ValueError."""
    known = tuple(choices)
    if isinstance(value, kinds) or any(type(value) is type(one) and value == one for one in known):
        return
    hint = suggestion(value, [one for one in known if isinstance(one, str)]) if isinstance(value, str) else ""
    others = "".join(f" or {_called(kind)}" for kind in kinds)
    raise ValueError(f"{name} must be one of {known}{others}, got {_shown(value)}{hint or _remedy(value, kinds)}")


def check_known(what: str, name: object, known: Collection[str]) -> None:
    """Refuse a name, such as that of an option, that is not known, with a ValueError."""
    if name not in list(known):
        raise ValueError(f"{what} {name!r} is unknown{suggestion(str(name), known)} (known: {', '.join(known)})")


def check_callable(name: str, value: object) -> None:
    """Refuse anything that cannot be called with a TypeError."""
    if not callable(value) or isinstance(value, type):
        raise TypeError(f"{name} must be a function, got {_shown(value)}")


def check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise an error unless ``ids`` are a batch of tokens of a vocabulary."""
    check_type(name, ids, Tensor)
    if ids.ndim != 2 or 0 in ids.shape or ids.dtype != torch.int64:
        raise ValueError(
            f"{name} must be int64 of shape (batch, length), none of them 0, got {ids.dtype} {tuple(ids.shape)}"
        )
    if torch.compiler.is_compiling():  # an exported model takes what it is given
        return
    low, high = torch.stack(torch.aminmax(ids)).tolist()  # one transfer
    if low < 0 or high >= vocab_size:
        raise ValueError(f"{name} must lie in 0..{vocab_size - 1}, got {low}..{high}")


def suggestion(name: str, known: Iterable[str]) -> str:
    """``"; did you mean 'a' or 'b'?"``, or an empty string if no known name is close."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""


def plain_number(value: Real) -> int | float:
    """A number as JSON knows it, from one of NumPy's, say."""
    return int(value) if isinstance(value, Integral) else float(value)


def _check_number(name: str, value: Any, kind: type, wanted: str, inside: Any) -> None:
    if isinstance(value, bool | Fraction) or not isinstance(value, kind):  # torch takes no fractions
        raise TypeError(f"{name} must be {wanted}, got {_shown(value)}")
    if not inside(value):
        raise ValueError(f"{name} must be {wanted}, got {_shown(value)}")


def _shown(value: object) -> str:
    """A value in an error, without the numbers of a tensor or the layers of a model."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    text = f"{type(value).__name__}(...)" if isinstance(value, nn.Module) else repr(value)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _called(kind: type) -> str:
    if kind is type(None):
        return "None"
    return f"a{'n' if kind.__name__[0] in 'AEIOU' else ''} {kind.__name__}"


def _remedy(value: object, kinds: tuple[type, ...]) -> str:
    """What to write instead of a class or of its name."""
    own = [kind for kind in kinds if kind.__module__.startswith("deqseq")]  # there are many kinds of Mapping
    known = {one.__name__: one for kind in own for one in _below(kind)}
    if isinstance(value, type) and value in known.values():
        return f": write {value.__name__}(...)"
    if isinstance(value, str):
        folded = {name.lower(): name for name in known}
        near = difflib.get_close_matches(value.lower().replace("_", ""), list(folded), n=1, cutoff=0.5)
        return f": write {folded[near[0]]}(...)" if near else ""
    return ""


def _below(kind: type) -> Iterator[type]:
    """A class and all that inherit from it."""
    yield kind
    for one in type.__subclasses__(kind):
        yield from _below(one)


PLAIN: dict[Any, Check] = {
    bool: check_flag,
    int: functools.partial(check_integer, low=-(2**63), high=2**63 - 1),
    float: functools.partial(check_number, interval="(-inf, inf)"),
}
"""What annotations without a range ask for."""
