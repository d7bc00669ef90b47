"""The shapes that the whole library speaks of, named once."""

from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

State = Float[Tensor, "batch *event"]
"""A batch of points; a *row* is one of them. A *token* is a vector along the last dimension: in
sequences, ``(batch, length, dim)``, one per position. A state ``(batch,)`` or ``(batch, dim)`` has
one per row."""

Residual = Float[Tensor, "batch *tokens"]
"""One number per row, or per token."""

Iterations = Int64[Tensor, "batch *tokens"]
"""How many evaluations of the map a row (or a token) needed."""

RowIndex = Int64[Tensor, " rows"]
"""Positions of rows in a batch."""

RowMask = Bool[Tensor, " batch"]
"""A choice of rows."""

Counts = Int64[Tensor, " batch"]
"""How many tokens of each row are meant."""

Sequence = Float[Tensor, "batch length d_model"]
"""A batch of sequences: embedded tokens, or the state of an iteration."""

Mask = Bool[Tensor, "batch length"]
"""True at real tokens, False at padding."""

Step = Callable[[Sequence, Sequence], Sequence]
"""The next point of an iteration, from the last one and the states there."""

FixedPointMap = Callable[..., Any]
"""A map ``z -> f(z)``, or ``(z, args) -> f(z, args)``, that keeps the shape; its fixed point is
``z* = f(z*)``.
"""


def is_dense(value: object) -> TypeGuard[Tensor]:
    """Whether it is a tensor, and of the usual layout."""
    return isinstance(value, Tensor) and value.layout == torch.strided


def float32_at_least(x: Tensor) -> torch.dtype:
    """The dtype in which numbers of ``x`` are accumulated."""
    return torch.promote_types(x.dtype, torch.float32)
