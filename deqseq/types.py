"""The shapes and the kinds of map that the whole library speaks of, named once."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float, Int64
from torch import Tensor

State = Float[Tensor, "batch *event"]
"""A batch of points; for sequences the event is ``(length, dim)`` and every position is a *token*."""

Residual = Float[Tensor, "batch *tokens"]
"""One number a row, or one a token."""

Steps = Int64[Tensor, "batch *tokens"]
"""How many evaluations of the map a row (or a token) needed."""

RowIndex = Int64[Tensor, " rows"]
"""Positions of rows in a batch."""

RowMask = Bool[Tensor, " batch"]
"""A choice of rows."""


FixedPointMap = Callable[[State], State]
"""A map ``z -> f(z)`` that keeps the shape; its fixed point is ``z* = f(z*)``."""


@runtime_checkable
class SelectableMap(Protocol):
    """A fixed-point map that can be narrowed to some rows, so that finished rows cost nothing.

    Example:
        >>> import torch, deqseq as dq
        >>> class Halved:
        ...     def __init__(self, x): self.x = x
        ...     def __call__(self, z): return (z + self.x) / 2
        ...     def select(self, rows): return Halved(self.x[rows])
        >>> f = Halved(torch.tensor([[0.0], [1.0]]))
        >>> isinstance(f, SelectableMap), dq.solve(f, f.x * 0, solver=dq.Naive(), stop=dq.Stop()).stats.steps.tolist()
        (True, [1, 10])
    """

    def __call__(self, z: State, /) -> State:
        """The map's value at ``z``, of the same shape."""
        ...

    def select(self, rows: RowIndex, /) -> "SelectableMap":
        """The same map for the named rows alone: ``f.select(rows)(z[rows]) == f(z)[rows]``; ``rows``: ``(rows,)``."""
        ...
