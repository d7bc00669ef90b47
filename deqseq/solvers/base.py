"""What a solver is: one step of an algorithm, and nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from deqseq.types import RowIndex, State

S = TypeVar("S")


class Solver(ABC, Generic[S]):
    """One step of a fixed-point algorithm. A solver object is its configuration: a frozen dataclass.

    The loop in :func:`deqseq.solve` evaluates the map, measures, freezes, stops and keeps the best iterate; a
    solver only says where to look next. It never calls the map, so that evaluation counts are honest, and treats
    every row on its own, so that a row's answer never depends on its neighbours.

    Write your own by subclassing (see :class:`deqseq.Anderson` for one with a memory):

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Halfway(Solver[None]):
        ...     def init(self, z0): return None
        ...     def step(self, z, fz, state): return (z + fz) / 2, None
        ...     def select(self, state, rows): return None
        >>> import torch
        >>> from deqseq.solve import solve
        >>> from deqseq.stop import Stop
        >>> f = lambda z: 1 - z     # a limit cycle of two steps for plain iteration
        >>> solve(f, torch.zeros(1, 1), solver=Halfway(), stop=Stop()).value
        tensor([[0.5000]])
    """

    @abstractmethod
    def init(self, z0: State) -> S:
        """The memory of the algorithm before its first step: a small record of tensors, or None.

        Args:
            z0: where the solve starts, ``(batch, *event)``.

        Returns:
            The memory, whose tensors have a row for each row of ``z0``.
        """

    @abstractmethod
    def step(self, z: State, fz: State, state: S) -> tuple[State, S]:
        """The next point, and the memory that goes with it.

        Args:
            z: the point that was evaluated, ``(batch, *event)``; not always the one proposed last, because the
                loop holds converged rows and tokens where they are.
            fz: the map at ``z``, ``(batch, *event)``.
            state: the memory so far.

        Returns:
            The next point to evaluate, of the same shape and dtype, and the new memory.
        """

    @abstractmethod
    def select(self, state: S, rows: RowIndex) -> S:
        """The memory of the named rows alone, for when finished rows are dropped.

        Args:
            state: the memory of all rows.
            rows: positions of those that stay, ``(rows,)``.

        Returns:
            The memory of these rows, in this order.
        """


class OutsideSolver(ABC):
    """A solver of another library, which owns its loop.

    :func:`deqseq.solve` hands it a map that counts every evaluation, measures it and ends the run when the
    stopping rule says so; what it returns is ignored. Rows cannot be frozen or dropped inside it.

    Example:
        >>> import torch, deqseq as dq
        >>> class TheirLoop(OutsideSolver):
        ...     def run(self, f, z0, max_steps):
        ...         z = z0
        ...         for _ in range(max_steps):
        ...             z = f(z)
        >>> dq.solve(torch.cos, torch.zeros(1), solver=TheirLoop(), stop=dq.Stop(rtol=1e-6)).value
        tensor([0.7391])
    """

    @abstractmethod
    def run(self, f: Callable[[State], State], z0: State, max_steps: int) -> object:
        """Iterate ``f`` for up to ``max_steps`` evaluations.

        Args:
            f: the map, ``(batch, *event) -> (batch, *event)``; it may raise to end the run, which is not to be caught.
            z0: where to start, ``(batch, *event)``.
            max_steps: the budget.

        Returns:
            Whatever the other library does; nobody looks at it.
        """
