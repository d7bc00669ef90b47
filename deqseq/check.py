"""Checks of arguments: an error names the argument, what it got and what it wants.

Most are called by :func:`deqseq.annotations.checked`, which reads what an argument takes from its
annotation.
"""

import difflib
import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

import torch
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
