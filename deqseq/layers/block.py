"""The feed-forward layer, and residual blocks of it and the Mamba2 mixer or attention."""

from typing import Annotated, Any, Literal

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from deqseq.arguments import AtLeast, checked
from deqseq.layers.attention import Attention, KeyValues, Past
from deqseq.layers.mamba2_mixer import Mamba2Mixer, MixerAux, MixerState
from deqseq.layers.rms_norm import RMSNorm
from deqseq.layers.rotary import RotaryTables
from deqseq.ops import Backend


class SwiGLU(nn.Module):
    r"""Gated feed-forward layer, :math:`W_\mathrm{down} (\mathrm{silu}(W_\mathrm{gate} x) \odot
    W_\mathrm{up} x)`.

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

    @checked
    def __init__(self, dim: Annotated[int, AtLeast(1)], width: Annotated[int, AtLeast(1)]) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(dim, width, bias=False)
        self.up_proj = nn.Linear(dim, width, bias=False)
        self.down_proj = nn.Linear(width, dim, bias=False)

    def forward(self, x: Float[Tensor, "*batch dim"]) -> Float[Tensor, "*batch dim"]:
        """Transform ``x``, ``(*batch, dim)``."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mamba2Block(nn.Module):
    r"""Mixer and optional feed-forward layer, each with a norm before it and a residual path.

    .. math:: z \leftarrow z + m \odot \mathrm{mixer}(\mathrm{norm}(z), \text{injection}), \qquad
              z \leftarrow z + \mathrm{mlp}(\mathrm{norm}(z))

    Args:
        mixer: the sequence mixer.
        d_model: width.
        mlp_width: hidden width of the feed-forward layer; 0 leaves it out.
        norm_eps: epsilon of the norms.

    Example:
        >>> import torch
        >>> block = Mamba2Block(Mamba2Mixer(8, d_state=4, headdim=4), 8)
        >>> block(torch.zeros(2, 5, 8))[0].shape
        torch.Size([2, 5, 8])
    """

    @checked
    def __init__(
        self,
        mixer: Mamba2Mixer,
        d_model: int,
        mlp_width: Annotated[int, AtLeast(0)] = 0,
        norm_eps: float = 1e-5,
    ) -> None:
        super().__init__()
        self.norm = RMSNorm(d_model, norm_eps)
        self.mixer = mixer
        self.post_norm = RMSNorm(d_model, norm_eps) if mlp_width else None
        self.mlp = SwiGLU(d_model, mlp_width) if mlp_width else None

    def forward(
        self,
        z: Float[Tensor, "batch length d_model"],
        injection: Float[Tensor, "batch length injected"] | None = None,
        state: MixerState | None = None,
        mask: Float[Tensor, "batch length d_model"] | None = None,
        need_aux: bool = False,
        backend: Backend = "auto",
    ) -> tuple[Float[Tensor, "batch length d_model"], MixerAux | None]:
        """The new ``z``, ``(batch, length, d_model)``, and what the mixer's ``state_after`` needs.

        ``mask`` is the dropout mask of the mixer's output, of the shape of ``z``; ``injection``,
        ``state``, ``need_aux`` and ``backend`` are for the mixer.
        """
        mixed, aux = self.mixer(self.norm(z), injection, state, need_aux, backend)
        z = z + (mixed if mask is None else mixed * mask)
        if self.mlp is not None and self.post_norm is not None:
            z = z + self.mlp(self.post_norm(z))
        return z, aux


Norms = Literal["pre", "post", "sandwich", "closed"]
"""Where the norms of a :class:`LlamaBlock` stand."""


class LlamaBlock(nn.Module):
    r"""Attention and feed-forward layer, each with a norm or two and beside a residual path.

    With :math:`g` for either layer, its dropout mask :math:`m`, and norms :math:`n, n_2`:

    .. math::
        \text{pre (Llama):}\quad       & z \leftarrow z + m \odot g(n(z)) \\
        \text{post (OLMo 2):}\quad     & z \leftarrow z + m \odot n_2(g(z)) \\
        \text{sandwich (Ouro):}\quad   & z \leftarrow z + m \odot n_2(g(n(z))) \\
        \text{closed (Huginn):}\quad   & z \leftarrow n_2(z + m \odot g(n(z)))

    The last one keeps the state bounded. Parameters are named as in the public Llama and Ouro
    models.

    Args:
        attention: the sequence mixer.
        d_model: width.
        mlp_width: hidden width of the feed-forward layer.
        norm_eps: epsilon of the norms.
        norms: where they stand.

    Example:
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
        d_model: int,
        mlp_width: int,
        norm_eps: float = 1e-5,
        norms: Norms = "pre",
    ) -> None:
        super().__init__()
        first, second = norms != "post", norms != "pre"
        self.closed = norms == "closed"
        self.input_layernorm = RMSNorm(d_model, norm_eps) if first else None
        self.self_attn = attention
        self.input_layernorm_2 = RMSNorm(d_model, norm_eps) if second else None
        self.post_attention_layernorm = RMSNorm(d_model, norm_eps) if first else None
        self.mlp = SwiGLU(d_model, mlp_width)
        self.post_attention_layernorm_2 = RMSNorm(d_model, norm_eps) if second else None

    def forward(
        self,
        z: Float[Tensor, "batch length d_model"],
        injection: Float[Tensor, "batch length injected"] | None,
        tables: RotaryTables,
        past: Past | None = None,
        mask: Float[Tensor, "batch length d_model"] | None = None,
        attention_mask: Any = None,
    ) -> tuple[Float[Tensor, "batch length d_model"], KeyValues]:
        """The new ``z``, ``(batch, length, d_model)``, and the keys and values of its tokens.

        ``mask`` is the dropout mask of both layers' outputs, of the shape of ``z``; ``injection``,
        ``tables``, ``past`` and ``attention_mask`` are for the attention.
        """
        mixed = z if self.input_layernorm is None else self.input_layernorm(z)
        mixed, own = self.self_attn(mixed, injection, tables, past, attention_mask)
        z = self._added(z, mixed, self.input_layernorm_2, mask)
        mixed = self.mlp(
            z if self.post_attention_layernorm is None else self.post_attention_layernorm(z)
        )
        return self._added(z, mixed, self.post_attention_layernorm_2, mask), own

    def _added(self, z: Tensor, mixed: Tensor, norm: RMSNorm | None, mask: Tensor | None) -> Tensor:
        """The residual path with a layer's output, and its second norm."""
        if norm is not None and not self.closed:
            mixed = norm(mixed)
        z = z + (mixed if mask is None else mixed * mask)
        return norm(z) if norm is not None and self.closed else z
