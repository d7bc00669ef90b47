"""The fixed-point map of a backbone for the tokens that are not settled yet."""

from typing import Any

import torch

from deqseq.backbones.base import Backbone, Cache, Injection, Trail
from deqseq.solution import Solution, Status
from deqseq.types import RowIndex, State


class BackboneMap:
    """A backbone as a map ``z -> f(z)``, for one input and one past.

    Padding is held at zero. While ``recording``, what the last evaluation computed is kept, and with it that of the
    rows that were narrowed to since; :meth:`settled` makes a cache of it.

    Args:
        backbone: the layers.
        injection: the input, prepared.
        cache: the settled tokens before; None: nothing.
        recording: whether :meth:`settled` will be called.

    Example:
        >>> import deqseq as dq
        >>> backbone, x = dq.Affine(4), torch.ones(3, 5, 4)
        >>> f = BackboneMap(backbone, backbone.inject(x), recording=True)
        >>> solution = dq.solve(f, torch.zeros(3, 5, 4), solver=dq.Naive(), stop=dq.Stop(rtol=1e-6))
        >>> cache, evaluated_again = f.settled(5, solution)
        >>> cache.previous.shape, evaluated_again
        (torch.Size([3, 4]), None)
    """

    def __init__(
        self, backbone: Backbone[Any], injection: Injection, cache: Cache | None = None, *, recording: bool = False
    ) -> None:
        self.backbone, self.injection, self.cache, self.recording = backbone, injection, cache, recording
        self._real = None if injection.real is None else injection.real[..., None]
        self._last: tuple[State, Trail] | None = None
        self._narrowed: tuple[RowIndex, BackboneMap] | None = None

    @property
    def length(self) -> int:
        """How many tokens there are."""
        return 0 if self.injection.value is None else self.injection.value.shape[1]

    def __call__(self, z: State, /) -> State:
        """One self-iteration, ``(batch, length, d_model)``."""
        value, trail = self.backbone(z, self.injection, self.cache, return_trail=self.recording)
        if self._real is not None:
            value = value.masked_fill(~self._real, 0)
        if trail is not None:
            self._last, self._narrowed = (value, trail), None
        return value

    def select(self, rows: RowIndex, /) -> "BackboneMap":
        """The same map for the named ``rows`` alone, ``(rows,)``."""
        cache = None if self.cache is None else self.cache.select(rows)
        narrow = BackboneMap(self.backbone, self.injection.select(rows), cache, recording=self.recording)
        if self.recording:
            self._narrowed = (rows, narrow)
        return narrow

    def first(self, tokens: int, /, *, recording: bool) -> "BackboneMap":
        """The map of the first ``tokens``; ``recording`` it can settle them."""
        injection = self.injection if tokens == self.length else self.injection.tokens(0, tokens).contiguous()
        cache = None if self.cache is None else self.cache.reserve(tokens)
        return BackboneMap(self.backbone, injection, cache, recording=recording)

    def beyond(self, tokens: int, cache: Cache | None, /) -> "BackboneMap":
        """The map of the tokens after the first ``tokens``, which have left ``cache``."""
        return BackboneMap(self.backbone, self.injection.tokens(tokens, self.length), cache)

    def settled(self, tokens: int, /, solution: Solution | None = None) -> tuple[Cache, RowIndex | None]:
        """The cache after the first few tokens, from the evaluation at which they passed.

        Args:
            tokens: how many have settled.
            solution: what the solve found; failed rows whose value is not that of their last evaluation are evaluated
                once more, there. None: all rows are as they are.

        Returns:
            The cache, without a graph, and which rows took one more evaluation; None: no row.
        """
        with torch.no_grad():
            value, trail = self._latest()
            if solution is None:
                return trail.after(tokens), None
            failed = solution.status != Status.CONVERGED
            if not bool(failed.any()):
                return trail.after(tokens), None
            elsewhere = (solution.value != value.to(solution.value.dtype)).flatten(1).any(dim=1)
            rows = (failed & elsewhere).nonzero()[:, 0]
            if not len(rows):
                return trail.after(tokens), None
            narrow = self.select(rows)
            narrow(solution.value[rows])
            return trail.merged(rows, narrow._latest()[1]).after(tokens), rows

    def _latest(self) -> tuple[State, Trail]:
        """What the last evaluation of each row gave and computed."""
        assert self._last is not None, "a map that settles must be recording, and have been evaluated"
        if self._narrowed is None or self._narrowed[1]._last is None:
            return self._last
        rows, narrow = self._narrowed
        value, trail = narrow._latest()
        return self._last[0].index_copy(0, rows, value), self._last[1].merged(rows, trail)
