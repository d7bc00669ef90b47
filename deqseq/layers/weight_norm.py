"""Weight normalisation of linear maps; and parametrised tensors, computed once per solve."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from deqseq.check import check_type
from deqseq.layers.causal_conv import CausalConv1d
from deqseq.layers.sharded import sharded_parts


def apply_weight_norm(module: nn.Module) -> None:
    r"""Reparametrise every linear map and causal convolution inside, :math:`w = g\, v / \lVert v \rVert` per row.

    ``weight`` is then computed from the parameters :math:`g` and :math:`v`. A write to it would be lost, and is an
    error; :func:`fold_weight_norm` makes it a parameter again. A row of zeros gets a random direction :math:`v`, along
    which it can grow.

    Args:
        module: changed in place; the initial weights stay what they are.

    Raises:
        ValueError: two parts share a weight, which would become two.

    References:
        Salimans and Kingma, Weight Normalization, NeurIPS 2016, arXiv 1602.07868.

    Example:
        >>> layer = nn.Sequential(nn.Linear(2, 3))
        >>> apply_weight_norm(layer)
        >>> [name for name, _ in layer.named_parameters()]
        ['0.bias', '0.parametrizations.weight.original0', '0.parametrizations.weight.original1']
    """
    check_type("module", module, nn.Module)
    parts: dict[str, Any] = {
        name: part
        for name, part in module.named_modules()
        if isinstance(part, nn.Linear | CausalConv1d) and not parametrize.is_parametrized(part, "weight")
    }
    owners: dict[nn.Parameter, str] = {}
    for name, part in parts.items():
        other = owners.setdefault(part.weight, name)
        if other != name:
            raise ValueError(f"module must have no tied weights, got {other}.weight and {name}.weight: one parameter")
    for part in parts.values():
        weight_norm(part, "weight", dim=0)
        _once_per_solve(type(part), "weight", guarded=True)
        magnitude, direction = part.parametrizations.weight.original0, part.parametrizations.weight.original1
        if not magnitude.is_meta and bool((magnitude == 0).any()):
            bound = 1 / math.sqrt(direction[0].numel())
            random = torch.empty_like(direction).uniform_(-bound, bound)
            direction.data = torch.where(magnitude == 0, random, direction)


def fold_weight_norm(module: nn.Module) -> None:
    """Make the weights plain parameters again, equal to what the normalisation gave to the last bit.

    Do this before tools that read and write ``weight`` run: merging LoRA, quantisation, pickling.

    Args:
        module: changed in place; without weight normalisation it stays as it is.

    Raises:
        ValueError: a part has another parametrised tensor besides its weight.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> apply_weight_norm(layer)
        >>> fold_weight_norm(layer)
        >>> [name for name, _ in layer.named_parameters()]
        ['bias', 'weight']
    """
    check_type("module", module, nn.Module)
    parts = [part for part, name in _computed_tensors(module) if (name, True) in _wrapped(type(part))]
    for part in parts:
        if others := sorted(set(part.parametrizations) - {"weight"}):
            raise ValueError(
                f"module must have no parametrised tensor but weights, got {others[0]!r}: remove that first"
            )
    for part in parts:
        trains = any(parameter.requires_grad for parameter in part.parametrizations.parameters())
        with torch.no_grad():
            weight = part.weight.as_subclass(Tensor)
        hooks = part._load_state_dict_pre_hooks
        names = {key: getattr(hook, "__qualname__", "") for key, hook in hooks.items()}
        for key in [key for key, name in names.items() if name.startswith("weight_norm.<locals>")]:
            del hooks[key]  # torch's, for weights of an older format, cannot be pickled
        del part.parametrizations
        part.__class__ = type(part).__bases__[0]
        part.weight = nn.Parameter(weight, requires_grad=trains)


@contextmanager
def cached_weights(module: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Within this context parametrised tensors of a module are computed once, in the gradient mode at entry.

    Those are the weights of :func:`apply_weight_norm`, and what ``torch.nn.utils.parametrize`` was told to compute.

    They must be computed here, not at their first use: that is in a solve without gradients, and would cut the
    parameters off from the gradient estimator that follows. They belong to this thread and module alone. Entering again
    inside, for the same module, computes those whose parameters have changed. Weights of parts that ``fully_shard`` has
    sharded are computed at every use: those parts hand their gradients on when their own backward pass ends, which
    is before that of a weight computed outside of them.

    Args:
        module: where to look for parametrised tensors.
        enabled: False computes them at every use, but makes the same check.

    Yields:
        Nothing; the context ends with the block.

    Raises:
        RuntimeError: gradients are wanted inside, but it was first entered without: they would silently be lost.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> apply_weight_norm(layer)
        >>> with cached_weights(layer):
        ...     layer.weight is layer.weight
        True
    """
    outer = _solves.get(_NOTHING)
    entered = outer.modules.get(id(module))
    if entered is not None and not entered.with_graph and torch.is_grad_enabled() and _trains(module):
        raise RuntimeError(
            "this model's weights were computed under no_grad (is this a callback of generate()?), so gradients would "
            "be lost here: wrap this call in torch.no_grad(), or make it after the outer call has returned"
        )
    if entered is not None:
        for key, (part, name) in entered.tensors.items():
            if (sources := _sources(entered.holders[key])) != entered.sources[key]:
                outer.tensors[key], entered.sources[key] = part.parametrizations[name](), sources
        yield
        return
    computed, modules = outer.tensors, outer.modules
    if enabled and not sharded_parts(module):
        tensors = {(id(part), name): (part, name) for part, name in _computed_tensors(module)}
        holders = {key: _holders(*place) for key, place in tensors.items()}
        sources = {key: _sources(places) for key, places in holders.items()}
        computed = computed | {key: part.parametrizations[name]() for key, (part, name) in tensors.items()}
        modules = modules | {id(module): _Entered(tensors, holders, sources, torch.is_grad_enabled())}
    token = _solves.set(_Solves(computed, modules))
    try:
        yield
    finally:
        _solves.reset(token)


@contextmanager
def weights_for_compiled(module: nn.Module) -> Iterator[None]:
    """Compiled code cannot look up what belongs to a thread: it finds what was computed as attributes."""
    solves = _solves.get(_NOTHING)
    entered = solves.modules.get(id(module))
    if entered is None:
        yield
        return
    with _compiled:
        for key, (part, name) in entered.tensors.items():
            part.__dict__[f"compiled_{name}"] = solves.tensors[key]
        try:
            yield
        finally:
            for part, name in entered.tensors.values():
                del part.__dict__[f"compiled_{name}"]


class ComputedWeight(Tensor):
    """A weight that its layer computes at each use: it can be read, and a write, which would be lost, is an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if func == _DATA.__set__ or (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE:
            raise RuntimeError(
                "this weight is computed from its weight normalisation, so a write to it would be lost: call "
                "deqseq.layers.fold_weight_norm(model) first, which makes it a parameter"
            )
        with torch._C.DisableTorchFunctionSubclass():
            value = func(*args, **(kwargs or {}))
        return value.as_subclass(cls) if func == _DATA.__get__ else value


_DATA: Any = Tensor.data
_IN_PLACE = {f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")}
_IN_PLACE |= {"__setitem__", "__ilshift__", "__irshift__"}


Key = tuple[int, str]


@dataclass(frozen=True)
class _Entered:
    """A module inside :func:`cached_weights`: its parametrised tensors, and what they were computed from."""

    tensors: dict[Key, tuple[Any, str]]
    holders: dict[Key, list[dict[str, Any]]]
    sources: dict[Key, tuple[Any, ...]]
    with_graph: bool


@dataclass(frozen=True)
class _Solves:
    """What is computed in this thread: tensors by their part's id and their name, and the modules that were entered."""

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    modules: dict[int, _Entered] = field(default_factory=dict)


_NOTHING = _Solves()
_solves: ContextVar[_Solves] = ContextVar("solves")
_compiled = RLock()


def _computed_tensors(module: nn.Module) -> Iterator[tuple[Any, str]]:
    """The parts of a module and the names of their parametrised tensors, each looked up in the running solve first."""
    for part in module.modules():
        for name in getattr(part, "parametrizations", ()):
            _once_per_solve(type(part), name)
            yield part, name


def _wrapped(kind: Any) -> set[tuple[str, bool]]:
    """The tensors of a class that are looked up, and whether a write to them is an error."""
    return kind.__dict__.get("looked_up", set())


def _once_per_solve(kind: Any, name: str, guarded: bool = False) -> None:
    """Let a parametrised class, of which torch makes one per module, look its tensor up in the running solve."""
    if any(known == name for known, _ in _wrapped(kind)):
        return
    computed, compiled = getattr(kind, name), f"compiled_{name}"

    def get(part: Any) -> Tensor:
        if torch.compiler.is_compiling():
            value = getattr(part, compiled)
            return computed.fget(part) if value is None else value
        solves = _solves.get(_NOTHING)
        value = solves.tensors.get((id(part), name))
        value = computed.fget(part) if value is None else value
        outside = guarded and solves is _NOTHING
        return value.as_subclass(ComputedWeight) if outside and type(value) is Tensor else value

    setattr(kind, name, property(get, computed.fset, computed.fdel))
    setattr(kind, compiled, None)
    kind.looked_up = _wrapped(kind) | {(name, guarded)}


def _holders(part: Any, name: str) -> list[dict[str, Any]]:
    """Where the parameters of a tensor are kept: each new token asks, and ``parameters()`` would take longer."""
    return [module._parameters for module in part.parametrizations[name].modules()]


def _sources(holders: list[dict[str, Any]]) -> tuple[Any, ...]:
    """The parameters of a tensor, and how often they have been written to."""
    parameters = [x for each in holders for x in each.values() if x is not None]
    return tuple((id(x), 0 if x.is_inference() else x._version) for x in parameters)


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
