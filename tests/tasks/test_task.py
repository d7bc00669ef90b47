"""What is drawn is checked and depends only on the seed; the word problem against a plain loop."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deqseq.tasks import Task, WordBatch, WordProblem, generators, parse_group, prefix_products


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


S5 = parse_group("S5")
A5 = parse_group("A5")


def test_worked_example_of_the_paper():
    tokens = [(5, 4, 1, 3, 2), (3, 4, 1, 2, 5), (5, 3, 1, 2, 4)]
    ids = torch.tensor([[S5.elements.index(token) for token in tokens]])
    products = [S5.elements[product] for product in prefix_products(S5, ids)[0].tolist()]
    assert products == [tokens[0], (1, 3, 5, 4, 2), (2, 5, 1, 3, 4)]


@given(
    name=st.sampled_from(["Z2", "S3", "M", "Z3xM"]),
    length=st.integers(1, 40),
    seed=st.integers(0, 99),
)
@settings(max_examples=50, deadline=None)
def test_targets_agree_with_the_table(name, length, seed):
    monoid = parse_group(name)
    inputs, targets = WordProblem(monoid).fixed(3, length, seed=seed)
    assert torch.equal(targets[:, 0], inputs[:, 0])
    assert torch.equal(targets[:, 1:], monoid.table[targets[:, :-1], inputs[:, 1:]])


def test_restricted_inputs():
    two = generators(A5, 2)
    task = WordProblem(A5, inputs=two)
    inputs, targets = task.fixed(100, 50, seed=0)
    assert task.input_ids == two
    assert task.vocab_size == 60
    assert set(inputs.flatten().tolist()) == set(two)
    assert abs((inputs == two[0]).double().mean() - 0.5) < 0.03
    assert set(targets.flatten().tolist()) == set(range(60))


@pytest.mark.parametrize("p", [0.0, 0.5, 1.0])
def test_only_the_group_part_of_the_reference_task_becomes_easy(p):
    task = WordProblem(parse_group("A5xM"), identity_probability=p)
    inputs, targets = task.fixed(400, 100, seed=0)
    group = inputs // 4
    letter = inputs % 4
    assert task.vocab_size == 240
    assert task.monoid.elements[inputs[0, 0]] == (A5.elements[group[0, 0]], "EABX"[letter[0, 0]])
    easy = group == A5.identity
    assert torch.equal(task.hard(inputs), ~easy)
    assert easy.double().mean().item() == pytest.approx(p + (1 - p) / 60, abs=0.01)
    shares = letter.flatten().bincount(minlength=4) / letter.numel()
    assert shares.tolist() == pytest.approx([0.25] * 4, abs=0.01)
    assert torch.equal(targets // 4, prefix_products(A5, group))
    assert torch.equal(targets % 4, prefix_products(parse_group("M"), letter))


def test_all_group_factors_become_easy_together():
    task = WordProblem(parse_group("Z11xMxZ11"), identity_probability=0.5)
    inputs, _ = task.fixed(200, 100, seed=0)
    first = inputs // 44 == 0
    last = inputs % 11 == 0
    assert torch.equal(task.hard(inputs), ~(first & last))
    with pytest.raises(ValueError, match="inputs must "):
        task.hard(inputs + 1)
    assert (first & last).double().mean().item() == pytest.approx(0.5 + 0.5 / 121, abs=0.02)
    assert (first != last).double().mean().item() == pytest.approx(0.5 * 20 / 121, abs=0.02)


def test_probability_changes_only_which_tokens_are_easy():
    plain, half, most = (
        WordProblem(A5, None, p).fixed(50, 40, seed=3).inputs for p in (0.0, 0.5, 0.9)
    )
    hard = half != A5.identity
    assert torch.equal(half[hard], plain[hard])
    assert hard[most != A5.identity].all()
    assert not torch.equal(plain, half)


def test_a_single_length_and_several():
    task = WordProblem(parse_group("Z2"))
    assert next(task.batches(3, 7, seed=0)).inputs.shape == (3, 7)
    batches = itertools.islice(task.batches(1, (4, 8, 16), seed=0), 300)
    lengths = [batch.inputs.shape[1] for batch in batches]
    for length in (4, 8, 16):
        assert 70 <= lengths.count(length) <= 130  # 100 expected, standard deviation 8


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("M", {"identity_probability": 0.5}, "must be 0 for M, which has no group"),
        ("Z3", {"inputs": ()}, "inputs must be one or more ids, none of them twice, got"),
        ("Z3", {"inputs": (0, 3)}, r"inputs must .* 0\.\.2, got 3"),
        ("Z3", {"inputs": (1, 1)}, r"inputs must .* none of them twice, got \(1, 1\)"),
    ],
)
def test_bad_arguments_of_a_word_problem_are_named(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        WordProblem(parse_group(name), **arguments)
