"""What models return, and what generation returns and tells a callback."""

from dataclasses import dataclass, field
from typing import Any

from jaxtyping import Bool, Float, Int64
from torch import Tensor

from deqseq.backbones.base import Cache
from deqseq.solution import Call, Outcome, SolveStats
from deqseq.types import Sequence


@dataclass(frozen=True, repr=False)
class ModelOutput(Outcome):
    """A model's states.

    Attributes:
        value: final states, ``(batch, length, d_model)``; for an implicit model the fixed point,
            ``(batch, length, state_width)``.
        cache: the cache after these tokens, with ``return_cache=True``.
        stats: numbers of the solve, per token; None for an explicit model.
        status: a :class:`~deqseq.Status` per row, the worst over its tokens, ``(batch,)``; None for
            an explicit model.
        call: what was solved, and how, for ``explain()``; not saved with the object.
    """

    value: Float[Tensor, "batch length d_model"]
    cache: Cache | None = None
    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None
    call: Call | None = field(default=None, repr=False, compare=False)


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
        call: what was solved, and how, for ``explain()``; not saved with the object.
    """

    logits: Float[Tensor, "batch length vocab"]
    loss: Float[Tensor, ""] | None = None
    cache: Cache | None = None
    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None
    call: Call | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, repr=False)
class TokenClassifierOutput(Outcome):
    """A class for every token.

    Attributes:
        logits: ``(batch, length, n_classes)``.
        states: states of the model, ``(batch, length, state_width)``. Those of an implicit model,
            detached, may be the ``start`` of a later call.
        loss: mean cross entropy in nats, ``()``, in float32 at least; None without targets.
        stats: numbers of the solve, per token; None for an explicit model.
        status: a :class:`~deqseq.Status` per row, ``(batch,)``; None for an explicit model.
        call: what was solved, and how, for ``explain()``; not saved with the object.
    """

    logits: Float[Tensor, "batch length n_classes"]
    states: Float[Tensor, "batch length state_width"]
    loss: Float[Tensor, ""] | None = None
    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None
    call: Call | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Evaluation:
    """What a model's ``evaluate`` returns: tokens after some iterations, not yet in the cache.

    Attributes:
        point: the states before the last iteration, ``(batch, length, state_width)``.
        states: the states after it, ``(batch, length, state_width)``, from which a later evaluation
            can continue.
        value: the input of the head, ``(batch, length, d_model)``: the states, unless layers follow
            the core.
        aux: what ``commit`` needs of this evaluation.
    """

    point: Sequence
    states: Sequence
    value: Sequence
    aux: Any


@dataclass(frozen=True)
class NewTokens:
    """What the ``callback`` of ``generate`` receives whenever tokens become final: one token per
    row; with a window, any number per row.

    Attributes:
        rows: the row of the batch that each token belongs to, in ascending order, ``(new,)``.
        positions: how many tokens were generated before each one in its row, ``(new,)``.
        tokens: the new tokens, ``(new,)``.
    """

    rows: Int64[Tensor, " new"]
    positions: Int64[Tensor, " new"]
    tokens: Int64[Tensor, " new"]


@dataclass(frozen=True, repr=False)
class Generation:
    """Generated tokens, and the numbers of their solves.

    Attributes:
        tokens: ``(batch, new)``; the padding token after a row's end.
        lengths: number of tokens of each row, including its stop token, ``(batch,)``.
        iterations: iterations of the state that each token was chosen from, ``(batch, new)``; in a
            window, counted from the last change of its input. The first token has the largest
            number over the tokens of the prompt. 0 after a row's end; None for an explicit model.
        converged: whether the state that each token was chosen from converged, ``(batch, new)``;
            True after a row's end; None for an explicit model.
        evaluations: sequential calls of the map after the prompt's solve, shared by all rows; None
            for an explicit model.
        updates: sum over the tokens of each row of the evaluations that they took part in, after
            the prompt's solve, ``(batch,)``; None for an explicit model.
        guessed: how many inputs of a row had been guessed right in the window before they were
            known, ``(batch,)``; 0 without a window.
    """

    tokens: Int64[Tensor, "batch new"]
    lengths: Int64[Tensor, " batch"]
    iterations: Int64[Tensor, "batch new"] | None = None
    converged: Bool[Tensor, "batch new"] | None = None
    evaluations: int | None = None
    updates: Int64[Tensor, " batch"] | None = None
    guessed: Int64[Tensor, " batch"] | None = None

    def __repr__(self) -> str:
        """Numbers of the generation, without the tensors."""
        counts = self.lengths.tolist()
        text = f"{len(counts)} rows, {min(counts)} to {max(counts)} new tokens"
        if self.converged is not None:
            done = int(self.converged.all(dim=1).sum())
            text += f", {done} rows converged, {self.evaluations} evaluations"
        return f"Generation({text})"

    def rows(self) -> list[list[int]]:
        """The tokens of each row, without padding."""
        pairs = zip(self.tokens.tolist(), self.lengths.tolist(), strict=True)
        return [tokens[:length] for tokens, length in pairs]
