"""Plain fixed-point iteration, and damped."""

from dataclasses import dataclass
from typing import Annotated

import torch

from deqseq.arguments import Within, checked
from deqseq.solvers.base import Solver
from deqseq.types import State


@dataclass(frozen=True)
class Naive(Solver[None]):
    r"""Plain (Picard) iteration.

    .. math:: z \leftarrow f(z)

    It converges if the map contracts.

    Example:
        >>> import torch, deqseq as dq
        >>> dq.solve(torch.cos, torch.zeros(1), solver=dq.Naive(), stop=dq.Stop(rtol=1e-6)).value
        tensor([0.7391])
    """

    def init(self, z0: State) -> None:
        return None

    def step(self, z: State, fz: State, state: None) -> tuple[State, None]:
        return fz, None


@checked
@dataclass(frozen=True)
class Relaxed(Solver[None]):
    r"""Relaxed (Krasnoselskii-Mann) iteration, the paper's forward solver.

    .. math:: z \leftarrow (1 - \tau)\, z + \tau f(z)

    On trained models plain iteration can end in limit cycles. A damping below 1 makes such solves
    converge, and costs few iterations otherwise.

    Args:
        damping: :math:`\tau`, float between 0 and 2; 1 is plain iteration.

    Raises:
        ValueError: ``damping`` is not above 0 and below 2.

    References:
        Schöne et al., Implicit Language Models are RNNs: Balancing Parallelization and
        Expressivity, ICML 2025, arXiv 2502.07827.

    Example:
        >>> import torch, deqseq as dq
        >>> dq.solve(lambda z: 1 - z, torch.zeros(1), solver=dq.Relaxed(0.5), stop=dq.Stop()).value
        tensor([0.5000])
    """

    damping: Annotated[float, Within("(0, 2)")] = 0.8

    def init(self, z0: State) -> None:
        return None

    def step(self, z: State, fz: State, state: None) -> tuple[State, None]:
        return torch.lerp(z, fz, self.damping), None
