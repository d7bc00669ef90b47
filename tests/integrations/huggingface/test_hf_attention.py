"""Every attention implementation of transformers, and registered ones: the same states, with and
without a cache.
"""

import pytest
import torch
from hf_models import IDS, LEFT, made
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import flash_attention_mask

from deqseq.integrations.huggingface import DeqseqForCausalLM, from_causal_lm, retrofit

CALLS = []
"""The numbers of the layers that the registered functions were called for."""


def unpadded(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, sliding_window=None, **_
):
    """What flash attention computes: rows without padding, the last query at the last key."""
    assert module.config._attn_implementation == "unpadded" and module.is_causal
    CALLS.append(module.layer_idx)
    groups, rows = module.num_key_value_groups, []
    for row in range(len(query)):
        q, k, v = (
            query[row],
            key[row].repeat_interleave(groups, 0),
            value[row].repeat_interleave(groups, 0),
        )
        if attention_mask is not None:
            real = attention_mask[row]
            assert real.shape == (k.shape[1],) and real[-q.shape[1] :].all()
            k, v = k[:, real], v[:, real]
        distance = torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None] - torch.arange(
            k.shape[1]
        )
        unseen = (distance < 0) | (distance >= (sliding_window or len(distance[0])))
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
    """Of padded rows, of the tokens after them, whose cache has gaps, and of tokens that were
    generated in windows.
    """
    ids = IDS.masked_fill(~LEFT, 0)
    first = model(ids, attention_mask=LEFT.long(), use_cache=True)
    seen = torch.cat([LEFT, torch.ones(3, 2, dtype=torch.bool)], dim=1).long()
    after = model(IDS[:, :2], attention_mask=seen, cache=first.cache)
    options = {
        "attention_mask": LEFT.long(),
        "do_sample": False,
        "pad_token_id": 0,
        "max_new_tokens": 4,
    }
    return torch.cat([first.logits[LEFT], after.logits.flatten(0, 1)]), model.generate(
        ids, **options
    )


@pytest.mark.parametrize("implementation", ["eager", "unpadded"])
@pytest.mark.parametrize("kind", ["llama", "explicit", "looped", "parts", "decoder"])
def test_the_same_states_by_every_function(kind, implementation):
    model = made(kind)
    expected, tokens = states(model)
    model.set_attn_implementation(implementation)
    found, same = states(model)
    tolerance = (
        1e-5 if (kind, implementation) == ("decoder", "eager") else 1e-12
    )  # which has a softmax in float32
    assert (found - expected).abs().max() < tolerance
    assert torch.equal(tokens, same)
    layers = {"llama": 2, "explicit": 2, "looped": 2, "parts": 2, "decoder": 4}[kind]
    assert set(CALLS) == (set(range(layers)) if implementation == "unpadded" else set())


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # of torch, for what transformers asks of it
@torch.no_grad()
def test_flex_attention():
    """In float32 and without a cache, which is what torch's C++ compiles on a CPU."""
    model = made("llama", solve={"stop": {"rtol": 1e-5}}).float()
    expected = model(IDS, use_cache=False).logits
    model.set_attn_implementation("flex_attention")
    assert (model(IDS, use_cache=False).logits - expected).abs().max() < 1e-4


def test_gradients_pass_through():
    model, gradients = (
        made("llama", solve={"gradient": {"name": "Phantom", "steps": 3}}).train(),
        [],
    )
    for implementation in ("sdpa", "eager", "unpadded"):
        model.set_attn_implementation(implementation)
        loss = model(IDS, labels=IDS).loss
        gradients.append(
            torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
        )
    for other in gradients[1:]:
        assert (
            max((one - two).abs().max() for one, two in zip(gradients[0], other, strict=True))
            < 1e-9
        )
    assert CALLS


def test_the_name_is_given_when_a_model_is_made_or_loaded(tmp_path):
    model = made("llama")
    model.save_pretrained(tmp_path)
    loaded = DeqseqForCausalLM.from_pretrained(tmp_path, attn_implementation="unpadded")
    assert not CALLS
    assert (loaded(IDS).logits - model(IDS).logits).abs().max() < 1e-12
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
    assert (first.logits - expected).abs().max() < 1e-12 and set(CALLS) == {0, 1}
    model(IDS[:, :1], cache=first.cache)
    with pytest.raises(ValueError, match=r'AttentionMaskInterface.register\("bare", function\)'):
        states(model)


@torch.no_grad()
def test_windows_of_a_decoder_count_real_tokens():
    """By flash attention, which gets them from the layers, and by masks."""
    from test_hf_decoder import made as decoder

    model = from_causal_lm(
        retrofit(decoder("mistral", sliding_window=4), prelude=1, core=2, coda=1)
    ).eval()
    expected, tokens = states(model)
    model.set_attn_implementation("unpadded")
    found, same = states(model)
    assert (found - expected).abs().max() < 1e-6 and torch.equal(tokens, same)


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
