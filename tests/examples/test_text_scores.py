"""Bits per byte beside a loop over the tokens: nothing is left out, and nothing counts twice."""

import math

import pytest
import torch
from common.bits_per_byte import Rows, excerpts, rows_in_order, score
from common.tokenizer import load_tokenizer, train_tokenizer
from common.tokens import encode
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import affine, contractive_mamba2
from torch.nn import functional as F

import deqseq as dq

BYTES = load_tokenizer("bytes")
DOCUMENTS = ["to be or not to be", "", "é 🎭", "that is the question"]
BPE = train_tokenizer([*DOCUMENTS, "not to be or to be"], 262)
SIZE = sum(len(text.encode()) for text in DOCUMENTS)
TIGHT = dq.Stop(rtol=1e-7, max_steps=100)


def language_model(implicit=True):
    backbone = contractive_mamba2(injection=implicit)
    return dq.CausalLM(
        262, dq.ImplicitModel(backbone, dq.SolveConfig(stop=TIGHT)) if implicit else dq.ExplicitModel(backbone)
    ).double()


def rows(length, documents=DOCUMENTS, tokenizer=BPE):
    return rows_in_order(encode(documents, tokenizer), length)


@given(texts=st.lists(st.text(max_size=12), min_size=1, max_size=20).filter(any), length=st.integers(1, 9))
@settings(max_examples=60, deadline=None)
def test_every_token_is_a_target_once(texts, length):
    found, stream = rows(length, texts), encode(texts, BPE)
    count = len(stream.ids) - 1
    assert found.targets.flatten().tolist() == stream.ids[1:].tolist() + [-100] * (found.targets.numel() - count)
    assert found.inputs.flatten()[:count].tolist() == stream.ids[:-1].tolist()
    assert set(found.inputs.flatten()[count:].tolist()) <= {BPE.eos_token_id}
    assert found.targets.numel() - count < length
    assert found.text_bytes.sum() == len("".join(texts).encode())


class Bigrams(torch.nn.Module):
    """Random logits for the token after each token."""

    def __init__(self, size):
        super().__init__()
        weights = torch.randn(size, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        self.table = torch.nn.Parameter(weights)

    def forward(self, ids):
        return dq.CausalLMOutput(logits=self.table[ids])


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["bytes", "bpe"])
@pytest.mark.parametrize(("length", "batch_size"), [(4, 3), (7, 1), (100, 2)])
def test_bits_per_byte_of_whole_documents(tokenizer, length, batch_size):
    """Document by document and token by token, against the rows."""
    model, bits, tokens = Bigrams(len(tokenizer)), 0.0, 0
    for text in DOCUMENTS:
        before = tokenizer.eos_token_id
        for token in [*tokenizer(text).input_ids, tokenizer.eos_token_id] if text else []:
            bits -= model.table[before].log_softmax(0)[token].item() / math.log(2)
            before, tokens = token, tokens + 1
    found = score(model, rows(length, tokenizer=tokenizer), batch_size=batch_size)
    assert (found.tokens, found.text_bytes) == (tokens, SIZE)
    assert found.bits_per_byte == pytest.approx(bits / SIZE, rel=1e-6)


@pytest.mark.parametrize("implicit", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_losses_are_those_of_each_token(implicit, batch_size):
    lm = language_model(implicit).train()
    found = score(lm, rows(7), batch_size=batch_size)
    assert lm.training
    assert lm.model.backbone.training
    ids, by_position = torch.from_numpy(encode(DOCUMENTS, BPE).ids.astype("int64")), [[] for _ in range(7)]
    lm.eval()
    for begin in range(0, len(ids) - 1, 7):
        row = ids[begin : begin + 8]
        with torch.no_grad():
            logits = lm(row[None, :-1]).logits[0]
        for place, loss in enumerate(F.cross_entropy(logits, row[1:], reduction="none")):
            by_position[place].append(loss.item())
    flat = [loss for losses in by_position for loss in losses]
    assert found.tokens == len(flat) == len(ids) - 1
    assert found.nats == pytest.approx(sum(flat), rel=1e-5)
    assert found.by_position.tolist() == pytest.approx([sum(part) / len(part) for part in by_position], rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(sum(flat) / len(flat)), rel=1e-5)
    if implicit:
        assert found.converged == 1
        assert 3 < found.iterations < 200
    else:
        assert (found.iterations, found.updates, found.converged) == (None, None, None)


def test_sweeps_agree_and_sequential_work_is_less():
    lm, text = language_model(), rows(12).chosen([0, 1])
    together = score(lm, text, batch_size=2)
    one_by_one = score(lm, text, batch_size=2, sweep=dq.Sequential())
    assert one_by_one.nats == pytest.approx(together.nats, rel=1e-6)
    assert one_by_one.updates < together.updates


def test_rows_that_fill_the_last_batch_do_not_count():
    lm, text, done = language_model(), rows(4), []
    alone, filled = score(lm, text, batch_size=1), score(lm, text, batch_size=64, progress=done.append)
    assert done == [len(text.inputs)]
    assert (alone.tokens, alone.text_bytes) == (filled.tokens, filled.text_bytes)
    assert alone.nats == pytest.approx(filled.nats)
    assert alone.iterations == pytest.approx(filled.iterations)


def test_failed_solves_are_reported():
    assert score(language_model(), rows(7), batch_size=2, stop=dq.Stop(rtol=1e-9, max_steps=2)).converged == 0


def test_processes_share_the_rows():
    class Process:
        num_processes = 2

        def __init__(self, rank):
            self.process_index, self.sums = rank, None

        def reduce(self, value, how):
            assert how == "sum"
            self.sums = value
            return value

    lm, text = dq.CausalLM(262, dq.ImplicitModel(affine())).double(), rows(5)
    both = [Process(0), Process(1)]
    for process in both:
        score(lm, text, batch_size=4, accelerator=process)
    alone = score(lm, text, batch_size=4)
    total = both[0].sums + both[1].sums
    assert total[0] == alone.text_bytes
    assert total[5:10].sum() == pytest.approx(alone.nats)
    assert total[10:].sum() == alone.tokens


def test_the_same_excerpts_are_scored_whatever_the_length_of_the_rows():
    ids = torch.arange(1, 206).numpy()  # 204 targets: 12 excerpts of 16 and one of 12
    text = {n: rows_in_order((ids, ids), n) for n in (4, 8, 16)}
    found = {n: excerpts(text[n], 64, [4, 8, 16]) for n in text}
    targets = {n: sorted(found[n].targets[found[n].targets != -100].tolist()) for n in found}
    assert targets[4] == targets[8] == targets[16]
    assert targets[16] == [2 + start + i for start in (0, 48, 96, 144) for i in range(16)]
    for everything in (excerpts(text[4], 0, [4, 8]), excerpts(text[4], 10**6, [4, 8])):
        assert torch.equal(everything.targets, text[4].targets)


def test_bad_input():
    with pytest.raises(ValueError, match="documents must have text"):
        rows(4, ["", ""])
    with pytest.raises(ValueError, match="length must be an integer >= 1"):
        rows(0)
    with pytest.raises(ValueError, match="batch_size must be a multiple"):
        score(language_model(), rows(4), batch_size=0)
    with pytest.raises(ValueError, match="rows at least one"):
        score(language_model(), Rows(*(part[:0] for part in rows(4))), batch_size=1)
