"""A few steps from the fixed point: the phantom gradient, and the Jacobian-free one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch

from deqseq.arguments import PositiveInt, Within, checked
from deqseq.gradients.base import AttachedGradient, checkpointed
from deqseq.types import State


@checked
@dataclass(frozen=True)
class Phantom(AttachedGradient):
    r"""Detach the fixed point, then take a few damped steps with a graph: the paper's estimator.

    .. math:: z \leftarrow (1 - \lambda)\, z + \lambda f(z) \quad \text{for } k \text{ steps from }
    z^*

    The gradient is a truncated Neumann series of the exact one. Its error shrinks as :math:`\lVert
    (1-\lambda) I + \lambda J \rVert^k`, where :math:`J` is the map's Jacobian at the fixed point.
    Memory grows with the phantom steps, not with the iterations of the solve.

    The value is that of the last step; under ``torch.no_grad()``, that of the solve. So if you
    checkpoint a model, use ``use_reentrant=False``: the reentrant kind runs the forward pass under
    ``no_grad``.

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
    r"""Differentiate one evaluation at the fixed point: the exact gradient without its inverse
    Jacobian.

    .. math:: \frac{d z^*}{d\theta} \approx \frac{\partial f}{\partial \theta}(z^*)

    This is the cheapest estimator, equal to ``Phantom(steps=1, damping=1.0)``. It is a descent
    direction if the map contracts well, and biased otherwise.

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
