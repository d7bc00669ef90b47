"""The gated feed-forward layer."""

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class SwiGLU(nn.Module):
    r"""Gated feed-forward layer, :math:`W_\mathrm{down} (\mathrm{silu}(W_\mathrm{gate} x) \odot W_\mathrm{up} x)`.

    Args:
        dim: size of the input and output.
        width: size of the hidden layer.

    References:
        Shazeer, GLU Variants Improve Transformer, 2020, arXiv 2002.05202.

    Example:
        >>> import torch
        >>> SwiGLU(4, 8)(torch.ones(1, 4)).shape
        torch.Size([1, 4])
    """

    def __init__(self, dim: int, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, width, bias=False)
        self.up_proj = nn.Linear(dim, width, bias=False)
        self.down_proj = nn.Linear(width, dim, bias=False)

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Transform ``x``, ``(*batch, dim)``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
