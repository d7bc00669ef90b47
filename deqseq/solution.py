"""What a solve returns: failure is data, and can be raised."""

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int64
from torch import Tensor

from deqseq.explain import ADVICE, Explanation, Problem, explain
from deqseq.norms import worst_token
from deqseq.rows import take
from deqseq.types import Iterations, Residual, RowIndex, RowMask, State


class Status(IntEnum):
    """How the solve of a row ended.

    Example:
        >>> import torch, deqseq as dq
        >>> solution = dq.solve(lambda z: 3 * z - 2, torch.zeros(1, 1), solver=dq.Naive(), stop=dq.Stop())
        >>> dq.Status(int(solution.status[0])).name
        'DIVERGED'
    """

    CONVERGED = 0
    """The residual, or its estimated error if ``Stop.of`` is ``"error"``, is within the tolerance."""
    EXITED = 1
    """The exit rule of the :class:`Stop` ended it before the residual was within the tolerance; no failure."""
    MAX_STEPS_REACHED = 2
    """``max_steps`` evaluations were made, or an external solver returned before; the best value is returned."""
    DIVERGED = 3
    """The residual grew without bound or became non-finite; the best finite value is returned, or the start if there
    is none (in a sliding window: zeros, from there on)."""


class ConvergenceError(RuntimeError):
    """A solve did not converge, and ``throw=True`` or ``raise_if_failed()`` raised an error.

    Attributes:
        rows: positions in the batch of the rows that failed.
        residuals: their residuals, in the same order.
    """

    def __init__(self, message: str, rows: list[int], residuals: list[float]) -> None:
        super().__init__(message)
        self.rows = rows
        self.residuals = residuals

    def __reduce__(self) -> tuple[type["ConvergenceError"], tuple[str, list[int], list[float]]]:
        return type(self), (str(self), self.rows, self.residuals)


class ConvergenceWarning(UserWarning):
    """A solve whose status is not returned to the caller, such as the adjoint solve of a backward pass, failed."""


@dataclass(frozen=True)
class SolveStats:
    """The numbers of a solve.

    Attributes:
        iterations: evaluations of the map until a row ended, ``(batch,)``; per token, with ``Stop(per="token")`` or a
            sweep over parts of the sequence, until the token passed for good, ``(batch, tokens)``, 0 at padding; in
            :class:`Lockstep` with an exit rule, until the rule let the token go.
        residual: relative residual ``|f(z) - z| / |f(z)|`` at the evaluation whose value was returned (``inf`` where
            no evaluation was finite), ``(batch,)`` or ``(batch, tokens)`` as ``iterations``.
        error: estimated relative error, ``residual / (1 - q)``, ``(batch,)`` or ``(batch, tokens)`` as ``residual``;
            ``q`` is the ratio of the last two checked residuals, per evaluation (of a frozen token: of the last two
            before it was frozen). ``inf`` if they did not fall, after a single check, or if the value is not the last
            one; too large if the last two checks were fewer than ``check_every`` evaluations apart. Where a linear map
            contracts by ``q`` it is the error of the last point; the value, one evaluation further, is closer by
            ``q``. With :class:`Relaxed` it is larger by one over the damping, and where residuals alternate in sign
            larger still. It is no bound before the slowest part of the state dominates the residual, with solvers whose
            residuals fall irregularly (:class:`Anderson`, :class:`Broyden`), or where there are other fixed points.
        evaluations: calls of the map, for the whole batch.
        updates: how many of those calls a row (in a model: a token) took part in before it was removed from the batch,
            ``(batch,)`` or ``(batch, length)``; the work of a solve is ``updates.sum()``.
        trace: residual at every check, ``(checks, batch, *tokens)``, with ``trace=True``; rows that have ended repeat
            their last one.
        forced: tokens that a sweep committed although they had not passed, ``(batch, length)``; of a chunk whose
            budget was spent, all of them. None where nothing was committed.
    """

    iterations: Iterations
    residual: Residual
    error: Residual
    evaluations: int
    updates: Int64[Tensor, "batch *each"]
    trace: Float[Tensor, "checks batch *tokens"] | None = None
    forced: Bool[Tensor, "batch length"] | None = None

    def take_rows(self, rows: RowIndex) -> "SolveStats":
        """The numbers of the given ``rows`` alone, ``(rows,)``; ``evaluations`` is still that of the whole batch."""
        names = ("iterations", "residual", "error", "updates", "forced")
        trace = None if self.trace is None else self.trace[:, rows]
        return replace(self, trace=trace, **{name: take(getattr(self, name), rows) for name in names})


Self = TypeVar("Self", bound="Outcome")  # beartype knows typing.Self in decorated classes alone
SOLVE = "the fixed-point solve"


class Outcome:
    """What solutions and model outputs have in common: a status per row, and the numbers of the solve.

    Example:
        >>> import torch, deqseq as dq
        >>> output = dq.ImplicitModel(dq.Affine(4))(torch.ones(2, 3, 4))
        >>> isinstance(output, Outcome), output.raise_if_failed().converged
        (True, tensor([True, True]))
    """

    status: Int64[Tensor, " batch"] | None
    """A :class:`Status` per row, ``(batch,)``; None for an explicit model."""
    stats: SolveStats | None
    """Numbers of the solve; None for an explicit model."""
    problem: Problem | None = None
    """What was solved, for :meth:`explain`; not saved with the object."""

    @property
    def converged(self) -> RowMask:
        """Which rows converged: their residual, or error (``Stop.of``), is within the tolerance, bool, ``(batch,)``.

        Raises:
            ValueError: an explicit model's output, which was not solved for.
        """
        if self.status is None:
            raise ValueError("converged needs a solve: an explicit model runs its layers once")
        return self.status == Status.CONVERGED

    @property
    def failed(self) -> RowMask:
        """Which rows spent their budget or diverged, bool, ``(batch,)``: neither converged nor ended by an exit rule.

        Raises:
            ValueError: an explicit model's output, which was not solved for.
        """
        return ~self.converged & (self.status != Status.EXITED)

    def raise_if_failed(self: Self, what: str = SOLVE) -> Self:
        """This object, if no row failed or there was nothing to solve.

        Args:
            what: the solve's name in the error message.

        Returns:
            The object itself.

        Raises:
            ConvergenceError: names the rows, their residuals and a remedy.
        """
        if self.status is None or not bool(self.failed.any()):
            return self
        rows = self.failed.nonzero()[:, 0]
        assert self.stats is not None
        residuals = worst_token(self.stats.residual.detach())[rows]
        message = describe_failure(self, what)
        if self.problem is not None and what == SOLVE:
            message += " Solved without throw, explain() of the result names the cause, and tries remedies."
        raise ConvergenceError(message, rows.tolist(), residuals.tolist())

    def explain(self) -> Explanation:
        """Why each row converged or not, and what to do about it; print it.

        The same problem is solved again with four times the budget (at least 64 and at most 1,000 iterations, or as
        many as before). If rows still fail, other solvers are tried until one converges: Adaptive, Relaxed(0.2),
        Anderson and Broyden, the last two alone if the solve is only slow, and not with ``Stop(of="error")``. Last, it
        is solved from a random start, which shows whether there are several fixed points. Tokens are solved together,
        whatever the sweep was.

        Returns:
            An :class:`Explanation`: a cause per row, and a remedy for each cause. It describes the model as it is now,
            if its weights have changed since.

        Raises:
            ValueError: an explicit model's output, an outcome that was copied or pickled, or some rows of one.

        Example:
            >>> import torch, deqseq as dq
            >>> x = torch.ones(1, 2)
            >>> solution = dq.solve(lambda z: 2 - z / 2, x, solver=dq.Naive(), stop=dq.Stop(max_steps=8))
            >>> print(solution.explain())
            row 0: budget. It converges in 10 iterations; the budget was 8.
              Remedy: give more iterations: stop=Stop(max_steps=16).
        """
        if self.problem is None:
            raise ValueError("explain() needs a solve made in this process: this outcome has none, or is a copy")
        if not self.problem.whole:
            raise ValueError("explain() needs the outcome of a whole solve, got rows of one: explain that one")
        return explain(self, self.problem)

    def __repr__(self) -> str:
        """Numbers of the solve, without the tensors."""
        name, stats = type(self).__name__, self.stats
        if stats is None:
            return f"{name}(not solved: an explicit model)"
        low, high = torch.aminmax(stats.iterations)
        done = f"{int(self.converged.sum())} of {len(self.converged)} rows converged"
        exited = int((self.status == Status.EXITED).sum())
        done += f", {exited} ended by the exit rule" * (exited > 0)
        return f"{name}({done}, iterations {int(low)} to {int(high)})"

    def __getstate__(self) -> dict[str, Any]:
        """Without the problem, which holds functions."""
        return {name: value for name, value in self.__dict__.items() if name != "problem"}


@dataclass(frozen=True, repr=False)
class Solution(Outcome):
    """A fixed point, or the best value that was found, with the numbers of its solve.

    Attributes:
        value: ``f(z)`` at the evaluation that passed the test, otherwise at the one with the smallest residual (the
            latest of equals), ``(batch, *event)``.
        status: a :class:`Status` per row, ``(batch,)``.
        stats: the numbers of the solve.
        aux: with ``has_aux=True``, what the map returned beside ``value``; of failed rows whose best value is not
            their last, what it returns at ``value``.
        problem: what was solved, for :meth:`explain`; not saved with the object.
    """

    value: State
    status: Int64[Tensor, " batch"]  # pyright: ignore[reportIncompatibleVariableOverride]
    stats: SolveStats  # pyright: ignore[reportIncompatibleVariableOverride]
    aux: Any = None
    problem: Problem | None = field(default=None, repr=False, compare=False)


def describe_failure(outcome: Outcome, what: str) -> str:
    """One paragraph: which rows failed, how, and what to try."""
    assert outcome.status is not None and outcome.stats is not None
    status, parts = outcome.status.cpu(), []
    judged = "error" if outcome.problem is not None and outcome.problem.stop.of == "error" else "residual"
    numbers = worst_token(getattr(outcome.stats, judged).detach()).cpu()
    for kind in (Status.MAX_STEPS_REACHED, Status.DIVERGED):
        rows = (status == kind).nonzero()[:, 0].tolist()
        if rows:
            shown = ", ".join(f"{row} ({judged} {numbers[row]:.2e})" for row in rows[:8])
            more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
            parts.append(f"{kind.name.lower().replace('_', ' ')}: rows {shown}{more}")
    failed = type(outcome.problem.solver).__name__ if outcome.problem is not None else ""
    others = " or ".join(f"{name}()" for name in ("Adaptive", "Anderson", "Broyden") if name != failed)
    fixed = outcome.problem is not None and outcome.problem.fixed
    advice = {
        Status.MAX_STEPS_REACHED: ADVICE["no tolerance"]
        if fixed
        else f"raise Stop.max_steps, loosen Stop.rtol, or try {others}",
        Status.DIVERGED: f"the map expands here: try {others}, or make it contractive",
    }
    diverged = status == Status.DIVERGED
    worst = Status.DIVERGED if bool(diverged.any()) else Status.MAX_STEPS_REACHED
    never, first = (worst_token(one.detach()).cpu() for one in (outcome.stats.residual, outcome.stats.iterations))
    if bool((diverged & (never == torch.inf) & (first == 1)).any()):
        advice[Status.DIVERGED] = (
            "f returned NaN, infinity or numbers too large at its first evaluation: check its inputs and its weights"
        )
    return (
        f"{what} failed for {int(outcome.failed.sum())} of {len(status)} rows "
        f"after {outcome.stats.evaluations} evaluations ({'; '.join(parts)}). Remedy: {advice[worst]}."
    )
