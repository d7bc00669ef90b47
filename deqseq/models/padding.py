"""Rows of unequal length: padding, wherever it is, is moved behind the real tokens."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from deqseq.arguments import check_type
from deqseq.solution import Solution
from deqseq.types import Mask, Sequence


@dataclass(frozen=True)
class Padding:
    """Where the real tokens of each row are moved; without padding, nowhere.

    A causal model computes a row as if it were alone when its padding comes last; so other padding
    is moved there, and the result is moved back. A window shared by all rows then begins at the
    first real token of each.
    """

    order: Int64[Tensor, "batch length"] | None = None
    """For each position the token that moves there, real ones first."""
    mask: Mask | None = None
    """True at real tokens, after the move."""

    @classmethod
    def of(cls, x: Shaped[Tensor, "batch length ..."], mask: Mask | None) -> "Padding":
        """From a mask of the real tokens, which is checked."""
        if mask is None or not check_mask(mask, x):
            return cls()
        order = mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        return cls(order, mask.gather(1, order))

    def compact(self, x: Sequence) -> Sequence:
        """``x`` with the real tokens of each row first, and zeros in place of the padding."""
        if self.order is None or self.mask is None:
            return x
        return _moved(x, self.order).masked_fill(~self.mask[..., None], 0)

    def restored(self, solution: Solution) -> Solution:
        """The solution with all tokens moved back."""
        if self.order is None:
            return solution
        stats = solution.stats.moved(self.back)
        return replace(solution, value=self.back(solution.value), stats=stats)

    def back(self, x: Shaped[Tensor, "batch length ..."]) -> Shaped[Tensor, "batch length ..."]:
        """``x`` with all tokens moved back."""
        if self.order is None:
            return x
        return _moved(x, self.order.argsort(dim=1))


def _moved(x: Tensor, order: Tensor) -> Tensor:
    """``x`` with its tokens in another order, ``(batch, length)``."""
    while order.ndim < x.ndim:
        order = order[..., None]
    return x.gather(1, order.expand_as(x))


def last_real(
    x: Shaped[Tensor, "batch length d"], mask: Mask | None
) -> Shaped[Tensor, "batch 1 d"]:
    """What ``x`` has at the last real token of each row."""
    if mask is None:
        return x[:, -1:]
    last = (mask * torch.arange(mask.shape[1], device=mask.device)).argmax(dim=1)
    return x[torch.arange(len(x), device=x.device), last][:, None]


def check_mask(mask: Tensor, tokens: Tensor) -> bool:
    """Raise an error unless the mask marks a real token in every row; whether there is padding."""
    check_type("mask", mask, Tensor)
    if mask.dtype != torch.bool or mask.shape != tokens.shape[:2] or mask.device != tokens.device:
        remedy = "" if mask.dtype == torch.bool else ": write mask.bool()"
        raise ValueError(
            f"mask must be bool of shape {tuple(tokens.shape[:2])} on {tokens.device}, True at "
            f"real tokens, got {mask.dtype} {tuple(mask.shape)} on {mask.device}{remedy}"
        )
    counts = mask.sum(dim=1).tolist()  # one transfer
    if 0 in counts:
        row = counts.index(0)
        raise ValueError(f"mask must be True at a real token of every row, got none in row {row}")
    return min(counts) < mask.shape[1]
