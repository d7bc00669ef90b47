"""Right answers, counted per task.

Counts are an int64 tensor of shape (2, 21): right answers and questions by task number. Counts of batches add up.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from babi.stories import TASK_NAMES, Story
from babi.stream import IGNORED, StoryBatch, Vocabulary

TASKS = len(TASK_NAMES) + 1


def count_right(logits: Tensor, batch: StoryBatch) -> Tensor:
    """Count the answers that are the most probable word. An answer outside the vocabulary is never right.

    Args:
        logits: the model's, (batch, length, vocab).
        batch: the model's input.

    Returns:
        Counts on the CPU, (2, 21).
    """
    scored = batch.targets != IGNORED
    answers, tasks = batch.targets[scored], batch.tasks[scored]
    right = (logits[scored].argmax(-1) == answers) & (answers != Vocabulary.unknown)
    return torch.stack([tasks[right].bincount(minlength=TASKS), tasks.bincount(minlength=TASKS)]).cpu()


def count_most_frequent(train: Sequence[Story], test: Sequence[Story]) -> Tensor:
    """Counts, (2, 21), of a baseline that always gives the most frequent answer of a task's training stories."""
    answers: dict[int, Counter[str]] = {}
    for story in train:
        answers.setdefault(story.task, Counter()).update(line.words()[-1] for line in story.questions)
    best = {task: counter.most_common(1)[0][0] for task, counter in answers.items() if counter}
    counts = torch.zeros(2, TASKS, dtype=torch.int64)
    for story in test:
        counts[0, story.task] += sum(line.words()[-1] == best.get(story.task) for line in story.questions)
        counts[1, story.task] += len(story.questions)
    return counts


def score_rows(counts: Tensor) -> list[dict]:
    """A row per task that has questions, and one for all tasks."""
    by_task = {str(task): counts[:, task] for task in range(TASKS) if counts[1, task]}
    rows = []
    for task, pair in (by_task | {"all": counts.sum(1)}).items():
        right, questions = pair.tolist()
        rows.append({"task": task, "accuracy": right / questions, "questions": questions})
    return rows
