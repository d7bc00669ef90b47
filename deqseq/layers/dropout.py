"""Dropout with one mask per solve."""

from typing import Annotated

import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.arguments import Within, checked


@checked
def dropout_mask(
    like: Float[Tensor, "batch length dim"], p: Annotated[float, Within("[0, 1)")]
) -> Float[Tensor, "batch length dim"]:
    r"""A mask to multiply by: zero with probability ``p``, else :math:`1 / (1 - p)`.

    Ordinary dropout would draw a new mask at each iteration, and the map would have no fixed point.

    Args:
        like: its shape, ``(batch, length, dim)``, its dtype and its device are taken.
        p: probability of zero, in [0, 1).

    Raises:
        TypeError: ``like`` is not of a floating-point dtype.

    References:
        Gal and Ghahramani, A Theoretically Grounded Application of Dropout in Recurrent Neural
        Networks, NeurIPS 2016, arXiv 1512.05287.

    Example:
        >>> sorted(set(dropout_mask(torch.zeros(1, 50, 4), 0.5).flatten().tolist()))
        [0.0, 2.0]
    """
    if not like.is_floating_point():
        raise TypeError(f"like must be of a floating-point dtype, got {like.dtype}")
    return torch.empty_like(like).bernoulli_(1 - p).div_(1 - p)
