"""Every backbone passes the contract; then what each promises of its own."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from small_models import Pointwise, affine, contractive_llama, contractive_mamba2, llama, randn

import deqseq as dq
from deqseq.rows import tensors_of
from deqseq.testing import BackboneContract
from deqseq.testing.backbones import part


def mamba2(**changes):
    torch.manual_seed(0)
    sizes = {"d_model": 8, "n_layers": 2, "d_state": 4, "headdim": 4, "n_groups": 2}
    return dq.Mamba2(dq.Mamba2Config(**{**sizes, **changes})).double()


BOTH = pytest.mark.parametrize("make", [mamba2, llama])
unchecked = pytest.mark.usefixtures("unchecked")


def injected(injection, make=contractive_llama):
    """Layers whose input enters by a part; the state counts little, so that they contract."""
    torch.manual_seed(1)
    if isinstance(injection, dq.ConcatInjection):
        injection.weight.data[:, :8].normal_(std=0.05)
    return dq.Injected(make(injection=False, n_layers=1), injection).double()


@unchecked
class TestInjectedDecay(BackboneContract):
    backbone = injected(dq.DecayInjection(8, decay=0.2), contractive_mamba2)


@unchecked
class TestLlamaOfOlmo(BackboneContract):
    backbone = injected(
        dq.ConcatInjection(8), partial(contractive_llama, norms="post", qk_norm=True)
    )


@unchecked
class TestLlamaOfHuginn(BackboneContract):
    backbone = contractive_llama(norms="closed", qk_bias=True, final_norm=False)


class TestLlamaInBothDirections(BackboneContract):
    backbone = contractive_llama(causal=False, norms="outer")


class TestLlamaOnAGrid(BackboneContract):
    backbone = contractive_llama(causal=False, grid=True, headdim=4)


@unchecked
class TestLlamaInBothDirectionsInjected(BackboneContract):
    backbone = injected(dq.ConcatInjection(8), partial(contractive_llama, causal=False))


class TestMamba2(BackboneContract):
    backbone = contractive_mamba2(n_groups=2, mlp_width=6, skip_scale=0.5)


class TestLlama(BackboneContract):
    backbone = contractive_llama()


class TestAffine(BackboneContract):
    backbone = affine()


class TestPointwise(BackboneContract):
    """What needs a cache is skipped."""

    backbone = Pointwise()


@pytest.mark.parametrize("sweep", [dq.Chunked(3), dq.Sequential(), dq.Sliding(3)])
def test_a_backbone_without_advance_is_solved_simultaneously_and_says_what_it_lacks(sweep):
    model = dq.ImplicitModel(Pointwise())
    x = randn(2, 7, 8)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    model(x, mask=mask, throw=True).value.square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in model.parameters())
    lm = dq.CausalLM(5, model).double()
    ids = torch.tensor([[1, 2, 3]])
    for call in (
        lambda: model(x, sweep=sweep),
        lambda: model(x, return_cache=True),
        lambda: lm.generate(ids, max_new_tokens=2),
    ):
        with pytest.raises(NotImplementedError, match=r"Pointwise has no advance\(.*Write advance"):
            call()


@BOTH
def test_dropout_draws_one_mask_per_solve(make):
    backbone = make(dropout=0.5).train()
    x = randn(2, 5, 8)
    z = randn(2, 5, 8, seed=1)
    inputs = backbone.prepare(x)
    assert len(inputs.dropout) == 2
    assert torch.equal(backbone(z, inputs)[0], backbone(z, inputs)[0])
    assert not torch.allclose(backbone(z, inputs)[0], backbone(z, backbone.prepare(x))[0])
    assert part(inputs, 1, 3).dropout[0].shape == (2, 2, 8)
    backbone.eval()
    assert backbone.prepare(x).dropout == ()


@unchecked
@BOTH
def test_an_injection_that_does_not_fit_is_named(make):
    with pytest.raises(ValueError, match=r"Injected\.backbone must have no .*injection=False"):
        dq.Injected(make(), dq.AddInjection())
    for injection in (dq.ConcatInjection(16), dq.DecayInjection(1)):
        with pytest.raises(ValueError, match=r"Injected\.injection must have .*d_model, 8, got"):
            dq.Injected(make(injection=False), injection)


@unchecked
def test_the_gate_of_a_concatenation_is_the_share_of_the_state():
    z, x = randn(2, 3, 8), randn(2, 3, 8, seed=1)
    for gate in (0, 0.25, 1):
        injection = dq.ConcatInjection(8, gate).double()
        entered = injection.enter(z, injection.prepare(x))
        torch.testing.assert_close(entered, gate * z + (1 - gate) * x)
    with pytest.raises(ValueError, match=r"gate must be a number in \[0, 1\], got 1.5"):
        dq.ConcatInjection(8, gate=1.5)


@BOTH
def test_skip_scale_multiplies_the_state_as_it_enters(make):
    x, z = randn(2, 5, 8), randn(2, 5, 8, seed=1)
    whole, weak = make(), make(skip_scale=0.25)
    expected = whole(0.25 * z, whole.prepare(x))[0]
    torch.testing.assert_close(weak(z, weak.prepare(x))[0], expected, rtol=1e-12, atol=0)
    with pytest.raises(ValueError, match=r"Config\.skip_scale must be a number in \(0, 1\], got 0"):
        make(skip_scale=0)


@BOTH
def test_without_injection_a_solve_must_start_at_the_input(make):
    backbone = make(injection=False)
    x = randn(2, 5, 8)
    assert not any("injection" in name for name, _ in backbone.named_parameters())
    assert dq.ExplicitModel(backbone)(x).value.shape == (2, 5, 8)
    model = dq.ImplicitModel(backbone)
    for start in ("zero", dq.RandomStart()):
        with pytest.raises(ValueError, match=r'without an injection.* start="input"'):
            model(x, start=start)
    assert model(x, start="input", stop=dq.Stop.exactly(2)).value.shape == (2, 5, 8)


@pytest.mark.parametrize(
    ("make", "changes", "names"),
    [
        (mamba2, {"headdim": 3}, r"Mamba2Config\.headdim must divide expand \* d_model = 16"),
        (mamba2, {"n_groups": 3}, r"Mamba2Config\.n_groups must divide the 4 heads"),
        (mamba2, {"dt_limit": (0.5, 0.1)}, r"Mamba2Config\.dt_limit"),
        (llama, {"n_heads": 3, "n_kv_heads": None}, r"LlamaConfig\.n_heads must divide .* = 8"),
        (llama, {"n_heads": 8, "n_kv_heads": None}, r"LlamaConfig\.headdim must be even"),
        (llama, {"n_kv_heads": 3}, r"LlamaConfig\.n_kv_heads must divide n_heads = 4"),
    ],
)
def test_a_configuration_names_the_bad_field(make, changes, names):
    with pytest.raises(ValueError, match=f"^{names}.* got "):
        make(**changes)


def test_llama_iterations_write_into_one_buffer():
    backbone = llama()
    x = randn(1, 6, 8)
    with torch.no_grad():
        _, aux = backbone(x, backbone.prepare(x), need_aux=True)
        cache = backbone.advance(None, aux, 6).reserve(8)
        pointers = [buffer.data_ptr() for buffer in tensors_of(cache.layers)]
        for t in range(8):
            token = x[:, :1]
            _, aux = backbone(token, backbone.prepare(token, cache), cache, need_aux=True)
            cache = backbone.advance(cache, aux, 1)
            assert cache.length == 7 + t
            assert [buffer.data_ptr() for buffer in tensors_of(cache.layers)] == pointers
        assert cache.reserve(1).layers[0].keys.shape[2] > 14


@unchecked
def test_options_of_the_configuration_reach_the_layers():
    limits = [0.1, 0.2]  # a list in JSON
    backbone = mamba2(dt_limit=limits, norm_eps=1e-2, chunk_size=5)
    mixer = backbone.layers[0].mixer
    assert mixer.dt_limit == (0.1, 0.2)
    assert mixer.norm.eps == 1e-2
    assert mixer.chunk_size == 5
    assert hash(backbone.config) == hash(replace(backbone.config, dt_limit=(0.1, 0.2)))
