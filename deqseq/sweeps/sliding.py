"""The sweep that iterates a window over the first tokens that have not converged."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deqseq.norms import measure
from deqseq.solution import Solution, SolveStats, Status
from deqseq.solve import Callback, iterate
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.sweeps.base import Sweep, Swept, TokenMap, refuse_trace
from deqseq.types import Residual, RowIndex, State


@dataclass(frozen=True)
class Sliding(Sweep):
    """A window over the first tokens that have not converged: the least work where a front moves left to right.

    In a trained model the converged front moves about one token a self-iteration. Each round iterates the window
    alone; as soon as a prefix of it has converged in every row, the prefix is committed from the evaluation at which
    it passed, and the window moves on: the tokens that stay keep their state, new ones start where the model begins.

    One window serves the whole batch, and waits for its slowest row; so a row's numbers depend on its neighbours
    within the tolerance. Each token is tested on its own, whatever ``stop.per`` says. After ``stop.max_steps`` rounds
    without a commit the first token of the window is committed as it is; ``stats.forced`` names those. A solver with a
    memory begins anew after each commit.

    Args:
        window: tokens that are iterated together, at least 1.

    Raises:
        ValueError: a window below 1; at solving, a whole-sequence norm.

    Example:
        >>> import torch, deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4), stop=dq.Stop(rtol=1e-6))
        >>> output = model(torch.ones(2, 30, 4), sweep=dq.Sliding(4))
        >>> output.stats.updates.shape, bool(output.stats.forced.any())
        (torch.Size([2, 30]), False)
    """

    window: int = 8

    def __post_init__(self) -> None:
        if not isinstance(self.window, int) or self.window < 1:
            raise ValueError(f"Sliding.window must be an integer >= 1, got {self.window!r}")

    def solve(
        self,
        f: TokenMap,
        z0: State,
        *,
        solver: Solver | OutsideSolver,
        stop: Stop,
        trace: bool = False,
        callback: Callback | None = None,
        keep_cache: bool = False,
    ) -> Swept:
        refuse_trace(self, trace)
        if stop.norm != "max_token":
            raise ValueError(f'Sliding tests each token: Stop.norm must be "max_token", got "{stop.norm}"')
        front, cache, z, entered = Front(len(z0), stop), None, z0[:, : self.window].contiguous(), self.window
        while f.length:
            window = f.first(z.shape[1], recording=True)
            end = iterate(window, z, solver, front, callback)
            count = front.commit(end.fz, end.evaluations)
            if keep_cache or count < f.length:
                cache, _ = window.settled(count)
            staying = front.alive(end.propose()[:, count:])
            z = torch.cat([staying, z0[:, entered : entered + count]], dim=1)
            f, entered = f.beyond(count, cache), entered + count
        return Swept(front.solution(), cache if keep_cache else None)


class Front:
    """The books of a sliding window: how far it has converged in every row, and which rows are lost.

    Args:
        rows: how many.
        stop: tolerances; the budget is that of a commit.
    """

    def __init__(self, rows: int, stop: Stop) -> None:
        self.stop = replace(stop, per="token")
        self.open_rows = self._rows = rows
        self._settled = 0  # tokens at the front of the window that have passed in every row
        self._lost: Tensor | None = None  # rows that have diverged
        self._limit: Tensor | None = None  # the difference at which they have
        self._moved = True  # whether tokens have come in since the last look
        self._rounds = 0
        self._entered: list[int] = []  # round before which each token of the window came in
        self._steps: list[int] = []  # of the tokens that have left
        self._values: list[State] = []
        self._residuals: list[Residual] = []
        self._forced: list[Tensor] = []

    def observe(self, z: State, fz: State, step: int) -> None:
        """Look at one round, in a single transfer to the host."""
        seen = measure(z, fz, self.stop)
        if self._moved:  # tokens that have just come in may be of another scale
            reference = torch.maximum(seen.difference, seen.scale.amax(dim=1)).clamp_min(1)
            limit = (self.stop.divergence * reference).clamp(max=torch.finfo(reference.dtype).max)
            self._limit, self._moved = limit if self._limit is None else torch.maximum(self._limit, limit), False
        assert self._limit is not None
        sound = seen.difference <= self._limit  # not a number is not sound
        *columns, all_sound = torch.cat([seen.passed.all(dim=0), sound.all()[None]]).tolist()
        if not all_sound or self._lost is not None:
            self._lost = ~sound if self._lost is None else self._lost | ~sound
            columns = (seen.passed | self._lost[:, None]).all(dim=0).tolist()
        self._seen = seen
        self._settled = columns.index(False) if False in columns else len(columns)
        self.open_rows = 0 if self._settled else self._rows

    def residuals(self) -> Residual:
        """The latest residuals of the window."""
        return self._seen.residual

    def hold(self, z: State, proposal: State) -> State:
        """Everything moves but lost rows, which stay at zero."""
        return self.alive(proposal)

    def drop_ended(self) -> RowIndex | None:
        """Nobody: the batch shares the window to the end."""
        return None

    def alive(self, z: State) -> State:
        """``z`` with zeros in the rows that are lost."""
        return z if self._lost is None else z.masked_fill(self._lost[:, None, None], 0)

    def commit(self, fz: State, rounds: int) -> int:
        """File the tokens that leave the window after ``rounds`` more evaluations, and say how many they are."""
        count = max(1, self._settled)  # none has settled: the budget is spent, and the first one is forced
        self._entered += [self._rounds] * (fz.shape[1] - len(self._entered))
        self._rounds += rounds
        self._steps += [self._rounds - entered for entered in self._entered[:count]]
        self._entered = self._entered[count:]
        self._values.append(self.alive(fz[:, :count]))
        self._residuals.append(self._seen.residual[:, :count])
        self._forced.append(~self._seen.passed[:, :count])
        self.open_rows, self._settled, self._moved = self._rows, 0, True
        return count

    def solution(self) -> Solution:
        """Everything that has left the window."""
        value, forced = torch.cat(self._values, dim=1), torch.cat(self._forced, dim=1)
        residual = torch.cat(self._residuals, dim=1).nan_to_num(nan=torch.inf, posinf=torch.inf)
        steps = torch.tensor(self._steps, device=value.device).expand(len(value), -1)
        status = torch.where(forced.any(dim=1), int(Status.BUDGET_SPENT), int(Status.CONVERGED))
        if self._lost is not None:
            status = torch.where(self._lost, int(Status.DIVERGED), status)
        return Solution(value, status, SolveStats(steps, residual, self._rounds, steps, forced=forced))
