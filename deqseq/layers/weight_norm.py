"""Weight normalisation of linear maps, computed once per solve."""

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
    error; :func:`fold_weight_norm` makes it a parameter again.

    Args:
        module: changed in place; the initial weights stay what they are.

    References:
        Salimans and Kingma, Weight Normalization, NeurIPS 2016, arXiv 1602.07868.

    Example:
        >>> layer = nn.Sequential(nn.Linear(2, 3))
        >>> apply_weight_norm(layer)
        >>> [name for name, _ in layer.named_parameters()]
        ['0.bias', '0.parametrizations.weight.original0', '0.parametrizations.weight.original1']
    """
    check_type("module", module, nn.Module)
    for part in list(module.modules()):
        if isinstance(part, nn.Linear | CausalConv1d) and not parametrize.is_parametrized(part, "weight"):
            weight_norm(part, "weight", dim=0)
            kind: Any = type(part)  # torch makes a class for each parametrised module
            kind.weight, kind.compiled_weight = _once_per_solve(kind.weight), None


def fold_weight_norm(module: nn.Module) -> None:
    """Make the weights plain parameters again, equal to what the normalisation gave to the last bit.

    Do this before tools that read and write ``weight`` run: merging LoRA, quantisation, pickling.

    Args:
        module: changed in place; without weight normalisation it stays as it is.

    Example:
        >>> layer = nn.Linear(2, 3)
        >>> apply_weight_norm(layer)
        >>> fold_weight_norm(layer)
        >>> [name for name, _ in layer.named_parameters()]
        ['bias', 'weight']
    """
    check_type("module", module, nn.Module)
    for part in _normalised(module):
        trains = any(parameter.requires_grad for parameter in part.parametrizations.parameters())
        with torch.no_grad():
            weight = part.weight.as_subclass(Tensor)
        del part.parametrizations
        part.__class__ = type(part).__bases__[0]
        part.weight = nn.Parameter(weight, requires_grad=trains)


@contextmanager
def cached_weights(module: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Within this context the normalised weights of a module are computed once, in the gradient mode at entry.

    They must be computed here, not at their first use: that is in a solve without gradients, and would cut the
    parameters off from the gradient estimator that follows. They belong to this thread and module alone. Entering again
    inside, for the same module, computes those whose parameters have changed. Weights of parts that ``fully_shard`` has
    sharded are computed at every use: those parts hand their gradients on when their own backward pass ends, which
    is before that of a weight computed outside of them.

    Args:
        module: where to look for normalised weights.
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
        for part in entered.parts:
            if _sources(part) != entered.sources[id(part)]:
                outer.weights[id(part)], entered.sources[id(part)] = _computed(part), _sources(part)
        yield
        return
    weights, modules = outer.weights, outer.modules
    if enabled and not sharded_parts(module):
        parts = list(_normalised(module))
        sources = {id(part): _sources(part) for part in parts}
        weights = weights | {id(part): _computed(part) for part in parts}
        modules = modules | {id(module): _Entered(parts, sources, torch.is_grad_enabled())}
    token = _solves.set(_Solves(True, weights, modules))
    try:
        yield
    finally:
        _solves.reset(token)


@contextmanager
def weights_for_compiled(module: nn.Module) -> Iterator[None]:
    """Compiled code cannot look up what belongs to a thread: it finds the computed weights as attributes."""
    solves = _solves.get(_NOTHING)
    entered = solves.modules.get(id(module))
    if entered is None:
        yield
        return
    with _compiled:
        for part in entered.parts:
            part.__dict__["compiled_weight"] = solves.weights[id(part)]
        try:
            yield
        finally:
            for part in entered.parts:
                del part.__dict__["compiled_weight"]


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


@dataclass(frozen=True)
class _Entered:
    """A module inside :func:`cached_weights`: its normalised parts, and what their weights were computed from."""

    parts: list[Any]
    sources: dict[int, tuple[Any, ...]]
    with_graph: bool


@dataclass(frozen=True)
class _Solves:
    """What is computed in this thread: weights by the id of their layer, and the modules that were entered."""

    running: bool = False
    weights: dict[int, Tensor] = field(default_factory=dict)
    modules: dict[int, _Entered] = field(default_factory=dict)


_NOTHING = _Solves()
_solves: ContextVar[_Solves] = ContextVar("solves")
_compiled = RLock()


def _once_per_solve(computed: property) -> property:
    """The property ``weight`` of a normalised layer."""
    compute: Any = computed.fget

    def get(part: Any) -> Tensor:
        if torch.compiler.is_compiling():
            return compute(part) if part.compiled_weight is None else part.compiled_weight
        solves = _solves.get(_NOTHING)
        if not solves.running:
            weight = compute(part)
            return weight.as_subclass(ComputedWeight) if type(weight) is Tensor else weight
        weight = solves.weights.get(id(part))
        return compute(part) if weight is None else weight

    return property(get, computed.fset)


def _normalised(module: nn.Module) -> Iterator[Any]:
    return (part for part in module.modules() if hasattr(type(part), "compiled_weight"))


def _computed(part: Any) -> Tensor:
    return part.parametrizations.weight()


def _sources(part: Any) -> tuple[Any, ...]:
    """The parameters of a weight, and how often they have been written to."""
    originals = part.parametrizations.weight
    pair = originals.original0, originals.original1
    return tuple((id(x), 0 if x.is_inference() else x._version) for x in pair)


def _trains(module: nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in module.parameters())
