"""A packed stream against the packed text, cut and resumed anywhere, shared by any number of ranks."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_documents import ListDocuments, PairEncoder

from deqseq.tasks.text import ByteEncoder, LocalDocuments, PackedStream, PackedText

TEXTS = st.lists(st.text(max_size=12), min_size=1, max_size=150).filter(any)


def stream(documents, length=3, batch_size=2, encoder=None, **options):
    return PackedStream(ListDocuments(documents), encoder or ByteEncoder(), length, batch_size=batch_size, **options)


def flat(batches, part):
    return [number for batch in batches for number in getattr(batch, part).flatten().tolist()]


@given(documents=TEXTS, length=st.integers(1, 9), batch_size=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_the_stream_is_the_packed_text_but_for_the_tail(documents, length, batch_size):
    text = PackedText.pack(documents, ByteEncoder(), length)
    batches = list(stream(documents, length, batch_size))
    assert len(batches) == text.rows // batch_size
    count = len(batches) * batch_size * length
    assert flat(batches, "targets") == text.tokens[1 : count + 1].tolist()
    assert flat(batches, "inputs") == text.tokens[:count].tolist()
    assert sum(flat(batches, "text_bytes")) == text.byte_counts[1 : count + 1].sum()
    assert all(batch.inputs.shape == batch.targets.shape == (batch_size, length) for batch in batches)


@given(documents=TEXTS, length=st.integers(1, 9), batch_size=st.integers(1, 5), data=st.data())
@settings(max_examples=60, deadline=None)
def test_resumes_exactly(documents, length, batch_size, data):
    whole = stream(documents, length, batch_size, repeat=True)
    done = data.draw(st.integers(0, 40))
    for _ in range(done):
        next(whole)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = stream(documents, length, batch_size, repeat=True)
    for _ in range(data.draw(st.integers(0, 3))):
        next(resumed)  # what it has read before is no matter
    resumed.load_state_dict(state)
    assert resumed.state_dict() == state
    for _ in range(10):
        expected, found = next(whole), next(resumed)
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@given(documents=TEXTS, world=st.sampled_from([1, 2, 3]), rows=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_ranks_share_the_batch(documents, world, rows):
    batch_size = world * rows
    ranks = [list(stream(documents, 4, batch_size, rank=rank, world=world)) for rank in range(world)]
    for whole, *parts in zip(stream(documents, 4, batch_size), *ranks, strict=True):
        for name in ("inputs", "targets", "text_bytes"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


def test_a_state_is_the_same_for_every_rank_and_serves_another_number_of_ranks():
    documents = [f"document number {i}" for i in range(50)]
    pair = [stream(documents, 5, 4, rank=rank, world=2) for rank in range(2)]
    for _ in range(7):
        _, _ = next(pair[0]), next(pair[1])
    assert pair[0].state_dict() == pair[1].state_dict()
    alone = stream(documents, 5, 4)
    alone.load_state_dict(pair[0].state_dict())
    assert next(alone).targets.tolist() == next(pair[0]).targets.tolist() + next(pair[1]).targets.tolist()


def test_repeating_loses_nothing():
    documents = ["abc", "de"]
    batches = stream(documents, 4, 1, repeat=True)
    targets = flat([next(batches) for _ in range(14)], "targets")
    assert targets == [*b"abc", 256, *b"de", 256] * 8


def test_it_does_not_read_ahead_of_a_group():
    documents = ListDocuments(["abcd"] * 500)
    packed = PackedStream(documents, PairEncoder(), 3, batch_size=2)
    assert documents.place == 0
    next(packed)
    assert documents.place == 64


def test_resuming_in_a_long_document_does_not_keep_its_tokens():
    documents = ["x" * 5000, "y" * 5000]
    packed = stream(documents, 100, 3)
    for _ in range(20):
        next(packed)
    assert packed.state_dict() == {"documents": {"place": 0}, "used": 6000, "before": ord("y")}


def test_local_files_resume(tmp_path):
    for name in "abc":
        lines = [json.dumps({"text": f"{name} line {i}"}) for i in range(70)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    whole = PackedStream(LocalDocuments(tmp_path), ByteEncoder(), 16, batch_size=4)
    rest = [list(part) for part in zip(*[iter(whole)] * 1, strict=True)]
    assert len(rest) == 3 * sum(len(f"a line {i}") + 1 for i in range(70)) // 64
    for done in (0, 1, 12, 13, 14, 25):
        first = PackedStream(LocalDocuments(tmp_path), ByteEncoder(), 16, batch_size=4)
        for _ in range(done):
            next(first)
        second = PackedStream(LocalDocuments(tmp_path), ByteEncoder(), 16, batch_size=4)
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        assert flat(second, "targets") == flat([batch for [batch] in rest[done:]], "targets")


def test_ends():
    packed = stream(["abc"], 2, 2)
    assert len(list(packed)) == 1
    assert list(packed) == []  # and stays at its end
    state = packed.state_dict()
    packed.load_state_dict(state)
    assert list(packed) == []
    assert list(stream(["a"], 5, 1)) == []


def test_bad_arguments():
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        stream(["abc"], 0)
    with pytest.raises(ValueError, match="batch_size must be a multiple of the number of processes 2, got 3"):
        stream(["abc"], 2, 3, world=2)
    with pytest.raises(ValueError, match="documents must have some text in them, got none"):
        next(stream(["", ""], 2, 2, repeat=True))
    assert list(stream([], 2, 2)) == []
