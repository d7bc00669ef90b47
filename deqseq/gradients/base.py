"""What a gradient estimator is: a way to give a fixed point a backward pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deqseq.arguments import check_like
from deqseq.rows import map_tensors, per_row
from deqseq.solution import Solution, Status, describe_failure, warn_caller
from deqseq.solve import Problem
from deqseq.types import FixedPointMap, State

NOT_LEFT_OUT = (
    "rows that diverged cannot be left out of the gradient, which becomes NaN: f is not finite at "
    "their z0 and has no args. Remedy: pass what f needs of each row as args"
)


class Gradient(ABC):
    """How a fixed point is differentiated. Write an estimator with settings as a frozen dataclass.

    An estimator that needs only the fixed point is an :class:`AttachedGradient`;
    :class:`deqseq.Unrolled` also needs the iterations.

    Example:
        >>> import torch, deqseq as dq
        >>> from deqseq import Gradient
        >>> class Frozen(Gradient):  # no gradient at all
        ...     def apply(self, problem, *, keep_value=False):
        ...         with torch.no_grad():
        ...             return problem.solve()
        >>> model = dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(gradient=Frozen()))
        >>> model(torch.ones(2, 3, 4)).value.requires_grad
        False
    """

    reaches_start: ClassVar[bool] = True
    """Whether the start of the iteration gets a gradient."""

    @abstractmethod
    def apply(self, problem: Problem, *, keep_value: bool = False) -> Solution:
        """Solve, and return a solution whose value carries this estimator's graph.

        Args:
            problem: what to solve, and how. ``problem.solve()`` solves it in the caller's gradient
                mode. Tensors that its map closes over, and its ``args``, receive gradients.
            keep_value: whether to return the value of the solve and only add the estimator's graph,
                as models do in eval mode.

        Returns:
            The solution; status and statistics are those of the solve.

        Raises:
            ValueError: ``problem.z0`` requires a gradient that the estimator would drop.
        """


class AttachedGradient(Gradient):
    """An estimator that needs the fixed point only: solve without a graph, then attach one.

    The fixed point does not depend on its start, so a start that requires a gradient is an error.

    Example:
        >>> import torch, deqseq as dq
        >>> from deqseq import AttachedGradient
        >>> class TwoSteps(AttachedGradient):
        ...     def attach(self, f, z_star):
        ...         return f(f(z_star.detach()))
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> stop = dq.Stop(rtol=1e-6)
        >>> f, z0 = lambda z: a * z + 1, torch.zeros(1, 1)
        >>> solution = dq.fixed_point(f, z0, gradient=TwoSteps(), stop=stop)
        >>> solution.value.sum().backward()
        >>> round(a.grad.item(), 3)  # z* = 2; one step gives 2, the exact gradient is 4
        3.0
    """

    reaches_start = False

    @abstractmethod
    def attach(self, f: Callable[[State], State], z_star: State) -> State:
        """The fixed point with this estimator's graph, built in the caller's gradient mode.

        Args:
            f: the map, ``z -> f(z)``.
            z_star: its fixed point, ``(batch, *event)``; detach it from its own graph, if any.

        Returns:
            A tensor of the same shape, equal to ``z_star`` up to the tolerance.
        """

    def apply(self, problem: Problem, *, keep_value: bool = False) -> Solution:
        if not torch.is_grad_enabled():
            return problem.solve()
        if problem.z0.requires_grad:
            raise ValueError(
                f"z0 requires a gradient, but {type(self).__name__} treats the fixed point as "
                "independent of its start: pass z0.detach(), or differentiate the iteration "
                "itself with Unrolled()"
            )
        with torch.no_grad():
            solution = problem.solve(f=primed(problem.f))
        value = self.attach_to(problem, solution)
        if keep_value:
            value = solution.value + (value - value.detach())
        return replace(solution, value=value)

    def _attached(self, f: Callable[[State], State], z_star: State) -> State:
        value = self.attach(f, z_star)
        check_like(f"{type(self).__name__}.attach", value, z_star, "z_star")
        return value

    def attach_to(self, problem: Problem, solution: Solution) -> State:
        """The value of a ``solution``, found by any means, with this estimator's graph.

        Diverged rows are left out: their infinities would reach every parameter. Without ``args``
        they are evaluated at ``z0`` instead. If all rows have diverged, gradients are zero rather
        than None, so that DDP does not hang; if ``f(z0)`` is not finite either, there is no graph.

        Warns:
            ConvergenceWarning: every row has diverged, or one that cannot be left out: gradients
                are then NaN.
        """
        diverged, ends = solution.status == Status.DIVERGED, solution.ends == Status.DIVERGED
        if not ends.any():
            return self._attached(problem.evaluate, solution.value)
        all_diverged = ends.all()
        if problem.args is not None and not all_diverged:
            rows = (~diverged).nonzero()[:, 0]
            value = self._attached(problem.rows(rows).evaluate, solution.value[rows])
            return solution.value.index_copy(0, rows, value)
        z0, replaced = problem.z0, per_row(diverged, problem.z0)

        def at_start(z: State) -> State:
            return problem.evaluate(torch.where(replaced, z0, z))

        value = self._attached(at_start, torch.where(replaced, z0, solution.value))
        finite = bool(value[diverged].isfinite().all())
        if all_diverged:
            if value.requires_grad:
                warn_caller(describe_failure(solution, "a solve to be differentiated"))
            if not finite:
                return solution.value  # a backward pass would make NaN of zero times infinity
        elif not finite and value.requires_grad:
            warn_caller(NOT_LEFT_OUT)
        return torch.where(replaced, solution.value, value)


def primed(f: FixedPointMap) -> FixedPointMap:
    """``f`` whose first evaluation runs with gradients, so that what it caches has a graph."""
    fresh = True

    def evaluated(*arguments: Any) -> Any:
        nonlocal fresh
        if not fresh:
            return f(*arguments)
        fresh = False
        with torch.enable_grad():
            return map_tensors(Tensor.detach, f(*arguments))

    return evaluated


def checkpointed(f: FixedPointMap) -> FixedPointMap:
    """``f`` that keeps no activations for the backward pass, but computes them again there."""
    return partial(checkpoint, f, use_reentrant=False)
