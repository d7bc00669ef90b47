"""Weight normalisation of linear maps, computed once per solve."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from deqseq.layers.causal_conv import CausalConv1d
from deqseq.layers.sharded import sharded_parts


def apply_weight_norm(module: nn.Module) -> None:
    r"""Reparametrise every linear map and causal convolution inside, :math:`w = g\, v / \lVert v \rVert` per row.

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
    for part in list(module.modules()):
        if isinstance(part, nn.Linear | CausalConv1d) and not parametrize.is_parametrized(part, "weight"):
            weight_norm(part, "weight", dim=0)


_entered: dict[int, bool] = {}  # modules whose weights are computed, and whether with a graph


@contextmanager
def cached_weights(module: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Within this context reparametrised weights are computed once, in the gradient mode at entry.

    They must be computed here, not at their first use: that is in a solve without gradients, and what it left in the
    cache would cut the parameters off from the gradient estimator that follows. Entering again inside, for the same
    module, does nothing. Weights of parts that ``fully_shard`` has sharded are computed at every use: those parts hand
    their gradients on when their own backward pass ends, which is before that of a weight computed outside of them.

    Args:
        module: where to look for reparametrised weights.
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
    inside = _entered.get(id(module))
    trains = torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters())
    if inside is False and trains:
        raise RuntimeError(
            "the weights of this model have been computed without gradients (is this a callback of generate()?): a "
            "call that wants gradients would silently lose them here; wrap it in torch.no_grad(), or make it later"
        )
    if inside is not None or not enabled or sharded_parts(module):
        yield
        return
    _entered[id(module)] = torch.is_grad_enabled()
    try:
        with parametrize.cached():
            for part in module.modules():
                for name in getattr(part, "parametrizations", ()):
                    getattr(part, name)
            yield
    finally:
        del _entered[id(module)]
