"""The lessons of the examples on synthetic tasks: what ends one, what follows, and that a run goes on where it was."""

import json
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from recipe import Lessons, Recipe, make_curriculum

from deqseq.tasks import WordProblem, cyclic

OPTIONS = Recipe(lengths=(2, 3), free_lengths=(3, 5), batch=2, steps=700, d_model=32, lr=1.0)


def lessons(options=OPTIONS, plan=None) -> Lessons:
    """Lessons in which an output is its accuracy."""
    return Lessons([WordProblem(cyclic(2))], options, lambda output, batch: output.accuracy, plan)


def step(course: Lessons, accuracy: float) -> int:
    """Draw a batch, tell its accuracy, and return its length."""
    batch = next(course)
    course.observe(SimpleNamespace(accuracy=accuracy), batch)
    return batch.inputs.shape[1]


def test_a_length_follows_when_ten_of_its_batches_are_nearly_all_right():
    course = lessons()
    assert {step(course, 0.45) for _ in range(100)} == {1, 2}
    assert course.length == 2
    full = 0
    while course.length == 2:
        full += step(course, 1.0) == 2
    assert full == 10  # 9 of 1 and one of 0.45 are 0.945 in the mean
    assert course.ends == [course.step]
    assert max(step(course, 0.0) for _ in range(50)) == 3


def test_phases_follow_the_lessons_and_the_learning_rate_falls_after_the_last_one():
    course, curriculum, seen, rates = lessons(), make_curriculum(OPTIONS), [], []
    while course.progress < 1:
        seen.append((course.progress, curriculum.at(course.progress).name))
        rates.append(course.lr)
        step(course, 1.0)
    assert all(before <= after for (before, _), (after, _) in pairwise(seen))
    assert [name for _, name in seen].index("free") == course.ends[1]
    assert len(course.ends) == 4
    assert course.step == course.last == course.ends[3] + 200  # 2/7 of all steps, since 600 would be more
    assert rates[:50] == pytest.approx([(n + 1) / 50 for n in range(50)])
    assert rates[50 : course.ends[3]] == [1.0] * (course.ends[3] - 50)
    assert all(before >= after for before, after in pairwise(rates[course.ends[3] :]))
    assert rates[-1] == pytest.approx(0.02, abs=0.01)


@pytest.mark.parametrize(("decay", "last"), [(100, 700), (2000, 2800), (9999, 10_000)])
def test_the_learning_rate_falls_for_longer_where_learning_took_long(decay, last):
    course = lessons(replace(OPTIONS, steps=10_000))
    course.decay = decay
    assert course.last == last


def test_what_is_never_learned_ends_after_all_steps_at_the_fixed_point():
    course, curriculum, phases = lessons(), make_curriculum(OPTIONS), []
    while course.progress < 1:
        phases.append(curriculum.at(course.progress).name)
        step(course, 0.5)
    assert (course.step, course.decay, course.ends) == (700, 500, [])
    assert phases[499] == "unrolled"
    assert phases[-1] == "free"


def test_the_longest_length_is_told_also_where_a_later_lesson_is_shorter():
    course = lessons(replace(OPTIONS, lengths=(2, 8), free_lengths=(4,)))
    course.ends = [10, 20]
    assert (course.length, course.reached) == (4, 8)


def test_a_run_that_goes_on_draws_what_it_would_have_drawn():
    whole, halves, again = lessons(), lessons(), lessons()
    for _ in range(30):
        assert step(whole, 0.97) == step(halves, 0.97)
    again.load_state_dict(json.loads(json.dumps(halves.state_dict())))
    assert again.lr == whole.lr
    for _ in range(30):
        ours, theirs = next(again), next(whole)
        assert torch.equal(ours.inputs, theirs.inputs)
        for course in (again, whole):
            course.observe(SimpleNamespace(accuracy=0.97), ours)
    assert again.plan == whole.plan


def test_another_model_repeats_the_lessons_whatever_its_accuracy():
    first = lessons()
    shapes = [step(first, 0.97) for _ in range(200)]
    second = lessons(plan=first.plan)
    assert [step(second, 0.0) for _ in shapes] == shapes
    assert second.progress == first.progress
