"""The cache of a backbone, a value, in the object that transformers passes from call to call."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import Cache as TransformersCache

from deqseq.backbones.base import Cache
from deqseq.models.output import ModelOutput
from deqseq.rows import take
from deqseq.solution import Outcome, SolveStats
from deqseq.types import Mask


@dataclass(frozen=True)
class Solve(Outcome):
    """How the tokens of one call were solved.

    Attributes:
        stats: iterations and residuals of each token, ``(batch, new)``.
        status: a :class:`deqseq.Status` per row, ``(batch,)``.
    """

    stats: SolveStats  # pyright: ignore[reportIncompatibleVariableOverride]
    status: Int64[Tensor, " batch"]  # pyright: ignore[reportIncompatibleVariableOverride]


class ImplicitCache(TransformersCache):
    """The committed tokens, under the interface of transformers' caches.

    A model replaces the value, which itself never changes. So a copy of this object (``copy.copy``)
    is a prompt that several continuations can share.

    Attributes:
        value: the cache of the backbone; None before the first token.
        mask: bool, True at real tokens among the committed ones, ``(batch, length)``; None: no
            padding.
        length: number of committed tokens, padding included.
        solves: how the tokens of each call were solved, in order; empty for an explicit model.

    Example:
        >>> cache = ImplicitCache()
        >>> cache.get_seq_length(), cache.batch_size
        (0, -1)
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.reset()

    def commit(self, output: ModelOutput, mask: Mask | None) -> None:
        """Replace the value by that of a call; ``mask`` is True at the real tokens of the call,
        ``(batch, new)``.
        """
        batch, new = output.value.shape[:2]
        if self.mask is not None or mask is not None:
            real = torch.ones(
                batch, self.length + new, dtype=torch.bool, device=output.value.device
            )
            before, now = real[:, : self.length], real[:, self.length :]
            self.mask = torch.cat(
                [before if self.mask is None else self.mask, now if mask is None else mask], dim=1
            )
        self.value, self.length = output.cache, self.length + new
        self._rows, self._device = batch, output.value.device
        if output.stats is not None and output.status is not None:
            self.solves = (*self.solves, Solve(output.stats, output.status))

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first token, as in transformers."""
        return self._rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As ``length``."""
        return self.length

    @property
    def is_linear(self) -> list[bool]:
        """``[False]``: the length is known, so transformers passes the tokens that come
        after it.
        """
        return [False]

    @property
    def is_croppable(self) -> bool:
        """Whether tokens can be removed: False where a part of the model is recurrent."""
        try:
            return self.value is None or self.value.crop(0) is not None
        except ValueError:
            return False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue with these rows; some may be repeated (beam search)."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Continue with these rows: their numbers, or a mask of bool, True at those to keep."""
        if self.value is not None:
            rows = torch.arange(self._rows, device=self._device)[
                torch.as_tensor(indices, device=self._device)
            ]
            (self.value, self.mask), self._rows = take((self.value, self.mask), rows), len(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue with each row repeated so many times."""
        self.batch_select_indices(torch.arange(max(0, self._rows)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Remove all tokens."""
        self.value: Cache | None = None
        self.mask: Mask | None = None
        self.length = 0
        self.solves: tuple[Solve, ...] = ()
        self._rows, self._device = -1, torch.device("cpu")

    def crop(self, tokens_to_remove: int) -> None:
        """Remove as many of the last tokens, a number that is negative, as in transformers.

        Raises:
            ValueError: a recurrent backbone, more tokens than there are, or more of one row than of
                another.
        """
        if tokens_to_remove == 0 or self.value is None:
            return
        removed = -tokens_to_remove
        if not 0 <= removed <= self.length:
            raise ValueError(
                f"tokens_to_remove must be {-self.length} to 0, got {tokens_to_remove}"
            )
        left = self.length - removed
        if self.mask is not None:
            real = set(self.mask[:, left:].sum(dim=1).tolist())
            if len(real) > 1:
                raise ValueError(
                    f"tokens_to_remove must take equally many from all rows, {tokens_to_remove} "
                    "does not"
                )
            self.mask, removed = self.mask[:, :left], real.pop()
        self.value, self.length = self.value.crop(removed), left

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """TypeError: layers do not write here, the model commits all of them at once."""
        raise TypeError(
            "an ImplicitCache works with deqseq's models only, which commit all layers at once"
        )

    def __repr__(self) -> str:
        return f"ImplicitCache(batch_size={self.batch_size}, length={self.length})"
