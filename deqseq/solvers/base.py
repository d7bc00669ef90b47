"""What a solver is: one step of an algorithm, and nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from deqseq.rows import put, tensors_of
from deqseq.types import RowIndex, State

S = TypeVar("S")


class Solver(ABC, Generic[S]):
    """One step of a fixed-point algorithm. A solver object is its configuration: a frozen dataclass.

    The loop in :func:`deqseq.solve` evaluates the map, measures, freezes, stops and keeps the best iterate; a
    solver only proposes the next point. It never calls the map, so that evaluation counts are exact, and treats
    every row on its own, so that a row's answer does not depend on the rest of its batch.

    To write your own, subclass it (see :class:`deqseq.Anderson` for one with a memory):

    Example:
        >>> from dataclasses import dataclass
        >>> @dataclass(frozen=True)
        ... class Halfway(Solver[None]):
        ...     def init(self, z0): return None
        ...     def step(self, z, fz, state): return (z + fz) / 2, None
        >>> import torch
        >>> from deqseq.solve import solve
        >>> from deqseq.stop import Stop
        >>> f = lambda z: 1 - z     # a limit cycle of two steps for plain iteration
        >>> solve(f, torch.zeros(1, 1), solver=Halfway(), stop=Stop()).value
        tensor([[0.5000]])
    """

    @abstractmethod
    def init(self, z0: State) -> S:
        """The memory of the algorithm before its first step.

        Args:
            z0: where the solve starts, ``(batch, *event)``.

        Returns:
            None, or a tuple, named tuple or dataclass of tensors with a row for each row of ``z0``; the loop removes
            rows of it by :func:`deqseq.take`.
        """

    @abstractmethod
    def step(self, z: State, fz: State, state: S) -> tuple[State, S]:
        """The next point, and the memory that goes with it.

        Args:
            z: the point that was evaluated, ``(batch, *event)``; not always the one proposed last, because the
                loop freezes converged rows and tokens.
            fz: the map at ``z``, ``(batch, *event)``.
            state: the memory so far.

        Returns:
            The next point to evaluate, of the same shape and dtype, and the new memory.
        """

    def restart(self, state: S, z: State, rows: RowIndex) -> S:
        """The memory in which some rows begin afresh, as the rows of a sliding window do that have moved.

        Write your own if the first step changes shapes or numbers in the memory.

        Args:
            state: the memory so far.
            z: the next point to evaluate, ``(batch, *event)``.
            rows: those that begin afresh, ``(rows,)``.

        Returns:
            A memory from which these rows go on as after :meth:`init` of their ``z``, and the others as before.

        Raises:
            NotImplementedError: the memory has another shape than before the first step.
        """
        new = self.init(z[rows])
        if [x.shape[1:] for x in tensors_of(state)] != [x.shape[1:] for x in tensors_of(new)]:
            raise NotImplementedError(
                f"the memory of {self} has another shape than before its first step, so some rows alone cannot begin "
                "afresh, as in a sliding window: write restart(state, z, rows)"
            )
        return put(state, rows, new)


class ExternalSolver(ABC):
    """A solver of another library, which owns its loop.

    :func:`deqseq.solve` hands it a map that counts and monitors every evaluation, and ends the run when the
    stopping rule says so; what it returns is ignored. Rows are neither frozen nor removed inside it.

    Example:
        >>> import torch, deqseq as dq
        >>> class TheirLoop(ExternalSolver):
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
            f: the map, ``(batch, *event) -> (batch, *event)``. The exception by which it ends the run
                must not be caught.
            z0: the start, ``(batch, *event)``.
            max_steps: the budget.

        Returns:
            Anything; it is ignored.
        """
