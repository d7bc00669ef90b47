"""Formal languages: answers against Python's own evaluation, distributions, speed, seeds and error texts."""

import itertools
import math
import time

import pytest
import torch

from deqseq.tasks import (
    FiniteMonoid,
    Task,
    WordBatch,
    WordProblem,
    cyclic,
    formal,
    generators,
    parse_group,
    scaled_accuracy,
)
from deqseq.tasks.formal import TASKS, FormalTask


def rows(task, lengths, size=64):
    """Strings and answers as lists of symbols; the answer without what is not scored."""
    for length in lengths:
        inputs, targets = task.fixed(size, length, seed=length)
        assert inputs.shape == targets.shape
        assert inputs.dtype == targets.dtype == torch.int64
        for string, answer in zip(inputs, targets, strict=True):
            yield length, task.text(string).split(), [symbol for symbol in task.text(answer).split() if symbol != "."]


def evaluated(text, modulus=5):
    return str(eval(text) % modulus)


def cycle(string):
    place = 0
    for step in string:
        place = {"=": place, "+": place + 1, "-": place - 1}[step]
    return [str(place % 5)]


def even_pairs(string):
    text = "".join(string)
    return [str(sum(text[i : i + 2] in ("01", "10") for i in range(len(text))) % 2)]


def missing(string):
    half, place = len(string) // 2, string.index("?")
    return [string[place - half if place >= half else place + half]]


def stack(string):
    held = []
    for symbol in string:
        if symbol == "POP":
            held = held[:-1]
        else:
            held.append(symbol[-1])
    return [*reversed(held), "#"]


def little_endian(number):
    return [*f"{number:b}"[::-1], "#"]


def added(string):
    first, second = ("".join(string)[::-1]).split("+")
    return little_endian(int(first, 2) + int(second, 2))


def multiplied(string):
    first, second = ("".join(string)[::-1]).split("*")
    return little_endian(int(first, 2) * int(second, 2))


def solved(string):
    left, right = "".join(string).split("=")
    return [str(x) for x in range(5) if evaluated(left.replace("x", f"({x})")) == right]


ANSWERS = {
    "even_pairs": even_pairs,
    "parity_check": lambda string: [str(string.count("1") % 2)],
    "cycle_navigation": cycle,
    "modular_arithmetic": lambda string: [evaluated("".join(string))],
    "modular_arithmetic_brackets": lambda string: [evaluated("".join(string))],
    "solve_equation": solved,
    "reverse_string": lambda string: string[::-1],
    "stack_manipulation": stack,
    "bucket_sort": sorted,
    "duplicate_string": lambda string: string + string,
    "missing_duplicate": missing,
    "odds_first": lambda string: string[0::2] + string[1::2],
    "binary_addition": added,
    "binary_multiplication": multiplied,
    "compute_sqrt": lambda string: [*f"{math.isqrt(int(''.join(string), 2)):0{(len(string) + 1) // 2}b}"],
}
SHORTER = {"modular_arithmetic": 1, "missing_duplicate": 0}  # lengths of another parity are one less


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_those_of_python(name):
    task = TASKS[name]
    for length, symbols, answer in rows(task, range(task.shortest, 33)):
        string = symbols[: symbols.index("_")]
        wanted = length - (name in SHORTER and length % 2 != SHORTER[name])
        assert len(string) == wanted
        assert set(symbols[wanted:]) == {"_"}
        assert answer == ANSWERS[name](string), string
        assert set(answer) <= set(task.answers)


@pytest.mark.parametrize("name", ANSWERS)
def test_answers_stand_at_the_blanks_from_the_first_on(name):
    task = TASKS[name]
    inputs, targets = task.fixed(32, 17, seed=0)
    blank = inputs == task.symbols.index("_")
    scored = targets != -100
    assert not (scored & ~blank).any()
    assert (scored.long().argmax(1) == blank.long().argmax(1)).all()
    assert (scored[:, 1:] <= (scored[:, :-1] | ~blank[:, :-1])).all()  # no gaps


@pytest.mark.parametrize(("modulus", "operators"), [(2, "+-*"), (7, "+"), (12, "-*"), (5, "*")])
@pytest.mark.parametrize("brackets", [False, True])
def test_arithmetic_with_other_numbers_and_operators(modulus, operators, brackets):
    task = formal.modular_arithmetic(modulus, brackets=brackets, operators=operators)
    seen = set()
    for _, symbols, answer in rows(task, (1, 2, 5, 12, 31)):
        string = "".join(symbols[: symbols.index("_")])
        assert answer == [evaluated(string, modulus)]
        seen |= set(symbols)
    assert seen - {"_", "(", ")", "-"} - set(operators) == set(map(str, range(modulus)))
    assert set(operators) <= seen
    assert task.chance == 1 / modulus


def test_expressions_divide_their_length_uniformly():
    inputs, _ = formal.modular_arithmetic(brackets=True).fixed(4000, 9, seed=0)
    opening = inputs == 8
    # (left op right) with 6 symbols for the two parts: left has 1 to 5 of them, so 1 + left is the operator's place.
    places = torch.zeros(9)
    for row in inputs.tolist():
        depth = 0
        for place, symbol in enumerate(row[:9]):
            depth += (symbol == 8) - (symbol == 9)
            if depth == 1 and symbol in (5, 6, 7) and place > 1 and row[place - 1] not in (5, 6, 7):
                places[place] += 1
                break
    assert opening[:, 0].all()
    assert places[:2].sum() == places[7:].sum() == 0
    assert (places[2:7] / 4000 - 0.2).abs().max() < 0.03


def closes(symbols):
    """The answers of a Dyck language from a stack machine; an error if the string breaks the rules."""
    held = []
    for symbol in symbols:
        if symbol[0] == "(":
            held.append(symbol[1:])
        else:
            assert held.pop() == symbol[1:]
        yield f"){held[-1]}" if held else "none"


@pytest.mark.parametrize("kinds", [1, 2, 5])
def test_dyck_strings_are_well_nested_and_answered_everywhere(kinds):
    task = formal.dyck(kinds)
    for length, symbols, answer in rows(task, (1, 2, 3, 16, 65)):
        assert len(symbols) == len(answer) == length
        assert answer == list(closes(symbols))
    assert (task.vocab_size, task.chance) == (2 * kinds + 1, 1 / (kinds + 1))
    inputs, targets = task.fixed(500, 100, seed=0)
    opens = inputs < kinds
    free = targets[:, :-1] != 2 * kinds
    assert opens[:, 1:][~free].all()
    assert opens[:, 1:][free].double().mean().item() == pytest.approx(0.5, abs=0.01)
    assert (inputs[opens].bincount(minlength=kinds) / opens.sum() - 1 / kinds).abs().max() < 0.02


@pytest.mark.parametrize(("keys", "length", "pairs"), [(64, 3, 1), (64, 16, 4), (64, 256, 64), (4, 40, 4)])
def test_recall_answers_each_query_by_the_value_of_its_key(keys, length, pairs):
    task = formal.associative_recall(keys, 8)
    for _, symbols, answer in rows(task, [length]):
        values = dict(zip(symbols[0 : 2 * pairs : 2], symbols[1 : 2 * pairs : 2], strict=True))
        assert len(values) == pairs
        assert all(key[0] == "k" and value[0] == "v" for key, value in values.items())
        assert answer == [values[key] for key in symbols[2 * pairs :]]
        assert len(symbols) == length
    inputs, targets = task.fixed(4, length, seed=0)
    assert (targets[:, : 2 * pairs] == -100).all()
    assert inputs.max() < task.vocab_size == keys + 8


@pytest.mark.parametrize("name", TASKS)
def test_every_symbol_is_drawn_and_every_answer_occurs(name):
    task = TASKS[name]
    batches = [task.fixed(2000, length, seed=length) for length in (11, 16)]
    inputs, targets = (torch.cat([part.flatten() for part in parts]) for parts in zip(*batches, strict=True))
    drawn, answers = ({task.symbols[i] for i in ids.unique().tolist() if i >= 0} for ids in (inputs, targets))
    assert answers == set(task.answers)
    assert set(task.symbols) - drawn - answers <= ({"*"} if name == "solve_equation" else set())


@pytest.mark.parametrize("name", ["even_pairs", "parity_check", "modular_arithmetic_brackets", "missing_duplicate"])
def test_guessing_has_the_accuracy_of_chance(name):
    task = formal.modular_arithmetic(brackets=True, operators="+-") if "brackets" in name else TASKS[name]
    _, targets = task.fixed(20_000, 21, seed=0)
    counts = targets[targets != -100].bincount(minlength=len(task.answers)) / 20_000
    assert (counts - task.chance).abs().max() < 0.015


def test_scaled_accuracy():
    targets = torch.tensor([[-100, 1, 0, -100], [2, -100, -100, 1]])
    logits = torch.nn.functional.one_hot(targets.clamp(min=0), 4).double()
    assert scaled_accuracy(logits, targets, 0.25) == 1.0
    logits[0, 1] = torch.tensor([0, 0, 5, 0])  # three of four are right
    assert scaled_accuracy(logits, targets, 0.0) == 0.75
    assert scaled_accuracy(logits, targets, 0.5) == 0.5
    assert scaled_accuracy(logits, targets, 0.75) == 0.0
    assert scaled_accuracy(-logits, targets, 0.5) == -1.0
    with pytest.raises(ValueError, match="at least one position"):
        scaled_accuracy(logits, torch.full_like(targets, -100), 0.5)
    with pytest.raises(ValueError, match=r"chance must be a number in \[0, 1\), got 1"):
        scaled_accuracy(logits, targets, 1.0)


def test_a_word_problem_and_a_language_are_used_alike():
    tasks: list[Task] = [WordProblem(cyclic(5)), *TASKS.values()]
    for task in tasks:
        batch = next(task.batches(4, (8, 12), seed=0))
        assert isinstance(batch, WordBatch)
        assert 0 < task.chance < 1
        assert batch.inputs.max() < task.vocab_size


def test_the_chance_of_a_word_problem_counts_the_products():
    assert WordProblem(cyclic(12), inputs=(4,)).chance == 1 / 3
    a5 = parse_group("A5")
    assert WordProblem(a5, inputs=generators(a5, 2)).chance == 1 / 60
    letters = parse_group("M")  # the empty product is no answer, and only in a group do others give it too
    assert [WordProblem(letters, inputs=(letters.index(letter),)).chance for letter in "EABX"] == [1, 1 / 2, 1, 1]


@pytest.mark.parametrize("name", TASKS)
def test_data_come_from_the_seed_alone(name):
    task = TASKS[name]
    torch.manual_seed(0)
    first, stream = task.fixed(16, 40, seed=5), task.batches(16, 40, seed=5)
    drawn = [next(stream) for _ in range(2)]
    torch.manual_seed(1)
    before = torch.get_rng_state()
    again, stream = task.fixed(16, 40, seed=5), task.batches(16, 40, seed=5)
    assert torch.equal(first.inputs, again.inputs)
    assert torch.equal(first.targets, again.targets)
    assert all(torch.equal(batch.inputs, next(stream).inputs) for batch in drawn)
    assert torch.equal(before, torch.get_rng_state())
    rows = [tuple(row) for batch in (first, *drawn, task.fixed(16, 40, seed=6)) for row in batch.inputs.tolist()]
    assert len(set(rows)) == 64  # of training and evaluation, and of all seeds


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_takes_milliseconds(name, unchecked):
    stream = TASKS[name].batches(64, 256, seed=0)
    taken = []
    for batch in itertools.islice(stream, 12):
        taken.append(time.process_time())
        assert len(batch.inputs) == 64
    assert min(b - a for a, b in itertools.pairwise(taken)) < 0.03  # 1 to 5 ms on an idle core


def test_every_task_has_its_name():
    assert all(task.name == name for name, task in TASKS.items())
    assert formal.modular_arithmetic() == TASKS["modular_arithmetic"] != TASKS["modular_arithmetic_brackets"]
    assert formal.dyck(3) != formal.dyck(2) == TASKS["dyck_2"]
    assert formal.modular_arithmetic(operators="+") != formal.modular_arithmetic(operators="*")


def nothing(batch, length, generator):
    raise AssertionError


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: formal.modular_arithmetic(1), "modulus must be an integer >= 2, got 1"),
        (lambda: formal.modular_arithmetic(operators=""), "operators must be some of .* got ''"),
        (lambda: formal.modular_arithmetic(operators="+/"), r"operators must be some of '\+-\*'.* got '\+/'"),
        (lambda: formal.modular_arithmetic(operators="++"), "operators must be .* each once"),
        (lambda: formal.solve_equation(0), "modulus must be an integer >= 2, got 0"),
        (lambda: formal.dyck(0), "kinds must be an integer >= 1, got 0"),
        (lambda: formal.associative_recall(0), "keys must be an integer >= 1, got 0"),
        (lambda: formal.associative_recall(4, 0), "values must be an integer >= 2, got 0"),
        (lambda: formal.solve_equation().fixed(2, 2, seed=0), "length must be an integer >= 3, got 2"),
        # At the call, not at the first batch.
        (lambda: formal.binary_addition().batches(2, (8, 2), seed=0), "length must be an integer >= 3, got 2"),
        (lambda: FormalTask("twice", ("a", "a"), ("a",), nothing), r"FormalTask\.symbols must be distinct"),
        (
            lambda: FormalTask("other", ("a", "b"), ("b", "c"), nothing),
            r"FormalTask\.answers must be .* got \('b', 'c'\)",
        ),
        (lambda: FormalTask("again", ("a", "b"), ("a", "a", "b"), nothing), r"FormalTask\.answers must be distinct"),
        (lambda: FormalTask("one", ("a", "b"), ("a",), nothing), r"FormalTask\.answers must be .* at least two"),
        (lambda: FormalTask("none", ("a", "b"), ("a", "b"), nothing, shortest=0), r"FormalTask\.shortest must"),
        (lambda: formal.parity_check().text(torch.tensor([0, 7])), "ids must be 0 to 2, or -100, got 7"),
        (lambda: formal.parity_check().text(torch.tensor([0, -1])), "ids must be 0 to 2, or -100, got -1"),
        (lambda: formal.parity_check().text(torch.tensor([0.5])), "ids must be 0 to 2, or -100, got 0.5"),
        (lambda: formal.parity_check().fixed(2, 4, seed=2**31), r"seed must be an integer in 0\.\.2147483647"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        ([[0, 2]], [[0, 1]], "the inputs of draw must lie in 0..1, got 0..2"),
        ([[0, 1]], [[-1, -100]], "the targets of draw must lie in 0..1, got -1..0"),
        ([[0, 1]] * 3, [[0, 1]] * 3, "draw must return 1 rows, got 3"),
    ],
)
def test_what_is_drawn_are_answers_of_the_vocabulary(inputs, targets, message):
    def make(batch, length, generator):
        return WordBatch(torch.tensor(inputs), torch.tensor(targets))

    with pytest.raises(ValueError, match=message):
        FormalTask("mine", ("a", "b"), ("a", "b"), make).fixed(1, 2, seed=0)


def test_the_unknown_of_an_equation_is_a_number_whatever_is_drawn(monkeypatch):
    rand = torch.rand

    def zeros(*shape, generator, dtype=None):  # in float32, by which x is chosen
        return rand(*shape, generator=generator, dtype=dtype) * (dtype is not None)

    monkeypatch.setattr(torch, "rand", zeros)
    batch = formal.solve_equation().fixed(32, 4, seed=0)
    assert int(batch.targets[:, -1].max()) < 5


def test_other_types_are_refused(unchecked):
    with pytest.raises(TypeError, match="brackets must be True or False"):
        formal.modular_arithmetic(brackets=1)
    with pytest.raises(TypeError, match="operators must be a str"):
        formal.modular_arithmetic(operators=("+",))


@pytest.mark.usefixtures("unchecked")
def test_arguments_that_are_no_row_or_do_not_fit_are_named():
    task = formal.parity_check()
    with pytest.raises(ValueError, match="ids must be one row"):
        task.text(torch.zeros(1, 2, dtype=torch.int64))
    with pytest.raises(TypeError, match="targets must be a Tensor"):
        scaled_accuracy(torch.zeros(1, 2, 3), [[1, 2]], 0.1)
    with pytest.raises(ValueError, match=r"targets must be int64 \(1, 2\)"):
        scaled_accuracy(torch.zeros(1, 2, 3), torch.zeros(1, 3, dtype=torch.int64), 0.1)
    with pytest.raises(TypeError, match=r"FiniteMonoid\.factors must be"):
        FiniteMonoid("a", (1,), torch.zeros(1, 1, dtype=torch.int64), 0, factors=(3,))
    logits, right = torch.zeros(1, 2, 3), torch.zeros(1, 2, dtype=torch.int64)
    for changed, message in (
        ({"logits": torch.full((1, 2, 3), torch.nan)}, "logits must be numbers .* NaN"),
        ({"logits": torch.zeros(1, 2, 3, dtype=torch.int64)}, "logits must be real"),
        ({"logits": torch.zeros(2, 3), "targets": right[0]}, "logits must be .* got torch.float32 \\(2, 3\\)"),
        ({"targets": right.float()}, "targets must be int64"),
        ({"targets": right + 3}, "targets must be ids below 3"),
    ):
        with pytest.raises(ValueError, match=message):
            scaled_accuracy(**{"logits": logits, "targets": right, "chance": 0.1} | changed)
    with pytest.raises(TypeError, match=r"FormalTask\.make must be a function"):
        FormalTask("text", ("a", "b"), ("a", "b"), "reverse")
    with pytest.raises(TypeError, match=r"FormalTask\.symbols must be a str"):
        FormalTask("numbers", (0, 1), ("0", "1"), nothing)
    wrong = FormalTask("wrong", ("a", "b"), ("a", "b"), lambda *_: WordBatch(torch.zeros(2, 4), torch.zeros(2, 3)))
    with pytest.raises(ValueError, match=r"draw must return .* got torch.float32 \(2, 4\), torch.float32 \(2, 3\)"):
        wrong.fixed(2, 4, seed=0)
    bare = FormalTask("bare", ("a", "b"), ("a", "b"), lambda *_: [0, 1])
    with pytest.raises(TypeError, match="the value of draw must be a WordBatch"):
        bare.fixed(2, 4, seed=0)
    assert next(task.batches(2, torch.tensor(4), seed=1)).inputs.shape == next(task.batches(2, 4, seed=1)).inputs.shape
