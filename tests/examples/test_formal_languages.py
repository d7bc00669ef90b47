"""The example on formal languages runs as it is, and its answers are those of Python."""

import itertools
import json

import formal_languages
import pytest
import torch
from formal_languages import most_frequent, read_options, scaled_accuracy
from formal_tasks import TASKS

TINY = (
    "--d-model 16 --d-state 4 --headdim 8 --batch 8 --lengths 3 --free-lengths 6 "
    "--steps 20 --baselines 1 --eval-lengths 6 9 --task bucket_sort"
)
pytestmark = pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")


def test_it_writes_numbers_and_a_figure_and_prints_a_table(tmp_path, capsys):
    formal_languages.main(f"{TINY} --output {tmp_path}".split())
    rows = json.loads((tmp_path / "results.json").read_text())
    models = ("implicit", "explicit 1 block", "most frequent answer")
    kinds = [*itertools.product(models, (6, 9))]
    assert [(row["model"], row["length"]) for row in rows] == kinds
    assert all(-0.25 <= row["accuracy"] <= 1 for row in rows)
    for row in rows[:2]:
        assert row["self_iterations"] >= 1
        assert 0 <= row["converged"] <= 1
    assert all(row["self_iterations"] is None for row in rows[2:])
    for row in rows[:4]:
        assert row["steps"] == 20
        assert row["trained_to"] in (3, 6)
        assert row["cpu_minutes"] >= 0
    assert "| most frequent answer | single pass |" in capsys.readouterr().out
    assert (tmp_path / "formal_languages.png").stat().st_size > 10_000


def test_the_most_frequent_answer_is_a_baseline():
    options = read_options(["--task", "modular_arithmetic_brackets", "--eval-lengths", "12", "40"])
    for row, length in zip(most_frequent(options), (12, 40), strict=True):
        targets = TASKS[options.task].fixed(256, length, seed=1000 + length).targets[:, -1]
        share = targets.bincount().max() / 256  # 0 is a frequent product
        assert row["length"] == length
        assert row["accuracy"] == pytest.approx((share.item() - 0.2) / 0.8)


def test_scaled_accuracy():
    targets = torch.tensor([[-100, 1, 0, -100], [2, -100, -100, 1]])
    logits = torch.nn.functional.one_hot(targets.clamp(min=0), 4).double()
    assert scaled_accuracy(logits, targets, 0.25) == 1.0
    logits[0, 1] = torch.tensor([0, 0, 5, 0])  # three of four are right
    for chance, expected in ((0.0, 0.75), (0.5, 0.5), (0.75, 0.0)):
        assert scaled_accuracy(logits, targets, chance) == expected
    assert scaled_accuracy(-logits, targets, 0.5) == -1.0


def cycle(string):
    return [str((string.count("+") - string.count("-")) % 5)]


def even_pairs(string):
    changes = [a != b for a, b in itertools.pairwise(string)]
    return [str(changes.count(True) % 2)]


def value(string):
    return [str(eval("".join(string)) % 5)]


ANSWERS = {
    "even_pairs": even_pairs,
    "parity_check": lambda string: [str(string.count("1") % 2)],
    "cycle_navigation": cycle,
    "modular_arithmetic": value,
    "modular_arithmetic_brackets": value,
    "reverse_string": lambda string: string[::-1],
    "bucket_sort": sorted,
    "duplicate_string": lambda string: string + string,
    "odds_first": lambda string: string[0::2] + string[1::2],
}


@pytest.mark.parametrize("name", TASKS)
def test_answers_are_those_of_python_and_stand_at_the_blanks(name):
    task = TASKS[name]
    for length in range(1, 33):
        size = length
        if name == "modular_arithmetic" and length % 2 == 0:
            size = length - 1
        for inputs, targets in zip(*task.fixed(64, length, seed=length), strict=True):
            symbols = task.text(inputs).split()
            answer = ANSWERS[name](symbols[:size])
            assert "_" not in symbols[:size]
            assert symbols[size:] == ["_"] * len(answer)
            assert task.text(targets).split() == ["."] * size + answer


@pytest.mark.parametrize("name", TASKS)
def test_every_symbol_is_drawn_and_every_answer_occurs(name):
    task = TASKS[name]
    batch = task.fixed(2000, 11, seed=0)
    assert set(torch.cat([*batch]).flatten().tolist()) == {-100, *range(task.vocab_size)}
    assert set(batch.targets.flatten().tolist()) == {-100, *range(task.answers)}
    assert task.chance == 1 / task.answers


def test_expressions_divide_their_length_uniformly():
    """(left operator right): the two parts have 6 symbols, so the operator is at 2 to 6."""
    task = TASKS["modular_arithmetic_brackets"]
    places = []
    for row in task.fixed(4000, 9, seed=0).inputs:
        symbols = task.text(row).split()[:9]
        for place in range(2, 9):
            before = symbols[:place]
            outer = before.count("(") - before.count(")") == 1
            if outer and symbols[place] in "+-*" and before[-1] not in "(+-*":
                places.append(place)
                break
    assert len(places) == 4000
    shares = torch.tensor(places).bincount(minlength=9) / 4000
    assert shares[7:].sum() == 0
    assert (shares[2:7] - 0.2).abs().max() < 0.03
