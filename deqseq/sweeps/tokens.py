"""What the map of some tokens needs, and how they are committed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from deqseq.backbones.base import Backbone, Cache
from deqseq.check import check_type
from deqseq.layers.sharded import unsharded
from deqseq.rows import map_tensors, tensors_of
from deqseq.sweeps.window import WindowMonitor
from deqseq.types import Mask, Sequence, State

Counts = Int64[Tensor, " batch"]
Head = Callable[[Sequence], Float[Tensor, "rows length classes"]]
"""From states to logits, for exit rules. One that holds tensors per row is a record that :func:`deqseq.take` cuts."""


class TokenArgs(NamedTuple):
    """What the map of some tokens needs besides their state: the second argument of the map of :func:`token_map`."""

    inputs: Any
    cache: Cache | None = None
    mask: Mask | None = None
    head: Head | None = None

    def gather(self, window: WindowMonitor) -> "TokenArgs":
        """The tokens in the windows, and room for them in the cache, which is that of the computed rows."""
        cache = None if self.cache is None else self.cache.reserve(window.width)
        return TokenArgs(map_tensors(window.gather, self.inputs), cache, window.mask())

    def slice(self, start: int, stop: int, length: int) -> "TokenArgs":
        """The tokens from ``start`` up to ``stop`` of ``length``, contiguous, and room for them in the cache."""
        if stop - start == length:
            return self.with_room(length)
        self.check_tokens(length)
        inputs, mask = map_tensors(lambda x: x[:, start:stop].contiguous(), (self.inputs, self.mask))
        return self._replace(inputs=inputs, mask=mask).with_room(stop - start)

    def with_room(self, tokens: int) -> "TokenArgs":
        """The same, with room for so many tokens in the cache."""
        return self if self.cache is None else self._replace(cache=self.cache.reserve(tokens))

    def check_tokens(self, length: int) -> None:
        """Refuse inputs that cannot be divided into tokens."""
        for x in tensors_of(self.inputs):
            if x.ndim < 2 or x.shape[1] != length:
                raise ValueError(
                    f"Backbone.prepare must return tensors (batch, {length} tokens, ...), which a sweep can divide, "
                    f"got one of shape {tuple(x.shape)}: expand it, or keep it as an attribute of the backbone"
                )


def token_map(backbone: Backbone[Any], *, need_aux: bool = False) -> Any:
    """The map ``(z, TokenArgs) -> (f(z), aux)`` of a backbone; padding is zero in its value."""

    def f(z: State, args: TokenArgs) -> tuple[State, Any]:
        pair = backbone(z, args.inputs, args.cache, need_aux=need_aux)
        if not isinstance(pair, tuple) or len(pair) != 2:
            name = type(backbone).__name__
            raise TypeError(f"{name}.forward must return a pair (new state, aux), got {type(pair).__name__}")
        if args.mask is None:
            return pair
        value, aux = pair
        return value.masked_fill(~args.mask[..., None], 0), aux

    return f


def readout(states: State, args: TokenArgs) -> Float[Tensor, "rows length classes"]:
    """The logits of some tokens, for the exit rule of a solve of :func:`token_map`."""
    assert args.head is not None
    return args.head(states)


def advance(backbone: Backbone[Any], args: TokenArgs, aux: Any, tokens: int, counts: Counts | None = None) -> Cache:
    """Commit the first tokens of an evaluation; ``counts`` of them in each row, by default the real ones."""
    if counts is None and args.mask is not None:
        counts = args.mask[:, :tokens].sum(dim=1)
    with torch.no_grad():
        cache = backbone.advance(args.cache, aux, tokens, counts)
    check_type(f"what {type(backbone).__name__}.advance returns", cache, Cache)
    return cache


@dataclass(frozen=True)
class Uncommitted:
    """Tokens that have been solved and may still be rejected, such as drafts: each row commits as many as it wants.

    Attributes:
        states: where a later solve of these tokens can begin, ``(batch, length, d_model)``.
        commit: returns the cache after the first ``counts[row]`` real tokens of each row, for int64 ``counts`` of shape
            ``(batch,)``, each from 0 to the row's length, not all 0.

    Example:
        >>> import deqseq as dq
        >>> model, x = dq.ImplicitModel(dq.Affine(4)), torch.ones(2, 3, 4)
        >>> cache = model(x, return_uncommitted=True).uncommitted.commit(torch.tensor([1, 2]))
        >>> row = model(x[1:, :2], return_cache=True).cache
        >>> torch.allclose(cache.tensors()[0][1:], row.tensors()[0], atol=1e-2)
        True
    """

    states: Sequence
    commit: Callable[[Counts], Cache]


def commit(backbone: Backbone[Any], args: TokenArgs, aux: Any, states: Sequence, counts: Counts) -> Cache:
    """The ``commit`` of :class:`Uncommitted`, for an evaluation that gave these states."""
    check_type("counts", counts, Tensor)
    (rows, length), device = states.shape[:2], states.device
    if counts.dtype != torch.int64 or counts.shape != (rows,) or counts.device != device:
        got = f"{counts.dtype} {tuple(counts.shape)} on {counts.device}"
        raise ValueError(f"counts must be int64 of shape ({rows},) on {device}, got {got}")
    most = length if args.mask is None else args.mask.sum(dim=1)
    low, high, left = torch.stack([counts.min(), counts.max(), (most - counts).min()]).tolist()  # one transfer
    if low < 0 or high < 1 or left < 0:
        most = most if args.mask is None else args.mask.sum(dim=1).tolist()
        raise ValueError(f"counts must be 0 to {most} tokens of each row, and not all 0, got {counts.tolist()}")
    with unsharded(backbone):
        return advance(backbone, args, aux, high, None if low == high else counts)
