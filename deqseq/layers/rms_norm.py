"""Root-mean-square normalisation, plain and gated."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from deqseq.arguments import NonNegativeFloat, PositiveInt, checked

Channels = Float[Tensor, "*batch dim"]


class RMSNorm(nn.Module):
    r"""Divide by the root mean square of the last dimension, then scale.

    .. math:: y = \frac{x}{\sqrt{\mathrm{mean}(x^2) + \epsilon}} \odot w

    Args:
        dim: size of the last dimension.
        eps: :math:`\epsilon`.

    References:
        Zhang and Sennrich, Root Mean Square Layer Normalization, NeurIPS 2019, arXiv 1910.07467.

    Example:
        >>> import torch
        >>> from deqseq.layers import RMSNorm
        >>> RMSNorm(2)(torch.tensor([[1.0, 7.0]]))
        tensor([[0.2000, 1.4000]], grad_fn=<MulBackward0>)
    """

    @checked
    def __init__(self, dim: PositiveInt, eps: NonNegativeFloat = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Channels) -> Channels:
        """Normalise ``x``, ``(*batch, dim)``."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class GatedRMSNorm(nn.Module):
    r"""Mamba2's output norm: gate first, then normalise each group.

    .. math:: y = \mathrm{RMSNorm}(x \odot \mathrm{silu}(\mathrm{gate}))

    Args:
        dim: size of the last dimension.
        eps: the norm's epsilon.
        groups: parts that are normalised separately, as in the public Mamba2 code; divides ``dim``.

    Raises:
        ValueError: groups that do not divide ``dim``.

    Example:
        >>> import torch
        >>> from deqseq.layers import GatedRMSNorm
        >>> GatedRMSNorm(2)(torch.zeros(1, 2), torch.ones(1, 2)).shape
        torch.Size([1, 2])
    """

    @checked
    def __init__(
        self,
        dim: PositiveInt,
        eps: NonNegativeFloat = 1e-5,
        groups: PositiveInt = 1,
    ) -> None:
        super().__init__()
        if dim % groups:
            raise ValueError(f"GatedRMSNorm.groups must divide dim = {dim}, got {groups}")
        self.eps, self.groups = eps, groups
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Channels, gate: Channels) -> Channels:
        """Normalise ``x`` gated by ``gate``, both ``(*batch, dim)``."""
        gated, weight = x * F.silu(gate), self.weight.to(x.dtype)
        if self.groups == 1:
            return F.rms_norm(gated, weight.shape, weight, self.eps)
        grouped = gated.unflatten(-1, (self.groups, -1))
        return F.rms_norm(grouped, grouped.shape[-1:], None, self.eps).flatten(-2) * weight
