"""Backpropagation through iterations: those of the solve, or a few from its fixed point."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Annotated, Any

import torch

from deqseq.arguments import PositiveInt, Within, checked
from deqseq.gradients.base import AttachedGradient, Gradient, checkpointed, primed
from deqseq.solution import Solution
from deqseq.solve import Problem
from deqseq.types import FixedPointMap, State


@checked
@dataclass(frozen=True)
class Unrolled(Gradient):
    r"""Differentiate all iterations of the solve: the exact gradient of the returned value, for
    the start ``z0``, too.

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
            early, or a sweep other than :class:`Simultaneous`.

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


@checked
@dataclass(frozen=True)
class Phantom(AttachedGradient):
    r"""Detach the fixed point, then take a few damped steps with a graph: the paper's estimator.

    .. math:: z \leftarrow (1 - \lambda)\, z + \lambda f(z) \quad \text{for } k \text{ steps from }
    z^*

    The gradient is a truncated Neumann series of the exact one. Its error shrinks as :math:`\lVert
    (1-\lambda) I + \lambda J \rVert^k`, where :math:`J` is the map's Jacobian at the fixed point.
    Memory grows with the phantom steps, not with the iterations of the solve.

    The value is that of the last step; under ``torch.no_grad()``, and in models in eval mode, that
    of the solve. With ``torch.utils.checkpoint`` pass ``use_reentrant=False``: the reentrant kind
    runs the forward pass under ``no_grad``.

    Args:
        steps: :math:`k`, at least 1.
        damping: :math:`\lambda`, float above 0 and at most 1.
        checkpoint: whether to recompute activations in the backward pass.

    Raises:
        ValueError: ``steps`` or ``damping`` is out of its range.

    References:
        Geng et al., On Training Implicit Models, NeurIPS 2021, arXiv 2111.05177.

    Example:
        >>> import torch, deqseq as dq
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> solution = dq.fixed_point(
        ...     lambda z: a * z + 1,
        ...     torch.zeros(1, 1),
        ...     stop=dq.Stop(rtol=1e-6),
        ...     gradient=dq.Phantom(steps=4, damping=0.8),
        ... )
        >>> solution.value.sum().backward()
        >>> round(a.grad.item(), 2)  # exact: 4
        3.48
    """

    steps: PositiveInt = 4
    damping: Annotated[float, Within("(0, 1]")] = 0.8
    checkpoint: bool = False

    @checked
    def attach(self, f: Callable[[State], State], z_star: State) -> State:
        f = checkpointed(f) if self.checkpoint else f
        z = z_star.detach()
        for _ in range(self.steps):
            z = torch.lerp(z, f(z), self.damping)
        return z


@dataclass(frozen=True)
class OneStep(AttachedGradient):
    r"""Differentiate one evaluation at the fixed point.

    .. math:: \frac{d z^*}{d\theta} \approx \frac{\partial f}{\partial \theta}(z^*)

    The exact gradient has a factor :math:`(I - J)^{-1}` in front; :math:`J` is the map's Jacobian.
    This is the cheapest estimator, equal to ``Phantom(steps=1, damping=1.0)``. It is biased, but
    still a descent direction if the map contracts well.

    References:
        Fung et al., JFB: Jacobian-Free Backpropagation for Implicit Networks, AAAI 2022, arXiv
        2103.12803.

    Example:
        >>> import torch, deqseq as dq
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> solution = dq.fixed_point(
        ...     lambda z: a * z + 1,
        ...     torch.zeros(1, 1),
        ...     gradient=dq.OneStep(),
        ...     stop=dq.Stop(rtol=1e-6),
        ... )
        >>> solution.value.sum().backward()
        >>> round(a.grad.item(), 3)  # z* = 2, where the exact gradient is 4
        2.0
    """

    @checked
    def attach(self, f: Callable[[State], State], z_star: State) -> State:
        return f(z_star.detach())
