"""Attention with rotary positions, grouped heads and an injection."""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from deqseq.arguments import PositiveFloat, PositiveInt, check_like, checked
from deqseq.layers.rms_norm import RMSNorm
from deqseq.layers.rotary import RotaryTables, rotate
from deqseq.types import Sequence

HeadTokens = Float[Tensor, "batch kv_heads length headdim"]
Injected = Float[Tensor, "batch length injected"]


class KeyValues(NamedTuple):
    """Keys, already turned to their positions, and values."""

    keys: HeadTokens
    values: HeadTokens


class Past(NamedTuple):
    """Keys and values of ``length`` committed tokens, in a buffer with room for new ones."""

    buffer: KeyValues
    length: int

    def joined(self, new: KeyValues) -> KeyValues:
        """All keys and values, those of the ``new`` tokens last.

        They are written into the buffer, unless a graph is being built, or the buffer's dtype would
        round them.
        """
        length, total = self.length, self.length + new.keys.shape[2]
        pairs = zip(self.buffer, new, strict=True)
        # autograd needs the keys of every iteration unchanged
        if torch.is_grad_enabled() or self.buffer.keys.dtype != new.keys.dtype:
            return KeyValues(
                *(torch.cat([old[:, :, :length].to(x.dtype), x], dim=2) for old, x in pairs)
            )
        for buffer, x in pairs:
            buffer[:, :, length:total] = x
        return KeyValues(*(buffer[:, :, :total] for buffer in self.buffer))


class DotProduct:
    """torch's attention; ``Attention.attend`` may be another object with these two methods."""

    def mask(self, z: Sequence, cache: Any) -> Any:
        """Which tokens the new ones attend to; made once for all layers of an iteration."""
        return None if cache is None else cache.visible

    def __call__(
        self,
        layer: "Attention",
        q: Float[Tensor, "batch heads new headdim"],
        k: Float[Tensor, "batch kv_heads all headdim"],
        v: Float[Tensor, "batch kv_heads all headdim"],
        mask: Any,
        *,
        causal: bool,
    ) -> Float[Tensor, "batch new heads headdim"]:
        """Mixed values, with what :meth:`mask` returned; ``causal``: without a mask each token
        attends to those up to it.
        """
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=layer.groups > 1
        )
        return mixed.transpose(1, 2)


class Attention(nn.Module):
    r"""Multi-head attention; parameters are named as in the public Llama models.

    .. math:: [q, k, v] = [W_q, W_k, W_v]\, x + \text{injection}, \qquad
              y = W_o\, \mathrm{softmax}\Bigl(\tfrac{R q\, (R k)^\top}{\sqrt d} +
              \text{mask}\Bigr)\, v

    The injection enters before the rotation :math:`R`; the mask is causal, or leaves out padding.

    Args:
        d_model: width of the input and output.
        n_heads: heads of the queries.
        n_kv_heads: heads of keys and values; divides ``n_heads``.
        headdim: channels per head, even.
        qk_norm: whether queries and keys are normalised, each over all heads, as in OLMo 2.
        qk_bias: whether their projections have a bias, as in Huginn.
        norm_eps: epsilon of the norms.
        causal: whether a token attends to those up to it only.

    Raises:
        ValueError: ``n_kv_heads`` does not divide ``n_heads``, or ``headdim`` is odd.

    Attributes:
        attend: what computes the attention and its mask, by default with torch's function.

    Example:
        >>> import torch
        >>> from deqseq.layers import Attention
        >>> from deqseq.layers import rotary_frequencies, rotary_tables
        >>> attention = Attention(d_model=8, n_heads=2, n_kv_heads=1, headdim=4)
        >>> tables = rotary_tables(
        ...     torch.arange(5)[None], rotary_frequencies(4, 10000.0), torch.float32
        ... )
        >>> y, key_values = attention(torch.zeros(2, 5, 8), None, tables)
        >>> y.shape, key_values.keys.shape
        (torch.Size([2, 5, 8]), torch.Size([2, 1, 5, 4]))
    """

    attend: Any = DotProduct()

    @checked
    def __init__(
        self,
        d_model: PositiveInt,
        n_heads: PositiveInt,
        n_kv_heads: PositiveInt,
        headdim: PositiveInt,
        *,
        qk_norm: bool = False,
        qk_bias: bool = False,
        norm_eps: PositiveFloat = 1e-5,
        causal: bool = True,
    ) -> None:
        super().__init__()
        check_heads("Attention", n_heads, n_kv_heads, headdim)
        self.causal = causal
        self.headdim, self.groups = headdim, n_heads // n_kv_heads
        queries, values = n_heads * headdim, n_kv_heads * headdim
        self.parts = (queries, values, values)
        self.q_proj = nn.Linear(d_model, queries, bias=qk_bias)
        self.k_proj = nn.Linear(d_model, values, bias=qk_bias)
        self.v_proj = nn.Linear(d_model, values, bias=False)
        self.q_norm = RMSNorm(queries, norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(values, norm_eps) if qk_norm else nn.Identity()
        self.o_proj = nn.Linear(queries, d_model, bias=False)

    @property
    def injected_width(self) -> int:
        """Width of the injection: queries, keys and values."""
        return sum(self.parts)

    def forward(
        self,
        x: Sequence,
        injection: Injected | None,
        tables: RotaryTables,
        past: Past | None = None,
        mask: Any = None,
    ) -> tuple[Sequence, KeyValues]:
        """Outputs of the shape of ``x``, and the keys and values of its tokens.

        Args:
            x: inputs, ``(batch, length, d_model)``.
            injection: added to queries, keys and values, ``(batch, length, injected_width)``; None
                adds nothing.
            tables: what :func:`~deqseq.layers.rotary_tables` gives for these tokens.
            past: the tokens before; without a graph, new keys and values are written into its
                buffer. Default: none.
            mask: what ``attend.mask`` returned. Default: each token attends to itself and those
                before it, or to all if it is not causal.
        """
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        if injection is not None:
            more_q, more_k, more_v = injection.split(self.parts, dim=-1)
            q, k, v = q + more_q, k + more_k, v + more_v
        parts = self.q_norm(q), self.k_norm(k), v
        q, k, v = (part.unflatten(2, (-1, self.headdim)) for part in parts)
        q = rotate(q, tables).transpose(1, 2)
        new = KeyValues(rotate(k, tables).transpose(1, 2), v.transpose(1, 2))
        seen = new if past is None else past.joined(new)
        keys, values = (part.to(q.dtype) for part in seen)
        mixed = self.attend(self, q, keys, values, mask, causal=self.causal and past is None)
        check_like("Attention.attend", mixed, q.transpose(1, 2), "the queries")
        return self.o_proj(mixed.flatten(2)), new


def check_heads(name: str, n_heads: int, n_kv_heads: int, headdim: int) -> None:
    """Refuse sizes that no attention can have; ``name`` is whose arguments they are."""
    if headdim % 2:
        raise ValueError(
            f"{name}.headdim must be even for the rotary embedding, got headdim {headdim}"
        )
    if n_heads % n_kv_heads:
        raise ValueError(
            f"{name}.n_kv_heads must divide n_heads = {n_heads}, got n_kv_heads {n_kv_heads}"
        )
