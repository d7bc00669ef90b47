"""Layers against independent formulas and torch's own modules."""

import pytest
import torch
from small_models import randn
from torch import nn
from torch.nn import functional as F

from deqseq.layers import (
    CausalConv1d,
    GatedRMSNorm,
    Mamba2Block,
    Mamba2Mixer,
    RMSNorm,
    SwiGLU,
    dropout_mask,
)


def test_rms_norm_formula():
    norm = RMSNorm(5, eps=1e-3).double()
    norm.weight.data = randn(5)
    x = randn(2, 3, 5, seed=1)
    root = (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    assert torch.allclose(norm(x), x / root * norm.weight)


@pytest.mark.parametrize("groups", [1, 3])
def test_gated_norm_gates_first_and_normalises_each_group(groups):
    norm, x, gate = GatedRMSNorm(6, groups=groups).double(), randn(2, 6), randn(2, 6, seed=1)
    norm.weight.data = randn(6, seed=2)
    gated = (x * F.silu(gate)).unflatten(1, (groups, -1))
    expected = gated / (gated.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert torch.allclose(norm(x, gate), expected.flatten(1) * norm.weight)


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
def test_conv_is_a_grouped_convolution(kernel_size):
    ours = CausalConv1d(3, kernel_size).double()
    theirs = nn.Conv1d(3, 3, kernel_size, groups=3, padding=kernel_size - 1).double()
    theirs.load_state_dict(ours.state_dict())
    x = randn(2, 6, 3)
    assert torch.allclose(ours(x), F.silu(theirs(x.transpose(1, 2))[:, :, :6].transpose(1, 2)))


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_conv_carries_on_from_its_state(cut):
    conv, x = CausalConv1d(3, 4).double(), randn(2, 6, 3)
    state = conv.state_after(x[:, :cut])
    assert torch.allclose(torch.cat([conv(x[:, :cut]), conv(x[:, cut:], state)], dim=1), conv(x))
    assert torch.equal(conv.state_after(x[:, cut:], state), x[:, 3:])


def test_swiglu_formula():
    mlp, x = SwiGLU(4, 6).double(), randn(2, 4)
    gate, up = x @ mlp.gate_proj.weight.T, x @ mlp.up_proj.weight.T
    assert torch.allclose(mlp(x), (gate * torch.sigmoid(gate) * up) @ mlp.down_proj.weight.T)


def test_sizes_that_do_not_divide_are_named():
    with pytest.raises(
        ValueError, match=r"headdim must divide expand \* d_model = 16, got headdim 5"
    ):
        Mamba2Mixer(8, headdim=5)
    with pytest.raises(ValueError, match=r"groups .*6, got 4"):
        GatedRMSNorm(6, groups=4)


def test_dropout_mask_keeps_the_mean():
    torch.manual_seed(0)
    mask = dropout_mask(torch.zeros(8, 50, 40), 0.25)
    assert mask.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert mask.mean().item() == pytest.approx(1.0, abs=0.02)


@pytest.fixture
def mixer():
    torch.manual_seed(0)
    return Mamba2Mixer(8, d_state=4, headdim=4, n_groups=2, chunk_size=3).double()


def test_mixer_adds_the_injection_to_the_projected_input(mixer):
    u, injection = randn(2, 5, 8), randn(2, 5, mixer.injected_width, seed=1)
    moved = randn(8, seed=3)
    # W (u + m) + i = W u + (i + W m)
    expected, _ = mixer(u, injection + mixer.in_proj.weight @ moved)
    assert torch.allclose(mixer(u + moved, injection)[0], expected)
    assert not torch.allclose(mixer(u, injection)[0], mixer(u)[0])


def test_initial_step_sizes_lie_in_mamba2s_range():
    torch.manual_seed(0)
    mixer = Mamba2Mixer(256, headdim=4)
    step = F.softplus(mixer.dt_bias)
    assert step.min() >= 0.999e-3 and step.max() <= 1.001e-1
    assert mixer.A_log.exp().min() >= 1 and mixer.A_log.exp().max() <= 16


def test_block_has_residual_paths_and_a_masked_branch(mixer):
    block = Mamba2Block(mixer, 8, mlp_width=6).double()
    z, nothing = randn(2, 5, 8), torch.zeros(2, 5, 8, dtype=torch.float64)
    masked, _ = block(z, None, None, nothing)
    assert torch.allclose(masked, z + block.mlp(block.post_norm(z)))
    block.mlp.down_proj.weight.data.zero_()
    assert torch.allclose(block(z)[0], z + mixer(block.norm(z))[0])


def test_step_size_limits_hold_in_the_mixer():
    torch.manual_seed(0)
    mixer = Mamba2Mixer(8, d_state=4, headdim=4, dt_limit=(0.05, 0.05)).double()
    u = torch.randn(1, 5, 8, dtype=torch.float64)
    before = mixer(u)[0]
    mixer.dt_bias.data += 1  # every step size is at its bound: the bias changes nothing
    assert torch.allclose(mixer(u)[0], before)
