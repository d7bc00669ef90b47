"""Stories as token ids: CatbAbI's endless stream for training, and one story per row for tests."""

import random
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from babi.stories import END_OF_STORY, UNKNOWN, Story
from deqseq.check import check_integer

IGNORED = -100


@dataclass(frozen=True)
class Vocabulary:
    """Words and their token ids: a word's id is its position; any other word is ``<unk>``."""

    words: tuple[str, ...]
    _ids: dict[str, int] = field(init=False, repr=False, compare=False)
    end_of_story: ClassVar[int] = 0
    unknown: ClassVar[int] = 1

    def __post_init__(self) -> None:
        if self.words[:2] != (END_OF_STORY, UNKNOWN) or len(set(self.words)) < len(self.words):
            raise ValueError(f"words must be {END_OF_STORY}, {UNKNOWN} and distinct words, got {self.words}")
        object.__setattr__(self, "_ids", {word: token for token, word in enumerate(self.words)})

    @classmethod
    def of(cls, stories: Iterable[Story]) -> "Vocabulary":
        """The words of stories in alphabetical order. Take the training stories; CatbAbI's own code adds the tests'."""
        return cls((END_OF_STORY, UNKNOWN, *sorted({word for story in stories for word in story.words()})))

    def __len__(self) -> int:
        return len(self.words)

    def encode(self, words: Iterable[str]) -> list[int]:
        """Token ids of lower-case words."""
        return [self._ids.get(word, self.unknown) for word in words]


class StoryBatch(NamedTuple):
    """Tokens of stories, each tensor of shape (batch, length).

    Attributes:
        inputs: token ids.
        targets: the answer at the last word of a question, the "?"; -100 elsewhere. They are already shifted: the
            target at a position is the token after the input there, as in the ``targets`` of :class:`deqseq.CausalLM`.
        tasks: the task number of each token.
        mask: True at real tokens; padding is on the right.
    """

    inputs: Int64[Tensor, "batch length"]
    targets: Int64[Tensor, "batch length"]
    tasks: Int64[Tensor, "batch length"]
    mask: Bool[Tensor, "batch length"]

    def to(self, device: torch.device | str) -> "StoryBatch":
        """The batch on ``device``."""
        return StoryBatch(*(tensor.to(device) for tensor in self))


def encode_story(story: Story, vocabulary: Vocabulary) -> StoryBatch:
    """A story as a batch of one row: ``<eos>``, which ends the story before, and the words."""
    inputs, targets = [vocabulary.end_of_story], [IGNORED]
    for line in story.lines:
        tokens = vocabulary.encode(line.words())
        inputs += tokens
        targets += [IGNORED] * len(tokens)
        if line.answer is not None:
            targets[-2] = tokens[-1]
    row = torch.tensor([inputs, targets])
    return StoryBatch(row[:1], row[1:], torch.full_like(row[:1], story.task), torch.ones_like(row[:1]).bool())


class StoryStream(Iterator[StoryBatch]):
    """CatbAbI's training data: an endless stream of stories, cut into batches.

    The stories are shuffled and dealt to the rows as these need them, then shuffled again. Each row is a stream of its
    own that continues in the next batch, so a model may carry its state over. Without that state it does not know the
    facts of a story before the cut.

    Args:
        stories: at least one.
        vocabulary: gives the token ids.
        batch: rows, at least 1.
        length: tokens per row, at least 1. A batch with few tokens may contain no answer.
        seed: seed of the order.
    """

    def __init__(self, stories: Sequence[Story], vocabulary: Vocabulary, *, batch: int, length: int, seed: int) -> None:
        self.stories = _encoded(stories, vocabulary)
        check_integer("batch", batch, 1)
        check_integer("length", length, 1)
        self.length, self.seed = int(length), seed
        self.load_state_dict({"drawn": 0, "rows": [[0, 0]] * batch})

    def __next__(self) -> StoryBatch:
        rows = [self._next_row(row) for row in range(len(self.rows))]
        return StoryBatch(*(torch.cat(parts) for parts in zip(*rows, strict=True)))

    def state_dict(self) -> dict[str, Any]:
        """How many stories have been drawn; per row the current story and how many of its tokens are left."""
        return {"drawn": self.drawn, "rows": [list(row) for row in self.rows]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a stream with the same arguments was when its state was taken."""
        rng, count = random.Random(f"babi stream {self.seed}"), len(self.stories)
        self.rows: list[list[int]] = [list(row) for row in state["rows"]]
        self.drawn, self._rng = state["drawn"], rng
        rounds, place = divmod(self.drawn, count)
        for _ in range(rounds):
            rng.sample(range(count), count)
        self._order = deque(rng.sample(range(count), count)[place:])

    def _next_row(self, row: int) -> StoryBatch:
        """The next tokens of a row, (1, length)."""
        story, left = self.rows[row]
        pieces = [StoryBatch(*(tensor[:, tensor.shape[1] - left :] for tensor in self.stories[story]))]
        while left < self.length:
            story = self._draw()
            pieces.append(self.stories[story])
            left += pieces[-1].inputs.shape[1]
        self.rows[row] = [story, left - self.length]
        return StoryBatch(*(torch.cat(parts, dim=1)[:, : self.length] for parts in zip(*pieces, strict=True)))

    def _draw(self) -> int:
        if not self._order:
            self._order.extend(self._rng.sample(range(len(self.stories)), len(self.stories)))
        self.drawn += 1
        return self._order.popleft()


def story_batches(stories: Sequence[Story], vocabulary: Vocabulary, *, batch: int) -> Iterator[StoryBatch]:
    """Every story once, one per row: for tests in which a question sees its own story alone.

    Args:
        stories: at least one.
        vocabulary: gives the token ids.
        batch: rows of a batch, at least 1; the last batch may have fewer.

    Returns:
        Batches of stories of similar length, the shortest first, padded on the right with ``<eos>``.
    """
    check_integer("batch", batch, 1)
    rows = sorted(_encoded(stories, vocabulary), key=lambda row: row.inputs.shape[1])
    padding = (vocabulary.end_of_story, IGNORED, 0, False)

    def padded(group: Sequence[StoryBatch]) -> StoryBatch:
        columns = [[part[0] for part in parts] for parts in zip(*group, strict=True)]
        pairs = zip(columns, padding, strict=True)
        return StoryBatch(*(pad_sequence(parts, batch_first=True, padding_value=value) for parts, value in pairs))

    return (padded(rows[first : first + batch]) for first in range(0, len(rows), batch))


def _encoded(stories: Sequence[Story], vocabulary: Vocabulary) -> list[StoryBatch]:
    if not stories:
        raise ValueError("stories must hold at least one story, got none")
    return [encode_story(story, vocabulary) for story in stories]
