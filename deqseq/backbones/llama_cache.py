"""Keys and values of the committed tokens, in buffers with room for later ones."""

from dataclasses import dataclass, field, replace
from threading import get_ident

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from deqseq.backbones.base import Cache
from deqseq.layers import KeyValues
from deqseq.rows import map_tensors, take
from deqseq.types import Mask, RowIndex


@dataclass
class Claim:
    """How much of a shared buffer is in use, and which thread may write to it."""

    upto: int = 0
    owner: int = field(default_factory=get_ident)


@dataclass(frozen=True)
class LlamaCache(Cache):
    """Keys and values of the committed tokens.

    Iterations write their own keys into the buffers after ``length``, and a commit leaves them there: nothing is
    concatenated. A later cache shares the buffers of the one before. If another cache has already written past
    ``length``, the buffers are copied.

    Attributes:
        layers: buffers, one pair per layer, ``(batch, kv_heads, capacity, headdim)``.
        length: committed tokens.
        mask: True at real tokens, ``(batch, length)``; None: no padding.
        claim: how much of the buffers is in use.
        ahead: how many tokens :meth:`reserve` has prepared for.
        visible: which tokens those attend to, ``(batch or 1, 1, ahead, length + ahead)``; None: all.
    """

    layers: tuple[KeyValues, ...]
    length: int = 0
    mask: Mask | None = None
    claim: Claim = field(default_factory=Claim)
    ahead: int = 0
    visible: Bool[Tensor, "batch 1 new all"] | None = None

    def take_rows(self, rows: RowIndex) -> "LlamaCache":
        """The given ``rows`` alone, ``(rows,)``, in new buffers."""
        total = self.length + self.ahead
        layers = map_tensors(lambda kept: kept[:, :, :total][rows], self.layers)
        visible = self.visible if self.visible is None or len(self.visible) == 1 else self.visible[rows]
        return LlamaCache(layers, self.length, take(self.mask, rows), Claim(self.length), self.ahead, visible)

    def tensors(self) -> tuple[Tensor, ...]:
        """Committed keys and values of all layers; padding is zero."""
        committed = tuple(kept[:, :, : self.length] for layer in self.layers for kept in layer)
        return committed if self.mask is None else tuple(kept * self.mask[:, None, :, None] for kept in committed)

    def reserve(self, tokens: int) -> "LlamaCache":
        """The same cache with room for ``tokens`` more that no other cache uses, and their attention mask."""
        free = self._writable
        if self.ahead == tokens and free:
            return self
        layers, claim = self.layers, self.claim
        capacity = layers[0].keys.shape[2]
        if not free or self.length + tokens > capacity:
            capacity = max(self.length + tokens, min(2 * capacity, capacity + 4096))
            layers = tuple(_moved(layer, self.length, capacity) for layer in layers)
            claim = Claim(self.length)
        return replace(self, layers=layers, claim=claim, ahead=tokens, visible=self._visible(tokens))

    @property
    def _writable(self) -> bool:
        """Whether no other cache uses the buffers after ``length``."""
        frozen = self.layers[0].keys.is_inference() and not torch.is_inference_mode_enabled()
        return self.claim.upto <= self.length and self.claim.owner == get_ident() and not frozen

    def extend(self, new: tuple[KeyValues, ...], mask: Mask | None) -> "LlamaCache":
        """The cache after more tokens, in the same buffers where no other cache uses their room.

        Args:
            new: keys and values, a pair per layer, ``(batch, kv_heads, tokens, headdim)``.
            mask: True at real tokens, ``(batch, tokens)``; None: no padding.
        """
        tokens = new[0].keys.shape[2]
        room = self if self.ahead >= tokens and self._writable else self.reserve(tokens)
        total = self.length + tokens
        for layer, own in zip(room.layers, new, strict=True):
            for kept, part in zip(layer, own, strict=True):
                kept[:, :, self.length : total] = part
        room.claim.upto = total
        return LlamaCache(room.layers, total, self._mask_with(mask, tokens), room.claim)

    def _mask_with(self, mask: Tensor | None, tokens: int) -> Tensor | None:
        """The mask once ``tokens`` more are committed."""
        if self.mask is None and mask is None:
            return None
        batch, device = len(self.layers[0].keys), self.layers[0].keys.device
        before = torch.ones(batch, self.length, dtype=torch.bool, device=device) if self.mask is None else self.mask
        after = torch.ones(batch, tokens, dtype=torch.bool, device=device) if mask is None else mask
        return torch.cat([before, after], dim=1)

    def _visible(self, tokens: int) -> Tensor | None:
        if tokens == 1 and self.mask is None:
            return None
        device = self.layers[0].keys.device
        causal = torch.ones(tokens, self.length + tokens, dtype=torch.bool, device=device).tril(self.length)
        if self.mask is None:
            return causal[None, None]
        known = self._mask_with(None, tokens)  # padding among the new tokens comes after the real ones of its row
        assert known is not None
        return causal & known[:, None, None]


def commit(
    cache: LlamaCache | None, new: tuple[KeyValues, ...], tokens: int, counts: Int64[Tensor, " batch"] | None = None
) -> LlamaCache:
    """The cache after the first ``tokens`` of an evaluation, ``counts`` of them real: see :meth:`Backbone.advance`."""
    new = map_tensors(lambda kept: kept.detach()[:, :, :tokens], new)
    if cache is None:
        cache = LlamaCache(map_tensors(lambda kept: kept[:, :, :0].contiguous(), new))
    return cache.extend(new, None if counts is None else torch.arange(tokens, device=counts.device) < counts[:, None])


def _moved(layer: KeyValues, length: int, capacity: int) -> KeyValues:
    """The committed tokens in a larger buffer."""
    moved = []
    for kept in layer:
        buffer = kept.new_zeros(*kept.shape[:2], capacity, kept.shape[3])
        buffer[:, :, :length] = kept[:, :, :length]
        moved.append(buffer)
    return KeyValues(*moved)
