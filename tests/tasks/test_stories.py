"""Stories: their answers are those of another way to follow them, and text becomes ids and back."""

import itertools
import random
import re
from collections import Counter

import pytest
import torch

from deqseq.tasks import Balls, Programs


def test_stories_are_told_on_the_cpu_whatever_device_is_the_default():
    expected = Balls().fixed(2, 3, seed=0)
    with torch.device("meta"):
        batch = Balls().fixed(2, 3, seed=0)
        ids = Balls().encode("where is 1 ?")
    assert torch.equal(batch.inputs, expected.inputs)
    assert torch.equal(batch.targets, expected.targets)
    assert Balls().decode(ids) == "where is 1 ?"


def told(task, length=9, rows=40):
    """Stories as text, their targets, and what the task says of them."""
    batch = task.fixed(rows, length, seed=3)
    answers = task.answers(batch.inputs)
    assert torch.equal(answers.targets, batch.targets)
    texts = [task.decode(row) for row in batch.inputs]
    return zip(texts, answers.targets.tolist(), answers.hops.tolist(), strict=True)


def questions(task, targets, hops):
    """Answers and hops in the order of the questions."""
    asked = [(target, hop) for target, hop in zip(targets, hops, strict=True) if target >= 0]
    assert all((target >= 0) == (hop >= 0) for target, hop in zip(targets, hops, strict=True))
    return [(task.words[target], hop) for target, hop in asked]


def traced(moves, ball):
    """A ball's cup and hops, found from the end of the story to its beginning."""
    hops = 0
    for pair in reversed(moves):
        if ball in pair:
            ball, hops = next(other for other in pair if other != ball), hops + 1
    return ball, hops


@pytest.mark.parametrize("task", [Balls(), Balls(n=2, questions=0.1), Balls(n=9, questions=1.0)])
def test_balls_are_where_a_trace_back_finds_them(task):
    for text, targets, hops in told(task):
        found, moves = [], []
        for sentence in re.findall(r"swap \d and \d \.|where is \d \?", text):
            balls = re.findall(r"\d", sentence)
            if sentence.startswith("swap"):
                moves.append(balls)
            else:
                found.append(traced(moves, balls[0]))
        assert questions(task, targets, hops) == found
        assert len(moves) == 9
        assert len(found) == max(1, round(9 * task.questions))
        assert targets[-1] >= 0


def test_programs_print_what_python_prints():
    task = Programs()
    for text, targets, hops in told(task):
        printed, names = [], {"x": (0, 0), "y": (0, 0), "z": (0, 0)}
        for line in filter(str.strip, text.replace(";", "\n").splitlines()):
            times, rest = re.fullmatch(r"(?:repeat (\d) : )?(.*)", line.strip()).groups()
            values = {name: value for name, (value, _) in names.items()}
            if rest.startswith("print"):
                printed.append((str(values[rest[-1]]), names[rest[-1]][1]))
                continue
            used = [0] + [hop for name, (_, hop) in names.items() if name in rest.split("=")[1]]
            target, before = rest[0], max(used)
            for repeated in range(int(times or 1)):
                exec(rest, {}, values)
                values[target] %= 10
                step = max(before, names[target][1] if target in rest.split("=")[1] else 0) + 1
                names[target] = values[target], before + 1 if not repeated else step
        assert questions(task, targets, hops) == printed
        assert len(printed) == 9


@pytest.mark.parametrize("task", [Balls(), Programs()])
def test_every_form_is_drawn_and_text_becomes_ids_and_back(task):
    texts = [text for text, _, _ in told(task)]
    words = set(itertools.chain.from_iterable(text.split() for text in texts))
    assert words == set(task.words)
    assert task.decode(task.encode(texts[0])) == texts[0]
    assert len(set(texts)) == 40
    empty = f"{task.ends[0]} {task.ends[0]}"
    assert sum(empty in text for text in texts) == (39 if task.words[0] == "=" else 0)
    assert task.vocab_size == len(task.words)


@pytest.mark.parametrize(("length", "forms"), [(1, 2), (3, 2), (4, 5), (5, 7), (6, 7), (12, 7)])
def test_short_programs_have_fewer_forms_and_are_printed_at_the_end(length, forms):
    drawn, seen, mixed = random.Random(length), Counter(), 0
    for _ in range(300):
        program = Programs().tell(length, drawn)
        printed = [line.startswith("print") for line in program]
        assert sum(printed) == length
        assert printed[-1]
        mixed += printed != sorted(printed)
        kinds = []
        for line in itertools.compress(program, [not late for late in printed]):
            times, target, *sums = re.fullmatch(
                r"(repeat . : )?(\w) = (\w)(?: \+ (\w))? ;", line
            ).groups()
            first, second = (term and ("0" if term.isdigit() else "v") for term in sums)
            assert first == "0" or second is None or sums[0] != sums[1]
            assert not times or sums[0] == target
            kinds.append((times is not None, first, second))
        numbers = [kind[1] == "0" for kind in kinds]
        assert all(numbers[:3])  # all programs begin with three
        assert length not in (4, 5) or (sum(numbers) == length - 1 and not numbers[-1])
        seen.update(kinds)
    assert len(seen) == forms
    assert mixed == 0 if length < 6 else mixed > 290
    first = 300 * (4 if length == 5 else min(length, 3))
    assert seen[False, "0", "0"] / first == pytest.approx(0.5, abs=0.06)
    if length == 12:  # of nine others 3 in 16, and repeated sums of variables 5 in 16
        assert (seen[False, "0", None] - 450) / 2700 == pytest.approx(3 / 16, abs=0.03)
        assert seen[True, "v", "v"] / 2700 == pytest.approx(5 / 16, abs=0.02)


def test_answers_are_evenly_spread_after_many_swaps():
    task = Balls()
    last = task.fixed(1000, 32, seed=0).targets[:, -1] - task.encode("1").item()
    assert last.bincount(minlength=5).min() > 150
    assert task.chance == 0.2


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (Balls(), "swap 1 and 1 ."),
        (Balls(), "swap 1 and where ."),
        (Balls(), "where is and ?"),
        (Balls(), "swap 1 and 2 ?"),
        (Programs(), "x = ;"),
        (Programs(), "x = y ;"),
        (Programs(), "print z ;"),
        (Programs(), "x = = ;"),
        (Programs(), "x = 1 + ;"),
        (Programs(), "x = 1 + 2 + 3 ;"),
        (Programs(), "3 = 4 ;"),
        (Programs(), "repeat x : x = 1 ;"),
        (Programs(), "repeat 2 : print x ;"),
        (Programs(), "repeat 2 : repeat 2 : x = 1 ;"),
        (Programs(), "repeat 2 : ;"),
        (Programs(), "repeat 2 ;"),
    ],
)
def test_sentences_that_cannot_be_followed_are_shown(task, text):
    with pytest.raises(ValueError, match=r"inputs must have sentences like .* got") as caught:
        task.answers(task.encode(text)[None])
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Balls().encode("swap 1 with 9 ."), "text must have these words, .* got 9 with"),
        (lambda: Balls().encode(" "), "text must have these words, .* got none"),
        (lambda: Balls().decode(torch.tensor([11])), "ids must lie in 0..10, got 11"),
        (lambda: Balls().decode(torch.tensor([[1]])), r"ids must have shape \(length,\)"),
        (lambda: Balls().answers(torch.tensor([[-1]])), "inputs must lie in 0..10, got -1"),
        (lambda: Balls(n=1), "n must be an integer in 2..9, got 1"),
        (lambda: Balls(questions=0.0), "questions must be a number in"),
    ],
)
def test_bad_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_what_follows_the_last_question_is_not_followed():
    task = Balls()
    ids = task.encode("where is 2 ? swap 1 and")  # cut in a sentence
    assert (task.answers(ids[None, :3]).targets == -100).all()
    assert task.answers(ids[None]).targets[0].tolist()[3:] == [task.encode("2").item(), *3 * [-100]]
