"""Bad values, generated from the annotations of every public name, and returned by parts that users
write.

An error is clear if it is a TypeError or ValueError that names the argument or the part. ``python
tests/test_bad_values.py`` lists the others.
"""

import inspect
import math
import re
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    Union,
    Unpack,
    get_args,
    get_origin,
    get_type_hints,
)

import pytest
import torch
from torch import Tensor, nn

import deqseq as dq
from deqseq import diagnostics, layers, ops, tasks, training
from deqseq.arguments import AtLeast, Between, Within
from deqseq.integrations import foreign
from deqseq.integrations.foreign import OuroGate
from deqseq.integrations.torchdeq import TorchDEQ

MODULES = (dq, diagnostics, layers, ops, tasks, training, foreign)
X, IDS = torch.ones(2, 6, 8), torch.tensor([[1, 2, 3], [3, 2, 1]])
NEITHER = object()


def bad_values(annotation: Any) -> list[Any]:
    """Values that an annotation does not take; none if it takes anything, or does not say."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return [bad for note in parts[1:] for bad in outside(note)] or bad_values(parts[0])
    if origin is Union or origin is types.UnionType:
        each = [bad_values(part) for part in parts if part is not type(None)]
        return [NEITHER, 1j] if all(each) else []
    if origin is Literal:
        return ["misspelt", NEITHER, [], math.nan]
    if origin is Callable or getattr(origin, "__name__", "") == "Callable":
        return [3, "text", NEITHER, *([lambda: None] if isinstance(parts[0], list) else ())]
    if annotation is bool:
        return ["yes", 1, NEITHER]
    if annotation in (int, float):
        return ["3", NEITHER, 1j, math.nan, True]
    kind = origin or annotation
    plain = isinstance(kind, type) and kind not in (object, Any)
    return [3, NEITHER, 1j, kind] if plain and getattr(kind, "_is_protocol", False) is False else []


def outside(note: Any) -> list[Any]:
    if isinstance(note, AtLeast | Between):
        return [
            note.low - 1,
            *([note.high + 1] if isinstance(note, Between) else ()),
            1.5,
            "3",
            True,
            math.nan,
            NEITHER,
        ]
    if isinstance(note, Within):
        low, high = (float(end) for end in note.interval[1:-1].split(","))
        return [
            low - 1 if low > -math.inf else math.nan,
            high + 1 if high < math.inf else math.nan,
            "0.1",
            True,
            NEITHER,
        ]
    return []


def functions() -> Iterator[Callable[..., Any]]:
    """Every public function, constructor and method that checks its arguments."""
    public = [getattr(module, name) for module in MODULES for name in module.__all__]
    for owner in dict.fromkeys(
        one for one in [*public, TorchDEQ] if inspect.isroutine(one) or isinstance(one, type)
    ):
        members = vars(owner).values() if isinstance(owner, type) else [owner]
        for one in (getattr(member, "__func__", member) for member in members):
            if (
                inspect.isfunction(one)
                and one.__module__.startswith("deqseq")
                and is_checked(owner, one)
            ):
                yield one


def is_checked(owner: Any, function: Callable[..., Any]) -> bool:
    """Whether the source says so, for a constructor that was generated at its dataclass."""
    if inspect.unwrap(function).__code__.co_filename != "<string>":
        return inspect.getsource(function).lstrip().startswith(("@checked", "@classmethod"))
    written = rf"^@checked\n(?:@.*\n)*class {owner.__name__}\b"
    module = inspect.getsource(sys.modules[owner.__module__])
    return function.__name__ == "__init__" and re.search(written, module, re.MULTILINE) is not None


def arguments(function: Callable[..., Any]) -> dict[str, Any]:
    """Its arguments that can be given by name, and their annotations."""
    hints, found = get_type_hints(function, include_extras=True), {}
    for one in inspect.signature(function).parameters.values():
        hint = hints.get(one.name, Any)
        if one.kind is one.VAR_KEYWORD and get_origin(hint) is Unpack:
            found |= get_type_hints(get_args(hint)[0], include_extras=True)
        elif one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD) and one.name not in (
            "self",
            "cls",
        ):
            found[one.name] = hint
    return found


class Met(NamedTuple):
    """What a bad value met."""

    where: str
    name: str
    value: str
    verdict: str
    error: str


def shown(value: object) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def met(where: str, name: str, value: object, call: Callable[[], Any]) -> Met:
    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            call()
    except Exception as error:
        clear = isinstance(error, TypeError | ValueError) and re.search(rf"\b{name}\b", str(error))
        return Met(
            where,
            name,
            shown(value),
            "clear" if clear else "obscure",
            f"{type(error).__name__}: {error}",
        )
    return Met(where, name, shown(value), "silent", "")


def from_annotations() -> Iterator[Met]:
    """One bad argument, or one that does not exist, and no others: they are checked first."""
    for function in functions():
        first = [None] * ("self" in inspect.signature(function).parameters)
        each = [
            (name, bad) for name, hint in arguments(function).items() for bad in bad_values(hint)
        ]
        for name, bad in (*each, ("misspelt", 1)):
            yield met(function.__qualname__, name, bad, partial(function, *first, **{name: bad}))


SPOILED: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: None,
    "a number": lambda x: 3.0,
    "a text": lambda x: "text",
    "an object": lambda x: NEITHER,
    "a triple": lambda x: (x, x, x),
    "a list": lambda x: [x],
    "an array": lambda x: x.detach().numpy(),
    "float64": lambda x: x.double(),
    "float16": lambda x: x.half(),
    "integers": lambda x: x.long(),
    "flags": lambda x: x > 0,
    "one row": lambda x: x[:1],
    "another length": lambda x: x[:, : x.shape[1] > 1],  # one token, which would broadcast, or none
    "two dimensions": lambda x: x[..., 0],
    "four dimensions": lambda x: x[None],
    "another device": lambda x: x.to("meta"),
}
"""What a part of the user's returns instead of a tensor."""


def spoiled(part: Any, method: str, change: Callable[[Any], Any]) -> Any:
    """A part whose method returns something else."""
    original = getattr(part, method)
    part.__dict__[method] = lambda *args, **kwargs: change(original(*args, **kwargs))
    return part


class TheirLoop(dq.ExternalSolver):
    def run(self, f, z0, stop):
        return f(z0)


def swept(change: Callable[[Any], Any], sweep: dq.Sweep) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Solves with a part whose tensor is changed, and what an error must name."""

    def solved(backbone: dq.Backbone[Any], solver: dq.Solver[Any]) -> Callable[[], Any]:
        return lambda: dq.ImplicitModel(backbone)(X, solver=solver, sweep=sweep, return_cache=True)

    for method in ("enter", "prepare"):
        layers = dq.Llama(dq.LlamaConfig(8, n_heads=2, injection=False))
        injected = dq.Injected(layers, spoiled(dq.AddInjection(), method, change))
        yield f"AddInjection.{method}", solved(injected, dq.Naive())
    yield (
        "Affine.forward",
        solved(
            spoiled(dq.Affine(8), "forward", lambda pair: (change(pair[0]), pair[1])), dq.Naive()
        ),
    )
    yield (
        "Affine.advance",
        solved(spoiled(dq.Affine(8), "advance", lambda c: change(c.previous)), dq.Naive()),
    )
    yield (
        "Naive.step",
        solved(dq.Affine(8), spoiled(dq.Naive(), "step", lambda pair: (change(pair[0]), pair[1]))),
    )
    if sweep != dq.Sliding(2):
        yield "TheirLoop.run", solved(dq.Affine(8), spoiled(TheirLoop(), "run", change))


def called(change: Callable[[Any], Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Other calls with such a part."""
    explicit, implicit = dq.ExplicitModel(dq.Affine(8)), dq.ImplicitModel(dq.Affine(8))
    backbone = spoiled(dq.Affine(8), "forward", lambda pair: (change(pair[0]), pair[1]))
    yield "Affine.forward", lambda: dq.ExplicitModel(backbone)(X)
    yield "Affine.forward", lambda: dq.ImplicitModel(backbone).evaluate(X)
    gate, norm = (
        spoiled(nn.Linear(8, 1), "forward", change),
        spoiled(nn.Identity(), "forward", change),
    )
    for name, choose in (
        ("OuroGate.linear", OuroGate(gate, 0.5)),
        ("Looped.choose", lambda x: change(x[-1])),
    ):
        yield name, partial(dq.ExplicitModel(dq.Looped(dq.Affine(8), 3, choose)), X)
    yield "RecurrentDepth.norm", partial(dq.RecurrentDepth(explicit, implicit, explicit, norm), X)
    estimator = spoiled(dq.Phantom(), "apply", lambda one: change(one.value))
    yield "Phantom.apply", partial(implicit, X, gradient=estimator)
    yield "Phantom.apply", partial(dq.fixed_point, nn.Linear(8, 8), X, gradient=estimator)
    task = spoiled(
        tasks.WordProblem(tasks.parse_group("Z3")), "draw", lambda batch: change(batch.inputs)
    )
    yield "draw", partial(task.fixed, 2, 6, seed=0)
    f, stop = spoiled(nn.Linear(8, 8), "forward", lambda z: change(z / 4)), dq.Stop(max_steps=8)
    yield "f", partial(dq.solve, f, X, solver=dq.Anderson(), stop=stop)
    yield "f", partial(dq.solve, lambda z: (f(z), z), X, solver=dq.Naive(), stop=stop, has_aux=True)
    for gradient in (dq.Implicit(), dq.Phantom(), dq.OneStep(), dq.Unrolled()):
        yield "f", partial(dq.fixed_point, f, X, stop=stop, gradient=gradient)
    for function in (training.jacobian_regularisation, diagnostics.spectral_radius):
        yield "f", partial(function, f, X)


def returned() -> Iterator[Met]:
    for label, change in SPOILED.items():
        solves = [
            swept(change, sweep) for sweep in (dq.Simultaneous(), dq.Sliding(2), dq.Sequential())
        ]
        for name, call in chain(called(change), *solves):
            yield met(name, name, label, call)


def unclear(found: list[Met]) -> str:
    return "\n".join(str(one) for one in found if one.verdict != "clear")


def assert_clear(found: list[Met], least: int) -> None:
    count = Counter(one.verdict for one in found)
    assert len(found) >= least
    assert count["silent"] == 0, unclear(found)
    assert count["clear"] >= 0.98 * len(found), unclear(found)


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("source", "least"), [(from_annotations, 1330), (returned, 525)])
def test_bad_values_are_named(source, least):
    assert_clear(list(source()), least)


if __name__ == "__main__":
    everything = [*from_annotations(), *returned()]
    print(unclear(everything), Counter(one.verdict for one in everything), sep="\n")
