"""Text that is too much to hold: packed as it is read, and resumed exactly."""

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from deqseq.tasks.text.encoders import Encoder, encode_group, groups
from deqseq.tasks.text.packing import TextBatch, check_at_least, share_of


@runtime_checkable
class Documents(Protocol):
    """Documents that can be read again, and from where one has stopped: local files, a data set of the hub.

    Example:
        >>> class Lines:
        ...     def __init__(self, lines): self.lines, self.at = lines, 0
        ...     def __iter__(self):
        ...         start, self.at = self.at, 0
        ...         for self.at, line in enumerate(self.lines[start:], start + 1):
        ...             yield line
        ...     def state_dict(self): return {"line": self.at}
        ...     def load_state_dict(self, state): self.at = state["line"]
        >>> documents = Lines(["to be", "or not"])
        >>> documents.load_state_dict({"line": 1})
        >>> isinstance(documents, Documents), list(documents)
        (True, ['or not'])
    """

    def __iter__(self) -> Iterator[str]:
        """From the beginning, or once from where :meth:`load_state_dict` says; does not read ahead."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Where the newest iterator stands."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Let the next iterator go on from where ``state`` was taken."""
        ...


class PackedStream:
    """Batches of a stream of documents, packed as :class:`~deqseq.tasks.text.PackedText` does, in the order they come.

    Every process reads and encodes the whole stream and keeps its own rows, so that all together see the same batches
    whatever their number.

    Args:
        documents: what is read.
        encoder: what makes tokens of it.
        length: of a row, in tokens.
        batch_size: rows of all processes together.
        rank: of this process.
        world: number of processes; divides the batch size.
        repeat: whether to read the documents again when they end, without losing a token between; otherwise the
            iterator ends there, and less than a batch of rows is left out.

    Raises:
        ValueError: a number out of its range; while reading, no documents.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from deqseq.tasks.text import ByteEncoder, LocalDocuments, PackedStream
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "play.txt").write_text("To be, or not to be")
        ...     stream = PackedStream(LocalDocuments(folder), ByteEncoder(), length=4, batch_size=2)
        ...     first, state = next(stream), stream.state_dict()
        ...     second = next(stream)
        ...     stream.load_state_dict(state)
        ...     torch.equal(next(stream).targets, second.targets)
        True
    """

    def __init__(
        self,
        documents: Documents,
        encoder: Encoder,
        length: int,
        *,
        batch_size: int,
        rank: int = 0,
        world: int = 1,
        repeat: bool = False,
    ) -> None:
        check_at_least("length", length, 1)
        self._share = share_of(batch_size, rank, world)
        self.documents, self.encoder = documents, encoder
        self.length, self.batch_size, self.repeat = length, batch_size, repeat
        self._pieces: deque[_Piece] = deque()
        self._used, self._before = 0, encoder.eos  # tokens of the first piece that are done; the one before the next
        self._groups = groups(iter(documents))

    def __iter__(self) -> Iterator[TextBatch]:
        """Itself."""
        return self

    def __next__(self) -> TextBatch:
        """This process's part of the next batch, ``batch_size / world`` rows."""
        tokens = self.batch_size * self.length
        while sum(len(piece.ids) for piece in self._pieces) - self._used < tokens:
            self._read()
        ids, byte_counts = self._take(tokens)
        targets = torch.from_numpy(ids).view(self.batch_size, self.length)
        inputs = torch.from_numpy(np.append(self._before, ids[:-1])).view(self.batch_size, self.length)
        text_bytes = torch.from_numpy(byte_counts).view(self.batch_size, self.length).sum(dim=1)
        self._before = int(ids[-1])
        return TextBatch(*(part[self._share] for part in (inputs, targets, text_bytes)))

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands after the last batch; small, JSON-serialisable, and the same for every process."""
        start = self._pieces[0].start if self._pieces else self.documents.state_dict()
        return {"documents": start, "used": self._used, "before": self._before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the batch at which the state was taken; another number of processes is no matter.

        Args:
            state: of a stream of the same documents and encoder.
        """
        self.documents.load_state_dict(state["documents"])
        self._pieces.clear()
        self._used, self._before = state["used"], state["before"]
        self._groups = groups(iter(self.documents))

    def _read(self) -> None:
        """Encode one more group of documents."""
        start = self.documents.state_dict()  # at the end of the documents too: from there one comes to the beginning
        group = next(self._groups, None)
        if group is None:
            if not self.repeat:
                raise StopIteration
            self._groups = groups(iter(self.documents))
            group = next(self._groups, None)
            if group is None:
                raise ValueError("documents must have some text in them, got none")
        encoded = encode_group(self.encoder, group)
        self._pieces.append(_Piece(start, encoded.ids.astype(np.int64), encoded.byte_counts.astype(np.int64)))

    def _take(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """The next tokens and their bytes; there are enough."""
        ids, byte_counts = [], []
        while tokens:
            piece = self._pieces[0]
            part = slice(self._used, min(self._used + tokens, len(piece.ids)))
            ids.append(piece.ids[part])
            byte_counts.append(piece.byte_counts[part])
            tokens -= part.stop - part.start
            self._used = part.stop
            if self._used == len(piece.ids):
                self._pieces.popleft()
                self._used = 0
        return np.concatenate(ids), np.concatenate(byte_counts)


class _Piece(NamedTuple):
    """A group of documents, encoded, and where it began: what is not kept can be made again."""

    start: dict[str, Any]
    ids: np.ndarray
    byte_counts: np.ndarray
