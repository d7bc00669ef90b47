"""Weight normalisation of linear maps and causal convolutions, and weights computed once."""

import math
import sys
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from deqseq.arguments import check_type, checked
from deqseq.layers.causal_conv import CausalConv1d

M = TypeVar("M", bound=nn.Module)
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where a module of torch keeps what users register."""


class WeightNorm(nn.Module):
    """The parameters of one weight, named as in ``torch.nn.utils.parametrizations.weight_norm``."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer_class = type(layer)
        direction = layer.weight.detach()
        magnitude = torch.norm_except_dim(direction, 2, 0)
        if not magnitude.is_meta and bool((magnitude == 0).any()):
            bound = 1 / math.sqrt(direction[0].numel())
            direction = torch.where(
                magnitude == 0, torch.empty_like(direction).uniform_(-bound, bound), direction
            )
        self.original0 = nn.Parameter(magnitude, requires_grad=layer.weight.requires_grad)
        self.original1 = nn.Parameter(direction, requires_grad=layer.weight.requires_grad)

    def forward(self) -> Tensor:
        """The weight."""
        magnitude, direction = self.original0, self.original1
        if direction.dtype == torch.float64 and direction.device.type != "cpu":
            # torch's CUDA kernel rounds the norm to float32, in float64 too
            return direction * (magnitude / torch.norm_except_dim(direction, 2, 0))
        return torch._weight_norm(direction, magnitude, 0)  # pyright: ignore[reportPrivateImportUsage]


class Normalised(nn.Module):
    """A layer whose weight is computed at each use; what would write to ``weight`` is an error."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the layer computes with its weight."""
        layer = _computed(self, {})
        # its attribute may be a wrapper of this method, as accelerate sets it
        return type(layer).forward(layer, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return _refuse(name) if name == "weight" else super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        _refuse(name) if name == "weight" else super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        # torch's parametrize begins with this, then changes the class, which many layers share
        _refuse(name) if name in self._parameters else super().__delattr__(name)


class NormalisedLinear(Normalised, nn.Linear):
    """The class of linear maps with weight normalisation."""


class NormalisedConv1d(Normalised, CausalConv1d):
    """The class of causal convolutions with weight normalisation."""


@checked
def apply_weight_norm(module: nn.Module) -> None:
    r"""Reparametrise every ``nn.Linear`` and :class:`CausalConv1d` inside.

    .. math:: w = g\, v / \lVert v \rVert \quad \text{per row}

    A solve computes the weights once, other calls of a layer each time. The layers have no
    attribute ``weight``, because a write to it would be lost: read ``with_weights(layer).weight``;
    :func:`fold_weight_norm` makes it a parameter again. A row of zeros gets a random direction
    :math:`v`, along which it can grow.

    Args:
        module: changed in place; the values of its weights stay the same.

    Raises:
        ValueError: two parts share a weight, which would become two; or a part has another
            parametrised tensor.

    References:
        Salimans and Kingma, Weight Normalization, NeurIPS 2016, arXiv 1602.07868.

    Example:
        >>> from deqseq.layers import apply_weight_norm
        >>> from torch import nn
        >>> layer = nn.Sequential(nn.Linear(2, 3))
        >>> apply_weight_norm(layer)
        >>> [name for name, _ in layer.named_parameters()]
        ['0.bias', '0.parametrizations.weight.original0', '0.parametrizations.weight.original1']
    """
    layers = {
        name: layer for name, layer in _layers(module) if not is_parametrized(layer, "weight")
    }
    owners: dict[nn.Parameter, str] = {}
    for name, layer in layers.items():
        if is_parametrized(layer):
            other = min(layer.parametrizations)
            raise ValueError(
                f"module must have no parametrised tensor but weights, got {other!r}: remove that "
                "first"
            )
        if (owner := owners.setdefault(layer.weight, name)) != name:
            raise ValueError(
                f"module must have no tied weights, got {owner}.weight and {name}.weight: one "
                "parameter"
            )
    for layer in layers.values():
        norm = WeightNorm(layer)
        del layer.weight
        layer.parametrizations = nn.ModuleDict({"weight": norm})
        kind: Any = NormalisedLinear if isinstance(layer, nn.Linear) else NormalisedConv1d
        layer.__class__ = kind


@checked
def fold_weight_norm(module: nn.Module) -> None:
    """Make the weights plain parameters again, equal to the normalised ones to the last bit.

    Do this before tools that read and write ``weight`` run: merging LoRA, quantisation.

    Args:
        module: changed in place.

    Example:
        >>> from deqseq.layers import apply_weight_norm, fold_weight_norm
        >>> from torch import nn
        >>> layer = nn.Linear(2, 3)
        >>> apply_weight_norm(layer)
        >>> fold_weight_norm(layer)
        >>> [name for name, _ in layer.named_parameters()]
        ['bias', 'weight']
    """
    layers: Any = [layer for layer in module.modules() if isinstance(layer, Normalised)]
    for layer in layers:
        norm = layer.parametrizations["weight"]
        layer.__class__ = norm.layer_class
        del layer.parametrizations
        requires_grad = any(p.requires_grad for p in norm.parameters())
        layer.weight = nn.Parameter(norm().detach(), requires_grad=requires_grad)


def has_weight_norm(module: nn.Module) -> bool:
    """Whether all layers inside have weight normalisation; ValueError if only some have."""
    layers = _layers(module)
    bare = [name for name, layer in layers if not is_parametrized(layer, "weight")]
    if 0 < len(bare) < len(layers):
        raise ValueError(
            f"weight normalisation must be on all layers of a backbone or on none, {bare[0]} has "
            "none: call deqseq.layers.apply_weight_norm or fold_weight_norm of the whole backbone"
        )
    return len(bare) < len(layers)


def _layers(module: nn.Module) -> list[tuple[str, Any]]:
    """The linear maps and causal convolutions inside, with their names."""
    modules = module.named_modules()
    return [(name, part) for name, part in modules if isinstance(part, nn.Linear | CausalConv1d)]


def with_weights(module: M) -> M:
    """A copy of a module whose parametrised tensors are computed once, now: what a solve iterates.

    These are the weights of :func:`apply_weight_norm`, and whatever ``torch.nn.utils.parametrize``
    computes; with a graph, if gradients are enabled. Only parametrised layers, and modules that
    contain them, are copied; parameters, buffers and all other modules are shared. Hooks are called
    with the original modules.

    Args:
        module: stays as it is.

    Returns:
        The copy; the module itself if nothing inside is parametrised, in ``torch.export``, or if
        ``fully_shard`` has sharded parts of it.

    Example:
        >>> from deqseq.layers import apply_weight_norm, with_weights
        >>> from torch import nn
        >>> layer = nn.Linear(2, 3)
        >>> apply_weight_norm(layer)
        >>> with_weights(layer).weight.shape
        torch.Size([3, 2])
    """
    check_type("module", module, nn.Module)
    as_it_is = torch.compiler.is_exporting() or sharded_parts(module)
    return module if as_it_is else cast(M, _computed(module, {}))


def sharded_parts(module: nn.Module) -> tuple[Any, ...]:
    """The modules inside, or itself, that ``torch.distributed.fsdp.fully_shard`` has sharded."""
    # where it has not been imported, nothing is sharded
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return ()
    return tuple(part for part in module.modules() if isinstance(part, fsdp.FSDPModule))


def _computed(module: Any, copies: dict[int, Any]) -> Any:
    """The module or its copy; a part that occurs twice is found in ``copies``, by its id."""
    if id(module) not in copies:
        kind, changes, parts = type(module), {}, dict(module._modules)
        if is_parametrized(module):
            tensors = parts.pop("parametrizations")
            if isinstance(module, Normalised):
                kind = tensors["weight"].layer_class
            else:  # torch makes a class of its own for each module that it parametrises
                kind = kind.__bases__[0]
            changes = {name: compute() for name, compute in tensors.items()}
        for name, part in parts.items():
            parts[name] = None if part is None else _computed(part, copies)
        if changes or any(part is not module._modules[name] for name, part in parts.items()):
            copies[id(module)] = copy = object.__new__(kind)
            copy.__dict__.update(module.__dict__, _modules=parts, **_hooks(module), **changes)
        else:
            copies[id(module)] = module
    return copies[id(module)]


def _hooks(module: nn.Module) -> dict[str, Any]:
    """The hooks of a copy, which are called with the module itself."""
    found: dict[str, Any] = {}
    for name in HOOKS:
        hooks = module.__dict__[name]
        if hooks:
            found[name] = {key: partial(_call, module, hooks, key) for key in hooks}
    return found


def _call(module: nn.Module, hooks: Any, key: int, copy: nn.Module, *values: Any) -> Any:
    """Call a hook with the module instead of its copy, unless it was removed during the solve."""
    return hooks[key](module, *values) if key in hooks else None


def _refuse(name: str) -> NoReturn:
    raise AttributeError(
        f"{name} is of a layer with weight normalisation: read with_weights(layer).weight, call "
        "fold_weight_norm(model) before tools that write to it (both of deqseq.layers)"
    )
