"""Rotary position embedding, with the frequency scaling of Llama 3.x checkpoints."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from deqseq.arguments import Between, PositiveFloat, PositiveInt, Within, checked, shown


@checked
@dataclass(frozen=True)
class RotaryScaling:
    """How Llama 3.1 and later stretch the rotary frequencies for long contexts.

    Args:
        factor: low frequencies are divided by this, at least 1.
        low_freq_factor: wavelengths above ``original_length / low_freq_factor`` are low
            frequencies.
        high_freq_factor: frequencies with wavelengths below ``original_length / high_freq_factor``
            stay as they are; those between are interpolated. Above ``low_freq_factor``.
        original_length: the context that the frequencies were first trained for, in tokens.

    Raises:
        TypeError, ValueError: a field of the wrong type or out of its range.

    References:
        Grattafiori et al., The Llama 3 Herd of Models, 2024, arXiv 2407.21783.

    Example:
        >>> from deqseq.layers import RotaryScaling
        >>> RotaryScaling(factor=8.0).original_length
        8192
    """

    factor: Annotated[float, Within("[1, inf)")] = 8.0
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_length: PositiveInt = 8192

    def __post_init__(self) -> None:
        if self.high_freq_factor <= self.low_freq_factor:
            raise ValueError(
                "RotaryScaling.high_freq_factor must be above low_freq_factor = "
                f"{self.low_freq_factor}, got {self.high_freq_factor}"
            )


RotaryTable = Float[Tensor, "rows length 1 headdim"]
RotaryTables = tuple[RotaryTable, RotaryTable]
"""Cosines and sines of the angles; sines are negative in the first half of the channels."""


@checked
def rotary_frequencies(
    headdim: Annotated[int, Between(2)],
    theta: PositiveFloat,
    scaling: RotaryScaling | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " half"]:
    r"""Radians per position, :math:`\theta^{-2i/d}`, shape ``(headdim / 2,)``.

    Args:
        headdim: channels per head, an even number (not checked).
        theta: the base.
        scaling: stretches low frequencies. Default: none.
        device: where to put them.
        dtype: of the result.

    References:
        Su et al., RoFormer, 2021, arXiv 2104.09864.

    Example:
        >>> from deqseq.layers import rotary_frequencies
        >>> rotary_frequencies(4, 10000.0)
        tensor([1.0000, 0.0100])
    """
    plain = 1.0 / theta ** (torch.arange(0, headdim, 2, dtype=dtype, device=device) / headdim)
    if scaling is None:
        return plain
    turns = scaling.original_length * plain / (2 * math.pi)  # over the original context
    span = scaling.high_freq_factor - scaling.low_freq_factor
    share = ((turns - scaling.low_freq_factor) / span).clamp(0, 1)
    return share * plain + (1 - share) * plain / scaling.factor


@checked
def rotary_tables(
    positions: Int64[Tensor, "batch length *axes"],
    frequencies: Float[Tensor, " half"],
    dtype: torch.dtype,
) -> RotaryTables:
    """Cosines, and sines that are negated in the first half of the channels, for these positions,
    each ``(batch, length, 1, headdim)``.

    Angles have the dtype of ``frequencies``. In the public Llama code they are float32 in models of
    any dtype, and weights were trained with that rounding.

    Args:
        positions: ``(batch, length)``; a batch of one serves all rows. In a grid each token has
            two, ``(batch, length, 2)``: half of the channels turn by the first, half by the second.
        frequencies: of :func:`rotary_frequencies`, ``(headdim / 2,)``; in a grid half as many.
        dtype: of the result.

    Raises:
        TypeError, ValueError: frequencies or positions of another shape or dtype.

    Example:
        >>> import torch
        >>> from deqseq.layers import rotary_tables
        >>> rotary_tables(torch.tensor([[0, 1]]), torch.tensor([0.5]), torch.float32)[0][0, 1]
        tensor([[0.8776, 0.8776]])
    """
    if not frequencies.is_floating_point() or frequencies.ndim != 1:
        raise TypeError(f"frequencies must be floating-point (half,), got {shown(frequencies)}")
    if positions.ndim not in (2, 3) or positions.dtype != torch.int64:
        raise ValueError(f"positions must be int64 (batch, length), got {shown(positions)}")
    angles = positions.to(frequencies.dtype)[..., None] * frequencies
    angles = angles.flatten(2)[:, :, None]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1).to(dtype), torch.cat([-sin, sin], dim=-1).to(dtype)


def rotate(x: Float[Tensor, "batch length heads headdim"], tables: RotaryTables) -> Tensor:
    """Turn each pair of channels ``(i, i + d/2)`` by its token's angle, in the dtype of ``x``."""
    cos, sin = (table.to(x.dtype) for table in tables)
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)
