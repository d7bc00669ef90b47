"""The states that an iteration begins from."""

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from deqseq.arguments import Between, PositiveFloat, checked
from deqseq.types import Sequence, float32_at_least


@checked
@dataclass(frozen=True)
class RandomStart:
    """Begin at random states: normal numbers, truncated at three standard deviations.

    Args:
        std: standard deviation before the truncation, above 0. Huginn uses about 0.63, retrofitted
            models sqrt(2 / (5 d_model)).
        seed: seed of each call, 0 to 2**32 - 1; all calls then begin at the same states. Default:
            torch's global generator.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range.

    References:
        Geiping et al., Scaling up Test-Time Compute with Latent Reasoning, 2025, arXiv 2502.05171.

    Example:
        >>> import torch, deqseq as dq
        >>> model = dq.ImplicitModel(
        ...     dq.Affine(4), dq.SolveConfig(stop=dq.Stop(rtol=1e-6), start=dq.RandomStart(1.0))
        ... )
        >>> x = torch.ones(2, 3, 4)
        >>> torch.allclose(model(x).value, model.backbone.solution(x), atol=1e-4)
        True
    """

    std: PositiveFloat = 1.0
    seed: Annotated[int, Between(0, 2**32 - 1)] | None = (
        None  # torch's generator on the CPU takes 32 bits
    )

    def draw(self, like: Tensor) -> Tensor:
        """States of the shape, dtype and device of ``like``, ``(batch, length, state_width)``.

        They are drawn on the CPU, so that they are the same on every device.

        Raises:
            ValueError: ``torch.export`` with a seed, which the exported model could not set again.
        """
        if self.seed is not None and torch.compiler.is_exporting():
            raise ValueError(
                "RandomStart.seed must be None in torch.export, which sets no seeds, got "
                f"{self.seed}"
            )
        random = None if self.seed is None else torch.Generator("cpu").manual_seed(int(self.seed))
        numbers = torch.empty(like.shape, dtype=float32_at_least(like), device="cpu")
        # the share of a normal distribution within three standard deviations
        share = math.erf(3 / math.sqrt(2))
        normal = numbers.uniform_(-share, share, generator=random).erfinv() * math.sqrt(2)
        return (normal.clamp(-3, 3) * self.std).to(like)


Start = Literal["zero", "input"] | RandomStart
"""Where an iteration begins: at zero, at the embedded tokens, or at random states."""


def initial_state(start: Start | Tensor, like: Sequence) -> Sequence:
    """The states that an iteration begins from: as ``start`` says for embedded tokens ``like``, or
    ``start`` itself.

    Zeros are one number, expanded: they take no memory. Raises ValueError for states unlike the
    tokens.
    """
    if isinstance(start, Tensor):
        check_states(start, like)
        return start
    if isinstance(start, RandomStart):
        return start.draw(like)
    return like if start == "input" else like.new_zeros(()).expand(like.shape)


def check_states(start: Tensor, like: Tensor) -> None:
    """Refuse states of another shape, dtype or device than the iteration has."""
    if start.shape != like.shape or start.dtype != like.dtype or start.device != like.device:
        wanted, got = (f"{x.dtype} {tuple(x.shape)} on {x.device}" for x in (like, start))
        raise ValueError(f"start must be like the states, {wanted}, got {got}")
