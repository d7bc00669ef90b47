"""What all tasks share: what a task of one's own draws is checked, and data come from the seed."""

import pytest
import torch

from deqseq.tasks import Task, WordBatch, WordProblem, generators, parse_group


class Mine(Task):
    """Whatever it is told."""

    vocab_size, chance = 2, 0.5

    def __init__(self, drawn):
        self.drawn = drawn

    def draw(self, batch, length, generator):
        return self.drawn


def ids(*rows) -> torch.Tensor:
    return torch.tensor(rows)


@pytest.mark.parametrize(
    ("drawn", "error", "message"),
    [
        (
            WordBatch(ids([0, 2]), ids([0, 1])),
            ValueError,
            "the inputs of draw must lie in 0..1, got 0..2",
        ),
        (
            WordBatch(ids([0, 1]), ids([-1, -100])),
            ValueError,
            "the targets of draw must lie in 0..1, got -1..0",
        ),
        (
            WordBatch(ids([0, 1], [0, 1]), ids([0, 1], [0, 1])),
            ValueError,
            "draw must return 1 rows, got 2",
        ),
        (
            WordBatch(torch.zeros(1, 2), ids([0, 1])),
            ValueError,
            "draw must return ids and answers, int64",
        ),
        ([0, 1], TypeError, "the value of draw must be a WordBatch"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_a_task_draws_is_checked(drawn, error, message):
    with pytest.raises(error, match=message):
        Mine(drawn).fixed(1, 2, seed=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda task: task.fixed(2, 0, seed=0), "length must be an integer >= 1, got 0"),
        (
            lambda task: task.batches(2, (8, 0), seed=0),
            "length must be an integer >= 1, got 0",
        ),  # at the call
        (lambda task: task.batches(2, (), seed=0), "length must name at least one length"),
        (lambda task: task.fixed(2, 4, seed=2**31), r"seed must be an integer in 0\.\.2147483647"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(Mine(None))


def test_data_come_from_the_seed_alone_and_training_never_sees_the_test():
    task = WordProblem(parse_group("Z5"))
    before = torch.get_rng_state()
    first, stream = task.fixed(16, 40, seed=5), task.batches(16, 40, seed=5)
    drawn = [next(stream) for _ in range(2)]
    again, stream = task.fixed(16, 40, seed=5), task.batches(16, 40, seed=5)
    assert torch.equal(first.inputs, again.inputs)
    assert all(torch.equal(batch.inputs, next(stream).inputs) for batch in drawn)
    assert torch.equal(before, torch.get_rng_state())
    rows = [
        tuple(row)
        for batch in (first, *drawn, task.fixed(16, 40, seed=6))
        for row in batch.inputs.tolist()
    ]
    assert len(set(rows)) == 64


def test_the_chance_of_a_word_problem_counts_the_products():
    assert WordProblem(parse_group("Z12"), inputs=(4,)).chance == 1 / 3
    a5 = parse_group("A5")
    assert WordProblem(a5, inputs=generators(a5, 2)).chance == 1 / 60
    letters = parse_group(
        "M"
    )  # the empty product is no answer, and only in a group do others give it too
    assert [
        WordProblem(letters, inputs=(letters.elements.index(letter),)).chance for letter in "EABX"
    ] == [
        1,
        1 / 2,
        1,
        1,
    ]
