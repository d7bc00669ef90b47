"""Weight normalisation of linear maps."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from deqseq.check import check_type
from deqseq.layers.causal_conv import CausalConv1d
from deqseq.layers.with_weights import copied, tensors_of


def apply_weight_norm(module: nn.Module) -> None:
    r"""Reparametrise every linear map and causal convolution inside, :math:`w = g\, v / \lVert v \rVert` per row.

    A solve computes the weights once, other calls of a layer each time. The layers have no attribute ``weight``, as a
    write to it would be lost: :func:`~deqseq.layers.with_weights` is for reading it, :func:`fold_weight_norm` makes it
    a parameter again. A row of zeros gets a random direction :math:`v`, along which it can grow.

    Args:
        module: changed in place; the initial weights stay what they are.

    Raises:
        ValueError: two parts share a weight, which would become two; or a part has another parametrised tensor.

    References:
        Salimans and Kingma, Weight Normalization, NeurIPS 2016, arXiv 1602.07868.

    Example:
        >>> layer = nn.Sequential(nn.Linear(2, 3))
        >>> apply_weight_norm(layer)
        >>> [name for name, _ in layer.named_parameters()]
        ['0.bias', '0.parametrizations.weight.original0', '0.parametrizations.weight.original1']
    """
    check_type("module", module, nn.Module)
    parts: Any = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear | CausalConv1d)]
    layers = {name: part for name, part in parts if not is_parametrized(part, "weight")}
    owners: dict[nn.Parameter, str] = {}
    for name, layer in layers.items():
        _check_no_other(layer)
        if (other := owners.setdefault(layer.weight, name)) != name:
            raise ValueError(f"module must have no tied weights, got {other}.weight and {name}.weight: one parameter")
    for layer in layers.values():
        norm = WeightNorm(layer.weight)
        del layer.weight
        layer.parametrizations = nn.ModuleDict({"weight": norm})
        layer.__class__ = _normalised(type(layer))


def fold_weight_norm(module: nn.Module) -> None:
    """Make the weights plain parameters again, equal to what the normalisation gave to the last bit.

    Do this before tools that read and write ``weight`` run: merging LoRA, quantisation.

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
    parametrised: Any = [part for part in module.modules() if is_parametrized(part, "weight")]
    layers = [layer for layer in parametrised if isinstance(layer.parametrizations["weight"], WeightNorm)]
    for layer in layers:
        _check_no_other(layer)
    for layer in layers:
        norm = layer.parametrizations["weight"]
        del layer.parametrizations
        layer.__class__ = type(layer).__bases__[0]
        layer.weight = nn.Parameter(norm().detach(), requires_grad=any(p.requires_grad for p in norm.parameters()))


class WeightNorm(nn.Module):
    """The parameters of one weight, named as in ``torch.nn.utils.parametrizations.weight_norm``."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        direction = weight.detach()
        magnitude = torch.norm_except_dim(direction, 2, 0)
        if not magnitude.is_meta and bool((magnitude == 0).any()):
            bound = 1 / math.sqrt(direction[0].numel())
            direction = torch.where(magnitude == 0, torch.empty_like(direction).uniform_(-bound, bound), direction)
        self.original0 = nn.Parameter(magnitude, requires_grad=weight.requires_grad)
        self.original1 = nn.Parameter(direction, requires_grad=weight.requires_grad)

    def forward(self) -> Tensor:
        """The weight."""
        return torch._weight_norm(self.original1, self.original0, 0)  # pyright: ignore[reportPrivateImportUsage]


def _normalised(kind: Any) -> Any:
    """The class of one layer, as ``torch.nn.utils.parametrize`` makes one, but it can be pickled."""

    class Normalised(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            plain = copied(self, kind, **tensors_of(self.parametrizations))
            return kind.forward(plain, *args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(_not_weight(name))

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(_not_weight(name), value)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return _empty, (kind,), self.__dict__

    Normalised.__name__ = f"Normalised{kind.__name__}"
    return Normalised


def _empty(kind: Any) -> Any:
    return object.__new__(_normalised(kind))


def _not_weight(name: str) -> str:
    if name == "weight":
        how = "read with_weights(layer).weight, and call fold_weight_norm(model) before tools that write to it"
        raise AttributeError(f"this weight is computed from its weight normalisation: {how} (both of deqseq.layers)")
    return name


def _check_no_other(layer: Any) -> None:
    if others := set(getattr(layer, "parametrizations", ())) - {"weight"}:
        raise ValueError(f"module must have no parametrised tensor but weights, got {min(others)!r}: remove that first")
