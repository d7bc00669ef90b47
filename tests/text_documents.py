"""Encoders for tests, and streams written out by their definition."""

from dataclasses import dataclass, field

import numpy as np

from deqseq.tasks.text import ByteEncoder, EncodedText


@dataclass
class PairEncoder:
    """Two characters a token, ids by order of appearance, and a note of how many documents each call had."""

    calls: list[int] = field(default_factory=list)
    vocab_size: int = 100_000
    eos: int = 7

    def __call__(self, texts, /):
        self.calls.append(len(texts))
        return [self.encode(text) for text in texts]

    def encode(self, text):
        pairs = [text[i : i + 2] for i in range(0, len(text), 2)]
        ids = [10 + sum(ord(c) * 251**n for n, c in enumerate(pair)) % 60_000 for pair in pairs] + [self.eos]
        return EncodedText(np.array(ids, np.uint32), np.array([len(pair.encode()) for pair in pairs] + [0], np.uint8))


class ListDocuments:
    """Documents of a list that count how many were read."""

    def __init__(self, texts):
        self.texts, self.start, self.place = texts, 0, 0

    def __iter__(self):
        self.place, self.start = self.start, 0
        return self._read()

    def _read(self):
        while self.place < len(self.texts):
            self.place += 1
            yield self.texts[self.place - 1]

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.start = self.place = state["place"]


def byte_stream(documents):
    """The stream of a ByteEncoder, byte by byte, and for each token how many bytes of text it is."""
    eos = ByteEncoder().eos
    tokens, sizes = [eos], [0]
    for document in documents:
        tokens += [*document.encode(), eos] if document else []
        sizes += [*([1] * len(document.encode())), 0] if document else []
    return tokens, sizes
