"""Residual blocks of a feed-forward layer and the Mamba2 mixer or attention, and their dropout."""

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from deqseq.arguments import NonNegativeFloat, NonNegativeInt, PositiveInt, Probability, checked
from deqseq.layers.attention import Attention, Injected, KeyValues, Past
from deqseq.layers.mamba2_mixer import Mamba2Mixer, MixerAux, MixerState
from deqseq.layers.rms_norm import Channels, RMSNorm
from deqseq.layers.rotary import RotaryTables
from deqseq.ops import Backend
from deqseq.types import Sequence


class SwiGLU(nn.Module):
    r"""Gated feed-forward layer.

    .. math:: y = W_\mathrm{down} (\mathrm{silu}(W_\mathrm{gate} x) \odot W_\mathrm{up} x)

    Args:
        dim: size of the input and output.
        width: size of the hidden layer.

    References:
        Shazeer, GLU Variants Improve Transformer, 2020, arXiv 2002.05202.

    Example:
        >>> from deqseq.layers import SwiGLU
        >>> import torch
        >>> SwiGLU(4, 8)(torch.ones(1, 4)).shape
        torch.Size([1, 4])
    """

    @checked
    def __init__(self, dim: PositiveInt, width: PositiveInt) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, width, bias=False)
        self.up_proj = nn.Linear(dim, width, bias=False)
        self.down_proj = nn.Linear(width, dim, bias=False)

    def forward(self, x: Channels) -> Channels:
        """Transform ``x``, ``(*batch, dim)``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mamba2Block(nn.Module):
    r"""Mixer and optional feed-forward layer, each with a norm before it and a residual path.

    .. math:: z \leftarrow z + m \odot \mathrm{mixer}(\mathrm{norm}(z), \text{injection}), \qquad
              z \leftarrow z + \mathrm{mlp}(\mathrm{norm}(z))

    with the dropout mask :math:`m`.

    Args:
        mixer: the sequence mixer.
        d_model: width.
        mlp_width: hidden width of the feed-forward layer; 0 leaves it out.
        norm_eps: epsilon of the norms.

    Example:
        >>> from deqseq.layers import Mamba2Block, Mamba2Mixer
        >>> import torch
        >>> block = Mamba2Block(Mamba2Mixer(8, d_state=4, headdim=4), 8)
        >>> block(torch.zeros(2, 5, 8))[0].shape
        torch.Size([2, 5, 8])
    """

    @checked
    def __init__(
        self,
        mixer: Mamba2Mixer,
        d_model: PositiveInt,
        mlp_width: NonNegativeInt = 0,
        norm_eps: NonNegativeFloat = 1e-5,
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(d_model, norm_eps)
        self.mixer = mixer
        self.post_norm: Any = RMSNorm(d_model, norm_eps) if mlp_width else None
        self.mlp = SwiGLU(d_model, mlp_width) if mlp_width else None

    def forward(
        self,
        z: Sequence,
        injection: Injected | None = None,
        state: MixerState | None = None,
        mask: Sequence | None = None,
        need_aux: bool = False,
        backend: Backend = "auto",
    ) -> tuple[Sequence, MixerAux | None]:
        """The new ``z``, ``(batch, length, d_model)``, and what the mixer's ``state_after`` needs.

        ``mask`` is the dropout mask of the mixer's output, of the shape of ``z``; ``injection``,
        ``state``, ``need_aux`` and ``backend`` are for the mixer.
        """
        mixed, aux = self.mixer(self.norm(z), injection, state, need_aux, backend)
        z = z + (mixed if mask is None else mixed * mask)
        if self.mlp is not None:
            z = z + self.mlp(self.post_norm(z))
        return z, aux


Norms = Literal["pre", "post", "sandwich", "closed", "outer"]
"""Where the norms of a :class:`LlamaBlock` stand."""


class LlamaBlock(nn.Module):
    r"""Attention and feed-forward layer, each with one or two norms and a residual path.

    With :math:`g` for either layer, the block's dropout mask :math:`m`, and norms :math:`n, n_2`:

    .. math::
        \text{pre (Llama):}\quad       & z \leftarrow z + m \odot g(n(z)) \\
        \text{post (OLMo 2):}\quad     & z \leftarrow z + m \odot n_2(g(z)) \\
        \text{sandwich (Ouro):}\quad   & z \leftarrow z + m \odot n_2(g(n(z))) \\
        \text{closed (Huginn):}\quad   & z \leftarrow n_2(z + m \odot g(n(z))) \\
        \text{outer (TRM):}\quad       & z \leftarrow n_2(z + m \odot g(z))

    The last two keep the state bounded; TRM is the Tiny Recursive Model. Parameters are named as in
    the public Llama and Ouro models.

    Args:
        attention: the sequence mixer.
        d_model: width.
        mlp_width: hidden width of the feed-forward layer.
        norm_eps: epsilon of the norms.
        norms: one of the five names above.

    Example:
        >>> from deqseq.layers import Attention, LlamaBlock
        >>> import torch
        >>> block = LlamaBlock(Attention(8, n_heads=2, n_kv_heads=2, headdim=4), 8, 16)
        >>> tables = torch.ones(1, 5, 1, 4), torch.zeros(1, 5, 1, 4)
        >>> block(torch.zeros(2, 5, 8), None, tables)[0].shape
        torch.Size([2, 5, 8])
    """

    @checked
    def __init__(
        self,
        attention: Attention,
        d_model: PositiveInt,
        mlp_width: PositiveInt,
        norm_eps: NonNegativeFloat = 1e-5,
        norms: Norms = "pre",
    ) -> None:
        super().__init__()
        self.closed = norms in ("closed", "outer")
        norm = partial(RMSNorm, d_model, norm_eps)
        first = nn.Identity if norms in ("post", "outer") else norm
        second = nn.Identity if norms == "pre" else norm
        self.input_layernorm = first()
        self.self_attn = attention
        self.input_layernorm_2 = second()
        self.post_attention_layernorm = first()
        self.mlp = SwiGLU(d_model, mlp_width)
        self.post_attention_layernorm_2 = second()

    def forward(
        self,
        z: Sequence,
        injection: Injected | None,
        tables: RotaryTables,
        past: Past | None = None,
        mask: Sequence | None = None,
        attention_mask: Any = None,
    ) -> tuple[Sequence, KeyValues]:
        """The new ``z``, ``(batch, length, d_model)``, and the keys and values of its tokens.

        ``mask`` is the dropout mask of both layers' outputs, of the shape of ``z``; ``injection``,
        ``tables``, ``past`` and ``attention_mask`` are for the attention.
        """
        x = self.input_layernorm(z)
        x, key_values = self.self_attn(x, injection, tables, past, attention_mask)
        z = self._added(z, x, self.input_layernorm_2, mask)
        x = self.mlp(self.post_attention_layernorm(z))
        return self._added(z, x, self.post_attention_layernorm_2, mask), key_values

    def _added(self, z: Tensor, x: Tensor, norm: nn.Module, mask: Tensor | None) -> Tensor:
        """The residual path with a layer's output ``x``, and its second norm."""
        if not self.closed:
            x = norm(x)
        z = z + (x if mask is None else x * mask)
        return norm(z) if self.closed else z


@checked
def dropout_mask(like: Sequence, p: Probability) -> Sequence:
    r"""A mask to multiply by: zero with probability ``p``, else :math:`1 / (1 - p)`.

    Ordinary dropout would draw a new mask at each iteration, and the map would have no fixed point.

    Args:
        like: a tensor of the mask's shape, ``(batch, length, dim)``, dtype and device.
        p: probability of zero, in [0, 1).

    Raises:
        TypeError: ``like`` is not of a floating-point dtype.
        ValueError: ``p`` is not in [0, 1).

    References:
        Gal and Ghahramani, A Theoretically Grounded Application of Dropout in Recurrent Neural
        Networks, NeurIPS 2016, arXiv 1512.05287.

    Example:
        >>> import torch
        >>> from deqseq.layers import dropout_mask
        >>> sorted(set(dropout_mask(torch.zeros(1, 50, 4), 0.5).flatten().tolist()))
        [0.0, 2.0]
    """
    if not like.is_floating_point():
        raise TypeError(f"like must be of a floating-point dtype, got {like.dtype}")
    return torch.empty_like(like).bernoulli_(1 - p).div_(1 - p)
