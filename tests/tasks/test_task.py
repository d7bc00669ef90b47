"""What all tasks share: the drawn batches are checked, and data depend only on the seed."""

import pytest
import torch

from deqseq.tasks import Task, WordBatch, WordProblem, generators, parse_group


class Constant(Task):
    """Draws what it is given."""

    vocab_size = 2
    chance = 0.5

    def __init__(self, drawn):
        self.drawn = drawn

    def draw(self, batch, length, generator):
        return self.drawn


ROW = torch.tensor([[0, 1]])


@pytest.mark.parametrize(
    ("drawn", "message"),
    [
        (WordBatch(2 * ROW, ROW), "the inputs of draw must lie in 0..1, got 0..2"),
        (WordBatch(ROW, ROW - 1), "the targets of draw must lie in 0..1, got -1..0"),
        (WordBatch(ROW.expand(2, 2), ROW.expand(2, 2)), "draw must return 1 rows, got 2"),
        (WordBatch(ROW / 2, ROW), "draw must return ids and answers, int64"),
        (WordBatch(ROW, [0, 1]), "what draw returns must be a Tensor"),
        (WordBatch(ROW, ROW.to("meta")), "draw must return tensors on the CPU"),
        ([0, 1], "the value of draw must be a WordBatch"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_a_task_draws_is_checked(drawn, message):
    with pytest.raises((TypeError, ValueError), match=message):
        Constant(drawn).fixed(1, 2, seed=0)
    assert Constant(WordBatch(ROW, ROW.where(ROW > 0, -100))).fixed(1, 2, seed=0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda task: task.fixed(2, 0, seed=0), "length must be an integer >= 1, got 0"),
        # an error of the call, not of the first batch
        (lambda task: task.batches(2, (8, 0), seed=0), "length must be an integer >= 1, got 0"),
        (lambda task: task.batches(2, (), seed=0), "length must name at least one length"),
        (lambda task: task.batches(2, 4, seed=0, device="gpu7"), "device must be .* got 'gpu7'"),
        (lambda task: task.fixed(2, 4, seed=2**31), r"seed must be an integer in 0\.\.2147483647"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call(Constant(None))


def test_data_depend_only_on_the_seed_and_differ_in_training_and_evaluation():
    task = WordProblem(parse_group("Z5"))

    def inputs(seed):
        stream = task.batches(16, 40, seed=seed)
        batches = (task.fixed(16, 40, seed=seed), next(stream), next(stream))
        return torch.cat([batch.inputs for batch in batches])

    state = torch.get_rng_state()
    rows = inputs(seed=5)
    assert torch.equal(rows, inputs(seed=5))
    assert torch.equal(state, torch.get_rng_state())
    assert len(torch.cat([rows, inputs(seed=6)]).unique(dim=0)) == 96


def test_the_chance_of_a_word_problem_counts_the_products():
    assert WordProblem(parse_group("Z12"), inputs=(4,)).chance == 1 / 3
    a5 = parse_group("A5")
    assert WordProblem(a5, inputs=generators(a5, 2)).chance == 1 / 60
    # the empty product is not an answer, and only in a group is it the product of other inputs
    chances = [WordProblem(parse_group("M"), inputs=(element,)).chance for element in range(4)]
    assert chances == [1, 1 / 2, 1, 1]
