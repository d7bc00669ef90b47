"""Weight normalisation of linear maps, computed once a solve."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from deqseq.layers.causal_conv import CausalConv1d


def apply_weight_norm(module: nn.Module) -> None:
    r"""Reparametrise every linear map and causal convolution inside, :math:`w = g\, v / \lVert v \rVert` a row.

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


_entered: set[int] = set()


@contextmanager
def weights_computed_once(module: nn.Module) -> Iterator[None]:
    """Within this context reparametrised weights are computed once, in the gradient mode at entry.

    They must be computed here, not at their first use: that is in a solve without gradients, and what it left in the
    cache would cut the parameters off from the gradient estimator that follows. Entering again inside, for the same
    module, does nothing.

    Args:
        module: where to look for reparametrised weights.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> apply_weight_norm(layer)
        >>> with weights_computed_once(layer):
        ...     layer.weight is layer.weight
        True
    """
    if id(module) in _entered:
        yield
        return
    _entered.add(id(module))
    try:
        with parametrize.cached():
            for part in module.modules():
                for name in getattr(part, "parametrizations", ()):
                    getattr(part, name)
            yield
    finally:
        _entered.discard(id(module))
