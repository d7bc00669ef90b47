"""How a token is chosen from its logits."""

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from jaxtyping import Float, Int64
from torch import Tensor

from deqseq.annotations import Between

Logits = Float[Tensor, "rows tokens vocab"]

Seed = Annotated[int, Between(-(2**63), 2**64 - 1)]
"""What ``torch.manual_seed`` takes."""


@dataclass(frozen=True)
class Sampler:
    """How a token is chosen from its logits.

    Args:
        temperature: logits are divided by it; 0: the most probable token is taken.
        top_k: how many of the most probable tokens to draw from, at least 1. Default: all.
        top_p: probability, in (0, 1], of the most probable tokens to draw from. Default: 1, all.
        seed: of the random numbers. Default: drawn from torch's global generator.

    Raises:
        ValueError: a number out of its range, or a choice among tokens that a temperature of 0 does not make.

    Example:
        >>> Sampler(temperature=0.8, top_p=0.95, seed=0).top_k is None
        True
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            raise ValueError("top_k and top_p need a temperature above 0; a temperature of 0 takes the best token")

    def choose(self, logits: Logits, uniform: Float[Tensor, "rows tokens"] | None) -> Int64[Tensor, "rows tokens"]:
        """A token from each vector of logits.

        Args:
            logits: ``(rows, tokens, vocab)``.
            uniform: a random number in [0, 1) for each, ``(rows, tokens)``; None takes the most probable token.

        Returns:
            The tokens, ``(rows, tokens)``; -1 where the logits are not finite.
        """
        finite = logits.isfinite().all(dim=-1)
        if self.temperature == 0 or uniform is None:
            return logits.argmax(dim=-1).where(finite, -1)
        scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = scaled - scaled.amax(dim=-1, keepdim=True)  # the largest is 0: nothing overflows
        scaled = scaled / max(self.temperature, torch.finfo(scaled.dtype).tiny)
        probability = scaled.softmax(dim=-1)
        if self.top_k is not None or self.top_p is not None:
            probability = self._kept(probability)
        # in the order of the vocabulary: in that of their probabilities, two that are nearly equal could change places
        total = probability.cumsum(dim=-1)
        whole = total[..., -1:]
        chosen = (total <= uniform.to(total)[..., None] * whole).sum(dim=-1)
        # rounding must not select what comes after the last token that can be chosen
        return chosen.minimum((total < whole).sum(dim=-1)).where(finite, -1)

    def _kept(self, probability: Logits) -> Logits:
        """The probabilities, with 0 for tokens that are left out."""
        ordered, token = probability.sort(dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            ordered[..., self.top_k :] = 0
        if self.top_p is not None:  # a token stays if those before it do not reach top_p yet
            before = ordered.cumsum(dim=-1) - ordered
            ordered = ordered.masked_fill(before >= self.top_p * ordered.sum(-1, keepdim=True), 0)
        return torch.zeros_like(probability).scatter(-1, token, ordered)


class Noise:
    """Random numbers in [0, 1) for each row and position; with a seed, always the same.

    Those of a row depend on the seed and the row's place in the batch, not on how many rows or positions there are.
    """

    def __init__(self, seed: int | None, batch: int) -> None:
        key = int(torch.randint(2**62, (), device="cpu") if seed is None else seed) % 2**64
        keys = [np.array([key, row], dtype=np.uint64) for row in range(batch)]
        self._streams = [np.random.Generator(np.random.Philox(key=key)) for key in keys]
        self._drawn = np.zeros((batch, 0))

    def at(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Those of some ``rows``, ``(rows,)``, at ``positions``, ``(rows, tokens)``."""
        while positions.max() >= self._drawn.shape[1]:
            self._drawn = np.concatenate([self._drawn, [stream.random(256) for stream in self._streams]], axis=1)
        return self._drawn[rows[:, None], positions]
