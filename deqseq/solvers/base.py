"""What a solver is: one step of an algorithm, and nothing else."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Generic, TypeVar

from deqseq.arguments import check_like, versions
from deqseq.rows import check_put, has_numbers, put, tensors_of
from deqseq.stop import Stop
from deqseq.types import RowIndex, State

S = TypeVar("S")


class Solver(ABC, Generic[S]):
    """One step of a fixed-point algorithm. Write a solver that has settings as a frozen dataclass.

    The loop in :func:`deqseq.solve` evaluates the map, measures residuals, freezes rows and stops;
    a solver only proposes the next point. It never calls the map, so that evaluation counts are
    exact, and it treats every row independently.

    Example:
        A solver of your own; :class:`deqseq.Anderson` is one with a memory.

        >>> from deqseq import Solver
        >>> import torch, deqseq as dq
        >>> class Halfway(Solver[None]):
        ...     def init(self, z0):
        ...         return None
        ...
        ...     def step(self, z, fz, state):
        ...         return (z + fz) / 2, None
        >>> f = lambda z: 1 - z  # a limit cycle of two steps for plain iteration
        >>> dq.solve(f, torch.zeros(1, 1), solver=Halfway(), stop=dq.Stop()).value
        tensor([[0.5000]])
    """

    combines: ClassVar[bool] = False
    """Whether a step combines several past points, as that of :class:`deqseq.Anderson` does.

    Such a step can jump to a distant point at which the relative residual is small. So after its
    first check a token converges only if it passes two consecutive checks, and has not grown to
    more than 1e4 times its first size. Such a solver can also converge where the map expands, so
    that ``z`` meets the tolerance and ``f(z)`` does not. So models return the ``z`` of a row that
    converged, as :func:`deqseq.solve` does with every solver; with other solvers, ``f(z)``.
    """

    owns_loop: ClassVar[bool] = False
    """Whether :meth:`begin` runs the whole solve; one evaluation follows, and a sweep needs
    ``window=1``.
    """

    per_token: ClassVar[bool] = False
    """Whether the memory's tensors are ``(rows, tokens, ...)`` or ``(rows, 1, ...)``.

    Such a memory moves along with the tokens of a window. If the input of a token changes, only
    this token restarts; without ``per_token``, its whole row restarts.
    """

    @abstractmethod
    def init(self, z0: State) -> S:
        """The memory of the algorithm before its first step.

        Args:
            z0: the start of the solve, ``(batch, *event)``.

        Returns:
            None, or a tuple, named tuple or dataclass of tensors with a row for each row of ``z0``.
            The loop removes rows from it by :func:`deqseq.take`.
        """

    @abstractmethod
    def step(self, z: State, fz: State, state: S) -> tuple[State, S]:
        """The next point, and the new memory.

        Args:
            z: the point that was evaluated, ``(batch, *event)``. It may differ from the last
                proposal, because the loop freezes rows that have ended.
            fz: the map at ``z``, ``(batch, *event)``.
            state: the memory so far.

        Returns:
            The next point to evaluate, of the same shape and dtype, and the new memory.
        """

    def restart(self, state: S, z: State, rows: RowIndex) -> S:
        """The memory ``state`` in which some ``rows``, int64 ``(rows,)``, begin anew, because their
        windows have moved.

        Override it if the first step changes shapes or numbers in the memory; ``z`` is the next
        point to evaluate, ``(batch, *event)``.

        Raises:
            NotImplementedError: the memory has another shape than before the first step.
            TypeError: it contains plain numbers, which all rows share.
        """
        if has_numbers(state):
            raise TypeError(
                f"the memory of {type(self).__name__} must be tensors with a row for each row of "
                "z, got a number: some "
                "rows begin anew, as in a sliding window"
            )
        new = self.init(z[rows])
        if [x.shape[1:] for x in tensors_of(state)] != [x.shape[1:] for x in tensors_of(new)]:
            raise NotImplementedError(
                f"the memory of {type(self).__name__} has another shape than before its first "
                "step, so some rows "
                "cannot begin anew, as in a sliding window: write restart(state, z, rows)"
            )
        check_put(f"the memory of {type(self).__name__}", state)
        return put(state, rows, new)

    def begin(
        self, f: Callable[[State], tuple[State, Any]], z0: State, stop: Stop
    ) -> tuple[State, S]:
        """The point where the loop begins, and the memory there: ``z0`` and ``init(z0)``.

        ``f`` returns the map's value and ``aux``; only solvers that own their loop use it.
        """
        return z0, self.init(z0)


class ExternalSolver(Solver[None]):
    """A solver of another library, with a loop of its own.

    :meth:`run` solves one block of tokens after another, by default all tokens at once; a sweep
    with a larger ``window``, such as :class:`~deqseq.Sliding`, is a ValueError. Then deqseq
    evaluates the map once at the result, for value, residual, status and ``aux``. All evaluations
    are counted.

    Example:
        >>> from deqseq import ExternalSolver
        >>> import torch, deqseq as dq
        >>> class TheirLoop(ExternalSolver):
        ...     def run(self, f, z0, stop):
        ...         z = z0
        ...         for _ in range(stop.max_steps - 1):
        ...             z = f(z)
        ...         return z
        >>> dq.solve(torch.cos, torch.zeros(1), solver=TheirLoop(), stop=dq.Stop(rtol=1e-6)).value
        tensor([0.7391])
    """

    owns_loop = True

    @abstractmethod
    def run(self, f: Callable[[State], State], z0: State, stop: Stop) -> State:
        """Solve by up to ``stop.max_steps - 1`` evaluations of ``f``.

        Args:
            f: the map, ``(batch, *event) -> (batch, *event)``.
            z0: the start, ``(batch, *event)``; do not change it in place.
            stop: tolerances and budget.

        Returns:
            The point that was found, ``(batch, *event)``.
        """

    def init(self, z0: State) -> None:
        return None

    def step(self, z: State, fz: State, state: None) -> tuple[State, None]:
        return fz, None

    def begin(
        self, f: Callable[[State], tuple[State, Any]], z0: State, stop: Stop
    ) -> tuple[State, None]:
        before, name = versions(z0), f"{type(self).__name__}.run"

        def evaluated(z: State) -> State:
            check_like(f"the argument of f in {name}", z, z0, "z0")
            return f(z)[0]

        z = self.run(evaluated, z0, stop)
        check_like(name, z, z0, "z0")
        if versions(z0) != before:
            raise ValueError(f"{name} must not change z0 in place: it may be the caller's")
        return z, None
