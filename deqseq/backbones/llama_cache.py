"""Keys and values of the committed tokens, in buffers with room for later ones."""

from dataclasses import dataclass, field, replace
from threading import get_ident

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn import functional as F

from deqseq.backbones.base import Cache
from deqseq.layers.attention import KeyValues
from deqseq.rows import map_tensors, take
from deqseq.types import RowIndex


@dataclass
class Claim:
    """Which cache is the newest of those that share buffers, and which thread may write to them."""

    newest: int = 0
    owner: int = field(default_factory=get_ident)


@dataclass(frozen=True)
class LlamaCache(Cache):
    """Keys and values of the committed tokens, at the beginning of each row.

    Iterations write their own keys into the buffers after ``length``, and a commit of the same
    tokens in every row leaves them there: nothing is concatenated. A later cache shares the buffers
    of the one before. If one that shares them is newer, the buffers are copied.

    Attributes:
        layers: buffers, one pair per layer, ``(batch, kv_heads, capacity, headdim)``.
        length: committed tokens of the longest row.
        counts: committed tokens of each row, ``(batch,)``; None: as many as ``length``.
        claim: who may write to the buffers.
        age: how many caches came before it in these buffers.
        ahead: how many tokens :meth:`reserve` has prepared for.
        visible: which tokens those attend to, ``(batch or 1, 1, ahead, length + ahead)``; None:
            all.
    """

    layers: tuple[KeyValues, ...]
    length: int = 0
    counts: Int64[Tensor, " batch"] | None = None
    claim: Claim = field(default_factory=Claim)
    age: int = 0
    ahead: int = 0
    visible: Bool[Tensor, "batch 1 new all"] | None = None

    def take_rows(self, rows: RowIndex) -> "LlamaCache":
        """The given ``rows`` alone, ``(rows,)``, in new buffers."""
        total = self.length + self.ahead
        layers = map_tensors(lambda kept: kept[:, :, :total][rows], self.layers)
        visible = (
            self.visible if self.visible is None or len(self.visible) == 1 else self.visible[rows]
        )
        return LlamaCache(
            layers, self.length, take(self.counts, rows), ahead=self.ahead, visible=visible
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Committed keys and values of all layers; zero after the end of a row."""
        committed = tuple(kept[:, :, : self.length] for layer in self.layers for kept in layer)
        real = self._real()
        return (
            committed
            if real is None
            else tuple(kept * real[:, None, :, None] for kept in committed)
        )

    def positions(self, tokens: int) -> Int64[Tensor, "rows tokens"]:
        """Positions of the next ``tokens``, ``(batch or 1, tokens)``."""
        after = torch.arange(tokens, device=self.layers[0].keys.device)[None]
        return after + (self.length if self.counts is None else self.counts[:, None])

    def reserve(self, tokens: int) -> "LlamaCache":
        """The same cache with room for ``tokens`` more that no other cache uses, and their
        attention mask.
        """
        free = self.writable
        if self.ahead == tokens and free:
            return self
        capacity, changes = self.layers[0].keys.shape[2], {}
        if not free or self.length + tokens > capacity:
            capacity = max(self.length + tokens, min(2 * capacity, capacity + 4096))
            room = capacity - self.length
            layers = map_tensors(
                lambda kept: F.pad(kept[:, :, : self.length], (0, 0, 0, room)), self.layers
            )
            changes = {"layers": layers, "claim": Claim(), "age": 0}
        return replace(self, ahead=tokens, visible=self._visible(tokens), **changes)

    def crop(self, tokens: int, /) -> "LlamaCache":
        """The same cache without the last ``tokens`` of each row; the next solve copies its
        buffers.
        """
        shortest = self.length if self.counts is None else int(self.counts.min())
        if not 0 <= tokens <= shortest:
            raise ValueError(
                f"tokens must be 0 to {shortest}, those of the shortest row, got {tokens}"
            )
        if tokens == 0:
            return self
        length = self.length - tokens
        layers = map_tensors(
            lambda kept: kept[:, :, :length], self.layers
        )  # without a claim to what lies behind
        return LlamaCache(layers, length, None if self.counts is None else self.counts - tokens)

    @property
    def writable(self) -> bool:
        """Whether no newer cache uses the buffers."""
        frozen = self.layers[0].keys.is_inference() and not torch.is_inference_mode_enabled()
        return self.claim.newest == self.age and self.claim.owner == get_ident() and not frozen

    def _real(self) -> Bool[Tensor, "batch length"] | None:
        """Which columns of the buffers are tokens; None: all."""
        if self.counts is None:
            return None
        return torch.arange(self.length, device=self.counts.device) < self.counts[:, None]

    def _visible(self, tokens: int) -> Tensor | None:
        real = self._real()
        if tokens == 1 and real is None:
            return None
        device = self.layers[0].keys.device
        causal = torch.ones(tokens, self.length + tokens, dtype=torch.bool, device=device).tril(
            self.length
        )
        # padding among the new tokens comes after the real ones of its row
        return (
            causal[None, None]
            if real is None
            else causal & F.pad(real, (0, tokens), value=True)[:, None, None]
        )


def commit(
    cache: LlamaCache | None,
    new: tuple[KeyValues, ...],
    tokens: int,
    counts: Int64[Tensor, " batch"] | None = None,
) -> LlamaCache:
    """The cache after the first ``tokens`` of an evaluation, ``counts`` of them real: see
    :meth:`Backbone.advance`.
    """
    new = map_tensors(lambda kept: kept.detach()[:, :, :tokens], new)
    if cache is None:
        cache = LlamaCache(map_tensors(lambda kept: kept[:, :, :0].contiguous(), new))
    if cache.ahead < tokens or not cache.writable:
        cache = cache.reserve(tokens)
    pairs = [
        pair
        for layer, own in zip(cache.layers, new, strict=True)
        for pair in zip(layer, own, strict=True)
    ]
    cache.claim.newest += 1
    whole = LlamaCache(cache.layers, cache.length + tokens, None, cache.claim, cache.claim.newest)
    if counts is None and cache.counts is None:
        for kept, own in pairs:
            kept[:, :, cache.length : whole.length] = own
        return whole
    places = cache.positions(tokens).expand(len(pairs[0][0]), -1)
    for kept, own in pairs:  # what lies after the end of a row will be overwritten
        kept.scatter_(2, places[:, None, :, None].expand_as(own), own.to(kept.dtype))
    after = places[:, 0] + (tokens if counts is None else counts)
    shortest, longest = torch.stack(torch.aminmax(after)).tolist()  # one transfer
    return replace(whole, length=longest, counts=None if shortest == longest else after)
