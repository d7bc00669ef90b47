"""Vocabulary, CatbAbI's stream, and scores."""

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch
from babi import (
    GENERATORS,
    Line,
    Story,
    StoryStream,
    Vocabulary,
    count_most_frequent,
    count_right,
    encode_story,
    generate_stories,
    score_rows,
    story_batches,
)
from torch.nn import functional as F

import deqseq as dq

STORIES = [story for task in GENERATORS for story in generate_stories(task, 6, seed=0)]
VOCABULARY = Vocabulary.of(STORIES)
PATH = Story(19, (Line("The garden is north of the office."), Line("How, from the garden?", "S,w", (1,))))


def words_of(vocabulary, tokens):
    return [vocabulary.words[token] for token in tokens.tolist()]


def test_a_story_is_encoded_with_its_answers_as_targets():
    vocabulary = Vocabulary.of([PATH])
    batch = encode_story(PATH, vocabulary)
    words = ["<eos>", *PATH.words()]
    assert words_of(vocabulary, batch.inputs[0]) == words
    scored = (batch.targets[0] != -100).nonzero().flatten().tolist()
    assert [words[place] for place in scored] == ["?"]
    assert words_of(vocabulary, batch.targets[0, scored]) == ["s,w"] == [words[scored[0] + 1]]
    assert batch.tasks.unique().tolist() == [19]
    assert bool(batch.mask.all())


def test_the_vocabulary_has_every_word_once_and_a_token_for_the_rest():
    assert VOCABULARY.words[:2] == ("<eos>", "<unk>")
    assert list(VOCABULARY.words[2:]) == sorted({word for story in STORIES for word in story.words()})
    assert [VOCABULARY.words[token] for token in VOCABULARY.encode(["mary", "zebra", "?"])] == ["mary", "<unk>", "?"]
    for words in (("a", "b"), ("<eos>", "<unk>", "a", "a")):
        with pytest.raises(ValueError, match="words must be <eos>, <unk> and distinct words"):
            Vocabulary(words)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: StoryStream([], VOCABULARY, batch=1, length=1, seed=0), "stories must hold at least one"),
        (lambda: StoryStream(STORIES, VOCABULARY, batch=0, length=1, seed=0), "batch must be an integer >= 1, got 0"),
        (lambda: StoryStream(STORIES, VOCABULARY, batch=1, length=0, seed=0), "length must be an integer >= 1, got 0"),
        (lambda: story_batches([], VOCABULARY, batch=1), "stories must hold at least one"),
        (lambda: story_batches(STORIES, VOCABULARY, batch=-1), "batch must be an integer >= 1, got -1"),
    ],
)
def test_arguments_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def rows_of_stream(pieces, batch, length):
    """Rows of (word, target, task) over several batches."""
    parts = list(itertools.islice(StoryStream(STORIES, VOCABULARY, batch=batch, length=length, seed=7), pieces))
    assert all(part.inputs.shape == (batch, length) and bool(part.mask.all()) for part in parts)
    joined = [torch.cat([part[i] for part in parts], dim=1).tolist() for i in range(3)]
    return [list(zip(*row, strict=True)) for row in zip(*joined, strict=True)]


@pytest.mark.parametrize("length", [1, 37, 400])
def test_a_row_is_whole_stories_one_after_another(length):
    encoded = set()
    for story in STORIES:
        row = encode_story(story, VOCABULARY)
        encoded.add(tuple(zip(*(part[0].tolist() for part in row[:3]), strict=True)))
    for row in rows_of_stream(1600 // length, 2, length):
        starts = [place for place, (word, _, _) in enumerate(row) if word == VOCABULARY.end_of_story]
        assert starts[0] == 0
        told = [tuple(row[a:b]) for a, b in itertools.pairwise(starts)]
        assert len(told) > 5
        assert all(words in encoded for words in told)


def test_every_story_appears_before_one_appears_again():
    parts = itertools.islice(StoryStream(STORIES, VOCABULARY, batch=1, length=100, seed=1), 300)
    text = tuple(word for part in parts for word in part.inputs[0].tolist())
    ends = [place for place, word in enumerate(text) if word == VOCABULARY.end_of_story]
    stories = [text[a:b] for a, b in itertools.pairwise(ends)]
    rounds = [stories[i : i + len(STORIES)] for i in range(0, len(stories) - len(STORIES) + 1, len(STORIES))]
    assert len(rounds) >= 5
    assert {frozenset(Counter(told).items()) for told in rounds} == {frozenset(Counter(rounds[0]).items())}
    assert max(Counter(rounds[0]).values()) == 1
    assert rounds[0] != rounds[1], "every round is shuffled anew"


def test_the_seed_alone_decides_the_stream():
    def first(seed):
        return next(StoryStream(STORIES, VOCABULARY, batch=3, length=40, seed=seed)).inputs

    torch.manual_seed(0)
    one = first(0)
    torch.manual_seed(1)
    assert torch.equal(one, first(0))
    assert not torch.equal(one, first(1))


@pytest.mark.parametrize("batches", [0, 1, 7, 150])
def test_a_stream_continues_from_its_state(batches):
    whole, other = (StoryStream(STORIES, VOCABULARY, batch=3, length=np.int64(50), seed=2) for _ in range(2))
    for _ in range(batches):
        next(whole)
    next(other)
    other.load_state_dict(json.loads(json.dumps(whole.state_dict())))
    for _ in range(40):
        assert all(torch.equal(a, b) for a, b in zip(next(whole), next(other), strict=True))


def test_story_batches_hold_every_story_once_and_pad_on_the_right():
    batches = list(story_batches(STORIES, VOCABULARY, batch=7))
    assert [len(batch.inputs) for batch in batches] == [7, 7, 7, 7, 2]
    told = []
    for batch in batches:
        lengths = batch.mask.sum(1)
        assert batch.mask.shape[1] == lengths.max()
        for row, length in enumerate(lengths.tolist()):
            assert bool(batch.mask[row, :length].all())
            assert batch.targets[row, length:].eq(-100).all()
            assert batch.inputs[row, length:].eq(VOCABULARY.end_of_story).all()
            told.append((batch.tasks[row, 0].item(), *words_of(VOCABULARY, batch.inputs[row, 1:length])))
    assert sorted(told) == sorted((story.task, *story.words()) for story in STORIES)


def test_right_answers_are_counted_per_task():
    (batch,) = story_batches(STORIES, VOCABULARY, batch=100)
    best = F.one_hot(batch.targets.clamp_min(0), len(VOCABULARY)).float()
    right, questions = count_right(best, batch)
    assert right.tolist() == questions.tolist()
    assert questions.tolist() == [sum(len(s.questions) for s in STORIES if s.task == task) for task in range(21)]
    assert count_right(-best, batch)[0].sum() == 0
    first = (batch.targets[0] != -100).nonzero()[0]
    best[0, first] = -best[0, first]
    wrong = questions - count_right(best, batch)[0]
    assert wrong.nonzero().tolist() == [[batch.tasks[0, 0].item()]] and wrong.sum() == 1


def test_an_unknown_answer_is_never_right():
    vocabulary = Vocabulary(("<eos>", "<unk>", "?"))
    batch = encode_story(Story(1, (Line("a"), Line("b?", "c", (1,)))), vocabulary)
    best = F.one_hot(batch.targets.clamp_min(0), len(vocabulary)).float()
    assert count_right(best, batch)[:, 1].tolist() == [0, 1]


def test_a_batch_without_an_answer_counts_nothing():
    batch = encode_story(Story(1, (Line("Mary left."),)), Vocabulary(("<eos>", "<unk>")))
    assert count_right(torch.zeros(1, 4, 2), batch).sum() == 0


def test_the_most_frequent_answer_is_a_baseline():
    def story(task, *answers):
        return Story(task, (Line("a"), *(Line("b?", answer, (1,)) for answer in answers)))

    train = [story(1, "x", "Y"), story(1, "y"), story(2, "x")]
    counts = count_most_frequent(train, [story(1, "y", "x", "Y", "z"), story(2, "y", "x"), story(3, "q")])
    assert score_rows(torch.zeros_like(counts)) == []
    assert [(row["task"], row["accuracy"], row["questions"]) for row in score_rows(counts)] == [
        ("1", 0.5, 4),
        ("2", 0.5, 2),
        ("3", 0.0, 1),
        ("all", 3 / 7, 7),
    ]
    assert count_most_frequent([Story(1, (Line("a"),))], [story(1, "x")])[:, 1].tolist() == [0, 1]


def test_padding_and_cuts_leave_an_explicit_model_unchanged():
    torch.manual_seed(0)
    backbone = dq.Mamba2(dq.Mamba2Config(d_model=8, d_state=4, headdim=8, injection=False))
    lm = dq.CausalLM(len(VOCABULARY), dq.ExplicitModel(backbone)).double().eval()
    with torch.no_grad():
        (batch,) = story_batches(STORIES[:3] + STORIES[-3:], VOCABULARY, batch=6)
        together = lm(batch.inputs, targets=batch.targets, mask=batch.mask)
        alone = [lm(row[None, mask]).logits[0] for row, mask in zip(batch.inputs, batch.mask, strict=True)]
        assert torch.allclose(together.logits[batch.mask], torch.cat(alone), atol=1e-9)
        first, second = itertools.islice(StoryStream(STORIES, VOCABULARY, batch=2, length=60, seed=0), 2)
        before = lm(first.inputs, return_cache=True)
        after = lm(second.inputs, cache=before.cache)
        both = lm(torch.cat([first.inputs, second.inputs], dim=1))
        assert torch.allclose(torch.cat([before.logits, after.logits], dim=1), both.logits, atol=1e-9)


def test_the_loss_is_that_of_the_answers_alone():
    torch.manual_seed(0)
    backbone = dq.Mamba2(dq.Mamba2Config(d_model=8, d_state=4, headdim=8, injection=False))
    lm = dq.CausalLM(len(VOCABULARY), dq.ExplicitModel(backbone))
    batch = next(StoryStream(STORIES, VOCABULARY, batch=4, length=100, seed=0))
    output = lm(batch.inputs, targets=batch.targets)
    scored = batch.targets != -100
    assert not scored[:, -1].any()
    answers = torch.stack([batch.inputs[row, place + 1] for row, place in scored[:, :-1].nonzero()])
    expected = F.cross_entropy(output.logits[:, :-1][scored[:, :-1]], answers)
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)
