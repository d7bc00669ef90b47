"""The books of a solve: who has ended, how, and the best value of everyone else."""

import torch
from torch import Tensor

from deqseq.norms import Measurement, measure
from deqseq.solution import Solution, SolveStats, Status
from deqseq.stop import Stop
from deqseq.types import Residual, RowIndex, RowMask, State, Steps


class Ledger:
    """Keeps what a solve knows of each row, and decides who has ended.

    The rows under observation shrink when the loop drops finished ones (:meth:`drop_ended`); what has been filed about
    a row stays. Decisions cost one transfer to the host a look. While every row improves, as in a contraction, the
    best value is the last one and nothing is copied.

    Args:
        z0: the starting point, ``(batch, *event)``.
        stop: the stopping rule.
        keep_trace: whether to keep the residual of every look.
    """

    def __init__(self, z0: State, stop: Stop, keep_trace: bool) -> None:
        self.stop = stop
        self.open_rows = z0.shape[0]
        """How many rows have not ended."""
        # of the rows under observation; the first two on the host, where decisions are made
        self._rows: RowIndex = torch.arange(z0.shape[0])  # where they stand in the batch
        self._open: RowMask = torch.ones(z0.shape[0], dtype=torch.bool)
        self._stay: Tensor | None = None  # rows (rows, 1) or tokens (rows, tokens) that do not move for now
        self._limit: Tensor | None = None  # the difference at which a row has diverged, set at the first look
        self._best = z0
        self._best_residual: Residual | None = None
        self._latest: Residual | None = None
        # of the whole batch
        self._before_drop: Residual | None = None  # the latest residuals when rows were dropped last
        self._value: State | None = None
        self._residual: Residual | None = None
        self._steps: Steps | None = None
        self._status = torch.full((z0.shape[0],), int(Status.BUDGET_SPENT))
        self._updates = torch.zeros(z0.shape[0], dtype=torch.int64)
        self._last_step = 0
        self._trace: list[Residual] | None = [] if keep_trace else None

    def observe(self, z: State, fz: State, step: int) -> None:
        """Look at one evaluation: write down residuals, best values, and rows that end here.

        Args:
            z: the rows under observation, ``(rows, *event)``.
            fz: the map at ``z``.
            step: number of the evaluation, counted from 1.
        """
        seen, self._last_step = measure(z, fz, self.stop), step
        if self._limit is None:
            self._begin(seen, step)
        assert self._limit is not None and self._best_residual is not None
        sound = seen.difference <= self._limit  # not a number is not sound
        improved = _row_worst(seen.residual) <= _row_worst(self._best_residual)
        sound, passed, improved = torch.stack([sound, _row_passed(seen.passed), improved]).cpu().unbind()
        self._latest = self._with_latest(seen.residual)
        if self._per_token:
            self._date_tokens(seen.passed, step)
            self._stay = seen.passed
        if self.open_rows == len(self._open) and bool(((sound & improved) > passed).all()):
            self._best, self._best_residual = fz, seen.residual
        else:
            self._settle(fz, seen, step, sound, passed, improved)
        if self._trace is not None:
            self._trace.append(self.residuals())

    def residuals(self) -> Residual:
        """The latest residual of every row of the batch; rows that have ended keep their last."""
        assert self._latest is not None, "nothing has been observed yet"
        if self._before_drop is None:
            return self._latest
        return self._before_drop.index_copy(0, self._rows.to(self._latest.device), self._latest)

    def hold(self, z: State, proposal: State) -> State:
        """``proposal`` where there is still something to solve, ``z`` in rows and tokens that stay where they are."""
        if self._stay is None:
            return proposal
        return torch.where(_over_event(self._stay, z), z, proposal)

    def drop_ended(self) -> RowIndex | None:
        """Stop observing the ended rows, if they are at least a quarter of those under observation.

        Returns:
            The positions, among the rows under observation until now, of those that stay; None: all of them.
        """
        count = len(self._open)
        if not self.open_rows or 4 * (count - self.open_rows) < count:
            return None
        keep = self._open.nonzero()[:, 0].to(self._best.device)
        self._before_drop = self.residuals()
        self._updates[self._rows] = self._last_step
        self._rows = self._rows[self._open]
        self._open = torch.ones(self.open_rows, dtype=torch.bool)
        assert self._best_residual is not None and self._limit is not None and self._latest is not None
        self._best, self._best_residual = self._best[keep], self._best_residual[keep]
        self._limit, self._latest = self._limit[keep], self._latest[keep]
        self._stay = self._stay[keep] if self._per_token and self._stay is not None else None
        return keep

    def solution(self, evaluations: int) -> Solution:
        """Everything that is known, after ``evaluations`` calls of the map."""
        self._file(self._open)
        assert self._value is not None and self._residual is not None and self._steps is not None
        trace = None if self._trace is None else torch.stack(self._trace)
        self._updates[self._rows] = evaluations
        updates = self._updates.to(self._value.device)
        stats = SolveStats(self._steps.clamp(max=evaluations), self._residual, evaluations, updates, trace)
        return Solution(self._value, self._status.to(self._value.device), stats)

    @property
    def _per_token(self) -> bool:
        return self.stop.per == "token"

    def _begin(self, seen: Measurement, step: int) -> None:
        """What the first look decides: when a row has diverged, and the shape of the statistics."""
        reference = torch.maximum(seen.difference, seen.scale.amax(dim=1)).clamp_min(1)
        largest = torch.finfo(reference.dtype).max  # infinity itself has diverged
        self._limit = (self.stop.divergence * reference).clamp(max=largest)
        self._best_residual = torch.full_like(seen.residual, torch.inf)
        first = step if self._per_token else self.stop.max_steps
        self._steps = torch.full_like(seen.passed, first, dtype=torch.int64)

    def _with_latest(self, residual: Residual) -> Residual:
        """The residuals of this look; rows that ended, but are still under observation, keep theirs."""
        if self.open_rows == len(self._open):
            return residual
        assert self._latest is not None
        return torch.where(_over_tokens(self._open.to(residual.device), residual), residual, self._latest)

    def _date_tokens(self, passed: Tensor, step: int) -> None:
        """Tokens that do not pass yet need one more look at least."""
        assert self._steps is not None
        upcoming = min(step + self.stop.check_every, self.stop.max_steps)
        moving = ~passed & self._open.to(passed.device)[:, None]
        rows = self._rows.to(passed.device)
        self._steps[rows] = torch.where(moving, upcoming, self._steps[rows])

    def _settle(
        self, fz: State, seen: Measurement, step: int, sound: RowMask, passed: RowMask, improved: RowMask
    ) -> None:
        """A look at which some row ends, has ended, or does not improve."""
        self._keep_best(fz, seen.residual, self._open & sound & (passed | improved))
        ended = self._open & (passed | ~sound)
        if bool(ended.any()):
            self._close(ended, passed & sound, step)
        if self.open_rows < len(self._open):
            stay = (~self._open).to(fz.device)[:, None]
            self._stay = seen.passed | stay if self._per_token else stay

    def _keep_best(self, fz: State, residual: Residual, better: RowMask) -> None:
        """Remember ``fz`` for the rows in ``better``; no copy when that is all of them."""
        assert self._best_residual is not None
        if bool(better.all()):
            self._best, self._best_residual = fz, residual
        elif bool(better.any()):
            chosen = better.to(fz.device)
            self._best = torch.where(_over_event(chosen[:, None], fz), fz, self._best)
            self._best_residual = torch.where(_over_tokens(chosen, residual), residual, self._best_residual)

    def _close(self, ended: RowMask, converged: RowMask, step: int) -> None:
        """Date and file the rows that end at this evaluation."""
        self._file(ended)
        places = self._rows[ended]
        self._status[places] = torch.where(converged, int(Status.CONVERGED), int(Status.DIVERGED))[ended]
        assert self._steps is not None
        places = places.to(self._steps.device)
        self._steps[places] = self._steps[places].clamp(max=step)
        self._open = self._open & ~ended
        self.open_rows = int(self._open.sum())

    def _file(self, which: RowMask) -> None:
        """File the best values, and their residuals, of some of the rows under observation."""
        assert self._best_residual is not None, "a solve evaluates its map at least once"
        if self._value is None and len(self._rows) == len(self._status) and bool(which.all()):
            self._value, self._residual = self._best, self._best_residual
        elif bool(which.any()):
            if self._value is None or self._residual is None:
                self._value = self._best.new_empty(len(self._status), *self._best.shape[1:])
                self._residual = self._best_residual.new_empty(len(self._status), *self._best_residual.shape[1:])
            chosen = which.nonzero()[:, 0].to(self._best.device)
            places = self._rows[which].to(self._best.device)
            self._value[places] = self._best[chosen]
            self._residual[places] = self._best_residual[chosen]


def _row_passed(passed: Tensor) -> Tensor:
    return passed if passed.ndim == 1 else passed.all(dim=1)


def _row_worst(residual: Residual) -> Tensor:
    return residual if residual.ndim == 1 else residual.amax(dim=1)


def _over_tokens(rows: Tensor, like: Tensor) -> Tensor:
    """A row mask shaped to broadcast over residuals, ``(batch,)`` or ``(batch, tokens)``."""
    return rows if like.ndim == 1 else rows[:, None]


def _over_event(mask: Tensor, z: State) -> Tensor:
    """A mask ``(batch, 1 or tokens)`` shaped to broadcast over the state."""
    if z.ndim == 1:
        return mask[:, 0]
    if mask.shape[1] == 1:
        return mask.reshape(-1, *[1] * (z.ndim - 1))
    return mask.reshape(*z.shape[:-1], 1)
