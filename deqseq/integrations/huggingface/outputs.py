"""What the models return: the outputs of transformers, with the numbers of the solve."""

from dataclasses import dataclass
from typing import no_type_check

from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from transformers.utils.generic import ModelOutput

from deqseq.integrations.huggingface.cache import ImplicitCache
from deqseq.solution import Outcome, SolveStats


@no_type_check  # accelerate rebuilds an output from a mapping in place of the first field
@dataclass
class ImplicitModelOutput(ModelOutput, Outcome):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Final states, and how they were found; with ``converged`` and ``raise_if_failed()`` as every outcome of a solve.

    Attributes:
        last_hidden_state: ``(batch, length, hidden_size)``; for an implicit model the fixed point.
        past_key_values: the cache after these tokens, if ``use_cache``.
        hidden_states: the embedded tokens and the final states, if ``output_hidden_states``.
        stats: numbers of the solve, per row for the simultaneous sweep, else per token; None for an explicit model.
        status: a :class:`deqseq.Status` per row, ``(batch,)``; None for an explicit model.
    """

    last_hidden_state: Float[Tensor, "batch length width"] | None = None
    past_key_values: ImplicitCache | None = None
    hidden_states: tuple[Float[Tensor, "batch length width"], ...] | None = None
    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None


@no_type_check
@dataclass
class ImplicitCausalLMOutput(ModelOutput, Outcome):  # pyright: ignore[reportIncompatibleMethodOverride]
    """Predictions, and how they were found; with ``converged`` and ``raise_if_failed()`` as every outcome of a solve.

    Attributes:
        loss: mean cross entropy in nats, ``()``; None without labels.
        logits: ``(batch, kept, vocab_size)``, at the positions of ``logits_to_keep``.
        past_key_values: the cache after these tokens, if ``use_cache``.
        hidden_states: the embedded tokens and the final states, if ``output_hidden_states``.
        stats: numbers of the solve, per row for the simultaneous sweep, else per token; None for an explicit model.
        status: a :class:`deqseq.Status` per row, ``(batch,)``; None for an explicit model.
    """

    loss: Float[Tensor, ""] | None = None
    logits: Shaped[Tensor, "*kept vocab"] | None = None
    past_key_values: ImplicitCache | None = None
    hidden_states: tuple[Float[Tensor, "batch length width"], ...] | None = None
    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None
