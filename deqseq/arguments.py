"""Checks of arguments: an error names the argument, what it got and what it wants.

Most are called by :func:`checked`, which reads what an argument takes from its annotation.
"""

import difflib
import functools
import inspect
import math
import types
from collections.abc import Callable, Collection, Iterable, Iterator
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
from torch import Tensor, nn

Kind = type | tuple[type, ...]

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
    "FiniteMonoid": 'tasks.parse_group("A5")',
    "slice": "slice(4, 12)",
    "Generator": "torch.Generator().manual_seed(0)",
    "dtype": "torch.bfloat16",
}
"""What to write where an object of a class is wanted."""


def check_type(name: str, value: object, wanted: Kind, example: str = "") -> None:
    """Refuse an argument that is not an object of a class, or of one of several."""
    if not isinstance(value, wanted):
        raise wrong_type(name, value, wanted if isinstance(wanted, tuple) else (wanted,), example)


def wrong_type(name: str, value: object, kinds: tuple[type, ...], example: str = "") -> TypeError:
    """The error for an argument that is not an object of one of these classes."""
    names = " or ".join(_called(kind) for kind in kinds)
    example = example or EXAMPLES.get(kinds[0].__name__, "")
    such = f", such as {example}" if example else ""
    return TypeError(f"{name} must be {names}{such}, got {_shown(value)}{_remedy(value, kinds)}")


def check_integer(name: str, value: object, low: int, high: int | float = math.inf) -> None:
    """Refuse anything but an integer in ``low..high``; Python's and NumPy's are taken, booleans are
    not.
    """
    wanted = f"an integer >= {low}" if high == math.inf else f"an integer in {low}..{high}"
    _check_number(name, value, Integral, wanted, lambda x: low <= x <= high)


def check_number(name: str, value: object, interval: str) -> None:
    """Refuse anything but a number in an interval, written as in ``"[0, inf)"``; NaN is in none."""
    _check_number(name, value, Real, f"a number in {interval}", _inside(interval))


def check_bounds(name: str, value: Any) -> None:
    """Refuse anything but two ordered bounds, the lower from 0 on, with a TypeError or a
    ValueError.
    """
    check_type(name, value, (tuple, list), "(0.0, 0.1)")
    if len(value) != 2:
        raise ValueError(f"{name} must be two bounds, got {value!r}")
    check_number(f"{name}[0]", value[0], "[0, inf)")
    check_number(f"{name}[1]", value[1], f"[{value[0]}, inf]")


def check_flag(name: str, value: object) -> None:
    """Refuse anything but True and False with a TypeError."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {_shown(value)}")


def check_choice(
    name: str, value: object, choices: Iterable[object], kinds: tuple[type, ...] = ()
) -> None:
    """Refuse anything but one of the ``choices``, or an object of one of the ``kinds``, with a
    ValueError.
    """
    known = tuple(choices)
    if isinstance(value, kinds) or any(
        isinstance(value, type(one)) and value == one for one in known
    ):
        return
    hint = (
        suggestion(value, [one for one in known if isinstance(one, str)])
        if isinstance(value, str)
        else ""
    )
    others = "".join(f" or {_called(kind)}" for kind in kinds)
    raise ValueError(
        f"{name} must be one of {known}{others}, got {_shown(value)}{hint or _remedy(value, kinds)}"
    )


def check_known(what: str, name: object, known: Collection[str]) -> None:
    """Refuse a name, such as that of an option, that is not known, with a ValueError."""
    if name not in list(known):
        raise ValueError(
            f"{what} {name!r} is unknown{suggestion(str(name), known)} (known: {', '.join(known)})"
        )


def check_callable(name: str, value: object, arguments: int | None = None) -> None:
    """Refuse anything that cannot be called, or not with so many ``arguments`` by place, with a
    TypeError.
    """
    if not callable(value) or isinstance(value, type):
        raise TypeError(f"{name} must be a function, got {_shown(value)}")
    if (
        arguments is None
        or getattr(getattr(value, "__code__", None), "co_argcount", None) == arguments
    ):
        return  # a plain function: a signature takes 20 microseconds
    try:
        signature = inspect.signature(value)
    except ValueError:  # some built-in functions have none
        return
    try:
        signature.bind(*range(arguments))
    except TypeError as error:
        raise TypeError(
            f"{name} must be a function of {arguments} argument(s), got one of {signature}"
        ) from error


def check_like(name: str, value: object, like: Tensor, what: str) -> None:
    """Refuse what ``name`` returned unless it is a tensor as ``like`` is; under autocast its dtype
    may differ.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"what {name} returns must be a Tensor like {what}, got {_shown(value)}")
    if value.shape != like.shape or value.device != like.device:
        wanted, got = (f"{tuple(one.shape)} on {one.device}" for one in (like, value))
        raise ValueError(f"{name} must keep the shape and device of {what}, {wanted}, got {got}")
    if value.dtype != like.dtype and not torch.is_autocast_enabled(like.device.type):
        raise TypeError(f"{name} must keep the dtype of {what}, {like.dtype}, got {value.dtype}")


def versions(*tensors: Tensor) -> list[int]:
    """How often each was changed in place; in inference mode torch does not count."""
    return [x._version for x in tensors if not x.is_inference()]


def returned_by(
    name: str, call: Callable[..., Any], *inputs: Tensor, like: Tensor, what: str
) -> Tensor:
    """What a user's object returns for ``inputs``: a tensor as ``like`` is; an error of torch names
    the object.
    """
    try:
        value = call(*inputs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise ValueError(
            f"{name} cannot take {' and '.join(map(_shown, inputs))}: {error}"
        ) from error
    check_like(name, value, like, what)
    return value


def check_ids(name: str, ids: Tensor, vocab_size: int) -> None:
    """Raise an error unless ``ids`` are a batch of tokens of a vocabulary."""
    check_type(name, ids, Tensor)
    if ids.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {ids.dtype}: write {name}.long()")
    if ids.ndim != 2:
        raise ValueError(f"{name} must have shape (batch, length), got {tuple(ids.shape)}")
    if 0 in ids.shape:
        raise ValueError(
            f"{name} must have at least one row and one token, got shape {tuple(ids.shape)}"
        )
    # an exported model takes what it is given; under vmap there are no values to look at, and the
    # solve refuses it
    torch_c: Any = torch._C
    if torch.compiler.is_compiling() or torch_c._functorch.is_batchedtensor(ids):
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


@functools.cache
def _inside(interval: str) -> Callable[[Any], bool]:
    """Whether a number is in an interval."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = (lambda x: low <= x) if interval[0] == "[" else (lambda x: low < x)
    below = (lambda x: x <= high) if interval[-1] == "]" else (lambda x: x < high)
    return lambda x: above(x) and below(x)


def _check_number(name: str, value: Any, kind: type, wanted: str, inside: Any) -> None:
    if isinstance(value, bool | Fraction) or not isinstance(
        value, kind
    ):  # torch takes no fractions
        raise TypeError(f"{name} must be {wanted}, got {_shown(value)}")
    if not inside(value):
        raise ValueError(f"{name} must be {wanted}, got {_shown(value)}")


def _shown(value: object) -> str:
    """A value in an error, without the numbers of a tensor or the layers of a model."""
    if isinstance(value, Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)}"
    text = repr(value)
    if isinstance(value, nn.Module) or "\n" in text:
        return f"{type(value).__name__}(...)"
    return text if len(text) <= 120 else f"{text[:117]}..."


def _called(kind: type) -> str:
    plain = {
        type(None): "None",
        bool: "True or False",
        int: "an integer",
        float: "a number",
        str: "a string",
    }
    return plain.get(kind) or f"a{'n' if kind.__name__[0] in 'AEIOUaeiou' else ''} {kind.__name__}"


def _remedy(value: object, kinds: tuple[type, ...]) -> str:
    """What to write instead of a class, of its name, or of a model of transformers."""
    if type(value).__module__.startswith("transformers.") and isinstance(value, nn.Module):
        return ": deqseq.integrations.huggingface.retrofit(model, ...) makes an implicit one of it"
    if (
        isinstance(value, tuple | list)
        and Tensor in kinds
        and all(isinstance(part, Tensor) for part in value)
    ):
        return (
            ": join them as one tensor (torch.cat along the last dimension), and split it inside f"
        )
    own = [
        kind for kind in kinds if kind.__module__.startswith("deqseq")
    ]  # there are many kinds of Mapping
    known = {one.__name__: one for kind in own for one in _below(kind)}
    if isinstance(value, type) and value in known.values():
        return f": write {value.__name__}(...)"
    if isinstance(value, str):
        folded = {name.lower(): name for name in known}
        near = difflib.get_close_matches(
            value.lower().replace("_", ""), list(folded), n=1, cutoff=0.5
        )
        return f": write {folded[near[0]]}(...)" if near else ""
    return ""


def _below(kind: type) -> Iterator[type]:
    """A class and all that inherit from it."""
    yield kind
    for one in type.__subclasses__(kind):
        yield from _below(one)


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
