"""Weight normalisation of linear maps."""

from typing import Any

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from deqseq.check import check_type
from deqseq.layers.causal_conv import CausalConv1d
from deqseq.layers.normalised import WeightNorm, normalise


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
        normalise(layer)


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


def has_weight_norm(module: nn.Module) -> bool:
    """Whether the linear maps and causal convolutions inside have weight normalisation now.

    Args:
        module: a backbone, say.

    Raises:
        ValueError: some have it and others have not.

    Example:
        >>> layer = nn.Sequential(nn.Linear(2, 3))
        >>> apply_weight_norm(layer)
        >>> has_weight_norm(layer)
        True
    """
    parts: Any = [(name, part) for name, part in module.named_modules() if isinstance(part, nn.Linear | CausalConv1d)]
    bare = [name for name, part in parts if not is_parametrized(part, "weight")]
    if 0 < len(bare) < len(parts):
        raise ValueError(
            f"weight normalisation must be on all layers of a backbone or on none, {bare[0]} has none: call "
            "deqseq.layers.apply_weight_norm or fold_weight_norm of the whole backbone"
        )
    return len(bare) < len(parts)


def _check_no_other(layer: Any) -> None:
    if others := set(getattr(layer, "parametrizations", ())) - {"weight"}:
        raise ValueError(f"module must have no parametrised tensor but weights, got {min(others)!r}: remove that first")
