"""Depthwise causal convolution and SiLU, as Mamba2 has them."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from deqseq.annotations import checked
from deqseq.ops import fused
from deqseq.ops.backend import Backend, resolved


@checked
def silu_causal_conv(
    x: Float[Tensor, "batch length channels"],
    weight: Float[Tensor, "channels 1 width"],
    bias: Float[Tensor, " channels"],
    state: Float[Tensor, "batch past channels"] | None = None,
    *,
    backend: Backend = "auto",
) -> Float[Tensor, "batch length channels"]:
    r"""Each channel is convolved with its own filter over the tokens up to the current one, then passes a SiLU.

    .. math:: y_t = \mathrm{silu}\Bigl(b + \sum_{j=0}^{k-1} w_j \odot x_{t-k+1+j}\Bigr)

    The reference is written as shifted multiply-adds, which on a CPU is faster than a grouped convolution.

    Args:
        x: inputs, ``(batch, length, channels)``.
        weight: filters, ``(channels, 1, width)``.
        bias: ``(channels,)``.
        state: the ``width - 1`` inputs before them, ``(batch, width - 1, channels)``. Default: zeros.
        backend: a :data:`deqseq.ops.Backend`; its kernels are those of causal_conv1d, where they can be imported and
            take the filter (width 2 to 4, channels in eights).

    Raises:
        ValueError: shapes that do not agree.

    Example:
        >>> filters, x = torch.tensor([[[1.0, 10.0]]]), torch.tensor([[[1.0], [2.0]]])
        >>> silu_causal_conv(x, filters, torch.zeros(1)).flatten()
        tensor([ 9.9995, 21.0000])
    """
    channels, width = weight.shape[0], weight.shape[2]
    if x.ndim != 3 or x.shape[2] != channels:
        raise ValueError(f"x must be (batch, length, {channels} channels), got {tuple(x.shape)}")
    if bias.shape != (channels,):
        raise ValueError(f"bias must be ({channels},), as the filters are, got {tuple(bias.shape)}")
    wanted = (x.shape[0], width - 1, channels)
    if state is not None and state.shape != wanted:
        raise ValueError(f"state must have shape {wanted}, the inputs before x, got {tuple(state.shape)}")
    return convolved(x, weight, bias, state, backend)


def convolved(x: Tensor, weight: Tensor, bias: Tensor, state: Tensor | None, backend: Backend) -> Tensor:
    """:func:`silu_causal_conv` without checks, for layers, which call it at every iteration."""
    width = weight.shape[2]
    if resolved(backend, x) == "mamba_ssm" and fused.convolves(weight.shape[0], width):
        return fused.convolved(x, weight, bias, state)
    length, past = x.shape[1], width - 1
    padded = F.pad(x, (0, 0, past, 0)) if state is None else torch.cat([state.to(x.dtype), x], dim=1)
    taps = weight[:, 0].to(x.dtype).unbind(dim=1)
    y = torch.addcmul(bias.to(x.dtype), taps[0], padded[:, :length])
    for offset, tap in enumerate(taps[1:], start=1):
        y = y.addcmul_(tap, padded[:, offset : offset + length])
    return F.silu(y)
