"""A window in each row, and which of its tokens have converged."""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn import functional as F

from deqseq.monitor import Monitor
from deqseq.norms import divergence_limit, error_estimate, measure
from deqseq.rows import take
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

    Where the windows stand is decided on the host. States and residuals of all tokens lie on the device; those in the
    windows are gathered from there.

    Args:
        z0: the start, ``(batch, length, d_model)``.
        stop: tolerances, and the budget of a commit.
        window: tokens that are iterated together.
        ends: real tokens of each row, ``(batch,)`` on the host.
        together: whether the loop goes on until every window can move.
    """

    moved: RowIndex | None
    """Computed rows whose window has just moved; None: all that have not ended."""

    def __init__(self, z0: State, stop: Stop, window: int, ends: Int64[Tensor, " batch"], together: bool) -> None:
        self.stop, self._together = replace(stop, per="token"), together
        self.active_rows, self._length = z0.shape[:2]
        self.width = self._widest = min(window, self._length)
        # of the computed rows, on the host: position in the batch, first token of the window, end, age of the window
        self._rows, self._start, self._end = torch.arange(len(z0)), torch.zeros_like(ends), ends
        self._age = torch.zeros_like(ends)
        # of the batch, on the host
        self._ends = ends
        self._history = [(0, self._start)]  # evaluations before each move, and where the windows stood after it
        self._computed = torch.zeros_like(ends)  # evaluations of tokens, known when a row leaves the computed ones
        self._work = 0  # those of each computed row: all have had the same
        self._forced = torch.zeros(len(z0), self._length, dtype=torch.bool)
        self._diverged = torch.zeros_like(ends, dtype=torch.bool)
        # of all tokens
        self._value = F.pad(z0, (0, 0, 0, self.width))  # room for windows that reach beyond the end
        # two residuals, at the last check and the one before; NaN: not yet; 0 after the end of a row
        real = (torch.arange(self._value.shape[1]) < ends[:, None]).to(z0.device)[..., None].expand(-1, -1, 2)
        kind = torch.promote_types(z0.dtype, torch.float32)
        self._residuals = torch.zeros_like(real, dtype=kind).masked_fill_(real, torch.nan)
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
        return None if bool(real.all()) else real.to(self._value.device)

    def checks(self, step: int) -> bool:
        return self.stop.check_every == 1 or bool(self.stop.checks(self._age + step).any())

    def check(self, z: State, fz: State, step: int, args: Any = None) -> None:
        age, latest, every = self._age + step, self._latest, self.stop.check_every
        due = self._open if every == 1 else self._open & self.stop.checks(age)
        seen = measure(z, fz, self.stop, latest)
        if every == 1:
            self._latest, self._before = seen.residual, latest
        else:
            now = due.to(z.device)[:, None]
            self._latest, self._before = torch.where(now, seen.residual, latest), torch.where(now, latest, self._before)
        if step <= every and bool((first := due & (age <= every)).any()):
            # tokens that have just entered may be of another scale
            limit = torch.maximum(self._limit, divergence_limit(seen, self.stop))
            self._limit = torch.where(first.to(z.device), limit, self._limit)
        prefix = seen.passed.cumprod(dim=1).sum(dim=1)
        prefix = torch.where(seen.difference <= self._limit, prefix, -1).cpu()  # NaN has diverged; one transfer
        counts = torch.minimum(prefix, self._left)
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

    def commit(self, fz: State, proposal: State, evaluations: int) -> Int64[Tensor, " rows"]:
        """File what leaves the windows, at ``fz``, after so many ``evaluations``; the others go on from ``proposal``.

        Returns:
            How many tokens leave in each computed row, ``(rows,)``, on the host. Of a row that has diverged it is the
            whole window: its cache has to show that, or later tokens would converge without a past.
        """
        here, counts = self._here.flatten(), self._counts
        leaves = (torch.arange(self.width) < counts[:, None]).to(fz.device)[..., None]
        # everything in the windows is written; what stays in them will be overwritten
        self._value.flatten(0, 1)[here] = torch.where(leaves, fz, proposal).flatten(0, 1)
        self._residuals.flatten(0, 1)[here] = torch.stack([self._latest, self._before], dim=-1).flatten(0, 1)
        self.evaluations += evaluations
        self._work += evaluations * self.width
        leaving = torch.where(self._lost, self._reach, counts)
        if bool((self._spent | self._lost).any()):
            self._file_failures()
        self._start = torch.where(self._lost, self._end, self._start + counts)
        self._age = torch.where(leaving > 0, 0, self._age + evaluations)
        self._history.append((self.evaluations, self._history[-1][1].index_copy(0, self._rows, self._start)))
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
            keep = (self._start < self._end).nonzero()[:, 0]
            self._computed[self._rows] = self._work
            self._rows, self._start, self._end, self._age = take((self._rows, self._start, self._end, self._age), keep)
            keep = keep.to(self._limit.device)
            self._limit = self._limit[keep]
        self._left, young = self._end - self._start, self._age == 0
        self._open = self._left > 0
        self.moved = None if bool((young | ~self._open).all()) else young.nonzero()[:, 0].to(self._value.device)
        if self.active_rows and self.moved is None:  # else solvers keep memories of this width
            self.width = min(self.width, int(self._left.max()))
        self._reach = self._left.clamp(max=self.width)
        rows = self._rows[:, None]
        self._places = self._start[:, None] + torch.arange(self.width)
        column = self._places.clamp(max=self._length - 1)
        index = torch.stack([rows * self._value.shape[1] + self._places, column, rows * self._length + column])
        self._here, self._column, self._column_of_all = index.to(self._value.device)
        self._latest, self._before = self._residuals.flatten(0, 1)[self._here].unbind(dim=-1)
        return keep

    def solution(self) -> Solution:
        """Everything that has left the windows."""
        residual, before = self._residuals[:, : self._length].unbind(dim=-1)
        error = error_estimate(residual, before, self.stop)
        residual = residual.nan_to_num(nan=torch.inf, posinf=torch.inf)
        status = torch.where(self._forced.any(dim=1), int(Status.MAX_STEPS_REACHED), int(Status.CONVERGED))
        status = status.masked_fill(self._diverged, int(Status.DIVERGED))
        self._computed[self._rows] = self._work
        numbers = (status, *self._count(), self._forced)
        status, steps, updates, forced = (x.to(residual.device) for x in numbers)
        stats = SolveStats(steps, residual, error, self.evaluations, updates, forced=forced)
        return Solution(self._value[:, : self._length].contiguous(), status, stats)

    def _file_failures(self) -> None:
        """Tokens that leave without having converged: one, or, where the row has diverged, the rest of it, as zero."""
        self._forced[self._rows[self._spent], self._start[self._spent]] = True
        for row, start, end in torch.stack([self._rows, self._start, self._end], dim=1)[self._lost].tolist():
            self._diverged[row] = self._forced[row, start:end] = True
            self._value[row, start:end], self._residuals[row, start:end] = 0, torch.inf

    def _count(self) -> tuple[Int64[Tensor, "batch length"], Int64[Tensor, "batch length"]]:
        """Iterations and updates of each token; work past the end of a row is counted at its last token."""
        times = torch.tensor([time for time, _ in self._history])
        starts = torch.stack([start for _, start in self._history], dim=1)
        tokens = torch.arange(self._length).expand(len(starts), -1).contiguous()
        # a token is in the window from the first move that brings it in until the first that leaves it behind
        entered, left = (torch.searchsorted(starts, tokens - width, right=True) for width in (self._widest, 0))
        spent = times[left.clamp(max=len(times) - 1)] - times[entered.clamp(max=len(times) - 1)]
        steps = spent.masked_fill(tokens >= self._ends[:, None], 0)
        idle = self._computed - steps.sum(dim=1)
        return steps, steps.scatter_add(1, self._ends[:, None] - 1, idle[:, None])
