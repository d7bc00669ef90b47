"""What a sweep is, and what it needs of a map whose tokens can be solved apart."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from deqseq.solution import Solution, SolveStats
from deqseq.solve import Callback
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.types import RowIndex, State


@runtime_checkable
class TokenMap(Protocol):
    """The fixed-point map of the tokens that are not settled yet, given those that are.

    States are ``(batch, length, dim)``. A window is solved by calling it; while it is being called it remembers what
    its last evaluation computed, and from that it can say what has settled, without another evaluation.

    Example:
        >>> import deqseq as dq
        >>> from deqseq.backbones import BackboneMap
        >>> backbone, x = dq.Affine(4), torch.ones(2, 6, 4)
        >>> f = BackboneMap(backbone, backbone.inject(x))
        >>> isinstance(f, TokenMap), f.first(2, recording=True).length
        (True, 2)
    """

    @property
    def length(self) -> int:
        """How many tokens are left."""
        ...

    def __call__(self, z: State, /) -> State:
        """The map's value at ``z``, of the same shape."""
        ...

    def select(self, rows: RowIndex, /) -> "TokenMap":
        """The same map for the named ``rows`` alone, ``(rows,)``."""
        ...

    def first(self, tokens: int, /, *, recording: bool) -> "TokenMap":
        """The map of the first ``tokens``, whatever comes after them; ``recording`` enables settling."""
        ...

    def settled(self, tokens: int, /, solution: Solution | None = None) -> tuple[Any, RowIndex | None]:
        """What the first few tokens leave behind, from the evaluation at which they passed.

        Rows that failed in ``solution`` are evaluated once more, at the value that it gives them.

        Args:
            tokens: how many of the first have settled.
            solution: of the window; None: all rows passed at its last evaluation.

        Returns:
            A cache, and which rows took one more evaluation; None: no row.
        """
        ...

    def beyond(self, tokens: int, cache: Any, /) -> "TokenMap":
        """The map of the tokens after the first ``tokens``, which have settled and left ``cache``."""
        ...


@dataclass(frozen=True)
class Swept:
    """What a sweep found.

    Attributes:
        solution: of the whole sequence, statistics per token (per row for the simultaneous sweep).
        cache: what the sequence leaves behind, if it was asked for.
    """

    solution: Solution
    cache: Any | None


class Sweep(ABC):
    """An order in which the tokens of a sequence are solved, each against the settled tokens before it.

    All sweeps of a causal map find the same fixed point, as far as the tolerance allows and the map has only one;
    they differ in how much work it takes and in how much of it is parallel. A sweep object is its configuration: a
    frozen dataclass.

    Example:
        >>> import deqseq as dq
        >>> model = dq.ImplicitModel(dq.Affine(4), stop=dq.Stop(rtol=1e-6))
        >>> x, sweeps = torch.ones(2, 6, 4), (dq.Simultaneous(), dq.Chunked(2), dq.Sliding(4), dq.Sequential())
        >>> values = [model(x, sweep=sweep).value for sweep in sweeps]
        >>> all(torch.allclose(values[0], value, atol=1e-4) for value in values)
        True
    """

    @abstractmethod
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
        """Solve for all tokens of ``f``.

        Args:
            f: the map.
            z0: where each token starts, ``(batch, length, dim)``.
            solver: the algorithm.
            stop: tolerances, budget and granularity; the budget is that of a chunk, or of a commit.
            trace: whether to keep residuals; with the simultaneous sweep only.
            callback: called at every look; with another sweep the steps begin anew for each chunk or commit.
            keep_cache: whether what the sequence leaves behind is wanted.

        Returns:
            Solution and cache.

        Raises:
            ValueError: a stopping rule or a trace that the sweep cannot honour.
        """


def refuse_trace(sweep: Sweep, trace: bool) -> None:
    """Residuals of chunks do not line up in one trace.

    Raises:
        ValueError: a trace was asked for.
    """
    if trace:
        raise ValueError(f"trace=True needs the Simultaneous sweep, got {sweep}: chunks have traces of their own")


def counted(solution: Solution, again: RowIndex | None) -> Solution:
    """The solution, with one more evaluation of some rows in its statistics."""
    if again is None:
        return solution
    stats = solution.stats
    updates = stats.updates.index_add(0, again, torch.ones_like(stats.updates[again]))
    return replace(solution, stats=replace(stats, evaluations=stats.evaluations + 1, updates=updates))


def joined(solutions: list[Solution]) -> Solution:
    """One solution for the whole sequence, its statistics per token.

    Args:
        solutions: of chunks, left to right; statistics per row or per token.
    """

    def per_token(numbers: list[Tensor]) -> Tensor:
        sizes = [solution.value.shape[1] for solution in solutions]
        pairs = zip(numbers, sizes, strict=True)
        return torch.cat([x[:, None].expand(-1, size) if x.ndim == 1 else x for x, size in pairs], dim=1)

    every = [solution.stats for solution in solutions]
    forced = per_token([~s.converged if s.stats.forced is None else s.stats.forced for s in solutions])
    stats = SolveStats(
        per_token([stats.steps for stats in every]),
        per_token([stats.residual for stats in every]),
        sum(stats.evaluations for stats in every),
        per_token([stats.updates for stats in every]),
        forced=forced,
    )
    status = torch.stack([solution.status for solution in solutions]).amax(dim=0)
    return Solution(torch.cat([solution.value for solution in solutions], dim=1), status, stats)
