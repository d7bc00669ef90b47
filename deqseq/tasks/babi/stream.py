"""CatbAbI: stories one after another in a stream of words, of which only the answers are scored."""

import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from deqseq.tasks.babi.story import Question, Story, line_words
from deqseq.tasks.babi.vocabulary import Vocabulary

IGNORED = -100


class StoryBatch(NamedTuple):
    """Words of stories.

    Attributes:
        inputs: token ids, ``(batch, length)``.
        targets: at the last word of a question (its "?") the answer, the next word; elsewhere -100; ``(batch,
            length)``. They are not shifted: the target at a place belongs to the input there, as
            :class:`deqseq.CausalLM`'s ``targets`` do.
        tasks: number of the task each word belongs to, ``(batch, length)``.
        mask: which words are real, ``(batch, length)``; the rest, on the right, is padding.
    """

    inputs: Int64[Tensor, "batch length"]
    targets: Int64[Tensor, "batch length"]
    tasks: Int64[Tensor, "batch length"]
    mask: Bool[Tensor, "batch length"]

    def to(self, device: torch.device | str) -> "StoryBatch":
        """The batch on ``device``."""
        return StoryBatch(*(tensor.to(device) for tensor in self))


def encode_story(story: Story, vocabulary: Vocabulary) -> StoryBatch:
    """A story as one row: ``<eos>``, which ends what came before, and its words.

    Args:
        story: to encode.
        vocabulary: knows its words, or replaces those it does not know.

    Returns:
        A batch of one row without padding.

    Raises:
        KeyError: a word that the vocabulary does not know.

    Example:
        >>> from deqseq.tasks.babi import Fact, Question
        >>> story = Story(1, (Fact("Mary left."), Question("Who left?", "mary", (1,))))
        >>> vocabulary = Vocabulary.of([story])
        >>> batch = encode_story(story, vocabulary)
        >>> vocabulary.decode(batch.inputs[0].tolist())
        ['<eos>', 'mary', 'left', '.', 'who', 'left', '?', 'mary']
        >>> batch.targets.tolist()
        [[-100, -100, -100, -100, -100, -100, 5, -100]]
    """
    inputs = [vocabulary.end_of_story]
    targets = [IGNORED]
    for line in story.lines:
        tokens = vocabulary.encode(line_words(line))
        scored = [IGNORED] * len(tokens)
        if isinstance(line, Question):
            scored[-2] = tokens[-1]
        inputs += tokens
        targets += scored
    row = torch.tensor([inputs, targets])
    return StoryBatch(row[:1], row[1:], torch.full_like(row[:1], story.task), torch.ones(1, len(inputs)).bool())


def stream_batches(
    stories: Sequence[Story], vocabulary: Vocabulary, *, batch: int, length: int, seed: int
) -> Iterator[StoryBatch]:
    """CatbAbI's training data: stories in random order in a stream of words, cut into pieces without end.

    All stories are shuffled and dealt out; when they are used up they are shuffled again. Each row is a stream of its
    own, takes the next story when it needs one, and goes on in the next batch where it was cut: a model may carry its
    state over. Where a cut falls into a story, a model that begins anew lacks the facts before.

    Args:
        stories: at least one.
        vocabulary: knows their words, or replaces those it does not know.
        batch: rows, at least 1.
        length: words a row, at least 1.
        seed: of the order; the same seed gives the same batches.

    Returns:
        Endless iterator of batches without padding. A batch may hold no answer at all if rows and length are few.

    Raises:
        ValueError: no stories, or a number below 1.
        KeyError: a word that the vocabulary does not know.

    References:
        Schlag, Munkhdalai and Schmidhuber, Learning Associative Inference Using Fast Weight Memory, ICLR 2021,
        arXiv 2011.07831.

    Example:
        >>> from deqseq.tasks.babi import generate_stories
        >>> stories = generate_stories(1, 10, seed=0)
        >>> batches = stream_batches(stories, Vocabulary.of(stories), batch=2, length=50, seed=0)
        >>> next(batches).inputs.shape
        torch.Size([2, 50])
    """
    _check_positive("batch", batch)
    _check_positive("length", length)
    rows = _encoded(stories, vocabulary)
    order = _endless_order(len(rows), seed)
    streams = [_stream(rows, order, length) for _ in range(batch)]

    def pieces() -> Iterator[StoryBatch]:
        while True:
            yield StoryBatch(*(torch.cat(parts) for parts in zip(*(next(stream) for stream in streams), strict=True)))

    # The checks above run at the call, as they would not in a generator function.
    return pieces()


def story_batches(stories: Sequence[Story], vocabulary: Vocabulary, *, batch: int) -> Iterator[StoryBatch]:
    """Every story once, each in a row of its own: for evaluation, where each question sees its whole story alone.

    Args:
        stories: at least one.
        vocabulary: knows their words, or replaces those it does not know.
        batch: most rows of a batch, at least 1.

    Returns:
        Batches of stories of similar length, the shortest first; the rows are padded on the right with ``<eos>``.

    Raises:
        ValueError: no stories, or a batch below 1.
        KeyError: a word that the vocabulary does not know.

    Example:
        >>> from deqseq.tasks.babi import generate_stories
        >>> stories = generate_stories(2, 10, seed=0)
        >>> batches = list(story_batches(stories, Vocabulary.of(stories), batch=4))
        >>> [len(part.inputs) for part in batches], sum(int((part.targets >= 0).sum()) for part in batches)
        ([4, 4, 2], 30)
    """
    _check_positive("batch", batch)
    rows = sorted(_encoded(stories, vocabulary), key=lambda row: row.inputs.shape[1])
    fill = StoryBatch(*(torch.tensor(value) for value in (vocabulary.end_of_story, IGNORED, 0, False)))
    groups = [rows[first : first + batch] for first in range(0, len(rows), batch)]
    return (_padded(group, fill) for group in groups)


def _encoded(stories: Sequence[Story], vocabulary: Vocabulary) -> list[StoryBatch]:
    if not stories:
        raise ValueError("stories must hold at least one, got none")
    return [encode_story(story, vocabulary) for story in stories]


def _endless_order(count: int, seed: int) -> Iterator[int]:
    """Shuffled again and again."""
    rng = random.Random(f"babi stream {seed}")
    while True:
        yield from rng.sample(range(count), count)


def _stream(rows: Sequence[StoryBatch], order: Iterator[int], length: int) -> Iterator[StoryBatch]:
    """One row's stream, cut into pieces of a length."""
    rest = rows[next(order)]
    while True:
        held, words = [rest], rest.inputs.shape[1]
        while words < length:
            held.append(rows[next(order)])
            words += held[-1].inputs.shape[1]
        joined = [torch.cat(parts, dim=1) for parts in zip(*held, strict=True)]
        yield StoryBatch(*(tensor[:, :length] for tensor in joined))
        rest = StoryBatch(*(tensor[:, length:] for tensor in joined))


def _padded(rows: Sequence[StoryBatch], fill: StoryBatch) -> StoryBatch:
    longest = max(row.inputs.shape[1] for row in rows)
    columns = []
    for parts, value in zip(zip(*rows, strict=True), fill, strict=True):
        column = value.expand(len(rows), longest).clone()
        for place, part in enumerate(parts):
            column[place, : part.shape[1]] = part[0]
        columns.append(column)
    return StoryBatch(*columns)


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
