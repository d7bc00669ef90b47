"""Solving: a problem, the function that users call, and the loop.

The loop evaluates the map and asks the solver for the next point. What has been found of the batch
is kept by :class:`AllTokens` or :class:`deqseq.windows.Swept`, which decide what has ended.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from deqseq.arguments import Function, check_type, checked, shown
from deqseq.rows import check_put, check_rows, map_tensors, on_device, on_host, per_row, put, take
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
from deqseq.stop import Stop
from deqseq.tokens import TokenArgs
from deqseq.types import FixedPointMap, RowIndex, State
from deqseq.windows import Found, NextPoint, Swept


@dataclass(frozen=True, kw_only=True)
class Problem(Call):
    """A fixed-point problem, and how it is solved: what a :class:`deqseq.Gradient` is given.

    Attributes:
        f: the map, called as ``f(z)``, or as ``f(z, args)``.
        z0: the start, ``(batch, *event)``.
        args: inputs of the map with one entry per row. Default: the map takes only ``z``.
        has_aux: whether the map returns a pair ``(f(z), aux)``.
        solver: the algorithm.
        stop: tolerances and budget.
        sweep: which tokens are solved together. Default: the map has no tokens.
        callback: called with a :class:`Progress` at every check of the residual.
        returns_tested: whether a converged row returns the point ``z`` that was tested. If not, it
            returns ``f(z)``, one iteration further, whose residual is not known. An
            :class:`~deqseq.ImplicitModel` sets it to ``solver.combines``.
        autocast: the dtype of autocast at the time of the solve. None: autocast was off.

    Example:
        >>> from deqseq import Problem
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
    returns_tested: bool = True
    autocast: torch.dtype | None = None

    def solve(self, **changes: Any) -> Solution:
        """Solve in the caller's gradient mode, without a warning if it fails.

        Args:
            **changes: fields of this problem to replace for this solve.

        Returns:
            The solution. Its ``call`` is this problem with the changed solver, stop or sweep.

        Raises:
            TypeError: inside a transform of ``torch.func``.
        """
        problem = replace(self, **changes)
        check_transforms(problem.stop)
        if problem.sweep is None or problem.sweep.block is None:
            # with other strides, as of expanded zeros, the map would be compiled twice
            solution = iterate(problem, AllTokens(problem), problem.z0.contiguous())
        else:
            _check_sweep(problem)
            swept = Swept(problem)
            solution = iterate(problem, swept, swept.states())
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
        if isinstance(args, TokenArgs):
            args = args.renewed()
        return replace(self, z0=self.z0[rows], args=args)

    def repeat(self, *, start: State | None = None, **changes: Any) -> Solution:
        # as a decorator, inside torch.compile, no_grad would stay switched on for good
        with torch.no_grad(), in_autocast(self.z0.device, self.autocast):
            return replace(self, z0=self.z0 if start is None else start).solve(**changes)

    @property
    def dtype(self) -> torch.dtype:
        return self.autocast or self.z0.dtype

    def values(self, outcome: Outcome) -> tuple[State, State | None]:
        assert isinstance(outcome, Solution)
        value = outcome.value.detach()
        return value, value if outcome.value.requires_grad else None


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
    callback: Callback | None = None,
) -> Solution:
    r"""Iterate towards a fixed point :math:`z^* = f(z^*)`.

    If gradients are enabled, autograd records all iterations. Each iteration evaluates the map
    once, checks the residual, ends the rows that have converged or diverged, and asks the solver
    for the next point. Rows that have ended are frozen. If ``f`` mixes rows, a converged row whose
    residual rises above the tolerance is iterated again. With ``args``, rows that have ended are
    removed from the batch once they are a quarter of it.

    Args:
        f: the map, ``(batch, *event) -> (batch, *event)``; with ``args`` it is called as ``f(z,
            args)``.
        z0: the start, ``(batch, *event)``, floating point and finite.
        solver: the algorithm.
        stop: tolerances and budget. ``stop.max_steps`` bounds the evaluations of each row; with
            ``args``, one or two more may check that rows are independent.
        args: inputs of the map with one entry per row: a tensor ``(batch, ...)``, or a dataclass,
            tuple, list or dict of them (see :func:`deqseq.take`). Default: the map takes only
            ``z``.
        has_aux: whether ``f`` returns a pair ``(f(z), aux)``; ``aux`` is built like ``args``. The
            solution has the ``aux`` of the evaluation that gave its value.
        callback: called with a :class:`Progress` at every check of the residual.

    Returns:
        A :class:`Solution`. Failed rows raise no error: see ``status``, or call
        ``raise_if_failed()``.

    Warns:
        ConvergenceWarning: a row spent its budget or diverged, and ``stop`` has a tolerance.

    Raises:
        TypeError: an argument or the value of ``f`` is of the wrong type or dtype.
        ValueError: ``z0``, ``args`` or the value of ``f`` has a wrong shape or device, ``z0`` is
            not finite, ``f`` changes ``z`` in place, or ``args`` are given and the rows of ``f``
            depend on one another.

    Example:
        >>> from deqseq import Stop, solve
        >>> import torch
        >>> from deqseq.solvers import Anderson
        >>> solution = solve(torch.cos, torch.zeros(3, 1), solver=Anderson(), stop=Stop(rtol=1e-6))
        >>> solution.value[:, 0]
        tensor([0.7391, 0.7391, 0.7391])
        >>> x = torch.tensor([[0.0], [1.0]])  # an input for each row
        >>> solve(
        ...     lambda z, x: (z + x) / 2, x * 0, args=x, solver=Anderson(), stop=Stop()
        ... ).stats.iterations
        tensor([1, 4])
    """
    problem = checked_problem(
        f=f,
        z0=z0,
        args=args,
        has_aux=has_aux,
        solver=solver,
        stop=stop,
        callback=callback,
    )
    solution = problem.solve()
    warn_failed(solution.ends, stop)
    return solution


def checked_problem(**fields: Any) -> Problem:
    """The problem of a caller, whose map, start and ``args`` are checked."""
    problem = Problem(**fields)
    f, takes = problem.f, Function(1 if problem.args is None else 2)
    if not takes.is_kind(f):
        if problem.args is None and Function(2).is_kind(f):
            raise TypeError(f"f must take z only, got {shown(f)}: give the second one as args=")
        takes("f", f)  # refuses it
    check_start("z0", problem.z0)
    check_rows("args", problem.args, len(problem.z0))
    return problem


class AllTokens(Found):
    """What a solve has found of the whole batch, where all tokens of a row are iterated together.

    The point of a row that has ended no longer changes, as long as it passes. With ``args``, of
    which rows can be taken, such rows are stored and removed once they are a quarter of the batch.
    """

    def __init__(self, problem: Problem) -> None:
        batch, tokens = len(problem.z0), math.prod(problem.z0.shape[1:-1])
        super().__init__(problem, length=tokens, width=tokens, room=tokens)
        self.args, self.evaluations_alone = problem.args, 0
        self.status = np.full(batch, int(Status.MAX_STEPS_REACHED))
        self.iterations, self.updates = np.zeros((2, batch), dtype=np.int64)
        self.stored: Any = None  # value and aux, from the first removal of rows on

    @property
    def none_removed(self) -> bool:
        """Whether every row of the batch is still evaluated."""
        return self.stored is None

    @property
    def ended(self) -> np.ndarray:
        """Which of the rows that are evaluated have ended."""
        return ~self.running[self.window.rows]

    @property
    def releases(self) -> bool:
        """Whether a row that is evaluated has ended."""
        return bool(self.ended.any())

    def judge(self, z: State, fz: State) -> bool:
        """Decide which rows have ended."""
        window, rows, stop = self.window, self.window.rows, self.problem.stop
        last = self.evaluations >= window.budget
        checks = last or self.evaluations % stop.check_every == 0
        # the first measurement is the scale of later ones, whether it decides anything or not;
        # without a tolerance the first check sets it, and no other transfer is worth its time
        sets_scale = stop.has_tolerance and window.fresh.all()
        if not (checks or sets_scale):
            return False
        numbers = on_host(window.measure(z, fz, self.length))
        passed, sound = window.judge(numbers, torch.finfo(z.dtype).eps)
        self.numbers[:, rows] = numbers[:2]
        if not checks:
            return False
        passed, sound = passed.all(axis=1), sound.all(axis=1)
        if self.none_removed and self.releases:
            # a row goes on if others have moved it, as a mean over them does
            resumed = rows[(self.status[rows] == Status.CONVERGED) & ~passed]
            self.running[resumed], self.status[resumed] = True, Status.MAX_STEPS_REACHED
        ends_now = self.running[rows] & (last | passed | ~sound)
        self.status[rows[ends_now & passed]] = Status.CONVERGED
        self.status[rows[ends_now & ~sound]] = Status.DIVERGED
        self.iterations[rows[ends_now]] = self.evaluations
        self.running[rows[ends_now]] = False
        return True

    def release(self, z: State, fz: State, aux: Any, proposal: State) -> NextPoint:
        """Freeze the rows that have ended, or store and remove them."""
        ended, problem = self.ended, self.problem
        z_next = torch.where(per_row(on_device(ended, self.device), z), z, proposal)
        if self.args is None or 4 * ended.sum() < len(ended):
            return z_next, None
        if self.none_removed:
            check_put("aux", aux)
            fz, aux = map_tensors(torch.clone, (fz, aux))  # a map may fill the same buffers again
            if not isinstance(problem.args, TokenArgs):  # models check their backbones
                stay = on_device(np.flatnonzero(~ended), self.device)
                self.evaluations_alone = check_independent(
                    problem.f, z, self.args, fz, stay, problem.has_aux
                )
        self.store(z, fz, aux)
        staying = self.window.keep(~ended, self.device)
        z_next, self.args = take((z_next, self.args), staying)
        return z_next, staying

    def store(self, z: State, fz: State, aux: Any) -> None:
        """Store what the rows that are evaluated return; those that go on are overwritten later."""
        rows = self.window.rows
        diverged = self.status[rows] == Status.DIVERGED
        at_point = diverged
        if self.problem.returns_tested:
            at_point = diverged | (self.status[rows] == Status.CONVERGED)
        places = on_device(rows, self.device)
        start = self.problem.z0[places] if diverged.any() else z  # only read where a row diverged
        new = returned_value(z, fz, at_point, diverged, start), aux
        self.stored = new if self.stored is None else put(self.stored, places, new)
        self.updates[rows] = self.evaluations

    def solution(self, z: State, fz: State, aux: Any) -> Solution:
        """Store the end of the last rows."""
        self.store(z, fz, aux)
        arrays = self.status, self.iterations, self.updates
        status, steps, updates = (on_device(x, self.device) for x in arrays)
        evaluations = self.evaluations + self.evaluations_alone
        stats = SolveStats(steps, self.residual(), evaluations, updates)
        # on a CPU the tensor shares its memory with the array
        return Solution(self.stored[0], status, stats, self.status.copy(), self.stored[1])


def iterate(problem: Problem, found: Found, z: State) -> Solution:
    """Iterate from ``z`` until every row has ended, and return what was ``found``.

    Gradients pass where the caller has enabled them.
    """
    solver, stop, window = problem.solver, problem.stop, found.window

    def evaluated(z: State) -> tuple[State, Any]:
        found.evaluations += 1
        return evaluate(problem.f, z, found.args, has_aux=problem.has_aux)

    # a solver with a loop of its own runs it in begin(), and its last evaluation is remembered
    remembered = window.remembered(evaluated)
    z, memory = solver.begin(remembered, z, stop)
    first = True
    while True:
        fz, aux = evaluated(z)
        checked_now = found.judge(z, fz)
        if checked_now and problem.callback is not None:
            counts = found.evaluations, stop.max_steps, int(found.running.sum())
            problem.callback(Progress(*counts, found.residual()))
        if first:
            check_rows("aux", aux, len(z))
        if not found.running.any():
            return found.solution(z, fz, aux)
        proposal, memory = next_point(solver, z, fz, memory)
        if first and problem.args is not None:
            check_rows(f"the state of {type(solver).__name__}", memory, len(z))
        first = False
        if not found.releases:
            z = proposal
        else:
            z, staying = found.release(z, fz, aux, proposal)
            if staying is not None:
                memory = take(memory, staying)
            if solver.owns_loop:
                # rows that have ended and stay are solved once more
                z, memory = solver.begin(remembered, z, stop)
            else:  # something to do only where windows have moved
                memory = window.carry(memory, z)
        del fz, proposal, aux  # not held while the map is evaluated
