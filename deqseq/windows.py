"""Which rows and tokens of a solve are still iterated, what ends, and what was found.

States stay on the device. What decides, the size of each token's step and of its state, is copied
to the host in one transfer per check: small operations take NumPy a third of torch's time. Arrays
of the host are of the whole batch.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deqseq.rows import put, take
from deqseq.solution import Solution, SolveStats, Status
from deqseq.solvers.base import Solver
from deqseq.stop import Stop, relative
from deqseq.types import Residual, RowIndex, State

Flags = tuple[np.ndarray, np.ndarray]


class Windows(ABC):
    """The rows that are still in the batch, and the tokens of each that are iterated.

    ``width`` is the tokens of a row in one evaluation, of ``tokens`` in all.
    """

    part: Any
    """The map's second argument for these rows and tokens."""
    restarted: RowIndex | None = None
    """Rows in which the solver begins afresh, because their window has just moved to other tokens;
    None: in none.
    """
    done = False
    """Whether every row has ended."""
    evaluations = 0
    """Calls of the map so far."""

    def __init__(
        self, z0: State, stop: Stop, solver: Solver[Any], block: int, width: int, tokens: int
    ) -> None:
        self.stop, self.width, self.device, self._block = stop, width, z0.device, block
        self._budget, self._returns_point = (
            1 if solver.owns_loop else stop.max_steps,
            solver.returns_point,
        )
        self._rows = np.arange(len(z0))  # positions of the rows that are still in the batch
        self._open = np.ones(len(z0), dtype=bool)  # rows that have not ended
        kind = f"f{torch.promote_types(z0.dtype, torch.float32).itemsize}"
        self._limit = np.zeros(len(z0), kind)  # the difference above which a row has diverged
        self._latest = np.ones(
            (2, len(z0), tokens), kind
        )  # of each token the difference, and the size of its state
        self._latest[0] = np.inf
        self._bound = np.full(
            (len(z0), tokens), np.nan, kind
        )  # of differences that pass; NaN: not measured yet

    @property
    def active_rows(self) -> int:
        """How many rows have not ended."""
        return int(self._open.sum())

    @abstractmethod
    def states(self) -> State:
        """The states to evaluate next, after a start or a move."""

    @abstractmethod
    def check(self, z: State, fz: State) -> bool:
        """Decide which blocks and rows end with the evaluation ``fz`` of ``z``; whether its
        residual was measured.
        """

    @abstractmethod
    def move(
        self, z: State, fz: State, aux: Any, proposal: State
    ) -> tuple[Tensor, RowIndex | None]:
        """Store what ends, and go on: the next point, and the rows that stay in the batch (None:
        all).
        """

    def residuals(self) -> Residual:
        """The latest residuals of the whole batch, ``(batch, tokens)``; ``inf`` where there is none
        yet.
        """
        with np.errstate(all="ignore"):
            return on_device(relative(*self._latest), self.device)

    @abstractmethod
    def solution(self, z: State, fz: State, aux: Any) -> Solution:
        """Store the end of the last rows, and return everything that was found."""

    def _measure(
        self, z: State, fz: State, at: Any, new: np.ndarray | None, measured: np.ndarray | None
    ) -> Flags:
        """Which tokens have not diverged, and which of them pass, each ``(rows, width)``.

        ``at`` is where these tokens stand in the arrays. Rows that are ``new`` have tokens of which
        nothing is known; only those that are ``measured`` (None: all) take anything in, so that no
        row depends on another one.
        """
        with torch.no_grad():
            numbers = on_host(torch.stack(self.stop.distances(z, fz, self._block)))
        self._latest[:, *at] = numbers
        (difference, scale), before = numbers, self._bound[at]
        with np.errstate(all="ignore"):
            if new is not None:
                limit = self.stop.limit(difference, scale).max(
                    axis=1
                )  # new tokens may be of another scale
                self._limit[self._rows[new]] = np.maximum(self._limit[self._rows], limit)[new]
                before = np.where(np.isnan(before), self.stop.rtol * scale, before)
            bound = self.stop.bound(difference, scale, before)
            self._bound[at] = (
                bound if measured is None else np.where(measured[:, None], bound, before)
            )
            sound = self.stop.sound(difference, scale, self._limit[at[0]].reshape(-1, 1))
            return sound, self.stop.passes(difference, scale, bound)

    def _value(
        self, z: State, fz: State, at_point: np.ndarray, diverged: np.ndarray, start: State
    ) -> State:
        """What rows return: ``fz``, or in some rows ``z``; where a row diverged and ``z`` is not
        finite, the start.
        """
        if not at_point.any():
            return fz
        point = z
        if diverged.any():
            finite = z.isfinite().reshape(len(z), -1).all(dim=1)
            point = torch.where(per_row(finite, z), z, start)
        return torch.where(per_row(on_device(at_point, self.device), z), point, fz)

    def _remove(self) -> RowIndex | None:
        """Remove rows that have ended from the batch, once they are a quarter of it; those that
        stay (None: all).
        """
        (stay,) = self._open[self._rows].nonzero()
        if 4 * (len(self._rows) - len(stay)) < len(self._rows):
            return None
        self._rows = self._rows[stay]
        return on_device(stay, self.device)


class AllTokens(Windows):
    """All tokens of a row end together. Nothing is indexed by token, so the iteration can be
    differentiated.

    The point of a row that has ended is no longer changed. The row is removed from the batch later,
    if the map has ``args`` of which rows can be taken; its value and ``aux`` are stored then.
    """

    def __init__(self, z0: State, args: Any, stop: Stop, solver: Solver[Any]) -> None:
        tokens = math.prod(z0.shape[1:-1])
        super().__init__(z0, stop, solver, tokens, tokens, tokens)
        self.part, self._z0 = args, z0
        self._at: Any = (slice(None),)  # rows that are in the batch
        self._frozen: Tensor | None = (
            None  # rows that have ended, shaped to broadcast over the state
        )
        self._stored: Any = None  # values and aux of the whole batch
        self._status = np.full(len(z0), int(Status.MAX_STEPS_REACHED))
        self._iterations = np.zeros(len(z0), dtype=np.int64)
        self._updates = np.zeros(len(z0), dtype=np.int64)

    def states(self) -> State:
        return (
            self._z0.contiguous()
        )  # with other strides, as of expanded zeros, the map would be compiled twice

    def check(self, z: State, fz: State) -> bool:
        late, first = self.evaluations >= self._budget, self._limit[0] == 0
        due = late or self.evaluations % self.stop.check_every == 0
        if not due and not (first and self.stop.has_tolerance):
            return False
        rows = self._rows
        sound, passed = self._measure(
            z, fz, self._at, np.ones_like(self._open) if first else None, None
        )
        if not due or not (late or passed.any() or not sound.all()):
            return due
        sound, passed = sound.all(axis=1), passed.all(axis=1)
        ended = self._open[rows] & (late | passed | ~sound)
        if ended.any():
            status = np.where(passed, Status.CONVERGED, Status.MAX_STEPS_REACHED)
            self._status[rows[ended]] = np.where(sound, status, Status.DIVERGED)[ended]
            self._iterations[rows[ended]], self._open[rows[ended]] = self.evaluations, False
            self._frozen = per_row(on_device(~self._open[rows], self.device), z)
            self.done = not self._open.any()
        return True

    def move(
        self, z: State, fz: State, aux: Any, proposal: State
    ) -> tuple[Tensor, RowIndex | None]:
        if self._frozen is None:
            return proposal, None
        after, rows = torch.where(self._frozen, z, proposal), self._rows
        kept = None if self.part is None else self._remove()
        if kept is None:
            return after, None
        self._store(rows, z, fz, aux)
        self._frozen, self.part, self._at = None, take(self.part, kept), (self._rows,)
        return after[kept], kept

    def solution(self, z: State, fz: State, aux: Any) -> Solution:
        self._store(self._rows, z, fz, aux)
        value, aux = self._stored
        status, *numbers = (
            on_device(x, self.device) for x in (self._status, self._iterations, self._updates)
        )
        return Solution(
            value,
            status,
            SolveStats(numbers[0], self.residuals(), self.evaluations, numbers[1]),
            aux,
        )

    def _store(self, rows: np.ndarray, z: State, fz: State, aux: Any) -> None:
        """These rows, which are in the batch; those that go on will be stored again."""
        places, status = on_device(rows, self.device), self._status[rows]
        diverged = status == Status.DIVERGED
        start = self._z0[places] if diverged.any() else z
        value = self._value(
            z, fz, diverged | (status == Status.CONVERGED) & self._returns_point, diverged, start
        )
        if self._stored is None and not self.done:
            value = value.clone()  # a map may fill the same buffer again
        self._stored = (
            (value, aux) if self._stored is None else put(self._stored, places, (value, aux))
        )
        self._updates[rows] = self.evaluations


def on_host(x: Tensor) -> np.ndarray:
    """A tensor as an array of the host, in one transfer."""
    return x.cpu().numpy()


def on_device(x: np.ndarray, device: torch.device) -> Tensor:
    """An array of the host as a tensor. On a CPU they share their memory, so the array must not be
    changed later.
    """
    return torch.from_numpy(x).to(device)


def per_row(flags: Tensor, z: State) -> Tensor:
    """One flag per row, shaped to broadcast over the state."""
    return flags.reshape(-1, *[1] * (z.ndim - 1))
