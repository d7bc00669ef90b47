"""A window in each row, and which of its tokens have converged."""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn import functional as F

from deqseq.monitor import Monitor, on_device, on_host
from deqseq.norms import divergence_limit, error_estimate, measure
from deqseq.solution import Solution, SolveStats, Status
from deqseq.stop import Stop
from deqseq.types import Residual, RowIndex, State

EVERY = 2
"""A window moves after every second evaluation, or when all of it has converged.

A move costs the whole batch about half of an evaluation, and in a large batch some window could move after each.
"""


class WindowMonitor(Monitor):
    """A window over the first tokens of each row that have not converged.

    It lives for a whole sweep. A run of the loop ends when the window of some row begins with tokens that have
    converged, or has spent its budget; then :meth:`commit` files these, and :meth:`stand` moves that window on. Each
    row has its own place, budget and checks, so nothing depends on the other rows. Each token is tested on its own.

    Where the windows stand is decided on the host, in arrays of numpy, whose small operations take a third of torch's
    time. States and residuals of all tokens lie on the device; those in the windows are gathered from there.

    Args:
        z0: the start, ``(batch, length, d_model)``.
        stop: tolerances, and the budget of a commit.
        window: tokens that are iterated together.
        ends: real tokens of each row, ``(batch,)``.
        together: whether the loop goes on until every window can move.
    """

    moved: RowIndex | None
    """Computed rows whose window has just moved; None: all that have not ended."""

    def __init__(self, z0: State, stop: Stop, window: int, ends: Int64[np.ndarray, " batch"], together: bool) -> None:
        self.stop, self._together = replace(stop, per="token"), together
        self.active_rows, self._length = z0.shape[:2]
        self.width = self._widest = min(window, self._length)
        # of the computed rows, on the host: position in the batch, first token of the window, end, age of the window
        self._rows, self._start, self._end = np.arange(len(z0)), np.zeros_like(ends), ends
        self._age = np.zeros_like(ends)
        # of the batch, on the host
        self._ends = ends
        self._history = [(0, self._start)]  # evaluations before each move, and where the windows stood after it
        self._computed = np.zeros_like(ends)  # evaluations of tokens, known when a row leaves the computed ones
        self._work = 0  # those of each computed row: all have had the same
        self._forced = np.zeros((len(z0), self._length), dtype=bool)
        self._diverged = np.zeros_like(ends, dtype=bool)
        # of all tokens
        self._value = F.pad(z0, (0, 0, 0, self.width))  # room for windows that reach beyond the end
        # two residuals, at the last check and the one before; NaN: not yet; 0 after the end of a row
        real = on_device(np.arange(self._value.shape[1]) < ends[:, None], self._value.device)[..., None]
        kind = torch.promote_types(z0.dtype, torch.float32)
        self._residuals = z0.new_zeros(*self._value.shape[:2], 2, dtype=kind).masked_fill_(real, torch.nan)
        # of the computed rows: the difference above which one has diverged
        self._limit = self._residuals.new_zeros(len(z0))
        self.stand()

    def states(self) -> State:
        """The states in the windows, ``(rows, window, d_model)``."""
        return self._value.flatten(0, 1)[self._here]

    def gather(self, x: Tensor) -> Tensor:
        """``x`` of the tokens in the windows: from ``(batch or 1, length, ...)`` to ``(rows, window, ...)``."""
        return x.flatten(0, 1)[self._column if len(x) == 1 else self._column_of_all]

    def mask(self) -> Bool[Tensor, "rows window"] | None:
        """True at tokens before the end of their row; None: all are."""
        real = self._places < self._end[:, None]
        return None if real.all() else on_device(real, self._value.device)

    def checks(self, step: int) -> bool:
        return self.stop.check_every == 1 or bool(self.stop.checks(self._age + step).any())

    def check(self, z: State, fz: State, step: int, args: Any = None) -> None:
        age, latest, every = self._age + step, self._latest, self.stop.check_every
        due = self._open if every == 1 else self._open & self.stop.checks(age)
        seen = measure(z, fz, self.stop, latest)
        if every == 1:
            self._latest, self._before = seen.residual, latest
        else:
            now = on_device(due, self._value.device)[:, None]
            self._latest, self._before = torch.where(now, seen.residual, latest), torch.where(now, latest, self._before)
        if step <= every and (first := due & (age <= every)).any():
            # tokens that have just entered may be of another scale
            limit = torch.maximum(self._limit, divergence_limit(seen, self.stop))
            self._limit = torch.where(on_device(first, self._value.device), limit, self._limit)
        sound = seen.difference <= self._limit  # NaN is not sound
        flags = on_host(torch.cat([sound[:, None], seen.passed], dim=1))
        prefix = np.logical_and.accumulate(flags, axis=1).sum(axis=1) - 1  # tokens that have converged; -1: diverged
        counts = np.minimum(prefix, self._left)
        self._lost = due & (prefix < 0)
        late = due & (age >= self.stop.max_steps)
        self._spent = late & (counts == 0)  # its first token is forced
        moves = due & ~self._lost
        if every == 1 and (self.evaluations + step) % EVERY:
            moves = moves & (late | (counts == self._reach))
        self._counts = (counts + self._spent) * moves
        ready = (self._counts > 0) | self._lost
        self.done = bool((ready | ~self._open).all() if self._together else ready.any())

    def residuals(self) -> Residual:
        known = self._residuals[..., 0].flatten().index_copy(0, self._here.flatten(), self._latest.flatten())
        return known.reshape(self._residuals.shape[:2])[:, : self._length].nan_to_num(nan=torch.inf)

    def commit(self, fz: State, proposal: State, evaluations: int) -> Int64[np.ndarray, " rows"]:
        """File what leaves the windows, at ``fz``, after so many ``evaluations``; the others go on from ``proposal``.

        Returns:
            How many tokens leave in each computed row, ``(rows,)``. Of a row that has diverged it is the
            whole window: its cache has to show that, or later tokens would converge without a past.
        """
        here, counts = self._here.flatten(), self._counts
        leaves = on_device(np.arange(self.width) < counts[:, None], self._value.device)[..., None]
        # everything in the windows is written; what stays in them will be overwritten
        self._value.flatten(0, 1)[here] = torch.where(leaves, fz, proposal).flatten(0, 1)
        self._residuals.flatten(0, 1)[here] = torch.stack([self._latest, self._before], dim=-1).flatten(0, 1)
        self.evaluations += evaluations
        self._work += evaluations * self.width
        leaving = np.where(self._lost, self._reach, counts)
        if (self._spent | self._lost).any():
            self._file_failures()
        self._start = np.where(self._lost, self._end, self._start + counts)
        self._age = np.where(leaving > 0, 0, self._age + evaluations)
        starts = self._history[-1][1].copy()
        starts[self._rows] = self._start
        self._history.append((self.evaluations, starts))
        self.active_rows = int((self._start < self._end).sum())
        return leaving

    def stand(self, remove: bool = False) -> RowIndex | None:
        """Take in where the windows stand.

        Args:
            remove: whether rows that have ended may leave the batch; they do once a quarter has ended.

        Returns:
            The computed rows that stay, ``(kept,)``; None: all.
        """
        keep, ended = None, len(self._rows) - self.active_rows
        if remove and self.active_rows and 4 * ended >= len(self._rows):
            (stay,) = (self._start < self._end).nonzero()
            self._computed[self._rows] = self._work
            self._rows, self._start, self._end, self._age = (
                x[stay] for x in (self._rows, self._start, self._end, self._age)
            )
            keep = on_device(stay, self._value.device)
            self._limit = self._limit[keep]
        self._left, young = self._end - self._start, self._age == 0
        self._open = self._left > 0
        self.moved = None if (young | ~self._open).all() else on_device(young.nonzero()[0], self._value.device)
        if self.active_rows and self.moved is None:  # else solvers keep memories of this width
            self.width = min(self.width, int(self._left.max()))
        self._reach = np.minimum(self._left, self.width)
        rows = self._rows[:, None]
        self._places = self._start[:, None] + np.arange(self.width)
        column = np.minimum(self._places, self._length - 1)
        index = np.stack([rows * self._value.shape[1] + self._places, column, rows * self._length + column])
        self._here, self._column, self._column_of_all = on_device(index, self._value.device)
        self._latest, self._before = self._residuals.flatten(0, 1)[self._here].unbind(dim=-1)
        return keep

    def solution(self) -> Solution:
        """Everything that has left the windows."""
        residual, before = self._residuals[:, : self._length].unbind(dim=-1)
        error = error_estimate(residual, before, self.stop)
        residual = residual.nan_to_num(nan=torch.inf, posinf=torch.inf)
        status = np.where(self._forced.any(axis=1), int(Status.MAX_STEPS_REACHED), int(Status.CONVERGED))
        status[self._diverged] = int(Status.DIVERGED)
        self._computed[self._rows] = self._work
        status, steps, updates, forced = (on_device(x, residual.device) for x in (status, *self._count(), self._forced))
        stats = SolveStats(steps, residual, error, self.evaluations, updates, forced=forced)
        return Solution(self._value[:, : self._length].contiguous(), status, stats)

    def _file_failures(self) -> None:
        """Tokens that leave without having converged: one, or, where the row has diverged, the rest of it, as zero."""
        self._forced[self._rows[self._spent], self._start[self._spent]] = True
        for row, start, end in np.stack([self._rows, self._start, self._end], axis=1)[self._lost].tolist():
            self._diverged[row] = self._forced[row, start:end] = True
            self._value[row, start:end], self._residuals[row, start:end] = 0, torch.inf

    def _count(self) -> tuple[Int64[np.ndarray, "batch length"], Int64[np.ndarray, "batch length"]]:
        """Iterations and updates of each token; work past the end of a row is counted at its last token."""
        times = np.array([*(time for time, _ in self._history), self.evaluations])
        starts = np.stack([start for _, start in self._history], axis=1)
        steps = np.zeros((len(starts), self._length), dtype=np.int64)
        for row, end in enumerate(self._ends):
            # a token is in the window from the first move that brings it in until the first that leaves it behind
            tokens = np.arange(end)
            entered, left = (np.searchsorted(starts[row], tokens - width, "right") for width in (self._widest, 0))
            steps[row, :end] = times[left] - times[entered]
        updates = steps.copy()
        updates[np.arange(len(steps)), self._ends - 1] += self._computed - steps.sum(axis=1)
        return steps, updates
