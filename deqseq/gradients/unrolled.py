"""Backpropagation through the iteration."""

from dataclasses import dataclass
from typing import Unpack

from deqseq.check import check_flag
from deqseq.gradients.base import Gradient, checkpointed
from deqseq.solution import Solution
from deqseq.solve import SolveCall, solve
from deqseq.types import FixedPointMap, State


@dataclass(frozen=True)
class Unrolled(Gradient):
    r"""Differentiate the solve itself: exact for the iterate that is returned, and for the start ``z0``.

    .. math:: \frac{d z^{(s)}}{d\theta} = \frac{\partial f}{\partial z} \frac{d z^{(s-1)}}{d\theta}
              + \frac{\partial f}{\partial \theta}

    Memory grows with the number of iterations; with ``checkpoint`` by one state each instead of all
    activations, for one more evaluation each in the backward pass. To train a fixed number of unrolled steps, give it
    ``Stop.exactly(steps)``.

    Args:
        checkpoint: whether to recompute activations in the backward pass.

    Example:
        >>> import torch, deqseq as dq
        >>> a = torch.tensor(0.5, requires_grad=True)
        >>> solution = dq.fixed_point(lambda z: a * z + 1, torch.zeros(1, 1), solver=dq.Naive(),
        ...                           stop=dq.Stop(rtol=1e-6), gradient=dq.Unrolled())
        >>> solution.value.sum().backward()
        >>> round(a.grad.item(), 3)     # d/da 1 / (1 - a)
        4.0
    """

    checkpoint: bool = False

    def __post_init__(self) -> None:
        check_flag("Unrolled.checkpoint", self.checkpoint)

    def apply(self, f: FixedPointMap, z0: State, **call: Unpack[SolveCall]) -> Solution:
        return solve(checkpointed(f) if self.checkpoint else f, z0, **call)
