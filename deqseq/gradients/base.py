"""What a gradient estimator is: a way to give a fixed point a backward pass."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deqseq.evaluate import evaluate
from deqseq.solution import ConvergenceWarning, Solution, Status, describe_failure
from deqseq.solve import Callback, solve
from deqseq.solvers.base import OutsideSolver, Solver
from deqseq.stop import Stop
from deqseq.types import FixedPointMap, RowIndex, SelectableMap, State


class Gradient(ABC):
    """How a fixed point is differentiated. An estimator object is its configuration: a frozen dataclass.

    One that needs the fixed point alone is an :class:`AttachedGradient`; :class:`deqseq.Unrolled` is the one of the
    library that needs the iteration too.

    Example:
        >>> import deqseq as dq
        >>> class Frozen(Gradient):     # no gradient at all
        ...     def apply(self, f, z0, *, solver, stop, trace=False, callback=None):
        ...         with torch.no_grad():
        ...             return dq.solve(f, z0, solver=solver, stop=stop, trace=trace, callback=callback)
        >>> model = dq.ImplicitModel(dq.Affine(4), gradient=Frozen())
        >>> model(torch.ones(2, 3, 4)).value.requires_grad
        False
    """

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass evaluates the map again (activation checkpointing)."""
        return False

    @abstractmethod
    def apply(
        self,
        f: FixedPointMap,
        z0: State,
        *,
        solver: Solver | OutsideSolver,
        stop: Stop,
        trace: bool = False,
        callback: Callback | None = None,
    ) -> Solution:
        """Solve, and return a solution whose value carries this estimator's graph where gradients are enabled.

        Args:
            f: the map; what it closes over (parameters, an injection) receives gradients.
            z0: where to start, ``(batch, *event)``.
            solver: the algorithm.
            stop: tolerances, budget and granularity.
            trace: whether to keep the residual at every look.
            callback: called at every look.

        Returns:
            The solution; status and statistics are those of the solve.
        """


class AttachedGradient(Gradient):
    """An estimator that needs the fixed point alone: solve without a graph by any means, then attach one.

    The fixed point does not depend on where the solve began, so a starting point that wants a gradient is an error.

    Example:
        >>> import deqseq as dq
        >>> class TwoSteps(AttachedGradient):
        ...     def attach(self, f, z_star): return f(f(z_star.detach()))
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> solution = dq.fixed_point(lambda z: a * z + 1, torch.zeros(1, 1), gradient=TwoSteps(),
        ...                           stop=dq.Stop(rtol=1e-6))
        >>> solution.value.sum().backward()
        >>> round(a.grad.item(), 3)     # z* = 2; one step gives 2, the exact gradient is 4
        3.0
    """

    @abstractmethod
    def attach(self, f: FixedPointMap, z_star: State) -> State:
        """The fixed point with this estimator's graph, built in the caller's gradient mode.

        Args:
            f: the map that ``z_star`` is a fixed point of.
            z_star: the fixed point, ``(batch, *event)``; its own history, if any, is cut.

        Returns:
            A tensor of the same shape: ``z_star`` up to the solve's tolerance.
        """

    def apply(
        self,
        f: FixedPointMap,
        z0: State,
        *,
        solver: Solver | OutsideSolver,
        stop: Stop,
        trace: bool = False,
        callback: Callback | None = None,
    ) -> Solution:
        if torch.is_grad_enabled() and isinstance(z0, Tensor) and z0.requires_grad:
            raise ValueError(
                f"z0 requires a gradient, but {type(self).__name__} treats the fixed point as independent of its "
                "start: pass z0.detach(), or differentiate the iteration itself with Unrolled()"
            )
        if not torch.is_grad_enabled():
            return solve(f, z0, solver=solver, stop=stop, trace=trace, callback=callback)
        with torch.no_grad():
            solution = solve(primed(f), z0, solver=solver, stop=stop, trace=trace, callback=callback)
        return replace(solution, value=self.attach_to(f, z0, solution))

    def attach_to(self, f: FixedPointMap, z0: State, solution: Solution) -> State:
        """The value of a solution with this estimator's graph.

        Diverged rows are kept out of it: their infinities would reach every parameter that rows share.

        Args:
            f: the map.
            z0: where the solve began, ``(batch, *event)``.
            solution: what was found, by any means.

        Returns:
            A tensor of the shape of ``z0``; diverged rows are those of the solution, without a gradient. If all of them
            are, parameters get gradients of zero, for which other processes may be waiting; but none at all where the
            map is not even finite at ``z0``.

        Warns:
            ConvergenceWarning: every row has diverged.
        """
        diverged = solution.status == Status.DIVERGED
        if not bool(diverged.any()):
            return self.attach(f, solution.value)
        if bool(diverged.all()):
            warnings.warn(describe_failure(solution, "a solve to be differentiated"), ConvergenceWarning, stacklevel=2)
        elif isinstance(f, SelectableMap):
            rows = (~diverged).nonzero()[:, 0]
            return solution.value.index_copy(0, rows, self.attach(f.select(rows), solution.value[rows]))
        held = diverged.reshape(-1, *[1] * (z0.ndim - 1))  # these are evaluated where they began
        value = self.attach(lambda z: f(torch.where(held, z0, z)), torch.where(held, z0, solution.value))
        if bool(diverged.all()) and not bool(value.isfinite().all()):
            return solution.value  # a backward pass would make NaN of zero times infinity
        return torch.where(held, solution.value, value)


def primed(f: FixedPointMap) -> FixedPointMap:
    """``f`` whose first evaluation is made with gradients enabled, and detached.

    What a map caches at its first use (``parametrize.cached()``, autocast's casts of the weights on older torch) then
    has a graph; made under ``no_grad``, it would cut the estimator that follows off from the parameters.
    """
    return _SelectablePrimed(f) if isinstance(f, SelectableMap) else _Primed(f)


class _Primed:
    def __init__(self, f: FixedPointMap) -> None:
        self._f = f
        self._fresh = True

    def __call__(self, z: State, /) -> State:
        if not self._fresh:
            return self._f(z)
        self._fresh = False
        with torch.enable_grad():
            return evaluate(self._f, z).detach()


class _SelectablePrimed(_Primed):
    _f: SelectableMap

    def select(self, rows: RowIndex, /) -> SelectableMap:
        return self._f.select(rows)  # rows are dropped after the first evaluation


def checkpointed(f: FixedPointMap) -> FixedPointMap:
    """``f`` that keeps no activations for the backward pass, but computes them again there."""
    return _SelectableCheckpointed(f) if isinstance(f, SelectableMap) else _checkpoint(f)


def _checkpoint(f: FixedPointMap) -> Callable[[State], State]:
    return lambda z: checkpoint(evaluate, f, z, use_reentrant=False)


class _SelectableCheckpointed:
    def __init__(self, f: SelectableMap) -> None:
        self._f = f
        self._call = _checkpoint(f)

    def __call__(self, z: State, /) -> State:
        return self._call(z)

    def select(self, rows: RowIndex, /) -> "_SelectableCheckpointed":
        return _SelectableCheckpointed(self._f.select(rows))
