"""Documents as one stream of tokens, and training batches of rows cut from it."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from datasets import Dataset, IterableDataset
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from common.tokenizer import end_of_text
from deqseq.check import check_integer

BLOCK = 1000  # documents whose rows are shuffled together
GROUP = 2**20  # characters that are encoded in one call


class Stream(NamedTuple):
    """Documents as tokens: end of text, document 1, end of text, document 2, ..., end of text.

    Attributes:
        ids: token ids, shape (tokens,).
        byte_counts: bytes (UTF-8) of text that each token stands for, shape (tokens,). Their sum is the size of the
            documents: where a character is split into several tokens, its bytes count with the first of them; what the
            tokenizer drops counts with the next token, or with the end of text.
    """

    ids: np.ndarray
    byte_counts: np.ndarray


def encode(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Stream:
    """Documents as one stream of tokens, without the special tokens that a tokenizer adds; empty ones are left out.

    The name of a special token in a document is text.

    Raises:
        ValueError: a document is no string, or has half of a surrogate pair, which UTF-8 cannot write.
    """
    parts = list(_encoded(documents, tokenizer))
    return Stream(*(np.concatenate(part) for part in zip(_tokens([end_of_text(tokenizer)], [0]), *parts, strict=True)))


def _encoded(documents: Iterable[str], tokenizer: PreTrainedTokenizerBase) -> Iterator[Stream]:
    """Each document with end of text at its end; an empty one has no tokens at all."""
    eos = end_of_text(tokenizer)
    for group in _groups(documents):
        contents = [np.frombuffer(text.encode(), np.uint8) for text in group]
        encoded = tokenizer(
            group,
            add_special_tokens=False,
            split_special_tokens=True,
            return_attention_mask=False,
            return_token_type_ids=False,
            return_offsets_mapping=True,
            verbose=False,
        )
        for content, ids, offsets in zip(contents, encoded["input_ids"], encoded["offset_mapping"], strict=True):
            if not len(content):
                yield _tokens([], [])
                continue
            starts = np.append(np.flatnonzero(content & 0xC0 != 0x80), len(content))  # of characters, in bytes
            ends = starts[[*(end for _, end in offsets), -1]]
            yield _tokens([*ids, eos], np.diff(np.maximum.accumulate(ends), prepend=0))


def _tokens(ids: Sequence[int], byte_counts: Sequence[int] | np.ndarray) -> Stream:
    return Stream(np.array(ids, np.int32), np.array(byte_counts, np.int32))


def _groups(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents to encode in one call: a tokenizer uses all cores for them, and a lot of memory."""
    group, characters = [], 0
    for document in documents:
        if not isinstance(document, str):
            raise ValueError(f"documents must be strings, got {type(document).__name__}")
        group.append(document)
        characters += len(document)
        if characters >= GROUP:
            yield group
            group, characters = [], 0
    if group:
        yield group


class Batch(NamedTuple):
    """Rows of text and, at every position, the token that comes next: ``model(inputs, targets=targets)``."""

    inputs: Int64[Tensor, "batch length"]
    targets: Int64[Tensor, "batch length"]


def tokenised(documents: Dataset | IterableDataset, tokenizer: PreTrainedTokenizerBase) -> Dataset | IterableDataset:
    """A data set's documents (column ``"text"``) as token ids (column ``"ids"``), each with end of text at its end.

    A `Dataset` is tokenised now, and stored where it is stored; an `IterableDataset` as it is read.
    """
    return documents.map(_ids, batched=True, batch_size=16, remove_columns=["text"], fn_kwargs={"tokenizer": tokenizer})


def _ids(batch: dict[str, list[str]], tokenizer: PreTrainedTokenizerBase) -> dict[str, list[np.ndarray]]:
    return {"ids": [document.ids for document in _encoded(batch["text"], tokenizer)]}


class Batches:
    """Training batches without end: every epoch, the rows of all documents in another random order.

        row i of a block:   inputs = ids[i L : i L + L],    targets = ids[i L + 1 : i L + L + 1]

    1000 documents are a block; a block's rows are shuffled together. If there are more, the documents of a `Dataset`
    and the files of a streamed one are shuffled too (a stream's from the second epoch on). Less than a row is left out
    at the end of each block. A batch may reach into the next epoch.

    All processes read the same rows and keep their own part of each batch: a run sees the same batches with any number
    of processes, and may go on with another number. (With `split_dataset_by_node` the batches would depend on it, and
    the processes' epochs would differ in length.)

    Args:
        documents: of :func:`tokenised`.
        eos: id of the end-of-text token, from which the first token of a block is predicted.
        length: of a row in tokens, L.
        batch_size: rows of a batch, of all processes together.
        seed: of the order.
        rank: of this process.
        world: number of processes; divides the batch size.

    Raises:
        ValueError: a number out of its range; at the first batch: documents without a single row.

    Example:
        >>> documents = Dataset.from_dict({"ids": [[5, 6, 7, 8, 9, 0]]})
        >>> batches = Batches(documents, eos=0, length=2, batch_size=2)
        >>> first, state = next(batches), batches.state_dict()
        >>> second = next(batches)
        >>> batches.load_state_dict(state)
        >>> torch.equal(next(batches).targets, second.targets)
        True
    """

    def __init__(
        self,
        documents: Dataset | IterableDataset,
        eos: int,
        length: int,
        batch_size: int,
        *,
        seed: int = 0,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        for name, value, least in (("length", length, 1), ("batch_size", batch_size, 1), ("seed", seed, 0)):
            check_integer(name, value, least)
        check_integer("world", world, 1)
        check_integer("rank", rank, 0, world - 1)
        if batch_size % world:
            raise ValueError(f"batch_size must be a multiple of the number of processes {world}, got {batch_size}")
        self.documents, self.eos, self.length, self.seed, self.batch_size = documents, eos, length, seed, batch_size
        self._mine = slice(rank * batch_size // world, (rank + 1) * batch_size // world)
        self._begin(0)
        self._state = self._position()

    def __iter__(self) -> Iterator[Batch]:
        """Itself."""
        return self

    def __next__(self) -> Batch:
        """This process's part of the next batch."""
        rows = np.stack([self._row() for _ in range(self.batch_size)][self._mine])
        self._state = self._position()
        ids = torch.from_numpy(rows.astype(np.int64))
        return Batch(ids[:, :-1], ids[:, 1:])

    def state_dict(self) -> dict[str, Any]:
        """The position after the last batch: small, JSON-serialisable, and the same in all processes."""
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which ``state`` was taken, with the same documents and seed."""
        self._begin(state["epoch"])
        self._rows.load_state_dict(state["rows"])
        self._state = state

    def _position(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "rows": self._rows.state_dict()}

    def _begin(self, epoch: int) -> None:
        documents = self.documents
        if isinstance(documents, Dataset):
            if len(documents) > BLOCK:
                documents = documents.shuffle(int(np.random.default_rng((self.seed, epoch)).integers(2**31)))
            documents = documents.to_iterable_dataset()
        else:
            documents = copy.deepcopy(documents)  # its position is kept in it
        cut = partial(_rows, eos=self.eos, length=self.length, seed=(self.seed, epoch))
        self._rows = documents.map(cut, batched=True, batch_size=BLOCK, with_indices=True, remove_columns=["ids"])
        self._rows.set_epoch(epoch)
        self._epoch, self._iterator = epoch, None

    def _row(self) -> np.ndarray:
        for _ in range(2):
            self._iterator = iter(self._rows) if self._iterator is None else self._iterator
            if (found := next(self._iterator, None)) is not None:
                return found["row"]
            self._begin(self._epoch + 1)
        tokens = f"{self.length + 1} tokens, a row and the one before it"
        raise ValueError(f"the documents have fewer than {tokens}: give more text, or a smaller length")


def _rows(
    batch: dict[str, list[Any]], indices: list[int], *, eos: int, length: int, seed: tuple[int, int]
) -> dict[str, list[np.ndarray]]:
    """A block of documents as rows of ``length + 1`` tokens, in random order."""
    ids = np.concatenate([np.array(part, np.int32) for part in ([eos], *batch["ids"])])
    order = np.random.default_rng((*seed, indices[0])).permutation((len(ids) - 1) // length)
    return {"row": [ids[i * length : (i + 1) * length + 1] for i in order]}
