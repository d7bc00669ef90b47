"""A batched chat: short answers are filled with padding, and the next turn follows behind it."""

import pytest
import torch
from hf_models import EVERY, IDS, close, made
from transformers import LlamaConfig, LlamaForCausalLM

from deqseq.integrations.huggingface import (
    ImplicitCache,
    from_causal_lm,
    from_decoder,
    to_causal_lm,
)

GAPS = torch.tensor([[1, 1, 0, 0, 1, 0, 1], [0, 1, 1, 1, 0, 1, 1], [1] * 7]) > 0
GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}


@pytest.fixture
def theirs():
    """A small Llama of transformers that ends some answers before others."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 13}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(config).double().eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return model


def turns(model, **options):
    """Tokens and mask of a chat of three turns, in which each row's answer ends where it ends."""
    ids, mask = torch.empty(3, 0, dtype=torch.int64), torch.empty(3, 0, dtype=torch.int64)
    for turn in range(3):
        ids = torch.cat([ids, IDS[:, 2 * turn : 2 * turn + 3]], dim=1)
        mask = torch.cat([mask, torch.ones(3, 3, dtype=torch.int64)], dim=1)
        before = ids.shape[1]
        ids = model.generate(ids, attention_mask=mask, eos_token_id=[3, 8], **GREEDY, **options)
        made = (ids[:, before:] != 0).long()
        mask = torch.cat([mask, made], dim=1)
    return ids, mask


def test_three_turns_are_those_of_transformers(theirs):
    ours = from_causal_lm(from_decoder(theirs))
    expected, mask = turns(theirs)
    inside = (mask[:, 1:] > mask[:, :-1]).any(dim=1)
    assert inside.any()  # a row with padding between two turns
    found, _ = turns(ours)
    assert torch.equal(found, expected)
    with torch.no_grad():
        positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
        logits = theirs(expected, attention_mask=mask, position_ids=positions).logits
        for call in ({}, {"position_ids": positions}):
            close(ours(expected, attention_mask=mask, **call).logits[mask > 0], logits[mask > 0])


def test_a_cache_of_answers_that_ended_before_others_is_refused(theirs):
    ours = from_causal_lm(from_decoder(theirs))
    with pytest.raises(ValueError, match=r"behind the end of a row .*: leave the cache out"):
        turns(ours, cache=ImplicitCache())


def test_a_cache_goes_on_behind_a_gap(theirs):
    ours = from_causal_lm(from_decoder(theirs))
    mask = GAPS.long()
    whole = ours.generate(IDS, attention_mask=mask, **GREEDY)
    cache = ImplicitCache()
    with torch.no_grad():
        ours(IDS[:, :5], attention_mask=mask[:, :5], cache=cache)
    assert torch.equal(ours.generate(IDS, attention_mask=mask, cache=cache, **GREEDY), whole)


@EVERY
@torch.no_grad()
def test_a_row_with_gaps_is_the_row_without_them(kind):
    model = made(kind)
    together = model(IDS, attention_mask=GAPS.long())
    lm = to_causal_lm(model)
    generated = lm.generate(IDS, mask=GAPS, max_new_tokens=4).tokens
    for row, real, output, tokens in zip(IDS, GAPS, together.logits, generated, strict=True):
        close(output[real], model(row[None, real]).logits[0])
        assert torch.equal(lm.generate(row[None, real], max_new_tokens=4).tokens[0], tokens)


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[1, 1, 1, 2, 2, 2, 2]]).expand(3, 7),
        torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -torch.inf]]).expand(3, 7),
        torch.tensor([[1.0, 1.0, 1.0, 1.0, 1.0, 1.0, torch.nan]]).expand(3, 7),
    ],
)
def test_masks_of_segments_and_of_scores_are_refused(mask):
    with pytest.raises(ValueError, match="attention_mask must have 1 at tokens and 0 at padding"):
        made("llama")(IDS, attention_mask=mask)
