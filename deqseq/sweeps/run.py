"""Solving a sequence by a sweep: one loop over chunks, and one over the positions of a window."""

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deqseq.backbones.base import Backbone, Cache
from deqseq.config import SolveConfig
from deqseq.gradients.base import AttachedGradient, Gradient
from deqseq.gradients.unrolled import Unrolled
from deqseq.monitor import on_device, on_host
from deqseq.rows import take
from deqseq.solution import Solution, SolveStats
from deqseq.solve import Callback, SolveCall, iterate, next_point, solve
from deqseq.solvers.base import ExternalSolver
from deqseq.sweeps.base import Lockstep, Simultaneous, Sliding, Sweep
from deqseq.sweeps.lockstep import last_iteration, run_lockstep
from deqseq.sweeps.tokens import TokenArgs, advance, readout, token_map
from deqseq.sweeps.window import WindowMonitor
from deqseq.types import Sequence


def run_sweep(
    backbone: Backbone[Any],
    args: TokenArgs,
    z0: Sequence,
    config: SolveConfig,
    *,
    gradient: Gradient | None = None,
    need_cache: bool = False,
    trace: bool = False,
    callback: Callback | None = None,
    keep_value: bool = False,
    keep_aux: bool = False,
) -> tuple[Solution, Cache | None]:
    """Solve for all tokens, and attach ``gradient``: over the whole sequence at once, however it was solved.

    With ``keep_value``, an estimator that needs the fixed point alone changes the gradient, and not the value. With
    ``keep_aux``, the solution of the simultaneous sweep has what ``advance`` needs.

    Raises:
        ValueError: a trace, a stopping rule or a gradient that the sweep cannot offer, or a plan that does not fit the
            length.
        NotImplementedError: a backbone without ``advance`` that must commit tokens.
    """
    together = isinstance(config.sweep, Simultaneous)
    if (need_cache or keep_aux or not together) and type(backbone).advance is Backbone.advance:
        backbone.advance(None, None, 1)  # says what is missing, before anything is solved
    if not together:
        _check(config, gradient, trace, keep_aux)
    attached = gradient if isinstance(gradient, AttachedGradient) else None
    if isinstance(config.sweep, Sliding):
        with torch.no_grad():
            solution, cache = _slide(backbone, args, z0, config, need_cache, callback)
    elif isinstance(config.sweep, Lockstep):
        unrolled = gradient if isinstance(gradient, Unrolled) else None
        solution, cache = run_lockstep(backbone, args, z0, config, unrolled, need_cache, callback)
    else:
        inside = None if attached else gradient
        solution, cache = _chunks(backbone, args, z0, config, need_cache, callback, trace, inside, keep_aux)
    if attached is not None:
        if torch.is_autocast_enabled(z0.device.type):
            torch.clear_autocast_cache()  # older torch keeps casts made without a graph, which would cut weights off
        whole = args._replace(cache=last_iteration(args.cache)).with_room(z0.shape[1])
        value = attached.attach_to(token_map(backbone), whole, z0, solution, has_aux=True)
        solution = replace(solution, value=solution.value + (value - value.detach()) if keep_value else value)
    return solution, cache


def _chunks(
    backbone: Backbone[Any],
    args: TokenArgs,
    z0: Sequence,
    config: SolveConfig,
    need_cache: bool,
    callback: Callback | None,
    trace: bool = False,
    gradient: Gradient | None = None,
    keep_aux: bool = False,
) -> tuple[Solution, Cache | None]:
    """Solve chunk after chunk, each to its end before the next begins; one chunk may be solved with its gradient."""
    start, length = 0, z0.shape[1]
    joined = _Joined(length)
    for size in _checked_sizes(config.sweep, length):
        end = start + size
        commits = need_cache or end < length
        chunk, f = args.slice(start, end, length), token_map(backbone, need_aux=commits or keep_aux)
        call: SolveCall = {"args": chunk, "has_aux": True, "solver": config.solver, "stop": config.stop}
        call["trace"], call["callback"] = trace, callback
        call["readout"] = None if args.head is None else readout
        z = z0[:, start:end].contiguous()  # other strides would be compiled anew
        if gradient is not None:
            solution = gradient.apply(f, z, **call)
        else:
            with torch.no_grad():  # attention then writes its keys in place
                solution = solve(f, z, **call)
        if commits:
            args = args._replace(cache=advance(backbone, chunk, solution.aux, size))
        if isinstance(config.sweep, Simultaneous):
            return _per_row(solution, keep_aux), args.cache if need_cache else None
        joined.add(solution, start, end, chunk.mask)
        start = end
    return joined.solution(), args.cache if need_cache else None


def _slide(
    backbone: Backbone[Any],
    args: TokenArgs,
    z0: Sequence,
    config: SolveConfig,
    need_cache: bool,
    callback: Callback | None,
) -> tuple[Solution, Cache | None]:
    """Iterate a window over the first tokens of each row that have not converged; commit these, and move on."""
    assert isinstance(config.sweep, Sliding)
    batch, length = z0.shape[:2]
    ends = np.full(batch, length) if args.mask is None else on_host(args.mask.sum(dim=1))
    f, solver = token_map(backbone, need_aux=True), config.solver
    external = isinstance(solver, ExternalSolver)
    monitor = WindowMonitor(z0, config.stop, config.sweep.window, ends, together=external)
    args.check_tokens(length)
    z, state = monitor.states(), None
    while monitor.active_rows:
        window = args.gather(monitor)
        end = iterate(f, z, window, solver, monitor, state, has_aux=True, callback=callback)
        proposal, state = next_point(solver, end.z, end.fz, end.state)
        counts = monitor.commit(end.fz, proposal, end.evaluations)
        low, high = int(counts.min()), int(counts.max())
        if high and (need_cache or monitor.active_rows):  # 0: a solver of another library has ended early
            each = None if low == high else on_device(counts, z0.device)
            args = args._replace(cache=advance(backbone, window, end.aux, high, each))
        if (keep := monitor.stand(remove=not need_cache)) is not None:
            args, state = args._replace(cache=take(args.cache, keep)), take(state, keep)
        z, moved = monitor.states(), monitor.moved
        state = None if external or moved is None else solver.restart(state, z, moved)
    return monitor.solution(), args.cache if need_cache else None


def _check(config: SolveConfig, gradient: Gradient | None, trace: bool, keep_aux: bool) -> None:
    sweep = config.sweep
    if keep_aux:
        raise ValueError(f"return_uncommitted=True needs the Simultaneous sweep, got {sweep}: others commit as they go")
    if trace:
        raise ValueError(
            f"trace=True needs the Simultaneous sweep, got {sweep}: other sweeps keep no trace; use callback="
        )
    unrolls = isinstance(sweep, Lockstep) and isinstance(gradient, Unrolled)
    if gradient is not None and not isinstance(gradient, AttachedGradient) and not unrolls:
        raise ValueError(
            f"{type(gradient).__name__} differentiates the iteration itself and needs the Simultaneous sweep, got "
            f"{sweep}: take Phantom, OneStep or Implicit, which need the fixed point alone"
        )
    if config.stop.exit is not None and not isinstance(sweep, Lockstep):
        raise ValueError(f"Stop.exit={config.stop.exit} needs the Simultaneous or the Lockstep sweep, got {sweep}")
    if isinstance(sweep, Sliding) and config.stop.norm != "max_token":
        raise ValueError(f'Sliding tests each token: Stop.norm must be "max_token", got "{config.stop.norm}"')


def _checked_sizes(sweep: Sweep, length: int) -> list[int]:
    sizes = list(islice(sweep.sizes(length), length + 1))
    if min(sizes, default=0) < 1 or sum(sizes) != length:
        raise ValueError(f"{sweep}.sizes({length}) must be numbers >= 1 that add up to {length}, got {sizes}")
    return sizes


def _per_row(solution: Solution, keep_aux: bool) -> Solution:
    """The one solution of all tokens: statistics per row, but updates, which models count per token."""
    updates = solution.stats.updates[:, None].expand(-1, solution.value.shape[1])
    aux = solution.aux if keep_aux else None
    return replace(solution, stats=replace(solution.stats, updates=updates), aux=aux, problem=None)


class _Joined:
    """One solution for the whole sequence, its statistics per token; the chunks are copied and let go."""

    def __init__(self, length: int) -> None:
        self._length, self._evaluations = length, 0
        self._status: Tensor | None = None
        self._numbers: tuple[Tensor, ...] = ()  # states, and what is counted for each token

    def add(self, solution: Solution, start: int, end: int, real: Tensor | None) -> None:
        """The solution of the tokens from ``start`` up to ``end``, of which these are ``real`` (None: all)."""
        stats, status = solution.stats, solution.status
        forced = ~solution.converged if real is None else real & ~solution.converged[:, None]
        numbers = (solution.value, stats.iterations, stats.residual, stats.error, stats.updates, forced)
        if not self._numbers:
            self._numbers = tuple(x.new_empty(len(x), self._length, *x.shape[2:]) for x in numbers)
        for whole, x in zip(self._numbers, numbers, strict=True):
            whole[:, start:end] = x[:, None] if x.ndim == 1 else x
        self._status = status if self._status is None else torch.maximum(self._status, status)
        self._evaluations += stats.evaluations

    def solution(self) -> Solution:
        value, iterations, residual, error, updates, forced = self._numbers
        assert self._status is not None
        stats = SolveStats(iterations, residual, error, self._evaluations, updates, forced=forced)
        return Solution(value, self._status, stats)
