"""Causal attention with rotary positions, grouped heads and an injection."""

from typing import Annotated, Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from deqseq.arguments import AtLeast, Within, checked
from deqseq.layers.rms_norm import RMSNorm
from deqseq.layers.rotary import RotaryTables, rotate

HeadTokens = Float[Tensor, "batch kv_heads length headdim"]


class KeyValues(NamedTuple):
    """Keys, already turned to their positions, and values."""

    keys: HeadTokens
    values: HeadTokens


class Past(NamedTuple):
    """Keys and values of ``length`` committed tokens, in a buffer with room for those
    of the call.
    """

    buffer: KeyValues
    length: int

    def joined(self, own: KeyValues) -> KeyValues:
        """All keys and values, with ``own`` of the new tokens last.

        They are written into the buffer, unless a graph is being built, or the buffer's dtype would
        round them.
        """
        length, total = self.length, self.length + own.keys.shape[2]
        # autograd needs the keys of every iteration unchanged
        if torch.is_grad_enabled() or self.buffer.keys.dtype != own.keys.dtype:
            committed = (
                (kept[:, :, :length].to(new.dtype), new)
                for kept, new in zip(self.buffer, own, strict=True)
            )
            return KeyValues(*(torch.cat(pair, dim=2) for pair in committed))
        for kept, new in zip(self.buffer, own, strict=True):
            kept[:, :, length:total] = new
        return KeyValues(*(kept[:, :, :total] for kept in self.buffer))


class DotProduct:
    """Mixes values by torch's attention; ``Attention.attend`` may be another object with these two
    methods.
    """

    def mask(self, z: Float[Tensor, "batch new d_model"], cache: Any) -> Any:
        """Which tokens of the ``cache`` and of ``z`` the new ones attend to, once for all layers of
        an iteration.
        """
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
        """Mixed values; ``mask`` is what :meth:`mask` returned, ``causal``: there are no tokens
        before the new ones.
        """
        grouped = layer.groups > 1
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped
        )
        return mixed.transpose(1, 2)


class Attention(nn.Module):
    r"""Multi-head causal attention; parameters are named as in the public Llama models.

    .. math:: [q, k, v] = [W_q, W_k, W_v]\, x + \text{injection}, \qquad
              y = W_o\, \mathrm{softmax}\Bigl(\tfrac{R q\, (R k)^\top}{\sqrt d} +
              \text{causal}\Bigr)\, v

    The injection enters before the rotation :math:`R`.

    Args:
        d_model: width of the input and output.
        n_heads: heads of the queries.
        n_kv_heads: heads of keys and values; divides ``n_heads``.
        headdim: channels per head, even.
        qk_norm: whether queries and keys are normalised, each over all of its heads, as in OLMo 2.
        qk_bias: whether their projections have a bias, as in Huginn.
        norm_eps: epsilon of the norms.

    Raises:
        ValueError: heads that the key-value heads do not divide, or an odd ``headdim``.

    Attributes:
        attend: what mixes the values, by default torch's attention, and makes the mask for it.

    Example:
        >>> from deqseq.layers import rotary_frequencies, rotary_tables
        >>> attention = Attention(d_model=8, n_heads=2, n_kv_heads=1, headdim=4)
        >>> tables = rotary_tables(
        ...     torch.arange(5)[None], rotary_frequencies(4, 10000.0), torch.float32
        ... )
        >>> y, kept = attention(torch.zeros(2, 5, 8), None, tables)
        >>> y.shape, kept.keys.shape
        (torch.Size([2, 5, 8]), torch.Size([2, 1, 5, 4]))
    """

    attend: Any = DotProduct()

    @checked
    def __init__(
        self,
        d_model: Annotated[int, AtLeast(1)],
        n_heads: Annotated[int, AtLeast(1)],
        n_kv_heads: Annotated[int, AtLeast(1)],
        headdim: Annotated[int, AtLeast(1)],
        *,
        qk_norm: bool = False,
        qk_bias: bool = False,
        norm_eps: Annotated[float, Within("(0, inf)")] = 1e-5,
    ) -> None:
        super().__init__()
        if n_heads % n_kv_heads or headdim % 2:
            raise ValueError(
                "Attention needs n_kv_heads that divide n_heads and an even headdim, got "
                f"n_heads {n_heads}, n_kv_heads {n_kv_heads}, headdim {headdim}"
            )
        self.headdim, self.groups = headdim, n_heads // n_kv_heads
        self.parts = (n_heads * headdim, n_kv_heads * headdim, n_kv_heads * headdim)
        biases = (qk_bias, qk_bias, False)
        self.q_proj, self.k_proj, self.v_proj = (
            nn.Linear(d_model, part, bias=bias)
            for part, bias in zip(self.parts, biases, strict=True)
        )
        self.q_norm, self.k_norm = (
            RMSNorm(part, norm_eps) if qk_norm else None for part in self.parts[:2]
        )
        self.o_proj = nn.Linear(self.parts[0], d_model, bias=False)

    @property
    def injected_width(self) -> int:
        """Width of the injection: queries, keys and values."""
        return sum(self.parts)

    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        injection: Float[Tensor, "batch length injected"] | None,
        tables: RotaryTables,
        past: Past | None = None,
        mask: Any = None,
    ) -> tuple[Float[Tensor, "batch length d_model"], KeyValues]:
        """Outputs of the shape of ``x``, and the keys and values of its tokens.

        Args:
            x: inputs, ``(batch, length, d_model)``.
            injection: added to queries, keys and values, ``(batch, length, injected_width)``; None
                adds nothing.
            tables: rotary tables of these tokens.
            past: the tokens before; without a graph, new keys and values are written into its
                buffer. Default: none.
            mask: what ``attend.mask`` returned. Default: each token attends to itself and those
                before it.
        """
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        if injection is not None:
            parts = tuple(
                part + more
                for part, more in zip(parts, injection.split(self.parts, dim=-1), strict=True)
            )
        if self.q_norm is not None and self.k_norm is not None:
            parts = (self.q_norm(parts[0]), self.k_norm(parts[1]), parts[2])
        q, k, v = (part.unflatten(2, (-1, self.headdim)) for part in parts)
        own = KeyValues(rotate(k, tables).transpose(1, 2), v.transpose(1, 2))
        seen = own if past is None else past.joined(own)
        q, keys, values = (
            rotate(q, tables).transpose(1, 2),
            seen.keys.to(q.dtype),
            seen.values.to(q.dtype),
        )
        mixed = self.attend(self, q, keys, values, mask, causal=past is None)
        return self.o_proj(mixed.flatten(2)), own
