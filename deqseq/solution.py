"""What a solve returns: failure is data, and can be raised."""

from dataclasses import dataclass
from enum import IntEnum

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from deqseq.types import Residual, RowMask, State, Steps


class Status(IntEnum):
    """How the solve of one row ended.

    Example:
        >>> import deqseq as dq
        >>> solution = dq.solve(lambda z: 3 * z - 2, torch.zeros(1, 1), solver=dq.Naive(), stop=dq.Stop())
        >>> Status(int(solution.status[0])).name
        'DIVERGED'
    """

    CONVERGED = 0
    """The residual passed the tolerance."""
    BUDGET_SPENT = 1
    """``max_steps`` evaluations were made; the best of them is returned."""
    DIVERGED = 2
    """The residual grew without bound or became non-finite; the best finite value is returned, or the start if there
    is none."""


class ConvergenceError(RuntimeError):
    """A solve did not converge and ``throw=True`` asked for an error.

    Attributes:
        rows: positions in the batch of the rows that failed.
        residuals: their residuals, in the same order.
    """

    def __init__(self, message: str, rows: list[int], residuals: list[float]) -> None:
        super().__init__(message)
        self.rows = rows
        self.residuals = residuals


class ConvergenceWarning(UserWarning):
    """A solve that nobody looks at, such as the adjoint solve of a backward pass, did not converge."""


@dataclass(frozen=True)
class SolveStats:
    """The numbers of a solve.

    Attributes:
        steps: evaluations of the map until a row ended, ``(batch,)``; per token, with ``Stop(per="token")`` or a sweep
            over parts of the sequence, until the token passed for good, ``(batch, tokens)``.
        residual: relative residual ``|f(z) - z| / |f(z)|`` at the evaluation whose value was returned (``inf`` where
            no evaluation was finite), ``(batch,)`` or ``(batch, tokens)`` as ``steps``.
        evaluations: how many times the map was called in all.
        updates: how many of those calls a row (in a model: a token) took part in, until it was dropped from the
            computation, ``(batch,)`` or ``(batch, length)``; a solver's work is ``updates.sum()``.
        trace: residual at every look, ``(looks, batch, *tokens)``, if it was asked for; a row that has ended
            repeats its last one.
        forced: tokens that a sweep committed though they had not passed, ``(batch, length)``; None where nothing was
            committed.
    """

    steps: Steps
    residual: Residual
    evaluations: int
    updates: Int64[Tensor, "batch *each"]
    trace: Float[Tensor, "looks batch *tokens"] | None = None
    forced: Bool[Tensor, "batch length"] | None = None


@dataclass(frozen=True)
class Solution:
    """A fixed point, or the best that was found, with what is known of it.

    Attributes:
        value: ``f(z)`` at the evaluation that passed the test, otherwise at the one with the smallest residual (the
            latest of equals), ``(batch, *event)``.
        status: a :class:`Status` a row, ``(batch,)``.
        stats: steps, residuals and, if asked for, their trace.
    """

    value: State
    status: Int64[Tensor, " batch"]
    stats: SolveStats

    @property
    def converged(self) -> RowMask:
        """Which rows converged."""
        return self.status == Status.CONVERGED

    def raise_if_failed(self, what: str = "the fixed-point solve") -> "Solution":
        """This solution, if every row converged.

        Args:
            what: the solve's name in the error's text.

        Returns:
            The solution itself.

        Raises:
            ConvergenceError: names the rows, their residuals and a remedy.
        """
        if bool(self.converged.all()):
            return self
        rows = (~self.converged).nonzero()[:, 0].tolist()
        residual = self.stats.residual
        per_row = residual if residual.ndim == 1 else residual.amax(dim=1)
        residuals = per_row[torch.tensor(rows, device=per_row.device)].tolist()
        raise ConvergenceError(describe_failure(self, what), rows, residuals)


def describe_failure(solution: Solution, what: str) -> str:
    """One paragraph: which rows failed, how, and what to try."""
    status = solution.status.cpu()
    residual = solution.stats.residual.detach().cpu()
    per_row = residual if residual.ndim == 1 else residual.amax(dim=1)
    parts = []
    for kind in (Status.BUDGET_SPENT, Status.DIVERGED):
        rows = (status == kind).nonzero()[:, 0].tolist()
        if rows:
            shown = ", ".join(f"{row} (residual {per_row[row]:.2e})" for row in rows[:8])
            more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
            parts.append(f"{kind.name.lower().replace('_', ' ')}: rows {shown}{more}")
    advice = {
        Status.BUDGET_SPENT: "raise Stop.max_steps, loosen Stop.rtol, or damp a limit cycle with Relaxed(damping=0.5)",
        Status.DIVERGED: "the map expands here: damp it with Relaxed(damping=0.5), try Anderson() or Broyden(), or "
        "make it contractive",
    }
    worst = Status.DIVERGED if bool((status == Status.DIVERGED).any()) else Status.BUDGET_SPENT
    return (
        f"{what} failed for {int((status != Status.CONVERGED).sum())} of {len(status)} rows "
        f"after {solution.stats.evaluations} evaluations ({'; '.join(parts)}). Remedy: {advice[worst]}."
    )
