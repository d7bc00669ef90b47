"""What the map of some tokens needs, and how they are committed."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from deqseq.backbones.base import Backbone, Cache
from deqseq.rows import map_tensors
from deqseq.types import Mask, State


class TokenArgs(NamedTuple):
    """What the map of some tokens needs besides their state: the second argument of :func:`token_map`."""

    inputs: Any
    cache: Cache | None = None
    mask: Mask | None = None

    def slice(self, start: int, stop: int, length: int) -> "TokenArgs":
        """The tokens from ``start`` up to ``stop`` of ``length``, contiguous, and room for them in the cache."""
        cache = None if self.cache is None else self.cache.reserve(stop - start)
        if stop - start == length:
            return self._replace(cache=cache)

        def part(x: Tensor) -> Tensor:
            if x.ndim < 2 or x.shape[1] != length:
                raise ValueError(
                    f"Backbone.prepare must return tensors (batch, {length} tokens, ...), which a sweep can divide, "
                    f"got one of shape {tuple(x.shape)}: expand it, or keep it as an attribute of the backbone"
                )
            return x[:, start:stop].contiguous()

        inputs, mask = map_tensors(part, (self.inputs, self.mask))
        return TokenArgs(inputs, cache, mask)


def token_map(backbone: Backbone[Any], *, need_aux: bool = False) -> Any:
    """The map ``(z, TokenArgs) -> (f(z), aux)`` of a backbone; padding is zero in its value."""

    def f(z: State, args: TokenArgs) -> tuple[State, Any]:
        pair = backbone(z, args.inputs, args.cache, need_aux=need_aux)
        if args.mask is None:
            return pair
        value, aux = pair
        return value.masked_fill(~args.mask[..., None], 0), aux

    return f


def advance(backbone: Backbone[Any], args: TokenArgs, aux: Any, tokens: int) -> Cache:
    """Commit the first tokens of an evaluation."""
    counts = None if args.mask is None else args.mask[:, :tokens].sum(dim=1)
    with torch.no_grad():
        return backbone.advance(args.cache, aux, tokens, counts)
