"""Which rows and tokens of a solve are still iterated, what ends, and what was found.

Decisions are made on the host in NumPy arrays, because their small operations take a third of torch's time there. They
cost one transfer per check. States and residuals stay on the device.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deqseq.rows import put, take
from deqseq.solution import Solution, SolveStats, Status
from deqseq.stop import Stop, relative
from deqseq.types import Residual, RowIndex, State


class Windows(ABC):
    """The rows that are still in the batch, and the tokens of each that are iterated.

    ``budget`` is ``stop.max_steps``, or 1 after a solver that owns its loop; ``width``, the tokens of a row in one
    evaluation.
    """

    part: Any
    """The map's second argument for these rows and tokens."""
    restarted: RowIndex | None = None
    """Rows in which the solver begins afresh, because their window has just moved to other tokens; None: in none."""
    done = False
    """Whether every row has ended."""
    evaluations = 0
    """Calls of the map so far."""

    def __init__(self, z0: State, stop: Stop, budget: int, block: int, width: int, returns_point: bool) -> None:
        self.stop, self.width, self.device = stop, width, z0.device
        self._budget, self._block, self._returns_point = budget, block, returns_point
        # of the rows that are still in the batch
        self._rows = np.arange(len(z0))  # their positions in the whole batch
        self._open = np.ones(len(z0), dtype=bool)  # not ended
        self._limit: Tensor | None = None  # the difference above which a row has diverged, (rows, 1)
        self._bound: Tensor | None = None  # the largest difference that may pass, (rows, parts)
        self._latest: tuple[Tensor, Tensor] | None = None  # difference and scale at the last check

    @property
    def active_rows(self) -> int:
        """How many rows have not ended."""
        return int(self._open.sum())

    @abstractmethod
    def states(self) -> State:
        """The states to evaluate next, after a start or a move."""

    @abstractmethod
    def check(self, z: State, fz: State) -> bool:
        """Decide which blocks and rows end with the evaluation ``fz`` of ``z``; whether its residual was measured."""

    @abstractmethod
    def move(self, z: State, fz: State, aux: Any, proposal: State) -> tuple[Tensor, RowIndex | None]:
        """Store what ends, and go on: the next point, and the rows that stay in the batch (None: all)."""

    @abstractmethod
    def residuals(self) -> Residual:
        """The latest residuals of the whole batch, ``(batch, tokens)``; ``inf`` where there is none yet."""

    @abstractmethod
    def solution(self, z: State, fz: State, aux: Any) -> Solution:
        """Store the end of the last rows, and return everything that was found."""

    def _measure(self, z: State, fz: State) -> tuple[np.ndarray, np.ndarray]:
        """Which rows have not diverged, ``(rows,)``, and which of their blocks pass, ``(rows, blocks)``."""
        with torch.no_grad():
            difference, scale = self._distances(z, fz)
            assert self._limit is not None and self._bound is not None
            sound, passed = difference <= self._limit, self.stop.passes(difference, scale, self._bound)
            if sound.shape[1] > 1:
                sound = sound.all(dim=1, keepdim=True)
            if self._block > 1 and passed.shape[1] == self.width:
                passed = passed.unflatten(1, (-1, self._block)).all(dim=2)
            flags = on_host(torch.cat([sound, passed], dim=1))
        return flags[:, 0], flags[:, 1:]

    def _distances(self, z: State, fz: State) -> tuple[Tensor, Tensor]:
        """Difference and scale. The first ones of a row decide when it has diverged, and all of them what may pass."""
        difference, scale = self._latest = self.stop.distances(z, fz, self._block)
        if self._limit is None:
            self._limit = self.stop.limit(difference, scale)[:, None]
        self._bound = self.stop.bound(difference, scale, self._bound)
        return difference, scale

    def _residual(self) -> Residual:
        """Of each token at the last check, ``(rows, width)``."""
        assert self._latest is not None
        return self._per_token(relative(*self._latest))

    def _per_token(self, x: Tensor) -> Tensor:
        """From ``(rows, parts)`` to ``(rows, width)``; what is measured of a block holds for all of its tokens."""
        return x.repeat_interleave(self.width // x.shape[1], dim=1)

    def _value(self, z: State, fz: State, at_point: np.ndarray, diverged: np.ndarray, start: State) -> State:
        """What rows return: ``fz``, or in some rows ``z``; where a row diverged and ``z`` is not finite, the start."""
        if not at_point.any():
            return fz
        point = z
        if diverged.any():
            finite = z.isfinite().reshape(len(z), -1).all(dim=1)
            point = torch.where(per_row(finite, z), z, start)
        return torch.where(per_row(on_device(at_point, self.device), z), point, fz)

    def _enough_ended(self) -> bool:
        """Whether rows that have ended leave the batch: once they are a quarter of it."""
        return 4 * (len(self._open) - self.active_rows) >= len(self._open)


class AllTokens(Windows):
    """All tokens of a row end together. Nothing is indexed by token, so the iteration can be differentiated.

    The point of a row that has ended is no longer changed. The row is removed from the batch later, if the map has
    ``args`` of which rows can be taken; its value, residual and ``aux`` are stored then.
    """

    def __init__(self, z0: State, args: Any, stop: Stop, budget: int, returns_point: bool) -> None:
        tokens = math.prod(z0.shape[1:-1])
        super().__init__(z0, stop, budget, tokens, tokens, returns_point)
        self.part, self._z0 = args, z0
        self._frozen: Tensor | None = None  # rows that have ended, shaped to broadcast over the state
        self._at_point = np.zeros(len(z0), dtype=bool)  # rows whose value is the point, not the map's value there
        self._diverged = np.zeros(len(z0), dtype=bool)
        # of the whole batch
        self._stored: Any = None  # values, residuals and aux
        self._status = np.full(len(z0), int(Status.MAX_STEPS_REACHED))
        self._iterations = np.zeros(len(z0), dtype=np.int64)
        self._updates = np.zeros(len(z0), dtype=np.int64)

    def states(self) -> State:
        return self._z0.contiguous()  # with other strides, as of expanded zeros, the map would be compiled twice

    def check(self, z: State, fz: State) -> bool:
        late = self.evaluations >= self._budget
        if not late and self.evaluations % self.stop.check_every:
            if self._limit is None and self.stop.has_tolerance:
                with torch.no_grad():
                    self._distances(z, fz)
            return False
        sound, passed = self._measure(z, fz)
        if late or passed.any() or not sound.all():
            self._end_rows(self._open & sound & passed[:, 0], self._open & ~sound, late)
        return True

    def move(self, z: State, fz: State, aux: Any, proposal: State) -> tuple[Tensor, RowIndex | None]:
        if self._frozen is None:
            return proposal, None
        after = torch.where(self._frozen, z, proposal)
        if self.part is None or not self._enough_ended():
            return after, None
        self._store(z, fz, aux)
        (stay,) = self._open.nonzero()
        self._rows, self._open, self._frozen = self._rows[stay], self._open[stay], None
        self._at_point, self._diverged = self._at_point[stay], self._diverged[stay]
        kept = on_device(stay, self.device)
        kept_too = self.part, self._limit, self._bound, self._latest
        self.part, self._limit, self._bound, self._latest = take(kept_too, kept)
        return after[kept], kept

    def residuals(self) -> Residual:
        now = self._residual()
        return now if self._stored is None else put(self._stored[1], on_device(self._rows, self.device), now)

    def solution(self, z: State, fz: State, aux: Any) -> Solution:
        self._store(z, fz, aux)
        value, residual, aux = self._stored
        status, steps, updates = (on_device(x, self.device) for x in (self._status, self._iterations, self._updates))
        return Solution(value, status, SolveStats(steps, residual, self.evaluations, updates), aux)

    def _end_rows(self, converged: np.ndarray, diverged: np.ndarray, late: bool) -> None:
        ended = self._open if late else converged | diverged
        if not ended.any():
            return
        self._status[self._rows[converged]] = int(Status.CONVERGED)
        self._status[self._rows[diverged]] = int(Status.DIVERGED)
        self._iterations[self._rows[ended]] = self.evaluations
        self._open, self._diverged = self._open & ~ended, self._diverged | diverged
        self._at_point = self._at_point | diverged | (converged & self._returns_point)
        self._frozen = per_row(on_device(~self._open, self.device), self._z0)
        self.done = not self._open.any()

    def _store(self, z: State, fz: State, aux: Any) -> None:
        """All rows that are in the batch; those that go on will be stored again."""
        rows = on_device(self._rows, self.device)
        start = self._z0[rows] if self._diverged.any() else z
        value = self._value(z, fz, self._at_point, self._diverged, start)
        if self._stored is None and not self.done:
            value = value.clone()  # a map may fill the same buffer again
        now = value, self._residual(), aux
        self._stored = now if self._stored is None else put(self._stored, rows, now)
        self._updates[self._rows] = self.evaluations


def on_host(x: Tensor) -> np.ndarray:
    """A tensor as an array of the host, in one transfer; inside torch.func its numbers are copied one by one."""
    torch_c: Any = torch._C
    return np.array(x.tolist()) if torch_c._functorch.is_functorch_wrapped_tensor(x) else x.cpu().numpy()


def on_device(x: np.ndarray, device: torch.device) -> Tensor:
    """An array of the host as a tensor. On a CPU they share their memory, so the array must not be changed later."""
    return torch.from_numpy(x).to(device)


def per_row(flags: Tensor, z: State) -> Tensor:
    """One flag per row, shaped to broadcast over the state."""
    return flags.reshape(-1, *[1] * (z.ndim - 1))
