"""A stack of Llama blocks, and its cache of keys and values."""

import math
from dataclasses import dataclass, field, replace
from itertools import repeat
from threading import get_ident

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from deqseq.arguments import (
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    check_integer,
    checked,
)
from deqseq.backbones.base import BlockStack, Cache, Inputs, SkipScale, check_cache
from deqseq.layers import (
    Attention,
    LlamaBlock,
    Norms,
    RMSNorm,
    RotaryScaling,
    rotary_frequencies,
    rotary_tables,
)
from deqseq.layers.attention import KeyValues, Past, check_heads
from deqseq.rows import map_tensors, take, tensors_of
from deqseq.types import Counts, Mask, RowIndex, Sequence, float32_at_least


@checked
@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and switches of a :class:`Llama` backbone.

    Args:
        d_model: width.
        n_layers: number of blocks.
        n_heads: heads of the queries.
        n_kv_heads: heads of keys and values, a divisor of ``n_heads``. Default: ``n_heads``.
        headdim: channels per head, even. Default: ``d_model / n_heads``.
        mlp_width: hidden width of the feed-forward layers. Default: ``int(8 * d_model / 3)``, as in
            the paper.
        rope_theta: base of the rotary embedding.
        rope_scaling: the frequency scaling of Llama 3.1 and later. Default: none.
        norm_eps: epsilon of all norms.
        norms: positions of the norms in a block, as in :class:`~deqseq.layers.LlamaBlock`:
            ``"pre"`` (Llama), ``"post"`` (OLMo 2), ``"sandwich"`` (Ouro), ``"closed"`` (Huginn) or
            ``"outer"`` (Tiny Recursive Model, and the first Transformers).
        qk_norm: whether queries and keys are normalised, each over all heads, as in OLMo 2.
        qk_bias: whether the projections to queries and keys have a bias, as in Huginn.
        final_norm: whether a norm follows the last block.
        float32_rotary: whether rotary angles are float32 in models of any dtype, as in the public
            Llama code. Otherwise they have the model's dtype, but at least float32.
        dropout: probability, at least 0 and below 1; one mask per block and solve, of the outputs
            of its attention and of its MLP.
        weight_norm: whether linear maps are weight-normalised, as in the paper.
        injection: whether the input enters every layer. :class:`~deqseq.Mamba2Config` says when to
            set it to False.
        skip_scale: factor of the state before the first block, float above 0 and at most 1, as in
            :class:`~deqseq.Mamba2Config`.
        causal: whether a token attends only to tokens up to it. Otherwise it attends to all: there
            are no caches, and all tokens are solved together.
        grid: whether the tokens of a sequence are the cells of a square, one line of it after
            another. Rotary angles then follow the line in half of the channels and the column in
            the other half. Needs ``causal=False``, and a ``headdim`` that 4 divides. Pad a
            rectangle to a square with cells of a separate token.

    Raises:
        TypeError, ValueError: a field of the wrong type or out of its range; sizes that do not fit.

    Example:
        >>> from deqseq import LlamaConfig
        >>> config = LlamaConfig(d_model=64, n_heads=4)
        >>> config.kv_heads, config.head_width
        (4, 16)
    """

    d_model: PositiveInt
    n_layers: PositiveInt = 1
    n_heads: PositiveInt = 8
    n_kv_heads: PositiveInt | None = None
    headdim: PositiveInt | None = None
    mlp_width: PositiveInt | None = None
    rope_theta: PositiveFloat = 500000.0
    rope_scaling: RotaryScaling | None = None
    norm_eps: PositiveFloat = 1e-5
    norms: Norms = "pre"
    qk_norm: bool = False
    qk_bias: bool = False
    final_norm: bool = True
    float32_rotary: bool = True
    dropout: Probability = 0.0
    weight_norm: bool = True
    injection: bool = True
    skip_scale: SkipScale = 1.0
    causal: bool = True
    grid: bool = False

    def __post_init__(self) -> None:
        if self.headdim is None and self.d_model % self.n_heads:
            raise ValueError(
                f"LlamaConfig.n_heads must divide d_model = {self.d_model} (or give headdim), got "
                f"{self.n_heads}"
            )
        check_heads("LlamaConfig", self.n_heads, self.kv_heads, self.head_width)
        if self.grid and (self.causal or self.head_width % 4):
            raise ValueError(
                "LlamaConfig.grid must come with causal=False and a headdim that 4 divides, got "
                f"causal={self.causal}, headdim {self.head_width}"
            )

    @property
    def head_width(self) -> int:
        """Channels per head."""
        return self.headdim or self.d_model // self.n_heads

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.n_kv_heads or self.n_heads


@dataclass
class Claim:
    """The newest of the caches that share buffers, and the thread that may write to them."""

    newest: int = 0
    owner: int = field(default_factory=get_ident)


@dataclass(frozen=True)
class LlamaCache(Cache):
    """Keys and values of the committed tokens, at the beginning of each row.

    Iterations write their keys into the buffers after ``length``. A commit of equally many tokens
    in every row leaves them there: nothing is concatenated. A later cache shares the buffers of the
    previous one. If a newer cache already uses the buffers, they are copied.

    Attributes:
        layers: buffers, one pair per layer, ``(batch, kv_heads, capacity, headdim)``.
        length: committed tokens of the longest row.
        counts: committed tokens of each row, ``(batch,)``. Default: ``length`` in every row.
        claim: who may write to the buffers.
        age: how many caches used these buffers before.
        ahead: how many tokens :meth:`reserve` has prepared for.
        visible: which tokens these attend to, ``(batch or 1, 1, ahead, length + ahead)``. Default:
            all tokens.
    """

    layers: tuple[KeyValues, ...]
    length: int = 0
    counts: Counts | None = None
    claim: Claim = field(default_factory=Claim)
    age: int = 0
    ahead: int = 0
    visible: Bool[Tensor, "batch 1 new all"] | None = None

    def take_rows(self, rows: RowIndex) -> "LlamaCache":
        """Only the given ``rows``, ``(rows,)``, in new buffers."""
        total = self.length + self.ahead
        layers = map_tensors(lambda buffer: buffer[:, :, :total][rows], self.layers)
        visible = self.visible
        if visible is not None and len(visible) > 1:
            visible = visible[rows]
        counts = take(self.counts, rows)
        return LlamaCache(layers, self.length, counts, ahead=self.ahead, visible=visible)

    def tensors(self) -> tuple[Tensor, ...]:
        """Committed keys and values of all layers; zero after the end of a row."""
        committed = tuple(buffer[:, :, : self.length] for buffer in tensors_of(self.layers))
        real = self._real()
        if real is None:
            return committed
        return tuple(tensor * real[:, None, :, None] for tensor in committed)

    def positions(self, tokens: int) -> Int64[Tensor, "rows tokens"]:
        """Positions of the next ``tokens``, ``(batch or 1, tokens)``."""
        after = torch.arange(tokens, device=self.layers[0].keys.device)[None]
        return after + (self.length if self.counts is None else self.counts[:, None])

    @checked
    def reserve(self, tokens: NonNegativeInt) -> "LlamaCache":
        """The same cache with room for ``tokens`` more, and their attention mask."""
        free = self.writable
        if self.ahead == tokens and free:
            return self
        capacity, changes = self.layers[0].keys.shape[2], {}
        if not free or self.length + tokens > capacity:
            capacity = max(self.length + tokens, min(2 * capacity, capacity + 4096))
            room = (0, 0, 0, capacity - self.length)
            layers = map_tensors(lambda old: F.pad(old[:, :, : self.length], room), self.layers)
            changes = {"layers": layers, "claim": Claim(), "age": 0}
        return replace(self, ahead=tokens, visible=self._visible(tokens), **changes)

    def crop(self, tokens: int, /) -> "LlamaCache":
        """The same cache without the last ``tokens`` of each row; the next solve copies it."""
        shortest = self.length if self.counts is None else int(self.counts.min())
        check_integer("tokens", tokens, 0, shortest)
        if tokens == 0:
            return self
        length = self.length - tokens
        # it has no claim to what lies behind
        layers = map_tensors(lambda buffer: buffer[:, :, :length], self.layers)
        return LlamaCache(layers, length, None if self.counts is None else self.counts - tokens)

    @property
    def writable(self) -> bool:
        """Whether no newer cache uses the buffers."""
        frozen = self.layers[0].keys.is_inference() and not torch.is_inference_mode_enabled()
        return self.claim.newest == self.age and self.claim.owner == get_ident() and not frozen

    def _real(self) -> Bool[Tensor, "batch length"] | None:
        """Which columns of the buffers are tokens; None if all of them are."""
        if self.counts is None:
            return None
        return torch.arange(self.length, device=self.counts.device) < self.counts[:, None]

    def _visible(self, tokens: int) -> Tensor | None:
        real = self._real()
        if tokens == 1 and real is None:
            return None
        shape, device = (tokens, self.length + tokens), self.layers[0].keys.device
        causal = torch.ones(shape, dtype=torch.bool, device=device).tril(self.length)[None, None]
        if real is None:
            return causal
        # padding among the new tokens comes after the real ones of its row
        return causal & F.pad(real, (0, tokens), value=True)[:, None, None]


def opened(cache: LlamaCache | None, tokens: int) -> tuple[LlamaCache | None, tuple[Past, ...]]:
    """A cache with room for more ``tokens``, and what the attention of each layer reads of it."""
    if cache is None:
        return None, ()
    cache = cache.reserve(tokens)  # does nothing if the solve has reserved already
    return cache, tuple(Past(layer, cache.length) for layer in cache.layers)


def commit(
    cache: LlamaCache | None,
    new: tuple[KeyValues, ...],
    tokens: int,
    counts: Counts | None = None,
) -> LlamaCache:
    """The cache after the first ``tokens`` of an evaluation, as in :meth:`Backbone.advance`."""
    new = map_tensors(lambda x: x.detach()[:, :, :tokens], new)
    if cache is None:
        cache = LlamaCache(map_tensors(lambda x: x[:, :, :0].contiguous(), new))
    if cache.ahead < tokens or not cache.writable:
        cache = cache.reserve(tokens)
    pairs = list(zip(tensors_of(cache.layers), tensors_of(new), strict=True))
    length = cache.length + tokens
    cache.claim.newest += 1
    whole = LlamaCache(cache.layers, length, None, cache.claim, cache.claim.newest)
    if counts is None and cache.counts is None:
        for buffer, x in pairs:
            buffer[:, :, cache.length : length] = x
        return whole
    places = cache.positions(tokens).expand(len(new[0].keys), -1)
    for buffer, x in pairs:  # what lies after the end of a row will be overwritten
        buffer.scatter_(2, places[:, None, :, None].expand_as(x), x.to(buffer.dtype))
    after = places[:, 0] + (tokens if counts is None else counts)
    shortest, longest = torch.stack(torch.aminmax(after)).tolist()  # one transfer
    return replace(whole, length=longest, counts=None if shortest == longest else after)


class Llama(BlockStack[LlamaCache]):
    r"""Transformer blocks and a final norm; the injection enters all queries, keys and values.

    With the switches of its configuration these are also the blocks of OLMo 2, Ouro and Huginn.

    .. math:: u = W_u\, \mathrm{RMSNorm}(x) + b_u, \qquad
              f(z) = \mathrm{RMSNorm}(\mathrm{block}_n(\ldots \mathrm{block}_1(\alpha z, u) \ldots,
              u))

    with :math:`\alpha` = ``skip_scale``.

    Parameters are named as in the public Llama models: ``layers.0.self_attn.q_proj.weight``,
    ``norm.weight``.

    Args:
        config: sizes and switches.

    References:
        Grattafiori et al., The Llama 3 Herd of Models, 2024, arXiv 2407.21783. Schöne et al.,
        Implicit Language Models are RNNs, ICML 2025, arXiv 2502.07827, section 3.

    Example:
        >>> import torch, deqseq as dq
        >>> backbone = dq.Llama(dq.LlamaConfig(d_model=16, n_heads=4))
        >>> dq.ImplicitModel(backbone)(torch.randn(2, 5, 16)).value.shape
        torch.Size([2, 5, 16])
    """

    @checked
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config, self.d_model = config, config.d_model
        self.layers = nn.ModuleList(_block(config) for _ in range(config.n_layers))
        norm = RMSNorm(config.d_model, config.norm_eps)
        self.norm = norm if config.final_norm else nn.Identity()
        self.add_injection(self.layers[0].self_attn.injected_width)

    @property
    def causal(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """As configured."""
        return self.config.causal

    def prepare(
        self, x: Sequence, cache: LlamaCache | None = None, mask: Mask | None = None
    ) -> Inputs:
        config = self.config
        shape = (config.kv_heads, None, config.head_width)  # those of keys and values
        check_cache(cache, LlamaCache, x, repeat(shape, 2 * len(self.layers)))
        if config.grid:
            positions = grid_positions(x, mask)
        elif cache is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        else:
            positions = cache.positions(x.shape[1])
        dtype = torch.float32
        if not config.float32_rotary:
            dtype = float32_at_least(x)
        turning = config.head_width // (2 if config.grid else 1)
        frequencies = rotary_frequencies(
            turning, config.rope_theta, config.rope_scaling, x.device, dtype
        )
        tables = rotary_tables(positions, frequencies, x.dtype)
        real = None if mask is None or config.causal else mask[:, None, None]
        return replace(self.prepared(x), rotary=tables, real=real)

    def forward(
        self,
        z: Sequence,
        inputs: Inputs,
        cache: LlamaCache | None = None,
        *,
        need_aux: bool = False,
    ) -> tuple[Sequence, tuple[KeyValues, ...] | None]:
        cache, past = opened(cache, z.shape[1])
        mask = self.layers[0].self_attn.attend.mask(z, cache) if self.causal else inputs.real
        z, key_values = self.run(z, inputs.injection, inputs.rotary, past, inputs.dropout, mask)
        return z, key_values if need_aux else None

    def advance(
        self,
        cache: LlamaCache | None,
        aux: tuple[KeyValues, ...],
        tokens: int,
        counts: Counts | None = None,
    ) -> LlamaCache:
        return commit(cache, aux, tokens, counts)

    def _stack(self, z, injected, tables, past, dropout, attention_mask):
        """All blocks and the final norm, from tensors to tensors."""
        z = self.entering(z)
        key_values = []
        for i, block in enumerate(self.layers):
            layer_past = past[i] if past else None
            mask = dropout[i] if dropout else None
            z, new = self.run_block(block, z, injected, tables, layer_past, mask, attention_mask)
            key_values.append(new)
        return self.norm(z), tuple(key_values)


def grid_positions(x: Sequence, mask: Mask | None) -> Int64[Tensor, "rows length 2"]:
    """The line and the column of each token, if the real ones of each row fill a square."""
    counts = [x.shape[1]] if mask is None else mask.sum(dim=1).tolist()
    if any(math.isqrt(count) ** 2 != count for count in counts):
        raise ValueError(
            "the tokens of each row must fill a square, as LlamaConfig.grid says, got "
            f"{counts} tokens"
        )
    sides = torch.tensor([[math.isqrt(count)] for count in counts], device=x.device)
    cells = torch.arange(x.shape[1], device=x.device)[None]
    return torch.stack([cells // sides, cells % sides], dim=2)


def _block(config: LlamaConfig) -> LlamaBlock:
    attention = Attention(
        config.d_model,
        config.n_heads,
        config.kv_heads,
        config.head_width,
        qk_norm=config.qk_norm,
        qk_bias=config.qk_bias,
        norm_eps=config.norm_eps,
        causal=config.causal,
    )
    width = config.mlp_width or int(8 * config.d_model / 3)
    return LlamaBlock(attention, config.d_model, width, config.norm_eps, config.norms)
