"""Rows of unequal length: padding on either side, moved behind the real tokens while a model runs."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor

from deqseq.backbones.base import RealTokens, Sequence
from deqseq.solution import Solution


@dataclass(frozen=True)
class Padding:
    """Where the real tokens of each row stand, and where they are moved.

    A causal model computes a row as if it were alone when its padding comes last; so left padding is moved there, and
    the result moved back. It also lets a window that all rows share begin at everybody's first token.

    Attributes:
        order: for each place the token that moves there, real ones first, ``(batch, length)``; None: no padding.
        real: which tokens are real once moved, ``(batch, length)``; None: all.

    Example:
        >>> padding = Padding.of(torch.zeros(1, 3, 1), torch.tensor([[False, True, True]]))
        >>> padding.order, padding.real
        (tensor([[1, 2, 0]]), tensor([[ True,  True, False]]))
    """

    order: Int64[Tensor, "batch length"] | None = None
    real: RealTokens | None = None

    @classmethod
    def of(cls, x: Shaped[Tensor, "batch length ..."], mask: RealTokens | None) -> "Padding":
        """From a mask of the real tokens.

        Raises:
            ValueError: a mask of another shape or dtype, a row without a real token, or padding between real tokens.
        """
        if mask is None:
            return cls()
        check_mask(mask, x)
        if bool(mask.all()):
            return cls()
        order = mask.logical_not().to(torch.uint8).argsort(dim=1, stable=True)
        return cls(order, mask.gather(1, order))

    def compact(self, x: Sequence) -> Sequence:
        """``x`` with the real tokens of each row first, and zeros behind them: padding may hold anything."""
        if self.order is None or self.real is None:
            return x
        return x.gather(1, self.order[..., None].expand_as(x)).masked_fill(~self.real[..., None], 0)

    def restored(self, solution: Solution) -> Solution:
        """The solution with all tokens back in their places; padding is zero."""
        if self.order is None:
            return solution
        stats = solution.stats
        per_token = {"steps": stats.steps, "residual": stats.residual, "updates": stats.updates, "forced": stats.forced}
        moved = {name: self.back(x) for name, x in per_token.items() if x is not None and x.ndim == 2}
        if stats.trace is not None and stats.trace.ndim == 3:
            moved["trace"] = torch.stack([self.back(look) for look in stats.trace])
        return replace(solution, value=self.back(solution.value), stats=replace(stats, **moved))

    def back(self, x: Shaped[Tensor, "batch length ..."]) -> Shaped[Tensor, "batch length ..."]:
        """``x`` with all tokens back in their places."""
        if self.order is None:
            return x
        places = self.order.argsort(dim=1)
        return x.gather(1, places.reshape(*places.shape, *[1] * (x.ndim - 2)).expand_as(x))


def check_mask(mask: Tensor, tokens: Tensor) -> None:
    """Refuse a mask that does not say where the real tokens of each row are.

    Raises:
        ValueError: names what the mask is and what it should be.
    """
    if mask.dtype != torch.bool or mask.shape != tokens.shape[:2]:
        raise ValueError(
            f"mask must be bool of shape {tuple(tokens.shape[:2])}, True at real tokens, got {mask.dtype} "
            f"{tuple(mask.shape)}"
        )
    begins = mask[:, 0].long() + (mask[:, 1:] & ~mask[:, :-1]).sum(dim=1)  # runs of real tokens
    bad = (begins != 1).nonzero()[:, 0].tolist()
    if bad:
        raise ValueError(
            "mask must mark one run of real tokens a row, with padding on the left or on the right of it, got "
            f"{begins[bad[0]].item()} runs in row {bad[0]}"
        )
