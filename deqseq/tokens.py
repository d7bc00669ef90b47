"""The map of some tokens of a backbone, and how they are committed."""

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deqseq.arguments import check_like, check_type
from deqseq.backbones.base import Backbone, Cache
from deqseq.rows import check_record, check_rows, tensors_of
from deqseq.solution import Solution, SolveStats, Status
from deqseq.types import Counts, Mask, Sequence


class TokenArgs(NamedTuple):
    """What the map of some tokens needs besides their state: the second argument of
    :func:`token_map`.

    ``need_aux`` says whether the map returns what commits them, and of a whole sequence whether its
    cache is wanted; ``x`` is what the inputs of a whole sequence were prepared from.
    """

    backbone: Backbone[Any]
    inputs: Any
    cache: Cache | None = None
    mask: Mask | None = None
    need_aux: bool = False
    x: Sequence | None = None

    @classmethod
    def prepared(
        cls,
        backbone: Backbone[Any],
        x: Sequence,
        cache: Cache | None,
        mask: Mask | None,
        need_aux: bool,
    ) -> "TokenArgs":
        """The inputs of all tokens ``x``, ``(batch, length, d_model)``, and room in the cache.

        A backbone that is evaluated more than once comes from :func:`deqseq.layers.with_weights`.
        """
        inputs = backbone.prepare(x, cache, mask)
        check_record(f"what {type(backbone).__name__}.prepare returns", inputs, len(x))
        return cls(
            backbone,
            inputs,
            None if cache is None else cache.reserve(x.shape[1]),
            mask,
            need_aux,
            x,
        )

    def prepared_again(self) -> "TokenArgs":
        """The same with inputs of these rows alone: a row that is gone, and was not finite, is not
        in their graph.
        """
        return (
            self
            if self.x is None
            else self._replace(inputs=self.backbone.prepare(self.x, self.cache, self.mask))
        )

    def advance(self, aux: Any, rows: int, tokens: int, counts: Counts | None = None) -> Cache:
        """The cache of these ``rows`` after the first ``tokens``: ``counts`` of them in each row,
        by default all.
        """
        with torch.no_grad():
            after = self.backbone.advance(self.cache, aux, tokens, counts)
        name = f"what {type(self.backbone).__name__}.advance returns"
        check_type(name, after, Cache)
        check_rows(name, after, rows, "z")
        return after

    def per_token(self, solution: Solution) -> Solution:
        """A solution of these tokens with its statistics per token, and the cache after them as its
        ``aux``.
        """
        stats, shape = solution.stats, solution.value.shape[:2]
        if stats.iterations.ndim == 2:
            return solution
        forced = (solution.status != Status.CONVERGED)[:, None].expand(shape)
        steps, residual, updates = (
            x.reshape(len(x), -1).expand(shape)
            for x in (stats.iterations, stats.residual, stats.updates)
        )
        if self.mask is not None:
            steps, forced = steps * self.mask, forced & self.mask
        stats = SolveStats(steps, residual, stats.evaluations, updates, forced)
        counts = None if self.mask is None else self.mask.sum(dim=1)
        cache = self.advance(solution.aux, shape[0], shape[1], counts) if self.need_aux else None
        return replace(solution, stats=stats, aux=cache)

    def check_tokens(self, length: int) -> None:
        """Refuse inputs that cannot be divided into tokens, and a backbone that cannot
        commit them.
        """
        for x in tensors_of(self.inputs):
            if x.ndim < 2 or x.shape[1] != length:
                raise ValueError(
                    f"Backbone.prepare must return tensors (batch, {length} tokens, ...), which a "
                    "sweep can divide, "
                    f"got one of shape {tuple(x.shape)}: expand it, or keep it as an attribute of "
                    "the backbone"
                )
        check_commits(self.backbone)


def token_map(z: Sequence, args: TokenArgs) -> tuple[Sequence, Any]:
    """One iteration of some tokens, and what commits them; padding is zero in its value."""
    pair = args.backbone(z, args.inputs, args.cache, need_aux=args.need_aux)
    if not isinstance(pair, tuple) or len(pair) != 2:
        name = type(args.backbone).__name__
        raise TypeError(
            f"{name}.forward must return a pair (new state, aux), got {type(pair).__name__}"
        )
    check_like(f"{type(args.backbone).__name__}.forward", pair[0], z, "z")
    if args.mask is None:
        return pair
    value, aux = pair
    return value.masked_fill(~args.mask[..., None], 0), aux


def check_commits(backbone: Backbone[Any]) -> None:
    """Refuse a backbone without ``advance``, before anything is solved."""
    if type(backbone).advance is Backbone.advance:
        backbone.advance(None, None, 1)


def commit(
    backbone: Backbone[Any], cache: Cache | None, aux: Any, states: Sequence, counts: Counts | None
) -> Cache:
    """The cache after the first ``counts`` tokens of each row of an evaluation that gave these
    states.
    """
    check_type("cache", cache, (Cache, type(None)))
    (rows, length), device = states.shape[:2], states.device
    if counts is None:
        low = high = length
    else:
        check_type("counts", counts, Tensor)
        if counts.dtype != torch.int64 or counts.shape != (rows,) or counts.device != device:
            got = f"{counts.dtype} {tuple(counts.shape)} on {counts.device}"
            raise ValueError(f"counts must be int64 of shape ({rows},) on {device}, got {got}")
        low, high = torch.stack(torch.aminmax(counts)).tolist()  # one transfer
        if low < 0 or high < 1 or high > length:
            raise ValueError(
                f"counts must be 0 to {length} tokens of each row, and not all 0, got "
                f"{counts.tolist()}"
            )
    return TokenArgs(backbone, None, cache).advance(
        aux, rows, high, None if low == high else counts
    )
