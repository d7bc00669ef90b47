"""What the models return: transformers' outputs, with the numbers of the solve."""

from dataclasses import dataclass
from typing import no_type_check

from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from transformers.utils.generic import ModelOutput

from deqseq.integrations.huggingface.cache import ImplicitCache
from deqseq.solution import SolveStats


@no_type_check  # accelerate makes an output anew, from a mapping in the place of the first field
@dataclass
class ImplicitModelOutput(ModelOutput):
    """Final states, and how they were found.

    Attributes:
        last_hidden_state: ``(batch, length, hidden_size)``; for an implicit model the fixed point.
        past_key_values: what the next tokens need of these, if it was asked for.
        hidden_states: the embedded tokens and the final states, if they were asked for.
        stats: self-iterations and residuals, per row for the simultaneous sweep, else per token; None: explicit.
        status: a :class:`deqseq.Status` a row, ``(batch,)``; None: explicit.
    """

    last_hidden_state: Float[Tensor, "batch length width"] | None = None
    past_key_values: ImplicitCache | None = None
    hidden_states: tuple[Float[Tensor, "batch length width"], ...] | None = None
    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None


@no_type_check
@dataclass
class ImplicitCausalLMOutput(ModelOutput):
    """Predictions, and how they were found.

    Attributes:
        loss: mean cross entropy in nats, ``()``; None without labels.
        logits: ``(batch, kept, vocab_size)``, of the positions that were asked for.
        past_key_values: what the next tokens need of these, if it was asked for.
        hidden_states: the embedded tokens and the final states, if they were asked for.
        stats: self-iterations and residuals, per row for the simultaneous sweep, else per token; None: explicit.
        status: a :class:`deqseq.Status` a row, ``(batch,)``; None: explicit.
    """

    loss: Float[Tensor, ""] | None = None
    logits: Shaped[Tensor, "*kept vocab"] | None = None
    past_key_values: ImplicitCache | None = None
    hidden_states: tuple[Float[Tensor, "batch length width"], ...] | None = None
    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None
