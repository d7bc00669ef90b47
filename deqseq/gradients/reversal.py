"""The points of a coupled iteration, from the last to the first."""

import math
import threading
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deqseq.evaluate import evaluate
from deqseq.types import FixedPointMap, RowIndex, State

TOLERANCE = 1e-3  # of the start that the points lead back to, relative to the first size of a row


@dataclass
class _Place:
    """Where a backward pass is: at evaluation ``number``.

    Of rows that go on from there, ``now`` is the point of that evaluation, and ``later`` the one after it; of the
    others ``later`` is their last point, and ``now`` the one before it.
    """

    number: int
    later: Tensor
    now: Tensor
    fz: Tensor | None = None
    digits: Tensor | None = None


class Reversal:
    """What an iteration records to be computed backwards: the last two points of each row, and its lost digits.

    The inverse of a step, rounded, misses the point before by a few multiples of the spacing. That digit is stored; an
    int64 number holds those of many steps.
    """

    def __init__(self, f: FixedPointMap, z0: State, damping: float, has_aux: bool) -> None:
        self.start, self.damping = z0.detach(), damping
        self._f, self._has_aux = f, has_aux
        self._calls: list[tuple[Any, RowIndex | None]] = []  # args and rows of each evaluation
        self._later = self._now = self.start.double()
        self._moved = torch.zeros(len(z0), dtype=torch.int64, device=z0.device)  # the evaluation of the last new point
        self._last = self._moved  # the last evaluation of each row
        self._spacing: Tensor | None = None
        # between the first size of a row and the spacing of its numbers; what is left of float64's 53 is for growth
        self._bits = 44 if z0.dtype == torch.float64 else 36
        self._largest = math.ceil(0.5 / (1 - damping)) + 2  # digits are between this and its negative
        self._base = 2 * self._largest + 1
        self._per_number = int(62 / math.log2(self._base))
        self._digits: list[Tensor] = []
        kind = z0.device.type
        self._autocast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
        self._places = threading.local()  # backward passes of several threads do not meet

    def evaluate(self, z: State, args: Any) -> tuple[State, Any]:
        """The map in the dtype of the start, its value in that of ``z``."""
        fz, aux = evaluate(self._f, z.to(self.start.dtype), args, has_aux=self._has_aux)
        return fz.to(z.dtype), aux

    # forward

    def record(self, z: State, args: Any, rows: RowIndex | None) -> int:
        """Number the evaluation that is about to be made, and keep its points."""
        number = len(self._calls)
        self._calls.append((args, rows))
        later, now, moved = (_of(x, rows) for x in (self._later, self._now, self._moved))
        new = (z != later).flatten(1).any(dim=1) if z.ndim > 1 else z != later
        self._now = _with(self._now, rows, torch.where(_like(new, z), later, now))
        self._moved = _with(self._moved, rows, torch.where(new, number, moved))
        self._later = _with(self._later, rows, z)
        return number

    def spacing(self, fz: State, rows: RowIndex) -> Tensor:
        """Of the numbers in each row: a power of 2, set at the first step."""
        if self._spacing is None:
            size = torch.maximum(self.start.double().abs(), fz.abs()).reshape(len(fz), -1).amax(dim=1)
            exponent = torch.frexp(size.nan_to_num().clamp(1, 1e100)).exponent
            self._spacing = _like(torch.ldexp(torch.ones_like(size), exponent - self._bits), fz)
        return self._spacing[rows]

    def record_step(self, before: State, fz: State, after: State, rows: RowIndex) -> None:
        """Keep what the inverse of a step lacks."""
        assert self._spacing is not None
        spacing = self._spacing[rows]
        digit = ((before - self._inverse(after, fz, spacing)) / spacing).nan_to_num()
        digit = digit.round().clamp(-self._largest, self._largest).to(torch.int64) + self._largest
        if (len(self._calls) - 1) % self._per_number == 0:
            self._digits.append(torch.zeros_like(self._later, dtype=torch.int64))
        self._digits[-1].mul_(self._base).index_add_(0, rows, digit)

    def finish(self, last: Tensor, diverged: Tensor) -> None:
        """The solve has ended: each row at evaluation ``last``; those that diverged stay at their start."""
        self._now = torch.where(_like(self._moved < last, self._now), self._later, self._now)
        self._later, self._now = (torch.where(_like(diverged, x), self.start, x) for x in (self._later, self._now))
        self._last = last.masked_fill(diverged, 0)

    # backward

    def point(self, number: int) -> State:
        """The point of an evaluation, without a graph."""
        place: _Place | None = getattr(self._places, "current", None)
        if place is None or place.number < number:
            place = _Place(len(self._calls) - 1, self._later, self._now)
        while place.number > number:
            self._back(place)
        rows, self._places.current = self._calls[number][1], place
        if number == 0:
            self._places.current = None
            self._check(place)
            return _of(self.start.double(), rows)
        return _of(torch.where(_like(self._last > number, place.now), place.now, place.later), rows).detach()

    def evaluated(self, number: int, fz: State) -> None:
        """The value at the point asked for last, which the step before it needs."""
        place: _Place | None = self._places.current
        if place is not None and place.number == number:
            place.fz = fz

    def _back(self, place: _Place) -> None:
        """To the evaluation before."""
        number, moves = place.number, _like(self._last > place.number, place.now)
        if number < len(self._calls) - 1:
            args, rows = self._calls[number]
            if place.fz is None:  # no gradient came this way
                point = _of(torch.where(moves, place.now, place.later), rows)
                kind, dtype = self._autocast or (point.device.type, None)
                with torch.no_grad(), torch.autocast(kind, dtype) if dtype else nullcontext():
                    place.fz = self.evaluate(point, args)[0]
            if place.digits is None or (number + 1) % self._per_number == 0:
                place.digits = self._digits[number // self._per_number]
            assert self._spacing is not None
            digit, place.digits = place.digits % self._base - self._largest, place.digits // self._base
            fz = _with(place.later, rows, place.fz)
            before = self._inverse(place.later, fz, self._spacing) + digit * self._spacing
            place.later, place.now = torch.where(moves, place.now, place.later), torch.where(moves, before, place.now)
        place.number, place.fz = number - 1, None

    def _inverse(self, after: Tensor, fz: Tensor, spacing: Tensor) -> Tensor:
        """The point before a step, up to a few multiples of the spacing. No fused operation: bits must agree."""
        return torch.round((after - fz * self.damping) / (1 - self.damping) / spacing) * spacing

    def _check(self, place: _Place) -> None:
        """Raise an error unless the points have led back to the start."""
        if self._spacing is None:
            return
        error = torch.where(_like(self._last > 0, place.now), (place.now - self.start).abs() / self._spacing, 0)
        worst = error.nan_to_num(torch.inf).max().item() * 2.0**-self._bits
        if worst > TOLERANCE:
            raise RuntimeError(
                f"Reversible cannot go back through these {len(self._calls)} evaluations with damping {self.damping}: "
                f"they lead to a start that is off by {worst:.0e} of the first value's size. Either the map gives "
                "other values when it is evaluated again (random numbers? weights changed before backward()?): make "
                "it deterministic. Or the states grew hundreds of times beyond their first size: normalise them, or "
                "take Unrolled(checkpoint=True)"
            )


def _of(x: Tensor, rows: RowIndex | None) -> Tensor:
    return x if rows is None else x[rows]


def _with(x: Tensor, rows: RowIndex | None, new: Tensor) -> Tensor:
    return new if rows is None else x.index_copy(0, rows, new)


def _like(rows: Tensor, z: Tensor) -> Tensor:
    """One number or flag per row, shaped to broadcast over the state."""
    return rows.reshape(-1, *[1] * (z.ndim - 1))
