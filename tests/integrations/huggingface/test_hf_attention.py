"""Attention implementations of transformers and registered ones: the same states by all."""

import pytest
import torch
from hf_models import IDS, LEFT, close, made
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from deqseq.integrations.huggingface import DeqseqForCausalLM, from_causal_lm, retrofit

CALLS = []
"""The numbers of the layers that the registered functions were called for."""


def unpadded(
    module, query, key, value, attention_mask, scaling, sliding_window=None, dropout=0.0, **_
):
    """What flash attention computes: rows without padding, the last query at the last key."""
    assert module.config._attn_implementation == "unpadded"
    assert module.is_causal
    CALLS.append(module.layer_idx)
    groups = module.num_key_value_groups
    rows = []
    for row, q in enumerate(query):
        k, v = (heads[row].repeat_interleave(groups, 0) for heads in (key, value))
        if attention_mask is not None:
            real = attention_mask[row]
            assert real.shape == (k.shape[1],)
            assert real[-q.shape[1] :].all()
            k = k[:, real]
            v = v[:, real]
        places = torch.arange(k.shape[1])
        distance = places[-q.shape[1] :, None] - places
        unseen = (distance < 0) | (distance >= (sliding_window or len(places)))
        rows.append((q @ k.mT * scaling).masked_fill(unseen, -torch.inf).softmax(-1) @ v)
    return torch.stack(rows).transpose(1, 2), None


def bare(module, query, key, value, attention_mask, **kwargs):
    """A function whose masks transformers cannot make."""
    assert attention_mask is None
    CALLS.append(module.layer_idx)
    return sdpa_attention_forward(module, query, key, value, None, **kwargs)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(AttentionInterface._global_mapping, "unpadded", unpadded)
    monkeypatch.setitem(AttentionInterface._global_mapping, "bare", bare)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "unpadded", flash_attention_mask)
    CALLS.clear()


@torch.no_grad()
def states(model):
    """Logits of padded rows and of tokens after them, whose cache has gaps; generated tokens."""
    ids = IDS.masked_fill(~LEFT, 0)
    mask = LEFT.long()
    first = model(ids, attention_mask=mask, use_cache=True)
    after = model(IDS[:, :2], attention_mask=F.pad(mask, (0, 2), value=1), cache=first.cache)
    options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 4}
    tokens = model.generate(ids, attention_mask=mask, **options)
    return torch.cat([first.logits[LEFT], after.logits.flatten(0, 1)]), tokens


@pytest.mark.parametrize("implementation", ["eager", "unpadded"])
@pytest.mark.parametrize("kind", ["llama", "explicit", "looped", "parts", "decoder"])
def test_the_same_states_by_every_function(kind, implementation):
    model = made(kind)
    expected, tokens = states(model)
    model.set_attn_implementation(implementation)
    found, same = states(model)
    in_float32 = (kind, implementation) == ("decoder", "eager")
    close(found, expected, 1e-5 if in_float32 else 1e-12)
    assert torch.equal(tokens, same)
    if implementation == "unpadded":
        assert set(CALLS) == set(range(4 if kind == "decoder" else 2))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # transformers asks torch for it
@torch.no_grad()
def test_flex_attention():
    """In float32 and without a cache, which is what torch's C++ compiles on a CPU."""
    model = made("llama", solve={"stop": {"rtol": 1e-5}}).float()
    expected = model(IDS, use_cache=False).logits
    model.set_attn_implementation("flex_attention")
    close(model(IDS, use_cache=False).logits, expected, 1e-4)


def test_gradients_pass_through():
    model = made("llama", solve={"gradient": {"name": "Phantom", "steps": 3}}).train()
    gradients = []
    for implementation in ("sdpa", "eager", "unpadded"):
        model.set_attn_implementation(implementation)
        loss = model(IDS, labels=IDS).loss
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    for expected, *others in zip(*gradients, strict=True):
        for other in others:
            close(other, expected, 1e-9)
    assert CALLS


def test_the_name_is_given_when_a_model_is_made_or_loaded(tmp_path):
    model = made("llama")
    model.save_pretrained(tmp_path)
    loaded = DeqseqForCausalLM.from_pretrained(tmp_path, attn_implementation="unpadded")
    assert not CALLS
    close(loaded(IDS).logits, model(IDS).logits)
    assert set(CALLS) == {0, 1}
    CALLS.clear()
    AutoModelForCausalLM.from_config(made("decoder").config, attn_implementation="unpadded")(IDS)
    assert set(CALLS) == {0, 1, 2, 3}


@torch.no_grad()
def test_a_function_without_masks_takes_equal_rows_and_refuses_others():
    model = made("llama")
    expected = model(IDS).logits
    model.set_attn_implementation("bare")
    first = model(IDS, use_cache=True)
    close(first.logits, expected)
    assert set(CALLS) == {0, 1}
    model(IDS[:, :1], cache=first.cache)
    with pytest.raises(ValueError, match=r'AttentionMaskInterface.register\("bare", function\)'):
        states(model)


@torch.no_grad()
def test_windows_of_a_decoder_count_real_tokens():
    """By flash attention, which gets them from the layers, and by masks."""
    from test_hf_decoder import made as decoder

    lm = retrofit(decoder("mistral", sliding_window=4), prelude=1, core=2, coda=1)
    model = from_causal_lm(lm).eval()
    expected, tokens = states(model)
    model.set_attn_implementation("unpadded")
    found, same = states(model)
    close(found, expected, 1e-6)
    assert torch.equal(tokens, same)


@pytest.mark.parametrize(
    ("kind", "name", "error", "message"),
    [
        ("llama", "flex", ValueError, '"flex"'),
        ("llama", "flash_attention_2", ImportError, "FlashAttention2"),
        ("llama", None, TypeError, "None"),
        ("decoder", "flex_attention", ValueError, "StableLmModel does not support"),
    ],
)
def test_a_name_that_cannot_be_used_changes_nothing(kind, name, error, message):
    model = made(kind)
    with pytest.raises(error, match=message):
        model.set_attn_implementation(name)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda q: None, "what the attention function 'bare' returns must be a tuple, got None"),
        (lambda q: q.transpose(1, 2), "what the attention function 'bare' returns must be a tuple"),
        (lambda q: (q, None), "must keep the shape"),
    ],
)
def test_what_a_registered_function_returns_is_checked(monkeypatch, returned, message):
    def answer(module, query, *rest, **options):
        return returned(query)

    monkeypatch.setitem(AttentionInterface._global_mapping, "bare", answer)
    model = made("llama")
    model.set_attn_implementation("bare")
    with pytest.raises((TypeError, ValueError), match=message):
        model(IDS)
