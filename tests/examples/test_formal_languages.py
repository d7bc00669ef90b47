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
    "--steps 20 --baselines 1"
)
TINY += " --eval-lengths 6 9"
pytestmark = pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")


def test_it_writes_numbers_and_a_figure_and_prints_a_table(tmp_path, capsys):
    formal_languages.main([*TINY.split(), "--task", "bucket_sort", "--output", str(tmp_path)])
    rows = json.loads((tmp_path / "results.json").read_text())
    models = ("implicit", "explicit 1 block", "most frequent answer")
    assert [(row["model"], row["length"]) for row in rows] == [
        (model, n) for model in models for n in (6, 9)
    ]
    assert all(-0.25 <= row["accuracy"] <= 1 for row in rows)
    assert all(row["self_iterations"] >= 1 and 0 <= row["converged"] <= 1 for row in rows[:2])
    assert all(row["self_iterations"] is None for row in rows[2:])
    assert all(
        row["steps"] == 20 and row["trained_to"] in (3, 6) and row["cpu_minutes"] >= 0
        for row in rows[:4]
    )
    assert "| most frequent answer | single pass |" in capsys.readouterr().out
    assert (tmp_path / "formal_languages.png").stat().st_size > 10_000


def test_the_most_frequent_answer_is_a_baseline():
    options = read_options(["--task", "modular_arithmetic_brackets", "--eval-lengths", "12", "40"])
    for row, length in zip(most_frequent(options), (12, 40), strict=True):
        targets = TASKS[options.task].fixed(256, length, seed=1000 + length).targets[:, -1]
        share = (
            max(targets.tolist().count(answer) for answer in range(5)) / 256
        )  # 0 is a frequent product
        assert row["length"] == length
        assert row["accuracy"] == pytest.approx((share - 0.2) / 0.8)


def test_scaled_accuracy():
    targets = torch.tensor([[-100, 1, 0, -100], [2, -100, -100, 1]])
    logits = torch.nn.functional.one_hot(targets.clamp(min=0), 4).double()
    assert scaled_accuracy(logits, targets, 0.25) == 1.0
    logits[0, 1] = torch.tensor([0, 0, 5, 0])  # three of four are right
    assert [scaled_accuracy(logits, targets, chance) for chance in (0.0, 0.5, 0.75)] == [
        0.75,
        0.5,
        0.0,
    ]
    assert scaled_accuracy(-logits, targets, 0.5) == -1.0


def cycle(string):
    return [str(sum({"=": 0, "+": 1, "-": -1}[step] for step in string) % 5)]


def even_pairs(string):
    return [str(sum(a != b for a, b in itertools.pairwise(string)) % 2)]


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
        for inputs, targets in zip(*task.fixed(64, length, seed=length), strict=True):
            symbols, answer = task.text(inputs).split(), task.text(targets).split()
            string = symbols[: symbols.index("_")]
            assert len(string) == length - (name == "modular_arithmetic" and length % 2 == 0)
            assert symbols[len(string) :] == ["_"] * len(ANSWERS[name](string))
            assert answer == ["."] * len(string) + ANSWERS[name](string), string


@pytest.mark.parametrize("name", TASKS)
def test_every_symbol_is_drawn_and_every_answer_occurs(name):
    task = TASKS[name]
    inputs, targets = (part.flatten() for part in task.fixed(2000, 11, seed=0))
    assert set(inputs.tolist()) | set(targets.tolist()) == set(range(task.vocab_size)) | {-100}
    assert set(targets.tolist()) == set(range(task.answers)) | {-100}
    assert task.chance == 1 / task.answers


def test_expressions_divide_their_length_uniformly():
    inputs, _ = TASKS["modular_arithmetic_brackets"].fixed(4000, 9, seed=0)
    # (left operator right) with 6 symbols for the two parts: left has 1 to 5 of them, so the
    # operator is at 2 to 6
    places = torch.zeros(9)
    for row in inputs.tolist():
        depth = 0
        for place, symbol in enumerate(row[:9]):
            depth += (symbol == 8) - (symbol == 9)
            if depth == 1 and symbol in (5, 6, 7) and place > 1 and row[place - 1] not in (5, 6, 7):
                places[place] += 1
                break
    assert places[:2].sum() == places[7:].sum() == 0
    assert (places[2:7] / 4000 - 0.2).abs().max() < 0.03
