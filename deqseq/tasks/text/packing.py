"""A corpus as one stream of tokens, cut into sequences of one length; any step's batch at once."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Int64, UInt
from torch import Tensor

from deqseq.models.causal_lm import IGNORED
from deqseq.tasks.text.encoders import EncodedText, Encoder, encode_group, groups, smallest_unsigned


class TextBatch(NamedTuple):
    """Sequences of text and, at every position, the token that comes next: ``model(inputs, targets=targets)``.

    Attributes:
        inputs: token ids, ``(batch, length)``.
        targets: the ids one place further on in the text, ``(batch, length)``; -100 where there is nothing to predict.
        text_bytes: how many bytes of text a row's targets stand for, ``(batch,)``.
    """

    inputs: Int64[Tensor, "batch length"]
    targets: Int64[Tensor, "batch length"]
    text_bytes: Int64[Tensor, " batch"]


@dataclass(frozen=True, eq=False)
class PackedText:
    """A corpus in memory, ready to be trained on and evaluated.

        stream = eos, tokens of document 1, eos, tokens of document 2, eos, ...
        row i:   inputs = stream[i L : i L + L],    targets = stream[i L + 1 : i L + L + 1]

    So every token of every document, and the eos that ends it, is the target of exactly one row; the leading eos is
    input alone, and is what the first token is predicted from. In training, fewer than ``length`` targets at the end
    of the stream are left out. A row does not begin with its document, and a document goes on in the next row.

    Args:
        tokens: the stream, ``(tokens,)``, in the smallest unsigned type.
        byte_counts: how many bytes of text each token stands for, ``(tokens,)``; see :func:`bits_per_byte`.
        length: of a row, in tokens, L.

    Raises:
        ValueError: a length below 1, arrays of unequal size, or nothing to predict.

    Example:
        >>> from deqseq.tasks.text import ByteEncoder, PackedText
        >>> text = PackedText.pack(["To be", "or not"], ByteEncoder(), length=4)
        >>> text.rows, text.tokens.tolist()
        (3, [256, 84, 111, 32, 98, 101, 256, 111, 114, 32, 110, 111, 116, 256])
        >>> next(text.in_order(2)).targets
        tensor([[ 84, 111,  32,  98],
                [101, 256, 111, 114]])
    """

    tokens: UInt[np.ndarray, " tokens"]
    byte_counts: UInt[np.ndarray, " tokens"]
    length: int

    def __post_init__(self) -> None:
        check_at_least("length", self.length, 1)
        if self.tokens.shape != self.byte_counts.shape or len(self.tokens) < 2:
            raise ValueError(
                f"tokens and byte_counts must have one size, at least 2, got {self.tokens.shape} and "
                f"{self.byte_counts.shape}"
            )

    @staticmethod
    def pack(documents: Iterable[str], encoder: Encoder, length: int) -> "PackedText":
        """Encode documents and string them together.

        Args:
            documents: the texts; empty ones are left out.
            encoder: what makes tokens of them.
            length: of a row, in tokens.

        Returns:
            The packed text. With a vocabulary from 257 to 65,536 a token usually takes 3 bytes of memory, one of them
            for its number of bytes.

        Raises:
            ValueError: no documents, or a length below 1.
        """
        check_at_least("length", length, 1)
        encoded = [encode_group(encoder, group) for group in groups(documents)]
        if not encoded:
            raise ValueError("documents must have some text in them, got none")
        first = EncodedText(smallest_unsigned(np.array([encoder.eos])), smallest_unsigned(np.array([0])))
        tokens, byte_counts = (smallest_unsigned(np.concatenate(parts)) for parts in zip(first, *encoded, strict=True))
        return PackedText(tokens, byte_counts, length)

    @property
    def rows(self) -> int:
        """Number of full rows, those that :meth:`batch` draws from."""
        return (len(self.tokens) - 1) // self.length

    @property
    def text_bytes(self) -> int:
        """Size of all documents together, in bytes of UTF-8."""
        return int(self.byte_counts.sum(dtype=np.int64))

    def batch(self, step: int, *, batch_size: int, seed: int, rank: int = 0, world: int = 1) -> TextBatch:
        """The training batch of a step: a pure function of its arguments, so that a resumed run needs no state.

        Rows come in a new random order every epoch, each once; a batch may reach into the next epoch.

        Args:
            step: counted from 0.
            batch_size: rows of all processes together.
            seed: of the order, 0 or more.
            rank: of this process, which gets rows ``rank * batch_size / world`` and following of the batch: all
                processes together see the same rows whatever their number.
            world: number of processes; divides the batch size.

        Returns:
            This process's part, ``batch_size / world`` rows.

        Raises:
            ValueError: a number out of its range, or not one full row of text.
        """
        share = share_of(batch_size, rank, world)
        check_at_least("step", step, 0)
        check_at_least("seed", seed, 0)
        if self.rows == 0:
            raise ValueError(f"the text must have at least {self.length + 1} tokens, got {len(self.tokens)}")
        places = np.arange(step * batch_size, (step + 1) * batch_size)[share]
        rows = [_order(self.rows, seed, int(place // self.rows))[place % self.rows] for place in places]
        return self._batch(np.array(rows))

    def in_order(
        self, batch_size: int, *, rows: Sequence[int] | None = None, rank: int = 0, world: int = 1
    ) -> Iterator[TextBatch]:
        """The whole text once, in order, for evaluation: no target is left out, none comes twice.

        Args:
            batch_size: rows of all processes together.
            rows: these alone, counted from 0, the last of which may be shorter than the others; None: all.
            rank: of this process.
            world: number of processes; divides the batch size.

        Returns:
            Iterator over this process's parts, all of ``batch_size / world`` rows, equally many for every process.
            The last batch is filled up with eos as input and -100 as target, so that a part of it may have no
            target at all: sum the losses over the targets that are not -100, and divide once.

        Raises:
            ValueError: a number out of its range, or no row at all.

        Example:
            >>> from deqseq.tasks.text import ByteEncoder, PackedText
            >>> text = PackedText.pack(["To be", "or not"], ByteEncoder(), length=4)
            >>> sum(int(batch.text_bytes.sum()) for batch in text.in_order(3))
            11
        """
        share = share_of(batch_size, rank, world)
        count = -(-(len(self.tokens) - 1) // self.length)  # rounded up
        chosen = np.arange(count) if rows is None else np.array(rows, dtype=np.int64)
        if chosen.ndim != 1 or not len(chosen) or chosen.min() < 0 or chosen.max() >= count:
            raise ValueError(f"rows must be a list of numbers from 0 to {count - 1}, at least one, got {rows}")
        filled = np.concatenate([chosen, np.full(-len(chosen) % batch_size, count + 1)])  # behind the end
        return (self._batch(batch[share]) for batch in filled.reshape(-1, batch_size))

    def _batch(self, rows: np.ndarray) -> TextBatch:
        places = rows[:, None] * self.length + np.arange(self.length + 1)
        inside = places < len(self.tokens)
        places = np.where(inside, places, 0)  # where eos stands
        ids = self.tokens[places].astype(np.int64)
        targets = np.where(inside, ids, IGNORED)[:, 1:]
        text_bytes = np.where(inside, self.byte_counts[places], 0)[:, 1:].sum(axis=1, dtype=np.int64)
        parts = (ids[:, :-1], targets, text_bytes)
        return TextBatch(*(torch.from_numpy(np.ascontiguousarray(part)) for part in parts))


def bits_per_byte(nats: float, text_bytes: int) -> float:
    """Loss per byte of text, which does not depend on the tokenizer.

        bits per byte = (sum over targets of -ln p(target)) / (ln 2 · bytes of text that the targets stand for)

    The loss of every target counts, that of each eos too, which stands for no byte: a model pays for saying where a
    document ends. The eos that leads the stream is no target and costs nothing. A token stands for the bytes of the
    document from the end of the token before it to its own end; where a character is split into several tokens, its
    bytes count with the first of them, and what a tokenizer drops at the end of a document counts with its eos. So over
    whole documents, as in :meth:`PackedText.in_order`, the bytes are exactly those of the text.

    Args:
        nats: the loss summed, not averaged, over the targets, in nats.
        text_bytes: the sum of ``text_bytes`` over the same batches.

    Returns:
        Bits per byte.

    Raises:
        ValueError: no bytes.

    Example:
        >>> bits_per_byte(8 * math.log(2), 4)  # four bytes, predicted with one bit of loss for every half of them
        2.0
    """
    check_at_least("text_bytes", text_bytes, 1)
    return nats / math.log(2) / text_bytes


def share_of(batch_size: int, rank: int, world: int) -> slice:
    """Which rows of a batch are a process's own.

    Raises:
        ValueError: a number out of its range, or processes that cannot share the batch equally.
    """
    check_at_least("world", world, 1)
    check_at_least("batch_size", batch_size, 1)
    if not 0 <= rank < world:
        raise ValueError(f"rank must lie in 0..{world - 1}, got {rank}")
    if batch_size % world:
        raise ValueError(f"batch_size must be a multiple of the number of processes {world}, got {batch_size}")
    rows = batch_size // world
    return slice(rank * rows, (rank + 1) * rows)


def check_at_least(name: str, value: int, least: int) -> None:
    """Refuse a number that is too small.

    Raises:
        ValueError: names it.
    """
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


@lru_cache(maxsize=4)  # an epoch's, and the next one's for batches that reach into it; of training data and one more
def _order(rows: int, seed: int, epoch: int) -> np.ndarray:
    order = np.random.default_rng((seed, epoch)).permutation(rows)
    order.setflags(write=False)
    return order
