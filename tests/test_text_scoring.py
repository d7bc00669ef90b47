"""Scores of a text, beside a loop over its tokens."""

import math

import pytest
import torch
from small_models import affine, contractive_mamba2
from torch.nn import functional as F

import deqseq as dq
from deqseq.tasks.text import ByteEncoder, PackedText
from deqseq.tasks.text.scoring import score

DOCUMENTS = ["to be or not to be", "é 🎭", "that is the question"]
TIGHT = dq.Stop(rtol=1e-9, max_steps=200, per="token")


def language_model(implicit: bool = True) -> dq.CausalLM:
    backbone = contractive_mamba2(injection=implicit)
    return dq.CausalLM(257, dq.ImplicitModel(backbone, stop=TIGHT) if implicit else dq.ExplicitModel(backbone)).double()


@pytest.mark.parametrize("implicit", [True, False])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_losses_are_those_of_each_token(implicit, batch_size):
    lm, text = language_model(implicit).train(), PackedText.pack(DOCUMENTS, ByteEncoder(), length=7)
    found = score(lm, text, batch_size=batch_size)
    assert lm.training
    assert lm.model.backbone.training
    stream, by_position = torch.from_numpy(text.tokens.astype("int64")), [[] for _ in range(7)]
    lm.eval()
    for begin in range(0, len(stream) - 1, 7):
        row = stream[begin : begin + 8]
        with torch.no_grad():
            logits = lm(row[None, :-1]).logits[0]
        for place, loss in enumerate(F.cross_entropy(logits, row[1:], reduction="none")):
            by_position[place].append(loss.item())
    flat = [loss for losses in by_position for loss in losses]
    assert found.tokens == len(flat) == len(stream) - 1
    assert found.nats == pytest.approx(sum(flat), rel=1e-5)
    assert found.by_position.tolist() == pytest.approx([sum(part) / len(part) for part in by_position], rel=1e-5)
    assert found.text_bytes == sum(len(text.encode()) for text in DOCUMENTS)
    assert found.bits_per_byte == pytest.approx(sum(flat) / math.log(2) / found.text_bytes, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(sum(flat) / len(flat)), rel=1e-5)
    if implicit:
        assert found.converged == 1
        assert 3 < found.self_iterations < 200
    else:
        assert (found.self_iterations, found.updates, found.converged) == (None, None, None)


def test_sweeps_agree_and_sequential_work_is_less():
    lm, text = language_model(), PackedText.pack(DOCUMENTS, ByteEncoder(), length=16)
    together = score(lm, text, batch_size=2)
    one_by_one = score(lm, text, batch_size=2, sweep=dq.Sequential())
    assert one_by_one.nats == pytest.approx(together.nats, rel=1e-6)
    assert one_by_one.updates < together.updates


def test_filling_rows_do_not_count():
    lm, text = language_model(), PackedText.pack(["to be"], ByteEncoder(), length=4)
    alone, filled = score(lm, text, batch_size=1), score(lm, text, batch_size=8)
    assert (alone.tokens, alone.text_bytes) == (filled.tokens, filled.text_bytes)
    assert alone.nats == pytest.approx(filled.nats)
    assert alone.self_iterations == pytest.approx(filled.self_iterations)


def test_a_part_of_the_text():
    lm, text = dq.CausalLM(257, dq.ImplicitModel(affine())).double(), PackedText.pack(DOCUMENTS, ByteEncoder(), 5)
    seen: list[int] = []
    found = score(lm, text, batch_size=2, rows=[0, 2, 5], progress=seen.append)
    assert (found.tokens, seen) == (15, [2, 2])
    each = [score(lm, text, batch_size=1, rows=[row]) for row in (0, 2, 5)]
    assert found.nats == pytest.approx(sum(one.nats for one in each))
    assert len({round(one.nats, 6) for one in each}) == 3
    for rows in ([], [-1], [10_000]):
        with pytest.raises(ValueError, match=r"rows must be a list of numbers from 0 to .*, at least one, got"):
            score(lm, text, batch_size=2, rows=rows)


def test_failed_solves_are_reported():
    lm, text = language_model(), PackedText.pack(DOCUMENTS, ByteEncoder(), length=7)
    assert score(lm, text, batch_size=2, stop=dq.Stop(rtol=1e-9, max_steps=2)).converged == 0
