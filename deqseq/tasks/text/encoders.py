"""Documents as token ids, with the bytes of text that each token stands for."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import UInt

GROUP_DOCUMENTS = 64  # encoded in one call, as tokenizers then use all cores ...
GROUP_CHARACTERS = 2**20  # ... but no more text than this (and one document) is held at a time


class EncodedText(NamedTuple):
    """One document as tokens: its own, then the end-of-text token.

    Attributes:
        ids: token ids, ``(tokens,)``, unsigned.
        byte_counts: how many bytes (UTF-8) of the document each token stands for, ``(tokens,)``, unsigned; their sum
            is the size of the document.
    """

    ids: UInt[np.ndarray, " tokens"]
    byte_counts: UInt[np.ndarray, " tokens"]


@runtime_checkable
class Encoder(Protocol):
    """What turns documents into tokens.

    Example:
        >>> class Words:
        ...     vocab_size, eos = 1000, 999
        ...     def __call__(self, texts):
        ...         sizes = [[len(word) for word in text.split()] for text in texts]
        ...         return [EncodedText(np.uint16([*row, 999]), np.uint16([*row, 0])) for row in sizes]
        >>> isinstance(Words(), Encoder), isinstance(ByteEncoder(), Encoder)
        (True, True)
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids that a model needs."""
        ...

    @property
    def eos(self) -> int:
        """Id of the end-of-text token."""
        ...

    def __call__(self, texts: Sequence[str], /) -> list[EncodedText]:
        """Each of ``texts`` as tokens that end with :attr:`eos`; the same text gives the same, whatever is near."""
        ...


class ByteEncoder:
    """Bytes as tokens: ids 0 to 255 are the bytes of UTF-8, 256 ends a document. Needs no training and no extra.

    Example:
        >>> ByteEncoder()(["hé"])[0].ids
        array([104, 195, 169, 256], dtype=uint16)
    """

    @property
    def vocab_size(self) -> int:
        """256 bytes and the end of text."""
        return 257

    @property
    def eos(self) -> int:
        """The id after the bytes."""
        return 256

    def __call__(self, texts: Sequence[str], /) -> list[EncodedText]:
        """Each document as its bytes and 256, which stands for no byte.

        Args:
            texts: the documents.

        Returns:
            One record a document.

        Raises:
            ValueError: a document has a lone surrogate, which UTF-8 cannot write.
        """
        encoded = []
        for text in texts:
            ids = np.append(np.frombuffer(utf8(text), dtype=np.uint8), np.uint16(self.eos))
            encoded.append(EncodedText(ids, np.append(np.ones(len(ids) - 1, np.uint8), np.uint8(0))))
        return encoded


def utf8(text: str) -> bytes:
    """A document's bytes.

    Raises:
        ValueError: it has a lone surrogate, half of a character; names the place.
    """
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"a document must be text that UTF-8 can write, got the lone surrogate "
            f"{text[error.start]!r} at character {error.start}"
        ) from error


def smallest_unsigned(values: np.ndarray) -> np.ndarray:
    """The same numbers, none below 0, in the smallest unsigned type that holds them all."""
    return values.astype(np.min_scalar_type(int(values.max(initial=0))))


def encode_group(encoder: Encoder, documents: Sequence[str]) -> EncodedText:
    """Documents as one run of tokens, each document ended by its end-of-text token."""
    encoded = encoder(documents)
    return EncodedText(*(np.concatenate(parts) for parts in zip(*encoded, strict=True)))


def groups(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in groups to encode in one call; nothing is read ahead of the group that is asked for.

    Args:
        documents: the texts; empty ones are left out, since there is nothing in them to predict.

    Returns:
        Iterator of lists of at most 64 documents, ended early by about a million characters. Where a group ends
        depends on the documents from its beginning on and on nothing else.

    Raises:
        TypeError: ``documents`` is one string, which would be read letter by letter, or a document is no string.
    """
    if isinstance(documents, str):
        raise TypeError("documents must be an iterable of strings, got one string: put it in a list")
    return _groups(documents)


def _groups(documents: Iterable[str]) -> Iterator[list[str]]:
    group, characters = [], 0
    for document in documents:
        if not isinstance(document, str):
            raise TypeError(f"documents must be strings, got {type(document).__name__}")
        if not document:
            continue
        group.append(document)
        characters += len(document)
        if len(group) == GROUP_DOCUMENTS or characters >= GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group
