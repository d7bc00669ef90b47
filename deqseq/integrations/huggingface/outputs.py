"""What the models return: the outputs of transformers, with the numbers of the solve."""

from dataclasses import dataclass
from typing import no_type_check

from jaxtyping import Int64
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from deqseq.models import Generation
from deqseq.solution import Outcome, SolveStats


@no_type_check  # accelerate rebuilds an output from a mapping in place of the first field
@dataclass
class ImplicitModelOutput(BaseModelOutputWithPast, Outcome):  # pyright: ignore[reportIncompatibleMethodOverride]
    """An outcome of a solve with transformers' fields; ``last_hidden_state`` is the fixed point of
    an implicit model.

    Attributes:
        stats: numbers of the solve, per token; None for an explicit model.
        status: a :class:`deqseq.Status` per row, ``(batch,)``; None for an explicit model.
    """

    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None


@no_type_check
@dataclass
class ImplicitCausalLMOutput(CausalLMOutputWithPast, Outcome):  # pyright: ignore[reportIncompatibleMethodOverride]
    """An outcome of a solve with transformers' ``loss``, ``logits`` and other fields.

    Attributes:
        stats: numbers of the solve, per token; None for an explicit model.
        status: a :class:`deqseq.Status` per row, ``(batch,)``; None for an explicit model.
    """

    stats: SolveStats | None = None
    status: Int64[Tensor, " batch"] | None = None


@no_type_check
@dataclass
class WindowedOutput(GenerateDecoderOnlyOutput):
    """``sequences`` and, if asked for, ``scores`` and ``logits`` of ``generate(...,
    return_dict_in_generate=True)``.

    Attributes:
        generation: the new tokens, and the iterations, updates and guesses that they took.
    """

    generation: Generation | None = None
