"""Keys and values of the settled tokens, in buffers that leave room for those to come."""

from dataclasses import dataclass, field, replace
from threading import get_ident

import torch
from jaxtyping import Bool
from torch import Tensor

from deqseq.backbones.base import Cache, RealTokens
from deqseq.layers import KeyValues
from deqseq.types import RowIndex


@dataclass
class Claim:
    """How far the buffers that several caches share are taken by one of them, and which thread may write in them."""

    upto: int = 0
    owner: int = field(default_factory=get_ident)


@dataclass(frozen=True)
class LlamaCache(Cache):
    """Keys and values of the settled tokens.

    Self-iterations write their own keys behind ``length``, where a later commit may leave them: nothing is
    concatenated. A cache that follows another shares its buffers. Only one may follow in place; who finds the room
    behind its length taken gets buffers of its own.

    Attributes:
        layers: buffers, one pair a layer, ``(batch, kv_heads, capacity, headdim)``.
        length: how many tokens of the buffers are settled.
        real: which of those are no padding, ``(batch, length)``; None: all.
        claim: how far the buffers are taken.
        ahead: how many tokens it has been prepared to be continued by.
        visible: what those attend to, ``(batch or 1, 1, ahead, length + ahead)``; None: everything.
    """

    layers: tuple[KeyValues, ...]
    length: int = 0
    real: RealTokens | None = None
    claim: Claim = field(default_factory=Claim)
    ahead: int = 0
    visible: Bool[Tensor, "batch 1 new all"] | None = None

    def select(self, rows: RowIndex) -> "LlamaCache":
        """The named ``rows`` alone, ``(rows,)``, in buffers of their own."""
        total = self.length + self.ahead
        layers = tuple(KeyValues(*(kept[:, :, :total][rows] for kept in layer)) for layer in self.layers)
        visible = self.visible if self.visible is None or len(self.visible) == 1 else self.visible[rows]
        real = None if self.real is None else self.real[rows]
        return LlamaCache(layers, self.length, real, Claim(self.length), self.ahead, visible)

    def tensors(self) -> tuple[Tensor, ...]:
        """Settled keys and values of all layers; padding is zero."""
        settled = tuple(kept[:, :, : self.length] for layer in self.layers for kept in layer)
        return settled if self.real is None else tuple(kept * self.real[:, None, :, None] for kept in settled)

    def reserve(self, tokens: int) -> "LlamaCache":
        """The same cache with room for ``tokens`` more that no other cache uses, and what they may attend to."""
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
        """Whether the room behind the settled tokens is this cache's own."""
        frozen = self.layers[0].keys.is_inference() and not torch.is_inference_mode_enabled()
        return self.claim.upto <= self.length and self.claim.owner == get_ident() and not frozen

    def followed(self, new: tuple[KeyValues, ...], real: RealTokens | None) -> "LlamaCache":
        """The cache after more tokens.

        Args:
            new: their keys and values, one pair a layer, ``(batch, kv_heads, tokens, headdim)``.
            real: which of them are no padding, ``(batch, tokens)``; None: all.

        Returns:
            The cache, in the same buffers where their room is free.
        """
        tokens = new[0].keys.shape[2]
        room = self if self.ahead >= tokens and self._writable else self.reserve(tokens)
        total = self.length + tokens
        for layer, own in zip(room.layers, new, strict=True):
            for kept, part in zip(layer, own, strict=True):
                kept[:, :, self.length : total] = part
        room.claim.upto = total
        return LlamaCache(room.layers, total, self._real_with(real, tokens), room.claim)

    def _real_with(self, real: Tensor | None, tokens: int) -> Tensor | None:
        """Which tokens are real once ``tokens`` more have settled."""
        if self.real is None and real is None:
            return None
        batch, device = len(self.layers[0].keys), self.layers[0].keys.device
        before = torch.ones(batch, self.length, dtype=torch.bool, device=device) if self.real is None else self.real
        after = torch.ones(batch, tokens, dtype=torch.bool, device=device) if real is None else real
        return torch.cat([before, after], dim=1)

    def _visible(self, tokens: int) -> Tensor | None:
        if tokens == 1 and self.real is None:
            return None
        device = self.layers[0].keys.device
        causal = torch.ones(tokens, self.length + tokens, dtype=torch.bool, device=device).tril(self.length)
        if self.real is None:
            return causal[None, None]
        known = self._real_with(None, tokens)  # padding among the new tokens comes after the real ones of its row
        assert known is not None
        return causal & known[:, None, None]


def _moved(layer: KeyValues, length: int, capacity: int) -> KeyValues:
    """The settled tokens in a larger buffer."""
    moved = []
    for kept in layer:
        buffer = kept.new_zeros(*kept.shape[:2], capacity, kept.shape[3])
        buffer[:, :, :length] = kept[:, :, :length]
        moved.append(buffer)
    return KeyValues(*moved)
