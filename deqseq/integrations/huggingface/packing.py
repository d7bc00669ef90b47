"""Several sequences packed into a row: each becomes a row of its own while a model runs."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from deqseq.models.output import ModelOutput
from deqseq.types import Mask


@dataclass(frozen=True)
class Packing:
    """Where the tokens of packed sequences lie; a model computes each sequence as if it were alone.

    Attributes:
        shape: of the packed rows, ``(batch, length)``.
        places: of each token of each sequence among the ``batch * length`` packed ones,
            ``(sequences, longest)``.
        mask: True at real tokens, which come first, ``(sequences, longest)``.
    """

    shape: tuple[int, int]
    places: Int64[Tensor, "sequences longest"]
    mask: Bool[Tensor, "sequences longest"]

    @classmethod
    def of(
        cls, position_ids: Int64[Tensor, "..."] | None, mask: Mask | None, shape: tuple[int, int]
    ) -> "Packing | None":
        """From the positions of tokens of this ``shape``, and which are real; None if each row is
        one sequence.

        A sequence begins at a position of 0 and after padding. ValueError: its positions do not
        count from 0.
        """
        if position_ids is None or position_ids.shape not in (shape, (1, shape[1])):
            return None
        positions = position_ids.expand(shape)
        real = torch.ones_like(positions, dtype=torch.bool) if mask is None else mask
        at_edge = torch.cat(
            [torch.ones_like(real[:, :1]), ~real[:, :-1]], dim=1
        )  # behind padding, or the first
        begins = real & ((positions == 0) | at_edge)
        if int(begins.sum(dim=1).max()) < 2:
            return None
        place = torch.arange(real.numel(), device=real.device)
        begin = place[begins.flatten()]
        sequence = begins.flatten().cumsum(0) - 1
        number = place - begin[sequence.clamp_min(0)]
        flat = real.flatten()
        if not torch.equal(positions.flatten()[flat], number[flat]):
            raise ValueError("position_ids must count the tokens of each packed sequence from 0")
        longest = int(number[flat].max()) + 1
        places = torch.zeros(len(begin), longest, dtype=torch.int64, device=real.device)
        there = torch.zeros_like(places, dtype=torch.bool)
        places[sequence[flat], number[flat]] = place[flat]
        there[sequence[flat], number[flat]] = True
        return cls(shape, places, there)

    def apart(
        self, x: Shaped[Tensor, "batch length ..."]
    ) -> Shaped[Tensor, "sequences longest ..."]:
        """A row for each sequence, with zeros behind it."""
        rows = x.flatten(0, 1)[self.places]
        return rows.masked_fill(~self.mask.reshape(*self.mask.shape, *[1] * (x.ndim - 2)), 0)

    def together(
        self, x: Shaped[Tensor, "sequences longest ..."]
    ) -> Shaped[Tensor, "batch length ..."]:
        """Packed again, with zeros at padding."""
        packed = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return packed.index_put((self.places[self.mask],), x[self.mask]).unflatten(0, self.shape)

    def output(self, output: ModelOutput) -> ModelOutput:
        """The output for the packed rows, without ``explain()``, whose rows would be
        the sequences.
        """
        stats, status = output.stats, output.status
        if stats is not None:
            names = ("iterations", "residual", "updates", "forced")
            stats = replace(stats, **{name: self.together(getattr(stats, name)) for name in names})
        if status is not None:
            row = self.places[:, 0] // self.shape[1]
            status = status.new_zeros(self.shape[0]).scatter_reduce(0, row, status, "amax")
        return ModelOutput(self.together(output.value), None, stats, status)
