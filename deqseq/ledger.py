"""The books of a solve: who has ended, how, and the best value of everyone else."""

import torch
from torch import Tensor

from deqseq.norms import Measurement, measure
from deqseq.solution import Solution, SolveStats, Status
from deqseq.stop import Stop
from deqseq.types import Residual, RowIndex, RowMask, State


class Ledger:
    """Keeps what a solve knows of each row, and decides who has ended.

    The rows under observation shrink when the loop drops finished ones (:meth:`drop_ended`); what has been written
    about a row stays. Decisions cost one transfer to the host a look. While every row improves, as in a
    contraction, the best value is the last one and nothing is copied.

    Args:
        z0: the starting point, ``(batch, *event)``.
        stop: the stopping rule.
        keep_trace: whether to keep the residual of every look.
    """

    def __init__(self, z0: State, stop: Stop, keep_trace: bool) -> None:
        self.stop = stop
        self._rows: RowIndex | None = None  # where the rows under observation stand in the batch; None: all of it
        self._host_rows = torch.arange(z0.shape[0])  # the same on the host, where decisions are made
        self._open = torch.ones(z0.shape[0], dtype=torch.bool)  # on the host, of the rows under observation
        self._value: State | None = None  # final values, allocated when the first row ends before another
        self._best = z0
        self._best_residual: Residual | None = None
        self._limit: Tensor | None = None
        self._stay: Tensor | None = None  # rows (rows, 1) or tokens (rows, tokens) that do not move for now
        self._status = torch.full((z0.shape[0],), int(Status.BUDGET_SPENT))
        self._steps: Tensor | None = None  # allocated at the first look, which tells rows from tokens
        self._residual: Residual | None = None  # of the best value
        self._latest: Residual | None = None
        self._trace: list[Residual] | None = [] if keep_trace else None

    @property
    def finished(self) -> bool:
        """Whether no row is left to solve."""
        return not bool(self._open.any())

    @property
    def residual(self) -> Residual:
        """The latest residual of every row of the batch."""
        assert self._latest is not None, "nothing has been observed yet"
        return self._latest

    @property
    def open_rows(self) -> int:
        """How many rows have not ended."""
        return int(self._open.sum())

    def observe(self, z: State, fz: State, step: int) -> None:
        """Look at one evaluation: write down residuals, best values, and rows that end here.

        Args:
            z: the rows under observation, ``(rows, *event)``.
            fz: the map at ``z``.
            step: number of the evaluation, counted from 1.
        """
        seen = measure(z, fz, self.stop)
        converged, diverged, improved = self._verdicts(seen)
        ended = self._open & (converged | diverged)
        self._write_steps(seen, step)
        self._write_best(fz, seen.residual, self._open & (converged | (improved & ~diverged)))
        self._write_latest(seen.residual)
        if self._trace is not None:
            self._trace.append(self.residual)
        if bool(ended.any()):
            self._close(ended, converged, step)
        self._stay = self._who_stays(seen.passed)

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
        count, left = len(self._open), self.open_rows
        if not left or 4 * (count - left) < count:
            return None
        self._host_rows = self._host_rows[self._open]
        self._rows = self._host_rows.to(self._best.device)
        keep = self._open.nonzero()[:, 0].to(self._best.device)
        self._open = torch.ones(left, dtype=torch.bool)
        self._best = self._best[keep]
        assert self._best_residual is not None and self._limit is not None
        self._best_residual, self._limit = self._best_residual[keep], self._limit[keep]
        if self._stay is not None:
            self._stay = self._stay[keep]
        return keep

    def solution(self, evaluations: int) -> Solution:
        """Everything that is known, after ``evaluations`` calls of the map."""
        assert self._steps is not None, "a solve evaluates its map at least once"
        self._put_values(self._open)
        assert self._value is not None and self._residual is not None
        trace = None if self._trace is None else torch.stack(self._trace)
        stats = SolveStats(self._steps.clamp(max=evaluations), self._residual, evaluations, trace)
        return Solution(self._value, self._status.to(self._value.device), stats)

    def _verdicts(self, seen: Measurement) -> tuple[RowMask, RowMask, RowMask]:
        """Which rows have converged, diverged, improved, on the host by one transfer."""
        difference, scale = seen.difference, seen.scale
        if self._limit is None:
            floor = torch.ones_like(scale)
            limit = self.stop.divergence * torch.maximum(torch.maximum(difference, scale), floor)
            self._limit = limit.clamp(max=torch.finfo(limit.dtype).max)  # infinity itself has diverged
            self._best_residual = torch.full_like(seen.residual, torch.inf)
        assert self._best_residual is not None
        diverged = ~(difference <= self._limit)  # not a number counts too
        converged = _per_row(seen.passed) & ~diverged
        worst, best = _row_worst(seen.residual), _row_worst(self._best_residual)
        improved = (worst < best) | best.isinf()
        on_host = torch.stack([converged, diverged, improved]).cpu()
        return on_host[0], on_host[1], on_host[2]

    def _who_stays(self, passed: Tensor) -> Tensor | None:
        """Ended rows, and per token those that pass; None when everything moves."""
        ended = None if bool(self._open.all()) else (~self._open).to(passed.device)[:, None]
        if passed.ndim == 1:
            return ended
        return passed if ended is None else passed | ended

    def _write_steps(self, seen: Measurement, step: int) -> None:
        """Tokens that do not pass yet need one more look at least; rows are dated when they end."""
        if self._steps is None:
            per_token = seen.passed.ndim == 2
            self._steps = torch.full_like(seen.passed, step if per_token else self.stop.max_steps, dtype=torch.int64)
        if seen.passed.ndim == 1:
            return
        upcoming = min(step + self.stop.check_every, self.stop.max_steps)
        moving = ~seen.passed & self._open.to(seen.passed.device)[:, None]
        places = slice(None) if self._rows is None else self._rows
        self._steps[places] = torch.where(moving, upcoming, self._steps[places])

    def _write_best(self, fz: State, residual: Residual, better: RowMask) -> None:
        """Remember ``fz`` for the rows in ``better``; no copy when that is all of them."""
        assert self._best_residual is not None
        if bool(better.all()):
            self._best, self._best_residual = fz, residual
        elif bool(better.any()):
            chosen = better.to(fz.device)
            self._best = torch.where(_over_event(chosen[:, None], fz), fz, self._best)
            self._best_residual = torch.where(_over_tokens(chosen, residual), residual, self._best_residual)
        if self._rows is None or self._residual is None:
            self._residual = self._best_residual
        else:
            self._residual = self._residual.index_copy(0, self._rows, self._best_residual)

    def _write_latest(self, residual: Residual) -> None:
        """The residual of this look, for rows that are still open; the others keep theirs."""
        if self._latest is None or (self._rows is None and bool(self._open.all())):
            self._latest = residual
            return
        places = slice(None) if self._rows is None else self._rows
        chosen = _over_tokens(self._open.to(residual.device), residual)
        self._latest = self._latest.clone()  # the trace holds the one before
        self._latest[places] = torch.where(chosen, residual, self._latest[places])

    def _close(self, ended: RowMask, converged: RowMask, step: int) -> None:
        """Date and file the rows that end at this evaluation."""
        self._put_values(ended)
        status = torch.where(converged, int(Status.CONVERGED), int(Status.DIVERGED))
        places = self._host_rows[ended]
        self._status[places] = status[ended]
        assert self._steps is not None
        places = places.to(self._steps.device)
        self._steps[places] = self._steps[places].clamp(max=step)
        self._open = self._open & ~ended

    def _put_values(self, which: RowMask) -> None:
        """File the best values of some of the rows under observation."""
        if not bool(which.any()):
            return
        if self._value is None and self._rows is None and bool(which.all()):
            self._value = self._best
            return
        if self._value is None:
            self._value = self._best.new_empty(len(self._status), *self._best.shape[1:])
        chosen = which.nonzero()[:, 0].to(self._best.device)
        places = chosen if self._rows is None else self._rows[chosen]
        self._value[places] = self._best[chosen]


def _per_row(passed: Tensor) -> RowMask:
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
