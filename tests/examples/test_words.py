"""The lessons of the examples on synthetic tasks: what ends one, what follows, and that a run goes on where it was."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from common.words import WordOptions, Words

from deqseq.tasks import WordProblem, cyclic, formal

PARITY = [WordProblem(cyclic(2))]
OPTIONS = WordOptions(lengths=(2, 3), free_lengths=(3, 5), batch=2, steps=700, warmup=4)


def step(words: Words, accuracy: float) -> int:
    """Draw a batch, tell its accuracy, and return its length."""
    length = next(words).inputs.shape[1]
    words.observe(accuracy)
    return length


def test_a_length_follows_when_ten_of_its_batches_are_nearly_all_right():
    words = Words(PARITY, OPTIONS)
    seen = [step(words, 0.45) for _ in range(100)]
    assert set(seen) == {1, 2}
    assert words.length == 2
    full = 0
    while words.length == 2:
        full += step(words, 1.0) == 2
    assert full == 10  # 9 of 1 and one of 0.45 are 0.945 in the mean
    assert words.ends == [words.step]
    assert max(step(words, 0.0) for _ in range(50)) == 3


def test_phases_follow_the_lessons_and_the_learning_rate_falls_after_the_last_one():
    words, seen, rates = Words(PARITY, OPTIONS), [], []
    while words.progress < 1:
        seen.append((words.progress, OPTIONS.curriculum.at(words.progress).name))
        rates.append(words.lr_factor)
        step(words, 1.0)
    assert all(before <= after for (before, _), (after, _) in pairwise(seen))
    assert [name for _, name in seen].index("free") == words.ends[1]
    assert len(words.ends) == 4
    assert words.step == words.last == words.ends[3] + 200  # 2/7 of all steps, since 600 would be more
    assert rates[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert all(rate == 1.0 for rate in rates[4 : words.ends[3]])
    assert all(before >= after for before, after in pairwise(rates[words.ends[3] :]))
    assert rates[-1] == pytest.approx(0.02, abs=0.01)
    with pytest.raises(StopIteration):
        next(words)


def test_the_learning_rate_falls_for_longer_where_learning_took_long():
    words = Words(PARITY, replace(OPTIONS, steps=10_000))
    words.decay = 100
    assert words.last == 700
    words.decay = 2000
    assert words.last == 2800
    words.decay = 9999
    assert words.last == 10_000


def test_what_is_never_learned_ends_after_all_steps_at_the_fixed_point():
    words, phases = Words(PARITY, OPTIONS), []
    while words.progress < 1:
        phases.append(OPTIONS.curriculum.at(words.progress).name)
        step(words, 0.5)
    assert (words.step, words.decay, words.ends) == (700, 500, [])
    assert phases[499] == "unrolled"
    assert phases[-1] == "free"


def test_the_longest_length_is_told_also_where_a_later_lesson_is_shorter():
    words = Words(PARITY, WordOptions(steps=900, lengths=(2, 8), free_lengths=(4,), learned=0.0))
    words.ends = [10, 20]
    assert (words.length, words.numbers["trained_to"]) == (4, 8)


def test_a_run_that_goes_on_draws_what_it_would_have_drawn():
    whole, halves = Words(PARITY, OPTIONS), Words(PARITY, OPTIONS)
    for _ in range(30):
        assert step(whole, 0.97) == step(halves, 0.97)
    again = Words(PARITY, OPTIONS)
    again.load_state_dict(json.loads(json.dumps(halves.state_dict())))
    assert again.lr_factor == whole.lr_factor
    for _ in range(30):
        ours, theirs = next(again), next(whole)
        assert torch.equal(ours.inputs, theirs.inputs)
        for words in (again, whole):
            words.observe(0.97)
    assert again.plan == whole.plan


def test_another_model_repeats_the_lessons_whatever_its_accuracy():
    first = Words(PARITY, OPTIONS)
    shapes = [step(first, 0.97) for _ in range(200) if first.progress < 1]
    second = Words(PARITY, OPTIONS, first.plan)
    assert [step(second, 0.0) for _ in range(len(shapes))] == shapes
    assert second.progress == first.progress


def test_no_batch_is_shorter_than_the_task_allows():
    words = Words([formal.solve_equation()], OPTIONS)
    assert words.lengths == [3, 3, 3, 5]
    seen = set()
    while words.progress < 1:
        seen.add(step(words, 1.0))
    assert seen == {4, 5, 6}  # a blank follows for the answer
