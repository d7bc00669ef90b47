"""Depthwise causal convolution and SiLU, as a layer with a state."""

from typing import Annotated

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from deqseq.annotations import AtLeast, checked
from deqseq.ops.backend import Backend
from deqseq.ops.causal_conv import convolved


class CausalConv1d(nn.Module):
    r"""The parameters of :func:`~deqseq.ops.causal_conv.silu_causal_conv`, :math:`\mathrm{silu}(\mathrm{conv}(x))`.

    They have the names and shapes of ``nn.Conv1d(channels, channels, k, groups=channels)``.

    Args:
        channels: number of channels.
        kernel_size: :math:`k`, at least 1.

    Example:
        >>> conv = CausalConv1d(1, 2)
        >>> _ = conv.weight.data.copy_(torch.tensor([[[1.0, 10.0]]])), conv.bias.data.zero_()
        >>> x = torch.tensor([[[1.0], [2.0]]])
        >>> conv(x).detach().flatten(), conv.state_after(x).flatten()
        (tensor([ 9.9995, 21.0000]), tensor([2.]))
    """

    @checked
    def __init__(self, channels: Annotated[int, AtLeast(1)], kernel_size: Annotated[int, AtLeast(1)]) -> None:
        super().__init__()
        self.past = kernel_size - 1
        bound = kernel_size**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))

    def init_state(self, batch: int) -> Float[Tensor, "batch past channels"]:
        """The inputs of ``batch`` rows before the first token: zeros."""
        return self.bias.new_zeros(batch, self.past, len(self.bias))

    def forward(
        self,
        x: Float[Tensor, "batch length channels"],
        state: Float[Tensor, "batch past channels"] | None = None,
        backend: Backend = "auto",
    ) -> Float[Tensor, "batch length channels"]:
        """Convolve and activate ``x``, ``(batch, length, channels)``, carrying on from ``state``; nothing is checked.

        ``state`` are the inputs before, ``(batch, kernel_size - 1, channels)``, by default zeros; ``backend`` computes.
        """
        return convolved(x, self.weight, self.bias, state, backend)

    def state_after(
        self,
        x: Float[Tensor, "batch length channels"],
        state: Float[Tensor, "batch past channels"] | None = None,
        counts: Int64[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch past channels"]:
        """The last ``kernel_size - 1`` inputs, which the tokens after ``x`` will still see, in memory of their own.

        ``x`` and ``state`` are as in :meth:`forward`; ``counts``, ``(batch,)``, says how many inputs of each row are
        real, by default all.
        """
        past = self.past
        if counts is None:
            x = x[:, max(0, x.shape[1] - past) :]
        padded = F.pad(x, (0, 0, past, 0)) if state is None else torch.cat([state.to(x.dtype), x], dim=1)
        if counts is None:
            return padded[:, padded.shape[1] - past :].clone()  # a view would keep all of it
        places = counts[:, None] + torch.arange(past, device=x.device)
        return padded.gather(1, places[..., None].expand(-1, -1, x.shape[2]))
