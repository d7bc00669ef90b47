"""Sweeps that solve chunk after chunk, each to the end before the next begins."""

from dataclasses import dataclass, replace

from deqseq.solution import Solution
from deqseq.solve import Callback, solve
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.sweeps.base import Sweep, Swept, TokenMap, counted, joined, refuse_trace
from deqseq.types import State


@dataclass(frozen=True)
class Simultaneous(Sweep):
    """All tokens together: parallel over the sequence, as the paper trains.

    The number of self-iterations grows with the length where later tokens wait for earlier ones.

    Example:
        >>> import torch, deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4))
        >>> model(torch.ones(2, 3, 4), sweep=dq.Simultaneous()).stats.steps.shape     # a number a row
        torch.Size([2])
    """

    def solve(
        self,
        f: TokenMap,
        z0: State,
        *,
        solver: Solver | OutsideSolver,
        stop: Stop,
        trace: bool = False,
        callback: Callback | None = None,
        keep_cache: bool = False,
    ) -> Swept:
        chunk = f.first(f.length, recording=keep_cache)
        solution = solve(chunk, z0, solver=solver, stop=stop, trace=trace, callback=callback)
        return settled_together(chunk, solution, keep_cache)


def settled_together(f: TokenMap, solution: Solution, keep_cache: bool) -> Swept:
    """A solution of all tokens of ``f``, and what they leave behind, if that is wanted."""
    cache, again = f.settled(f.length, solution) if keep_cache else (None, None)
    solution = counted(solution, again)
    updates = solution.stats.updates[:, None].expand(-1, f.length)
    return Swept(replace(solution, stats=replace(solution.stats, updates=updates)), cache)


@dataclass(frozen=True)
class Chunked(Sweep):
    """Chunks of a fixed size, left to right.

    Args:
        size: tokens a chunk, at least 1.

    Raises:
        ValueError: a size below 1.

    Example:
        >>> import torch, deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4))
        >>> model(torch.ones(2, 3, 4), sweep=dq.Chunked(2)).stats.steps.shape      # a number a token
        torch.Size([2, 3])
    """

    size: int

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or self.size < 1:
            raise ValueError(f"Chunked.size must be an integer >= 1, got {self.size!r}")

    def solve(
        self,
        f: TokenMap,
        z0: State,
        *,
        solver: Solver | OutsideSolver,
        stop: Stop,
        trace: bool = False,
        callback: Callback | None = None,
        keep_cache: bool = False,
    ) -> Swept:
        refuse_trace(self, trace)
        solutions, cache = [], None
        for start in z0.split(self.size, dim=1):
            size, last = start.shape[1], start.shape[1] == f.length
            chunk = f.first(size, recording=keep_cache or not last)
            solutions.append(solve(chunk, start.contiguous(), solver=solver, stop=stop, callback=callback))
            if keep_cache or not last:
                cache, again = chunk.settled(size, solutions[-1])
                f, solutions[-1] = f.beyond(size, cache), counted(solutions[-1], again)
        return Swept(joined(solutions), cache if keep_cache else None)


@dataclass(frozen=True)
class Sequential(Sweep):
    """Token by token: the model run as the recurrent network it is.

    Example:
        >>> import torch, deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4))
        >>> model(torch.ones(2, 3, 4), sweep=dq.Sequential()).stats.steps.shape
        torch.Size([2, 3])
    """

    def solve(
        self,
        f: TokenMap,
        z0: State,
        *,
        solver: Solver | OutsideSolver,
        stop: Stop,
        trace: bool = False,
        callback: Callback | None = None,
        keep_cache: bool = False,
    ) -> Swept:
        refuse_trace(self, trace)
        return Chunked(1).solve(f, z0, solver=solver, stop=stop, callback=callback, keep_cache=keep_cache)
