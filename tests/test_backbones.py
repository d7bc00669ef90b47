"""Every backbone is pure, causal, selectable, and equal to itself cut at any token."""

from dataclasses import replace

import pytest
import torch
from small_models import affine

import deqseq as dq
from deqseq.backbones.base import check_sequence


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


def llama(**changes):
    torch.manual_seed(0)
    sizes = {"d_model": 8, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "mlp_width": 6}
    return dq.Llama(dq.LlamaConfig(**{**sizes, **changes})).double()


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(params=[mamba2, llama, affine], ids=["Mamba2", "Llama", "Affine"])
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
        whole, last = backbone(z, injection, return_trail=True)
        start = backbone.init_cache(2)
        first, trail = backbone(z[:, :cut], injection.tokens(0, cut), start, return_trail=True)
        second, trail = backbone(z[:, cut:], injection.tokens(cut, 7), trail.after(cut), return_trail=True)
        assert torch.allclose(torch.cat([first, second], dim=1), whole)
        assert_same(trail.after(7 - cut), last.after(7))

    def test_the_cache_after_any_token_comes_from_one_evaluation(self, backbone):
        x, z = randn(2, 7, 8), randn(2, 7, 8, seed=1)
        injection = backbone.inject(x)
        _, trail = backbone(z[:, :2], injection.tokens(0, 2), return_trail=True)
        before = trail.after(2)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                _, trail = backbone(z[:, 2:], injection.tokens(2, 7), before, return_trail=True)
            for tokens in (5, 1, 3):
                _, shorter = backbone(z[:, : 2 + tokens], injection.tokens(0, 2 + tokens), return_trail=True)
                after = trail.after(tokens)
                assert_same(after, shorter.after(2 + tokens))
                assert not any(tensor.requires_grad for tensor in after.tensors())

    def test_padding_leaves_what_the_row_alone_leaves(self, backbone):
        x, z, counts = randn(3, 5, 8), randn(3, 5, 8, seed=1), [2, 5, 1]
        real = torch.arange(5) < torch.tensor(counts)[:, None]
        value, trail = backbone(z, backbone.inject(x, None, real), return_trail=True)
        continued_x, continued_z = randn(3, 4, 8, seed=2), randn(3, 4, 8, seed=3)
        caches = [trail.after(5), trail.after(3)]
        for cache, limit in zip(caches, (5, 3), strict=True):
            later, _ = backbone(continued_z, backbone.inject(continued_x, cache), cache)
            for row, count in enumerate(counts):
                one, count = slice(row, row + 1), min(count, limit)
                alone, left = backbone(z[one, :count], backbone.inject(x[one, :count]), return_trail=True)
                assert torch.allclose(alone, value[one, :count])
                mine = left.after(count)
                expected, _ = backbone(continued_z[one], backbone.inject(continued_x[one], mine), mine)
                assert torch.allclose(expected, later[one])

    def test_two_continuations_of_one_cache_do_not_disturb_each_other(self, backbone):
        x, z = randn(2, 9, 8), randn(2, 9, 8, seed=1)
        injection = backbone.inject(x)
        with torch.no_grad():
            _, trail = backbone(z[:, :3], injection.tokens(0, 3), return_trail=True)
            root = trail.after(3)
            prepared = root.reserve(2)
            _, one = backbone(z[:, 3:5], injection.tokens(3, 5), prepared, return_trail=True)
            one = one.after(2)
            kept = [tensor.clone() for tensor in (*root.tensors(), *one.tensors())]
            _, other = backbone(z[:, 5:7], injection.tokens(3, 5), prepared, return_trail=True)
            other = other.after(2)
            backbone(z[:, 7:9], injection.tokens(3, 5), root)
        assert all(torch.equal(a, b) for a, b in zip(kept, (*root.tensors(), *one.tensors()), strict=True))
        assert not all(torch.allclose(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))

    def test_merged_takes_rows_from_another_evaluation(self, backbone):
        x, z, rows = randn(3, 4, 8), randn(3, 4, 8, seed=1), torch.tensor([2, 0])
        injection, other_z = backbone.inject(x), randn(3, 4, 8, seed=2)
        _, mine = backbone(z, injection, return_trail=True)
        _, theirs = backbone(other_z[rows], injection.select(rows), return_trail=True)
        mixed_z = torch.stack([other_z[0], z[1], other_z[2]])
        _, expected = backbone(mixed_z, injection, return_trail=True)
        with torch.no_grad():
            assert_same(mine.merged(rows, theirs).after(4), expected.after(4))

    def test_a_cache_grows_token_by_token(self, backbone):
        x, z = randn(1, 40, 8), randn(1, 40, 8, seed=1)
        injection = backbone.inject(x)
        whole, last = backbone(z, injection, return_trail=True)
        cache, steps = backbone.init_cache(1), []
        with torch.no_grad():
            for t in range(40):
                value, trail = backbone(z[:, t : t + 1], injection.tokens(t, t + 1), cache, return_trail=True)
                cache = trail.after(1)
                steps.append(value)
        assert torch.allclose(torch.cat(steps, dim=1), whole)
        assert_same(cache, last.after(40))

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
        _, trail = backbone(z, injection, return_trail=True)
        cache = trail.after(3)
        before = [t.clone() for t in cache.tensors()]
        with torch.no_grad():
            later = backbone.inject(x, cache)
            first = backbone(z, later, cache, return_trail=True)[0]
            second = backbone(z, later, cache, return_trail=True)[0]
        assert torch.equal(first, second)
        assert torch.allclose(first, backbone(z, later, cache)[0])  # with a graph
        for old, new in zip(before, cache.tensors(), strict=True):
            assert torch.equal(old, new)

    @pytest.mark.parametrize("rows", [[2, 0], [1, 1, 2, 0], [1]], ids=str)
    def test_select_narrows_repeats_and_reorders_everything(self, backbone, rows):
        x, z = randn(3, 4, 8), randn(3, 4, 8, seed=1)
        real = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
        _, trail = backbone(z, backbone.inject(x, None, real), return_trail=True)
        rows, cache = torch.tensor(rows), trail.after(4)
        for prepared in (cache, cache.reserve(4)):
            injection = backbone.inject(x, prepared, real)
            whole = backbone(z, injection, prepared)[0]
            narrow = backbone(z[rows], injection.select(rows), prepared.select(rows))[0]
            assert torch.allclose(narrow, whole[rows])

    @pytest.mark.parametrize("shape", [(0, 3, 8), (2, 0, 8), (2, 3, 7)])
    def test_bad_input_is_named(self, backbone, shape):
        with pytest.raises(ValueError, match=r"x must have shape \(batch, length, 8\), none of them 0, got"):
            dq.ImplicitModel(backbone)(torch.zeros(shape))


def assert_same(ours, theirs):
    assert len(ours.tensors()) == len(theirs.tensors()) > 0
    for mine, other in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert mine.shape == other.shape
        assert torch.allclose(mine, other)


def test_affine_solution_is_a_fixed_point():
    backbone, x = affine(), randn(2, 6, 8)
    z = backbone.solution(x)
    assert (backbone(z, backbone.inject(x))[0] - z).abs().max() < 1e-14


@pytest.mark.parametrize("make", [mamba2, llama])
def test_dropout_draws_one_mask_a_solve(make):
    backbone, x = make(dropout=0.5), randn(2, 5, 8)
    backbone.train()
    injection = backbone.inject(x)
    z = randn(2, 5, 8, seed=1)
    assert len(injection.dropout) == 2
    assert torch.equal(backbone(z, injection)[0], backbone(z, injection)[0])
    assert not torch.allclose(backbone(z, injection)[0], backbone(z, backbone.inject(x))[0])
    assert injection.tokens(1, 3).dropout[0].shape == (2, 2, 8)
    backbone.eval()
    assert backbone.inject(x).dropout == ()


@pytest.mark.parametrize("make", [mamba2, llama])
def test_without_injection_it_serves_explicit_models_only(make):
    backbone, x = make(injection=False), randn(2, 5, 8)
    assert not any("injection" in name for name, _ in backbone.named_parameters())
    assert dq.ExplicitModel(backbone)(x).value.shape == (2, 5, 8)
    with pytest.raises(ValueError, match=r"built with \w+Config\(injection=False\): it serves explicit models only"):
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_heads": 3, "n_kv_heads": None}, "n_heads must divide d_model = 8 (or give headdim), got 3"),
        ({"n_heads": 8, "n_kv_heads": None}, "headdim must be even for the rotary embedding, got 1"),
        ({"n_kv_heads": 3}, "n_kv_heads must divide n_heads = 4, got 3"),
        ({"n_layers": 0}, "n_layers must be an integer >= 1, got 0"),
        ({"mlp_width": 0}, "mlp_width must be an integer >= 1, got 0"),
        ({"dropout": 1.0}, "dropout must lie in [0, 1), got 1.0"),
        ({"rope_theta": 0.0}, "rope_theta must be > 0, got 0.0"),
        ({"norm_eps": 0.0}, "norm_eps must be > 0, got 0.0"),
    ],
)
def test_llama_config_names_the_bad_field(changes, message):
    with pytest.raises(ValueError, match=r"LlamaConfig\.") as error:
        llama(**changes)
    assert str(error.value) == f"LlamaConfig.{message}"


def test_llama_reads_positions_relative_to_each_other():
    backbone = llama()
    injection, z = backbone.inject(randn(1, 5, 8)), randn(1, 5, 8, seed=1)
    far = replace(injection, tables=backbone.inject(randn(1, 105, 8)).tokens(100, 105).tables)
    assert torch.allclose(backbone(z, injection)[0], backbone(z, far)[0], atol=1e-5)
    stretched = replace(injection, tables=tuple(t[:, ::2] for t in backbone.inject(randn(1, 9, 8)).tables))
    assert not torch.allclose(backbone(z, injection)[0], backbone(z, stretched)[0], atol=1e-3)


def test_llama_iterations_write_into_one_buffer():
    backbone, x = llama(), randn(1, 6, 8)
    with torch.no_grad():
        _, trail = backbone(x, backbone.inject(x), return_trail=True)
        cache = trail.after(6).reserve(8)
        pointers = {tensor.data_ptr() for layer in cache.layers for tensor in layer}
        for t in range(8):
            token = x[:, :1]
            _, trail = backbone(token, backbone.inject(token, cache), cache, return_trail=True)
            cache = trail.after(1)
            assert cache.length == 7 + t
            assert {tensor.data_ptr() for layer in cache.layers for tensor in layer} == pointers
        assert cache.reserve(1).layers[0].keys.shape[2] > 14


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
