"""Depthwise causal convolution that can carry on from a state."""

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F


class CausalConv1d(nn.Module):
    r"""Each channel is convolved with its own short filter over the tokens up to the current one.

    .. math:: y_t = b + \sum_{j=0}^{k-1} w_j \odot x_{t-k+1+j}

    Written as shifted multiply-adds, which on a CPU is faster than a grouped convolution. Parameters have the names
    and shapes of ``nn.Conv1d(channels, channels, k, groups=channels)``.

    Args:
        channels: number of channels.
        kernel_size: :math:`k`, at least 1.

    Example:
        >>> conv = CausalConv1d(1, 2)
        >>> _ = conv.weight.data.copy_(torch.tensor([[[1.0, 10.0]]])), conv.bias.data.zero_()
        >>> x = torch.tensor([[[1.0], [2.0]]])
        >>> conv(x).flatten().tolist(), conv.state_after(x).flatten().tolist()
        ([10.0, 21.0], [2.0])
    """

    def __init__(self, channels: int, kernel_size: int) -> None:
        super().__init__()
        if kernel_size < 1:
            raise ValueError(f"CausalConv1d.kernel_size must be >= 1, got {kernel_size}")
        bound = kernel_size**-0.5
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel_size).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound))

    def init_state(self, batch: int) -> Float[Tensor, "batch past channels"]:
        """The inputs before the first token: zeros."""
        return self.bias.new_zeros(batch, self.weight.shape[2] - 1, self.weight.shape[0])

    def forward(
        self,
        x: Float[Tensor, "batch length channels"],
        state: Float[Tensor, "batch past channels"] | None = None,
    ) -> Float[Tensor, "batch length channels"]:
        """Convolve, carrying on from ``state``.

        Args:
            x: inputs, ``(batch, length, channels)``.
            state: the ``kernel_size - 1`` inputs before them; None: zeros.

        Returns:
            Outputs of the shape of ``x``.
        """
        length, past = x.shape[1], self.weight.shape[2] - 1
        padded = F.pad(x, (0, 0, past, 0)) if state is None else torch.cat([state.to(x.dtype), x], dim=1)
        taps = self.weight[:, 0].to(x.dtype).unbind(dim=1)
        y = torch.addcmul(self.bias.to(x.dtype), taps[0], padded[:, :length])
        for offset, tap in enumerate(taps[1:], start=1):
            y = y.addcmul_(tap, padded[:, offset : offset + length])
        return y

    def state_after(
        self,
        x: Float[Tensor, "batch length channels"],
        state: Float[Tensor, "batch past channels"] | None = None,
        counts: Int64[Tensor, " batch"] | None = None,
    ) -> Float[Tensor, "batch past channels"]:
        """The inputs that the tokens after ``x`` will still see.

        Args:
            x: inputs, ``(batch, length, channels)``.
            state: what came before them; None: zeros.
            counts: how many inputs of each row count, ``(batch,)``; None: all.

        Returns:
            The last ``kernel_size - 1`` inputs, in memory of their own.
        """
        past = self.weight.shape[2] - 1
        if counts is None:
            x = x[:, max(0, x.shape[1] - past) :]
        padded = F.pad(x, (0, 0, past, 0)) if state is None else torch.cat([state.to(x.dtype), x], dim=1)
        if counts is None:
            return padded[:, padded.shape[1] - past :].clone()  # a view would keep all of it
        places = counts[:, None] + torch.arange(past, device=x.device)
        return padded.gather(1, places[..., None].expand(-1, -1, x.shape[2]))
