"""Which rows of a solve have converged."""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deqseq.judge import Judge
from deqseq.norms import Measurement, divergence_limit, earlier, error_estimate, measure, worst_token
from deqseq.rows import put, take
from deqseq.solution import Solution, SolveStats, Status
from deqseq.stop import Stop
from deqseq.types import Residual, RowIndex, State


class Monitor(ABC):
    """Watches a run of the loop: measures residuals, freezes what has converged, and decides when it ends."""

    stop: Stop
    active_rows: int
    """How many rows have not ended."""
    done: bool = False
    """Whether the loop ends here."""
    evaluations: int = 0
    """How many came before this run of the loop, in the same solve."""

    def checks(self, step: int) -> bool:
        """Whether evaluation number ``step`` is to be checked."""
        return self.stop.checks(step)

    @abstractmethod
    def check(self, z: State, fz: State, step: int, args: Any = None) -> None:
        """Measure evaluation number ``step`` (counted from 1), and end what has converged or diverged.

        ``args`` is what the map was given beside ``z``.
        """

    @abstractmethod
    def residuals(self) -> Residual:
        """The latest residuals."""

    def freeze(self, z: State, proposal: State) -> State:
        """The next point: ``proposal``, with frozen rows or tokens kept at ``z``."""
        return proposal

    def compact(self, aux: Any, step: int) -> RowIndex | None:
        """Rows that stay, if finished ones are to leave the batch after evaluation ``step``, which gave ``aux``."""
        return None


class RowMonitor(Monitor):
    """Statistics of each row, and its best value.

    The rows that are computed shrink when finished ones are removed. Decisions cost one transfer to the host per check,
    and are made in arrays of numpy, whose small operations take a third of torch's time. While every row improves, as
    in a contraction, the best value is the last one and nothing is copied.
    """

    def __init__(
        self, z0: State, stop: Stop, keep_trace: bool, freezes: bool = True, judge: Judge | None = None
    ) -> None:
        batch = len(z0)
        self.stop = stop
        self.active_rows = batch
        self._judge = judge  # of the exit rule
        self._freezes = freezes  # an external solver goes on moving the rows that have ended
        # of the rows that are computed; the first three on the host, where decisions are made
        self._rows = np.arange(batch)  # their positions in the batch
        self._active = np.ones(batch, dtype=bool)
        self._stale = np.zeros(batch, dtype=bool)  # the best value is not that of the last evaluation
        self._frozen: Tensor | None = None  # rows (rows, 1) or tokens (rows, tokens)
        self._limit: Tensor | None = None  # the difference above which a row has diverged, set at the first check
        self._keep_best(z0)
        self._best_residual: Residual | None = None
        self._latest: Residual | None = None
        self._before: Residual | None = None  # of the check before the latest
        # of the whole batch; the last three on the host
        self._filed: Any = None  # (best, its residual, latest residual, error, aux), as of the last _file
        self._steps: Tensor | None = None
        self._trace: list[Residual] | None = [] if keep_trace else None
        self._filed_stale = self._stale
        self._status = np.full(batch, int(Status.MAX_STEPS_REACHED))
        self._updates = np.zeros(batch, dtype=np.int64)

    def check(self, z: State, fz: State, step: int, args: Any = None) -> None:
        self._check_best()
        held = self._rates_of_frozen()
        seen = measure(z, fz, self.stop, self._latest, held)
        converged = passed = _all_tokens(seen.passed)
        if self._judge is not None:
            seen = seen._replace(passed=self._judge.passed(z, fz, args))
            passed = _all_tokens(seen.passed)
        if self._limit is None or self._best_residual is None or self._latest is None:
            self._limit = divergence_limit(seen, self.stop)
            self._best_residual = torch.full_like(seen.residual, torch.inf)
            self._latest = self._before = torch.full_like(seen.residual, torch.nan)
            first = step if self._per_token else self.stop.max_steps
            self._steps = torch.full_like(seen.passed, first, dtype=torch.int64)
        sound = seen.difference <= self._limit  # NaN is not sound
        improved = worst_token(seen.residual) <= worst_token(self._best_residual)
        flags = on_host(torch.stack([sound, passed, improved, converged]))
        sound, passed, improved, _ = flags
        everything = self.active_rows == len(self._active)
        now, before = seen.residual, earlier(seen.residual, self._latest, held)
        self._before = before if everything else self._where_active(before, self._before)
        self._latest = now if everything else self._where_active(now, self._latest)
        if self._per_token:
            self._date_tokens(seen.passed, step)
            self._frozen = seen.passed
        if everything and (sound & improved & ~passed).all():
            self._keep_best(fz)
            self._best_residual, self._stale = seen.residual, np.zeros_like(self._active)
        else:
            self._end_rows(fz, seen, step, flags)
        if self._trace is not None:
            self._trace.append(self.residuals())
        self.done = not self.active_rows or step == self.stop.max_steps

    def residuals(self) -> Residual:
        assert self._latest is not None, "nothing has been checked yet"
        if self._filed is None:
            return self._latest
        return put(self._filed[2], on_device(self._rows, self._latest.device), self._latest)

    def freeze(self, z: State, proposal: State) -> State:
        if self._frozen is None:
            return proposal
        return torch.where(_over_event(self._frozen, z), z, proposal)

    def compact(self, aux: Any, step: int) -> RowIndex | None:
        count = len(self._active)
        if not self.active_rows or 4 * (count - self.active_rows) < count:
            return None
        self._file(aux, step)
        (stay,) = self._active.nonzero()
        self._rows, self._stale, self._active = self._rows[stay], self._stale[stay], self._active[stay]
        keep = on_device(stay, self._best.device)
        best, self._best_residual, self._limit, self._latest, self._before = take(
            (self._best, self._best_residual, self._limit, self._latest, self._before), keep
        )
        self._keep_best(best)
        self._frozen = take(self._frozen, keep) if self._per_token else None
        if self._judge is not None:
            self._judge.keep(keep)
        return keep

    def solution(self, evaluations: int, aux: Any) -> tuple[Solution, RowIndex | None]:
        """What was found, and the rows whose ``aux`` is not that of their value (None: no row)."""
        self._check_best()
        self._file(aux, evaluations)
        assert self._steps is not None
        (value, residual, _, error, aux), device = self._filed, self._best.device
        trace = None if self._trace is None else torch.stack(self._trace)
        status, updates = on_device(self._status, device), on_device(self._updates, device)
        stats = SolveStats(self._steps.clamp(max=evaluations), residual, error, evaluations, updates, trace)
        (stale,) = self._filed_stale.nonzero()
        return Solution(value, status, stats, aux), on_device(stale, device) if len(stale) else None

    @property
    def _per_token(self) -> bool:
        return self.stop.per == "token"

    def _keep_best(self, value: State) -> None:
        self._best = value
        self._version = None if value.is_inference() else value._version

    def _check_best(self) -> None:
        """Refuse a kept value that was changed in place: its residual would be another's."""
        if self._version is not None and self._best._version != self._version:
            raise ValueError(
                "a value that f had returned was changed in place, by f (out=, a buffer that it fills again) or by "
                "the solver: return a new tensor each time"
            )

    def _file(self, aux: Any, evaluations: int) -> None:
        """Store the results of the computed rows at their positions in the batch."""
        assert self._latest is not None and self._before is not None
        error = error_estimate(self._latest, self._before, self.stop)
        error = torch.where(self._best_residual == self._latest, error, torch.inf)
        current = (self._best, self._best_residual, self._latest, error, aux)
        if self._filed is None:
            self._filed, self._filed_stale = current, self._stale.copy()
        else:
            self._filed = put(self._filed, on_device(self._rows, self._best.device), current)
            self._filed_stale[self._rows] = self._stale
        self._updates[self._rows] = evaluations

    def _rates_of_frozen(self) -> Residual | None:
        """The ratio of the last two residuals of each frozen token, NaN elsewhere; None: no token is frozen."""
        if not self._per_token or self._frozen is None:
            return None
        assert self._before is not None and self._latest is not None
        return torch.where(self._frozen, self._before / self._latest, torch.nan)

    def _date_tokens(self, passed: Tensor, step: int) -> None:
        """Tokens that have not passed yet need one more check at least."""
        assert self._steps is not None
        upcoming = min(step + self.stop.check_every, self.stop.max_steps)
        moving = ~passed & on_device(self._active, passed.device)[:, None]
        rows = on_device(self._rows, passed.device)
        self._steps[rows] = torch.where(moving, upcoming, self._steps[rows])

    def _end_rows(self, fz: State, seen: Measurement, step: int, flags: np.ndarray) -> None:
        """A check at which some row ends, has ended, or does not improve."""
        sound, passed, improved, converged = flags
        better = self._active & sound & (passed | improved)
        self._stale = np.where(self._active, ~better, self._stale if self._freezes else True)
        if better.all():
            self._keep_best(fz)
            self._best_residual = seen.residual
        elif better.any():
            chosen = on_device(better, fz.device)
            assert self._best_residual is not None
            self._keep_best(torch.where(_over_event(chosen[:, None], fz), fz, self._best))
            self._best_residual = torch.where(_over_tokens(chosen, seen.residual), seen.residual, self._best_residual)
        ended = self._active & (passed | ~sound)
        if ended.any():
            status = np.where(converged, int(Status.CONVERGED), int(Status.EXITED))
            places, status = self._rows[ended], np.where(sound, status, int(Status.DIVERGED))
            self._status[places] = status[ended]
            assert self._steps is not None
            places = on_device(places, fz.device)
            self._steps[places] = self._steps[places].clamp(max=step)
            self._active = self._active & ~ended
            self.active_rows = int(self._active.sum())
        if self.active_rows < len(self._active):
            ended = on_device(~self._active, fz.device)[:, None]
            self._frozen = seen.passed | ended if self._per_token else ended

    def _where_active(self, new: Residual, old: Residual | None) -> Residual:
        """``new`` in the rows that are iterated, ``old`` in those that have ended but are still computed."""
        assert old is not None
        return torch.where(_over_tokens(on_device(self._active, new.device), new), new, old)


def on_host(x: Tensor) -> np.ndarray:
    """A tensor as an array of the host, in one transfer; inside torch.func its numbers are copied one by one."""
    torch_c: Any = torch._C
    return np.array(x.tolist()) if torch_c._functorch.is_functorch_wrapped_tensor(x) else x.cpu().numpy()


def on_device(x: np.ndarray, device: torch.device) -> Tensor:
    """An array of the host as a tensor. On a CPU they share their memory, so the array must not be changed later."""
    return torch.from_numpy(x).to(device)


def _all_tokens(passed: Tensor) -> Tensor:
    return passed if passed.ndim == 1 else passed.all(dim=1)


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
