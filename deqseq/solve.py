"""Solving: a problem, the loop of its iteration, and the function that users call."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

import numpy as np
import torch

from deqseq.arguments import Function, check_callable, check_type, checked, shown
from deqseq.rows import check_rows, map_tensors, on_device, on_host, per_row, put, take
from deqseq.solution import Call, Outcome, Solution, SolveStats, Status, warn_failed, worst_token
from deqseq.solvers.base import Solver
from deqseq.step import (
    Callback,
    Progress,
    autocast_dtype,
    check_independent,
    check_start,
    check_transforms,
    evaluate,
    in_autocast,
    next_point,
    returned_value,
)
from deqseq.stop import Stop, relative
from deqseq.sweeps import Sweep
from deqseq.tokens import TokenArgs
from deqseq.types import FixedPointMap, RowIndex, State
from deqseq.windows import Window, iterate_windows


class Changes(TypedDict, total=False):
    """Fields of a :class:`Problem` that an estimator may replace."""

    f: FixedPointMap
    z0: State
    solver: Solver[Any]
    stop: Stop
    sweep: Sweep | None
    callback: Callback | None


@dataclass(frozen=True, kw_only=True)
class Problem(Call):
    """A fixed-point problem, and how it is solved: what a :class:`deqseq.Gradient` is given.

    Attributes:
        f: the map, called as ``f(z)``, or as ``f(z, args)``.
        z0: the start, ``(batch, *event)``.
        args: what the map needs of each row. Default: it takes ``z`` only.
        has_aux: whether the map returns a pair ``(f(z), aux)``.
        solver: the algorithm.
        stop: tolerances and budget.
        sweep: which tokens are solved together. Default: the map has no tokens.
        callback: called with a :class:`Progress` at every check.
        renew: prepares ``args`` again from some rows of them, so that no graph reaches the others.
            Default: rows of ``args`` are taken as they are.
        returns_tested: whether a row that converged returns the point that was tested, or the
            map's value there, which no residual is known of. :class:`ImplicitModel` takes the
            latter, one iteration more, unless its solver combines points.
        autocast: the dtype of autocast at the time of the solve; None: it was switched off.

    Example:
        >>> import torch, deqseq as dq
        >>> problem = Problem(
        ...     f=torch.cos, z0=torch.zeros(3, 1), solver=dq.Anderson(), stop=dq.Stop(rtol=1e-6)
        ... )
        >>> problem.solve(solver=dq.Broyden()).value[:, 0]
        tensor([0.7391, 0.7391, 0.7391])
    """

    f: FixedPointMap
    z0: State
    args: Any = None
    has_aux: bool = False
    callback: Callback | None = None
    renew: Callable[[Any], Any] | None = None
    returns_tested: bool = True
    autocast: torch.dtype | None = None

    def solve(self, **changes: Unpack[Changes]) -> Solution:
        """Solve in the caller's gradient mode, without a warning if it fails.

        Args:
            **changes: fields to replace for this solve.

        Returns:
            The solution. Its ``call`` is this problem with the changed solver, rule or sweep.

        Raises:
            TypeError: inside a transform of ``torch.func``.
        """
        problem = replace(self, **changes)
        check_transforms(problem.stop)
        if problem.sweep is None or problem.sweep.block is None:
            solution = iterate_rows(problem)
        else:
            _check_sweep(problem)
            solution = iterate_windows(problem)
        stats = solution.stats
        if problem.sweep is None:
            stats = replace(stats, residual=worst_token(stats.residual))
        # the caller's own map and start, not what an estimator put in their place
        autocast = autocast_dtype(self.z0.device)
        call = replace(problem, f=self.f, z0=self.z0, callback=None, autocast=autocast)
        return replace(solution, stats=stats, call=call)

    def evaluate(self, z: State) -> State:
        """The map at ``z``, ``(batch, *event)``, checked, without its auxiliary output."""
        return evaluate(self.f, z, self.args, has_aux=self.has_aux)[0]

    def rows(self, rows: RowIndex) -> "Problem":
        """The problem of some ``rows``, ``(rows,)``; no gradient reaches the others."""
        args = take(self.args, rows)
        if self.renew is not None:
            args = self.renew(args)
        return replace(self, z0=self.z0[rows], args=args)

    def repeat(self, *, start: State | None = None, **changes: Any) -> Solution:
        # as a decorator, inside torch.compile, no_grad would stay switched on for good
        with torch.no_grad(), in_autocast(self.z0.device, self.autocast):
            return replace(self, z0=self.z0 if start is None else start).solve(**changes)

    @property
    def dtype(self) -> torch.dtype:
        return self.autocast or self.z0.dtype

    def solved_value(self, outcome: Outcome) -> State:
        assert isinstance(outcome, Solution)
        return outcome.value.detach()

    def estimated_value(self, outcome: Outcome) -> State | None:
        assert isinstance(outcome, Solution)
        return outcome.value.detach() if outcome.value.requires_grad else None


def _check_sweep(problem: Problem) -> None:
    """Refuse a map without tokens, and a solver that cannot begin anew in a window."""
    check_type("args", problem.args, TokenArgs)
    assert problem.sweep is not None
    if problem.solver.owns_loop and problem.sweep.window > 1:
        raise ValueError(
            f"{problem.solver} solves a block on its own, and cannot begin anew in a window of "
            f"{problem.sweep.window} blocks: take Simultaneous(), Chunked(size) or Sequential()"
        )
    problem.args.check_sweep(problem.z0.shape[1])


@checked
def solve(
    f: FixedPointMap,
    z0: State,
    *,
    solver: Solver[Any],
    stop: Stop,
    args: Any = None,
    has_aux: bool = False,
    sweep: Sweep | None = None,
    callback: Callback | None = None,
) -> Solution:
    r"""Iterate towards a fixed point :math:`z^* = f(z^*)`, in the caller's gradient mode.

    Each iteration evaluates the map once, checks the residual, ends the rows that have converged or
    diverged, and asks the solver for the next point. Rows that have ended are frozen. With
    ``args``, they are removed from the batch once a quarter of it has ended.

    Args:
        f: the map, ``(batch, *event) -> (batch, *event)``; with ``args`` it is called as ``f(z,
            args)``.
        z0: the start, ``(batch, *event)``, floating point and finite.
        solver: the algorithm.
        stop: tolerances and budget. ``stop.max_steps`` counts evaluations of ``f``, exactly.
        args: what the map needs of each row: a tensor ``(batch, ...)``, or a record of them
            (:func:`deqseq.take` removes rows of it). Default: the map takes ``z`` alone.
        has_aux: whether ``f`` returns a pair ``(f(z), aux)``, with ``aux`` a record of tensors with
            a row dimension. The solution has that of the evaluation which gave its value.
        sweep: which tokens of a sequence are solved together; models pass theirs, with ``args``
            that can be divided. Default: the map has no tokens.
        callback: called with a :class:`Progress` at every check.

    Returns:
        A :class:`Solution`. Failed rows raise nothing: see ``status``, or call
        ``raise_if_failed()``.

    Warns:
        ConvergenceWarning: most rows spent their budget or diverged.

    Raises:
        TypeError: an argument or the value of ``f`` is of the wrong type.
        ValueError: ``z0``, ``args`` or the value of ``f`` has a wrong shape, dtype or device,
            ``z0`` is not finite, or ``f`` changes ``z`` in place.

    Example:
        >>> import torch
        >>> from deqseq.solvers import Anderson
        >>> solution = solve(torch.cos, torch.zeros(3, 1), solver=Anderson(), stop=Stop(rtol=1e-6))
        >>> solution.value[:, 0]
        tensor([0.7391, 0.7391, 0.7391])
        >>> x = torch.tensor([[0.0], [1.0]])
        >>> solve(
        ...     lambda z, x: (z + x) / 2, x * 0, args=x, solver=Anderson(), stop=Stop()
        ... ).stats.iterations
        tensor([1, 4])
    """
    problem = posed(
        f=f,
        z0=z0,
        args=args,
        has_aux=has_aux,
        solver=solver,
        stop=stop,
        sweep=sweep,
        callback=callback,
    )
    solution = problem.solve()
    warn_failed(solution.ends, stop)
    return solution


def posed(**fields: Any) -> Problem:
    """The problem of a caller, whose map, start and ``args`` are checked."""
    problem = Problem(**fields)
    if (
        problem.args is None
        and not Function(1).is_kind(problem.f)
        and Function(2).is_kind(problem.f)
    ):
        raise TypeError(f"f must take z only, got {shown(problem.f)}: give the second one as args=")
    check_callable("f", problem.f, 1 if problem.args is None else 2)
    check_start("z0", problem.z0)
    check_rows("args", problem.args, len(problem.z0))
    return problem


def iterate_rows(problem: Problem) -> Solution:
    """Iterate until every row has ended, all tokens of a row together.

    Gradients pass where the caller has enabled them. The point of a row that has ended no longer
    changes. With ``args``, of which rows can be taken, such rows are stored and removed once they
    are a quarter of the batch.
    """
    f, args, solver, stop = problem.f, problem.args, problem.solver, problem.stop
    z0, device = problem.z0, problem.z0.device
    batch, tokens = len(z0), math.prod(z0.shape[1:-1])
    budget = 1 if solver.owns_loop else stop.max_steps
    evaluations = evaluations_alone = 0
    window = Window(stop, solver, batch, tokens)  # all tokens of the rows that are still evaluated
    running = np.ones(batch, dtype=bool)  # rows that have not ended
    status = np.full(batch, int(Status.MAX_STEPS_REACHED))
    iterations, updates = np.zeros((2, batch), dtype=np.int64)
    numbers: np.ndarray | None = None  # d and s of each token, (2, batch, tokens)
    stored: Any = None  # value and aux of the whole batch

    def evaluated(z: State) -> tuple[State, Any]:
        nonlocal evaluations
        evaluations += 1
        return evaluate(f, z, args, has_aux=problem.has_aux)

    # with other strides, as of expanded zeros, the map would be compiled twice
    z, memory = solver.begin(window.remembered(evaluated), z0.contiguous(), stop)
    answers_checked = False
    while True:
        fz, aux = evaluated(z)
        rows, last = window.rows, evaluations >= budget
        checks = last or evaluations % stop.check_every == 0
        if checks or (numbers is None and stop.has_tolerance):
            measured = on_host(window.measure(z, fz, tokens))
            passed, sound = window.judge(measured, torch.finfo(z.dtype).eps)
            numbers = measured[:2] if numbers is None else numbers
            numbers[:, rows] = measured[:2]
            if checks:
                row_passed, row_sound = passed.all(axis=1), sound.all(axis=1)
                ended = running[rows] & (last | row_passed | ~row_sound)
                status[rows[ended & row_passed]] = Status.CONVERGED
                status[rows[ended & ~row_sound]] = Status.DIVERGED
                iterations[rows[ended]] = evaluations
                running[rows[ended]] = False
            if checks and problem.callback is not None:
                residual = on_device(relative(numbers), device)
                active = int(running.sum())
                problem.callback(Progress(evaluations, stop.max_steps, active, residual))
        if not answers_checked:
            check_rows("aux", aux, len(z))
        frozen, done = ~running[rows], not running.any()
        remove = args is not None and 4 * frozen.sum() >= len(rows)
        if remove and not done and len(rows) == batch:  # the first that are removed
            fz, aux = map_tensors(torch.clone, (fz, aux))  # a map may fill the same buffers again
            if problem.renew is None:  # the map is the caller's own
                stay = on_device(np.flatnonzero(~frozen), device)
                evaluations_alone = check_independent(f, z, args, fz, stay, problem.has_aux)
        if done or remove:  # all rows are stored; those that go on are overwritten when they end
            diverged = status[rows] == Status.DIVERGED
            at_point = diverged
            if problem.returns_tested:
                at_point = diverged | (status[rows] == Status.CONVERGED)
            places = on_device(rows, device)
            start = z0[places] if diverged.any() else z  # only read where a row diverged
            value = returned_value(z, fz, at_point, diverged, start)
            stored = (value, aux) if stored is None else put(stored, places, (value, aux))
            updates[rows] = evaluations
        if done:
            arrays = status, iterations, relative(numbers), updates
            there, steps, residual, work = (on_device(x, device) for x in arrays)
            stats = SolveStats(steps, residual, evaluations + evaluations_alone, work)
            return Solution(stored[0], there, stats, status, stored[1])
        proposal, memory = next_point(solver, z, fz, memory)
        if not answers_checked and args is not None:
            check_rows(f"the state of {type(solver).__name__}", memory, len(z))
        answers_checked = True
        if frozen.any():
            proposal = torch.where(per_row(on_device(frozen, device), z), z, proposal)
        z = proposal
        del fz, proposal, aux  # not held while the map is evaluated
        if remove:
            z, memory, args = take((z, memory, args), window.keep(~frozen, device))
