"""Depthwise causal convolution and SiLU, as a layer with a state."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from deqseq.arguments import PositiveInt, checked
from deqseq.ops import Backend, fused
from deqseq.types import Counts

Channels = Float[Tensor, "batch length channels"]
ConvState = Float[Tensor, "batch past channels"]


class CausalConv1d(nn.Module):
    r"""A filter for each channel, over the tokens up to the current one, followed by a SiLU.

    .. math:: y_t = \mathrm{silu}\Bigl(b + \sum_{j=0}^{k-1} w_j \odot x_{t-k+1+j}\Bigr)

    Parameters have the names and shapes of ``nn.Conv1d(channels, channels, k, groups=channels)``.

    Args:
        channels: number of channels.
        kernel_size: :math:`k`, at least 1.

    Example:
        >>> import torch
        >>> from deqseq.layers import CausalConv1d
        >>> conv = CausalConv1d(1, 2)
        >>> _ = conv.weight.data.copy_(torch.tensor([[[1.0, 10.0]]])), conv.bias.data.zero_()
        >>> x = torch.tensor([[[1.0], [2.0]]])
        >>> conv(x).detach().flatten(), conv.state_after(x).flatten()
        (tensor([ 9.9995, 21.0000]), tensor([2.]))
    """

    @checked
    def __init__(self, channels: PositiveInt, kernel_size: PositiveInt) -> None:
        super().__init__()
        self.past = kernel_size - 1
        bound = kernel_size**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))

    def forward(
        self,
        x: Channels,
        state: ConvState | None = None,
        backend: Backend = "auto",
    ) -> Channels:
        """Convolve and activate ``x``, ``(batch, length, channels)``; nothing is checked.

        ``state`` are the inputs before, ``(batch, kernel_size - 1, channels)``, by default zeros;
        ``backend`` is a :data:`deqseq.ops.Backend`, whose kernels need a ``kernel_size`` of 2 to 4
        and a number of channels that 8 divides; else plain PyTorch runs.
        """
        weight, bias = self.weight, self.bias
        kernels = fused.resolved(backend, x) == "mamba_ssm"
        if kernels and fused.convolves(len(weight), self.past + 1):
            return fused.convolved(x, weight, bias, state)
        # shifted multiply-adds: on a CPU faster than a grouped convolution
        length, padded = x.shape[1], self._padded(x, state)
        taps = weight[:, 0].to(x.dtype).unbind(dim=1)
        y = torch.addcmul(bias.to(x.dtype), taps[0], padded[:, :length])
        for offset, tap in enumerate(taps[1:], start=1):
            y = y.addcmul_(tap, padded[:, offset : offset + length])
        return F.silu(y)

    def state_after(
        self,
        x: Channels,
        state: ConvState | None = None,
        counts: Counts | None = None,
    ) -> ConvState:
        """The last ``kernel_size - 1`` inputs, which the next tokens will see, copied.

        ``x`` and ``state`` are as in :meth:`forward`; ``counts``, ``(batch,)``, says how many
        inputs of each row are real, by default all.
        """
        if counts is None:
            padded = self._padded(x[:, max(0, x.shape[1] - self.past) :], state)
            return padded[:, padded.shape[1] - self.past :].clone()  # a view would keep all of it
        places = counts[:, None] + torch.arange(self.past, device=x.device)
        return self._padded(x, state).gather(1, places[..., None].expand(-1, -1, x.shape[2]))

    def _padded(self, x: Tensor, state: Tensor | None) -> Tensor:
        if state is None:
            return F.pad(x, (0, 0, self.past, 0))
        return torch.cat([state.to(x.dtype), x], dim=1)
