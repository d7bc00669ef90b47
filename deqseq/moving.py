"""Windows of a sequence that move on as their first blocks converge."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from deqseq.rows import take
from deqseq.solution import Solution, SolveStats, Status
from deqseq.stop import Stop
from deqseq.sweeps import Sweep
from deqseq.tokens import TokenArgs
from deqseq.types import Residual, RowIndex, State
from deqseq.windows import Windows, on_device, on_host

MOVES_EVERY = 2
"""Windows move at every second evaluation, because a move costs half an evaluation.

These move at once: a window of one token; one that passes entirely at its first evaluation, or at the end of its row;
one that has spent its budget; and every one if ``check_every`` is above 1.
"""


class MovingWindows(Windows):
    """Each row iterates a window of blocks, from its first block that is not committed.

    Leading blocks that pass are stored and committed, and the window moves on; tokens that stay keep their state. A
    row that has ended stays in the batch if its cache is needed: its window then lies past its last token.
    """

    def __init__(self, z0: State, args: TokenArgs, stop: Stop, budget: int, returns_point: bool, sweep: Sweep) -> None:
        batch, self._length = z0.shape[:2]
        super().__init__(z0, stop, budget, sweep.block or 1, sweep.width(self._length), returns_point)
        lengths = np.full(batch, self._length) if args.mask is None else on_host(args.mask.sum(dim=1))
        self._args, self._cache, self._returns_cache = args, args.cache, args.need_aux
        # of the rows that are still in the batch
        self._first, self._end = np.zeros_like(lengths), lengths  # first token of the window, end of the row
        self._since = np.zeros_like(lengths)  # evaluations when the window moved last
        self._moved = self._measured = self._open  # their window has moved since the last measurement; measured now
        self._entered = np.zeros((batch, self.width), dtype=np.int64)  # evaluations when each token in it entered
        # of the last check: tokens that leave, rows that have spent their budget, rows that have diverged
        self._leaving, self._spent, self._diverged = np.zeros_like(lengths), ~self._open, ~self._open
        # of the whole batch, on the host
        self._lengths, self._work = lengths, np.zeros_like(lengths)  # tokens, and evaluations of tokens
        self._status = np.full(batch, int(Status.CONVERGED))
        self._iterations = np.zeros((batch, self._length), dtype=np.int64)
        self._forced = np.zeros((batch, self._length), dtype=bool)
        # of the whole batch, on the device, with room for windows that reach beyond the end
        self._values = F.pad(z0, (0, 0, 0, self.width))  # final ones, and the states in the windows
        kind = torch.promote_types(z0.dtype, torch.float32)
        self._residuals = self._values.new_full(self._values.shape[:2], torch.inf, dtype=kind)
        self._bounds = torch.full_like(self._residuals, torch.nan)  # of differences that pass; NaN: not measured yet
        self._update_indices()

    def states(self) -> State:
        return self._values.flatten(0, 1)[self._value_index]

    def check(self, z: State, fz: State) -> bool:
        age, every = self.evaluations - self._since, self.stop.check_every
        due, late = self._open, age >= self._budget
        self._leaving = np.zeros_like(self._first)
        if every > 1:
            due = due & ((age % every == 0) | late)
            self._measured = due | self._moved
            if not due.any():
                if self._moved.any():
                    with torch.no_grad():
                        self._distances(z, fz)
                return False
        sound, passed = self._measure(z, fz)
        left = self._end - self._first
        window = np.minimum(left, self.width)
        passing = np.minimum(np.logical_and.accumulate(passed, axis=1).sum(axis=1) * self._block, left)
        moves = due & sound
        self._diverged, self._spent = due & ~sound, moves & late & (passing == 0)
        if every == 1 and self.width > 1 and self.evaluations % MOVES_EVERY:
            moves = moves & (late | ((passing == window) & ((age == 1) | (window == left))))
        leaving = np.where(self._spent, np.minimum(left, self._block), passing * moves)
        # The whole window of a row that diverged is committed. Its cache then shows that it is not finite: a solve that
        # goes on from there diverges too, instead of converging as if these tokens did not exist.
        self._leaving = np.where(self._diverged, window, leaving)
        self._open = ~self._diverged & (self._leaving < left)
        self.done = not self._open.any()
        return True

    def _distances(self, z: State, fz: State) -> tuple[Tensor, Tensor]:
        """The limit of divergence is raised in rows whose window has just moved: new tokens may be of another scale."""
        limit, bound = self._limit, self._bound
        difference, scale = super()._distances(z, fz)
        if limit is not None and bound is not None and self._bound is not None:
            if not self._measured.all():
                self._bound = torch.where(on_device(self._measured, self.device)[:, None], self._bound, bound)
            if self._moved.any():
                higher = torch.maximum(limit, self.stop.limit(difference, scale)[:, None])
                rows = on_device(self._moved, self.device)[:, None]
                self._limit = higher if self._moved.all() else torch.where(rows, higher, limit)
                fresh = rows & self._bound.isnan()
                self._bound = torch.where(fresh, self.stop.bound(difference, scale, None), self._bound)
        self._moved = np.zeros_like(self._moved)
        return difference, scale

    def move(self, z: State, fz: State, aux: Any, proposal: State) -> tuple[Tensor, RowIndex | None]:
        self.restarted = None
        if not self._leaving.any():
            return proposal, None
        self._store(z, fz, proposal)
        self._commit(aux)
        self._advance()
        kept = self._remove()
        self.restarted = on_device(np.flatnonzero(self._since == self.evaluations), self.device)
        self._update_indices()
        assert self._bound is not None
        self._bound = self._bounds.flatten()[self._value_index][:, :: self.width // self._bound.shape[1]]
        return self.states(), kept

    def residuals(self) -> Residual:
        known = self._residuals.flatten().index_copy(0, self._value_index.flatten(), self._residual().flatten())
        return known.reshape(self._residuals.shape)[:, : self._length]

    def solution(self, z: State, fz: State, aux: Any) -> Solution:
        self._store(z, fz, fz)
        if self._returns_cache:
            self._commit(aux)
        self._work[self._rows] = self.evaluations * self.width
        updates = self._iterations.copy()  # work beyond the end of a row is counted at its last token
        updates[np.arange(len(updates)), self._lengths - 1] += self._work - updates.sum(axis=1)
        arrays = self._status, self._iterations, updates, self._forced, np.arange(self._length) < self._lengths[:, None]
        status, steps, updates, forced, real = (on_device(x, self.device) for x in arrays)
        residual = self._residuals[:, : self._length].masked_fill(~real, 0)
        stats = SolveStats(steps, residual, self.evaluations, updates, forced)
        cache = self._cache if self._returns_cache else None
        return Solution(self._values[:, : self._length].contiguous(), status, stats, cache)

    def _store(self, z: State, fz: State, proposal: State) -> None:
        """Write the windows back: final values of tokens that leave, the next states of tokens that stay."""
        inside = np.arange(self.width) < self._leaving[:, None]
        at_point = self._diverged | ~self._spent if self._returns_point else self._diverged
        value = self._value(z, fz, at_point, self._diverged, self.states() if self._diverged.any() else z)
        value = torch.where(on_device(inside, self.device)[..., None], value, proposal)
        index = self._value_index.flatten()
        self._values.flatten(0, 1)[index] = value.flatten(0, 1)
        self._residuals.flatten()[index] = self._residual().flatten()
        assert self._bound is not None
        self._bounds.flatten()[index] = self._per_token(self._bound).flatten()
        row, offset = inside.nonzero()
        tokens, failed = (self._rows[row], self._first[row] + offset), self._spent | self._diverged
        self._iterations[tokens] = self.evaluations - self._entered[row, offset]
        if failed.any():
            self._forced[tokens] = failed[row]
            self._store_failures()

    def _store_failures(self) -> None:
        """Statuses, and the tokens that a row which diverged does not reach."""
        token, lost, spent = np.arange(self._length), self._rows[self._diverged], self._rows[self._spent]
        rest = (token >= self._first[self._diverged, None]) & (token < self._end[self._diverged, None])
        self._forced[lost] = self._forced[lost] | rest
        self._status[spent] = int(Status.MAX_STEPS_REACHED)
        self._status[lost] = int(Status.DIVERGED)

    def _commit(self, aux: Any) -> None:
        low, high = int(self._leaving.min()), int(self._leaving.max())
        counts = None if low == high else on_device(self._leaving, self.device)
        self._cache = self.part.advance(aux, len(self._rows), high, counts)

    def _advance(self) -> None:
        """Move the windows past what has left."""
        source = np.arange(self.width) + self._leaving[:, None]
        stayed = np.take_along_axis(self._entered, np.minimum(source, self.width - 1), axis=1)
        self._entered = np.where(source < self.width, stayed, self.evaluations)
        self._moved = self._leaving > 0
        self._since = np.where(self._moved, self.evaluations, self._since)
        self._first = np.where(self._diverged, self._end, self._first + self._leaving)

    def _remove(self) -> RowIndex | None:
        """Remove the rows that have ended from the batch; those that stay (None: all)."""
        if self._returns_cache or not self._enough_ended():
            return None
        self._work[self._rows] = self.evaluations * self.width
        (stay,) = self._open.nonzero()
        self._rows, self._open, self._since = self._rows[stay], self._open[stay], self._since[stay]
        self._first, self._end, self._entered = self._first[stay], self._end[stay], self._entered[stay]
        self._moved, self._measured = self._moved[stay], np.ones_like(self._open)
        kept = on_device(stay, self.device)
        self._limit, self._cache = take((self._limit, self._cache), kept)
        return kept

    def _update_indices(self) -> None:
        """Where the windows are now, and what the map needs of their tokens."""
        row, token = self._rows[:, None], self._first[:, None] + np.arange(self.width)
        inside = np.minimum(token, self._length - 1)
        index = np.stack([row * self._values.shape[1] + token, inside, row * self._length + inside])
        self._value_index, shared, own = on_device(index, self.device)
        real = token < self._end[:, None]
        mask = None if real.all() else on_device(real, self.device)

        def gathered(x: Tensor) -> Tensor:
            """From ``(batch or 1, length, ...)`` to ``(rows, width, ...)``."""
            return x[0][shared] if len(x) == 1 else x.flatten(0, 1)[own]

        self.part = self._args.window(gathered, self._cache, mask, self.width)
