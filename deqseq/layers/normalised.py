"""Layers whose weight is computed from its norm and its direction."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from deqseq.layers.with_weights import copied, tensors_of


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


def normalise(layer: Any) -> Any:
    """Give a layer that has a :class:`WeightNorm` the class that uses it, as torch makes one for each layer."""
    kind = type(layer)

    class Normalised(kind):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            plain = copied(self, kind, **tensors_of(self.parametrizations))
            return kind.forward(plain, *args, **kwargs)

        def __getattr__(self, name: str) -> Any:
            return super().__getattr__(_not_weight(name))

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(_not_weight(name), value)

        def __reduce_ex__(self, protocol: Any) -> Any:
            return normalise, (copied(self, kind),)

    Normalised.__name__ = f"Normalised{kind.__name__}"
    layer.__class__ = Normalised
    return layer


def _not_weight(name: str) -> str:
    if name == "weight":
        how = "read with_weights(layer).weight, and call fold_weight_norm(model) before tools that write to it"
        raise AttributeError(f"this weight is computed from its weight normalisation: {how} (both of deqseq.layers)")
    return name
