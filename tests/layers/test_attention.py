"""Attention and rotary positions against softmax and complex numbers written out."""

import pytest
import torch
from small_models import randn

from deqseq import layers
from deqseq.layers import Attention, RotaryScaling, rotary_frequencies, rotary_tables
from deqseq.layers.attention import KeyValues, Past


def tables(length, headdim, theta):
    frequencies = rotary_frequencies(headdim, theta)
    return rotary_tables(torch.arange(length)[None], frequencies, torch.float64)


def test_rotary_scaling_leaves_high_frequencies_and_divides_low_ones():
    plain, scaled = (
        rotary_frequencies(64, 500000.0, scaling)
        for scaling in (None, RotaryScaling(8.0, 1.0, 4.0, 8192))
    )
    wavelength = 2 * torch.pi / plain
    high = wavelength < 8192 / 4
    low = wavelength > 8192
    between = ~high & ~low
    assert min(high.sum(), low.sum()) > 5
    assert between.any()
    assert torch.equal(scaled[high], plain[high])
    assert torch.allclose(scaled[low], plain[low] / 8)
    assert ((scaled < plain) & (scaled > plain / 8))[between].all()


@pytest.fixture
def attention():
    torch.manual_seed(0)
    return Attention(8, n_heads=4, n_kv_heads=2, headdim=6).double()


@pytest.mark.parametrize("graph", [True, False])
def test_attention_after_committed_tokens(attention, graph):
    x = randn(2, 5, 8)
    cut = 3
    cosines = tables(5, 6, 500.0)
    whole, own = attention(x, None, cosines)
    room = torch.full_like(own.keys, torch.nan)
    buffer = KeyValues(*(torch.cat([part[:, :, :cut], room], dim=2) for part in own))
    copies = [part.clone() for part in buffer]
    visible = torch.ones(2, 5, dtype=torch.bool).tril(cut)[None, None]
    with torch.set_grad_enabled(graph):
        later = tuple(table[:, cut:] for table in cosines)
        y, new = attention(x[:, cut:], None, later, Past(buffer, cut), visible)
    assert torch.allclose(y, whole[:, cut:])
    assert torch.allclose(new.keys, own.keys[:, :, cut:])
    for now, expected, mine in zip(buffer, copies, new, strict=True):
        if not graph:  # in place, behind the committed tokens
            expected[:, :, cut:5] = mine
        assert torch.equal(now.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize(("kv_heads", "headdim", "name"), [(3, 6, "n_kv_heads"), (2, 5, "headdim")])
def test_attention_names_heads_that_do_not_fit(kv_heads, headdim, name):
    with pytest.raises(ValueError, match=rf"Attention\.{name} must"):
        Attention(8, 4, kv_heads, headdim)


def test_llama_block_has_residual_paths_and_masked_branches(attention):
    block = layers.LlamaBlock(attention, 8, 6).double()
    z = randn(2, 5, 8)
    angles = tables(5, 6, 500.0)
    assert torch.equal(block(z, None, angles, None, torch.zeros_like(z))[0], z)
    mixed = z + attention(block.input_layernorm(z), None, angles)[0]
    assert torch.allclose(
        block(z, None, angles)[0], mixed + block.mlp(block.post_attention_layernorm(mixed))
    )


@pytest.mark.parametrize(
    ("attend", "message"),
    [
        (lambda q: None, "returns must be a Tensor like the queries, got None"),
        (lambda q: q, "must keep the shape"),
        (lambda q: q.transpose(1, 2)[:, :1], "must keep the shape"),
        (lambda q: q.transpose(1, 2).float(), "must keep the dtype"),
    ],
)
def test_what_mixes_the_values_is_checked(attention, attend, message):
    attention.attend = lambda layer, q, *rest, causal: attend(q)
    with pytest.raises((TypeError, ValueError), match=rf"Attention\.attend {message}"):
        attention(randn(2, 5, 8), None, tables(5, 6, 500.0))
