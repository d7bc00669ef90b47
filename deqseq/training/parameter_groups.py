"""Which parameters are decayed."""

from typing import Annotated, Any

from torch import nn

from deqseq.arguments import Within, checked
from deqseq.layers.rms_norm import GatedRMSNorm, RMSNorm

NORMS = (RMSNorm, GatedRMSNorm, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)
STATE_SPACE = ("A_log", "D", "dt_bias")
MAGNITUDE = "original0"  # what torch calls the g of a weight-normalised w = g v / |v|


@checked
def parameter_groups(
    model: nn.Module, weight_decay: Annotated[float | int, Within("[0, inf)")] = 0.1
) -> list[dict[str, Any]]:
    r"""The parameters of a model in two groups for an optimizer: with weight decay, and without.

    Not decayed are embeddings and a head tied to one; scales of norms; biases, ``dt_bias``, ``D``
    and ``A_log``; and magnitudes of weight-normalised maps, :math:`g` in :math:`w = g\, v / \lVert
    v \rVert`. All other parameters are decayed, including the directions :math:`v`. Their gradient
    is orthogonal to :math:`v`, so every step makes them longer; decay keeps their length, and so
    the rate at which they turn, from drifting.

    Args:
        model: any module, of this library or of transformers.
        weight_decay: weight decay of the first group, at least 0.

    Returns:
        The two groups, in this order, each in the order of ``model.named_parameters()``. Tied
        parameters occur once, frozen ones not at all; a group may be empty.

    Raises:
        ValueError: a negative or not finite decay, or a model in which no parameter requires a
            gradient.

    References:
        Salimans and Kingma, Weight Normalization, NeurIPS 2016, arXiv 1602.07868. van Laarhoven, L2
        Regularization versus Batch and Weight Normalization, 2017, arXiv 1706.05350.

    Example:
        >>> import torch, deqseq as dq
        >>> lm = dq.CausalLM(
        ...     10, dq.ImplicitModel(dq.Llama(dq.LlamaConfig(d_model=16, n_heads=2, mlp_width=32)))
        ... )
        >>> optimizer = torch.optim.AdamW(parameter_groups(lm, 0.1), lr=1e-3, betas=(0.9, 0.95))
        >>> [(group["weight_decay"], len(group["params"])) for group in optimizer.param_groups]
        [(0.1, 8), (0.0, 14)]
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    if not names:
        raise ValueError(f"{type(model).__name__} has no parameter that wants a gradient")
    modules = dict(model.named_modules(remove_duplicate=False))
    groups: list[dict[str, Any]] = [
        {"params": [], "weight_decay": weight_decay},
        {"params": [], "weight_decay": 0.0},
    ]
    decayed, others = groups
    for parameter, tied in names.items():
        is_decayed = parameter.ndim > 1 and all(_is_decayed(modules, name) for name in tied)
        group = decayed if is_decayed else others
        group["params"].append(parameter)
    return groups


def _is_decayed(modules: dict[str, nn.Module], name: str) -> bool:
    """Whether a parameter is decayed, by its name and the module that it belongs to."""
    path, _, last = name.rpartition(".")
    owner = path.removesuffix("parametrizations." + path.rpartition(".")[2]).removesuffix(".")
    module = modules[owner]
    if owner == path:  # torch.nn.utils.weight_norm, the older one, names g weight_g
        is_magnitude = last.endswith("_g") and hasattr(module, f"{last[:-1]}v")
    else:
        is_magnitude = last == MAGNITUDE
    return not (is_magnitude or last in STATE_SPACE or isinstance(module, (nn.Embedding, *NORMS)))
