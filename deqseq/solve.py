"""Solving: the map, the solver and the stopping rule meet in the loop."""

from dataclasses import replace
from functools import partial
from typing import Any, Required, TypedDict

import torch

from deqseq.arguments import check_callable, check_type, checked
from deqseq.evaluate import autocast_dtype, check_start, check_transforms, in_autocast
from deqseq.loop import Callback, iterate
from deqseq.moving import MovingWindows
from deqseq.rows import check_rows
from deqseq.solution import Solution, warn_failed, worst_token
from deqseq.solvers.base import Solver
from deqseq.stop import Stop
from deqseq.sweeps import Sweep
from deqseq.tokens import TokenArgs
from deqseq.types import FixedPointMap, State
from deqseq.windows import AllTokens


class SolveCall(TypedDict, total=False):
    """Keyword arguments of :func:`solve`, which gradient estimators hand on."""

    solver: Required[Solver[Any]]
    stop: Required[Stop]
    args: Any
    has_aux: bool
    sweep: Sweep | None
    callback: Callback | None


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
        tensor([1, 3])
    """
    check_callable("f", f, 1 if args is None else 2)
    solution = run_solve(
        f, z0, solver=solver, stop=stop, args=args, has_aux=has_aux, sweep=sweep, callback=callback
    )
    warn_failed(solution.status, stop)
    return solution


def run_solve(
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
    """:func:`solve` without its warning: for callers that report failures themselves."""
    check_transforms()
    check_start("z0", z0)
    check_rows("args", args, len(z0))
    if sweep is None or sweep.block is None:
        windows = AllTokens(z0, args, stop, solver)
    else:
        check_type("args", args, TokenArgs)
        if solver.owns_loop and sweep.window > 1:
            raise ValueError(
                f"{solver} solves a block on its own, and cannot begin afresh in a window of "
                f"{sweep.window} blocks: "
                "take Simultaneous(), Chunked(size) or Sequential()"
            )
        args.check_tokens(z0.shape[1])
        windows = MovingWindows(z0, args, stop, solver, sweep)
    solution = iterate(f, solver, windows, has_aux=has_aux, callback=callback)
    if sweep is None:
        solution = replace(
            solution, stats=replace(solution.stats, residual=worst_token(solution.stats.residual))
        )
    call = {"args": args, "has_aux": has_aux, "autocast": autocast_dtype(z0.device)}
    return replace(solution, again=partial(_again, f, z0, solver=solver, stop=stop, **call))


def _again(
    f: FixedPointMap,
    z0: State,
    *,
    autocast: torch.dtype | None,
    start: State | None = None,
    **call: Any,
) -> Solution:
    """The same solve in another way, without gradients, for :meth:`Solution.explain`."""
    # as a decorator, inside torch.compile, no_grad would stay switched on for good
    with torch.no_grad(), in_autocast(z0.device, autocast):
        return run_solve(f, z0 if start is None else start, **call)
