"""Bad values, of arguments of every public name and returned by parts that users write.

An error is clear if it is a TypeError or ValueError that names the argument or the part.
"""

import inspect
import math
import re
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
from deqseq.arguments import Between, Within
from deqseq.integrations import foreign
from deqseq.integrations.torchdeq import TorchDEQ

MODULES = (dq, diagnostics, layers, ops, tasks, training, foreign)
X = torch.ones(2, 6, 8)
IDS = torch.tensor([[1, 2, 3], [3, 2, 1]])
NEITHER = object()


def bad_values(annotation):
    """Values that an annotation does not take; none if it takes anything, or does not say."""
    origin = get_origin(annotation)
    parts = get_args(annotation)
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


def outside(note):
    """Values outside the range that an annotation notes; infinity plus one becomes NaN."""
    if isinstance(note, Within):
        low, high = (float(end) for end in note.interval[1:-1].split(","))
        beyond = [low - 1, high + 1]
    elif isinstance(note, Between):
        beyond = [note.low - 1, (math.nan if note.high is None else note.high) + 1, 1.5]
    else:
        return []
    finite = [number if math.isfinite(number) else math.nan for number in beyond]
    return [*finite, "0.1", True, NEITHER]


def functions():
    """Every public function, constructor and method that checks its arguments."""
    public = [getattr(module, name) for module in MODULES for name in module.__all__]
    for owner in dict.fromkeys([*filter(callable, public), TorchDEQ]):
        members = vars(owner).values() if isinstance(owner, type) else [owner]
        for member in members:
            function = getattr(member, "__func__", member)
            if inspect.isfunction(function) and is_checked(owner, function):
                yield function


def is_checked(owner, function):
    """Whether the source says so: that of the class, for a constructor of a dataclass."""
    if not function.__module__.startswith("deqseq"):
        return False
    generated = inspect.unwrap(function).__code__.co_filename == "<string>"
    if generated and function.__name__ != "__init__":
        return False
    source = inspect.getsource(owner if generated else function)
    return source.lstrip().startswith(("@checked", "@classmethod"))


def arguments(function):
    """Its arguments that can be given by name, and their annotations."""
    hints = get_type_hints(function, include_extras=True)
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint = hints.get(name, Any)
        if parameter.kind is parameter.VAR_KEYWORD and get_origin(hint) is Unpack:
            found |= get_type_hints(get_args(hint)[0], include_extras=True)
        elif parameter.kind in (parameter.KEYWORD_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            found[name] = hint
    found.pop("self", None)
    return found


class Met(NamedTuple):
    """What a bad value met."""

    verdict: str
    line: str


def shown(value):
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


def met(where, name, value, call):
    torch.manual_seed(0)
    verdict = "silent"
    error = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            call()
        except Exception as caught:
            error = repr(caught)
            named = re.search(rf"\b{name}\b", str(caught))
            clear = named and isinstance(caught, TypeError | ValueError)
            verdict = "clear" if clear else "obscure"
    return Met(verdict, f"{where}, {name}={shown(value)}: {verdict}, {error}")


def from_annotations():
    """One bad argument, or one that does not exist, and no others: they are checked first."""
    for function in functions():
        method = "self" in inspect.signature(function).parameters
        call = partial(function, None) if method else function
        for name, hint in arguments(function).items():
            for bad in bad_values(hint):
                yield met(function.__qualname__, name, bad, partial(call, **{name: bad}))
        yield met(function.__qualname__, "misspelt", 1, partial(call, misspelt=1))


SPOILED: dict[str, Callable[[Tensor], Any]] = {
    "nothing": lambda x: None,
    "a number": lambda x: 3.0,
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
    "sparse": lambda x: x.to_sparse(),
}
"""What a part of the user's returns instead of a tensor."""


def spoiled(part, method, change):
    """A part whose method returns something else."""
    original = getattr(part, method)
    part.__dict__[method] = lambda *args, **kwargs: change(original(*args, **kwargs))
    return part


class TheirLoop(dq.ExternalSolver):
    def run(self, f, z0, stop):
        return f(z0)


Calls = Iterator[tuple[str, Callable[[], Any]]]
"""What an error must name, and a call with a part whose tensor is changed."""


def swept(change, sweep):
    """Solves of a model by a sweep."""

    def first(pair):
        return change(pair[0]), pair[1]

    def solved(backbone, solver):
        model = dq.ImplicitModel(backbone)
        return partial(model, X, solver=solver, sweep=sweep, return_cache=True)

    for method in ("enter", "prepare"):
        layers = dq.Llama(dq.LlamaConfig(8, n_heads=2, injection=False))
        injected = dq.Injected(layers, spoiled(dq.AddInjection(), method, change))
        yield f"AddInjection.{method}", solved(injected, dq.Naive())
    backbone = spoiled(dq.Affine(8), "forward", first)
    yield "Affine.forward", solved(backbone, dq.Naive())
    backbone = spoiled(dq.Affine(8), "advance", lambda cache: change(cache.previous))
    yield "Affine.advance", solved(backbone, dq.Naive())
    yield "Naive.step", solved(dq.Affine(8), spoiled(dq.Naive(), "step", first))
    if sweep != dq.Sliding(2):
        yield "TheirLoop.run", solved(dq.Affine(8), spoiled(TheirLoop(), "run", change))


def called(change):
    """Other calls with such a part."""
    explicit = dq.ExplicitModel(dq.Affine(8))
    implicit = dq.ImplicitModel(dq.Affine(8))
    backbone = spoiled(dq.Affine(8), "forward", lambda pair: (change(pair[0]), pair[1]))
    yield "Affine.forward", partial(dq.ExplicitModel(backbone), X)
    yield "Affine.forward", partial(dq.ImplicitModel(backbone).evaluate, X)
    norm = spoiled(nn.Identity(), "forward", change)
    yield "RecurrentDepth.norm", partial(dq.RecurrentDepth(explicit, implicit, explicit, norm), X)
    estimator = spoiled(dq.Phantom(), "apply", lambda solution: change(solution.value))
    yield "Phantom.apply", partial(implicit, X, gradient=estimator)
    yield "Phantom.apply", partial(dq.fixed_point, nn.Linear(8, 8), X, gradient=estimator)
    task = tasks.WordProblem(tasks.parse_group("Z3"))
    spoiled(task, "draw", lambda batch: change(batch.inputs))
    yield "draw", partial(task.fixed, 2, 6, seed=0)
    f = spoiled(nn.Linear(8, 8), "forward", lambda z: change(z / 4))
    stop = dq.Stop(max_steps=8)
    yield "f", partial(dq.solve, f, X, solver=dq.Anderson(), stop=stop)
    yield "f", partial(dq.solve, lambda z: (f(z), z), X, solver=dq.Naive(), stop=stop, has_aux=True)
    for gradient in (dq.Implicit(), dq.Phantom(), dq.OneStep(), dq.Unrolled()):
        yield "f", partial(dq.fixed_point, f, X, stop=stop, gradient=gradient)
    for function in (training.jacobian_regularisation, diagnostics.spectral_radius):
        yield "f", partial(function, f, X)


def returned():
    for label, change in SPOILED.items():
        sweeps = dq.Simultaneous(), dq.Sliding(2), dq.Sequential()
        solves = [swept(change, sweep) for sweep in sweeps]
        for name, call in chain(called(change), *solves):
            yield met(name, name, label, call)


def assert_clear(found, least):
    """Nothing is taken silently, and nearly all errors are clear."""
    count = Counter(each.verdict for each in found)
    unclear = "\n".join(each.line for each in found if each.verdict != "clear")
    assert len(found) >= least
    assert count["silent"] == 0, unclear
    assert count["clear"] >= 0.98 * len(found), unclear


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("source", "least"), [(from_annotations, 1330), (returned, 425)])
def test_bad_values_are_named(source, least):
    assert_clear(list(source()), least)
