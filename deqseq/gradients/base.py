"""What a gradient estimator is: a way to give a fixed point a backward pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Unpack

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from deqseq.evaluate import evaluate
from deqseq.rows import map_tensors, take_apart
from deqseq.solution import Solution, Status, describe_failure, warn_caller
from deqseq.solve import SolveCall, run_solve
from deqseq.types import FixedPointMap, State

NOT_LEFT_OUT = (
    "rows that diverged cannot be left out of the gradient, which becomes NaN: f is not finite at "
    "their z0 and has no "
    "args. Remedy: pass what f needs of each row as args"
)


class Gradient(ABC):
    """How a fixed point is differentiated. An estimator object is its configuration: a frozen
    dataclass.

    An estimator that needs the fixed point alone is an :class:`AttachedGradient`;
    :class:`deqseq.Unrolled` needs the iteration too.

    Example:
        >>> import deqseq as dq
        >>> class Frozen(Gradient):  # no gradient at all
        ...     def apply(self, f, z0, *, keep_value=False, **call):
        ...         with torch.no_grad():
        ...             return dq.solve(f, z0, **call)
        >>> model = dq.ImplicitModel(dq.Affine(4), dq.SolveConfig(gradient=Frozen()))
        >>> model(torch.ones(2, 3, 4)).value.requires_grad
        False
    """

    reaches_start: ClassVar[bool] = True
    """Whether the start of the iteration gets a gradient."""

    @abstractmethod
    def apply(
        self, f: FixedPointMap, z0: State, *, keep_value: bool = False, **call: Unpack[SolveCall]
    ) -> Solution:
        """Solve, and return a solution whose value carries this estimator's graph where gradients
        are enabled.

        Args:
            f: the map; what it closes over, and its ``args``, receive gradients.
            z0: the start, ``(batch, *event)``.
            keep_value: whether the value is that of the solve, and the estimator adds its graph
                alone, as models want it in eval mode.
            **call: the keyword arguments of :func:`deqseq.solve`.

        Returns:
            The solution; status and statistics are those of the solve.

        Raises:
            ValueError: ``z0`` requires a gradient that the estimator would drop.
        """


class AttachedGradient(Gradient):
    """An estimator that needs the fixed point alone: solve without a graph by any means, then
    attach one.

    The fixed point does not depend on its start, so a start that requires a gradient is an error.

    Example:
        >>> import deqseq as dq
        >>> class TwoSteps(AttachedGradient):
        ...     def attach(self, f, z_star):
        ...         return f(f(z_star.detach()))
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> solution = dq.fixed_point(
        ...     lambda z: a * z + 1, torch.zeros(1, 1), gradient=TwoSteps(), stop=dq.Stop(rtol=1e-6)
        ... )
        >>> solution.value.sum().backward()
        >>> round(a.grad.item(), 3)  # z* = 2; one step gives 2, the exact gradient is 4
        3.0
    """

    reaches_start = False

    @abstractmethod
    def attach(self, f: Callable[[State], State], z_star: State) -> State:
        """The fixed point with this estimator's graph, built in the caller's gradient mode.

        Args:
            f: the map ``z -> f(z)`` that ``z_star`` is a fixed point of.
            z_star: the fixed point, ``(batch, *event)``; its own history, if any, is cut.

        Returns:
            A tensor of the same shape: ``z_star`` up to the solve's tolerance.
        """

    def apply(
        self, f: FixedPointMap, z0: State, *, keep_value: bool = False, **call: Unpack[SolveCall]
    ) -> Solution:
        if not torch.is_grad_enabled():
            return run_solve(f, z0, **call)
        if isinstance(z0, Tensor) and z0.requires_grad:
            raise ValueError(
                f"z0 requires a gradient, but {type(self).__name__} treats the fixed point as "
                "independent of its "
                "start: pass z0.detach(), or differentiate the iteration itself with Unrolled()"
            )
        with torch.no_grad():
            solution = run_solve(primed(f), z0, **call)
        value = self.attach_to(
            f, call.get("args"), z0, solution, has_aux=call.get("has_aux", False)
        )
        return replace(
            solution, value=solution.value + (value - value.detach()) if keep_value else value
        )

    def attach_to(
        self, f: FixedPointMap, args: Any, z0: State, solution: Solution, *, has_aux: bool = False
    ) -> State:
        """The value of a ``solution``, found by any means from ``z0``, with this estimator's graph.

        Diverged rows are left out: their infinities would reach every parameter. Without ``args``
        they are evaluated at ``z0`` instead. If all rows have diverged, gradients are zero, so that
        DDP does not hang; if ``f(z0)`` is not finite either, there is no graph.

        Warns:
            ConvergenceWarning: every row has diverged, or one that cannot be left out: gradients
                are then NaN.
        """
        diverged = solution.status == Status.DIVERGED
        if not bool(diverged.any()):
            return self.attach(_bound(f, args, has_aux), solution.value)
        if args is not None and not bool(diverged.all()):
            rows = (~diverged).nonzero()[:, 0]
            value = self.attach(_bound(f, take_apart(args, rows), has_aux), solution.value[rows])
            return solution.value.index_copy(0, rows, value)
        bound = _bound(f, args, has_aux)
        replaced = diverged.reshape(
            -1, *[1] * (z0.ndim - 1)
        )  # these rows are evaluated where they began
        value = self.attach(
            lambda z: bound(torch.where(replaced, z0, z)), torch.where(replaced, z0, solution.value)
        )
        finite = bool(value[diverged].isfinite().all())
        if bool(diverged.all()):
            if value.requires_grad:
                warn_caller(describe_failure(solution, "a solve to be differentiated"))
            if not finite:
                return solution.value  # a backward pass would make NaN of zero times infinity
        elif not finite and value.requires_grad:
            warn_caller(NOT_LEFT_OUT)
        return torch.where(replaced, solution.value, value)


def _bound(f: FixedPointMap, args: Any, has_aux: bool) -> Callable[[State], State]:
    """The map of ``z`` alone, checked, without its auxiliary output."""
    return lambda z: evaluate(f, z, args, has_aux=has_aux)[0]


def primed(f: FixedPointMap) -> FixedPointMap:
    """``f`` whose first evaluation has gradients enabled, and is detached: what a map caches there
    has a graph.
    """
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
