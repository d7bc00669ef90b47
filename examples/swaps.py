"""What retrofit.py trains on: stories of balls that are swapped, and a text beside them.

A sentence swaps the balls in two cups, or nothing, and asks where one ball is. What the answer
depends on is counted in *hops*: the swaps that the ball, and before it the balls in whose place it
came, went through. A model that is pretrained here reads 5 bytes a sentence, ``13315`` or
``....5``, and answers with a cup, ``A`` to ``E``; others read ``swap 1 for 3 and 3 for 1 . where
is 5 ?``. A swap is told from both sides, so that each ball has a token of its own at which its new
cup can be computed, from that of the ball before it: told once, ``+135``, both cups have to be
found at one token, and loops hardly learn it.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor

from deqseq.tasks import Balls

BALLS = Balls()
HELD_OUT = 10  # of the topics of Python's reference, every tenth is held out
UNSCORED = -100


class Stories(NamedTuple):
    """A batch of stories, or of rows of a text, which have no hops.

    Attributes:
        inputs: ids of the tokens, ``(rows, length)``.
        targets: id of what follows, -100 where nothing is scored.
        hops: of each answer, -1 where there is none.
    """

    inputs: Tensor
    targets: Tensor
    hops: Tensor


@dataclass(frozen=True)
class Language:
    """How stories are written for a model: its tokens, and whether in whole words."""

    encode: Callable[[str], list[int]]
    vocab_size: int
    words: bool = True
    bytes_a_token: float = 1.0

    def sentence(self, swap: Sequence[str], ball: str) -> str:
        """A swap of two balls, or of none, and a question."""
        if self.words:
            both = f"swap {' for '.join(swap)} and {' for '.join(reversed(swap))} . "
            return f"{both if swap else '. '}where is {ball} ? "
        return f"{''.join([*swap, *reversed(swap)]) or '....'}{ball}"

    def answer(self, cup: str) -> int:
        """The token that is right where a ball is in a ``cup``."""
        return self.encode(cup if self.words else chr(ord("A") + int(cup) - 1))[-1]


BYTES = Language(lambda text: list(text.encode("ascii", "replace")), vocab_size=128, words=False)


def tell(
    language: Language, rows: int, sentences: int, swaps: tuple[int, int], drawn: random.Random
) -> Stories:
    """Stories of so many sentences; the swaps of each are as many as is drawn, from, to.

    In half of the stories they follow one another, in the others they stand anywhere.
    """
    stories = []
    for _ in range(rows):
        count = drawn.randint(min(swaps[0], sentences), min(swaps[1], sentences))
        places = drawn.sample(range(sentences), count)
        if drawn.random() < 0.5:
            first = drawn.randint(0, sentences - count)
            places = range(first, first + count)
        stories.append(_story(language, sentences, frozenset(places), drawn))
    length = max(len(story[0]) for story in stories)
    padded = [
        [*values, *[fill] * (length - len(values))]
        for story in stories
        for values, fill in zip(story, (language.encode(".")[-1], UNSCORED, -1), strict=True)
    ]
    inputs, targets, hops = (torch.tensor(padded[part::3]) for part in range(3))
    return Stories(inputs, targets, hops)


def _story(
    language: Language, sentences: int, places: frozenset[int], drawn: random.Random
) -> tuple[list[int], list[int], list[int]]:
    """Ids, targets and hops of a story whose swaps stand at ``places``."""
    told, ids, targets, hops = [], [], [], []
    for place in range(sentences):
        swap, ball = (
            drawn.sample(BALLS.balls, 2) if place in places else [],
            drawn.choice(BALLS.balls),
        )
        told += [["swap", swap[0], "and", swap[1], "."] if swap else ["."]]
        told += [["where", "is", ball, "?"]]
        ids.append(language.encode(language.sentence(swap, ball)))
    answers = islice(BALLS.follow(told), 1, None, 2)
    for sentence, answer in zip(ids, answers, strict=True):
        assert answer is not None
        before = len(sentence) - 1
        targets += [*[UNSCORED] * before, language.answer(answer[0])]
        hops += [*[-1] * before, answer[1]]
    return [id for sentence in ids for id in sentence], targets, hops


def text_of(held_out: bool) -> str:
    """Python's language reference, which comes with Python; a tenth of its topics is held out."""
    names = sorted(topics)
    kept = set(names[::HELD_OUT])
    return "".join(topics[name] for name in names if (name in kept) == held_out)


def rows_of_text(language: Language, length: int, held_out: bool) -> Stories:
    """The text in rows of so many tokens."""
    ids = torch.tensor(language.encode(text_of(held_out)))
    count = (len(ids) - 1) // length
    inputs, targets = (ids[first : first + count * length].view(count, length) for first in (0, 1))
    return Stories(inputs, targets, torch.full_like(inputs, -1))
