"""What Triton's interpreter does not run: causal_conv1d and two calls of the CUDA driver."""

import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import torch
from torch.nn import functional as F


def laid_out(x):
    """Channels next to each other, everything else on a multiple of eight, as for CUDA."""
    offsets = (x.stride(0), x.stride(2), x.storage_offset())
    return x.stride(1) == 1 and not any(offset % 8 for offset in offsets)


def convolution(x, weight, bias=None, seq_idx=None, initial_states=None, activation=None):
    assert laid_out(x), (x.shape, x.stride(), x.storage_offset())
    assert seq_idx is None
    assert 2 <= weight.shape[1] <= 4
    assert x.shape[1] % 8 == 0
    if initial_states is not None:
        assert initial_states.stride(1) == 1
        assert initial_states.dtype == x.dtype
    past = initial_states
    if past is None:
        past = x.new_zeros(*x.shape[:2], weight.shape[1] - 1)
    y = F.conv1d(torch.cat([past, x], dim=2), weight[:, None], bias, groups=len(weight))
    return F.silu(y) if activation in ("silu", True) else y


def update(x, conv_state, weight, bias=None, activation=None):
    joined = torch.cat([conv_state, x[..., None]], dim=2)
    y = F.conv1d(joined, weight[:, None], bias, groups=len(weight))[..., 0]
    conv_state.copy_(joined[..., 1:])
    return F.silu(y) if activation == "silu" else y


def forward_function(x, weight, bias, seq_idx, initial_states, final_states_out, silu):
    return convolution(x, weight, bias, seq_idx, initial_states, silu).mT.contiguous().mT


def backward_function(
    x, weight, bias, dout, seq_idx, initial_states, dfinal_states, dx, want_dinitial, silu
):
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    with torch.enable_grad():
        y = convolution(*leaves, seq_idx, initial_states, silu)
    gradients = torch.autograd.grad(y, leaves, dout)
    dx.copy_(gradients[0])
    return dx, *gradients[1:], None


def causal_conv1d():
    module = ModuleType("causal_conv1d")
    functions = ModuleType("causal_conv1d.cpp_functions")
    module.causal_conv1d_fn = convolution
    module.causal_conv1d_update = update
    module.__path__ = []
    functions.causal_conv1d_fwd_function = forward_function
    functions.causal_conv1d_bwd_function = backward_function
    functions.causal_conv1d_update_function = update
    return module, functions


def install(patch):
    """Let mamba_ssm's Triton code run on CPU tensors."""
    for module in causal_conv1d():
        patch.setitem(sys.modules, module.__name__, module)
    patch.setattr(torch.cuda, "device", lambda index: nullcontext())
    patch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=2)
    )
