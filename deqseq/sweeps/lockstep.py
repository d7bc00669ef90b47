"""A fixed number of iterations, each with a cache of its own."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deqseq.backbones.base import Backbone, Cache
from deqseq.evaluate import evaluate
from deqseq.gradients.base import checkpointed
from deqseq.gradients.unrolled import Unrolled
from deqseq.norms import measure
from deqseq.solution import Solution, SolveStats, Status
from deqseq.solve import Callback, Progress, next_point
from deqseq.solvers.base import ExternalSolver, Solver
from deqseq.stop import Stop
from deqseq.sweeps.base import Lockstep, Sweep
from deqseq.sweeps.tokens import TokenArgs, advance, token_map
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


def backbone_cache(cache: Cache | None, sweep: Sweep) -> Cache | None:
    """A cache as the backbone knows it: where there is one per iteration, the first.

    Raises:
        ValueError: a cache of another sweep.
    """
    steps = len(cache.steps) if isinstance(cache, LockstepCache) else None
    if cache is not None and steps != (sweep.steps if isinstance(sweep, Lockstep) else None):
        made = "another sweep" if steps is None else f"Lockstep({steps})"
        raise ValueError(f"cache must be of the sweep that goes on with it, {sweep}, got one of {made}")
    return cache.steps[0] if isinstance(cache, LockstepCache) else cache


def run_lockstep(
    backbone: Backbone[Any],
    args: TokenArgs,
    z0: Sequence,
    solver: Solver[Any] | ExternalSolver,
    steps: int,
    unrolled: Unrolled | None,
    need_cache: bool,
    callback: Callback | None,
) -> tuple[Solution, Cache | None]:
    """Iterate ``steps`` times, with a graph if ``unrolled``; ``args.cache`` is a :class:`LockstepCache`."""
    if isinstance(solver, ExternalSolver):
        raise ValueError(f"Lockstep iterates itself: solver must be one of deqseq's, got {solver}")
    before = args.cache.steps if isinstance(args.cache, LockstepCache) else (None,) * steps
    first = steps if unrolled is None else steps - min(unrolled.last or steps, steps)  # of those with a graph
    f, length, after, stop = token_map(backbone, need_aux=need_cache), z0.shape[1], [], Stop.exactly(steps)
    g = checkpointed(f) if unrolled is not None and unrolled.checkpoint else f
    z, fz, state, seen = z0, z0, solver.init(z0), measure(z0, z0, stop)
    for step, cache in enumerate(before):
        with torch.no_grad() if step < first else nullcontext():
            if step > 0:
                z, state = next_point(solver, z, fz, state)
            own = args._replace(cache=cache).slice(0, length, length)
            fz, aux = evaluate(g if step >= first else f, z, own, has_aux=True)
        if need_cache:
            after.append(advance(backbone, own, aux, length))
        if callback is not None or step + 1 == steps:
            seen = measure(z, fz, stop)
        if callback is not None:
            callback(Progress(step + 1, steps, len(z), seen.residual))
    status = torch.where(seen.difference.isfinite(), int(Status.MAX_STEPS_REACHED), int(Status.DIVERGED))
    counts = torch.full_like(status, steps)
    stats = SolveStats(counts, seen.residual, steps, counts[:, None].expand(-1, length))
    return Solution(fz, status, stats), LockstepCache(tuple(after)) if need_cache else None
