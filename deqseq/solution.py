"""What a solve returns: failure is data, and can be raised."""

import os
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor

from deqseq.rows import on_host, take
from deqseq.stop import Stop
from deqseq.types import Iterations, RowIndex, RowMask, State

if TYPE_CHECKING:
    from deqseq.diagnostics.explain import Explanation
    from deqseq.solvers.base import Solver
    from deqseq.sweeps import Sweep


class Status(IntEnum):
    """How the solve of a row ended.

    Example:
        >>> import torch, deqseq as dq
        >>> solution = dq.solve(
        ...     lambda z: 3 * z - 2, torch.zeros(1, 1), solver=dq.Naive(), stop=dq.Stop()
        ... )
        >>> dq.Status(int(solution.status[0])).name
        'DIVERGED'
    """

    CONVERGED = 0
    """The residual is within the tolerance."""
    MAX_STEPS_REACHED = 1
    """The budget is spent; the value is that of the last evaluation."""
    DIVERGED = 2
    """The change ``|f(z) - z|`` of a token exceeded the limit of ``Stop.divergence``, or became
    non-finite; the value is the point before that evaluation, or the start if that is not finite
    either."""


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
    """A row did not converge, or the adjoint solve of :class:`deqseq.Implicit` failed. A model in
    training warns only if a row diverged or no row converged.
    """


LIBRARIES = f"{Path(__file__).parent}{os.sep}", f"{Path(torch.__file__).parents[1]}{os.sep}"
"""Folders of this library and of what is installed beside torch."""


def warn_caller(message: str) -> None:
    """Give a :class:`ConvergenceWarning` at the caller's line: the first frame that is not of a
    library.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, ConvergenceWarning, stacklevel=level)


def warn_failed(ends: np.ndarray, stop: Stop, least: int = 1, later: str = "") -> bool:
    """Warn if so many rows failed, although they could converge; whether it did. ``ends`` is
    :attr:`Solution.ends`.
    """
    if not stop.has_tolerance or torch.compiler.is_compiling():
        return False
    spent, diverged = (
        int((ends == kind).sum()) for kind in (Status.MAX_STEPS_REACHED, Status.DIVERGED)
    )
    failed, rows = spent + diverged, len(ends)
    if failed < least:
        return False
    warn_caller(
        f"{failed} of {rows} rows did not converge ({spent} spent the budget of {stop.max_steps} "
        f"iterations, {diverged} diverged), so their values are not fixed points. explain() of a "
        f"solution or a model's output, as in print(model(x).explain()), says why and what to do."
        f"{later}"
    )
    return True


@dataclass(frozen=True)
class SolveStats:
    """The numbers of a solve: one per row, or one per token if a model was solved.

    Attributes:
        iterations: evaluations of the map from the row's start, or from the token's entry into a
            window, until it ended, ``(batch,)`` or ``(batch, length)``; the same for all tokens
            that end together. 0 at padding, and at tokens that a diverged row did not reach.
        residual: relative residual ``|f(z) - z| / |f(z)|`` at the last check, or that of a
            :class:`Rule`; ``inf`` if it was not finite. The residual of a row is the largest over
            its tokens. ``(batch,)`` or ``(batch, length)``.
        evaluations: calls of the map, for the whole batch. If rows of your own map are removed from
            the batch, this includes one or two calls that check that its rows are independent.
        updates: how many of those calls a row, or a token, took part in before it was removed from
            the batch, ``(batch,)`` or ``(batch, length)``. What a window computes beyond the end of
            a row is counted at its last token, so that the work of a solve is ``updates.sum()``.
        forced: True at tokens, except padding, that a model committed or returned without having
            converged, ``(batch, length)``. None for a map of your own.
    """

    iterations: Iterations
    residual: Float[Tensor, "batch ..."]
    evaluations: int
    updates: Int64[Tensor, "batch *tokens"]
    forced: Bool[Tensor, "batch length"] | None = None

    def moved(self, move: Callable[[Any], Tensor]) -> "SolveStats":
        """The same where ``move`` puts the numbers of tokens, each ``(batch, length)``."""
        names = ("iterations", "residual", "updates", "forced")
        return replace(self, **{name: move(getattr(self, name)) for name in names})


def worst_token(numbers: Shaped[Tensor, "batch *tokens"]) -> Shaped[Tensor, " batch"]:
    """The largest number of each row."""
    return numbers if numbers.ndim == 1 else numbers.amax(dim=1)


Self = TypeVar("Self", bound="Outcome")  # beartype knows typing.Self only in decorated classes
SOLVE = "the fixed-point solve"
OF_ALL_ROWS = "call", "loss"  # fields of outcomes


class Outcome:
    """What solutions and model outputs have in common: a status per row, and the numbers of the
    solve.

    Example:
        >>> from deqseq.solution import Outcome
        >>> import torch, deqseq as dq
        >>> output = dq.ImplicitModel(dq.Affine(4))(torch.ones(2, 3, 4))
        >>> isinstance(output, Outcome), output.raise_if_failed().converged
        (True, tensor([True, True]))
    """

    status: Int64[Tensor, " batch"] | None
    """A :class:`Status` per row, ``(batch,)``; None for an explicit model."""
    stats: SolveStats | None
    """Numbers of the solve; None for an explicit model."""
    call: "Call | None" = None
    """What was solved, and how, for :meth:`explain`; not saved with the object."""

    @property
    def converged(self) -> RowMask:
        """Which rows converged: their residual is within the tolerance, bool, ``(batch,)``.

        Raises:
            ValueError: an explicit model's output, which was not solved for.
        """
        if self.status is None:
            raise ValueError("converged needs a solve: an explicit model runs its layers once")
        return self.status == Status.CONVERGED

    def raise_if_failed(self: Self, what: str = SOLVE) -> Self:
        """Raise an error unless all rows converged or there was nothing to solve.

        Args:
            what: the solve's name in the error message.

        Returns:
            The object itself.

        Raises:
            ConvergenceError: names the rows, their residuals and a remedy.
        """
        if self.status is None or bool(self.converged.all()):
            return self
        rows = (~self.converged).nonzero()[:, 0]
        assert self.stats is not None
        residuals = worst_token(self.stats.residual.detach())[rows]
        message = describe_failure(self, what)
        if self.call is not None and what == SOLVE:
            message += (
                " Solved without throw, explain() of the result names the cause, and tries "
                "remedies."
            )
        raise ConvergenceError(message, rows.tolist(), residuals.tolist())

    def explain(self) -> "Explanation":
        """Why each row converged or not, and what to do about it; print it.

        The same problem is solved again with a larger budget, with other solvers and from another
        start: see :func:`deqseq.diagnostics.explain`.

        Returns:
            An :class:`~deqseq.diagnostics.Explanation`: a cause per row, and a remedy for each
            cause.

        Raises:
            ValueError: an explicit model's output, an outcome that was copied or pickled, or some
                rows of one.

        Example:
            >>> import torch, deqseq as dq
            >>> x = torch.ones(1, 2)
            >>> solution = dq.solve(
            ...     lambda z: 2 - z / 2, x, solver=dq.Naive(), stop=dq.Stop(max_steps=8)
            ... )
            >>> print(solution.explain())
            row 0: budget. It converges in 10 iterations; the budget was 8.
              Remedy: give more iterations: stop=Stop(max_steps=16).
        """
        # the diagnostics stand above the core, and are loaded when they are asked for
        from deqseq.diagnostics.explain import explain

        return explain(self)

    def take_rows(self, rows: RowIndex) -> "Outcome":
        """The result of these ``rows``, ``(rows,)``. Its ``loss`` and ``call`` are None, because
        they belong to the whole batch; so :meth:`explain` raises an error.
        """
        names = [field.name for field in fields(self)]  # pyright: ignore[reportArgumentType]
        parts = {name: None if name in OF_ALL_ROWS else getattr(self, name) for name in names}
        return replace(self, **take(parts, rows))  # pyright: ignore[reportArgumentType]

    def __repr__(self) -> str:
        """Numbers of the solve, without the tensors."""
        name, stats = type(self).__name__, self.stats
        if stats is None:
            return f"{name}(not solved: an explicit model)"
        low, high = torch.aminmax(worst_token(stats.iterations))
        rows, tested = len(self.converged), self.call is None or self.call.stop.has_tolerance
        done = f"{int(self.converged.sum())} of {rows} rows converged"
        if not tested:
            done = f"{rows} rows, without a tolerance"
        return f"{name}({done}, iterations {int(low)} to {int(high)})"

    if not TYPE_CHECKING:  # a type checker names such attributes by itself

        def __getattr__(self, name: str) -> Any:
            """AttributeError: names the fields, since a result is not a tensor."""
            names = ", ".join(field.name for field in fields(self))
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}; it has {names}"
            )

    def __getstate__(self) -> dict[str, Any]:
        """Without the call, which holds functions."""
        return {name: value for name, value in self.__dict__.items() if name != "call"}


@dataclass(frozen=True, kw_only=True)
class Call(ABC):
    """What was solved, and how: it can be solved again with changes.

    Attributes:
        solver: the algorithm.
        stop: tolerances and budget.
        sweep: which tokens were solved together; None: the map has no tokens.
    """

    solver: "Solver[Any]"
    stop: Stop
    sweep: "Sweep | None" = None

    @abstractmethod
    def repeat(self, *, start: State | None = None, **changes: Any) -> "Any":
        """Solve again, without a graph, from another start or with other fields of this object."""

    @property
    def takes_windows(self) -> bool:
        """Whether all tokens were solved together that could be solved in windows."""
        return self.sweep is not None and self.sweep.block is None

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The precision in which the map was evaluated."""

    @abstractmethod
    def values(self, outcome: Outcome) -> tuple[State, State | None]:
        """The value of the solve that gave an outcome, and of its gradient estimator, if any."""


@dataclass(frozen=True, repr=False)
class Solution(Outcome):
    """A fixed point, or where its solve ended, with the numbers of the solve.

    Attributes:
        value: ``(batch, *event)``: of a row that converged, the point ``z`` that passed (of a
            model, ``f(z)`` unless its solver ``combines``); of one that spent its budget, ``f(z)``
            at the last evaluation; of one that diverged, the last ``z``, or the start if that is
            not finite. A gradient estimator may replace it.
        status: a :class:`Status` per row, ``(batch,)``.
        stats: the numbers of the solve.
        ends: the ``status`` as a NumPy array, which can be read without a wait for the device.
        aux: with ``has_aux=True``, the second output of the map at the evaluation that gave
            ``value``; of a model, the cache after its tokens. It carries a gradient only with
            :class:`Unrolled`, or after a direct call of :func:`solve` with gradients enabled.
        call: what was solved, and how, for ``explain()``; not saved with the object.
    """

    value: State
    status: Int64[Tensor, " batch"]  # pyright: ignore[reportIncompatibleVariableOverride]
    stats: SolveStats  # pyright: ignore[reportIncompatibleVariableOverride]
    ends: np.ndarray = field(repr=False, compare=False)
    aux: Any = None
    call: Call | None = field(default=None, repr=False, compare=False)

    def take_rows(self, rows: RowIndex) -> Outcome:
        """The result of these ``rows``, ``(rows,)``, including their ``ends``."""
        return replace(super().take_rows(rows), ends=self.ends[on_host(rows)])  # pyright: ignore[reportArgumentType]

    def __iter__(self) -> NoReturn:
        """TypeError: a solution is not a pair."""
        raise TypeError("a Solution cannot be unpacked: the fixed point is solution.value")


def describe_failure(outcome: Outcome, what: str) -> str:
    """One paragraph: which rows failed, how, and what to try."""
    assert outcome.status is not None and outcome.stats is not None
    status, evaluations = outcome.status.cpu(), outcome.stats.evaluations
    residual = worst_token(outcome.stats.residual.detach()).cpu()
    parts = []
    for kind in (Status.MAX_STEPS_REACHED, Status.DIVERGED):
        rows = (status == kind).nonzero()[:, 0].tolist()
        if rows:
            shown = ", ".join(f"{row} (residual {residual[row]:.2e})" for row in rows[:8])
            more = f" and {len(rows) - 8} more" if len(rows) > 8 else ""
            parts.append(f"{kind.name.lower().replace('_', ' ')}: rows {shown}{more}")
    count = int((status != Status.CONVERGED).sum())
    return (
        f"{what} failed for {count} of {len(status)} rows after {evaluations} evaluations "
        f"({'; '.join(parts)}). Remedy: {_advice(outcome)}."
    )


def _advice(outcome: Outcome) -> str:
    """What to do about rows that failed."""
    assert outcome.stats is not None
    call = outcome.call
    diverged = outcome.status == Status.DIVERGED
    stats = outcome.stats
    first_check = 1 if call is None else call.stop.check_every
    at_once = worst_token(stats.iterations) <= first_check
    infinite = worst_token(stats.residual.detach()) == torch.inf
    failed = None if call is None else type(call.solver).__name__
    names = [name for name in ("Adaptive", "Anderson", "Broyden") if name != failed]
    others = " or ".join(f"{name}()" for name in names)
    if bool((diverged & infinite & at_once).any()):
        return (
            "f returned NaN, infinity or numbers too large at its first evaluations: check its "
            "inputs and weights"
        )
    if bool(diverged.any()):
        return (
            f"the map expands here: try {others}, or make it contractive; raise Stop.divergence "
            "if it has to grow on its way"
        )
    if call is not None and not call.stop.has_tolerance:
        return "without a tolerance no row can converge: give stop=Stop(rtol=1e-3)"
    advice = f"raise Stop.max_steps, loosen Stop.rtol, or try {others}"
    if call is not None and call.takes_windows:
        return f"first try sweep=dq.Sliding(8); {advice}"
    return advice
