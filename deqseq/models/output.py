"""What models return."""

from dataclasses import dataclass, field

from jaxtyping import Float, Int64
from torch import Tensor

from deqseq.backbones.base import Cache
from deqseq.explain import Problem
from deqseq.solution import Outcome, SolveStats
from deqseq.sweeps.tokens import Uncommitted


@dataclass(frozen=True, repr=False)
class ModelOutput(Outcome):
    """A model's states.

    Attributes:
        value: final states, ``(batch, length, d_model)``; for an implicit model the fixed point.
        cache: the cache after these tokens, with ``return_cache=True``.
        stats: numbers of the solve, per row if all tokens are solved together, else per token; None: not solved.
        status: a :class:`~deqseq.Status` per row, the worst over its chunks, ``(batch,)``; None for an explicit model.
        problem: what was solved, for :meth:`explain`; not saved with the object.
        uncommitted: with ``return_uncommitted=True``, what commits any number of these tokens.
    """

    value: Float[Tensor, "batch length d_model"]
    cache: Cache | None = None
    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None
    problem: Problem | None = field(default=None, repr=False, compare=False)
    uncommitted: Uncommitted | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, repr=False)
class CausalLMOutput(Outcome):
    """A language model's predictions.

    Attributes:
        logits: ``(batch, length, vocab_size)``.
        loss: mean cross entropy in nats, ``()``, in float32 at least; None without labels or targets.
        cache: the cache after these tokens, with ``return_cache=True``.
        stats: numbers of the solve; None for an explicit model.
        status: a :class:`~deqseq.Status` per row, ``(batch,)``; None for an explicit model.
        problem: what was solved, for :meth:`explain`; not saved with the object.
    """

    logits: Float[Tensor, "batch length vocab"]
    loss: Float[Tensor, ""] | None = None
    cache: Cache | None = None
    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None
    problem: Problem | None = field(default=None, repr=False, compare=False)
