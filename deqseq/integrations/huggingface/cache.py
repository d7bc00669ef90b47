"""The tokens of a call and those before it: the cache, masks, positions, packed sequences."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache as TransformersCache

from deqseq.arguments import check_type, suggestion
from deqseq.backbones.base import Cache
from deqseq.config import SolveFields
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
        """Replace the value by that of a call; ``mask`` is that of all tokens until then."""
        batch, new = output.value.shape[:2]
        self.value, self.mask, self.length = output.cache, mask, self.length + new
        self._rows, self._device = batch, output.value.device
        if output.stats is not None and output.status is not None:
            self.solves = (*self.solves, Solve(output.stats, output.status))

    def joined_mask(self, attention_mask: Tensor | None, batch: int, new: int) -> Mask | None:
        """The mask of committed and new tokens, ``(batch, length + new)``; None: no padding.

        ValueError: another shape, or other padding among the committed tokens.
        """
        if attention_mask is None:
            return None if self.mask is None else F.pad(self.mask, (0, new), value=True)
        shape = (batch, self.length + new)
        if attention_mask.shape != shape:
            raise ValueError(
                f"attention_mask must have shape {shape}, for {self.length} tokens in the cache "
                f"and {new} new ones, got {tuple(attention_mask.shape)}; masks between pairs of "
                "tokens are not supported"
            )
        mask = attention_mask != 0
        committed = mask[:, : self.length]
        if self.mask is None:
            same = bool(committed.all())
        else:
            same = torch.equal(committed, self.mask.to(mask.device))
        if not same:
            raise ValueError(
                "attention_mask must mark the same padding among the tokens of the cache as when "
                "they were computed"
            )
        return None if bool(mask.all()) else mask

    @property
    def batch_size(self) -> int:
        """Rows; -1 before the first token, as in transformers."""
        return self._rows

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """As ``length``."""
        return self.length

    @property
    def is_linear(self) -> list[bool]:
        """``[False]``: the length is known, so transformers passes the tokens after it."""
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

    def batch_select_indices(self, indices: Tensor | list[int]) -> None:
        """Continue with these rows: their numbers, or a mask of bool, True at those to keep."""
        if self.value is not None:
            chosen = torch.as_tensor(indices, device=self._device)
            rows = torch.arange(self._rows, device=self._device)[chosen]
            self.value, self.mask = take((self.value, self.mask), rows)
            self._rows = len(rows)

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
        """Remove some of the last tokens; their number is negative, as in transformers.

        Raises:
            ValueError: a recurrent backbone, more tokens than there are, or more of one row than of
                another.
        """
        removed = -tokens_to_remove
        if removed == 0 or self.value is None:
            return
        if not 0 <= removed <= self.length:
            raise ValueError(
                f"tokens_to_remove must be {-self.length} to 0, got {tokens_to_remove}"
            )
        length = self.length - removed
        if self.mask is not None:
            counts = self.mask[:, length:].sum(dim=1).unique()
            if len(counts) > 1:
                raise ValueError(
                    "tokens_to_remove must take equally many from all rows, "
                    f"{tokens_to_remove} does not"
                )
            self.mask, removed = self.mask[:, :length], int(counts)
        self.value, self.length = self.value.crop(removed), length

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """TypeError: layers do not write here, the model commits all of them at once."""
        raise TypeError(
            "an ImplicitCache works with deqseq's models only, which commit all layers at once"
        )

    def __repr__(self) -> str:
        return f"ImplicitCache(batch_size={self.batch_size}, length={self.length})"


UNUSED = (
    "token_type_ids",
    "mm_token_type_ids",
    "moe_mm_token_type_ids",
    "cache_position",
    "num_items_in_batch",
    "output_router_logits",
    "tokenizer",
    "assistant_tokenizer",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
)
"""What transformers passes to every model, and these models do not need."""
REFUSED = {
    "output_attentions": "no attention weights are computed",
    "past_key_values": (
        "transformers 5.24 and this library call it cache, and PEFT's prefix tuning does not work"
    ),
}
TAKEN = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "cache",
    "inputs_embeds",
    "labels",
    "use_cache",
    "shift_labels",
    "logits_to_keep",
    "output_hidden_states",
    "return_dict",
    "solve",
)


def check_keywords(position_ids: object, keywords: Mapping[str, Any]) -> None:
    """Refuse keywords that would change the result, and unknown ones; None asks for nothing."""
    check_tensors(position_ids=position_ids)
    flattened = keywords.get("cu_seq_lens_q") is not None or keywords.get("seq_idx") is not None
    if flattened and position_ids is None:
        raise ValueError(
            "position_ids must be given too: where they begin again a packed sequence begins"
        )
    for name, value in keywords.items():
        if name == "is_causal":
            if value is False:
                raise ValueError("is_causal=False is not available: these models are causal")
        elif name in REFUSED:
            if value is not None and value is not False:
                raise ValueError(f"{name} is not available: {REFUSED[name]}")
        elif name not in UNUSED:
            remedy = suggestion(name, TAKEN)
            if name in SolveFields.__annotations__:
                remedy = f': write solve={{"{name}": ...}}'
            raise TypeError(f"unexpected keyword argument {name!r}{remedy}")


def check_tensors(**values: object) -> None:
    """Refuse what is not a tensor."""
    for name, value in values.items():
        check_type(name, value, (Tensor, type(None)), "torch.tensor([[1, 2, 3]])")


def check_cache(cache: object, rows: int) -> None:
    """Refuse the cache of another library, or of another number of rows."""
    if not isinstance(cache, ImplicitCache):
        raise TypeError(
            f"cache must be an ImplicitCache, got {type(cache).__name__}: leave it out, or give "
            "deqseq.integrations.huggingface.ImplicitCache()"
        )
    if cache.batch_size not in (-1, rows):
        raise ValueError(
            f"cache has {cache.batch_size} rows and the input has {rows}: repeat its rows with "
            "cache.batch_repeat_interleave(n), or choose some with cache.batch_select_indices(rows)"
        )


def check_positions(
    position_ids: Tensor | None, mask: Mask | None, committed: int, shape: tuple[int, int]
) -> None:
    """Refuse positions other than the model's own: real tokens counted from 0."""
    if position_ids is None:
        return
    if position_ids.shape not in (shape, (1, shape[1])):
        raise ValueError(f"position_ids must have shape {shape}, got {tuple(position_ids.shape)}")
    if mask is None:
        mask = torch.ones(1, committed + shape[1], dtype=torch.bool, device=position_ids.device)
    expected = mask.cumsum(dim=1)[:, committed:] - 1
    fits = (position_ids == expected) | ~mask[:, committed:]  # those of padding do not matter
    if not bool(fits.all()):
        raise ValueError(
            "position_ids must count the real tokens of a row, or of each sequence in it, from 0, "
            "those of the cache included, as the model does itself: leave them out (shifted "
            "positions are not supported)"
        )


@dataclass(frozen=True)
class Packing:
    """Where the tokens of packed sequences lie; each becomes a row of its own for the solve.

    Attributes:
        real: True at real tokens of the packed rows, ``(batch, length)``.
        sequence: the sequence of each real token, ``(tokens,)``.
        number: its number in the sequence, ``(tokens,)``.
    """

    real: Bool[Tensor, "batch length"]
    sequence: Int64[Tensor, " tokens"]
    number: Int64[Tensor, " tokens"]

    @classmethod
    def of(
        cls, position_ids: Int64[Tensor, "..."] | None, mask: Mask | None, shape: tuple[int, int]
    ) -> "Packing | None":
        """From the positions of the tokens, and which are real; None if each row is one sequence.

        A sequence begins at a position of 0 and after padding. ValueError: its positions do not
        count from 0.
        """
        if position_ids is None or position_ids.shape not in (shape, (1, shape[1])):
            return None
        positions = position_ids.expand(shape)
        real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
        at_edge = F.pad(~real[:, :-1], (1, 0), value=True)  # after padding, or first in its row
        begins = real & ((positions == 0) | at_edge)
        if int(begins.sum(dim=1).max()) < 2:
            return None
        place = torch.arange(real.numel(), device=real.device).view(shape)[real]
        begins = begins[real]
        sequence = begins.cumsum(0) - 1
        number = place - place[begins][sequence]
        if not torch.equal(positions[real], number):
            raise ValueError("position_ids must count the tokens of each packed sequence from 0")
        return cls(real, sequence, number)

    def apart(self, x: Tensor) -> Tensor:
        """A row for each sequence, with zeros behind it, ``(sequences, longest, ...)``."""
        count, longest = int(self.sequence.max()) + 1, int(self.number.max()) + 1
        rows = x.new_zeros(count, longest, *x.shape[2:])
        return rows.index_put((self.sequence, self.number), x[self.real])

    def together(self, x: Tensor) -> Tensor:
        """Packed again, ``(batch, length, ...)``, with zeros at padding."""
        packed = x.new_zeros(*self.real.shape, *x.shape[2:])
        return packed.index_put((self.real,), x[self.sequence, self.number])

    def output(self, output: ModelOutput) -> ModelOutput:
        """The output for the packed rows; without ``explain()``, which would speak of sequences."""
        stats, status = output.stats, output.status
        if stats is not None:
            names = ("iterations", "residual", "updates", "forced")
            stats = replace(stats, **{name: self.together(getattr(stats, name)) for name in names})
        if status is not None:
            rows, worst = self.real.nonzero()[:, 0], status.new_zeros(len(self.real))
            status = worst.scatter_reduce(0, rows, status[self.sequence], "amax")
        return ModelOutput(self.together(output.value), None, stats, status)
