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
    dropout_mask,
)


@pytest.mark.parametrize("kernel_size", [1, 2, 4])
def test_conv_is_a_grouped_convolution(kernel_size):
    ours = CausalConv1d(3, kernel_size).double()
    theirs = nn.Conv1d(3, 3, kernel_size, groups=3, padding=kernel_size - 1).double()
    theirs.load_state_dict(ours.state_dict())
    x = randn(2, 6, 3)
    assert torch.allclose(ours(x), F.silu(theirs(x.transpose(1, 2))[:, :, :6].transpose(1, 2)))


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


def test_initial_step_sizes_lie_in_mamba2s_range():
    torch.manual_seed(0)
    mixer = Mamba2Mixer(256, headdim=4)
    step = F.softplus(mixer.dt_bias)
    assert step.min() >= 0.999e-3
    assert step.max() <= 1.001e-1
    assert mixer.A_log.exp().min() >= 1
    assert mixer.A_log.exp().max() <= 16


def test_block_has_residual_paths_and_a_masked_branch(mixer):
    block = Mamba2Block(mixer, 8, mlp_width=6).double()
    z = randn(2, 5, 8)
    nothing = torch.zeros(2, 5, 8, dtype=torch.float64)
    masked, _ = block(z, None, None, nothing)
    assert torch.allclose(masked, z + block.mlp(block.post_norm(z)))
    block.mlp.down_proj.weight.data.zero_()
    assert torch.allclose(block(z)[0], z + mixer(block.norm(z))[0])
