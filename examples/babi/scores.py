"""Right answers, counted per task.

Counts are an int64 tensor of shape (2, 21): right answers and questions by task number. Counts of batches add up.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

import deqseq as dq
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
    """A row per task that has questions, and one for all tasks; none without questions."""
    by_task = {str(task): counts[:, task] for task in range(TASKS)} | {"all": counts.sum(1)}
    pairs = [(task, *pair.tolist()) for task, pair in by_task.items() if pair[1]]
    return [{"task": task, "accuracy": right / count, "questions": count} for task, right, count in pairs]


@torch.no_grad()
def score(lm: dq.CausalLM, batches: Iterable[StoryBatch], *, carry: bool = False) -> list[dict]:
    """Test a model.

    Args:
        lm: put into eval mode.
        batches: its inputs.
        carry: whether each batch continues the one before, with the state that this one has left.

    Returns:
        The rows of :func:`score_rows`, each with the mean iterations of a token and the share of solves that converged;
        both are None for an explicit model.
    """
    counts, iterations, converged, cache = [], [], [], None
    lm.eval()
    for batch in batches:
        batch = batch.to(lm.embedding.weight.device)
        output = lm(batch.inputs, mask=None if carry else batch.mask, cache=cache, return_cache=carry)
        cache = output.cache
        counts.append(count_right(output.logits, batch))
        if output.stats is not None and output.status is not None:
            iterations += output.stats.iterations[batch.mask].tolist()
            converged += output.converged.tolist()
    solves = {
        "self_iterations": sum(iterations) / len(iterations) if iterations else None,
        "converged": sum(converged) / len(converged) if converged else None,
    }
    return [row | solves for row in score_rows(torch.stack(counts).sum(0))]
