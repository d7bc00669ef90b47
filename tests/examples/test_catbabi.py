"""CatbAbI runs and goes on after an interruption; its stories' answers follow from their facts."""

import itertools
import json
import re

import catbabi
import pytest
import torch
import training_loop
from catbabi import Batch, deduction_story, encode, generate, one_fact_story, rows_of, stream

TESTS = ("1x", "2x", "3x", "stream")
MODELS = ("most frequent answer", "explicit 1 block", "implicit 1 block")
VOCABULARY = {
    word: n
    for n, word in enumerate(
        ("<eos>", "<unk>", *sorted({w for _, s in generate(20, 0, 3) for w, _ in s}))
    )
}
ROWS = [encode(*story, VOCABULARY) for story in generate(3, 0, 1)]
pytestmark = pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")


def run(folder, *options):
    catbabi.main(["--quick", "--output", str(folder), *options])
    rows = json.loads((folder / "results.json").read_text())
    return [{name: value for name, value in row.items() if name != "cpu_seconds"} for row in rows]


def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path, monkeypatch, capsys):
    whole = run(tmp_path / "whole")
    printed = capsys.readouterr().out
    assert all(
        f"| {model} | {task} |" in printed for model in MODELS for task in ("1", "15", "all")
    )
    kinds = itertools.product(MODELS, TESTS, ("1", "15", "all"))
    assert [(row["model"], row["test"], row["task"]) for row in whole] == list(kinds)
    for row in whole:
        assert 0 <= row["accuracy"] <= 1
        assert (
            row["questions"] == {"1": 10, "15": 8, "all": 18}[row["task"]]
            or row["test"] == "stream"
        )
        assert (
            (row["self_iterations"] is None)
            == (row["converged"] is None)
            == (row["model"] != "implicit 1 block")
        )
    assert {row["model"]: row["steps"] for row in whole[12:]} == {MODELS[1]: 12, MODELS[2]: 6}

    monkeypatch.setattr(training_loop, "SAVED_EVERY", 2)
    calls, right_answers = [], catbabi.right_answers

    def interrupted(*arguments):
        calls.append(1)  # by the baseline, the explicit model and its tests, then the implicit one
        if len(calls) == 11 + 12 + 11 + 5:
            raise KeyboardInterrupt
        return right_answers(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(catbabi, "right_answers", interrupted)
        with pytest.raises(SystemExit, match="run the same command again"):
            run(tmp_path / "cut")
    capsys.readouterr()
    assert run(tmp_path / "cut") == whole
    went_on = re.findall("(.*): going on from step (.*)", capsys.readouterr().out)
    assert went_on == [("explicit 1 block", "12"), ("implicit 1 block", "4")]


@pytest.mark.parametrize("scale", [1, 2, 3])
def test_answers_follow_from_the_facts(scale):
    asked = [0, 0]
    for task, story in generate(60, 5, scale):
        where, kinds, fears = {}, {}, {}
        words = " ".join(word for word, answer in story if not answer)
        answers = iter([word for word, answer in story if answer])
        for line in re.findall(r"[^.?]+[.?]", words):
            match line.split():
                case [person, *_, "the", room, "."]:
                    assert where.get(person) != room, "nobody goes where they are"
                    where[person] = room
                case ["where", "is", person, "?"]:
                    assert next(answers) == where[person]
                    asked[0] += 1
                case [name, "is", "a", kind, "."]:
                    kinds[name] = kind
                case [many, "are", "afraid", "of", feared, "."]:
                    one = {plural: kind for kind, plural in catbabi.KINDS.items()}
                    fears[one[many]] = one[feared]
                case ["what", "is", name, "afraid", "of", "?"]:
                    assert next(answers) == fears[kinds[name]]
                    asked[1] += 1
        assert next(answers, None) is None
        assert len(kinds) == len(fears) == (4 * scale if task == 15 else 0)
    assert asked == [60 * 5, 60 * 4]


@pytest.mark.parametrize("make", [one_fact_story, deduction_story])
def test_stories_come_from_the_seed(make):
    task = {make: task for task, make in catbabi.GENERATORS.items()}[make]
    first, again, other = generate(4, 0, 1), generate(6, 0, 1), generate(4, 1, 1)
    stories = [
        [words for number, words in part if number == task] for part in (first, again, other)
    ]
    assert stories[0] == stories[1][:4]
    assert not any(story in stories[0] for story in stories[2])


def test_a_story_is_encoded_with_its_answers_as_targets():
    words = [
        ("where", False),
        ("is", False),
        ("mary", False),
        ("?", False),
        ("garden", True),
        ("zebra", False),
    ]
    inputs, targets, tasks = encode(1, words, VOCABULARY).tolist()
    assert inputs == [0, *(VOCABULARY[word] for word in ("where", "is", "mary", "?", "garden")), 1]
    assert targets == [-100] * 4 + [VOCABULARY["garden"], -100, -100]
    assert set(tasks) == {1}


def test_batches_are_padded_on_the_right():
    batch = Batch.of(ROWS, "cpu")
    assert batch.mask.sum(1).tolist() == [row.shape[1] for row in ROWS]
    for row, inputs, targets, mask in zip(
        ROWS, batch.inputs, batch.targets, batch.mask, strict=True
    ):
        assert torch.equal(inputs[mask], row[0])
        assert (targets[~mask] == -100).all()


def test_a_row_of_the_stream_is_whole_stories_one_after_another_over_the_cuts():
    batches = [*itertools.islice(stream(ROWS, 3, 50, 0, "cpu"), 20)]
    known = [row[0].tolist() for row in ROWS]
    for row in torch.cat([batch.inputs for batch in batches], dim=1).tolist():
        starts = [place for place, token in enumerate(row) if token == 0]
        parts = [row[a:b] for a, b in itertools.pairwise(starts)]
        assert len(parts) > len(ROWS)
        assert all(part in known for part in parts)
    again = [*itertools.islice(stream(ROWS, 3, 50, 0, "cpu"), 20)]
    other = next(stream(ROWS, 3, 50, 1, "cpu"))
    assert all(torch.equal(a.targets, b.targets) for a, b in zip(batches, again, strict=True))
    assert not torch.equal(other.inputs, batches[0].inputs)


def test_right_answers_are_counted_per_task():
    answers = torch.tensor([[1, 0, 1, 1], [1, 1, 15, 15]])
    assert rows_of(answers, seed=0) == [
        {"task": "1", "accuracy": 0.5, "questions": 2, "seed": 0},
        {"task": "15", "accuracy": 1.0, "questions": 2, "seed": 0},
        {"task": "all", "accuracy": 0.75, "questions": 4, "seed": 0},
    ]
