"""The loop of all solves, but for :class:`Lockstep` and ``torch.export``."""

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, Required, TypedDict

import torch
from torch import Tensor

from deqseq.check import check_callable, check_flag, check_type
from deqseq.evaluate import check_start, check_transforms, evaluate
from deqseq.exits import check_exit
from deqseq.explain import Problem
from deqseq.judge import Judge
from deqseq.monitor import Monitor, RowMonitor
from deqseq.norms import measure
from deqseq.rows import check_rows, put, take
from deqseq.solution import Solution, SolveStats, Status
from deqseq.solvers.base import ExternalSolver, Solver
from deqseq.stop import Stop
from deqseq.types import FixedPointMap, Residual, RowIndex, State


@dataclass(frozen=True)
class Progress:
    """What a callback receives at each check of the residual.

    Attributes:
        iteration: evaluations so far.
        max_steps: the budget; in a sliding window, that of each commit.
        active_rows: rows that have not ended.
        residual: the latest residual of each row or token, ``(batch,)`` or ``(batch, tokens)``, on the device of the
            state.
    """

    iteration: int
    max_steps: int
    active_rows: int
    residual: Residual


Callback = Callable[[Progress], None]
"""Called with a :class:`Progress` at each check of the residual."""


class SolveCall(TypedDict, total=False):
    """Keyword arguments of :func:`solve`, which gradient estimators hand on."""

    solver: Required[Solver[Any] | ExternalSolver]
    stop: Required[Stop]
    args: Any
    has_aux: bool
    trace: bool
    callback: Callback | None
    readout: Callable[..., Tensor] | None


def solve(
    f: FixedPointMap,
    z0: State,
    *,
    solver: Solver[Any] | ExternalSolver,
    stop: Stop,
    args: Any = None,
    has_aux: bool = False,
    trace: bool = False,
    callback: Callback | None = None,
    readout: Callable[..., Tensor] | None = None,
) -> Solution:
    r"""Iterate towards a fixed point :math:`z^* = f(z^*)`, in the caller's gradient mode.

    Each iteration evaluates the map once, checks the residual, ends the rows that have converged or diverged, and asks
    the solver for the next point. Rows that have ended are frozen. With ``args``, they are removed from the batch once
    a quarter of it has ended.

    Args:
        f: the map, ``(batch, *event) -> (batch, *event)``; with ``args`` it is called as ``f(z, args)``.
        z0: the start, ``(batch, *event)``, floating point and finite.
        solver: the algorithm.
        stop: tolerances, budget and granularity. ``stop.max_steps`` counts evaluations of ``f``, exactly.
        args: what the map needs of each row: a tensor ``(batch, ...)``, or a record of them
            (:func:`deqseq.take` removes rows of it). Default: the map takes ``z`` alone.
        has_aux: whether ``f`` returns a pair ``(f(z), aux)``, with ``aux`` a record of tensors with a row dimension.
            The solution has the ``aux`` of the evaluation that gave its value. Failed rows whose best value is not
            their last are evaluated once more for it (with an external solver, also rows that ended before the others),
            beyond the budget and counted: their ``aux`` is that of an evaluation at the value.
        trace: whether to keep the residual of every check.
        callback: called with a :class:`Progress` at every check.
        readout: how values become logits, ``(batch, *event) -> (batch, *tokens, classes)``, for an exit rule that
            judges these; with ``args`` it is called as ``readout(fz, args)``.

    Returns:
        A :class:`Solution`. Its value is ``f(z)`` at the evaluation that passed the test; for rows that did not
        pass, at the one with the smallest residual. Failed rows raise nothing: see ``status``, or call
        ``raise_if_failed()``.

    Raises:
        TypeError: an argument or the value of ``f`` is of the wrong type.
        ValueError: ``z0``, ``args`` or the value of ``f`` has a wrong shape, dtype or device, ``z0`` is not finite,
            ``f`` changes ``z`` in place, or an exit rule needs a ``readout``.

    Example:
        >>> import torch
        >>> from deqseq.solvers import Anderson
        >>> solution = solve(torch.cos, torch.zeros(3, 1), solver=Anderson(), stop=Stop(rtol=1e-6))
        >>> solution.value[:, 0]
        tensor([0.7391, 0.7391, 0.7391])
        >>> x = torch.tensor([[0.0], [1.0]])
        >>> solve(lambda z, x: (z + x) / 2, x * 0, args=x, solver=Anderson(), stop=Stop()).stats.iterations
        tensor([1, 3])
    """
    check_call(f, z0, solver, stop, args, callback)
    if readout is not None:
        check_callable("readout", readout)
    check_exit(stop.exit, readout)
    check_flag("has_aux", has_aux)
    check_flag("trace", trace)
    if torch.compiler.is_exporting():
        if trace or callback is not None:
            raise ValueError("torch.export keeps no trace and calls no callback: leave trace and callback out")
        return _exported(f, z0, args, solver, stop, has_aux)
    judge = None if stop.exit is None else Judge(stop, readout)
    monitor = RowMonitor(z0, stop, trace, freezes=not isinstance(solver, ExternalSolver), judge=judge)
    end = iterate(f, z0, args, solver, monitor, has_aux=has_aux, callback=callback)
    solution, stale = monitor.solution(end.evaluations, end.aux)
    if solution.aux is not None and stale is not None:
        with torch.no_grad():
            solution = _with_own_aux(f, args, solution, stale)

    def again(solver: Solver[Any] | ExternalSolver, stop: Stop, start: State | None, trace: bool) -> Solution:
        z = z0.detach() if start is None else start
        with torch.no_grad():  # as a decorator, inside torch.compile, it would stay switched on for good
            return solve(f, z, solver=solver, stop=stop, args=args, has_aux=has_aux, trace=trace, readout=readout)

    return replace(solution, problem=Problem(solver, stop, again))


def _exported(
    f: FixedPointMap, z0: State, args: Any, solver: Solver[Any] | ExternalSolver, stop: Stop, has_aux: bool
) -> Solution:
    """A fixed number of iterations, for ``torch.export``: no decision depends on numbers."""
    if stop.check_every < stop.max_steps or stop.exit is not None or isinstance(solver, ExternalSolver):
        raise ValueError(
            "torch.export needs a fixed number of iterations: stop must be Stop.exactly(n) and the solver one of "
            f"deqseq's, got {stop} and {solver}"
        )
    z, state = z0, solver.init(z0)
    for _ in range(stop.max_steps - 1):
        z, state = solver.step(z, evaluate(f, z, args, has_aux=has_aux)[0], state)
    fz, aux = evaluate(f, z, args, has_aux=has_aux)
    seen = measure(z, fz, replace(stop, per="row"))
    status = torch.where(seen.passed, int(Status.CONVERGED), int(Status.MAX_STEPS_REACHED))
    status = torch.where(seen.difference.isfinite(), status, int(Status.DIVERGED))
    steps = torch.full_like(status, stop.max_steps)
    unknown = torch.full_like(seen.residual, torch.inf)
    return Solution(fz, status, SolveStats(steps, seen.residual, unknown, stop.max_steps, steps), aux)


def check_call(f: object, z0: Tensor, solver: object, stop: object, args: object, callback: object) -> None:
    """Refuse what no solve can begin from, before anything is computed."""
    check_transforms()
    check_callable("f", f)
    check_start("z0", z0)
    check_type("solver", solver, (Solver, ExternalSolver), "dq.Anderson()")
    check_type("stop", stop, Stop, "dq.Stop(rtol=1e-3)")
    check_rows("args", args, len(z0))
    if callback is not None:
        check_callable("callback", callback)


def _with_own_aux(f: FixedPointMap, args: Any, solution: Solution, rows: RowIndex) -> Solution:
    """The solution, with ``aux`` of the given rows evaluated at their value."""
    if args is None:
        aux = take(evaluate(f, solution.value.detach(), has_aux=True)[1], rows)
    else:
        aux = evaluate(f, solution.value[rows].detach(), take(args, rows), has_aux=True)[1]
    stats = solution.stats
    updates = stats.updates.index_add(0, rows, torch.ones_like(rows))
    stats = replace(stats, evaluations=stats.evaluations + 1, updates=updates)
    return replace(solution, stats=stats, aux=put(solution.aux, rows, aux))


@dataclass(frozen=True)
class LoopResult:
    """Where an iteration ended: its last evaluation, of the rows that were still computed, and the solver's state."""

    z: State
    fz: State
    aux: Any
    evaluations: int
    state: Any


def iterate(
    f: FixedPointMap,
    z0: State,
    args: Any,
    solver: Solver[Any] | ExternalSolver,
    monitor: Monitor,
    state: Any = None,
    *,
    has_aux: bool = False,
    callback: Callback | None = None,
) -> LoopResult:
    """The loop of :func:`solve`, for any monitor, from a ``state`` of the solver; None: from its first."""
    if isinstance(solver, ExternalSolver):
        return _iterate_externally(f, z0, args, solver, monitor, has_aux, callback)
    z, step = z0, 0
    state = solver.init(z0) if state is None else state
    while True:
        step += 1
        fz, aux = evaluate(f, z, args, has_aux=has_aux)
        if step == 1:
            check_rows("aux", aux, len(z))
        if monitor.checks(step):
            monitor.check(z, fz, step, args)
            _report(callback, monitor, step)
            if monitor.done:
                return LoopResult(z, fz, aux, step, state)
        proposal, state = next_point(solver, z, fz, state)
        if step == 1 and args is not None:
            check_rows(f"the state of {type(solver).__name__}", state, len(z))
        z = monitor.freeze(z, proposal)
        if args is not None and (rows := monitor.compact(aux, step)) is not None:
            z, args, state = take((z, args, state), rows)
        del fz, proposal, aux  # not held while the map is evaluated


def next_point(solver: Solver[Any] | ExternalSolver, z: State, fz: State, state: Any) -> tuple[State, Any]:
    """One step of the solver, in full precision: under autocast only the map is computed in half precision.

    Raises:
        TypeError: the solver does not return a pair, or its proposal has another dtype than ``z``.
        ValueError: its proposal has another shape or device, or it has changed ``z``.
    """
    if isinstance(solver, ExternalSolver):
        return fz, state
    kind, before = z.device.type, None if z.is_inference() else z._version
    with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
        pair = solver.step(z, fz, state)
    name = f"{type(solver).__name__}.step"
    if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], Tensor):
        raise TypeError(f"{name} must return a pair (next point, state), got {type(pair).__name__}")
    if pair[0].dtype != z.dtype:
        raise TypeError(f"{name} must keep the dtype of z, {z.dtype}, got {pair[0].dtype}")
    if pair[0].shape != z.shape or pair[0].device != z.device:
        got = f"{tuple(pair[0].shape)} on {pair[0].device}"
        raise ValueError(f"{name} must keep the shape and device of z, {tuple(z.shape)} on {z.device}, got {got}")
    if before is not None and z._version != before:
        raise ValueError(f"{name} must not change z in place: it may be the caller's z0. Return a new tensor")
    return pair


class _Finished(Exception):
    """Ends the loop of an external solver."""


def _iterate_externally(
    f: FixedPointMap,
    z0: State,
    args: Any,
    solver: ExternalSolver,
    monitor: Monitor,
    has_aux: bool,
    callback: Callback | None,
) -> LoopResult:
    """Let another library iterate, and monitor each evaluation that it makes."""
    step = 0
    last: tuple[State, State, Any] | None = None

    def check() -> None:
        assert last is not None
        monitor.check(last[0], last[1], step, args)
        _report(callback, monitor, step)

    def observed(z: State) -> State:
        nonlocal step, last
        step += 1
        fz, aux = evaluate(f, z, args, has_aux=has_aux)
        last = z, fz, aux
        if monitor.checks(step):
            check()
            if monitor.done:
                raise _Finished
        return fz

    with suppress(_Finished):
        solver.run(observed, z0, monitor.stop.max_steps)
    if last is None:
        raise RuntimeError(f"{solver} returned without evaluating the map")
    if not monitor.checks(step):
        check()
    return LoopResult(*last, step, None)


def _report(callback: Callback | None, monitor: Monitor, step: int) -> None:
    if callback is not None:
        callback(Progress(monitor.evaluations + step, monitor.stop.max_steps, monitor.active_rows, monitor.residuals()))
