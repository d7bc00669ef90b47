"""Training batches: rows by their definition, each once an epoch, resumed exactly, shared by processes."""

import json
from itertools import chain

import datasets
import pytest
import torch
from common import tokens
from common.text import hub_documents, load_corpus
from common.tokenizer import load_tokenizer
from common.tokens import Batches, tokenised
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

BYTES = load_tokenizer("bytes")
EOS = BYTES.eos_token_id
TEXTS = st.lists(st.text(max_size=12), min_size=1, max_size=30).filter(lambda texts: len("".join(texts)) > 9)


def dataset(texts):
    return tokenised(Dataset.from_dict({"text": texts}), BYTES)


def batches(documents, length=3, batch_size=2, **options):
    return Batches(documents, EOS, length, batch_size, **options)


def stream(texts):
    """A block of documents, token by token."""
    ids = [EOS]
    for text in texts:
        ids += [*BYTES(text, split_special_tokens=True).input_ids, EOS] if text else []
    return ids


def rows_by_definition(texts, length):
    ids = stream(texts)
    return [ids[i * length : (i + 1) * length + 1] for i in range((len(ids) - 1) // length)]


def rows_of(batch):
    assert torch.equal(batch.inputs[:, 1:], batch.targets[:, :-1])
    return torch.cat([batch.inputs, batch.targets[:, -1:]], dim=1).tolist()


def taken(source, rows):
    """So many rows, which may end within a batch."""
    found = []
    while len(found) < rows:
        found += rows_of(next(source))
    return found[:rows]


@given(texts=TEXTS, length=st.integers(1, 9), batch_size=st.integers(1, 5), seed=st.integers(0, 2**70))
@settings(max_examples=30, deadline=None)
def test_an_epoch_is_every_row_once(texts, length, batch_size, seed):
    expected = sorted(rows_by_definition(texts, length))
    found = taken(batches(dataset(texts), length, batch_size, seed=seed), 3 * len(expected))
    for epoch in range(3):
        assert sorted(found[epoch * len(expected) : (epoch + 1) * len(expected)]) == expected


def test_the_order_depends_on_seed_and_epoch_alone():
    documents = dataset(["".join(chr(65 + i % 50) * 3 for i in range(200))])
    rows = len(documents["ids"][0]) // 3

    def epochs(seed):
        source = batches(documents, seed=seed)
        return taken(source, rows), taken(source, rows)

    first = epochs(0)
    torch.manual_seed(123)
    assert epochs(0) == first
    orders = [*first, *epochs(1)]
    assert all(orders[i] != orders[j] for i in range(4) for j in range(i))  # seed + epoch would give two the same


@given(texts=TEXTS, length=st.integers(1, 9), batch_size=st.integers(1, 5), data=st.data())
@settings(max_examples=40, deadline=None)
def test_resumes_exactly(texts, length, batch_size, data):
    documents = dataset(texts)
    whole = batches(documents, length, batch_size)
    for _ in range(data.draw(st.integers(0, 40))):
        next(whole)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = batches(documents, length, batch_size)
    for _ in range(data.draw(st.integers(0, 3))):
        next(resumed)  # what it has read before does not matter
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for _ in range(8):
        for expected, found in zip(next(whole), next(resumed), strict=True):
            assert torch.equal(expected, found)


@pytest.fixture(params=["a data set", "a stream"])
def many(request, tmp_path, monkeypatch):
    """More documents than a block has, and their texts."""
    monkeypatch.setattr(tokens, "BLOCK", 4)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    texts = [f"document number {i}" for i in range(22)]
    if request.param == "a data set":
        return dataset(texts), texts
    folder = tmp_path / "hub"
    folder.mkdir()
    for part in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[part * 8 : (part + 1) * 8]]
        (folder / f"train-{part}.jsonl").write_text("".join(lines))
    return tokenised(hub_documents(str(folder)), BYTES), texts


def test_many_documents_are_shuffled_in_blocks(many):
    documents, texts = many
    length = 2
    source, seen = batches(documents, length, 1), []
    while source.state_dict()["epoch"] < 2:
        (row,) = rows_of(next(source))
        seen.append((source.state_dict()["epoch"], row))
    epochs = [[row for number, row in seen if number == epoch] for epoch in range(2)]
    size = len(stream(texts)) - 1
    for rows in epochs:
        assert size - 6 * length < len(rows) * length <= size  # less than a row is left out of each block
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("done", [0, 1, 7, 30, 61, 150])
def test_many_documents_resume_exactly(many, done):
    documents, _ = many
    whole = batches(documents, 5, 3)
    for _ in range(done):
        next(whole)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = batches(documents, 5, 3)
    next(resumed)
    resumed.load_state_dict(state)
    for _ in range(40):  # over the end of an epoch
        assert rows_of(next(resumed)) == rows_of(next(whole))


@pytest.mark.parametrize("world", [2, 3])
def test_processes_share_each_batch(many, world):
    documents, _ = many
    whole, parts = batches(documents, 5, 6), [batches(documents, 5, 6, rank=r, world=world) for r in range(world)]
    for _ in range(40):  # over the end of an epoch
        shares = [rows_of(next(part)) for part in parts]
        assert {len(share) for share in shares} == {6 // world}
        assert list(chain(*shares)) == rows_of(next(whole))
        assert all(part.state_dict() == whole.state_dict() for part in parts)
    alone = batches(documents, 5, 6)
    alone.load_state_dict(parts[0].state_dict())  # another number of processes goes on
    assert rows_of(next(alone)) == list(chain(*(rows_of(next(part)) for part in parts)))


def test_a_batch_larger_than_the_text():
    batch = next(batches(dataset(["abcdef"]), 2, 9))
    rows = rows_by_definition(["abcdef"], 2)
    assert len(rows) == 3
    assert sorted(rows_of(batch)) == sorted(rows * 3)
    assert [part.dtype for part in batch] == [torch.int64] * 2


def test_held_out_documents_are_never_trained_on(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "x.txt").write_text("a text")
    for held_out in (whole, whole / "x.txt"):
        with pytest.raises(ValueError, match="held_out must not lie in the corpus"):
            load_corpus(str(whole), held_out=str(held_out))
    texts = [chr(0x4E00 + i) * 9 for i in range(60)]  # each document has a character of its own
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train, held_out = load_corpus(str(tmp_path / "a.jsonl"))
    assert held_out == texts[57:]
    ids = stream(texts[:57])
    source = batches(tokenised(train, BYTES), 4, 5)
    seen = taken(source, 2 * (len(ids) // 4))
    text = "".join(BYTES.decode([token for row in seen for token in row if token != EOS], errors="replace"))
    assert not set(text) & set("".join(held_out))
    forbidden = {tuple(stream([text])[i : i + 3]) for text in held_out for i in (1, 4, 7)}  # the bytes of a character
    assert not any(tuple(row[i : i + 3]) in forbidden for row in seen for i in range(3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length must be an integer >= 1"),
        ({"seed": -1}, "seed must be an integer >= 0"),
        ({"batch_size": 0}, "batch_size must be an integer >= 1, got 0"),
        ({"batch_size": 3, "world": 2}, "batch_size must be a multiple of the number of processes 2, got 3"),
        ({"world": 0}, "world must be an integer >= 1, got 0"),
        ({"rank": 2, "world": 2}, "rank must be an integer in 0.."),
        ({"rank": -1}, "rank must be an integer in 0.."),
    ],
)
def test_bad_numbers(options, message):
    with pytest.raises(ValueError, match=message):
        batches(dataset(["abcdef"]), **options)


def test_less_than_a_row():
    for texts in (["abc"], ["", ""]):
        with pytest.raises(ValueError, match="fewer than 10 tokens"):
            next(batches(dataset(texts), 9))
    with pytest.raises(ValueError, match="documents must be strings, got NoneType"):
        dataset(["abc", None])
