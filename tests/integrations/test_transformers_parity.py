"""Explicit models compute what ``transformers`` computes from the same weights: logits, padding, cached decoding."""

import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import transformers

import deqseq as dq

LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 16


def llama(scaled: bool, tied: bool = True) -> tuple[dq.CausalLM, torch.nn.Module]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        rms_norm_eps=1e-5,
        tie_word_embeddings=tied,
        initializer_range=0.3,
        rope_parameters=LLAMA3 if scaled else {"rope_type": "default", "rope_theta": 10000.0},
    )
    ours = dq.LlamaConfig(
        d_model=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        headdim=12,
        mlp_width=48,
        rope_theta=10000.0,
        rope_scaling=dq.layers.RotaryScaling(original_length=16) if scaled else None,
        weight_norm=False,
        injection=False,
    )
    return twins(dq.Llama(ours), transformers.LlamaForCausalLM(config), "model.embed_tokens.", "model.", tied)


def mamba2() -> tuple[dq.CausalLM, torch.nn.Module]:
    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        head_dim=16,
        num_heads=4,
        n_groups=2,
        state_size=8,
        chunk_size=8,
        tie_word_embeddings=True,
        initializer_range=0.3,
        time_step_limit=(0.0, float("inf")),
    )
    ours = dq.Mamba2Config(
        d_model=32, n_layers=2, headdim=16, n_groups=2, d_state=8, chunk_size=5, weight_norm=False, injection=False
    )
    return twins(dq.Mamba2(ours), transformers.Mamba2ForCausalLM(config), "backbone.embeddings.", "backbone.")


def twins(backbone, theirs, embedding: str, prefix: str, tied: bool = True) -> tuple[dq.CausalLM, torch.nn.Module]:
    """Our explicit model with their weights, by name."""
    lm = dq.CausalLM(50, dq.ExplicitModel(backbone), tied=tied)
    weights = {}
    for name, tensor in theirs.state_dict().items():
        if name.startswith(embedding):
            weights["embedding.weight"] = tensor
        elif name.startswith(prefix):
            weights["model.backbone." + name.removeprefix(prefix)] = tensor
        elif not tied:
            weights["head.weight"] = tensor
    lm.load_state_dict(weights)
    return lm.eval(), theirs.eval()


MODELS = pytest.mark.parametrize(
    "make",
    [lambda: llama(False), lambda: llama(True), lambda: llama(False, tied=False), mamba2],
    ids=["Llama", "Llama 3.x", "Llama, untied head", "Mamba2"],
)
IDS = torch.randint(0, 50, (3, 21), generator=torch.Generator().manual_seed(0))


def close(ours, theirs):
    assert theirs.std() > 0.1
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


@MODELS
@torch.no_grad()
def test_logits(make):
    ours, theirs = make()
    close(ours(IDS).logits, theirs(IDS).logits)


@MODELS
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_batches(make, side):
    ours, theirs = make()
    mask = torch.arange(21) < torch.tensor([21, 9, 14])[:, None]
    mask = mask.flip(1) if side == "left" else mask
    positions = {} if make is mamba2 else {"position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)}
    expected = theirs(IDS, attention_mask=mask.long(), **positions).logits
    got = ours(IDS, mask=mask).logits
    close(got[mask], expected[mask])
    assert got[~mask].abs().max() == 0


@MODELS
@torch.no_grad()
def test_cached_decoding(make):
    ours, theirs = make()
    mine = ours(IDS[:, :15], return_cache=True)
    other = theirs(IDS[:, :15], use_cache=True)
    for t in range(15, 21):
        close(mine.logits[:, -1], other.logits[:, -1])
        mine = ours(IDS[:, t : t + 1], cache=mine.cache, return_cache=True)
        other = theirs(IDS[:, t : t + 1], use_cache=True, cache=other.cache)
    close(mine.logits[:, -1], other.logits[:, -1])


@MODELS
@torch.no_grad()
def test_cached_decoding_of_a_left_padded_batch(make):
    ours, theirs = make()
    mask = (torch.arange(21) < torch.tensor([21, 15, 18])[:, None]).flip(1)
    mine = ours(IDS[:, :15], mask=mask[:, :15], return_cache=True)
    other = theirs(IDS[:, :15], attention_mask=mask[:, :15].long(), use_cache=True, **positions(make, mask, 0, 15))
    for t in range(15, 21):
        mine = ours(IDS[:, t : t + 1], cache=mine.cache, return_cache=True)
        known = mask[:, t : t + 1] if make is mamba2 else mask[:, : t + 1]
        options = {"cache": other.cache, "attention_mask": known.long()} | positions(make, mask, t, t + 1)
        other = theirs(IDS[:, t : t + 1], use_cache=True, **options)
        close(mine.logits[:, -1], other.logits[:, -1])


def positions(make, mask, start: int, stop: int) -> dict:
    """What generate() would pass to a transformer."""
    if make is mamba2:
        return {}
    return {"position_ids": (mask.long().cumsum(1) - 1).clamp(min=0)[:, start:stop]}


@MODELS
def test_gradients(make):
    ours, theirs = make()
    ours(IDS, labels=IDS).loss.backward()
    theirs(IDS, labels=IDS).loss.backward()
    theirs = {name.partition(".")[2]: p.grad for name, p in theirs.named_parameters()}
    checked = 0
    for name, parameter in ours.named_parameters():
        other = theirs.get(name.removeprefix("model.backbone."))
        if other is not None:
            assert (parameter.grad - other).norm() < 1e-4 * other.norm(), name
            checked += 1
    assert checked >= 19
