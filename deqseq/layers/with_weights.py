"""Modules whose parametrised tensors are computed once."""

from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.utils import parametrize

from deqseq.check import check_type
from deqseq.layers.sharded import sharded_parts

M = TypeVar("M", bound=nn.Module)


def with_weights(module: M) -> M:
    """The same module with its parametrised tensors computed now: what a solve iterates.

    These are the weights of :func:`~deqseq.layers.apply_weight_norm`, and whatever ``torch.nn.utils.parametrize``
    computes. They have a graph if gradients are enabled now. Parametrised layers, and modules that contain them, are
    copied; parameters, buffers, hooks and all other modules are shared.

    Args:
        module: stays as it is.

    Returns:
        The copy. The module itself if nothing inside is parametrised; if ``fully_shard`` has sharded parts of it, which
        hand their gradients on when their own backward pass ends; or in ``torch.export``, which knows no copies.
        Weights are then computed at each use.

    Example:
        >>> from deqseq.layers import apply_weight_norm
        >>> layer = nn.Linear(2, 3)
        >>> apply_weight_norm(layer)
        >>> with_weights(layer).weight.shape
        torch.Size([3, 2])
    """
    check_type("module", module, nn.Module)
    as_it_is = torch.compiler.is_exporting() or sharded_parts(module)
    return module if as_it_is else cast(M, _computed(module, {}))


def _computed(module: Any, copies: dict[int, Any]) -> Any:
    """The module or its copy; a part that occurs twice is found in ``copies``, by its id."""
    if id(module) not in copies:
        kind, tensors, parts = type(module), {}, dict(module._modules)
        if parametrize.is_parametrized(module):
            kind, tensors = kind.__bases__[0], tensors_of(parts.pop("parametrizations"))
        parts = {name: None if part is None else _computed(part, copies) for name, part in parts.items()}
        same = not tensors and all(part is module._modules[name] for name, part in parts.items())
        copies[id(module)] = module if same else copied(module, kind, _modules=parts, **tensors)
    return copies[id(module)]


def copied(module: Any, kind: type, **changes: Any) -> Any:
    """A shallow copy of another class, with some attributes replaced."""
    copy = object.__new__(kind)
    copy.__dict__.update(module.__dict__, **changes)
    return copy


def tensors_of(parametrizations: Any) -> dict[str, Any]:
    """What a module's parametrisations compute, by name."""
    return {name: compute() for name, compute in parametrizations.items()}
