"""What models return."""

from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxtyping import Float, Int64
from torch import Tensor

from deqseq.backbones.base import Cache
from deqseq.solution import Outcome, SolveStats
from deqseq.types import Sequence


@dataclass(frozen=True, repr=False)
class ModelOutput(Outcome):
    """A model's states.

    Attributes:
        value: final states, ``(batch, length, d_model)``; for an implicit model the fixed point.
        cache: the cache after these tokens, with ``return_cache=True``.
        stats: numbers of the solve, per token; None for an explicit model.
        status: a :class:`~deqseq.Status` per row, the worst over its tokens, ``(batch,)``; None for
            an explicit model.
        again: the call that was made, for :meth:`explain`; not saved with the object.
    """

    value: Float[Tensor, "batch length d_model"]
    cache: Cache | None = None
    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None
    again: "partial[Any] | None" = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, repr=False)
class CausalLMOutput(Outcome):
    """A language model's predictions.

    Attributes:
        logits: ``(batch, length, vocab_size)``.
        loss: mean cross entropy in nats, ``()``, in float32 at least; None without labels or
            targets.
        cache: the cache after these tokens, with ``return_cache=True``.
        stats: numbers of the solve, per token; None for an explicit model.
        status: a :class:`~deqseq.Status` per row, ``(batch,)``; None for an explicit model.
        again: the call that was made, for :meth:`explain`; not saved with the object.
    """

    logits: Float[Tensor, "batch length vocab"]
    loss: Float[Tensor, ""] | None = None
    cache: Cache | None = None
    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None
    again: "partial[Any] | None" = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Evaluation:
    """A few iterations of some tokens, which may still be committed: what a model's ``evaluate``
    returns.

    Attributes:
        point: the states before the last iteration, ``(batch, length, d_model)``.
        states: those after it, ``(batch, length, d_model)``, from which a later evaluation can go
            on.
        value: what the head is given, ``(batch, length, d_model)``; the states, unless layers
            follow the core.
        aux: what ``commit`` needs of this evaluation.
    """

    point: Sequence
    states: Sequence
    value: Sequence
    aux: Any
