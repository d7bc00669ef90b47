"""Words as numbers, CatbAbI's stream and its scores."""

import itertools
from collections import Counter

import pytest
import torch
from torch.nn import functional as F

import deqseq as dq
from deqseq.tasks.babi import (
    GENERATORS,
    Count,
    Fact,
    Question,
    Story,
    Vocabulary,
    count_most_frequent,
    count_right,
    encode_story,
    generate_stories,
    merge_counts,
    split_words,
    story_batches,
    stream_batches,
    total,
)

STORIES = [story for task in GENERATORS for story in generate_stories(task, 6, seed=0)]
VOCABULARY = Vocabulary.of(STORIES)
PATH = Story(19, (Fact("The garden is north of the office."), Question("How, from the garden?", "S,w", (1,))))


def test_words_of_a_story():
    assert split_words("  Then she said: go!") == ("then", "she", "said", ":", "go", "!")
    assert split_words("What is winona afraid of?") == ("what", "is", "winona", "afraid", "of", "?")
    assert PATH.words()[8:] == ("how", ",", "from", "the", "garden", "?", "s,w")


def test_a_story_is_encoded_with_its_answers_as_targets():
    vocabulary = Vocabulary.of([PATH])
    batch = encode_story(PATH, vocabulary)
    words = [
        "<eos>",
        "the",
        "garden",
        "is",
        "north",
        "of",
        "the",
        "office",
        ".",
        "how",
        ",",
        "from",
        "the",
        "garden",
        "?",
        "s,w",
    ]
    assert vocabulary.decode(batch.inputs[0].tolist()) == words
    scored = (batch.targets[0] != -100).nonzero().flatten().tolist()
    assert [words[place] for place in scored] == ["?"]
    assert vocabulary.decode(batch.targets[0, scored].tolist()) == ["s,w"] == [words[scored[0] + 1]]
    assert batch.tasks.unique().tolist() == [19]
    assert bool(batch.mask.all())


def test_vocabulary():
    assert VOCABULARY.words[:2] == ("<eos>", "<unk>")
    assert list(VOCABULARY.words[2:]) == sorted({word for story in STORIES for word in story.words()})
    assert len(VOCABULARY) == len(VOCABULARY.words)
    assert [VOCABULARY.words[i] for i in VOCABULARY.encode(["mary", "?"])] == ["mary", "?"]
    with pytest.raises(KeyError, match="'zebra' is not in the vocabulary of"):
        VOCABULARY.encode(["mary", "zebra"])
    lenient = Vocabulary.of(STORIES, replace_unknown=True)
    assert lenient.decode(lenient.encode(["mary", "zebra"])) == ["mary", "<unk>"]
    assert lenient != VOCABULARY == Vocabulary(VOCABULARY.words)
    for token in (-1, len(VOCABULARY)):
        with pytest.raises(IndexError, match=f"tokens must lie in 0..{len(VOCABULARY) - 1}, got {token}"):
            VOCABULARY.decode([token])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Vocabulary(("a", "b")), "Vocabulary.words must begin with <eos> and <unk>, got ['a', 'b']"),
        (lambda: Vocabulary(("<eos>", "<unk>", "a", "a")), "Vocabulary.words must not repeat a word, got 'a' twice"),
        (lambda: Vocabulary.of([]), "stories must hold at least one, got none"),
        (lambda: stream_batches([], VOCABULARY, batch=1, length=1, seed=0), "stories must hold at least one, got none"),
        (lambda: stream_batches(STORIES, VOCABULARY, batch=0, length=1, seed=0), "batch must be at least 1, got 0"),
        (lambda: stream_batches(STORIES, VOCABULARY, batch=1, length=0, seed=0), "length must be at least 1, got 0"),
        (lambda: story_batches([], VOCABULARY, batch=1), "stories must hold at least one, got none"),
        (lambda: story_batches(STORIES, VOCABULARY, batch=-1), "batch must be at least 1, got -1"),
    ],
)
def test_error_texts(make, message):
    with pytest.raises(ValueError) as caught:
        make()
    assert str(caught.value) == message


def rows_of_stream(pieces, batch, length):
    """The first pieces of a stream joined again: rows of (word, target, task)."""
    parts = list(itertools.islice(stream_batches(STORIES, VOCABULARY, batch=batch, length=length, seed=7), pieces))
    assert all(part.inputs.shape == (batch, length) and bool(part.mask.all()) for part in parts)
    joined = [torch.cat([part[i] for part in parts], dim=1).tolist() for i in range(3)]
    return [list(zip(*row, strict=True)) for row in zip(*joined, strict=True)]


@pytest.mark.parametrize("length", [1, 37, 400])
def test_rows_of_the_stream_are_whole_stories_one_after_another(length):
    encoded = {}
    for story in STORIES:
        row = encode_story(story, VOCABULARY)
        words = tuple(zip(row.inputs[0].tolist(), row.targets[0].tolist(), row.tasks[0].tolist(), strict=True))
        encoded[words] = story
    for row in rows_of_stream(1600 // length, 2, length):
        starts = [place for place, (word, _, _) in enumerate(row) if word == VOCABULARY.end_of_story]
        assert starts[0] == 0
        told = [tuple(row[a:b]) for a, b in itertools.pairwise(starts)]
        assert len(told) > 5
        assert all(words in encoded for words in told)


def test_every_story_is_told_before_one_is_told_again():
    parts = itertools.islice(stream_batches(STORIES, VOCABULARY, batch=1, length=100, seed=1), 300)
    text = tuple(word for part in parts for word in part.inputs[0].tolist())
    ends = [place for place, word in enumerate(text) if word == VOCABULARY.end_of_story]
    stories = [text[a:b] for a, b in itertools.pairwise(ends)]
    rounds = [stories[i : i + len(STORIES)] for i in range(0, len(stories) - len(STORIES) + 1, len(STORIES))]
    assert len(rounds) >= 5
    assert {frozenset(Counter(told).items()) for told in rounds} == {frozenset(Counter(rounds[0]).items())}
    assert max(Counter(rounds[0]).values()) == 1
    assert rounds[0] != rounds[1], "shuffled anew"


def test_the_seed_decides_the_stream():
    def first(seed):
        return next(stream_batches(STORIES, VOCABULARY, batch=3, length=40, seed=seed)).inputs

    torch.manual_seed(0)
    one = first(0)
    torch.manual_seed(1)
    assert torch.equal(one, first(0))
    assert not torch.equal(one, first(1))


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
            told.append((batch.tasks[row, 0].item(), *VOCABULARY.decode(batch.inputs[row, 1:length].tolist())))
    assert sorted(told) == sorted((story.task, *story.words()) for story in STORIES)


def test_counts_of_right_answers():
    (batch,) = story_batches(STORIES, VOCABULARY, batch=100)
    best = F.one_hot(batch.targets.clamp_min(0), len(VOCABULARY)).float()
    expected = {task: sum(len(s.questions) for s in STORIES if s.task == task) for task in GENERATORS}
    assert {task: count.questions for task, count in count_right(best, batch, VOCABULARY).items()} == expected
    assert all(count.right == count.questions for count in count_right(best, batch, VOCABULARY).values())
    assert all(count.right == 0 for count in count_right(-best, batch, VOCABULARY).values())
    first = (batch.targets[0] != -100).nonzero()[0]
    best[0, first] = -best[0, first]
    wrong = {task: count.questions - count.right for task, count in count_right(best, batch, VOCABULARY).items()}
    assert wrong == {task: int(task == batch.tasks[0, 0]) for task in GENERATORS}


def test_an_unknown_answer_is_never_right():
    vocabulary = Vocabulary(("<eos>", "<unk>", "?"), replace_unknown=True)
    batch = encode_story(Story(1, (Fact("a"), Question("b?", "c", (1,)))), vocabulary)
    best = F.one_hot(batch.targets.clamp_min(0), len(vocabulary)).float()
    assert count_right(best, batch, vocabulary) == {1: (0, 1)}


def test_a_batch_without_an_answer_counts_nothing():
    batch = encode_story(Story(1, (Fact("Mary left."),)), Vocabulary(("<eos>", "<unk>"), replace_unknown=True))
    assert count_right(torch.zeros(1, 4, 2), batch, Vocabulary(("<eos>", "<unk>"))) == {}


def test_padding_and_cuts_leave_an_explicit_model_as_it_is():
    torch.manual_seed(0)
    backbone = dq.Mamba2(dq.Mamba2Config(d_model=8, d_state=4, headdim=8, injection=False))
    lm = dq.CausalLM(len(VOCABULARY), dq.ExplicitModel(backbone)).double().eval()
    with torch.no_grad():
        (batch,) = story_batches(STORIES[:3] + STORIES[-3:], VOCABULARY, batch=6)
        together = lm(batch.inputs, targets=batch.targets, mask=batch.mask)
        alone = [lm(row[None, real]).logits[0] for row, real in zip(batch.inputs, batch.mask, strict=True)]
        assert torch.allclose(together.logits[batch.mask], torch.cat(alone), atol=1e-9)
        first, second = itertools.islice(stream_batches(STORIES, VOCABULARY, batch=2, length=60, seed=0), 2)
        before = lm(first.inputs, return_cache=True)
        after = lm(second.inputs, cache=before.cache)
        both = lm(torch.cat([first.inputs, second.inputs], dim=1))
        assert torch.allclose(torch.cat([before.logits, after.logits], dim=1), both.logits, atol=1e-9)


def test_a_model_trains_on_answers_alone():
    torch.manual_seed(0)
    backbone = dq.Mamba2(dq.Mamba2Config(d_model=8, d_state=4, headdim=8, injection=False))
    lm = dq.CausalLM(len(VOCABULARY), dq.ExplicitModel(backbone))
    batch = next(stream_batches(STORIES, VOCABULARY, batch=4, length=100, seed=0))
    output = lm(batch.inputs, targets=batch.targets)
    scored = batch.targets != -100
    answers = torch.stack([batch.inputs[row, place + 1] for row, place in scored[:, :-1].nonzero()])
    expected = F.cross_entropy(output.logits[:, :-1][scored[:, :-1]], answers)
    assert not scored[:, -1].any()
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_the_most_frequent_answer():
    def story(task, *answers):
        return Story(task, (Fact("a"), *(Question("b?", answer, (1,)) for answer in answers)))

    train = [story(1, "x", "Y"), story(1, "y"), story(2, "x")]
    assert count_most_frequent(train, [story(1, "y", "x", "Y", "z"), story(2, "y", "x"), story(3, "q")]) == {
        1: Count(2, 4),
        2: Count(1, 2),
        3: Count(0, 1),
    }
    assert count_most_frequent([Story(1, (Fact("a"),))], [story(1, "x"), Story(2, (Fact("a"),))]) == {1: Count(0, 1)}


def test_counts_are_added_up_task_by_task():
    assert merge_counts([{2: Count(1, 2)}, {}, {1: Count(0, 3), 2: Count(1, 5)}]) == {1: Count(0, 3), 2: Count(2, 7)}
    assert total([]) == Count(0, 0)
    with pytest.raises(ZeroDivisionError):
        _ = total([]).accuracy
