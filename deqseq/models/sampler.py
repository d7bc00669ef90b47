"""How a token is chosen from its logits."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from deqseq.arguments import Between
from deqseq.types import float32_at_least

Logits = Float[Tensor, "rows tokens vocab"]

Seed = Annotated[int, Between(-(2**63), 2**64 - 1)]
"""What ``torch.manual_seed`` takes."""


@dataclass(frozen=True)
class Sampler:
    """How a token is chosen: these arguments of :meth:`deqseq.CausalLM.generate`."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError(
                "top_k and top_p need a temperature above 0; "
                "a temperature of 0 takes the best token"
            )

    def choose(
        self, logits: Logits, rows: np.ndarray, positions: np.ndarray
    ) -> Int64[Tensor, "rows tokens"]:
        """A token for each row and position; -1 where the logits are not finite.

        A token is drawn as the largest of its logits, over the temperature, plus noise that depends
        only on the seed, the row and the position. Logits that differ little, as those of two
        windows, then seldom give different tokens.
        """
        finite = logits.isfinite().all(dim=-1)
        if self.temperature:
            logits = logits.to(float32_at_least(logits))
            logits = logits - logits.amax(dim=-1, keepdim=True)  # so that no quotient overflows
            logits = logits / max(self.temperature, torch.finfo(logits.dtype).tiny)
            if self.top_k is not None or self.top_p is not None:
                logits = self._without_improbable(logits)
            logits = logits + gumbel(int(self.seed or 0), rows, positions, logits)
        return logits.argmax(dim=-1).where(finite, -1)

    def _without_improbable(self, logits: Logits) -> Logits:
        probability, token = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            probability[..., self.top_k :] = 0
        left_out = probability == 0
        # a token stays if the more probable ones do not reach top_p
        share = 1 if self.top_p is None else self.top_p
        more_probable = probability.cumsum(dim=-1) - probability
        left_out |= more_probable >= share * probability.sum(dim=-1, keepdim=True)
        left_out[..., 0] = False
        return logits.masked_fill(left_out.scatter(-1, token, left_out), -torch.inf)


def gumbel(seed: int, rows: np.ndarray, positions: np.ndarray, like: Logits) -> Logits:
    """Gumbel noise: the same for the same seed, row, position and token, on any device."""
    step = 0x9E3779B97F4A7C15 - 2**64
    token = torch.arange(like.shape[-1], device=like.device)
    row, position = (torch.from_numpy(x).to(like.device) for x in (rows, positions))
    key = torch.full_like(row, (seed + 2**63) % 2**64 - 2**63)
    key = _mixed(key + row * step)
    key = _mixed(key[:, None] + position * step)
    bits = _mixed(key[..., None] + token * step) >> 41 & 2**23 - 1
    uniform = (bits.float() + 0.5) * 2**-23  # never 0 or 1
    return -(-uniform.log()).log().to(like.dtype)


def _mixed(x: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
    """A hash of each number: the last steps of SplitMix64 (Steele et al., OOPSLA 2014)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift & 2 ** (64 - shift) - 1)) * (factor - 2**64)
    return x ^ (x >> 31 & 2**33 - 1)
