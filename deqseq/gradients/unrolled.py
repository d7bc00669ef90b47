"""Backpropagation through the iteration."""

from dataclasses import dataclass
from itertools import count
from typing import Any

import torch

from deqseq.arguments import PositiveInt, checked
from deqseq.gradients.base import Gradient, checkpointed, primed
from deqseq.solution import Solution
from deqseq.solve import Problem
from deqseq.types import FixedPointMap


@checked
@dataclass(frozen=True)
class Unrolled(Gradient):
    r"""Differentiate the solve itself, exactly for the returned iterate, and also for the start
    ``z0``.

    .. math:: \frac{d z^{(s)}}{d\theta} = \frac{\partial f}{\partial z} \frac{d z^{(s-1)}}{d\theta}
              + \frac{\partial f}{\partial \theta}

    Memory grows with the number of iterations. With ``checkpoint``, each iteration keeps one state
    instead of all activations, and costs one more evaluation in the backward pass. To train a fixed
    number of unrolled steps, use ``Stop.exactly(steps)``.

    With ``last``, backpropagation is truncated: earlier iterations run without a graph, the start
    gets no gradient, and memory does not grow with the number of iterations.

    A row that diverges stays in the graph, so its huge or infinite derivatives enter the gradients
    of shared parameters. The other estimators leave such rows out.

    Args:
        checkpoint: whether to recompute activations in the backward pass.
        last: how many of the last iterations are differentiated; needs ``Stop.exactly(steps)``.
            Default: all.

    Raises:
        ValueError: ``last`` is below 1; in a call, ``last`` with a stopping rule that can end
            early.

    Example:
        >>> import torch, deqseq as dq
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> solution = dq.fixed_point(
        ...     lambda z: a * z + 1,
        ...     torch.zeros(1, 1),
        ...     solver=dq.Naive(),
        ...     stop=dq.Stop(rtol=1e-6),
        ...     gradient=dq.Unrolled(),
        ... )
        >>> solution.value.sum().backward()
        >>> round(a.grad.item(), 3)  # d/da 1 / (1 - a)
        4.0
    """

    checkpoint: bool = False
    last: PositiveInt | None = None

    def apply(self, problem: Problem, *, keep_value: bool = False) -> Solution:
        if not torch.is_grad_enabled():
            return problem.solve()
        f, sweep, stop = problem.f, problem.sweep, problem.stop
        if sweep is not None and sweep.block is not None:
            raise ValueError(
                "Unrolled differentiates the iteration itself and needs the Simultaneous sweep, "
                f"got {sweep}: take Phantom, OneStep or Implicit, which need the fixed point only"
            )
        g, z0 = checkpointed(f) if self.checkpoint else f, problem.z0
        if self.last is not None:
            if not stop.runs_to_the_end:
                raise ValueError(
                    f"Unrolled.last counts from the end: stop must be Stop.exactly(n), got {stop}"
                )
            if stop.max_steps > self.last:
                g, z0 = _first_without_graph(stop.max_steps - self.last, f, g), z0.detach()
        return problem.solve(f=g, z0=z0)


def _first_without_graph(evaluations: int, f: FixedPointMap, then: FixedPointMap) -> FixedPointMap:
    """``f`` without a graph for so many evaluations, ``then`` with one."""
    f, calls = primed(f), count()

    def truncated(*arguments: Any) -> Any:
        if next(calls) >= evaluations:
            return then(*arguments)
        with torch.no_grad():
            return f(*arguments)

    return truncated
