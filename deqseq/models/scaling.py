"""Around the layers: what is done to embedded tokens and to logits."""

import torch
from jaxtyping import Float
from torch import Tensor

from deqseq.check import check_number
from deqseq.types import Sequence


def check_embedding(owner: str, *, dropout: float, scale: float, softcap: float | None) -> None:
    """Refuse numbers outside their ranges, by the names that ``owner`` gives them."""
    check_number(f"{owner}.embedding_dropout", dropout, "[0, 1)")
    check_number(f"{owner}.embedding_scale", scale, "(0, inf)")
    if softcap is not None:
        check_number(f"{owner}.logit_softcap", softcap, "(0, inf)")


def scaled(x: Sequence, scale: float) -> Sequence:
    """Embedded tokens times ``scale``, which is rounded to their dtype first."""
    return x if scale == 1 else x * x.new_full((), scale)


def capped(logits: Float[Tensor, "*rows vocab"], cap: float | None) -> Float[Tensor, "*rows vocab"]:
    """Logits within ``(-cap, cap)``; as they are if it is None."""
    return logits if cap is None else torch.tanh(logits / cap) * cap
