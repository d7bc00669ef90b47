"""Stories made from a seed, in the form of bAbI's files."""

import random

from deqseq.tasks.babi.deduction import deduction_story
from deqseq.tasks.babi.movement import one_fact_story, three_fact_story, two_fact_story
from deqseq.tasks.babi.paths import path_story
from deqseq.tasks.babi.story import Story

GENERATORS = {1: one_fact_story, 2: two_fact_story, 3: three_fact_story, 15: deduction_story, 19: path_story}
"""The tasks that can be generated: one, two and three supporting facts, basic deduction, path finding."""

SCALES = (1, 2, 3)
"""How long stories can be: what the facts before each question are multiplied by."""


def generate_stories(task: int, count: int, *, seed: int, scale: int = 1) -> list[Story]:
    """Make stories of one task.

    The tasks' form and kinds of words are those of the official files; which words, how often things happen and in
    what order is ours. Longer stories are made of the same words, so that a model trained at one scale can be tested at
    another.

    Args:
        task: 1, 2, 3 (one, two, three supporting facts), 15 (basic deduction) or 19 (path finding).
        count: how many, at least 1. More stories from the same seed begin with the same ones.
        seed: any integer; different seeds, tasks and scales give independent stories.
        scale: 1 to 3; multiplies the facts before each question: 2, at least 4, at least 5, in the three tasks of
            supporting facts; 8 and 5 in deduction and path finding.

    Returns:
        The stories; the same arguments give the same ones.

    Raises:
        ValueError: another task or scale, or a count below 1.

    References:
        Weston et al., Towards AI-Complete Question Answering: A Set of Prerequisite Toy Tasks, 2015,
        arXiv 1502.05698.

    Example:
        >>> story = generate_stories(19, 1, seed=0)[0]
        >>> len(story.lines), len(story.questions[0].support)
        (6, 2)
    """
    if task not in GENERATORS:
        raise ValueError(f"task must be one of {', '.join(map(str, GENERATORS))} to be generated, got {task}")
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    if scale not in SCALES:
        raise ValueError(f"scale must be one of {', '.join(map(str, SCALES))}, got {scale}")
    return [GENERATORS[task](random.Random(f"babi {task} {scale} {seed} {index}"), scale) for index in range(count)]
