"""Around the layers: what is done to embedded tokens and to logits."""

import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.types import Sequence


def scaled(x: Sequence, scale: float) -> Sequence:
    """Embedded tokens times ``scale``, which is rounded to their dtype first."""
    return x if scale == 1 else x * x.new_full((), scale)


def capped(logits: Float[Tensor, "*rows vocab"], cap: float | None) -> Float[Tensor, "*rows vocab"]:
    """Logits within ``(-cap, cap)``; as they are if it is None."""
    return logits if cap is None else torch.tanh(logits / cap) * cap
