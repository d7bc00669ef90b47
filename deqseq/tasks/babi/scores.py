"""How many answers are right, task by task."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor

from deqseq.tasks.babi.story import Story
from deqseq.tasks.babi.stream import IGNORED, StoryBatch
from deqseq.tasks.babi.vocabulary import Vocabulary


class Count(NamedTuple):
    """Questions, and how many of them were answered right.

    Attributes:
        right: answers that are right.
        questions: how many were asked.

    Example:
        >>> Count(right=3, questions=4).accuracy
        0.75
    """

    right: int
    questions: int

    @property
    def accuracy(self) -> float:
        """Share of right answers; ZeroDivisionError without questions."""
        return self.right / self.questions


def count_right(
    logits: Float[Tensor, "batch length vocab"], batch: StoryBatch, vocabulary: Vocabulary
) -> dict[int, Count]:
    """Of each task, how many answers are the most probable word at their place.

    An answer that the vocabulary does not know is never right.

    Args:
        logits: of a model, ``(batch, length, vocab)``.
        batch: what it was given.
        vocabulary: of the batch.

    Returns:
        A count for each task that has questions in the batch.

    Example:
        >>> import torch
        >>> from deqseq.tasks.babi import encode_story, generate_stories
        >>> stories = generate_stories(15, 1, seed=0)
        >>> vocabulary = Vocabulary.of(stories)
        >>> batch = encode_story(stories[0], vocabulary)
        >>> perfect = torch.nn.functional.one_hot(batch.targets.clamp_min(0), len(vocabulary)).float()
        >>> count_right(perfect, batch, vocabulary)
        {15: Count(right=4, questions=4)}
    """
    scored = batch.targets != IGNORED
    answers, tasks = batch.targets[scored], batch.tasks[scored]
    right = (logits[scored].argmax(-1) == answers) & (answers != vocabulary.unknown)
    rights, questions = Counter(tasks[right].tolist()), Counter(tasks.tolist())
    return {task: Count(rights[task], questions[task]) for task in sorted(questions)}


def total(counts: Iterable[Count]) -> Count:
    """The sum of counts.

    Args:
        counts: of tasks or batches.

    Returns:
        Their sum; nothing counted is 0 of 0.

    Example:
        >>> total([Count(1, 2), Count(3, 4)])
        Count(right=4, questions=6)
    """
    pairs = list(counts)
    return Count(sum(count.right for count in pairs), sum(count.questions for count in pairs))


def merge_counts(batches: Iterable[Mapping[int, Count]]) -> dict[int, Count]:
    """The counts of several batches added up, task by task.

    Args:
        batches: what :func:`count_right` returned for each.

    Returns:
        A count for each task.

    Example:
        >>> merge_counts([{1: Count(1, 2)}, {1: Count(2, 2), 15: Count(0, 4)}])
        {1: Count(right=3, questions=4), 15: Count(right=0, questions=4)}
    """
    kept = list(batches)
    tasks = sorted({task for counts in kept for task in counts})
    return {task: total(counts[task] for counts in kept if task in counts) for task in tasks}


def count_most_frequent(train: Sequence[Story], test: Sequence[Story]) -> dict[int, Count]:
    """What is right for who always gives a task's most frequent answer: the least that a model should beat.

    Args:
        train: where the answers are counted.
        test: where they are given.

    Returns:
        A count for each task of the test stories that has questions.

    Example:
        >>> from deqseq.tasks.babi import generate_stories
        >>> count_most_frequent(generate_stories(1, 50, seed=0), generate_stories(1, 20, seed=1))[1].questions
        100
    """
    answers: dict[int, Counter[str]] = {}
    for story in train:
        answers.setdefault(story.task, Counter()).update(question.answer.lower() for question in story.questions)
    best = {task: counter.most_common(1)[0][0] for task, counter in answers.items() if counter}
    asked = [
        {story.task: Count(int(question.answer.lower() == best.get(story.task)), 1)}
        for story in test
        for question in story.questions
    ]
    return merge_counts(asked)
