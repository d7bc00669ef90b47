"""The only iteration loop of the library."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from deqseq.evaluate import check_start, evaluate
from deqseq.ledger import Ledger
from deqseq.solution import Solution
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.types import FixedPointMap, Residual, SelectableMap, State


@dataclass(frozen=True)
class Progress:
    """What a callback is told at each look at the residual.

    Attributes:
        step: evaluations so far.
        max_steps: the budget.
        open_rows: rows that have not ended.
        residual: the latest residual of each row or token, on the device of the state.
    """

    step: int
    max_steps: int
    open_rows: int
    residual: Residual


Callback = Callable[[Progress], None]


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
        TypeError, ValueError: a starting point or a map that breaks its contract.

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
    if isinstance(solver, OutsideSolver):
        return _observe_outside(f, z0, solver, ledger, callback)
    z, state = z0, solver.init(z0)
    selectable = f if isinstance(f, SelectableMap) else None
    kind = z0.device.type  # under autocast the map is computed in half precision, the solver's inner products are not
    full_precision = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
    step = 0
    while True:
        step += 1
        fz = evaluate(f, z)
        if stop.looks_at(step):
            ledger.observe(z, fz, step)
            _tell(callback, ledger, step)
            if not ledger.open_rows or step == stop.max_steps:
                return ledger.solution(step)
        with full_precision:
            proposal, state = solver.step(z, fz, state)
        z = ledger.hold(z, proposal)
        if selectable is not None and (keep := ledger.drop_ended()) is not None:
            f = selectable = selectable.select(keep)
            z, state = z[keep], solver.select(state, keep)


class _Finished(Exception):
    """Ends the loop of an outside solver."""


def _observe_outside(
    f: FixedPointMap, z0: State, solver: OutsideSolver, ledger: Ledger, callback: Callback | None
) -> Solution:
    """Let another library iterate, and keep our books on each evaluation that it makes."""
    stop, step = ledger.stop, 0
    last: tuple[State, State] | None = None

    def observed(z: State) -> State:
        nonlocal step, last
        step += 1
        fz = evaluate(f, z)
        last = z, fz
        if stop.looks_at(step):
            ledger.observe(z, fz, step)
            _tell(callback, ledger, step)
            if not ledger.open_rows or step == stop.max_steps:
                raise _Finished
        return fz

    try:
        solver.run(observed, z0, stop.max_steps)
    except _Finished:
        return ledger.solution(step)
    if last is None:
        raise RuntimeError(f"{solver} returned without evaluating the map")
    if not stop.looks_at(step):
        ledger.observe(last[0], last[1], step)
        _tell(callback, ledger, step)
    return ledger.solution(step)


def _tell(callback: Callback | None, ledger: Ledger, step: int) -> None:
    if callback is not None:
        callback(Progress(step, ledger.stop.max_steps, ledger.open_rows, ledger.residual))
