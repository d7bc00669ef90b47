"""How far a state is from a fixed point, as a term of the loss."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from deqseq.check import check_callable, check_type
from deqseq.evaluate import check_start, evaluate
from deqseq.stop import token_norms
from deqseq.types import FixedPointMap, State


def terminal_residual(
    f: FixedPointMap, z: State, *, mask: Bool[Tensor, "batch tokens"] | None = None
) -> Float[Tensor, ""]:
    r"""The relative residual of a state, as a term of a training loss that makes iterations end at a fixed point.

    .. math:: \frac{1}{|T|} \sum_{t \in T} \frac{\lVert f(z)_t - z_t \rVert}{\lVert f(z)_t \rVert}

    with norms over the last dimension and :math:`T` the real tokens of all rows. It costs one evaluation of ``f``. The
    gradient reaches whatever ``f`` closes over, and what the state was computed from; ``z.detach()`` leaves the latter
    out. A token that is a fixed point already gives no gradient.

    Args:
        f: the map.
        z: the state in which the iteration ended, ``(batch, *event)``, such as a model's ``value``.
        mask: bool, True at real tokens, ``(batch, tokens)``. Default: no padding.

    Returns:
        The mean, a scalar in float32 at least, with a graph where gradients are enabled.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: ``z`` is empty or not finite, or ``mask`` has another shape or dtype or no real token.

    Example:
        >>> z = torch.tensor([[[1.0], [2.0], [5.0]]])
        >>> mask = torch.tensor([[True, True, False]])
        >>> terminal_residual(lambda z: 0.5 * z + 1, z, mask=mask)     # |1.5 - 1| / 1.5, and 2 is the fixed point
        tensor(0.1667)
    """
    check_callable("f", f)
    check_start("z", z)
    check_type("mask", mask, (Tensor, type(None)))
    fz, _ = evaluate(f, z)
    distance, scale = token_norms(fz - z), token_norms(fz)
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape != scale.shape or not bool(mask.any()):
            got = f"{mask.dtype} {tuple(mask.shape)} with {int(mask.sum())} of them"
            raise ValueError(f"mask must be bool {tuple(scale.shape)}, True at real tokens, got {got}")
        distance, scale = distance[mask], scale[mask]
    return (distance / scale.clamp_min(torch.finfo(scale.dtype).tiny)).mean()
