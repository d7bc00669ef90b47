"""Packed text: the stream by its definition, what each rank sees, the order of rows, and bits per byte."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from text_documents import PairEncoder, byte_stream
from torch.nn import functional as F

from deqseq.tasks.text import ByteEncoder, PackedText, bits_per_byte

TEXTS = st.lists(st.text(max_size=12), min_size=1, max_size=80).filter(any)


def pack(documents, length):
    return PackedText.pack(documents, ByteEncoder(), length)


@given(documents=TEXTS, length=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_the_stream_is_the_documents_each_ended(documents, length):
    text = pack(documents, length)
    tokens, sizes = byte_stream(documents)
    assert text.tokens.tolist() == tokens
    assert text.byte_counts.tolist() == sizes
    assert text.text_bytes == len("".join(documents).encode())
    assert text.rows == (len(tokens) - 1) // length


@given(documents=TEXTS, length=st.integers(1, 9), world=st.sampled_from([1, 2, 3]), rows=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_in_order_every_token_is_a_target_once(documents, length, world, rows):
    text = pack(documents, length)
    tokens, _ = byte_stream(documents)
    ranks = [list(text.in_order(rows * world, rank=rank, world=world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    inputs, targets, sizes = [], [], 0
    for parts in zip(*ranks, strict=True):
        for batch in parts:
            assert batch.inputs.shape == batch.targets.shape == (rows, length)
            inputs += batch.inputs.flatten().tolist()
            targets += batch.targets.flatten().tolist()
            sizes += int(batch.text_bytes.sum())
    count = len(tokens) - 1
    assert targets == tokens[1:] + [-100] * (len(targets) - count)
    assert inputs[:count] == tokens[:-1]
    assert set(inputs[count + 1 :]) <= {256}
    assert len(targets) - count < rows * world * length
    assert sizes == text.text_bytes


def test_named_rows_alone_come_in_their_order():
    text = pack(["To be, or not to be, that is the question:"], 4)
    whole = list(text.in_order(1))
    (some,) = text.in_order(4, rows=[5, 0, len(whole) - 1])
    for row, index in enumerate([5, 0, len(whole) - 1]):
        assert some.targets[row].tolist() == whole[index].targets[0].tolist()
        assert some.inputs[row].tolist() == whole[index].inputs[0].tolist()
    assert set(some.targets[3].tolist()) == {-100} and int(some.text_bytes[3]) == 0


@given(seed=st.integers(0, 2**70), length=st.integers(1, 7), world=st.sampled_from([1, 2, 4]), rows=st.integers(1, 5))
@settings(max_examples=60, deadline=None)
def test_an_epoch_is_every_row_once(seed, length, world, rows):
    text = pack(["To be, or not to be, that is the question:", "Whether 'tis nobler in the mind"], length)
    batch_size, epochs = rows * world, 3
    steps = math.ceil(epochs * text.rows / batch_size)
    seen = []
    for step in range(steps):
        parts = [text.batch(step, batch_size=batch_size, seed=seed, rank=r, world=world) for r in range(world)]
        whole = text.batch(step, batch_size=batch_size, seed=seed)
        assert torch.equal(torch.cat([part.inputs for part in parts]), whole.inputs)
        assert torch.equal(torch.cat([part.text_bytes for part in parts]), whole.text_bytes)
        assert torch.equal(whole.inputs[:, 1:], whole.targets[:, :-1])
        seen += [tuple(row) for row in torch.cat([part.targets for part in parts]).tolist()]
    ordered = [tuple(text.tokens[1 + i * length : 1 + (i + 1) * length].tolist()) for i in range(text.rows)]
    for epoch in range(epochs):
        assert sorted(seen[epoch * text.rows : (epoch + 1) * text.rows]) == sorted(ordered)


def test_order_depends_on_seed_and_epoch_alone():
    text = pack(["".join(chr(65 + i % 50) * 3 for i in range(200))], 3)

    def epoch(number, seed):
        steps = range(number * text.rows, (number + 1) * text.rows)
        return [text.batch(step, batch_size=1, seed=seed).inputs.tolist() for step in steps]

    first = epoch(0, seed=0)
    others = [epoch(1, seed=0), epoch(0, seed=1), epoch(1, seed=1)]
    assert all(first != other for other in others)
    assert others[0] != others[1]  # seed + epoch would make these two the same
    torch.manual_seed(123)
    assert epoch(0, seed=0) == first


def test_a_batch_larger_than_the_text():
    text = pack(["abcdef"], 2)
    assert text.rows == 3
    batch = text.batch(0, batch_size=9, seed=0)
    assert sorted(batch.targets.tolist()) == sorted([[97, 98], [99, 100], [101, 102]] * 3)
    assert batch.text_bytes.tolist() == [2] * 9


def test_smallest_types():
    assert pack(["abc"], 1).tokens.dtype == np.uint16
    assert pack(["abc"], 1).byte_counts.dtype == np.uint8
    text = PackedText.pack(["\x00\x01\x00\x01"], PairEncoder(), 1)
    assert text.tokens.dtype == np.uint16  # 10 + 251
    assert text.tokens.tolist() == [7, 261, 261, 7]
    assert PackedText.pack(["\x00\x00"], PairEncoder(), 1).tokens.dtype == np.uint8
    batch = text.batch(0, batch_size=1, seed=0)
    assert [part.dtype for part in batch] == [torch.int64] * 3


def test_documents_are_encoded_in_groups():
    encoder = PairEncoder()
    PackedText.pack(["ab"] * 130 + ["c" * 2**20, "d", "e"], encoder, 4)
    assert encoder.calls == [64, 64, 3, 2]


def test_bits_per_byte_against_a_loop():
    """A model of random logits, document by document and byte by byte, against the packed evaluation."""
    documents = ["To be, or not to be", "né 🎭", "x"]
    table = torch.randn(257, 257, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    bits, size = 0.0, 0
    for document in documents:
        before = 256
        for token in [*document.encode(), 256]:
            bits -= float(table[before].log_softmax(0)[token]) / math.log(2)
            before = token
        size += len(document.encode())
    text = PackedText.pack(documents, ByteEncoder(), length=4)
    nats, counted = 0.0, 0
    for batch in text.in_order(3):
        nats += float(F.cross_entropy(table[batch.inputs].flatten(0, 1), batch.targets.flatten(), reduction="sum"))
        counted += int(batch.text_bytes.sum())
    assert counted == size == 19 + 8 + 1
    assert bits_per_byte(nats, counted) == pytest.approx(bits / size, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"step": -1}, "step must be at least 0, got -1"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"world": 0}, "world must be at least 1, got 0"),
        ({"rank": 2, "world": 2}, r"rank must lie in 0\.\.1, got 2"),
        ({"rank": -1}, r"rank must lie in 0\.\.0, got -1"),
        ({"batch_size": 3, "world": 2}, "batch_size must be a multiple of the number of processes 2, got 3"),
    ],
)
def test_bad_batches(arguments, text):
    with pytest.raises(ValueError, match=text):
        pack(["abcdef"], 2).batch(**{"step": 0, "batch_size": 2, "seed": 0, **arguments})


def test_bad_texts():
    with pytest.raises(ValueError, match="length must be at least 1, got 0"):
        pack(["abc"], 0)
    with pytest.raises(ValueError, match="documents must have some text in them, got none"):
        pack(["", ""], 2)
    with pytest.raises(TypeError, match="got one string: put it in a list"):
        pack("abc", 2)
    with pytest.raises(TypeError, match="documents must be strings, got int"):
        pack(iter([3]), 2)
    with pytest.raises(ValueError, match="lone surrogate"):
        pack(["a\ud800"], 2)
    with pytest.raises(ValueError, match="the text must have at least 10 tokens, got 5"):
        pack(["abc"], 9).batch(0, batch_size=1, seed=0)
    with pytest.raises(ValueError, match=r"must have one size, at least 2, got \(1,\) and \(1,\)"):
        PackedText(np.zeros(1, np.uint8), np.zeros(1, np.uint8), 1)
    with pytest.raises(ValueError, match="text_bytes must be at least 1, got 0"):
        bits_per_byte(1.0, 0)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        pack(["abc"], 2).in_order(0)  # at the call, not at the first batch
