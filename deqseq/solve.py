"""The only iteration loop of the library."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

import torch

from deqseq.evaluate import check_start, evaluate
from deqseq.ledger import Ledger
from deqseq.solution import Solution
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.types import FixedPointMap, Residual, RowIndex, SelectableMap, State


@dataclass(frozen=True)
class Progress:
    """What a callback is told at each look at the residual.

    Attributes:
        step: evaluations so far.
        max_steps: the budget.
        open_rows: rows that have not ended.
        residual: the latest residual of each row or token, ``(batch,)`` or ``(batch, tokens)``, on the device of the
            state.
    """

    step: int
    max_steps: int
    open_rows: int
    residual: Residual


Callback = Callable[[Progress], None]
"""Called with a :class:`Progress` at each look at the residual."""


def solve(
    f: FixedPointMap,
    z0: State,
    *,
    solver: Solver | OutsideSolver,
    stop: Stop,
    trace: bool = False,
    callback: Callback | None = None,
) -> Solution:
    r"""Iterate towards a fixed point :math:`z^* = f(z^*)`, in the caller's gradient mode.

    Each round evaluates the map once, looks at the residual, ends the rows that have converged or diverged, and asks
    the solver for the next point. Rows that ended stay where they are; when they are a quarter of those left, and
    ``f`` offers ``select(rows)``, they are dropped from the computation.

    Args:
        f: the map, ``(batch, *event) -> (batch, *event)``; if it has ``select(rows)``, finished rows are dropped.
        z0: where to start, ``(batch, *event)``, floating point and finite.
        solver: the algorithm.
        stop: tolerances, budget and granularity. ``stop.max_steps`` counts evaluations of ``f``, exactly.
        trace: whether to keep the residual at every look.
        callback: called with a :class:`Progress` at every look.

    Returns:
        A :class:`Solution`. Its value is ``f(z)`` at the evaluation that passed the test; for rows that did not
        converge, at the one with the smallest residual. Nothing is raised for them: look at ``status``, or call
        ``raise_if_failed()``.

    Raises:
        TypeError: a starting point or a map that breaks its contract by its type.
        ValueError: one that breaks it by its shape, dtype or numbers.

    Example:
        >>> import torch
        >>> from deqseq.solvers import Anderson
        >>> solution = solve(torch.cos, torch.zeros(3, 1), solver=Anderson(), stop=Stop(rtol=1e-6))
        >>> solution.value[:, 0]
        tensor([0.7391, 0.7391, 0.7391])
        >>> solution.converged
        tensor([True, True, True])
    """
    check_start(z0)
    ledger = Ledger(z0, stop, trace)
    return ledger.solution(iterate(f, z0, solver, ledger, callback).evaluations)


@runtime_checkable
class Books(Protocol):
    """Who watches an iteration and decides when it ends: a :class:`Ledger`, or the front of a sliding window."""

    stop: Stop
    open_rows: int

    def residuals(self) -> Residual:
        """The latest residuals."""
        ...

    def observe(self, z: State, fz: State, step: int) -> None:
        """Look at one evaluation."""
        ...

    def hold(self, z: State, proposal: State) -> State:
        """The next point, given what the solver proposes."""
        ...

    def drop_ended(self) -> RowIndex | None:
        """Rows that stay, if some are to be dropped from the computation."""
        ...


@dataclass(frozen=True)
class Ending:
    """Where an iteration stopped: its last evaluation, and where the solver would have gone next."""

    z: State
    fz: State
    evaluations: int
    propose: Callable[[], State]


def iterate(
    f: FixedPointMap, z0: State, solver: Solver | OutsideSolver, books: Books, callback: Callback | None = None
) -> Ending:
    """The loop of :func:`solve`, for any books.

    Args:
        f: the map.
        z0: where to start, ``(batch, *event)``.
        solver: the algorithm.
        books: decides when it ends; ``books.stop.max_steps`` evaluations at most.
        callback: called at every look.

    Returns:
        The last evaluation, of the rows that were not dropped.
    """
    if isinstance(solver, OutsideSolver):
        return _observe_outside(f, z0, solver, books, callback)
    stop, z, state = books.stop, z0, solver.init(z0)
    selectable = f if isinstance(f, SelectableMap) else None
    kind = z0.device.type  # under autocast the map is computed in half precision, the solver's inner products are not
    full_precision = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
    step = 0
    while True:
        step += 1
        fz = evaluate(f, z)
        if stop.looks_at(step):
            books.observe(z, fz, step)
            _tell(callback, books, step)
            if not books.open_rows or step == stop.max_steps:
                return Ending(z, fz, step, partial(_propose, solver, z, fz, state))
        with full_precision:
            proposal, state = solver.step(z, fz, state)
        z = books.hold(z, proposal)
        if selectable is not None and (keep := books.drop_ended()) is not None:
            f = selectable = selectable.select(keep)
            z, state = z[keep], solver.select(state, keep)


def _propose(solver: Solver, z: State, fz: State, state: object) -> State:
    with torch.autocast(z.device.type, enabled=False):
        return solver.step(z, fz, state)[0]


class _Finished(Exception):
    """Ends the loop of an outside solver."""


def _observe_outside(
    f: FixedPointMap, z0: State, solver: OutsideSolver, books: Books, callback: Callback | None
) -> Ending:
    """Let another library iterate, and keep our books on each evaluation that it makes."""
    stop, step = books.stop, 0
    last: tuple[State, State] | None = None

    def observed(z: State) -> State:
        nonlocal step, last
        step += 1
        fz = evaluate(f, z)
        last = z, fz
        if stop.looks_at(step):
            books.observe(z, fz, step)
            _tell(callback, books, step)
            if not books.open_rows or step == stop.max_steps:
                raise _Finished
        return fz

    with suppress(_Finished):
        solver.run(observed, z0, stop.max_steps)
    if last is None:
        raise RuntimeError(f"{solver} returned without evaluating the map")
    if not stop.looks_at(step):
        books.observe(last[0], last[1], step)
        _tell(callback, books, step)
    return Ending(*last, step, partial(_identity, last[1]))


def _identity(fz: State) -> State:
    return fz


def _tell(callback: Callback | None, books: Books, step: int) -> None:
    if callback is not None:
        callback(Progress(step, books.stop.max_steps, books.open_rows, books.residuals()))
