"""Every backbone is pure, causal, selectable, and equal to itself cut at any token."""

import pytest
import torch

import deqseq as dq
from deqseq.backbones.base import check_sequence
from deqseq.backbones.mamba2 import Mamba2Cache


def mamba2(**changes):
    torch.manual_seed(0)
    sizes = {
        "d_model": 8,
        "n_layers": 2,
        "d_state": 4,
        "headdim": 4,
        "n_groups": 2,
        "mlp_width": 6,
        "chunk_size": 3,
    }
    return dq.Mamba2(dq.Mamba2Config(**{**sizes, **changes})).double()


def affine():
    torch.manual_seed(0)
    return dq.Affine(8).double()


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(params=[mamba2, affine], ids=["Mamba2", "Affine"])
def backbone(request):
    return request.param()


class TestContract:
    def test_shape_and_dtype(self, backbone):
        x = randn(2, 7, 8)
        z, cache = backbone(torch.zeros_like(x), backbone.inject(x))
        assert z.shape == (2, 7, 8)
        assert z.dtype == torch.float64
        assert cache is None

    def test_input_reaches_the_output(self, backbone):
        x, other = randn(2, 7, 8), randn(2, 7, 8, seed=1)
        z = randn(2, 7, 8, seed=2)
        assert not torch.allclose(backbone(z, backbone.inject(x))[0], backbone(z, backbone.inject(other))[0])

    @pytest.mark.parametrize("cut", [1, 3, 6])
    def test_a_sequence_cut_in_two_is_the_sequence(self, backbone, cut):
        x, z = randn(2, 7, 8), randn(2, 7, 8, seed=1)
        injection = backbone.inject(x)
        whole, last = backbone(z, injection, return_cache=True)
        first, cache = backbone(z[:, :cut], injection.tokens(0, cut), backbone.init_cache(2), return_cache=True)
        second, cache = backbone(z[:, cut:], injection.tokens(cut, 7), cache, return_cache=True)
        assert torch.allclose(torch.cat([first, second], dim=1), whole)
        for ours, theirs in zip(tensors(cache), tensors(last), strict=True):
            assert torch.allclose(ours, theirs)

    def test_causal(self, backbone):
        x, z = randn(1, 7, 8), randn(1, 7, 8, seed=1)
        changed_x, changed_z = x.clone(), z.clone()
        changed_x[:, 4:] += 1
        changed_z[:, 4:] += 1
        before = backbone(z, backbone.inject(x))[0]
        after = backbone(changed_z, backbone.inject(changed_x))[0]
        assert torch.equal(before[:, :4], after[:, :4])
        assert not torch.allclose(before[:, 4:], after[:, 4:])

    def test_pure(self, backbone):
        x, z = randn(2, 3, 8), randn(2, 3, 8, seed=1)
        injection = backbone.inject(x)
        _, cache = backbone(z, injection, return_cache=True)
        before = [t.clone() for t in tensors(cache)]
        first = backbone(z, injection, cache, return_cache=True)[0]
        second = backbone(z, injection, cache, return_cache=True)[0]
        assert torch.equal(first, second)
        for old, new in zip(before, tensors(cache), strict=True):
            assert torch.equal(old, new)

    def test_select_narrows_everything(self, backbone):
        x, z = randn(3, 4, 8), randn(3, 4, 8, seed=1)
        injection = backbone.inject(x)
        _, cache = backbone(z, injection, return_cache=True)
        rows = torch.tensor([2, 0])
        whole = backbone(z, injection, cache)[0]
        narrow = backbone(z[rows], injection.select(rows), cache.select(rows))[0]
        assert torch.allclose(narrow, whole[rows])

    @pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 7)])
    def test_bad_input_is_named(self, backbone, shape):
        with pytest.raises(ValueError, match=r"x must have shape \(batch, length, 8\), none of them 0, got"):
            dq.ImplicitModel(backbone)(torch.zeros(shape))


def tensors(cache):
    if isinstance(cache, Mamba2Cache):
        return [tensor for state in cache.layers for tensor in state]
    return [cache.previous]


def test_affine_solution_is_a_fixed_point():
    backbone, x = affine(), randn(2, 6, 8)
    z = backbone.solution(x)
    assert (backbone(z, backbone.inject(x))[0] - z).abs().max() < 1e-14


def test_mamba2_dropout_draws_one_mask_a_solve():
    backbone, x = mamba2(dropout=0.5), randn(2, 5, 8)
    backbone.train()
    injection = backbone.inject(x)
    z = randn(2, 5, 8, seed=1)
    assert len(injection.masks) == 2
    assert torch.equal(backbone(z, injection)[0], backbone(z, injection)[0])
    assert not torch.allclose(backbone(z, injection)[0], backbone(z, backbone.inject(x))[0])
    assert injection.tokens(1, 3).masks[0].shape == (2, 2, 8)
    backbone.eval()
    assert backbone.inject(x).masks == ()


def test_mamba2_without_injection_serves_explicit_models_only():
    backbone, x = mamba2(injection=False), randn(2, 5, 8)
    assert not any("injection" in name for name, _ in backbone.named_parameters())
    assert dq.ExplicitModel(backbone)(x).value.shape == (2, 5, 8)
    with pytest.raises(ValueError, match=r"built with Mamba2Config\(injection=False\): it serves explicit models only"):
        backbone.inject(x)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"headdim": 3}, "headdim must divide expand * d_model = 16, got 3"),
        ({"n_groups": 3}, "n_groups must divide the 4 heads, got 3"),
        ({"n_layers": 0}, "n_layers must be an integer >= 1, got 0"),
        ({"dropout": 1.0}, "dropout must lie in [0, 1), got 1.0"),
        ({"dt_limit": (0.5, 0.1)}, "dt_limit must be bounds 0 <= low <= high, got (0.5, 0.1)"),
        ({"norm_eps": 0.0}, "norm_eps must be > 0, got 0.0"),
        ({"mlp_width": -1}, "mlp_width must be >= 0, got -1"),
    ],
)
def test_mamba2_config_names_the_bad_field(changes, message):
    with pytest.raises(ValueError, match=r"Mamba2Config\.") as error:
        mamba2(**changes)
    assert str(error.value) == f"Mamba2Config.{message}"


def test_a_missing_dimension_is_named():
    with pytest.raises(ValueError, match=r"none of them 0, got \(2, 8\)"):
        check_sequence(torch.zeros(2, 8), 8)


def test_affine_contraction_is_checked():
    with pytest.raises(ValueError, match=r"Affine.contraction must lie in \(0, 1\), got 1.0"):
        dq.Affine(4, contraction=1.0)


def test_options_of_the_configuration_reach_the_layers():
    config = dq.Mamba2Config(d_model=8, headdim=4, dt_limit=(0.1, 0.2), norm_eps=1e-2, chunk_size=5)
    mixer = dq.Mamba2(config).layers[0].mixer
    assert (mixer.dt_limit, mixer.norm.eps, mixer.chunk_size) == ((0.1, 0.2), 1e-2, 5)
