"""Windows of a sequence that move on as their first blocks converge."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from deqseq.rows import map_tensors, take
from deqseq.solution import Solution, SolveStats, Status
from deqseq.solvers.base import Solver
from deqseq.stop import Stop
from deqseq.sweeps import Sweep
from deqseq.tokens import TokenArgs
from deqseq.types import Residual, RowIndex, State
from deqseq.windows import Windows, on_device, on_host

MOVES_EVERY = 2
"""Windows move at every second evaluation, because a move costs half an evaluation.

These move at once: a window of one token; one that passes entirely at its first evaluation, or at
the end of its row; one that has spent its budget; and every one if ``check_every`` is above 1.
"""


class MovingWindows(Windows):
    """Each row iterates a window of blocks, from its first block that is not committed.

    Leading blocks that pass are stored and committed, and the window moves on; tokens that stay
    keep their state. A row that has ended stays in the batch if its cache is needed: its window
    then lies past its last token.
    """

    def __init__(
        self, z0: State, args: TokenArgs, stop: Stop, solver: Solver[Any], sweep: Sweep
    ) -> None:
        batch, self._length = z0.shape[:2]
        width = sweep.width(self._length)
        room = self._length + width  # windows may reach beyond the end
        super().__init__(z0, stop, solver, sweep.block or 1, width, room)
        self._args, self._cache, self._returns_cache = args, args.cache, args.need_aux
        # of rows: tokens, the first one of the window, evaluations when it came there, and of how
        # many tokens in all
        self._lengths = (
            np.full(batch, self._length) if args.mask is None else on_host(args.mask.sum(dim=1))
        )
        self._first, self._since, self._work = (np.zeros(batch, dtype=np.int64) for _ in range(3))
        self._status = np.full(batch, int(Status.CONVERGED))
        # of tokens: evaluations when they came into a window, and until they left it; and whether
        # they had to
        self._entered = np.full((batch, room), np.iinfo(np.int64).max)
        self._iterations = np.zeros((batch, self._length), dtype=np.int64)
        self._forced = np.zeros((batch, self._length), dtype=bool)
        self._values = F.pad(z0, (0, 0, 0, width))  # final ones, and the states in the windows
        self._update_indices()

    def states(self) -> State:
        return self._values.flatten(0, 1)[self._value_index]

    def check(self, z: State, fz: State) -> bool:
        rows, every = self._rows, self.stop.check_every
        left, age = self._lengths[rows] - self._first[rows], self.evaluations - self._since[rows]
        late, new = age >= self._budget, np.isnan(self._bound[rows, self._at[1][:, -1]])
        due = (left > 0) & (late | (age % every == 0))
        self._leaving = np.zeros_like(left)
        if not (due | new).any():
            return False
        measured = None if every == 1 else due | new
        sound, passed = self._measure(z, fz, self._at, new if new.any() else None, measured)
        if not due.any():
            return False
        sound = sound.all(axis=1)
        window = np.minimum(left, self.width)
        blocks = passed.reshape(len(rows), -1, self._block).all(axis=2)
        passing = np.minimum(
            np.logical_and.accumulate(blocks, axis=1).sum(axis=1) * self._block, left
        )
        moves = due & sound
        self._diverged, self._spent = due & ~sound, moves & late & (passing == 0)
        if every == 1 and self.width > 1 and self.evaluations % MOVES_EVERY:
            moves = moves & (late | ((passing == window) & (new | (window == left))))
        leaving = np.where(self._spent, np.minimum(left, self._block), passing * moves)
        # The whole window of a row that diverged is committed. Its cache then shows that it is not
        # finite: a solve that goes on from there diverges too, instead of converging as if these
        # tokens did not exist.
        self._leaving = np.where(self._diverged, window, leaving)
        self._open[rows] = ~self._diverged & (self._leaving < left)
        self.done = not self._open.any()
        return True

    def move(
        self, z: State, fz: State, aux: Any, proposal: State
    ) -> tuple[Tensor, RowIndex | None]:
        self.restarted = None
        if not self._leaving.any():
            return proposal, None
        self._store(z, fz, proposal)
        self._commit(aux)
        rows = self._rows
        self._first[rows] = np.where(
            self._diverged, self._lengths[rows], self._first[rows] + self._leaving
        )
        self._since[rows[self._leaving > 0]] = self.evaluations
        self._work[rows] = self.evaluations * self.width
        kept = None if self._returns_cache else self._remove()
        if kept is not None:
            self._cache = take(self._cache, kept)
        self.restarted = on_device(
            np.flatnonzero(self._since[self._rows] == self.evaluations), self.device
        )
        self._update_indices()
        return self.states(), kept

    def residuals(self) -> Residual:
        return super().residuals()[:, : self._length]

    def solution(self, z: State, fz: State, aux: Any) -> Solution:
        self._store(z, fz, fz)
        if self._returns_cache:
            self._commit(aux)
        self._work[self._rows] = self.evaluations * self.width
        updates = (
            self._iterations.copy()
        )  # work beyond the end of a row is counted at its last token
        updates[np.arange(len(updates)), self._lengths - 1] += self._work - updates.sum(axis=1)
        self._latest[0, np.arange(self._latest.shape[2]) >= self._lengths[:, None]] = (
            0  # padding has none
        )
        arrays = self._status, self._iterations, updates, self._forced
        status, steps, updates, forced = (on_device(x, self.device) for x in arrays)
        stats = SolveStats(steps, self.residuals().contiguous(), self.evaluations, updates, forced)
        cache = self._cache if self._returns_cache else None
        return Solution(self._values[:, : self._length].contiguous(), status, stats, cache)

    def _store(self, z: State, fz: State, proposal: State) -> None:
        """Write the windows back: final values of tokens that leave, the next states of tokens that
        stay.
        """
        inside = np.arange(self.width) < self._leaving[:, None]
        at_point = self._diverged | ~self._spent if self._returns_point else self._diverged
        value = self._value(
            z, fz, at_point, self._diverged, self.states() if self._diverged.any() else z
        )
        value = torch.where(on_device(inside, self.device)[..., None], value, proposal)
        self._values.flatten(0, 1)[self._value_index.flatten()] = value.flatten(0, 1)
        row, offset = inside.nonzero()
        tokens = self._rows[row], self._at[1][row, offset]
        self._iterations[tokens] = self.evaluations - self._entered[tokens]
        self._forced[tokens] = (self._spent | self._diverged)[row]
        self._status[self._rows[self._spent]] = Status.MAX_STEPS_REACHED
        for lost in self._rows[self._diverged]:  # it does not reach the tokens that are left
            self._status[lost] = Status.DIVERGED
            self._forced[lost, self._first[lost] : self._lengths[lost]] = True

    def _commit(self, aux: Any) -> None:
        low, high = int(self._leaving.min()), int(self._leaving.max())
        counts = None if low == high else on_device(self._leaving, self.device)
        self._cache = self.part.advance(aux, len(self._rows), high, counts)

    def _update_indices(self) -> None:
        """Where the windows are now, and what the map needs of their tokens."""
        row = self._rows[:, None]
        token = self._first[row] + np.arange(self.width)
        self._at = row, token
        self._entered[self._at] = np.minimum(self._entered[self._at], self.evaluations)
        inside = np.minimum(token, self._length - 1)
        index = np.stack([row * self._values.shape[1] + token, inside, row * self._length + inside])
        self._value_index, shared, own = on_device(index, self.device)
        real = token < self._lengths[row]
        mask = None if real.all() else on_device(real, self.device)

        def gathered(x: Tensor) -> Tensor:
            """From ``(batch or 1, length, ...)`` to ``(rows, width, ...)``."""
            return x[0][shared] if len(x) == 1 else x.flatten(0, 1)[own]

        inputs, cache = map_tensors(gathered, self._args.inputs), self._cache
        cache = None if cache is None else cache.reserve(self.width)
        self.part = TokenArgs(self._args.backbone, inputs, cache, mask, need_aux=True)
