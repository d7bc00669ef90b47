"""The Jacobian-free gradient."""

from collections.abc import Callable
from dataclasses import dataclass

from deqseq.gradients.base import AttachedGradient
from deqseq.types import State


@dataclass(frozen=True)
class OneStep(AttachedGradient):
    r"""Differentiate one evaluation at the fixed point: the implicit gradient with its inverse
    Jacobian left out.

    .. math:: \frac{d z^*}{d\theta} \approx \frac{\partial f}{\partial \theta}(z^*)

    The cheapest estimator; a descent direction where the map contracts well, biased elsewhere. The
    same as ``Phantom(steps=1, damping=1.0)``.

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

    def attach(self, f: Callable[[State], State], z_star: State) -> State:
        return f(z_star.detach())
