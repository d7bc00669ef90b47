"""Several sequences packed into a row: each becomes a row of its own while a model runs."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int64, Shaped
from torch import Tensor

from deqseq.check import check_type
from deqseq.models.output import ModelOutput
from deqseq.types import Mask


@dataclass(frozen=True)
class Packing:
    """Where the tokens of packed sequences lie; a model computes each sequence as if it were alone.

    Attributes:
        shape: of the packed rows, ``(batch, length)``.
        places: of each token of each sequence among the ``batch * length`` packed ones, ``(sequences, longest)``.
        mask: True at real tokens, which come first, ``(sequences, longest)``.
    """

    shape: tuple[int, int]
    places: Int64[Tensor, "sequences longest"]
    mask: Bool[Tensor, "sequences longest"]

    @classmethod
    def of(
        cls,
        position_ids: Int64[Tensor, "..."] | None,
        cu_seq_lens_q: Shaped[Tensor, "..."] | None,
        seq_idx: Shaped[Tensor, "..."] | None,
        mask: Mask | None,
        shape: tuple[int, int],
    ) -> "Packing | None":
        """From whatever tells where sequences begin in tokens of this ``shape``; None if each row is one sequence.

        A sequence begins at a position of 0, at an entry of ``cu_seq_lens_q``, which counts through all rows, at
        another number in ``seq_idx``, and after padding. ValueError: they disagree, or do not fit the tokens.
        """
        told = _beginnings(position_ids, cu_seq_lens_q, seq_idx, shape)
        if not told:
            return None
        first, begins = next(iter(told.items()))
        real = torch.ones_like(begins) if mask is None else mask
        for name, other in told.items():
            if not torch.equal(other & real, begins & real):
                raise ValueError(f"{name} and {first} must begin sequences at the same tokens")
        at_edge = torch.cat([torch.ones_like(real[:, :1]), ~real[:, :-1]], dim=1)  # behind padding, or the first
        begins = real & (begins | at_edge)
        if int(begins.sum(dim=1).max()) < 2:
            return None
        place = torch.arange(real.numel(), device=real.device)
        begin = place[begins.flatten()]
        sequence = begins.flatten().cumsum(0) - 1
        number = place - begin[sequence.clamp_min(0)]
        flat = real.flatten()
        if position_ids is not None and not torch.equal(position_ids.expand(shape).flatten()[flat], number[flat]):
            raise ValueError("position_ids must count the tokens of each packed sequence from 0")
        longest = int(number[flat].max()) + 1
        places = torch.zeros(len(begin), longest, dtype=torch.int64, device=real.device)
        there = torch.zeros_like(places, dtype=torch.bool)
        places[sequence[flat], number[flat]] = place[flat]
        there[sequence[flat], number[flat]] = True
        return cls(shape, places, there)

    def apart(self, x: Shaped[Tensor, "batch length ..."]) -> Shaped[Tensor, "sequences longest ..."]:
        """A row for each sequence, with zeros behind it."""
        rows = x.flatten(0, 1)[self.places]
        return rows.masked_fill(~self.mask.reshape(*self.mask.shape, *[1] * (x.ndim - 2)), 0)

    def together(self, x: Shaped[Tensor, "sequences longest ..."]) -> Shaped[Tensor, "batch length ..."]:
        """Packed again, with zeros at padding."""
        packed = x.new_zeros(self.shape[0] * self.shape[1], *x.shape[2:])
        return packed.index_put((self.places[self.mask],), x[self.mask]).unflatten(0, self.shape)

    def output(self, output: ModelOutput) -> ModelOutput:
        """The output for the packed rows, without ``explain()``, whose rows would be the sequences."""
        stats, status = output.stats, output.status
        if stats is not None:
            names = ("iterations", "residual", "updates", "forced")
            stats = replace(stats, **{name: self.together(getattr(stats, name)) for name in names})
        if status is not None:
            row = self.places[:, 0] // self.shape[1]
            status = status.new_zeros(self.shape[0]).scatter_reduce(0, row, status, "amax")
        return ModelOutput(self.together(output.value), None, stats, status)


def _beginnings(
    position_ids: Tensor | None, cu_seq_lens_q: Tensor | None, seq_idx: Tensor | None, shape: tuple[int, int]
) -> dict[str, Mask]:
    """Which tokens each argument says begin a sequence, ``(batch, length)``."""
    told: dict[str, Any] = {}
    if cu_seq_lens_q is not None:
        check_type("cu_seq_lens_q", cu_seq_lens_q, Tensor)
        ends, whole = cu_seq_lens_q.long(), shape[0] * shape[1]
        if ends.ndim != 1 or len(ends) < 2 or ends[0] != 0 or ends[-1] != whole or bool((ends.diff() <= 0).any()):
            raise ValueError(f"cu_seq_lens_q must rise from 0 to {whole}, the number of tokens, got {ends.tolist()}")
        begins = torch.zeros(whole, dtype=torch.bool, device=ends.device)
        begins[ends[:-1]] = True
        told["cu_seq_lens_q"] = begins.unflatten(0, shape)
    if seq_idx is not None:
        check_type("seq_idx", seq_idx, Tensor)
        if seq_idx.shape != shape:
            raise ValueError(f"seq_idx must have shape {shape}, got {tuple(seq_idx.shape)}")
        told["seq_idx"] = torch.cat([torch.ones_like(seq_idx[:, :1]), seq_idx.diff(dim=1)], dim=1) != 0
    if position_ids is not None and position_ids.shape in (shape, (1, shape[1])):
        told["position_ids"] = (position_ids == 0).expand(shape)
    return told
