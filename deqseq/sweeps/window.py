"""Which tokens of a window have converged."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deqseq.monitor import Monitor
from deqseq.norms import divergence_limit, error_estimate, measure
from deqseq.solution import Solution, SolveStats, Status
from deqseq.stop import Stop
from deqseq.types import Residual, RowIndex, State


class WindowMonitor(Monitor):
    """How far a window has converged in every row, and which rows have diverged.

    It lives for a whole sweep: after each iteration the converged prefix leaves by :meth:`commit`, and the statistics
    of the tokens that stay go on. Each token is tested on its own; the budget is that of a commit.
    """

    def __init__(self, rows: int, stop: Stop) -> None:
        self.stop = replace(stop, per="token")
        self.active_rows = self._all_rows = rows
        self._converged = 0  # tokens at the start of the window that have passed in every row
        self._diverged: Tensor | None = None  # rows
        self._limit: Tensor | None = None  # the difference above which a row has diverged
        self._entered: list[int] = []  # evaluations before each token of the window entered it
        self._evaluations = 0
        self._fresh = True  # whether tokens have entered since the last check
        self._latest: Residual | None = None  # of the tokens in the window
        # of the tokens that have left, a part per commit
        self._steps: list[int] = []
        self._values: list[State] = []
        self._residuals: list[Residual] = []
        self._befores: list[Residual] = []  # the residuals one check earlier
        self._forced: list[Tensor] = []

    def check(self, z: State, fz: State, step: int, args: Any = None) -> None:
        before = self._latest if self._latest is None else _widened(self._latest, z.shape[1])
        seen = measure(z, fz, self.stop, before)
        self._before = torch.full_like(seen.residual, torch.nan) if before is None else before
        self._latest = seen.residual
        if self._fresh:  # tokens that have just entered may be of another scale
            limit = divergence_limit(seen, self.stop)
            self._limit, self._fresh = limit if self._limit is None else torch.maximum(self._limit, limit), False
        assert self._limit is not None
        sound = seen.difference <= self._limit  # NaN is not sound
        *columns, all_sound = torch.cat([seen.passed.all(dim=0), sound.all()[None]]).tolist()  # one transfer
        if not all_sound or self._diverged is not None:
            self._diverged = ~sound if self._diverged is None else self._diverged | ~sound
            columns = (seen.passed | self._diverged[:, None]).all(dim=0).tolist()
        self._passed = seen.passed
        self._converged = columns.index(False) if False in columns else len(columns)
        self.active_rows = 0 if self._converged else self._all_rows

    def residuals(self) -> Residual:
        assert self._latest is not None, "nothing has been checked yet"
        return self._latest

    def freeze(self, z: State, proposal: State) -> State:
        return self.without_diverged(proposal)

    def compact(self, aux: Any) -> RowIndex | None:
        """No row is removed: the batch shares the window to the end."""
        return None

    def without_diverged(self, x: State) -> State:
        """``x`` with zeros in the rows that have diverged: they stay there to the end."""
        return x if self._diverged is None else x.masked_fill(self._diverged[:, None, None], 0)

    def commit(self, fz: State, evaluations: int) -> int:
        """File the tokens that leave the window after ``evaluations`` more, and return how many they are."""
        count = max(1, self._converged)  # none has converged: the budget is spent, and the first one is forced
        self._entered += [self._evaluations] * (fz.shape[1] - len(self._entered))
        self._evaluations += evaluations
        self._steps += [self._evaluations - entered for entered in self._entered[:count]]
        self._entered = self._entered[count:]
        self._values.append(self.without_diverged(fz[:, :count]))
        self._residuals.append(self.residuals()[:, :count])
        self._befores.append(self._before[:, :count])
        self._latest = self.residuals()[:, count:]
        self._forced.append(~self._passed[:, :count])
        self.active_rows, self._converged, self._fresh = self._all_rows, 0, True
        return count

    def solution(self) -> Solution:
        """Everything that has left the window."""
        value, forced = torch.cat(self._values, dim=1), torch.cat(self._forced, dim=1)
        residual, before = torch.cat(self._residuals, dim=1), torch.cat(self._befores, dim=1)
        error = error_estimate(residual, before, self.stop)
        residual = residual.nan_to_num(nan=torch.inf, posinf=torch.inf)
        steps = torch.tensor(self._steps, device=value.device).expand(len(value), -1)
        status = torch.where(forced.any(dim=1), int(Status.MAX_STEPS_REACHED), int(Status.CONVERGED))
        if self._diverged is not None:
            status = torch.where(self._diverged, int(Status.DIVERGED), status)
        return Solution(value, status, SolveStats(steps, residual, error, self._evaluations, steps, forced=forced))


def _widened(residual: Tensor, width: int) -> Tensor:
    """Residuals of the tokens in a window, NaN where one has just entered."""
    return F.pad(residual, (0, width - residual.shape[1]), value=torch.nan)
