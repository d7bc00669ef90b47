"""The tokens of a call and those before it: the cache, masks, positions, packed sequences."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache as TransformersCache

from deqseq.arguments import Between, check_integer, check_type, shown, suggestion
from deqseq.backbones.base import Cache
from deqseq.config import SolveFields
from deqseq.models.output import ModelOutput
from deqseq.rows import take
from deqseq.solution import Outcome, SolveStats
from deqseq.types import Mask, RowIndex


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

    A model replaces ``value`` and never changes it. So several continuations can share a prompt:
    give each of them a copy of this object (``copy.copy``).

    Attributes:
        value: the cache of the backbone; None before the first token.
        mask: bool, True at real tokens among the committed ones, ``(batch, length)``; None: no
            padding.
        length: number of committed tokens, padding included.
        solves: how the tokens of each call were solved, in order; empty for an explicit model.

    Example:
        >>> from deqseq.integrations.huggingface import ImplicitCache
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
        self.value = output.cache
        self.mask = mask
        self.length = self.length + new
        self._rows = batch
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
        complete, odd = torch.stack([mask.all(), (attention_mask != mask).any()]).tolist()
        if odd:
            raise ValueError(
                "attention_mask must have 1 at tokens and 0 at padding, got other numbers: packed "
                "sequences are told by position_ids that begin again at 0"
            )
        committed = mask[:, : self.length]
        expected = torch.ones_like(committed) if self.mask is None else self.mask
        if not torch.equal(committed, expected.to(mask.device)):
            raise ValueError(
                "attention_mask must mark the same padding among the tokens of the cache as when "
                "they were computed (what generate made behind the end of a row counts as tokens): "
                "leave the cache out, or crop it"
            )
        return None if complete else mask

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
        check_type("beam_idx", beam_idx, (Tensor, list))
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor | list[int]) -> None:
        """Continue with these rows: their numbers, or a mask of bool, True at those to keep.

        Raises:
            TypeError, ValueError: indices of another kind, or beyond the rows.
        """
        check_type("indices", indices, (Tensor, list))
        if self.value is None:
            return
        rows = torch.arange(self._rows, device="cpu")
        try:
            index = torch.as_tensor(indices, device="cpu")
            chosen = None if index.dtype == torch.uint8 else rows[index]  # torch's old masks
        except (IndexError, NotImplementedError):  # the second: numbers on the device meta
            chosen = None
        if chosen is None or chosen.ndim != 1:
            raise ValueError(
                f"indices must be int64 in 0..{len(rows) - 1}, or bool of shape ({len(rows)},), "
                f"got {shown(indices)}"
            )
        self._rows = len(chosen)
        chosen = chosen.to(self.value.tensors()[0].device)
        self.value, self.mask = take((self.value, self.mask), chosen)

    def take_rows(self, rows: RowIndex) -> "ImplicitCache":
        """A cache of the given ``rows``, ``(rows,)``; ``solves`` stay those of the whole calls."""
        taken = copy(self)
        taken.batch_select_indices(rows)
        return taken

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Continue with each row repeated so many times."""
        check_integer("repeats", repeats, 1)
        self.batch_select_indices(torch.arange(max(0, self._rows)).repeat_interleave(repeats))

    def reset(self) -> None:
        """Remove all tokens."""
        self.value: Cache | None = None
        self.mask: Mask | None = None
        self.length = 0
        self.solves: tuple[Solve, ...] = ()
        self._rows = -1

    def crop(self, tokens_to_remove: int) -> None:
        """Remove some of the last tokens; their number is negative, as in transformers.

        Raises:
            ValueError: a recurrent backbone, more tokens than there are, or more of one row than of
                another.
        """
        Between()("tokens_to_remove", tokens_to_remove)
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
            self.mask = self.mask[:, :length]
            removed = int(counts)
        self.value = self.value.crop(removed)
        self.length = length

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
    check_packing(position_ids, keywords)
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


def check_packing(position_ids: Any, keywords: Mapping[str, Any]) -> None:
    """Refuse packed sequences that are told without positions, or in contradiction to them."""
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        told = keywords.get(name)
        if told is None:
            continue
        check_tensors(**{name: told})
        if position_ids is None:
            raise ValueError(
                "position_ids must be given too: where they begin again a packed sequence begins"
            )
        begins = position_ids.flatten() == 0
        if name == "seq_idx":
            told = F.pad(told.diff(dim=1) != 0, (1, 0), value=True).flatten()
        else:
            told, begins = told[:-1], begins.nonzero()[:, 0]
        if not torch.equal(told.to(begins), begins):
            raise ValueError(
                f"{name} must say that sequences begin where position_ids are 0, got others: "
                "leave it out"
            )


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
    whole = not position_ids.is_floating_point() and not position_ids.is_complex()
    if position_ids.shape not in (shape, (1, shape[1])) or not whole:
        raise ValueError(
            f"position_ids must be integers of shape {shape}, got {shown(position_ids)}"
        )
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
        packed: True at real tokens of the packed rows, ``(batch, length)``.
        apart: True at the same tokens, in the same order, of a row for each sequence,
            ``(sequences, longest)``.
    """

    packed: Bool[Tensor, "batch length"]
    apart: Bool[Tensor, "sequences longest"]

    @classmethod
    def of(
        cls, position_ids: Int64[Tensor, "..."] | None, mask: Mask | None, shape: tuple[int, int]
    ) -> "Packing | None":
        """From the positions of the tokens, and which are real; None if each row is one sequence.

        A sequence begins at a position of 0, and a row with one; after padding inside it a sequence
        goes on. ValueError: its positions do not count from 0.
        """
        if position_ids is None or position_ids.shape not in (shape, (1, shape[1])):
            return None
        positions = position_ids.expand(shape)
        real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
        first = real & (real.cumsum(dim=1) == 1)
        begins = first | (real & (positions == 0))
        if int(begins.sum(dim=1).max()) < 2:
            return None
        lengths = (begins[real].cumsum(0) - 1).bincount()
        apart = torch.arange(int(lengths.max()), device=real.device) < lengths[:, None]
        if not torch.equal(positions[real], apart.nonzero()[:, 1]):
            raise ValueError("position_ids must count the tokens of each packed sequence from 0")
        return cls(real, apart)

    def rows(self, x: Tensor) -> Tensor:
        """A row for each sequence, with zeros behind it, ``(sequences, longest, ...)``."""
        return _moved(x, self.packed, self.apart)

    def together(self, x: Tensor) -> Tensor:
        """Packed again, ``(batch, length, ...)``, with zeros at padding."""
        return _moved(x, self.apart, self.packed)

    def output(self, output: ModelOutput) -> ModelOutput:
        """The output for the packed rows; without ``explain()``, which would speak of sequences."""
        stats = output.stats
        status = output.status
        if stats is not None:
            stats = stats.moved(self.together)
        if status is not None:  # a row has the worst status of its sequences
            status = self.together(status[:, None].expand_as(self.apart)).amax(dim=1)
        return ModelOutput(self.together(output.value), None, stats, status)


def _moved(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """What is at the places ``source``, one after another at the places ``target``; else zeros."""
    moved = x.new_zeros(*target.shape, *x.shape[2:])
    return moved.index_put((target,), x[source])
