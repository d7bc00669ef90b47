"""CatbAbI runs and goes on after an interruption; its stories' answers follow from their facts."""

import itertools
import json
import re

import catbabi
import pytest
import torch
import training_loop
from catbabi import Batch, encode, generate, rows_of, stream

TESTS = ("1x", "2x", "3x", "stream")
TASKS = ("1", "15", "all")
MODELS = ("most frequent answer", "explicit 1 block", "implicit 1 block")
WORDS = {word for _, story in generate(20, 0, 3) for word, _ in story}
VOCABULARY = {word: n for n, word in enumerate(("<eos>", "<unk>", *sorted(WORDS)))}
ROWS = [encode(*story, VOCABULARY) for story in generate(3, 0, 1)]
pytestmark = pytest.mark.filterwarnings("ignore::deqseq.solution.ConvergenceWarning")


def run(folder, *options):
    catbabi.main(["--quick", "--output", str(folder), *options])
    rows = json.loads((folder / "results.json").read_text())
    return [row | {"cpu_seconds": 0} for row in rows]


def test_an_interrupted_run_ends_as_if_it_had_not_been(tmp_path, monkeypatch, capsys):
    whole = run(tmp_path / "whole")
    printed = capsys.readouterr().out
    kinds = [*itertools.product(MODELS, TESTS, TASKS)]
    assert all(f"| {model} | {task} |" in printed for model, _, task in kinds)
    assert [(row["model"], row["test"], row["task"]) for row in whole] == kinds
    for row in whole:
        assert 0 <= row["accuracy"] <= 1
        if row["test"] != "stream":
            assert row["questions"] == {"1": 10, "15": 8, "all": 18}[row["task"]]
        for number in (row["self_iterations"], row["converged"]):
            assert (number is not None) == (row["model"] == "implicit 1 block")
    assert {row["model"]: row["steps"] for row in whole[12:]} == {MODELS[1]: 12, MODELS[2]: 6}

    monkeypatch.setattr(training_loop, "SAVED_EVERY", 2)
    right_answers = catbabi.right_answers
    # by the baseline, the explicit model and its tests, then the implicit one
    calls = iter(range(11 + 12 + 11 + 4))

    def interrupted(*arguments):
        if next(calls, None) is None:
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
    asked = {1: 0, 15: 0}
    singular = {plural: kind for kind, plural in catbabi.KINDS.items()}
    for task, story in generate(60, 5, scale):
        where = {}
        kinds = {}
        fears = {}
        words = " ".join(word for word, is_answer in story if not is_answer)
        answers = iter([word for word, is_answer in story if is_answer])
        for line in re.findall(r"[^.?]+[.?]", words):
            match line.split():
                case [person, *_, "the", room, "."]:
                    assert where.get(person) != room, "nobody goes where they are"
                    where[person] = room
                case ["where", "is", person, "?"]:
                    assert next(answers) == where[person]
                    asked[task] += 1
                case [name, "is", "a", kind, "."]:
                    kinds[name] = kind
                case [many, "are", "afraid", "of", feared, "."]:
                    fears[singular[many]] = singular[feared]
                case ["what", "is", name, "afraid", "of", "?"]:
                    assert next(answers) == fears[kinds[name]]
                    asked[task] += 1
        assert next(answers, None) is None
        assert len(kinds) == len(fears) == {1: 0, 15: 4 * scale}[task]
    assert asked == {1: 60 * 5, 15: 60 * 4}


@pytest.mark.parametrize("task", catbabi.GENERATORS)
def test_stories_come_from_the_seed(task):
    def stories(number, seed):
        return [story for kind, story in generate(number, seed, 1) if kind == task]

    first = stories(4, 0)
    assert first == stories(6, 0)[:4]
    assert not any(story in first for story in stories(4, 1))


def test_a_story_is_encoded_with_its_answers_as_targets():
    words = ["where", "is", "mary", "?", "garden", "zebra"]
    story = [(word, word == "garden") for word in words]
    inputs, targets, tasks = encode(1, story, VOCABULARY).tolist()
    assert inputs == [0, *(VOCABULARY.get(word, 1) for word in words)]
    assert inputs[-1] == 1
    assert targets == [-100] * 4 + [VOCABULARY["garden"], -100, -100]
    assert set(tasks) == {1}


def test_batches_are_padded_on_the_right():
    batch = Batch.of(ROWS, "cpu")
    assert batch.mask.sum(1).tolist() == [row.shape[1] for row in ROWS]
    assert torch.equal(batch.inputs[batch.mask], torch.cat([row[0] for row in ROWS]))
    assert (batch.targets[~batch.mask] == -100).all()


def test_a_row_of_the_stream_is_whole_stories_one_after_another_over_the_cuts():
    def streamed(seed):
        batches = itertools.islice(stream(ROWS, 3, 50, seed, "cpu"), 20)
        return torch.cat([torch.stack([batch.inputs, batch.targets]) for batch in batches], dim=2)

    inputs, _ = tokens = streamed(0)
    stories = [row[0].tolist() for row in ROWS]
    for row in inputs.tolist():
        starts = [place for place, token in enumerate(row) if token == 0]
        parts = [row[a:b] for a, b in itertools.pairwise(starts)]
        assert len(parts) > len(ROWS)
        assert all(part in stories for part in parts)
    assert torch.equal(streamed(0), tokens)
    assert not torch.equal(streamed(1), tokens)


def test_right_answers_are_counted_per_task():
    answers = torch.tensor([[1, 0, 1, 1], [1, 1, 15, 15]])
    assert rows_of(answers, seed=0) == [
        {"task": "1", "accuracy": 0.5, "questions": 2, "seed": 0},
        {"task": "15", "accuracy": 1.0, "questions": 2, "seed": 0},
        {"task": "all", "accuracy": 0.75, "questions": 4, "seed": 0},
    ]
