"""The lessons of the examples on synthetic tasks: what ends one, what follows, and that a run goes
on where it was.
"""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from recipe import LengthSchedule, Recipe, make_curriculum

import deqseq as dq
from deqseq.tasks import WordProblem, parse_group

OPTIONS = Recipe(lengths=(2, 3), free_lengths=(3, 5), batch=2, steps=700, d_model=32, lr=1.0)


def schedule(options=OPTIONS, plan=None):
    """Batches in which an output is its accuracy."""
    return LengthSchedule(
        [WordProblem(parse_group("Z2"))], options, lambda output, batch: output.accuracy, plan
    )


def step(batches, accuracy):
    """Draw a batch, tell its accuracy, and return its length."""
    batch = next(batches)
    batches.record(SimpleNamespace(accuracy=accuracy), batch)
    return batch.inputs.shape[1]


def test_a_length_follows_when_ten_of_its_batches_are_nearly_all_right():
    batches = schedule()
    assert {step(batches, 0.45) for _ in range(100)} == {1, 2}
    assert batches.length == 2
    full = 0
    while batches.length == 2:
        full += step(batches, 1.0) == 2
    assert full == 10  # 9 of 1 and one of 0.45 are 0.945 in the mean
    assert batches.ends == [batches.step]
    assert max(step(batches, 0.0) for _ in range(50)) == 3


def test_phases_follow_the_lessons_and_the_learning_rate_falls_after_the_last_one():
    batches = schedule()
    progress = []
    rates = []
    while batches.progress < 1:
        progress.append(batches.progress)
        rates.append(batches.lr)
        step(batches, 1.0)
    curriculum = make_curriculum(OPTIONS)
    _, free, _, end = batches.ends
    assert progress == sorted(progress)
    assert [curriculum.at(share).name for share in progress].index("free") == free
    assert batches.step == batches.last == end + 200  # 2/7 of all steps, since 600 would be more
    assert rates[:50] == pytest.approx([(n + 1) / 50 for n in range(50)])
    assert set(rates[50:end]) == {1.0}
    assert rates[end:] == sorted(rates[end:], reverse=True)
    assert rates[-1] == pytest.approx(0.02, abs=0.01)


def test_the_learning_rate_may_fall_with_each_lesson_of_the_fixed_point():
    batches = schedule(replace(OPTIONS, lr_factor=1 / 4))
    batches.step = 100
    rates = []
    for lessons in range(5):
        batches.ends = [100] * lessons
        rates.append(batches.lr)
    assert rates == pytest.approx([1, 1, 1, 1 / 2, 1 / 4])


def test_iterations_tolerance_and_gradient_are_options():
    options = replace(OPTIONS, unrolled_steps=3, rtol=0.01, phantom_steps=6)
    unrolled, free = make_curriculum(options).phases
    assert unrolled.solve.stop.max_steps == 3
    assert (free.solve.stop.rtol, free.solve.gradient.steps) == (0.01, 6)


def test_unrolled_iterations_begin_at_zeros_or_at_random_states():
    begins = [make_curriculum(replace(OPTIONS, unrolled_start=x)).phases[0] for x in (0.0, 0.5)]
    assert [phase.solve.start for phase in begins] == ["zero", dq.RandomStart(0.5)]


def test_labels_may_be_smoothed_at_the_fixed_point():
    batches = schedule(replace(OPTIONS, label_smoothing=0.5))
    logits, targets = torch.tensor([[[2.0, 0.0], [0.0, 9.0]]]), torch.tensor([[0, -100]])
    given = SimpleNamespace(logits=logits, loss="its own"), SimpleNamespace(targets=targets)
    batches.ends = [10]
    assert batches.loss(*given) == "its own"
    batches.ends = [10, 20]
    right, wrong = (-math.log(torch.softmax(logits[0, 0], 0)[i]) for i in (0, 1))
    assert batches.loss(*given).item() == pytest.approx(0.75 * right + 0.25 * wrong)
    assert schedule().loss(*given) == "its own"


def test_unrolled_lessons_have_the_first_task_and_later_ones_all():
    tasks = [WordProblem(parse_group(name)) for name in ("Z2", "Z3")]
    batches = LengthSchedule(tasks, OPTIONS, lambda output, batch: output.accuracy)
    ids = {"unrolled": 0, "free": 0}
    for _ in range(200):
        phase = make_curriculum(OPTIONS).at(batches.progress).name
        batch = next(batches)
        batches.record(SimpleNamespace(accuracy=1.0), batch)
        ids[phase] = max(ids[phase], int(batch.inputs.max()))
    assert ids == {"unrolled": 1, "free": 2}


@pytest.mark.parametrize(("decay", "last"), [(100, 700), (2000, 2800), (9999, 10_000)])
def test_the_learning_rate_falls_for_longer_where_learning_took_long(decay, last):
    batches = schedule(replace(OPTIONS, steps=10_000))
    batches.decay = decay
    assert batches.last == last


def test_the_learning_rate_falls_in_as_many_steps_as_the_options_say():
    batches = schedule(replace(OPTIONS, falling=30))
    while batches.progress < 1:
        step(batches, 1.0)
    assert batches.step == batches.decay + 30 == batches.ends[-1] + 30
    batches = schedule(replace(OPTIONS, falling=30))
    while batches.progress < 1:
        step(batches, 0.5)
    assert (batches.decay, batches.step) == (670, 700)


def test_what_is_never_learned_ends_after_all_steps_at_the_fixed_point():
    batches = schedule()
    phases = []
    while batches.progress < 1:
        phases.append(make_curriculum(OPTIONS).at(batches.progress).name)
        step(batches, 0.5)
    assert batches.step == 700
    assert batches.decay == 500
    assert batches.ends == []
    assert phases[499] == "unrolled"
    assert phases[-1] == "free"


def test_the_longest_length_is_told_also_where_a_later_lesson_is_shorter():
    batches = schedule(replace(OPTIONS, lengths=(2, 8), free_lengths=(4,)))
    batches.ends = [10, 20]
    assert batches.length == 4
    assert batches.reached == 8


def test_a_run_that_goes_on_draws_what_it_would_have_drawn():
    whole = schedule()
    resumed = schedule()
    for _ in range(30):
        step(whole, 0.97)
    resumed.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    assert resumed.lr == whole.lr
    for _ in range(30):
        ours = next(resumed)
        theirs = next(whole)
        assert torch.equal(ours.inputs, theirs.inputs)
        for batches in (resumed, whole):
            batches.record(SimpleNamespace(accuracy=0.97), ours)
    assert resumed.plan == whole.plan


def test_another_model_repeats_the_lessons_whatever_its_accuracy():
    first = schedule()
    shapes = [step(first, 0.97) for _ in range(200)]
    second = schedule(plan=first.plan)
    assert [step(second, 0.0) for _ in shapes] == shapes
    assert second.progress == first.progress


def test_long_lessons_have_fewer_sequences():
    options = Recipe(lengths=(2,), free_lengths=(8, 64), batch=16, batch_tokens=64, output="unused")
    batches = schedule(options)
    sizes = []
    for _ in options.lengths + options.free_lengths:
        sizes.append(len(next(batches).inputs))
        batches.ends.append(batches.step)
    assert sizes == [16, 8, 1]
