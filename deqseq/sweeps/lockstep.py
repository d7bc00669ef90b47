"""A fixed number of iterations, each with a cache of its own."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deqseq.backbones.base import Backbone, Cache
from deqseq.config import SolveConfig
from deqseq.evaluate import evaluate
from deqseq.gradients.base import checkpointed
from deqseq.gradients.unrolled import Unrolled
from deqseq.judge import Judge
from deqseq.norms import measure
from deqseq.solution import Solution, SolveStats, Status
from deqseq.solve import Callback, Progress, next_point
from deqseq.solvers.base import ExternalSolver
from deqseq.stop import Stop
from deqseq.sweeps.base import Lockstep, Sweep
from deqseq.sweeps.tokens import TokenArgs, advance, readout, token_map
from deqseq.types import Sequence


@dataclass(frozen=True)
class LockstepCache(Cache):
    """What each iteration keeps of the committed tokens.

    Attributes:
        steps: the backbone's cache of the first iteration, of the second, and so on.
    """

    steps: tuple[Cache, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that is kept; rows first."""
        return tuple(tensor for step in self.steps for tensor in step.tensors())


def last_iteration(cache: Cache | None) -> Cache | None:
    """A cache as the backbone knows it: where there is one per iteration, the last."""
    return cache.steps[-1] if isinstance(cache, LockstepCache) else cache


def backbone_cache(cache: Cache | None, sweep: Sweep) -> Cache | None:
    """A cache as the backbone knows it: where there is one per iteration, the first.

    Raises:
        ValueError: a cache of another sweep.
    """
    steps = len(cache.steps) if isinstance(cache, LockstepCache) else None
    if cache is not None and steps != (sweep.steps if isinstance(sweep, Lockstep) else None):
        made = "another sweep" if steps is None else f"Lockstep({steps})"
        raise ValueError(
            f"cache was made by {made}, but this call solves by {sweep}: go on with the sweep that made it"
        )
    return cache.steps[0] if isinstance(cache, LockstepCache) else cache


def run_lockstep(
    backbone: Backbone[Any],
    args: TokenArgs,
    z0: Sequence,
    config: SolveConfig,
    unrolled: Unrolled | None,
    need_cache: bool,
    callback: Callback | None,
) -> tuple[Solution, Cache | None]:
    """Iterate as often as the sweep says, with a graph if ``unrolled``; ``args.cache`` is a :class:`LockstepCache`."""
    assert isinstance(config.sweep, Lockstep)
    solver, steps = config.solver, config.sweep.steps
    if isinstance(solver, ExternalSolver):
        raise ValueError(f"Lockstep iterates itself: solver must be one of deqseq's, got {solver}")
    exits = None if config.stop.exit is None else _Exits(config.stop, args)
    before = args.cache.steps if isinstance(args.cache, LockstepCache) else (None,) * steps
    first = steps if unrolled is None else steps - min(unrolled.last or steps, steps)  # of those with a graph
    f, length, after, stop = token_map(backbone, need_aux=need_cache), z0.shape[1], [], Stop.exactly(steps)
    g = checkpointed(f) if unrolled is not None and unrolled.checkpoint else f
    z = fz = (z0.detach() if first else z0).contiguous()
    state = solver.init(z)
    for step, cache in enumerate(before):
        with torch.no_grad() if step < first else nullcontext():
            if step > 0:
                z, state = next_point(solver, z, fz, state)
            own = args._replace(cache=cache).with_room(length)
            fz, aux = evaluate(g if step >= first else f, z, own, has_aux=True)
        if need_cache:
            after.append(advance(backbone, own, aux, length))
        if callback is not None:
            callback(Progress(step + 1, steps, len(z), measure(z, fz, stop).residual))
        if exits is not None:
            exits.file(z, fz, step + 1)
    seen = measure(z, fz, stop)
    status = torch.where(seen.difference.isfinite(), int(Status.MAX_STEPS_REACHED), int(Status.DIVERGED))
    counts = torch.full_like(status, steps)
    unknown, updates = torch.full_like(seen.residual, torch.inf), counts[:, None].expand(-1, length)
    stats = SolveStats(counts, seen.residual, unknown, steps, updates)
    solution = Solution(fz, status, stats)
    solution = solution if exits is None else exits.applied(solution)
    return solution, LockstepCache(tuple(after)) if need_cache else None


class _Exits:
    """The value of each token at the first iteration at which the exit rule lets it go."""

    def __init__(self, stop: Stop, args: TokenArgs) -> None:
        self._judge, self._args = Judge(stop, None if args.head is None else readout), args
        self._exited: Tensor | None = None  # tokens
        self._of: tuple[Tensor, Tensor, Tensor] | None = None  # values, iterations and residuals

    def file(self, z: Sequence, fz: Sequence, step: int) -> None:
        """After evaluation number ``step``."""
        done = self._judge.done(fz, fz.shape[1], self._args)
        residual = measure(z, fz, Stop(per="token")).residual
        now = (fz, torch.full_like(done, step, dtype=torch.int64), residual)
        if self._exited is None or self._of is None:
            self._exited, self._of = done, now
            return
        value, iterations, own = (
            torch.where(self._exited[..., None] if new.ndim == 3 else self._exited, old, new)
            for new, old in zip(now, self._of, strict=True)
        )
        self._of, self._exited = (value, iterations, own), self._exited | done

    def applied(self, solution: Solution) -> Solution:
        """The solution with these values; a row has exited if each of its tokens has."""
        assert self._of is not None and self._exited is not None
        value, iterations, residual = self._of
        exited = self._exited if self._args.mask is None else self._exited | ~self._args.mask
        spent = solution.status == Status.MAX_STEPS_REACHED
        status = solution.status.masked_fill(exited.all(dim=1) & spent, int(Status.EXITED))
        unknown = torch.full_like(residual, torch.inf)
        stats = replace(solution.stats, iterations=iterations, residual=residual, error=unknown)
        return Solution(value, status, stats)
