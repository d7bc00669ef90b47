"""A stack of Llama blocks."""

from dataclasses import dataclass, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from deqseq.arguments import AtLeast, Within, checked
from deqseq.backbones.base import Backbone, Inputs, check_cache, check_sequence
from deqseq.backbones.llama_cache import LlamaCache, commit
from deqseq.layers import (
    Attention,
    LlamaBlock,
    Norms,
    RMSNorm,
    RotaryScaling,
    apply_weight_norm,
    dropout_mask,
    rotary_frequencies,
    rotary_tables,
)
from deqseq.layers.attention import KeyValues, Past
from deqseq.layers.weight_norm import has_weight_norm
from deqseq.types import Counts, Mask, Sequence


@checked
@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of a :class:`Llama` backbone.

    Args:
        d_model: width.
        n_layers: blocks.
        n_heads: heads of the queries.
        n_kv_heads: heads of keys and values, a divisor of ``n_heads``. Default: ``n_heads``.
        headdim: channels per head, even. Default: ``d_model / n_heads``.
        mlp_width: hidden width of the feed-forward layers. Default: ``int(2/3 * 4 * d_model)``, as
            in the paper.
        rope_theta: base of the rotary embedding.
        rope_scaling: the frequency scaling of Llama 3.1 and later. Default: none.
        norm_eps: epsilon of all norms.
        norms: where the norms of a block stand, as :class:`~deqseq.layers.LlamaBlock` says:
            ``"pre"`` (Llama), ``"post"`` (OLMo 2), ``"sandwich"`` (Ouro) or ``"closed"`` (Huginn).
        qk_norm: whether queries and keys are normalised, each over all of its heads, as in OLMo 2.
        qk_bias: whether the projections to queries and keys have a bias, as in Huginn.
        final_norm: whether a norm follows the last block.
        float32_rotary: whether rotary angles are float32 in models of any dtype, as in the public
            Llama code. False: they have the model's dtype, and float32 at least.
        dropout: probability, in [0, 1); one mask per layer and solve.
        weight_norm: whether linear maps are weight-normalised, as in the paper.
        injection: whether the input enters every layer; without, it serves explicit models,
            ``start="input"``, and :class:`Injected`, which adds the input to the state.

    Raises:
        TypeError, ValueError: names the field, what it got and what it wants.

    Example:
        >>> LlamaConfig(d_model=64, n_heads=4).mlp_width is None
        True
    """

    d_model: Annotated[int, AtLeast(1)]
    n_layers: Annotated[int, AtLeast(1)] = 1
    n_heads: Annotated[int, AtLeast(1)] = 8
    n_kv_heads: Annotated[int, AtLeast(1)] | None = None
    headdim: Annotated[int, AtLeast(1)] | None = None
    mlp_width: Annotated[int, AtLeast(1)] | None = None
    rope_theta: Annotated[float, Within("(0, inf)")] = 500000.0
    rope_scaling: RotaryScaling | None = None
    norm_eps: Annotated[float, Within("(0, inf)")] = 1e-5
    norms: Norms = "pre"
    qk_norm: bool = False
    qk_bias: bool = False
    final_norm: bool = True
    float32_rotary: bool = True
    dropout: Annotated[float, Within("[0, 1)")] = 0.0
    weight_norm: bool = True
    injection: bool = True

    def __post_init__(self) -> None:
        if self.headdim is None and self.d_model % self.n_heads:
            raise ValueError(
                f"LlamaConfig.n_heads must divide d_model = {self.d_model} (or give headdim), got "
                f"{self.n_heads}"
            )
        if self.head_width % 2:
            raise ValueError(
                f"LlamaConfig.headdim must be even for the rotary embedding, got {self.head_width}"
            )
        if self.n_heads % self.kv_heads:
            raise ValueError(
                f"LlamaConfig.n_kv_heads must divide n_heads = {self.n_heads}, got "
                f"{self.n_kv_heads}"
            )

    @property
    def head_width(self) -> int:
        """Channels per head."""
        return self.headdim or self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_kv_heads or self.n_heads


class Llama(Backbone[LlamaCache]):
    r"""Transformer blocks and a final norm; the injection enters queries, keys and values of every
    layer.

    With the switches of its configuration these are also the blocks of OLMo 2, Ouro and Huginn.

    .. math:: u = W_u\, \mathrm{RMSNorm}(x) + b_u, \qquad
              f(z) = \mathrm{RMSNorm}(\mathrm{block}_n(\ldots \mathrm{block}_1(z, u) \ldots, u))

    Parameters are named as in the public Llama models: ``layers.0.self_attn.q_proj.weight``,
    ``norm.weight``.

    Args:
        config: sizes and switches.

    References:
        Grattafiori et al., The Llama 3 Herd of Models, 2024, arXiv 2407.21783. Schöne et al.,
        Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827, section 3.

    Example:
        >>> backbone = Llama(LlamaConfig(d_model=16, n_heads=4))
        >>> x = torch.randn(2, 5, 16)
        >>> z, _ = backbone(torch.zeros(2, 5, 16), backbone.prepare(x))
        >>> z.shape
        torch.Size([2, 5, 16])
    """

    @checked
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self.d_model, eps = config, config.d_model, config.norm_eps
        blocks = [_block(config) for _ in range(config.n_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(self.d_model, eps) if config.final_norm else nn.Identity()
        width = blocks[0].self_attn.injected_width
        self.injection_norm: Any = RMSNorm(self.d_model, eps) if config.injection else None
        self.injection = nn.Linear(self.d_model, width) if config.injection else None
        if config.weight_norm:
            apply_weight_norm(self)

    def prepare(
        self, x: Sequence, cache: LlamaCache | None = None, mask: Mask | None = None
    ) -> Inputs:
        check_sequence(x, self.d_model)
        config, tokens = self.config, x.shape[1]
        shape = (config.kv_heads, None, config.head_width)
        check_cache(cache, LlamaCache, x, [shape] * (2 * len(self.layers)))
        positions = (
            torch.arange(tokens, device=x.device)[None]
            if cache is None
            else cache.positions(tokens)
        )
        exact = (
            torch.float32 if config.float32_rotary else torch.promote_types(x.dtype, torch.float32)
        )
        frequencies = rotary_frequencies(
            config.head_width, config.rope_theta, config.rope_scaling, x.device, exact
        )
        injection = None if self.injection is None else self.injection(self.injection_norm(x))
        drops = self.training and config.dropout > 0
        dropout = tuple(dropout_mask(x, config.dropout) for _ in self.layers if drops)
        return Inputs(injection, dropout, rotary_tables(positions, frequencies, x.dtype))

    def forward(
        self,
        z: Sequence,
        inputs: Inputs,
        cache: LlamaCache | None = None,
        *,
        need_aux: bool = False,
    ) -> tuple[Sequence, tuple[KeyValues, ...] | None]:
        past: tuple[Past, ...] = ()
        if cache is not None:
            cache = cache.reserve(z.shape[1])  # does nothing if the solve has reserved already
            past = tuple(Past(layer, cache.length) for layer in cache.layers)
        first: Any = self.layers[0]
        mask = first.self_attn.attend.mask(z, cache)
        z, kept = self.run(z, inputs.injection, inputs.rotary, past, inputs.dropout, mask)
        return z, kept if need_aux else None

    def advance(
        self,
        cache: LlamaCache | None,
        aux: tuple[KeyValues, ...],
        tokens: int,
        counts: Counts | None = None,
    ) -> LlamaCache:
        return commit(cache, aux, tokens, counts)

    def sizes(self) -> LlamaConfig:
        return replace(self.config, weight_norm=has_weight_norm(self))

    def _stack(
        self,
        z: Tensor,
        injected: Tensor | None,
        tables: tuple[Tensor, ...],
        past: tuple[Past, ...],
        dropout: tuple[Tensor, ...],
        attention_mask: Any,
    ) -> tuple[Tensor, tuple[KeyValues, ...]]:
        """All blocks and the final norm, from tensors to tensors."""
        kept = []
        for i, block in enumerate(self.layers):
            before, mask = past[i] if past else None, dropout[i] if dropout else None
            z, own = self.run_block(block, z, injected, tables, before, mask, attention_mask)
            kept.append(own)
        return self.norm(z), tuple(kept)


def _block(config: LlamaConfig) -> LlamaBlock:
    sizes = (config.d_model, config.n_heads, config.kv_heads, config.head_width)
    attention = Attention(
        *sizes, qk_norm=config.qk_norm, qk_bias=config.qk_bias, norm_eps=config.norm_eps
    )
    width = config.mlp_width or int(8 * config.d_model / 3)
    return LlamaBlock(attention, config.d_model, width, config.norm_eps, config.norms)
