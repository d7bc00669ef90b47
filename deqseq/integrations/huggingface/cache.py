"""This library's cache, a value, in the object that transformers passes from call to call."""

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from transformers import Cache as TransformersCache

from deqseq.backbones.base import Cache, RealTokens
from deqseq.models.output import ModelOutput
from deqseq.solution import SolveStats


@dataclass(frozen=True)
class Solve:
    """How the tokens of one call were solved.

    Attributes:
        stats: self-iterations and residuals.
        status: a :class:`deqseq.Status` a row, ``(batch,)``.
    """

    stats: SolveStats
    status: Int64[Tensor, " batch"]


class ImplicitCache(TransformersCache):
    """What the settled tokens have left, under transformers' interface.

    A model reads the value once, solves, and commits the value that follows once; nothing changes meanwhile. So a copy
    of the object (``copy.copy``) is a prompt that several continuations can share.

    Attributes:
        value: this library's cache; None: nothing has settled.
        real: which of the settled tokens are no padding, ``(batch, length)``; None: all.
        length: how many tokens have settled, padding included.
        solves: how the tokens of each call were solved, in order; rows are those of that call. Empty for an explicit
            model.

    Example:
        >>> cache = ImplicitCache()
        >>> cache.get_seq_length(), cache.batch_size
        (0, -1)
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.value: Cache | None = None
        self.real: Bool[Tensor, "batch length"] | None = None
        self.length = 0
        self.solves: tuple[Solve, ...] = ()
        self._rows, self._device = -1, torch.device("cpu")

    def commit(self, output: ModelOutput, mask: RealTokens | None) -> None:
        """Go on to what a call has left.

        Args:
            output: of the call, with a cache.
            mask: which of its tokens are real, ``(batch, new)``; None: all.
        """
        batch, new = output.value.shape[:2]
        if self.real is not None or mask is not None:
            every = torch.ones(batch, max(self.length, new), dtype=torch.bool, device=output.value.device)
            before = every[:, : self.length] if self.real is None else self.real
            self.real = torch.cat([before, every[:, :new] if mask is None else mask], dim=1)
        self.value, self.length = output.cache, self.length + new
        self._rows, self._device = batch, output.value.device
        if output.stats is not None and output.status is not None:
            self.solves = (*self.solves, Solve(output.stats, output.status))

    @property
    def batch_size(self) -> int:
        """Rows; -1 while nothing has settled, as in transformers."""
        return self._rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """How many tokens have settled, padding included; the same in all layers."""
        return self.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """-1: there is no limit."""
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Settled and new tokens together, and where they begin."""
        return self.length + query_length, 0

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether anything has settled."""
        return self.value is not None

    @property
    def is_initialized(self) -> bool:
        """Whether anything has settled."""
        return self.value is not None

    @property
    def is_croppable(self) -> bool:
        """No: the state of a recurrent backbone does not contain the states before it."""
        return False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with these rows, of which some may be named more than once (beam search)."""
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Go on with these rows."""
        self._select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Go on with each row so many times."""
        self._select(torch.arange(max(0, self._rows)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Forget everything."""
        self.value, self.real, self.length, self.solves, self._rows = None, None, 0, (), -1

    def crop(self, tokens_to_remove: int) -> None:
        """Tokens cannot be taken back; removing none does nothing.

        Raises:
            ValueError: any other number.
        """
        if tokens_to_remove != 0:
            raise ValueError(
                "an ImplicitCache cannot be cropped, because the state of a recurrent backbone does not contain the "
                "states before it: keep a copy.copy(cache) of the place to come back to"
            )

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Layers have nothing to write here: the model commits a whole value.

        Raises:
            TypeError: always.
        """
        raise TypeError("an ImplicitCache serves the models of deqseq alone, which commit all layers at once")

    def __repr__(self) -> str:
        return f"ImplicitCache(batch_size={self.batch_size}, length={self.length})"

    def _select(self, rows: Tensor) -> None:
        if self.value is None:
            return
        rows = rows.to(self._device, torch.int64)
        self.value, self._rows = self.value.select(rows), len(rows)
        self.real = None if self.real is None else self.real[rows]
