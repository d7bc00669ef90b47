"""Assisted decoding: the tokens of greedy search, from drafts of another model or of the prompt."""

import copy

import pytest
import torch
from hf_models import IDS, LEFT, close, made
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

CROPPABLE = pytest.mark.parametrize("kind", ["llama", "explicit", "looped", "decoder"])
GREEDY = {"max_new_tokens": 8, "do_sample": False}
"""Without a padding token: transformers takes it for padding where a draft contains it."""


def small():
    """A model of transformers that drafts."""
    sizes = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    torch.manual_seed(1)
    config = LlamaConfig(**sizes, num_attention_heads=2, bos_token_id=None, eos_token_id=None)
    return LlamaForCausalLM(config).double().eval()


class Spy:
    """How many tokens each call of a model gets."""

    def __init__(self, model):
        self.lengths = []
        model.register_forward_pre_hook(self.note, with_kwargs=True)

    def note(self, model, arguments, keywords):
        self.lengths.append(keywords["input_ids"].shape[1])


@CROPPABLE
def test_drafts_do_not_change_greedy_tokens(kind):
    model = made(kind)
    ids = IDS[1:2].masked_fill(~LEFT[1:2], 0)
    mask = LEFT[1:2].long()
    expected = model.generate(ids, attention_mask=mask, **GREEDY)
    assert len(expected[0, 7:].unique()) > 1 or kind == "explicit"
    drafts = [
        {"assistant_model": copy.deepcopy(model)},
        {"assistant_model": small()},
        {"prompt_lookup_num_tokens": 3},
    ]
    calls = []
    for options in drafts:
        spy = Spy(model)
        options |= GREEDY | {"return_dict_in_generate": True}
        found = model.generate(ids, attention_mask=mask, **options)
        assert torch.equal(found.sequences, expected)
        assert found.cache.get_seq_length() in (13, 14)
        calls.append(len(spy.lengths))
        assert max(spy.lengths[1:]) > 1
    assert calls[0] < 6  # the model itself drafts what is taken


def test_our_models_draft_for_those_of_transformers():
    theirs = small()
    expected = theirs.generate(IDS[:1], **GREEDY)
    for kind in ("llama", "explicit"):
        assert torch.equal(theirs.generate(IDS[:1], assistant_model=made(kind), **GREEDY), expected)


@CROPPABLE
@torch.no_grad()
def test_a_cropped_cache_goes_on_as_if_the_tokens_had_not_been(kind):
    model = made(kind)
    mask = LEFT.long()
    cache = model(IDS[:, :6], attention_mask=mask[:, :6]).cache
    whole = copy.copy(cache)
    longer = copy.copy(cache)
    assert longer.is_croppable
    model(IDS[:, :4], attention_mask=F.pad(mask[:, :6], (0, 4), value=1), cache=longer)
    longer.crop(-3)
    assert longer.get_seq_length() == 7
    longer.crop(-1)
    expected = model(IDS[:, 6:], attention_mask=mask, cache=copy.copy(cache)).logits
    for one in (longer, whole):  # the one that was cropped writes nothing into the other
        close(model(IDS[:, 6:], attention_mask=mask, cache=one).logits, expected)
    with pytest.raises(ValueError, match="tokens_to_remove must be -7 to 0, got -8"):
        longer.crop(-8)
    with pytest.raises(ValueError, match="must take equally many from all rows, -6 does not"):
        longer.crop(-6)


@pytest.mark.parametrize("kind", ["mamba2", "parts"])
def test_a_recurrent_state_cannot_take_tokens_back(kind):
    recurrent = made(kind)
    explicit = made("explicit")
    for model, assistant in ((recurrent, explicit), (explicit, recurrent)):
        with pytest.raises(ValueError, match=r"state of a Mamba2 \(backbone\) cannot"):
            model.generate(IDS[:1], assistant_model=assistant, **GREEDY)
    cache = recurrent(IDS[:, :4]).cache
    assert not cache.is_croppable
    cache.crop(0)
    with pytest.raises(ValueError, match=r"cannot be cropped: .*Keep the cache"):
        cache.crop(-1)
    assert cache.get_seq_length() == 4
